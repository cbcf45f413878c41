"""Reference sets of the real tools read by parts as xarray and zarr read them; where they may lead; damaged ones."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pytest
import zarr

import scidata
from scidata.cli.commands.bench import bench_path
from scidata.core.options import ReadOptions
from scidata.core.urls import url_of
from scidata.data.raw_report import inspect_store
from scidata.errors import (
    ConfigError,
    CorruptDataError,
    MissingChunkError,
    RefusedError,
    ShortReadError,
    SourceChangedError,
    TooLargeError,
    UnsupportedFormatError,
)
from scidata.grids.reader import GridReader
from scidata.sources import open_source
from scidata.sources.access.files import files
from scidata.sources.references import kerchunk as json_sets
from scidata.sources.references import parquet as parquet_sets
from scidata.sources.references.kerchunk import Templates
from tests.unit._s3 import BUCKET, KEY, SECRET
from tests.unit.sources._references import ARRAY, PLAIN, ROWS, parquet_set, plain_refs, save
from tests.unit.sources._sets import check_parts, read_part

ERA = Path(__file__).parents[3].parent / "shared" / "data" / "eraint_uvz.nc"
VALUES = np.random.default_rng(0).normal(size=(4, 13, 10)).astype("f4")
COUNTS = np.arange(4 * 13 * 10, dtype="i2").reshape(4, 13, 10)
COUNTS[1] = 7  # its chunks are small enough to be inline
WHOLE = {"u": VALUES, "n": COUNTS}
DIMS = ("time", "lat", "lon")


def write_netcdf(path: Path, kind: str) -> Path:
    netcdf4 = pytest.importorskip("netCDF4")
    with netcdf4.Dataset(path, "w", format=kind) as f:
        for dim, n in zip(DIMS, VALUES.shape, strict=True):
            f.createDimension(dim, None if dim == "time" else n)
        options = {"zlib": True, "shuffle": True, "chunksizes": (1, 5, 10)} if kind == "NETCDF4" else {}
        for name, values in WHOLE.items():
            f.createVariable(name, values.dtype, DIMS, **options)[:] = values
        f.createVariable("lat", "f8", ("lat",))[:] = np.linspace(-60, 60, 13)
    return path


def refs_of(path: Path, **options: Any) -> dict[str, Any]:
    """Return kerchunk's references to a file."""
    pytest.importorskip("kerchunk")
    if h5py.is_hdf5(path):
        from kerchunk.hdf import SingleHdf5ToZarr

        return dict(SingleHdf5ToZarr(str(path), **options).translate())
    from kerchunk.netCDF3 import NetCDF3ToZarr

    return dict(NetCDF3ToZarr(str(path), **options).translate())


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "data.bin").write_bytes(PLAIN.tobytes())
    return folder


def rows_of(path: Any, **options: Any) -> np.ndarray[Any, Any]:
    ds = scidata.open_dataset(path, sample_dim="time", **options)
    return np.stack([ds[i]["u"].numpy() for i in range(len(ds))])


# -- what the tools write --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inline", [0, 100, 10**6], ids=["none", "some", "all"])
@pytest.mark.parametrize("kind", ["NETCDF4", "NETCDF3_CLASSIC"])
def test_json_of_kerchunk(tmp_path: Path, kind: str, inline: int) -> None:
    refs = refs_of(write_netcdf(tmp_path / "data.nc", kind), inline_threshold=inline)
    path = save(tmp_path / "refs.json", refs)
    keys = [key for key in refs["refs"] if key.startswith(("u/", "n/")) and "/." not in key]
    forms = {type(refs["refs"][key]) for key in keys}
    assert forms == {0: {list}, 100: {list, str} if kind == "NETCDF4" else {list}, 10**6: {str}}[inline]
    source = open_source(path)
    assert source.format == "kerchunk"
    if inline < 10**6:
        assert [c.name for c in source.arrays["u"].codecs] == (["shuffle", "zlib"] if kind == "NETCDF4" else [])
    check_parts(path, WHOLE, "lat")
    xarray = pytest.importorskip("xarray")
    with xarray.open_dataset(str(path), engine="kerchunk", decode_cf=False) as found:
        check_parts(path, {name: found[name].values for name in WHOLE}, "lat")
    again = pickle.loads(pickle.dumps(scidata.open_dataset(path)))
    assert np.array_equal(again[2]["u"].numpy(), VALUES[2])


