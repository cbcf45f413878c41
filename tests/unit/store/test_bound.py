"""A chunk, a file or a folder in another's place is found when it is read, however the store is read."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
import zarr
from crc32c import crc32c

import scidata
from scidata.core.options import ReadOptions
from scidata.errors import ChecksumError, CorruptDataError, FieldMismatchError
from scidata.read import read_plan
from scidata.sources.zarr import tree, walk
from scidata.store.format import arrays
from scidata.store.format.checksums import KEPT_BYTES
from scidata.store.format.documents import sample_document
from scidata.store.format.manifest import CHECKSUMS, dump_json
from scidata.store.format.places import MANIFEST
from scidata.store.format.store import open_store, read_sample_info, verify, write_manifest
from scidata.store.format.sums import MANIFEST_VERSION, old_document
from scidata.store.reading.reader import StoreReader
from tests.writers import triangulation, write_hdf5

NUM_NODES, NUM_SAMPLES = 3000, 4


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples that are alike in all but the values of their fields; shards of two chunks."""
    folder = tmp_path_factory.mktemp("bound")
    mesh = triangulation(np.random.default_rng(0).random((NUM_NODES, 2)))
    for index in range(NUM_SAMPLES):
        rng = np.random.default_rng(1 + index)
        fields = {f"node/{name}": rng.standard_normal(NUM_NODES).astype("f4") for name in ("u", "v")}
        fields["node/history"] = rng.standard_normal((3, NUM_NODES))
        write_hdf5(folder / f"case{index}.h5", mesh | fields, {"node/history": ["time"]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "_SHARD_BYTES", 2 * 4 * arrays.CHUNK_ROWS)
        scidata.partition([folder / f"case{i}.h5" for i in range(NUM_SAMPLES)], folder / "store")
    return folder / "store"


@pytest.fixture
def store(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "s")


def place(store: Path, sample: int, array: str = "") -> Path:
    return store / f"sample-{sample:06d}.zarr" / array


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def overwrite(path: Path, other: Path) -> None:
    """Put the bytes of another file into the same one, which may be open."""
    data = other.read_bytes()
    with open(path, "r+b") as file:
        file.write(data)


def swap_chunks(shard: Path, *, by_index: bool) -> None:
    """Exchange the first two chunks of a shard, checksums and all: their bytes, or their places in the index."""
    data = bytearray(shard.read_bytes())
    table = len(data) - 36
    (first, size, second, _) = struct.unpack("<4Q", data[table:-4])
    if by_index:
        data[table:-4] = struct.pack("<4Q", second, size, first, size)
        data[-4:] = struct.pack("<I", crc32c(bytes(data[table:-4])))
    else:
        one, other = data[first : first + size], data[second : second + size]
        data[first : first + size], data[second : second + size] = other, one
    shard.write_bytes(data)


#: What is exchanged, and the sample and the field that are then wrong.
EXCHANGES: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "shards of two samples": (lambda s: swap(place(s, 3, "node/u/c/0"), place(s, 2, "node/u/c/0")), 3, "u"),
    "arrays of two samples": (lambda s: swap(place(s, 3, "node/u"), place(s, 2, "node/u")), 3, "u"),
    "arrays of one sample": (lambda s: swap(place(s, 1, "node/u"), place(s, 1, "node/v")), 1, "u"),
    "shards of two arrays": (lambda s: swap(place(s, 1, "node/v/c/0"), place(s, 1, "node/u/c/0")), 1, "u"),
    "shards of one array": (
        lambda s: swap(place(s, 1, "node/history/c/0/0"), place(s, 1, "node/history/c/1/0")),
        1,
        "history",
    ),
    "chunks of a shard": (lambda s: swap_chunks(place(s, 0, "node/u/c/0"), by_index=False), 0, "u"),
    "places of chunks": (lambda s: swap_chunks(place(s, 0, "node/u/c/0"), by_index=True), 0, "u"),
    "samples": (lambda s: swap(place(s, 1), place(s, 3)), 3, "u"),
    "checksums": (lambda s: swap(place(s, 1, CHECKSUMS), place(s, 3, CHECKSUMS)), 3, "u"),
}


@pytest.mark.parametrize("what", EXCHANGES)
def test_is_found_when_it_is_read(store: Path, what: str) -> None:
    exchange, index, field = EXCHANGES[what]
    exchange(store)
    ds = scidata.open_dataset(store, fields=field, sample_dim=False)
    with pytest.raises(ChecksumError, match=r"'(node/\w+|csr/\w+|cell/\w+|blocks/\w+)', chunk \(\d+,") as caught:
        ds[index]
    assert str(store) in str(caught.value)
    assert f"sample-{index:06d}" in str(caught.value) or f"sample {index}" in str(caught.value)
    assert verify(store) is not None
    if what not in ("samples", "checksums"):
        assert f"'node/{field}'" in str(caught.value)
        assert "was recorded for it" in str(caught.value)


