"""Attributes of a loader, its description, and the arguments that all ranks must share."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.utils.data
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from typing_extensions import TypeVar  # with defaults, before Python 3.13

from scidata.core.html import card
from scidata.data.facts import in_words
from scidata.data.sample import Sample
from scidata.device_mesh.devices import accelerator, current_device
from scidata.errors import ConfigError
from scidata.loader.sampler import DistributedSampler

BatchT = TypeVar("BatchT", covariant=True, default=Sample)


class BaseLoader(torch.utils.data.DataLoader[BatchT]):
    """torch's loader with the attributes that scidata's has besides."""

    device: torch.device | None
    on_error: str
    watch: bool
    workers: str
    max_prefetch_bytes: int | None
    transform_stream: bool

    @property
    def index_source(self) -> object:
        """The sampler that decides the order, also of a batch sampler of torch's."""
        return getattr(self.batch_sampler, "sampler", self.sampler)

    @property
    def num_batches(self) -> int | None:
        """Number of batches of an iteration, if known."""
        with suppress(TypeError, AttributeError, NotImplementedError):
            return len(self)
        return None

    @property
    def copies_to(self) -> torch.device | None:
        """The accelerator with its index, which reader threads would not know; None for the host."""
        if self.device is None or self.device.type == "cpu":
            return None
        if accelerator() != self.device.type:
            raise ConfigError(
                f"device={str(self.device)!r}: no such device is available; leave device out, or use 'cpu'"
            )
        return self.device if self.device.index is not None else current_device(self.device.type)

    # -- in words ----------------------------------------------------------------------------------------------------

    def facts_for_ranks(self) -> dict[str, str]:
        """Return the arguments that all ranks share; call it before an iteration, which moves the sampler's place."""
        sampler = self.index_source
        facts: dict[str, object] = {
            "batch_size": getattr(self.batch_sampler, "batch_size", self.batch_size),
            "drop_last": getattr(self.batch_sampler, "drop_last", self.drop_last),
            "on_error": self.on_error,
            "collate_fn": in_words(self.collate_fn),
            "the sampler": type(sampler).__name__,
        }
        if type(self.batch_sampler) is not BatchSampler:
            facts["the batch sampler"] = type(self.batch_sampler).__name__
        if isinstance(sampler, DistributedSampler):
            facts |= sampler.arguments(agreed=True)
        return {name: str(value) for name, value in facts.items()}

    def _facts(self) -> dict[str, str]:
        sampler = self.index_source
        count = "an unknown number of" if self.num_batches is None else str(self.num_batches)
        size = "samples" if self.batch_size is None and self.batch_sampler is None else "batches"
        of = f" of {self.batch_size}" if self.batch_size is not None else ""
        unit, plural = ("thread", "s") if self.workers == "thread" else ("process", "es")
        several = "" if self.num_workers == 1 else plural
        readers = f"{self.num_workers} {unit}{several}, {self.prefetch_factor} ahead"
        return {
            "batches": f"{count} {size}{of}",
            "order": {SequentialSampler: "as stored", RandomSampler: "random"}.get(type(sampler), repr(sampler)),
            "readers": readers if self.num_workers else "the calling thread",
            "device": "" if self.device is None else str(self.device),
            "drop_last": "yes" if self.drop_last else "",
            "on_error": "" if self.on_error == "raise" else self.on_error,
        }

    def __repr__(self) -> str:
        facts = self._facts()
        said = [facts["batches"], f"order: {facts['order']}", facts["readers"], facts["device"]]
        return f"DataLoader({self.dataset!r}, {', '.join(filter(None, said))})"

    def _repr_html_(self) -> str:
        own = getattr(self.dataset, "_repr_html_", None)
        text = card("DataLoader", self._facts() | ({} if own else {"dataset": repr(self.dataset)}))
        return text + (f"<br>{own()}" if own else "")
