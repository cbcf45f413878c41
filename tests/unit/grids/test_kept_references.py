"""Decoded parts of reference sets on disk: found again by what the set refers to, and what that is known by."""

from __future__ import annotations

import base64
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scidata.core.options import ReadOptions
from scidata.core.urls import Url, url_of
from scidata.errors import SourceChangedError
from scidata.grids.reader import GridReader
from scidata.grids.staging import Staging
from scidata.sources.access.files import files
from scidata.sources.references.kerchunk import JsonSet
from tests.unit.sources._references import PLAIN, ROWS, parquet_set, plain_refs, save


def opened(path: Any, cache: Path, axis_sizes: Any = None, **options: Any) -> GridReader:
    """Open as another process would, which has seen nothing of the source."""
    files().close()
    path = Url(path.target, path.options) if isinstance(path, Url) else str(path)
    kept = ReadOptions(
        sample_dim="time", fields="u", cache_dir=cache, cache_disk_bytes=1 << 26, num_threads=0, **options
    )
    return GridReader(path, kept, axis_sizes=axis_sizes)


def read(reader: GridReader, **where: int) -> tuple[np.ndarray[Any, Any], int]:
    """Return all samples of one rank, and how many bytes were fetched for them."""
    spec, found, fetched = reader.buffer_specs(where)["u"], [], 0
    for i in range(reader.num_samples):
        out = {"u": np.empty(spec.shape, spec.dtype)}
        fetched += reader.read_into(i, out, where).bytes_fetched
        found.append(out["u"])
    return np.stack(found), fetched


def settle(path: Path, age: float = 100.0) -> None:
    os.utime(path, (time.time() - age,) * 2)


def write(folder: Path, values: np.ndarray[Any, Any] = PLAIN, age: float = 100.0, **changes: Any) -> Path:
    """Write a set of rows that have to be decoded, in a file beside it."""
    rows = [zlib.compress(row.tobytes()) for row in values]
    data = folder / "data.bin"
    data.write_bytes(b"".join(rows))
    settle(data, age)
    at = np.cumsum([0, *map(len, rows)]).tolist()
    refs = plain_refs("data.bin", **{f"u/{i}.0": ["data.bin", at[i], len(row)] for i, row in enumerate(rows)})
    refs["refs"]["u/.zarray"] = refs["refs"]["u/.zarray"].replace(
        '"compressor": null', '"compressor": {"id": "zlib", "level": 1}'
    )
    refs["refs"] |= {key: refs["refs"].get(value, value) for key, value in changes.items()}
    return save(folder / "refs.json", refs)


def inline(row: np.ndarray[Any, Any]) -> str:
    return "base64:" + base64.b64encode(zlib.compress(row.tobytes())).decode()


def test_sets_are_kept_by_what_they_refer_to(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = write(tmp_path, **{"u/2.0": inline(PLAIN[2])})
    values, fetched = read(opened(path, cache))
    assert np.array_equal(values, PLAIN)
    assert fetched > 0
    save(path, json.dumps(json.loads(path.read_text()), indent=1))  # says the same
    again = opened(path, cache)
    assert np.array_equal(read(again)[0], PLAIN)
    assert read(again)[1] == 0
    moved = write(tmp_path, **{"u/1.0": "u/3.0", "u/2.0": inline(PLAIN[2] + 7)})  # the same file, to the byte
    values, fetched = read(opened(moved, cache))
    assert np.array_equal(values, [PLAIN[0], PLAIN[3], PLAIN[2] + 7, PLAIN[3]])
    assert fetched > 0


def test_a_file_that_a_set_refers_to_is_written_again(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before = opened(write(tmp_path), cache)
    assert np.array_equal(read(before)[0], PLAIN)
    path = write(tmp_path, PLAIN[::-1], age=50.0)
    values, fetched = read(opened(path, cache))
    assert np.array_equal(values, PLAIN[::-1])
    assert fetched > 0
    assert read(opened(path, cache))[1] == 0
    before.chain.disk.clear()
    with pytest.raises(SourceChangedError, match=r"data\.bin"):
        read(before)
    write(tmp_path, PLAIN, age=0.0)  # just now: could be written once more within the same tick
    assert np.array_equal(read(opened(path, cache))[0], PLAIN)
    assert read(opened(path, cache))[1] > 0


def test_ranks_stage_sets(tmp_path: Path) -> None:
    path, cache = write(tmp_path), tmp_path / "cache"
    how = {"axis_sizes": {"domain": 2}, "shard": {"x": "domain"}}
    assert Staging(opened(path, cache, **how), [0, 1]).run().written == 8
    for rank in range(2):
        values, fetched = read(opened(path, cache, **how), domain=rank)
        assert np.array_equal(values, PLAIN[:, 3 * rank : 3 * rank + 3])
        assert fetched == 0


def test_parquet_and_raw_chunks(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(PLAIN.tobytes())
    settle(tmp_path / "data.bin")
    path = parquet_set(tmp_path, ROWS)
    reader = opened(path, tmp_path / "cache")
    assert not reader.pool.worth.on_disk  # raw, on a local disk: nothing to gain
    assert np.array_equal(read(reader)[0], PLAIN)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("form", ["json", "local json", "parquet"])
def test_objects_are_fetched_once(tmp_path: Path, s3: Any, form: str) -> None:
    cache, data = tmp_path / "cache", tmp_path / "data.bin"
    data.write_bytes(PLAIN.tobytes())
    where = s3.put(data, f"{form}/data.bin")
    if form == "parquet":
        path: Any = url_of(s3.put(parquet_set(tmp_path, ROWS | {"path": [where] * 4}), f"{form}/set.parq"), s3.options)
    else:
        path = save(tmp_path / "refs.json", plain_refs(where))
        targets = {"targets": {"s3://": s3.options, where: s3.options}}
        path = url_of(f"file://{path}", targets) if form == "local json" else url_of(
            s3.put(path, f"{form}/refs.json"), s3.options
        )  # fmt: skip
    values, fetched = read(opened(path, cache))
    assert np.array_equal(values, PLAIN)
    assert fetched == PLAIN.nbytes
    s3.wire.forget()
    values, fetched = read(opened(path, cache))
    assert np.array_equal(values, PLAIN)
    assert fetched == 0
    assert not [key for key, _ in s3.wire.gets if "data.bin" in key]
    data.write_bytes((PLAIN + 1).tobytes())
    s3.put(data, f"{form}/data.bin")
    assert np.array_equal(read(opened(path, cache))[0], PLAIN + 1)


def test_objects_that_never_change_are_not_asked_for(tmp_path: Path, s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of an Icechunk repository, whose names are given once."""
    data = tmp_path / "data.bin"
    data.write_bytes(PLAIN.tobytes())
    where = s3.put(data, "lasting/data.bin")
    path = url_of(s3.put(save(tmp_path / "refs.json", plain_refs(where)), "sets/lasting.json"), s3.options)
    monkeypatch.setattr(JsonSet, "lasting", where.removesuffix("data.bin"))
    assert np.array_equal(read(opened(path, tmp_path / "cache"))[0], PLAIN)
    s3.wire.forget()
    values, fetched = read(opened(path, tmp_path / "cache"))
    assert np.array_equal(values, PLAIN)
    assert fetched == 0
    assert not [key for key in (*s3.wire.heads, *(key for key, _ in s3.wire.gets)) if "data.bin" in key]
