"""Writing: each rank writes its part of a sample, in the background, without gathering. :func:`scidata.create`."""
