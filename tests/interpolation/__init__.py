"""Random fields, grids, points and layouts held against SciPy: ``python -m tests.interpolation``."""
