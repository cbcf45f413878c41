"""GRIB files, editions 1 and 2: each message is a chunk of an array that has a dim for each key that differs.

eccodes reads the headers once, for keys and places of the messages; ranks read messages by their bytes.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from scidata.core.types import AnyArray, ArrayLayout, IntArray
from scidata.errors import CorruptDataError, UnsupportedFormatError
from scidata.sources.formats import FileFormat, Place
from scidata.sources.grib_messages import codec_of, dated, eccodes, headers, opened

_MAX_POINTS = 1 << 28
_HOUR = datetime.timedelta(hours=1)
_DIMS = ("time", "number", "step", "level")
_ATTRIBUTES: Mapping[str, Mapping[str, str]] = {
    "time": {"units": "minutes since 1970-01-01", "standard_name": "time", "axis": "T"},
    "number": {"standard_name": "realization"},
    "step": {"units": "hours", "standard_name": "forecast_period"},
    "level": {"axis": "Z"},
    "latitude": {"units": "degrees_north", "standard_name": "latitude"},
    "longitude": {"units": "degrees_east", "standard_name": "longitude"},
}


#: shortName, typeOfLevel, stepType, grid.
_Variable: TypeAlias = tuple[str, str, str, str]
#: Number of a member, step in hours, level.
_Place: TypeAlias = tuple[int, float, float]
#: And the time before them.
_At: TypeAlias = tuple[int, int, float, float]


class _Message(NamedTuple):
    """One message: the variable that it is of, its place along each of ``_DIMS``, and in the file."""

    variable: _Variable
    at: _At
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """Points of messages: names and sizes of their dims, and coordinates by name, each with its dims."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    coords: Mapping[str, tuple[tuple[str, ...], AnyArray]]


class GribSource(FileFormat):
    """One GRIB file.

    Arrays have eccodes' short names (``t``, ``2t``), and where several differ in more, the type of level or of step
    behind it. Dims: ``time`` (of the forecast's begin), ``number``, ``step`` and ``level``, those of one value but time
    left out; then ``latitude, longitude``, ``y, x`` of projections, or ``values`` of reduced grids. Values are float32.
    """

    format: ClassVar[str] = "grib"

    def __init__(self, path: str, *, allow_external: bool = False) -> None:
        super().__init__(path, allow_external=allow_external)
        self.skipped: dict[str, str] = {}
        self._coords: dict[str, AnyArray] = {}
        self._places: dict[str, IntArray] = {}  # first byte and bytes of each message of an array, -1 where it lacks

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__  # no other process looks through the file again

    def describe(self) -> Iterator[ArrayLayout]:
        """Return fields and coordinates."""
        grids: dict[str, _Grid] = {}
        facts: dict[_Variable, dict[str, object]] = {}
        variables: dict[_Variable, dict[_At, _Message]] = {}
        for message in self._messages(grids, facts):
            others = variables.setdefault(message.variable, {})
            if (twin := others.setdefault(message.at, message)) is not message:
                raise UnsupportedFormatError(
                    f"{self.path}: two messages, at bytes {twin.offset} and {message.offset}, of {message.variable[0]} "
                    f"at {dict(zip(_DIMS, message.at, strict=True))}; split the file (grib_copy -w)"
                )
        dims: dict[str, list[tuple[object, ...]]] = {dim: [] for dim in _DIMS}  # values of each that variables have
        for variable, name in _names(list(variables)).items():
            yield self._field(name, variables[variable], grids[variable[3]], facts[variable], dims)
        for dim, known_values in dims.items():
            for k, values in enumerate(known_values):
                yield self._coordinate(_numbered(dim, k), (_numbered(dim, k),), np.array(values), _ATTRIBUTES[dim])
        for grid in grids.values():
            for name, (own_dims, array) in grid.coords.items():
                yield self._coordinate(name, own_dims, array, _ATTRIBUTES.get(name.partition("_")[0], {}))

    def _messages(self, grids: dict[str, _Grid], facts: dict[_Variable, dict[str, object]]) -> Iterator[_Message]:
        """Yield the messages of gridded fields; note their grids, and attributes of their variables."""
        eccodes(f"{self.path}: GRIB")
        known: dict[bytes, tuple[_Variable, _Place] | None] = {}  # messages of other times are alike
        for offset, nbytes, header in headers(self.path):
            begin, rest = dated(header)
            if rest not in known:
                with opened(header) as (library, handle):
                    known[rest] = self._keys(library, handle, grids, facts)
            if (found := known[rest]) is not None:
                variable, place = found
                yield _Message(variable, (begin, *place), offset, nbytes)

    def _keys(
        self, library: Any, handle: int, grids: dict[str, _Grid], facts: dict[_Variable, dict[str, object]]
    ) -> tuple[_Variable, _Place] | None:

        def get(key: str) -> Any:
            return library.codes_get(handle, key) if library.codes_is_defined(handle, key) else None

        grid, short = get("md5GridSection"), get("shortName")
        name = f"param{get('paramId')}" if short == "unknown" else short
        if grid is None or get("gridType") in ("sh", "unknown") or get("alternativeRowScanning"):
            self.skipped[name] = f"its grid, {get('gridType')}, is not read"
            return None
        if grid not in grids:
            grids[grid] = _grid_of(self.path, library, handle, get, len(grids))
        variable = name, str(get("typeOfLevel")), str(get("stepType")), grid
        if variable not in facts:
            given = {"long_name": "name"} | {key: key for key in ("units", "typeOfLevel", "gridType")}
            facts[variable] = {key: get(found) for key, found in given.items()}
        begin, valid = (_time(get(f"{d}Date"), get(f"{d}Time")) for d in ("data", "validity"))
        return variable, (int(get("perturbationNumber") or 0), (valid - begin) / _HOUR, float(get("level") or 0))

    def _field(
        self,
        name: str,
        messages: Mapping[_At, _Message],
        grid: _Grid,
        facts: dict[str, object],
        dims: dict[str, list[tuple[object, ...]]],
    ) -> ArrayLayout:
        values = [sorted({at[k] for at in messages}) for k in range(len(_DIMS))]
        kept = [k for k, each in enumerate(values) if k == 0 or len(each) > 1]
        lead, attributes = [], dict(facts)
        for k, (dim, each) in enumerate(zip(_DIMS, values, strict=True)):
            if k in kept:
                numbers = tuple(each)
                if numbers not in dims[dim]:
                    dims[dim].append(numbers)
                lead.append(_numbered(dim, dims[dim].index(numbers)))
            else:
                attributes[dim] = each[0]
        shape, rows = tuple(len(values[k]) for k in kept), [{x: i for i, x in enumerate(each)} for each in values]
        places = np.full((*shape, 2), -1, np.int64)
        for at, message in messages.items():
            places[tuple(rows[k][at[k]] for k in kept)] = message.offset, message.nbytes
        self._places[name] = places
        codec = codec_of("values", "float32")
        return self.array(
            name, (*shape, *grid.shape), np.float32, dims=(*lead, *grid.dims),
            chunks=(*(1 for _ in shape), *grid.shape), codecs=[] if codec is None else [codec], fill_value=np.nan,
            attributes=attributes,
        )  # fmt: skip

    def _coordinate(
        self, name: str, dims: Sequence[str], values: AnyArray, attributes: Mapping[str, object]
    ) -> ArrayLayout:
        self._coords[name] = values
        return replace(self.array(name, values.shape, values.dtype, dims=dims, attributes=attributes), fallback=True)

    def place(self, layout: ArrayLayout, chunk: tuple[int, ...]) -> Place | None:
        """Return where a message lies."""
        places = self._places[layout.name]
        offset, nbytes = places[chunk[: places.ndim - 1]].tolist()
        return None if offset < 0 else (self.path, offset, nbytes)

    def read(self, layout: ArrayLayout, box: tuple[slice, ...]) -> AnyArray:
        """Return values of a coordinate."""
        return self._coords[layout.name][box]


