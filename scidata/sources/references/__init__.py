"""Zarr whose chunks lie elsewhere: kerchunk's and VirtualiZarr's reference sets, Icechunk repositories."""
