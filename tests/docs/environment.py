"""What a reader has installed: the README's ``pip install .`` and the extras that a page names before its first code.

Pages run without everything else that this environment has. ``docs/_environment/sitecustomize.py`` hides it
from processes.
"""

from __future__ import annotations

import builtins
import contextlib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docs.blocks import ROOT

_PROJECT = "scidata-parallel"
_FIRST_CODE = re.compile(r"^ *```(?:python|console|\{code-cell\})", re.MULTILINE)


def hidden_modules(page: str, *, notebook: bool = False) -> set[str]:
    """Return the modules of optional packages that neither ``pip install .`` nor the extras of a page bring."""
    before = page[: found.start()] if (found := _FIRST_CODE.search(page)) else page
    named = {extra for group in re.findall(r"pip install '\.\[([\w,-]+)\]'", before) for extra in group.split(",")}
    others = re.findall(r"pip install ([a-z]\w*)", page)
    kept = _closure(_PROJECT, frozenset(named)).union(*(_closure(name, frozenset()) for name in others))
    if notebook:  # the kernel
        kept |= _closure("ipykernel", frozenset())
    optional = _closure(_PROJECT, frozenset({"dev"}), only_own=True) - kept
    return {
        module
        for module, found in _distributions().items()
        if {*map(canonicalize_name, found)} <= optional and not (ROOT / module).exists()
    }


_distributions = cache(packages_distributions)  # reads the files of every distribution


@cache
def _closure(name: str, extras: frozenset[str], *, only_own: bool = False) -> set[str]:
    """Return the distributions that one with some extras brings, itself included; ``only_own``: those that it names."""
    found, todo = set(), [(name, extras)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        found.add(str(canonicalize_name(name)))
        if only_own and name != _PROJECT:
            continue
        with contextlib.suppress(PackageNotFoundError):
            for each in map(Requirement, requires(name) or ()):
                if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras or {""}):
                    todo.append((each.name, frozenset(each.extras)))
    return found


@contextlib.contextmanager
def without(modules: Iterable[str]) -> Iterator[None]:
    """Have a page's own imports, and those of scidata, find none of these modules in this process."""
    hidden, before = frozenset(modules), builtins.__import__

    def importing(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        importer = (globals or {}).get("__name__", "").partition(".")[0]
        if level == 0 and importer in ("__main__", "scidata") and name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}: the page does not say that it needs it", name=name)
        return before(name, globals, locals, fromlist, level)

    builtins.__import__ = importing
    try:
        yield
    finally:
        builtins.__import__ = before
