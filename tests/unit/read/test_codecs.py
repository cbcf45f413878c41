"""Codecs against numcodecs and the standard library; partial Blosc decoding against full decoding."""

import bz2
import gzip
import lzma
import struct
import threading
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor

import numcodecs
import numcodecs.zstd
import numpy as np
import pytest
from google_crc32c import value as crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from scidata.core.types import Codec
from scidata.errors import ChecksumError, CorruptDataError, UnsupportedFormatError
from scidata.read import blosc, zstd
from scidata.read.codecs import Pipeline, Scratch


def noise(size, seed=0):
    return np.random.default_rng(seed).integers(0, 4, size, np.uint8)


def array(data):
    return np.frombuffer(bytearray(data), np.uint8)


def decode(names, data, nbytes, dest=None, **config):
    pipeline = Pipeline([Codec(name=n, config=config) for n in names], nbytes)
    return pipeline.decode(array(data), dest, Scratch())


ENCODED = {
    "blosc": lambda b: numcodecs.Blosc("zstd").encode(b),
    "zstd": lambda b: numcodecs.Zstd().encode(b),
    "lz4": lambda b: numcodecs.LZ4().encode(b),
    "zlib": zlib.compress,
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "lzma": lzma.compress,
    "crc32c": lambda b: b + crc32c(b).to_bytes(4, "little"),
    "fletcher32": lambda b: numcodecs.Fletcher32().encode(np.frombuffer(b, "u1")),
}


@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize("size", [1, 5, 1000, 300_001])
def test_round_trip_into_scratch_and_into_place(name, size):
    if name == "fletcher32" and size % 2:
        size += 1
    data = noise(size)
    encoded = ENCODED[name](data.tobytes())
    assert np.array_equal(decode([name], encoded, size), data)
    dest = np.empty(size, np.uint8)
    assert decode([name], encoded, size, dest) is dest
    assert np.array_equal(dest, data)


@pytest.mark.parametrize("name", [n for n in ENCODED if n not in ("crc32c", "fletcher32")])
@pytest.mark.parametrize("found", [0, 999, 1001, 50_000_000])
def test_a_declared_size_that_is_wrong_is_refused(name, found):
    with pytest.raises(CorruptDataError):
        decode([name], ENCODED[name](bytes(found)), 1000)


@pytest.mark.parametrize("name", ENCODED)
def test_every_truncation_is_an_error_of_ours(name):
    encoded = ENCODED[name](noise(600).tobytes())
    for size in range(len(encoded)):
        with pytest.raises(CorruptDataError):
            decode([name], encoded[:size], 600)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(ENCODED)), at=st.integers(0, 400), flip=st.integers(1, 255))
def test_a_flipped_byte_never_escapes_as_another_error(name, at, flip):
    data = noise(600)
    encoded = bytearray(ENCODED[name](data.tobytes()))
    encoded[at % len(encoded)] ^= flip
    try:
        decoded = decode([name], encoded, 600)
    except CorruptDataError:
        return
    assert decoded.size == 600
    if name in ("crc32c", "fletcher32"):
        assert np.array_equal(decoded, data), "a checksum let a wrong byte pass"


@pytest.mark.parametrize("name", ["crc32c", "fletcher32"])
def test_checksum_errors_are_their_own_kind(name):
    encoded = bytearray(ENCODED[name](noise(64).tobytes()))
    encoded[7] ^= 1
    with pytest.raises(ChecksumError, match=name):
        decode([name], encoded, 64)


def test_crc32c_at_the_start():
    data = noise(10).tobytes()
    assert decode(["crc32c"], crc32c(data).to_bytes(4, "little") + data, 10, location="start").tobytes() == data


@pytest.mark.parametrize("itemsize", [1, 2, 3, 4, 8, 16, 300])
@pytest.mark.parametrize("size", [1, 7, 4096, 4099, 70_000])
def test_shuffle_is_hdf5s(itemsize, size):
    data = noise(size)
    whole = size // itemsize * itemsize
    shuffled = np.concatenate([data[:whole].reshape(-1, itemsize).T.reshape(-1), data[whole:]])
    assert np.array_equal(decode(["shuffle"], shuffled, size, elementsize=itemsize), data)


def test_concatenated_gzip_members_are_one_stream():
    data = noise(500).tobytes()
    assert decode(["gzip"], gzip.compress(data[:100]) + gzip.compress(data[100:]), 500).tobytes() == data
    with pytest.raises(CorruptDataError, match="more bytes"):
        decode(["gzip"], gzip.compress(data) + gzip.compress(data), 500)


def test_zstd_frames_without_a_size():
    # Magic, a window of 1 KiB and no content size, then one raw block and one of 1,000 equal bytes.
    raw = b"\x28\xb5\x2f\xfd\x00\x50" + struct.pack("<I", 5 << 3)[:3] + b"hello"
    frame = raw + struct.pack("<I", 1000 << 3 | 1 << 1 | 1)[:3] + b"x"
    assert decode(["zstd"], frame, 1005).tobytes() == b"hello" + b"x" * 1000
    with pytest.raises(CorruptDataError, match="1004 were expected"):
        decode(["zstd"], frame, 1004)
    bomb = raw + (struct.pack("<I", (128 << 10) << 3 | 1 << 1)[:3] + b"x") * 1000 + struct.pack("<I", 1)[:3]
    with pytest.raises(CorruptDataError, match="may hold"):
        decode(["zstd"], bomb, 1005)


