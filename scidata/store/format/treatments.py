"""What was done about the faults of samples, by their options: which samples may lie in one store.

A fault that the options of a sample neither repair nor keep is refused: a sample that is there has none of that kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scidata.meshes.order.faults import REMEDIES

TREATMENTS = ("repair", "keep")


def treat_alike(settings: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether no kind of fault is kept by the one and repaired by the other."""
    mine, theirs = _treated(settings), _treated(other)
    return all(theirs.get(kind, how) == how for kind, how in mine.items())


def either_treats(settings: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, object]:
    """Return settings that repair and keep the faults that either does."""
    both = {name: [*settings.get(name, ()), *other.get(name, ())] for name in TREATMENTS}
    return {**settings, **{name: list(dict.fromkeys(kinds)) for name, kinds in both.items()}}


def _treated(settings: Mapping[str, Any]) -> dict[str, str]:
    repaired = settings.get("repair", ())
    kinds = REMEDIES if "all" in repaired else repaired
    return dict.fromkeys(kinds, "repair") | dict.fromkeys(settings.get("keep", ()), "keep")
