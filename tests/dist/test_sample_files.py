"""A file for each sample: in the source's format and order, on its mesh, the same for any number of ranks."""

from __future__ import annotations

import base64
import os
import re
import signal
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import h5py
import numpy as np
import pytest
import torch

import scidata
from scidata.errors import ConfigError, OutputError, SciDataError, SourceChangedError
from scidata.meshes.formats.vtk_pieces import read_vtk
from scidata.sources.paths import expand_paths
from scidata.testing import run_ranks

Mesh = tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]
NAMES = ("a/car.vtp", "b/car.vtp", "zipped.vtu", "tiny.vtp", "grid.vtkhdf", "plain.h5")
STORES = {"xml": NAMES[:4], "grid": NAMES[4:5], "plain": NAMES[5:]}
OUT = dict(zip(NAMES, ("a_car.vtp", "b_car.vtp", "cars_zipped.vtu", "cars_tiny.vtp", *NAMES[4:]), strict=True))


def surface(seed: int, num: int) -> Mesh:
    """Make a surface of triangles with fields of nodes (cp, wss) and cells (q)."""
    from scipy.spatial import Delaunay

    rng = np.random.default_rng(seed)
    points = rng.random((num, 3)).astype("f4")
    cells = Delaunay(points[:, :2]).simplices.astype(np.int64)
    cp, wss = rng.normal(size=num).astype("f4"), rng.normal(size=(num, 3)).astype("f4")
    return points, cells, {"cp": cp, "wss": wss, "q": rng.integers(0, 99, len(cells)).astype("i4")}


def array_element(name: str, values: np.ndarray, how: str, appended: list[bytes]) -> str:
    """Return a DataArray as VTK's User's Guide has it: ascii, zlib in base64, or appended as raw bytes, big-endian."""
    kind = {"f4": "Float32", "i8": "Int64", "i4": "Int32", "u1": "UInt8"}[values.dtype.str[1:]]
    said = f'<DataArray type="{kind}" Name="{name}" NumberOfComponents="{1 if values.ndim == 1 else values.shape[1]}"'
    if how == "ascii":
        return f'{said} format="ascii">{" ".join(map(repr, values.ravel().tolist()))}</DataArray>'
    if how == "zlib":
        data = zlib.compress(values.tobytes())
        head = np.array([1, values.nbytes, 0, len(data)], "<u4").tobytes()
        return f'{said} format="binary">{base64.b64encode(head).decode()}{base64.b64encode(data).decode()}</DataArray>'
    offset = sum(map(len, appended))
    appended.append(np.array(values.nbytes, ">u8").tobytes() + values.astype(values.dtype.newbyteorder(">")).tobytes())
    return f'{said} format="appended" offset="{offset}"/>'


def write_xml(path: Path, mesh: Mesh, how: str) -> None:
    points, cells, fields = mesh
    is_grid, appended = path.suffix == ".vtu", list[bytes]()

    def group(name: str, **arrays: np.ndarray) -> str:
        return f"<{name}>{''.join(array_element(n, x, how, appended) for n, x in arrays.items())}</{name}>"

    kind, lists = ("UnstructuredGrid", "Cells") if is_grid else ("PolyData", "Polys")
    types = {"types": np.full(len(cells), 5, "u1")} if is_grid else {}
    ends = 3 * np.arange(1, len(cells) + 1)
    said = {
        "ascii": "",
        "zlib": 'byte_order="LittleEndian" compressor="vtkZLibDataCompressor"',
        "raw": 'byte_order="BigEndian" header_type="UInt64"',
    }[how]
    text = (
        f'<?xml version="1.0"?><VTKFile type="{kind}" version="0.1" {said}><{kind}>'
        f'<Piece NumberOfPoints="{len(points)}" NumberOf{lists}="{len(cells)}">'
        + group("PointData", cp=fields["cp"], wss=fields["wss"])
        + group("CellData", q=fields["q"])
        + group("Points", Points=points)
        + group(lists, connectivity=cells.ravel(), offsets=ends, **types)
        + f"</Piece></{kind}>"
    )
    tail = b'<AppendedData encoding="raw">_' + b"".join(appended) + b"</AppendedData>" if appended else b""
    path.write_bytes(text.encode() + tail + b"</VTKFile>")