def test_version_0_is_the_references_alone(plain: Path) -> None:
    path = save(plain / "refs.json", "\ufeff  " + json.dumps(plain_refs(plain / "data.bin")["refs"]))
    assert np.array_equal(rows_of(path), PLAIN)


@pytest.mark.parametrize("engine", ["fastparquet", "pyarrow"])
def test_parquet_of_kerchunk(tmp_path: Path, engine: str) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip(engine)
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.reference import LazyReferenceMapper

    refs = refs_of(write_netcdf(tmp_path / "data.nc", "NETCDF4"), inline_threshold=100)["refs"]
    path = tmp_path / "refs.parq"
    path.mkdir()
    written = LazyReferenceMapper.create(str(path), fs=fsspec.filesystem("file"), record_size=5, engine=engine)
    for key in sorted(refs, key=lambda key: not key.rpartition("/")[2].startswith(".")):  # metadata first
        written[key] = refs[key]
    written.flush()
    assert len(list((path / "u").glob("*.parq"))) == 3  # of 12 chunks
    assert open_source(path).format == "kerchunk-parquet"
    check_parts(path, WHOLE, "lat")


def test_a_rank_reads_the_tables_of_its_chunks_alone(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("fastparquet")
    pytest.importorskip("kerchunk")
    from kerchunk.df import refs_to_dataframe

    refs_to_dataframe(
        refs_of(write_netcdf(tmp_path / "data.nc", "NETCDF4")), str(tmp_path / "refs.parq"), record_size=3
    )
    reader = GridReader(tmp_path / "refs.parq", ReadOptions(fields=["u"]))
    for block in (0, 2, 3):
        (tmp_path / "refs.parq" / "u" / f"refs.{block}.parq").unlink()
    assert np.array_equal(read_part(reader, 1, {})["u"], VALUES[1])
    with pytest.raises(MissingChunkError, match=r"chunk \(2, 0, 0\)"):
        read_part(reader, 2, {})


@pytest.mark.parametrize("form", ["json", "parquet"])
def test_sets_of_virtualizarr(tmp_path: Path, form: str) -> None:
    pytest.importorskip("virtualizarr")
    xarray = pytest.importorskip("xarray")
    if form == "parquet":
        pytest.importorskip("pyarrow")
        pytest.importorskip("fastparquet")
    from obspec_utils.registry import ObjectStoreRegistry
    from obstore.store import LocalStore
    from virtualizarr import open_virtual_dataset
    from virtualizarr.parsers import HDFParser

    if not ERA.exists():
        pytest.skip("needs the ERA-Interim file")
    with xarray.open_dataset(ERA) as era:
        small = era.isel(latitude=slice(0, 61), longitude=slice(0, 48)).load().drop_encoding()
    chunks = {name: {"zlib": True, "shuffle": True, "chunksizes": (1, 2, 20, 48)} for name in small.data_vars}
    small.to_netcdf(tmp_path / "era.nc", encoding=chunks)
    registry = ObjectStoreRegistry({"file://": LocalStore()})
    virtual = open_virtual_dataset(f"file://{tmp_path}/era.nc", parser=HDFParser(), registry=registry)
    path = tmp_path / f"set.{form}"
    getattr(virtual, "vz" if hasattr(virtual, "vz") else "virtualize").to_kerchunk(str(path), format=form)
    # fsspec's own reader of Parquet sets does not take those in which all chunks of an array are inline
    oracle = (
        {"filename_or_obj": str(path), "engine": "kerchunk"}
        if form == "json"
        else {"filename_or_obj": tmp_path / "era.nc"}
    )
    with xarray.open_dataset(**oracle) as wanted:
        check_parts(path, {name: wanted[name].values for name in small.data_vars}, "latitude")


def test_several_files_and_a_whole_one(plain: Path) -> None:
    for i in range(4):
        (plain / f"{i}.bin").write_bytes(PLAIN[i].tobytes())
    changes: dict[str, Any] = {f"u/{i}.0": [f"{i}.bin"] for i in range(3)}  # relative: to the folder of the set
    changes["u/3.0"] = "base64:" + base64.b64encode(PLAIN[3].tobytes()).decode()
    path = save(plain / "refs.json", plain_refs("", **changes))
    assert np.array_equal(rows_of(path), PLAIN)
    source = open_source(path)
    refs = source.locate(source.arrays["u"], np.array([[0, 0], [1, 0], [0, 0]]))
    assert [os.path.basename(refs.paths[i]) for i in refs.path_index] == ["0.bin", "1.bin", "0.bin"]
    assert len(refs.paths) == 2


def test_scalars_and_empty_arrays(plain: Path) -> None:
    refs = plain_refs("data.bin")
    refs["refs"]["crs/.zarray"] = json.dumps(ARRAY | {"shape": [], "chunks": []})
    refs["refs"]["crs/0"] = ["data.bin", 8, 4]
    refs["refs"]["none/.zarray"] = json.dumps(ARRAY | {"shape": [0, 6]})
    source = open_source(save(plain / "refs.json", refs))
    found = source.locate(source.arrays["crs"], np.zeros((1, 0), np.int64))
    assert (found.offset.tolist(), found.nbytes.tolist()) == ([8], [4])
    assert not len(source.locate(source.arrays["none"], np.zeros((0, 2), np.int64)).path_index)
    refs["refs"]["crs/1"] = ["data.bin", 8, 4]
    with pytest.raises(CorruptDataError, match="crs/1"):
        _ = open_source(save(plain / "refs.json", refs)).arrays


def test_zarr_3_and_shards(tmp_path: Path) -> None:
    """Files of a sharded store, packed into one: what indexes say counts from where the shard begins."""
    array = zarr.create_array(
        tmp_path / "a.zarr", shape=(4, 13, 10), chunks=(1, 5, 10), shards=(2, 15, 10), dtype="f4",
        dimension_names=DIMS,
    )  # fmt: skip
    array[:] = VALUES
    refs: dict[str, Any] = {
        "zarr.json": '{"zarr_format": 3, "node_type": "group"}',
        "u/zarr.json": json.loads((tmp_path / "a.zarr" / "zarr.json").read_text()),
    }
    packed = b"begins with something else"
    for i in range(2):
        shard = (tmp_path / "a.zarr" / "c" / str(i) / "0" / "0").read_bytes()
        refs[f"u/c/{i}/0/0"] = ["packed.bin", len(packed), len(shard)]
        packed += shard
    (tmp_path / "packed.bin").write_bytes(packed)
    path = save(tmp_path / "refs.json", {"version": 1, "refs": refs})
    check_parts(path, {"u": VALUES}, "lat")
    refs["u/c/1/0/0"] = "base64:" + base64.b64encode(packed[refs["u/c/1/0/0"][1] :]).decode()
    check_parts(save(path, {"version": 1, "refs": refs}), {"u": VALUES}, "lat")
    refs["u/c/0/0/0"][2] -= 1
    with pytest.raises(CorruptDataError, match=r"packed\.bin"):
        rows_of(save(path, {"version": 1, "refs": refs}))


def test_codecs_that_only_zarr_knows(plain: Path) -> None:
    delta = numcodecs.Delta(dtype="<i4")
    data = b"".join(bytes(delta.encode(row)) for row in PLAIN)
    (plain / "data.bin").write_bytes(data)
    array = json.dumps(ARRAY | {"filters": [delta.get_config()]})
    path = save(plain / "refs.json", plain_refs("data.bin", **{"u/.zarray": array}))
    assert open_source(path).arrays["u"].fallback
    assert np.array_equal(rows_of(path), PLAIN)
    path = save(plain / "refs.json", plain_refs("/etc/hostname", **{"u/.zarray": array}))
    with pytest.raises(RefusedError):
        rows_of(path)


def test_templates_and_generators(plain: Path) -> None:
    refs = plain_refs(plain / "data.bin")
    del refs["refs"]["u/0.0"], refs["refs"]["u/1.0"], refs["refs"]["u/2.0"]
    refs["templates"] = {"dir": f"{plain}", "f": "{{dir_}}/{{c}}.bin"}
    refs["refs"]["u/3.0"] = [f"{{{{f(dir_='{plain}', c='data')}}}}", 72, 24]
    refs["gen"] = [{
        "key": "u/{{i}}.0", "url": "{{dir}}/data.bin", "offset": "{{(i + 1) * 24 - 24}}", "length": "24",
        "dimensions": {"i": {"stop": 3}},
    }]  # fmt: skip
    assert np.array_equal(rows_of(save(plain / "refs.json", refs)), PLAIN)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__ }}", "{{ open('x') }}", "{{ u.__init__ }}", "{{ u * 9 }}", "{{ 9 ** 9 }}", "{{ [1] }}",
        "{{ 1 // 0 }}", "{{ missing }}", "{{ f() }}", "{{ " + "(" * 500 + " }}", "{{ 99999999 * 999999999999 }}",
    ],
)  # fmt: skip
def test_templates_run_no_code(text: str) -> None:
    with pytest.raises(UnsupportedFormatError, match=r"set\.json: template"):
        Templates({"u": "text", "f": "{{c}}"}, "set.json").fill(text)


