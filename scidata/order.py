"""The order of an epoch over all ranks, as a pure function of (seed, epoch). NumPy only.

Nothing here knows of ranks: who takes which entry is dealt by :class:`scidata.DistributedSampler`, so that any number
of ranks goes through the same order, and a resumed run through the rest of it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scidata.errors import ConfigError
from scidata.types import IntArray

__all__ = ["Mixture", "Order"]

# Streams besides the plain permutation's, which has no spawn key
_WEIGHTS, _PARTS, _GROUPS = 1, 2, 3
_GROUPS_SORTED_TOGETHER = 16


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Data sets that follow each other in one numbering, and how much of each an epoch has.

    Attributes
    ----------
    lengths
        Samples of each data set.
    takes
        Entries that one epoch has of each.
    """

    lengths: tuple[int, ...]
    takes: tuple[int, ...]

    @classmethod
    def of(cls, lengths: tuple[int, ...], ratios: tuple[float, ...], num_samples: int | None) -> Mixture:
        """Divide an epoch by ratios: of ``num_samples`` entries, or of as many as no data set must repeat for.

        Raises
        ------
        ConfigError
            An empty data set, a ratio that is not positive, or an epoch too short to hold a sample.
        """
        if not lengths or len(lengths) != len(ratios):
            raise ConfigError(f"mix: {len(lengths)} data sets need as many ratios, not {len(ratios)}")
        if min(lengths) == 0:
            raise ConfigError(f"mix: data set {lengths.index(0)} is empty; leave it out")
        if not all(np.isfinite(r) and r > 0 for r in ratios):
            raise ConfigError(f"mix: ratios must be positive numbers, not {list(ratios)}; leave out what has none")
        shares = np.asarray(ratios, np.float64) / sum(ratios)
        if num_samples is None:
            # rounded first: 7 / 0.7 is a little less than 10
            num_samples = int(np.floor(np.round(np.asarray(lengths) / shares, 6)).min())
        takes = np.floor(np.round(shares * num_samples, 6)).astype(np.int64)
        missing = num_samples - int(takes.sum())
        takes[np.argsort(takes - shares * num_samples, kind="stable")[:missing]] += 1  # largest remainders
        if num_samples < 1:
            raise ConfigError(f"mix: an epoch of {num_samples} samples; give num_samples=")
        return cls(lengths=lengths, takes=tuple(takes.tolist()))


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """What decides the order of every epoch.

    Attributes
    ----------
    num_samples
        Samples of the data set.
    shuffle, seed
        A new order in each epoch, or always ``0, 1, 2, …``.
    weights
        ``(num_samples,)`` float64: how often each sample comes, on average, relative to the others; drawn with
        replacement.
    draws
        Entries of an epoch that is drawn by weights.
    mixture
        Several data sets, interleaved so that every stretch of the order has them in their ratio. Each goes through
        all its samples before it repeats one, over several epochs where one epoch does not take them all.
    sizes
        ``(num_samples,)`` float64, cost of each sample: entries then come in groups of similar cost.
    group
        Entries of such a group.
    """

    num_samples: int
    shuffle: bool
    seed: int
    weights: npt.NDArray[np.float64] | None = None
    draws: int | None = None
    mixture: Mixture | None = None
    sizes: npt.NDArray[np.float64] | None = None
    group: int | None = None

    def __len__(self) -> int:
        """Entries of an epoch."""
        if self.mixture is not None:
            return sum(self.mixture.takes)
        return self.num_samples if self.draws is None else self.draws

    def entries(self, epoch: int) -> IntArray:
        """Return the epoch's sample numbers, ``(len(self),)`` int64."""
        if self.mixture is not None:
            entries = self._mixed(self.mixture, epoch)
        elif self.weights is not None:
            entries = self._drawn(self.weights, epoch)
        else:
            entries = self._permutation(self.num_samples, epoch)
        return entries if self.sizes is None or self.group is None else self._grouped(entries, self.sizes, epoch)

    def digest(self, epoch: int) -> str:
        """Return a digest of the epoch's entries: that no change of anything goes unnoticed by a resumed run."""
        return hashlib.sha256(self.entries(epoch).astype("<i8").tobytes()).hexdigest()[:16]

    def _stream(self, epoch: int, *key: int) -> np.random.Generator:
        # Not seed + epoch: epoch 1 of seed 0 would be epoch 0 of seed 1.
        return np.random.default_rng(np.random.SeedSequence([self.seed, epoch], spawn_key=key))

    def _permutation(self, count: int, epoch: int, *key: int) -> IntArray:
        if not self.shuffle:
            return np.arange(count, dtype=np.int64)
        return self._stream(epoch, *key).permutation(count).astype(np.int64, copy=False)

    def _drawn(self, weights: npt.NDArray[np.float64], epoch: int) -> IntArray:
        edges = np.cumsum(weights)
        points = self._stream(epoch, _WEIGHTS).random(len(self)) * edges[-1]
        last = np.flatnonzero(weights)[-1]  # where rounding brings a point to the very end
        drawn: IntArray = np.minimum(np.searchsorted(edges, points, side="right"), last).astype(np.int64)
        return drawn

    def _mixed(self, mixture: Mixture, epoch: int) -> IntArray:
        starts = np.cumsum([0, *mixture.lengths])
        parts, times = [], []
        for number, (length, take) in enumerate(zip(mixture.lengths, mixture.takes, strict=True)):
            first = epoch * take  # in the endless row of this data set's passes
            passes = range(first // length, -(-(first + take) // length))
            rows = [self._permutation(length, number_of_pass, _PARTS, number) for number_of_pass in passes]
            offset = first - passes.start * length
            parts.append(starts[number] + np.concatenate([*rows, np.empty(0, np.int64)])[offset : offset + take])
            times.append((np.arange(take) + 0.5) / max(1, take))
        interleaved: IntArray = np.concatenate(parts)[np.argsort(np.concatenate(times), kind="stable")]
        return interleaved.astype(np.int64, copy=False)

    def _grouped(self, entries: IntArray, sizes: npt.NDArray[np.float64], epoch: int) -> IntArray:
        """Sort by size inside windows of several groups, then put the groups in a random order."""
        assert self.group is not None
        window = self.group * _GROUPS_SORTED_TOGETHER
        windows = np.arange(len(entries)) // window
        by_size = entries[np.lexsort((sizes[entries], windows))]
        whole = len(entries) // self.group * self.group
        groups = by_size[:whole].reshape(-1, self.group)
        groups = groups[self._stream(epoch, _GROUPS).permutation(len(groups))]
        return np.concatenate([groups.reshape(-1), by_size[whole:]])  # the incomplete one last, or none would align
