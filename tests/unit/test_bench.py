"""bench_path measures what it says; how fast that is, no test decides."""

import h5py
import numpy as np
import pytest
import zarr

from scidata.bench import bench_path
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
