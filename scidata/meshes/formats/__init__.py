"""Where nodes, cells and edges are found in each kind of file: one module per format, all giving a ``RawTopology``."""
