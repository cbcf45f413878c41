"""Orders by blocks: all samples once, each block by one dp rank, each chunk decoded once; as random as may be."""

from __future__ import annotations

import pickle
import re
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import scidata
from scidata.core.cache import Cache
from scidata.data.order import Order
from scidata.errors import ConfigError
from scidata.grids.blocks import sizes
from scidata.grids.blocks.sizes import KEPT_BLOCKS
from scidata.grids.plan import plan_grid
from scidata.loader.waiting import WaitWatch
from tests.unit.loader._orders import Readable
from tests.unit.loader._resume import place


def order(
    blocks: np.ndarray, lanes: int, epoch: int = 0, seed: int = 0, stretches: np.ndarray | None = None
) -> np.ndarray:
    with np.errstate(all="raise"):
        return Order(
            num_samples=len(blocks), shuffle=True, seed=seed, blocks=blocks, stretches=stretches, lanes=lanes
        ).entries(epoch)


def loads(entries: np.ndarray, blocks: np.ndarray, dp: int, rank: int, room: int) -> int:
    """Count how often one of the dp ranks loads a block, where it keeps so many, the latest used."""
    kept: Cache[bool] = Cache(room, "lru")
    count = 0
    for block in blocks[entries[rank::dp]].tolist():
        if kept.get(block) is None:
            kept.put(block, True)
            count += 1
    return count


@pytest.mark.parametrize(("num", "size"), [(640, 8), (643, 8), (5, 8), (1, 1), (97, 1), (300, 40)])
@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_every_sample_once_a_function_of_seed_and_epoch(num: int, size: int, lanes: int) -> None:
    blocks = np.arange(num) // size
    first = order(blocks, lanes)
    assert sorted(first.tolist()) == list(range(num))
    assert first.tolist() == order(blocks, lanes).tolist()
    if num > 90:
        assert first.tolist() != order(blocks, lanes, epoch=1).tolist() != order(blocks, lanes, seed=1).tolist()


