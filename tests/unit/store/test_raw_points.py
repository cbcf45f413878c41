"""Raw point clouds without a store: in file order, each part its own rows."""

import pickle
from dataclasses import replace

import h5py
import netCDF4
import numpy as np
import pytest
import torch
import zarr

import scidata
from scidata.core.options import ReadOptions
from scidata.errors import ConfigError, FieldMismatchError, SciDataError, UnknownNameError, UnsupportedFormatError
from scidata.loader.data_loader import DataLoader
from scidata.meshes.formats.vtk_write import write_vtk
from scidata.meshes.geometry import RawCells
from scidata.store.partitioning.partition import partition
from scidata.store.raw_points.reader import PointsReader
from scidata.store.reading.rows import RowAccess
from tests.writers import write_hdf5

COUNT = 5003


def arrays(count=COUNT, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "points": rng.random((count, 3)).astype("f4"),
        "u": rng.standard_normal((count, 2)).astype("f4"),
        "label": rng.integers(0, 9, count).astype("i2"),
        "cost": rng.integers(0, 9, count).astype("f8"),
    }


def write(path, values):
    """In chunks of 100 points: Zarr compressed, HDF5 plain, NetCDF compressed."""
    path = str(path)
    if path.endswith(".zarr"):
        group = zarr.open_group(path, mode="w")
        for name, x in values.items():
            names = ["point", *(f"k{n}" for n in x.shape[1:])]
            array = group.create_array(
                name, shape=x.shape, dtype=x.dtype, chunks=(100, *x.shape[1:]), dimension_names=names,
                config={"write_empty_chunks": True},
            )  # fmt: skip
            array[:] = x
    elif path.endswith(".nc"):
        with netCDF4.Dataset(path, "w") as file:
            file.createDimension("point", len(values["points"]))
            for name, x in values.items():
                for n in x.shape[1:]:
                    if f"k{n}" not in file.dimensions:
                        file.createDimension(f"k{n}", n)
                chunks = (100, *x.shape[1:])
                dims = ("point", *(f"k{n}" for n in x.shape[1:]))
                file.createVariable(name, x.dtype, dims, chunksizes=chunks, zlib=True)[:] = x
    else:
        write_hdf5(path, values)
    return path


@pytest.fixture(scope="module", params=["zarr", "h5", "nc"])
def cloud(request, tmp_path_factory):
    return write(tmp_path_factory.mktemp("raw") / f"cloud.{request.param}", arrays())


def expected(name):
    return arrays()[{"pos": "points"}.get(name, name)]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_owned_rows_put_together_are_the_file(cloud, num_parts):
    rng = np.random.default_rng(num_parts)
    uneven = np.sort(np.r_[0, 0, rng.integers(0, COUNT, 5), COUNT][-(num_parts + 1) :])
    uneven[0] = 0
    for bounds in ("even", "chunk", uneven):
        reader = PointsReader(cloud, ReadOptions(bounds=bounds), num_parts=num_parts)
        assert set(reader.fields) == {"pos", "u", "label", "cost"}
        parts = [reader.read(0, p) for p in range(num_parts)]
        for name in reader.fields:
            values = np.concatenate([part.fields[name] for part in parts])
            assert values.tobytes() == expected(name).astype("f8" if name == "pos" else expected(name).dtype).tobytes()
        ids = [reader.original_id(0, p, "point") for p in range(num_parts)]
        assert np.array_equal(np.concatenate(ids), np.arange(COUNT))
        for p, part in enumerate(parts):
            assert part.index_maps["point"].num_owned == len(part.fields["u"]) == len(ids[p])
            plan = reader.plan(0, p)
            assert plan.exact
            assert plan.bytes_fetched == part.stats.bytes_fetched
        whole = PointsReader(cloud).plan(0).bytes_fetched
        assert sum(part.stats.bytes_fetched for part in parts) <= whole * (1 + 2.1 * (num_parts - 1) * 100 / COUNT)


def test_files_are_planned_once(cloud, monkeypatch):
    planned, plan = [], RowAccess.plan
    monkeypatch.setattr(
        RowAccess, "plan", lambda self, path, *a, **o: planned.append(path) or plan(self, path, *a, **o)
    )
    reader = PointsReader([cloud, cloud], num_parts=2)
    first = [reader.read(i, p).fields for i in (0, 1) for p in (0, 1)]
    assert planned.count("point/u") == 4
    again = [reader.read(i, p).fields for i in (0, 1) for p in (0, 1)]
    assert planned.count("point/u") == 4
    for one, two in zip(first, again, strict=True):
        assert all(np.array_equal(one[name], two[name]) for name in reader.fields)
    reader.close()
    reader.read(0, 0)
    assert planned.count("point/u") == 5


