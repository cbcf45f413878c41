"""Many pieces of work that are alike, done by processes of this machine or by the workers of a Dask cluster."""
