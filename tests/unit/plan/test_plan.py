"""Plans without any I/O: which chunks, which bytes, how many reads."""

import itertools
import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scidata.core.types import ArrayLayout, ChunkRefs, Codec, Segment
from scidata.errors import ConfigError, CorruptDataError, TooLargeError
from scidata.plan import array
from scidata.plan.array import PlanFamily, chunks_needed, plan_array
from scidata.plan.spans import MAX_READ, MAX_SPAN, group_reads
from scidata.plan.totals import ReadPlan, summarize
from scidata.read.copies import merge_copies


def layout_of(shape, chunks, dtype="f4", **options):
    options = {"axis_order": tuple(range(len(shape))), **options}
    return ArrayLayout(
        store="s.zarr", name="u", shape=shape, dims=tuple(f"dim_{i}" for i in range(len(shape))),
        dtype=np.dtype(dtype), chunks=chunks, **options,
    )  # fmt: skip


def full(shape):
    return tuple((Segment(start=0, count=n),) for n in shape)


def refs_of(layout, selection, nbytes=None, path="data", spacing=0):
    """Chunks one after the other in one file."""
    num = len(chunks_needed(layout, selection))
    size = layout.chunk_nbytes if nbytes is None else nbytes
    return ChunkRefs(
        paths=(path,), path_index=np.zeros(num, np.int64), offset=np.arange(num) * (size + spacing),
        nbytes=np.full(num, size),
    )  # fmt: skip


def planned(layout, selection, refs="adjoining", **options):
    shape = tuple(max((s.offset + s.count for s in dim), default=0) for dim in selection)
    refs = refs_of(layout, selection, **options) if refs == "adjoining" else refs
    return plan_array(layout, selection, refs, out_shape=shape)


