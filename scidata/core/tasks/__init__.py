"""Run many similar jobs, in processes on this machine or on the workers of a Dask cluster."""
