"""Dim names of derived fields, if their sizes determine them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from scidata.core.checks import check_mapping
from scidata.errors import ConfigError, check_known

#: Names of dims, and their sizes.
_Sized: TypeAlias = tuple[tuple[str, ...], tuple[int, ...]]


def dims_of_made(
    fields: Mapping[str, torch.Tensor], old: Mapping[str, _Sized], given: Mapping[str, Sequence[str]] | None
) -> dict[str, tuple[str, ...]]:
    """Return the dims of fields that are added to, or replace, existing ones.

    In order of preference: the given dims; the dims of the old field of that name, without some if the sizes determine
    which; all or some dims of another field, if the sizes match; ``dim_0``, ``dim_1``, …. Raises ConfigError if given
    dims do not fit, and UnknownNameError if their field is missing.
    """
    if given is None:
        given = {}
    else:
        check_mapping("dims", given, "{'speed': ('lat', 'lon')}")
        check_known("replace: dims of field", list(given), fields)
    made = {}
    for name, tensor in fields.items():
        shape = tuple(tensor.shape)
        if name in given:
            made[name] = tuple(given[name])
            if isinstance(given[name], str) or len(made[name]) != len(shape) or len(set(made[name])) < len(shape):
                raise ConfigError(f"replace: dims={{{name!r}: {given[name]!r}}}, but the tensor has shape {shape}")
        elif name in old and len(old[name][0]) == len(shape):
            made[name] = old[name][0]
        else:
            by_shape = {shape: dims for dims, shape in old.values()}
            found = _left_of([old[name]], shape) if name in old else set()
            found = found or ({by_shape[shape]} if shape in by_shape else _left_of(old.values(), shape))
            made[name] = found.pop() if len(found) == 1 else tuple([f"dim_{i}" for i in range(len(shape))])
    return made


def _left_of(old: Iterable[_Sized], shape: tuple[int, ...]) -> set[tuple[str, ...]]:
    """Return all ways to drop dims of old fields so that these sizes are left."""
    found = set()
    for dims, sizes in old:
        for kept in itertools.combinations(range(len(dims)), len(shape)):
            if tuple([sizes[i] for i in kept]) == shape:
                found.add(tuple([dims[i] for i in kept]))
    return {dims for dims in found if dims[:1] == ("batch",)} or found  # a model's result for a batch is a batch
