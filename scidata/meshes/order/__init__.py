"""Orders that keep neighbours together, ghosts, cuts and their quality: NumPy and SciPy only, no torch, no I/O."""
