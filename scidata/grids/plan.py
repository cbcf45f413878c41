"""Bytes that every rank of a domain reads of a sample of a grid, and cuts that would be cheaper.

Plans ranks in turn, without starting any; memory does not grow with their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from scidata.core.options import ReadOptions
from scidata.core.types import IntArray, Selection
from scidata.core.urls import public_text
from scidata.errors import SciDataError
from scidata.grids.blocks.node_shares import NodeRanks
from scidata.grids.blocks.sizes import KEPT_BLOCKS
from scidata.grids.blocks.worth import is_worth_sharing
from scidata.grids.reader import GridReader
from scidata.plan.array import chunks_needed
from scidata.plan.totals import TOTALS, PlanSummary, summarize
from scidata.read.inflate import decoder_text

_BAD = 1.5  # amplification from which something better is looked for
_TRIED_RANKS = 64
_MANY_CHUNKS = 1 << 18  # of a sample; looking for their files takes a second
_SMALL_CHUNK = 1 << 20  # bytes: handing over takes half a ms, as long as decoding half a megabyte
_WORTHWHILE = 0.9  # a suggestion lowers it at least to this fraction

Tick = Callable[[], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class GridPlan(PlanSummary):
    """The reads of every rank of a domain for one sample, summed over fields.

    - ``bytes_memory``: ``(num_ranks,)`` int64: of the decoded part, halo included.
    - ``bytes_halo``: ``(num_ranks,)`` int64: of ``bytes_wanted``, those of the halo; the others are owned.
    - ``num_owned``: ``(num_ranks,)`` int64, owned cells of the grid.
    - ``notes``: why figures are estimated, chunks that are absent, and which library decodes zlib and gzip.
    """

    reader: GridReader
    sample: int
    bytes_memory: IntArray
    bytes_halo: IntArray
    num_owned: IntArray
    notes: tuple[str, ...]

    @property
    def balance(self) -> float:
        """Cells of the fullest rank over the mean."""
        mean = float(self.num_owned.mean())
        return float(self.num_owned.max()) / mean if mean else 1.0

    @property
    def cost(self) -> float:
        """The larger of the two amplifications."""
        sums = self.sums()
        return float(max(sums["amplification"] or 1.0, sums["decode_amplification"] or 1.0))

    def rank(self, rank: int) -> dict[str, object]:
        """Describe one rank in plain values."""
        partition, reader = self.reader.partition, self.reader
        at = partition.coordinate(rank)
        dims = [dim for dim in partition.sizes if dim in partition.axis_of_dim or dim in partition.halo]
        return {
            "rank": rank,
            "coordinate": at,
            "owned": {dim: list(partition.owned_rows(dim, at)) for dim in dims},
            "halo": {dim: list(partition.halo_rows(dim, at)) for dim in partition.halo},
            "local_shape": {name: list(spec.shape) for name, spec in reader.buffer_specs(at).items()},
            "bytes_memory": int(self.bytes_memory[rank]),
            **self._owned_and_halo(self.bytes_wanted[rank], self.bytes_halo[rank]),
            **self.sums(rank),
        }

    @staticmethod
    def _owned_and_halo(wanted: int, halo: int) -> dict[str, object]:
        owned = int(wanted) - int(halo)
        ratio = int(wanted) / owned if owned else None
        return {"bytes_owned": owned, "bytes_halo": int(halo), "halo_amplification": ratio}

    def totals(self) -> dict[str, object]:
        """Describe all ranks together in plain values."""
        return {
            "bytes_memory": int(self.bytes_memory.sum()),
            **self._owned_and_halo(self.bytes_wanted.sum(), self.bytes_halo.sum()),
            **self.sums(),
            "shared_chunks": self.shared_chunks,
            "balance": self.balance,
        }

    def about(self, dp: int | None = None) -> dict[str, object]:
        """Describe the plan in plain values: the data, the cut, and how samples spread over ``dp`` groups."""
        reader, partition = self.reader, self.reader.partition
        return {
            "path": public_text(reader.paths[0]),
            "files": len(reader.paths),
            "fields": list(reader.fields),
            "static_fields": list(reader.static_fields),
            "global_shape": {name: list(reader.global_shape(name)) for name in reader.fields},
            "sample_dim": reader.sample_dim if len(reader.sample_dims) < 2 else list(reader.sample_dims),
            "num_samples": reader.num_samples,
            "steps": reader.field_steps.as_json(),
            "sample": self.sample,
            "domain": dict(partition.axis_sizes),
            "shard": dict(partition.axis_of_dim),
            "bounds": {dim: partition.bounds[dim].tolist() for dim in partition.axis_of_dim},
            "halo": {dim: list(pair) for dim, pair in partition.halo.items()},
            "periodic": sorted(partition.periodic),
            "dp": dp,
            "world_size": self.num_ranks * (dp or 1),
            "samples_per_dp_rank": -(-reader.num_samples // (dp or 1)),
            "exact": self.exact,
            "notes": list(self.notes),
        }


def plan_grid(
    reader: GridReader, sample: int = 0, *, ranks: Sequence[int] | None = None, tick: Tick | None = None
) -> GridPlan:
    """Plan one sample for every rank of the reader's domain, or for some: ``ranks``."""
    partition = reader.partition
    places = [partition.coordinate(rank) for rank in (range(partition.num_parts) if ranks is None else ranks)]
    read = [name for name in reader.fields if name not in reader.static_fields] or reader.fields
    reads = [each for name in read for each in _reads_of(reader, name, sample, places, tick)]
    summaries = [each.summary for each in reads]
    return GridPlan(
        reader=reader,
        sample=sample,
        **{name: np.sum([getattr(summary, name) for summary in summaries], axis=0) for name in TOTALS},
        bytes_memory=np.array([sum(s.nbytes for s in reader.buffer_specs(at).values()) for at in places], np.int64),
        bytes_halo=np.sum([each.bytes_halo for each in reads], axis=0),
        num_owned=np.array([_num_owned(reader, at) for at in places], np.int64),
        shared_chunks=sum(summary.shared_chunks for summary in summaries),
        exact=all(summary.exact for summary in summaries),
        notes=tuple(dict.fromkeys([*(each.note for each in reads if each.note), *_notes(reader, places)])),
    )


