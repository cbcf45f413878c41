"""Plug-ins for DLIO: what they read, without it; and DLIO itself, running them on files that it has written."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from scidata.errors import ConfigError
from scidata.loader import dlio
from scidata.loader.data_loader import DataLoader
from scidata.loader.dlio import Order, open_records


def write(folder, form, num_files=3, per_file=2):
    """Write files as DLIO does, samples along the first dimension of HDF5 and the last of NPZ; return paths, values."""
    values = np.random.default_rng(0).normal(size=(num_files, per_file, 4, 6)).astype("f4")
    paths = [str(folder / f"img_{i}_of_{num_files}.{form}") for i in range(num_files)]
    for path, part in zip(paths, values, strict=True):
        if form == "npz":
            np.savez(path, x=np.moveaxis(part, 0, -1), y=[0] * per_file)
            continue
        with h5py.File(path, "w", libver="latest") as file:
            file["records_0"], file["records_1"], file["labels"] = part, -part, [0] * per_file
    return paths, values.reshape(-1, 4, 6)


@pytest.mark.parametrize("form", ["hdf5", "npz"])
def test_records_of_all_files_come_in_the_order_that_dlio_draws(tmp_path, form):
    paths, values = write(tmp_path, form)
    config = SimpleNamespace(train_global_index_map={np.int64(i): (paths[i // 2], i % 2) for i in (5, 0, 3, 2)})
    fields = {"x": 1} if form == "npz" else {"records_0": 1, "records_1": -1}
    loader = DataLoader(open_records(paths, form, 2), batch_size=2, sampler=Order(config, train=True), num_workers=2)
    for order in ([5, 0, 3, 2], [1, 4]):
        config.train_global_index_map = dict.fromkeys(np.array(order), ("", 0))
        found = list(loader)
        for name, sign in fields.items():
            got = np.concatenate([batch[name].numpy() for batch in found])
            assert np.array_equal(got, sign * values[order])


def test_other_formats_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"dataset\.format=tfrecord: of DLIO's formats scidata reads hdf5 and npz"):
        open_records(["img_0_of_1.tfrecord"], "tfrecord")


@pytest.mark.parametrize("form", ["hdf5", "npz"])
@pytest.mark.parametrize("are_alike", [True, False])
def test_the_reader_keeps_files_open_and_reads_what_dlio_asks_for(tmp_path, monkeypatch, form, are_alike):
    paths, values = write(tmp_path, form)
    if not are_alike:
        write(tmp_path / "..", form, 1, 1)
        os.replace(tmp_path / f"../img_0_of_1.{form}", paths[2])  # of one sample
        values[4] = write(tmp_path / "..", form, 1, 1)[1][0]
    config = SimpleNamespace(
        format=form, num_dset_per_record=1, num_samples_per_file=2, preprocess_time=0, resized_image="dlio's",
        train_global_index_map={i: (paths[i // 2], i % 2) for i in range(6 if are_alike else 5)},
    )  # fmt: skip
    monkeypatch.setattr(dlio, "_config", lambda: config)
    opened, real = [], dlio.open_records
    monkeypatch.setattr(dlio, "open_records", lambda *args: opened.append(args[0]) or real(*args))
    reader = dlio.Reader("train", 0, 0)
    for order in ([3, 0, 4, 1], [2, 4, 0]):
        for i in order:
            assert reader.read_index(i, 1) == "dlio's"
            (found,) = reader._memory.values()
            assert np.array_equal(found, values[i])
    assert [len(each) for each in opened] == ([3] if are_alike else [3, 1, 1, 1])


PLUGINS = {
    "Reader": ["reader.reader_classname=scidata.loader.dlio.Reader"],
    "Loader": ["reader.data_loader_classname=scidata.loader.dlio.Loader", "reader.data_loader_sampler=index"],
}


@pytest.mark.parametrize(("form", "plugin"), [("hdf5", "Loader"), ("npz", "Reader")])
def test_dlio_runs_the_plugins(tmp_path, form, plugin):
    pytest.importorskip("dlio_benchmark", reason="it is not on PyPI as it is used here")
    said = [
        *(f"dataset.format={form}", f"dataset.data_folder={tmp_path}/data", "dataset.num_files_train=8"),
        *("dataset.num_files_eval=0", "dataset.num_subfolders_train=0", "dataset.num_subfolders_eval=0"),
        *("dataset.record_dims=[4,6]", "dataset.record_element_type=float32", "workflow.generate_data=True"),
        *("workflow.evaluation=False", "reader.batch_size=2", "train.computation_time=0", "train.epochs=2"),
        *("reader.preprocess_time=0.001", *PLUGINS[plugin]),
    ]
    command = [sys.executable, "-c", "import dlio_benchmark.main as m; m.main()", "workload=default"]
    options = [f"hydra.run.dir={tmp_path}/out", *(f"++workload.{each}" for each in said)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out/summary.json").read_text())
    assert len(found["metric"]["train_throughput_samples_per_second"]) == 2
    assert all(each > 0 for each in found["metric"]["train_throughput_samples_per_second"])
