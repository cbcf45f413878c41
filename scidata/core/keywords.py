"""Reject unknown keyword arguments of public functions, and name near ones."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from scidata.errors import near_matches

F = TypeVar("F", bound=Callable[..., Any])


#: Arguments of torch and xarray that have another name or place in scidata, or are inferred.
_ELSEWHERE = {
    "num_replicas": "the mesh says how many ranks read other samples: pass mesh=scidata.init_mesh(dp=…)",
    "rank": "the mesh knows which rank this is: pass mesh=scidata.init_mesh()",
    "world_size": "the mesh says how many ranks there are: pass mesh=scidata.init_mesh()",
    "device": "samples are read to the host; scidata.DataLoader(device=) copies batches while others are computed",
    **dict.fromkeys(
        ("batch_size", "num_workers", "pin_memory", "collate_fn", "sampler", "batch_sampler", "prefetch_factor"),
        "it belongs to the loader: scidata.DataLoader(dataset, {0}=)",
    ),
    "shuffle": "order belongs to the loader: scidata.DataLoader(dataset, shuffle=True), or scidata.DistributedSampler",
    "drop_last": "it belongs to the loader or its sampler: scidata.DataLoader(dataset, drop_last=True)",
    "chunks": "chunks are those of the file; each rank reads its part, which shard= and bounds= say",
    "engine": "the format is told by the content",
}


def _answer(unknown: str, known: Iterable[str]) -> str:
    said = _ELSEWHERE.get(unknown)
    return near_matches(unknown, known) if said is None else f"; {said.format(unknown)}"


def checked_keywords(function: F) -> F:
    """Make a function reject unknown keyword arguments before it runs."""
    kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(function).parameters.values()
    assert not [p for p in parameters if p.kind is p.VAR_KEYWORD], "takes any"
    known = {p.name for p in parameters if p.kind in kinds and p.name != "self"}

    @functools.wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        if not kwargs.keys() <= known:
            unknown = next(name for name in kwargs if name not in known)
            name = function.__qualname__
            if name.endswith(".__init__"):
                name = type(args[0]).__name__  # subclasses may inherit it
            raise TypeError(f"{name}() has no argument {unknown!r}{_answer(unknown, known)}")
        return function(*args, **kwargs)

    return cast(F, checked)
