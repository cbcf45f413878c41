"""A loader in words: on one line, and as a notebook shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import RandomSampler, SequentialSampler

from scidata.core.html import card

if TYPE_CHECKING:
    from scidata.loader.data_loader import DataLoader


def facts_of(loader: DataLoader[Any]) -> dict[str, str]:
    """Return what decides the batches and how they are read, by name."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    order = {SequentialSampler: "as stored", RandomSampler: "random"}.get(type(sampler), repr(sampler))
    count = _length(loader)
    size = "samples" if loader.batch_size is None and loader.batch_sampler is None else "batches"
    of = f" of {loader.batch_size}" if loader.batch_size is not None else ""
    unit = "thread" if loader.workers == "thread" else "process"
    readers = (
        f"{loader.num_workers} {unit}{'s' if unit == 'thread' else 'es'}" if loader.num_workers != 1 else f"1 {unit}"
    )
    return {
        "batches": f"{count} {size}{of}",
        "order": order,
        "readers": f"{readers}, {loader.prefetch_factor} ahead" if loader.num_workers else "the calling thread",
        "device": "" if loader.device is None else str(loader.device),
        "drop_last": "yes" if loader.drop_last else "",
        "on_error": "" if loader.on_error == "raise" else loader.on_error,
    }


def as_text(loader: DataLoader[Any]) -> str:
    """Return ``repr(loader)``."""
    facts = facts_of(loader)
    said = [facts["batches"], f"order: {facts['order']}", facts["readers"], facts["device"]]
    return f"DataLoader({loader.dataset!r}, {', '.join(filter(None, said))})"


def as_html(loader: DataLoader[Any]) -> str:
    """Return what a notebook shows."""
    own = getattr(loader.dataset, "_repr_html_", None)
    text = card("DataLoader", facts_of(loader) | ({} if own else {"dataset": repr(loader.dataset)}))
    return text + (f"<br>{own()}" if own else "")


def _length(loader: DataLoader[Any]) -> str:
    try:
        return str(len(loader))
    except TypeError:  # a sampler without a length
        return "an unknown number of"