@st.composite
def dims(draw):
    size = draw(st.integers(0, 40))
    chunk = draw(st.integers(1, 45))
    found, offset = [], 0
    for _ in range(draw(st.integers(0, 4)) if size else 0):
        step = draw(st.sampled_from([1, 1, 2, 5, 50, -1, -3, -41]))
        start = draw(st.integers(0, size - 1))
        count = draw(st.integers(0, (size - 1 - start) // step + 1 if step > 0 else start // -step + 1))
        found.append(Segment(start=start, count=count, step=step, offset=offset))
        offset += count
    return size, chunk, tuple(found)


@given(st.lists(dims(), max_size=3))
def test_chunks_needed_are_those_with_a_wanted_row(cases):
    shape, chunks, selection = tuple(zip(*cases, strict=True)) or ((), (), ())
    rows = [
        {(s.start + i * s.step) // c for s in dim for i in range(s.count)}
        for c, dim in zip(chunks, selection, strict=True)
    ]
    want = [()]
    for dim in rows:
        want = [(*w, c) for w in want for c in sorted(dim)]
    found = chunks_needed(layout_of(shape, chunks), selection)
    assert found.shape == (len(want), len(shape))
    assert list(map(tuple, found.tolist())) == want


def test_strides_longer_than_a_chunk_skip_chunks():
    found = chunks_needed(layout_of((100,), (10,)), ((Segment(start=5, count=4, step=25),),))
    assert found.tolist() == [[0], [3], [5], [8]]


@pytest.mark.parametrize(
    "segment",
    [
        Segment(start=5, count=6),
        Segment(start=-1, count=2),
        Segment(start=2, count=4, step=-1),
        Segment(start=0, count=2, step=0),
        Segment(start=0, count=2, offset=-1),
    ],
)
def test_selections_that_do_not_fit_are_refused(segment):
    with pytest.raises(ConfigError, match="does not fit 10 rows"):
        chunks_needed(layout_of((10,), (4,)), ((segment,),))


def test_destinations_that_do_not_fit_are_refused():
    layout, selection = layout_of((10,), (4,)), ((Segment(start=0, count=6, offset=2),),)
    assert plan_array(layout, selection, None, out_shape=(8,)).bytes_wanted == 24
    with pytest.raises(ConfigError, match="destination of 7"):
        plan_array(layout, selection, None, out_shape=(7,))
    with pytest.raises(ConfigError, match="dimensions"):
        chunks_needed(layout, full((10, 2)))


def test_adjoining_chunks_are_one_read_and_large_ones_are_split():
    small = layout_of((64, 64), (8, 8))
    plan = planned(small, full(small.shape))
    assert (plan.num_chunks, plan.num_reads) == (64, 1)
    assert plan.ranges()[1].tolist() == [[0, 0, 64 * 64 * 4]]
    large = layout_of((1024, 4096), (1024, 4096))
    plan = planned(large, full(large.shape))
    assert plan.num_reads > 4
    assert plan.bytes_fetched == plan.bytes_wanted == large.nbytes
    rows = plan.ranges()[1]
    assert np.array_equal(rows[1:, 1], rows[:-1, 1] + rows[:-1, 2])


def test_small_gaps_are_read_across_and_large_ones_are_not():
    layout = layout_of((100, 1000), (100, 1000))
    near = planned(layout, ((Segment(start=0, count=100),), (Segment(start=0, count=500),)))
    assert near.num_reads == 1
    assert near.bytes_fetched == (99 * 1000 + 500) * 4
    far = planned(layout, ((Segment(start=0, count=10, step=10),), (Segment(start=0, count=500),)))
    assert far.num_reads == 10
    assert far.bytes_fetched == far.bytes_wanted == 10 * 500 * 4
    assert planned(layout, far.selection, path="s3://bucket/data").num_reads == 1  # requests cost more than bytes


@pytest.mark.parametrize("width", [1500, 100])  # rows that are read in place, and short ones that are copied
def test_rows_of_a_periodic_halo_are_read_for_each_place(width):
    layout = layout_of((40, width), (40, width))
    rows = (Segment(start=38, count=2), Segment(start=0, count=40, offset=2), Segment(start=0, count=3, offset=42))
    plan = planned(layout, (rows, (Segment(start=0, count=width),)))
    spans, reads = plan.spans, plan.span_reads
    in_dest = np.zeros(45 * width, int)
    for read, (first, stop) in enumerate(itertools.pairwise(reads.bounds.tolist())):
        end = int(reads.offset[read])
        for i in range(first, stop):
            begin, nbytes = int(spans.offset[i]), int(spans.nbytes[i])
            assert reads.offset[read] <= begin
            assert begin + nbytes <= reads.offset[read] + reads.nbytes[read]
            if spans.direct[i]:  # a preadv fills the buffers of a read one after the other
                assert begin >= end
                in_dest[spans.dest[i] : spans.dest[i] + nbytes // 4] += 1
            end = begin + nbytes
        assert len(set(spans.direct[first:stop].tolist())) == 1
    if spans.direct.all():
        assert (in_dest == 1).all()
    assert plan.bytes_fetched == reads.nbytes.sum() >= plan.bytes_wanted - 5 * 4 * width


def grouped(offset, nbytes, path_index=None, **options):
    """Reads as (path, first byte, bytes, the ranges in it)."""
    num = len(offset)
    order, reads = group_reads(
        np.array(path_index if path_index is not None else [0] * num), np.array(offset), np.array(nbytes),
        **{"remote": False, **options},
    )  # fmt: skip
    bounds = reads.bounds.tolist()
    return [
        (path, first, size, order[a:b].tolist())
        for path, first, size, a, b in zip(
            reads.path_index.tolist(), reads.offset.tolist(), reads.nbytes.tolist(), bounds[:-1], bounds[1:],
            strict=True,
        )
    ]  # fmt: skip


def test_ranges_that_overlap_are_one_read_only_where_they_are_copied_from_there():
    offset, nbytes = [0, 50, 90], [100, 10, 20]
    assert grouped(offset, nbytes, direct=np.array([False] * 3)) == [(0, 0, 110, [0, 1, 2])]
    assert grouped(offset, nbytes, direct=np.array([True] * 3)) == [
        (0, 0, 100, [0]),
        (0, 50, 10, [1]),
        (0, 90, 20, [2]),
    ]
    assert grouped(offset, nbytes) == [(0, 0, 100, [0]), (0, 50, 10, [1]), (0, 90, 20, [2])]
    assert grouped([0, 100], [100, 10], direct=np.array([True] * 2)) == [(0, 0, 110, [0, 1])]  # they adjoin
    assert grouped([0, 100], [100, 10], direct=np.array([True, False])) == [(0, 0, 100, [0]), (0, 100, 10, [1])]
    assert grouped([0, 100], [100, 10]) == [(0, 0, 110, [0, 1])]


def test_ranges_are_read_in_the_order_of_files_and_places():
    assert grouped([50, 0, 7, 0], [10, 10, 1, 10], [1, 0, 2, 1]) == [
        (0, 0, 10, [1]), (1, 0, 60, [3, 0]), (2, 7, 1, [2]),
    ]  # fmt: skip
    assert grouped([5, 3, 1], [1, 1, 1], [0, 1, 2]) == [(0, 5, 1, [0]), (1, 3, 1, [1]), (2, 1, 1, [2])]
    assert grouped([], []) == []


def test_gaps_and_lengths_bound_a_read():
    gap = 8 << 10
    assert grouped([0, 10 + gap], [10, 10]) == [(0, 0, 20 + gap, [0, 1])]
    assert grouped([0, 11 + gap], [10, 10]) == [(0, 0, 10, [0]), (0, 11 + gap, 10, [1])]
    assert grouped([0, 11 + gap], [10, 10], remote=True) == [(0, 0, 21 + gap, [0, 1])]
    half = MAX_READ // 2
    many = [half * i for i in range(5)]
    assert [ranges for *_, ranges in grouped(many, [half] * 5)] == [[0, 1], [2, 3], [4]]
    assert [ranges for *_, ranges in grouped(many, [half] * 5, remote=True)] == [[0, 1, 2, 3, 4]]
    sizes = np.array([60, 60, 60, 60])
    assert [r for *_, r in grouped([0, 10, 20, 30], [10] * 4, decoded=sizes, max_decoded=120)] == [[0, 1], [2, 3]]
    assert [r for *_, r in grouped([0, 10, 20, 30], [10] * 4, decoded=sizes, max_decoded=120, remote=True)] == [
        [0, 1, 2, 3]
    ]
    direct = np.ones(64, bool)  # reads that need no scratch are as long as leaves 16 of them
    long = [half * i for i in range(64)]
    assert {len(r) for *_, r in grouped(long, [half] * 64, direct=direct)} == {4}


def test_encoded_chunks_are_fetched_whole():
    layout = layout_of((100, 100), (50, 50), codecs=(Codec(name="zstd"),))
    plan = planned(layout, ((Segment(start=0, count=1),), (Segment(start=0, count=100),)), nbytes=700)
    assert plan.bytes_wanted == 400
    assert plan.bytes_fetched == 1400
    assert plan.bytes_decoded == 2 * 50 * 50 * 4
    assert plan.exact
    estimate = planned(layout, plan.selection, refs=None)
    assert not estimate.exact
    assert estimate.bytes_fetched == 2 * 50 * 50 * 4
    apart = planned(layout, plan.selection, nbytes=700, spacing=100_000)
    assert (apart.num_reads, apart.bytes_fetched) == (2, 1400)


def test_whole_chunks_are_decoded_straight_into_their_place():
    layout = layout_of((6, 40), (2, 40), codecs=(Codec(name="zstd"),))
    columns = (Segment(start=0, count=40),)
    plan = planned(layout, ((Segment(start=0, count=6),), columns), nbytes=70)
    assert plan.encoded.direct.tolist() == [True] * 3
    assert plan.encoded.dest.tolist() == [0, 80, 160]
    plan = planned(layout, ((Segment(start=1, count=5),), columns), nbytes=70)
    assert plan.encoded.direct.tolist() == [False, True, True]
    assert plan.encoded.wanted.tolist() == [40, 80, 80]
    assert plan.encoded.dest[1:].tolist() == [40, 120]
    upside_down = ((Segment(start=5, count=6, step=-1),), columns)
    assert not planned(layout, upside_down, nbytes=70).encoded.direct.any()
    single = layout_of((3, 40), (1, 40), codecs=(Codec(name="zstd"),))  # of one row, upside down is the right way up
    plan = planned(single, ((Segment(start=2, count=3, step=-1),), columns), nbytes=70)
    assert plan.encoded.direct.all()
    assert plan.encoded.dest.tolist() == [80, 40, 0]
    turned = layout_of((4, 4), (4, 4), codecs=(Codec(name="zstd"),), axis_order=(1, 0))
    assert not planned(turned, full((4, 4)), nbytes=70).encoded.direct.any()


def test_an_empty_selection_reads_nothing():
    for selection in (((), (Segment(start=0, count=5),)), ((Segment(start=3, count=0),), (Segment(start=0, count=5),))):
        plan = planned(layout_of((10, 5), (4, 5)), selection)
        assert (plan.num_chunks, plan.num_reads, plan.bytes_wanted, plan.bytes_fetched) == (0, 0, 0, 0)


def test_places_that_make_no_sense_are_corrupt():
    layout = layout_of((8,), (4,))
    refs = refs_of(layout, full((8,)))
    refs.path_index[1] = 3
    with pytest.raises(CorruptDataError, match=r"chunk \(1,\)"):
        plan_array(layout, full((8,)), refs, out_shape=(8,))


# with a field of fields, and bytes between them
RECORD = np.dtype({"names": ["a", "b"], "formats": ["<f4", [("c", ">i2", (2,))]], "offsets": [0, 8], "itemsize": 16})


@settings(max_examples=60, deadline=None)
@given(
    cases=st.lists(dims(), max_size=3),
    dtype=st.sampled_from(["<f4", ">i2", "u1", "<M8[s]", RECORD]),
    fill=st.sampled_from([None, 3]),
    known=st.booleans(),
    masked=st.booleans(),
    reverse=st.booleans(),
)
def test_plans_pickle_and_go_as_json(cases, dtype, fill, known, masked, reverse):
    shape, chunks, selection = tuple(zip(*cases, strict=True)) or ((), (), ())
    layout = layout_of(
        shape, chunks, dtype, axis_order=tuple(range(len(shape)))[:: -1 if reverse else 1],
        codecs=(Codec(name="zstd", config={"level": np.int64(3)}),) if masked else (),
        fill_value=None if fill is None else np.array(fill, dtype),
    )  # fmt: skip
    refs = None
    if known:
        places = refs_of(layout, selection)
        skipped = (np.arange(len(places.offset)) % 2).astype(np.uint32) if masked else None
        refs = ChunkRefs(**{**{f: getattr(places, f) for f in places.__dataclass_fields__}, "skipped_codecs": skipped})
    plan = planned(layout, selection, refs)
    again = pickle.loads(pickle.dumps(plan))
    assert again.to_json() == json.loads(json.dumps(plan.to_json()))
    assert again.layout == plan.layout or fill is not None
    assert again.selection == plan.selection
    assert again.ranges()[0] == plan.ranges()[0] == (() if refs is None else refs.paths)
    assert np.array_equal(again.ranges()[1], plan.ranges()[1])
    counts = ("bytes_wanted", "bytes_fetched", "bytes_decoded", "num_chunks", "exact")
    assert {name: again.to_json()[name] for name in counts} == {name: getattr(plan, name) for name in counts}
    whole = ReadPlan(index=3, rank=1, fields={"u": (plan, plan), "v": ()})
    copy = pickle.loads(pickle.dumps(whole))
    assert copy.to_json() == whole.to_json()
    assert copy.bytes_fetched == 2 * plan.bytes_fetched
    assert copy.exact == plan.exact


def test_amplification():
    layout = layout_of((100,), (10,), codecs=(Codec(name="zstd"),))
    plan = planned(layout, ((Segment(start=5, count=10),),), nbytes=10)
    both = ReadPlan(index=0, rank=0, fields={"u": (plan,)})
    assert (both.amplification, both.decode_amplification) == (20 / 40, 80 / 40)
    assert ReadPlan(index=0, rank=0, fields={}).amplification == 1.0


def test_rows_far_apart_are_read_alone_and_near_ones_together_up_to_a_limit():
    layout = layout_of((4, 6, 4096), (4, 6, 4096))
    narrow = planned(layout, (*full((4, 6)), (Segment(start=5, count=10),)))
    assert narrow.bytes_fetched == narrow.bytes_wanted
    assert len(narrow.ranges()[1]) == 24
    layout = layout_of((5000, 1024), (5000, 1024))  # 20 MB
    rows = full((5000,))[0]
    near = planned(layout, (rows, (Segment(start=0, count=1000),)))
    sizes = near.pattern.spans.nbytes
    assert sizes.max() <= MAX_SPAN
    assert len(sizes) == -(-layout.nbytes // MAX_SPAN)
    assert near.ranges()[1][:, 2].max() <= MAX_READ


def test_a_family_of_selections_that_do_not_move():
    layout = layout_of((6, 8), (2, 4))
    selection = ((Segment(start=1, count=4),), (Segment(start=2, count=5),))
    family = PlanFamily((), (4, 5))
    wanted = planned(layout, selection).to_json()
    for _ in range(2):
        plan = family.plan(layout, selection, lambda layout, chunks: refs_of(layout, selection))
        assert plan.to_json() == wanted
    nothing = ((), full((8,))[0])
    for dims in ((), (0,), (0, 1)):
        assert PlanFamily(dims, (0, 8)).plan(layout, nothing, lambda *_: refs_of(layout, nothing)).num_chunks == 0


def test_summary_equals_the_ranks_own_plans_and_counts_shared_chunks():
    layout = layout_of((37, 721, 1440), (1, 91, 180), codecs=(Codec(name="zstd"),))
    bounds = np.linspace(0, 721, 9).astype(int)

    def selection_of(rank):
        rows = Segment(start=int(bounds[rank]), count=int(bounds[rank + 1] - bounds[rank]))
        return (Segment(start=0, count=37),), (rows,), (Segment(start=0, count=1440),)

    found = summarize(layout, selection_of, 8)
    plans = [planned(layout, selection_of(r), refs=None) for r in range(8)]
    for name in ("bytes_wanted", "bytes_fetched", "bytes_decoded", "num_chunks"):
        assert getattr(found, name).tolist() == [getattr(p, name) for p in plans]
    assert found.bytes_wanted.sum() == layout.nbytes
    rows = [set(range(bounds[r] // 91, (bounds[r + 1] - 1) // 91 + 1)) for r in range(8)]
    shared = sum(1 for c in range(8) if sum(c in r for r in rows) > 1)
    assert found.shared_chunks == shared * 37 * 8
    assert not found.exact
    assert found.sums()["amplification"] > 1
    for rank, plan in enumerate(plans):
        figures = found.sums(rank)
        assert (figures["bytes_fetched"], figures["num_chunks"]) == (plan.bytes_fetched, plan.num_chunks)
        assert figures["amplification"] == plan.bytes_fetched / plan.bytes_wanted
        assert figures["decode_amplification"] == plan.bytes_decoded / plan.bytes_wanted
    located = summarize(layout, selection_of, 8, lambda c: refs_for(layout, c))
    assert located.exact
    assert located.bytes_fetched.sum() == 100 * sum(p.num_chunks for p in plans)


def test_a_rank_of_no_rows_reads_nothing():
    layout = layout_of((37, 20), (1, 10))
    found = summarize(layout, lambda rank: (full((37,))[0], () if rank else full((20,))[0]), 2)
    assert found.num_chunks.tolist() == [74, 0]
    assert found.sums(1) == {
        "bytes_wanted": 0, "bytes_fetched": 0, "bytes_decoded": 0, "num_chunks": 0,
        "amplification": None, "decode_amplification": None,
    }  # fmt: skip
    assert found.sums() == found.sums(0)


def refs_for(layout, chunks):
    number = np.ravel_multi_index(tuple(chunks.T), layout.num_chunks)
    return ChunkRefs(
        paths=("data",), path_index=np.zeros(len(chunks), np.int64), offset=number * 10**6,
        nbytes=np.full(len(chunks), 100),
    )  # fmt: skip


def test_summary_of_a_thousand_ranks():
    layout = layout_of((37, 721, 1440), (1, 91, 180))

    def selection_of(rank):
        y, x = divmod(rank, 32)
        rows, columns = np.linspace(0, 721, 33).astype(int), np.linspace(0, 1440, 33).astype(int)
        return (
            (Segment(start=0, count=37),),
            (Segment(start=int(rows[y]), count=int(rows[y + 1] - rows[y])),),
            (Segment(start=int(columns[x]), count=int(columns[x + 1] - columns[x])),),
        )

    found = summarize(layout, selection_of, 1024)
    assert found.bytes_wanted.sum() == layout.nbytes
    assert found.shared_chunks == math.prod(layout.num_chunks)  # every chunk is smaller than a rank's neighbours


@given(
    tiles=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3)),
    order=st.sampled_from(["rows", "columns", "random"]),
    seed=st.integers(0, 99),
)
def test_merged_copies_are_the_same_copies(tiles, order, seed):
    ny, nx, tile = tiles
    places = [(y, x) for y in range(ny) for x in range(nx)]
    if order == "columns":
        places.sort(key=lambda p: p[::-1])
    if order == "random":
        np.random.default_rng(seed).shuffle(places)
    num, width = len(places), nx * tile
    read = np.arange(num) * 2 // max(num, 1)
    copies = merge_copies(
        read=read,
        num_reads=2,
        shape=np.tile([tile, tile], (num, 1)),
        source=np.arange(num) * tile * tile,
        source_strides=np.tile([tile, 1], (num, 1)),
        dest=np.array([(y * tile * width + x * tile) for y, x in places]),
        dest_strides=np.tile([width, 1], (num, 1)),
    )
    data = np.arange(num * tile * tile, dtype=np.int64).astype(np.uint8)
    want, out = np.zeros((ny * tile, width), np.uint8), np.zeros((ny * tile, width), np.uint8)
    for i, (y, x) in enumerate(places):
        block = data[i * tile * tile : (i + 1) * tile * tile].reshape(tile, tile)
        want[y * tile : (y + 1) * tile, x * tile : (x + 1) * tile] = block
    for i in range(copies.bounds[0], copies.bounds[-1]):
        source = np.ndarray(copies.shape[i], np.uint8, data, copies.source[i], copies.source_strides[i])
        np.ndarray(copies.shape[i], np.uint8, out, copies.dest[i], copies.dest_strides[i])[...] = source
    for gather in itertools.chain(*copies.gathers.values()):
        gather.run(data, out.reshape(-1), np.dtype(np.uint8))
    assert np.array_equal(out, want)
    if order == "rows" and num > 8:
        assert len(copies.shape) < num


@settings(deadline=None)
@given(
    rows=st.lists(st.integers(0, 11), min_size=2, max_size=6),
    steps=st.integers(1, 2),
    chunk=st.sampled_from([1, 2, 3, 12]),
    codecs=st.sampled_from([(), (Codec(name="zlib"),)]),
    gap=st.sampled_from([0, 64, 1 << 15]),
)
def test_a_plan_does_not_depend_on_plans_made_before(rows, steps, chunk, codecs, gap):
    layout = layout_of((13, 6, 8), (chunk, 4, 8), codecs=codecs)
    for row in rows:
        selection = ((Segment(start=row, count=steps),), (Segment(start=1, count=4),), (Segment(start=0, count=8),))
        chunks = chunks_needed(layout, selection)
        sizes = np.full(len(chunks), layout.chunk_nbytes)
        offset = row * 10**6 + np.cumsum(sizes + gap)
        refs = ChunkRefs(paths=("data",), path_index=np.zeros(len(chunks), np.int64), offset=offset, nbytes=sizes)
        shape = (steps, 4, 8)
        warm = plan_array(layout, selection, refs, out_shape=shape)
        _forget_plans()
        cold = plan_array(layout, selection, refs, out_shape=shape)
        assert warm.to_json() == cold.to_json()
        assert np.array_equal(warm.chunks, chunks)
        for one, other in zip(warm.pieces, cold.pieces, strict=True):
            assert all(np.array_equal(getattr(one, n), getattr(other, n)) for n in one.__dataclass_fields__)
        for one, other in ((warm.spans, cold.spans), (warm.encoded, cold.encoded)):
            assert (one is None) == (other is None)
            if one is not None:
                assert all(np.array_equal(getattr(one, n), getattr(other, n)) for n in one.__dataclass_fields__)


@settings(deadline=None)
@given(
    rows=st.lists(st.integers(0, 10), min_size=2, max_size=8),
    relative=st.sampled_from([((0, 1, 1, 0),), ((0, 2, 1, 0),), ((0, 1, 1, 0), (2, 1, 1, 1)), ((2, 3, -1, 0),)]),
    chunk=st.sampled_from([1, 2, 5, 13]),
    codecs=st.sampled_from([(), (Codec(name="zlib"),), (Codec(name="crc32c"),)]),
    gap=st.sampled_from([0, 64, 1 << 15]),
    lost=st.sampled_from([None, 1]),
    lonely=st.booleans(),
)
def test_a_family_plans_what_plan_array_does(rows, relative, chunk, codecs, gap, lost, lonely):
    layout = layout_of((13, 6, 8), (chunk, 4, 8), codecs=codecs)
    shape = (sum(count for _, count, _, _ in relative), 4, 8)
    family, located, of_pattern = PlanFamily((0,), shape), [], {}

    def locate(layout, chunks):
        located.append(chunks)
        sizes = np.full(len(chunks), layout.chunk_nbytes)
        path_index = np.arange(len(chunks)) if lonely else np.zeros(len(chunks), np.int64)
        path_index[lost:] = path_index[lost:] if lost is None else -1
        offset = chunks @ np.array([10**6, 10**4, 10**4]) + np.cumsum(sizes + gap)
        paths = tuple(f"file {c}" for c in chunks.tolist())
        return ChunkRefs(paths=paths, path_index=path_index, offset=offset, nbytes=sizes)

    for row in rows:
        first = tuple(Segment(start=row + s, count=n, step=k, offset=o) for s, n, k, o in relative)
        selection = (first, (Segment(start=1, count=4),), (Segment(start=0, count=8),))
        if max(s.start + max(0, (s.count - 1) * s.step) for s in first) >= 13:
            with pytest.raises(ConfigError, match="does not fit 13 rows"):
                family.plan(layout, selection, locate)
            continue
        found = family.plan(layout, selection, locate)
        if codecs:  # the reader finds a row inside a decoded chunk once for a pattern
            starts = [p.start.tolist() for p in found.pieces]
            assert of_pattern.setdefault(id(found.pattern), (starts, found.pattern))[0] == starts
        _forget_plans()
        chunks = chunks_needed(layout, selection)
        wanted = plan_array(layout, selection, locate(layout, chunks), out_shape=shape)
        assert np.array_equal(located[-2], chunks)
        assert found.to_json() == wanted.to_json()
        assert found.num_reads == wanted.num_reads
        assert np.array_equal(found.absent, wanted.absent)
        tables = [(found.spans, wanted.spans), (found.encoded, wanted.encoded)]
        for one, other in [*tables, *zip(found.pieces, wanted.pieces, strict=True)]:
            assert (one is None) == (other is None)
            if one is not None:
                assert all(np.array_equal(getattr(one, n), getattr(other, n)) for n in one.__dataclass_fields__)


def test_places_that_make_no_sense_are_refused_also_where_the_plan_is_known():
    layout = layout_of((13, 6, 8), (1, 6, 8))
    selection = ((Segment(start=0, count=1),), (Segment(start=0, count=6),), (Segment(start=0, count=8),))
    for offset in (100, -1, 2**61):
        one = np.array([layout.chunk_nbytes])
        refs = ChunkRefs(paths=("data",), path_index=np.zeros(1, np.int64), offset=np.array([offset]), nbytes=one)
        if offset == 100:
            assert plan_array(layout, selection, refs, out_shape=(1, 6, 8)).ranges()[1].tolist() == [[0, 100, *one]]
            continue
        with pytest.raises(CorruptDataError, match="make no sense"):
            plan_array(layout, selection, refs, out_shape=(1, 6, 8))


def _forget_plans():
    array._cuts._kept.clear()


@pytest.mark.slow_for("scattered")
@pytest.mark.parametrize(
    "rows",
    [
        lambda: [Segment(start=0, count=1 << 40, step=1, offset=0)],
        lambda: [Segment(start=7, count=1 << 23, step=1 << 10, offset=0)],
        lambda: [Segment(start=25 * i, count=1, step=1, offset=i) for i in range((1 << 22) + 1)],
    ],
    ids=["dense", "sparse", "scattered"],
)
def test_more_chunks_than_one_read_may_have(rows):
    """Damaged metadata may say so: planning would take minutes, and the memory."""
    layout = layout_of((1 << 50, 3), (25, 1))
    with pytest.raises(TooLargeError, match=r"'u' of shape .* lies in \d+ of them or more, and one read takes at most"):
        chunks_needed(layout, (rows(), [Segment(start=0, count=1, step=1, offset=0)]))
