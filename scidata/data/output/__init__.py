"""Writing: each rank its part of a sample, in the background, without gathering. :func:`scidata.create`."""
