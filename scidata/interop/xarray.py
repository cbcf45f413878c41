"""xarray: opens its data sets by the file behind them, where nothing was computed; samples as data sets of xarray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch

from scidata.core.checks import optional_module
from scidata.core.types import Array, ArrayLayout
from scidata.errors import ConfigError
from scidata.read.arrays import read_array
from scidata.shard import ShardTensor
from scidata.sources import open_source

#: Attributes that say how values were packed: they are not true of decoded ones.
_PACKING = {"scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned"}
#: Attributes that say how an array lies in its file.
_STORAGE = {"_ARRAY_DIMENSIONS", "DIMENSION_LIST", "REFERENCE_LIST", "CLASS", "NAME", "coordinates", "grid_mapping"}
#: Rows of a dim, as ``isel`` of ``open_dataset`` takes them.
Rows: TypeAlias = int | slice | list[int]
_FROM_FILE = 2  # layers of a dask array that reads a file: the array that is read, and its chunks


def dataset_of(
    fields: Mapping[str, torch.Tensor],
    dims: Mapping[str, Sequence[str]],
    coords: Mapping[str, torch.Tensor | Array],
    attributes: Mapping[str, Mapping[str, object]],
) -> Any:
    """Return fields as an ``xarray.Dataset`` on the host; ShardTensors give the rows that this rank owns.

    Coordinates whose rows are not as many as those of their dim (a transform changed it) are left out.
    """
    xarray = optional_module("xarray", "to_xarray makes an xarray.Dataset", "xarray")
    arrays = {name: _owned(tensor) for name, tensor in fields.items()}
    named = [pair for name, values in arrays.items() for pair in zip(dims[name], values.shape, strict=True)]
    first = dict(reversed(named))
    twice = {dim for dim, size in named if first[dim] != size}  # names that files without names give: dim_0, dim_1
    own = {(name, dim): f"{name}_{dim}" for name in arrays for dim in dims[name]}
    own = {key: text for key, text in own.items() if key[1] in twice or text in coords}  # as fields with other steps
    shown_dims = {name: tuple(own.get((name, dim), dim) for dim in dims[name]) for name in arrays}
    variables = {
        name: (shown_dims[name], values, _plain(attributes.get(name, {}), _PACKING | _STORAGE))
        for name, values in arrays.items()
    }
    sizes = {dim: n for name, values in arrays.items() for dim, n in zip(shown_dims[name], values.shape, strict=True)}
    shown = {}
    for dim, coordinate in coords.items():
        values = coordinate if isinstance(coordinate, np.ndarray) else _owned(coordinate)
        has_rows = dim in sizes
        along = ("batch",) * (values.ndim - has_rows) + (dim,) * has_rows
        if len(set(along)) == values.ndim and all(sizes.get(d) == n for d, n in zip(along, values.shape, strict=True)):
            name = dim if len(along) < 2 else f"{dim}_of_sample"  # xarray has no such coordinate of the dim's own name
            # by decoded times themselves
            said = {"units", "calendar"} if values.dtype.kind not in "iuf" else set[str]()
            shown[name] = along, values, _plain(attributes.get(dim, {}), _PACKING | _STORAGE | said)
    return xarray.Dataset(variables, coords=shown)


def _owned(tensor: torch.Tensor) -> Array:
    local = (tensor.to_local() if isinstance(tensor, ShardTensor) else tensor).detach().cpu()
    return (local.float() if local.dtype is torch.bfloat16 else local).numpy()


def _plain(attributes: Mapping[str, object], without: set[str]) -> dict[str, object]:
    return {name: value for name, value in attributes.items() if name not in without}


@dataclass(frozen=True, kw_only=True)
class Lazy:
    """The file, fields and rows that an object of xarray would read."""

    path: str  # the file or store
    fields: list[str]  # names of its data variables
    isel: dict[str, Rows]  # rows of their dims
    decodes: bool  # whether packed values are unpacked


def is_xarray(obj: object) -> TypeGuard[Any]:
    """Whether it is a ``Dataset`` or ``DataArray`` of xarray, without importing that."""
    kind = type(obj)
    return kind.__module__.startswith("xarray.") and kind.__name__ in ("Dataset", "DataArray")


def lazy_of(obj: Any) -> Lazy:
    """Find the file and rows that an ``xarray.Dataset`` or ``DataArray`` reads, where nothing was computed with it.

    Raises ConfigError: its values are no longer those of one file, or in another order, or under another name.
    """
    if type(obj).__name__ == "DataArray":
        obj = obj.to_dataset(name=obj.name or "values")
    if not obj.data_vars:
        raise _refused("it has no data variables", "")
    found = [_Variable(name, variable.variable, obj.encoding) for name, variable in obj.data_vars.items()]
    paths = {each.path for each in found}
    if len(paths) > 1:
        raise _refused(f"its variables are of {len(paths)} files", "give open_dataset the list of files")
    decodes = {each.decodes for each in found if each.decodes is not None}
    if len(decodes) > 1:
        raise _refused("some of its packed variables are decoded and some are not", "open it one way")
    source = open_source(paths.pop())
    isel: dict[str, Rows] = {}
    for each in found:
        layout = source.arrays.get(each.name)
        if layout is None:
            raise _refused(f"{each.name!r} is not in {source.path} any more", "open it anew")
        for dim, rows in each.rows_of(layout).items():
            if dim in isel and not _same(isel[dim], rows):
                raise _refused(f"its variables have different rows of {dim!r}", "crop with isel=")
            isel[dim] = rows
    whole = {dim: rows for dim, rows in isel.items() if not (isinstance(rows, slice) and rows == slice(None))}
    for dim, rows in isel.items():
        layout, here = source.arrays.get(dim), obj.coords.get(dim)
        if layout is not None and layout.dims == (dim,) and here is not None and here.dtype != object:
            _check_labels(dim, here.values, read_array(source, layout, allow_missing=True)[rows], layout.attributes)
    return Lazy(path=source.path, fields=[each.name for each in found], isel=whole, decodes=not decodes or min(decodes))


def _check_labels(dim: str, here: Array, stored: Array, attributes: Mapping[str, object]) -> None:
    xarray = optional_module("xarray", "an object of xarray is compared by it", "xarray")
    labels, raw = (xarray.Variable((dim,), np.atleast_1d(x), attributes) for x in (here, stored))
    decode = xarray.conventions.decode_cf_variable
    if not (labels.equals(raw) or any(labels.equals(decode(dim, raw, decode_times=on)) for on in (False, True))):
        raise _refused(f"{dim!r} has other labels there", "")


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and bool(np.all(one == other))


def _refused(why: str, instead: str) -> ConfigError:
    hint = instead or "give open_dataset the path, and fields=, isel=, transform= for what was done to it"
    return ConfigError(f"an object of xarray is opened as what its file holds, and {why}; {hint}")


class _Variable:
    """A variable that reads an array of a file, and nothing else."""

    def __init__(self, name: str, variable: Any, encoding: Mapping[str, object]) -> None:
        self._dims, self._keys = variable.dims, []
        data = variable._data  # the public `data` would load it
        if hasattr(data, "dask"):
            data = self._under_dask(name, data)
        for wrapper in _unwrapped(data):
            if type(wrapper).__name__ == "LazilyIndexedArray":
                self._keys.append(wrapper.key.tuple)
            elif type(wrapper).__name__ == "LazilyVectorizedIndexedArray":
                raise _refused(f"{name!r} was transposed, or picked from point by point", "")
            data = wrapper
        array = getattr(data, "_array", None)  # of Zarr
        stored = getattr(data, "variable_name", None) or getattr(array, "path", None)
        path = variable.encoding.get("source") or encoding.get("source")
        if path is None and array is not None:  # a DataArray of a Zarr store, of which only the Dataset knows the path
            path = getattr(array.store, "root", None)
        if stored is None or path is None or len(self._keys) > 1:
            raise _refused(f"{name!r} was loaded or computed", "")
        group = getattr(getattr(data, "datastore", None), "_group", None) or ""
        group, _, self.name = f"{group}/{stored}".strip("/").rpartition("/")
        if self.name != name:
            raise _refused(f"{name!r} is {self.name!r} there", "rename nothing, or give the path")
        self.path = f"{path}/{group}" if group else str(path)
        packed, unpacked = _PACKING & set(variable.attrs), _PACKING & set(variable.encoding) - {"_FillValue"}
        if packed and unpacked:
            raise _refused(f"{name!r} was given {min(packed)}", "")
        self.decodes = False if packed else True if unpacked else None

    @staticmethod
    def _under_dask(name: str, array: Any) -> Any:
        graph = dict(array.dask)
        originals = [value for key, value in graph.items() if str(key).startswith("original-")]
        if len(array.dask.layers) != _FROM_FILE or len(originals) != 1:
            raise _refused(f"{name!r} is computed by dask", "")
        return originals[0]

    def rows_of(self, layout: ArrayLayout) -> dict[str, Rows]:
        """Return the rows that it has along each dim of the array in the file."""
        key = self._keys[0] if self._keys else (slice(None),) * len(layout.dims)
        rows: dict[str, Rows] = {}
        left: list[str] = []
        for dim, size, each in zip(layout.dims, layout.shape, key, strict=True):
            if isinstance(each, slice):
                rows[dim] = slice(None) if each.indices(size) == (0, size, 1) else each
            else:
                rows[dim] = [int(row) for row in each] if isinstance(each, np.ndarray) else int(each)
            if not isinstance(rows[dim], int):
                left.append(dim)
        if tuple(left) != tuple(self._dims):
            raise _refused(f"{self.name!r} has dims {', '.join(left)} there, and {', '.join(self._dims)} here", "")
        return rows


def _unwrapped(data: object) -> Iterator[Any]:
    """Yield an array of xarray, the array that it wraps, and so on down to the file."""
    while data is not None:
        yield data
        data = getattr(data, "array", None)
