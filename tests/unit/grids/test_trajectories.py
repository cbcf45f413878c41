"""Samples that are times, or windows of them, in each of several trajectories."""

import itertools
import os
import re
import warnings

import h5py
import numpy as np
import pytest
import torch
import zarr

import scidata
from scidata.core.checks import allocate
from scidata.core.options import ReadOptions
from scidata.errors import ConfigError, FieldMismatchError, UnknownNameError
from scidata.grids.blocks.node_shares import NodeRanks
from scidata.grids.blocks.on_node import NodeDecoder
from scidata.grids.plan import plan_grid
from scidata.grids.reader import GridReader
from scidata.grids.staging import Staging

warnings.filterwarnings("ignore", category=zarr.errors.ZarrUserWarning)

DIMS = {"run": 5, "time": 7, "y": 9, "x": 4, "c": 2}
FIELDS = {"u": "run time y x c", "static": "run y x", "forcing": "time y", "mask": "y x"}
RNG = np.random.default_rng(0)
VALUES = {name: RNG.random([DIMS[d] for d in dims.split()], np.float32) for name, dims in FIELDS.items()}


def write(path, layout, values=VALUES):
    """Write all fields, by how chunks lie."""
    if layout.startswith("hdf5"):
        with h5py.File(path, "w") as file:
            for name, data in values.items():
                gzip = {"chunks": tuple(-(-n // 2) for n in data.shape), "compression": "gzip"}
                found = file.create_dataset(name, data=data, **(gzip if layout == "hdf5-gzip" else {}))
                for k, dim in enumerate(FIELDS[name].split()):
                    found.dims[k].label = dim
        return str(path)
    group = zarr.open_group(str(path), mode="w")
    for name, data in values.items():
        dims = FIELDS[name].split()
        chunks = tuple({"run": 2, "time": 3, "y": 4, "x": 4, "c": 1}[d] for d in dims)
        codec = None if layout == "raw" else zarr.codecs.ZstdCodec()
        group.create_array(name, data=data, chunks=chunks, compressors=codec, dimension_names=dims)
    return str(path)


def settle(folder):
    """Make files older: what was written just now is not kept."""
    for file in folder.rglob("*"):
        os.utime(file, (1.7e9,) * 2)


def parts_of(reader, index, num_ranks=3):
    """Read a sample's parts of all ranks, put together."""
    parts = []
    for rank in range(num_ranks):
        here = reader.partition.coordinate(rank)
        out = {n: allocate(n, spec.shape, spec.dtype) for n, spec in reader.buffer_specs(here).items()}
        reader.read_into(index, out, here)
        parts.append(out)
    return {n: np.concatenate([p[n] for p in parts], reader.dims(n).index("y")) for n in reader.fields}


def wanted(run, times, values=VALUES):
    rows = times if len(times) > 1 else times[0]
    return {
        "u": values["u"][run, rows], "static": values["static"][run], "forcing": values["forcing"][rows],
        "mask": values["mask"],
    }  # fmt: skip


def assert_same(found, want):
    for name, values in want.items():
        assert np.array_equal(found[name], values), name


LAYOUTS = ("raw", "zstd", "hdf5", "hdf5-gzip")


@pytest.mark.parametrize("pool_bytes", [0, 1 << 20])
@pytest.mark.parametrize("steps", [(0,), (0, 1), (-1, 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_sample_is_a_window_of_one_trajectory(tmp_path, layout, steps, pool_bytes):
    path = write(tmp_path / "a", layout)
    reader = GridReader(
        path,
        ReadOptions(
            shard={"y": "domain"}, sample_dim=("run", "time"), steps=steps, fields=list(FIELDS), pool_bytes=pool_bytes
        ),
        axis_sizes={"domain": 3},
    )
    firsts = range(-min(0, *steps), DIMS["time"] - max(0, *steps))
    samples = list(itertools.product(range(DIMS["run"]), firsts))
    assert reader.num_samples == len(samples)
    assert reader.dims("u") == (("time",) if len(steps) > 1 else ()) + ("y", "x", "c")
    for i, (run, time) in enumerate(samples):
        assert_same(parts_of(reader, i), wanted(run, [time + s for s in steps]))
    assert_same(parts_of(reader, -1), wanted(4, [firsts[-1] + s for s in steps]))
    with pytest.raises(IndexError, match=f"there are {len(samples)} samples"):
        reader.plan(len(samples))


def test_crops_of_both_dimensions(tmp_path):
    path = write(tmp_path / "a", "zstd")
    reader = GridReader(
        path,
        ReadOptions(
            shard={"y": "domain"},
            sample_dim=("run", "time"),
            steps=(0, 1),
            isel={"run": [4, 0], "time": slice(1, 7, 2), "c": 1},
            fields=list(FIELDS),
        ),
        axis_sizes={"domain": 3},
    )
    assert reader.num_samples == 4
    for i, (run, times) in enumerate([(4, [1, 3]), (4, [3, 5]), (0, [1, 3]), (0, [3, 5])]):
        want = wanted(run, times)
        assert_same(parts_of(reader, i), want | {"u": want["u"][..., 1]})
    one = GridReader(path, ReadOptions(sample_dim=("run", "time"), isel={"run": 3}, shard={}, fields=["u"]))
    assert one.num_samples == 7
    with pytest.raises(ConfigError, match="'run' is the sample dimension and cannot be sharded"):
        GridReader(path, ReadOptions(shard={"run": "domain"}, sample_dim=("run", "time")), axis_sizes={"domain": 2})
    with pytest.raises(ConfigError, match="steps 0,7 reach over more rows than the 7 of 'time'"):
        GridReader(path, ReadOptions(sample_dim=("run", "time"), steps=(0, 7)))
    with pytest.raises(UnknownNameError, match=r"'rum'.*did you mean 'run'"):
        GridReader(path, ReadOptions(sample_dim=("rum", "time")))
    with pytest.raises(ConfigError, match="each dimension once"):
        GridReader(path, ReadOptions(sample_dim=("time", "time")))


def test_three_dimensions_of_samples(tmp_path):
    values = RNG.random((2, 3, 4, 5, 6))
    zarr.create_array(str(tmp_path / "a.zarr/v"), data=values, chunks=(1, 2, 3, 5, 6), dimension_names=list("abtyx"))
    zarr.open_group(str(tmp_path / "a.zarr"))
    reader = GridReader(str(tmp_path / "a.zarr/v"), ReadOptions(sample_dim=list("abt"), shard={}))
    (name,) = reader.fields
    here = reader.partition.coordinate(0)
    out = {name: np.empty((5, 6))}
    assert reader.num_samples == 24
    for i, at in enumerate(np.ndindex(2, 3, 4)):
        reader.read_into(i, out, here)
        assert np.array_equal(out[name], values[at])


def test_files_follow_each_other_along_the_trajectories(tmp_path):
    halves = [{n: v[cut] if "run" in FIELDS[n] else v for n, v in VALUES.items()} for cut in (slice(3), slice(3, None))]
    paths = [write(tmp_path / f"{k}.h5", "hdf5-gzip", half) for k, half in enumerate(halves)]
    reader = GridReader(
        paths,
        ReadOptions(
            shard={"y": "domain"}, sample_dim=("run", "time"), steps=(0, 1), fields=list(FIELDS), pool_bytes=1 << 20
        ),
        axis_sizes={"domain": 3},
    )
    assert reader.num_samples == 5 * 6
    for i, (run, time) in enumerate(itertools.product(range(5), range(6))):
        assert_same(parts_of(reader, i), wanted(run, [time, time + 1]))
    shorter = write(tmp_path / "2.h5", "hdf5", {n: v[:, :5] if n == "u" else v for n, v in VALUES.items() if n == "u"})
    with pytest.raises(FieldMismatchError, match="files of one series must agree"):
        GridReader([paths[0], shorter], ReadOptions(fields=["u"], sample_dim=("run", "time")))


ONCE = 6 * 9 * 12 * 4 * 2 * 4  # bytes of whole chunks of u: three of two runs each, three of three times, …


def check_epoch(loader, steps, chosen):
    """Compare an epoch of samples of the chosen trajectories, each once, with what was written."""
    per_run, found = 7 - steps[-1], []
    for batch in loader:
        for index, u, static in zip(batch.index, batch["u"].numpy(), batch["static"].numpy(), strict=True):
            run, time = divmod(index, per_run)
            rows = slice(time, time + 2) if len(steps) > 1 else time
            assert np.array_equal(u, VALUES["u"][chosen[run], rows])
            assert np.array_equal(static, VALUES["static"][chosen[run]])
            found.append(index)
    assert sorted(found) == list(range(len(chosen) * per_run))


@pytest.mark.parametrize("runs", [slice(None), slice(1, 5), [4, 0, 1]])
@pytest.mark.parametrize("steps", [(0,), (0, 1)])
@pytest.mark.parametrize("pool_bytes", [1 << 20, None])
def test_chunks_of_several_trajectories_are_decoded_once(tmp_path, steps, pool_bytes, runs):
    path = write(tmp_path / "a", "zstd", {n: VALUES[n] for n in ("u", "static")})
    ds = scidata.open_dataset(
        path, fields=["u", "static"], sample_dim=("run", "time"), steps=steps, pool_bytes=pool_bytes, isel={"run": runs}
    )
    chosen = np.arange(5)[runs]
    per_run = 7 - steps[-1]
    together = 3 if not isinstance(runs, list) else len(chosen)  # runs out of order are decoded on their own
    size = 3 if steps == (0,) else 6 if isinstance(runs, slice) else 9  # of windows 8 steps, at least
    last_time = -(-per_run // size)
    assert np.array_equal(np.unique(ds.blocks()), np.arange(together * last_time))
    once = together * (ONCE // 3 + 2 * 12 * 4 * 4)
    for sampler in (None, scidata.DistributedSampler(ds, shuffle="blocks", window=2)):
        loader = scidata.DataLoader(ds, batch_size=3, sampler=sampler)
        for epoch in range(2 if pool_bytes else 1):  # the default need not hold all for another one
            loader.set_epoch(epoch)
            check_epoch(loader, steps, chosen)
        decoded = loader.stats()["bytes_decoded"]
        assert 0 < decoded <= 1.1 * once, decoded / once
        ds.reader.pool.clear()


@pytest.mark.parametrize("runs", [slice(None), slice(1, 5)])
@pytest.mark.parametrize("steps", [(0,), (0, 1)])
@pytest.mark.parametrize("pool_bytes", [0, None])
def test_kept_on_disk_chunks_of_several_trajectories_are_decoded_once(tmp_path, steps, pool_bytes, runs):
    path = write(tmp_path / "a", "zstd", {n: VALUES[n] for n in ("u", "static")})
    settle(tmp_path / "a")
    chosen = np.arange(5)[runs]
    once = 3 * (ONCE // 3 + 2 * 12 * 4 * 4)
    for k, shuffle in enumerate([True, "blocks", False]):
        decoded = []
        for cache in (tmp_path / f"cache{k}", tmp_path / f"cache{k}", tmp_path / "cache0"):
            ds = scidata.open_dataset(
                path, fields=["u", "static"], sample_dim=("run", "time"), steps=steps, pool_bytes=pool_bytes,
                isel={"run": runs}, cache_dir=cache, cache_disk_bytes=1 << 24,
            )  # fmt: skip
            loader = scidata.DataLoader(ds, batch_size=3, sampler=scidata.DistributedSampler(ds, shuffle=shuffle))
            check_epoch(loader, steps, chosen)
            decoded.append(loader.stats()["bytes_decoded"])
        assert 0 < decoded[0] <= 1.1 * once, decoded[0] / once
        assert decoded[1:] == [0, 0]
    kept = {"cache_dir": tmp_path / "cache0", "cache_disk_bytes": 1 << 24}
    other = GridReader(
        path, ReadOptions(fields=["u", "static"], sample_dim=("run", "time"), isel={"run": [3, 1]}, **kept)
    )
    out = {n: np.empty(spec.shape, spec.dtype) for n, spec in other.buffer_specs({}).items()}
    assert [other.read_into(i, out, {}).bytes_decoded for i in range(14)] == [0] * 14
    assert_same(out, {"u": VALUES["u"][1, 6], "static": VALUES["static"][1]})


def test_a_pool_that_does_not_hold_several_trajectories_serves_one(tmp_path):
    path = write(tmp_path / "a", "zstd", {"u": VALUES["u"]})
    room = 4 * 3 * 9 * 8 * 4  # four blocks of one trajectory; of two there are three
    ds = scidata.open_dataset(path, fields=["u"], sample_dim=("run", "time"), pool_bytes=room)
    loader = scidata.DataLoader(ds, batch_size=3)
    for batch in loader:
        for index, u in zip(batch.index, batch["u"].numpy(), strict=True):
            assert np.array_equal(u, VALUES["u"][divmod(index, 7)])
    # apart each chunk is decoded for either trajectory; where reading ahead falls behind, a block is made again; where
    # nothing was kept, it would be 3.9 times
    assert 5 * ONCE // 3 <= loader.stats()["bytes_decoded"] < 3 * ONCE


def test_the_plan_says_what_decodes_each_chunk_once(tmp_path):
    path = write(tmp_path / "a", "zstd", {"u": VALUES["u"]})
    reader = GridReader(path, ReadOptions(sample_dim=("run", "time"), shard={"y": "domain"}), axis_sizes={"domain": 1})
    note = next(note for note in plan_grid(reader, 0).notes if "trajectories" in note)
    assert "chunks hold 3 steps of 2 trajectories" in note
    (in_order,) = re.findall(r"stored order with pool_bytes=([\d_]+)", note)
    for nbytes, most in ((int(in_order), 1.0), (int(in_order) // 2, 2.0)):
        ds = scidata.open_dataset(path, fields=["u"], sample_dim=("run", "time"), pool_bytes=nbytes)
        loader = scidata.DataLoader(ds, batch_size=1)
        for _ in loader:
            pass
        decoded = loader.stats()["bytes_decoded"] / ONCE
        assert decoded <= 1.1 if most == 1.0 else 1.1 < decoded <= most


def test_kept_on_disk_and_staged(tmp_path):
    path = write(tmp_path / "a", "zstd")
    settle(tmp_path / "a")
    options = ReadOptions(
        shard={"y": "domain"}, sample_dim=("run", "time"), steps=(0, 1), fields=list(FIELDS),
        cache_dir=tmp_path / "cache", cache_disk_bytes=1 << 24,
    )  # fmt: skip
    reader = GridReader(path, options, axis_sizes={"domain": 3})
    staging = Staging(reader, [0, 1, 2])
    staged = staging.run()
    assert (staged.written, staged.there) == (staging.num_parts, 0)
    others = 3 * 2 * 12 * 4 * 4 + 3 * 3 * 12 * 4 + 12 * 4 * 4  # chunks of static, forcing and mask
    assert 0 < staged.stats.bytes_decoded <= 1.1 * (ONCE + others)
    assert Staging(GridReader(path, options, axis_sizes={"domain": 3}), [1]).run().written == 0
    again = GridReader(path, options, axis_sizes={"domain": 3})
    for i, (run, time) in enumerate(itertools.product(range(5), range(6))):
        assert_same(parts_of(again, i), wanted(run, [time, time + 1]))
    here = again.partition.coordinate(1)
    out = {n: np.empty(spec.shape, spec.dtype) for n, spec in again.buffer_specs(here).items()}
    assert again.read_into(11, out, here).bytes_decoded == 0


def test_ranks_of_a_node_share_its_chunks(tmp_path):
    path = write(tmp_path / "a", "zstd", {"u": VALUES["u"]})
    ranks = [
        NodeRanks(name=f"t-{tmp_path}", coordinates=tuple({"domain": k} for k in range(3)), me=me, max_bytes=1 << 24)
        for me in range(3)
    ]
    options = ReadOptions(shard={"y": "domain"}, sample_dim=("run", "time"), pool_bytes=1 << 20)
    readers = [GridReader(path, options, axis_sizes={"domain": 3}, node=each) for each in ranks]
    found = np.empty_like(VALUES["u"])
    for i in range(35):
        for k, reader in enumerate(readers):
            here = {"domain": k}
            run, time = divmod((i, 34 - i, (i + 7) % 35)[k], 7)  # one is in a run, others in the next of the same chunk
            out = {n: np.empty(spec.shape, spec.dtype) for n, spec in reader.buffer_specs(here).items()}
            reader.read_into(7 * run + time, out, here)
            found[run, time, slice(*reader.partition.owned_rows("y", here))] = out["u"]
    assert np.array_equal(found, VALUES["u"])
    decoder = readers[0].chain.source
    assert isinstance(decoder, NodeDecoder)
    assert len(decoder._next._jobs) > 0
    readers[0].close()
    assert len(decoder._next._jobs) == 0


def test_a_loader_goes_on_in_the_middle_and_other_crops_have_other_fingerprints(tmp_path):
    path = write(tmp_path / "a", "hdf5")
    ds = scidata.open_dataset(path, fields=["u"], sample_dim=("run", "time"))
    sampler = scidata.DistributedSampler(ds, seed=1)
    loader = scidata.DataLoader(ds, batch_size=4, sampler=sampler)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    left = [batch.index for batch in batches]
    again = scidata.DataLoader(ds, batch_size=4, sampler=scidata.DistributedSampler(ds, seed=1))
    again.load_state_dict(state)
    assert [batch.index for batch in again] == left
    flat = scidata.open_dataset(path, fields=["u"], sample_dim="time", isel={"run": 0})
    assert ds.reader.fingerprint() != flat.reader.fingerprint()


def test_groups_are_trajectories_of_which_no_window_crosses(tmp_path):
    path = str(tmp_path / "swe.h5")
    with h5py.File(path, "w") as file:
        for run in range(3):
            file[f"{run}/u"] = VALUES["u"][run, : 7 - run]
    ds = scidata.open_dataset(f"{path}/*", fields=["u"], steps=(0, 2))
    assert len(ds) == 5 + 4 + 3
    want = [(run, t) for run in range(3) for t in range(5 - run)]
    for i, (run, t) in enumerate(want):
        assert torch.equal(ds[i]["u"], torch.from_numpy(VALUES["u"][run, t : t + 3 : 2]))
    every = scidata.open_dataset(f"{path}/*", fields=["u"], steps=(0, 1), isel={"dim_0": slice(None, None, 2)})
    assert len(every) == 3 + 2 + 1  # of rows 0 2 4 6, 8 10 12, and 14 16 of all three
    with pytest.raises(ConfigError, match="there would be no sample"):
        scidata.open_dataset(f"{path}/*", fields=["u"], steps=(0, 7))
