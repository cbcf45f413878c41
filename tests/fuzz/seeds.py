"""Small sound files of every format that scidata reads, by the formats' own writers: what cases damage."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import meshio
import netCDF4
import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

import scidata
from scidata.meshes.order.faces import SOLID_FACES
from tests.real_layouts import make
from tests.unit.meshes import _cgns, _foam
from tests.unit.meshes._fluent import write_case, write_results
from tests.unit.meshes.test_cgns import block, solution, three_zones
from tests.unit.meshes.test_fluent import triangles_and_a_pentagon, turned_faces
from tests.writers import write_arrays, write_mpas

__all__ = ["FORMATS", "Seed", "Span", "make_seeds"]

DATA = Path(__file__).parents[2].parent / "shared" / "data"
TIMES, ROWS, COLUMNS = 3, 8, 6
DIMS = ("time", "lat", "lon")

#: File below the seed's folder, first byte, the one after the last.
Span = tuple[str, int, int]


@dataclass(frozen=True, kw_only=True)
class Seed:
    """Sound files in a folder.

    Attributes
    ----------
    name
        ``format/variant``.
    kind
        What is done with it: ``"grid"``, ``"points"``, ``"mesh"`` (also graphs: raw, to be partitioned) or ``"store"``.
    targets
        What is opened, below the folder.
    options
        Of ``scidata.partition``; of a grid ``kind``, where it has to be said.
    sealed
        Whether every byte is under a checksum: our own stores.
    checked
        Spans under a checksum of the format.
    weak
        Whether that is a sum which finds flipped bits, but not every run of bytes (Fletcher, Adler).
    """

    name: str
    folder: str
    kind: str
    targets: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    sealed: bool = False
    checked: tuple[Span, ...] = ()
    weak: bool = False

    @property
    def format(self) -> str:
        """The first part of the name."""
        return self.name.split("/")[0]


@dataclass(frozen=True, kw_only=True)
class _Maker:
    write: Callable[[Path], str | tuple[str, ...]]
    kind: str
    options: Mapping[str, Any]
    checked: str  # which bytes: "" none, "chunks" of Zarr, "index" of its shards, "hdf5" chunks


_MAKERS: dict[str, _Maker] = {}


def _makes(
    name: str, kind: str, *, checked: str = "", options: Mapping[str, Any] | None = None
) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    def register(write: Callable[[Path], Any]) -> Callable[[Path], Any]:
        _MAKERS[name] = _Maker(write=write, kind=kind, options=options or {}, checked=checked)
        return write

    return register


def _values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("f4")


# -- grids -------------------------------------------------------------------------------------------------------------


def _zarr_grid(folder: Path, version: int, *, consolidated: bool = False, **options: Any) -> str:
    path = folder / "g.zarr"
    group = zarr.open_group(str(path), mode="w", zarr_format=version)
    group.attrs["title"] = "made for the fuzzer"
    for i, name in enumerate(("u", "v")):
        extra: dict[str, Any] = {"dimension_names": DIMS} if version == 3 else {"fill_value": None}
        array = group.create_array(
            name, shape=(TIMES, ROWS, COLUMNS), chunks=(1, 4, 3), dtype="f4", **extra, **options
        )  # fmt: skip
        array[...] = _values(TIMES, ROWS, COLUMNS, seed=i)
        array.attrs.update({"units": "m s-1"} | ({"_ARRAY_DIMENSIONS": DIMS} if version == 2 else {}))
    for dim, size in zip(DIMS, (TIMES, ROWS, COLUMNS), strict=True):
        extra = {"dimension_names": (dim,)} if version == 3 else {"fill_value": None}
        array = group.create_array(dim, data=np.arange(size, dtype="f8") * 5, **extra) if version == 3 else None
        if array is None:
            array = group.create_array(dim, shape=(size,), dtype="f8", **extra)
            array[...] = np.arange(size) * 5.0
            array.attrs["_ARRAY_DIMENSIONS"] = [dim]
    if consolidated:
        zarr.consolidate_metadata(str(path), zarr_format=version)
    return "g.zarr"


def _add_zarr() -> None:
    import numcodecs

    old = {
        "raw": (None, ""),
        "blosc": (numcodecs.Blosc(), ""),
        "zstd": (numcodecs.Zstd(), ""),
        "gzip": (numcodecs.GZip(), "chunks"),
    }
    new: dict[str, tuple[dict[str, Any], str]] = {
        "raw": ({"compressors": None}, ""),
        "zstd": ({"compressors": ZstdCodec(checksum=True)}, "chunks"),
        "blosc": ({"compressors": BloscCodec()}, ""),
        "gzip": ({"compressors": GzipCodec()}, "chunks"),
        "crc32c": ({"compressors": Crc32cCodec()}, "chunks"),
        "sharded": ({"compressors": None, "shards": (1, 8, 6)}, "index"),
        "sharded_crc32c": ({"compressors": Crc32cCodec(), "shards": (1, 8, 6)}, "chunks"),
        "sharded_zstd": ({"compressors": ZstdCodec(), "shards": (3, 8, 6)}, "index"),
    }
    for consolidated in (False, True):
        suffix = "_consolidated" if consolidated else ""
        for name, (codec, checked) in old.items():
            _makes(f"zarr2/{name}{suffix}", "grid", checked=checked)(
                lambda folder, codec=codec, c=consolidated: _zarr_grid(folder, 2, consolidated=c, compressors=codec)
            )
        for name, (options, checked) in new.items():
            if not consolidated or name in ("zstd", "sharded"):
                _makes(f"zarr3/{name}{suffix}", "grid", checked=checked)(
                    lambda folder, o=options, c=consolidated: _zarr_grid(folder, 3, consolidated=c, **o)
                )


_add_zarr()


def _hdf5_grid(folder: Path, *, scales: bool = False, libver: str | None = None, **options: Any) -> str:
    with h5py.File(folder / "g.h5", "w", libver=libver) as file:
        for i, name in enumerate(("u", "v")):
            file.create_dataset(name, data=_values(TIMES, ROWS, COLUMNS, seed=i), **options)
            file[name].attrs["units"] = "m s-1"
            for k, dim in enumerate(DIMS):
                file[name].dims[k].label = dim
        if scales:
            for k, (dim, size) in enumerate(zip(DIMS, (TIMES, ROWS, COLUMNS), strict=True)):
                file[dim] = np.arange(size) * 5.0
                file[dim].make_scale(dim)
                for name in ("u", "v"):
                    file[name].dims[k].attach_scale(file[dim])
    return "g.h5"


def _hdf5(name: str, *, checked: str = "", **options: Any) -> None:
    _makes(f"hdf5/{name}", "grid", checked=checked)(lambda folder: _hdf5_grid(folder, **options))


_CHUNKED = {"chunks": (1, 4, 3)}
_hdf5("contiguous")
_hdf5("scales", scales=True)
_hdf5("chunked", **_CHUNKED)
_hdf5("latest", libver="latest", scales=True, **_CHUNKED)
_hdf5("fletcher32", checked="hdf5", fletcher32=True, **_CHUNKED)
_hdf5("gzip", checked="hdf5", compression="gzip", shuffle=True, fletcher32=True, **_CHUNKED)


@_makes("hdf5/text", "grid")
def _hdf5_text(folder: Path) -> str:
    """Attributes of variable length, in the global heap; compound and vlen arrays, which are skipped; groups."""
    name = _hdf5_grid(folder)
    with h5py.File(folder / name, "a") as file:
        file.attrs["history"] = "a text of variable length " * 4
        file["u"].attrs["long_name"] = "wind"
        file["u"].attrs["flags"] = np.array(["one", "two", "three"], h5py.string_dtype())
        file["u"].attrs["scale_factor"] = np.float32(0.5)
        file["u"].attrs["add_offset"] = np.float32(1.0)
        file["table"] = np.zeros(4, [("a", "f4"), ("b", "i8", (2,))])
        file.create_dataset("names", data=["a", "bb", "ccc"], dtype=h5py.string_dtype())
        file.create_dataset("ragged", shape=(3,), dtype=h5py.vlen_dtype("i4"))[0] = [1, 2, 3]
        file["deep/er/w"] = _values(TIMES, ROWS, COLUMNS, seed=4)
        for dim, label in zip(file["deep/er/w"].dims, ("time", "latitude", "longitude"), strict=True):
            dim.label = label
    return name


def _netcdf_grid(path: Path, format: str, *, first: int = 0, times: int = TIMES) -> None:
    with netCDF4.Dataset(path, "w", format=format) as nc:
        nc.Conventions = "CF-1.8"
        for dim, size in zip(DIMS, (None, ROWS, COLUMNS), strict=True):
            nc.createDimension(dim, size)
            variable = nc.createVariable(dim, "f8", (dim,))
            variable[:] = np.arange(first, first + times) if size is None else np.arange(size) * 5.0
            variable.units = {"time": "days since 2000-01-01", "lat": "degrees_north", "lon": "degrees_east"}[dim]
        packed = {"zlib": True, "chunksizes": (1, 4, 3)} if format == "NETCDF4" else {}
        nc.createVariable("u", "f4", DIMS)[:] = _values(times, ROWS, COLUMNS, seed=first)
        variable = nc.createVariable("t", "i2", DIMS, fill_value=-99, **packed)
        variable.setncatts({"scale_factor": 0.01, "add_offset": 273.0, "units": "K", "long_name": "temperature"})
        variable[:] = 273 + _values(times, ROWS, COLUMNS, seed=first + 1)
        nc.createVariable("mask", "i1", ("lat", "lon"))[:] = 1


def _netcdf(name: str, format: str) -> None:
    def write(folder: Path) -> str:
        _netcdf_grid(folder / "g.nc", format)
        return "g.nc"

    _makes(name, "grid")(write)


_netcdf("netcdf3/classic", "NETCDF3_CLASSIC")
_netcdf("netcdf3/offset64", "NETCDF3_64BIT_OFFSET")
_netcdf("netcdf3/data64", "NETCDF3_64BIT_DATA")
_netcdf("netcdf4/packed", "NETCDF4")


@_makes("series/netcdf3", "grid")
def _series_netcdf(folder: Path) -> tuple[str, ...]:
    for i in range(2):
        _netcdf_grid(folder / f"g{i}.nc", "NETCDF3_CLASSIC", first=i * 2, times=2)
    return "g0.nc", "g1.nc"


@_makes("series/hdf5", "grid")
def _series_hdf5(folder: Path) -> tuple[str, ...]:
    for i in range(2):
        _hdf5_grid(folder, scales=True)
        (folder / "g.h5").rename(folder / f"g{i}.h5")
        with h5py.File(folder / f"g{i}.h5", "a") as file:
            file["time"][...] += 100 * i
    return "g0.h5", "g1.h5"


# -- clouds, meshes, graphs --------------------------------------------------------------------------------------------

_CELLS = [[0, 1, 2], [0, 2, 3], [1, 4, 5, 2], [2, 5, 6, 7, 3]]
_XY = np.array([[0, 0], [1, 0], [1, 1], [0, 1], [2, 0], [2, 1], [1.5, 2], [0.5, 2]])


def _write_arrays(path: Path, arrays: Mapping[str, Any]) -> str:
    """Write to Zarr or HDF5, by the suffix."""
    write_arrays(path, {".h5": "hdf5", ".zarr2": "zarr2"}.get(path.suffix, "zarr3"), arrays)
    return path.name


def _cloud(seed: int = 0, count: int = 50) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "points": rng.random((count, 3)).astype("f4"),
        "u": rng.standard_normal((count, 2)).astype("f4"),
        "label": rng.integers(0, 9, count).astype("i2"),
    }


def _plain(seed: int = 0) -> dict[str, Any]:
    return {
        "points": _XY + seed,
        "cells/offsets": np.cumsum([0, *map(len, _CELLS)]),
        "cells/connectivity": np.concatenate(_CELLS),
        "cells/types": np.array([5, 5, 9, 7], "u1"),
        "node/u": _values(8, 3, seed=seed),
        "cell/k": np.array([3, 1, 2, 5]) + seed,
    }


def _graph(seed: int = 0, count: int = 12) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    source = np.arange(count).repeat(2)
    return {
        "pos": rng.random((count, 3)),
        "edge_index": np.stack([source, (source + np.tile([1, 3], count)) % count]),
        "node/u": rng.standard_normal((count, 2)),
        "edge/w": rng.random(2 * count).astype("f4"),
    }


def _times(seed: int = 0) -> dict[str, Any]:
    return _plain(seed) | {"node/w": _values(TIMES, 8, seed=seed), "cell/q": _values(TIMES, 4, seed=seed + 5)}


for _suffix in ("h5", "zarr", "zarr2"):
    for _name, _kind, _arrays in (
        ("points", "points", _cloud),
        ("plain", "mesh", _plain),
        ("graph", "mesh", _graph),
    ):
        _makes(f"{_name}/{_suffix}", _kind, options={"kind": "points"} if _name == "points" else {})(
            lambda folder, a=_arrays, s=_suffix: _write_arrays(folder / f"m.{s}", a())
        )


@_makes("graph/csr", "mesh", options={"kind": "graph", "order": "rows"})
def _csr(folder: Path) -> str:
    arrays = {"indptr": np.arange(0, 25, 2), "indices": _graph()["edge_index"][1], "node/u": _values(12, 2)}
    return _write_arrays(folder / "m.h5", arrays)


def _ugrid(folder: Path, format: str) -> str:
    with netCDF4.Dataset(folder / "m.nc", "w", format=format) as nc:
        for name, size in (("n_node", 8), ("n_face", 4), ("most", 5), ("time", 2)):
            nc.createDimension(name, size)
        nc.createVariable("mesh", "i4").setncatts(
            {
                "cf_role": "mesh_topology",
                "topology_dimension": 2,
                "face_node_connectivity": "face_nodes",
                "node_coordinates": "node_x node_y",
                "face_dimension": "n_face",
            }
        )
        nodes = nc.createVariable("face_nodes", "i4", ("n_face", "most"), fill_value=-999)
        nodes.start_index = 1
        nodes.set_auto_mask(False)
        nodes[...] = np.array([[n + 1 for n in row] + [-999] * (5 - len(row)) for row in _CELLS])
        for name, column in zip(("node_x", "node_y"), _XY.T, strict=True):
            nc.createVariable(name, "f8", ("n_node",))[...] = column
        nc.createVariable("u", "f4", ("time", "n_node"))[...] = _values(2, 8)
        variable = nc.createVariable("k", "i2", ("n_face",))
        variable.setncatts({"location": "face", "mesh": "mesh", "scale_factor": 0.5})
        variable[...] = np.arange(4)
    return "m.nc"


def _mpas(folder: Path) -> str:
    write_mpas(folder / "m.nc")
    return "m.nc"


def _exodus(folder: Path, format: str) -> str:
    blocks = (("HEX8", [[1, 2, 3, 4, 5, 6, 7, 8]]), ("TETRA", [[1, 2, 3, 5], [2, 3, 4, 9], [9, 3, 2, 1]]))
    with netCDF4.Dataset(folder / "m.exo", "w", format=format) as nc:
        sizes = {"time_step": None, "num_nodes": 9, "num_dim": 3, "len_name": 33, "num_nod_var": 1, "num_elem_var": 1}
        for name, size in sizes.items():
            nc.createDimension(name, size)
        nc.createVariable("time_whole", "f8", ("time_step",))[0:2] = [0.0, 0.5]
        for axis, column in zip("xyz", np.random.default_rng(0).random((3, 9)), strict=True):
            nc.createVariable(f"coord{axis}", "f8", ("num_nodes",))[...] = column
        for name, dim, text in (
            ("name_nod_var", "num_nod_var", "pressure"),
            ("name_elem_var", "num_elem_var", "stress"),
        ):
            nc.createVariable(name, "S1", (dim, "len_name"))[0] = np.array(list(text.ljust(33, "\0")), "S1")
        nc.createVariable("vals_nod_var1", "f8", ("time_step", "num_nodes"))[0:2] = _values(2, 9)
        for b, (kind, nodes) in enumerate(blocks, 1):
            nc.createDimension(f"num_el_in_blk{b}", len(nodes))
            nc.createDimension(f"num_nod_per_el{b}", len(nodes[0]))
            connect = nc.createVariable(f"connect{b}", "i4", (f"num_el_in_blk{b}", f"num_nod_per_el{b}"))
            connect.elem_type = kind
            connect[...] = np.array(nodes)
            variable = nc.createVariable(f"vals_elem_var1eb{b}", "f8", ("time_step", f"num_el_in_blk{b}"))
            variable[0:2] = _values(2, len(nodes))
    return "m.exo"


def _vtkhdf(folder: Path, steps: int) -> str:
    cells = [[0, 1, 2, 3], [1, 2, 3, 4, 5, 0], [7, 6, 5, 4, 3, 2, 1, 0]]
    num = max(1, steps)
    with h5py.File(folder / "m.vtkhdf", "w") as file:
        root = file.create_group("VTKHDF")
        root.attrs["Version"] = (2, 0)
        root.attrs.create("Type", b"UnstructuredGrid", dtype=h5py.string_dtype("ascii", 16))
        root["NumberOfPoints"], root["NumberOfCells"] = [6, 8], [2, 1]
        root["NumberOfConnectivityIds"] = [10, 8]
        root["Points"] = _values(14, 3)
        root["Connectivity"] = np.concatenate(cells)
        root["Offsets"] = [0, 4, 10, 0, 8]
        root["Types"] = np.array([10, 13, 12], "u1")
        root.create_dataset("PointData/v", data=_values(num * 14, 3), chunks=(4, 3), compression="gzip")
        root["CellData/c"] = np.arange(num * 3)
        if steps:
            group = root.create_group("Steps")
            group.attrs["NSteps"] = steps
            group["Values"] = np.linspace(0, 1, steps)
            group["NumberOfParts"] = [2] * steps
            for name in ("PartOffsets", "PointOffsets"):
                group[name] = np.zeros(steps, int)
            for name in ("CellOffsets", "ConnectivityIdOffsets"):
                group[name] = np.zeros((steps, 1), int)
            group["PointDataOffsets/v"] = np.arange(steps) * 14
            group["CellDataOffsets/c"] = np.arange(steps) * 3
    return "m.vtkhdf"


_REPAIR = {"repair": "all"}
_makes("ugrid/netcdf4", "mesh")(lambda folder: _ugrid(folder, "NETCDF4"))
_makes("ugrid/netcdf3", "mesh")(lambda folder: _ugrid(folder, "NETCDF3_CLASSIC"))
_makes("mpas/netcdf3", "mesh")(_mpas)
_makes("exodus/netcdf3", "mesh", options=_REPAIR)(lambda folder: _exodus(folder, "NETCDF3_64BIT_OFFSET"))
_makes("exodus/netcdf4", "mesh", options=_REPAIR)(lambda folder: _exodus(folder, "NETCDF4"))
_makes("vtkhdf/one", "mesh", options=_REPAIR)(lambda folder: _vtkhdf(folder, 0))
_makes("vtkhdf/steps", "mesh", options=_REPAIR)(lambda folder: _vtkhdf(folder, 2))


def _meshio(folder: Path, name: str, file_format: str, **options: Any) -> str:
    points = np.random.default_rng(0).random((6, 3))
    cells = [("tetra", [[0, 1, 2, 3], [2, 3, 4, 5]])]
    mesh = meshio.Mesh(points, cells, point_data={"u": points[:, 0]}, cell_data={"k": [np.array([1.5, 2.5])]})
    here = os.getcwd()
    os.chdir(folder)  # the writer of XDMF puts its HDF5 file into the present folder
    try:
        mesh.write(name, file_format=file_format, **options)
    finally:
        os.chdir(here)
    return name


for _name, _args, _options in (
    ("vtu/ascii", ("m.vtu", "vtu"), {"binary": False}),
    ("vtu/binary", ("m.vtu", "vtu"), {"binary": True}),
    ("vtk/ascii", ("m.vtk", "vtk"), {"binary": False}),
    ("vtk/binary", ("m.vtk", "vtk"), {"binary": True}),
    ("gmsh/old", ("m.msh", "gmsh22"), {"binary": True}),
    ("gmsh/new", ("m.msh", "gmsh"), {"binary": True}),
    ("xdmf/xml", ("m.xdmf", "xdmf"), {"data_format": "XML"}),
    ("xdmf/hdf", ("m.xdmf", "xdmf"), {"data_format": "HDF"}),
):
    _makes(_name, "mesh")(lambda folder, a=_args, o=_options: _meshio(folder, *a, **o))


def _numpy(folder: Path, name: str) -> str:
    make.cloud_npz(folder / name, compressed=name.startswith("packed"))
    return name


def _vtp(folder: Path, encoding: str) -> str:
    make.vtp(folder / "m.vtp", encoding)
    return "m.vtp"


for _name in ("plain.npz", "packed.npz"):
    _makes(f"numpy/{_name}", "points", options={"kind": "points"})(lambda folder, n=_name: _numpy(folder, n))
for _name in ("ascii", "base64"):
    _makes(f"vtp/{_name}", "mesh")(lambda folder, n=_name: _vtp(folder, n))


# -- formats of flow solvers ------------------------------------------------------------------------------------------


_SURFACE = {"Polys": [(0, 1, 2), (2, 3, 4, 5)], "Strips": [(6, 7, 8, 9, 10), (1, 2, 3)]}
_OF_CELLS = {"entity": "cell"}


def _vtp_packed(folder: Path, compressor: str, *, raw: bool, parts: Mapping[str, Any]) -> str:
    values = np.arange(float(sum(map(len, parts.values()))))
    make.vtp_of(folder / "m.vtp", dict(parts), {"Area": values}, compressor=compressor, raw=raw)
    return "m.vtp"


def _polydata(folder: Path) -> str:
    """Polygons and a strip, as VTKHDF, in two pieces."""
    with h5py.File(folder / "m.vtkhdf", "w") as file:
        root = file.create_group("VTKHDF")
        root.attrs["Version"] = (2, 0)
        root.attrs.create("Type", b"PolyData", dtype=h5py.string_dtype("ascii", 8))
        root["NumberOfPoints"], root["Points"] = [6, 6], _values(12, 3)
        for name in ("Vertices", "Lines", "Polygons", "Strips"):
            ids = {"Polygons": [0, 1, 2, 2, 3, 4, 5], "Strips": [0, 1, 2, 3, 4]}.get(name, [])
            ends = {"Polygons": [0, 3, 7], "Strips": [0, 5]}.get(name, [0])
            group = root.create_group(name)
            group["Connectivity"], group["Offsets"] = np.array(ids * 2, int), np.array(ends * 2, int)
            group["NumberOfCells"], group["NumberOfConnectivityIds"] = [len(ends) - 1] * 2, [len(ids)] * 2
        root["PointData/u"], root["CellData/p"] = _values(12), _values(6)
    return "m.vtkhdf"


def _solids() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return points, hexahedra, and the sides of each, turned outwards."""
    points, cells = block()
    return points.reshape(-1, 3, order="F"), cells, cells[:, np.array(SOLID_FACES[12])]


