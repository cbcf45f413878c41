"""Observations beside an analysis: raw tables → windows of rows, joined with a grid by time.

    python -m pipelines.observations make weather                             # small made-up data, a folder
    python -m pipelines.observations make theirs --layout weathergenerator    # the same in another layout
    python -m pipelines.observations convert theirs/stations.zarr obs.zarr    # WeatherGenerator's, anemoi's → columns

    ds = open_observations("weather", mesh, patch=4)    # an analysis, and what was observed in the 12 hours before it
    ds[0]["analysis"]["t2m"]                            # (H, W)
    ds[0]["stations"]["t2m"]                            # (N,), as many as there are, of this rank's latitudes

Made-up data are three instruments that see one weather, which is known everywhere: two satellites that scan a swath
along their orbits (with gaps), stations that report each hour (some do not, and lack some values), and radiosondes at
0 and 12 UTC that drift while they rise. A table is sorted by ``dates``; ``qc`` is 0 for a good row, 1 for a doubtful
one, 2 for a wrong one. Layouts of tables:

- ``columns``: each column an array ``(row,)``; ``dates`` in seconds since 1970, as CF says.
- ``weathergenerator``: ``data`` ``(row, column)``, whose attribute ``colnames`` names its columns, what was measured as
  ``obsvalue_…``; ``dates`` ``(row, 1)``; ``idx_197001010000_1``, the number of rows until each hour since 1970.
- ``anemoi``: ``data`` ``(row, column)``, whose first columns are day, second of the day, latitude and longitude;
  ``date_index_ranges`` ``(time, 3)``: each time that occurs, its first row, how many rows it has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zarr
from torch.distributed.device_mesh import DeviceMesh

import scidata
from pipelines.telling import telling

__all__ = [
    "INSTRUMENTS",
    "LAYOUTS",
    "Weather",
    "convert",
    "make",
    "open_analysis",
    "open_observations",
    "value_columns",
    "write_table",
]

INSTRUMENTS = ("satellite", "stations", "radiosondes")
LAYOUTS = ("columns", "weathergenerator", "anemoi")
GIVEN = ("lat", "lon", "qc", "scan_angle", "height", "pressure")  # what is known of a row, and not measured
HOURLY = "idx_197001010000_1"

Float = npt.NDArray[np.float64]
Table = dict[str, npt.NDArray[Any]]


# -- reading -------------------------------------------------------------------------------------------------------


def open_analysis(
    folder: str,
    mesh: DeviceMesh | None,
    *,
    patch: int = 1,
    fields: Sequence[str] | None = None,
    dtype: torch.dtype | None = torch.float32,
    **options: Any,
) -> scidata.ShardedDataset:
    """Open ``analysis.zarr``: this rank's latitudes of each field, cut between patches.

    Rows and columns that do not fill a patch are left out, at the end of both dimensions.

    Parameters
    ----------
    folder
        As :func:`make` writes it.
    mesh, fields, dtype, options
        As in :func:`scidata.open_dataset`.
    patch
        Patch size of the model, in rows and columns.
    """
    path = str(Path(folder) / "analysis.zarr")
    probe = scidata.open_dataset(path)  # metadata only
    rows, columns = (len(probe.coordinate(dim)) for dim in ("lat", "lon"))
    crop = {"lat": slice(0, rows - rows % patch), "lon": slice(0, columns - columns % patch)}
    shard = {} if mesh is None else {"shard": {"lat": "domain"}}
    return scidata.open_dataset(
        path, mesh, fields=fields, isel=crop, align=patch, dtype=dtype, coords=True, **(shard | options)
    )


def open_observations(
    folder: str,
    mesh: DeviceMesh | None,
    *,
    hours: int = 12,
    patch: int = 1,
    instruments: Sequence[str] = INSTRUMENTS,
    fields: Sequence[str] | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> scidata.JoinedDataset:
    """Open analyses, each with what was observed in the hours before it, wrong rows left out.

    Each rank has the rows that lie in its own latitudes of the grid.

    Parameters
    ----------
    folder
        As :func:`make` writes it, in columns or in WeatherGenerator's layout.
    mesh, dtype
        As in :func:`scidata.open_dataset`.
    hours
        How long before an analysis observations are taken: those in ``[t - hours, t)``.
    patch, fields
        Of the grid; see :func:`open_analysis`.
    instruments
        Names of tables, which parts of samples have, beside ``"analysis"``.
    """
    analysis = open_analysis(folder, mesh, patch=patch, fields=fields, dtype=dtype)
    tables = {
        name: scidata.open_dataset(
            str(Path(folder) / f"{name}.zarr"),
            mesh,
            kind="points",
            positions=("lat", "lon"),
            time="dates",
            window=f"{hours}h",
            every="6h",
            where={"qc": (0, 1)},
            cut_like=analysis,
            dtype=dtype,
        )
        for name in instruments
    }
    on = {"analysis": "time"} | dict.fromkeys(tables, "dates")
    return scidata.join({"analysis": analysis, **tables}, on, at=dict.fromkeys(tables, f"-{hours}h"))


def value_columns(table: Any) -> list[str]:
    """Return the names of columns that are neither time nor place: what was measured, and what is known of a row."""
    return [name for name in table.fields if name not in ("pos", "lat", "lon", "dates")]


# -- the weather ---------------------------------------------------------------------------------------------------


class Weather:
    """Travelling waves: what is measured, at any time and place. Angles are in degrees, pressure is in hPa."""

    fields = ("t2m", "u10", "v10", "msl")

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.waves = {name: rng.normal(size=(4, 3)) for name in ("temperature", "u", "v", "msl")}

    def wave(self, name: str, hours: Float, lat: Float, lon: Float, depth: Float | float = 0.0) -> Float:
        """Return waves of heights near 1, which lean with ``depth``: 0 at the ground, 1 at the top."""
        cosine, total = np.cos(np.radians(lat)), np.zeros(())
        for k, (height, phase, speed) in enumerate(self.waves[name], start=1):
            angle = k * np.radians(lon) + phase - (0.05 + 0.02 * speed) * hours + 0.8 * depth
            total = total + height * np.sin(angle) * cosine**k
        return total

    def temperature(self, hours: Float, lat: Float, lon: Float, pressure: Float | float = 1000.0) -> Float:
        """Return K."""
        depth = 1 - pressure / 1000
        mean = (300 - 45 * np.sin(np.radians(lat)) ** 2) * (pressure / 1000) ** 0.19
        return mean + 6 * (1 - depth) * self.wave("temperature", hours, lat, lon, depth)

    def wind(self, name: str, hours: Float, lat: Float, lon: Float, pressure: Float | float = 1000.0) -> Float:
        """Return m/s, of ``u`` or ``v``."""
        depth = 1 - pressure / 1000
        jet = 30 * depth * np.sin(np.radians(2 * lat)) ** 2 if name == "u" else 0.0
        return jet + (5 + 8 * depth) * self.wave(name, hours, lat, lon, depth)

    def at_ground(self, name: str, hours: Float, lat: Float, lon: Float) -> Float:
        """Return one of ``fields``: K, m/s or Pa."""
        if name == "t2m":
            return self.temperature(hours, lat, lon)
        if name == "msl":
            return 101300 + 1200 * self.wave("msl", hours, lat, lon)
        return 0.7 * self.wind(name[0], hours, lat, lon)


def _observed(rng: np.random.Generator, qc: npt.NDArray[Any], truth: Float, error: float) -> Float:
    """Return what an instrument says: three times the error where it is doubtful, anything where it is wrong."""
    return truth + rng.normal(size=truth.shape) * error * np.choose(qc, (1, 3, 40))


def _qc(rng: np.random.Generator, num: int, doubtful: float, wrong: float) -> npt.NDArray[Any]:
    return rng.choice(np.arange(3, dtype="i1"), size=num, p=[1 - doubtful - wrong, doubtful, wrong])


def satellite(weather: Weather, rng: np.random.Generator, days: float, density: float) -> Table:
    """Two satellites in sun-synchronous orbits, a scan of 11 pixels every two minutes; some scans are lost.

    Brightness temperatures of two channels are temperatures of thick layers, lower to the sides of the swath.
    """
    tables = []
    across = np.linspace(-50, 50, 11)  # degrees from nadir
    for node in (0.0, 75.0):  # of the orbit, degrees east
        seconds = np.arange(0, days * 86400, 120 / density).round()
        lost = np.cumsum(rng.random(len(seconds)) < min(0.5, 0.01 / density)) % 3 == 1  # from one fault to the next
        seconds = np.repeat(seconds[~lost], len(across)) + np.tile(np.arange(len(across)), (~lost).sum())
        angle = np.tile(across, (~lost).sum())
        along = 2 * np.pi * seconds / 6060  # an orbit of 101 minutes
        side = np.radians(angle * 0.18)  # 9 degrees of arc to each side
        tilt = np.radians(98.7)
        x, y, z = np.cos(along) * np.cos(side), np.sin(along) * np.cos(side), np.sin(side)
        y, z = y * np.cos(tilt) - z * np.sin(tilt), y * np.sin(tilt) + z * np.cos(tilt)
        lat, lon = np.degrees(np.arcsin(z)), (np.degrees(np.arctan2(y, x)) + node - seconds / 240) % 360
        qc, hours = _qc(rng, len(lat), 0.1, 0.02), seconds / 3600
        columns: Table = {"dates": seconds, "lat": lat, "lon": lon, "qc": qc, "scan_angle": angle}
        for name, pressure in (("bt_low", 850.0), ("bt_high", 400.0)):
            truth = weather.temperature(hours, lat, lon, pressure) - 4 * (1 - np.cos(np.radians(angle)))
            columns[name] = _observed(rng, qc, truth, 0.4)
        tables.append(columns)
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def stations(weather: Weather, rng: np.random.Generator, days: float, density: float) -> Table:
    """Stations near each other on land, which report on the hour; a report in ten is lost, a value in twenty."""
    num = max(3, round(90 * density))
    land = np.degrees(np.arcsin(rng.uniform(-0.7, 0.95, 6))), rng.uniform(0, 360, 6)
    which = rng.integers(0, 6, num)
    lat = np.clip(land[0][which] + rng.normal(scale=9, size=num), -89.5, 89.5)
    lon = (land[1][which] + rng.normal(scale=14, size=num)) % 360
    height = rng.gamma(1.5, 200, num)
    hour, place = np.divmod(np.flatnonzero(rng.random(round(days * 24) * num) > 0.1), num)
    qc, hours = _qc(rng, len(place), 0.05, 0.02), hour.astype(np.float64)
    columns: Table = {"dates": hours * 3600, "lat": lat[place], "lon": lon[place], "qc": qc, "height": height[place]}
    for name, error in (("t2m", 0.7), ("u10", 0.9), ("v10", 0.9), ("msl", 60.0)):
        truth = weather.at_ground(name, hours, lat[place], lon[place])
        truth = truth - 0.0065 * height[place] if name == "t2m" else truth
        columns[name] = np.where(rng.random(len(place)) < 0.05, np.nan, _observed(rng, qc, truth, error))
    return columns


def radiosondes(weather: Weather, rng: np.random.Generator, days: float, density: float) -> Table:
    """Balloons let go 45 minutes before 0 and 12 UTC, which the wind carries off; a profile has 15 rows or less."""
    num, levels = max(2, round(16 * density)), np.geomspace(1000, 50, 15)
    lat0, lon0 = np.degrees(np.arcsin(rng.uniform(-0.85, 0.95, num))), rng.uniform(0, 360, num)
    launch, place = np.divmod(np.flatnonzero(rng.random(round(days * 2) * num) > 0.08), num)
    launch = launch[launch > 0], place[launch > 0]  # the first would begin before the data do
    burst = rng.uniform(40, 400, len(launch[0]))  # hPa
    rise = 7 * np.log(1000 / levels) / 0.3 / 3.6  # minutes: 7 km of scale height, 5 m/s
    seconds = (launch[0][:, None] * 43200 - 2700 + (60 * rise)[None, :]).round()
    lat, lon, pressure = (
        np.broadcast_to(x, seconds.shape) for x in (lat0[launch[1], None], lon0[launch[1], None], levels)
    )
    hours = seconds / 3600
    carried = np.cumsum(weather.wind("u", hours, lat, lon, pressure) * np.gradient(60 * rise), axis=1) / 111e3
    lon = (lon + carried / np.cos(np.radians(lat))) % 360
    up = (pressure >= burst[:, None]) & (seconds < days * 86400)
    hours, lat, lon, pressure = (x[up] for x in (hours, lat, lon, pressure))
    qc = _qc(rng, len(hours), 0.03, 0.01)
    columns: Table = {"dates": seconds[up], "lat": lat, "lon": lon, "qc": qc, "pressure": pressure}
    columns["t"] = _observed(rng, qc, weather.temperature(hours, lat, lon, pressure), 0.5)
    for name in ("u", "v"):
        columns[name] = _observed(rng, qc, weather.wind(name, hours, lat, lon, pressure), 1.0)
    return columns


# -- tables --------------------------------------------------------------------------------------------------------


def write_table(
    out: str, columns: Mapping[str, npt.NDArray[Any]], *, layout: str = "columns", chunk: int = 16384
) -> None:
    """Write a table, sorted by time.

    Parameters
    ----------
    out
        A new Zarr store.
    columns
        Arrays ``(row,)``: ``dates``, datetime64, ``lat`` and ``lon``, degrees, ``qc``, integers, and values, which may
        be NaN.
    layout
        One of ``LAYOUTS``; see above.
    chunk
        Rows of a chunk.

    Raises
    ------
    FileExistsError
        ``out`` exists.
    ValueError
        No such layout.
    """
    _refuse_existing(out)
    order = np.argsort(columns["dates"], kind="stable")
    dates = columns["dates"][order].astype("M8[s]").astype("i8")
    rest = {name: values[order] for name, values in columns.items() if name != "dates"}
    if layout == "columns":
        group = _create_columns(out, {name: values.dtype for name, values in rest.items()}, len(dates), chunk)
        for name, values in {"dates": dates, **rest}.items():
            group[name][:] = values
    elif layout == "weathergenerator":
        _write_weathergenerator(out, dates, rest, chunk)
    elif layout == "anemoi":
        _write_anemoi(out, dates, rest, chunk)
    else:
        raise ValueError(f"{layout!r} is none of {', '.join(LAYOUTS)}")


def _refuse_existing(out: str) -> None:
    if Path(out).exists():
        raise FileExistsError(f"{out} exists; remove it or choose another name")


def _create_columns(out: str, dtypes: Mapping[str, npt.DTypeLike], num_rows: int, chunk: int) -> zarr.Group:
    """Make the arrays of a table. They are not compressed, so that a rank fetches its own rows of a chunk only."""
    about: dict[str, dict[str, Any]] = {
        "dates": {"units": "seconds since 1970-01-01", "standard_name": "time"},
        "lat": {"units": "degrees_north", "standard_name": "latitude"},
        "lon": {"units": "degrees_east", "standard_name": "longitude"},
        "qc": {"flag_values": [0, 1, 2], "flag_meanings": "good doubtful wrong"},
    }
    group = zarr.open_group(out, mode="w-", zarr_format=3)
    for name, dtype in {"dates": np.dtype("i8"), **dtypes}.items():
        kept = np.float32 if np.dtype(dtype).kind == "f" else dtype
        group.create_array(
            name,
            shape=(num_rows,),
            chunks=(min(chunk, max(1, num_rows)),),
            dtype=kept,
            fill_value=np.nan if kept is np.float32 else 0,
            compressors=None,
            dimension_names=("row",),
            attributes=about.get(name, {}),
            config={"write_empty_chunks": True},
        )
    return group


def _write_weathergenerator(out: str, dates: npt.NDArray[np.int64], columns: Table, chunk: int) -> None:
    """Write places, what is known of a row, and what was measured, as columns of one array; and the hourly index."""
    names = [name if name in GIVEN else f"obsvalue_{name}" for name in columns]
    data = np.stack([*columns.values()], axis=1).astype("f4")
    group = zarr.open_group(out, mode="w-", zarr_format=2)
    about = {
        "colnames": names,
        "means": np.nanmean(data, axis=0).tolist() if len(data) else [0.0] * len(names),
        "vars": np.nanvar(data, axis=0).tolist() if len(data) else [1.0] * len(names),
        "obs_id": 0,
    }
    group.create_array("data", data=data, chunks=(chunk, len(names)), attributes=about, fill_value=np.nan)
    group.create_array("dates", data=dates.astype("M8[s]").astype("M8[ns]")[:, None], chunks=(chunk, 1))
    hours = 3600 * np.arange(0 if len(dates) == 0 else dates[-1] // 3600 + 2)
    group.create_array(HOURLY, data=np.searchsorted(dates, hours, side="right"), chunks=(1 << 16,))


def _write_anemoi(out: str, dates: npt.NDArray[np.int64], columns: Table, chunk: int) -> None:
    """Write day, second, place and all else as columns of one array; and where the rows of each time are."""
    values = {name: column for name, column in columns.items() if name not in ("lat", "lon")}
    data = np.stack([dates // 86400, dates % 86400, columns["lat"], columns["lon"] % 360, *values.values()], axis=1)
    group = zarr.open_group(out, mode="w-", zarr_format=2)
    group.attrs.update(
        {
            "layout": "tabular",
            "date_indexing": "bisect",
            "meta_variables": ["__date", "__time", "__latitude", "__longitude"],
            "variables": [*values],
        }
    )
    group.create_array("data", data=data.astype("f4"), chunks=(chunk, data.shape[1]), fill_value=np.nan)
    times, first, counts = np.unique(dates, return_index=True, return_counts=True)
    group.create_array("date_index_ranges", data=np.stack([times, first, counts], axis=1), chunks=(1 << 16, 3))


def convert(source: str, out: str, *, chunk: int = 16384, rows: int = 1 << 20) -> None:
    """Write WeatherGenerator's or anemoi's table as columns, so many ``rows`` at a time.

    ``obsvalue_`` is left out of names, and columns are float32, but for ``qc``: integers.

    Raises
    ------
    FileExistsError
        ``out`` exists.
    ValueError
        ``source`` has neither layout.
    """
    _refuse_existing(out)
    group = zarr.open_group(source, mode="r")
    if "data" in group and "colnames" in group["data"].attrs and "dates" in group:
        names = [name.removeprefix("obsvalue_") for name in group["data"].attrs["colnames"]]

        def read(begin: int, end: int) -> Table:
            found = dict(zip(names, group["data"][begin:end].T, strict=True))
            return found | {"dates": group["dates"][begin:end].reshape(-1).astype("M8[s]").astype("i8")}

    elif group.attrs.get("layout") == "tabular":
        names = ["lat", "lon", *group.attrs["variables"]]

        def read(begin: int, end: int) -> Table:
            day, second, *found = group["data"][begin:end].T
            return dict(zip(names, found, strict=True)) | {"dates": day.astype("i8") * 86400 + second.astype("i8")}

    else:
        raise ValueError(f"{source}: is neither WeatherGenerator's layout nor anemoi's tabular one")
    num_rows = group["data"].shape[0]
    made = _create_columns(out, {name: "i1" if name == "qc" else "f4" for name in names}, num_rows, chunk)
    tick = telling("rows", num_rows)
    for begin in range(0, num_rows, rows):
        end = min(begin + rows, num_rows)
        for name, values in read(begin, end).items():
            made[name][begin:end] = values
        tick(end - begin)


# -- making --------------------------------------------------------------------------------------------------------


def make(
    out: str,
    *,
    days: float = 20.0,
    shape: tuple[int, int] = (32, 64),
    density: float = 1.0,
    layout: str = "columns",
    begin: str = "2020-01-01",
    seed: int = 0,
) -> None:
    """Write a folder: ``analysis.zarr``, a grid each six hours, and a table of each instrument.

    Parameters
    ----------
    out
        A new folder.
    days
        How long it lasts, from ``begin`` on.
    shape
        Latitudes and longitudes of the grid, which has no poles.
    density
        How many observations there are, as a share of the usual 13,000 a day.
    layout
        Of the tables; see :func:`write_table`.
    seed
        Of the weather and of all errors.

    Raises
    ------
    FileExistsError
        ``out`` exists.
    """
    _refuse_existing(out)
    weather, start = Weather(seed), np.datetime64(begin, "s")
    hours = np.arange(0, days * 24, 6.0)
    lat = 90 - (np.arange(shape[0]) + 0.5) * 180 / shape[0]
    lon = np.arange(shape[1]) * 360 / shape[1]
    group = zarr.open_group(str(Path(out) / "analysis.zarr"), mode="w-", zarr_format=3)
    axes: dict[str, tuple[npt.NDArray[Any], dict[str, str]]] = {
        "time": (hours, {"units": f"hours since {begin}", "standard_name": "time"}),
        "lat": (lat.astype("f4"), {"units": "degrees_north", "standard_name": "latitude"}),
        "lon": (lon.astype("f4"), {"units": "degrees_east", "standard_name": "longitude"}),
    }
    for dim, (values, about) in axes.items():
        group.create_array(dim, data=values, dimension_names=(dim,), attributes=about, compressors=None)
    tick = telling("analysis and tables", len(weather.fields) + len(INSTRUMENTS))
    for name, units in zip(weather.fields, ("K", "m s-1", "m s-1", "Pa"), strict=True):
        values = weather.at_ground(name, hours[:, None, None], lat[:, None], lon).astype("f4")
        chunks, about = (1, min(8, shape[0]), shape[1]), {"units": units}
        group.create_array(
            name, data=values, chunks=chunks, dimension_names=(*axes,), attributes=about, compressors=None,
            config={"write_empty_chunks": True},
        )  # fmt: skip
        tick(1)
    for number, (name, observe) in enumerate(_OBSERVE.items()):
        columns = observe(weather, np.random.default_rng([seed, number]), days, density)
        columns["dates"] = start + columns["dates"].astype("m8[s]")
        write_table(str(Path(out) / f"{name}.zarr"), columns, layout=layout)
        tick(1)


_OBSERVE: dict[str, Callable[[Weather, np.random.Generator, float, float], Table]] = {
    "satellite": satellite,
    "stations": stations,
    "radiosondes": radiosondes,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="pipelines.observations", description="Make or convert observations.")
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("make", help="write a small made-up analysis, and what three instruments see of it")
    made.add_argument("out", help="a new folder")
    made.add_argument("--days", type=float, default=20.0)
    made.add_argument("--shape", type=int, nargs=2, default=(32, 64), metavar=("LAT", "LON"))
    made.add_argument("--density", type=float, default=1.0, help="a share of the usual 13,000 rows a day")
    made.add_argument("--layout", choices=LAYOUTS, default="columns", help="of the tables")
    made.add_argument("--seed", type=int, default=0)
    converted = commands.add_parser("convert", help="write WeatherGenerator's or anemoi's table as columns")
    converted.add_argument("source")
    converted.add_argument("out")
    args = parser.parse_args(argv)
    try:
        if args.command == "make":
            size = (args.shape[0], args.shape[1])
            make(args.out, days=args.days, shape=size, density=args.density, layout=args.layout, seed=args.seed)
        else:
            convert(args.source, args.out)
    except (OSError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
