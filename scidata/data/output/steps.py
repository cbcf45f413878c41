"""Labels of the steps of an output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from scidata.core.checks import optional_module
from scidata.core.types import Array, ArrayLayout
from scidata.data.output.fields import OutputVariable
from scidata.data.output.packing import OF_PACKING
from scidata.errors import ConfigError
from scidata.sources.cf import is_time

_OF_STORAGE = {"_ARRAY_DIMENSIONS", "DIMENSION_LIST", "REFERENCE_LIST", "CLASS", "NAME", "_Netcdf4Dimid"}
_OF_STORAGE |= {"_Netcdf4Coordinates", "_nc3_strict", "_NCProperties"}


def stored_attributes(attributes: Mapping[str, object]) -> dict[str, object]:
    """Return the attributes of a source's array whose values are copied as they are stored."""
    return {name: value for name, value in attributes.items() if name not in _OF_STORAGE}


def kept_attributes(attributes: Mapping[str, object]) -> dict[str, object]:
    """Return the attributes of a source's array, without those of its storage and packing."""
    return {name: value for name, value in stored_attributes(attributes).items() if name not in OF_PACKING}


def copied_variable(
    layout: ArrayLayout, read: Callable[[], Array], dims: tuple[str, ...], shape: tuple[int, ...]
) -> OutputVariable:
    """Return an array of a source, to be copied as it is stored."""
    dtype, attributes = layout.dtype.newbyteorder("="), stored_attributes(layout.attributes)
    return OutputVariable(name=layout.name, dims=dims, shape=shape, dtype=dtype, read=read, attributes=attributes)


def given_steps(
    times: object, dim: str, known: Sequence[str], said: Mapping[str, Mapping[str, object]]
) -> tuple[dict[str, int], list[OutputVariable]]:
    """Return the sizes of the steps' dims, and their coordinates.

    Parameters
    ----------
    dim
        That of times which name none.
    known
        Dims along which one step lies.
    said
        The attributes of the source's arrays, by name.

    Raises
    ------
    ConfigError
        No steps, or labels that are none.
    """
    given = dict(times) if isinstance(times, Mapping) else {dim: times}
    sizes: dict[str, int] = {}
    variables: list[OutputVariable] = []
    for name, values in given.items():
        if name in known:
            raise ConfigError(f"create: times names {name!r}, along which one sample lies")
        if isinstance(values, int | np.integer) and not isinstance(values, bool):
            sizes[name] = int(values)
        else:
            coordinate = _coordinate(str(name), values, said.get(str(name), {}))
            sizes[name] = coordinate.shape[0]
            variables.append(coordinate)
        if sizes[name] < 1:
            raise ConfigError(f"create: times has no steps along {name!r}")
    return sizes, variables


def _coordinate(dim: str, given: object, said: Mapping[str, object]) -> OutputVariable:
    values: Array = np.asarray(given)
    if values.ndim != 1:
        raise ConfigError(f"create: times of {dim!r} have shape {values.shape}; give a list, or a number of steps")
    attributes = stored_attributes(said)
    if values.dtype.kind in "iuf":
        return OutputVariable.of(dim, values, attributes)
    return _encoded(dim, values, attributes)


def _encoded(dim: str, values: Array, attributes: Mapping[str, object]) -> OutputVariable:
    """Return dates, or lengths of time, as numbers with units: the source's where they are of a calendar."""
    is_length = values.dtype.kind == "m"
    if values.dtype.kind not in "mM" and not all(hasattr(each, "calendar") for each in values):
        raise ConfigError(
            f"create: times of {dim!r} are {type(values[0]).__name__ if len(values) else values.dtype}; give numbers, "
            "datetime64, timedelta64, or objects of cftime"
        )
    xarray = optional_module("xarray", f"create: times of {dim!r} are encoded by xarray", "xarray")
    units = {name: attributes[name] for name in ("units", "calendar") if name in attributes and is_time(attributes)}
    variable = xarray.Variable((dim,), values, encoding={} if is_length else units)
    encoded = xarray.conventions.encode_cf_variable(variable, name=dim)
    said = {k: v for k, v in attributes.items() if k not in ("units", "calendar", *OF_PACKING)}
    return OutputVariable.of(dim, np.asarray(encoded.values), {**said, **encoded.attrs})
