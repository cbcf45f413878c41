"""Unknown keyword arguments of public functions are answered with near ones."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from scidata.errors import near_matches

F = TypeVar("F", bound=Callable[..., Any])


def checked_keywords(function: F) -> F:
    """Make a function refuse keyword arguments that it does not have, before it does anything.

    Raises
    ------
    TypeError
        As Python does, and with the names that are near: ``halos=`` is answered with ``halo``.
    """
    kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(function).parameters.values()
    assert not [p for p in parameters if p.kind is p.VAR_KEYWORD], "takes any"
    known = {p.name for p in parameters if p.kind in kinds and p.name != "self"}

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.keys() <= known:
            unknown = next(name for name in kwargs if name not in known)
            name = function.__qualname__
            if name.endswith(".__init__"):
                name = type(args[0]).__name__  # which may inherit it
            raise TypeError(f"{name}() has no argument {unknown!r}{near_matches(unknown, known)}")
        return function(*args, **kwargs)

    return cast(F, checked)