def test_chunk_bounds_fall_on_chunks(tmp_path):
    path = write(tmp_path / "cloud.zarr", arrays())
    bounds = PointsReader(path, ReadOptions(bounds="chunk"), num_parts=3).partition_of(0).bounds["point"]
    assert (bounds[1:-1] % 100 == 0).all()


def test_weights_balance_a_field(cloud):
    reader = PointsReader(cloud, ReadOptions(weights="cost"), num_parts=4)
    costs = [reader.read(0, p).fields["cost"].sum() for p in range(4)]
    assert max(costs) - min(costs) <= 16
    same = PointsReader(cloud, ReadOptions(weights=expected("cost")), num_parts=4)
    assert np.array_equal(same.partition_of(0).bounds["point"], reader.partition_of(0).bounds["point"])


@pytest.mark.parametrize("block", [1, 30, "chunk"])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_parts_make_up_the_draw_of_one_process(cloud, num_parts, block):
    rng = np.random.default_rng(num_parts)
    bounds = np.sort(np.r_[0, 0, rng.integers(0, COUNT, 5), COUNT][-(num_parts + 1) :])
    bounds[0] = 0
    drawn = ReadOptions(subsample={"point": 600}, subsample_block=block, subsample_seed=4)
    one, many = PointsReader(cloud, drawn), PointsReader(cloud, replace(drawn, bounds=bounds), num_parts=num_parts)
    seen = []
    for epoch in (0, 1, 2):
        whole = one.read(0, 0, epoch=epoch)
        parts = [many.read(0, p, epoch=epoch) for p in range(num_parts)]
        ids = np.concatenate([many.original_id(0, p, "point", rows=x.rows["point"]) for p, x in enumerate(parts)])
        assert np.array_equal(ids, whole.rows["point"])
        for name in many.fields:
            values = np.concatenate([part.fields[name] for part in parts])
            assert np.array_equal(values, expected(name)[ids])
            assert many.global_shape(name, 0, epoch=epoch) == values.shape
        for p, part in enumerate(parts):
            assert many.plan(0, p, epoch=epoch).bytes_fetched == part.stats.bytes_fetched
            assert np.diff(part.index_maps["point"].bounds)[p] == len(part.rows["point"])
        seen.append(ids.tobytes())
    assert len(set(seen)) > 1


