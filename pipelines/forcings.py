"""What follows from time and place alone: insolation at the top of the atmosphere, time of day and of year.

    python -m pipelines.era5_grid make era5.zarr

    from pipelines.era5_grid import open_era5
    ds = open_era5("era5.zarr", mesh, derived=["insolation", "cos_time_of_day"])
    sample = ds[0]
    sample["insolation"]   # (T, H, W), in solar constants, of this rank's rows alone

No rank computes another's rows, and nothing is exchanged. Sines and cosines are taken along each coordinate, and
points are products of those, so that the parts of any cut, put together, are the whole, bit for bit.

The sun's position is by the low-precision formulas of the Astronomical Almanac, as written down by Michalsky, "The
Astronomical Almanac's algorithm for approximate solar position (1950-2050)", Solar Energy 40 (1988): 0.01 degrees in
those years. The solar constant is that of Kopp and Lean, Geophysical Research Letters 38 (2011).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import scidata

__all__ = ["NAMES", "SOLAR_CONSTANT", "add_forcings", "clock_of", "cos_zenith", "forcing", "insolation", "sun_of"]

SOLAR_CONSTANT = 1360.8  # W m-2
#: What :func:`forcing` makes.
NAMES = ("insolation", "sin_time_of_day", "cos_time_of_day", "sin_time_of_year", "cos_time_of_year")
_NODES_PER_HOUR = 12  # of a mean over hours: within 0.3 W m-2 of one a second (tests/examples/test_forcings.py)

Float = npt.NDArray[np.float64]


# -- time --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Times as the sun has them; arrays ``()`` or ``(T,)``, as the times are."""

    days: Float  # since noon of 2000-01-01
    day: Float  # part of the day since midnight in Greenwich, in [0, 1)
    year: Float  # part of its year, in [0, 1)

    def later(self, hours: float) -> Clock:
        """Return the clock some hours later, or earlier, of the same year."""
        return Clock(days=self.days + hours / 24, day=self.day + hours / 24, year=self.year)


def clock_of(times: Any) -> Clock:
    """Read times, in UTC: ``datetime64``, or objects of cftime, ``()`` or ``(T,)``.

    In calendars that are not the sky's (``noleap``, ``360_day``, ``all_leap``) each year, however long, is the orbit
    of 2000.

    Raises
    ------
    TypeError
        They are neither.
    """
    times = np.asarray(times)
    if times.dtype.kind == "M":
        exact = times.astype("M8[ns]")
        days = (exact - np.datetime64("2000-01-01T12", "ns")) / np.timedelta64(1, "D")
        day = (exact - times.astype("M8[D]")) / np.timedelta64(1, "D")
        begin = times.astype("M8[Y]")
        length = (begin + 1).astype("M8[D]") - begin.astype("M8[D]")
        return Clock(days=days, day=day, year=(exact - begin.astype("M8[ns]")) / length)
    found = [_read(time) for time in times.flat]
    days, day, year = (np.array(part, dtype=np.float64).reshape(times.shape) for part in zip(*found, strict=True))
    return Clock(days=days, day=day, year=year)


def _read(time: Any) -> tuple[float, float, float]:
    """Return days, part of the day and of the year, of an object of cftime."""
    if not hasattr(time, "calendar"):
        raise TypeError(f"{time!r} is no time: give datetime64, or objects of cftime")
    day = (time.hour * 3600 + time.minute * 60 + time.second + time.microsecond / 1e6) / 86400
    last = time.replace(month=12, day=30)  # every calendar has it
    year = (time.dayofyr - 1 + day) / (last.dayofyr + (time.calendar != "360_day"))
    if time.calendar in ("noleap", "365_day", "all_leap", "366_day", "360_day"):
        return year * 365.2422 - 0.5, day, year
    return time.toordinal(fractional=True) - 2451545.0, day, year


# -- the sun -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sun:
    """Where the sun stands; arrays ``()`` or ``(T,)``, as the times are."""

    declination: Float  # rad
    hour_angle: Float  # rad, in Greenwich; 0 where it is highest, and growing with time
    irradiance: Float  # W m-2, on a plane that faces it


def sun_of(clock: Clock) -> Sun:
    """Compute where the sun stands; see this module's docstring for the source."""
    n = clock.days
    mean_longitude = np.radians((280.460 + 0.9856474 * n) % 360)
    anomaly = np.radians((357.528 + 0.9856003 * n) % 360)
    longitude = mean_longitude + np.radians(1.915 * np.sin(anomaly) + 0.020 * np.sin(2 * anomaly))
    obliquity = np.radians(23.439 - 4e-7 * n)
    ascension = np.arctan2(np.cos(obliquity) * np.sin(longitude), np.cos(longitude))
    equation_of_time = (mean_longitude - ascension + np.pi) % (2 * np.pi) - np.pi
    distance = 1.00014 - 0.01671 * np.cos(anomaly) - 0.00014 * np.cos(2 * anomaly)
    return Sun(
        declination=np.arcsin(np.sin(obliquity) * np.sin(longitude)),
        hour_angle=2 * np.pi * clock.day - np.pi + equation_of_time,
        irradiance=SOLAR_CONSTANT / distance**2,
    )


