"""``PatchDataset``: patches of the samples of a grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self

import numpy as np
import torch

from scidata.core.bounds import halo_widths
from scidata.core.cache import Cache
from scidata.core.checks import check_int, sample_number
from scidata.core.types import Array, BufferSpec, Empty
from scidata.data.channels import TensorT
from scidata.data.grid_dataset import ShardedDataset
from scidata.data.local_fields import LocalFields
from scidata.data.sample import Coordinate, Sample
from scidata.data.statistics_table import Statistics
from scidata.errors import ConfigError
from scidata.grids.patch_reader import PatchReader
from scidata.grids.patches import Origin
from scidata.plan.totals import ReadPlan
from scidata.read.context import ReadStats

#: Where a patch begins: read with its fields, so that whoever wraps them knows, in whichever process and epoch.
_PLACE = "#patch"
_MAX_VIEWS = 256


class PatchDataset(ShardedDataset[TensorT]):
    """Patches of the samples of a grid, of which this rank reads its part. Made by :func:`open_dataset`.

    All patches have the same sizes. Their halo is clipped at the edges of the grid, and in a batch as in that of its
    patches which has least.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> ds = scidata.open_dataset("era5.zarr", fields=["u"], patch={"latitude": 4, "longitude": 5})
    >>> len(ds), tuple(ds[0]["u"].shape), ds.origin(0)
    (4, (3, 4, 5), {'latitude': 3, 'longitude': 2})
    """

    reader: PatchReader
    _cached = ("_static", "_views")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._epoch = torch.zeros((), dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]  # with processes that live through several epochs
        self._beyond: Mapping[str, tuple[int, int]] = {}

    # -- places --------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that determines the drawn places."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Draw new places: call it before each epoch, with the same number on every rank.

        ``DataLoader.set_epoch`` does. An iterator of a loader stays in the epoch in which it began.

        Parameters
        ----------
        epoch : int
            From 0.

        Raises
        ------
        ConfigError
            A negative epoch, or not an integer.

        Examples
        --------
        >>> ds.set_epoch(1)
        """
        self._epoch.fill_(check_int("epoch", epoch, least=0))

    def origin(self, index: int, *, epoch: int | None = None) -> dict[str, int]:
        """Return the first row of a patch along each of its dims, counted in the rows left by crop and stride.

        Parameters
        ----------
        index : int
            The patch.
        epoch : int or None, optional
            Default the one that was set.

        Examples
        --------
        >>> ds.origin(0, epoch=0)
        {'latitude': 3, 'longitude': 2}
        """
        return dict(zip(self.reader.patches.dims, self._origin(index, epoch), strict=True))

    def _origin(self, index: int, epoch: int | None = None) -> Origin:
        return self.reader.patches.origin(sample_number(index, len(self)), self.epoch if epoch is None else epoch)

    def _plan(self, index: int, rank: int) -> ReadPlan:
        return self.reader.plan(index, rank, epoch=self.epoch)

    def _draw(
        self, index: int, field: str | None, isel: Mapping[str, int] | None, parts: bool, path: str | None
    ) -> Any:
        return super()._draw(self.reader.patches.base(index), field, isel, False, path)

    @property
    def _own_dims(self) -> set[str | None]:
        return {self.reader.sample_dim, *self.reader.patches.dims}

    def labels_of(self, name: str, dim: str) -> Sequence[object] | None:
        """Return the labels of a field's rows along a dim that patches do not cut."""
        return None if dim in self.reader.patches.dims else super().labels_of(name, dim)

    # -- reading -------------------------------------------------------------------------------------------------

    def buffer_specs(self) -> dict[str, BufferSpec]:
        """Return shape and dtype of this rank's part of any patch, with its whole halo; ``"#patch"`` is its place."""
        return super().buffer_specs() | {
            _PLACE: BufferSpec(shape=(len(self.reader.patches.dims),), dtype=np.dtype(np.int64))
        }

    def read_into(self, index: int, out: Mapping[str, Array], *, epoch: int | None = None) -> ReadStats:
        """Read this rank's part of a patch of an epoch, default the present one, into buffers. Thread-safe."""
        epoch = self.epoch if epoch is None else epoch
        if _PLACE in out:
            out[_PLACE][...] = self._origin(index, epoch)
        return super().read_into(index, {name: x for name, x in out.items() if name != _PLACE}, epoch=epoch)

    def read_local(self, index: int, *, epoch: int | None = None) -> dict[str, torch.Tensor]:
        """Read this rank's part of a patch of an epoch: tensors with its whole halo, and ``"#patch"``, its place."""
        made = {name: np.empty(spec.shape, spec.dtype) for name, spec in self.buffer_specs().items()}
        self.read_into(index, made, epoch=epoch)
        return {name: torch.from_numpy(values) for name, values in made.items()}

    def epoch_reader(
        self, epoch: int | None = None, *, empty: Empty = np.empty
    ) -> Callable[[int], dict[str, torch.Tensor]]:
        """Return :meth:`read_local` bound to an epoch, default the present one, for reading ahead."""
        return partial(self.read_local, epoch=self.epoch if epoch is None else epoch)

    # -- wrapping ------------------------------------------------------------------------------------------------

    def assemble(
        self, local: Mapping[str, torch.Tensor], *, index: int | list[int] | None = None, batched: bool | None = None
    ) -> Sample[TensorT]:
        """Wrap local parts, the results of :meth:`read_local`, as a patch of ShardTensors, or a batch of patches.

        As :meth:`ShardedDataset.assemble`. Without ``"#patch"``, places are those of ``index`` in the present epoch.
        """
        if isinstance(local, Sample):
            return local
        self._check_attached()
        if isinstance(local, LocalFields):
            index = local.index if index is None else index
            self._note(*(index if isinstance(index, list) else [index]))
            local = local.fields()
        placed = self._placed(local.get(_PLACE), index)
        view = self._view([each.origin for each in placed] if self._reaches else ())
        fields = {name: view._clipped(name, tensor) for name, tensor in local.items() if name != _PLACE}
        sample = ShardedDataset.assemble(view, fields, index=index, batched=batched)
        pairs = zip(placed, sample.members, strict=True) if sample.members else ()
        sample.members = [(each, number, step) for each, (_, number, step) in pairs]
        return sample

    def _placed(self, place: torch.Tensor | None, index: int | list[int] | None) -> list[PlacedOrigin]:
        if place is None:
            if index is None:
                raise ConfigError("assemble: which patch is it? pass index=, or the '#patch' that was read with it")
            place = torch.tensor([self._origin(i) for i in (index if isinstance(index, list) else [index])])
        num = len(index) if isinstance(index, list) else 1 if place.ndim < 2 else len(place)
        place = place.reshape(num, -1)
        if place.device.type != "cpu":  # an asynchronous copy: wait only if it is used
            return [PlacedOrigin(self, row) for row in place.clone()]
        return [PlacedOrigin(self, torch.tensor(row)) for row in place.tolist()]

    @cached_property
    def _reaches(self) -> bool:
        return any(dim in self.reader.cut.halo for dim in self.reader.patches.dims)

    def _view(self, origins: Sequence[Origin]) -> Self:
        """Return this data set for patches whose halo is clipped at the same edges of the grid."""
        cuts = [self.reader.cut.at(origin) for origin in origins] if self._reaches else [self.reader.cut]
        every = {dim: [cut.beyond(dim) for cut in cuts] for dim in self.reader.patches.dims}
        beyond = {dim: (min(a for a, _ in each), min(b for _, b in each)) for dim, each in every.items()}
        return self._views.get_or_make(tuple(beyond.items()), lambda: self._clipped_like(beyond))

    @cached_property
    def _views(self) -> Cache[Self]:
        return Cache(_MAX_VIEWS)

    def _clipped_like(self, beyond: Mapping[str, tuple[int, int]]) -> Self:
        made = object.__new__(type(self))
        _ = self._static, self._specs  # which all views share
        made.__dict__.update(self.__dict__ | {"_beyond": beyond})
        for name in ("_views", "_cuts", "_places"):
            made.__dict__.pop(name, None)
        return made

    def _rows(self, dim: str) -> tuple[int, int, int]:
        """Return, along a dim of patches, where this rank's rows begin in a buffer, their number, and those below."""
        cut, (before, after) = self.reader.cut, self._beyond[dim]
        lo, hi = cut.halo.get(dim, (0, 0))
        part = self._coordinate[cut.axis_of_dim[dim]] if dim in cut.axis_of_dim else 0
        below, above = halo_widths(cut.bounds[dim], part, lo=lo, hi=hi, periodic=False, before=before, after=after)
        most, owned, _ = cut.most_rows(dim, self._coordinate)
        return most - below, below + owned + above, below

    def _clipped(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dims = self.reader.dims(name) if name in self.fields else ()
        lead = tensor.ndim - len(dims)
        for axis, dim in enumerate(dims):
            if dim in self._beyond and lead >= 0 and tensor.shape[axis + lead] == self._specs[name].shape[axis]:
                tensor = tensor.narrow(axis + lead, *self._rows(dim)[:2])
        return tensor

    @cached_property
    def _places(self) -> Any:
        return {
            name: replace(place, expected=tuple(map(self._expected, place.dims, place.expected)))
            for name, place in super()._places.items()
        }

    def _expected(self, dim: str, rows: int) -> int:
        return self._rows(dim)[1] if dim in self._beyond else rows

    def _cut(self, dims: tuple[str, ...], lead: int) -> Any:
        placements, sizes, halo = super()._cut(dims, lead)
        for axis, widths in halo.items():
            if (dim := dims[axis - lead]) in self._beyond:
                before, after = self._beyond[dim]
                halo[axis] = replace(widths, periodic=False, before=before, after=after)
        return placements, sizes, halo

    # -- normalising ---------------------------------------------------------------------------------------------

    def normalise(
        self, stats: Statistics, *, fields: str | Sequence[str] | None = None, method: str = "mean_std"
    ) -> Self:
        """Return a data set of normalised patches; statistics by row along a dim of patches are refused."""
        made = super().normalise(stats, fields=fields, method=method)
        for name, scale in made.normalising.items():
            for dim, size in zip(scale.dims, scale.shift.shape, strict=True):
                if dim in self.reader.patches.dims and size > 1:
                    raise ConfigError(
                        f"normalise: statistics of {name!r} are by {dim!r}, along which patches lie anywhere; gather "
                        "some that are not"
                    )
        return made


@dataclass(frozen=True, eq=False)
class PlacedOrigin:
    """The data set of a patch, and the patch's place."""

    dataset: PatchDataset[Any]
    place: torch.Tensor

    @cached_property
    def origin(self) -> Origin:
        """The first row of the patch along each of its dims."""
        return tuple(self.place.tolist())

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # of one that is being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def placed_coords(
        self, device: torch.device, members: Sequence[PlacedOrigin], *, batched: bool
    ) -> dict[str, Coordinate]:
        """Return the coordinates along dims of patches, of one patch or of a batch, by dim."""
        dataset, found = self.dataset, dict[str, Coordinate]()
        reader, view = dataset.reader, dataset._view([each.origin for each in members])
        for dim in reader.patches.dims:
            rows = []
            for each in members:
                cut = reader.cut.at(each.origin)
                values = reader.labels.local(dim, cut.segments(dim, dataset._coordinate))
                if values is None:
                    break
                _, num, below = view._rows(dim)
                first = cut.halo_rows(dim, dataset._coordinate)[0]
                if dim in cut.axis_of_dim:  # with its halo
                    rows.append(values[first - below :][:num])
                else:
                    rows.append(values[first:][: cut.sizes[dim]])
            if len(rows) < len(members):
                continue
            joined = np.stack(rows) if batched else rows[0]
            if joined.dtype.kind not in "iuf":
                found[dim] = joined
                continue
            tensor = torch.from_numpy(np.array(joined, joined.dtype.newbyteorder("="))).to(device)
            shape = (*tensor.shape[:-1], reader.cut.sizes[dim])
            found[dim] = view._sharded(tensor, (dim,), shape) if dim in reader.cut.axis_of_dim else tensor
        return found
