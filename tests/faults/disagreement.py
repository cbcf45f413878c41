"""Each thing that may differ by mistake between ranks that share samples: is it named on all of them, and how soon?

    python -m tests.faults.disagreement

Ranks, 2 and 3 of them, go through epochs of 1, 2 and 50 steps, with a collective in each, and pause in it or not. The
last rank has another argument, order or file. All must raise a ``ConfigError`` with what differs and both values, no
later than at the end of the epoch, and what is an argument or a file before the first batch; nobody may hang, and the
groups must be of use afterwards. Prints what was amiss; exits with 1 where anything was.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, RandomSampler

import scidata
from scidata.errors import ConfigError
from scidata.testing import make_grid, run_ranks

STEPS = (1, 2, 50)
LONGEST = 5.0  # s that a case may take on a machine with other work


def grid(**odd: Any) -> Callable[..., Any]:
    """Return what makes a loader of a grid whose odd rank has other arguments of ``open_dataset``."""

    def make(mesh: Any, folder: Path, is_odd: bool, steps: int) -> Any:
        options = {"fields": ["u"], "halo": 1, "shard": {"latitude": "domain"}, "isel": {"time": slice(0, steps)}}
        ds = scidata.open_dataset(folder / "grid", mesh, **(options | odd if is_odd else options))
        return scidata.DataLoader(ds, 1)

    return make


def content(name: str, **options: Any) -> Callable[..., Any]:
    """Return what makes a loader of a file behind whose path the odd rank finds another one, of the same layout."""

    def make(mesh: Any, folder: Path, is_odd: bool, steps: int) -> Any:
        ds = scidata.open_dataset(folder / ("new" if is_odd else "old") / name, mesh, **options)
        return scidata.DataLoader(scidata.subset(ds, np.arange(steps) % len(ds)), 1)

    return make


def loader(same: dict[str, Any], odd: dict[str, Any]) -> Callable[..., Any]:
    """Return what makes a loader whose odd rank has other arguments."""

    def make(mesh: Any, folder: Path, is_odd: bool, steps: int) -> Any:
        ds = scidata.open_dataset(folder / "grid", mesh, fields=["u"], isel={"time": slice(0, steps)})
        given = {
            name: value(ds, mesh) if callable(value) else value for name, value in (odd if is_odd else same).items()
        }
        return scidata.DataLoader(ds, **({"batch_size": 1} | given))

    return make


def rows(**odd: Any) -> Callable[..., Any]:
    """Return what makes a loader of a store whose odd rank has other arguments of ``open_dataset``."""

    def make(mesh: Any, folder: Path, is_odd: bool, steps: int) -> Any:
        ds = scidata.open_dataset(folder / "store", mesh, **({"fields": ["u"]} | (odd if is_odd else {})))
        return scidata.DataLoader(scidata.subset(ds, np.arange(steps) % len(ds)), 1)

    return make


def epoch(mesh: Any, folder: Path, is_odd: bool, steps: int) -> Any:
    """Return a loader whose odd rank has not set the epoch."""
    made = loader({"shuffle": True}, {"shuffle": True})(mesh, folder, is_odd, steps)
    made.set_epoch(0 if is_odd else 3)
    return made


def normalised(mesh: Any, folder: Path, is_odd: bool, steps: int) -> Any:
    """Return a loader whose odd rank normalises."""
    ds = scidata.open_dataset(folder / "grid", mesh, fields=["u"], isel={"time": slice(0, steps)})
    stats = scidata.statistics(scidata.open_dataset(folder / "grid", fields=["u"], isel={"time": slice(0, 2)}))
    return scidata.DataLoader(ds.normalise(stats) if is_odd else ds, 1)


def order(mesh: Any, folder: Path, is_odd: bool, steps: int) -> Any:
    """Return a loader whose sampler is torch's, seeded by rank."""
    ds = scidata.open_dataset(folder / "grid", mesh, fields=["u"], isel={"time": slice(0, steps)})
    torch.manual_seed(int(is_odd))
    return scidata.DataLoader(ds, 1, sampler=RandomSampler(ds))


def tail(mesh: Any, folder: Path, is_odd: bool, steps: int) -> Any:
    """Return a loader whose order differs in the last sample, which nobody has asked for before the first batch."""
    ds = scidata.open_dataset(folder / "grid", mesh, fields=["u"])
    return scidata.DataLoader(ds, 1, sampler=[*range(steps - 1), 40 + is_odd], num_workers=0)


