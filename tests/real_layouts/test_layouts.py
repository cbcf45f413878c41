"""Files as the field lays them out: what they are taken for, what opens at once, what is asked, and the values."""

import json
import re
import shlex
import warnings
from pathlib import Path

import h5py
import netCDF4
import numpy as np
import pytest
import xarray as xr
import zarr
from typer.testing import CliRunner

import scidata
from scidata.cli.app import app
from scidata.core.options import ReadOptions
from scidata.data.raw_report import inspect_store
from scidata.errors import ConfigError, UnknownNameError, UnsupportedFormatError
from scidata.grids.reader import GridReader
from tests.real_layouts import make

warnings.filterwarnings("ignore", category=zarr.errors.ZarrUserWarning)


@pytest.fixture
def made(tmp_path):
    def write(function, name="a.h5", **options):
        path = tmp_path / name
        function(path, **options)
        return str(path)

    return write


def split_of(path, num_ranks=2, **options):
    """Return the sample dimension, and the one that ranks split."""
    reader = GridReader(path, ReadOptions(**options), axis_sizes={"domain": num_ranks})
    return reader.sample_dim, next(iter(reader.partition.axis_of_dim))


def parts_of(path, name, index=1, num_ranks=3, **options):
    """Read a field's parts of all ranks, put together."""
    reader = GridReader(path, ReadOptions(**options), axis_sizes={"domain": num_ranks})
    (dim,) = reader.partition.axis_of_dim
    found = []
    for rank in range(num_ranks):
        here = reader.partition.coordinate(rank)
        out = {n: np.empty(spec.shape, spec.dtype) for n, spec in reader.buffer_specs(here).items()}
        reader.read_into(index, out, here)
        found.append(out[name])
    return np.concatenate(found, reader.dims(name).index(dim))


# -- opened at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", [False, True])
def test_era5_of_the_data_store(made, new):
    path = made(make.era5_cds, "a.nc", new=new)
    assert inspect_store(path).kind == "grid"
    assert split_of(path) == ("valid_time" if new else "time", "latitude")
    with xr.open_dataset(path) as want:
        assert np.array_equal(parts_of(path, "t"), want["t"][1].values)


def test_cmip6_of_360_days(made):
    path = made(make.cmip6, "a.nc")
    report = inspect_store(path)
    assert (report.kind, report.fields, report.warnings) == ("grid", ("tas",), ())
    assert split_of(path) == ("time", "lat")
    with netCDF4.Dataset(path) as want:
        assert np.array_equal(parts_of(path, "tas"), want["tas"][1])


