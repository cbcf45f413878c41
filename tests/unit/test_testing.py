"""The rank runner itself: results, failures, hangs and deaths all come back."""

import os
import time
import warnings

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from scidata.errors import ConfigError
from scidata.testing import GRID_FORMATS, RankError, fake_group, make_grid, run_ranks
from tests import heavy


class Value:
    def __init__(self, number):
        self.number = number


def summed(rank, num_ranks, value):
    x = torch.full((2,), rank + value.number)
    dist.all_reduce(x)
    assert torch.get_num_threads() == 1
    return x, Value(rank)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_returns_each_ranks_value(num_ranks):
    results = run_ranks(summed, num_ranks, Value(10))
    for rank, (x, value) in enumerate(results):
        assert x.tolist() == [sum(range(num_ranks)) + 10 * num_ranks] * 2
        assert value.number == rank


def raises_on_one(rank, num_ranks):
    if rank == 1:
        raise ValueError("not on my watch")
    dist.barrier()


def test_a_traceback_comes_back_with_its_rank():
    with pytest.raises(RankError, match=r"rank 1 of 2: Traceback[\s\S]*raises_on_one[\s\S]*not on my watch") as e:
        run_ranks(raises_on_one, 2)
    assert e.value.rank == 1


def dies(rank, num_ranks):
    dist.barrier()  # or the other may fail to connect, and that comes back
    if rank == 0:
        os._exit(7)


def test_a_death_comes_back():
    with pytest.raises(RankError, match="rank 0 of 2: ended with exit code 7"):
        run_ranks(dies, 2)


def hangs(rank, num_ranks):
    if rank == 1:
        time.sleep(1000)


def test_a_hang_comes_back_with_its_stack():
    with pytest.raises(RankError, match=r"rank 1 of 2: hung[\s\S]* in hangs"):
        run_ranks(hangs, 2, timeout=3)


def waits_for_the_other(rank, num_ranks):
    if rank == 0:
        dist.barrier()
    else:
        time.sleep(1000)


def test_a_collective_gives_up_before_the_deadline():
    with pytest.raises(RankError, match=r"rank 0 of 2: Traceback[\s\S]*dist.barrier"):
        run_ranks(waits_for_the_other, 2, timeout=4)


def no_group(rank, num_ranks):
    return dist.is_initialized()


def test_without_a_group():
    assert run_ranks(no_group, 2, backend=None) == [False, False]


def test_local_functions_are_refused():
    with pytest.raises(TypeError, match="top of a module"):
        run_ranks(lambda rank, num_ranks: None, 1)


def test_fake_group_shows_one_rank_of_many():
    with fake_group(512, rank=257):
        mesh = init_device_mesh("cpu", (128, 4), mesh_dim_names=("dp", "domain"))
        assert mesh.get_local_rank("domain") == 1
    assert not dist.is_initialized()


def opened(path, fmt):
    """The store as xarray sees it: times as numbers, values decoded."""
    xr = pytest.importorskip("xarray")
    engine = {"zarr": "zarr", "hdf5": "h5netcdf", "netcdf4": "netcdf4", "netcdf3": "scipy"}
    name = next(value for key, value in engine.items() if fmt.startswith(key))
    options = {"consolidated": False} if name == "zarr" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return xr.open_dataset(path, engine=name, decode_times=False, **options)


@pytest.mark.parametrize("options", [{}, {"packed": True}, {"unlimited": True, "first_time": 4}, {"compressed": False}])
@pytest.mark.parametrize("fmt", [fmt for fmt in GRID_FORMATS if not fmt.startswith("hdf5")])
def test_grids_are_what_xarray_reads(fmt, options, tmp_path):
    wanted = make_grid(tmp_path / "grid", format=fmt, num_times=3, num_lat=9, **options)
    with opened(tmp_path / "grid", fmt) as ds:
        assert set(wanted) == {"u", "v", "t", "time", "level", "latitude", "longitude"} == set(ds.variables)
        for name, values in wanted.items():
            assert ds[name].dims == (("time", "level", "latitude", "longitude") if values.ndim == 4 else (name,))
            np.testing.assert_array_equal(ds[name].values, values)
            assert ds[name].dtype == values.dtype
        assert ds.time.values[0] == 6 * options.get("first_time", 0)
    assert np.isnan(wanted["t"]).any() == ("packed" in options)


@pytest.mark.parametrize("fmt", ["hdf5", "hdf5_chunked"])
def test_hdf5_grids(fmt, tmp_path):
    wanted = make_grid(tmp_path / "grid", format=fmt, chunks=(2, 1, 5, 5))
    with h5py.File(tmp_path / "grid") as file:
        assert file["u"].chunks == ((2, 1, 5, 5) if fmt == "hdf5_chunked" else None)
        assert [dim[0].name for dim in file["u"].dims] == ["/time", "/level", "/latitude", "/longitude"]
        for name, values in wanted.items():
            np.testing.assert_array_equal(file[name][...], values)


def test_grids_depend_on_the_seed_only(tmp_path):
    first = make_grid(tmp_path / "a", format="hdf5", seed=1)
    again = make_grid(tmp_path / "b", format="zarr2", seed=1)
    other = make_grid(tmp_path / "c", format="hdf5", seed=2)
    assert np.array_equal(first["u"], again["u"])
    assert not np.array_equal(first["u"], other["u"])
    assert np.all(np.diff(first["latitude"]) < 0)
    with pytest.raises(ConfigError, match="format must be one of"):
        make_grid(tmp_path / "d", format="grib")


def test_each_case_of_a_heavy_test_is_in_one_share(request, monkeypatch):
    names = heavy.LIST.read_text().split()
    for name in names:
        path, function = name.split("::")[0], name.split("::")[-1]
        assert f"def {function}(" in (request.config.rootpath / path).read_text(), (
            f"{name} is gone; tests/heavy.py makes tests/heavy.txt anew"
        )
    kept = []
    for share in range(4):
        monkeypatch.setenv("SCIDATA_SHARE", f"{share}/4")
        left = set(heavy.left_to_others(request.session.items))
        kept += [item.nodeid for item in request.session.items if item not in left and heavy.function_of(item) in names]
    all_of_them = [item for item in request.session.items if heavy.function_of(item) in names]
    assert sorted(kept) == sorted(item.nodeid for item in all_of_them if not item.get_closest_marker("slow"))
