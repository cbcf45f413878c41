"""Sphinx builds the site, without a warning: links inside it lead somewhere, and the notebooks run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, is_notebook


@pytest.mark.slow_for("as users start them")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("started", ["with torch loaded", "as users start them"])
def test_the_site_builds_without_warnings(started: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Sphinx, and all that notebooks start: kernels, commands, torchrun and its ranks."""
    for module in ("furo", "myst_nb", "numpydoc", "torch_geometric", "xarray", "matplotlib"):
        pytest.importorskip(module, reason="the site is built with the extra 'docs'")
    command = ["-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-j", "2", "-d", str(tmp_path / "trees")]
    python = sys.executable if started == "as users start them" else request.getfixturevalue("programs") / "python"
    built = subprocess.run(
        [python, *command, "docs", str(tmp_path / "site")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=880,
    )
    assert built.returncode == 0, built.stderr[-6000:]
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        made = (tmp_path / "site" / page.relative_to(ROOT / "docs")).with_suffix(".html")
        if is_notebook(text):  # it ran: each cell that has output shows it
            assert made.read_text(encoding="utf-8").count("cell_output") >= text.count("```{code-cell}") // 2, made
    assert "__rand__" in (tmp_path / "site" / "compatibility" / "operations.html").read_text(
        encoding="utf-8"
    )  # not a bold "rand"
    pictures = sorted((tmp_path / "site" / "_images").iterdir())
    shown = re.findall(r"_generated/([\w.]+)", (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8"))
    assert {picture.name for picture in pictures} >= set(shown)
    assert all(picture.stat().st_size > 2000 for picture in pictures)