def test_wrf_is_read_at_the_centres_and_says_what_is_not(made):
    path = made(make.wrf, "wrfout_d01.nc")
    report = inspect_store(path)
    assert {"T", "QVAPOR"} <= set(report.fields)
    assert split_of(path) == ("Time", "south_north")
    assert split_of(path, fields=["U"]) == ("Time", "south_north")
    with netCDF4.Dataset(path) as want:
        assert np.array_equal(parts_of(path, "T"), want["T"][1])
        assert np.array_equal(parts_of(path, "V", fields=["V"]), want["V"][1])
    with pytest.warns(UserWarning, match="U, V: not on the grid of T, left out unless named with fields"):
        scidata.open_dataset(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scidata.open_dataset(path, fields=["T", "QVAPOR"])


@pytest.mark.parametrize("format", ["NETCDF4", "NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET"])
def test_times_of_wrf_as_text(made, format):
    """Two files without a decodable XTIME, as old versions write them."""
    days = [
        made(make.wrf, f"wrfout_{day}.nc", format=format, first=f"2016-02-{day}", times=4, has_xtime=False)
        for day in (28, 29)
    ]
    ds = scidata.open_dataset(days, fields=["T"], sel={"Time": "2016-02-29"}, coords=True)
    assert len(ds) == 4
    assert ds[1].coords["Time"] == np.datetime64("2016-02-29T06:00")
    with netCDF4.Dataset(days[1]) as want:
        assert np.array_equal(ds[1]["T"].numpy(), want["T"][1])
    alone = scidata.open_dataset(days, fields=["T"], sel={"Time": ["2016-02-28T18", "2016-02-29T12"]}, coords=True)
    assert [str(sample.coords["Time"]) for sample in alone] == ["2016-02-28T18:00:00", "2016-02-29T12:00:00"]
    with pytest.raises(ConfigError, match=r"labelled 2016-02-28T00:00:00, 2016-02-28T06:00:00.*sel={'Time': '2016"):
        scidata.open_dataset(days, fields=["T"], isel={"Time": "2016-02-29"})
    with pytest.raises(UnknownNameError, match="no label is '2017-01-01'"):
        scidata.open_dataset(days, fields=["T"], sel={"Time": "2017-01-01"})


def test_days_that_no_calendar_of_numpy_has_stay_text(made):
    path = made(make.wrf, "wrfout_d01.nc", has_xtime=False)
    with netCDF4.Dataset(path, "a") as file:
        file["Times"][2] = netCDF4.stringtochar(np.array("2015-02-30_00:00:00", "S19"))
    ds = scidata.open_dataset(path, fields=["T"], sel={"Time": "2015-02-30_00:00:00"}, coords=True)
    assert ds[0].coords["Time"] == "2015-02-30_00:00:00"
    path = made(make.wrf, "wrfout_d02.nc", has_xtime=False)
    with netCDF4.Dataset(path, "a") as file:
        file["Times"][:] = b"0"  # of no time at all
    with pytest.raises(ConfigError, match="no coordinate"):
        scidata.open_dataset(path, fields=["T"], sel={"Time": "2015"})


def test_faces_of_wrf_at_the_centres(made):
    path = made(make.wrf, "wrfout_d01.nc")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is left out
        ds = scidata.open_dataset(path, destagger=True, coords=True)
    assert set(ds.fields) == {"T", "QVAPOR", "U", "V"}
    assert ds[1].coords["Time"] == np.datetime64("2015-01-01T06:00")
    with netCDF4.Dataset(path) as want:
        u, v = want["U"][:].filled(), want["V"][:].filled()
    means = {"U": 0.5 * (u[..., :-1] + u[..., 1:]), "V": 0.5 * (v[..., :-1, :] + v[..., 1:, :])}
    crop = {"west_east": slice(3, 29, 2), "south_north": slice(1, 18)}
    for name, values in means.items():
        assert np.array_equal(parts_of(path, name, destagger=True), values[1])
        found = parts_of(path, name, destagger=True, isel=crop, steps=(0, 1))
        assert np.array_equal(found, values[1:3, :, 1:18, 3:29:2])
    reader = GridReader(
        path, ReadOptions(destagger=True, fields=["V"], halo=2, isel={"bottom_top": 0}), axis_sizes={"domain": 3}
    )
    for rank in range(3):
        here = reader.partition.coordinate(rank)
        out = {"V": np.empty(reader.buffer_specs(here)["V"].shape, "f4")}
        reader.read_into(2, out, here)
        start, stop = reader.partition.owned_rows("south_north", here)
        assert np.array_equal(out["V"], means["V"][2, 0, max(0, start - 2) : stop + 2])


def test_variables_of_anemoi_by_name_and_without_its_statistics(made):
    path = made(make.anemoi, "a.zarr")
    ds = scidata.open_dataset(path, sel={"variable": ["z_500", "2t"], "time": "2020-01-01"}, coords=True)
    assert ds.fields == ("data",)
    want = zarr.open(path)["data"][:]
    assert len(ds) == 4
    for i in range(4):
        assert np.array_equal(ds[i]["data"].numpy(), want[i][[2, 0]])
    assert ds[3].coords["variable"].tolist() == ["z_500", "2t"]
    assert ds[3].coords["time"] == np.datetime64("2020-01-01T18:00")
    assert np.array_equal(scidata.open_dataset(path, fields=["mean"], sample_dim="variable")[1]["mean"].numpy(),
                          zarr.open(path)["mean"][1])  # fmt: skip
    with pytest.raises(UnknownNameError, match=r"no label is 'tp'.*it has 2t, msl, z_500"):
        scidata.open_dataset(path, sel={"variable": "tp"})


@pytest.mark.parametrize(
    ("function", "name", "field"),
    [(make.anemoi, "a.zarr", "data"), (make.healpix, "a.zarr", "ts"), (make.icon, "a.nc", "temp")],
)
def test_cells_with_coordinates_are_split(made, function, name, field):
    path = made(function, name)
    want = zarr.open(path)[field][1] if name.endswith("zarr") else netCDF4.Dataset(path)[field][1]
    options = {"kind": "grid"} if function is make.healpix else {}
    scidata.open_dataset(path, **options)
    sample_dim, split = split_of(path)
    assert sample_dim == "time"
    assert split in ("cell", "ncells")
    assert np.array_equal(parts_of(path, field), want)


@pytest.mark.parametrize(
    ("dims", "split"),
    [
        ("ocean_time s_rho eta_rho xi_rho", "eta_rho"),  # ROMS
        ("time_counter deptht y x", "y"),  # NEMO
        ("time z_t nlat nlon", "nlat"),  # POP
        ("time z_l yh xh", "yh"),  # MOM6
        ("time nc nj ni", "nj"),  # CICE
        ("time pfull grid_yt grid_xt", "grid_yt"),  # FV3
        ("time lev j i", "j"),  # CMIP6's oceans
        ("time level longitude latitude", "latitude"),  # WeatherBench2
    ],
)
def test_dims_of_models_that_have_no_variable(tmp_path, dims, split):
    path = str(tmp_path / "a.nc")
    names = dims.split()
    xr.Dataset({"u": (names, make.values(3, 4, 12, 14)), "mask": (names[2:], make.values(12, 14))}).to_netcdf(path)
    report = inspect_store(path)
    assert (report.kind, report.sample_dim, report.shard_dim, report.warnings) == ("grid", names[0], split, ())
    with netCDF4.Dataset(path) as want:
        assert np.array_equal(parts_of(path, "u"), want["u"][1])


# -- asked ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "field", "shard", "sample_dim", "asked"),
    [
        (make.nersc_era5, "fields", "dim_2", "dim_0", r"dim_1 \(20 rows, about 10 a rank\), dim_2 \(36 rows"),
        (make.pdebench_advection, "tensor", "dim_2", "dim_0", r"dim_1 \(11 rows.*dim_2 \(64 rows, about 32 a rank"),
        (make.the_well, "t0_fields/density", "dim_2", "dim_0", r"dim_1 \(9 rows.*dim_2 \(16 rows"),
    ],
)
def test_dims_without_names_are_asked_for(made, function, field, shard, sample_dim, asked):
    path = made(function)
    report = inspect_store(path)
    assert (report.kind, report.sample_dim, report.shard_dim) == ("grid", "dim_0", None)
    assert "which dimension do the 2 ranks" in report.warnings[0]
    with pytest.raises(ConfigError, match=r"which dimension do the 2 ranks.*" + asked) as caught:
        split_of(path)
    assert re.search(r"shard=\{'dim_\d': 'domain'\} \(--shard dim_\d\)", str(caught.value))
    with h5py.File(path) as want:
        options = {"fields": [field], "shard": {shard: "domain"}, "sample_dim": sample_dim}
        assert np.array_equal(parts_of(path, field, **options), want[field][1])


