"""Joins on several ranks: each part as its data set has it by itself, cut over its own axes."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
import xarray as xr

import scidata
from scidata.errors import ConfigError, RankFailedError
from scidata.testing import run_ranks

TIMES = np.datetime64("2020-02-28", "ns") + np.arange(12) * np.timedelta64(6, "h")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An analysis in chunks of four steps, a coarse one, and a table of observations with an empty night."""
    path = tmp_path_factory.mktemp("join")
    rng = np.random.default_rng(0)
    for name, num, steps in (("fine", 7, 4), ("coarse", 4, 3)):
        values = rng.random((12, num, 5))
        ds = xr.Dataset(
            {"u": (("time", "lat", "lon"), values), "oro": (("lat", "lon"), values[0])},
            {"time": TIMES, "lat": np.linspace(60, 0, num), "lon": np.arange(5) * 72.0},
        )
        ds.drop_isel(time=3 if num == 4 else 9).to_zarr(
            path / f"{name}.zarr", encoding={"u": {"chunks": (steps, num, 5)}}, consolidated=False
        )
    seconds = np.sort(rng.integers(0, 66 * 3600, 400))
    seconds = seconds[(seconds // 3600 < 24) | (seconds // 3600 >= 30)]
    table = {
        "t": 280 + rng.random(len(seconds)),
        "lat": rng.uniform(0, 60, len(seconds)),
        "lon": rng.uniform(0, 288, len(seconds)),
    }
    obs = xr.Dataset(
        {name: ("obs", x) for name, x in table.items()}
        | {"dates": ("obs", TIMES[0] + seconds * np.timedelta64(1, "s"))}
    )
    obs.to_zarr(
        path / "obs.zarr", encoding={"dates": {"units": "seconds since 2020-01-01", "dtype": "i8"}}, consolidated=False
    )
    return path


def opened(folder: Path, mesh: object, **options: object) -> dict[str, object]:
    fine = scidata.open_dataset(
        folder / "fine.zarr", mesh, shard={"lat": "domain"}, halo={"lat": 1}, steps=(0, 1), **options
    )
    coarse = scidata.open_dataset(folder / "coarse.zarr", mesh, dtype=torch.float32, **options)
    obs = scidata.open_dataset(
        folder / "obs.zarr", mesh, kind="points", time="dates", window="6h", every="6h", positions=("lat", "lon")
    )
    return {"fine": fine, "coarse": coarse, "obs": obs}


KEYS = {"fine": "time", "coarse": "time", "obs": "dates"}


def same(rank: int, num_ranks: int, folder: Path) -> list[tuple[str, int]]:
    """Hold every part against the data sets by themselves; return the windows that it has."""
    mesh = scidata.init_mesh(domain=num_ranks)
    parts = opened(folder, mesh)
    ds = scidata.join(parts, on=KEYS, at={"obs": "-6h"})
    copy = pickle.loads(pickle.dumps(ds))  # as a worker of torch's loader has it
    found = []
    for shuffle in (False, True, "blocks"):
        for batch in scidata.DataLoader(ds, None, shuffle=shuffle):
            times = {name: x.sample_keys(KEYS[name]) for name, x in parts.items()}
            own = {name: parts[name][int(np.flatnonzero(times[name] == key)[0])] for name, key in (
                ("fine", batch.key), ("coarse", batch.key), ("obs", batch.key - np.timedelta64(6, "h"))
            )}  # fmt: skip
            for sample in (batch, ds.assemble(scidata.collate(copy[batch.index]))):
                for name, part in sample.items():
                    for field, x in part.items():
                        local, wanted = x.to_local(), own[name][field].to_local()
                        assert torch.equal(local, wanted)
                        assert local.dtype == wanted.dtype
                assert torch.equal(sample["fine"]["u"].local_with_halo(), own["fine"]["u"].local_with_halo())
                assert (
                    sample["obs"].original_id("point").to_local().tolist()
                    == own["obs"].original_id("point").to_local().tolist()
                )
            if not shuffle:
                found.append((str(batch.key), len(batch["obs"]["t"].to_local())))
    return found


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_parts_are_those_of_the_data_sets(folder: Path, num_ranks: int) -> None:
    found = run_ranks(same, num_ranks, folder)
    six = np.timedelta64(6, "h")
    fine, coarse = (
        {*xr.open_zarr(folder / f"{n}.zarr", consolidated=False)["time"].values} for n in ("fine", "coarse")
    )
    dates = xr.open_zarr(folder / "obs.zarr", consolidated=False)["dates"].values
    windows = pd.Series(1, dates).resample("6h").sum()
    wanted = {str(t): windows[t - six] for t in fine & coarse if t + six in fine and t - six in windows.index}
    assert {key: sum(own[i][1] for own in found) for i, (key, _) in enumerate(found[0])} == wanted
    assert 0 in wanted.values()


def axes(rank: int, num_ranks: int, folder: Path) -> None:
    mesh = scidata.init_mesh(domain=(1, 2), names=("dp", "h", "w"))
    fine = scidata.open_dataset(folder / "fine.zarr", mesh, shard={"lat": "w"}, fields=["u"])
    coarse = scidata.open_dataset(folder / "coarse.zarr", mesh, shard={"lon": "w", "lat": "h"}, fields=["u"])
    ds = scidata.join({"fine": fine, "coarse": coarse}, on="time")
    for batch in scidata.DataLoader(ds, 3):
        assert tuple(batch["fine"]["u"].to_local().shape)[1:] == ((4, 3)[rank], 5)
        assert tuple(batch["coarse"]["u"].to_local().shape)[1:] == (4, (3, 2)[rank])
    other = scidata.open_dataset(folder / "coarse.zarr", scidata.init_mesh(domain=2))
    with pytest.raises(ConfigError, match="data sets fine and other were opened with other meshes"):
        scidata.join({"fine": fine, "other": other}, on="time")


def node(rank: int, num_ranks: int, folder: Path) -> int:
    parts = opened(folder, scidata.init_mesh(domain=num_ranks), decode="node")
    loader = scidata.DataLoader(scidata.join({n: parts[n] for n in ("fine", "coarse")}, on="time"), 2, shuffle="blocks")
    seen = [i for batch in loader for i in batch.index]
    assert len(seen) == 8
    dist.barrier()
    return loader.stats()["bytes_decoded"]


def told(rank: int, num_ranks: int, folder: Path) -> None:
    parts = opened(folder, scidata.init_mesh(domain=num_ranks))
    ds = scidata.join(parts, on=KEYS, at={"obs": "-6h" if rank else "-12h"})
    with pytest.raises((ConfigError, RankFailedError), match="which keys"):
        list(scidata.DataLoader(ds, None))


def all_of_two(rank: int, num_ranks: int, folder: Path) -> int:
    axes(rank, num_ranks, folder)
    told(rank, num_ranks, folder)
    return node(rank, num_ranks, folder)


def test_axes_node_decoding_and_ranks_that_differ(folder: Path) -> None:
    decoded = run_ranks(all_of_two, 2, folder)
    sizes = 8 * 5 * (7 * 12 + 4 * 12)  # of whole chunks, each decoded by one of the ranks
    assert sum(decoded) <= sizes + 2 * 8 * 5 * 7 + 8 * 5 * 11