def _polyhedra(folder: Path) -> str:
    points, cells, sides = _solids()
    stream = [[6, *(value for side in each for value in (4, *side))] for each in sides[:6].tolist()]
    arrays = {
        "connectivity": cells[:6], "offsets": np.arange(8, 49, 8), "types": np.full(6, 42), "faces": stream,
        "faceoffsets": np.cumsum(list(map(len, stream))),
    }  # fmt: skip

    def array(name: str, values: Any, kind: str = "Int64", more: str = "") -> str:
        text = " ".join(map(repr, np.ravel(values).tolist()))
        return f'<DataArray type="{kind}" Name="{name}" format="ascii"{more}>{text}</DataArray>'

    inner = "".join(array(name, values) for name, values in arrays.items())
    of_points = array("Points", points, "Float64", ' NumberOfComponents="3"')
    (folder / "m.vtu").write_text(
        f'<VTKFile type="UnstructuredGrid" version="1.0" header_type="UInt64"><UnstructuredGrid><Piece '
        f'NumberOfPoints="{len(points)}" NumberOfCells="6"><Points>{of_points}</Points><Cells>{inner}</Cells>'
        f"<CellData>{array('p', _values(6), 'Float32')}</CellData></Piece></UnstructuredGrid></VTKFile>"
    )
    return "m.vtu"


