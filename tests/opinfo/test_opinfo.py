"""A share of torch's own samples; ``python -m tests.opinfo`` runs all."""

import pickle
import re
from collections import Counter
from pathlib import Path

import pytest

from scidata.testing import run_ranks

pytest.importorskip("torch.testing._internal.common_methods_invocations", reason="needs expecttest")

from tests.opinfo.__main__ import BAD
from tests.opinfo.cases import on_ranks, operations
from tests.opinfo.report import table, with_columns

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


def test_columns_of_other_dtypes():
    counted = [
        {"name": "abs", "counts": {"right": 4}, "alone": {"right": 2}},
        {"name": "cat", "counts": {"right": 3, "refused": 2}, "alone": {"right": 1, "refused": 1}},
    ]
    page = table(counted, counted, "Words.")
    runs = {"float32": [counted[1], {"name": "sin", "counts": {"error": 1}, "alone": {}}], "bfloat16": counted}
    with_both = with_columns(page, runs)
    assert "| `abs` | 4 |  |  | 4 of 4 |  | 4 |\n" in with_both
    assert "| `cat` | 3 | 2 |  | 3 of 5 | 3, 2 refused | 3, 2 refused |\n" in with_both
    assert "**float32**: 3 calls right, 2 refused, 0 neither; 0 of 1 operations all right." in with_both
    assert "1 have samples here; 1 (100.0%) are all right" in with_both
    assert with_columns(with_both, runs) == with_both
    assert with_both.endswith("## How this was run\n\nWords.\n")


def test_the_page_adds_up():
    page = (Path(__file__).parents[2] / "docs/compatibility/operations.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[6:8]] for line in page.splitlines() if line.startswith("| `")]
    for i, dtype in enumerate(("float32", "bfloat16")):
        said = re.search(rf"\*\*{dtype}\*\*: ([\d,]+) calls right, (\d+) refused, (\d+) neither", page)
        found = Counter()
        for cells in rows:
            for number, kind in re.findall(r"(\d+)(?: (refused|neither))?", cells[i]):
                found[kind or "right"] += int(number)
        assert [int(n.replace(",", "")) for n in said.groups()] == [found[k] for k in ("right", "refused", "neither")]
