"""Shared by tests: ARRAY, PLAIN, ROWS, parquet_set, plain_refs, save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def save(path: Path, refs: Any) -> Path:
    path.write_text(refs if isinstance(refs, str) else json.dumps(refs))
    return path


ARRAY = {
    "zarr_format": 2, "shape": [4, 6], "chunks": [1, 6], "dtype": "<i4", "compressor": None, "filters": None,
    "fill_value": None, "order": "C",
}  # fmt: skip


PLAIN = np.arange(24, dtype="<i4").reshape(4, 6)


def plain_refs(target: Any, **changes: Any) -> dict[str, Any]:
    """References to rows of :data:`PLAIN` in a file of its bytes."""
    refs: dict[str, Any] = {
        ".zgroup": '{"zarr_format": 2}',
        "u/.zarray": json.dumps(ARRAY),
        "u/.zattrs": '{"_ARRAY_DIMENSIONS": ["time", "x"]}',
    }
    refs |= {f"u/{i}.0": [str(target), 24 * i, 24] for i in range(4)}
    return {"version": 1, "refs": refs | changes}


def parquet_set(folder: Path, columns: dict[str, Any], **summary: Any) -> Path:
    pytest.importorskip("pyarrow")
    import pyarrow
    from pyarrow import parquet

    refs = plain_refs("")["refs"]
    metadata = {key: json.loads(refs[key]) for key in (".zgroup", "u/.zarray", "u/.zattrs")}
    path = folder / "set.parq"
    (path / "u").mkdir(parents=True)
    (path / ".zmetadata").write_text(json.dumps({"metadata": metadata, "record_size": 4} | summary))
    parquet.write_table(pyarrow.table(columns), path / "u" / "refs.0.parq")
    return path


ROWS: dict[str, Any] = {"path": ["data.bin"] * 4, "offset": [0, 24, 48, 72], "size": [24] * 4}
