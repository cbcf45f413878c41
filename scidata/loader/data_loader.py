"""``DataLoader``: torch's, with reader threads and reused buffers in place of worker processes.

Decides the order (sampler), the batches, the depth; :mod:`scidata.loader.prefetch` does the reading ahead, the data
set knows how to read a sample and how to wrap it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, TypeVar, Unpack, overload

import torch
import torch.utils.data

from scidata.core.checks import check_int, check_optional_int
from scidata.core.keywords import checked_keywords
from scidata.data.adapter import DatasetAdapter, Readable
from scidata.data.collate import collate
from scidata.data.combine import as_combined
from scidata.data.composed import ComposedDataset
from scidata.data.joined_sample import JoinedSample
from scidata.data.sample import Sample
from scidata.data.side_stream import SideStream
from scidata.errors import ConfigError
from scidata.loader.arguments import (
    IndexLists,
    Indices,
    Options,
    as_device,
    check_dataset,
    check_given,
    check_loader,
    default_sampler,
    needs_agreement,
)
from scidata.loader.base import BaseLoader, BatchT
from scidata.loader.batches import Announced, Batches, facts_of_data, items_of
from scidata.loader.peers.agreement import Agreement
from scidata.loader.peers.ballot import Ballot, CommonBallot, OwnBallot
from scidata.loader.peers.session import Session
from scidata.loader.peers.watch import Watch
from scidata.loader.position import Position, position_of
from scidata.loader.prefetch.ahead import ReadAhead
from scidata.loader.prefetch.own_reads import OwnReads
from scidata.loader.read_paths import ReadPaths
from scidata.loader.sampler import DistributedSampler, check_state, fingerprint_of
from scidata.loader.stats import LoaderStats, PrefetchStats
from scidata.loader.waiting import WaitWatch, warn_of_copies, warn_of_pairs, warn_of_room, warn_of_shared_blocks

_VERSION = 1  # of the state

_Sample = TypeVar("_Sample", bound=Sample[Any] | JoinedSample)
_Collated = TypeVar("_Collated")


class DataLoader(BaseLoader[BatchT]):
    """Batches of a data set of :func:`scidata.open_dataset`, read ahead by threads, grids into reused buffers.

    Samples of grids are stacked; meshes, clouds and graphs, whose sizes differ, become a disjoint union with a
    ``batch`` vector.

    Takes all of ``torch.utils.data.DataLoader``'s arguments and raises its errors; those that mean something else
    here, and those that are refused, are listed below. No process is started and no collective is called: that all
    ranks of a domain iterate alike is the sampler's work. On a mesh of several ranks a thread watches the others
    through the process group's key-value store: a sample that one rank cannot read ends all of them at the same step,
    within a second, with its message; so do ranks of a domain that read different samples, and a rank that dies. See
    :mod:`scidata.loader.peers.watch`. Before the first batch, and at the end of an epoch, ranks compare there their
    arguments and orders: :mod:`scidata.loader.peers.agreement`.

    A batch stays valid for as long as it, or any tensor on its memory, is kept. Memory is bounded by
    ``prefetch_factor + 1`` batches (2 with ``num_workers=0``), and one more for each batch kept beyond the current one.
    The buffers of ended epochs are kept for the next, until the loader is dropped. Samples that differ in size are read
    into blocks that are used again where they fit.

    Parameters
    ----------
    dataset : ShardedDataset or IrregularDataset
        Or several, or a part: :func:`scidata.concat`, :func:`scidata.mix`, :func:`scidata.subset`, torch's ``Subset``
        and ``ConcatDataset``. With a mesh whose ``dp`` axis has several ranks, each reads its own samples: see
        ``sampler``.
    batch_size : int or None
        Samples per dp rank. None hands out samples without a batch dimension.
    shuffle : bool or "blocks"
        With a mesh, or by blocks: a :class:`scidata.DistributedSampler` with seed 0, so that all ranks agree; call
        :meth:`set_epoch` or every epoch has the same order. Else: torch's random order.
    sampler, batch_sampler : iterable of int, or of lists of them, or None
        Used as they are; where samples share chunks, asked for up to 1024 samples more than are read. Default with a
        mesh: a :class:`scidata.DistributedSampler`, which pads to the same number of steps, or drops with
        ``drop_last``.
    num_workers : int
        Reader threads. 0 reads in the calling thread, without reading ahead. Samples of local disks that take at most 2
        ms are read there, too, while that is faster than threads, which is tried from time to time; not with
        ``timeout``, or to a CUDA ``device``.
    workers : {"thread", "process"}
        ``"process"``: each thread has a process, spawned, in which reading, and the data set's ``local_transform``,
        run; the rest is as with threads. For Python-heavy work only: parts come through shared memory, and are copied
        once more. ``worker_init_fn``, ``multiprocessing_context`` (``"spawn"``, ``"forkserver"``),
        ``persistent_workers``, ``generator`` (of the processes' seeds) and ``prefetch_factor`` are then as in
        torch.
    collate_fn : Callable[[Any], Any] or None, optional
        Called with the list of a batch's samples. Default: a batch is read where it lies in the end; where the data
        set has a transform, :func:`scidata.collate` stacks the transformed samples.
    pin_memory : bool
        Read into page-locked memory, where CUDA is available. Without ``device`` the batches themselves are pinned,
        and torch's pinned allocator, not the loader, recycles their memory. Samples that differ in size pass through
        page-locked blocks, which are used again, on their way to ``device``.
    device : torch.device or str, optional
        Where the tensors are handed out; on CUDA they are copied on a stream of their own, one batch ahead of use.
        Default: on the host.
    prefetch_factor : int, optional
        Batches in flight in all, default 2; with ``workers="process"`` for each process, as in torch.
    max_prefetch_bytes : int, optional
        The number of batches in flight adapts, beginning with ``prefetch_factor``: it grows where the loop waits, and
        shrinks where it never needs the last, within this many bytes of batches besides the current one.
    transform_stream : bool
        Run the data set's transform on a CUDA stream of its own, beside kernels that work on earlier batches. It gets
        samples that are on ``device`` in any case. ``sample.generator`` is the same on every rank that shares it.
    timeout : float
        Seconds that the loop waits for a batch, 0 for ever; after half of them, or 30, a warning names the rank.
    on_error : {"raise", "skip"}
        ``"skip"`` leaves out samples that cannot be read, on all ranks that share them, and counts them in
        :meth:`stats`; a step of which a dp rank has nothing left is left out on all. All ranks then wait in each step
        until the others have read it.
    watch : bool
        False if ranks do not iterate alike: one that validates alone, say.
    drop_last : bool, default False
        Leave out a last batch of fewer samples.
    worker_init_fn : Callable[[int], None] or None, optional
        As of ``torch.utils.data.DataLoader``.
    multiprocessing_context : Any, optional
        As of ``torch.utils.data.DataLoader``; default spawn.
    generator : torch.Generator or None, optional
        As of ``torch.utils.data.DataLoader``, for orders that a sampler of torch draws.
    persistent_workers : bool, default False
        Keep worker processes from epoch to epoch.
    pin_memory_device : str, default ""
        As of ``torch.utils.data.DataLoader``; the device is that of ``device``.
    in_order : bool, default True
        As of ``torch.utils.data.DataLoader``; batches always come in order.

    Raises
    ------
    ConfigError
        A data set that cannot be read into buffers (use torch's DataLoader for it); ``worker_init_fn``,
        ``multiprocessing_context``, ``persistent_workers`` without processes; forks; ``timeout`` without
        threads, ``in_order=False`` (ranks would disagree), ``pin_memory_device`` (use ``device``); ``generator`` where
        the order must be the same on several ranks; ``pin_memory`` where samples differ in size and ``device`` is not
        CUDA.
    ValueError
        As torch does, for arguments that contradict each other.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> mesh = scidata.init_mesh()
    >>> ds = scidata.open_dataset("era5.zarr", mesh, fields=["u"])
    >>> loader = scidata.DataLoader(ds, batch_size=2, shuffle=True)
    >>> for epoch in range(2):
    ...     loader.set_epoch(epoch)
    ...     for batch in loader:
    ...         print(epoch, batch.index, tuple(batch["u"].shape))
    0 [2, 0] (2, 3, 7, 8)
    0 [1, 3] (2, 3, 7, 8)
    1 [3, 0] (2, 3, 7, 8)
    1 [2, 1] (2, 3, 7, 8)
    """

    # To type checkers: a batch has the type of samples, or that which ``collate_fn`` returns.
    # fmt: off
    @overload
    def __init__(
        self: DataLoader[_Sample], dataset: Readable[_Sample], batch_size: int | None = 1,
        shuffle: bool | str | None = None, *, collate_fn: None = None, **options: Unpack[Options],
    ) -> None: ...

    @overload
    def __init__(
        self: DataLoader[_Collated], dataset: Readable[Sample[Any] | JoinedSample], batch_size: int | None = 1,
        shuffle: bool | str | None = None, *, collate_fn: Callable[[Any], _Collated], **options: Unpack[Options],
    ) -> None: ...
    # fmt: on

    @checked_keywords
    def __init__(
        self,
        dataset: Readable[Any],
        batch_size: int | None = 1,
        shuffle: bool | str | None = None,
        sampler: Indices | None = None,
        batch_sampler: IndexLists | None = None,
        num_workers: int = 2,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        device: torch.device | str | int | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        on_error: str = "raise",
        watch: bool = True,
        workers: str = "thread",
        max_prefetch_bytes: int | None = None,
        transform_stream: bool = False,
    ) -> None:
        source = DatasetAdapter(as_combined(dataset))  # torch's Subset may hide the data set
        check_dataset(source)
        check_given(
            {"sampler": sampler, "batch_sampler": batch_sampler}, timeout, generator,
            functions={"collate_fn": collate_fn, "worker_init_fn": worker_init_fn},
            flags={
                "pin_memory": pin_memory, "persistent_workers": persistent_workers, "in_order": in_order,
                "watch": watch, "transform_stream": transform_stream,
                **({} if shuffle is None or isinstance(shuffle, str) else {"shuffle": shuffle}),
            },
        )  # fmt: skip
        order = shuffle if isinstance(shuffle, str) else bool(shuffle)
        if sampler is None and batch_sampler is None and needs_agreement(source.dataset, order):
            sampler = default_sampler(source.dataset, order, drop_last=drop_last, generator=generator, check=watch)
            order = False
        if collate_fn is None and (batch_size is not None or batch_sampler is not None):
            collate_fn = collate
        super().__init__(
            dataset,  # type: ignore[arg-type]
            check_optional_int("batch_size", batch_size),
            bool(order),  # torch refuses it beside a sampler
            sampler,
            batch_sampler,  # type: ignore[arg-type]
            check_int("num_workers", num_workers),
            collate_fn, pin_memory, drop_last, timeout, worker_init_fn, multiprocessing_context, generator,
            prefetch_factor=check_optional_int("prefetch_factor", prefetch_factor),
            persistent_workers=persistent_workers, pin_memory_device=pin_memory_device, in_order=in_order,
        )  # fmt: skip
        self.device = None if device is None else as_device(device)
        self.on_error, self.watch, self.workers = on_error, watch, workers
        self.max_prefetch_bytes = check_optional_int("max_prefetch_bytes", max_prefetch_bytes)
        self.transform_stream = transform_stream
        check_loader(self, source)
        # to Accelerate: on a mesh, samples are dealt to the ranks already; its save_state() then saves state_dict()
        self._is_accelerate_prepared = self.use_stateful_dataloader = source.dataset.mesh is not None
        self._source, self._read_paths, self._own_reads = source, ReadPaths(source), OwnReads()
        self._watch: Watch | None = None
        self._stats = PrefetchStats()
        self._position: Position | None = None  # of the latest iteration, or of the next one where a state was loaded
        self._epoch = 0

    def check_worker_number_rationality(self) -> None:
        """Do nothing: torch warns of more worker processes than cores, but threads that wait for a disk need none."""

    def __getstate__(self) -> dict[str, object]:
        """Leave out the buffers, which are made again when needed, and the iteration, which stays with its owner."""
        return self.__dict__ | {"_position": None, "_watch": None, "_own_reads": OwnReads()}

    # -- iterating ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Batches[BatchT]:  # type: ignore[override]  # an iterator, but none of torch's
        """Begin an epoch: a new iterator, whose threads end with it."""
        device = self.copies_to
        if self._source.dataset.mesh is None:
            warn_of_copies(self.index_source)
        session = self._begin_session()
        try:
            return self._begin_epoch(session, device)
        except BaseException as e:
            if session is not None:
                session.failed(0, e)
                session.end(failed=True)
            raise

    def _begin_epoch(self, session: Session | None, device: torch.device | None) -> Batches[BatchT]:
        """Put an epoch together: its order, the agreement of ranks, its read path, and the threads that read it."""
        of_loader = {} if session is None else self.facts_for_ranks()  # before the position moves the sampler's place
        position = self._position = self._next_position()
        num_batches = None if session is None else self.num_batches
        items: Iterator[list[int]] = items_of(position.items(), self._auto_collation)
        ahead = self._read_ahead(items)
        items = items if ahead is None else ahead
        agreement = None
        if session is not None and self._watch is not None:
            items = announced = Announced(items, session)
            of_data = partial(
                facts_of_data, self._source.dataset, self._watch, self._draws(), position, announced, num_batches
            )
            agreement = Agreement(self._watch, session, of_loader, of_data)
        prefetcher = self._read_paths.prefetcher(
            self, items, self._prefetch, device, stats=self._stats, peers=session, ballot=self._ballot(session),
            ahead=ahead, own_reads=self._own_reads if self._may_read(device) else None,
        )  # fmt: skip
        waiting = WaitWatch(self.num_workers, self.prefetch_factor or 0, self._source.dataset)
        warn_of_pairs(waiting, self.index_source)
        return Batches(
            prefetcher=prefetcher,
            position=position,
            session=session,
            source=self._source,
            collate_fn=self.collate_fn,
            batched=self._auto_collation,
            device=device,
            waiting=waiting,
            draws=self._draws(),
            stream=SideStream(device) if self.transform_stream and device is not None else None,
            agreement=agreement,
        )

    def _may_read(self, device: torch.device | None) -> bool:
        """Whether the loop may read samples itself: not if a read may hang undetected, nor for copies to devices."""
        return self.workers == "thread" and not self.timeout and device is None and self._source.reads_alone

    def _read_ahead(self, items: Iterator[list[int]]) -> ReadAhead | None:
        """Return the reader of shared blocks; None if samples share no blocks that this process keeps."""
        source = self._source
        reads = source.shared_reads(0) if self.workers == "thread" and len(source.dataset) else ()
        if not reads:
            return None
        sampler = self.index_source
        if isinstance(sampler, DistributedSampler):
            warn_of_shared_blocks(sampler)
            if not isinstance(source.dataset, ComposedDataset):
                pool, part = reads[0].pool, reads[0].key.part
                warn_of_room(sampler, pool.sizes.of(part).bytes_of_block, pool.max_bytes(part))
        return ReadAhead(items, source.shared_reads, self._prefetch + 1)

    def _draws(self) -> tuple[int, int]:
        sampler = self.index_source
        if isinstance(sampler, torch.utils.data.DistributedSampler):
            return int(sampler.seed), int(sampler.epoch)
        return 0 if self.generator is None else self.generator.initial_seed(), self._epoch

    @property
    def _prefetch(self) -> int:
        return (self.prefetch_factor or 0) * (self.num_workers if self.workers == "process" else 1)

    def _begin_session(self) -> Session | None:
        if not self.watch:
            return None
        dataset = self._source.dataset
        if self._watch is None or self._watch.board.is_over:
            self._watch = Watch.of(dataset.mesh, dataset.dp_axis)
        if self._watch is None:
            return None
        return Session(self._watch, lambda: (fingerprint_of(dataset), repr(dataset)), self.timeout)

    def _ballot(self, session: Session | None) -> Ballot | None:
        if self.on_error == "raise":
            return None
        return OwnBallot() if session is None or self._watch is None else CommonBallot(self._watch, session)

    # -- state -------------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler and of the data set, if they have one.

        Parameters
        ----------
        epoch : int
            From 0; the same on every rank.

        Examples
        --------
        >>> loader.set_epoch(2)
        """
        self._epoch = epoch
        self._source.set_epoch(epoch)
        for owner in (self.batch_sampler, getattr(self.batch_sampler, "sampler", None), self.sampler):
            set_epoch = getattr(owner, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
                return

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values. It counts received samples, not samples read ahead.

        With a :class:`scidata.DistributedSampler`, the default on a mesh, it is the same on every rank, and an epoch
        can go on with other numbers of dp and domain ranks, workers, and samples in a batch. With any other sampler it
        is this rank's own. Of several iterators at once, it is the place of the one begun last. No communication.

        Once an epoch has ended, it is the beginning of the next one: ``state["sampler"]["epoch"]`` is where a loop over
        epochs goes on.

        Examples
        --------
        >>> loader.state_dict()["sampler"]["epoch"] > 0
        True
        """
        position = self._position or self._next_position()
        state = {"version": _VERSION, "fingerprint": self._fingerprint, "sampler": position.state_dict()}
        costs = getattr(self._source.dataset, "costs", None)
        return state if costs is None else state | {"costs": costs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``: the next iteration has exactly the samples that the saved loop had not received.

        The order stays that of the whole epoch; its last batch is padded or dropped as at the end of a whole one. The
        iteration after it is whole, and so is one after ``set_epoch`` of another epoch. ``len`` is the number of
        batches of a whole epoch throughout, as in torchdata.

        Parameters
        ----------
        state : Mapping[str, Any]
            From ``state_dict``.

        Raises
        ------
        ConfigError
            The state is of another data set, sampler, seed, order or ``drop_last``, or of a newer version.

        Examples
        --------
        >>> state = loader.state_dict()
        >>> loader.load_state_dict(state)
        """
        check_state("the loader's state", state, {"version", "fingerprint", "sampler"}, _VERSION)
        if state["fingerprint"] != self._fingerprint:
            raise ConfigError(
                f"the loader's state is of another data set: its fingerprint was {state['fingerprint']!r} and is "
                f"{self._fingerprint!r}; open the same data set, or start an epoch afresh"
            )
        if (costs := state.get("costs")) is not None:
            self._source.dataset.load_costs(costs)
        self._position = position_of(self.sampler, self._index_sampler)
        self._position.load_state_dict(state["sampler"])
        self._epoch = state["sampler"]["epoch"]
        self._source.set_epoch(self._epoch)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint_of(self._source.dataset)

    def _next_position(self) -> Position:
        if self._position is None or self._position.begun:
            return position_of(self.sampler, self._index_sampler)
        return self._position

    def stats(self) -> LoaderStats:
        """Return counts and times of the batches so far, over all iterators: a dict that prints as a table.

        Examples
        --------
        >>> loader.stats()["batches"]
        4
        """
        static = self._source.static_nbytes
        return LoaderStats(self._stats, queue_capacity=self.prefetch_factor or 0, bytes_static=static)