def _time(date: int, time: int) -> datetime.datetime:
    return datetime.datetime(date // 10000, date // 100 % 100, date % 100, time // 100, time % 100)


def _numbered(name: str, k: int) -> str:
    return f"{name}_{k}" if k else name


def _names(variables: Sequence[_Variable]) -> dict[_Variable, str]:
    """Name variables by their short names, and by the types of level and step in which those of one name differ."""
    names: dict[str, list[_Variable]] = {}
    for variable in variables:
        alike = [other for other in variables if other[0] == variable[0]]
        more = [variable[k] for k in (1, 2) if len({other[k] for other in alike}) > 1]
        names.setdefault("_".join([variable[0], *more]), []).append(variable)
    return {each: _numbered(name, k) for name, same in names.items() for k, each in enumerate(same)}


def _grid_of(path: str, library: Any, handle: int, get: Callable[[str], Any], k: int) -> _Grid:
    """Describe the ``k``-th grid of a file. Sizes that contradict each other would end the process in eccodes."""
    points, kind = int(get("numberOfPoints")), str(get("gridType"))
    table = library.codes_get_array(handle, "pl").astype(np.int64) if get("PLPresent") else None
    sizes = int(get("Nj") or 0), int(get("Ni") or 0)
    of_cells = table is not None or not all(sizes)
    if points != (table.sum() if table is not None else sizes[0] * sizes[1] or points) or points > _MAX_POINTS:
        raise CorruptDataError(
            f"{path}: a grid {kind}, {sizes[0]} x {sizes[1]}, said to have {points} points, of at most {_MAX_POINTS}"
        )
    lat, lon = (library.codes_get_array(handle, key) for key in ("latitudes", "longitudes"))
    names = [_numbered(name, k) for name in ("latitude", "longitude", "values", "y", "x", "reduced_points", "rows")]
    lat_dim, lon_dim, cell_dim, y, x, table_name, rows = names
    if of_cells:
        coords = {lat_dim: ((cell_dim,), lat), lon_dim: ((cell_dim,), lon)}
        if table is not None:
            coords[table_name] = (rows,), table
        return _Grid(dims=(cell_dim,), shape=(points,), coords=coords)
    by_columns = bool(get("jPointsAreConsecutive"))
    shape = sizes[::-1] if by_columns else sizes
    lat, lon = lat.reshape(shape), lon.reshape(shape)
    if kind not in ("regular_ll", "regular_gg"):
        dims = (x, y) if by_columns else (y, x)
        return _Grid(dims=dims, shape=shape, coords={lat_dim: (dims, lat), lon_dim: (dims, lon)})
    first_lat, first_lon = (lat[0], lon[:, 0]) if by_columns else (lat[:, 0], lon[0])
    coords = {lat_dim: ((lat_dim,), first_lat.copy()), lon_dim: ((lon_dim,), first_lon.copy())}
    return _Grid(dims=(lon_dim, lat_dim) if by_columns else (lat_dim, lon_dim), shape=shape, coords=coords)