def cos_zenith(lat: Tensor, lon: Tensor, sun: Sun) -> Tensor:
    """Compute the cosine of the angle between sun and zenith; it is negative at night.

    Parameters
    ----------
    lat, lon
        Degrees, float64, that broadcast: ``(H, 1)`` and ``(W,)`` of a grid, ``(N,)`` both of points. Plain, or
        ShardTensors.
    sun
        At one time, or several.

    Returns
    -------
    Float64, laid out as ``lat`` and ``lon`` are: ``(H, W)`` or ``(N,)``, after ``(T,)`` for several times.
    """
    lat, lon = lat * (np.pi / 180), lon * (np.pi / 180)
    sin_lat, cos_lat = lat.sin(), lat.cos()

    def at(declination: float, angle: float) -> Tensor:
        return np.sin(declination) * sin_lat + (np.cos(declination) * cos_lat) * (lon + angle).cos()

    return _over_times(at, sun.declination, sun.hour_angle)


def insolation(lat: Tensor, lon: Tensor, times: Any, *, hours: float = 0.0) -> Tensor:
    """Compute the sun's irradiance on a level plane at the top of the atmosphere, W m-2.

    Parameters
    ----------
    lat, lon
        As for :func:`cos_zenith`.
    times
        As for :func:`clock_of`.
    hours
        The mean over so many hours before each time: of ERA5's ``tisr``, in J m-2 over the last hour, it is a 3600th
        with 1. With 0 at the time itself.

    Returns
    -------
    As :func:`cos_zenith` does.
    """
    clock = clock_of(times)
    count = max(1, round(_NODES_PER_HOUR * hours))
    total = None
    for node in range(count):  # in the middle of each part of the hours
        sun = sun_of(clock.later(hours * ((node + 0.5) / count - 1)))
        strength = torch.as_tensor(sun.irradiance / count, device=lat.device)
        found = cos_zenith(lat, lon, sun).clamp(min=0) * strength.reshape(*strength.shape, *[1] * _ndim(lat, lon))
        total = found if total is None else total + found
    assert total is not None
    return total


# -- forcings ----------------------------------------------------------------------------------------------------


def forcing(name: str, lat: Tensor, lon: Tensor, times: Any, *, hours: float = 0.0) -> Tensor:
    """Compute what a model is given, about as large as 1.

    ``insolation`` is in solar constants; ``sin_`` and ``cos_time_of_day`` follow the mean sun over each longitude from
    its midnight, those ``_of_year`` the calendar's year. Parameters and result are those of :func:`insolation`.

    Raises
    ------
    ValueError
        No such name.
    """
    if name not in NAMES:
        raise ValueError(f"{name!r} is none of {', '.join(NAMES)}")
    if name == "insolation":
        return insolation(lat, lon, times, hours=hours) / SOLAR_CONSTANT
    clock = clock_of(times)
    wave = torch.sin if name.startswith("sin") else torch.cos
    if name.endswith("day"):
        here = lon * (np.pi / 180)
        return _over_times(lambda part: wave(here + 2 * np.pi * part) + torch.zeros_like(lat), clock.day)
    everywhere = torch.zeros_like(lat) + torch.zeros_like(lon)
    number = np.sin if wave is torch.sin else np.cos
    return _over_times(lambda part: everywhere + number(2 * np.pi * part), clock.year)


def add_forcings(
    sample: scidata.Sample[Any], names: Sequence[str] = NAMES, *, hours: float = 0.0
) -> scidata.Sample[Any]:
    """Add fields of those names to a sample of a grid: a ``transform`` for ``open_dataset(..., coords=True)``.

    Parameters
    ----------
    sample
        Its fields' last two dims are latitude and longitude, which have coordinates, as its times have.
    names, hours
        See :func:`forcing`.

    Returns
    -------
    A sample with fields ``(H, W)``, or ``(T, H, W)`` with several steps, of the first field's dtype, laid out as it is.

    Raises
    ------
    ValueError
        The sample has no times.
    """
    first = next(iter(sample))
    coords = sample.coords
    times = [value for value in coords.values() if not isinstance(value, Tensor) and value.dtype.kind in "MO"]
    if not times:
        raise ValueError(f"no coordinate of the sample is a time; there are {', '.join(coords)}")
    lat, lon = (coords[dim] for dim in sample.dims[first][-2:])
    assert isinstance(lat, Tensor)
    assert isinstance(lon, Tensor)
    lat, lon, dtype = lat.double().unsqueeze(1), lon.double(), sample[first].dtype
    return sample.replace({name: forcing(name, lat, lon, times[0], hours=hours).to(dtype) for name in names})


def _ndim(lat: Tensor, lon: Tensor) -> int:
    return max(lat.ndim, lon.ndim)


def _over_times(function: Callable[..., Tensor], *numbers: Float) -> Tensor:
    """Return what a function makes of the numbers of each time, one after another."""
    made = [function(*map(float, each)) for each in zip(*map(np.ravel, numbers), strict=True)]
    return torch.stack(made) if numbers[0].ndim else made[0]
