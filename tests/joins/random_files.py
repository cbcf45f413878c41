"""Random joins of data sets that are read: every value, in all orders, stopped and resumed on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xarray as xr

import scidata
from scidata.data.joined_sample import JoinedSample
from scidata.testing import run_ranks

ROWS = 40
GRIDS = {"fine": (7, 1), "deep": (6, 5), "coarse": (4, 7)}  # latitudes, steps of a chunk
COUNTS = {
    "cloud": [3 + k * 7 % 11 for k in range(ROWS)],
    "obs": [(k * 5 + 4) % 9 for k in range(ROWS - 1)] + [2],  # windows of a table, some of them empty
}
LONS = np.arange(3)
MESHES = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3)]  # ranks of dp, of the domain


def write(folder: Path) -> None:
    """Write the data sets of all trials: each value says its row and place."""
    for name, (num, steps) in GRIDS.items():
        values = np.arange(ROWS)[:, None, None] * 1000.0 + np.arange(num)[:, None] * 10 + LONS
        ds = xr.Dataset(
            {"u": (("time", "lat", "lon"), values), "oro": (("lat",), np.arange(num) * 2.0)},
            {"time": np.arange(ROWS), "lat": np.arange(num), "lon": LONS},
        )
        ds.to_zarr(folder / f"{name}.zarr", encoding={"u": {"chunks": (steps, num, 3)}}, consolidated=False)
    (folder / "clouds").mkdir()
    for k, num in enumerate(COUNTS["cloud"]):
        with h5py.File(folder / "clouds" / f"{k:03}.h5", "w") as file:
            file["pos"], file["v"] = np.random.default_rng(k).random((num, 3)), k * 100.0 + np.arange(num)
    hours = np.repeat(np.arange(ROWS) * 10, COUNTS["obs"])
    rows = {
        "hour": hours,
        "x": hours * 0.1,
        "y": hours * 0.2,
        "v": np.concatenate([*map(np.arange, COUNTS["obs"])]) * 1.0,
    }
    xr.Dataset({name: ("row", values) for name, values in rows.items()}).to_zarr(
        folder / "obs.zarr", consolidated=False
    )
    scidata.partition(str(folder / "clouds" / "*.h5"), folder / "cloud", kind="points", order="rows")


class Trial:
    """Which rows of which data sets, with which keys, in which order, by a seed."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.seed = seed
        names = list(rng.permutation([*GRIDS, *COUNTS])[: rng.integers(2, 5)])
        self.left = bool(rng.random() < 0.5)
        if self.left:
            names = [names[0], *(name for name in COUNTS if name != names[0])]
        self.rows, self.keys = {}, {}
        for name in map(str, names):
            self.rows[name] = rng.choice(ROWS, rng.integers(15, ROWS), replace=False)
            if rng.random() < 0.5:
                self.rows[name].sort()
            self.keys[name] = rng.choice(ROWS + 5, len(self.rows[name]), replace=name == names[0])
        where = {name: dict(zip(k.tolist(), self.rows[name].tolist(), strict=True)) for name, k in self.keys.items()}
        first, *others = names
        self.wanted = []  # of each sample: its key, and the row of each data set
        for key, row in zip(self.keys[first].tolist(), self.rows[first].tolist(), strict=True):
            found = {str(name): where[name].get(key, -1) for name in others}
            if self.left or min(found.values()) >= 0:
                self.wanted.append((key, {str(first): row} | found))
        self.shuffle = [False, True, "blocks" if GRIDS.keys() & self.rows.keys() else True][rng.integers(3)]
        self.batch = int(rng.integers(1, 5))
        self.workers = int(rng.integers(0, 3))
        self.stop = int(rng.integers(1, 4))

    def open(self, folder: Path, mesh: Any) -> Any:
        parts = {}
        for name, rows in self.rows.items():
            more = {"shard": {"lat": "domain"}} if name in GRIDS and mesh is not None else {}
            if name == "obs":
                more = {"kind": "points", "time": "hour", "window": 10, "every": 10, "positions": ("x", "y")}
            path = folder / (name if name == "cloud" else f"{name}.zarr")
            parts[name] = scidata.subset(scidata.open_dataset(path, mesh, **more), rows)
        return scidata.join(parts, on=self.keys, how="left" if self.left else "inner")

    def check(self, batch: JoinedSample, place: int, num_parts: int) -> None:
        """Hold the values of a batch against what was written."""
        wanted = [self.wanted[i] for i in batch.index]
        assert batch.key.tolist() == [key for key, _ in wanted]
        for name, part in batch.items():
            rows = np.array([own[name] for _, own in wanted])
            assert part.index == batch.index
            if name in COUNTS:
                numbers = part["batch"].to_local().numpy()
                own = part.original_id("point").to_local().numpy()
                if name == "obs":  # rows of the table: of the window those after its first
                    own = own - np.cumsum([0, *COUNTS[name]])[rows[numbers]]
                wanted_v = own + rows[numbers] * (100 if name == "cloud" else 0)
                assert np.array_equal(part["v"].to_local().numpy(), wanted_v)
                assert part.index_map("point").num_global == sum(COUNTS[name][row] for row in rows if row >= 0)
                continue
            lats = np.array_split(np.arange(GRIDS[name][0]), num_parts)[place]
            u, oro = (part[field].to_local().numpy() for field in ("u", "oro"))
            assert np.array_equal(u, rows[:, None, None] * 1000.0 + lats[:, None] * 10 + LONS)
            assert np.array_equal(oro, np.broadcast_to(lats * 2.0, (len(rows), len(lats))))