def test_chunks_of_a_draw_are_the_files(tmp_path):
    path = write(tmp_path / "cloud.zarr", arrays())
    reader = PointsReader(path, ReadOptions(subsample={"point": 500}, subsample_block="chunk", subsample_seed=0))
    ids = reader.read(0, 0).rows["point"]
    assert len(np.unique(ids // 100)) == 5
    assert reader.plan(0).num_chunks == 5 * 4
    assert reader.plan(0).bytes_decoded <= 1.01 * reader.plan(0).bytes_wanted


def test_what_a_store_would_hand_out_in_another_order(tmp_path):
    files = [write(tmp_path / f"{i}.h5", arrays(100 + 7 * i, i)) for i in range(3)]
    partition(files, tmp_path / "store", kind="points")
    raw, store = scidata.open_dataset(files), scidata.open_dataset(str(tmp_path / "store"))
    assert len(raw) == len(store) == 3
    assert raw.kind == "points"
    assert raw.fingerprint != scidata.open_dataset(files[:2]).fingerprint
    assert raw.statistics("u") is None
    again = pickle.loads(pickle.dumps(raw))
    for index in (0, 2, -1):
        ours, theirs = raw[index], store[index]
        assert set(ours) == set(theirs)
        assert torch.equal(again[index]["u"], ours["u"])
        ids = theirs.original_id("point")
        assert torch.equal(ours.original_id("point"), torch.arange(ours.num_nodes))
        for name in ours:
            assert ours[name].dtype == theirs[name].dtype, name
            assert torch.equal(ours[name][ids], theirs[name]), name
            assert ours.dims[name][0] == raw.dims(name)[0]
    with pytest.raises(IndexError, match="sample 3 is out of range"):
        raw[3]


def test_separate_coordinates_in_radians_become_degrees(tmp_path):
    rng = np.random.default_rng(1)
    lat, lon = rng.uniform(-1.5, 1.5, 60), rng.uniform(0, 6, 60)
    with netCDF4.Dataset(tmp_path / "sphere.nc", "w") as file:
        file.createDimension("site", 60)
        for name, x in (("lat", lat), ("lon", lon)):
            variable = file.createVariable(name, "f8", ("site",))
            variable[:] = x
            variable.units = "radians"
            variable.standard_name = {"lat": "latitude", "lon": "longitude"}[name]
        packed = file.createVariable("t", "i2", ("site",))
        packed.scale_factor = 0.5
        packed[:] = np.arange(60) * 0.5
    path = str(tmp_path / "sphere.nc")
    sample = scidata.open_dataset(path)[0]  # recognised
    assert torch.equal(sample["pos"], torch.from_numpy(np.degrees(np.stack([lon, lat], axis=1))))
    assert np.allclose(sample["t"], np.arange(60) * 0.5)
    raw = scidata.open_dataset(path, decode=False, fields="t")[0]
    assert raw["t"].tolist() == list(range(60))
    single = scidata.open_dataset(path, dtype=torch.float32)[0]
    assert single["pos"].dtype is single["t"].dtype is torch.float32


def test_time_before_the_points_stays_and_is_a_grid_unless_said(tmp_path):
    path = str(tmp_path / "times.nc")
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("time", 4)
        file.createDimension("site", 30)
        for name in ("lat", "lon"):
            variable = file.createVariable(name, "f8", ("site",))
            variable[:] = np.arange(30)
            variable.units = f"degrees_{'north' if name == 'lat' else 'east'}"
        file.createVariable("t", "f4", ("time", "site"))[:] = np.arange(120).reshape(4, 30)
    assert isinstance(scidata.open_dataset(path), scidata.ShardedDataset)
    reader = PointsReader(path, num_parts=2)
    assert reader.dims("t") == ("time", "site")
    parts = [reader.read(0, p).fields["t"] for p in range(2)]
    assert np.array_equal(np.concatenate(parts, axis=1), np.arange(120).reshape(4, 30))
    drawn = PointsReader(path, ReadOptions(subsample={"point": 7}, subsample_block=1, subsample_seed=0)).read(0, 0)
    assert np.array_equal(drawn.fields["t"], np.arange(120).reshape(4, 30)[:, drawn.rows["point"]])


def test_the_loader_reads_epochs_of_raw_points(cloud):
    ds = scidata.open_dataset(cloud, subsample={"point": 40}, subsample_block="chunk")
    loader = DataLoader(ds, batch_size=None, num_workers=1)
    ids = {}
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        (sample,) = list(loader)
        assert np.array_equal(sample["u"], expected("u")[sample.original_id("point")])
        assert ids.setdefault(epoch, sample.original_id("point").tolist()) == sample.original_id("point").tolist()
    assert ids[0] != ids[1]


def test_more_parts_than_points(tmp_path):
    path = write(tmp_path / "few.h5", arrays(3))
    reader = PointsReader(path, ReadOptions(subsample={"point": 100}, subsample_block=1, subsample_seed=0), num_parts=5)
    assert [len(reader.read(0, p).fields["u"]) for p in range(5)] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"halo": 0.1}, ConfigError, r"scidata partition .*cloud.h5 OUT --kind points"),
        ({"ghosts": "disk"}, ConfigError, "scidata partition"),
        ({"isel": {"point": slice(3)}}, ConfigError, "isel: means nothing for points"),
        ({"steps": (0, 1)}, ConfigError, "steps: means nothing for points"),
        ({"fields": ["v"]}, UnknownNameError, "no field 'v'"),
        ({"subsample": {"node": 3}}, UnknownNameError, "draws rows of point"),
        ({"bounds": [0, 7]}, ConfigError, "must run from 0 to 5003"),
        ({"bounds": "odd"}, ConfigError, "cut 'even', 'chunk'"),
        ({"weights": [1.0, 2.0]}, ConfigError, r"weights of shape \(2,\) for 5003 points"),
        ({"weights": "cost", "bounds": [0, 5003]}, ConfigError, "exclude each other"),
    ],
)
def test_what_cannot_be_honoured(tmp_path, options, error, words):
    path = write(tmp_path / "cloud.h5", arrays())
    with pytest.raises(error, match=words):
        scidata.open_dataset(path, scidata.init_mesh(domain=1, device="cpu"), kind="points", **options)[0]


