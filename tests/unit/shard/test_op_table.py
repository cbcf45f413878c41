"""The list in scidata/shard/README.md is the op table; ``python tests/unit/shard/test_op_table.py`` writes it."""

from pathlib import Path

import scidata.shard  # noqa: F401 - fills the table
from scidata.shard.op_table import HANDLERS, REFUSES, op_name

README = Path(__file__).parents[3] / "scidata/shard/README.md"
START, END = "<!-- op table: generated -->\n", "<!-- end of op table -->"
SHOWN_OPERATORS = ("__getitem__", "__setitem__", "__matmul__")  # the others are of functions that are named
OF_SOME_VERSIONS = ("linear_cross_entropy",)  # of torch: left out of the table in Markdown, which is the same for all


def op_table() -> str:
    """Return the op table in Markdown, one row for each family; in-place forms and aliases are not repeated."""
    families: dict[str, set[str]] = {}
    for function, handler in HANDLERS.items():
        name = op_name(function).rsplit(".", 1)[-1]
        if handler in REFUSES or op_name(function).startswith("aten.") or name in OF_SOME_VERSIONS:
            continue
        name = op_name(function).split(".")[-2] if name == "__get__" else name
        families.setdefault(handler.__module__.rsplit(".", 1)[-1].replace("_", " "), set()).add(name)
    rows = ["| family | functions and methods |", "|---|---|"]
    for family, names in sorted(families.items()):
        shown = [n for n in sorted(names) if n.rstrip("_") not in names - {n}]
        shown = [n for n in shown if not n.startswith("__") or n in SHOWN_OPERATORS]
        rows.append(f"| {family} | {', '.join(f'`{name}`' for name in shown)} |")
    return "\n".join(rows)


def test_the_readme_lists_the_op_table():
    text = README.read_text(encoding="utf-8")
    listed = text[text.index(START) + len(START) : text.index(END)].strip()
    assert listed == op_table(), "out of date; run python tests/unit/shard/test_op_table.py"
    for name in ("`cross_entropy`", "`roll`", "`softmax`", "`__getitem__`", "`index_add`"):
        assert name in listed


if __name__ == "__main__":
    before, _, rest = README.read_text(encoding="utf-8").partition(START)
    README.write_text(f"{before}{START}{op_table()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
