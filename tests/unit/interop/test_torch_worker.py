"""What of PyTorch Geometric's containers is a field of nodes, of edges, or of the whole: as PyG itself says."""

import json
import pickle

import numpy as np
import pytest
import torch

from scidata.interop import torch_worker

geometric = pytest.importorskip("torch_geometric.data")

PAIRS = torch.tensor([[0, 1, 1], [1, 0, 2]])


def read(tmp_path, data):
    torch.save(data, tmp_path / "a.pt")
    torch_worker.write_arrays(str(tmp_path / "a.pt"), str(tmp_path), 1 << 30)
    made = json.loads((tmp_path / "arrays.json").read_text())
    with open(tmp_path / "arrays.npy", "rb") as file:
        values = {name: np.load(file) for name in made["arrays"]}
    return made["arrays"], values, made["left_out"]


def test_pyg_decides_what_lives_where(tmp_path):
    data = geometric.Data(
        x=torch.rand(4, 2), edge_index=PAIRS, edge_attr=torch.rand(3, 4), y=torch.rand(1, 4), square=torch.rand(4, 4),
        w=torch.rand(4, 3), of_edges=torch.rand(3, 4), u=torch.tensor(2.5), name="benzene", number=7,
        some_index=torch.rand(3, 4), edge_label_index=torch.tensor([[0], [3]]), train_index=torch.arange(4),
    )  # fmt: skip
    made, values, left_out = read(tmp_path, data)
    places = {name: (each["entity"], each["dim"]) for name, each in made.items() if each["entity"]}
    assert places == {
        "node/x": ("node", 0), "node/square": ("node", 0), "node/w": ("node", 0), "node/some_index": ("node", 1),
        "edge/edge_attr": ("edge", 0), "edge/of_edges": ("edge", 0),
    }  # fmt: skip
    for name in data.keys():  # noqa: SIM118 - it is no mapping
        assert (f"node/{name}" in places) == (data.is_node_attr(name) and f"graph/{name}" not in left_out)
        assert (f"edge/{name}" in places) == (data.is_edge_attr(name) and name != "edge_index")
    assert values["graph/y"].shape == (1, 4)
    assert values["graph/u"] == 2.5
    assert {n: json.loads(values[n].tobytes()) for n in ("graph/name", "graph/number")} == {
        "graph/name": "benzene", "graph/number": 7,
    }  # fmt: skip
    assert set(left_out) == {"graph/edge_label_index", "graph/train_index"}  # numbers of nodes


def test_isolated_last_nodes(tmp_path):
    big = np.array(6, ">i4")[()]  # NumPy's numbers, as OGB has them of binary files
    counts = (6, np.int64(6), big)
    for data in (
        *(geometric.Data(edge_index=PAIRS, num_nodes=n) for n in counts),
        {"edge_index": PAIRS, "num_nodes": 6},
    ):
        assert read(tmp_path, data)[1]["num_nodes"] == 6


def test_sets_and_relations(tmp_path):
    data = geometric.HeteroData()
    data["a"].x, data["a"].z, data["b"].num_nodes = torch.rand(4, 2), torch.rand(1, 4), 3
    relation = data["a", "to", "b"]
    relation.edge_index, relation.w, relation.t = PAIRS, torch.rand(3, 4), torch.rand(1, 3)
    data.y, data.name = torch.rand(1, 2), "q"
    made, values, left_out = read(tmp_path, data)
    assert not left_out
    assert {name for name, each in made.items() if each["entity"]} == {"nodes/a/x", "edges/a__to__b/w"}
    assert {n for n in values if n.startswith("graph/")} == {
        "graph/a/z", "graph/a__to__b/t", "graph/y", "graph/name",
    }  # fmt: skip
    assert values["nodes/b/num_nodes"] == 3


