"""Weights of a metric's rows, by dims, and the weights of a rank's box."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scidata.core.checks import check_mapping
from scidata.core.types import FloatArray
from scidata.data.metrics.layout import Layout, cut_out
from scidata.errors import ConfigError, ShardLayoutError, check_known
from scidata.shard import ShardTensor

#: Weights by dim or, where they vary along several, by dims.
WeightsByDim: TypeAlias = (  # a mapping's type of keys is invariant: dict[str, Tensor] is none of the last
    Mapping[str, npt.ArrayLike | Tensor]
    | Mapping[tuple[str, ...], npt.ArrayLike | Tensor]
    | Mapping[str | tuple[str, ...], npt.ArrayLike | Tensor]
)


class Weights:
    """Weights by dims; an element's weight is their product. All are finite, none is negative, not all are zero."""

    def __init__(self, by_dims: WeightsByDim | None) -> None:
        if by_dims is not None:
            check_mapping("weights", by_dims, "{'latitude': scidata.metrics.latitude_weights(ds)}")
        by_key = {(key,) if isinstance(key, str) else tuple(key): values for key, values in (by_dims or {}).items()}
        self._weights = {dims: _checked(dims, values) for dims, values in by_key.items()}

    @property
    def described(self) -> list[str]:
        """Return the dims and a digest of each one's weights, so that ranks can compare them."""
        return [f"{', '.join(dims)}: {_digest(values)}" for dims, values in self._weights.items()]

    def __bool__(self) -> bool:
        return bool(self._weights)

    def check_names(self, known: Collection[str]) -> None:
        """Raise if a weighted dim is in no field."""
        check_known("weights: no field has a dim", itertools.chain(*self._weights), known)

    def local(self, layout: Layout, device: torch.device) -> Tensor | None:
        """Return the product of the weights over a box, float64, with extent 1 along dims without weights.

        None without weights. Weights along dims that the box does not have are left out: those of levels, for a field
        at the surface. Raises ConfigError, ShardLayoutError: weights of another length, or that lie differently.
        """
        product: Tensor | None = None
        for dims, values in self._weights.items():
            if not set(dims) <= set(layout.dims):
                continue
            own = _own_part(dims, values, layout).to(device=device, dtype=torch.float64)
            order = [d for d in layout.dims if d in dims]
            own = own.permute([dims.index(d) for d in order])
            own = own.reshape([own.shape[order.index(d)] if d in order else 1 for d in layout.dims])
            product = own if product is None else product * own
        return product


def _own_part(dims: tuple[str, ...], values: Tensor, layout: Layout) -> Tensor:
    places = [layout.dims.index(dim) for dim in dims]
    shape, box = tuple(layout.global_shape[d] for d in places), layout.box(places)
    if tuple(values.shape) != shape:
        shown = ", ".join(f"{d}: {n}" for d, n in zip(dims, shape, strict=True))
        raise ConfigError(
            f"weights along {', '.join(dims)} have shape {tuple(values.shape)}, and the fields have {shown}; weights "
            "are those of all ranks' rows"
        )
    if isinstance(values, ShardTensor):
        spec, values = values.spec, values.to_local().detach()
        if any(axis.size > 1 for axis, dim in zip(spec.axes, spec.dims, strict=True) if dim is not None):
            found = list(zip(spec.offsets, spec.local_shape, strict=True))
            if found != box:
                raise ShardLayoutError(
                    f"weights along {', '.join(dims)} are split differently from the fields: rows {found} and {box} "
                    "(start, number) here; call redistribute() on them, or full_tensor()"
                )
            return values
    return cut_out(values, box)


def _checked(dims: tuple[str, ...], values: npt.ArrayLike | Tensor) -> Tensor:
    if not isinstance(values, Tensor):
        values = torch.from_numpy(np.array(values, np.float64))
    if values.ndim != len(dims):
        raise ConfigError(f"weights along {', '.join(dims)} have {values.ndim} dims, and need {len(dims)}")
    if isinstance(values, ShardTensor):  # parts are checked with the samples, so that all ranks raise alike
        return values
    if fault := weights_fault(values):
        raise ConfigError(f"weights along {', '.join(dims)}: {fault}")
    if values.numel() and not values.any():
        raise ConfigError(f"weights along {', '.join(dims)} are all zero")
    return values.detach()


def weights_fault(values: Tensor) -> str | None:
    """Return the fault of weights; None if they are valid."""
    ok = torch.isfinite(values) & (values >= 0)
    return (
        None if bool(ok.all()) else f"{int((~ok).sum())} are negative or not finite; leave rows out with a weight of 0"
    )


