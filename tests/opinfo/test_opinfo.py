"""A share of torch's own samples; ``python -m tests.opinfo`` runs all."""

import pickle

import pytest

from scidata.testing import run_ranks

pytest.importorskip("torch.testing._internal.common_methods_invocations", reason="needs expecttest")

from tests.opinfo.__main__ import BAD
from tests.opinfo.cases import on_ranks, operations

#: Those in which faults were found.
FAULTY = [
    *("addr", "cat", "gather", "index_add", "index_select", "take_along_dim", "tensor_split", "roll", "expand", "view"),
    *("nn.functional.pad.replicate_negative", "nn.functional.scaled_dot_product_attention"),
    *("nn.functional.cosine_similarity", "nn.functional.dropout"),
]
#: Operations of which some of these calls are refused.
REFUSED = {
    *("index_add", "nn.functional.embedding_bag", "normal", "normal.number_mean", "scatter_reduce.prod"),
    "tensor_split",
}


@pytest.mark.slow_for("12")
@pytest.mark.parametrize(("one_in", "least"), [(120, 90), (12, 680)], ids=[120, 12])
def test_nothing_is_wrong(tmp_path, one_in, least):
    names = [*dict.fromkeys([*FAULTY, *list(operations())[::one_in]])]
    run_ranks(on_ranks, 3, names, 3, tmp_path / "found", timeout=300)
    found = {}
    with (tmp_path / "found").open("rb") as file:
        for _ in names:
            each = pickle.load(file)
            found[each.name] = each
    bad = {name: each.notes for name, each in found.items() if set(each.counts) & set(BAD)}
    assert not bad
    assert not {name: each.notes for name, each in found.items() if each.counts["refused"]}.keys() - REFUSED
    assert sum(each.counts["right"] for each in found.values()) >= least
