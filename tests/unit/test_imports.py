"""The graph of all imports between scidata's modules has no circle, also not inside functions or for type checkers."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import scidata

TOP = Path(scidata.__file__).parent


def imports_of(module: str, path: Path, modules: set[str]) -> set[str]:
    """Return the modules that a file imports anywhere; a package counts where something of it is imported by name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in inner}
    return (found & modules) - {module}


def graph() -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    files = {}
    for path in TOP.rglob("*.py"):
        parts = path.relative_to(TOP.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: imports_of(name, path, set(files)) for name, path in files.items()}


def test_no_circles() -> None:
    try:
        graphlib.TopologicalSorter(graph()).prepare()
    except graphlib.CycleError as e:
        raise AssertionError("a circle of imports: " + " <- ".join(e.args[1])) from None
