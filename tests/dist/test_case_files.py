"""Predictions written back as OpenFOAM's fields, the same for any number of ranks: our reader's, foamlib's and VTK's."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scidata
from scidata.errors import ConfigError, OutputError, SourceChangedError
from scidata.meshes.samples import read_samples
from scidata.testing import run_ranks

_spec = importlib.util.spec_from_file_location("_foam", Path(__file__).parents[1] / "unit" / "meshes" / "_foam.py")
assert _spec is not None
assert _spec.loader is not None
_foam = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_foam)

TIMES = ("0.5", "10")
SIZES = {"raw": 5, "text": 7, "cut": 6}
FIELDS = {
    "p": None,
    "U_model": {"like": "U"},
    "stress": {"entity": "cell", "components": 6, "attributes": {"units": "kg m-1 s-2"}},
    "grad": {"entity": "cell", "components": 9},
}
KINDS = {"p": "volScalarField", "U_model": "volVectorField", "stress": "volSymmTensorField", "grad": "volTensorField"}


def values(case: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(SIZES[case])
    return rng.normal(size=(2, SIZES[case], 3)), rng.normal(size=(2, SIZES[case]))


def write_case(folder: Path, name: str) -> None:
    """Write a case: binary, ascii, or binary and decomposed with cells in another order."""
    (u, p), how, num = values(name), {"binary": name != "text", "label": 32}, SIZES[name]
    rows = [np.arange(4), np.arange(4, num)] if name == "cut" else [np.arange(num)]
    for number, own in enumerate(rows):
        case = folder / name / (f"processor{number}" if len(rows) > 1 else "")
        mesh = case / "constant" / "polyMesh"
        _foam.write_mesh(mesh, int(own[0]), len(own), **how, between=(number, 1 - number) if len(rows) > 1 else None)
        if len(rows) > 1:
            address = _foam.head("labelList", "c", **how) + _foam.items(own, **how)
            (mesh / "cellProcAddressing").write_bytes(address)
        for step, time in enumerate(TIMES):
            _foam.write_field(case / time / "U", "volVectorField", u[step][own], **how)
            _foam.write_field(case / time / "p", "volScalarField", p[step][own], **how)
    (folder / name / "system").mkdir()
    (folder / name / "system" / "controlDict").write_bytes(
        _foam.head("dictionary", "controlDict", binary=False, label=32)
        + b"startFrom startTime;\nstartTime 0;\nendTime 10;\ndeltaT 0.5;\nwriteControl timeStep;\nwriteInterval 1;\n"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("foam")
    for name in SIZES:
        write_case(path / "cases", name)
    scidata.partition([path / "cases" / name for name in SIZES], path / "store")
    return path


def predict(sample: Any, fields: Any) -> dict[str, Any]:
    u = sample["U"]
    made = {"p": 2 * sample["p"], "U_model": -u, "stress": torch.cat([u, 2 * u], 1), "grad": torch.cat([u, u, -u], 1)}
    return {name: made[name] for name in fields}


def write(rank: int, num_ranks: int, folder: str, out: str, dp: int = 1, options: Any = None) -> None:
    mesh = scidata.init_mesh(dp=dp, domain=num_ranks // dp, device="cpu")
    ds: Any = scidata.open_dataset(f"{folder}/store", mesh)
    with scidata.create(f"{folder}/{out}", like=ds, fields=FIELDS, **(options or {})) as writer:
        for index in [i for i in writer.missing if i % dp == mesh.get_local_rank("dp")]:
            writer[index] = predict(ds[index], writer.fields)


def check(out: Path) -> dict[str, bytes]:
    """Compare all fields with what they were made of; return the files that were written."""
    assert sorted(os.listdir(out)) == sorted(SIZES)
    for name in SIZES:
        u, p = values(name)
        raw = read_samples(str(out / name))[0]
        assert raw.values["time"].tolist() == [0.5, 10.0]
        f4 = {"stress": np.concatenate([u, 2 * u], 2), "grad": np.concatenate([u, u, -u], 2)}
        wanted = {"p": 2 * p, "U": u, "U_model": -u, **{n: x.astype("f4").astype("f8") for n, x in f4.items()}}
        assert {*raw.fields} == {*wanted, "volume"}
        for field, expected in wanted.items():
            np.testing.assert_array_equal(raw.fields[field].read(), expected, err_msg=f"{name} {field}")
        assert raw.fields["U_model"].units == "m s-1"
        assert raw.fields["stress"].units == "kg m-1 s-2"
        (foam,) = out.glob(f"{name}/*.foam")
        assert not foam.stat().st_size
    files = {str(f.relative_to(out)): f for root, _, names in os.walk(out) for f in (Path(root) / n for n in names)}
    written = {name: f.read_bytes() for name, f in files.items() if not f.is_symlink() and f.suffix != ".foam"}
    assert len(written) == 4 * 2 * 4  # fields of times of raw, text and two processors
    assert all(KINDS[os.path.basename(name)].encode() in content for name, content in written.items())
    assert all((b"binary" in content) is ("text/" not in name) for name, content in written.items())
    links = [f for root, dirs, names in os.walk(out) for f in (Path(root) / n for n in dirs + names) if f.is_symlink()]
    assert len(links) == 2 * 2 + 3 + 2 * 4  # constant and system, processors' constant, and U of all times
    assert not any(os.path.isabs(os.readlink(link)) for link in links)
    return written


def test_fields_go_back_into_cases(folder: Path) -> None:
    contents = []
    for num_ranks, dp in ((1, 1), (2, 1), (3, 1), (2, 2)):
        run_ranks(write, num_ranks, str(folder), f"out{num_ranks}{dp}/", dp)
        contents.append(check(folder / f"out{num_ranks}{dp}"))
    assert all(each == contents[0] for each in contents)
    shutil.copytree(folder, folder.parent / "moved", symlinks=True)  # all together: links are relative
    check(folder.parent / "moved" / "out11")


def test_others_read_them(folder: Path) -> None:
    foamlib, pyvista = pytest.importorskip("foamlib"), pytest.importorskip("pyvista")
    run_ranks(write, 1, str(folder), "seen")
    for name in ("raw", "text"):
        u, p = values(name)
        case = foamlib.FoamCase(folder / "seen" / name)
        assert [time.name for time in case] == list(TIMES)
        np.testing.assert_array_equal(case[1]["U_model"].internal_field, -u[1])
        assert case[1]["grad"].internal_field.shape == (SIZES[name], 9)
        np.testing.assert_array_equal(case[0]["p"].internal_field, 2 * p[0])
    for name in SIZES:
        u, p = values(name)
        reader = pyvista.POpenFOAMReader(str(folder / "seen" / name / f"{name}.foam"))
        reader.case_type = "decomposed" if name == "cut" else "reconstructed"
        reader.set_active_time_value(10.0)
        found = reader.read()["internalMesh"].cell_data
        assert {"p", "U", *FIELDS} <= set(found.keys())
        np.testing.assert_allclose(found["U_model"], -u[1], rtol=1e-6)
        np.testing.assert_allclose(found["p"], 2 * p[1], rtol=1e-6)


def write_some_and_die(rank: int, num_ranks: int, folder: str) -> None:
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    ds: Any = scidata.open_dataset(f"{folder}/store", mesh)
    writer = scidata.create(f"{folder}/killed", like=ds, fields=FIELDS)
    for index in range(5):
        writer[index] = predict(ds[index], FIELDS)
    writer.flush()
    torch.distributed.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    writer.close()


def test_a_killed_run_goes_on(folder: Path) -> None:
    with pytest.raises(Exception, match=r"killed|died|SIGKILL|-9"):
        run_ranks(write_some_and_die, 2, str(folder))
    begun = folder / "killed.unfinished"
    assert not (folder / "killed").exists()
    half = begun / ".tmp-cut_10"
    half.mkdir()
    os.symlink("../cases", half / "constant")
    (begun / "cut" / "processor1" / "10").mkdir()  # killed between two processors' folders
    (begun / "cut" / "processor1" / "10" / "p").write_bytes(b"half")
    before = {path: path.stat().st_mtime_ns for path in begun.glob("**/U_model")}
    assert len(before) == 2 * 2 + 2
    run_ranks(write, 3, str(folder), "killed", 1, {"resume": True})
    check(folder / "killed")
    for path, changed in before.items():
        assert (folder / "killed" / path.relative_to(begun)).stat().st_mtime_ns == changed
    assert (folder / "cases" / "cut" / "processor1").is_dir()  # links were not followed


def test_names_times_and_what_is_refused(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("one", "two"):
        write_case(tmp_path / name, "raw")
    (tmp_path / "one" / "raw" / "car.foam").touch()
    times = [tmp_path / "one" / "raw" / "0.5", tmp_path / "one" / "raw" / "10", tmp_path / "two" / "raw" / "10"]
    scidata.partition(times, tmp_path / "times.store")
    scidata.partition(tmp_path / "one" / "raw" / "car.foam", tmp_path / "car.store")
    ds: Any = scidata.open_dataset(tmp_path / "times.store")
    with scidata.create(tmp_path / "of_times", like=ds, fields=["p"]) as writer:
        for index in range(3):
            writer[index] = {"p": -ds[index]["p"]}
    found = sorted(
        str(path.parent.relative_to(tmp_path / "of_times")) for path in (tmp_path / "of_times").glob("*/*/p")
    )
    assert found == ["one_raw/10", "raw/0.5", "two_raw/10"] or found == ["one_raw/0.5", "one_raw/10", "two_raw/10"]
    car: Any = scidata.open_dataset(tmp_path / "car.store")
    monkeypatch.setattr(os, "symlink", _no_links)  # as on file systems that have none: copies
    with scidata.create(tmp_path / "of_car", like=car, fields=["p", "U"], sample=[1]) as writer:
        writer[1] = {"p": -car[1]["p"], "U": car[1]["U"]}
    monkeypatch.undo()
    assert not any(path.is_symlink() for path in (tmp_path / "of_car").glob("**/*"))
    raw = read_samples(str(tmp_path / "of_car" / "car"))[0]
    np.testing.assert_array_equal(raw.fields["p"].read()[0], -values("raw")[1][1])
    for fields, match in (
        ({"uv": {"entity": "cell", "components": 2}}, "1, 3, 6 or 9"),
        ({"a b": {"entity": "cell"}}, "letters"),
    ):
        with pytest.raises(ConfigError, match=match):
            scidata.create(tmp_path / "no", like=car, fields=fields)
    with pytest.raises(OutputError, match="which is read"):
        scidata.create(tmp_path / "one" / "raw" / "out", like=car)
    (tmp_path / "two").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="topology="):
        scidata.create(tmp_path / "lost", like=ds)
    path = tmp_path / "one" / "raw" / "10" / "p"
    path.write_bytes(path.read_bytes()[:-80] + b" " * 80)
    writer = scidata.create(tmp_path / "changed", like=car, fields=["p"], sample=1)
    writer[1] = {"p": car[1]["p"]}
    with pytest.raises(SourceChangedError, match="content differs"):
        writer.close()
    assert not (tmp_path / "changed").exists()
    shutil.rmtree(tmp_path / "one" / "raw" / "10")
    with pytest.raises(SourceChangedError, match="has 1 times, and had 2"):
        scidata.create(tmp_path / "fewer", like=car, fields=["p"])
    shutil.copytree(folder / "cases", tmp_path / "moved" / "cases")
    shutil.copytree(folder / "store", tmp_path / "store")
    moved: Any = scidata.open_dataset(tmp_path / "store")
    with scidata.create(tmp_path / "found", like=moved, topology=tmp_path / "moved" / "cases", fields=FIELDS) as writer:
        for index in range(6):
            writer[index] = predict(moved[index], FIELDS)
    check(tmp_path / "found")


def _no_links(*args: Any, **options: Any) -> None:
    raise OSError("no links")
