"""The name of a block of decoded rows, the blocks that a sample needs, and the contract of a stage of the chain.

A *block* has the rows that one rank needs of the chunks which hold the same steps of a field, halo included, decoded.
Stages stand in a row, each of which knows the next one only::

    memory (pool) -> local disk (on_disk) -> ranks of the node (on_node) -> files (from_source)

Example: chunks hold 8 steps, and a sample is steps 6 and 9 of field "t". It needs row 6 of the block that begins at
step 0, and row 1 of the one that begins at step 8. The pool copies both rows if it has the blocks. If not, and keeping
them is worth it, it asks the next stage for whole blocks; else it passes the field on: a later stage reads the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias

from scidata.core.types import Array, Segment
from scidata.grids.parts import Part
from scidata.read.context import ReadStats

#: Decoded values of any dtype.
Rows: TypeAlias = Array


class BlockKey(NamedTuple):
    """The one name of a block, in every stage.

    - ``part``: whose rows it holds; compared by identity.
    - ``member``, ``num``: the first trajectory that it holds, and how many trajectories.
    - ``start``: its first row along the dimension of samples, in the file of ``member``; 0 of a field without that
      dimension.
    """

    part: Part
    name: str
    member: int
    num: int
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A block that a sample needs, and which of its rows.

    - ``inside``: where the sample's trajectory lies in a block that holds several; None in a block of one.
    - ``rows``: pairs: a row of the block, and its place in the field of the sample.
    """

    key: BlockKey
    nbytes: int
    inside: tuple[slice, ...] | None
    rows: tuple[tuple[int, int], ...]


class Patch(NamedTuple):
    """A rank's part of a patch of a sample: as it is read by itself, and its rows in blocks, by dim."""

    part: Part
    rows: Mapping[str, tuple[Segment, ...]]


class SampleRead(NamedTuple):
    """One rank's part of a sample, and the buffers that it is read into.

    - ``once``: whether the caller keeps the fields that are the same in other samples, so that no stage needs to.
    - ``wanted``: the blocks of each field that is cut into blocks; the first stage finds them.
    - ``keep``: whether other epochs read the same, so that plans of it are kept.
    - ``patch``: where only a patch is read of what ``part`` has in blocks.
    """

    part: Part
    number: int
    out: Mapping[str, Rows]
    once: bool
    wanted: Mapping[str, Sequence[Wanted]] = MappingProxyType({})
    keep: bool = True
    patch: Patch | None = None


class BusyError(Exception):
    """Another rank makes all that is wanted right now."""


class BlockStage(Protocol):
    """One place that rows come from; a block that it lacks comes from the next stage. Thread-safe."""

    def block(self, key: BlockKey, *, wait: bool = True) -> tuple[Rows, ReadStats]:
        """Return a block, dims in the source's order, and its reads. BusyError: not to wait for a rank that decodes."""

    def read_into(self, sample: SampleRead, names: Sequence[str]) -> ReadStats:
        """Read some fields of a sample into its buffers; return the statistics of the reads it took."""

    def clear(self) -> None:
        """Forget rows, plans and versions of files that are kept in memory, in the next stages, too."""
