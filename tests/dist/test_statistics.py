"""Statistics on real ranks: the same bits on any mesh, errors on all of them; normalised shards, and back."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zarr

import scidata
from scidata.errors import ConfigError, CorruptDataError, RankFailedError
from scidata.testing import make_grid, run_ranks

NAMES = ("count", "missing", "mean", "std", "min", "max")


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("grid") / "grid.zarr")
    wanted = make_grid(path, num_times=9, num_lat=13, num_lon=10, chunks=(4, 2, 5, 10), packed=True)
    group = zarr.open_group(path)
    rng = np.random.default_rng(5)
    orography = rng.normal(300, 500, (13, 10)).astype("f4")
    group.create_array("z", data=orography, chunks=(5, 10), dimension_names=["latitude", "longitude"])
    lake = rng.random(3).astype("f4")  # lies on no dim that is split
    group.create_array("w", data=lake, dimension_names=["level"])
    return path, wanted | {"z": orography, "w": lake}


def bits_of(stats):
    """Every number of some statistics, as text."""
    return {
        name: [
            (values.tobytes().hex(), values.shape)
            for figures in (found, found.differences)
            if figures is not None
            for values in (getattr(figures, figure) for figure in NAMES)
        ]
        for name, found in stats.items()
    }


def alone(path, by, **options):
    return bits_of(scidata.statistics(scidata.open_dataset(path, fields=["u", "t", "z", "w"], **options), by=by))


def together(rank, num_ranks, path, by, mesh_options, options):
    mesh = scidata.init_mesh(device="cpu", **mesh_options)
    ds = scidata.open_dataset(path, mesh, fields=["u", "t", "z", "w"], **options)
    calls = dist.group.WORLD._get_sequence_number_for_group
    before = [mesh.get_group(axis)._get_sequence_number_for_group() for axis in range(mesh.ndim)]
    stats = scidata.statistics(ds, by=by)
    after = [mesh.get_group(axis)._get_sequence_number_for_group() for axis in range(mesh.ndim)]
    # sizes, then the sums: of each axis once
    assert all(b - a <= 4 for a, b in zip(before, after, strict=True)), (before, after, calls())
    return bits_of(stats)


@pytest.mark.parametrize(
    ("num_ranks", "mesh", "options"),
    [
        (1, {"domain": 1}, {}),
        (2, {"domain": 2}, {"halo": {"latitude": 2}}),
        (3, {"domain": 3}, {"halo": {"latitude": (1, 2)}}),
        (3, {"domain": 3}, {"bounds": {"latitude": [0, 9, 9, 13]}, "shard": {"latitude": "domain"}}),
        (3, {"dp": 3, "domain": 1}, {"steps": (0, 1)}),
        (4, {"dp": 2, "domain": 2}, {"halo": 1, "periodic": "latitude"}),
        (
            4,
            {"domain": (2, 2), "names": ("dp", "h", "w")},
            {"shard": {"latitude": "h", "longitude": "w"}, "halo": 1},
        ),
    ],
)
@pytest.mark.parametrize("by", [(), "level", ("level", "latitude")])
def test_the_same_bits_on_any_mesh(grid, num_ranks, mesh, options, by):
    path, _ = grid
    steps = {name: value for name, value in options.items() if name == "steps"}
    wanted = alone(path, by, **steps)
    for found in run_ranks(together, num_ranks, path, by, mesh, options):
        assert found == wanted


def of_irregular(rank, num_ranks, path, kind):
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    ds = scidata.open_dataset(path, mesh, kind=kind, **({"halo": 1} if kind != "points" else {}))
    stats = scidata.statistics(ds)
    normal = ds.normalise(stats, fields=["speed"])
    sample, raw = normal[0], ds[0]
    back = normal.denormalise(sample)
    if kind != "points":
        wanted = (raw.with_ghosts("speed") - float(stats["speed"].mean)) / float(stats["speed"].std)
        torch.testing.assert_close(sample.with_ghosts("speed"), wanted)
        torch.testing.assert_close(back.with_ghosts("speed"), raw.with_ghosts("speed"))
    torch.testing.assert_close(back["speed"].to_local(), raw["speed"].to_local())
    assert torch.equal(sample["pos"].to_local(), raw["pos"].to_local())
    return bits_of(stats)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["graph", "points"])
def test_stores_and_points(tmp_path, num_ranks, kind):
    rng, speeds = np.random.default_rng(3), []
    import h5py

    for number, size in enumerate((40, 7)):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["pos"] = rng.random((size, 3))
            speeds.append(rng.normal(1e6, 1, size))
            file["speed"] = speeds[-1]
            if kind == "graph":
                ids = np.arange(size)
                ring = np.stack([ids, np.roll(ids, 1)])
                file["edge_index"] = np.concatenate([ring, ring[::-1]], axis=1)
    files = [str(tmp_path / f"{number}.h5") for number in range(2)]
    path = files if kind == "points" else str(tmp_path / "graphs.store")
    if kind == "graph":
        scidata.partition(files, path, order="rows")
    wanted = bits_of(scidata.statistics(scidata.open_dataset(path, kind=kind)))
    for found in run_ranks(of_irregular, num_ranks, path, kind):
        assert found == wanted
    stats = scidata.statistics(scidata.open_dataset(path, kind=kind))
    every = np.concatenate(speeds[: len(files)])
    assert stats["speed"].count == len(every)
    np.testing.assert_allclose(stats["speed"].std, every.std(), rtol=1e-12)
    assert stats["speed"].differences is None


def one_fails(rank, num_ranks, path):
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    ds = scidata.open_dataset(path, mesh, fields=["u"], shard={"latitude": "domain"}, bounds="chunk")
    with pytest.raises((CorruptDataError, RankFailedError)) as caught:
        scidata.statistics(ds)
    return type(caught.value).__name__, str(caught.value)


def test_all_ranks_hear_of_one_that_cannot_read(tmp_path):
    path = tmp_path / "grid.zarr"
    make_grid(path, num_times=2, num_lat=12, num_lon=8, chunks=(1, 3, 4, 8))
    for chunk in (path / "u" / "c").glob("*/*/2/*"):
        chunk.write_bytes(b"damaged")
    found = run_ranks(one_fails, 3, str(path))
    assert [name for name, _ in found][:2] == ["RankFailedError"] * 2
    assert "rank 2 failed" in found[0][1]
    assert "'u'" in found[2][1]
    assert found[2][0] == "CorruptDataError"


def asks_differently(rank, num_ranks, path):
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    ds = scidata.open_dataset(path, mesh, fields=["u"])
    with pytest.raises(ConfigError, match="other fields, dims or samples"):
        scidata.statistics(ds, by="level" if rank else ())
    with pytest.raises(ConfigError, match="jobs=2"):
        scidata.statistics(ds, jobs=2)


def test_ranks_that_ask_differently(grid):
    run_ranks(asks_differently, 2, grid[0])


def normalises(rank, num_ranks, path, by, options):
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    ds = scidata.open_dataset(path, mesh, fields=["u", "t"], shard={"latitude": "domain"}, **options)
    stats = scidata.statistics(ds, by=by)
    normal = ds.normalise(stats)
    whole = scidata.open_dataset(path, fields=["u", "t"]).normalise(stats)
    sample, raw, wanted = normal[3], ds[3], whole[3]
    for name in ("u", "t"):
        torch.testing.assert_close(sample[name].full_tensor(), wanted[name], rtol=0, atol=0, equal_nan=True)
        back = normal.denormalise(sample)[name]
        assert isinstance(back, scidata.ShardTensor)
        torch.testing.assert_close(back.to_local(), raw[name].to_local(), equal_nan=True)
        if "latitude" not in by:
            torch.testing.assert_close(back.local_with_halo(), raw[name].local_with_halo(), equal_nan=True)
    # a model's output, with gradients; and a loader's batch, stock workers too
    output = (sample["u"].nan_to_num() * 1.0).detach().requires_grad_()
    total = normal.denormalise({"u": output, "other": output})["u"].sum()
    total.backward()
    std = torch.from_numpy(np.broadcast_to(whole.normalising["u"].scale, wanted["u"].shape).copy())
    torch.testing.assert_close(output.grad.full_tensor(), std.to(output.dtype))
    for batch in scidata.DataLoader(normal, batch_size=2):
        assert torch.equal(batch["u"].nan_to_num().full_tensor()[0], whole[batch.index[0]]["u"].nan_to_num())
        break


@pytest.mark.parametrize("by", [(), ("level",), ("latitude",), ("level", "latitude")])
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(1, {}), (2, {"halo": {"latitude": 2}, "periodic": "latitude"}), (3, {"bounds": [0, 9, 9, 13], "halo": 1})],
)
def test_normalised_shards_and_back(grid, num_ranks, options, by):
    run_ranks(normalises, num_ranks, grid[0], by, options)
