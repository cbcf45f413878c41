"""Node sets that stand for the points of another: levels of a hierarchy, whose edges rules of distance find."""

from __future__ import annotations

import numpy as np

from scidata.errors import ConfigError
from scidata.meshes.sets.node_set import NodeSet


def voxels(nodes: NodeSet, size: float) -> NodeSet:
    """Return the mean of the nodes in each cube of side ``size`` that holds some, in the order of the cubes.

    Cubes begin at the lowest coordinates. Each node lies at most their diagonal away from its mean.
    """
    points = nodes.points
    if nodes.on_sphere or not (np.isfinite(size) and size > 0):
        raise ConfigError(f"cubes of side {size:g}: a positive number is needed, and nodes that are not on a sphere")
    if not len(points):
        return nodes
    cubes = np.floor((points - points.min(axis=0)) / size).astype(np.int64)
    _, own, counts = np.unique(cubes, axis=0, return_inverse=True, return_counts=True)
    own = own.reshape(-1)  # NumPy 2.0 gave it two dimensions
    means = [np.bincount(own, points[:, axis]) / counts for axis in range(points.shape[1])]
    return NodeSet(points=np.stack(means, axis=1), on_sphere=False)


def farthest(nodes: NodeSet, num: int) -> NodeSet:
    """Return ``num`` of the nodes: the first, then always the one farthest from all before.

    Farthest-point sampling (Eldar et al., IEEE Transactions on Image Processing 6, 1997), a pass for each node.
    """
    if not 1 <= num <= nodes.num_nodes:
        raise ConfigError(f"{num} farthest nodes: expected 1 to {nodes.num_nodes}, of which there are so many")
    where = nodes.positions()
    chosen, nearest = np.zeros(num, np.int64), np.full(len(where), np.inf)
    for i in range(1, num):
        np.minimum(nearest, ((where - where[chosen[i - 1]]) ** 2).sum(axis=1), out=nearest)
        chosen[i] = np.argmax(nearest)
    return NodeSet(points=nodes.points[chosen], on_sphere=nodes.on_sphere)
