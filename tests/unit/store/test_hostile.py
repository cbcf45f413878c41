"""Stores that are damaged or made to do harm: what is wrong is named, nothing outside is opened, no byte is unseen."""

from __future__ import annotations

import copy
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import scidata
from scidata.errors import ConfigError, CorruptDataError, FieldMismatchError, RefusedError, SciDataError
from scidata.sources.zarr import tree
from scidata.store.format import store as store_module
from scidata.store.format.manifest import digest_of
from scidata.store.format.places import MANIFEST
from scidata.store.format.store import open_store, read_sample_info, verify, verify_sample
from scidata.store.format.sums import old_document
from scidata.store.reading.report import inspect_partitioned
from tests.writers import triangulation, write_hdf5

ROOT = Path(__file__).parents[3]
SAMPLE = "sample-000000.zarr"


def write_raw(path: Path, seed: int = 0, name: str = "node/u") -> Path:
    rng = np.random.default_rng(seed)
    arrays = triangulation(rng.random((40, 2))) | {name: rng.standard_normal((40, 2)).astype("f4")}
    return Path(write_hdf5(path, arrays, attributes={name: {"units": "m"}}))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    inputs = [write_raw(folder / f"case{i}.h5", i) for i in range(2)]
    scidata.partition(inputs, folder / "store")
    return folder / "store"


@pytest.fixture
def store(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "s")


@pytest.fixture
def one_sample(pristine: Path, tmp_path: Path) -> Path:
    """A store in which each kind of file and folder is once, for tests that verify it hundreds of times."""
    scidata.partition(pristine.parent / "case0.h5", tmp_path / "one")
    return tmp_path / "one"


# -- keys of the manifest --------------------------------------------------------------------------------------------

DELETED = object()
NAN = float("nan")