def read(
    rank: int, num_ranks: int, folder: Path, seeds: list[int], dp: int, states: list[Any]
) -> list[tuple[list[list[int]], Any]]:
    """Read each trial for some batches, or from a state to its end; return the samples, and the state."""
    mesh, found = scidata.init_mesh(dp=dp, domain=num_ranks // dp), []
    place = mesh.get_local_rank("domain")
    for seed, state in zip(seeds, states, strict=True):
        trial = Trial(seed)
        loader = scidata.DataLoader(
            trial.open(folder, mesh), trial.batch, shuffle=trial.shuffle, num_workers=trial.workers
        )
        loader.set_epoch(seed % 3)
        if state is not None:
            loader.load_state_dict(state)
        had = []
        for batch in loader:
            trial.check(batch, place, num_ranks // dp)
            had.append(batch.index)
            if state is None and len(had) == trial.stop:
                break
        found.append((had, loader.state_dict()))
    return found


def run(folder: Path, seeds: list[int], first: tuple[int, int], then: tuple[int, int]) -> None:
    """Read trials on some ranks, and the rest of them on others; hold the order against the sampler's."""
    seeds = [seed for seed in seeds if Trial(seed).wanted]
    states, seen = [None] * len(seeds), [[] for _ in seeds]
    for dp, domain in (first, then):
        results = run_ranks(read, dp * domain, folder, seeds, dp, states, timeout=300)
        for number, of_ranks in enumerate(zip(*results, strict=True)):
            assert all(had == of_ranks[rank - rank % domain][0] for rank, (had, _) in enumerate(of_ranks))
            steps = zip(*[had for had, _ in of_ranks[::domain]], strict=True)
            seen[number] += [i for step in steps for row in zip(*step, strict=True) for i in row]
        states = [state for _, state in results[0]]
    for seed, had in zip(seeds, seen, strict=True):
        trial = Trial(seed)
        ds = trial.open(folder, None)
        assert len(ds) == len(trial.wanted)
        if trial.shuffle == "blocks":  # in lanes, of which the number is that of the first ranks
            assert sorted(set(had)) == list(range(len(ds))), f"seed {seed}"
            continue
        sampler = scidata.DistributedSampler(ds, shuffle=trial.shuffle)
        sampler.set_epoch(seed % 3)
        order = list(sampler)
        assert had[: len(order)] == order, f"seed {seed}"