@pytest.mark.parametrize("what", ["shards of two samples", "chunks of a shard", "samples"])
@pytest.mark.parametrize(
    "options",
    [
        {"subsample": {"node": 500}},
        {"subsample": {"node": 2500}, "subsample_block": "chunk"},
        {"weights": "u"},
        {"dtype": torch.float64},
        {"fields": ["u", "history"], "steps": (0, 1)},
        {"fields": ["u"], "cache_bytes": 0},
    ],
    ids="-".join,
)
def test_however_samples_are_read(store: Path, what: str, options: dict[str, object]) -> None:
    exchange, index, _ = EXCHANGES[what]
    exchange(store)
    ds = scidata.open_dataset(store, **{"fields": "u", **options})  # type: ignore[arg-type]
    per_sample = len(ds) // NUM_SAMPLES
    with pytest.raises(ChecksumError):
        ds[index * per_sample]


@pytest.mark.parametrize("ghosts", ["disk", "exchange"])
@pytest.mark.parametrize("what", ["shards of two samples", "samples"])
def test_of_every_rank(store: Path, what: str, ghosts: str) -> None:
    exchange, index, _ = EXCHANGES[what]
    exchange(store)
    reader = StoreReader(store, ReadOptions(fields="u", halo=1, ghosts=ghosts), num_parts=3)
    with pytest.raises(ChecksumError):
        reader.read(index, 0)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=["threads", "processes"])
def test_by_the_loader(store: Path, options: dict[str, int]) -> None:
    exchange, *_ = EXCHANGES["shards of two samples"]
    exchange(store)
    with pytest.raises(ChecksumError, match="'node/u', chunk"):
        for _ in scidata.DataLoader(scidata.open_dataset(store, fields="u"), batch_size=1, **options):
            pass


def test_with_plans_that_are_kept(store: Path) -> None:
    """The second epoch reads by the plans of the first, after the files were exchanged under it."""
    reader = StoreReader(store, ReadOptions(fields="u", cache_bytes=1 << 20))
    reader.read(3, 0)
    overwrite(place(store, 3, "node/u/c/0"), place(store, 2, "node/u/c/0"))
    with pytest.raises(ChecksumError, match="was recorded for it"):
        reader.read(3, 0)


def test_by_a_plan_that_was_sent(store: Path) -> None:
    """A plan goes with its checksums."""
    reader = StoreReader(store, ReadOptions(fields="u"))
    plan = pickle.loads(pickle.dumps(reader.plan(3).fields["u"][0]))
    assert plan.refs is not None
    assert plan.refs.checksums is not None
    overwrite(place(store, 3, "node/u/c/0"), place(store, 2, "node/u/c/0"))
    with pytest.raises(ChecksumError, match="was recorded for it"):
        read_plan(plan, np.empty(plan.out_shape, "f4"), source=reader.store.source(3))


@pytest.mark.parametrize("what", ["shards of two samples", "samples", "checksums"])
def test_behind_a_url(store: Path, what: str) -> None:
    exchange, index, _ = EXCHANGES[what]
    memory = fsspec.filesystem("memory")
    memory.put(str(store), f"/{what}", recursive=True)
    url = f"memory://{what}"
    scidata.open_dataset(url, fields="u")[index]
    exchange(store)
    memory.rm(f"/{what}", recursive=True)
    memory.put(str(store), f"/{what}", recursive=True)
    with pytest.raises(ChecksumError, match=f"sample[- ]0*{index}"):
        scidata.open_dataset(url, fields="u")[index]
    fault = verify(url)
    assert fault is not None
    memory.rm(f"/{what}", recursive=True)


def test_a_source_pickles_bound(store: Path) -> None:
    source = pickle.loads(pickle.dumps(open_store(store).source(3)))
    EXCHANGES["shards of two samples"][0](store)
    opened = open_store(store)
    opened._sources.put(3, source)
    with pytest.raises(ChecksumError):
        opened.read(3, "node/u")


def test_lost_and_short_checksums(store: Path) -> None:
    file = place(store, 0, f"{CHECKSUMS}/c/0")
    data = file.read_bytes()
    for broken in (None, data[:-1], data[:4], data[:7] + bytes([data[7] ^ 1]) + data[8:]):
        if broken is None:
            file.unlink()
        else:
            file.write_bytes(broken)
        with pytest.raises(CorruptDataError, match=r"sample[- ]0") as caught:
            scidata.open_dataset(store, fields="u")[0]
        assert CHECKSUMS in str(caught.value)
        assert verify(store) is not None


