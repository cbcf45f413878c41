"""A sample of a graph between several node sets: GraphCast's grid and mesh, PyTorch Geometric's ``HeteroData``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scidata.core.keywords import checked_keywords
from scidata.data.channels import TensorT
from scidata.data.irregular_sample import IrregularSample
from scidata.data.to_pyg import Columns, EdgeColumns, pyg_of

if TYPE_CHECKING:
    from torch_geometric.data import HeteroData


class HeteroSample(IrregularSample[TensorT]):
    """Fields by name, sharded along the rows of their node set, or the edges of their relation.

    A field is called ``"temperature"`` where one set alone has it, else ``"grid/temperature"``. Entities are the node
    sets (``"grid"``), the relations (``"grid__to__mesh"``), and ``"joint"``, the rows of all sets together, which are
    cut at once. Each set has its own index map: its ghosts are the sources, by any relation, of edges that end at owned
    rows of some set, so that one exchange of a set's rows serves all relations; and what the layers of ``halo`` need.

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
    """

    @checked_keywords
    def to_pyg(
        self,
        *,
        x: Columns | None = None,
        y: Columns | None = None,
        edge_attr: EdgeColumns | None = None,
        khop: bool = False,
        by_hop: bool = False,
    ) -> HeteroData:
        """Return a ``torch_geometric.data.HeteroData`` of ShardTensors, for stock layers, unmodified. Collective.

        Each set has ``num_nodes`` and its fields by their names, each relation ``edge_index`` and its fields.

        Parameters
        ----------
        x, y : Mapping[str, str or Sequence[str]] or None, optional
            By node set: fields that are put side by side, one column for each component, under these names instead.
        edge_attr : Mapping[tuple or str, str or Sequence[str]] or None, optional
            The same by relation, ``("grid", "to", "mesh")`` or ``"grid__to__mesh"``.
        khop : bool, default False
            For models that run without exchange, by ``call_on_parts``: plain tensors instead, of this rank's rows,
            owned ones, then ghosts, and of all edges among them that it has. ``y`` and ``batch``, which losses and
            pooling take, are ShardTensors all the same. With ``ghosts="disk"`` nothing is sent.
        by_hop : bool, default False
            Only graphs of one node set have this order.

        Raises
        ------
        MissingDependencyError
            torch_geometric is not installed.
        UnknownNameError, ConfigError
            No such set, relation or field, or a field of another one.

        Examples
        --------
        >>> data = sample.to_pyg(x={"grid": "heat"})
        >>> data.node_types
        ['grid', 'mesh']
        """
        return pyg_of(self, {"x": x, "y": y, "edge_attr": edge_attr}, khop=khop, by_hop=by_hop)
