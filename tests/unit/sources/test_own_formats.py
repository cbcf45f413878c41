"""Formats from outside: an installed package's, by a real entry point, and a script's; all of scidata reads them."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import scidata
from scidata.cli.app import app
from scidata.errors import (
    ConfigError,
    CorruptDataError,
    MissingChunkError,
    RefusedError,
    ShortReadError,
    SourceChangedError,
    TooLargeError,
    UnsupportedFormatError,
)
from scidata.sources import Codec, FileFormat, formats, open_source, register_format
from scidata.testing import run_ranks

EXAMPLE = Path(__file__).parents[3] / "examples/own_format"
DIMS = ("time", "lat", "lon")
RNG = np.random.default_rng(0)
U, V = (RNG.normal(size=(6, 11, 8)).astype("f4") for _ in "uv")


def installed(folder):
    """Lay out what pip would: the module, and its metadata with the entry points of the example's pyproject.toml."""
    info = folder / "lab_format-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(EXAMPLE / "lab_format.py", folder)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-format\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[scidata.sources]\nlab = lab_format:LabFile\nbad = lab_format:Missing\nworse = nowhere:Thing\n"
    )
    return str(folder)


def use(folder):
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    formats._entry_points.cache_clear()
    formats._load.cache_clear()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = installed(tmp_path_factory.mktemp("site"))
    use(folder)
    yield folder
    sys.path.remove(folder)
    formats._entry_points.cache_clear()


