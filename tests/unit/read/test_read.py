"""read_plan against NumPy indexing, on real files of every layout; then against zarr-python and h5py."""

import dataclasses
import gc
import math
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import fsspec
import h5py
import numcodecs
import numpy as np
import pytest
import zarr
from google_crc32c import value as crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scidata.core.bounds import segments_of_slice
from scidata.core.types import ArrayLayout, ChunkRefs, Codec, Decoding, Segment
from scidata.errors import (
    ChecksumError,
    ConfigError,
    CorruptDataError,
    MissingChunkError,
    ShortReadError,
    UnsupportedFormatError,
)
from scidata.plan import array
from scidata.plan.array import chunks_needed, plan_array
from scidata.read import Job, blosc, pattern_tables, read_plan, read_plans
from scidata.read.context import ReadStats
from scidata.sources import open_source
from scidata.sources.access import files

ENCODERS = {
    "blosc": lambda b, c: numcodecs.Blosc(**c).encode(b),
    "zstd": lambda b, c: numcodecs.Zstd().encode(b),
    "gzip": lambda b, c: numcodecs.GZip().encode(b),
    "zlib": lambda b, c: numcodecs.Zlib().encode(b),
    "lz4": lambda b, c: numcodecs.LZ4().encode(b),
    "bz2": lambda b, c: numcodecs.BZ2().encode(b),
    "lzma": lambda b, c: numcodecs.LZMA().encode(b),
    "shuffle": lambda b, c: np.asarray(numcodecs.Shuffle(**c).encode(np.frombuffer(b, "u1"))).tobytes(),
    "fletcher32": lambda b, c: numcodecs.Fletcher32().encode(np.frombuffer(b, "u1")),
    "crc32c": lambda b, c: bytes(b) + crc32c(bytes(b)).to_bytes(4, "little"),
}
CHAINS = [
    (),
    ("crc32c",),
    ("blosc",),
    ("zstd",),
    ("lz4", "crc32c"),
    ("shuffle", "zlib", "fletcher32"),
    ("shuffle", "gzip"),
    ("fletcher32",),
    ("bz2",),
    ("lzma",),
    ("blosc", "zstd"),
]


def configured(names, itemsize):
    configs = {"blosc": {"cname": "lz4", "shuffle": 1}, "shuffle": {"elementsize": itemsize}}
    return tuple(Codec(name=n, config=configs.get(n, {})) for n in names)


def encode(data, codecs):
    for codec in codecs:
        data = bytes(ENCODERS[codec.name](data, codec.config))
    return data


class FileSource:
    """Chunk files written by numcodecs: a source of one array. One file for all chunks, or one per chunk."""

    format = "test"

    def __init__(self, folder, data, *, chunks, axis_order=None, codecs=(), one_file=False, pad=0, skip=()):
        self.path, self.attributes = str(folder), {}
        order = tuple(range(data.ndim)) if axis_order is None else axis_order
        self.layout = ArrayLayout(
            store=self.path, name="u", shape=data.shape, dims=tuple(f"dim_{i}" for i in range(data.ndim)),
            dtype=data.dtype, chunks=chunks, axis_order=order, codecs=codecs,
            fill_value=np.array(7, data.dtype),
        )  # fmt: skip
        self.places, stream = {}, bytearray(b"head")
        for at in np.ndindex(*self.layout.num_chunks):
            part = data[tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, chunks, strict=True))]
            full = np.full(chunks, 99, data.dtype)
            full[tuple(map(slice, part.shape))] = part
            part = full
            mask = skip[sum(at) % len(skip)] if skip else 0
            used = [c for i, c in enumerate(codecs) if not mask >> i & 1]
            raw = encode(np.ascontiguousarray(part.transpose(order)).tobytes(), used)
            if one_file:
                self.places[at] = ("all", len(stream), len(raw), mask)
                stream += raw + b"-" * pad
            else:
                name = ".".join(map(str, at)) or "scalar"
                with open(os.path.join(folder, name), "wb") as f:
                    f.write(raw)
                self.places[at] = (name, 0, len(raw), mask)
        if one_file:
            with open(os.path.join(folder, "all"), "wb") as f:
                f.write(stream)

    @property
    def arrays(self):
        return {"u": self.layout}

    def check_unchanged(self, layout, paths):
        """Its files do not change."""

    def locate(self, layout, chunks):
        found = [self.places.get(tuple(c)) for c in chunks.tolist()]
        names = sorted({f[0] for f in found if f})
        return ChunkRefs(
            paths=tuple(os.path.join(self.path, n) for n in names),
            path_index=np.array([names.index(f[0]) if f else -1 for f in found], np.int64),
            offset=np.array([f[1] if f else 0 for f in found], np.int64),
            nbytes=np.array([f[2] if f else 0 for f in found], np.int64),
            skipped_codecs=np.array([f[3] if f else 0 for f in found], np.uint32),
        )

    def read_box(self, layout, box, out):
        raise AssertionError("not a fallback array")

    def close(self):
        pass


