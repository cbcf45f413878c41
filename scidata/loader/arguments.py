"""What a :class:`scidata.DataLoader` accepts: checks of its arguments, and the sampler it makes by itself."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import torch
import torch.utils.data
from torch.utils.data import IterableDataset, Sampler

from scidata.core.checks import check_flag, check_function
from scidata.data.adapter import BufferedDataset, DatasetAdapter, PartDataset
from scidata.data.order import MAX_DRAWN
from scidata.device_mesh import axis_rank, axis_size
from scidata.device_mesh.devices import kinds
from scidata.errors import ConfigError, near_matches
from scidata.loader.base import BaseLoader
from scidata.loader.sampler import DistributedSampler

Indices: TypeAlias = Sampler[int] | Iterable[int]
IndexLists: TypeAlias = Sampler[list[int]] | Iterable[Sequence[int]]


class Options(TypedDict, total=False):
    """The other arguments of :class:`scidata.DataLoader`, for its overloads."""

    sampler: Indices | None
    batch_sampler: IndexLists | None
    num_workers: int
    pin_memory: bool
    drop_last: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    generator: torch.Generator | None
    device: torch.device | str | int | None
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool
    on_error: str
    watch: bool
    workers: str
    max_prefetch_bytes: int | None
    transform_stream: bool


def check_dataset(source: DatasetAdapter) -> None:
    """Refuse a data set that has no parts to read."""
    missing = source.lacks("read_into" if source.has_buffers else "read_local", "assemble", "__len__")
    if missing or isinstance(source.dataset, IterableDataset):
        raise ConfigError(
            f"scidata.DataLoader reads parts of samples, which {type(source.dataset).__name__} cannot do (it has no "
            f"{', '.join(missing) or 'length'}); make it with scidata.open_dataset, or use torch.utils.data.DataLoader"
        )


def check_given(
    samplers: Mapping[str, object],
    timeout: object,
    generator: object,
    *,
    functions: Mapping[str, object],
    flags: Mapping[str, object],
) -> None:
    """Refuse arguments of types on which torch would fail later."""
    for name, given in samplers.items():
        if given is not None and (isinstance(given, str) or not isinstance(given, Iterable)):
            raise ConfigError(f"{name}={given!r}: expected something to iterate over, which gives indices of samples")
    if not isinstance(timeout, int | float) or isinstance(timeout, bool):
        raise ConfigError(f"timeout={timeout!r}: expected seconds, 0 for ever")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ConfigError(f"generator={generator!r}: expected a torch.Generator, not {type(generator).__name__}")
    for name, function in functions.items():
        check_function(name, function)
    for name, given in flags.items():
        check_flag(name, given)


def as_device(device: torch.device | str | int) -> torch.device:
    """Return a device; torch's own error lists twenty that no loader copies to."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as e:
        raise ConfigError(f"device={device!r}: the loader copies to 'cuda', 'cuda:1' or their like, or to 'cpu'") from e


def needs_agreement(dataset: BufferedDataset | PartDataset, shuffle: bool | str) -> bool:
    """Whether torch's own samplers do not serve: ranks must agree, samples are mixed, shuffled by blocks, or too many.

    On a mesh always: Lightning, say, replaces samplers that deal nothing to ranks. And of more samples than torch's
    ``RandomSampler`` could list in memory.
    """
    if isinstance(shuffle, str) or dataset.mesh is not None:
        return True
    return getattr(dataset, "mixture", None) is not None or len(dataset) > MAX_DRAWN


def default_sampler(
    dataset: BufferedDataset | PartDataset,
    shuffle: bool | str,
    *,
    drop_last: bool,
    generator: torch.Generator | None,
    check: bool,
) -> DistributedSampler:
    """Return the loader's own sampler, if ranks must agree; with ``drop_last`` all ranks have equally many batches."""
    if generator is not None and (shuffle or getattr(dataset, "mixture", None) is not None):
        raise ConfigError(
            "generator: ranks must agree on the order, which a generator of each rank's own does not ensure; "
            "pass sampler=DistributedSampler(dataset, mesh, seed=...)"
        )
    check = check and (bool(shuffle) or axis_size(dataset.mesh, dataset.dp_axis) > 1)
    return DistributedSampler(
        dataset, dataset.mesh, dp=dataset.dp_axis, shuffle=shuffle, drop_last=drop_last, check=check
    )


