"""What of PyTorch Geometric's containers is a field of nodes, of edges, or of the whole: as PyG itself says."""

import json

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
    values = {name: np.load(tmp_path / each["file"]) for name, each in made["arrays"].items()}
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


def test_isolated_last_nodes_and_graphs_between_two_sets(tmp_path):
    for data in (geometric.Data(edge_index=PAIRS, num_nodes=6), {"edge_index": PAIRS, "num_nodes": 6}):
        assert read(tmp_path, data)[1]["num_nodes"] == 6
    with pytest.raises(ValueError, match="x_s and x_t make it a graph between two node sets"):
        read(tmp_path, geometric.Data(x_s=torch.rand(5, 2), x_t=torch.rand(3, 2), edge_index=PAIRS))


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
