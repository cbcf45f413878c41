"""Ranks that decode for each other: each gets what it would have read, and each chunk is decoded about once."""

import os
import time

import numpy as np
import pytest
import xarray as xr
import zarr

import scidata
from scidata.errors import ConfigError
from scidata.testing import run_ranks

STEPS = 24


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("node")
    rng = np.random.default_rng(0)
    data = {name: rng.normal(size=(STEPS, 30, 40)).astype(np.float32) for name in "uv"}
    for name, chunks in (("fields", (1, 30, 40)), ("steps", (5, 30, 40)), ("tiles", (4, 11, 13))):
        group = zarr.open_group(folder / name, mode="w")
        for field, values in data.items():
            array = group.create_array(
                field,
                shape=values.shape,
                dtype="f4",
                chunks=chunks,
                dimension_names=("time", "lat", "lon"),
                compressors=zarr.codecs.ZstdCodec(),
            )
            array[:] = values
    packed = {"dtype": "i2", "scale_factor": 0.001, "_FillValue": -9999, "zlib": True, "chunksizes": (6, 30, 40)}
    ds = xr.Dataset({name: (("time", "lat", "lon"), values) for name, values in data.items()})
    ds.to_netcdf(folder / "packed", engine="netcdf4", encoding=dict.fromkeys("uv", packed))
    return {name: str(folder / name) for name in ("fields", "steps", "tiles", "packed")}


def epoch(rank, num_ranks, path, shape, names, options, shuffle):
    mesh = scidata.init_mesh(domain=shape, names=names, device="cpu")
    own, shared = (scidata.open_dataset(path, mesh, decode=decode, **options) for decode in ("rank", "node"))
    loader = scidata.DataLoader(shared, 2, shuffle=shuffle)
    for _ in range(2):
        seen = []
        for batch in loader:
            for place, index in enumerate(batch.index):
                expected = own.read_local(index)
                for field in expected:
                    part = batch[field].local_with_halo()[place]
                    assert np.array_equal(part.numpy(), expected[field].numpy(), equal_nan=True), (index, field)
            seen += batch.index
        assert sorted(seen) == list(range(len(shared)))
    return loader.stats()["bytes_decoded"]


CASES = [
    ("fields", (3,), None, {"bounds": {"lat": (0, 4, 4, 30)}, "shard": {"lat": "domain"}}),
    ("steps", (3,), None, {"shard": {"lat": "domain"}, "halo": {"lat": 2}, "periodic": ["lat"], "steps": (0, 2)}),
    ("steps", (2,), None, {"shard": {"lon": "domain"}, "isel": {"lon": slice(39, 3, -2)}}),
    ("tiles", (2, 2), ("dp", "h", "w"), {"shard": {"lat": "h", "lon": "w"}}),
    ("tiles", (3,), None, {"shard": {"lat": "domain"}, "halo": {"lat": 1}}),
    ("packed", (2,), None, {"shard": {"lat": "domain"}}),
    ("packed", (1,), None, {"shard": {"lat": "domain"}}),
]


@pytest.mark.parametrize(("name", "shape", "names", "options"), CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("shuffle", [False, "blocks"])
def test_parts_are_those_of_single_ranks_and_chunks_are_decoded_once(stores, name, shape, names, options, shuffle):
    num_ranks = int(np.prod(shape))
    shape = shape if names else shape[0]
    decoded = run_ranks(epoch, num_ranks, stores[name], shape, names, options, shuffle)
    itemsize = 2 if name == "packed" else 4
    columns = 3 * 4 * 11 * 13 if name == "tiles" else 30 * 40  # whole chunks
    rows = -(-STEPS // {"fields": 1, "steps": 5, "tiles": 4, "packed": 6}[name])
    rows *= {"fields": 1, "steps": 5, "tiles": 4, "packed": 6}[name]
    whole = 2 * 2 * rows * columns * itemsize  # two fields, two epochs
    assert sum(decoded) <= 1.1 * whole
    assert num_ranks == 1 or max(decoded) < whole


def slow_rank(rank, num_ranks, path, marker):
    """The last rank begins its second epoch when the others have ended both."""
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    ds = scidata.open_dataset(path, mesh, shard={"lat": "domain"}, decode="node")
    own = scidata.open_dataset(path, mesh, shard={"lat": "domain"})
    began = time.monotonic()
    for turn in range(2):
        if rank == num_ranks - 1 and turn == 1:
            while sum(name.startswith("done") for name in os.listdir(marker)) < num_ranks - 1:
                assert time.monotonic() < began + 50
                time.sleep(0.01)
        for index in range(len(ds)):
            assert np.array_equal(ds.read_local(index)["u"].numpy(), own.read_local(index)["u"].numpy())
    open(os.path.join(marker, f"done{rank}"), "w").close()


def test_a_rank_that_falls_behind_stops_nobody(stores, tmp_path):
    run_ranks(slow_rank, 3, stores["steps"], str(tmp_path))


def test_arguments(stores):
    with pytest.raises(ConfigError, match=r"decode must be True, False, 'rank' or 'node', not 'nod'.*'node'"):
        scidata.open_dataset(stores["steps"], decode="nod")
    with pytest.raises(ConfigError, match="pool_bytes=0 leaves none"):
        scidata.open_dataset(stores["steps"], decode="node", pool_bytes=0)
    assert len(scidata.open_dataset(stores["steps"], decode="node")) == STEPS