def test_inspect_and_bench(tmp_path: Path) -> None:
    path = save(tmp_path / "refs.json", refs_of(write_netcdf(tmp_path / "data.nc", "NETCDF4"), inline_threshold=100))
    report = inspect_store(str(path))
    assert (report.format, report.num_samples, set(report.fields)) == ("kerchunk", 4, {"u", "n"})
    assert {row.method for row in bench_path(str(path), repeats=1)} == {"scidata", "scidata threads", "preadv"}


# -- where references may lead ---------------------------------------------------------------------------------------


def test_files_outside_the_folder_are_refused(plain: Path) -> None:
    outside = plain.parent / "outside.bin"
    outside.write_bytes(PLAIN.tobytes())
    (plain / "link.bin").symlink_to(outside)
    (plain / "dir").symlink_to(plain.parent)
    (plain.parent / "set2").mkdir()
    (plain.parent / "set2" / "data.bin").write_bytes(PLAIN.tobytes())
    names = [
        outside, f"file://{outside}", "../outside.bin", "link.bin", "dir/outside.bin", f"{plain}/../outside.bin",
        f"{plain}2/data.bin", "..//outside.bin", "x/../../outside.bin",
    ]  # fmt: skip
    (plain / "x").mkdir()
    for name in names:
        path = save(plain / "refs.json", plain_refs(name))
        with pytest.raises(RefusedError, match="allow_external=True"):
            rows_of(path)
        assert np.array_equal(rows_of(path, allow_external=True), PLAIN), name
    options = {"targets": {f"file://{plain.parent}": {}}}
    assert np.array_equal(rows_of(f"file://{path}", storage_options=options), PLAIN)
    with pytest.raises(RefusedError):
        rows_of(f"file://{path}", storage_options={"targets": {f"file://{plain}": {}}})
    with pytest.raises(ConfigError, match="targets"):
        rows_of(f"file://{path}", storage_options={"targets": [f"file://{plain}"]})


