"""``Patches``: how samples are cut from each global sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy.typing as npt

from scidata.core.checks import check_int, check_mapping
from scidata.errors import ConfigError, near_matches

#: Number of rows for all dims of a patch, or by dim.
ByDim: TypeAlias = int | Mapping[str, int]

_ORDERS = ("random", "regular")
_CHUNK = "chunk"


@dataclass(frozen=True, eq=False)
class Patches:
    """Patches of a grid: the ``patch`` of :func:`scidata.open_dataset` with more options than a size.

    Parameters
    ----------
    size : Mapping[str, int]
        Rows of a patch along some dims; along all others it has the whole sample. That of the sample dim is a number of
        steps that follow each other.
    order : {"random", "regular"}, default "random"
        ``"random"``: places are drawn anew in each epoch, a function of seed, epoch and number of the sample alone.
        ``"regular"``: tiles that cover the sample, the last one of each dim moved inwards; of periodic dims it wraps.
    num : int, default 1
        Patches of each sample and epoch, where places are drawn; samples ``num * i`` and on are of global sample ``i``.
    overlap : int or Mapping[str, int], default 0
        Rows that a tile shares with the next.
    align : int or str or a mapping by dim, default 1
        Patches begin at multiples of it; ``"chunk"``: at edges of the source's chunks, so that none is read for a few
        rows.
    weights : array_like or str or None, optional
        How often patches are drawn, in proportion to the mean of the weights in them: an array of the selected rows of
        the patch's dims, in the order of ``size``, or the name of a field, of which the mean along other dims counts.
        NaN counts as 0.
    seed : int, default 0
        Of the places.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> tiles = scidata.Patches({"latitude": 4, "longitude": 4}, order="regular", overlap={"latitude": 1})
    >>> ds = scidata.open_dataset("era5.zarr", fields=["u"], patch=tiles)
    >>> len(ds), tuple(ds[0]["u"].shape)  # 4 times of 2 x 2 tiles
    (16, (3, 4, 4))
    """

    size: Mapping[str, int]
    order: str = "random"
    num: int = 1
    overlap: ByDim = 0
    align: ByDim | str | Mapping[str, int | str] = 1
    weights: npt.ArrayLike | str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_mapping("patch", self.size, "{'lat': 128, 'lon': 128}")
        if not self.size:
            raise ConfigError("patch names no dimension; give the rows of a patch, {'lat': 128, 'lon': 128}")
        if self.order not in _ORDERS:
            near = near_matches(self.order, _ORDERS)
            raise ConfigError(f"patch: order must be 'random' or 'regular', not {self.order!r}{near}")
        check_int("patch: num", self.num, least=1)
        check_int("patch: seed", self.seed, least=0)
        for dim, rows in self.size.items():
            check_int(f"patch of {dim!r}", rows, least=1)
        for dim, rows in self.overlaps.items():
            if rows >= self.size[dim]:
                raise ConfigError(f"patch: overlap of {dim!r} is {rows}, and a patch has {self.size[dim]} rows")
        _ = self.units
        given = {"num": self.num != 1, "weights": self.weights is not None, "seed": self.seed != 0}
        given = given if self.is_regular else {"overlap": any(self.overlaps.values())}
        if idle := [name for name, is_given in given.items() if is_given]:
            raise ConfigError(f"patch: {idle[0]} means nothing with order={self.order!r}; leave it out")

    @classmethod
    def of(cls, patch: Patches | Mapping[str, int]) -> Patches:
        """Return Patches unchanged, or build them from a size."""
        return patch if isinstance(patch, Patches) else cls(patch)

    @property
    def is_regular(self) -> bool:
        """Whether patches are regular tiles."""
        return self.order == "regular"

    def renamed(self, names: Mapping[str, str]) -> Patches:
        """Return a copy with renamed dims; values given as one number become values by dim."""

        def of(name: str, default: int) -> dict[str, Any]:
            return {names[dim]: value for dim, value in self._by_dim(name, default)}

        size = {names[dim]: rows for dim, rows in self.size.items()}
        return replace(self, size=size, overlap=of("overlap", 0), align=of("align", 1))

    @property
    def overlaps(self) -> dict[str, int]:
        """Rows shared with the next tile, by dim."""
        return {dim: check_int(f"patch: overlap of {dim!r}", n, least=0) for dim, n in self._by_dim("overlap", 0)}

    @property
    def units(self) -> dict[str, int]:
        """Alignment of the first rows of patches, by dim; 0 means chunk edges."""
        given = self._by_dim("align", 1)
        return {d: 0 if n == _CHUNK else check_int(f"patch: align of {d!r}, or 'chunk'", n, least=1) for d, n in given}

    def _by_dim(self, name: str, default: int) -> list[tuple[str, object]]:
        given = getattr(self, name)
        if not isinstance(given, Mapping):
            return [(dim, given) for dim in self.size]
        if stray := [dim for dim in given if dim not in self.size]:
            raise ConfigError(f"patch: {name} names {stray[0]!r}, along which patches have all rows")
        return [(dim, given.get(dim, default)) for dim in self.size]
