"""Arguments of torch functions, by position or by name."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any


def argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str, default: Any = None) -> Any:
    """Return an argument that was given by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def many(args: tuple[Any, ...], kwargs: Mapping[str, Any], *names: str) -> tuple[int, ...]:
    """Return integers that were given one by one or as one sequence."""
    given = args[1:] if len(args) > 1 else next((kwargs[n] for n in names if n in kwargs), ())
    if len(given) == 1 and not isinstance(given[0], int):
        given = given[0]
    return tuple(operator.index(n) for n in given)


def normal_dim(dim: int, ndim: int) -> int:
    """Count a dim from the front; raises IndexError."""
    if not -ndim <= dim < ndim:
        raise IndexError(f"dim {dim} is out of range for a tensor of {ndim} dims")
    return dim % ndim