def command(*args):
    done = CliRunner().invoke(app, [*args, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def write(path, *, packed=True, chunks=None, u=U):
    from lab_format import write_lab

    arrays = {
        "time": (("time",), np.arange(len(u))),
        "lat": (("lat",), np.linspace(90, -90, 11)),
        "lon": (("lon",), np.arange(0, 360, 45.0)),
        "u": (DIMS, u),
        "v": (DIMS, V[: len(u)]),
    }
    units = {"lat": {"units": "degrees_north"}, "lon": {"units": "degrees_east"}, "u": {"units": "m/s"}}
    write_lab(str(path), arrays, chunks=chunks or {"time": 2, "lat": 4}, packed=packed, attributes=units)
    return str(path)


@pytest.fixture
def lab(site, tmp_path):
    return write(tmp_path / "a.lab")


# -- an installed format ----------------------------------------------------------------------------------------------


def test_the_package_is_imported_only_where_a_name_matches(site, tmp_path):
    code = "import sys; from scidata.sources import open_source; np = open_source('a.npy'); "
    code += "assert np.format == 'npy' and 'lab_format' not in sys.modules; "
    code += "lab = open_source('a.lab'); print(lab.format, 'lab_format' in sys.modules, 'torch' in sys.modules)"
    np.save(tmp_path / "a.npy", U)
    write(tmp_path / "a.lab")
    paths = os.pathsep.join([site, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "lab True False\n", done.stderr


def on_ranks(rank, num_ranks, site, paths):
    use(site)
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    for path in paths:
        options = {"shard": {"lat": "domain"}, "halo": {"lat": 2}, "steps": (0, 1), "bounds": {"lat": (0, 3, 11)}}
        for decode in ("rank", "node"):
            ds = scidata.open_dataset(path, mesh, decode=decode, **options)
            assert [ds.plan(0, r).bytes_wanted for r in (0, 1)] == [2 * 2 * 5 * 8 * 4, 2 * 2 * 10 * 8 * 4]
            loader = scidata.DataLoader(ds, 2, shuffle="blocks")
            seen = []
            for batch in loader:
                for name, values in (("u", U), ("v", V)):
                    local = batch[name].local_with_halo().numpy()
                    rows = slice(0, 5) if rank == 0 else slice(1, 11)
                    expected = np.stack([values[i : i + 2, rows] for i in batch.index])
                    np.testing.assert_array_equal(local, expected)
                seen += batch.index
            assert sorted(seen) == [0, 1, 2, 3, 4]
            torch.distributed.barrier()
        stats = scidata.statistics(ds)
        assert stats["u"].mean == pytest.approx(U.mean(dtype=np.float64), abs=1e-6)
        normal = ds.normalise(stats)
        assert torch.allclose(normal.denormalise(normal[1])["u"].full_tensor(), torch.from_numpy(U[1:3]), atol=1e-5)


def test_ranks_read_their_parts(site, tmp_path):
    paths = [write(tmp_path / "packed.lab"), write(tmp_path / "raw.lab", packed=False)]
    run_ranks(on_ranks, 2, site, paths)


def test_files_follow_each_other_and_workers_open_them(site, tmp_path):
    paths = [write(tmp_path / f"{i}.lab", u=U[3 * i : 3 * i + 3]) for i in range(2)]
    from lab_format import write_lab

    write_lab(paths[1], {"time": (("time",), np.arange(3, 6)), "u": (DIMS, U[3:])}, packed=True)
    write_lab(paths[0], {"time": (("time",), np.arange(3)), "u": (DIMS, U[:3])}, packed=True)
    ds = scidata.open_dataset(paths, kind="grid", fields=["u"], shard={})
    again = pickle.loads(pickle.dumps(ds))
    assert all(np.array_equal(each[i]["u"], U[i]) for each in (ds, again) for i in range(6))
    stock = torch.utils.data.DataLoader(ds, batch_size=3, num_workers=1, multiprocessing_context="spawn")
    assert np.array_equal(torch.cat([dict(batch)["u"] for batch in stock]), U)


def test_command_line_describes_it(lab):
    found = command("inspect", lab)
    assert (found["format"], found["kind"], found["shard_dim"]) == ("lab", "grid", "lat")
    assert {a["name"]: a["codecs"] for a in found["arrays"]}["u"] == ["lab-pack"]
    assert command("plan", lab, "--domain", "2", "--fields", "u")["exact"]
    ds = scidata.open_dataset(lab, fields=["u"])
    plan = ds.plan(0)
    assert pickle.loads(pickle.dumps(plan)).to_json() == json.loads(json.dumps(plan.to_json()))
    assert plan.exact
    assert not plan.note


def test_a_mesh_is_partitioned(site, tmp_path):
    from lab_format import write_lab

    pos = RNG.random((60, 2))
    cells = np.stack([np.arange(58), np.arange(1, 59), np.arange(2, 60)], axis=1)
    arrays = {"points": (("node", "xy"), pos), "cells": (("cell", "three"), cells), "h": (("node",), pos[:, 0])}
    write_lab(str(tmp_path / "mesh.lab"), arrays)
    scidata.partition(str(tmp_path / "mesh.lab"), str(tmp_path / "store"))
    sample = scidata.open_dataset(str(tmp_path / "store"))[0]
    ids = sample.original_id("node").numpy()
    np.testing.assert_array_equal(sample["h"].numpy(), pos[ids, 0])


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_broken_entry_point_is_named_and_stops_nothing(site, lab, tmp_path):
    formats._load.cache_clear()
    for name, reason in (("bad", "AttributeError"), ("worse", "ModuleNotFoundError: No module named 'nowhere'")):
        shutil.copy(EXAMPLE / "lab_format.py", tmp_path / f"x.{name}")
        with (
            pytest.warns(RuntimeWarning, match=f"entry point '{name}' of scidata.sources of lab-format 1.0.*{reason}"),
            pytest.raises(UnsupportedFormatError, match="which is no format that scidata reads"),
        ):
            open_source(tmp_path / f"x.{name}")
    np.save(tmp_path / "grid.npy", U)
    shutil.copy(tmp_path / "grid.npy", tmp_path / "x.bad")  # content that scidata knows is read all the same
    assert open_source(tmp_path / "x.bad").format == "npy"
    assert len(scidata.open_dataset(lab)) == 6


def test_another_file_of_that_name_is_not_taken(site, tmp_path):
    np.save(tmp_path / "grid.npy", U)
    os.rename(tmp_path / "grid.npy", tmp_path / "grid.lab")
    assert open_source(tmp_path / "grid.lab").format == "npy"


def test_a_format_that_cannot_tell_stops_no_other(site, tmp_path):
    (tmp_path / "short.lab").write_bytes(b"LA")
    with pytest.raises(UnsupportedFormatError, match="which is no format that scidata reads"):
        open_source(tmp_path / "short.lab")
    path = write(tmp_path / "a.lab")

    @register_format
    class Careless(FileFormat):
        patterns = ("lab",)

        @classmethod
        def takes(cls, path):
            return path["x"]

    with pytest.warns(UserWarning, match=r"a\.lab: .*Careless\.takes failed \(TypeError"):
        assert open_source(path).format == "lab"


def test_damage_is_told(site, tmp_path):
    path = write(tmp_path / "a.lab")
    data = Path(path).read_bytes()
    ds = scidata.open_dataset(path, fields=["u"])
    Path(path).write_bytes(data[:-4000])
    with pytest.raises((ShortReadError, SourceChangedError)):
        [ds[i] for i in range(6)]
    ds = scidata.open_dataset(path, fields=["v"])
    with pytest.raises(ShortReadError, match=r"a\.lab"):
        [ds[i] for i in range(6)]
    Path(path).write_bytes(data[:4000] + bytes(2000) + data[6000:])
    with pytest.raises(CorruptDataError, match=r"field '\w+', chunk \(\d.*lab-pack cannot decode it \("):
        [dict(scidata.open_dataset(path)[i]) for i in range(6)]
    Path(path).write_bytes(data[:4] + b"\x20\0\0\0" + data[8:])
    with pytest.raises(CorruptDataError, match=r"a\.lab: cannot be described as lab \(\w+Error"):
        scidata.open_dataset(path)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        scidata.open_dataset(str(tmp_path / "b.lab"))
    Path(path).write_bytes(data)
    ds = scidata.open_dataset(path, fields=["u"])
    ds[0]
    write(path, u=U[::-1])
    with pytest.raises(SourceChangedError):
        ds[5]


class Bad(FileFormat):
    """Says what its file says, as a careless lab's would."""

    format, patterns = "bad", ("*.bad1",)

    def describe(self):
        for name, given in json.loads(self.read_bytes(0, self.size())).items():
            yield self.array(name, **{k: v for k, v in given.items() if k != "place"})

    def place(self, layout, chunk):
        found = json.loads(self.read_bytes(0, self.size()))[layout.name]["place"]
        return None if found is None else tuple(found)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"shape": [1 << 40, 1 << 40], "dtype": "f8"}, CorruptDataError, "more bytes than any file"),
        ({"shape": [-1], "dtype": "f8"}, CorruptDataError, "do not fit"),
        ({"shape": [4], "dtype": "f8", "chunks": [0]}, CorruptDataError, "do not fit"),
        ({"shape": [4, 4], "dtype": "f8", "dims": ["x", "x"]}, CorruptDataError, "do not fit"),
        ({"shape": [4], "dtype": "f8", "codecs": ["zstd"]}, ConfigError, "not 'zstd'"),
        ({"shape": [4], "dtype": "f8", "place": ["{here}/a.bad1", 0.5, 32]}, CorruptDataError, "32 bytes from 0.5 on"),
        ({"shape": [4], "dtype": "O"}, UnsupportedFormatError, "never unpickled"),
        ({"shape": [4], "dtype": "no"}, CorruptDataError, "cannot be described as bad"),
        ({"shape": [1 << 50], "dtype": "f8", "place": ["{here}/a.bad1", 0, 1 << 53]}, TooLargeError, "bytes"),
        ({"shape": [4], "dtype": "f8", "place": None}, MissingChunkError, "does not have it"),
        ({"shape": [4], "dtype": "f8", "place": ["/etc/passwd", 0, 32]}, RefusedError, "outside of its folder"),
        ({"shape": [4], "dtype": "f8", "place": ["{here}/../x", 0, 32]}, RefusedError, "outside of its folder"),
        ({"shape": [4], "dtype": "f8", "place": ["{here}/a.bad1", -5, 32]}, CorruptDataError, "make no sense"),
        ({"shape": [4], "dtype": "f8", "place": ["{here}/a.bad1", 0, 3]}, CorruptDataError, "bytes"),
        ({"shape": [4], "dtype": "f8", "place": ["{here}/a.bad1", 1 << 70, 32]}, CorruptDataError, "cannot be found"),
        ({"shape": [4], "dtype": "f8", "place": [1]}, CorruptDataError, "cannot be found as bad"),
    ],
)
def test_hostile_descriptions_are_refused(tmp_path, given, error, match):
    register_format(Bad)
    text = json.dumps({"x": given}).replace("{here}", str(tmp_path))
    (tmp_path / "a.bad1").write_text(text)
    with pytest.raises(error, match=match):
        scidata.open_dataset(str(tmp_path / "a.bad1"), sample_dim=False, kind="grid")[0]


