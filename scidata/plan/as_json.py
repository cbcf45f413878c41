"""The inputs of a plan as plain JSON values, and back."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from scidata.core.types import ArrayLayout, ChunkRefs, Codec, Segment, Selection, segment_table


def _plain(value: Any) -> Any:
    """Turn descriptions, NumPy values and tuples into values of JSON; dtypes into arguments of ``np.dtype``."""
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.dtype):
        return _plain(value.descr) if value.names else value.str
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _descr(spec: Any) -> Any:
    """Turn a dtype's description into NumPy's form: a list of fields, each a tuple."""
    if isinstance(spec, str):
        return spec
    return [(_tuples(name), _descr(of), *map(_tuples, shape)) for name, of, *shape in spec]


def _layout_to_json(layout: ArrayLayout) -> dict[str, Any]:
    """Return all but the attributes, which decide nothing, and decoders; the fill value bit for bit, as base64."""
    found: dict[str, Any] = _plain(layout)
    del found["attributes"]
    found["codecs"] = [{"name": codec.name, "config": _plain(codec.config)} for codec in layout.codecs]
    if layout.fill_value is not None:
        found["fill_value"] = base64.b64encode(layout.fill_value.astype(layout.dtype).tobytes()).decode()
    return found


def _layout_from_json(value: Mapping[str, Any]) -> ArrayLayout:
    dtype, fill = np.lib.format.descr_to_dtype(_descr(value["dtype"])), value["fill_value"]
    return ArrayLayout(
        **{name: _tuples(each) for name, each in value.items() if name not in ("dtype", "codecs", "fill_value")},
        dtype=dtype,
        codecs=tuple(Codec(**codec) for codec in value["codecs"]),
        fill_value=None if fill is None else np.frombuffer(base64.b64decode(fill), dtype).reshape(()),
    )


def inputs_to_json(
    layout: ArrayLayout, selection: Selection, refs: ChunkRefs | None, out_shape: tuple[int, ...]
) -> dict[str, Any]:
    """Return the arguments of :func:`scidata.plan.array.plan_array`."""
    return {
        "layout": _layout_to_json(layout),
        "selection": [segment_table(segments).tolist() for segments in selection],
        "refs": _plain(refs),
        "out_shape": list(out_shape),
    }


def inputs_from_json(value: Mapping[str, Any]) -> tuple[ArrayLayout, Selection, ChunkRefs | None, tuple[int, ...]]:
    """Undo :func:`inputs_to_json`."""
    selection = tuple(
        tuple(Segment(start=s[0], count=s[1], step=s[2], offset=s[3]) for s in segments)
        for segments in value["selection"]
    )
    places, refs = value["refs"], None
    if places is not None:
        tables: dict[str, Any] = {n: np.array(places[n], np.int64) for n in ("path_index", "offset", "nbytes")}
        for name in ("skipped_codecs", "checksums"):
            tables[name] = None if places.get(name) is None else np.array(places[name], np.uint32)
        refs = ChunkRefs(paths=tuple(places["paths"]), **tables)
    return _layout_from_json(value["layout"]), selection, refs, tuple(value["out_shape"])
