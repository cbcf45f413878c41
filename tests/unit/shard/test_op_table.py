"""The list in scidata/shard/README.md is the op table; ``python tests/unit/shard/test_op_table.py`` writes it."""

from pathlib import Path

import scidata.shard  # noqa: F401 - fills the table
from scidata.shard.op_table import op_table

README = Path(__file__).parents[3] / "scidata/shard/README.md"
START, END = "<!-- op table: generated -->\n", "<!-- end of op table -->"


def test_the_readme_lists_the_op_table():
    text = README.read_text(encoding="utf-8")
    listed = text[text.index(START) + len(START) : text.index(END)].strip()
    assert listed == op_table(), "out of date; run python tests/unit/shard/test_op_table.py"
    for name in ("`cross_entropy`", "`roll`", "`softmax`", "`__getitem__`", "`index_add`"):
        assert name in listed


if __name__ == "__main__":
    before, _, rest = README.read_text(encoding="utf-8").partition(START)
    README.write_text(f"{before}{START}{op_table()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
