"""Icechunk repositories: by parts as zarr reads a session; which snapshot it is, and that all ranks have the same."""

from __future__ import annotations

import functools
import http.server
import os
import pickle
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import scidata
from scidata.core.options import ReadOptions
from scidata.core.urls import url_of
from scidata.data.raw_report import inspect_store
from scidata.errors import ConfigError, CorruptDataError, MissingChunkError, RefusedError, UnsupportedFormatError
from scidata.grids.reader import GridReader
from scidata.sources import open_source
from scidata.testing import run_ranks
from tests.unit._s3 import BUCKET, KEY, SECRET, Server
from tests.unit.sources._sets import check_parts, read_part

icechunk = pytest.importorskip("icechunk")
if not hasattr(icechunk.IcechunkStore, "array_chunk_iterator"):
    pytest.skip("needs an icechunk that says where chunks lie", allow_module_level=True)

RNG = np.random.default_rng(0)
VALUES = RNG.normal(size=(4, 13, 10)).astype("f4")
DIMS = ("time", "lat", "lon")


def write(store: Any, values: Any = VALUES, name: str = "u", **options: Any) -> Any:
    group = zarr.open_group(store, mode="a")
    options = {"chunks": (1, 5, 10)} | options
    array = group.create_array(
        name, shape=values.shape, dtype=values.dtype, dimension_names=DIMS, overwrite=True, **options
    )
    array[:] = values
    return array


def commit(repository: Any, values: Any = VALUES, branch: str = "main") -> str:
    session = repository.writable_session(branch)
    write(session.store, values)
    return str(session.commit("a change"))


def create(folder: Path, *containers: str, spec: int = 2) -> Any:
    """Make a repository that knows of folders with virtual chunks."""
    config = icechunk.RepositoryConfig.default()
    config.inline_chunk_threshold_bytes = 100  # less than chunks of noise take
    for container in containers:
        store = icechunk.local_filesystem_store(container.removeprefix("file://"))
        config.set_virtual_chunk_container(icechunk.VirtualChunkContainer(container, store))
    return icechunk.Repository.create(
        icechunk.local_filesystem_storage(str(folder)),
        config=config,
        spec_version=spec,
        authorize_virtual_chunk_access=dict.fromkeys(containers, icechunk.credentials.LocalFileSystemAccess),
    )


@pytest.fixture
def repository(tmp_path: Path) -> Any:
    return create(tmp_path / "repo")


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [1, 2])
def test_parts_of_native_and_inline_chunks(tmp_path: Path, spec: int) -> None:
    repository = create(tmp_path / "repo", spec=spec)
    session = repository.writable_session("main")
    write(session.store)
    counts = RNG.integers(0, 1000, VALUES.shape).astype("i2")
    counts[1] = 7  # small enough to be inline
    write(session.store, counts, "n")
    write(session.store, VALUES * 2, "sharded", shards=(2, 15, 10))
    write(session.store, VALUES * 3, "raw", compressors=None)
    session.commit("all")
    kinds = {str(session.chunk_type("/n", [i, 0, 0])).lower().rpartition(".")[2] for i in range(4)}
    assert kinds == {"native", "inline"}
    path = tmp_path / "repo"
    assert open_source(path).format == "icechunk"
    group = zarr.open_group(repository.readonly_session("main").store, mode="r")
    check_parts(path, {name: np.asarray(group[name][:]) for name in ("u", "n", "sharded", "raw")}, "lat")
    report = inspect_store(str(path))
    assert (report.format, report.num_samples, sorted(report.fields)) == ("icechunk", 4, ["n", "raw", "sharded", "u"])


def test_codecs_that_only_zarr_knows(tmp_path: Path, repository: Any) -> None:
    session = repository.writable_session("main")
    write(session.store, compressors=[zarr.codecs.ZstdCodec()],
          filters=[zarr.codecs.numcodecs.FixedScaleOffset(offset=0, scale=1, dtype="<f4")])  # fmt: skip
    session.commit("filtered")
    assert open_source(tmp_path / "repo").arrays["u"].fallback
    values = zarr.open_array(repository.readonly_session("main").store, path="u", mode="r")[:]
    check_parts(tmp_path / "repo", {"u": np.asarray(values)}, "lat")


