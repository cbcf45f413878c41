"""Ghosts of meshes and graphs: which rank sends which rows, and how far a layer reaches."""