def lengths(mesh: Any, folder: Path, is_odd: bool, steps: int) -> Any:
    """Return a loader whose sampler has no length, and one sample less on the odd rank."""
    ds = scidata.open_dataset(folder / "grid", mesh, fields=["u"])

    class Some:
        def __iter__(self) -> Any:
            return iter(range(steps - is_odd))

    return scidata.DataLoader(ds, 1, sampler=Some())


def doubled(sample: Any) -> Any:
    """Return a sample with twice the values."""
    return sample.replace({"u": sample["u"] * 2})


def in_place(part: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Do nothing."""
    return part


def first_half(batch: Any) -> Any:
    """Return the first sample of a batch."""
    return scidata.collate(batch[:1])


#: By name: what makes the loader of a rank, and a word of the message.
ARGUMENTS: dict[str, tuple[Callable[..., Any], str]] = {
    "fields": (grid(fields=["v"]), "fields is u on"),
    "more fields": (grid(fields=["u", "t"]), "fields is u on"),
    "dtype": (grid(dtype=torch.float64), "dtype is None on"),
    "bfloat16": (grid(dtype=torch.bfloat16), "dtype is None on"),
    "halo": (grid(halo=2), "halo is"),
    "periodic": (grid(periodic=["latitude"]), "periodic is"),
    "steps": (grid(steps=(0, 1), isel={"time": slice(0, 50)}), "steps is (0,) on"),
    "shard": (grid(shard={"longitude": "domain"}), "shard is"),
    "weights": (grid(weights=np.arange(1.0, 13.0)), "bounds is"),
    "isel": (grid(isel={"time": slice(0, 1), "longitude": slice(0, 8)}), "isel is"),
    "other times": (grid(isel={"time": slice(1, 2)}), "is"),
    "decode": (grid(decode=False), "decode is True on"),
    "transform": (grid(transform=doubled), "transform is None on"),
    "local_transform": (grid(local_transform=in_place), "local_transform is None on"),
    "coords": (grid(coords=True), "coords is False on"),
    "normalise": (normalised, "normalise is None on"),
    "batch_size": (loader({}, {"batch_size": 2}), "batch_size is 1 on"),
    "no batches": (loader({}, {"batch_size": None}), "batch_size is 1 on"),
    "shuffle": (loader({"shuffle": True}, {"shuffle": False}), "shuffle is True on"),
    "shuffle on one": (loader({}, {"shuffle": True}), "shuffle is False on"),
    "drop_last": (loader({}, {"drop_last": True}), "drop_last is False on"),
    "on_error": (loader({}, {"on_error": "skip"}), "on_error is raise on"),
    "collate_fn": (loader({}, {"collate_fn": lambda ds, mesh: first_half}), "collate_fn is"),
    "seed": (
        loader(
            {"sampler": scidata.DistributedSampler},
            {"sampler": lambda ds, mesh: scidata.DistributedSampler(ds, mesh, seed=1)},
        ),
        "seed is 0 on",
    ),
    "sampler": (loader({}, {"sampler": lambda ds, mesh: range(len(ds))}), "the sampler is DistributedSampler on"),
    "batch_sampler": (
        loader({}, {"batch_size": 1, "batch_sampler": lambda ds, mesh: BatchSampler(range(len(ds)), 1, False)}),
        "the sampler is",
    ),
    "epoch": (epoch, "epoch is 3 on"),
    "torch's seed": (order, "the seed of torch's RandomSampler is"),
    "fields of rows": (rows(fields=["pos"]), "fields is u on"),
    "dtype of rows": (rows(dtype=torch.float64), "dtype is None on"),
    "halo of rows": (rows(halo=0.3, ghosts="exchange"), "halo is"),
    "ghosts of rows": (rows(halo=0.3), "ghosts is exchange on"),
    "bounds of rows": (rows(weights="u"), "bounds of sample"),
    "subsample of rows": (rows(subsample={"point": 8}), "subsample is None on"),
    "zarr": (content("grid.zarr"), "stored bytes of"),
    "hdf5": (content("grid.h5"), "stored bytes of"),
    "netcdf3": (content("grid.nc"), "stored bytes of"),
    "raw points": (content("points.h5", kind="points"), "stored bytes of"),
    "store": (content("store"), "the values is"),
}
#: What is found at the end of an epoch at the latest.
ORDERS: dict[str, tuple[Callable[..., Any], str]] = {"tail": (tail, "[40]"), "lengths": (lengths, "")}
#: What may differ.
ALIKE: dict[str, Callable[..., Any]] = {
    "num_workers": loader({}, {"num_workers": 0, "prefetch_factor": None}),
    "prefetch_factor": loader({}, {"prefetch_factor": 5}),
    "pin_memory": loader({}, {"pin_memory": True}),
    "timeout": loader({}, {"timeout": 50}),
    "num_threads": grid(num_threads=0),
    "pool_bytes": grid(pool_bytes=0),
    "the halo in other words": grid(halo={"latitude": (1, 1)}),
    "a copy elsewhere": lambda mesh, folder, is_odd, steps: scidata.DataLoader(
        scidata.subset(scidata.open_dataset(folder / ("copy" if is_odd else "grid"), mesh), range(steps)), 1
    ),
}


def write(folder: Path) -> None:
    """Write what the cases read."""
    make_grid(folder / "grid", num_times=52, num_lat=12, num_lon=16)
    shutil.copytree(folder / "grid", folder / "copy")
    for seed, name in enumerate(("old", "new")):
        (folder / name).mkdir()
        for file, kind in (("grid.zarr", "zarr3"), ("grid.h5", "hdf5"), ("grid.nc", "netcdf3")):
            make_grid(folder / name / file, format=kind, num_times=2, num_lat=12, num_lon=16, seed=seed)
        clouds = []
        for number in range(3):
            clouds.append(folder / name / ("points.h5" if not number else f"points{number}.h5"))
            random = np.random.default_rng((seed, number))
            with h5py.File(clouds[-1], "w") as file:
                file["pos"], file["u"] = random.random((40, 3)), random.random(40).astype("f4")
        scidata.partition(clouds, folder / name / "store", kind="points")
        shutil.rmtree(folder / "store", ignore_errors=True)
        shutil.copytree(folder / name / "store", folder / "store")


def meets(rank: int, num_ranks: int, folder: Path, names: list[str], steps: int, pause: float) -> list[tuple[str, ...]]:
    """Go through an epoch of each case; return what was amiss."""
    mesh = scidata.init_mesh(domain=num_ranks)
    amiss = []
    for name in names:
        make, words = (ARGUMENTS | ORDERS | {n: (m, "") for n, m in ALIKE.items()})[name]
        made = make(mesh, folder, rank == num_ranks - 1, steps)
        dist.barrier()
        began, had, text = time.monotonic(), 0, ""
        try:
            for batch in made:
                had += 1
                sum(field.sum() for field in batch.values())
                time.sleep(pause)
        except ConfigError as e:
            text = str(e)
        seconds = time.monotonic() - began - had * pause
        if name in ALIKE:
            good = not text and had == steps
        else:
            both = ("rank 0" in text and f"rank {num_ranks - 1}" in text) or "ranks 0, 1" in text
            good = words in text and both and (name in ORDERS or had == 0)
        if not good or seconds > LONGEST:
            amiss.append((name, f"rank {rank} of {num_ranks}, {steps} steps: {had} batches, {seconds:.1f} s", text))
        if name != "lengths":  # where one rank waited for the other in a collective, which is broken
            dist.barrier()
    return amiss


def main() -> int:
    """Try all of it."""
    with tempfile.TemporaryDirectory() as place:
        write(Path(place))
        names = [*ARGUMENTS, *ALIKE, *ORDERS]
        found = []
        for num_ranks, steps, pause in itertools.product((2, 3), STEPS, (0.0, 0.3)):
            chosen = [name for name in names if not (pause and steps == 50 and name in ALIKE)]
            for amiss in run_ranks(meets, num_ranks, Path(place), chosen, steps, pause, timeout=300):
                found += amiss
            print(f"{num_ranks} ranks, {steps} steps, pause {pause} s: {len(chosen)} cases", flush=True)
    for name, where, text in found:
        print(f"{name}: {where}: {text or 'no error'}")
    print(f"{len(found)} amiss")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
