"""A sample of a graph between several node sets: GraphCast's grid and mesh, PyTorch Geometric's ``HeteroData``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scidata.data.channels import TensorT
from scidata.data.irregular_sample import IrregularSample

if TYPE_CHECKING:
    from torch_geometric.data import HeteroData

    from scidata.data.to_pyg import Columns, EdgeColumns


class HeteroSample(IrregularSample[TensorT]):
    """Fields by name, sharded along the rows of their node set, or the edges of their relation.

    A field is called ``"temperature"`` where one set alone has it, else ``"grid/temperature"``. Entities are the node
    sets (``"grid"``), the relations (``"grid__to__mesh"``), and ``"joint"``, the rows of all sets together, which are
    cut at once. Each set has its own index map: its ghosts are the sources, by any relation, of edges that end at owned
    rows of some set, so that one exchange of a set's rows serves all relations; and rows for the layers of ``halo``.

    Examples
    --------
    >>> import h5py
    >>> import numpy as np
    >>> with h5py.File("two.h5", "w") as file:  # six points in a row, and a node between each two pairs
    ...     file["nodes/grid/pos"] = np.stack([np.arange(6.0), np.zeros(6)], axis=1)
    ...     file["nodes/grid/heat"] = np.arange(6.0)
    ...     file["nodes/mesh/pos"] = np.array([[0.5, 0.0], [2.5, 0.0], [4.5, 0.0]])
    ...     file["edges/grid__to__mesh/edge_index"] = np.array([np.arange(6), np.arange(6) // 2])
    >>> _ = scidata.partition("two.h5", "two.store")

    On each of two ranks:

    >>> mesh = scidata.init_mesh(domain=2)
    >>> sample = scidata.open_dataset("two.store", mesh)[0]
    >>> sample.node_types, sample.edge_types, tuple(sample["heat"].shape)
    (('grid', 'mesh'), (('grid', 'to', 'mesh'),), (6,))
    >>> source, target = sample.edge_index_dict["grid", "to", "mesh"]  # local numbers
    >>> sums = torch.zeros(sample.index_map("mesh").num_owned, dtype=torch.float64)
    >>> sums = sums.index_add(0, target, sample.with_ghosts("heat")[source])
    >>> total = sums.sum()
    >>> torch.distributed.all_reduce(total)
    >>> total
    tensor(15., dtype=torch.float64)
    >>> sample.to_pyg(x={"grid": "heat"}).node_types
    ['grid', 'mesh']
    """

    if TYPE_CHECKING:

        def to_pyg(
            self,
            *,
            x: Columns | None = None,
            y: Columns | None = None,
            edge_attr: EdgeColumns | None = None,
            khop: bool = False,
            by_hop: bool = False,
        ) -> HeteroData:
            """Return a ``HeteroData``: see :meth:`IrregularSample.to_pyg`."""
