"""Ghosts of meshes and graphs: who sends which, and how far a layer reaches."""
