"""DLIO, the I/O benchmark of MLPerf Storage, on its own readers and on scidata's plug-ins, in turns.

    python tests/bench/dlio.py --repeats 5

DLIO writes the files (HDF5 and NPZ), and says how many samples a second come. Zarr stores of the same samples lie under
HDF5 files' names, in a folder of their own: DLIO has no Zarr. Files are in the page cache. CPU time is that of all
processes from the end of the first epoch on: a run's other six seconds vary by more than its samples take. One rank
runs in a fork of this process, which has imported everything. Needs ``dlio_benchmark`` (docs/howto/dlio.md).
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import psutil
import zarr

PLUGINS = {
    "DLIO's": [],
    "Reader": ["reader.reader_classname=scidata.loader.dlio.Reader"],
    "Loader": ["reader.data_loader_classname=scidata.loader.dlio.Loader", "reader.data_loader_sampler=index"],
}
#: Shape of a sample of float32, samples a file, files.
SETS = {"8 MiB, 1 a file": ((128, 128, 128), 1, 64), "256 KiB, 8 a file": ((256, 256), 8, 32)}


EPOCHS = 6
#: Neither DLIO nor MPI, which must not be forked.
IMPORTED = ("torch.utils.data", "pandas", "hydra", "functorch.compile", "scidata.loader.data_loader")


def cpu() -> float:
    """Return the CPU time of this process and of its workers, s."""
    me = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in (me, *me.children(recursive=True)))


def call(out: str, arguments: list[str]) -> None:
    """Run DLIO's command as one rank, and leave the CPU time at the end of each epoch; a file has what it says."""
    with open(f"{out}/log", "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    main = importlib.import_module("dlio_benchmark.main").main
    stats = importlib.import_module("dlio_benchmark.utils.statscounter").StatsCounter
    own, marks = stats.end_epoch, list[float]()

    def end_epoch(self: object, epoch: int = 1) -> None:
        own(self, epoch)
        marks.append(cpu())

    stats.end_epoch = end_epoch
    sys.argv = ["dlio_benchmark", *arguments]
    main()
    Path(f"{out}/{os.getpid()}.cpu").write_text(json.dumps(marks))


def run(folder: Path, form: str, name: str, num_ranks: int, *options: str) -> list[float]:
    """Run DLIO; return samples a second of each epoch, and behind them the CPU time of all but the first, s."""
    shape, per_file, num_files = SETS[name]
    dims = f"[{','.join(map(str, shape))}]"
    said = [
        *(f"dataset.format={form}", f"dataset.data_folder={folder}", f"dataset.num_files_train={num_files}"),
        *("dataset.num_files_eval=0", f"dataset.num_samples_per_file={per_file}", f"dataset.record_dims={dims}"),
        *("dataset.record_element_type=float32", "dataset.num_subfolders_eval=0", "workflow.evaluation=False"),
        f"dataset.num_subfolders_train={int(folder.name.endswith('zarr'))}",
        # batches as large as the samples are: DLIO's readers else give small ones in their place
        *(f"reader.transformed_record_dims={dims}", "reader.transformed_record_element_type=float32"),
        *("reader.batch_size=4", "reader.read_threads=2", "train.computation_time=0"),
        *(f"train.epochs={EPOCHS}", *options),
    ]
    with tempfile.TemporaryDirectory() as out:
        arguments = ["workload=default", f"hydra.run.dir={out}", *(f"++workload.{each}" for each in said)]
        if num_ranks == 1:
            child = multiprocessing.get_context("fork").Process(target=call, args=(out, arguments))
            child.start()
            child.join()
            code = child.exitcode
        else:
            ranks = ["mpirun", "--oversubscribe", "-n", str(num_ranks), sys.executable, __file__, "--call", out]
            code = subprocess.run([*ranks, *arguments], check=False).returncode
        if code:
            sys.exit(Path(out, "log").read_text()[-6000:])
        if "workflow.train=False" in options:
            return []
        found = json.loads(Path(out, "summary.json").read_text())
        marks = [json.loads(path.read_text()) for path in Path(out).glob("*.cpu")]
    seconds = sum(each[-1] - each[0] for each in marks)
    return [*found["metric"]["train_throughput_samples_per_second"], seconds]


def write(folder: Path) -> list[tuple[str, str, Path]]:
    """Have DLIO write its files, and copy those of HDF5 to Zarr; return the set, format and folder of each."""
    made = []
    for name in SETS:
        for form in ("hdf5", "npz"):
            there = folder / f"{name}.{form}".replace(" ", "").replace(",", "-")
            run(there, form, name, 1, "workflow.generate_data=True", "workflow.train=False")
            made.append((name, form, there))
        copies = there.with_suffix(".zarr")
        (copies / "valid").mkdir(parents=True)  # which DLIO lists
        for path in (there.with_suffix(".hdf5") / "train").iterdir():
            with h5py.File(path) as file:
                data = file["records_0"]
                group = zarr.open_group(copies / "train/0" / path.name, mode="w")
                group.create_array("records_0", data=data[:], chunks=(1, *data.shape[1:]), compressors=None)
        made.append((name, "zarr", copies))
    return made


Case = tuple[str, str, Path, str, int]


def show(cases: list[Case], found: list[list[list[float]]]) -> None:
    """Print a table of medians of the runs so far."""
    print("| | format | read by | ranks | first epoch, samples/s | later ones | CPU ms a sample |")
    print("|---|---|---|---|---|---|---|")
    for runs, (name, form, _, plugin, num_ranks) in zip(found, cases, strict=True):
        first = statistics.median(each[0] for each in runs)
        later = statistics.median(x for each in runs for x in each[1:-1])
        samples = (EPOCHS - 1) * SETS[name][1] * SETS[name][2]
        cpu_ms = statistics.median(each[-1] for each in runs) / samples * 1000
        print(f"| {name} | {form} | {plugin} | {num_ranks} | {first:.0f} | {later:.0f} | {cpu_ms:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in IMPORTED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        cases = [
            (name, form, there, plugin, num_ranks)
            for name, form, there in write(Path(folder))
            for num_ranks in args.ranks
            for plugin in PLUGINS
            if form != "zarr" or plugin != "DLIO's"
        ]
        found = [[] for _ in cases]
        for turn in range(1, args.repeats + 1):
            for runs, (name, form, there, plugin, num_ranks) in zip(found, cases, strict=True):
                runs.append(run(there, "npz" if form == "npz" else "hdf5", name, num_ranks, *PLUGINS[plugin]))
            print(f"\nAfter {turn} of {args.repeats} runs", flush=True)  # of one that is stopped, too
            show(cases, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--call"]:
        call(sys.argv[2], sys.argv[3:])
    else:
        main()
