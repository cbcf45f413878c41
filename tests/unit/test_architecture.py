"""docs/architecture.md draws the imports between folders as they are."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
MAY_IMPORT_ALL = {"testing"}


def folder_of(module):
    """``scidata.grids.reader`` → ``grids``; the package itself and its entry point are none."""
    parts = module.split(".")
    is_folder = len(parts) > 1 and parts[0] == "scidata" and (ROOT / "scidata" / parts[1]).is_dir()
    return parts[1] if is_folder else ("errors" if parts[:2] == ["scidata", "errors"] else None)


def imported_by(tree):
    """Return the modules that a file imports, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports():
    found = {}
    for path in sorted((ROOT / "scidata").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for name in imported_by(ast.parse(path.read_text(encoding="utf-8"))):
            arrow = folder_of(module), folder_of(name)
            if None not in arrow and arrow[0] != arrow[1] and arrow[0] not in MAY_IMPORT_ALL:
                found.setdefault(arrow, module)
    return found


def drawn():
    rows = re.findall(r"^\| `(\w+)` \| → ([^|]+) \|", PAGE, flags=re.MULTILINE)
    return {folder: re.findall(r"`(\w+)`", targets) for folder, targets in rows}


def reached(arrows, folder):
    return {folder}.union(*(reached(arrows, target) for target in arrows.get(folder, ())))


def test_each_drawn_arrow_is_an_import():
    arrows = {(folder, target) for folder, targets in drawn().items() for target in targets}
    assert arrows, "the page draws nothing"
    assert not arrows - imports().keys()


def test_each_import_follows_drawn_arrows():
    arrows = drawn()
    amiss = {arrow: module for arrow, module in imports().items() if arrow[1] not in reached(arrows, arrow[0])}
    assert not amiss, f"imports that the page does not draw, and a module that has each: {amiss}"


def test_each_folder_stands_on_the_page():
    folders = {path.name for path in (ROOT / "scidata").iterdir() if (path / "__init__.py").exists()}
    assert folders - MAY_IMPORT_ALL == drawn().keys()
    sketch = PAGE.partition("```text")[2].partition("```")[0]
    assert all(re.search(rf"\b{folder}\b", sketch) for folder in drawn())


def test_the_wings_do_not_reach_each_other():
    arrows = drawn()
    assert not reached(arrows, "shard") & {"grids", "store", "meshes", "read", "plan", "sources"}
    assert not (reached(arrows, "grids") | reached(arrows, "store")) & {"shard", "device_mesh"}


def test_each_path_on_the_page_exists():
    paths = re.findall(r"`([a-z_]+/[a-z_0-9/]*(?:\.py)?)`", PAGE)
    assert paths
    for path in paths:
        base = ROOT if path.startswith(("docs/", "tests/", "scidata/")) else ROOT / "scidata"
        assert (base / path).exists() or (base / f"{path}.py").exists(), path