def test_windows_inside_each_trajectory(made):
    path = made(make.the_well)
    field = "t0_fields/density"
    ds = scidata.open_dataset(path, fields=[field], sample_dim=("dim_0", "dim_1"), steps=(0, 1))
    assert len(ds) == 4 * 8
    with h5py.File(path) as want:
        for i in range(len(ds)):
            assert np.array_equal(ds[i][field].numpy(), want[field][i // 8, i % 8 : i % 8 + 2])


def test_fields_without_their_mesh(made):
    path = made(make.fesom_fields, "sst.fesom.nc")
    report = inspect_store(path)
    assert report.kind == "mesh"
    assert f"scidata partition {path} OUT --kind mesh --mesh TOPOLOGY" in report.warnings[0]
    with pytest.raises(UnsupportedFormatError, match=r"topology is in another file.*--kind mesh --mesh TOPOLOGY.*grid"):
        scidata.open_dataset(path)
    assert scidata.open_dataset(path, kind="grid")[0]["sst"].shape == (90,)
    assert split_of(path) == ("time", "nod2")


# -- groups that are samples -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [make.pdebench_swe, make.mesh_graph_nets])
def test_groups_are_never_taken_for_fields(made, function, tmp_path):
    path = made(function)
    first = "0000" if function is make.pdebench_swe else "0"
    message = f"its 11 groups.*name one, {re.escape(path)}/{first}, or all of them, '{re.escape(path)}/"
    for use in (scidata.open_dataset, inspect_store, lambda p: scidata.partition(p, str(tmp_path / "out"))):
        with pytest.raises(UnsupportedFormatError, match=message):
            use(path)
    assert not (tmp_path / "out").exists()


def test_groups_with_digits_that_are_no_samples(tmp_path):
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w") as file:
        file["level1/u"], file["level2/v"] = make.values(4, 8, 8), make.values(4, 8, 8)
    assert inspect_store(path).kind == "grid"
    path = str(tmp_path / "b.h5")
    with h5py.File(path, "w") as file:
        for name in ("level1/u", "level1/v", "level2/u", "level2/v"):
            file[name] = make.values(4, 8, 8)
    with pytest.raises(UnsupportedFormatError, match="kind='grid' takes them for fields of one"):
        scidata.open_dataset(path)
    assert set(scidata.open_dataset(path, kind="grid")[0]) == {"level1/u", "level1/v", "level2/u", "level2/v"}


def swe_of(path, group):
    with h5py.File(path) as file:
        return file[f"{group}/data"][:]


def test_trajectories_of_pdebench(made):
    path = made(make.pdebench_swe)
    one, options = f"{path}/0003", {"fields": ["data"], "shard": {"dim_1": "domain"}}
    assert inspect_store(one).kind == "grid"
    every = scidata.open_dataset(f"{path}/*", fields=["data"])
    with h5py.File(path) as want:
        assert np.array_equal(parts_of(one, "data", **options), want["0003/data"][1])
        assert len(every) == 11 * 7
        assert np.array_equal(every[3 * 7 + 2]["data"].numpy(), want["0003/data"][2])
    loader = scidata.DataLoader(every, batch_size=7, num_workers=1, workers="process")
    assert np.array_equal(list(loader)[3]["data"].numpy(), swe_of(path, "0003"))
    windows = scidata.open_dataset(f"{path}/*", fields=["data"], steps=(0, 1))
    assert len(windows) == 11 * 6
    assert np.array_equal(windows[3 * 6 + 5]["data"].numpy(), swe_of(path, "0003")[5:7])
    with pytest.raises(FileNotFoundError, match=r"no arrays in a group '0033'.*did you mean"):
        scidata.open_dataset(f"{path}/0033")
    with pytest.raises(FileNotFoundError, match="nor does a group of a file"):
        scidata.open_dataset(f"{path}/9*")


def test_trajectories_of_mesh_graph_nets(made, tmp_path):
    path, out = made(make.mesh_graph_nets), str(tmp_path / "out")
    assert inspect_store(f"{path}/*").kind == "mesh"
    report = scidata.partition(f"{path}/*", out)
    assert report.num_samples == 11
    assert scidata.partition(f"{path}/*", out, resume=True).written == ()
    scidata.partition(f"{path}/*", f"{out}2", jobs=2)  # sources go to other processes
    assert sorted(f.relative_to(out) for f in Path(out).rglob("*")) == sorted(
        f.relative_to(f"{out}2") for f in Path(f"{out}2").rglob("*")
    )
    ds = scidata.open_dataset(out)
    with h5py.File(path) as want:
        for i in (0, 2, 10):  # in the order of numbers
            sample = ds[i]
            order = sample.original_id("node").numpy()
            assert np.array_equal(sample["velocity"].numpy(), want[f"{i}/velocity"][:][:, order])
            assert np.array_equal(sample["node_type"].numpy(), want[f"{i}/node_type"][:][order])
    with h5py.File(path, "a") as file:
        file["3/pressure"][0] = 7
    with pytest.raises(scidata.errors.OutputError, match="was made from another"):
        scidata.partition(f"{path}/*", out, resume=True)


# -- meshes ----------------------------------------------------------------------------------------------------------


def test_esmf_meshes(made, tmp_path):
    path, out = made(make.esmf, "mesh.nc"), str(tmp_path / "out")
    report = inspect_store(path)
    assert (report.kind, report.kind_reason) == ("mesh", "a mesh as ESMF")
    assert f"scidata partition {path} OUT --kind mesh" in report.warnings[0]
    made_of = scidata.partition(path, out, kind="mesh", entity="cell")
    assert made_of.num_samples == 1
    sample = scidata.open_dataset(out)[0]
    order = sample.original_id("cell").numpy()
    assert np.array_equal(sample["elementArea"].numpy(), np.array([1.0, 2.0, 3.0])[order])
    pairs = {tuple(order[pair]) for pair in sample.edge_index.numpy().T}
    assert pairs == {(0, 1), (1, 0), (1, 2), (2, 1)}  # across the faces that cells share


def test_scrip_is_refused_with_what_to_run(made, tmp_path):
    path = made(make.scrip, "grid.nc")
    for use in (scidata.open_dataset, inspect_store, lambda p: scidata.partition(p, str(tmp_path / "out"))):
        with pytest.raises(UnsupportedFormatError, match="ESMF_Scrip2Unstruct"):
            use(path)


def test_numbers_of_rows_are_not_taken_for_fields(tmp_path):
    """FESOM's ``nod_in_elem2D`` and the like: a store numbers its rows anew."""
    path, out = tmp_path / "mesh.nc", str(tmp_path / "out")
    points = make.RNG.random((30, 2))
    cells = make.Delaunay(points).simplices
    mesh = {"pos": (("nod2", "xy"), points), "cells": (("elem", "three"), cells.astype("i4"))}
    numbers = make.RNG.integers(0, len(cells), (30, 8)).astype("i4")
    fields = {"temp": (("nod2",), make.values(30)), "nod_in_elem2D": (("nod2", "most"), numbers)}
    xr.Dataset(mesh | fields).to_netcdf(path)
    scidata.partition(str(path), out)
    assert "temp" in scidata.open_dataset(out)[0]
    assert "nod_in_elem2D" not in scidata.open_dataset(out)[0]
    kept = str(tmp_path / "kept")
    scidata.partition(str(path), kept, fields=["temp", "nod_in_elem2D"])
    sample = scidata.open_dataset(kept)[0]
    order = sample.original_id("node").numpy()
    assert np.array_equal(sample["nod_in_elem2D"].numpy(), numbers[order])


def test_inspect_says_how_files_that_are_samples_differ(tmp_path):
    for i, names in enumerate((("pos", "cells", "p"), ("pos", "cells", "p"), ("pos", "cells", "q"))):
        with h5py.File(tmp_path / f"{i}.h5", "w") as file:
            points = make.RNG.random((20 + i, 2))
            for name in names:
                file[name] = {"pos": points, "cells": make.Delaunay(points).simplices}.get(name, points[:, 0])
    with h5py.File(tmp_path / "3.h5", "w") as file:
        file["pos"], file["cells"], file["p"] = points, np.zeros((1, 3), "i4"), points.astype("f4")
    report = inspect_store(sorted(map(str, tmp_path.iterdir())))
    assert report.kind == "mesh"
    assert report.warnings[1:] == (
        f"{tmp_path}/2.h5: lacks p; has also q",
        f"{tmp_path}/3.h5: p is float32 22x2, not float64 20",
        "each of the 4 files is a sample; shown is the first, 2 have its arrays",
    )


# -- what is printed, and what is lost -----------------------------------------------------------------------------


def edges_alone(path):
    with h5py.File(path, "w") as file:
        file["edge_index"], file["x"] = np.array([[0, 1, 2], [1, 2, 3]]), np.arange(4.0)


@pytest.mark.parametrize(
    ("function", "name", "samples"),
    [
        (make.esmf, "a.nc", ""),
        (make.mesh_graph_nets, "a b.h5", "/*"),
        (make.mesh_graph_nets, "a.h5", "/3"),
        (edges_alone, "a.h5", ""),
        pytest.param(make.pyg_list, "a.pt", "/*", marks=pytest.mark.slow),  # torch in a process of its own
        (make.stl, "a.stl", ""),
    ],
)
def test_commands_of_inspect_run_as_printed(made, tmp_path, monkeypatch, function, name, samples):
    made(function, name)
    monkeypatch.chdir(tmp_path)
    pattern = re.compile(r"scidata (partition .*? OUT --kind \w+(?: --order \w+)?)")
    (said,) = pattern.findall(CliRunner().invoke(app, ["inspect", name + samples]).output)
    for command in (["plan", name + samples, "--domain", "2"], ["bench", name + samples]):
        assert pattern.findall(CliRunner().invoke(app, command).stderr) == [said]
    with pytest.raises(UnsupportedFormatError, match=re.escape(said)):
        scidata.open_dataset(name + samples)
    result = CliRunner().invoke(app, shlex.split(said))
    assert result.exit_code == 0, result.output
    assert len(scidata.open_dataset("OUT")) >= (11 if samples == "/*" else 1)


def test_arrays_that_are_not_in_a_store_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with h5py.File("m.h5", "w") as file:
        file["points"] = np.array([[0.0, 0], [1, 0], [1, 1], [0, 1]])
        file["cells"] = np.array([[0, 1, 2], [0, 2, 3]])
        file["u"] = np.arange(4.0)
    report = scidata.partition("m.h5", "whole")
    assert report.notes == {}
    with h5py.File("m.h5", "a") as file:
        for i in range(6):
            file[f"extra{i}"] = np.arange(7.0)
    result = CliRunner().invoke(app, ["partition", "m.h5", "part", "--json"])
    (note,) = json.loads(result.stdout)["notes"]["m"]
    assert note.startswith("left out: extra0 (has shape (dim_0: 7)")
    assert note.endswith("and 2 more, which --dry-run lists")
