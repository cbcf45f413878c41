"""zlib-ng beside Python's zlib: the same bytes of whole streams, the same errors of damaged ones; who is used when."""

import gzip
import sys
import tracemalloc
import warnings
import zlib
from contextlib import closing
from functools import partial

import h5py
import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from scidata.core.types import Codec
from scidata.errors import SciDataError
from scidata.meshes.formats import vtk_xml
from scidata.read import inflate
from scidata.read.arrays import read_array
from scidata.read.codecs import Pipeline, Scratch
from scidata.sources import open_source

zlib_ng = pytest.importorskip("zlib_ng.zlib_ng")
ENGINES = {"zlib": zlib, "zlib-ng": zlib_ng}
WBITS = {"zlib": 15, "gzip": 31}
DATA = np.random.default_rng(0).integers(0, 9, 700, np.uint8).tobytes()


def packed(codec, data=DATA, level=6, strategy=0, wbits=None):
    stream = zlib.compressobj(level, zlib.DEFLATED, wbits or WBITS[codec], 8, strategy)
    return stream.compress(data) + stream.flush()


def decode(codec, data, nbytes):
    """Return the decoded bytes, or the words of the error."""
    try:
        return Pipeline([Codec(name=codec)], nbytes).decode(np.frombuffer(data, np.uint8), None, Scratch()).tobytes()
    except SciDataError as e:
        return type(e).__name__, str(e)


def by_both(run):
    """Return what ``run`` gives by each engine, which must be the same."""
    found = {}
    for name, engine in ENGINES.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inflate, "engine", lambda engine=engine: engine)
            found[name] = run()
    assert found["zlib"] == found["zlib-ng"]
    return found["zlib"]


@pytest.mark.parametrize("codec", WBITS)
def test_whole_streams_of_every_kind(codec):
    for level in (0, 1, 4, 6, 9):
        for strategy in (zlib.Z_DEFAULT_STRATEGY, zlib.Z_FILTERED, zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE, zlib.Z_FIXED):
            for data in (DATA, b"", b"x", bytes(100_000), DATA * 300):
                encoded = packed(codec, data, level, strategy)
                assert by_both(partial(decode, codec, encoded, len(data))) == data


@pytest.mark.parametrize("codec", WBITS)
def test_truncated_anywhere(codec):
    encoded = packed(codec)
    for size in range(len(encoded)):
        assert by_both(partial(decode, codec, encoded[:size], len(DATA)))[0] == "CorruptDataError"


@pytest.mark.parametrize("codec", WBITS)
def test_each_byte_damaged(codec):
    encoded = packed(codec)
    for at in range(len(encoded)):
        for flip in (1, 0x20, 0x80, 0xFF):
            damaged = bytearray(encoded)
            damaged[at] ^= flip
            by_both(partial(decode, codec, bytes(damaged), len(DATA)))


@pytest.mark.parametrize("codec", WBITS)
def test_ends_members_and_sizes(codec):
    """Trailing bytes, wrong checksums, several members, and more or less than was expected."""
    encoded, num = packed(codec), len(DATA)
    wrong = bytes([*encoded[:-1], encoded[-1] ^ 1])
    answers = {
        "padded": (encoded + bytes(9), num),
        "trailing": (encoded + b"rest", num),
        "part of a member": (encoded + encoded[:20], num),
        "checksum": (wrong, num),
        "members": (packed(codec, DATA[:300]) + packed(codec, DATA[300:]), num),
        "second member is damaged": (packed(codec, DATA[:300]) + wrong, num + 300),
        "a member too many": (encoded + encoded, num),
        "more": (encoded, num - 1),
        "less": (encoded, num + 1),
        "nothing": (b"", num),
        "none expected": (encoded, 0),
        "another window": (packed(codec, wbits=WBITS[codec] - 6), num),
    }
    found = {name: by_both(partial(decode, codec, *each)) for name, each in answers.items()}
    assert {name for name, each in found.items() if each == DATA} == {"padded", "members", "another window"}
    assert "incorrect" in found["checksum"][1]
    assert "more bytes than expected" in found["more"][1]
    assert "cut short" in found["part of a member"][1]