@pytest.mark.parametrize("name", ["http://127.0.0.1:9/x", "s3://bucket/x", "ftp://h/x", "memory://x", "https://h@g/x"])
def test_urls_are_refused(plain: Path, name: str) -> None:
    with pytest.raises(RefusedError, match="outside"):
        rows_of(save(plain / "refs.json", plain_refs(name)))


@pytest.mark.parametrize("name", ["HTTP://h/x", "FILE:///etc/hostname", " file:///etc/hostname", "http://h/a%2f../b"])
def test_odd_urls_are_refused_always(plain: Path, name: str) -> None:
    path = save(plain / "refs.json", plain_refs(name))
    for options in ({"allow_external": True}, {"storage_options": {"targets": {"file:///": {}, "http://h/a": {}}}}):
        with pytest.raises(RefusedError, match="not written as URLs are"):
            rows_of(f"file://{path}", **options)


@pytest.mark.parametrize("name", ["simplecache::file:///x", "zip://a::/x", "a\0b", ""])
def test_chains_are_refused_always(plain: Path, name: str) -> None:
    with pytest.raises(RefusedError, match="neither a path nor a URL"):
        rows_of(save(plain / "refs.json", plain_refs(name)), allow_external=True)


def test_inspect_describes_sets_that_lead_outside(plain: Path) -> None:
    refs = refs_of(write_netcdf(plain.parent / "data.nc", "NETCDF4"), inline_threshold=0)
    report = inspect_store(str(save(plain / "refs.json", refs)))
    assert (report.kind, {array.name for array in report.arrays}) == ("grid", {"u", "n", "lat"})