def _foam_case(folder: Path, *, binary: bool) -> str:
    _foam.write_mesh(folder / "case/constant/polyMesh", 0, 5, binary=binary, label=32)
    for time in ("0.5", "10"):
        _foam.write_field(folder / f"case/{time}/U", "volVectorField", np.ones((5, 3)) / 3, binary=binary, label=32)
    return "case"


def _cgns_zones(folder: Path, form: str) -> str:
    if form == "ngon":
        points, _, sides = _solids()
        faces, owner, neighbour = turned_faces(sides.reshape(-1, 4).tolist(), np.repeat(np.arange(24), 6))
        beside = np.stack([owner, neighbour], axis=1) + 1
        parents = _cgns.array(np.where(beside > 0, beside + len(faces), 0))
        nodes = np.array(faces)[:, ::-1].ravel() + 1
        ngon = _cgns.section(22, 1, nodes, len(faces), np.arange(len(faces) + 1) * 4, ParentElements=parents)
        zone = _cgns.unstructured(points, 24, N=ngon, S=solution("CellCenter", u=np.arange(24.0)))
        root = _cgns.tree({"Base": _cgns.Tree("CGNSBase_t", np.array([3, 3], "i4"), Zone=zone)})
    else:
        root = three_zones(*block())
    path = folder / "m.cgns"
    _cgns.write_adf(path, root, binary=form == "adf-b") if "adf" in form else _cgns.write_hdf5(path, root)
    return "m.cgns"