def _check_drop_last(batches: object) -> None:
    """Warn if ``drop_last`` leaves no batch."""
    if type(batches) is torch.utils.data.BatchSampler and batches.drop_last:
        with contextlib.suppress(TypeError, NotImplementedError):  # a sampler that does not know how many it draws
            if 0 < (found := len(batches.sampler)) < batches.batch_size:  # type: ignore[arg-type]
                warnings.warn(
                    f"drop_last=True leaves no batch of {batches.batch_size} of this rank's {found} samples; take a "
                    "smaller batch_size, or drop_last=False",
                    stacklevel=4,
                )


def _check_sampler(sampler: object, dataset: BufferedDataset | PartDataset) -> None:
    """Refuse torch's ``DistributedSampler`` if its ranks are not those of the mesh's dp axis."""
    if dataset.mesh is None or not isinstance(sampler, torch.utils.data.DistributedSampler):
        return
    own = axis_rank(dataset.mesh, dataset.dp_axis), axis_size(dataset.mesh, dataset.dp_axis)
    if (sampler.rank, sampler.num_replicas) != own:
        raise ConfigError(
            f"{type(sampler).__name__} deals samples to rank {sampler.rank} of {sampler.num_replicas}, but this is dp "
            f"rank {own[0]} of {own[1]}, and the ranks of a domain share their samples; leave sampler out, or pass "
            "scidata.DistributedSampler(dataset, mesh) (in Lightning: Trainer(use_distributed_sampler=False))"
        )


def check_loader(loader: BaseLoader[Any], source: DatasetAdapter) -> None:
    """Refuse arguments that contradict each other or the data set."""
    _check_drop_last(loader.batch_sampler)
    for sampler in (loader.sampler, loader.batch_sampler, loader.index_source):
        _check_sampler(sampler, source.dataset)
    for name, choices in (("workers", ("thread", "process")), ("on_error", ("raise", "skip"))):
        given = getattr(loader, name)
        if given not in choices:
            hint = near_matches(str(given), choices, listed=False)
            raise ConfigError(f"{name} must be {choices[0]!r} or {choices[1]!r}, not {given!r}{hint}")
    threads, context = loader.workers == "thread", loader.multiprocessing_context
    remedy = "there are no worker processes; leave it out, or pass workers='process'"
    refused = {
        "worker_init_fn": (threads and loader.worker_init_fn is not None, remedy),
        "multiprocessing_context": (threads and context is not None, remedy),
        "persistent_workers": (threads and loader.persistent_workers, remedy),
        "timeout": (loader.timeout > 0 and not loader.num_workers, "num_workers=0 has none; leave it out"),
        "in_order": (not loader.in_order, "ranks of a domain would disagree on the sample; leave it out"),
        "pin_memory_device": (loader.pin_memory_device != "", "pass device= instead"),
        "pin_memory": (
            loader.pin_memory and not source.has_buffers and str(loader.device) in ("None", "cpu"),
            "samples differ in size, and are pinned only on their way to a device; pass device=, or leave it out",
        ),
    }
    if loader.on_error == "skip" and not getattr(loader.sampler, "pad", True):
        raise ConfigError(
            'on_error="skip": dp ranks agree in each step, and with pad=False some have fewer; pass "raise"'
        )
    for name, (given, remedy) in refused.items():
        if given:
            raise ConfigError(f"{name}: reading is done by threads of this process: {remedy}")
    if context is not None and context.get_start_method() == "fork":
        raise ConfigError(
            "multiprocessing_context: a fork copies locks that threads hold; pass 'spawn' or 'forkserver'"
        )
    if loader.max_prefetch_bytes is not None and (loader.max_prefetch_bytes <= 0 or not loader.num_workers):
        raise ConfigError(
            f"max_prefetch_bytes={loader.max_prefetch_bytes}: must be positive, and needs num_workers > 0"
        )
    kind = "cpu" if loader.device is None else loader.device.type
    if loader.transform_stream and kind == "cpu":
        raise ConfigError("transform_stream: there are streams on an accelerator only; pass device=, or leave it out")
    if kind not in ("cpu", *kinds()):
        names = " or ".join(map(repr, kinds()))
        raise ConfigError(f"device={str(loader.device)!r}: the loader copies to {names}, or leaves data on 'cpu'")
