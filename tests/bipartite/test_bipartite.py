"""A share of PyTorch Geometric's convolutions between two sets of nodes; ``python -m tests.bipartite`` runs all."""

from __future__ import annotations

import pytest

from scidata.testing import run_ranks

pytest.importorskip("torch_geometric", reason="its layers are what is tested")

from tests.bipartite.__main__ import worst
from tests.bipartite.cases import cases, layers_of_pyg, on_ranks, write_store

#: Self-loops join rows of the same number in both sets, which no rank need hold.
REFUSED = {f"{name} self-loops" for name in ("FeaStConv", "GATConv", "GATv2Conv", "PointNetConv")}
#: What needs a library that is not there.
NEEDS = {"SplineConv", "DynamicEdgeConv", "GravNetConv"}
#: In which rules of several kinds meet.
FEW = [
    *("SAGEConv", "SAGEConv lstm", "SAGEConv median", "GATConv attention", "TransformerConv", "GENConv powermean"),
    *("PointTransformerConv", "RGCNConv blocks", "GraphConv no target", "CGConv batch_norm", "GATConv self-loops"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("bipartite"))


def test_no_layer_is_left_out():
    assert layers_of_pyg() - {name.split()[0] for name in cases()} == {"HANConv", "HGTConv"} & layers_of_pyg()


def check(store, num_ranks, names, *, amp=False):
    found = run_ranks(on_ranks, num_ranks, store, names, amp, timeout=400)[0]
    bad = {each.name: each.notes for each in found if worst([each]) == "wrong"}
    assert not bad
    assert {each.name for each in found if each.counts["refused"]} == (REFUSED & {*names} if num_ranks > 1 else set())
    assert {each.name for each in found if set(each.counts) == {"not run"}} <= NEEDS
    assert all(each.counts["right"] for each in found if each.name not in REFUSED | NEEDS)


def test_a_few(store):
    check(store, 3, FEW)


def test_a_few_under_autocast(store):
    names = ["SAGEConv", "GATv2Conv", "TransformerConv", "GINEConv", "NNConv", "ResGatedGraphConv", "GraphConv"]
    check(store, 2, names, amp=True)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_all(store, num_ranks):
    check(store, num_ranks, list(cases()))
