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
    make_grid(tmp_path / "era5.zarr", num_lat=241, num_lon=480)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "read.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(README.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert run.returncode == 0, run.stderr
    line = r"\d \(2, 3, 241, 480\) \(.*?\) \(.*?\) \d\.\d{6}"  # ranks may print their lines into one another's
    shown = re.findall(line, text)
    assert len(shown) == 3
    assert sorted(re.findall(line, run.stdout)) == sorted(shown), run.stdout