def _fluent_case(folder: Path, *, is_plane: bool) -> str:
    if is_plane:
        points, cells = triangles_and_a_pentagon()
        edges = [[b, a] for cell in cells for a, b in zip(cell, cell[1:] + cell[:1], strict=True)]
        faces, owners = edges, [i for i, cell in enumerate(cells) for _ in cell]
    else:
        points, cells, sides = _solids()
        faces, owners = sides.reshape(-1, 4).tolist(), np.repeat(np.arange(24), 6)
    write_case(folder / "m.cas.h5", points, *turned_faces(faces, owners), len(cells))
    write_results(folder / "m.dat.h5", {"SV_P": _values(len(cells)), "SV_V": _values(len(cells), 2)})
    return "m.cas.h5"


def _collection(folder: Path) -> str:
    for i in range(2):
        make.vtp(folder / f"{i}.vtp", "base64")
    lines = "".join(f'<DataSet timestep="{i}" file="{i}.vtp"/>' for i in range(2))
    (folder / "m.pvd").write_text(f'<VTKFile type="Collection"><Collection>{lines}</Collection></VTKFile>')
    return "m.pvd"


_makes("vtp/lz4", "mesh")(lambda folder: _vtp_packed(folder, "vtkLZ4DataCompressor", raw=True, parts=_SURFACE))
_makes("vtp/cloud", "points", options={"kind": "points"})(
    lambda folder: _vtp_packed(folder, "vtkZLibDataCompressor", raw=False, parts={"Verts": [(n,) for n in range(12)]})
)
_makes("vtp/collection", "mesh")(_collection)
_makes("vtkhdf/polydata", "mesh", options=_REPAIR)(_polydata)
_makes("vtu/polyhedra", "mesh", options=_OF_CELLS)(_polyhedra)
for _binary in (False, True):
    _makes(f"foam/{'binary' if _binary else 'ascii'}", "mesh")(lambda folder, b=_binary: _foam_case(folder, binary=b))
