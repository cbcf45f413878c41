"""What to install is said by a command that works: from a checkout, from a wheel, and as pyproject.toml has it."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scidata.core import install

ROOT = Path(__file__).parents[3]
METADATA = """\
Metadata-Version: 2.4
Name: scidata-parallel
Version: 0.1.0
Provides-Extra: plot
Provides-Extra: obstore
Provides-Extra: cloud
Requires-Dist: torch>=2.10
Requires-Dist: icechunk>=2.3; (python_version >= '3.12') and extra == 'obstore'
Requires-Dist: scidata-parallel[cloud]; extra == 'obstore'
Requires-Dist: fsspec>=2025.9; extra == 'cloud'
Requires-Dist: matplotlib>=3.8; extra == 'plot'
"""


@pytest.mark.parametrize("extra", ["plot", "obstore", "icechunk", "virtual", "test", "dev"])
def test_a_checkout_names_the_packages_of_an_extra(extra):
    hint, _, name = install.install_hint(extra).partition(" (")
    assert name == f"the extra '.[{extra}]')"
    assert hint.startswith("pip install ")
    assert "[" not in re.sub(r"nox\[uv\]|moto\[s3\]", "", hint), "no extras of our own: the index has another scidata"
    assert ";" not in hint


def test_extras_that_name_others_bring_theirs():
    assert install.install_hint("plot") == "pip install 'matplotlib>=3.8' (the extra '.[plot]')"
    assert install.install_hint("gcs").startswith(install.install_hint("cloud").partition(" (")[0])


def test_each_extra_that_the_code_names_is_there():
    with open(ROOT / "pyproject.toml", "rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    source = "".join(path.read_text() for path in (ROOT / "scidata").rglob("*.py"))
    named = set(re.findall(r"""install_hint\(['"](\w+)['"]\)""", source))
    named |= set(re.findall(r"""optional_module\(.*, "(\w+)"\)""", source))
    assert {"plot", "pyg", "cloud", "meshio"} <= named <= {*extras}


@pytest.mark.parametrize("has_metadata", [True, False])
def test_installed_elsewhere(tmp_path, has_metadata):
    """As a wheel is: no pyproject.toml beside the package."""
    package = tmp_path / "scidata" / "core"
    package.mkdir(parents=True)
    shutil.copy(install.__file__, package)
    if has_metadata:
        described = tmp_path / "scidata_parallel-0.1.0.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(METADATA)
    code = "from scidata.core.install import install_hint as h; print(h('plot'), h('obstore'), h('none'), sep='\\n')"
    command = [sys.executable, "-S", "-c", code]  # alone on the path, so that no other installation answers
    environ = {"PYTHONPATH": str(tmp_path), "PYTHONNOUSERSITE": "1"}
    found = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    if has_metadata:
        assert found[0] == "pip install 'matplotlib>=3.8' (the extra '.[plot]')"
        assert found[1] == "pip install 'icechunk>=2.3' 'fsspec>=2025.9' (the extra '.[obstore]')"
    else:
        assert found[0] == "pip install 'scidata-parallel[plot]'"
    assert found[2] == "pip install 'scidata-parallel[none]'"


def test_the_name_is_that_of_pyproject():
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    assert project["name"] == install.DISTRIBUTION
    everything = [each for group in project["optional-dependencies"].values() for each in group]
    assert not [each for each in everything if re.match(r"scidata\b(?!-)", each)]
    assert project["scripts"] == {"scidata": "scidata.cli.app:main"}
