"""Gridded data: series of files, choices along dimensions, the cut, and the reader of one rank."""