class CountingCache(files.FileCache):
    """Counts the bytes that really come from files."""

    def __init__(self):
        super().__init__()
        self.count, self.guard = 0, threading.Lock()

    def read_at_once(self, path, offset, *views):
        done = super().read_at_once(path, offset, *views)
        with self.guard:
            self.count += done * sum(v.nbytes for v in views)
        return done

    def read_each(self, path, offsets, views):
        views = list(views)
        done = super().read_each(path, offsets, views)
        with self.guard:
            self.count += sum(view.nbytes for view in views[:done])
        return done

    def read_into(self, path, offset, buffers):
        super().read_into(path, offset, buffers)
        with self.guard:
            self.count += sum(memoryview(b).nbytes for b in buffers)


@pytest.fixture
def counted(monkeypatch):
    cache = CountingCache()
    monkeypatch.setattr(files, "_cache", cache)
    return cache


def rows_of(segments, size):
    """The source row of each destination row."""
    rows = np.full(size, -1)
    for s in segments:
        rows[s.offset : s.offset + s.count] = s.start + s.step * np.arange(s.count)
    return rows


def shape_of(selection):
    return tuple(max((s.offset + s.count for s in dim), default=0) for dim in selection)


def expected(data, selection):
    return data[np.ix_(*(rows_of(s, n) for s, n in zip(selection, shape_of(selection), strict=True)))]


def everything(shape):
    return tuple((Segment(start=0, count=n),) for n in shape)


def read(source, selection, dtype=None, layout=None, **options):
    layout = layout or source.layout
    refs = None if layout.fallback else source.locate(layout, chunks_needed(layout, selection))
    plan = plan_array(layout, selection, refs, out_shape=shape_of(selection))
    out = np.full(plan.out_shape, 55, dtype or layout.dtype.newbyteorder("="))
    stats = read_plan(plan, out, source=source, **options)
    return out, plan, stats


@st.composite
def segments(draw, size):
    """Segments of one dimension that fill a destination: forwards, backwards, strided, repeated, out of order."""
    found, offset = [], 0
    for _ in range(draw(st.integers(0, 3)) if size else 0):
        step = draw(st.sampled_from([1, 1, 1, 2, 3, 7, -1, -2, -5]))
        start = draw(st.integers(0, size - 1))
        room = (size - 1 - start) // step + 1 if step > 0 else start // -step + 1
        count = draw(st.integers(0, room))
        found.append(Segment(start=start, count=count, step=step, offset=offset))
        offset += count
    return tuple(draw(st.permutations(found)))


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=0, max_size=4)))
    chunks = tuple(draw(st.integers(1, n + 3)) for n in shape)
    dtype = draw(st.sampled_from(["u1", "<i2", ">i2", "<f4", ">f4", "<f8", "<i8", "bool", "<c8"]))
    return {
        "shape": shape,
        "chunks": chunks,
        "dtype": np.dtype(dtype),
        "axis_order": tuple(draw(st.permutations(range(len(shape))))),
        "codecs": draw(st.sampled_from(CHAINS)),
        "one_file": draw(st.booleans()),
        "pad": draw(st.sampled_from([0, 1, 40])),
        "skip": draw(st.sampled_from([(), (0, 1), (0, 3, 7)])),
        "selection": tuple(draw(segments(n)) for n in shape),
    }


def values(shape, dtype):
    return (np.arange(math.prod(shape)) * 37 % 251).reshape(shape).astype(dtype)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), dtype=st.sampled_from([None, None, np.float64]), threads=st.booleans())
def test_any_selection_of_any_layout_equals_numpy(case, dtype, threads, tmp_path_factory, counted, pool):
    selection, codecs = case.pop("selection"), configured(case.pop("codecs"), case["dtype"].itemsize)
    data = values(case.pop("shape"), case.pop("dtype"))
    if data.dtype.kind == "c":
        dtype = None
    source = FileSource(tmp_path_factory.mktemp("case"), data, codecs=codecs, **case)
    counted.count = 0
    out, plan, stats = read(source, selection, dtype, executor=pool if threads else None)
    np.testing.assert_array_equal(out, expected(data, selection))
    assert plan.exact
    assert plan.bytes_wanted == out.size * data.dtype.itemsize
    assert counted.count == plan.bytes_fetched == stats.bytes_fetched
    assert stats.bytes_decoded <= plan.bytes_decoded


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(3) as executor:
        yield executor


