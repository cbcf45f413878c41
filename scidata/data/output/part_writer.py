"""The thread's side of a writer: packs a rank's part of a step, exchanges strips, and writes whole chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from scidata.core.types import Array
from scidata.data.output.fields import OutputField, OutputLayout
from scidata.data.output.flat_output import FlatOutput
from scidata.data.output.ranks import Ranks
from scidata.data.output.routes import Route
from scidata.data.output.staging import Staged
from scidata.data.output.zarr_output import ZarrOutput
from scidata.plan.owners import Box, within

Output: TypeAlias = ZarrOutput | FlatOutput


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """This rank's part of a field of one step, on its way."""

    field: OutputField
    route: Route
    staged: Staged


class _Block:
    """The steps that share a chunk, as far as they have come."""

    def __init__(self, first: int, num: int) -> None:
        self.first, self.num = first, num
        self.steps: set[int] = set()
        self.values: dict[str, Array] = {}


class PartWriter:
    """Writes this rank's part of steps, one after another."""

    def __init__(self, layout: OutputLayout, output: Output, ranks: Ranks, path: str) -> None:
        self._layout, self._output, self._ranks, self._path = layout, output, ranks, path
        self._blocks: dict[int, _Block] = {}
        self._buffers: dict[str, Array] = {}

    def write(self, step: int, parts: Sequence[Part]) -> set[int]:
        """Write this rank's parts of a step, or keep them until all steps that share its chunks are there.

        Return the steps that are written now.
        """
        first, num = self._layout.block_of(step)
        block = self._blocks.setdefault(first, _Block(first, num))
        for part in parts:
            name = part.field.name
            if (written := part.route.written) is not None:
                for box, values in self._exchanged(part, step):
                    if block.num == 1:
                        self._to_output(part, block.first, box, values[None])
                    else:
                        if name not in block.values:
                            block.values[name] = np.empty((block.num, *part.route.shape), values.dtype)
                        block.values[name][step - block.first, ...][within(box, written)] = values
            part.staged.release()
        block.steps.add(step)
        if len(block.steps) < block.num:
            return set()
        for part in parts:
            if part.route.written is not None and part.field.name in block.values:
                self._to_output(part, block.first, part.route.written, block.values[part.field.name])
        del self._blocks[block.first]
        return block.steps

    def _to_output(self, part: Part, step: int, box: Box, values: Array) -> None:
        if values.size:
            self._output.write(part.field, step, box, values)

    def _exchanged(self, part: Part, step: int) -> Iterator[tuple[Box, Array]]:
        """Yield the global boxes of a field of a step that this rank writes, with their stored values.

        The box that needs no other rank's rows comes first, while these are on their way.
        """
        route, field = part.route, part.field
        packed = field.packing.pack(part.staged.values(), f"{self._path}: field {field.name!r} of step {step}")
        coming = []
        for other, at, shape in route.receives:
            rows = np.empty(shape, packed.dtype)
            coming.append((self._ranks.receive(rows, other), at, rows))
        going = [self._ranks.send(packed[index], other) for other, index in route.sends]
        if route.inner is not None:
            box, index = route.inner
            yield box, packed[index]
        out = self._buffer(route, field) if route.edges else packed  # of which nothing is put together then
        for at, index in route.own:
            out[at] = packed[index]
        for work, at, rows in coming:
            self._ranks.wait(work)
            out[at] = rows
        for work, _ in going:
            self._ranks.wait(work)
        for box, at in route.edges:
            yield box, out[at]

    def _buffer(self, route: Route, field: OutputField) -> Array:
        """Return memory in which rows of several ranks are put together; used again for the next step."""
        found = self._buffers.get(field.name)
        if found is None or found.shape != route.shape:
            missing = np.asarray(field.packing.missing)
            found = self._buffers[field.name] = np.empty(route.shape, missing.dtype)
            for _, at in route.edges:  # the rest is not touched, and takes no memory
                found[at] = missing  # rows that the store has not
        return found