def test_a_pipe_is_not_opened(plain: Path) -> None:
    os.mkfifo(plain / "pipe")
    with pytest.raises(RefusedError, match="no regular file"):
        rows_of(save(plain / "refs.json", plain_refs("pipe")))


def test_sets_in_a_bucket(plain: Path, s3: Any) -> None:
    own = s3.put(plain / "data.bin", "own/data.bin")
    changes = {"u/2.0": [own], "u/1.0": "base64:" + base64.b64encode(PLAIN[1].tobytes()).decode()}
    refs = plain_refs(own, **changes)
    refs["refs"]["u/2.0"] = [own, 48, 24]
    url = s3.put(save(plain / "refs.json", refs), "sets/refs.json")
    ds = scidata.open_dataset(url, sample_dim="time", storage_options=s3.options)
    s3.wire.forget()
    assert np.array_equal(np.stack([ds[i]["u"].numpy() for i in range(4)]), PLAIN)
    assert sorted(span for _, span in s3.wire.gets) == ["bytes=0-23", "bytes=48-71", "bytes=72-95"]
    assert np.array_equal(pickle.loads(pickle.dumps(ds))[3]["u"].numpy(), PLAIN[3])
    assert SECRET not in repr(ds.plan(0)) + repr(ds)
    relative = s3.put(save(plain / "rel.json", plain_refs("../own/./data.bin")), "sets/rel.json")
    assert np.array_equal(rows_of(relative, storage_options=s3.options), PLAIN)