for _name in ("hdf5", "adf", "adf-b"):
    _makes(f"cgns/{_name}", "mesh")(lambda folder, n=_name: _cgns_zones(folder, n))
_makes("cgns/ngon", "mesh", options=_OF_CELLS)(lambda folder: _cgns_zones(folder, "ngon"))
_makes("fluent/plane", "mesh")(lambda folder: _fluent_case(folder, is_plane=True))
_makes("fluent/solid", "mesh", options=_OF_CELLS)(lambda folder: _fluent_case(folder, is_plane=False))


# -- our own stores ----------------------------------------------------------------------------------------------------


def _store(folder: Path, arrays: Callable[[int], Mapping[str, Any]], num: int, **options: Any) -> str:
    raw = folder / "raw"
    raw.mkdir()
    files = [str(raw / _write_arrays(raw / f"{i}.h5", arrays(i))) for i in range(num)]
    scidata.partition(files, folder / "s.store", **options)
    shutil.rmtree(raw)
    return "s.store"


_makes("store/mesh", "store")(lambda folder: _store(folder, _plain, 2))
_makes("store/times", "store")(lambda folder: _store(folder, _times, 2))
_makes("store/points", "store")(lambda folder: _store(folder, _cloud, 2, kind="points"))
_makes("store/graph", "store")(lambda folder: _store(folder, _graph, 2, kind="graph"))