def write_h5(path: Path, mesh: Mesh) -> None:
    points, cells, fields = mesh
    with h5py.File(path, "w") as file:
        if path.suffix == ".h5":
            file["points"], file["cells"] = points, cells
            for name, values in fields.items():
                file[name] = values
            return
        root = file.create_group("VTKHDF")
        root.attrs["Version"] = (2, 0)
        root.attrs.create("Type", b"UnstructuredGrid", dtype=h5py.string_dtype("ascii", 16))
        for name, num in (("Points", len(points)), ("Cells", len(cells)), ("ConnectivityIds", cells.size)):
            root[f"NumberOf{name}"] = [num]
        root["Points"], root["Connectivity"], root["Offsets"] = points, cells.ravel(), 3 * np.arange(len(cells) + 1)
        root["Types"] = np.full(len(cells), 5, "u1")
        for name, values in fields.items():
            root[f"{'CellData' if name == 'q' else 'PointData'}/{name}"] = values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("cars")
    for number, name in enumerate(NAMES):
        mesh, file = surface(number, 3 if name.startswith("tiny") else 40 + 9 * number), path / "cars" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix in (".h5", ".vtkhdf"):
            write_h5(file, mesh)
        else:
            write_xml(file, mesh, "zlib" if file.suffix == ".vtu" else "raw" if name == "b/car.vtp" else "ascii")
    for store, names in STORES.items():
        scidata.partition([path / "cars" / name for name in names], path / f"{store}.store", kind="mesh")
    return path


FIELDS = {"cp": None, "q": None, "wss_model": {"like": "wss"}, "new": {"entity": "node", "components": 2}}


def predict(sample: Any, fields: Any) -> dict[str, Any]:
    made = {"cp": 2 * sample["cp"], "q": sample["q"] + 1, "wss_model": -sample["wss"], "new": sample["wss"][:, 1:]}
    return {name: made[name] for name in fields}