def test_memory_is_bounded(store: Path) -> None:
    opened = open_store(store)
    info = opened.sample(0).arrays[CHECKSUMS]
    opened._checksums.max_size = 2 * 4 * info.shape[0]  # of two samples
    for _ in range(2):
        for index in range(NUM_SAMPLES):
            opened.read(index, "node/u")
            assert len(opened._checksums) <= 2
    assert open_store(store)._checksums.max_size == KEPT_BYTES


def test_any_zarr_reader_reads_it(store: Path) -> None:
    """Chunks are what they were, and the checksums are an array like others."""
    group = zarr.open_group(place(store, 0), mode="r")
    expected = open_store(store).read(0, "node/u")
    np.testing.assert_array_equal(group["node/u"][:], expected)
    sums = group[CHECKSUMS][:]
    assert len(sums) == open_store(store).sample(0).arrays[CHECKSUMS].shape[0]
    chunk = np.zeros(arrays.CHUNK_ROWS, "<f4")
    chunk[:] = expected[: arrays.CHUNK_ROWS]
    assert crc32c(chunk.tobytes()) in sums


# -- stores of other schema versions ---------------------------------------------------------------------------------


def as_version(version: int, store: Path) -> Path:
    """Make of a store what scidata wrote before chunks were bound to their places, or layouts were in the manifest."""
    infos = []
    for index in range(NUM_SAMPLES):
        info = read_sample_info(str(store), index)
        old = replace(info, arrays={path: replace(array, shards=None) for path, array in info.arrays.items()})
        if version == 1:
            arrays = {path: replace(a, chunks=None) for path, a in old.arrays.items() if path != CHECKSUMS}
            old = replace(old, arrays=arrays, documents=None)
            shutil.rmtree(place(store, index, CHECKSUMS))
        (place(store, index) / "zarr.json").write_text(sample_document(old))
        infos.append(old)
    write_manifest(str(store), infos)
    (store / MANIFEST).write_text(old_document(open_store(store).manifest))
    return store


def test_version_1_is_read_as_before(pristine: Path, store: Path) -> None:
    old = as_version(1, store)
    assert '"version": 1' in (old / MANIFEST).read_text()
    assert "documents" not in (old / MANIFEST).read_text()
    assert verify(old) is None
    one, other = scidata.open_dataset(old, fields="u"), scidata.open_dataset(pristine, fields="u")
    for index in range(NUM_SAMPLES):
        np.testing.assert_array_equal(one[index]["u"], other[index]["u"])
    EXCHANGES["shards of two samples"][0](old)
    one[3]  # not bound
    fault = verify(old)
    assert fault is not None
    assert fault.array == "node/u"


def test_version_2_is_read_as_before(pristine: Path, store: Path) -> None:
    old = as_version(2, store)
    assert '"version": 2' in (old / MANIFEST).read_text()
    assert '"shards"' not in (old / MANIFEST).read_text()
    assert verify(old) is None
    one, other = scidata.open_dataset(old), scidata.open_dataset(pristine)
    for index in range(NUM_SAMPLES):
        assert all(torch.equal(one[index][name], other[index][name]) for name in other[0])
    os.unlink(place(old, 0, "node/u") / "zarr.json")
    with pytest.raises(scidata.errors.UnknownNameError, match="node/u"):
        scidata.open_dataset(old, fields="u")[0]


def test_reading_opens_no_metadata_of_zarr(pristine: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError

    monkeypatch.setattr(walk, "read_json", fail)
    monkeypatch.setattr(tree.LocalTree, "get", fail)
    scidata.open_dataset(store)[0]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_metadata_of_zarr_that_are_not_the_manifests(store: Path, scheme: str) -> None:
    document = place(store, 0, "node/u") / "zarr.json"
    document.write_text(document.read_text().replace('"fill_value": 0.0', '"fill_value": 1.0'))
    scidata.open_dataset(store)[0]  # by the manifest
    fault = verify(f"{scheme}{store}")
    assert fault is not None
    assert fault.sample == 0
    assert re.search(r"'node/u': its zarr.json has fill_value 1.0, but the manifest has 0.0", str(fault))


def test_versions_do_not_mix(pristine: Path, store: Path) -> None:
    as_version(1, store)
    infos = [read_sample_info(str(store), 0), read_sample_info(str(pristine), 1)]
    with pytest.raises(FieldMismatchError, match="has version 3, but sample 0"):
        write_manifest(str(store), infos)


@pytest.mark.parametrize("version", [0, MANIFEST_VERSION + 1, "2", None, True])
def test_other_versions_are_refused(store: Path, version: object) -> None:
    manifest = json.loads((store / MANIFEST).read_text())
    (store / MANIFEST).write_text(dump_json({**manifest, "version": version}))
    with pytest.raises(CorruptDataError, match=r"schema version .*reads 1 to 4"):
        open_store(store)
