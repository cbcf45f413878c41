"""Where a loader's loop is in its order, saved and loaded again.

Samples count that the loop has received, not those read ahead for it. There are two kinds of order. A
:class:`scidata.DistributedSampler` is a function of (seed, epoch), so its place is one number for all ranks and holds
on any number of them. Of any other sampler only this rank's own indices are known: the place is how many there were,
with a checksum, and a resumed epoch goes through them again and compares.
"""

from __future__ import annotations

import copy
import operator
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.data import BatchSampler, RandomSampler

from scidata.errors import ConfigError
from scidata.loader.sampler import DistributedSampler, check_state

_VERSION = 1


class DealtPosition:
    """The place of one iteration over a :class:`scidata.DistributedSampler`."""

    def __init__(self, sampler: DistributedSampler, index_sampler: Any) -> None:
        self._sampler = sampler
        self._index_sampler = index_sampler
        self._epoch = self._consumed = 0
        self.begun = self._finished = False

    def items(self) -> Iterator[object]:
        """Begin: the rest of a resumed epoch, or a whole one."""
        if self._sampler.repeats():
            warnings.warn(
                f"scidata.DataLoader: epoch {self._sampler.epoch} again, in the same shuffled order: call "
                "loader.set_epoch(epoch) before each epoch for a new one (this is said once)",
                UserWarning,
                stacklevel=4,  # the line of the loop
            )
        self.begun, self._epoch, self._consumed = True, self._sampler.epoch, self._sampler.start
        return _batched(self._sampler, self._index_sampler)

    def received(self, indices: Sequence[int]) -> None:
        """Count the samples that this rank's loop got; all dp ranks get as many."""
        self._consumed += len(indices) * self._sampler.num_replicas

    def finish(self) -> None:
        """The epoch has ended."""
        self._finished = True
        self._sampler.ended = self._epoch

    def state_dict(self) -> dict[str, object]:
        """Return the position to resume from: the next epoch if this one has ended."""
        if not self.begun:
            return self._sampler.state_dict(consumed=self._sampler.start)
        if self._epoch != self._sampler.epoch:  # set_epoch(), after the loop was left early
            return self._sampler.state_dict(consumed=0)
        if self._finished:
            return self._sampler.state_dict(epoch=self._epoch + 1, consumed=0)
        return self._sampler.state_dict(consumed=self._consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin there."""
        self._sampler.load_state_dict(state)


class CountedPosition:
    """Position in an unknown sampler; torch's ``RandomSampler`` is redrawn from one saved number."""

    def __init__(self, sampler: Any, index_sampler: Any) -> None:
        self._sampler = sampler
        self._index_sampler = index_sampler
        self._epoch = self._epoch_now()
        #: The seed of the order of torch's ``RandomSampler``, once the iteration has begun.
        self.torch_seed: int | None = None
        self._count = self._checksum = 0
        self.begun = self._finished = False

    def items(self) -> Iterator[object]:
        """Begin: the rest of a resumed epoch, or a whole one."""
        if self._epoch != self._epoch_now():
            self._restart()
        self.begun = True
        if _makes_batches(self._index_sampler):
            own: Iterator[object] = iter(self._seeded())
            self._leave_out(own)
            return _batched(own, self._index_sampler)
        entries: Iterator[object] = iter(self._index_sampler)
        self._leave_out(entries)
        return entries

    def _restart(self) -> None:
        self._epoch, self._count, self._checksum, self.torch_seed = self._epoch_now(), 0, 0, None
        self._finished = False

    def _epoch_now(self) -> int:
        return int(getattr(self._sampler, "epoch", 0))

    def _seeded(self) -> Iterable[object]:
        if type(self._sampler) is not RandomSampler or self._sampler.generator is not None:
            return self._sampler
        if self.torch_seed is None:
            self.torch_seed = int(torch.empty((), dtype=torch.int64).random_().item())
        seeded = copy.copy(self._sampler)
        seeded.generator = torch.Generator()
        seeded.generator.manual_seed(self.torch_seed)
        return seeded

    def _leave_out(self, entries: Iterator[object]) -> None:
        expected = self._count, self._checksum
        self._count = self._checksum = 0
        while self._count < expected[0] and (entry := next(entries, None)) is not None:
            self.received([operator.index(i) for i in (entry if hasattr(entry, "__iter__") else [entry])])
        if (self._count, self._checksum) != expected:
            raise ConfigError(
                f"{type(self._sampler).__name__} does not begin with the {expected[0]} samples that were received "
                "before the state was saved; resume with the same sampler and batches, or use "
                "scidata.DistributedSampler, whose order is a function of its seed"
            )

    def received(self, indices: Sequence[int]) -> None:
        """Count the samples that the loop got."""
        self._count += len(indices)
        data = b"".join([index.to_bytes(8, "little", signed=True) for index in indices])
        self._checksum = zlib.crc32(data, self._checksum)

    def finish(self) -> None:
        """Note the end of the epoch: the next one is whole and in a new order."""
        self._restart()
        self._finished = True

    def state_dict(self) -> dict[str, object]:
        """Return the position to resume from."""
        if self._epoch != self._epoch_now():  # set_epoch()
            self._restart()
        return {
            "version": _VERSION,
            "sampler": type(self._sampler).__name__,
            "epoch": self._epoch + self._finished,
            "received": self._count,
            "checksum": self._checksum,
            "torch_seed": self.torch_seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin there."""
        mine = self.state_dict()
        check_state("the loader's state", state, set(mine), _VERSION)
        if state["sampler"] != mine["sampler"]:
            raise ConfigError(
                f"the state is of another sampler: {state['sampler']}, not {mine['sampler']}; resume with the same kind"
            )
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(state["epoch"])
        self._epoch = self._epoch_now()
        self._count, self._checksum, self.torch_seed = state["received"], state["checksum"], state["torch_seed"]


Position: TypeAlias = DealtPosition | CountedPosition


def position_of(sampler: Any, index_sampler: Any) -> Position:
    """Return the place at the beginning of a loader's next iteration.

    - ``sampler``, ``index_sampler``: the loader's, as torch calls them: a batch sampler may be the second's kind, and
      hold the first.
    """
    if not _makes_batches(index_sampler) and index_sampler is not sampler:
        return CountedPosition(getattr(index_sampler, "sampler", index_sampler), index_sampler)
    own = index_sampler.sampler if index_sampler is not sampler else sampler
    return (
        DealtPosition(own, index_sampler)
        if isinstance(own, DistributedSampler)
        else CountedPosition(own, index_sampler)
    )


def _makes_batches(index_sampler: object) -> bool:
    """Whether a batch sampler takes its sampler's indices in order, so that the first ones can be skipped."""
    return type(index_sampler) is BatchSampler


def _batched(own: Iterable[Any], index_sampler: Any) -> Iterator[object]:
    entries = iter(own)  # at once: a BatchSampler would begin with the first batch
    if not _makes_batches(index_sampler):
        return entries
    return iter(BatchSampler(entries, index_sampler.batch_size, index_sampler.drop_last))
