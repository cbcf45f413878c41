"""Chunks that are written without zarr-python, against what that writes."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

from scidata.data.output.chunks import ChunkFiles
from scidata.data.output.zarr_output import with_checksum
from scidata.plan.owners import Box

CODECS: dict[str, tuple[Any, Any]] = {
    "none": ([Crc32cCodec()], np.ravel),
    "lz4": (
        [BloscCodec(typesize=4, cname="lz4", clevel=5, shuffle="shuffle"), Crc32cCodec()],
        numcodecs.Blosc("lz4", 5, numcodecs.Blosc.SHUFFLE).encode,
    ),
    "blosc": (
        [BloscCodec(typesize=4, cname="zstd", clevel=3, shuffle="shuffle"), Crc32cCodec()],
        numcodecs.Blosc("zstd", 3, numcodecs.Blosc.SHUFFLE).encode,
    ),
    "zstd": ([ZstdCodec(level=3), Crc32cCodec()], numcodecs.Zstd(3).encode),
}
BOXES: list[Box] = [
    (slice(0, 2), slice(0, 8), slice(0, 9)),
    (slice(0, 2), slice(8, 13), slice(0, 9)),  # filled up along two dimensions
    (slice(2, 3), slice(4, 8), slice(5, 9)),  # one chunk, filled up along two
    (slice(2, 3), slice(0, 4), slice(0, 5)),
]


def make(path: Path, codecs: Any, dtype: str, fill_value: Any = 0) -> Any:
    group = zarr.create_group(path)
    return group.create_array(
        "u", shape=(3, 13, 9), chunks=(2, 4, 5), dtype=dtype, filters=None, compressors=codecs,
        config={"write_empty_chunks": True}, fill_value=fill_value,
    )  # fmt: skip


def writer_of(path: Path, array: Any, threads: ThreadPoolExecutor, encode: Any) -> ChunkFiles:
    return ChunkFiles(
        str(path), threads, chunks=array.chunks, fill=array.fill_value, name_of=array.metadata.encode_chunk_key,
        encode=functools.partial(with_checksum, encode),
    )  # fmt: skip


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("dtype", "fill"), [("<f4", np.nan), ("<i4", -9), ("<f4", 0)])
def test_the_same_bytes(tmp_path: Path, codec: str, dtype: str, fill: float) -> None:
    codecs, encode = CODECS[codec]
    ours, theirs = (make(tmp_path / name, codecs, dtype, fill_value=fill) for name in ("ours", "theirs"))
    values = np.random.default_rng(0).integers(0, 50, (3, 13, 9)).astype(dtype)
    with ThreadPoolExecutor(2) as threads:
        writer = writer_of(tmp_path / "ours" / "u", ours, threads, encode)
        for box in BOXES:
            writer.write(box, values[box])
            theirs[box] = values[box]
        assert files(tmp_path / "ours") == files(tmp_path / "theirs")
        writer.write(BOXES[0], values[BOXES[0]] + 1)  # again, as after resume=True
    np.testing.assert_array_equal(ours[:2, :8], values[:2, :8] + 1)
    assert sum("c/" in name for name in files(tmp_path / "ours")) == 4 + 4 + 2


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    """The error comes from the thread, and no part of a file is left."""
    array = make(tmp_path / "a", CODECS["none"][0], "<f4")
    os.makedirs(tmp_path / "a" / "u" / "c" / "0" / "0" / "1")  # where a chunk should be
    with ThreadPoolExecutor(1) as threads, pytest.raises(IsADirectoryError):
        writer_of(tmp_path / "a" / "u", array, threads, np.ravel).write(BOXES[0], np.zeros((2, 8, 9), "f4"))
    assert not [name for name in files(tmp_path) if name.endswith(".partial")]
