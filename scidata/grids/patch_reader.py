"""Reads any rank's part of any patch of a gridded data set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from scidata.core.bounds import num_rows_of
from scidata.core.grid_cut import GridCut
from scidata.core.options import DEFAULTS, ReadOptions
from scidata.core.patches import Patches
from scidata.core.types import AnyArray, BufferSpec, IntArray, Source
from scidata.errors import ConfigError
from scidata.grids.blocks.key import Patch, SampleRead
from scidata.grids.blocks.pool import BlockRead
from scidata.grids.blocks.sizes import BlockSizes
from scidata.grids.choices import choose_split
from scidata.grids.partition import GridPartition, make_partition, selected_rows
from scidata.grids.parts import Jobs, Part
from scidata.grids.passes import GridPass
from scidata.grids.patches import Origin, PatchPartition, PatchPlan, named, patch_partition, weights_of
from scidata.grids.reader import GridReader
from scidata.grids.steps import FieldSteps
from scidata.read.context import ReadStats


class PatchReader(GridReader):
    """A grid whose samples are patches, see :class:`GridReader`; buffers have a whole halo, 0 beyond the grid."""

    cut: PatchPartition
    _asked: Patches

    def __init__(self, path: Any, options: ReadOptions = DEFAULTS, **given: Any) -> None:
        super().__init__(path, options, **given)
        asked, weights = self._asked, self._asked.weights
        dims = [dim for dim in asked.size if dim != self.sample_dim]
        if isinstance(weights, str):
            weights = weights_of(self.series.sources[0], weights, dims, self.sample_dims, self.partition)
        self.patches = PatchPlan(
            asked, self.cut, sample_dim=self.sample_dim, num_samples=self.num_samples, chunks=self.chunks,
            weights=None if weights is None else np.asarray(weights),
        )  # fmt: skip
        self.num_samples = self.patches.num
        self._parts_at: dict[tuple[Origin, tuple[int, ...]], Part] = {}

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_parts_at": {}}

    # -- the cut -------------------------------------------------------------------------------------------------

    def _resolved(self, options: ReadOptions, sizes: Mapping[str, int], crop: Mapping[str, Any]) -> ReadOptions:
        lengths = {dim: num_rows_of(rows) for dim, rows in selected_rows(crop, sizes).items()}
        self._asked = named(Patches.of(options.patch or {}), lengths, self.sample_dims)
        if self.sample_dim is None or self.sample_dim not in self._asked.size:
            return options
        if options.given("steps"):
            raise ConfigError(f"patch says how many steps of {self.sample_dim!r} a sample has; leave out steps")
        return replace(options, steps=range(self._asked.size[self.sample_dim]))

    def _cuts(
        self, head: Source, options: ReadOptions, sizes: Mapping[str, int], crop: Mapping[str, Any],
        axis_sizes: Mapping[str, int],
    ) -> tuple[GridPartition, GridPartition]:  # fmt: skip
        if isinstance(options.weights, str):
            raise ConfigError("weights: a patch lies elsewhere in each sample; give costs of its rows, or leave it out")
        size = {dim: n for dim, n in self._asked.size.items() if dim != self.sample_dim}
        first = {**crop, **{dim: slice(0, n) for dim, n in size.items()}}  # as many rows as a patch has
        split = choose_split(head, self.choice, options.shard, sizes=sizes, crop=first, axis_sizes=axis_sizes)
        shard = dict[str | int, str](split.items())
        of_grid = replace(DEFAULTS, isel=crop, shard=shard)
        whole = make_partition(sizes, of_grid, axis_sizes=axis_sizes, chunks=self.chunks)
        of_patch = replace(options, shard=shard)
        cut = patch_partition(whole, size, of_patch, axis_sizes=axis_sizes, chunks=self.chunks)
        self._check_halos(cut)
        return whole, cut

    def _kept_cut(self) -> GridPartition:
        whole = self.partition
        bounds = {dim: np.array([0, size], np.int64) for dim, size in whole.sizes.items()}
        return replace(whole, axis_of_dim={}, axis_sizes={}, bounds=bounds)

    def _share_of_patch(self) -> Callable[[str], tuple[float, int]]:
        return self._share

    def _share(self, name: str) -> tuple[float, int]:
        """Return which share of a field's chunks a rank's part of a patch touches, about, and a sample's patches."""
        layout, cut, share = self.layout(name), self.cut, 1.0
        places = [cut.coordinate(rank) for rank in range(cut.num_parts)]
        for dim, chunk, num in zip(layout.dims, layout.chunks, layout.num_chunks, strict=True):
            if dim in cut.origin:
                rows = max(sum(cut.most_rows(dim, place)) for place in places)
                share *= min(1.0, ((rows - 1) / chunk + 1) / num)
        return share, self.patches.per_sample

    # -- the data set --------------------------------------------------------------------------------------------

    def grid_cut(self) -> GridCut:
        """Refuse: patches lie elsewhere in each sample."""
        raise ConfigError(f"cut_like: samples of {self.paths[0]} are patches, which points cannot follow")

    def fingerprint(self) -> str:
        """Return a digest of all that :meth:`GridReader.fingerprint` has, and of where patches lie."""
        text = json.dumps([super().fingerprint(), self.patches.recipe])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _rows_of(self, index: int, steps: FieldSteps) -> list[int]:
        return super()._rows_of(self.patches.base(self._number(index)), steps)

    def sample_keys(self, on: str) -> AnyArray:
        """Return those of the global sample that each patch is of."""
        return super().sample_keys(on)[self.patches.bases]

    def _numbers(self, size_of: Callable[[BlockSizes], int]) -> IntArray:
        return super()._numbers(size_of)[self.patches.bases]

    def _moving_dims(self) -> set[str]:
        return {*self.sample_dims, *self.patches.dims}

    def buffer_specs(self, coordinate: Mapping[str, int]) -> dict[str, BufferSpec]:
        """Return shape and dtype of the buffers of each field: of any patch, with room for its whole halo."""
        rows = {dim: sum(self.cut.most_rows(dim, coordinate)) for dim in self.cut.sizes}
        return {
            name: BufferSpec(
                shape=tuple(self.field_steps.num(name) if d == self.sample_dim else rows[d] for d in field.dims),
                dtype=field.dtype,
            )
            for name, field in self._fields.items()
        }

    def field_pass(self, name: str, samples: IntArray, rank: int = 0) -> GridPass:
        """Return a pass over all rows of a field that the global samples of some patches have."""
        return super().field_pass(name, np.unique(self.patches.bases[samples]), rank)

    # -- planning and reading ------------------------------------------------------------------------------------

    def _number(self, index: int) -> int:
        num = self.num_samples
        if not -num <= index < num:
            raise IndexError(f"{self.paths[0]}: sample {index} is out of range: there are {num} patches")
        return index % num

    def _part_at(self, origin: Origin, coordinate: Mapping[str, int]) -> Part:
        """Return a rank's part of the patch that begins at ``origin``; of tiles, the same object each time."""
        key = origin, tuple(coordinate[axis] for axis in self.cut.axis_sizes)
        found = self._parts_at.get(key)
        if found is None:
            found = self.planner.part_of_cut(self.cut.at(origin), coordinate)
            found = self._parts_at.setdefault(key, found) if self.patches.patches.is_regular else found
        return found

    def _jobs_of(self, index: int, rank: int, epoch: int) -> Jobs:
        index = self._number(index)
        part = self._part_at(self.patches.origin(index, epoch), self.cut.coordinate(rank))
        return self.planner.plan_fields(self.patches.base(index), part, self.fields)

    def read_into(
        self, index: int, out: Mapping[str, AnyArray], coordinate: Mapping[str, int], *, once: bool = False,
        epoch: int = 0,
    ) -> ReadStats:  # fmt: skip
        """Read one rank's part of a patch into buffers as :meth:`buffer_specs`, or some of them. Thread-safe."""
        index = self._number(index)
        origin = self.patches.origin(index, epoch)
        part, cut = self._part_at(origin, coordinate), self.cut.at(origin)
        names = [name for name in self.fields if name in out]
        places = {name: self._place_of(name, cut, coordinate) for name in names}
        fits = {name: out[name].shape == part.shapes[name] for name in names}
        own = {n: out[n] if fits[n] else np.empty(part.shapes[n], out[n].dtype) for n in names}
        keep = self.patches.patches.is_regular
        patch = Patch(part, {dim: cut.window(dim, coordinate) for dim in part.segments})
        whole = self.planner.part_of({})
        read = SampleRead(whole, self.patches.base(index), own, once, keep=keep, patch=patch)
        stats = self.pool.read_into(read, names)
        for name in (name for name in names if not fits[name]):
            out[name][...] = 0
            out[name][places[name]] = own[name]
        return stats

    def _place_of(self, name: str, cut: PatchPartition, coordinate: Mapping[str, int]) -> tuple[slice, ...]:
        """Return where a patch's rows lie in its buffer."""
        found = []
        for dim in self._fields[name].dims:
            if dim not in cut.origin:
                found.append(slice(None))
                continue
            most, below = cut.most_rows(dim, coordinate)[0], cut.halo_rows(dim, coordinate)[0]
            found.append(slice(most - below, most - below + cut.local_size(dim, coordinate)))
        return tuple(found)

    def shared_reads(self, index: int, coordinate: Mapping[str, int]) -> list[BlockRead]:
        """Return the blocks that a patch shares with others."""
        return self.pool.shared_reads(self.planner.part_of({}), self.patches.base(self._number(index)))
