"""Zarr v2 and v3: the metadata, the shards, and where the bytes of each chunk lie."""