@pytest.mark.parametrize("axis_order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("codecs", [(), ("blosc",), ("crc32c",), ("zstd",)])
@pytest.mark.parametrize("chunks", [(40, 300, 200), (20, 100, 200), (3, 64, 50)])
def test_large_arrays_take_every_fast_path(tmp_path, axis_order, codecs, chunks, counted, pool):
    data = np.random.default_rng(0).integers(0, 9, (40, 300, 200)).astype("f4")
    source = FileSource(
        tmp_path, data, chunks=chunks, axis_order=axis_order, codecs=configured(codecs, 4), one_file=True, pad=3
    )
    slab = ((Segment(start=0, count=40),), (Segment(start=75, count=38),), (Segment(start=0, count=200),))
    wrapped = (
        (Segment(start=39, count=40, step=-1),),
        (Segment(start=290, count=10), Segment(start=0, count=60, offset=10)),
        (Segment(start=190, count=10), Segment(start=0, count=30, offset=10)),
    )
    for selection in (everything(data.shape), slab, wrapped):
        for executor in (None, pool):
            counted.count = 0
            out, plan, stats = read(source, selection, executor=executor)
            assert np.array_equal(out, expected(data, selection))
            assert counted.count == stats.bytes_fetched <= plan.bytes_fetched
            if "blosc" not in codecs or selection == everything(data.shape):
                assert stats.bytes_fetched == plan.bytes_fetched
    out, _, _ = read(source, slab, np.float64)
    assert np.array_equal(out, expected(data, slab))


@pytest.mark.parametrize("content", ["compresses", "random"])
@pytest.mark.parametrize("library", ["c-blosc", "numcodecs"])
def test_blosc_reads_and_decodes_only_the_blocks_that_are_wanted(tmp_path, content, library, counted, monkeypatch):
    if library == "numcodecs":
        monkeypatch.setattr(blosc, "_decompress_ctx", None)
    assert library == "numcodecs" or blosc._decompress_ctx is not None
    rng = np.random.default_rng(0)
    data = rng.normal(size=(67, 256, 251)).astype("f4")  # the last block is short
    if content == "compresses":
        data = np.round(data)
    source = FileSource(tmp_path, data, chunks=data.shape, codecs=configured(["blosc"], 4), one_file=True, pad=5)
    full = (Segment(start=0, count=256),), (Segment(start=0, count=251),)
    for start, count in ((30, 8), (0, 1), (66, 1), (10, 50)):
        counted.count = 0
        out, plan, stats = read(source, ((Segment(start=start, count=count),), *full))
        assert np.array_equal(out, data[start : start + count])
        assert plan.bytes_decoded == data.nbytes
        assert counted.count == stats.bytes_fetched
        if count <= 8:
            assert stats.bytes_decoded < data.nbytes // 4
            assert stats.bytes_fetched < plan.bytes_fetched // 4
    ends = (Segment(start=0, count=1), Segment(start=66, count=1, offset=1))
    counted.count = 0
    out, plan, stats = read(source, (ends, *full))  # two runs of blocks
    assert np.array_equal(out, data[[0, 66]])
    assert counted.count == stats.bytes_fetched < plan.bytes_fetched // 2


def test_a_blosc_block_table_that_points_astray_is_an_error(tmp_path):
    data = np.round(np.random.default_rng(0).normal(size=(64, 256, 256))).astype("f4")
    source = FileSource(tmp_path, data, chunks=data.shape, codecs=configured(["blosc"], 4))
    path = tmp_path / "0.0.0"
    row = ((Segment(start=30, count=8),), (Segment(start=0, count=256),), (Segment(start=0, count=256),))
    for entry in (-5, 0, path.stat().st_size):
        with open(path, "r+b") as f:
            f.seek(16 + 4)
            f.write(entry.to_bytes(4, "little", signed=True))
        with pytest.raises(CorruptDataError, match=r"chunk \(0, 0, 0\).*block table points out"):
            read(source, row)


def test_elements_outside_the_selection_keep_their_values(tmp_path):
    data = values((6, 5), "i4")
    source = FileSource(tmp_path, data, chunks=(2, 2))
    selection = ((Segment(start=1, count=2, offset=3),), (Segment(start=0, count=5),))
    plan = plan_array(source.layout, selection, None, out_shape=(8, 5))
    out = np.full((8, 5), -1, "i4")
    read_plan(plan, out, source=source)  # a plan without places asks the source for them
    assert np.array_equal(out[3:5], data[1:3])
    assert np.all(np.delete(out, [3, 4], axis=0) == -1)


# -- CF decoding -------------------------------------------------------------------------------------------------


def xarray_decodes(raw, attributes):
    """What xarray makes of raw values; its result is the oracle."""
    xarray = pytest.importorskip("xarray")
    return xarray.conventions.decode_cf_variable("u", xarray.Variable(("y", "x"), raw, attributes)).values


@pytest.mark.parametrize("codecs", [(), ("blosc",)])
@pytest.mark.parametrize("stored", ["<i2", ">i2", "<i4", "<f4", ">f4", "u1"])
@pytest.mark.parametrize("chunks", [(50, 40), (7, 9)])
def test_cf_decoding_is_bit_for_bit_xarrays(tmp_path, codecs, stored, chunks):
    raw = values((50, 40), stored)
    scale, offset, fill = np.float32(0.0137), np.float32(-3.7), np.asarray(raw[3, 5])[()]
    source = FileSource(tmp_path, raw, chunks=chunks, codecs=configured(codecs, raw.dtype.itemsize))
    want = xarray_decodes(raw, {"scale_factor": scale, "add_offset": offset, "_FillValue": fill})
    decoding = Decoding(dtype=want.dtype, scale=float(scale), offset=float(offset), fill_values=(fill,))
    out, _, _ = read(source, everything(raw.shape), want.dtype, decoding=decoding)
    assert np.isnan(want).any()
    assert out.tobytes() == want.tobytes()
    half, _, _ = read(source, everything(raw.shape), np.float16, decoding=decoding)  # one cast, after the arithmetic
    assert half.tobytes() == want.astype(np.float16).tobytes()
    single, _, _ = read(source, everything(raw.shape), np.float32, decoding=decoding)
    assert single.tobytes() == want.astype(np.float32).tobytes()


def test_fill_alone_keeps_floats_bit_for_bit(tmp_path):
    raw = np.random.default_rng(1).normal(size=(30, 20)).astype(">f4")
    raw[2, 3], raw[4, 5], raw[6, 7] = 1e20, np.nan, -9999
    source = FileSource(tmp_path, raw, chunks=(30, 20))
    decoding = Decoding(dtype=np.dtype("f4"), fill_values=(1e20, np.nan, -9999))
    out, _, _ = read(source, everything(raw.shape), "f4", decoding=decoding)
    want = np.where((raw == np.float32(1e20)) | (raw == -9999), np.float32(np.nan), raw.astype("f4"))
    np.testing.assert_array_equal(out, want)
    assert np.isnan(out).sum() == 3


def test_unsigned_view(tmp_path):
    raw = np.array([[-1, -128, 5, 127]], "i1")
    source = FileSource(tmp_path, raw, chunks=(1, 3))
    decoding = Decoding(dtype=np.dtype("f4"), scale=0.5, fill_values=(255,), view_as=np.dtype("u1"))
    out, _, _ = read(source, everything(raw.shape), "f4", decoding=decoding)
    np.testing.assert_array_equal(out, np.array([[np.nan, 64, 2.5, 63.5]], "f4"))
    big = np.array([-2, 3], ">i2")
    (tmp_path / "big").mkdir()
    source = FileSource(tmp_path / "big", big, chunks=(2,))
    decoding = Decoding(dtype=np.dtype("u2"), view_as=np.dtype("u2"))
    out, _, _ = read(source, everything(big.shape), "u2", decoding=decoding)
    assert out.tolist() == [65534, 3]


# -- what is wrong is said ---------------------------------------------------------------------------------------


def damaged(tmp_path, codecs, change, **options):
    data = values((8, 6), "i4")
    source = FileSource(tmp_path, data, chunks=(4, 3), codecs=configured(codecs, 4), **options)
    path = tmp_path / "1.0"
    raw = bytearray(path.read_bytes())
    path.write_bytes(change(raw))
    return source


def flip(raw):
    raw[len(raw) // 2] ^= 0xFF
    return raw


@pytest.mark.parametrize(
    "codecs", [("crc32c",), ("zstd", "crc32c"), ("fletcher32",), ("shuffle", "zlib", "fletcher32")]
)
@pytest.mark.parametrize("count", [8, 5])  # whole chunks, and a part
def test_checksums_are_checked(tmp_path, codecs, count):
    source = damaged(tmp_path, codecs, flip)
    selection = ((Segment(start=0, count=count),), (Segment(start=0, count=6),))
    with pytest.raises(ChecksumError, match=r"field 'u', chunk \(1, 0\).*checksum"):
        read(source, selection)


@pytest.mark.parametrize("codec", ["blosc", "zstd", "gzip", "zlib", "lz4", "bz2", "lzma"])
def test_a_chunk_of_another_size_is_corrupt(tmp_path, codec):
    data = values((8, 6), "i4")
    source = FileSource(tmp_path, data, chunks=(4, 3), codecs=configured([codec], 4))
    for count in (11, 13, 4000):
        raw = encode(values((count,), "i4").tobytes(), source.layout.codecs)
        (tmp_path / "1.0").write_bytes(raw)
        source.places[1, 0] = ("1.0", 0, len(raw), 0)
        with pytest.raises(CorruptDataError, match=r"field 'u', chunk \(1, 0\)"):
            read(source, everything(data.shape))


@pytest.mark.parametrize("codec", ["blosc", "zstd", "gzip", "zlib", "lz4", "bz2", "lzma"])
def test_garbage_is_corrupt(tmp_path, codec):
    source = damaged(tmp_path, [codec], lambda raw: bytes(len(raw)))
    with pytest.raises(CorruptDataError, match=r"field 'u', chunk \(1, 0\)"):
        read(source, everything((8, 6)))


@pytest.mark.parametrize("codecs", [(), ("blosc",), ("crc32c",)])
def test_short_and_missing_files_are_named(tmp_path, codecs):
    source = damaged(tmp_path, codecs, lambda raw: raw[:-5])
    with pytest.raises(ShortReadError, match=r"chunk \(1, 0\).*ends at byte"):
        read(source, everything((8, 6)))
    (tmp_path / "1.0").unlink()
    files.files().close()
    with pytest.raises(MissingChunkError, match=r"chunk \(1, 0\).*is not there"):
        read(source, everything((8, 6)))


def test_a_merged_read_names_the_chunk_that_is_cut_off(tmp_path):
    data = values((8, 6), "i4")
    source = FileSource(tmp_path, data, chunks=(4, 3), one_file=True)
    path = tmp_path / "all"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ShortReadError, match=r"chunk \(1, 1\)"):
        read(source, everything(data.shape))


@pytest.mark.parametrize(("nbytes", "error"), [(40, ShortReadError), (60, CorruptDataError)])
def test_raw_chunks_of_the_wrong_size(tmp_path, nbytes, error):
    data = values((8, 6), "i4")
    source = FileSource(tmp_path, data, chunks=(4, 3))
    source.places[1, 0] = ("1.0", 0, nbytes, 0)
    with pytest.raises(error, match=rf"chunk \(1, 0\): it has {nbytes} bytes, but 48"):
        read(source, everything(data.shape))


def test_absurd_places_are_refused_before_anything_is_allocated(tmp_path):
    data = values((8, 6), "i4")
    source = FileSource(tmp_path, data, chunks=(4, 3), codecs=configured(["zstd"], 4))
    for place in [(0, 1 << 50), (1 << 62, 10), (-1, 10)]:
        source.places[1, 0] = ("1.0", *place, 0)
        with pytest.raises(CorruptDataError, match=r"chunk \(1, 0\).*no sense"):
            read(source, everything(data.shape))


@pytest.mark.parametrize("codecs", [(), ("blosc",)])
def test_absent_chunks_are_errors_or_fill(tmp_path, codecs):
    data = values((8, 6), "i4")
    source = FileSource(tmp_path, data, chunks=(4, 3), codecs=configured(codecs, 4))
    del source.places[1, 0], source.places[1, 1]
    with pytest.raises(MissingChunkError, match=r"chunk \(1, 0\).*1 more.*allow_missing"):
        read(source, everything(data.shape))
    out, _, _ = read(source, everything(data.shape), allow_missing=True)
    assert np.array_equal(out[:4], data[:4])
    assert np.all(out[4:] == 7)
    decoding = Decoding(dtype=np.dtype("f8"), scale=2.0, fill_values=(7,))
    out, _, _ = read(source, everything(data.shape), "f8", allow_missing=True, decoding=decoding)
    assert np.isnan(out[4:]).all()


def test_unknown_codec_is_unsupported(tmp_path):
    data = values((4,), "i4")
    source = FileSource(tmp_path, data, chunks=(4,))
    source.layout = type(source.layout)(
        **{**{f: getattr(source.layout, f) for f in source.layout.__dataclass_fields__}, "codecs": (Codec(name="x9"),)}
    )
    with pytest.raises(UnsupportedFormatError, match="'x9'"):
        read(source, everything((4,)))


def test_buffers_that_do_not_fit_are_refused(tmp_path):
    source = FileSource(tmp_path, values((4, 4), "i4"), chunks=(4, 4))
    plan = plan_array(source.layout, everything((4, 4)), None, out_shape=(4, 4))
    for out in (np.empty((4, 5), "i4"), np.empty((4, 4), "i4").T[::-1], np.empty((4, 4), "i4", order="F")):
        with pytest.raises(ConfigError, match="buffer must be"):
            read_plan(plan, out, source=source)


# -- threads -----------------------------------------------------------------------------------------------------


def test_one_error_of_many_threads_is_raised_once_and_ends_the_rest(tmp_path, pool, counted):
    data = np.zeros((64, 64, 64), "f8")
    source = FileSource(tmp_path, data, chunks=(1, 64, 64), codecs=configured(["crc32c"], 8))
    (tmp_path / "0.0.0").write_bytes(flip(bytearray((tmp_path / "0.0.0").read_bytes())))
    with pytest.raises(ChecksumError, match=r"chunk \(0, 0, 0\)"):
        read(source, everything(data.shape), executor=pool)
    assert counted.count < 64 * (64 * 64 * 8 + 4)
    assert pool.submit(lambda: 1).result(10) == 1  # no thread is left behind in the work


def test_reading_inside_the_executors_own_only_thread_does_not_wait_for_itself(tmp_path):
    data = np.random.default_rng(0).normal(size=(16, 128, 128))
    source = FileSource(tmp_path, data, chunks=(1, 128, 128))
    with ThreadPoolExecutor(2) as executor:
        jobs = [executor.submit(read, source, everything(data.shape), executor=executor) for _ in range(4)]
        for job in jobs:
            assert np.array_equal(job.result(30)[0], data)


# -- other places ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codecs", [(), ("blosc",)])
def test_urls_run_the_same_plan(tmp_path, codecs, pool, monkeypatch):
    data = values((20, 30), "f4")
    source = FileSource(tmp_path, data, chunks=(7, 8), codecs=configured(codecs, 4))
    memory = fsspec.filesystem("memory")
    root = f"/h3-{tmp_path.name}"
    memory.put(str(tmp_path), root, recursive=True)
    source.path = "memory:/" + root
    selection = ((Segment(start=19, count=9, step=-2),), (Segment(start=4, count=20),))
    given, cat_file = [], type(memory).cat_file

    def counting(self, path, start=None, end=None, **kwargs):
        given.append(cat_file(self, path, start, end, **kwargs))
        return given[-1]

    monkeypatch.setattr(type(memory), "cat_file", counting)
    out, plan, _ = read(source, selection, executor=pool)
    assert np.array_equal(out, expected(data, selection))
    assert sum(map(len, given)) == plan.bytes_fetched
    memory.rm(root, recursive=True)


def test_fallback_reads_boxes_through_the_source(tmp_path):
    data = values((10, 9), ">i2")

    class Fallback(FileSource):
        def read_box(self, layout, box, out):
            assert all(s.step > 0 for s in box)
            out[...] = data[box]

    source = Fallback(tmp_path, data, chunks=(4, 4))
    fields = {f: getattr(source.layout, f) for f in source.layout.__dataclass_fields__}
    layout = type(source.layout)(**{**fields, "fallback": True})
    selection = (
        (Segment(start=9, count=5, step=-2),),
        (Segment(start=7, count=2), Segment(start=0, count=3, offset=2)),
    )
    for dtype in (None, np.float32):
        out, plan, stats = read(source, selection, dtype, layout=layout)
        np.testing.assert_array_equal(out, expected(data, selection))
        assert not plan.exact
        assert stats.num_reads > 0


@pytest.mark.parametrize("chain", [(), ("zstd",), ("crc32c",), ("blosc",)])
def test_a_job_runs_any_number_of_times(tmp_path, chain):
    data = values((10, 9), "<i4")
    source = FileSource(tmp_path, data, chunks=(4, 4), codecs=configured(chain, 4))
    os.remove(os.path.join(tmp_path, "2.1"))
    del source.places[2, 1]
    selection, wanted = everything((10, 9)), data.copy()
    wanted[8:, 4:8] = 7  # the fill value, each time
    job = Job(plan_array(source.layout, selection, source.locate, out_shape=(10, 9)), source, allow_missing=True)
    buffers = [np.full((10, 9), i, dtype) for i, dtype in enumerate(["i4", "f8", "i4", "f4", "f8", "i4"])]
    stats = [read_plans([(job, out)]) for out in buffers]
    for out in buffers:
        np.testing.assert_array_equal(out, wanted)
    assert len({s.bytes_fetched for s in stats}) == 1
    assert stats[0].bytes_fetched == job.plan.bytes_fetched
    with pytest.raises(ConfigError, match="buffer must be"):
        read_plans([(job, np.empty((9, 10), "i4"))])
    strict = Job(job.plan, source)
    for _ in range(2):
        with pytest.raises(MissingChunkError, match=r"chunk \(2, 1\)"):
            read_plans([(strict, buffers[0])])


@pytest.mark.parametrize("num_quick", [0, 1, 3])
def test_raw_reads_of_whole_buffers_that_turn_out_slow_or_short_go_on_as_others(tmp_path, monkeypatch, num_quick):
    sources, wanted = [], [values((6, 5), dtype) for dtype in ("<f4", "<i8", "<i2")]
    for k, data in enumerate(wanted):
        os.mkdir(tmp_path / str(k))
        sources.append(FileSource(tmp_path / str(k), data, chunks=(6, 5)))
    plans = [plan_array(s.layout, everything((6, 5)), s.locate, out_shape=(6, 5)) for s in sources]
    jobs = [Job(plan, source) for plan, source in zip(plans, sources, strict=True)]
    asked = []
    monkeypatch.setattr("scidata.read._MIN_PARALLEL", 1)
    monkeypatch.setattr("scidata.read._Pace.is_slow", lambda self, _: asked.append(self) or len(asked) > num_quick)
    with ThreadPoolExecutor(2) as executor:
        buffers = [np.empty((6, 5), data.dtype) for data in wanted]
        stats = read_plans(list(zip(jobs, buffers, strict=True)), executor=executor)
        for out, data in zip(buffers, wanted, strict=True):
            np.testing.assert_array_equal(out, data)
        assert stats.num_reads == 3
        assert stats.bytes_fetched == stats.bytes_decoded == sum(data.nbytes for data in wanted)
        os.truncate(tmp_path / "2" / "0.0", 7)
        asked.clear()
        with pytest.raises(ShortReadError, match=r"chunk \(0, 0\)"):
            read_plans(list(zip(jobs, buffers, strict=True)), executor=executor)


def test_an_absent_chunk_of_a_fallback_array_is_missed_at_each_run(tmp_path):
    data = values((8, 4), "<f4")

    class Fallback(FileSource):
        def read_box(self, layout, box, out):
            out[...] = data[box]

    source = Fallback(tmp_path, data, chunks=(4, 4))
    layout = dataclasses.replace(source.layout, fallback=True)
    job, out = (
        Job(plan_array(layout, everything((8, 4)), source.locate, out_shape=(8, 4)), source),
        np.empty((8, 4), "f4"),
    )
    read_plans([(job, out)])
    np.testing.assert_array_equal(out, data)
    del source.places[1, 0]
    with pytest.raises(MissingChunkError, match=r"chunk \(1, 0\)"):
        read_plans([(job, out)])


def test_what_is_derived_from_a_pattern_is_shared_by_its_plans_and_goes_with_it(tmp_path):
    data = values((6, 400, 3), "<f4")
    source = FileSource(tmp_path, data, chunks=(1, 400, 3))
    dims = (Segment(start=0, count=400),), (Segment(start=0, count=2),)
    plans = [
        plan_array(source.layout, ((Segment(start=i, count=1),), *dims), source.locate, out_shape=(1, 400, 2))
        for i in range(6)
    ]
    pattern = weakref.ref(plans[0].pattern)
    assert all(plan.pattern is pattern() for plan in plans)
    array._cuts._kept.clear()  # of other tests
    gc.collect()
    before = len(pattern_tables._kept)
    for i, plan in enumerate(plans):
        for dtype in ("f4", "f8"):
            out = np.empty(plan.out_shape, dtype)
            read_plan(plan, out, source=source)
            np.testing.assert_array_equal(out, data[i : i + 1, :, :2])
    assert len(pattern_tables._kept) == before + 1
    assert len(pattern_tables._kept[pattern()]) == 2
    del plan, plans
    array._cuts._kept.clear()
    gc.collect()
    assert pattern() is None
    assert len(pattern_tables._kept) == before


def test_stats_add_up():
    assert ReadStats(bytes_fetched=1, num_reads=2) + ReadStats(bytes_fetched=3) == ReadStats(
        bytes_fetched=4, num_reads=2
    )


# -- the formats' own libraries as oracles -----------------------------------------------------------------------

WRAP = (
    (Segment(start=4, count=3, step=-2),),
    (Segment(start=60, count=10), Segment(start=0, count=33, offset=10)),
    (Segment(start=3, count=40, step=2),),
)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"compressors": None},
        {"compressors": None, "order": "F"},
        {"compressors": "auto"},
        {"compressors": "blosc"},
        {"compressors": "gzip"},
        {"compressors": "blosc", "shards": (4, 40, 60)},
        {"compressors": None, "shards": (4, 40, 60)},
    ],
)
def test_zarr(tmp_path, zarr_format, options, counted):
    options = dict(options)
    if zarr_format == 3 and "order" in options:
        pytest.skip("Zarr v3 says the order by a codec")
    if zarr_format == 2 and "shards" in options:
        pytest.skip("Zarr v2 has no shards")
    named = {
        (3, "blosc"): zarr.codecs.BloscCodec(cname="zstd", shuffle="bitshuffle"),
        (3, "gzip"): zarr.codecs.GzipCodec(),
        (2, "blosc"): numcodecs.Blosc("lz4"),
        (2, "gzip"): numcodecs.GZip(),
    }
    options["compressors"] = named.get((zarr_format, options["compressors"]), options["compressors"])
    data = np.random.default_rng(0).normal(size=(5, 70, 90)).astype("f4")
    path = str(tmp_path / "a.zarr")
    group = zarr.open_group(path, zarr_format=zarr_format, mode="w")
    group.create_array("u", shape=data.shape, chunks=(2, 20, 30), dtype="f4", **options)[:] = data
    source = open_source(path)
    layout = source.arrays["u"]
    for selection in (WRAP, everything(data.shape)):
        source.locate(layout, chunks_needed(layout, selection))  # reads the shards' indexes, once
        counted.count = 0
        out, plan, _ = read(source, selection, layout=layout)
        assert np.array_equal(out, expected(data, selection))
        assert counted.count == plan.bytes_fetched


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunks": (2, 20, 30)},
        {"chunks": (2, 20, 30), "compression": "gzip", "shuffle": True, "fletcher32": True},
        {"chunks": (2, 20, 30), "compression": "lzf"},
        {"chunks": (5, 70, 90), "shuffle": True},
    ],
)
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<i2"])
def test_hdf5(tmp_path, options, dtype):
    data = (np.random.default_rng(0).normal(size=(5, 70, 90)) * 100).astype(dtype)
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w") as f:
        f.create_dataset("u", data=data, **options)
    source = open_source(path)
    for selection in (WRAP, everything(data.shape)):
        out, _, _ = read(source, selection, layout=source.arrays["u"])
        np.testing.assert_array_equal(out, expected(data, selection))
    source.close()