def deep(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


SEAL = 32 * "-"
VALUES: dict[str, Any] = {
    "deleted": DELETED,
    "null": None,
    "text": "x",
    "a way out": "../../etc",
    "surrogate": "\ud800",
    "nul": "a\0b",
    "true": True,
    "half": 0.5,
    "NaN": NAN,
    "infinite": 1e999,
    "negative": -1,
    "huge": 10**30,
    "large": 2**62,
    "list": [],
    "list of null": [None],
    "dict": {},
    "dict of null": {"a": None},
    "nested": deep(100),
}


def ways(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each value of a manifest; of a list to its first, of many arrays to some."""
    if way:
        yield way
    if isinstance(value, dict):
        for key, item in value.items():
            if way[-1:] != ("arrays",) or key in ("node/u", "node/pos", "checksums"):
                yield from ways(item, (*way, key))
    elif isinstance(value, list):
        for i, item in enumerate(value[:1]):
            yield from ways(item, (*way, i))


def changed(data: Any, way: tuple[Any, ...], value: Any) -> Any:
    data = copy.deepcopy(data)
    inner = data
    for key in way[:-1]:
        inner = inner[key]
    if value is DELETED:
        del inner[way[-1]]
    else:
        inner[way[-1]] = value
    return data


def write(store: Path, data: dict[str, Any]) -> None:
    """Write a manifest that matches its own digest, whatever it says."""
    text = json.dumps({**data, "digest": SEAL}, indent=1, sort_keys=True) + "\n"
    digest = digest_of(text.replace(f' "digest": "{SEAL}",\n', "").encode())
    (store / MANIFEST).write_text(text.replace(SEAL, digest))


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or the error if it is one of scidata's."""
    try:
        return call()
    except SciDataError as e:
        found = e
    said = str(found)
    assert len(said) < 2000
    assert said.isprintable()
    return found


def read_all(store: Path) -> list[torch.Tensor]:
    ds = scidata.open_dataset(store)
    return [ds[i]["u"] for i in range(len(ds))]


def as_before(store: Path) -> Path:
    """Give a store the manifest that versions of scidata wrote which held each sample in full."""
    (store / MANIFEST).write_text(old_document(open_store(store).manifest))
    return store


@pytest.mark.parametrize(
    ("name", "is_old"), [*((name, False) for name in VALUES), *((name, True) for name in list(VALUES)[::3])]
)
def test_every_key(store: Path, name: str, is_old: bool) -> None:
    good = json.loads((as_before(store) if is_old else store).joinpath(MANIFEST).read_text())
    before = read_all(store)
    refused = 0
    for way in ways({key: value for key, value in good.items() if key != "digest"}):
        if (edited := changed(good, way, VALUES[name])) == good and name != "true":  # which equals 1
            continue
        write(store, edited)
        opened = outcome(lambda: open_store(store))
        if isinstance(opened, SciDataError):
            refused += 1
            assert isinstance(opened, CorruptDataError | RefusedError | FieldMismatchError), way
            continue
        # names, notes, settings, digests: what decides nothing that is read
        assert outcome(lambda: verify(store)) is not None, way
        outcome(lambda: inspect_partitioned(store))
        found = outcome(lambda: read_all(store))
        if not isinstance(found, SciDataError):
            assert all(map(torch.equal, found, before)), way
    assert refused > 50


def test_the_sample_and_the_key_are_named(store: Path) -> None:
    good = json.loads((as_before(store) / MANIFEST).read_text())
    for way, value, words in (
        (("samples", 1, "counts", "node"), -1, "sample 1: 'counts'['node']"),
        (("samples", 1, "arrays", "node/u", "shape"), [2**62, 2**62], "sample 1: 'arrays'['node/u']['shape']"),
        (("samples", 0, "kind"), DELETED, "sample 0: 'kind' is missing"),
        (("samples", 0, "fields", "node/u", "entity_dim"), 7, "sample 0: 'fields'['node/u']['entity_dim'] is 7"),
        (("samples", 1, "index"), 0, "sample 1"),
        (("samples", 1), copy.deepcopy(good["samples"][0]), "sample 1: 'index' is 0, as of a sample before"),
        (("samples",), [], "'samples' is a list of 0"),
        (("samples", 1, "statistics", "node/u", "mean"), [1.0], "sample 1: 'statistics'['node/u']['mean']"),
    ):
        write(store, changed(good, way, value))
        with pytest.raises(CorruptDataError) as caught:
            open_store(store)
        assert words in str(caught.value), way
        assert str(store / MANIFEST) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"version": 2, "digest": "x", "samples": ' + b"[" * 900 + b"]" * 900 + b"}",
        b"\xff\xfe",
        b"9" * 10_000,
        b'{"version": NaN}',
        b'"\\ud800"',
        b"null",
        b'{"version": 2, "digest": {}}',
    ],
    ids=lambda t: t[:12].decode("ascii", "replace"),
)
def test_other_documents(store: Path, text: bytes) -> None:
    (store / MANIFEST).write_bytes(text)
    with pytest.raises(CorruptDataError, match="manifest"):
        open_store(store)
    assert verify(store) is not None


def test_edited_manifests_do_not_match_their_digest(store: Path) -> None:
    text = (store / MANIFEST).read_text()
    for edited in (text.replace("case0", "case2"), text.replace('"kind": "mesh"', '"kind":  "points"', 1)):
        assert edited != text
        (store / MANIFEST).write_text(edited)
        with pytest.raises(CorruptDataError, match="does not match its own digest"):
            open_store(store)


# -- places outside --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["../other/sample-000000.zarr", "/sample-000000.zarr", "..", "a/../../b", ""])
def test_folders_that_lead_out(store: Path, pristine: Path, folder: str) -> None:
    good = json.loads((as_before(store) / MANIFEST).read_text())
    shutil.copytree(pristine, store.parent / "other")
    write(store, changed(good, ("samples", 0, "folder"), folder.replace("/sample", f"{pristine}/sample", 1)))
    with pytest.raises(RefusedError, match="sample 0: 'folder' names"):
        open_store(store)
    fault = verify(store)
    assert fault is not None
    assert "outside the store" in fault.message


@pytest.mark.parametrize("name", ["../u", "/u", "node/../../../u", "node//u", "node\\u", "no\0de/u"])
def test_arrays_that_lead_out(store: Path, name: str) -> None:
    good = json.loads((as_before(store) / MANIFEST).read_text())
    good["samples"][0]["arrays"][name] = good["samples"][0]["arrays"]["blocks/bbox"]
    good["samples"][0]["arrays"]["checksums"] = dict(good["samples"][0]["arrays"]["checksums"])
    write(store, good)
    with pytest.raises(RefusedError, match="no path inside a sample"):
        open_store(store)


