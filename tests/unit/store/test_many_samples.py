"""Stores of many samples: opened at a cost that does not grow with them, from a table that is checked as a whole."""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

import scidata
from scidata.errors import CorruptDataError, RefusedError, SciDataError
from scidata.store.format import samples as samples_module
from scidata.store.format import store as store_module
from scidata.store.format.manifest import described, digest_of, dump_json, sealed
from scidata.store.format.places import MANIFEST, TABLE, folder_of
from scidata.store.format.store import open_store, read_sample_info, verify, write_manifest
from scidata.store.format.sums import old_document
from scidata.store.reading.report import inspect_partitioned

NUMBERS = (1100, 2200)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Three clouds; an attribute of the last is a number of another kind."""
    folder = tmp_path_factory.mktemp("many")
    for i in range(3):
        with h5py.File(folder / f"c{i}.h5", "w") as file:
            file["xyz"] = np.arange(12.0 + 3 * i).reshape(-1, 3) + i
            file["u"] = np.arange(4.0 + i)
            file["u"].attrs["level"] = 1.0 if i == 2 else 1
    scidata.partition(str(folder / "c*.h5"), folder / "s", kind="points", points="xyz")
    return folder / "s"


@pytest.fixture
def store(pristine, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_MANY", 2)
    return str(shutil.copytree(pristine, tmp_path / "s"))


@pytest.fixture
def beside(store, monkeypatch):
    """The same store, whose table is a file, of which nothing stays in memory."""
    monkeypatch.setattr(store_module, "_INLINE_BYTES", 0)
    monkeypatch.setattr(samples_module, "_HELD_BYTES", 0)
    monkeypatch.setattr(samples_module, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(samples_module, "_PIECE_BYTES", 500)
    write_manifest(store, list(open_store(store).manifest.samples))
    return store


def infos_of(path):
    return [described(info) for info in open_store(path).manifest.samples]


# -- costs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(pristine, tmp_path_factory):
    """Two stores of many samples, of which only the folders are there."""
    folder, found = tmp_path_factory.mktemp("large"), []
    first = read_sample_info(str(pristine), 0)
    for num in NUMBERS:
        path = folder / f"{num}"
        for i in range(num):
            os.makedirs(path / folder_of(i))
        each = ({"index": i, "folder": folder_of(i), "name": f"c{i}", "documents": f"{i:032x}"} for i in range(num))
        write_manifest(str(path), (replace(first, **values) for values in each))
        found.append(str(path))
    return found


def calls_of(path):
    """Return the calls of Python's functions that opening makes."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        scidata.open_dataset(path)
    finally:
        sys.setprofile(None)
    return count


def test_calls_do_not_grow_with_samples(large):
    scidata.open_dataset(large[0])
    few, many = map(calls_of, large)
    assert abs(many - few) < 100


def test_memory_is_that_of_the_table(large):
    scidata.open_dataset(large[0])
    lasting, peaks = [], []
    for path in large:
        tracemalloc.start()
        kept = scidata.open_dataset(path)
        now, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        lasting, peaks = [*lasting, now], [*peaks, peak]
        del kept
    more = NUMBERS[1] - NUMBERS[0]
    assert lasting[1] - lasting[0] < 150 * more  # rows of 32 bytes and names, twice
    assert peaks[1] - peaks[0] < 500 * more


def test_few_files_are_opened(large, monkeypatch):
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *a, **k: opened.append(str(path)) or real(path, *a, **k))
    scidata.open_dataset(large[1])
    assert len([path for path in opened if path.startswith(large[1])]) <= 2


def test_no_sample_is_looked_at(store, monkeypatch):
    looks = []
    for name in ("stat", "lstat"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda path, *a, real=real, **k: looks.append(str(path)) or real(path, *a, **k))
    ds = scidata.open_dataset(store)
    assert len(ds) == 3
    assert not [path for path in looks if "sample-" in path]


def test_a_sample_that_is_gone_or_elsewhere_is_still_found(store, tmp_path):
    shutil.move(f"{store}/sample-000001.zarr", tmp_path / "away")
    with pytest.raises(CorruptDataError, match=r"sample 1 .* is not there"):
        scidata.open_dataset(store)
    os.symlink(tmp_path / "away", f"{store}/sample-000001.zarr")
    with pytest.raises(RefusedError, match="out of the store"):
        scidata.open_dataset(store)


# -- the table -------------------------------------------------------------------------------------------------------


def test_samples_are_what_was_written(store, beside):
    written = [described(read_sample_info(store, i)) for i in range(3)]
    assert dump_json({"samples": infos_of(beside)}) == dump_json({"samples": written})  # 1 is not 1.0
    assert os.path.isfile(f"{beside}/{TABLE}")
    assert verify(beside) is None
    ds = scidata.open_dataset(beside)
    assert [tuple(ds[i]["u"].shape) for i in range(3)] == [(4,), (5,), (6,)]
    assert ds.counts("point").tolist() == [4, 5, 6]


