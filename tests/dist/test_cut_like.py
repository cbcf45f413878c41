"""Points that follow the cut of a grid: each rank has those in its part, and interpolation sends nothing."""

import itertools

import h5py
import numpy as np
import pytest
import torch
import zarr

import scidata
from scidata.errors import SciDataError
from scidata.shard.comm.transport import count_sent
from scidata.testing import make_grid, run_ranks

NUM = 300


def write(folder):
    """A grid and observations of two days, sorted by time, of which the first window is empty in the north."""
    make_grid(f"{folder}/grid.zarr", num_times=2, num_levels=2, num_lat=13, num_lon=16)
    rng = np.random.default_rng(0)
    group = zarr.open_group(f"{folder}/obs.zarr", mode="w")
    minutes = np.sort(rng.integers(0, 2 * 1440, NUM))
    columns = {
        "minutes": minutes,
        "dates": np.datetime64("2020-01-01") + minutes.astype("m8[m]").astype("m8[s]"),
        "lat": rng.random(NUM) * 180 - 90,
        "lon": rng.random(NUM) * 720 - 360,
        "value": np.arange(NUM, dtype="f4"),
    }
    columns["lat"][minutes < 720] = -50
    columns["dates"] = (columns["dates"] - np.datetime64("1970-01-01")).astype("m8[s]").astype("i8")
    for name, values in columns.items():
        array = group.create_array(name, data=values, chunks=(64,), dimension_names=["obs"])
        units = {"dates": "seconds since 1970-01-01", "lat": "degrees_north", "lon": "degrees_east"}
        array.attrs.update({"units": units[name]} if name in units else {})
    with h5py.File(f"{folder}/cloud.h5", "w") as file:
        for name in ("lat", "lon", "value"):
            file[name] = columns[name]
            file[name].attrs["units"] = {"lat": "degrees_north", "lon": "degrees_east"}.get(name, "1")
    np.savez(f"{folder}/columns.npz", **columns)


def opened(folder, mesh, shard, halo, **windows):
    grid = scidata.open_dataset(
        f"{folder}/grid.zarr",
        mesh,
        kind="grid",
        fields=["t"],
        shard=shard,
        halo=halo,
        periodic=[*{"longitude"} & {*halo}],
    )
    how = {"kind": "points", "positions": ("lon", "lat"), "cut_like": grid}
    return (
        grid,
        scidata.open_dataset(f"{folder}/obs.zarr", mesh, **how, **windows),
        scidata.open_dataset(f"{folder}/cloud.h5", mesh, **how),
    )


