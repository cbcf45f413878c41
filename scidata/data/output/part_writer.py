"""The writing thread's work: pack a rank's part of a step, exchange strips, and write whole chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from scidata.core.types import Array
from scidata.data.output.fields import OutputField, OutputLayout
from scidata.data.output.flat_output import FlatOutput
from scidata.data.output.ranks import Ranks
from scidata.data.output.routes import Route
from scidata.data.output.zarr_output import ZarrOutput
from scidata.data.side_stream import SideStream
from scidata.device_mesh.devices import is_accelerator
from scidata.errors import ConfigError
from scidata.plan.owners import Box, within


@dataclass(frozen=True, eq=False)
class Staged:
    """A tensor's values for the writing thread.

    ``release`` says that they have been used; it raises ConfigError if they were not copied, and have changed.
    """

    host: torch.Tensor
    ready: torch.Event | None
    release: Callable[[], None]

    def values(self) -> Array:
        """Return the values once the copy is done; bfloat16, which NumPy lacks, as float32."""
        if self.ready is not None:
            self.ready.synchronize()
        return (self.host.float() if self.host.dtype is torch.bfloat16 else self.host).numpy()


class Staging:
    """Copies tensors into reused buffers.

    - ``copy``: whether tensors on the CPU are copied, too; else they must not be changed in place until they are
      written, which is looked at.
    """

    def __init__(self, *, copy: bool) -> None:
        self._copy = copy
        self._free: defaultdict[object, list[torch.Tensor]] = defaultdict(list)
        self._streams: dict[torch.device, SideStream] = {}

    def take(self, tensor: torch.Tensor, what: str) -> Staged:
        """Start to copy a tensor, and return its future values."""
        tensor = tensor.detach()
        if is_accelerator(tensor.device):
            return self._from_accelerator(tensor)
        if tensor.device.type != "cpu":
            tensor = tensor.cpu()
        elif not self._copy:
            return _kept(tensor, what)
        host, release = self._buffer(tensor, pinned=False)
        host.copy_(tensor)
        return Staged(host, None, release)

    def _from_accelerator(self, tensor: torch.Tensor) -> Staged:
        """Copy to pinned memory on a separate stream; the tensor's memory is not reused before that."""
        host, release = self._buffer(tensor, pinned=True)
        side = self._streams.setdefault(tensor.device, SideStream(tensor.device))
        with side.current(after=True) as stream:
            host.copy_(tensor, non_blocking=True)
            event = side.record()
        tensor.record_stream(stream)
        return Staged(host, event, release)

    def _buffer(self, tensor: torch.Tensor, *, pinned: bool) -> tuple[torch.Tensor, Callable[[], None]]:
        free = self._free[tuple(tensor.shape), tensor.dtype, pinned]
        host = free.pop() if free else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        return host, lambda: free.append(host)


def _kept(tensor: torch.Tensor, what: str) -> Staged:
    version = tensor._version  # torch counts changes in place, also those of views

    def check() -> None:
        if tensor._version != version:
            raise ConfigError(
                f"{what} was changed in place before it was written; leave it as it is, or give create(copy=True)"
            )

    return Staged(tensor, None, check)


def as_tensor(value: object, what: str) -> torch.Tensor:
    """Return a tensor or a NumPy array as a tensor; raise ConfigError for anything else."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{what} is a {type(value).__name__}, and must be a tensor")
    return value


Output: TypeAlias = ZarrOutput | FlatOutput


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """This rank's part of a field of one step, in transit."""

    field: OutputField
    route: Route
    staged: Staged


class _Block:
    """The steps that share a chunk, as far as they have arrived."""

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
        """Write a step's parts, or keep them until all steps of their chunks are there; return the written steps."""
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
            at = self._layout.box(step, len(values), box)
            self._output.write(part.field, at, values.reshape([rows.stop - rows.start for rows in at]))

    def _exchanged(self, part: Part, step: int) -> Iterator[tuple[Box, Array]]:
        """Yield this rank's boxes of a field with their values: first the box that needs no other rank's rows."""
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
        out = self._buffer(route, field) if route.edges else packed  # nothing of them is assembled
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
        """Return the memory in which rows of several ranks are assembled; the next step reuses it."""
        found = self._buffers.get(field.name)
        if found is None or found.shape != route.shape:
            missing = np.asarray(field.packing.missing)
            found = self._buffers[field.name] = np.empty(route.shape, missing.dtype)
            for _, at in route.edges:  # the rest is untouched and takes no memory
                found[at] = missing  # rows missing in the store
        return found