class UniformSource(FileSource):
    """Says that no chunk skips a codec, as sources do."""

    def locate(self, layout, chunks):
        return dataclasses.replace(super().locate(layout, chunks), skipped_codecs=None)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 99),
    num=st.sampled_from([40, 300]),
    dtype=st.sampled_from(["<f4", ">f4", "u1", "<c16"]),
    order=st.permutations((0, 1, 2)),
    chunks=st.sampled_from([(2000, 3, 2), (37, 2, 1), (700, 3, 2)]),
    codecs=st.sampled_from([(), (Codec(name="crc32c"),), (Codec(name="zlib"),)]),
    one_file=st.booleans(),
    backwards=st.booleans(),
    decoding=st.sampled_from([None, Decoding(dtype=np.dtype("f8"), scale=0.5, offset=1.0)]),
)
def test_scattered_rows(tmp_path_factory, seed, num, dtype, order, chunks, codecs, one_file, backwards, decoding):
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 200, (2000, 3, 2)).astype(dtype)
    source = UniformSource(
        tmp_path_factory.mktemp("rows"), data, chunks=chunks, axis_order=tuple(order), codecs=codecs, one_file=one_file
    )
    rows = rng.choice(2000, num, replace=False)
    rows[: num // 2] = np.sort(rows[: num // 2])
    columns = slice(None, None, -1) if backwards else slice(None)
    selection = (segments_of_slice(rows.tolist(), 2000), segments_of_slice(columns, 3), segments_of_slice(columns, 2))
    kind = None
    if decoding is not None and dtype != "<c16":
        kind = decoding.dtype
    else:
        decoding = None
    for _ in range(2):  # the second time with what the first one kept
        plan = plan_array(
            source.layout, selection, source.locate(source.layout, chunks_needed(source.layout, selection)),
            out_shape=(num, 3, 2),
        )  # fmt: skip
        out = np.full(plan.out_shape, 55, kind or source.layout.dtype.newbyteorder("="))
        stats = read_plan(plan, out, source=source, decoding=decoding)
        wanted = data[rows][:, columns, columns]
        assert np.array_equal(out, wanted if decoding is None else wanted.astype("f8") * 0.5 + 1.0)
        assert (stats.bytes_fetched, stats.num_reads) == (plan.bytes_fetched, plan.num_reads)


def test_scattered_rows_of_a_short_file_name_their_chunk(tmp_path, counted):
    data = np.arange(400_000, dtype="f4").reshape(100_000, 4)
    source = UniformSource(tmp_path, data, chunks=(50_000, 4))
    selection = (segments_of_slice([*range(0, 100_000, 997), 99_999], 100_000), (Segment(start=0, count=4),))
    out, plan, _ = read(source, selection)
    assert np.array_equal(out, expected(data, selection))
    assert counted.count == plan.bytes_fetched
    os.truncate(os.path.join(tmp_path, "1.0"), 400_000)
    with pytest.raises(ShortReadError, match=r"chunk \(1, 0\)"):
        read(source, selection)