def follows(rank, num_ranks, folder, shape):
    mesh = scidata.init_mesh(domain=shape, dp=1, device="cpu")
    names = ("latitude", "longitude") if isinstance(shape, tuple) else ("latitude",)
    axes = ("h", "w") if isinstance(shape, tuple) else ("domain",)
    halo = dict.fromkeys(names, (0, 1))
    columns = np.load(f"{folder}/columns.npz")
    minutes = columns["minutes"]
    for order in itertools.permutations(names):
        grid, windows, cloud = opened(
            folder, mesh, dict(zip(order, axes, strict=True)), halo, time="minutes", window=720
        )
        coords = grid.coordinate("latitude"), grid.coordinate("longitude")
        field = grid[1]["t"]
        whole = field.full_tensor()
        samples = [(windows[i], minutes // 720 == i) for i in range(len(windows))] + [(cloud[0], minutes >= 0)]
        assert len(windows) == 4
        seen = []
        for sample, rows in samples:
            assert len(sample["value"]) == rows.sum()
            at = sample["pos"].flip(1)
            before = count_sent()
            found = scidata.interpolate(field, at, coords, period=(0, 360), outside=("clip", "nan"))
            # of a 1-D domain one agreement, and of two axes one of all ranks
            assert count_sent() - before <= 4 * 8 * (num_ranks - 1)
            places = sample["pos"].full_tensor()
            expected = scidata.interpolate(whole, places.flip(1), coords, period=(0, 360), outside=("clip", "nan"))
            assert torch.equal(found.full_tensor(), expected)
            ids = sample.original_id("point").full_tensor()
            assert sorted(ids.tolist()) == np.flatnonzero(rows).tolist()
            assert torch.equal(places, torch.from_numpy(np.stack([columns["lon"], columns["lat"]], 1)[ids]))
            assert torch.equal(sample["value"].full_tensor(), torch.from_numpy(columns["value"][ids]))
            seen.append(len(sample["value"].to_local()))
        plan = cloud.plan(0, rank)
        assert plan.fields["pos"]
        assert plan.bytes_wanted == NUM * 16 + seen[-1] * 20
    if num_ranks == 3:
        assert (seen[0] == 0) == (rank < 2)  # the first window lies in the south


@pytest.mark.parametrize("shape", [1, 2, 3, (2, 2)])
def test_points_follow_a_grid(shape, tmp_path):
    write(tmp_path)
    run_ranks(follows, int(np.prod(shape)), str(tmp_path), shape)


def by_coordinate(rank, num_ranks, folder):
    mesh = scidata.init_mesh(domain=num_ranks, dp=1, device="cpu")
    how = {"kind": "points", "positions": ("lon", "lat")}
    cloud = scidata.open_dataset(f"{folder}/cloud.h5", mesh, cut_like={"lat": [90, 10, -90]}, fields=["value"], **how)
    lat = np.load(f"{folder}/columns.npz")["lat"]
    assert cloud[0]["value"].to_local().tolist() == np.flatnonzero((lat >= 10) == (rank == 0)).tolist()
    assert cloud.counts("point").tolist() == [NUM]
    grid = scidata.open_dataset(f"{folder}/grid.zarr", mesh, kind="grid", shard={"level": "domain"})
    for message, options in [
        ("split along 'level'", {"cut_like": grid}),
        ("cut_like is a IrregularDataset", {"cut_like": cloud}),
        ("no coordinate 'level'", {"cut_like": {"level": [0, 1, 2]}}),
        ("did you mean 'latitude'", {"cut_like": {"latitud": [90, 0, -90]}}),
        ("a grid in 3 parts, for a domain of 2 ranks", {"cut_like": {"lat": [90, 0, -10, -90]}}),
        ("weights", {"cut_like": {"lat": [90, 0, -90]}, "weights": "value"}),
    ]:
        with pytest.raises(SciDataError, match=message):
            scidata.open_dataset(f"{folder}/cloud.h5", mesh, **how, **options)
    patches = scidata.open_dataset(
        f"{folder}/grid.zarr", mesh, kind="grid", shard={"latitude": "domain"}, patch={"latitude": 4, "longitude": 4}
    )
    with pytest.raises(SciDataError, match="are patches"):
        scidata.open_dataset(f"{folder}/cloud.h5", mesh, **how, cut_like=patches)
    with pytest.raises(SciDataError, match="means nothing for a grid"):
        scidata.open_dataset(f"{folder}/grid.zarr", mesh, cut_like={"lat": [90, 0, -90]})
    assert scidata.statistics(cloud)["value"].mean == pytest.approx((NUM - 1) / 2)
    grid, windows, _ = opened(folder, mesh, {"latitude": "domain"}, {"latitude": (0, 1)}, time="dates", window="6h")
    both = scidata.join({"grid": grid, "obs": windows}, on={"grid": "time", "obs": "dates"})
    assert [len(sample["obs"]["value"]) for sample in both] == [len(windows[i]["value"]) for i in range(2)]
    batch = scidata.collate([both[0], both[1]])
    coords, fields, points = (
        (grid.coordinate("latitude"), grid.coordinate("longitude")),
        batch["grid"]["t"],
        batch["obs"],
    )
    found = scidata.interpolate(fields[:, 0], points["pos"].flip(1), coords, period=(0, 360), outside=("clip", "nan"))
    found, of = found.gather(0, points["batch"][None])[0].full_tensor(), points["batch"].full_tensor()
    places = points["pos"].full_tensor().flip(1)
    for number, whole in enumerate(fields[:, 0].full_tensor()):
        expected = scidata.interpolate(whole, places[of == number], coords, period=(0, 360), outside=("clip", "nan"))
        assert torch.equal(found[of == number], expected)
    loader = scidata.DataLoader(cloud, num_workers=1)
    for batch in loader:
        assert sorted(batch["value"].full_tensor().tolist()) == list(range(NUM))


def test_ends_of_parts_and_messages(tmp_path):
    write(tmp_path)
    run_ranks(by_coordinate, 2, str(tmp_path))
