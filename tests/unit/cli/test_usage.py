"""One thing wrong in each call: the message names it, what was expected, and what is near."""

import inspect
import json
import os
import shutil

import h5py
import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from typer.testing import CliRunner

import scidata
from scidata.cli.app import app
from scidata.errors import ConfigError, UnknownNameError
from scidata.testing import make_grid


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A grid, a raw mesh and cloud, a store of each of these, and files that are none."""
    path = tmp_path_factory.mktemp("usage")
    make_grid(path / "era5.zarr", chunks=(1, 3, 7, 24))
    rng = np.random.default_rng(0)
    with h5py.File(path / "mesh.h5", "w") as file:
        file["points"] = np.array([[0.0, 0], [1, 0], [1, 1], [0, 1], [2, 0]])
        file["cells"] = np.array([[0, 1, 2], [0, 2, 3], [1, 4, 2]])
        file["u"] = rng.random(5)
    with h5py.File(path / "cloud.h5", "w") as file:
        file["points"] = rng.random((40, 3))
        file["p"] = rng.random(40)
    for name in ("mesh", "cloud"):
        assert run("partition", path / f"{name}.h5", path / f"{name}.store").exit_code == 0
    (path / "text.nc").write_text("this is text")
    (path / "mixed").mkdir()
    (path / "mixed" / "a.txt").write_text("text")
    os.symlink("loop", path / "loop")
    return path


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("plan era5.zarr --domain 2 --kind gird", "--kind: did you mean 'grid'"),
        ("plan era5.zarr --domain 2 --dp x", "--dp: 'x' is not a whole number"),
        ("plan era5.zarr --domain 2 --sample -1", "--sample: -1 is less than 0"),
        ("plan era5.zarr --domain 2 --steps 0,100", "steps 0,100"),
        ("plan era5.zarr --domain 2 --isel latitude=100", "'latitude'"),
        ("plan era5.zarr --domain 2 --bounds evn", "--bounds: did you mean 'even'"),
        ("plan era5.zarr --domain 2 --plot x.pgn", "did you mean 'png'"),
        ("plan mesh.store --domain 2 --kind graph", "--kind: of kind 'mesh'"),
        ("plan mesh.store --domain 2 --ghosts disc", "--ghosts: did you mean 'disk'"),
        ("plan mesh.store --domain 2 --bounds evn", "--bounds: did you mean 'even'"),
        ("plan mesh.store --domain 2 --weights edgs", "did you mean 'edges'"),
        ("partition mesh.h5 out --order hilbrt", "--order: did you mean 'hilbert'"),
        ("partition mesh.h5 out --kind mess", "did you mean 'mesh'"),
        ("partition mesh.h5 out --entity cels", "did you mean 'cell'"),
        ("partition mesh.h5 out --edges fces", "did you mean 'faces'"),
        ("partition mesh.h5 out --repair self_lops", "did you mean 'self_loops'"),
        ("partition mesh.h5 out --fields uu", "did you mean 'u'"),
        ("partition mesh.h5 out --topology mesh", "names one of several meshes of a UGRID file"),
        ("partition cloud.h5 out --topology mesh", "leave it out"),
        ("bench mesh.store", "PATH: add --pipeline"),
        ("bench era5.zarr --fields uu", "did you mean 'u'"),
        ("bench era5.zarr --kind gird", "--kind: did you mean 'grid'"),
        ("demo --ranks 16", "--ranks: 15"),
        ("plan era5.zarr --domain 2 --overwrite", "--overwrite: is for the picture of --plot"),
        ("plan era5.zarr --domain 2 --fields ,", "--fields: names no array"),
        (
            "plan era5.zarr --domain 2 --weights longitude",
            "--weights: 'longitude' has dims longitude, not 'latitude'",
        ),
        ("plan era5.zarr --domain 2 --weights latitude", "--weights must be finite: row 10 costs -10"),
        ("plan era5.zarr --domain 2 --isel level=9", "--isel of 'level': --sel level=9 selects by label"),
        ("plan era5.zarr --domain 2 --isel latitude=5:5", "--isel leaves no rows: --sel latitude=5:5 selects"),
        ("plan mesh.store --domain 2 --sel level=550", "--sel: means nothing for mesh.store"),
        ("stage mesh.store cache --domain 2 --sel level=550", "--sel: means nothing for mesh.store"),
        ("inspect s4://bucket/x.zarr", "nothing reads s4:// URLs; did you mean 's3'"),
        ("inspect foo://host/x.zarr", "nothing reads foo:// URLs; s3://"),
    ],
)
def test_wrong_arguments_exit_with_2(folder, monkeypatch, line, says):
    monkeypatch.chdir(folder)
    result = run(*line.split())
    words = " ".join(result.stderr.replace("│", " ").split())
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    for part in says.split(": "):
        assert part in words


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("inspect era5.zar", "did you mean 'era5.zarr'"),
        ("inspect text.nc", "no format that scidata reads"),
        ("inspect mixed", "use a glob"),
        ("inspect *.grib", "no file matches"),
        ("inspect loop", "loop: too many levels of symbolic links"),
        ("bench loop", "loop: too many levels of symbolic links"),
        ("plan mesh.h5 --domain 2", "scidata partition mesh.h5 OUT"),
        ("plan mesh.store/sample-000000.zarr --domain 2", "mesh.store"),
        ("bench mesh.h5", "scidata partition mesh.h5 OUT"),
        ("verify era5.zarr", "no scidata store"),
        ("partition mesh.h5 mesh.store", "--overwrite replaces it"),
        ("partition mixed out", "mixed"),
    ],
)
def test_what_fails_exits_with_1(folder, monkeypatch, line, says):
    monkeypatch.chdir(folder)
    result = run(*line.split())
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr


@pytest.mark.parametrize(
    "command", ["plan era5.zarr --domain 2", "stage era5.zarr cache --domain 2", "stats era5.zarr"]
)
@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ("time", "'time' is incomplete; accepted: dim=first:last"),
        ("tim=2020", "--sel names dimension 'tim', which no field has; did you mean 'time'?"),
        ("level=501", "--sel of 'level': no label is 501; it has 1000, 550, 100"),
        ("level=550,999", "--sel of 'level': no label is [550, 999]"),
        ("level=a", "--sel of 'level': no label is 'a'"),
        ("level=1:2:3", "'1:2:3' has more than one ':'"),
        ("time=1990:2015", "--sel of 'time': nothing lies in 1990:2015; it has 2020-01-01T00:00:00"),
        ("time=2020-13-01", "--sel of 'time': no label is '2020-13-01'"),
        ("time=2020-01-01T07:00", "--sel of 'time': no label is '2020-01-01T07:00'"),
        ("latitude=20:60", "--sel of 'latitude': nothing lies in 20:60; 90.0: labels descend: 60:20"),
    ],
)
def test_labels_that_are_not_there(folder, monkeypatch, command, chosen, says):
    monkeypatch.chdir(folder)
    command = command.format("era5.zarr")
    result = run(*command.split(), "--sel", chosen)
    words = " ".join(result.stderr.replace("│", " ").split())
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    for part in says.split("; "):
        for each in part.split(": 90.0: "):
            assert each.removeprefix("90.0: ") in words
    twice = json.loads(run(*command.split(), "--sel", "level=550", "--sel", "level=100", "--json").stdout)["error"]
    assert "'level' is given twice" in twice["message"]
    assert twice["exit_code"] == 2


def test_labels_and_numbers_choose_the_same(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    pairs = [("--sel level=550,100", "--isel level=1,2"), ("--sel time=2020-01-01T06:00", "--isel time=1")]
    for by_label, by_number in pairs:
        plans = [
            json.loads(run("plan", "era5.zarr", "--domain", "2", *x.split(), "--json").stdout)
            for x in (by_label, by_number)
        ]
        assert plans[0]["ranks"] == plans[1]["ranks"]
        done = [
            json.loads(run("stage", "era5.zarr", tmp_path, "--domain", "2", *x.split(), "--json").stdout)
            for x in (by_label, by_number)
        ]
        assert done[0]["written"] > 0
        assert (done[1]["written"], done[1]["there"]) == (0, done[0]["written"])
        shutil.rmtree(tmp_path / "scidata-parts")


def test_where_figures_cannot_be_written_is_said_before_they_are_gathered(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("scidata.cli.commands.stats.statistics", None)
    for out, says in (("absent/x.json", "there is no folder absent"), (".", "is a folder; name a file in it")):
        result = run("stats", "era5.zarr", "--out", out)
        assert (result.exit_code, result.stdout) == (1, "")
        assert says in result.stderr


def test_home_is_meant_by_a_tilde(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run("partition", folder / "mesh.h5", "~/made.store").exit_code == 0
    assert run("verify", "~/made.store").exit_code == 0
    assert json.loads(run("plan", "~/made.store", "--domain", "2", "--json").stdout)["kind"] == "mesh"
    missing = run("inspect", "~/absent.zarr")
    assert (missing.exit_code, "made.store" in missing.stderr) == (1, False)  # a home is not listed
    make_grid("~/small.zarr", num_times=2, num_lat=7, num_lon=8)
    assert run("stats", "~/small.zarr", "--out", "~/stats.json").exit_code == 0
    with scidata.trace("~/one.json"):
        scidata.Statistics.load("~/stats.json").save("~/again.json")
    scidata.merge_traces(["~/one.json"], "~/all.json")
    assert {"stats.json", "again.json", "all.json"} <= set(os.listdir(tmp_path))
    (tmp_path / "link.zarr").symlink_to("nowhere")
    assert "link.zarr: is a link to nowhere, which is not there" in run("inspect", "~/link.zarr").stderr


def test_arrays_of_a_mesh_are_timed_on_request(folder):
    rows = json.loads(run("bench", folder / "mesh.h5", "--kind", "grid", "--repeats", "1", "--json").stdout)["rows"]
    assert {row["field"] for row in rows} == {"points", "cells", "u"}
    assert run("bench", folder / "cloud.h5", "--repeats", "1").exit_code == 0


def test_examples_in_the_help_use_options_that_exist():
    for command in app.registered_commands:
        lines = [line.split() for line in inspect.getdoc(command.callback).splitlines() if line.startswith("scidata ")]
        known = run(command.callback.__name__, "--help").stdout
        assert lines
        for words in lines:
            assert words[1] == command.callback.__name__
            assert all(word in known for word in words if word.startswith("--"))


# -- the library -------------------------------------------------------------------------------------------------------

SHARD = {"latitude": "domain"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fields": 3}, "fields=3: expected a name or a list"),
        ({"steps": 1}, "steps=1: expected a tuple of offsets"),
        ({"steps": "01"}, "steps='01'"),
        ({"steps": (0.5,)}, "steps=0.5: expected an integer, not float"),
        ({"steps": (0, 9)}, "there would be no sample"),
        ({"shard": "latitude"}, "shard='latitude': expected a mapping"),
        ({"isel": ["latitude"]}, "isel=['latitude']: expected a mapping"),
        ({"isel": {"latitude": "12"}}, "isel of 'latitude': '12' selects nothing"),
        ({"isel": {"latitude": 3.0}}, "isel of 'latitude': 3.0"),
        ({"isel": {"latitude": slice(0, 2.0)}}, "does not run from integer to integer"),
        ({"isel": {"level": np.array([True, False])}}, "a mask of shape (2,)"),
        ({"isel": {"level": True}}, "isel of 'level'"),
        ({"isel": {"latitude": 100}}, "isel of 'latitude': index 100"),
        ({"weights": ["a"] * 19}, "weights must be numbers"),
        ({"align": "8"}, "align='8': expected an integer, not str"),
        ({"align": 9.5}, "align=9.5: expected an integer, not float"),
        ({"periodic": True}, "periodic=True: expected a name"),
        ({"decode": "no"}, "decode must be True, False, 'rank' or 'node', not 'no'"),
        ({"dtype": "float32"}, "such as torch.float32, not 'float32'"),
        ({"transform": 3}, "transform=3: expected a function, not int"),
        ({"num_threads": "4"}, "num_threads='4': expected an integer"),
    ],
)
def test_arguments_of_open_dataset(folder, options, says):
    with pytest.raises(ConfigError) as caught:
        scidata.open_dataset(folder / "era5.zarr", scidata.init_mesh(), **{"shard": SHARD} | options)
    assert says in str(caught.value)


def test_masks_and_numpy_integers_select_as_they_say(folder):
    mask = np.array([True, False, True])
    chosen = scidata.open_dataset(folder / "era5.zarr", isel={"level": mask, "time": np.int64(1)})[0]["u"]
    assert torch.equal(chosen, scidata.open_dataset(folder / "era5.zarr")[1]["u"][[0, 2]])


@pytest.mark.parametrize("path", [None, 3, b"era5.zarr"])
def test_paths_of_other_types(path):
    with pytest.raises(ConfigError, match="expected a path or URL"):
        scidata.open_dataset(path)


def test_calls_with_one_thing_wrong(folder, tmp_path):
    mesh = scidata.init_mesh(dp=np.int64(1))
    ds = scidata.open_dataset(folder / "era5.zarr", mesh, shard=SHARD)
    part, placements = torch.zeros(4, 3), [Replicate(), Shard(0)]
    linear, sample = torch.nn.Linear(2, 2), ds[0]
    expected = {
        "DeviceMesh, made by scidata.init_mesh": [
            lambda: scidata.open_dataset(folder / "era5.zarr", 4),
            lambda: scidata.DistributedSampler(ds, 3),
            lambda: scidata.parallelize(linear, 4),
        ],
        "batch_size='2'": [lambda: scidata.DataLoader(ds, batch_size="2")],
        "num_workers=1.5": [lambda: scidata.DataLoader(ds, num_workers=1.5)],
        "timeout='5'": [lambda: scidata.DataLoader(ds, timeout="5")],
        "sampler=3": [lambda: scidata.DataLoader(ds, sampler=3)],
        "collate_fn=3": [lambda: scidata.DataLoader(ds, collate_fn=3)],
        "generator=3": [lambda: scidata.DataLoader(ds, generator=3)],
        "shuffle=3": [lambda: scidata.DataLoader(ds, shuffle=3)],
        "no store of one node set": [lambda: scidata.NeighborLoader(ds, [2])],
        "dims=3": [lambda: scidata.shard_dataset([torch.zeros(2)], mesh, dims=3)],
        "nodes=3": [lambda: scidata.partition(folder / "m.h5", folder / "m.store", nodes=3)],
        "model: expected a module": [lambda: scidata.explain(None)],
        "a list of samples": [lambda: scidata.collate(3)],
        "='no': expected True or False": [
            lambda: scidata.DataLoader(ds, pin_memory="no"),
            lambda: scidata.DataLoader(ds, in_order="no"),
            lambda: scidata.DataLoader(ds, watch="no"),
            lambda: scidata.DataLoader(ds, transform_stream="no"),
            lambda: scidata.DataLoader(ds, workers="process", persistent_workers="no"),
        ],
        "bucket_bytes must be at least 1": [lambda: scidata.parallelize(linear, None, bucket_bytes=-1)],
        "device='cdua'": [lambda: scidata.DataLoader(ds, device="cdua")],
        "did you mean 'thread'": [lambda: scidata.DataLoader(ds, workers="treads")],
        "did you mean 'skip'": [lambda: scidata.DataLoader(ds, on_error="skp")],
        "seed='a'": [lambda: scidata.DistributedSampler(ds, mesh, seed="a")],
        "epoch='1'": [lambda: scidata.DistributedSampler(ds, mesh).set_epoch("1")],
        "weights: 4 numbers": [lambda: scidata.DistributedSampler(ds, mesh, weights="abcd")],
        "group='2'": [lambda: scidata.DistributedSampler(ds, mesh, sizes=[1] * 4, group="2")],
        "give the data sets one by one": [lambda: scidata.concat([ds, ds])],
        "mix: expected data sets": [lambda: scidata.mix({"a": 3}, {"a": 1})],
        "subset: expected data sets": [lambda: scidata.subset(3, [0])],
        "ratios must be positive": [lambda: scidata.mix({"a": ds}, {"a": "x"})],
        "model must be a torch.nn.Module": [lambda: scidata.parallelize(mesh, linear)],
        "no_sync takes the model": [lambda: scidata.no_sync(3)],
        "placements='Shard(0)'": [lambda: scidata.ShardTensor.from_local(part, mesh, "Shard(0)")],
        "one for each of dp, domain, not 1": [lambda: scidata.ShardTensor.from_local(part, mesh, [Shard(0)])],
        "device_mesh must be a DeviceMesh": [lambda: scidata.ShardTensor.from_local(part, 3, placements)],
        "expected a tensor, not ndarray": [lambda: scidata.ShardTensor.from_local(part.numpy(), mesh, placements)],
        "global_src='0'": [lambda: scidata.scatter_tensor(part, "0", mesh, placements)],
        "to_dtensor takes a ShardTensor": [lambda: scidata.to_dtensor(part)],
        "collate makes a batch": [lambda: scidata.collate([]), lambda: scidata.collate([3])],
        "field 'w' is a int": [lambda: sample.replace({"w": 1})],
        "samples are numbered by integers": [lambda: ds["u"], lambda: ds[1.0], lambda: ds[0:2]],
        "jobs='2'": [lambda: scidata.partition(folder / "mesh.h5", tmp_path / "s", jobs="2")],
        "max_field_bytes must be at least 1": [
            lambda: scidata.partition(folder / "mesh.h5", tmp_path / "s", max_field_bytes=0)
        ],
        "points=3: expected a name": [lambda: scidata.partition(folder / "mesh.h5", tmp_path / "s", points=3)],
        "weights=[1]: expected a field's name": [
            lambda: scidata.partition(folder / "mesh.h5", tmp_path / "s", weights=[1])
        ],
        "out=3: expected the path of a new folder": [lambda: scidata.partition(folder / "mesh.h5", 3)],
        "resume='yes': expected True": [lambda: scidata.create(tmp_path / "o.zarr", like=ds, resume="yes").__enter__()],
        "differences='no': expected True": [lambda: scidata.statistics(ds, differences="no")],
        "RMSE() has no argument 'weight'; did you mean 'weights'?": [lambda: scidata.metrics.RMSE(weight=1)],
        "ACC() has no argument 'by_dim'": [lambda: scidata.metrics.ACC(by_dim=1)],
        "edges=8": [lambda: scidata.partition(folder / "mesh.h5", tmp_path / "s", edges=8)],
        "a list of traces": [lambda: scidata.merge_traces("a.json", "b.json")],
        "no folder": [lambda: scidata.trace(tmp_path / "absent" / "t.json").__enter__()],
        "register_op takes torch's functions": [lambda: scidata.register_op("sin")(print)],
        "did you mean 'open_dataset'": [lambda: scidata.open_datset],
    }
    for says, calls in expected.items():
        for call in calls:
            with pytest.raises((ValueError, TypeError, OSError, AttributeError)) as caught:
                call()
            assert says in str(caught.value)


@pytest.mark.parametrize(
    ("datasets", "ratios", "says"), [("ab", "ac", "'c' has no data set"), ("ab", "a", "'b' has no")]
)
def test_names_of_a_mix(folder, datasets, ratios, says):
    ds = scidata.open_dataset(folder / "era5.zarr")
    with pytest.raises(UnknownNameError, match=says):
        scidata.mix(dict.fromkeys(datasets, ds), dict.fromkeys(ratios, 1))