@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_each_dp_rank_has_blocks_of_its_own(dp: int) -> None:
    blocks = np.arange(128 * 8) // 8
    entries = order(blocks, 8)
    assert sum(loads(entries, blocks, dp, rank, 8 // dp) for rank in range(dp)) == 128
    plain = np.random.default_rng(0).permutation(len(blocks))
    assert sum(loads(plain, blocks, dp, rank, 8 // dp) for rank in range(dp)) > 128 * 7


def test_blocks_of_unequal_sizes_are_loaded_hardly_more_than_once() -> None:
    blocks = np.repeat(np.arange(200), np.random.default_rng(1).integers(1, 12, 200))
    entries = order(blocks, 8)
    assert sorted(entries.tolist()) == list(range(len(blocks)))
    assert loads(entries, blocks, 1, 0, 8) == 200
    assert sum(loads(entries, blocks, 2, rank, 5) for rank in range(2)) < 220  # at the end, lanes shift


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize(("num", "length"), [(4000, 10), (643, 10), (640, 1000), (5, 3), (0, 1)])
def test_lanes_go_through_stretches_block_by_block(num: int, length: int, dp: int) -> None:
    blocks = np.random.default_rng(2).permutation(num) // 8  # samples of a block lie anywhere
    stretches = blocks // length
    entries = order(blocks, 4, stretches=stretches)
    assert sorted(entries.tolist()) == list(range(num))
    if num < 100:
        return
    ups = 0
    for rank in range(dp):
        for lane in range(4 // dp):
            own = blocks[entries[rank::dp][lane :: 4 // dp]][: num // 4 - 8]
            steps = np.diff(own[np.flatnonzero(np.diff(own, prepend=-1))])
            assert len(steps) == len(np.unique(own)) - 1  # each block is gone through in one go
            most = min(length, len(np.unique(blocks)) // 8)
            assert (np.abs(steps) == 1).sum() >= len(steps) * (1 - 1 / most) - 2
            ups += np.sign(steps).sum()
    assert abs(ups) < 0.9 * len(np.unique(blocks))  # some of them upwards, some down
    if length == 10:
        assert order(blocks, 4, epoch=1, stretches=stretches).tolist() != entries.tolist()


def test_it_is_a_shuffle() -> None:
    """Samples go as far as in a full shuffle; those next to each other are hardly ever of one block."""
    blocks = np.arange(4000) // 8
    by_blocks, full = order(blocks, 8), np.random.default_rng(0).permutation(4000)
    far = [np.abs(entries - np.arange(4000)).mean() / 4000 for entries in (by_blocks, full)]
    assert far == pytest.approx([1 / 3, 1 / 3], abs=0.03)
    correlation = np.corrcoef(by_blocks[:-1], by_blocks[1:])[0, 1]
    assert abs(correlation) < 0.05
    assert (blocks[by_blocks[:-1]] == blocks[by_blocks[1:]]).mean() < 0.01


def test_weights_and_mixtures() -> None:
    parts = [Readable(count, None) for count in (40, 24)]
    weighted = scidata.DistributedSampler(
        parts[0], shuffle="blocks", weights=np.arange(40) % 7, num_samples=500, window=2, seed=5
    )
    drawn = weighted.order()
    plain = scidata.DistributedSampler(parts[0], weights=np.arange(40) % 7, num_samples=500, seed=5).order()
    assert sorted(drawn.tolist()) == sorted(plain.tolist())
    assert loads(drawn, parts[0].blocks(), 1, 0, 2) == 14
    mixed = scidata.mix(parts, [1, 1], num_samples=48)
    entries = scidata.DistributedSampler(mixed, shuffle="blocks", window=2).order()
    assert (np.sort(entries[entries >= 40]) == np.arange(40, 64)).all()
    assert (np.add.reduceat(entries < 40, range(0, 48, 4)) == 2).all()
    assert loads(entries, mixed.blocks(), 1, 0, 4) <= 8 + 10  # the first is over before its last blocks


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("blocks") / "store"
    group = zarr.open_group(folder, mode="w")
    for name, steps in (("u", 8), ("v", 4)):
        array = group.create_array(
            name, shape=(64, 12, 10), dtype="f4", chunks=(steps, 6, 10), dimension_names=("time", "y", "x")
        )
        array[:] = np.arange(64 * 120).reshape(64, 12, 10) + len(name)
    return folder


@pytest.mark.parametrize("readers", [0, 2])
@pytest.mark.parametrize("make", ["plain", "concat", "subset"])
def test_a_loader_decodes_each_chunk_once(path: Path, readers: int, make: str) -> None:
    decoded = {}
    for shuffle, pool_bytes in ((True, 0), ("blocks", 1 << 20)):
        ds: Any = scidata.open_dataset(path, pool_bytes=pool_bytes)
        if make == "concat":
            ds = scidata.concat(ds, scidata.open_dataset(path, pool_bytes=pool_bytes))
        if make == "subset":
            ds = scidata.subset(ds, range(5, 61))
        how: dict[str, Any] = {"sampler": scidata.DistributedSampler(ds, shuffle=shuffle, window=4)}
        loader = scidata.DataLoader(ds, 2, num_workers=readers, **(how if readers else {"shuffle": shuffle}))
        seen = [
            (i, float(value)) for batch in loader for i, value in zip(batch.index, batch["u"][:, 0, 0], strict=True)
        ]
        wanted = {i: (i % 64 + 5 * (make == "subset")) * 120 + 1 for i in range(len(ds))}
        assert dict(seen) == wanted
        decoded[shuffle] = loader.stats()["bytes_decoded"]
    steps = {"plain": 64 + 64, "concat": 4 * 64, "subset": 64 + 60}[make]  # v's first chunk is not needed
    whole = steps * 120 * 4
    assert whole <= decoded["blocks"] <= 1.1 * whole  # a thread that stands still may find its block gone
    assert decoded[True] > 5 * whole


@pytest.mark.parametrize("steps", [(0,), (-1, 0, 2)])
def test_what_plan_says_is_enough(path: Path, steps: tuple[int, ...]) -> None:
    reader = scidata.open_dataset(path, steps=steps).reader
    (note,) = plan_grid(reader).notes
    assert note.startswith("chunks hold 8 steps")
    enough = [int(number) for number in re.findall(r"pool_bytes=([\d_]+)", note)]
    assert enough == [3 * reader.block_bytes({})[0], 12 * reader.block_bytes({})[1]]
    for shuffle, pool_bytes in zip((False, "blocks"), enough, strict=True):
        ds = scidata.open_dataset(path, steps=steps, pool_bytes=pool_bytes)
        loader = scidata.DataLoader(ds, 2, shuffle=shuffle)
        assert len(list(loader)) == -(-len(ds) // 2)
        assert 1 <= loader.stats()["bytes_decoded"] / (64 * 120 * 4 * 2) <= 1.1
        assert 0 < ds.reader.pool.num_bytes <= pool_bytes


@pytest.mark.parametrize(
    ("chunk", "size", "steps", "codec"),
    [
        (1, 8, (0, 1), "zstd"),
        (1, 8, (-1, 0, 2), "blosc"),
        (3, 9, (0, 1), "zstd"),
        (8, 8, (-1, 0, 2), "blosc"),
        (20, 20, (-1, 0, 2), "zstd"),
        (20, 20, (0, 20), "blosc"),
    ],
)
def test_windows_decode_chunks_once(tmp_path: Path, chunk: int, size: int, steps: tuple[int, ...], codec: str) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    compressors = {"zstd": zarr.codecs.ZstdCodec(), "blosc": zarr.codecs.BloscCodec(cname="lz4")}[codec]
    num = max(480, 192 * chunk)
    values = np.arange(num * 6, dtype=np.float32).reshape(num, 2, 3)
    for name in "uv":
        group.create_array(
            name, data=values, chunks=(chunk, 2, 3), dimension_names=("time", "y", "x"), compressors=compressors
        )
    every = scidata.open_dataset(tmp_path / "a.zarr", steps=steps)
    room = KEPT_BLOCKS * every.reader.block_bytes({})[1]  # the default where not all of it fits
    ds = scidata.open_dataset(tmp_path / "a.zarr", steps=steps, pool_bytes=room)
    assert ds.blocks().tolist() == (np.arange(len(ds)) // size).tolist()
    loader = scidata.DataLoader(ds, None, shuffle="blocks")
    seen = {sample.index: sample["v"][..., 0, 0].reshape(-1).tolist() for sample in loader}
    assert seen == {i: [6.0 * (i + k - min(steps)) for k in steps] for i in range(len(ds))}
    assert 0.99 < loader.stats()["bytes_decoded"] / (2 * values.nbytes) <= 1.14
    assert ds.reader.pool.num_bytes < 0.6 * values.nbytes
    assert every.reader.pool.max_bytes(every.reader.part_of({})) == 2 * values.nbytes
    alone = scidata.open_dataset(tmp_path / "a.zarr")
    assert alone.blocks().tolist() == alone.stretches().tolist() == (np.arange(num) // chunk).tolist()


@pytest.fixture
def compressed(tmp_path: Path) -> Path:
    """40 chunks of 8 steps: many more than the pool of an order by blocks holds."""
    values = np.arange(320 * 6, dtype=np.float32).reshape(320, 2, 3)
    zarr.create_array(
        tmp_path / "a.zarr", name="u", data=values, chunks=(8, 2, 3), dimension_names=("time", "y", "x"),
        compressors=zarr.codecs.BloscCodec(cname="lz4"),
    )  # fmt: skip
    return tmp_path / "a.zarr"


@pytest.mark.parametrize("shuffle", [False, True, "blocks"])
def test_what_fits_stays_by_default(compressed: Path, shuffle: bool | str) -> None:
    loader = scidata.DataLoader(scidata.open_dataset(compressed, fields=["u"]), 4, shuffle=shuffle)
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert len(list(loader)) == 80
    assert loader.stats()["bytes_decoded"] == 320 * 24


def test_what_does_not_fit_is_decoded_in_each_epoch(compressed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of memory is one for all data sets of a process; those of worker processes keep no more than blocks."""
    monkeypatch.setattr("scidata.data.node.memory_share", lambda: 3 * 320 * 24 - 1)
    first, second, third = [scidata.open_dataset(compressed, fields=["u"]) for _ in range(3)]
    monkeypatch.setattr(sizes, "_kept", weakref.WeakKeyDictionary())
    sent, blocks = pickle.loads(pickle.dumps(second)), 320 * 24
    sent.reader.chain.sizes._process = 0
    kept = [ds.reader.pool.max_bytes(ds.reader.part_of({})) for ds in (first, second, third, sent)]
    assert kept == [blocks, blocks, 12 * 8 * 24, 12 * 8 * 24]
    loader = scidata.DataLoader(third, 4, shuffle="blocks")
    for _ in range(2):
        assert len(list(loader)) == 80
    assert loader.stats()["bytes_decoded"] >= 2 * 320 * 24


def test_a_block_goes_when_each_of_its_rows_was_taken(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    values = np.arange(800 * 6, dtype=np.float32).reshape(800, 2, 3)
    group.create_array("u", data=values, chunks=(8, 2, 3), dimension_names=("time", "y", "x"))
    ds = scidata.open_dataset(tmp_path / "a.zarr", fields=["u"], steps=(0, 1), pool_bytes=values.nbytes // 2)
    for shuffle, left in ((False, 2), ("blocks", 40)):  # the ends of the series; of stretches, too
        loader = scidata.DataLoader(ds, None, shuffle=shuffle)
        assert sum(1 for _ in loader) == 799
        del loader
        assert ds.reader.pool.num_bytes <= left * 8 * 24
        ds.reader.pool.clear()


def test_chunks_that_end_elsewhere_are_decoded_once(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    values = np.arange(2400 * 6, dtype=np.float32).reshape(2400, 2, 3)
    for name, chunk in (("u", 12), ("v", 8)):
        group.create_array(name, data=values, chunks=(chunk, 2, 3), dimension_names=("time", "y", "x"))
    ds = scidata.open_dataset(tmp_path / "a.zarr")
    assert ds.blocks().tolist() == (np.arange(2400) // 12).tolist()
    loader = scidata.DataLoader(ds, None, shuffle="blocks")
    assert {sample.index: float(sample["v"][0, 0]) for sample in loader} == {i: 6.0 * i for i in range(2400)}
    assert 1 <= loader.stats()["bytes_decoded"] / (2 * values.nbytes) <= 1.1


@pytest.mark.parametrize(("blocks", "warned"), [(2, True), (7, True), (8, False)])
def test_a_pool_that_is_too_small_for_the_order_is_named(path: Path, blocks: int, warned: bool) -> None:
    block = scidata.open_dataset(path).reader.block_bytes({})[1]
    ds = scidata.open_dataset(path, pool_bytes=blocks * block)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loader = scidata.DataLoader(ds, shuffle="blocks")
        assert sum(1 for _ in loader) == 64
    said = [str(each.message) for each in found if "blocks in turn" in str(each.message)]
    assert len(said) == warned
    if warned:
        assert f"DistributedSampler(window={blocks}) on all ranks" in said[0]
        assert f"open_dataset(pool_bytes={12 * block:_})" in said[0]
        loader = scidata.DataLoader(ds, sampler=scidata.DistributedSampler(ds, shuffle="blocks", window=blocks))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.set_epoch(1)
        before = loader.stats()["bytes_decoded"]
        assert sum(1 for _ in loader) == 64
    if blocks > 2:  # one is read while the last samples of another are on their way
        assert loader.stats()["bytes_decoded"] - before <= 1.5 * 64 * 120 * 4 * 2


@pytest.mark.parametrize(("window", "ranks"), [(None, 1), (8, 3), (6, 1)])
def test_blocks_that_several_dp_ranks_read_are_named(path: Path, window: int | None, ranks: int) -> None:
    ds = scidata.open_dataset(path, pool_bytes=1 << 20)
    sampler = scidata.DistributedSampler(ds, place(0, 3, 1), shuffle="blocks", window=window, check=False)
    loader = scidata.DataLoader(ds, None, sampler=sampler)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert len(list(iter(loader))) == 22
    said = [str(each.message) for each in found if "each block" in str(each.message)]
    assert len(said) == (ranks > 1)
    if said:
        assert f"to {ranks} of the 3 dp ranks" in said[0]
        assert "window=9), a multiple of 3" in said[0]


def test_what_is_refused(path: Path) -> None:
    ds = scidata.open_dataset(path)
    with pytest.raises(ConfigError, match="shuffle='block': expected True, False or"):
        scidata.DistributedSampler(ds, shuffle="block")
    with pytest.raises(ConfigError, match="window"):
        scidata.DistributedSampler(ds, shuffle="blocks", window=0)
    with pytest.raises(ConfigError, match="sizes decide the order"):
        scidata.DistributedSampler(ds, shuffle="blocks", sizes=np.ones(64), group=2)
    with pytest.raises(ConfigError, match="list does not say which samples share chunks"):
        scidata.DistributedSampler([1, 2, 3], shuffle="blocks")
    one = scidata.DistributedSampler(ds, shuffle="blocks")
    other = scidata.DistributedSampler(ds, shuffle="blocks", window=4)
    with pytest.raises(ConfigError, match="shuffle was 'blocks, 8 at a time' and is 'blocks, 4 at a time'"):
        other.load_state_dict(one.state_dict())
    with pytest.raises(ConfigError, match="pool_bytes"):
        scidata.open_dataset(path, pool_bytes=-1)


def test_the_warning_about_slow_data_names_the_pool() -> None:
    advice = WaitWatch(2, 2)._advice
    assert "8.0 bytes are decoded for each that is wanted" in advice("decode", 8.0)
    assert "pool_bytes=" in advice("decode", 8.0)
    assert "pool_bytes" not in advice("decode", 1.2)


def test_the_same_shuffled_epoch_again_is_named_once(path: Path) -> None:
    ds = scidata.open_dataset(path, scidata.init_mesh(device="cpu"))

    def warned(loader: Any, epochs: list[int | None]) -> list[tuple[str, str]]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for epoch in epochs:
                if epoch is not None:
                    loader.set_epoch(epoch)
                for _ in loader:
                    pass
        return [(str(each.message), each.filename) for each in found if "set_epoch" in str(each.message)]

    said = warned(scidata.DataLoader(ds, shuffle=True), [None] * 3)
    assert len(said) == 1
    assert said[0][0].startswith("scidata.DataLoader: epoch 0 again, in the same shuffled order: call loader.set_epoch")
    assert said[0][1] == __file__
    assert warned(scidata.DataLoader(ds, shuffle=True), [0, 1, 2]) == []
    assert warned(scidata.DataLoader(ds, shuffle=False), [None] * 3) == []
    loader = scidata.DataLoader(ds, shuffle=True)
    next(iter(loader))  # left early: not an epoch
    assert warned(loader, [None]) == []