def test_groups_and_chunks_that_are_not_there(tmp_path: Path, repository: Any) -> None:
    session = repository.writable_session("main")
    group = zarr.open_group(session.store, mode="a").create_group("a/b")
    array = group.create_array("u", shape=VALUES.shape, chunks=(1, 13, 10), dtype="f4", dimension_names=DIMS)
    array[:3] = VALUES[:3]
    group.create_array("crs", shape=(), dtype="i4")[...] = 7
    session.commit("three of four")
    source = open_source(tmp_path / "repo")
    assert source.locate(source.arrays["a/b/crs"], np.zeros((1, 0), np.int64)).path_index.tolist() == [0]
    reader = GridReader(tmp_path / "repo", ReadOptions(fields=["a/b/u"]))
    assert np.array_equal(read_part(reader, 2, {})["a/b/u"], VALUES[2])
    with pytest.raises(MissingChunkError, match=r"chunk \(3, 0, 0\)"):
        read_part(reader, 3, {})
    session = repository.writable_session("main")
    zarr.open_array(session.store, path="a/b/u", mode="a").resize((2, 13, 10))
    session.commit("two")
    reader = GridReader(tmp_path / "repo", ReadOptions(fields=["a/b/u"]))
    assert reader.num_samples == 2
    assert np.array_equal(read_part(reader, 1, {})["a/b/u"], VALUES[1])


