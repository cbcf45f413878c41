"""The names that the reference shows, as Sphinx finds them on its pages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from tests.docs.blocks import ROOT

_DIRECTIVE = re.compile(r"\.\. auto(function|class):: (\S+)\n((?: +:[^\n]*\n)*)")


def shown() -> dict[str, Any]:
    """Return functions, classes and methods by their full names."""
    found: dict[str, Any] = {}
    for page in sorted((ROOT / "docs/reference").glob("*.md")):
        for kind, name, options in _DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            found[name] = thing = _named(name)
            if kind == "class":
                found |= {f"{name}.{member}": value for member, value in _members(thing, options)}
    return found


def _named(name: str) -> Any:
    parts = name.split(".")
    for num in range(len(parts) - 1, 0, -1):
        try:
            thing = import_module(".".join(parts[:num]))
        except ImportError:
            continue
        for part in parts[num:]:
            thing = getattr(thing, part)
        return thing
    raise LookupError(name)


def _members(thing: type, options: str) -> Iterator[tuple[str, Any]]:
    """Yield the methods that ``:members:`` and ``:exclude-members:`` leave."""
    asked, left_out = (re.search(rf":{option}:(.*)", options) for option in ("members", "exclude-members"))
    if asked is None:
        return
    names = re.findall(r"\w+", asked[1]) or [name for name in vars(thing) if not name.startswith("_")]
    for name in names:
        value = inspect.getattr_static(thing, name)
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if inspect.isfunction(function) and name not in re.findall(r"\w+", left_out[1] if left_out else ""):
            yield name, function