def _digest(values: Tensor) -> str:
    if isinstance(values, ShardTensor):
        return "of parts"
    array = np.ascontiguousarray(values.cpu().to(torch.float64).numpy())
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def latitude_weights(latitude: object, *, method: str = "area", dim: str = "latitude") -> Tensor:
    """Return the weight of each latitude of a regular grid, with mean 1.

    Parameters
    ----------
    latitude : object
        Degrees, ``(num_latitudes,)``, rising or falling, all ranks' rows. Or a data set of a grid, whose coordinate it
        is.
    method : str, default "area"
        ``"area"``: the share of the sphere between the middles of neighbouring latitudes, as WeatherBench 2 has it
        (Rasp et al., 2024). The outermost cells reach to the poles where the grid does: where not even one more row
        would fit between; else, in a crop, half a spacing further. ``"cos"``: the cosine of the latitude.
    dim : str, default "latitude"
        The coordinate's name, for data sets.

    Returns
    -------
    torch.Tensor
        ``(num_latitudes,)``, float64, on the CPU.

    Raises
    ------
    ConfigError
        Not degrees in order, an unknown method, a data set without this coordinate.

    Examples
    --------
    >>> scidata.metrics.latitude_weights([90, 45, 0, -45, -90])
    tensor([0.1903, 1.3530, 1.9134, 1.3530, 0.1903], dtype=torch.float64)
    >>> scidata.metrics.latitude_weights([40, 30, 20], method="cos")
    tensor([0.8936, 1.0102, 1.0962], dtype=torch.float64)
    """
    if method not in ("area", "cos"):
        raise ConfigError(f"method={method!r}: expected 'area' or 'cos'")
    degrees = _coordinate(latitude, dim)
    steps = np.diff(degrees)
    if not (np.abs(degrees) <= 90).all() or not ((steps > 0).all() or (steps < 0).all()):
        raise ConfigError(f"latitudes must be degrees from -90 to 90, rising or falling, not {degrees[:4]}…")
    if method == "cos":
        weights = np.maximum(np.cos(np.deg2rad(degrees)), 0.0)
    else:
        rising = degrees if len(degrees) == 1 or steps[0] > 0 else degrees[::-1]
        edges = np.sin(np.deg2rad(_edges(rising)))
        weights = np.diff(edges)
        weights = weights if rising is degrees else weights[::-1]
    return torch.from_numpy(np.ascontiguousarray(weights / weights.mean()))


def _edges(rising: FloatArray) -> FloatArray:
    """Return the edges of the cells around latitudes, ``(num + 1,)``."""
    if len(rising) == 1:
        return np.array([-90.0, 90.0])
    middles = (rising[1:] + rising[:-1]) / 2
    south, north = rising[1] - rising[0], rising[-1] - rising[-2]
    first = -90.0 if rising[0] - south <= -90 else rising[0] - south / 2
    last = 90.0 if rising[-1] + north >= 90 else rising[-1] + north / 2
    return np.concatenate([[first], middles, [last]])


def level_weights(pressure: object, *, method: str = "pressure", dim: str = "level") -> Tensor:
    """Return the weight of each pressure level, with mean 1.

    Parameters
    ----------
    pressure : object
        ``(num_levels,)``, in any unit, all positive. Or a data set of a grid, whose coordinate it is.
    method : str, default "pressure"
        ``"pressure"``: in proportion to the pressure, as GraphCast's loss (Lam et al., 2023). ``"thickness"``: to the
        pressure between the middles of neighbouring levels, hence to the mass of air; the outermost ones reach as far
        out as in.
    dim : str, default "level"
        The coordinate's name, for data sets.

    Returns
    -------
    torch.Tensor
        ``(num_levels,)``, float64, on the CPU.

    Raises
    ------
    ConfigError
        Not pressures in order, an unknown method, a data set without this coordinate.

    Examples
    --------
    >>> scidata.metrics.level_weights([1000, 850, 500, 50])
    tensor([1.6667, 1.4167, 0.8333, 0.0833], dtype=torch.float64)
    """
    if method not in ("pressure", "thickness"):
        raise ConfigError(f"method={method!r}: expected 'pressure' or 'thickness'")
    values = _coordinate(pressure, dim)
    if not (np.isfinite(values) & (values > 0)).all():
        raise ConfigError(f"pressures must be positive, not {values[:4]}…")
    weights = values
    if method == "thickness":
        steps = np.diff(values)
        if len(values) < 2 or not ((steps > 0).all() or (steps < 0).all()):
            raise ConfigError(f"thickness: two or more pressures in order are needed, not {values[:4]}…")
        between = np.abs(steps)
        weights = (np.concatenate([between[:1], between]) + np.concatenate([between, between[-1:]])) / 2
    return torch.from_numpy(weights / weights.mean())


def _coordinate(values: object, dim: str) -> FloatArray:
    ask = getattr(values, "coordinate", None)
    if callable(ask):
        found = ask(dim)
        if found is None:
            raise ConfigError(f"the data set has no coordinate {dim!r}; say its name with dim=, or give the values")
        values = found
    array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values, np.float64)
    if array.ndim != 1 or len(array) == 0:
        raise ConfigError(f"expected one value for each row of {dim!r}, not shape {array.shape}")
    return array
