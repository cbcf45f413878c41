"""The order of an epoch over all ranks, as a pure function of (seed, epoch). NumPy only.

Nothing here knows of ranks: :class:`scidata.DistributedSampler` deals the entries to them, so that any number
of ranks goes through the same order, and a resumed run through the rest of it.

An order of up to :data:`MAX_LISTED` entries is NumPy's permutation, whole in memory: 4 bytes an entry, while an epoch
goes through it in blocks. A longer one is never listed: it is a keyed bijection of ``[0, num_samples)``, of which any
stretch is computed by itself.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from scidata.core.types import FloatArray, IntArray
from scidata.errors import ConfigError

#: Entries of an order that is listed whole. Another number gives other orders: saved places would not fit them.
MAX_LISTED = 1 << 24
#: Entries of an order that can only be listed (drawn by weights, of a mixture, grouped): 2 GiB of int64.
MAX_DRAWN = 1 << 28
_BLOCK = 1 << 14  # entries that are computed at once: their arrays stay in cache
_ROUNDS = 10
_DIGESTED = 1 << 12

#: Sample numbers in as few bytes as hold them.
_Numbers: TypeAlias = npt.NDArray[np.int32] | IntArray

# Streams besides the plain permutation's, which has no spawn key
_WEIGHTS, _PARTS, _GROUPS, _BLOCKS = 1, 2, 3, 4
_GROUPS_SORTED_TOGETHER = 16
_LEAST_STRETCHES = 16  # of an order by blocks, and two a lane


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Data sets numbered one after another, and how many entries an epoch takes of each."""

    lengths: tuple[int, ...]
    takes: tuple[int, ...]

    @classmethod
    def of(cls, lengths: tuple[int, ...], ratios: tuple[float, ...], num_samples: int | None) -> Mixture:
        """Divide an epoch by ratios: ``num_samples`` entries, or as many as need no repeated sample."""
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
        if num_samples > MAX_DRAWN:
            raise ConfigError(
                f"mix: an epoch of {num_samples} samples, which is listed whole, of at most {MAX_DRAWN}; give a "
                "smaller num_samples=: each data set goes on in the next epoch where this one left it"
            )
        return cls(lengths=lengths, takes=tuple(takes.tolist()))


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """The arguments that determine the order of every epoch.

    - ``shuffle``, ``seed``: a new order in each epoch, or always ``0, 1, 2, …``.
    - ``weights``: ``(num_samples,)`` float64: how often each sample comes, on average, relative to the others; drawn
      with replacement.
    - ``mixture``: several data sets, interleaved so that every stretch of the order has them in their ratio. Each goes
      through all its samples before it repeats one, over several epochs where one epoch does not take them all.
    - ``sizes``: ``(num_samples,)`` float64, cost of each sample: entries then come in groups of similar cost.
    - ``blocks``: ``(num_samples,)`` int64: samples of the same number share chunks. Entries then come in lanes, see
      ``lanes``.
    - ``stretches``: ``(num_samples,)`` int64, with ``blocks``: blocks of the same number, in their order, share chunks
      with those next to them, too. A lane goes through these one after the other, up or down; None: each is by itself.
    - ``lanes``: blocks that are under way at a time: entry p is of lane ``p % lanes``, and each lane goes through one
      block after the other. So where the number of dp ranks divides that of lanes, a block's samples all go to one of
      them, while the order itself is the same for any number.
    """

    num_samples: int
    shuffle: bool
    seed: int
    weights: FloatArray | None = None
    draws: int | None = None
    mixture: Mixture | None = None
    sizes: FloatArray | None = None
    group: int | None = None
    blocks: IntArray | None = None
    stretches: IntArray | None = None
    lanes: int = 1

    def __len__(self) -> int:
        """Entries of an epoch."""
        if self.mixture is not None:
            return sum(self.mixture.takes)
        return self.num_samples if self.draws is None else self.draws

    @property
    def listed(self) -> bool:
        """Whether the whole order is kept; plain orders of many entries are computed block by block instead."""
        return not self._is_plain or len(self) <= MAX_LISTED

    @property
    def _is_plain(self) -> bool:
        return self.mixture is None and self.weights is None and self.sizes is None and self.blocks is None

    def entries(self, epoch: int) -> IntArray:
        """Return the epoch's sample numbers, ``(len(self),)`` int64. Raises ConfigError: too many to list."""
        if not self.listed:
            raise ConfigError(
                f"an order of {len(self)} samples is never held whole; iterate over the sampler, which computes it in "
                "stretches"
            )
        return self._list(epoch).astype(np.int64)

    def dealt(self, epoch: int, first: int, step: int, count: int) -> Iterator[int]:
        """Yield ``count`` entries: the ``first``, and each ``step``-th after it, wrapping around at the end."""
        entries_at = self._entries_at(epoch)
        self.__dict__.pop("_kept", None)
        for begin in range(0, count, _BLOCK):
            rows = first % len(self) + step * np.arange(begin, min(begin + _BLOCK, count))
            yield from entries_at(rows % len(self)).tolist()

    def digest(self, epoch: int) -> str:
        """Return a digest of the epoch's entries, by which a resumed run notices any change; keep their list."""
        is_new = epoch not in self._lists
        entries_at, size = self._entries_at(epoch), len(self)
        if is_new:
            self.__dict__["_kept"] = entries_at
        digest = hashlib.sha256() if self.listed else hashlib.sha256(f"{size} ".encode())
        # of one that is not listed its first entries, which depend on all that decides the others
        for begin in range(0, size if self.listed else _DIGESTED, _BLOCK):
            stop = min(begin + _BLOCK, size if self.listed else _DIGESTED)
            digest.update(entries_at(np.arange(begin, stop)).astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def _entries_at(self, epoch: int) -> Callable[[IntArray], _Numbers]:
        """Return the function from places in the epoch's order to sample numbers; it may hold a list."""
        if self._is_plain and not self.shuffle:
            return lambda rows: rows
        if not self.listed:
            return lambda rows: self._permuted(rows, len(self), epoch)
        listed = self._list(epoch)
        return lambda rows: listed[rows]

    @functools.cached_property
    def _lists(self) -> weakref.WeakValueDictionary[int, IntArray]:
        return weakref.WeakValueDictionary()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lists", "_kept")}

    def _list(self, epoch: int) -> IntArray:
        """Return the epoch's sample numbers in the smallest integer dtype."""
        found = self._lists.get(epoch)
        if found is None:
            found = self._lists[epoch] = self._made(epoch).astype(_dtype_of(self.num_samples), copy=False)
        return found

    def _made(self, epoch: int) -> IntArray:
        if self.mixture is not None:
            entries = self._mixed(self.mixture, epoch)
        elif self.weights is not None:
            entries = self._weighted(self.weights, epoch)
        else:
            entries = self._permutation(self.num_samples, epoch)
        if self.blocks is not None and self.mixture is None:
            entries = self._in_lanes(entries, 0, self._stream(epoch, _BLOCKS))
        return entries if self.sizes is None or self.group is None else self._grouped(entries, self.sizes, epoch)

    def _stream(self, epoch: int, *key: int) -> np.random.Generator:
        # Not seed + epoch: epoch 1 of seed 0 would be epoch 0 of seed 1.
        return np.random.default_rng(np.random.SeedSequence([self.seed, epoch], spawn_key=key))

    def _permutation(self, count: int, epoch: int, *key: int) -> IntArray:
        entries = np.arange(count, dtype=_dtype_of(count))
        if self.shuffle:
            self._stream(epoch, *key).shuffle(entries)  # as Generator.permutation, which has int64
        return entries

    def _stretch(self, count: int, start: int, stop: int, epoch: int, *key: int) -> IntArray:
        """Return entries ``[start, stop)`` of a permutation of ``count``."""
        if count <= MAX_LISTED:
            return self._permutation(count, epoch, *key)[start:stop]
        return self._permuted(np.arange(start, stop), count, epoch, *key)

    def _permuted(self, rows: IntArray, count: int, epoch: int, *key: int) -> IntArray:
        """Return the entries at ``rows`` of a permutation of ``count`` that is not listed."""
        if not self.shuffle:
            return rows.astype(np.int64, copy=False)
        seeds = np.random.SeedSequence([self.seed, epoch], spawn_key=key)
        return _shuffled(rows, count, seeds.generate_state(_ROUNDS, np.uint64).astype(np.uint64, copy=False))

    def _weighted(self, weights: FloatArray, epoch: int) -> IntArray:
        edges = np.cumsum(weights)
        points = self._stream(epoch, _WEIGHTS).random(len(self)) * edges[-1]
        last = np.flatnonzero(weights)[-1]  # rounding may move a point to the very end
        return np.minimum(np.searchsorted(edges, points, side="right"), last).astype(np.int64)

    def _mixed(self, mixture: Mixture, epoch: int) -> IntArray:
        starts = np.cumsum([0, *mixture.lengths])
        parts, times = [], []
        for number, (length, take) in enumerate(zip(mixture.lengths, mixture.takes, strict=True)):
            first = epoch * take  # in the endless sequence of this data set's passes
            passes = range(first // length, -(-(first + take) // length))
            rows = [np.empty(0, np.int64)]
            for number_of_pass in passes:
                begin = number_of_pass * length
                own = max(first - begin, 0), min(first + take - begin, length)
                if self.blocks is None:
                    rows.append(self._stretch(length, *own, number_of_pass, _PARTS, number))
                else:
                    of_part = self._permutation(length, number_of_pass, _PARTS, number)
                    stream = self._stream(number_of_pass, _BLOCKS, number)
                    rows.append(self._in_lanes(of_part, int(starts[number]), stream)[own[0] : own[1]])
            parts.append(starts[number] + np.concatenate(rows))
            times.append((np.arange(take) + 0.5) / max(1, take))
        interleaved: IntArray = np.concatenate(parts)[np.argsort(np.concatenate(times), kind="stable")]
        return interleaved.astype(np.int64, copy=False)

    def _in_lanes(self, entries: IntArray, first: int, stream: np.random.Generator) -> IntArray:
        """Put entries into lanes; the first of their samples has number ``first``."""
        assert self.blocks is not None
        blocks = self.blocks[first + entries]
        stretches = blocks if self.stretches is None else self.stretches[first + entries]
        return entries[_lanes_of(blocks, stretches, self.lanes, stream)]

    def _grouped(self, entries: IntArray, sizes: FloatArray, epoch: int) -> IntArray:
        """Sort by size inside windows of several groups, then put the groups in a random order."""
        assert self.group is not None
        window = self.group * _GROUPS_SORTED_TOGETHER
        windows = np.arange(len(entries)) // window
        by_size = entries[np.lexsort((sizes[entries], windows))]
        whole = len(entries) // self.group * self.group
        groups = by_size[:whole].reshape(-1, self.group)
        groups = groups[self._stream(epoch, _GROUPS).permutation(len(groups))]
        return np.concatenate([groups.reshape(-1), by_size[whole:]])  # the incomplete group is last: the others align


def _dtype_of(count: int) -> npt.DTypeLike:
    return np.int32 if count <= 1 << 31 else np.int64


def _lanes_of(blocks: IntArray, stretches: IntArray, lanes: int, stream: np.random.Generator) -> IntArray:
    """Return the order of entries: random stretches of blocks are dealt to lanes; each gives one entry in turn.

    Each lane has as many entries as the others, to a block. Entries of a block, shuffled before, keep their order.
    Where there are few blocks, stretches are cut.
    """
    # Two lanes, and blocks A (3 entries), B (2), C (3) that come in the order C, A, B: in a row the entries are
    # C C C A A A B B. The second lane begins at the block nearest the middle, A. One entry of each in turn gives
    # C A, C A, C A, then the rest of the longer lane: B, B.
    _, firsts, block_of, counts = np.unique(blocks, return_index=True, return_inverse=True, return_counts=True)
    by_stretch = np.argsort(stretches[firsts], kind="stable")
    numbers = stretches[firsts][by_stretch]
    places = np.arange(len(numbers)) - np.searchsorted(numbers, numbers)  # of blocks in their stretch
    pieces = np.cumsum(places % max(1, len(counts) // max(_LEAST_STRETCHES, 2 * lanes)) == 0) - 1
    signs = stream.choice([-1, 1], len(pieces))
    in_turn = by_stretch[np.lexsort((signs[pieces] * places, stream.permutation(len(pieces))[pieces]))]
    by_block = np.argsort(np.argsort(in_turn)[block_of], kind="stable")
    bounds = np.cumsum([0, *counts[in_turn]])
    shares = np.arange(lanes) * len(blocks) // lanes
    begins = bounds[np.searchsorted((bounds[:-1] + bounds[1:]) / 2, shares, side="right")]
    entries = np.arange(len(blocks))
    lane_of = np.searchsorted(begins, entries, side="right") - 1
    return by_block[np.lexsort((lane_of, entries - begins[lane_of]))]


def _shuffled(rows: IntArray, count: int, keys: npt.NDArray[np.uint64]) -> IntArray:
    """Map ``rows`` by a keyed bijection of ``[0, count)``.

    A Feistel network on the next power of two (Luby and Rackoff 1988), which is walked again from whatever lands
    beyond ``count`` until it lands below (Black and Rogaway 2002): fewer than two walks on average.
    """
    bits = (count - 1).bit_length()
    found = _feistel(rows.astype(np.uint64), bits, keys)
    while len(outside := np.flatnonzero(found >= np.uint64(count))):
        found[outside] = _feistel(found[outside], bits, keys)
    return found.astype(np.int64)


def _feistel(values: npt.NDArray[np.uint64], bits: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix each half of the bits with a hash of the other, in turn; halves of an odd number of bits differ by one."""
    low = np.uint64(bits // 2)
    masks = np.uint64((1 << (bits // 2)) - 1), np.uint64((1 << (bits - bits // 2)) - 1)
    halves = [values & masks[0], values >> low]
    for number, key in enumerate(keys):
        one, other = number % 2, 1 - number % 2
        halves[one] = halves[one] ^ (_hashed(halves[other], key) & masks[one])
    return halves[1] << low | halves[0]


def _hashed(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """Hash values and a key by SplitMix64's finaliser (Steele, Lea and Flood 2014)."""
    mixed = (values ^ key) * np.uint64(0x9E3779B97F4A7C15) + key
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return mixed ^ mixed >> np.uint64(31)