# -- real files --------------------------------------------------------------------------------------------------------


def _real(name: str, kind: str, options: Mapping[str, Any] | None = None) -> None:
    if (DATA / name).is_file():
        _makes(f"real/{name}", kind, options=options)(
            lambda folder: Path(shutil.copyfile(DATA / name, folder / name)).name
        )


_real("quad_hexagon_grid.nc", "mesh")
_real("quad_hexagon_data.nc", "grid", {"kind": "grid"})  # fields of a mesh that is in another file
_real("outCSne30_vortex.nc", "grid", {"kind": "grid"})
_real("mesh.QU.1920km.151026.nc", "mesh")

#: Every format, in the order of its first seed.
FORMATS = tuple(dict.fromkeys(name.split("/")[0] for name in _MAKERS))


# -- which bytes are under a checksum ----------------------------------------------------------------------------------


def _chunk_files(folder: Path) -> list[Path]:
    names = ("zarr.json", ".zarray", ".zattrs")
    files = [p for name in ("u", "v") for p in (folder / "g.zarr" / name).rglob("*")]
    return sorted(p for p in files if p.is_file() and p.name not in names)


def _spans(folder: Path, target: str, checked: str) -> tuple[Span, ...]:
    if checked == "chunks":
        return tuple((str(p.relative_to(folder)), 0, p.stat().st_size) for p in _chunk_files(folder))
    found: list[Span] = []
    if checked == "index":
        for path in _chunk_files(folder):
            home = next(parent for parent in path.parents if (parent / "zarr.json").is_file())
            array = json.loads((home / "zarr.json").read_text())
            if array["codecs"][0]["name"] == "sharding_indexed":
                outer = array["chunk_grid"]["configuration"]["chunk_shape"]
                inner = array["codecs"][0]["configuration"]["chunk_shape"]
                entries = int(np.prod([o // i for o, i in zip(outer, inner, strict=True)]))
                size = path.stat().st_size
                found.append((str(path.relative_to(folder)), size - 16 * entries - 4, size))
    if checked == "hdf5":
        with h5py.File(folder / target, "r") as file:
            for name in ("u", "v"):
                places = [file[name].id.get_chunk_info(i) for i in range(file[name].id.get_num_chunks())]
                found += [(target, p.byte_offset, p.byte_offset + p.size) for p in places]
    return tuple(found)


def make_seeds(root: str, formats: tuple[str, ...]) -> list[Seed]:
    """Write the sound files of some formats below a folder."""
    seeds = []
    for name, maker in _MAKERS.items():
        if name.split("/")[0] not in formats:
            continue
        folder = Path(root) / name.replace("/", "-")
        folder.mkdir()
        targets = maker.write(folder)
        targets = (targets,) if isinstance(targets, str) else targets
        seeds.append(
            Seed(
                name=name,
                folder=str(folder),
                kind=maker.kind,
                targets=targets,
                options=maker.options,
                sealed=maker.kind == "store",
                checked=_spans(folder, targets[0], maker.checked),
                weak=maker.checked == "hdf5",
            )
        )
    return seeds