def test_virtual_chunks_of_virtualizarr(tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("virtualizarr")
    pytest.importorskip("netCDF4")
    from obspec_utils.registry import ObjectStoreRegistry
    from obstore.store import LocalStore
    from virtualizarr import open_virtual_dataset
    from virtualizarr.parsers import HDFParser

    (tmp_path / "files").mkdir()
    data = xarray.Dataset({"u": (DIMS, VALUES)}, coords={"lat": np.linspace(-60, 60, 13)})
    options = {"zlib": True, "shuffle": True, "chunksizes": (1, 5, 10)}
    data.to_netcdf(tmp_path / "files" / "data.nc", engine="netcdf4", encoding={"u": options})
    prefix = f"file://{tmp_path}/files/"
    repository = create(tmp_path / "repo", prefix)
    virtual = open_virtual_dataset(
        f"{prefix}data.nc", parser=HDFParser(), registry=ObjectStoreRegistry({"file://": LocalStore()})
    )
    session = repository.writable_session("main")
    getattr(virtual, "vz" if hasattr(virtual, "vz") else "virtualize").to_icechunk(session.store)
    session.commit("virtual")
    path = tmp_path / "repo"
    with pytest.raises(RefusedError, match=r"files/data\.nc.*outside.*allow_external=True"):
        scidata.open_dataset(path, fields="u")[0]
    check_parts(path, {"u": VALUES}, "lat", allow_external=True)
    named = scidata.open_dataset(f"file://{path}", fields="u", storage_options={"targets": {prefix: {}}})
    assert np.array_equal(named[3]["u"].numpy(), VALUES[3])
    with pytest.raises(RefusedError):
        scidata.open_dataset(f"file://{path}", fields="u", storage_options={"targets": {f"{prefix}other": {}}})[0]


# -- which snapshot --------------------------------------------------------------------------------------------------


def test_branches_tags_and_snapshots(tmp_path: Path, repository: Any) -> None:
    path = tmp_path / "repo"
    first = commit(repository)
    repository.create_tag("v1", snapshot_id=first)
    repository.create_branch("dev", snapshot_id=first)
    second = commit(repository, VALUES + 1)
    third = commit(repository, VALUES + 2, "dev")
    wanted = {"": (second, 1), "@branch=main": (second, 1), "@branch=dev": (third, 2), "@tag=v1": (first, 0)}
    wanted |= {f"@snapshot={first}": (first, 0), f"@snapshot={third}": (third, 2)}
    for suffix, (snapshot, added) in wanted.items():
        for start in ("", "file://"):
            ds = scidata.open_dataset(f"{start}{path}{suffix}")
            assert np.array_equal(ds[1]["u"].numpy(), VALUES[1] + added)
            assert f"{path}@snapshot={snapshot}" in repr(ds)
    for suffix in ("@branch=no", "@tag=main", "@snapshot=no", "@snapshot=" + "0" * 20):
        with pytest.raises(ConfigError, match=r"branches \['dev', 'main'\] and tags \['v1'\]"):
            scidata.open_dataset(f"{path}{suffix}")


def test_a_session_reads_one_snapshot(tmp_path: Path, repository: Any) -> None:
    first = commit(repository)
    path = tmp_path / "repo"
    ds = scidata.open_dataset(path)
    sent = pickle.dumps(ds)
    commit(repository, VALUES + 1)
    later = scidata.open_dataset(path)
    for found in (ds, pickle.loads(sent)):
        assert np.array_equal(found[1]["u"].numpy(), VALUES[1])
        assert found.fingerprint == ds.fingerprint
    assert np.array_equal(later[1]["u"].numpy(), VALUES[1] + 1)
    assert later.fingerprint != ds.fingerprint
    assert scidata.open_dataset(f"{path}@snapshot={first}").fingerprint == ds.fingerprint
    with pytest.raises(ConfigError, match="fingerprint"):
        scidata.DataLoader(later).load_state_dict(scidata.DataLoader(ds).state_dict())


def test_parts_are_kept_on_disk_whatever_the_snapshot(tmp_path: Path, repository: Any) -> None:
    commit(repository)

    def read() -> float:
        ds = scidata.open_dataset(tmp_path / "repo", cache_dir=tmp_path / "cache", cache_disk_bytes=1 << 26)
        loader = scidata.DataLoader(ds, shuffle=False)
        for batch in loader:
            assert np.array_equal(batch["u"][0].numpy(), zarr_values()[batch.index[0]])
        return loader.stats()["bytes_fetched"]

    def zarr_values() -> Any:
        store = repository.readonly_session("main").store
        return np.asarray(zarr.open_group(store, mode="r")["u"][:])

    settled: set[Path] = set()

    def settle() -> None:
        """Make new files old enough to be kept; touched again, those before would count as changed."""
        for file in {*(tmp_path / "repo" / "chunks").iterdir()} - settled:
            os.utime(file, (time.time() - 100,) * 2)
            settled.add(file)

    settle()
    assert read() > 0
    assert read() == 0
    session = repository.writable_session("main")
    zarr.open_group(session.store, mode="r+")["u"][2] = VALUES[0]
    session.commit("one step")
    settle()
    fetched = read()
    assert 0 < fetched < VALUES.nbytes / 2
    assert read() == 0


def _opens(rank: int, num_ranks: int, path: str, snapshots: list[str]) -> str:
    """Open while the branch moves: as if rank 1 had looked after a commit."""
    mesh = scidata.init_mesh(domain=num_ranks)
    ds = scidata.open_dataset(f"{path}@snapshot={snapshots[rank]}", mesh)
    try:
        for _ in scidata.DataLoader(ds):
            time.sleep(0.3)
    except ConfigError as e:
        return str(e)
    return "nobody has noticed"


@pytest.mark.slow  # eight seconds; what it says follows from the fingerprints above, and from test_watch.py
def test_ranks_at_different_snapshots_are_told(tmp_path: Path, repository: Any) -> None:
    snapshots = [commit(repository), commit(repository, VALUES + 1)]
    for message in run_ranks(_opens, 2, str(tmp_path / "repo"), snapshots):
        assert all(f"repo@snapshot={snapshot}" in message for snapshot in snapshots)
        assert "give both the same data set" in message


def in_a_fork(call: Callable[[], bool]) -> int:
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # it would wait for threads that a fork does not have
        os._exit(0 if call() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def is_refused_anew(path: Path) -> bool:
    try:
        return not open_source(path).arrays
    except ConfigError as e:
        return "spawn" in str(e)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_processes_raise_and_do_not_hang(tmp_path: Path, repository: Any) -> None:
    commit(repository)
    reader = GridReader(tmp_path / "repo", ReadOptions(num_threads=1))

    def is_refused() -> bool:
        try:
            read_part(reader, 0, {})
        except ConfigError as e:
            return "spawn" in str(e)
        return False

    assert in_a_fork(is_refused) == 0
    assert in_a_fork(lambda: is_refused_anew(tmp_path / "repo")) == 0
    read_part(reader, 0, {})  # from here on the places are known, and a fork has them
    assert in_a_fork(lambda: np.array_equal(read_part(reader, 1, {})["u"], VALUES[1])) == 0


def test_what_is_no_repository(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", shape=(3,), dtype="f4")[:] = 1
    with pytest.raises(ConfigError, match="no Icechunk repository"):
        open_source(f"{tmp_path}/a.zarr@branch=main")
    os.rename(tmp_path / "a.zarr", tmp_path / "b@branch=main")
    assert list(open_source(f"{tmp_path}/b@branch=main").arrays) == ["b@branch=main"]  # which has that name
    (tmp_path / "empty" / "snapshots").mkdir(parents=True)
    with pytest.raises(UnsupportedFormatError):
        open_source(tmp_path / "empty")
    (tmp_path / "empty" / "repo").write_bytes(b"nothing that Icechunk has written")
    with pytest.raises(OSError, match=r"empty.*Icechunk could not read it"):
        _ = open_source(tmp_path / "empty").arrays


def test_damaged_chunks(tmp_path: Path, repository: Any) -> None:
    commit(repository)
    ds = scidata.open_dataset(tmp_path / "repo")
    chunk = max((tmp_path / "repo" / "chunks").iterdir())
    shutil.copy(chunk, tmp_path / "copy")
    os.truncate(chunk, 20)
    with pytest.raises(CorruptDataError, match=chunk.name):
        [ds[i] for i in range(4)]
    chunk.unlink()
    chunk.symlink_to(tmp_path / "copy")
    with pytest.raises(RefusedError, match=chunk.name):
        [scidata.open_dataset(tmp_path / "repo")[i] for i in range(4)]


# -- object stores ---------------------------------------------------------------------------------------------------


def test_a_repository_on_a_web_server(tmp_path: Path, repository: Any) -> None:
    pytest.importorskip("aiohttp")
    commit(repository)
    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ds = scidata.open_dataset(f"http://127.0.0.1:{server.server_port}/repo@branch=main")
        assert np.array_equal(ds[2]["u"].numpy(), VALUES[2])
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and ranges of them."""

    def do_GET(self) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if found is None or not path.is_file():
            super().do_GET()
            return
        data, begin = path.read_bytes(), int(found[1])
        body = data[begin : int(found[2]) + 1 if found[2] else None]
        self.send_response(206)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Range", f"bytes {begin}-{begin + len(body) - 1}/{len(data)}")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def test_a_repository_in_a_bucket(s3: Server) -> None:
    s3.client().create_bucket(Bucket="elsewhere")
    for bucket in (BUCKET, "elsewhere"):
        s3.client().put_object(Bucket=bucket, Key="raw.bin", Body=VALUES.tobytes())
    access: dict[str, Any] = {"region": "us-east-1", "endpoint_url": s3.endpoint, "allow_http": True}
    config = icechunk.RepositoryConfig.default()
    keys = icechunk.s3_credentials(access_key_id=KEY, secret_access_key=SECRET)
    for bucket in (BUCKET, "elsewhere"):
        store = icechunk.s3_store(**access, force_path_style=True)
        config.set_virtual_chunk_container(icechunk.VirtualChunkContainer(f"s3://{bucket}/", store))
    repository = icechunk.Repository.create(
        icechunk.s3_storage(
            bucket=BUCKET, prefix="ice/repo", **access, force_path_style=True, access_key_id=KEY,
            secret_access_key=SECRET,
        ),
        config=config,
        authorize_virtual_chunk_access=icechunk.containers_credentials(
            {f"s3://{bucket}/": keys for bucket in (BUCKET, "elsewhere")}
        ),
    )  # fmt: skip
    session = repository.writable_session("main")
    write(session.store)
    row = VALUES[0].nbytes
    for name, bucket in (("v", BUCKET), ("w", "elsewhere")):
        write(session.store, np.zeros_like(VALUES), name, chunks=(1, 13, 10), compressors=None)
        for i in range(4):
            session.store.set_virtual_ref(f"{name}/c/{i}/0/0", f"s3://{bucket}/raw.bin", offset=i * row, length=row)
    session.commit("all")
    url = f"s3://{BUCKET}/ice/repo"
    check_parts(url_of(url, s3.options), {"u": VALUES, "v": VALUES}, "lat", fields=["u", "v"])
    ds = scidata.open_dataset(f"{url}@branch=main", fields=["w"], storage_options=s3.options)
    assert SECRET not in repr(ds) + repr(ds.reader.sources)
    with pytest.raises(RefusedError, match=r"elsewhere/raw\.bin") as refused:
        ds[0]
    assert SECRET not in str(refused.value)
    options = s3.options | {"targets": {"s3://elsewhere": s3.options}}
    named = scidata.open_dataset(url, fields=["w"], storage_options=options)
    assert np.array_equal(pickle.loads(pickle.dumps(named))[2]["w"].numpy(), VALUES[2])
    with pytest.raises(ConfigError, match="branches"):
        scidata.open_dataset(f"{url}@tag=x", storage_options=s3.options)
    wrong = s3.options | {"secret": "x" * 20}
    s3.wire.fault = lambda environ: "403" if "ice" in environ["PATH_INFO"] else None
    with pytest.raises(OSError) as denied:  # noqa: PT011 - whoever notices first
        scidata.open_dataset(url, storage_options=wrong)
    s3.wire.fault = lambda environ: None
    assert "x" * 20 not in str(denied.value)
