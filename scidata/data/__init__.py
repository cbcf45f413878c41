"""Samples and data sets: ``open_dataset``, one class for grids and one for meshes, clouds and graphs."""
