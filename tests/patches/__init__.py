"""Patches of random grids against NumPy: ``python -m tests.patches --trials 1000``."""
