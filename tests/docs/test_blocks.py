"""The blocks of pages are found, and outputs compared, as ``test_pages.py`` needs it."""

import os
import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT, blocks_of, differs
from tests.docs.environment import hidden_modules, without

PAGE = """# A page

```python
print(1)
```

```text
1
```

Words.

<!-- not run: slurm -->
```bash
srun true
```

Words between.

<!-- sketch -->
```text
a ─► b
```

1. In a list:

   ```python
   # one.py
   print(2)
   ```
"""


def test_blocks_with_what_they_show():
    first, second, third, fourth = blocks_of(PAGE)
    assert (first.language, first.text, first.shown, first.line) == ("python", "print(1)\n", "1\n", 4)
    assert (second.text, second.marks, second.shown) == ("srun true\n", {"not run": "slurm"}, None)
    assert (third.language, third.marks) == ("text", {"sketch": ""})
    assert (fourth.text, fourth.file) == ("# one.py\nprint(2)\n", "one.py")


@pytest.mark.parametrize(
    ("printed", "shown", "options", "same"),
    [
        ("a 1\nb\n", "a 1\nb\n", {}, True),
        ("a 1\nb\n", "a 2\nb\n", {}, False),
        ("a 1\nb\n", "a 1\n", {}, False),
        ("a\nb\nc\n", "a\n…\nc\n", {}, True),
        ("a\nb\nc\n", "a\n…\nd\n", {}, False),
        ("loss 0.5 (x)\n", "loss … (x)\n", {}, True),
        ("took 12.5 ms\n", "took 3 ms\n", {"numbers_vary": True}, True),
        ("took 12.5 s\n", "took 3 ms\n", {"numbers_vary": True}, False),
        ("1 b\n0 a\n", "0 a\n1 b\n", {"any_order": True}, True),
        ("1 b\n0 a\n", "0 a\n1 b\n", {}, False),
    ],
)
def test_outputs_are_compared(printed, shown, options, same):
    assert (differs(printed, shown, **options) is None) == same


def test_pages_find_what_they_tell_readers_to_install() -> None:
    told = "It needs `pip install '.[netcdf,plot]'`.\n```python\nimport xarray\n```\nand `pip install '.[xarray]'`"
    hidden = hidden_modules(told)
    assert {"xarray", "torch_geometric"} <= hidden
    assert not {"netCDF4", "matplotlib", "zarr", "torch"} & hidden
    with without(hidden), pytest.raises(ModuleNotFoundError, match="xarray"):
        exec("import xarray", {"__name__": "__main__"})
    process = subprocess.run(
        [sys.executable, "-c", "import matplotlib, torch_geometric"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "docs" / "_environment"), "SCIDATA_PAGE_LACKS": " ".join(hidden)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stderr.endswith("No module named 'torch_geometric'\n")
