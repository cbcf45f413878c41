"""Bytes of blocks, against the blocks that samples need; which of them are kept, to the last byte of room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, ZstdCodec

import scidata
from scidata.core.options import ReadOptions
from scidata.grids.blocks import sizes as sizes_module
from scidata.grids.blocks.key import BlockKey
from scidata.grids.blocks.pool import BlockRead
from scidata.grids.reader import GridReader
from tests.unit.grids._pool import BIG

SERIES = {"u": ("time y x", (4, 3, 5)), "v": ("time y x", (2, 3, 5)), "mask": ("y x", (3, 5))}
RUNS = {"u": ("run time y x", (2, 4, 3, 5)), "v": ("run time y x", (1, 2, 3, 5)), "mask": ("run y x", (2, 3, 5))}
LENGTHS = {"run": 6, "time": 32, "y": 3, "x": 5}
ROW = 3 * 5 * 4  # bytes of one step of one field


@pytest.fixture(scope="module")
def paths(tmp_path_factory: Any) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("sizes")
    for name, fields in (("series", SERIES), ("runs", RUNS)):
        group = zarr.open_group(folder / name, mode="w")
        for field, (dims, chunks) in fields.items():
            shape = [LENGTHS[dim] for dim in dims.split()]
            data = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
            zstd = ZstdCodec()
            group.create_array(field, data=data, chunks=chunks, dimension_names=dims.split(), compressors=zstd)
    return {name: str(folder / name) for name in ("series", "runs")}


def opened(path: str, steps: Any = (0,), pool_bytes: int | None = BIG) -> GridReader:
    dims = ("run", "time") if path.endswith("runs") else "time"
    options = ReadOptions(sample_dim=dims, steps=steps, pool_bytes=pool_bytes, num_threads=0, shard={})
    return GridReader(path, options, memory_bytes=BIG)


def reads(reader: GridReader, index: int, names: Sequence[str] = "uv") -> dict[BlockKey, BlockRead]:
    found = reader.pool.reads_of(reader.part_of({}), index)
    return {each.key: each for name in names for each in found[name]}


def nbytes(blocks: Mapping[BlockKey, BlockRead]) -> int:
    return sum(read.nbytes for read in blocks.values())


@pytest.mark.parametrize("steps", [(0,), (0, 1), (0, 1, 2), (0, 4), {"u": (0,), "v": (1, 2)}])
@pytest.mark.parametrize("name", ["series", "runs"])
def test_bytes_are_those_of_the_blocks_that_samples_need(paths: dict[str, str], name: str, steps: Any) -> None:
    reader = opened(paths[name], steps)
    part, every = reader.part_of({}), [reads(reader, i) for i in range(reader.num_samples)]
    assert reader.pool.reads_of(part, 0) is reader.pool.reads_of(part, 0)
    together: dict[int, dict[BlockKey, BlockRead]] = {}
    for number, found in zip(reader.blocks().tolist(), every, strict=True):
        together.setdefault(number, {}).update(found)
    sizes, blocks = reader.chain.sizes.of(part), {key: read for found in every for key, read in found.items()}
    assert sizes.bytes_of_sample == max(map(nbytes, every))
    assert sizes.bytes_of_block == max(map(nbytes, together.values()))
    masks = {key: read for i in range(reader.num_samples) for key, read in reads(reader, i, ["mask"]).items()}
    assert sizes.bytes_of_all == nbytes(blocks | masks)
    two_runs = nbytes({key: read for key, read in blocks.items() if key.member < (2 if key.name == "u" else 1)})
    assert sizes.bytes_in_order == (3 * sizes.bytes_of_sample if name == "series" else two_runs + sizes.bytes_of_sample)
    for key, read in (blocks | reads(reader, 0, ["mask"])).items():
        assert reader.chain.source.block(key)[0].nbytes == read.nbytes


@pytest.mark.parametrize("steps", [(0,), (0, 1), {"u": (0,), "v": (5,)}])
def test_neighbours_share_chunks_where_a_field_is_of_later_steps(paths: dict[str, str], steps: Any) -> None:
    numbers = opened(paths["series"], steps).blocks()
    assert numbers.tolist() == (np.arange(len(numbers)) // (4 if steps == (0,) else 8)).tolist()


@pytest.mark.parametrize(
    ("room", "shared", "fixed"),
    [(6 * ROW - 1, "", []), (6 * ROW, "uv", []), (7 * ROW - 1, "uv", []), (7 * ROW, "uv", ["mask"])],
)
def test_fields_are_kept_where_one_sample_fits(paths: dict[str, str], room: int, shared: str, fixed: list[str]) -> None:
    reader = opened(paths["series"], pool_bytes=room)
    assert reader.chain.sizes.of(reader.part_of({})).kept_fields == (frozenset(shared), frozenset(fixed))


@pytest.mark.parametrize(("room", "num"), [(50 * ROW - 1, 1), (50 * ROW, 2)])
def test_blocks_hold_several_trajectories_where_three_and_a_mask_of_two_fit(
    paths: dict[str, str], room: int, num: int
) -> None:
    reader = opened(paths["runs"], pool_bytes=room)
    sizes = reader.chain.sizes.of(reader.part_of({}))
    assert [sizes.together(name, 0).num for name in ("u", "v", "mask")] == [num, 1, num]


@pytest.mark.parametrize(("name", "rows"), [("series", 12 * 8 + 1), ("runs", 12 * 16 + 12 * 2)])
def test_the_default_pool_holds_twelve_blocks_of_an_order_by_blocks(
    paths: dict[str, str], name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes_module.BlockSizes, "left", 0)  # other data sets of the process keep the rest
    reader = opened(paths[name], pool_bytes=None)
    assert reader.pool.max_bytes(reader.part_of({})) == rows * ROW


@pytest.mark.parametrize(("less", "num"), [(0, 2), (1, 1)])
def test_trajectories_are_decoded_for_the_disk_at_once_where_they_fit(
    paths: dict[str, str], monkeypatch: pytest.MonkeyPatch, less: int, num: int
) -> None:
    monkeypatch.setattr(sizes_module, "_MAX_AT_ONCE", 8 * ROW - less)
    reader = opened(paths["runs"])
    assert reader.chain.sizes.of(reader.part_of({})).at_once("u", 1).num == num


@pytest.mark.parametrize(
    ("codec", "chunk", "steps", "enough"),
    [
        ("zstd", 8, (0,), 1),
        ("zstd", 1, (0, 1), 2),
        ("zstd", 1, (0,), None),
        ("lz4", 8, (0,), 4),
        ("lz4", 5, (0,), 3),
        ("lz4", 1, (0, 1), 2),
        (None, 8, (0, 1), None),
    ],
)
def test_samples_that_make_a_block_worth_reading(
    tmp_path: Path, codec: str | None, chunk: int, steps: tuple[int, ...], enough: int | None
) -> None:
    codecs = {"zstd": ZstdCodec(), "lz4": BloscCodec(cname="lz4"), None: None}
    zarr.create_array(
        tmp_path / "a",
        data=np.zeros((16, 3)),
        chunks=(chunk, 3),
        dimension_names=("time", "x"),
        compressors=codecs[codec],
    )
    worth = opened(str(tmp_path / "a"), steps).pool.worth
    assert list(worth.enough.values()) == ([] if enough is None else [enough])


def test_what_the_plan_says_is_enough_where_chunks_hold_other_numbers_of_trajectories(paths: dict[str, str]) -> None:
    """A block of samples is of two runs, and blocks of "v" of one: it needs two of these."""
    block = opened(paths["runs"]).block_bytes({})[1]
    ds = scidata.open_dataset(paths["runs"], sample_dim=("run", "time"), fields=["u", "v"], pool_bytes=12 * block)
    loader = scidata.DataLoader(ds, None, shuffle="blocks")
    assert sum(1 for _ in loader) == 6 * 32
    assert 1 <= loader.stats()["bytes_decoded"] / (2 * 6 * 32 * ROW) <= 1.1
