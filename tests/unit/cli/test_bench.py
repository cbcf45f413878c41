"""bench_path measures what it says; how fast that is, no test decides."""

from contextlib import closing

import h5py
import numpy as np
import pytest
import zarr

import scidata
from scidata.cli.commands.bench import bench_path
from scidata.cli.commands.pipeline_bench import bench_pipeline, decompressors, plans_of, preadv_loop
from scidata.errors import ConfigError, UnknownNameError


@pytest.fixture
def data():
    return np.random.default_rng(0).normal(size=(3, 64, 50)).astype("f4")


def make(tmp_path, kind, data):
    path = str(tmp_path / f"store.{kind}")
    if kind == "zarr":
        group = zarr.open_group(path, mode="w")
        group.create_array("u", shape=data.shape, chunks=(1, 16, 50), dtype="f4")[:] = data
        group.create_array("v", shape=(4,), dtype="f4")[:] = 1
    else:
        with h5py.File(path, "w") as f:
            f["u"], f["v"] = data, np.ones(4, "f4")
    return path


@pytest.mark.parametrize("kind", ["zarr", "h5"])
def test_every_method_of_every_case(tmp_path, kind, data):
    rows = bench_path(make(tmp_path, kind, data), repeats=1, num_threads=2)
    methods = {"slicing", "library", "scidata", "scidata threads", "preadv"}
    assert {(r.field, r.case, r.method) for r in rows} == {
        *((f, c, m) for f, c in [("u", "full"), ("u", "slab"), ("v", "full")] for m in methods)
    }
    sizes = {(r.field, r.case): r.nbytes for r in rows}
    assert sizes == {("u", "full"): data.nbytes, ("u", "slab"): data.nbytes // 8, ("v", "full"): 16}
    assert all(r.wall > 0 for r in rows)
    assert all(r.wall_ratio == 1 for r in rows if r.method == "preadv")


def test_large_fields_are_cropped(tmp_path, data):
    rows = bench_path(make(tmp_path, "h5", data), fields=["u"], repeats=1, max_bytes=data[:2].nbytes)
    assert {r.nbytes for r in rows if r.case == "full"} == {data[:2].nbytes}


def test_what_cannot_be_measured_is_refused(tmp_path, data):
    path = make(tmp_path, "h5", data)
    with pytest.raises(UnknownNameError, match=r"there are|did you mean"):
        bench_path(path, fields=["w"])
    with pytest.raises(ConfigError, match="repeats"):
        bench_path(path, repeats=0)
    with pytest.raises(ConfigError, match="local"):
        bench_path("s3://bucket/a.zarr")


# -- pipelines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressors", [None, "auto"])
def test_a_pipeline_of_a_grid(tmp_path, data, compressors):
    path = str(tmp_path / "grid.zarr")
    group = zarr.open_group(path, mode="w")
    group.create_array("u", shape=data.shape, chunks=(1, 16, 50), dtype="f4", compressors=compressors)[:] = data
    rows, step = bench_pipeline(path, num_samples=5, workers=(0, 2), step=1e-3, repeats=1)
    assert step == 1e-3
    assert [(r.method, r.num_workers) for r in rows] == [
        ("loader", 0),
        ("loader", 2),
        ("preadv", None),
        *([("decompress", None)] if compressors else []),
    ]
    assert all(r.wall > 0 and r.nbytes > 0 for r in rows)
    assert [r.nbytes for r in rows if r.method != "preadv"] == [data[0].nbytes] * (3 if compressors else 2)
    assert all(0 <= r.wait_share <= 1 for r in rows[:2])


def test_a_pipeline_of_a_store(tmp_path):
    raw, path = tmp_path / "cloud.h5", str(tmp_path / "cloud.store")
    rng = np.random.default_rng(0)
    with h5py.File(raw, "w") as f:
        f["pos"], f["t"] = rng.random((900, 3)), rng.random(900).astype("f4")
    scidata.partition(raw, path, kind="points")
    rows, _ = bench_pipeline(path, num_samples=3, workers=(1,), repeats=1)
    assert {r.method for r in rows} >= {"loader", "preadv"}
    assert rows[0].nbytes >= 900 * 4


def test_the_floors_do_what_they_are_compared_for(tmp_path, data):
    path = make(tmp_path, "zarr", data)
    with closing(scidata.open_dataset(path, fields=["u"])) as ds:
        plans = plans_of(ds, [0, 1])
        read, nbytes = preadv_loop(plans)
        assert nbytes == np.mean([ds.plan(i).bytes_fetched for i in (0, 1)])
        read(5)
        decode, decoded = decompressors(plans)
        assert decoded == data[0].nbytes
        decode(5)


def test_a_pipeline_that_cannot_be_measured_is_refused(tmp_path, data):
    path = make(tmp_path, "h5", data)
    for options in ({"num_samples": 0}, {"repeats": 0}, {"workers": ()}, {"workers": (-1,)}, {"step": -1.0}):
        with pytest.raises(ConfigError, match="at least 1"):
            bench_pipeline(path, **options)
    with pytest.raises(ConfigError, match="local"):
        bench_pipeline("s3://bucket/a.zarr")