@pytest.mark.parametrize(
    "path",
    [
        MANIFEST,
        SAMPLE,
        f"{SAMPLE}/zarr.json",
        f"{SAMPLE}/node",
        f"{SAMPLE}/node/u",
        f"{SAMPLE}/node/u/c",
        f"{SAMPLE}/node/u/c/0",
        f"{SAMPLE}/node/u/zarr.json",
        f"{SAMPLE}/checksums",
        f"{SAMPLE}/checksums/c/0",
    ],
)
def test_links_that_lead_out(store: Path, tmp_path: Path, path: str) -> None:
    aside = tmp_path / "aside"
    (store / path).rename(aside)
    (store / path).symlink_to(aside)
    if path.endswith("zarr.json"):  # the manifest says what it would, so that nothing opens it
        scidata.open_dataset(store)[0]
    else:
        with pytest.raises(RefusedError, match=r"link leads to .*out of the store"):
            scidata.open_dataset(store)[0]
    assert verify(store) is not None
    if path != MANIFEST:
        with pytest.raises(SciDataError):
            verify_sample(str(store), 0)


def test_a_store_behind_a_link(store: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store, target_is_directory=True)
    assert torch.equal(read_all(tmp_path / "link")[1], read_all(store)[1])
    assert verify(tmp_path / "link") is None


def test_links_inside(store: Path) -> None:
    """A sample's folder may be a link that stays in the store; another sample in its place is found all the same."""
    shutil.rmtree(store / SAMPLE)
    (store / SAMPLE).symlink_to("sample-000001.zarr")
    with pytest.raises(CorruptDataError):
        scidata.open_dataset(store)[0]


# -- sizes -----------------------------------------------------------------------------------------------------------


