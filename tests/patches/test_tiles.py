"""Tiles put together again: cropped bit for bit, blended as NumPy does, of any ranks, resumed."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

import scidata
from scidata import Patches
from scidata.errors import ConfigError, OutputError
from scidata.testing import make_grid, run_ranks

SIZE, OVERLAP = {"latitude": 7, "longitude": 9}, {"latitude": 3, "longitude": 4}
TILES = Patches(SIZE, order="regular", overlap=OVERLAP)


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("tiles") / "grid.zarr")
    make_grid(path, num_times=3, num_levels=2, num_lat=19, num_lon=24, chunks=(1, 1, 8, 10))
    return path


def _open(path, mesh, periodic):
    split = {"shard": {"latitude": "domain"}, "halo": {"longitude": 1}, "periodic": ["longitude"] if periodic else []}
    return scidata.open_dataset(path, mesh, fields=["u"], patch=TILES, **split)


def _changed(sample, index):
    """A model whose output depends on the tile."""
    return {"u": sample["u"] + float(index)}


def _write(rank, num_ranks, path, out, domain, mode, periodic, tiles=None, fails=False):
    ds = _open(path, scidata.init_mesh(domain=domain), periodic)
    sampler = scidata.DistributedSampler(ds, ds.mesh, shuffle=False, pad=False)
    with scidata.create(out, like=ds, tiles=mode, resume=True) as writer:
        left = set(writer.missing)
        for index in sampler:
            if index in left and (tiles is None or index < tiles):
                writer[index] = _changed(ds[index], index)
        if fails:
            writer.flush()
            raise RuntimeError("killed")


def _oracle(path, mode, periodic):
    """Put the tiles together by NumPy: crop by the nearest middle, or blend by ramps."""
    ds = _open(path, scidata.init_mesh(domain=1), periodic)
    values = [_changed(ds[i], i)["u"].full_tensor().numpy() for i in range(len(ds))]
    shape = ds.reader.partition.sizes
    steps, per = shape["time"], len(ds) // shape["time"]
    found = np.zeros((steps, 2, 19, 24))
    sums = np.zeros((steps, 2, 19, 24))
    starts = {d: sorted({ds.origin(i)[d] for i in range(per)}) for d in SIZE}

    def weights(dim, first):
        rows, size, every = shape[dim], SIZE[dim], starts[dim]
        others = [s + k * rows for s in every for k in ((-1, 0, 1) if periodic and dim == "longitude" else (0,))]
        before, after = (
            max((s for s in others if s < first), default=None),
            min((s for s in others if s > first), default=None),
        )
        w = np.ones(size)
        for j in range(size):
            row = first + j
            if mode == "crop":
                low = -1e9 if before is None else (before + size + first) // 2
                high = 1e9 if after is None else (first + size + after) // 2
                w[j] = low <= row < high
            else:
                if before is not None and row < before + size:
                    w[j] = min(w[j], (j + 1) / (before + size - first + 1))
                if after is not None and row >= after:
                    w[j] = min(w[j], (size - j) / (first + size - after + 1))
        return w

    for index, tile in enumerate(values):
        origin, step = ds.origin(index), index // per
        lat = np.arange(7) + origin["latitude"]
        lon = (np.arange(9) + origin["longitude"]) % 24
        w = np.multiply.outer(weights("latitude", origin["latitude"]), weights("longitude", origin["longitude"]))
        found[step][np.ix_([0, 1], lat, lon)] += w * tile
        sums[step][np.ix_([0, 1], lat, lon)] += w
    assert mode == "blend" or (sums == 1).all()
    return (found / sums).astype("f4")


def _read(out):
    ds = scidata.open_dataset(out, fields=["u"])
    return np.stack([ds[i]["u"].numpy() for i in range(len(ds))])


@pytest.mark.parametrize(("mode", "periodic"), [("crop", False), ("crop", True), ("blend", True)])
def test_put_together_by_any_ranks(grid, tmp_path, mode, periodic):
    wanted = _oracle(grid, mode, periodic)
    for num, domain, name in [(1, 1, "one.zarr"), (3, 3, "three.nc"), (4, 2, "dp.zarr")][periodic:]:
        out = str(tmp_path / name)
        run_ranks(_write, num, grid, out, domain, mode, periodic)
        found = _read(out)
        assert np.array_equal(found, wanted) if mode == "crop" else np.allclose(found, wanted, rtol=1e-6)
        assert not [n for n in os.listdir(tmp_path) if "progress" in n or "unfinished" in n]
        if mode == "blend":
            wanted = found  # bit for bit, whoever adds them up


def test_resumed_on_other_ranks(grid, tmp_path):
    out = str(tmp_path / "out.zarr")
    with pytest.raises(Exception, match="killed"):
        run_ranks(_write, 2, grid, out, 2, "crop", False, 21, True)
    ds = _open(grid, scidata.init_mesh(domain=1), False)
    with pytest.raises(OutputError, match="another output was begun there"):
        scidata.create(out, like=ds, tiles="blend", resume=True)
    run_ranks(_write, 3, grid, out, 1, "crop", False)
    assert np.array_equal(_read(out), _oracle(grid, "crop", False))


def test_what_is_refused(grid, tmp_path):
    mesh = scidata.init_mesh(domain=1)
    ds = _open(grid, mesh, False)
    random = scidata.open_dataset(grid, mesh, fields=["u"], patch=SIZE, shard={"latitude": "domain"})
    whole = scidata.open_dataset(grid, mesh, fields=["u"])
    out = str(tmp_path / "out.zarr")
    for like, options, words in [
        (random, {}, "random patches do not cover the grid"),
        (whole, {"tiles": "crop"}, "are no tiles"),
        (ds, {"tiles": "fade"}, "must be 'crop' or 'blend'"),
        (ds, {"chunks": {"time": 2}}, "chunks of one step"),
        (ds, {"times": 2}, "are not those of 2 steps"),
    ]:
        with pytest.raises(ConfigError, match=words):
            scidata.create(out, like=like, **options)
    with scidata.create(out, like=ds, tiles="crop") as writer:
        with pytest.raises(ConfigError, match=r"has shape \(2, 19, 24\), and a tile has \(2, 7, 9\)"):
            writer[0] = whole[0]
        for first in range(0, len(ds), 4):
            writer[list(range(first, first + 4))] = scidata.collate([ds[i] for i in range(first, first + 4)])
        assert writer.missing == []
        with pytest.raises(OutputError, match="is written already"):
            writer[3] = ds[3]
    assert torch.equal(scidata.open_dataset(out, fields=["u"])[1]["u"], whole[1]["u"].full_tensor())
