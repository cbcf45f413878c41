"""One rank's part of a store: cuts, rows, ghosts, topology and fields."""
