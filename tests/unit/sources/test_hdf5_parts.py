"""Values of HDF5 that lie in other files: a part that is missing, short or of another kind is an error, not a fill."""

import os

import h5py
import numpy as np
import pytest

import scidata
from scidata.errors import CorruptDataError, MissingChunkError, ShortReadError
from scidata.sources import open_source


def write(path, values, name="u"):
    with h5py.File(path, "w") as file:
        file[name] = values


def write_virtual(path, shape, parts, dtype="f8"):
    layout = h5py.VirtualLayout(shape, dtype)
    for place, part in parts:
        layout[place] = part
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("u", layout, fillvalue=-5)


def read(path, rows=slice(None), **options):
    source = open_source(path, allow_external=True, **options)
    layout = source.arrays["u"]
    shape = (len(range(*rows.indices(layout.shape[0]))), *layout.shape[1:])
    out = np.empty(shape, layout.dtype)
    source.read_box(layout, (rows, *(slice(0, n) for n in shape[1:])), out)
    return out


@pytest.fixture
def three(tmp_path):
    """A virtual set of three files, whose rows are 1, 2 and 3."""
    for k in range(3):
        write(tmp_path / f"y{k}.h5", np.full((4, 2), k + 1.0))
    source = [(k, h5py.VirtualSource(f"y{k}.h5", "u", (4, 2))) for k in range(3)]
    write_virtual(tmp_path / "all.h5", (3, 4, 2), source)
    return tmp_path


def test_a_missing_part_is_an_error_and_others_are_read(three):
    assert read(three / "all.h5")[:, 0, 0].tolist() == [1, 2, 3]
    os.remove(three / "y1.h5")
    ds = scidata.open_dataset(str(three / "all.h5"), allow_external=True, sample_dim="dim_0")
    assert ds[0]["u"].unique().tolist() == [1]
    assert ds[2]["u"].unique().tolist() == [3]
    with pytest.raises(MissingChunkError, match=r"field 'u': file 'y1.h5', whose 'u' is a part of .*all\.h5, is not"):
        ds[1]
    path = str(three / "all.h5")
    lenient = scidata.open_dataset(path, allow_external=True, sample_dim="dim_0", allow_missing=True)
    assert [float(lenient[i]["u"].mean()) for i in range(3)] == [1, -5, 3]


@pytest.mark.parametrize(
    ("values", "error", "why"),
    [
        (None, MissingChunkError, "cannot open it"),
        ({"v": np.zeros((4, 2))}, MissingChunkError, "data set 'u' of file 'y1.h5'.*is not there"),
        ({"u": np.zeros((3, 2))}, CorruptDataError, r"of shape \(3, 2\).*\[4, 2\] were expected"),
        ({"u": np.zeros((6, 2))}, CorruptDataError, r"of shape \(6, 2\)"),
        ({"u": np.zeros((2, 4))}, CorruptDataError, r"of shape \(2, 4\)"),
        ({"u": np.zeros((4, 2), "c16")}, CorruptDataError, "its values do not fit float64"),
        ({"u": np.zeros((4, 2), "i8")}, CorruptDataError, None),
    ],
)
def test_a_part_that_is_not_what_the_map_says(three, values, error, why):
    with open(three / "y1.h5", "r+b") as file:
        file.truncate(700)
    if values is not None:
        with h5py.File(three / "y1.h5", "w") as file:
            for name, each in values.items():
                file[name] = each
    assert read(three / "all.h5", slice(2, 3)).max() == 3
    if why is None:  # numbers that float64 holds are taken
        assert read(three / "all.h5", slice(1, 2)).max() == 0
        return
    with pytest.raises(error, match=why):
        read(three / "all.h5", slice(1, 2))


def test_interleaved_nested_and_unmapped(tmp_path):
    write(tmp_path / "a.h5", np.arange(12.0).reshape(3, 4))
    even = [(slice(0, 6, 2), h5py.VirtualSource("a.h5", "u", (3, 4)))]
    odd = [(slice(1, 6, 2), h5py.VirtualSource("b.h5", "u", (3, 4)))]
    write_virtual(tmp_path / "inner.h5", (7, 4), even + odd)
    assert open_source(tmp_path / "inner.h5", allow_external=True).arrays["u"].chunks == (1, 4)
    assert read(tmp_path / "inner.h5", slice(0, 6, 2)).tolist() == np.arange(12.0).reshape(3, 4).tolist()
    for rows, why in ((slice(1, 2), "file 'b.h5'"), (slice(6, 7), "4 elements of data set '/u' .* are of no part")):
        with pytest.raises(MissingChunkError, match=why):
            read(tmp_path / "inner.h5", rows)
    inner = h5py.VirtualSource("inner.h5", "u", (7, 4))
    write_virtual(tmp_path / "outer.h5", (2, 4), [(0, inner[0]), (1, inner[1])])
    assert read(tmp_path / "outer.h5", slice(0, 1)).tolist() == [[0, 1, 2, 3]]
    with pytest.raises(MissingChunkError, match=r"file 'b.h5'"):
        read(tmp_path / "outer.h5", slice(1, 2))