def test_documents_that_are_too_large(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (store / MANIFEST).stat().st_size
    monkeypatch.setattr(store_module, "MAX_MANIFEST_BYTES", size)
    read_all(store)
    monkeypatch.setattr(store_module, "MAX_MANIFEST_BYTES", size - 1)
    with pytest.raises(RefusedError, match=f"takes {size} bytes, and no more than {size - 1} .*MAX_MANIFEST_BYTES"):
        open_store(store)
    monkeypatch.undo()
    monkeypatch.setattr(tree, "MAX_METADATA_BYTES", 20_000)
    document = store / SAMPLE / "node" / "u" / "zarr.json"
    document.write_text(document.read_text() + " " * 20_000)
    assert re.search(r"node/u/zarr\.json: has \d+ bytes, but at most 20000", str(verify(store)))


def test_a_sparse_manifest_takes_no_memory(store: Path) -> None:
    """A file of a terabyte that has no blocks is refused before it is read."""
    os.truncate(store / MANIFEST, 1 << 40)
    with pytest.raises(RefusedError, match="MAX_MANIFEST_BYTES"):
        open_store(store)


# -- every byte ------------------------------------------------------------------------------------------------------


def files_of(store: Path) -> list[Path]:
    return sorted(path for path in store.rglob("*") if path.is_file())


def places_of(size: int) -> list[int]:
    """Return all places in a small file, some of a large one: its ends, and every so many between."""
    if size <= 64:
        return list(range(size))
    return sorted({0, 1, *range(size - 8, size), *range(0, size, max(1, size // 10))})


@pytest.mark.slow_for("added", "removed")
@pytest.mark.parametrize("how", ["flipped", "added", "removed"])
def test_every_byte_is_verified(tmp_path: Path, how: str) -> None:
    with h5py.File(tmp_path / "cloud.h5", "w") as file:
        file["points"] = np.random.default_rng(0).random((3, 2))
        file["u"] = np.arange(3, dtype="i1")
    scidata.partition(tmp_path / "cloud.h5", tmp_path / "s", kind="points")
    store, unseen = tmp_path / "s", []
    assert verify(store) is None
    for path in files_of(store):
        data = path.read_bytes()
        for at in places_of(len(data)):
            body = bytearray(data)
            if how == "flipped":
                body[at] ^= 1 << at % 8
            elif how == "added":
                body.insert(at, body[at])
            else:
                del body[at]
            if bytes(body) == data:
                continue
            path.write_bytes(body)
            if outcome(lambda: verify(store)) is None:
                unseen.append((path.relative_to(store), at))
        path.write_bytes(data)
    assert unseen == []
    assert verify(store) is None


@pytest.mark.parametrize("ending", [b" ", b"\n", b"\0", b"{}"])
def test_bytes_after_the_end(one_sample: Path, ending: bytes) -> None:
    for path in files_of(one_sample):
        data = path.read_bytes()
        path.write_bytes(data + ending)
        assert outcome(lambda: verify(one_sample)) is not None, path
        path.write_bytes(data)
    assert verify(one_sample) is None


def test_whole_files(one_sample: Path) -> None:
    for path in files_of(one_sample):
        data = path.read_bytes()
        path.unlink()
        assert outcome(lambda: verify(one_sample)) is not None, path
        path.write_bytes(b"")
        assert outcome(lambda: verify(one_sample)) is not None, path
        path.write_bytes(data)
    folders = [one_sample, *(path for path in one_sample.rglob("*") if path.is_dir())]
    for folder in folders:
        for name in ("stray", ".hidden", "zarr.json"):
            if not (folder / name).exists():
                (folder / name).write_text("{}")
                assert outcome(lambda: verify(one_sample)) is not None, folder / name
                (folder / name).unlink()
        (folder / "empty").mkdir()
        assert outcome(lambda: verify(one_sample)) is not None, folder
        (folder / "empty").rmdir()
    assert verify(one_sample) is None


def test_consolidated_metadata(store: Path) -> None:
    import zarr

    zarr.consolidate_metadata(store / SAMPLE)
    assert verify(store) is not None


def test_damaged_metadata_are_written_again(pristine: Path) -> None:
    """A run that resumes finds what ``verify`` finds, and ends byte for byte where a whole one does."""
    store = shutil.copytree(pristine, pristine.parent / "copy")  # from where the inputs are seen as they were
    document = store / "sample-000001.zarr" / "node" / "u" / "zarr.json"
    document.write_text(document.read_text() + " ")
    (store / MANIFEST).unlink()
    report = scidata.partition([pristine.parent / f"case{i}.h5" for i in range(2)], store, resume=True)
    assert (report.kept, report.written) == ((0,), (1,))
    expected = {path.relative_to(pristine): path.read_bytes() for path in files_of(pristine)}
    assert {path.relative_to(store): path.read_bytes() for path in files_of(store)} == expected


# -- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a\\b", "a\\", "\\"])
def test_names_that_zarr_does_not_hold(tmp_path: Path, name: str) -> None:
    raw = write_raw(tmp_path / "raw.h5", name=f"node/{name}")
    with pytest.raises(ConfigError, match="backslash"):
        scidata.partition(raw, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_attributes_that_are_no_text(tmp_path: Path) -> None:
    """Bytes that are no UTF-8, as an attribute of a field may hold, are written out."""
    raw = write_raw(tmp_path / "raw.h5")
    with h5py.File(raw, "r+") as file:
        file["node/u"].attrs.create("comment", b"caf\xe9", dtype=h5py.string_dtype())
    scidata.partition(raw, tmp_path / "s")
    assert verify(tmp_path / "s") is None
    assert "caf" in str(open_store(tmp_path / "s").manifest.fields["node/u"].attributes)
    assert read_sample_info(str(tmp_path / "s"), 0) == open_store(tmp_path / "s").sample(0)


def test_files_that_may_not_grow(tmp_path: Path) -> None:
    """``ulimit -f``, as schedulers set it: named like a full disk, and what was written is removed."""
    raw = write_raw(tmp_path / "raw.h5")
    code = f"""
import resource, sys
from scidata.cli.app import main
resource.setrlimit(resource.RLIMIT_FSIZE, (400, {resource.getrlimit(resource.RLIMIT_FSIZE)[1]}))
sys.argv = ["scidata", "partition", {str(raw)!r}, {str(tmp_path / "s")!r}]
main()
"""
    # no bytecode: a cut .pyc would be there for all that import the module after this
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "a file became too large" in done.stderr
    assert "ulimit -f" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("s/*"))
