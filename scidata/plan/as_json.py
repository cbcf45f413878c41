"""The inputs of a plan as plain JSON values, and back."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from scidata.core.types import ArrayLayout, ChunkRefs, Codec, Segment, Selection


def _plain(value: Any) -> Any:
    """Turn NumPy values and tuples of a codec's configuration into what JSON has."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value


def _dtype_to_json(dtype: np.dtype[Any]) -> Any:
    return _plain(dtype.descr) if dtype.names else dtype.str


def _dtype_from_json(value: Any) -> np.dtype[Any]:
    if isinstance(value, str):
        return np.dtype(value)
    return np.dtype([tuple(tuple(v) if isinstance(v, list) else v for v in field) for field in value])


def _layout_to_json(layout: ArrayLayout) -> dict[str, Any]:
    fill = layout.fill_value
    return {
        "store": layout.store,
        "name": layout.name,
        "shape": list(layout.shape),
        "dims": list(layout.dims),
        "dtype": _dtype_to_json(layout.dtype),
        "chunks": list(layout.chunks),
        "axis_order": list(layout.axis_order),
        "codecs": [{"name": c.name, "config": _plain(c.config)} for c in layout.codecs],
        "shards": None if layout.shards is None else list(layout.shards),
        "fill_value": None if fill is None else base64.b64encode(fill.astype(layout.dtype).tobytes()).decode(),
        "edge_chunks_clipped": layout.edge_chunks_clipped,
        "fallback": layout.fallback,
    }


def _layout_from_json(value: Mapping[str, Any]) -> ArrayLayout:
    dtype = _dtype_from_json(value["dtype"])
    fill = value["fill_value"]
    return ArrayLayout(
        store=value["store"],
        name=value["name"],
        shape=tuple(value["shape"]),
        dims=tuple(value["dims"]),
        dtype=dtype,
        chunks=tuple(value["chunks"]),
        axis_order=tuple(value["axis_order"]),
        codecs=tuple(Codec(name=c["name"], config=c["config"]) for c in value["codecs"]),
        shards=None if value["shards"] is None else tuple(value["shards"]),
        fill_value=None if fill is None else np.frombuffer(base64.b64decode(fill), dtype).reshape(()),
        edge_chunks_clipped=value["edge_chunks_clipped"],
        fallback=value["fallback"],
    )


def inputs_to_json(
    layout: ArrayLayout, selection: Selection, refs: ChunkRefs | None, out_shape: tuple[int, ...]
) -> dict[str, Any]:
    """Return what :func:`scidata.plan.plan_array` was given. The layout's attributes decide nothing: left out."""
    places = None
    if refs is not None:
        skipped, sums = refs.skipped_codecs, refs.checksums
        places = {
            "paths": list(refs.paths),
            "path_index": refs.path_index.tolist(),
            "offset": refs.offset.tolist(),
            "nbytes": refs.nbytes.tolist(),
            "skipped_codecs": None if skipped is None else skipped.tolist(),
            "checksums": None if sums is None else sums.tolist(),
        }
    return {
        "layout": _layout_to_json(layout),
        "selection": [[[s.start, s.count, s.step, s.offset] for s in segments] for segments in selection],
        "refs": places,
        "out_shape": list(out_shape),
    }


def inputs_from_json(
    value: Mapping[str, Any],
) -> tuple[ArrayLayout, Selection, ChunkRefs | None, tuple[int, ...]]:
    """Undo :func:`inputs_to_json`."""
    selection = tuple(
        tuple(Segment(start=s[0], count=s[1], step=s[2], offset=s[3]) for s in segments)
        for segments in value["selection"]
    )
    places = value["refs"]
    refs = None
    if places is not None:
        skipped, sums = places["skipped_codecs"], places.get("checksums")
        refs = ChunkRefs(
            paths=tuple(places["paths"]),
            path_index=np.array(places["path_index"], np.int64),
            offset=np.array(places["offset"], np.int64),
            nbytes=np.array(places["nbytes"], np.int64),
            skipped_codecs=None if skipped is None else np.array(skipped, np.uint32),
            checksums=None if sums is None else np.array(sums, np.uint32),
        )
    return _layout_from_json(value["layout"]), selection, refs, tuple(value["out_shape"])
