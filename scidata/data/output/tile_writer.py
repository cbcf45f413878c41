"""``TileWriter``: take tiles of samples, and assemble each step once its tiles are there.

Each rank writes its part of a tile into a file of the progress. The rank that sees a step's last part arrive puts the
step together, band by band, and removes the parts; steps that are left over, the first rank puts together at the end.
So ranks exchange nothing, and any of them may give any tile.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import Shard

from scidata.core.own_files import write_whole
from scidata.core.types import Array, FloatArray, IntArray
from scidata.data.output.fields import OutputField
from scidata.data.output.part_writer import Part
from scidata.data.output.places import LocalPlace
from scidata.data.output.routes import Route
from scidata.data.output.writer import Writer
from scidata.errors import ConfigError
from scidata.grids.patch_reader import PatchReader
from scidata.plan.owners import Box
from scidata.shard import ShardTensor

_BAND_BYTES = 256 << 20  # of a step assembled at once
_NAME = re.compile(r"tile-(\d+)-(\d+)-(\d+)-of-(\d+)\.npz")


class Tiles:
    """Places and weights of a step's tiles.

    - ``reader``: of tiles.
    - ``blend``: whether overlaps are blended, by weights that fall towards the edges; else each tile is cropped to
      their middle.
    """

    def __init__(self, reader: PatchReader, *, blend: bool) -> None:
        self._patches, self._cut, self.blend = reader.patches, reader.cut, blend
        self.num = reader.patches.per_sample

    @property
    def digest(self) -> str:
        """Text of the parameters that determine the parts of steps."""
        return f"{self._patches.recipe} {'blended' if self.blend else 'cropped'}"

    def shape(self, field: OutputField) -> tuple[int, ...]:
        """Return the shape of a field of a tile."""
        sizes = self._patches.patches.size
        return tuple(sizes[d] if d in self._patches.dims else n for d, n in zip(field.dims, field.shape, strict=True))

    def rows(self, tile: int, dim: str, size: int) -> IntArray:
        """Return the grid's rows in a tile along a dim."""
        return np.arange(size) + (self._place(tile, dim)[0] if dim in self._patches.dims else 0)

    def _place(self, tile: int, dim: str) -> tuple[int, int | None, int | None]:
        """Return the first row of a tile along a dim, and those of the tiles before and after it."""
        axis = self._patches.dims.index(dim)
        starts, k = self._patches.starts[axis].tolist(), int(np.unravel_index(tile, self._patches.shape)[axis])
        wraps, rows = dim in self._cut.periodic and len(starts) > 1, self._cut.whole[dim]
        before = starts[k - 1] if k else starts[-1] - rows if wraps else None
        after = starts[k + 1] if k + 1 < len(starts) else starts[0] + rows if wraps else None
        return starts[k], before, after

    def weights(self, tile: int, dim: str, size: int) -> FloatArray:
        """Return the weight of each row of a tile along a dim; with cropping, 0 or 1."""
        found = np.ones(size)
        if dim not in self._patches.dims:
            return found
        first, before, after = self._place(tile, dim)
        for shared, ramp in (
            (0 if before is None else before + size - first, found),
            (0 if after is None else first + size - after, found[::-1]),
        ):
            if shared > 0 and self.blend:
                ramp[:shared] = np.minimum(ramp[:shared], np.arange(1, shared + 1) / (shared + 1))
            elif shared > 0:  # the middle row of an odd number is the later tile's
                ramp[: shared // 2 if ramp is found else shared - shared // 2] = 0
        return found


class TileWriter(Writer):
    """A :class:`Writer` of tiles: ``writer[i] = sample`` takes tile ``i`` of the data set, or a model's result for it.

    - ``num_steps``: number of tiles of all steps.
    """

    def __init__(self, *args: Any, tiles: Tiles, **options: Any) -> None:
        self._tiles = tiles
        super().__init__(*args, **options)
        assert isinstance(self._place, LocalPlace)
        self._folder = self._place
        self._journal = f"steps-{self._ranks.run}-{self._ranks.group}_{self._ranks.part}-0-of-1.json"
        steps, self.num_steps = self._before, self._layout.num_steps * tiles.num
        self._wanted = range(self.num_steps)
        there = {step * tiles.num + tile for step, tile, _ in self._whole_tiles()}
        self._before = there | {step * tiles.num + k for step in steps for k in range(tiles.num)}

    def _whole_tiles(self, step: int | None = None) -> Iterator[tuple[int, int, list[str]]]:
        """Yield step and tile of the complete tiles, and their files, in order."""
        found = dict[tuple[int, int, int], list[str]]()
        for name in self._folder.names():
            if match := _NAME.fullmatch(name):
                of, tile, _, parts = map(int, match.groups())
                if step in (None, of):
                    found.setdefault((of, tile, parts), []).append(name)
        for (of, tile, parts), names in sorted(found.items()):
            if len(names) == parts:
                yield of, tile, names

    def _claim(self, step: int) -> None:
        """Do nothing: any rank may pass any tile."""

    def _route_of(self, name: str, tensor: torch.Tensor, step: object, lead: int | None) -> Route:
        """Return the rows of a tile that this rank has and writes."""
        field, skip = self._layout.fields[name], int(lead is not None)
        shape = self._tiles.shape(field)
        if tuple(tensor.shape[skip:]) != shape or (lead is not None and tensor.shape[0] != lead):
            raise ConfigError(f"{self._what(name, step)} has shape {tuple(tensor.shape)}, and a tile has {shape}")
        if self._tiles.blend and not tensor.is_floating_point():
            raise ConfigError(
                f"{self._what(name, step)} is {tensor.dtype}, which cannot be blended: create(tiles='crop')"
            )
        box, mine = [slice(0, size) for size in shape], self._ranks.part == 0
        if isinstance(tensor, ShardTensor):
            spec = tensor.spec
            if tuple(spec.device_mesh.shape) != self._ranks.parts:
                raise ConfigError(f"{self._what(name, step)} is split over another mesh than that of create(mesh=)")
            place = np.unravel_index(self._ranks.part, self._ranks.parts) if self._ranks.parts else ()
            split = [isinstance(placement, Shard) for placement in spec.placements]
            mine = all(is_split or at == 0 for is_split, at in zip(split, place, strict=True))
            for dim in spec.sharded:
                bounds, part = spec.dim_bounds(dim)
                if dim < skip:
                    raise ConfigError(f"{self._what(name, step)} is split over its batch dim; split others")
                box[dim - skip] = slice(int(bounds[part]), int(bounds[part + 1]))
        return Route(part=self._ranks.part, written=tuple(box) if mine else None)

    def _write(self, step: tuple[int, list[Part]]) -> None:
        number, tile = divmod(step[0], self._tiles.num)
        if self._ranks.is_first:
            self._owner.look()
        content = dict[str, Array]()
        for part in step[1]:
            if (box := part.route.written) is not None:
                values = part.staged.values()
                if not self._tiles.blend:
                    box, values = self._cropped(part.field, tile, box, values)
                content[part.field.name] = values
                content[f"{part.field.name}/first"] = np.array([rows.start for rows in box], np.int64)
        data, num_parts = io.BytesIO(), math.prod(self._ranks.parts)
        np.savez(data, **content)  # type: ignore[arg-type]  # names are the fields'
        for part in step[1]:
            part.staged.release()  # their memory is reused
        name = f"tile-{number}-{tile}-{self._ranks.part}-of-{num_parts}.npz"
        write_whole(self._folder.beside(name), data.getvalue())
        if len(whole := list(self._whole_tiles(number))) == self._tiles.num:
            own = f"{self._ranks.group}_{self._ranks.part}"
            if self._ranks.claim(f"tiles/{number}", own) == own:
                self._put_together(number, whole)

    def _cropped(self, field: OutputField, tile: int, box: Box, values: Array) -> tuple[Box, Array]:
        made = list(box)
        for axis, (dim, size) in enumerate(zip(field.dims, self._tiles.shape(field), strict=True)):
            kept = np.flatnonzero(self._tiles.weights(tile, dim, size)[box[axis]])
            first, count = (int(kept[0]), len(kept)) if len(kept) else (0, 0)
            values = values[(slice(None),) * axis + (slice(first, first + count),)]
            made[axis] = slice(box[axis].start + first, box[axis].start + first + count)
        return tuple(made), values

    def _put_together(self, step: int, whole: list[tuple[int, int, list[str]]]) -> None:
        """Write a step whose tiles are all there, and remove their files."""
        for field in self._layout.fields.values():
            for band in _bands(field):
                values = self._band(field, band, whole)
                packed = field.packing.pack(values, f"{self.path}: field {field.name!r} of step {step}")
                at = self._layout.box(step, 1, band)
                self._output.write(field, at, packed.reshape([rows.stop - rows.start for rows in at]))
        self._written.add(step)
        self._say()
        self._folder.drop(*(name for _, _, names in whole for name in names))

    def _band(self, field: OutputField, band: Box, whole: list[tuple[int, int, list[str]]]) -> Array:
        shape = [rows.stop - rows.start for rows in band]
        found, sums = None, np.zeros(shape if self._tiles.blend else 0)
        for _, tile, names in whole:
            for name in names:
                with np.load(self._folder.beside(name), allow_pickle=False) as file:
                    if field.name not in file:
                        continue
                    values, first = file[field.name], file[f"{field.name}/first"].tolist()
                to, taken, weight = [], [], np.ones(())
                for axis, (dim, size) in enumerate(zip(field.dims, self._tiles.shape(field), strict=True)):
                    own = slice(first[axis], first[axis] + values.shape[axis])
                    rows = self._tiles.rows(tile, dim, size)[own] % field.shape[axis]
                    inside = np.flatnonzero((rows >= band[axis].start) & (rows < band[axis].stop))
                    to.append(rows[inside] - band[axis].start)
                    taken.append(inside)
                    weight = np.multiply.outer(weight, self._tiles.weights(tile, dim, size)[own][inside])
                if found is None:
                    found = np.zeros(shape, np.float64 if self._tiles.blend else values.dtype)
                    dtype = values.dtype
                if self._tiles.blend:
                    found[np.ix_(*to)] += weight * values[np.ix_(*taken)]
                    sums[np.ix_(*to)] += weight
                else:
                    found[np.ix_(*to)] = values[np.ix_(*taken)]
        assert found is not None
        return (found / sums).astype(dtype) if self._tiles.blend else found

    def _finish(self) -> None:
        if not self._is_whole:
            waiting = dict[int, list[tuple[int, int, list[str]]]]()
            for each in self._whole_tiles():
                waiting.setdefault(each[0], []).append(each)
            for step, whole in waiting.items():
                if len(whole) == self._tiles.num:
                    self._put_together(step, whole)
        self._wanted = range(self._layout.num_steps)
        super()._finish()


def _bands(field: OutputField) -> Iterator[Box]:
    """Yield the boxes of a field of a step: whole chunks, of a size that fits into memory."""
    axis = next((i for i, (n, unit) in enumerate(zip(field.shape, field.units, strict=True)) if unit < n), None)
    if axis is None:
        yield tuple(slice(0, size) for size in field.shape)
        return
    size, unit = field.shape[axis], field.units[axis]
    row_bytes = 8 * math.prod(field.shape) // size
    rows = max(1, _BAND_BYTES // max(1, row_bytes) // unit) * unit
    for start in range(0, size, rows):
        band = slice(start, min(start + rows, size))
        yield tuple(band if i == axis else slice(0, n) for i, n in enumerate(field.shape))


def tiles_of(reader: object, tiles: str | None, place: object, layout_steps: int, step_chunk: int) -> Tiles | None:
    """Return the tiles from which an output is assembled; None if whole samples are written."""
    if not isinstance(reader, PatchReader):
        if tiles is not None:
            raise ConfigError(f"create: tiles={tiles!r}: the samples of like= are no tiles; leave it out")
        return None
    if not reader.patches.patches.is_regular:
        raise ConfigError(
            "create: random patches do not cover the grid; open like= with patch=Patches(…, order='regular')"
        )
    if tiles not in (None, "crop", "blend"):
        raise ConfigError(f"create: tiles must be 'crop' or 'blend', not {tiles!r}")
    if not isinstance(place, LocalPlace) or step_chunk > 1:
        raise ConfigError("create: tiles are put together on a file system, in chunks of one step each; copy them then")
    if len(reader.patches.bases) != layout_steps * reader.patches.per_sample:
        raise ConfigError(
            f"create: {len(reader.patches.bases)} tiles, {reader.patches.per_sample} a step, are not those of "
            f"{layout_steps} steps"
        )
    return Tiles(reader, blend=tiles == "blend")