def test_y_of_graphs_of_one_node_or_none_is_the_graphs_own(tmp_path):
    """As PyG's data sets are met: joined with slices, of one graph without, as lists and batches, of subclasses."""
    from torch_geometric.data import Batch, Data, InMemoryDataset

    def graph(n, pairs):
        return Data(
            x=torch.rand(n, 2), edge_index=pairs, edge_attr=torch.rand(pairs.shape[1], 4), w=torch.rand(pairs.shape[1]),
            y=torch.rand(1, 4), name=f"of {n}", u=torch.tensor(2.5), train_mask=torch.rand(n) > 0.5,
        )  # fmt: skip

    none = torch.zeros(2, 0, dtype=torch.int64)
    graphs = [graph(4, PAIRS), graph(1, none), graph(0, none), graph(3, PAIRS)]
    InMemoryDataset.save(graphs, tmp_path / "joined.pt")
    subclass = [Pairs(**each.to_dict()) for each in graphs]
    files = {"joined": torch.load(tmp_path / "joined.pt", weights_only=False), "list": graphs, "subclasses": subclass}
    files |= {
        "batch": Batch.from_data_list(graphs),
        "batches": [Batch.from_data_list(g) for g in (graphs[:2], subclass[2:])],
    }
    files |= {"old": InMemoryDataset.collate(graphs)}
    files |= {"TUDataset": (*files["joined"][:2], {"num_node_labels": 2}, Data)}
    for kind, data in files.items():
        _, values, left_out = read(tmp_path, data)
        assert not left_out
        for i, each in enumerate(graphs):
            own = {name.partition("/")[2]: value for name, value in values.items() if name.startswith(f"{i}/")}
            assert own.pop("num_nodes") == each.num_nodes
            assert json.loads(own.pop("graph/name").tobytes()) == each.name
            want = {"node/x": each.x, "edge/edge_attr": each.edge_attr, "edge/w": each.w, "graph/y": each.y}
            want |= {"node/train_mask": each.train_mask, "edge_index": each.edge_index, "graph/u": each.u}
            assert set(own) == set(want), kind
            for name, value in want.items():
                assert np.array_equal(own[name].reshape(value.shape), value), (kind, name)
                assert own[name].dtype == value.numpy().dtype
    InMemoryDataset.save(graphs[:1], tmp_path / "one.pt")
    for data in (torch.load(tmp_path / "one.pt", weights_only=False), (graphs[0], None)):  # PyG's, OGB's
        assert {"edge_index", "node/x", "graph/y"} <= set(read(tmp_path, data)[0])
    _, values, _ = read(tmp_path, geometric.Data(x=torch.rand(5, 2)))
    assert values["edge_index"].shape == (2, 0)
    with pytest.raises(ValueError, match="its edges are in adj_t, a sparse matrix; save edge_index"):
        read(tmp_path, geometric.Data(x=torch.rand(4, 2), adj_t=torch.eye(4).to_sparse()))


class Pairs(geometric.Data):
    """Of a user's own package: its code is not there where a file is read."""

    def __inc__(self, key, value, *args):
        if key == "edge_index" and "x_s" in self:
            return torch.tensor([[self.x_s.size(0)], [self.x_t.size(0)]])
        return super().__inc__(key, value, *args)


def test_bipartite_data_and_dicts_by_set_become_node_sets(tmp_path):
    from torch_geometric.data import Batch, InMemoryDataset

    pairs = [
        Pairs(
            x_s=torch.rand(5, 2), x_t=torch.rand(3, 4), edge_index=PAIRS, edge_attr=torch.rand(3, 1), y=torch.rand(1, 2)
        ),
        Pairs(
            x_s=torch.rand(2, 2),
            x_t=torch.rand(1, 4),
            edge_index=PAIRS[:, :1] * 0,
            edge_attr=torch.rand(1, 1),
            y=torch.rand(1, 2),
        ),
    ]
    InMemoryDataset.save(pairs, tmp_path / "joined.pt")
    for data in (pairs, torch.load(tmp_path / "joined.pt", weights_only=False), Batch.from_data_list(pairs)):
        _, values, left_out = read(tmp_path, data)
        assert not left_out
        for i, each in enumerate(pairs):
            found = {name.removeprefix(f"{i}/"): v for name, v in values.items() if name.startswith(f"{i}/")}
            want = {"nodes/s/x": each.x_s, "nodes/t/x": each.x_t, "edges/s__to__t/edge_index": each.edge_index}
            want |= {"edges/s__to__t/edge_attr": each.edge_attr, "graph/y": each.y}
            assert {name: found[name].tolist() for name in want} == {name: v.tolist() for name, v in want.items()}
            assert set(found) - set(want) == {"nodes/s/num_nodes", "nodes/t/num_nodes"}
    own = geometric.Data(x_s=torch.rand(5, 2), x_t=torch.rand(3, 4), edge_index_s=PAIRS, edge_index_t=PAIRS[:, :1])
    assert {"edges/s__to__s/edge_index", "edges/t__to__t/edge_index"} <= set(read(tmp_path, own)[0])
    mag = geometric.Data(
        num_nodes_dict={"a": 3, "b": 2}, x_dict={"a": torch.rand(3, 2)}, y_dict={"b": torch.tensor([1, 2])},
        edge_reltype={("a", "w", "b"): torch.ones(2, 1)},
        edge_index_dict={("a", "w", "b"): PAIRS[:, :2]},
    )  # fmt: skip
    made, _, _ = read(tmp_path, (mag, None))  # OGB's
    assert set(made) == {
        "nodes/a/x", "nodes/a/num_nodes", "nodes/b/y", "nodes/b/num_nodes", "edges/a__w__b/edge_index",
        "edges/a__w__b/edge_reltype",
    }  # fmt: skip


def test_objects_that_are_no_graphs_are_refused_by_name(tmp_path):
    for found in ([Plain()], Plain(), {"a": Plain()}, (Plain(), None)):
        with pytest.raises(pickle.UnpicklingError, match=r"Plain was not an allowed global"):
            read(tmp_path, found)


class Plain:
    pass
