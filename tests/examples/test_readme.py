"""The README's first script, as it stands there, under torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

from scidata.testing import make_grid

README = Path(__file__).parents[2] / "README.md"


def test_the_first_script_prints_what_the_readme_shows(tmp_path):
    text = README.read_text()
    script = next(block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "# read.py" in block)
    (tmp_path / "read.py").write_text(script)
    make_grid(tmp_path / "era5.zarr", num_lat=241, num_lon=480, chunks=(1, 3, 31, 480))
    # each rank into a file of its own: on one pipe their lines may mix
    torchrun = [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "3",
        "--redirects",
        "3",
        "--log-dir",
        "logs",
    ]
    run = subprocess.run(
        [sys.executable, "-m", *torchrun, "read.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(README.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert run.returncode == 0, run.stderr
    shown = re.findall(r"^\d \(2, 3, 241, 480\).*$", text, re.M)
    assert len(shown) == 3
    printed = [log.read_text().strip() for log in (tmp_path / "logs").rglob("stdout.log")]
    assert sorted(printed) == sorted(shown)