def test_files_that_differ_name_the_field(tmp_path):
    first = write(tmp_path / "0.h5", arrays(40))
    other = arrays(30)
    other["u"] = other["u"].astype("f8")
    ds = scidata.open_dataset([first, write(tmp_path / "1.h5", other)])
    assert len(ds[0]["u"]) == 40
    with pytest.raises(FieldMismatchError, match=r"1\.h5: field 'u': .*float64, but .*0\.h5 has .*float32"):
        ds[1]
    del other["u"]
    missing = scidata.open_dataset([first, write(tmp_path / "2.h5", other)])
    with pytest.raises(FieldMismatchError, match="'u': no such field"):
        missing[1]


def test_points_with_cells_are_a_mesh(tmp_path):
    with h5py.File(tmp_path / "mesh.h5", "w") as file:
        file["points"] = np.random.default_rng(0).random((4, 2))
        file["cells"] = np.array([[0, 1, 2], [1, 2, 3]])
    with pytest.raises(UnsupportedFormatError, match="--kind mesh"):
        scidata.open_dataset(str(tmp_path / "mesh.h5"))


def test_points_of_surfaces_in_a_collection(tmp_path):
    """VTP and VTU by ranges of rows, in the order of the collection's times; the same surfaces as a store's samples."""
    rng, times = np.random.default_rng(3), (2.0, -1.0, 10.5)
    triangles = RawCells.of_kind(np.array([[0, 1, 2], [1, 2, 3], [4, 5, 6]]), 5)
    clouds, fields = rng.random((3, 7, 3)), rng.random((3, 7, 2)).astype("f4")
    (tmp_path / "steps").mkdir()
    lines = []
    for i, (time, suffix) in enumerate(zip(times, ("vtp", "vtu", "vtp"), strict=True)):
        kind = "UnstructuredGrid" if suffix == "vtu" else "PolyData"
        on_points = {"u": fields[i], "x": fields[i, :, 0]}
        write_vtk(str(tmp_path / f"steps/{i}.{suffix}"), kind, clouds[i], triangles, on_points, {"c": np.arange(3.0)})
        lines.append(f'<DataSet timestep="{time}" file="steps/{i}.{suffix}"/>')
    path = tmp_path / "run.pvd"

    def write_collection(*lines, before=""):
        inner = f"<Collection>{''.join(lines)}</Collection>"
        path.write_text(f'{before}<VTKFile type="Collection">{inner}</VTKFile>')

    write_collection(*lines)
    for num_parts in (1, 2, 3, 9):
        reader = PointsReader(str(path), num_parts=num_parts)
        assert reader.names == ("1", "0", "2")
        for index, i in enumerate((1, 0, 2)):
            parts = [reader.read(index, rank).fields for rank in range(num_parts)]
            for name, values in {"pos": clouds[i], "u": fields[i], "x": fields[i, :, 0]}.items():
                np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), values)
    partition(str(path), tmp_path / "a.store", order="rows")
    ds = scidata.open_dataset(str(tmp_path / "a.store"))
    np.testing.assert_array_equal(np.stack([sample["u"] for sample in ds]), fields[[1, 0, 2]])
    (tmp_path / "out.vtp").write_bytes((tmp_path / "steps/0.vtp").read_bytes())
    for wrong, message in (
        ([lines[0], lines[0]], "one twice at a time"),
        ([], "names no files"),
        (['<DataSet timestep="nan" file="steps/0.vtp"/>'], "times that are no numbers"),
        (['<DataSet timestep="0.x" file="steps/0.vtp"/>'], "no collection of VTK's"),
        (['<DataSet timestep="0" file="../out.vtp"/>'], "not in its folder"),
        (["<"], "no XML of VTK's"),
    ):
        write_collection(*wrong)
        with pytest.raises(SciDataError, match=rf"run\.pvd: .*{message}"):
            scidata.open_dataset(str(path), kind="points")
    write_collection(*lines, before='<!DOCTYPE a [<!ENTITY b "c">]>')
    with pytest.raises(SciDataError, match="declares the XML entity 'b'"):
        scidata.open_dataset(str(path), kind="points")
