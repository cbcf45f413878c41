"""``SampleSource``: a sample's origin, for errors and for writing back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SampleSource:
    """The step or file that a sample comes from.

    Attributes
    ----------
    path : str
        The file or Zarr store; of a partitioned store, the group of the sample in it.
    index : int
        The row along the sample dimension in that file; 0 if it has none.
    time : object or None
        The label of that row: ``numpy.datetime64``, an object of cftime, a number or a text; where nothing labels it,
        that of the row along another sample dimension, or None. Of a window of observations, its beginning.
    rows : tuple[int, int] or None
        Of a window, the first row and the one after the last; else None.
    trajectory : Mapping[str, int]
        Rows along the other sample dimensions in the file, such as ``{"member": 2}``.
    inputs : tuple[str, ...]
        Of a partitioned store, the files that the sample was made of, as long as they lie where they did as seen from
        the store; first that of the topology.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> sample = scidata.open_dataset("era5.zarr", steps=(0, 1))[2]
    >>> print(*sample.source, sep="; ")
    era5.zarr[2] 2020-01-01T12:00:00; era5.zarr[3] 2020-01-01T18:00:00
    """

    path: str
    index: int
    time: object | None = None
    rows: tuple[int, int] | None = None
    trajectory: Mapping[str, int] = field(default_factory=dict, hash=False)
    inputs: tuple[str, ...] = ()

    def __str__(self) -> str:
        at = ", ".join([*(f"{dim}={row}" for dim, row in self.trajectory.items()), str(self.index)])
        time = "" if self.time is None else f" {str(self.time).removesuffix('.000000000')}"
        return f"{self.path}[{at}]{time}" + ("" if self.rows is None else f" rows {self.rows[0]}:{self.rows[1]}")
