"""HDF5 files: every numeric dataset by its path."""