@pytest.mark.parametrize("with_library", [True, False])
def test_zstd_says_the_same_of_damage_as_numcodecs(with_library, monkeypatch):
    if not with_library:  # a build that hides its functions
        monkeypatch.setattr(zstd, "_LIBRARY", None)
    data = noise(600).tobytes()
    encoded = bytes(numcodecs.Zstd(3, checksum=True).encode(data))
    flipped = [
        encoded[:i] + bytes([encoded[i] ^ flip]) + encoded[i + 1 :] for i in range(len(encoded)) for flip in (1, 128)
    ]
    damaged = [*flipped, *(encoded[:i] for i in range(len(encoded))), encoded + b"rest", encoded + encoded]

    def outcome(decode, each):
        dest = np.empty(600, np.uint8)
        try:
            decode(array(each), dest)
        except (RuntimeError, ValueError) as e:
            return type(e), str(e)
        return dest.tobytes()

    found = [outcome(zstd.decode, each) for each in (encoded, *damaged)]
    assert found[0] == data
    assert found == [outcome(numcodecs.zstd.decompress, each) for each in (encoded, *damaged)]


def test_each_thread_has_a_zstd_context_that_ends_with_it():
    if zstd._LIBRARY is None:
        pytest.skip("this build of numcodecs hides its library")
    data, together, contexts = noise(200_000), threading.Barrier(4), list[weakref.ref[object]]()
    encoded = numcodecs.Zstd().encode(data)

    def work():
        together.wait()
        for _ in range(20):
            assert np.array_equal(decode(["zstd"], encoded, data.size), data)
        contexts.append(weakref.ref(zstd._thread.context))
        together.wait()

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(work) for _ in range(4)]:
            each.result()
        assert len({each() for each in contexts}) == 4
    assert [each() for each in contexts] == [None] * 4


def test_two_of_a_kind_do_not_share_a_buffer():
    data = noise(5000)
    encoded = numcodecs.Blosc("lz4").encode(numcodecs.Blosc("lz4", shuffle=0).encode(data))
    assert np.array_equal(decode(["blosc", "blosc"], encoded, 5000), data)


def test_unknown_codecs_are_named():
    with pytest.raises(UnsupportedFormatError, match=r"hdf5:32013.*blosc"):
        Pipeline([Codec(name="hdf5:32013")], 10)


# -- Blosc blocks ------------------------------------------------------------------------------------------------


@settings(max_examples=250, deadline=None)
@given(
    cname=st.sampled_from(["lz4", "lz4hc", "zstd", "zlib", "blosclz"]),
    shuffle=st.sampled_from([0, 1, 2]),
    level=st.sampled_from([0, 1, 5]),
    typesize=st.integers(1, 8),
    size=st.integers(1, 70_000),
    blocksize=st.sampled_from([0, 256, 1024, 4096, 65536]),
    random=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_some_blocks_equal_the_full_decode(cname, shuffle, level, typesize, size, blocksize, random, seed):
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256 if random else 3, size, np.uint8)
    encoded = numcodecs.blosc.compress(data, cname.encode(), level, shuffle, blocksize, typesize)
    header = blosc.read_header(array(encoded), size)
    needed = rng.random(header.num_blocks) < 0.4
    needed[rng.integers(header.num_blocks)] = True
    blosc.add_neighbour(needed, header)
    dest = np.full(size, 77, np.uint8)
    read = np.zeros(len(encoded), np.uint8)  # what is not read may hold anything
    ranges = [[0, blosc.table_nbytes(header)], *blosc.block_ranges(array(encoded), header, needed, len(encoded))]
    for start, stop in ranges:
        read[start:stop] = array(encoded)[start:stop]
    decoded = blosc.decode_blocks(read, header, needed, dest)
    wanted = np.repeat(needed, header.blocksize)[:size]
    assert np.array_equal(dest[wanted], data[wanted])
    assert decoded == wanted.sum()
    whole = np.empty(size, np.uint8)
    blosc.decode(array(encoded), whole)
    assert np.array_equal(whole, data)


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 40), value=st.integers(0, 255))
def test_damaged_blosc_headers_and_tables_are_refused_or_decode_to_the_right_size(at, value):
    data = noise(40_000)
    encoded = array(numcodecs.blosc.compress(data, b"lz4", 5, 1, 4096, 4))
    encoded[at] = value
    try:
        header = blosc.read_header(encoded, data.size)
        assert header.nbytes == data.size
        needed = np.arange(header.num_blocks) % 3 == 0
        blosc.decode_blocks(encoded, header, needed, np.empty(data.size, np.uint8))
    except CorruptDataError:
        return


def test_scratch_is_reused_and_bounded(monkeypatch):
    scratch = Scratch()
    first = scratch.get("a", 100_000)
    assert np.shares_memory(first, scratch.get("a", 50))
    assert not np.shares_memory(first, scratch.get("b", 50))
    monkeypatch.setattr(Scratch, "max_kept", 1 << 20)
    large = scratch.get("a", 2 << 20)
    assert not np.shares_memory(large, scratch.get("a", 10))