def test_parts_that_were_never_written_and_a_circle(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("chunked", (4, 4), "f8", chunks=(2, 4))[:2] = 1
        file.create_dataset("plain", (2, 4), "f8")
    chunked = h5py.VirtualSource("a.h5", "chunked", (4, 4))
    parts = [(0, chunked[:2]), (1, chunked[2:]), (2, h5py.VirtualSource("a.h5", "plain", (2, 4)))]
    write_virtual(tmp_path / "v.h5", (3, 2, 4), parts)
    assert read(tmp_path / "v.h5", slice(0, 1)).min() == 1
    for row, why in ((1, "a chunk of data set '/chunked'"), (2, "data set '/plain' of .* was never written")):
        with pytest.raises(MissingChunkError, match=why):
            read(tmp_path / "v.h5", slice(row, row + 1))
    for one, other in (("c", "d"), ("d", "c")):
        write_virtual(tmp_path / f"{one}.h5", (2, 4), [(slice(0, 2), h5py.VirtualSource(f"{other}.h5", "u", (2, 4)))])
    with pytest.raises(CorruptDataError, match="in each other more than"):
        read(tmp_path / "c.h5")


def create_unlimited(path, name, *, block):
    """A set that grows with its parts: blocks of two rows each of its own file, or all rows of one."""
    unlimited = h5py.h5s.UNLIMITED
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    space = h5py.h5s.create_simple((2, 3), (unlimited, 3))
    if block:
        space.select_hyperslab((0, 0), (unlimited, 1), stride=(2, 3), block=(2, 3))
        source = h5py.h5s.create_simple((2, 3))
        source.select_all()
    else:
        space.select_hyperslab((0, 0), (1, 1), stride=(1, 3), block=(unlimited, 3))
        source = space.copy()
    plist.set_virtual(space, name.encode(), b"u", source)
    with h5py.File(path, "w") as file:
        h5py.h5d.create(file.id, b"u", h5py.h5t.NATIVE_DOUBLE, space, plist)


def test_sets_that_grow_with_their_parts(tmp_path):
    for k in range(3):
        write(tmp_path / f"b{k}.h5", np.full((2, 3), k + 1.0))
    create_unlimited(tmp_path / "blocks.h5", "b%b.h5", block=True)
    create_unlimited(tmp_path / "all.h5", "b0.h5", block=False)
    assert read(tmp_path / "blocks.h5")[:, 0].tolist() == [1, 1, 2, 2, 3, 3]
    assert read(tmp_path / "all.h5").shape == (2, 3)
    os.remove(tmp_path / "b1.h5")  # HDF5 says that the set has two rows then
    with pytest.raises(MissingChunkError, match=r"file 'b1.h5', a part of .*blocks\.h5 that others follow"):
        read(tmp_path / "blocks.h5")
    os.remove(tmp_path / "b0.h5")
    with pytest.raises(MissingChunkError, match=r"file 'b0.h5'"):
        read(tmp_path / "all.h5")


def test_external_files_that_are_short_or_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # HDF5 looks for them from there
    with h5py.File("a.h5", "w") as file:
        file.create_dataset("u", (10,), "f8", external=[("one.bin", 0, 40), ("two.bin", 8, 40)])[:] = np.arange(10.0)
    assert read(tmp_path / "a.h5").tolist() == list(range(10))
    os.truncate("two.bin", 24)
    assert read(tmp_path / "a.h5", slice(0, 7)).tolist() == list(range(7))
    with pytest.raises(ShortReadError, match=r"'two.bin' has 24 bytes, and 32 are needed"):
        read(tmp_path / "a.h5", slice(4, 8))
    os.remove("one.bin")
    with pytest.raises(MissingChunkError, match=r"the external file 'one.bin'"):
        read(tmp_path / "a.h5", slice(0, 2))


def test_a_virtual_set_onto_its_own_file_needs_no_permission(tmp_path):
    with h5py.File(tmp_path / "own.h5", "w") as file:
        file["a"], file["b"] = np.zeros(3), np.ones(3)
        file["away"] = h5py.ExternalLink("other.h5", "x")
        for name, others in (("u", "ab"), ("v", ("a", "away"))):
            layout = h5py.VirtualLayout((2, 3), "f8")
            for row, other in enumerate(others):
                layout[row] = h5py.VirtualSource(".", other, (3,))
            file.create_virtual_dataset(name, layout)
    source = open_source(tmp_path / "own.h5")
    assert "lie in other files" in source.skipped["v"]
    ds = scidata.open_dataset(str(tmp_path / "own.h5"), fields=["u"], sample_dim="dim_0")
    assert [float(ds[i]["u"].mean()) for i in range(2)] == [0, 1]


def test_a_missing_part_of_netcdf_and_of_references(tmp_path):
    netCDF4 = pytest.importorskip("netCDF4", reason="writes the file")
    with netCDF4.Dataset(tmp_path / "part.nc", "w") as nc:
        nc.createDimension("x", 3)
        nc.createVariable("u", "f8", ("x",))[:] = [1, 2, 3]
    with netCDF4.Dataset(tmp_path / "all.nc", "w") as nc:
        nc.createDimension("time", 2)
        nc.createDimension("x", 3)
    layout = h5py.VirtualLayout((2, 3), "f8")
    for row, name in enumerate(("part.nc", "lost.nc")):
        layout[row] = h5py.VirtualSource(name, "u", (3,))
    with h5py.File(tmp_path / "all.nc", "r+") as file:
        file.create_virtual_dataset("u", layout)
    source = open_source(tmp_path / "all.nc", allow_external=True)
    assert source.format == "netcdf4"
    assert read(tmp_path / "all.nc", slice(0, 1)).tolist() == [[1, 2, 3]]
    with pytest.raises(MissingChunkError, match=r"file 'lost.nc'"):
        read(tmp_path / "all.nc", slice(1, 2))
