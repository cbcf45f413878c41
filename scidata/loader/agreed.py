"""What must be the same of a loader on all ranks that iterate it; :mod:`scidata.loader.peers.agreement` compares it.

Left out is what may differ: how and where to it reads (workers, prefetching, devices, pinned memory, timeouts).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler

from scidata.data.facts import facts_of, in_words, witness_of
from scidata.loader.batches import Announced
from scidata.loader.peers.watch import Watch
from scidata.loader.position import Position
from scidata.loader.sampler import DistributedSampler

if TYPE_CHECKING:
    from scidata.loader.data_loader import DataLoader


def facts_of_loader(loader: DataLoader[Any]) -> dict[str, str]:
    """Return what all ranks must have alike, before an iteration begins, which moves the sampler's place."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    facts = {
        "batch_size": getattr(loader.batch_sampler, "batch_size", loader.batch_size),
        "drop_last": getattr(loader.batch_sampler, "drop_last", loader.drop_last),
        "on_error": loader.on_error,
        "collate_fn": in_words(loader.collate_fn),
        "the sampler": type(sampler).__name__,
    }
    if type(loader.batch_sampler) is not BatchSampler:
        facts["the batch sampler"] = type(loader.batch_sampler).__name__
    if isinstance(sampler, DistributedSampler):
        facts |= sampler.arguments(agreed=True)
    return {name: str(value) for name, value in facts.items()}


def num_batches(loader: DataLoader[Any]) -> int | None:
    """Return how many batches an iteration has, where that is known, before it begins."""
    with suppress(TypeError, AttributeError, NotImplementedError):
        return len(loader)
    return None


def facts_of_data(
    dataset: Any, watch: Watch, draws: tuple[int, int], position: Position, items: Announced, batches: int | None
) -> dict[str, str]:
    """Return what ranks that share their samples must have alike, once the iteration has begun.

    Of the data set in the first iteration only, as it stays the same; what lies in its files each time, in another
    sample.
    """
    facts = facts_of(dataset) if watch.iteration == 1 else {}
    facts |= {
        "the number of batches": str(batches),
        "seed and epoch of the samples' random numbers": str(draws),
        "the epoch of the data set": str(getattr(dataset, "epoch", None)),
        "the seed of torch's RandomSampler": str(getattr(position, "torch_seed", None)),
    }
    first = items.look()[:1]
    return facts | (witness_of(dataset, first[0]) if first else {})
