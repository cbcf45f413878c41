"""The partitioned store: a folder with ``manifest.json``, written last, and one Zarr v3 group per sample.

The manifest has what samples have in common, and a row for each; many rows lie in ``samples.bin`` beside it.

``format`` is what lies in it, ``reading`` a rank's part of it, ``partitioning`` how it is made, ``raw_points`` how
point files are read without it. Rows are in curve order, so that one store serves any number of ranks.
"""