class _Reads(NamedTuple):
    """Bytes that all ranks read of a field in one file; the reason, if they are an estimate."""

    summary: PlanSummary
    bytes_halo: IntArray
    note: str


def _reads_of(
    reader: GridReader, name: str, sample: int, places: Sequence[Mapping[str, int]], tick: Tick | None
) -> Iterator[_Reads]:
    owned, local = _cells_of(reader, name, places)
    for k, (i, layout, first) in enumerate(reader.selections(name, sample, places[0])):

        def selection_of(rank: int, k: int = k) -> Selection:
            if tick is not None:
                tick()
            return reader.selections(name, sample, places[rank])[k][2]

        locate, note = partial(reader.sources[i].locate, layout), ""
        if layout.fallback:
            note = "some arrays are decoded by the format's own library: their bytes are estimated"
        elif len(found := locate(chunks_needed(layout, first)).path_index) and (found < 0).all():
            note = f"the store holds no chunk of sample {sample}: bytes are estimated from decoded sizes"
        summary = summarize(layout, selection_of, len(places), None if note else locate)
        wanted = summary.bytes_wanted
        yield _Reads(summary, wanted - wanted * owned // np.maximum(local, 1), note)


def _notes(reader: GridReader, places: Sequence[Mapping[str, int]]) -> Iterator[str]:
    """List remarks that the figures of a plan do not show."""
    yield from _node_note(reader)
    if static := reader.static_fields:
        nbytes = max(sum(reader.buffer_specs(place)[name].nbytes for name in static) for place in places)
        yield (
            f"{', '.join(static)}: the same in all samples; read once and kept, up to {nbytes:_} bytes a rank; "
            "what a sample reads is of the others"
        )
    inflated = decoder_text(map(reader.layout, reader.fields))
    yield from filter(None, (reader.choice.taken_text, *reader.gap_texts, inflated))
    yield from _wide_halos(reader)
    yield from _pool_note(reader, places)


def _node_note(reader: GridReader) -> Iterator[str]:
    """Say how often ranks of a node decode the same chunk, if that is worth sharing."""
    partition, source = reader.partition, reader.sources[0]
    every = tuple(map(partition.coordinate, range(partition.num_parts)))
    shares = reader.node_shares(NodeRanks(name="plan", coordinates=every, me=0, max_bytes=0))
    shared = [layout for layout in map(reader.layout, reader.fields) if is_worth_sharing(shares, layout, source)]
    if not shared:
        return
    times = max(shares.times_decoded(layout, source) for layout in shared)
    small = max(layout.chunk_nbytes for layout in shared) < _SMALL_CHUNK
    but = "; chunks are small, and handing them over may take more CPU time than decoding them again" if small else ""
    yield (
        f"ranks decode chunks up to {times:.1f} times over, because several need the same: those of a node do it for "
        f"each other with open_dataset(decode='node'){but}"
    )


def _pool_note(reader: GridReader, places: Sequence[Mapping[str, int]]) -> Iterator[str]:
    """Say how many bytes of decoded rows keep samples from decoding a chunk again that several of them share."""
    block_bytes = max(reader.block_bytes(place)[1] for place in places)
    if not block_bytes:
        return
    sizes = reader.chain.sizes
    in_order = max(sizes.of(reader.part_of(place)).bytes_in_order for place in places)
    every = max(sizes.of(reader.part_of(place)).bytes_of_all for place in places)
    steps, several = max(sizes.layout.steps_per_block.values()), sizes.most_trajectories
    shared = f"chunks hold {steps} steps" if max(steps, several) > 1 else "samples share steps"
    shared += f" of {several} trajectories" if several > 1 else ""
    often = " (at most 1.1 times, of a long series)" if sizes.steps_in_stretch > sizes.steps_in_order else ""
    yield (
        f"{shared}, which a full shuffle decodes anew for each sample (of large Blosc chunks a part). They are "
        f"decoded once in stored order with pool_bytes={in_order:_}, and with "
        f'DistributedSampler(shuffle="blocks"){often} with pool_bytes={KEPT_BLOCKS * block_bytes:_}; default '
        f"{'the larger of both' if several > 1 else 'the latter'}, within an eighth of the memory available. Where "
        f"this holds all, {every:_} bytes a rank, all is kept, and later epochs decode nothing in any order"
    )


def _num_owned(reader: GridReader, place: Mapping[str, int]) -> int:
    rows = [reader.partition.owned_rows(d, place) for d in reader.partition.sizes if d not in reader.sample_dims]
    return math.prod(stop - start for start, stop in rows)


def _cells_of(reader: GridReader, name: str, places_of: Sequence[Mapping[str, int]]) -> tuple[IntArray, IntArray]:
    partition = reader.partition
    owned, local = np.ones((2, len(places_of)), np.int64)
    for dim in reader.dims(name):
        if dim in partition.axis_of_dim or dim in partition.halo:
            rows = [partition.owned_rows(dim, place) for place in places_of]
            owned *= [stop - start for start, stop in rows]
            local *= [partition.local_size(dim, place) for place in places_of]
    return owned, local


def _wide_halos(reader: GridReader) -> Iterator[str]:
    """Say where a halo first reaches beyond the neighbouring part."""
    partition = reader.partition
    for dim, (below, above) in partition.halo.items():
        if dim not in partition.axis_of_dim:
            continue
        parts = np.diff(partition.bounds[dim])
        if len(parts) > 1 and max(below, above) > parts.min():
            yield (
                f"the halo of {dim} ({below}+{above} rows) is wider than the smallest part ({parts.min()} rows): ranks "
                "read rows of ranks beyond their neighbours; use fewer ranks, or a smaller halo"
            )
            return


def cheaper_cuts(plan: GridPlan) -> list[tuple[Mapping[str, object], GridPlan]]:
    """Return cuts by other bounds or dims that read less, best first; none where little is lost or planning is slow.

    Each as the options that change (``bounds``, ``shard``, and ``domain`` where that is cut along one axis), and its
    plan, for some ranks.
    """
    if plan.cost <= _BAD or plan.num_chunks[:_TRIED_RANKS].sum() > _MANY_CHUNKS:
        return []
    found = [(changed, _tried(plan, options, axes)) for changed, options, axes in _other_cuts(plan)]
    better = [(changed, x) for changed, x in found if x is not None and x.cost <= _WORTHWHILE * plan.cost]
    return sorted(better, key=lambda cut: cut[1].cost)


def _other_cuts(plan: GridPlan) -> Iterator[tuple[dict[str, object], ReadOptions, Mapping[str, int]]]:
    """Yield other cuts: the changes, the options, and the ranks along each axis."""
    partition, options = plan.reader.partition, plan.reader.options
    if not isinstance(options.bounds, str):
        return
    if options.bounds == "even" and options.weights is None:
        yield {"bounds": "chunk"}, replace(options, bounds="chunk"), partition.axis_sizes
    if len(partition.axis_of_dim) > 1:
        first = next(iter(partition.axis_of_dim))  # the slowest varying: its rows lie together in a file
        whole = replace(options, shard={first: "domain"}, weights=None)
        yield {"domain": plan.num_ranks, "shard": first}, whole, {"domain": plan.num_ranks}
    if len(partition.axis_of_dim) == 1:
        ((sharded, axis),) = partition.axis_of_dim.items()
        for dim, size in partition.sizes.items():
            if dim != sharded and dim not in plan.reader.sample_dims and size >= plan.num_ranks:
                other = replace(options, shard={dim: axis}, weights=None, align=1)
                yield {"shard": dim}, other, partition.axis_sizes


def _tried(plan: GridPlan, options: ReadOptions, axis_sizes: Mapping[str, int]) -> GridPlan | None:
    try:
        reader = GridReader(plan.reader.paths, options, axis_sizes=axis_sizes)
    except SciDataError:  # it was only an idea
        return None
    with closing(reader):
        if reader.sample_dims != plan.reader.sample_dims:
            return None  # a sample would be something else
        # of a large domain a few ranks tell
        ranks = np.linspace(0, plan.num_ranks - 1, min(plan.num_ranks, _TRIED_RANKS)).astype(np.int64).tolist()
        return plan_grid(reader, plan.sample, ranks=ranks)


def layout_advice(plan: GridPlan) -> list[str]:
    """Say which chunks are larger than a rank's part, where the amplification is high."""
    if plan.cost <= _BAD:
        return []
    reader, texts = plan.reader, []
    layout = max((reader.layout(name) for name in reader.fields), key=lambda x: x.nbytes)
    for dim, chunk in zip(layout.dims, layout.chunks, strict=True):
        if dim in reader.partition.axis_of_dim:
            rows = int(np.diff(reader.partition.bounds[dim]).max())
            if chunk > rows:
                texts.append(f"rechunk {layout.name}: {dim} in chunks of at most {rows} rows, not {chunk}")
        elif dim == reader.sample_dim and layout.codecs and chunk > reader.field_steps.num(layout.name):
            texts.append(f"DistributedSampler(shuffle='blocks') decodes the {chunk} rows of {dim} in a chunk once")
    return texts
