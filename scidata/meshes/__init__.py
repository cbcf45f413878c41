"""Raw meshes, point clouds and graphs: the kinds of file, their samples, and orders that keep neighbours together."""
