"""The thread's side of a writer: packs a rank's part of a step, exchanges strips, and writes whole chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from scidata.data.output.fields import OutputField, OutputLayout
from scidata.data.output.ranks import Ranks
from scidata.data.output.routes import Route
from scidata.data.output.staging import Staged
from scidata.plan.owners import Box


class Output(Protocol):
    """A file or store that is being written."""

    def write(self, each: OutputField, step: int, box: Box, values: npt.NDArray[Any]) -> None:
        """Write a global box of some steps from ``step`` on."""

    def finish(self) -> None:
        """Say that all is written."""

    def close(self) -> None:
        """Let go of what is open."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """This rank's part of a field of one step, on its way."""

    field: OutputField
    route: Route
    staged: Staged


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """This rank's parts of all fields of a step."""

    number: int
    parts: list[Part]


class _Block:
    """The steps that share a chunk, as far as they have come."""

    def __init__(self, first: int, num: int) -> None:
        self.first, self.num = first, num
        self.steps: set[int] = set()
        self.values: dict[str, npt.NDArray[Any]] = {}


class PartWriter:
    """Writes this rank's part of steps, one after another."""

    def __init__(self, layout: OutputLayout, output: Output, ranks: Ranks, path: str) -> None:
        self._layout, self._output, self._ranks, self._path = layout, output, ranks, path
        self._blocks: dict[int, _Block] = {}
        self._buffers: dict[str, npt.NDArray[Any]] = {}

    def write(self, step: Step) -> set[int]:
        """Write a step, or keep it until all that share its chunks are there; return which are written now."""
        first, num = self._layout.block_of(step.number)
        block = self._blocks.setdefault(first, _Block(first, num))
        for part in step.parts:
            rows = self._exchanged(part, step.number)
            if rows is not None and block.num == 1:
                self._to_output(part, block.first, rows[None])
            elif rows is not None:
                name = part.field.name
                if name not in block.values:
                    block.values[name] = np.empty((block.num, *rows.shape), rows.dtype)
                block.values[name][step.number - block.first] = rows
            part.staged.release()
        block.steps.add(step.number)
        if len(block.steps) < block.num:
            return set()
        for part in step.parts if block.num > 1 else ():
            if part.field.name in block.values:
                self._to_output(part, block.first, block.values[part.field.name])
        del self._blocks[block.first]
        return block.steps

    def _to_output(self, part: Part, step: int, values: npt.NDArray[Any]) -> None:
        written = part.route.written
        if written is not None and values.size:
            self._output.write(part.field, step, written, values)

    def _exchanged(self, part: Part, step: int) -> npt.NDArray[Any] | None:
        """Return what this rank writes of a field of a step, as it is stored."""
        route, field = part.route, part.field
        if route.written is None:
            return None
        packed = field.packing.pack(part.staged.values(), f"{self._path}: field {field.name!r} of step {step}")
        if route.is_local:
            return packed
        out = self._buffer(route.shape, field)
        coming, going, own = [], [], None
        for other, at, shape in route.receives:
            if other == route.part:
                own = at
                continue
            rows = np.empty(shape, out.dtype)
            coming.append((self._ranks.receive(rows, other), at, rows))
        for other, index in route.sends:
            if other != route.part:
                going.append(self._ranks.send(packed[index], other))
            elif own is not None:
                out[own] = packed[index]
        for work, at, rows in coming:
            work.wait()
            out[at] = rows
        for work, _ in going:
            work.wait()
        return out

    def _buffer(self, shape: tuple[int, ...], field: OutputField) -> npt.NDArray[Any]:
        """Return memory for what is put together of a field; used again for the next step."""
        found = self._buffers.get(field.name)
        if found is None or found.shape != shape:
            found = self._buffers[field.name] = np.full(shape, field.packing.missing)  # rows that the store has not
        return found