def test_credentials_stay_with_their_bucket(plain: Path, s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.client().create_bucket(Bucket="other")
    s3.client().put_object(Bucket="other", Key="data.bin", Body=PLAIN.tobytes())
    url = s3.put(save(plain / "refs.json", plain_refs("s3://other/data.bin")), "sets/other.json")
    with pytest.raises(RefusedError, match=r"other/data\.bin"):
        rows_of(url, storage_options=s3.options)
    for name in ("s3://other-evil/data.bin", f"s3://{BUCKET}/../other/data.bin", f"s3://{BUCKET}@other/data.bin"):
        bad = s3.put(save(plain / "bad.json", plain_refs(name)), "sets/bad.json")
        with pytest.raises(RefusedError):
            rows_of(bad, storage_options=s3.options | {"targets": {"s3://other": s3.options}})
    targets = {"targets": {"s3://other/": s3.options}}
    assert np.array_equal(rows_of(url, storage_options=s3.options | targets), PLAIN)
    local = save(plain / "refs.json", plain_refs("s3://other/data.bin"))
    assert np.array_equal(rows_of(f"file://{local}", storage_options=targets), PLAIN)
    source: Any = open_source(url, allow_external=True, storage_options=s3.options)
    assert source.bind(f"s3://{BUCKET}/x").options == s3.options
    assert source.bind("s3://other/data.bin").options == {}
    assert KEY not in str(vars(source.bind("s3://other/data.bin")))
    with pytest.raises(RefusedError, match="local file outside its own bucket or host"):
        rows_of(s3.put(save(plain / "l.json", plain_refs("/etc/hostname")), "sets/l.json"), storage_options=s3.options)


def test_parquet_in_a_bucket(tmp_path: Path, s3: Any) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("fastparquet")
    pytest.importorskip("kerchunk")
    from kerchunk.df import refs_to_dataframe

    refs = refs_of(write_netcdf(tmp_path / "data.nc", "NETCDF4"), inline_threshold=100)
    where = s3.put(tmp_path / "data.nc", "pq/data.nc")
    refs["refs"] = {k: [where, *v[1:]] if isinstance(v, list) else v for k, v in refs["refs"].items()}
    refs_to_dataframe(refs, str(tmp_path / "refs.parq"), record_size=5)
    url = url_of(s3.put(tmp_path / "refs.parq", "pq/refs.parq"), s3.options)
    check_parts(url, WHOLE, "lat")


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"u/0.0": ["data.bin", -24, 24]}, CorruptDataError, "u/0.0"),
        ({"u/0.0": ["data.bin", 0, -24]}, CorruptDataError, "u/0.0"),
        ({"u/0.0": ["data.bin", "0", 24]}, CorruptDataError, "u/0.0"),
        ({"u/0.0": ["data.bin", True, 24]}, CorruptDataError, "u/0.0"),
        ({"u/0.0": ["data.bin", 2**63 - 10, 24]}, CorruptDataError, "u/0.0"),
        ({"u/0.0": ["data.bin", 0]}, CorruptDataError, "u/0.0"),
        ({"u/0.0": [7, 0, 24]}, CorruptDataError, "u/0.0"),
        ({"u/0.0": 7}, CorruptDataError, "u/0.0"),
        ({"u/0.0": "base64:###"}, CorruptDataError, "u/0.0.*base64"),
        ({"u/4.0": ["data.bin", 0, 24]}, CorruptDataError, r"u/4\.0.*grid"),
        ({"u/00.0": ["data.bin", 0, 24]}, CorruptDataError, r"u/00\.0.*grid"),
        ({"u/0": ["data.bin", 0, 24]}, CorruptDataError, "u/0'.*grid"),
        ({"u/nonsense": ["data.bin", 0, 24]}, CorruptDataError, "nonsense.*grid"),
        ({"u/0.0": ["data.bin", 90, 24]}, ShortReadError, r"data\.bin.*96"),
        ({"u/0.0": ["data.bin", 2**60, 24]}, ShortReadError, r"data\.bin"),
        ({"u/0.0": ["data.bin", 0, 23]}, ShortReadError, r"chunk \(0, 0\)"),
        ({"u/0.0": ["data.bin", 0, 2**60]}, CorruptDataError, r"chunk \(0, 0\)"),
        ({"u/0.0": ["data.bin"]}, CorruptDataError, r"chunk \(0, 0\).*96 bytes"),
        ({"u/0.0": "1234"}, ShortReadError, r"u/0\.0"),
        ({"u/0.0": ["gone.bin", 0, 24]}, FileNotFoundError, r"gone\.bin"),
        ({"../x/.zarray": json.dumps(ARRAY)}, RefusedError, "x"),
        ({"u/.zarray": ["data.bin", 0, 24]}, UnsupportedFormatError, r"u/\.zarray"),
        ({"u/0.0": ["{{nothing}}", 0, 24]}, UnsupportedFormatError, "nothing"),
    ],
)
def test_damaged_references(plain: Path, changes: dict[str, Any], error: type[Exception], said: str) -> None:
    path = save(plain / "refs.json", plain_refs("data.bin", **changes))
    with pytest.raises(error, match=said):
        rows_of(path)