def write(rank: int, num_ranks: int, folder: str, jobs: list[tuple[str, str, dict[str, Any]]], dp: int = 1) -> None:
    mesh = scidata.init_mesh(dp=dp, domain=num_ranks // dp, device="cpu")
    for store, out, options in jobs:
        ds: Any = scidata.open_dataset(f"{folder}/{store}.store", mesh)
        with scidata.create(f"{folder}/{out}", like=ds, **{"fields": FIELDS, **options}) as writer:
            for index in [i for i in writer.missing if i % dp == mesh.get_local_rank("dp")]:
                writer[index] = predict(ds[index], writer.fields)


def read(path: Path) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Read a file of any of the formats, without what wrote it."""
    if path.suffix in (".vtp", ".vtu"):
        found = read_vtk(str(path), path.read_bytes())
        assert found.cells is not None
        return found.points, found.cells.connectivity, {**found.point_data, **found.cell_data}
    if path.suffix == ".xdmf":
        grid, values = ElementTree.parse(path).getroot()[0][0], dict[str, np.ndarray]()
        for each in grid:
            name, _, place = (each[0].text or "").partition(":/")
            with h5py.File(path.parent / name) as file:
                values[each.get("Name", each.tag)] = file[place][...]
            assert tuple(map(int, each[0].get("Dimensions", "").split())) == values[each.get("Name", each.tag)].shape
        mixed = values.pop("Topology").reshape(-1, 4)
        assert (mixed[:, 0] == 4).all()
        return values.pop("Geometry"), mixed[:, 1:].ravel(), values
    with h5py.File(path) as file:
        if path.suffix == ".h5":
            fields = {n.rpartition("/")[2]: file[n][...] for n in ("cp", "wss", "q", "node/wss_model", "node/new")}
            return file["points"][...], file["cells"][...].ravel(), fields
        root = file["VTKHDF"]
        fields = {name: x[...] for group in ("PointData", "CellData") for name, x in root[group].items()}
        return root["Points"][...], root["Connectivity"][...], fields


def check(path: Path, number: int, *, keeps: bool) -> None:
    points, cells, fields = surface(number, 3 if path.stem == "cars_tiny" else 40 + 9 * number)
    found_points, found_cells, found = read(path)
    assert (found_points == points).all()
    assert (found_cells == cells.ravel()).all()
    wanted = {"cp": 2 * fields["cp"], "q": fields["q"] + 1, "wss_model": -fields["wss"], "new": fields["wss"][:, 1:]}
    wanted |= {"wss": fields["wss"]} if keeps else {}
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype
        assert np.array_equal(found[name], values)


def test_onto_the_sources_files(folder: Path) -> None:
    contents = []
    for num_ranks, dp in ((1, 1), (2, 1), (3, 1), (2, 2)):
        out = f"onto{num_ranks}{dp}"
        run_ranks(write, num_ranks, str(folder), [(store, f"{out}-{store}/", {}) for store in STORES], dp)
        for store, names in STORES.items():
            series = ["series.pvd"] if store == "xml" else []
            assert sorted(os.listdir(folder / f"{out}-{store}")) == sorted([*series, *(OUT[name] for name in names)])
            for name in names:
                check(folder / f"{out}-{store}" / OUT[name], NAMES.index(name), keeps=True)
        contents.append({name: (folder / f"{out}-xml" / name).read_bytes() for name in map(OUT.get, STORES["xml"])})
    assert all(each == contents[0] for each in contents)
    ds: Any = scidata.open_dataset(folder / "xml.store")
    assert [ds[i].source[0].inputs for i in range(4)] == [(str(folder / "cars" / name),) for name in STORES["xml"]]
    # what was written is a source itself
    scidata.partition(folder / "onto11-plain/plain.h5", folder / "again.store", kind="mesh")
    again: Any = scidata.open_dataset(folder / "again.store")
    assert set(again.fields) == {"pos", "cp", "wss", "q", "wss_model", "new"}


KINDS = {"vtp": "series.pvd", "vtu": "series.pvd", "vtkhdf": "series.hdf", "xdmf": "series.xmf"}


def check_series(path: Path, numbers: list[int]) -> None:
    """Look at the file that lists those of some samples, and at its steps as VTK reads them."""
    if path.suffix == ".pvd":
        assert [Path(name).stem for name in expand_paths(str(path))] == ["a_car", "cars_tiny"]
        return
    if path.suffix == ".xmf":
        grids = ElementTree.parse(path).getroot().findall("Domain/Grid/Grid")
        assert [grid.find("Time").get("Value") for grid in grids] == list(map(str, numbers))  # type: ignore[union-attr]
        return
    meshes = [surface(number, 3 if number == 3 else 40) for number in numbers]
    with h5py.File(path) as file:
        steps = file["VTKHDF/Steps"]
        assert steps["Values"][:].tolist() == numbers
        for name, which in (("Point", 0), ("Cell", 1)):
            firsts = [0, len(meshes[0][which])]
            assert steps[f"{name}Offsets"][:].ravel().tolist() == firsts
            assert all(each[:].tolist() == firsts for each in steps[f"{name}DataOffsets"].values())
        cp = file["VTKHDF/PointData/cp"][:]
        assert np.array_equal(cp, np.concatenate([2 * mesh[2]["cp"] for mesh in meshes]))
    vtk: Any = pytest.importorskip("vtk")
    from vtkmodules.util.numpy_support import vtk_to_numpy

    reader = vtk.vtkHDFReader()
    reader.SetFileName(str(path))
    for step, (points, cells, fields) in enumerate(meshes):
        reader.SetStep(step)
        reader.Update()
        grid = reader.GetOutput()
        assert np.array_equal(vtk_to_numpy(grid.GetPoints().GetData()), points)
        assert np.array_equal(vtk_to_numpy(grid.GetCells().GetConnectivityArray()), cells.ravel())
        assert np.array_equal(vtk_to_numpy(grid.GetCellData().GetArray("q")), fields["q"] + 1)
        assert np.array_equal(vtk_to_numpy(grid.GetPointData().GetArray("wss_model")), -fields["wss"])


def test_new_files(folder: Path) -> None:
    jobs = [("xml", f"new-{kind}", {"format": kind, "codec": "zlib", "sample": [0, 3]}) for kind in KINDS]
    run_ranks(write, 2, str(folder), jobs)
    for kind in KINDS:
        written = folder / f"new-{kind}"
        every = {f"{name}.{each}" for name in ("a_car", "cars_tiny") for each in (kind, *["h5"] * (kind == "xdmf"))}
        assert set(os.listdir(written)) == {*every, KINDS[kind]}
        for number, name in ((0, "a_car"), (3, "cars_tiny")):
            check(written / f"{name}.{kind}", number, keeps=False)
        check_series(written / KINDS[kind], [0, 3])


def write_some_and_die(rank: int, num_ranks: int, folder: str) -> None:
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    ds: Any = scidata.open_dataset(f"{folder}/xml.store", mesh)
    writer = scidata.create(f"{folder}/killed", like=ds, fields=FIELDS)
    for index in range(3):
        writer[index] = predict(ds[index], FIELDS)
    writer.flush()
    torch.distributed.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    writer.close()


def test_a_killed_run_goes_on(folder: Path) -> None:
    with pytest.raises(Exception, match=r"killed|died|SIGKILL|-9"):
        run_ranks(write_some_and_die, 2, str(folder))
    assert not (folder / "killed").exists()
    begun = folder / "killed.unfinished"
    (begun / ".tmp-half.vtp").write_bytes(b"half")
    before = {name: (begun / name).stat().st_mtime_ns for name in os.listdir(begun)}
    run_ranks(write, 3, str(folder), [("xml", "killed", {"resume": True})])
    assert sorted(os.listdir(folder / "killed")) == sorted(["series.pvd", *map(OUT.get, STORES["xml"])])
    for number, name in enumerate(STORES["xml"]):
        check(folder / "killed" / OUT[name], number, keeps=True)
    kept = [name for name in OUT.values() if name in before]
    assert len(kept) == 3  # those that all had said
    assert all(before[name] == (folder / "killed" / name).stat().st_mtime_ns for name in kept)


def refused(rank: int, num_ranks: int, folder: str) -> list[str]:
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    ds: Any = scidata.open_dataset(f"{folder}/xml.store", mesh)
    sample, said = ds[0], []
    writer = scidata.create(f"{folder}/refused", like=ds, fields=["cp"], sample=[0, 1])
    for index, values in (
        (0, sample["wss"]),
        (0, torch.zeros(7)),
        (1, sample["cp"]),
        (2, sample["cp"]),
        ([0], sample["cp"]),
    ):
        try:
            writer[index] = {"cp": values}
        except SciDataError as e:
            said.append(f"{type(e).__name__}: {e}")
    try:
        writer[0] = {"cp": sample["cp"].full_tensor()}  # not split
    except ConfigError as e:
        said.append(str(e))
    torch.distributed.barrier()
    writer.abort(RuntimeError("enough"))
    return said


def test_what_is_wrong_is_named(folder: Path, tmp_path: Path) -> None:
    for said in run_ranks(refused, 2, str(folder)):
        for text, parts in zip(
            said,
            (
                ("a_car.vtp", "(40, 3)", "(40,)"),
                ("(7,)",),
                ("(49,)",),
                ("sample=",),
                ("one at a time",),
                ("not split",),
            ),
            strict=True,
        ):
            assert all(part in text for part in parts), text
    ds: Any = scidata.open_dataset(folder / "xml.store")
    for options, match in (
        ({"format": "nc"}, "none of"),
        ({"format": "vtp", "chunks": {"node": 3}}, "file for each sample"),
        ({"times": [1, 2]}, "times"),
        ({"fields": {"new": {"entity": "nodes"}}}, "no entity 'nodes'"),
        ({"fields": {"new": {}}}, "entity"),
        ({"topology": str(tmp_path)}, "is gone"),
        ({"topology": [str(tmp_path)]}, "names the folder"),
        ({"sample": [0, 99]}, "sample=99 is out of range"),
        ({"sample": -1}, "sample=-1 is out of range"),
        ({"sample": []}, "names none of the samples"),
        ({"fields": {"new": {"entity": "node", "dtype": "flot32"}}}, "field 'new': data type 'flot32'"),
    ):
        with pytest.raises((ConfigError, FileNotFoundError, KeyError), match=match):
            scidata.create(tmp_path / "out", like=ds, **options)
    with pytest.raises(OutputError, match="which is read"):
        scidata.create(folder / "cars", like=ds, overwrite=True)
    source = tmp_path / "cars" / "one.vtp"
    source.parent.mkdir()
    write_xml(source, surface(0, 9), "ascii")
    scidata.partition(source, tmp_path / "one.store", kind="mesh")
    one: Any = scidata.open_dataset(tmp_path / "one.store")
    moved = tmp_path / "elsewhere"
    source.parent.rename(moved)
    with pytest.raises(FileNotFoundError, match="topology="):
        scidata.create(tmp_path / "lost", like=one)
    with scidata.create(tmp_path / "found", like=one, topology=moved, fields=["cp"]) as writer:
        writer[0] = {"cp": one[0]["cp"]}
    assert np.array_equal(read(tmp_path / "found" / "one.vtp")[2]["cp"], surface(0, 9)[2]["cp"])
    with h5py.File(tmp_path / "cloud.h5", "w") as file:  # points as they are, in no store
        file["pos"], file["cp"] = surface(0, 9)[0], surface(0, 9)[2]["cp"]
    cloud: Any = scidata.open_dataset(tmp_path / "cloud.h5", kind="points")
    for kind in (None, "vtp"):
        with scidata.create(tmp_path / f"of_cloud{kind}", like=cloud, fields=["cp"], format=kind) as writer:
            writer[0] = {"cp": -cloud[0]["cp"]}
    with h5py.File(tmp_path / "of_cloudNone/cloud.h5") as file:
        assert np.array_equal(file["cp"], -surface(0, 9)[2]["cp"])
    vertices = read_vtk("cloud.vtp", (tmp_path / "of_cloudvtp/cloud.vtp").read_bytes())
    assert np.array_equal(vertices.point_data["cp"], -surface(0, 9)[2]["cp"])
    scidata.partition(moved / "one.vtp", tmp_path / "centres.store", kind="points", entity="cell")
    centres: Any = scidata.open_dataset(tmp_path / "centres.store")
    with scidata.create(tmp_path / "of_centres", like=centres, fields={"two_q": {"like": "q"}}) as writer:
        writer[0] = {"two_q": 2 * centres[0]["q"]}
    found = read_vtk("one.vtp", (tmp_path / "of_centres/one.vtp").read_bytes())
    assert np.array_equal(found.cell_data["two_q"], 2 * surface(0, 9)[2]["q"])
    text = (moved / "one.vtp").read_bytes()
    (moved / "one.vtp").write_bytes(text.replace(b"0.", b"1.", 1))  # of the same size
    writer = scidata.create(tmp_path / "changed", like=one, topology=moved, fields=["cp"])
    writer[0] = {"cp": one[0]["cp"]}
    with pytest.raises(SourceChangedError, match="content differs"):
        writer.close()
    assert not (tmp_path / "changed").exists()
    (moved / "one.vtp").write_bytes(text + b"\n")
    with pytest.raises(SourceChangedError, match=r"bytes, and had"):
        scidata.create(tmp_path / "longer", like=one, topology=moved)


def give_others(rank: int, num_ranks: int, folder: str, case: str) -> str:
    """Give other samples than the other ranks do: of as many rows, in another order, or one fewer at the end."""
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    ds: Any = scidata.open_dataset(f"{folder}/alike.store", mesh)
    order = {"left out": [0, 2, 3], "turned": [1, 0, 2, 3], "fewer": [0, 1, 2]}[case] if rank == 1 else range(4)
    try:
        with scidata.create(f"{folder}/{case}", like=ds, fields=["cp"]) as writer:
            for index in order:
                writer[index] = {"cp": ds[index]["cp"]}
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


@pytest.mark.parametrize("case", ["left out", "turned", "fewer"])
def test_ranks_that_give_other_samples_are_named(tmp_path: Path, case: str) -> None:
    for number in range(4):
        write_xml(tmp_path / f"{number}.vtp", surface(number, 40), "raw")
    scidata.partition([tmp_path / f"{number}.vtp" for number in range(4)], tmp_path / "alike.store", kind="mesh")
    said = run_ranks(give_others, 2, str(tmp_path), case)
    wanted = "no more" if case == "fewer" else "the same samples, in the same order"
    assert any(re.search(wanted, text) for text in said), said
    assert "nothing" not in said, said
    assert not (tmp_path / case).exists()
