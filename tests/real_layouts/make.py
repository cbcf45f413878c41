"""Small files laid out as the tools of the field write them: names, groups, dims, dtypes and attributes as theirs.

Each function is named after what it imitates, says where that is described, and writes random values to a path.
"""

from __future__ import annotations

import base64
import lzma
import zlib
from pathlib import Path

import h5py
import netCDF4
import numpy as np
import torch
import xarray as xr
import zarr
from numcodecs import lz4
from scipy.spatial import Delaunay

RNG = np.random.default_rng(0)


def values(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype("f4")


def pdebench_advection(path: Path) -> None:
    """PDEBench's 1-D files (github.com/pdebench/PDEBench, data_download): ``tensor`` is (trajectory, time, x)."""
    with h5py.File(path, "w") as file:
        file["tensor"] = values(6, 11, 64)
        file["x-coordinate"] = np.linspace(0, 1, 64, dtype="f4")
        file["t-coordinate"] = np.linspace(0, 2, 12, dtype="f4")


def pdebench_swe(path: Path) -> None:
    """PDEBench's shallow-water file: a group a trajectory, ``data`` is (time, x, y, 1)."""
    with h5py.File(path, "w") as file:
        for i in range(11):
            file[f"{i:04d}/data"] = values(7, 32, 32, 1)
            for name, n in (("x", 32), ("y", 32), ("t", 7)):
                file[f"{i:04d}/grid/{name}"] = np.linspace(-1, 1, n, dtype="f4")


def mesh_graph_nets(path: Path) -> None:
    """MeshGraphNets' sets as HDF5, a group a trajectory: fields of each time on nodes, triangles, node types."""
    with h5py.File(path, "w") as file:
        for i in range(11):
            points = RNG.random((40 + i, 2))
            file[f"{i}/pos"] = points.astype("f4")
            file[f"{i}/cells"] = Delaunay(points).simplices.astype("i4")
            file[f"{i}/node_type"] = RNG.integers(0, 7, (len(points), 1)).astype("i4")
            file[f"{i}/velocity"] = values(5, len(points), 2)
            file[f"{i}/pressure"] = values(5, len(points), 1)


def the_well(path: Path) -> None:
    """The Well (github.com/PolymathicAI/the_well, data format): (trajectory, time, x, y) below ``t0_fields``, …"""
    with h5py.File(path, "w") as file:
        file.attrs.update(dataset_name="turbulence", grid_type="cartesian", n_spatial_dims=2, n_trajectories=4)
        file["t0_fields/density"] = values(4, 9, 16, 24)
        file["t1_fields/velocity"] = values(4, 9, 16, 24, 2)
        file["scalars/Re"] = np.float32(1000)
        for name, n in (("time", 9), ("x", 16), ("y", 24)):
            file[f"dimensions/{name}"] = np.linspace(0, 1, n, dtype="f4")


def nersc_era5(path: Path) -> None:
    """NERSC's ERA5 for FourCastNet and makani: ``fields`` is (time, channel, latitude, longitude), without names."""
    with h5py.File(path, "w") as file:
        file.create_dataset("fields", data=values(5, 20, 36, 72), chunks=(1, 1, 36, 72))


def anemoi(path: Path) -> None:
    """anemoi-datasets' Zarr (anemoi.readthedocs.io): data (time, variable, ensemble, cell), cells with coordinates."""
    group = zarr.open_group(str(path), mode="w", zarr_format=2)
    group.attrs["variables"] = ["2t", "msl", "z_500"]

    def put(name: str, data: np.ndarray, *dims: str) -> None:
        array = group.create_array(name, data=data, chunks=(1, *data.shape[1:]) if data.ndim > 1 else data.shape)
        array.attrs["_ARRAY_DIMENSIONS"] = list(dims)

    put("data", values(6, 3, 1, 200), "time", "variable", "ensemble", "cell")
    put("latitudes", np.linspace(90, -90, 200), "cell")
    put("longitudes", np.linspace(0, 359, 200), "cell")
    put("dates", np.arange("2020-01-01", "2020-01-02T12", 6, "M8[h]").astype("M8[s]"), "time")
    for name in ("mean", "stdev", "minimum", "maximum"):
        put(name, values(3).astype("f8"), "variable")


def wrf(
    path: Path, *, format: str = "NETCDF4", first: str = "2015-01-01", times: int = 3, has_xtime: bool = True
) -> None:
    """WRF's output (wrfout, WRF Users' Guide): staggered dims, ``Times`` as text, two-dimensional XLAT and XLONG.

    Every 6 hours, records of all variables one after the other. Old versions have no XTIME, or one without units.
    """
    written = np.datetime64(first) + np.arange(times) * np.timedelta64(6, "h")
    texts = [str(time.astype("M8[s]")).replace("T", "_") for time in written]
    with netCDF4.Dataset(path, "w", format=format) as file:
        sizes = {"Time": None, "DateStrLen": 19, "bottom_top": 4, "south_north": 20, "west_east": 30}
        for name, n in sizes.items():
            file.createDimension(name, n)
            if n in (4, 20, 30):
                file.createDimension(f"{name}_stag", n + 1)
        file.createVariable("Times", "S1", ("Time", "DateStrLen"))[:] = netCDF4.stringtochar(np.array(texts, "S19"))
        time = file.createVariable("XTIME", "f4", ("Time",))
        time[:] = np.arange(times) * 360
        if has_xtime:
            time.units = f"minutes since {first} 00:00:00"
        rows, columns = ("Time", "south_north"), "west_east"
        for name in ("XLAT", "XLONG"):
            file.createVariable(name, "f4", (*rows, columns))[:] = values(times, 20, 30)
        for name in ("T", "QVAPOR"):
            variable = file.createVariable(name, "f4", ("Time", "bottom_top", "south_north", "west_east"))
            variable[:] = values(times, 4, 20, 30)
            variable.setncatts({"coordinates": "XLONG XLAT XTIME", "stagger": ""})
        file.createVariable("U", "f4", ("Time", "bottom_top", "south_north", "west_east_stag"))[:] = values(
            times, 4, 20, 31
        )
        file.createVariable("V", "f4", ("Time", "bottom_top", "south_north_stag", "west_east"))[:] = values(
            times, 4, 21, 30
        )


def era5_cds(path: Path, *, new: bool) -> None:
    """ERA5 from the Climate Data Store: since 2024 with ``valid_time``, ``number`` and ``expver``, packed before."""
    time, level = ("valid_time", "pressure_level") if new else ("time", "level")
    field = xr.DataArray(
        values(4, 3, 19, 36),
        dims=(time, level, "latitude", "longitude"),
        coords={
            time: np.arange(4).astype("M8[h]").astype("M8[ns]"),
            level: [500.0, 850.0, 1000.0] if new else np.array([500, 850, 1000], "i4"),
            "latitude": np.linspace(90, -90, 19),
            "longitude": np.arange(0, 360, 10.0),
        },
    )
    data = field.to_dataset(name="t")
    if new:
        data = data.assign_coords(number=0, expver=(time, ["0001"] * 4))
    packed = {"dtype": "i2", "scale_factor": 1e-3, "add_offset": 0.5, "_FillValue": -32767}
    data.to_netcdf(path, encoding={"t": {} if new else packed}, format="NETCDF4" if new else "NETCDF3_64BIT")


def cmip6(path: Path) -> None:
    """A CMIP6 table file: 360-day calendar, bounds of all coordinates."""
    with netCDF4.Dataset(path, "w") as file:
        for name, n in (("time", None), ("lat", 18), ("lon", 36), ("bnds", 2)):
            file.createDimension(name, n)
        for name, axis, numbers in (
            ("time", "T", np.arange(6) * 30 + 15.0),
            ("lat", "Y", np.linspace(-85, 85, 18)),
            ("lon", "X", np.arange(0, 360, 10.0)),
        ):
            variable = file.createVariable(name, "f8", (name,))
            variable[:] = numbers
            variable.setncatts({"axis": axis, "bounds": f"{name}_bnds"})
            file.createVariable(f"{name}_bnds", "f8", (name, "bnds"))[:] = numbers[:, None] + [-0.5, 0.5]
        file["time"].setncatts({"units": "days since 1850-01-01", "calendar": "360_day"})
        variable = file.createVariable("tas", "f4", ("time", "lat", "lon"), fill_value=1e20)
        variable[:] = values(6, 18, 36)


def healpix(path: Path) -> None:
    """A HEALPix Zarr as of nextGEMS: (time, cell), ``crs`` says the order."""
    data = xr.Dataset({"ts": (("time", "cell"), values(4, 12 * 8**2)), "crs": ((), 0)})
    data["crs"].attrs = {"grid_mapping_name": "healpix", "healpix_nside": 8, "healpix_order": "nest"}
    data.to_zarr(path, consolidated=True, zarr_format=2)


def icon(path: Path) -> None:
    """ICON's output: fields of cells, whose centres are there and whose corners lie in the grid's file."""
    data = xr.Dataset(
        {"temp": (("time", "height", "ncells"), values(3, 4, 120))},
        {"clon": ("ncells", np.linspace(-3, 3, 120)), "clat": ("ncells", np.linspace(-1.5, 1.5, 120))},
    )
    data["clon"].attrs = {"standard_name": "longitude", "units": "radian"}
    data["clat"].attrs = {"standard_name": "latitude", "units": "radian"}
    data["temp"].attrs = {"CDI_grid_type": "unstructured", "coordinates": "clat clon"}
    data.to_netcdf(path)


def fesom_fields(path: Path) -> None:
    """FESOM2's output of one variable: (time, nod2), nothing of the mesh."""
    xr.Dataset({"sst": (("time", "nod2"), values(3, 90))}).to_netcdf(path)


def esmf(path: Path) -> None:
    """ESMF's unstructured grid file (ESMF reference manual): two quadrilaterals and a triangle, padded, from 1."""
    with netCDF4.Dataset(path, "w") as file:
        for name, n in (("nodeCount", 7), ("elementCount", 3), ("maxNodePElement", 4), ("coordDim", 2)):
            file.createDimension(name, n)
        file.createVariable("nodeCoords", "f8", ("nodeCount", "coordDim"))[:] = [
            *([0, 0], [10, 0], [20, 0], [0, 10], [10, 10], [20, 10], [15, 20])
        ]
        file["nodeCoords"].units = "degrees"
        rows = file.createVariable("elementConn", "i4", ("elementCount", "maxNodePElement"), fill_value=-1)
        rows[:] = [[1, 2, 5, 4], [2, 3, 6, 5], [5, 6, 7, -1]]
        file.createVariable("numElementConn", "i1", ("elementCount",))[:] = [4, 4, 3]
        file.createVariable("centerCoords", "f8", ("elementCount", "coordDim"))[:] = [[5, 5], [15, 5], [15, 13]]
        file.createVariable("elementArea", "f8", ("elementCount",))[:] = [1, 2, 3]
        file.gridType = "unstructured"


def scrip(path: Path) -> None:
    """A SCRIP grid: the corners of each cell for itself."""
    with netCDF4.Dataset(path, "w") as file:
        for name, n in (("grid_size", 6), ("grid_corners", 4), ("grid_rank", 1)):
            file.createDimension(name, n)
        for name in ("grid_corner_lat", "grid_corner_lon"):
            file.createVariable(name, "f8", ("grid_size", "grid_corners"))[:] = values(6, 4)
        for name in ("grid_center_lat", "grid_center_lon"):
            file.createVariable(name, "f8", ("grid_size",))[:] = values(6)


def cloud_npz(path: Path, *, compressed: bool) -> None:
    """A point cloud as ``numpy.savez`` writes it, one array in Fortran's order."""
    points, pressure = RNG.random((90, 3)), np.asfortranarray(values(90, 2))
    (np.savez_compressed if compressed else np.savez)(path, pos=points, pressure=pressure, label=np.arange(90) % 7)


def graph_data(num_nodes: int):
    """A graph of PyTorch Geometric: fields of nodes and edges, a mask, a label of the graph, text."""
    from torch_geometric.data import Data

    pairs = np.unique(RNG.integers(0, num_nodes - 1, (200, 2)), axis=0)  # the last node has no edge
    pairs = torch.from_numpy(pairs[pairs[:, 0] != pairs[:, 1]].T.copy())
    tensor = lambda *shape: torch.from_numpy(values(*shape))  # noqa: E731
    return Data(
        x=tensor(num_nodes, 3), edge_index=pairs, edge_attr=tensor(pairs.shape[1], 2), y=tensor(num_nodes),
        train_mask=torch.arange(num_nodes) % 2 == 0, graph_label=tensor(1, 4), name="benzene",
    )  # fmt: skip


def pyg_data(path: Path) -> list:
    """``torch.save`` of one ``Data``."""
    data = graph_data(30)
    torch.save(data, path)
    return [data]


def pyg_list(path: Path) -> list:
    """``torch.save`` of a list of ``Data``, as many data sets are handed on."""
    data = [graph_data(20 + i) for i in range(11)]
    torch.save(data, path)
    return data


def pyg_processed(path: Path) -> list:
    """``processed/data.pt`` of an ``InMemoryDataset``: all samples in one, and where each begins."""
    from torch_geometric.data import InMemoryDataset

    data = [graph_data(20 + i) for i in range(11)]
    InMemoryDataset.save(data, str(path))
    return data


def stl(path: Path) -> np.ndarray:
    """A surface as CAD writes it: triangles by their corners (binary STL). Returns their corners."""
    points = RNG.random((40, 2))
    points = np.column_stack([points, np.sin(points[:, 0])]).astype("<f4")
    corners = points[Delaunay(points[:, :2]).simplices]
    record = np.zeros(len(corners), [("normal", "<f4", 3), ("corners", "<f4", (3, 3)), ("attribute", "<u2")])
    record["corners"] = corners
    path.write_bytes(b"made by nobody".ljust(80) + np.uint32(len(corners)).tobytes() + record.tobytes())
    return corners


def vtp(path: Path, encoding: str, *, num_points: int = 12) -> dict[str, np.ndarray]:
    """A surface as VTK's vtkXMLPolyDataWriter writes it, triangles and quads (VTK User's Guide, XML file formats).

    ``encoding``: ``"ascii"``, ``"binary"`` (base64 inside), ``"base64"`` or ``"raw"`` (appended), the last also
    ``"raw-zlib"``.
    """
    points = RNG.random((num_points, 3)).astype("<f4")
    arrays = {
        "Temperature": values(num_points), "Area": RNG.random(7), "Points": points,
        "connectivity": np.array([0, 1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 9, 10, 11, 8, 9, 0, 3, 6, 9, 1, 5, 8], "<i8"),
        "offsets": np.array([3, 6, 10, 13, 17, 20, 23], "<i8"),
    }  # fmt: skip
    types = {"f4": "Float32", "f8": "Float64", "i8": "Int64"}
    appended, packed = b"", encoding == "raw-zlib"

    def block(data: bytes) -> tuple[bytes, bytes]:
        if not packed:
            return np.uint32(len(data)).tobytes(), data
        small = zlib.compress(data)
        return np.array([1, len(data), 0, len(small)], "<u4").tobytes(), small

    def tag(name: str, array: np.ndarray) -> str:
        nonlocal appended
        parts = f' NumberOfComponents="{array.shape[1]}"' if array.ndim > 1 else ""
        head = f'<DataArray type="{types[array.dtype.str[1:]]}" Name="{name}"{parts} format='
        if encoding == "ascii":
            return f'{head}"ascii">{" ".join(map(repr, array.ravel().tolist()))}</DataArray>'
        header, data = block(array.tobytes())
        if encoding == "binary":
            return f'{head}"binary">{base64.b64encode(header + data).decode()}</DataArray>'
        begin = len(appended)
        appended += base64.b64encode(header + data) if encoding == "base64" else header + data
        return f'{head}"appended" offset="{begin}"                   />'

    t = {name: tag(name, array) for name, array in arrays.items()}
    none = "".join(
        f"<{part}>{tag('connectivity', np.empty(0, '<i8'))}{tag('offsets', np.empty(0, '<i8'))}</{part}>"
        for part in ("Verts", "Lines", "Strips")
    )
    compressor = ' compressor="vtkZLibDataCompressor"' if packed else ""
    text = (
        f'<?xml version="1.0"?>\n<VTKFile type="PolyData" version="0.1" byte_order="LittleEndian" header_type="UInt32"'
        f'{compressor}>\n<PolyData>\n<Piece NumberOfPoints="{num_points}" NumberOfVerts="0" NumberOfLines="0" '
        'NumberOfStrips="0" '
        f'NumberOfPolys="7"       >\n<PointData Scalars="Temperature">{t["Temperature"]}</PointData>\n<CellData>'
        f"{t['Area']}</CellData>\n<Points>{t['Points']}</Points>\n{none}\n<Polys>{t['connectivity']}{t['offsets']}</Polys>\n</Piece>\n"
        "</PolyData>\n"
    )
    if appended:
        kind = "base64" if encoding == "base64" else "raw"
        text += f'<AppendedData encoding="{kind}">\n   _'
    tail = b"\n  </AppendedData>\n</VTKFile>\n" if appended else b"</VTKFile>\n"
    path.write_bytes(text.encode() + appended + tail)
    return arrays


def vtp_of(
    path: Path, parts: dict[str, list[tuple[int, ...]]], cell_data: dict[str, np.ndarray], *, compressor: str, raw: bool
) -> np.ndarray:
    """A surface or cloud of 12 points as VTK appends it, in blocks of 64 bytes where it is compressed."""
    points = RNG.random((12, 3)).astype("<f4")
    appended = b""

    def packed(block: bytes) -> bytes:
        if "LZ4" in compressor:
            return bytes(lz4.compress(block))[4:]  # numcodecs puts the size first
        return (zlib if "ZLib" in compressor else lzma).compress(block)

    def tag(name: str, array: np.ndarray) -> str:
        nonlocal appended
        begin, data = len(appended), array.tobytes()
        header = np.uint32(len(data)).tobytes()
        if compressor:
            blocks = [packed(data[at : at + 64]) for at in range(0, len(data), 64)]
            header = np.array([len(blocks), 64, len(data) % 64, *map(len, blocks)], "<u4").tobytes()
            data = b"".join(blocks)
        apart = base64.b64encode(header) + base64.b64encode(data) if compressor else base64.b64encode(header + data)
        appended += header + data if raw else apart
        kind = {"f4": "Float32", "f8": "Float64", "i8": "Int64"}[array.dtype.str[1:]]
        width = f' NumberOfComponents="{array.shape[1]}"' if array.ndim > 1 else ""
        return f'<DataArray type="{kind}" Name="{name}"{width} format="appended" offset="{begin}"/>'

    def cells(name: str) -> str:
        rows = parts.get(name, [])
        nodes = np.array([node for row in rows for node in row], "<i8")
        return (
            f"<{name}>{tag('connectivity', nodes)}{tag('offsets', np.cumsum([*map(len, rows)], dtype='<i8'))}</{name}>"
        )

    fields = "".join(tag(name, values) for name, values in {"Height": np.ascontiguousarray(points[:, 2])}.items())
    inner = f"<PointData>{fields}</PointData><CellData>{''.join(map(tag, cell_data, cell_data.values()))}</CellData>"
    inner += f"<Points>{tag('Points', points)}</Points>" + "".join(map(cells, ("Verts", "Lines", "Strips", "Polys")))
    counts = " ".join(f'NumberOf{name}="{len(rows)}"' for name, rows in parts.items())
    by = f' compressor="{compressor}"' if compressor else ""
    text = (
        f'<?xml version="1.0"?>\n<VTKFile type="PolyData" version="0.1" byte_order="LittleEndian" header_type="UInt32"'
        f'{by}><PolyData><Piece NumberOfPoints="12" {counts}>{inner}</Piece></PolyData>\n'
        f'<AppendedData encoding="{"raw" if raw else "base64"}">\n   _'
    )
    path.write_bytes(text.encode() + appended + b"\n  </AppendedData>\n</VTKFile>\n")
    return points