@pytest.mark.parametrize("value", [2**60, 2**40])
def test_absurd_sizes_of_compressed_chunks(plain: Path, value: int) -> None:
    array = json.dumps(ARRAY | {"compressor": {"id": "zlib"}})
    path = save(plain / "refs.json", plain_refs("data.bin", **{"u/.zarray": array, "u/0.0": ["data.bin", 0, value]}))
    tracemalloc.start()
    with pytest.raises(CorruptDataError, match=rf"chunk \(0, 0\).*{value}"):
        rows_of(path)
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"version": 1, "refs": {', "not valid JSON"),
        ('{"version": 1}', "no 'refs'"),
        ('{"version": 1, "refs": []}', "no 'refs'"),
        ('{"version": 2, "refs": {}}', "version 2"),
        ('{"version": [], "refs": {}}', "version"),
        ('{"hello": "world"}', "no reference set"),
        ('{"version": 1, "refs": {"a/0": ["x"]}}', "no reference set"),
        ('{"a": ' * 100_000, "not valid JSON"),
        ('{"version": 1, "refs": {}, "templates": {"u": 1}}', "templates"),
        ('{"version": 1, "refs": {}, "gen": [{"key": "a"}]}', "generator"),
        (
            '{"version": 1, "refs": {}, "gen": [{"key": "{{i}}", "url": "x", "dimensions": {"i": {"stop": 9999999}}}]}',
            "generators of more",
        ),
        (
            '{"version": 1, "refs": {}, "gen": [{"key": "{{i}}", "url": "x", "dimensions": {"i": {"stop": 1e300}}}]}',
            "dimension",
        ),
    ],
)
def test_what_is_no_reference_set(tmp_path: Path, text: str, said: str) -> None:
    path = save(tmp_path / "refs.json", text)
    with pytest.raises(UnsupportedFormatError, match=said) as caught:
        rows_of(path)
    assert str(path) in str(caught.value)


def test_documents_that_are_too_large(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_sets, "_MAX_BYTES", 1000)
    path = save(plain / "refs.json", plain_refs("data.bin") | {"more": "x" * 1000})
    with pytest.raises(TooLargeError, match="Parquet"):
        rows_of(path)
    monkeypatch.undo()
    monkeypatch.setattr(json_sets, "_MAX_TEXT_BYTES", 1000)
    refs = plain_refs("data.bin", **{"u/0.0": ["{{u}}0", 0, 24], "u/1.0": ["{{u}}1", 0, 24]})
    with pytest.raises(TooLargeError, match="paths"):
        rows_of(save(path, refs | {"templates": {"u": "x" * 900}}))
    with pytest.raises(UnsupportedFormatError, match="characters"):
        rows_of(save(path, refs | {"templates": {"u": "x" * 20_000}}))


def test_plain_parquet(plain: Path) -> None:
    path = parquet_set(plain, ROWS | {"raw": [None, PLAIN[1].tobytes(), None, None]})
    assert np.array_equal(rows_of(path), PLAIN)
    os.truncate(path / "u" / "refs.0.parq", 100)
    with pytest.raises(CorruptDataError, match=r"refs\.0\.parq"):
        rows_of(path)
    (path / "u" / "refs.0.parq").unlink()
    (path / "u" / "refs.0.parq").symlink_to("/etc/hostname")
    with pytest.raises(RefusedError, match=r"refs\.0\.parq"):
        rows_of(path)


