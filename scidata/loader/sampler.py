"""``DistributedSampler``: assigns samples to domains, equal on all ranks of a domain."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sized
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DistributedSampler as _DistributedSampler

from scidata.core.checks import check_int
from scidata.core.keywords import checked_keywords
from scidata.core.types import Array, IntArray
from scidata.device_mesh import axes_of, axis_rank, axis_size
from scidata.errors import ConfigError
from scidata.grids.blocks.sizes import BLOCKS_AT_ONCE
from scidata.loader.order_arguments import order_of
from scidata.shard.comm.agreement import check_agreement

_VERSION = 1
_COUNTS = ("epoch", "consumed", "received", "checksum", "torch_seed")  # of states
_IN_BLOCKS = "blocks, {} at a time"


class DistributedSampler(_DistributedSampler[Any]):
    """Deals an order of sample indices to the ranks of the dp axis.

    The order is a function of seed and epoch alone. Ranks of one domain get the same indices, all dp ranks the same
    number of them: rank r takes each ``dp``-th entry from r. With batches of b samples a rank, step s therefore works
    on entries ``[s * dp * b, (s + 1) * dp * b)`` of the order: a global batch holds the same samples for any dp.

    It is a ``torch.utils.data.DistributedSampler`` to whatever asks, and saves its place: see :meth:`state_dict`.

    Parameters
    ----------
    dataset : Sized
        Anything with a length. One of :func:`scidata.mix` brings its ratios along.
    mesh : DeviceMesh or None, optional
        None: one replica, all samples.
    dp : str or None, default "dp"
        The mesh's data-parallel axis; None if it has none.
    shuffle, seed : bool or str or int
        A new order in each epoch (``set_epoch``), or always ``0, 1, 2, …``. ``"blocks"``: samples that share chunks
        come close to each other, for ``open_dataset(pool_bytes=)``, so that each chunk is decoded once. Blocks of such
        samples come in random order, ``window`` of them at a time, of which one sample each is taken in turn. Where
        windows of steps make blocks share chunks with the next, some ten of them follow each other, up or down.
    drop_last : bool, default False
        What happens to the last samples when the dp axis does not divide their number: dropped, or the first ones
        of the order repeated to fill up.
    pad : bool, default True
        False, for validation: neither; each sample comes once, and dp ranks take numbers of steps that differ by one at
        most, some of them none. So there must be no collective over dp in a step (DDP's backward, ``on_error="skip"``):
        sum the results of the ranks at the end.
    check : bool, default True
        Whether ranks find out, when they first iterate, that they were given different arguments. That first time
        is collective over the mesh; not in a :class:`scidata.DataLoader`, which finds out by itself.
    weights : array_like or None, optional
        ``(len(dataset),)``: samples are drawn with replacement, each in proportion to its weight.
    num_samples : int or None, optional
        Entries of an epoch that is drawn by ``weights``; default as many as there are samples.
    sizes : array_like or None, optional
        ``(len(dataset),)``: cost of each sample, such as ``ds.counts("node")``. Each ``group`` entries in a row then
        have similar sizes, so that the ranks that work side by side finish together.
    group : int or None, optional
        Entries that are of similar size: the global batch (``dp * batch_size``), or a multiple of it.
    window : int or None, optional
        Blocks that are under way at a time over all dp ranks; a multiple of their number has each block read by one
        of them. Each keeps ``window / dp`` blocks in its pool, and one more for each that is read ahead. Default: the
        first multiple of the number of dp ranks from 8 on; in a run that was resumed, that which it began with.

    Raises
    ------
    ConfigError
        An empty dataset, fewer samples than dp ranks with ``drop_last``, a negative seed, weights or sizes that do not
        fit. When first iterated: ranks that disagree, on all ranks alike.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> ds = scidata.open_dataset("era5.zarr", fields=["u"])
    >>> sampler = scidata.DistributedSampler(ds, shuffle=True, seed=0)
    >>> list(sampler)
    [2, 0, 1, 3]
    >>> sampler.set_epoch(1)
    >>> list(sampler)
    [3, 0, 2, 1]
    """

    @checked_keywords
    def __init__(
        self,
        dataset: Sized,
        mesh: DeviceMesh | None = None,
        *,
        dp: str | None = "dp",
        shuffle: bool | str = True,
        seed: int = 0,
        drop_last: bool = False,
        pad: bool = True,
        check: bool = True,
        weights: npt.ArrayLike | None = None,
        num_samples: int | None = None,
        sizes: npt.ArrayLike | None = None,
        group: int | None = None,
        window: int | None = None,
    ) -> None:
        dp_axis = None if mesh is None else axes_of(mesh, dp=dp)[0]
        num_replicas = axis_size(mesh, dp_axis)
        if not isinstance(dataset, Sized):
            raise ConfigError(f"dataset: expected one with a length, not {type(dataset).__name__}")
        if len(dataset) == 0:
            raise ConfigError("the dataset is empty: there is nothing to sample")
        seed = check_int("seed", seed, least=0)
        super().__init__(
            dataset,  # type: ignore[arg-type]  # any sized thing will do
            num_replicas=num_replicas,
            rank=axis_rank(mesh, dp_axis),
            shuffle=bool(shuffle),
            seed=int(seed),
            drop_last=drop_last,
        )
        if not isinstance(shuffle, bool | np.bool_) and shuffle != "blocks":
            raise ConfigError(f'shuffle={shuffle!r}: expected True, False or "blocks"')
        self._may_adopt = window is None
        window = num_replicas * -(-BLOCKS_AT_ONCE // num_replicas) if window is None else window
        window = check_int("window", window, least=1) if shuffle == "blocks" else None
        self._order = order_of(dataset, bool(shuffle), int(seed), weights, num_samples, sizes, group, window)
        count = len(self._order)
        if not isinstance(pad, bool):
            raise ConfigError(f"pad={pad!r}: expected True or False")
        if not pad and drop_last:
            raise ConfigError("pad=False keeps each sample, and drop_last=True drops some; leave out one of them")
        self.pad = bool(pad)
        if drop_last and count < num_replicas:
            raise ConfigError(
                f"{count} samples for {num_replicas} dp ranks: drop_last=True would drop them all; use "
                "drop_last=False, or fewer dp ranks"
            )
        self.num_samples = self._share(0)
        self.total_size = self.num_samples * num_replicas if pad else count
        self.mesh = mesh
        self._fingerprint: str | None = None
        self._digest = (-1, "")
        self._start = 0  # entries that the next iteration leaves out: a resumed epoch has had them
        self._dealt = 0  # entries that the present one has dealt, to all dp ranks together
        self._unchecked = check and mesh is not None
        self.ended = -1  # the latest epoch that a loader has finished
        self._told = False

    def __repr__(self) -> str:
        kind = '"blocks"' if self.window else self.shuffle
        drop = ", drop_last=True" if self.drop_last else "" if self.pad else ", pad=False"
        dealt = f"; dp rank {self.rank} of {self.num_replicas} gets {self.num_samples}" if self.num_replicas > 1 else ""
        return (
            f"DistributedSampler({len(self._order)} samples, shuffle={kind}, seed={self.seed}, epoch={self.epoch}"
            f"{drop}{dealt})"
        )

    def repeats(self) -> bool:
        """Say, once, whether a loader is about to go again through a shuffled epoch that it has come to the end of."""
        found = bool(self.shuffle) and not self._told and self._start == 0 and self.ended == self.epoch
        self._told = self._told or found
        return found

    @property
    def window(self) -> int:
        """Blocks from which all dp ranks together take samples in turn; 0 in an order without blocks."""
        return 0 if self._order.blocks is None else self._order.lanes

    @property
    def blocks_at_once(self) -> int:
        """Blocks from which each dp rank takes samples in turn; 0 in an order without blocks."""
        blocks = self._order.blocks
        if blocks is None:
            return 0
        return -(-min(self.window, len(np.unique(blocks))) // math.gcd(self.window, self.num_replicas))

    @property
    def ranks_per_block(self) -> int:
        """Dp ranks that take samples from the same block in turn: 1 if ``window`` is a multiple of their number."""
        return self.num_replicas // math.gcd(self.window, self.num_replicas) if self.window else 1

    # -- the order ---------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; call it with the same epoch on every rank.

        A loaded state's place is kept where it belongs to this epoch, and forgotten otherwise.

        Parameters
        ----------
        epoch : int
            From 0; the same on every rank.

        Raises
        ------
        ConfigError
            A negative epoch.

        Examples
        --------
        >>> sampler.set_epoch(2)
        """
        epoch = check_int("epoch", epoch, least=0)
        if epoch != self.epoch:
            self._start = self._dealt = 0
        super().set_epoch(int(epoch))

    def order(self) -> IntArray:
        """Return this epoch's order over all dp ranks, ``(total_size,)`` int64: rank r takes each ``dp``-th from r.

        Raises
        ------
        ConfigError
            More than 2^24 samples, whose order is computed while it is iterated and never whole.

        Examples
        --------
        >>> sorted(sampler.order().tolist())
        [0, 1, 2, 3]
        """
        return np.resize(self._order.entries(self.epoch), self.total_size)  # repeats from the start, or cuts

    def __iter__(self) -> Iterator[int]:
        self.check_agreement()
        self._dealt, self._start = self._start, 0
        first, count = self._dealt + self.rank, self._share(self._dealt)
        return self._deal(self._order.dealt(self.epoch, first, self.num_replicas, count))

    def _deal(self, own: Iterator[int]) -> Iterator[int]:
        for index in own:
            self._dealt += self.num_replicas
            yield index

    def _share(self, start: int) -> int:
        """Return how many of the entries from ``start`` this dp rank takes, with ``pad`` each."""
        left = max(0, len(self._order) - start)
        if not self.pad:
            return max(0, -(-(left - self.rank) // self.num_replicas))
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    # -- its place ---------------------------------------------------------------------------------------------------

    @property
    def start(self) -> int:
        """Entries of the order that the next iteration leaves out, over all dp ranks: 0 unless a state was loaded."""
        return self._start

    def state_dict(self, *, epoch: int | None = None, consumed: int | None = None) -> dict[str, Any]:
        """Return the position in the order as JSON values, equal on every rank. No communication.

        Counts dealt samples. A loader reads ahead of its loop, so save :meth:`scidata.DataLoader.state_dict` there.

        Parameters
        ----------
        epoch, consumed : int or None, optional
            Another place: entries of that epoch's order, over all dp ranks, that were used.

        Examples
        --------
        >>> sampler.state_dict(epoch=3, consumed=2)["epoch"]
        3
        """
        epoch = self.epoch if epoch is None else epoch
        return {
            "version": _VERSION,
            **self._identity(),
            "epoch": epoch,
            "consumed": max(self._start, self._dealt) if consumed is None else consumed,
            "order": self._digest_of(epoch),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state`` on any number of ranks: the next iteration has the rest of its epoch.

        The iteration after that one is whole again. ``len`` stays that of a whole epoch, as in torchdata.

        Parameters
        ----------
        state : Mapping[str, Any]
            From ``state_dict``.

        Raises
        ------
        ConfigError
            The state is of another data set, seed, order or ``drop_last``, or of a newer version.

        Examples
        --------
        >>> sampler.load_state_dict(sampler.state_dict(epoch=3, consumed=2))
        >>> len(list(sampler))
        2
        """
        check_state(
            "the sampler's state", state, {"version", "epoch", "consumed", "order", *self._identity()}, _VERSION
        )
        self._adopt(state["shuffle"])
        for name, mine in self._identity().items():
            if state[name] != mine:
                what = "data set" if name in ("fingerprint", "samples") else name
                raise ConfigError(
                    f"the state is of another {what}: {name} was {state[name]!r} and is {mine!r}; resume with the "
                    f"same {what}, or start an epoch afresh"
                )
        epoch, consumed = state["epoch"], state["consumed"]
        if self._digest_of(epoch) != state["order"]:
            raise ConfigError(
                f"the state is of another order of epoch {epoch}, although seed and data set are the same: weights, "
                "sizes, group or ratios differ, or NumPy's random numbers; resume with what it was saved with"
            )
        self.epoch, self._start, self._dealt, self.ended = epoch, consumed, 0, -1

    def _adopt(self, shuffle: object) -> None:
        """Take the window of a run on another number of dp ranks, unless the user gave one."""
        words = re.fullmatch(_IN_BLOCKS.format(r"(\d+)"), str(shuffle))
        if words and self.window and self._may_adopt:
            self._order = replace(self._order, lanes=int(words[1]))
            self._digest = (-1, "")

    def _digest_of(self, epoch: int) -> str:
        if self._digest[0] != epoch:  # saving the position at each step must not cost time for all samples
            self._digest = epoch, self._order.digest(epoch)
        return self._digest[1]

    def _identity(self) -> dict[str, object]:
        """Return the arguments on which the meaning of a saved place depends."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint_of(self.dataset)
        found: dict[str, object] = {
            "seed": self.seed,
            "shuffle": self._shuffle_in_words,
            "drop_last": self.drop_last,
            "samples": self._order.num_samples,
            "fingerprint": self._fingerprint,
        }
        return found if self.pad else found | {"pad": False}

    @property
    def _shuffle_in_words(self) -> bool | str:
        return _IN_BLOCKS.format(self.window) if self.window else self.shuffle

    # -- agreement ---------------------------------------------------------------------------------------------------

    def check_agreement(self) -> None:
        """Check once that all ranks of the mesh have the same arguments. Collective the first time.

        Raises
        ------
        ConfigError
            Names the ranks and their values, on all ranks.
        """
        if not self._unchecked or self.mesh is None:
            return
        check_agreement("the sampler", self.arguments(), self.mesh, tuple(self.mesh.mesh_dim_names or ()))
        self._unchecked = False

    def arguments(self, *, agreed: bool = False) -> dict[str, object]:
        """Return the arguments that all ranks of the mesh must share, by name; ``agreed``: the caller compares them."""
        self._unchecked = self._unchecked and not agreed
        order = self._order
        return {
            "seed": self.seed,
            "shuffle": self._shuffle_in_words,
            "drop_last": self.drop_last,
            "pad": self.pad,
            "the number of samples": order.num_samples,
            "epoch": self.epoch,
            "the place in the epoch": self._start,
            **self._digests,
            "group": order.group,
            "the length of an epoch": len(order),
        }

    @cached_property
    def _digests(self) -> dict[str, object]:
        order = self._order
        blocks = [_digest(order.blocks), _digest(order.stretches)]
        return {"weights": _digest(order.weights), "sizes": _digest(order.sizes), "blocks": blocks}


def check_state(what: str, state: Mapping[str, Any], names: set[str], version: int) -> None:
    """Raise unless ``state`` has a known version and all of its values."""
    known = state if isinstance(state, Mapping) else {}
    found, missing = known.get("version"), sorted(names - known.keys())
    for name in names & known.keys():
        if not isinstance(state[name], str | int | float | Mapping | None):
            raise ConfigError(f"{what}: {name} must be a plain value, as JSON has them, not {state[name]!r}")
    if isinstance(found, int) and found > version:
        raise ConfigError(f"{what} is of version {found}, and this scidata knows up to {version}; use a newer scidata")
    if missing or found != version:
        raise ConfigError(f"{what} is not one that state_dict() has made: it has no {', '.join(missing) or 'version'}")
    for name in names.intersection(_COUNTS):
        value = state[name]
        is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
        if not is_count and (value is not None or name != "torch_seed"):
            raise ConfigError(f"{what}: {name} must be an integer from 0, not {value!r}")


def fingerprint_of(dataset: object) -> str:
    """Return the data set's fingerprint, or ``""`` if it has none."""
    return str(getattr(dataset, "fingerprint", ""))


def _digest(values: Array | None) -> str:
    return "none" if values is None else hashlib.sha256(values.tobytes()).hexdigest()[:12]
