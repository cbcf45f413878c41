"""``init_mesh``, from launcher to ``DeviceMesh``; the axes of a mesh; how process groups end."""

from scidata.device_mesh.mesh import axes_of, axis_rank, axis_size, domain_mesh, further_axes, init_mesh

__all__ = ["axes_of", "axis_rank", "axis_size", "domain_mesh", "further_axes", "init_mesh"]