def test_docstring_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (test,) = doctest.DocTestFinder(recurse=False).find(FileFormat, globs={"scidata": scidata})
    assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test).failed == 0


def test_registration_is_checked():
    with pytest.raises(ConfigError, match="no patterns of file names"):
        register_format(FileFormat)
    with pytest.raises(ConfigError, match=r"'\*\.nc' are files that scidata reads itself"):
        register_format(type("Mine", (FileFormat,), {"patterns": ("nc",)}))


# -- a format of a script ---------------------------------------------------------------------------------------------


class Column(FileFormat):
    """Text, a time a line: only a function can read it."""

    format, patterns = "column", ("run_*",)
    num_reads = 0

    def describe(self):
        values = np.loadtxt(self.path, ndmin=2)
        yield self.array("t", values.shape, "f8", dims=("time", "x"), chunks=(1, values.shape[1]))

    def read(self, layout, box):
        type(self).num_reads += 1
        return np.loadtxt(self.path, ndmin=2)[box]


def test_a_function_alone_reads(tmp_path):
    register_format(Column)
    values = RNG.random((4, 6))
    path = str(tmp_path / "run_17")
    np.savetxt(path, values, fmt="%.17g")
    ds = scidata.open_dataset(path, scidata.init_mesh(device="cpu"), shard={"x": "domain"}, isel={"x": slice(1, 6, 2)})
    assert all(np.array_equal(ds[i]["t"].full_tensor(), values[i, 1::2]) for i in range(4))
    plan = ds.plan(0)
    assert not plan.exact
    assert "t: read by a function that tells no byte ranges" in plan.note
    assert plan.note in repr(plan)
    assert plan.bytes_fetched == 6 * 8
    notes = command("plan", path, "--domain", "2", "--shard", "x")["notes"]
    assert any("decoded by the format's own library" in note for note in notes)


