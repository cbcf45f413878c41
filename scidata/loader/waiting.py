"""Warnings, each once: a loop waits for data, an order exceeds the pool, all ranks read the same samples, shuffled
loaders run side by side.
"""

from __future__ import annotations

import os
import warnings
import weakref
from dataclasses import replace
from statistics import median

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from scidata.grids.blocks.sizes import BLOCKS_BESIDE
from scidata.loader.sampler import DistributedSampler
from scidata.loader.stats import PrefetchStats

_WARM_UP = 5  # steps of an epoch that are not looked at: nothing was read ahead, kernels are being compiled
_WINDOW = 20  # steps that are judged together
_SHARE = 0.1  # of the time, from which on waiting is worth a warning
_MIN_WAIT = 1_000_000  # ns a step; less is not worth anybody's time
_MIN_WORK = 200_000  # ns a step; a loop that does less with its batches is there to try the loader

_begun: list[weakref.ref[WaitWatch]] = []  # the shuffled epoch that was begun last


def warn_of_pairs(epoch: WaitWatch, sampler: object) -> None:
    """Warn if the shuffled epochs of two data sets begin before either gives a batch, as under ``zip``."""
    if not getattr(sampler, "shuffle", isinstance(sampler, RandomSampler)):
        return
    other = _begun[0]() if _begun else None
    if other is not None and not other.is_asked and other.dataset is not epoch.dataset:
        warnings.warn(
            "scidata.DataLoader: two loaders that shuffle are begun side by side, as zip() does. Each has an order of "
            "its own, so samples that come together need not belong together; scidata.join({'a': a, 'b': b}, "
            "on='time') reads those of the same time as one data set",
            UserWarning,
            stacklevel=4,  # the line of the loop
        )
    _begun[:] = [weakref.ref(epoch)]


def warn_of_room(sampler: DistributedSampler, block_bytes: int, room: int) -> None:
    """Warn if the pool holds fewer blocks than the order takes samples from in turn, so that blocks are decoded
    repeatedly.
    """
    wanted, held = sampler.blocks_at_once, room // max(1, block_bytes)
    if wanted > held:
        window = f"DistributedSampler(window={held * sampler.num_replicas}) on all ranks, or " if held else ""
        warnings.warn(
            f'scidata.DataLoader: shuffle="blocks" takes samples of {wanted} blocks in turn, of {block_bytes:_} bytes '
            f"each when decoded, and the pool keeps {room:_}: chunks are decoded again for each sample. Use {window}"
            f"open_dataset(pool_bytes={(wanted + BLOCKS_BESIDE) * block_bytes:_})",
            RuntimeWarning,
            stacklevel=4,  # the line of the loop
        )


def warn_of_shared_blocks(sampler: DistributedSampler) -> None:
    """Warn if several dp ranks take samples from each block, so that each decodes it."""
    if (ranks := sampler.ranks_per_block) > 1:
        dp = sampler.num_replicas
        warnings.warn(
            f'scidata.DataLoader: shuffle="blocks" gives the samples of each block to {ranks} of the {dp} dp ranks, '
            f"and each decodes its chunks. From the beginning of an epoch on, use DistributedSampler(window="
            f"{dp * -(-sampler.window // dp)}), a multiple of {dp}, on all ranks",
            RuntimeWarning,
            stacklevel=4,  # the line of the loop
        )


def warn_of_copies(sampler: object) -> None:
    """Warn if each of several processes goes through all samples: without a mesh and without a distributed sampler."""
    if type(sampler) in (RandomSampler, SequentialSampler) and (num_ranks := _num_ranks()) > 1:
        warnings.warn(
            f"scidata.DataLoader: all {num_ranks} processes read all samples, whole: the data set has no mesh. "
            "open_dataset(path, scidata.init_mesh(domain=…)) shares each sample between them, (dp=…) deals samples out",
            UserWarning,
            stacklevel=3,  # the line of the loop
        )


def _num_ranks() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    said = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else ""
    return int(said) if said.isdecimal() else 1