@settings(max_examples=200, deadline=None)
@given(
    codec=st.sampled_from(sorted(WBITS)),
    level=st.integers(0, 9),
    data=st.binary(max_size=4000) | st.just(DATA * 40),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=4),
    end=st.integers(-20, 0),
    more=st.binary(max_size=12),
    expected=st.sampled_from([-1, 0, 1, 5000]),
)
def test_any_damage(codec, level, data, flips, end, more, expected):
    encoded = bytearray(packed(codec, data, level))
    for place, flip in flips:
        encoded[int(place * len(encoded))] ^= flip
    encoded = bytes(encoded[: len(encoded) + end]) + more
    by_both(partial(decode, codec, encoded, max(len(data) + expected, 0)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("codec", WBITS)
def test_a_bomb_is_stopped_at_the_size_expected(codec, engine, monkeypatch):
    monkeypatch.setattr(inflate, "engine", lambda: ENGINES[engine])
    bomb = packed(codec, bytes(50_000_000), level=9)
    tracemalloc.start()
    try:
        assert "more bytes than expected" in decode(codec, bomb, 100_000)[1]
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


# -- formats -------------------------------------------------------------------------------------------------------


def write(path, kind, values):
    if kind == "hdf5":
        with h5py.File(path, "w") as file:
            file.create_dataset("u", data=values, chunks=(1, 40, 50), compression="gzip", shuffle=True, fletcher32=True)
        return
    codec = {
        "zarr2 zlib": {"zarr_format": 2, "compressors": numcodecs.Zlib(1)},
        "zarr2 gzip": {"zarr_format": 2, "compressors": numcodecs.GZip(5)},
        "zarr3 gzip": {"zarr_format": 3, "compressors": zarr.codecs.GzipCodec(level=5)},
    }[kind]
    group = zarr.open_group(path, mode="w", zarr_format=codec.pop("zarr_format"))
    group.create_array("u", shape=values.shape, dtype=values.dtype, chunks=(1, 40, 50), **codec)[:] = values


@pytest.mark.parametrize("kind", ["hdf5", "zarr2 zlib", "zarr2 gzip", "zarr3 gzip"])
def test_files_of_others_and_a_damaged_chunk(tmp_path, kind):
    values = np.random.default_rng(0).normal(size=(3, 40, 50)).round(2).astype("f4")
    path = str(tmp_path / ("u.h5" if kind == "hdf5" else "u.zarr"))
    write(path, kind, values)

    def read():
        with closing(open_source(path)) as source:
            try:
                return read_array(source, source.arrays["u"]).tobytes()
            except SciDataError as e:
                return type(e).__name__, str(e)

    assert by_both(read) == values.tobytes()
    with closing(open_source(path)) as source:
        refs = source.locate(source.arrays["u"], np.array([[1, 0, 0]]))
    with open(refs.paths[refs.path_index[0]], "r+b") as file:
        file.seek(int(refs.offset[0]) + 100)
        file.write(b"damage")
    assert by_both(read)[0] in ("CorruptDataError", "ChecksumError")


def test_blocks_of_vtk():
    def block(encoded, size):
        try:
            return vtk_xml._block(encoded, size, "vtkZLibDataCompressor")
        except (ValueError, inflate.engine().error) as e:
            return str(e)

    encoded = packed("zlib")
    assert by_both(partial(block, encoded, len(DATA))) == DATA
    for damaged, size in ((encoded, 9), (encoded[:99], len(DATA)), (b"?" + encoded, 9), (encoded[:50] + b"??", 700)):
        assert isinstance(by_both(partial(block, damaged, size)), str)


# -- who is used ---------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh():
    """As in a process that has inflated nothing."""
    inflate.engine.cache_clear()
    yield inflate.engine
    inflate.engine.cache_clear()


def test_zlib_ng_is_loaded_with_the_first_stream(fresh):
    data = np.zeros(1000, np.uint8)
    Pipeline([Codec(name="blosc")], 1000).decode(np.frombuffer(numcodecs.Blosc().encode(data), "u1"), None, Scratch())
    assert fresh.cache_info().currsize == 0
    assert decode("gzip", gzip.compress(bytes(1000)), 1000) == bytes(1000)
    assert fresh() is zlib_ng


def test_without_it_zlib_decodes_and_nothing_is_said(fresh, monkeypatch, tmp_path):
    path = str(tmp_path / "u.h5")
    write(path, "hdf5", np.zeros((3, 40, 50), "f4"))
    with closing(open_source(path)) as source:
        layouts = source.arrays.values()
        assert inflate.decoder_text(layouts) == "zlib: decoded by zlib-ng"
        fresh.cache_clear()
        monkeypatch.setitem(sys.modules, "zlib_ng", None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert decode("zlib", packed("zlib"), len(DATA)) == DATA
        assert fresh() is zlib
        assert inflate.decoder_text(layouts).startswith("zlib: decoded by Python's zlib; ")
        assert "pip install 'zlib-ng" in inflate.decoder_text(layouts)
    assert inflate.decoder_text([]) is None