@pytest.mark.parametrize("wrong", [np.zeros(6), 0.0, np.zeros((1, 5)), np.zeros((1, 6), "c16")])
def test_a_function_that_returns_something_else(tmp_path, wrong, monkeypatch):
    register_format(Column)
    np.savetxt(tmp_path / "run_1", RNG.random((4, 6)))
    monkeypatch.setattr(Column, "read", lambda self, layout, box: wrong)
    with pytest.raises(CorruptDataError, match=r"run_1: field 't' cannot be read as column \(\w+Error"):
        scidata.open_dataset(str(tmp_path / "run_1"), kind="grid", shard={})[0]


def test_a_folder_with_companions(tmp_path):
    @register_format
    class Run(FileFormat):
        format, patterns = "run", ("*.run",)

        def describe(self):
            names = sorted(os.listdir(self.path))
            codec = Codec(name="upside down", decoder=lambda data, nbytes: bytes(data)[::-1])
            yield self.array("t", (len(names), 4), ">i4", dims=("time", "x"), chunks=(1, 4), codecs=[codec])

        def place(self, layout, chunk):
            path = os.path.join(self.path, f"{chunk[0]}.bin")
            return path, 0, os.path.getsize(path)

    values = RNG.integers(0, 99, (3, 4), dtype=np.int32)
    (tmp_path / "a.run").mkdir()
    for i, row in enumerate(values):
        (tmp_path / f"a.run/{i}.bin").write_bytes(row.astype(">i4").tobytes()[::-1])
    ds = scidata.open_dataset(str(tmp_path / "a.run"), kind="grid", shard={})
    assert all(np.array_equal(ds[i]["t"], values[i]) for i in range(3))
    (tmp_path / "a.run/1.bin").write_bytes(bytes(16))
    os.utime(tmp_path / "a.run/1.bin", (1, 1))
    with pytest.raises(SourceChangedError):
        ds[1]