class WaitWatch:
    """Looks at the steps of one epoch, and warns of the first window in which waiting takes the time.

    What is judged is the wait for a batch and its transform, against all of the time, over 20 steps after the fifth,
    less the step that waited longest: a pause is no pattern.
    """

    def __init__(self, num_workers: int, prefetch: int, dataset: object = None) -> None:
        self.dataset, self._num_workers, self._prefetch = dataset, num_workers, prefetch
        self._num_steps = self._returned = 0
        self._before: PrefetchStats | None = None  # the steps that are judged now
        self._steps: list[tuple[int, int]] = []  # ns of each: of the wait, and of the loop's work before it

    @property
    def is_asked(self) -> bool:
        """Whether the loop has had a batch."""
        return self._num_steps > 0

    def step(self, stats: PrefetchStats, called: int, arrived: int, returned: int) -> None:
        """Count one step: when ``next`` was called, when its data was there, and when it returned (ns)."""
        stats.transform_seconds += (returned - arrived) / 1e9
        stats.loop_seconds += (returned - (self._returned or called)) / 1e9
        self._num_steps += 1
        if not stats.warned and self._before is not None:
            self._steps.append((returned - called, called - self._returned))
            if len(self._steps) == _WINDOW:
                self._judge(stats, self._before)
        elif self._num_steps == _WARM_UP:
            self._before = replace(stats)
        self._returned = returned

    def _judge(self, stats: PrefetchStats, before: PrefetchStats) -> None:
        steps = sorted(self._steps)
        self._steps.clear()
        self._before = replace(stats)
        waited = sum(wait for wait, _ in steps[:-1])
        total = waited + sum(work for _, work in steps[:-1])
        is_long = waited > _SHARE * total and waited > _MIN_WAIT * (_WINDOW - 1)
        if is_long and median(work for _, work in steps) > _MIN_WORK:
            stats.warned = True
            text = self._message(waited / total, waited / (_WINDOW - 1), before, stats)
            warnings.warn(text, RuntimeWarning, stacklevel=4)  # the line of the loop

    def _message(self, share: float, wait: float, before: PrefetchStats, now: PrefetchStats) -> str:
        def grown(name: str) -> float:
            return float(getattr(now, name) - getattr(before, name))

        times = {stage: grown(f"{stage}_seconds") for stage in ("read", "decode", "copy")}
        # the rest is the search for rows and ghosts, and planning, unless the stages overlap
        times["preparation"] = max(0.0, grown("fill_seconds") - sum(times.values()))
        stage = max(times, key=times.__getitem__)
        if grown("transform_seconds") > grown("wait_seconds"):
            stage, times["transform"] = "transform", grown("transform_seconds")
        speed = ""
        if stage == "read" and times[stage] > 0:
            speed = f", {grown('bytes_fetched') / times[stage] / 1e6:.0f} MB/s"
        each = 1e3 * times[stage] / max(1.0, grown("samples"))
        amplified = grown("bytes_decoded" if stage == "decode" else "bytes_fetched") / max(1.0, grown("bytes"))
        advice = self._advice(stage, amplified)
        return (
            f"scidata.DataLoader: data is what the loop waits for: {100 * share:.0f} % of the time "
            f"({wait / 1e6:.1f} ms a step) over {_WINDOW} steps. The slowest stage is {stage} ({each:.1f} ms a "
            f"sample{speed}): {advice}. print(loader.stats()) shows all stages; this is said once"
        )

    def _advice(self, stage: str, amplification: float) -> str:
        if stage == "transform":
            return "it runs in the loop's own thread; make it cheaper, or do it once, when the store is written"
        if not self._num_workers:
            return "nothing is read ahead with num_workers=0; pass num_workers=2 or more"
        ahead = (
            f"more reader threads (num_workers={self._num_workers} now) and more batches ahead "
            f"(prefetch_factor={self._prefetch} now) hide it where cores and memory are free"
        )
        if stage == "read":
            if amplification > 1.5:
                return (
                    f"{amplification:.1f} bytes are fetched for each that is wanted; choose chunks that fit the split "
                    "(scidata plan PATH shows it, bounds='chunk' moves the split to them), or write a store of meshes, "
                    "clouds and graphs with scidata partition"
                )
            return f"{ahead}; else the storage is the limit: put the data on a faster one, or compress it"
        if stage == "decode" and amplification > 1.5:
            return (
                f"{amplification:.1f} bytes are decoded for each that is wanted; where chunks hold several steps, "
                "samples in stored order or of shuffle='blocks' share what is decoded, if open_dataset(pool_bytes=) is "
                "enough (scidata plan PATH says how many bytes); else write the data in smaller chunks"
            )
        if stage == "decode":
            return f"{ahead}; else write the data with a faster codec (blosc-lz4) or in smaller chunks"
        if stage == "copy":
            return f"write the data in chunks that fit the split, in the dtype that is used; {ahead}"
        return (
            "rows, ghosts and byte ranges are worked out for samples that are not kept from an earlier epoch; "
            f"{ahead}, and a larger cache_bytes keeps more of a store"
        )