def test_a_parquet_set_that_is_written_again_is_noticed(plain: Path) -> None:
    path = parquet_set(plain, {name: values[:2] for name, values in ROWS.items()}, record_size=2)
    ds = scidata.open_dataset(path, sample_dim="time")
    assert np.array_equal(ds[1]["u"].numpy(), PLAIN[1])
    shutil.rmtree(path)
    parquet_set(plain, {name: values[2:] for name, values in ROWS.items()}, record_size=2, again=True)
    (path / "u" / "refs.0.parq").rename(path / "u" / "refs.1.parq")
    with pytest.raises(SourceChangedError, match="zmetadata"):
        ds[2]


@pytest.mark.parametrize(
    ("columns", "summary", "error", "said"),
    [
        (ROWS | {"offset": [-1, 0, 0, 0]}, {}, CorruptDataError, "row 0"),
        (ROWS | {"offset": [0.5, 0, 0, 0]}, {}, CorruptDataError, "double"),
        (ROWS | {"path": [1, 2, 3, 4]}, {}, CorruptDataError, "int64"),
        (ROWS | {"path": ["../out"] * 4}, {}, RefusedError, "out"),
        ({k: v * 2 for k, v in ROWS.items()}, {}, CorruptDataError, "8 rows"),
        (ROWS | {"path": [None] * 4}, {}, MissingChunkError, r"chunk \(0, 0\)"),
        (ROWS, {"record_size": 0}, UnsupportedFormatError, "record_size"),
        (ROWS, {"record_size": 10**12}, UnsupportedFormatError, "record_size"),
        (ROWS, {"metadata": 7}, UnsupportedFormatError, "metadata"),
    ],
)
def test_damaged_parquet(plain: Path, columns: Any, summary: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        rows_of(parquet_set(plain, columns, **summary))


def test_a_text_in_every_row_takes_no_more_memory(plain: Path) -> None:
    """1 MB of path in 20,000 rows would be 20 GB as a column of texts."""
    pyarrow = pytest.importorskip("pyarrow")
    num = 20_000
    long = pyarrow.DictionaryArray.from_arrays(np.zeros(num, np.int32), ["x" * 2**20])
    zeros = np.zeros(num, np.int64)
    path = parquet_set(plain, {"path": long, "offset": zeros, "size": zeros}, record_size=num)
    before = pyarrow.total_allocated_bytes()
    source = open_source(path)
    with pytest.raises(OSError):  # noqa: PT011 - the name is too long for any file
        source.locate(source.arrays["u"], np.array([[0, 0]]))
    assert pyarrow.total_allocated_bytes() - before < 64 << 20


def test_parquet_claims_are_checked_first(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_sets, "_MAX_DECODED", 100)
    with pytest.raises(CorruptDataError, match="claims"):
        rows_of(parquet_set(plain, ROWS))


def test_a_file_that_is_replaced_is_noticed(plain: Path) -> None:
    path = save(plain / "refs.json", plain_refs("data.bin"))
    ds = scidata.open_dataset(path, sample_dim="time")
    assert np.array_equal(ds[0]["u"].numpy(), PLAIN[0])
    sent = pickle.dumps(ds)
    (plain / "new.bin").write_bytes(PLAIN.tobytes() * 2)
    os.replace(plain / "new.bin", plain / "data.bin")
    files().close()  # as in another process, which has nothing open
    with pytest.raises(SourceChangedError, match=r"data\.bin"):
        pickle.loads(sent)[1]
    save(path, json.dumps(plain_refs("data.bin"), indent=1))
    with pytest.raises(SourceChangedError, match=r"refs\.json"):
        pickle.loads(sent)[0]


def test_absent_chunks(plain: Path) -> None:
    refs = plain_refs("data.bin")
    del refs["refs"]["u/2.0"]
    path = save(plain / "refs.json", refs)
    with pytest.raises(MissingChunkError, match=r"chunk \(2, 0\)"):
        rows_of(path)
    assert np.array_equal(rows_of(path, allow_missing=True)[2], np.zeros(6))
