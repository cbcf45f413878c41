"""``scidata.partition`` is a function and a package: both work, whatever is imported first."""

import subprocess
import sys
from pathlib import Path

import pytest

CALL = """
try:
    scidata.partition()
except TypeError as error:
    assert "partition() missing" in str(error), error
else:
    raise AssertionError("called without arguments")
"""
PACKAGE = "from scidata.meshes.order.hilbert import order_hilbert\nimport scidata.meshes.order.rcb\n"


@pytest.mark.parametrize(
    "script", [f"import scidata\n{CALL}{PACKAGE}{CALL}", f"{PACKAGE}import scidata\n{CALL}{PACKAGE}"]
)
def test_the_name_is_a_function_and_a_package(script):
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