def test_a_manifest_of_before_says_the_same(store):
    written, fingerprint = infos_of(store), scidata.open_dataset(store).fingerprint
    Path(store, MANIFEST).write_text(old_document(open_store(store).manifest))
    assert infos_of(store) == written
    assert scidata.open_dataset(store).fingerprint == fingerprint
    assert verify(store) is None
    scidata.store.partitioning.partition.finalize(store)
    assert json.loads(Path(store, MANIFEST).read_text())["version"] == 4
    assert infos_of(store) == written


def test_samples_of_several_groups(store):
    """Samples without positions' corners beside others: each group has rows of its own, in between."""
    infos = list(open_store(store).manifest.samples)
    mixed = [replace(infos[i % 3], index=i, folder=folder_of(i), bbox=None if i % 2 else infos[i % 3].bbox)
             for i in range(7)]  # fmt: skip
    samples = store_module.gather(mixed, "here")
    assert len(samples.groups) == 2
    assert list(map(described, samples)) == list(map(described, mixed))
    assert samples.column("index", start=1, stop=6).tolist() == [1, 2, 3, 4, 5]
    assert samples.nbytes() == [info.nbytes for info in mixed]
    assert samples.column("arrays", "point/u", "digest").tolist() == [i.arrays["point/u"].digest for i in mixed]
    assert [samples.index_of(1, row) for row in range(3)] == [1, 3, 5]


@pytest.mark.parametrize("change", ["gone", "short", "long", "flipped", "foreign", "a link"])
def test_a_damaged_table_is_named(beside, tmp_path, change):
    table = Path(beside, TABLE)
    data = table.read_bytes()
    if change == "a link":
        table.rename(tmp_path / "away")
        table.symlink_to(tmp_path / "away")
    elif change == "gone":
        table.unlink()
    else:
        other = bytes(len(data)) if change == "foreign" else data[:70] + bytes([data[70] ^ 1]) + data[71:]
        table.write_bytes({"short": data[:-1], "long": data + b"x"}.get(change, other))
    with pytest.raises(
        RefusedError if change == "a link" else CorruptDataError, match=r"table of samples|samples\.bin"
    ):
        open_store(beside)
    assert verify(beside) is not None


def test_a_table_that_changes_while_it_is_open(beside):
    opened = open_store(beside)
    table = Path(beside, TABLE)
    data = table.read_bytes()
    with table.open("r+b") as file:
        file.write(bytes(len(data)))
    with pytest.raises(CorruptDataError, match="changed while the store was open"):
        opened.sample(1)


HOSTILE = {"int": (-1, 2**62, -(2**63), 0, 5), "float": (np.nan, np.inf, -np.inf, 1e300), "text": (-1, 0, 2**40, 3)}


def test_every_column_of_a_row(store):
    """A table that matches its digest and says what no sample is: it is refused, or reading finds the samples."""
    before = [scidata.open_dataset(store)[i]["u"] for i in range(3)]
    samples, refused, tried = open_store(store).manifest.samples, 0, 0
    group, good = samples.groups[0], json.loads(Path(store, MANIFEST).read_text())
    for i, column in enumerate(group.columns):
        for value in HOSTILE.get(column.kind, (bytes(16),)):
            rows = group.rows(0, group.num).copy()
            rows[str(i)][1] = value
            if (data := rows.tobytes()) == group.rows(0, group.num).tobytes():
                continue
            write(store, good, data + samples.table.read(rows.nbytes, samples.table.nbytes))
            tried += 1
            try:
                found = [scidata.open_dataset(store)[i]["u"] for i in range(3)]
            except SciDataError:
                refused += 1
                continue
            assert all(map(np.array_equal, found, before)), (column, value)
            assert verify(store) is not None, (column, value)
            inspect_partitioned(store)
    assert refused > tried / 2


@pytest.mark.parametrize("size", [0, 7, -1])
def test_tables_of_other_sizes(store, size):
    table = open_store(store).manifest.samples.table
    data = table.read(0, table.nbytes)
    write(store, json.loads(Path(store, MANIFEST).read_text()), data[:size] if size >= 0 else data + b"x")
    with pytest.raises(CorruptDataError, match=f"{MANIFEST}: 'samples'"):
        open_store(store)


def write(store, manifest, table):
    """Write a manifest with another table, of which it has the digest."""
    samples = {"nbytes": len(table), "digest": digest_of(table), "table": base64.b64encode(table).decode()}
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    Path(store, MANIFEST).write_text(dump_json(sealed({**rest, "samples": {**rest["samples"], **samples}})))
