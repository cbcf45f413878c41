"""Arguments, sizes and values of a data set that have to be equal on all ranks sharing its samples.

The effect of arguments is compared, not how they were written: ``halo=1`` and ``halo={"lat": 1}`` may be the same.
Paths, and how files are read (threads, caches), may differ.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from scidata.core.bounds import rows_of
from scidata.core.types import Array
from scidata.core.urls import is_url
from scidata.data.combined_dataset import CombinedDataset
from scidata.data.domain_dataset import DomainDataset
from scidata.data.grid_dataset import ShardedDataset
from scidata.data.irregular_dataset import IrregularDataset
from scidata.data.joined_dataset import JoinedDataset
from scidata.data.scaling import numbers_of
from scidata.errors import SciDataError
from scidata.plan.array import ArrayPlan
from scidata.sources.access.files import files

_FILES = 8  # number whose coordinates are compared at once
_LONGEST = 120  # characters of a value that are shown
_FIELDS, _READS, _BYTES = 4, 4, 512  # compared per sample: fields, reads per field, bytes at both ends of each read


def facts_of(dataset: object) -> dict[str, str]:
    """Return by name the metadata that has to be equal on all ranks; for values see :func:`witness_of`."""
    facts: dict[str, object]
    if isinstance(dataset, CombinedDataset):
        facts = {"which samples": (len(dataset), *dataset.numbering())}
        facts["ratios"] = None if dataset.mixture is None else dataset.mixture.takes
        for number, each in enumerate(dataset.datasets):
            which = f" of data set {number}" if len(dataset.datasets) > 1 else ""
            facts |= {name + which: value for name, value in facts_of(each).items()}
    elif isinstance(dataset, JoinedDataset):
        facts = {
            "which keys": (len(dataset), dataset.fingerprint),
            "transform of the join": in_words(dataset.own_transform),
        }
        for part, each in dataset.parts.items():
            facts |= {f"{name} of {part!r}": value for name, value in facts_of(each).items()}
    elif isinstance(dataset, ShardedDataset):
        facts = _arguments(dataset) | _facts_of_grid(dataset)
    elif isinstance(dataset, IrregularDataset):
        facts = _arguments(dataset) | _facts_of_rows(dataset)
    else:  # a user's own
        name = re.sub(" at 0x[0-9a-f]+", "", repr(dataset))
        facts = {"the data set": f"{name} ({getattr(dataset, 'fingerprint', '')})"}
    return {name: shortened(str(value)) for name, value in facts.items()}


# Arguments come first, and their consequences later: a message shows the first few that differ.


def _arguments(dataset: DomainDataset[Any, Any]) -> dict[str, object]:
    return {
        "the data set": type(dataset).__name__,
        "fields": ", ".join(dataset.fields),
        "dtype": dataset.dtype,
        "transform": in_words(dataset.transform),
        "local_transform": in_words(dataset.local_transform),
        "coords": dataset.has_coords,
        "normalise": numbers_of(dataset.normalising) or None,
    }


def _facts_of_grid(dataset: ShardedDataset[Any]) -> dict[str, object]:
    reader, cut, dim = dataset.reader, dataset.reader.cut, dataset.reader.sample_dim
    rows = {d: rows_of(s) for d, s in cut.selected.items() if d not in reader.sample_dims}
    # querying many or remote files takes long; the fingerprint contains it and is compared later
    is_near = len(reader.paths) <= _FILES and not is_url(reader.paths[0])
    labels = reader.coordinate(dim) if dim is not None and is_near else None
    ends = "" if labels is None or not len(labels) else f"{labels[0]} to {labels[-1]}, {_digest(labels)}"
    return {
        "sample_dim": reader.sample_dims,
        "steps": reader.field_steps.by_field or reader.field_steps.every,
        "decode": reader.options.decodes,
        "decode by node": (by_node := reader.pool.worth.by_node),
        "shared by node": reader.paths if by_node and hasattr(reader.sources[0], "witness") else None,
        "shard": dict(cut.axis_of_dim),
        "halo": dict(cut.halo),
        "periodic": sorted(cut.periodic),
        "isel": {d: f"{len(own)} from {own[0]} to {own[-1]}, {_digest(own)}" for d, own in rows.items() if len(own)},
        "patch": getattr(getattr(reader, "patches", None), "recipe", None),
        "bounds": {d: cut.bounds[d].tolist() for d in cut.axis_of_dim},
        "the number of samples": len(dataset),
        f"the coordinate {dim}": ends,
        "the shapes": {name: dataset.global_shape(name) for name in dataset.fields},
        "the dims": {name: dataset.dims(name) for name in dataset.fields},
        "the dtypes that are read": {name: str(reader.dtype(name)) for name in dataset.fields},
    }


def _facts_of_rows(dataset: IrregularDataset[Any]) -> dict[str, object]:
    reader: Any = dataset.reader
    return {
        "kind": reader.kind,
        "ghosts": reader.ghosts,
        "halo": reader.layers if reader.kind == "hetero" else getattr(reader, "halo", 0),
        "ghost cells": getattr(reader, "ghost_cells", False),
        "subsample": reader.subsample,
        "the number of samples": len(dataset),
        "the dims": {name: dataset.dims(name) for name in dataset.fields},
        "the dtypes that are read": {name: str(reader.dtype(name)) for name in dataset.fields},
        "the values": dataset.fingerprint if _is_stored(dataset) else None,
        "the windows": dataset.fingerprint if hasattr(reader, "windows") else None,
    }


def _is_stored(dataset: IrregularDataset[Any]) -> bool:
    from scidata.store.reading.reader import StoreReader  # which grids do without

    return isinstance(dataset.reader, StoreReader)


def witness_of(dataset: object, index: int) -> dict[str, str]:
    """Return digests of some stored bytes of a sample by field, equal on all ranks: a few small reads.

    So that ranks which have other files behind the same path find out. Nothing where no bytes can be told, and of
    stores, whose :func:`facts_of` have digests of all values. Of data that is cut sample by sample also its bounds.
    """
    if isinstance(dataset, CombinedDataset):
        part, own = dataset.locate(index)
        return witness_of(dataset.datasets[part], own)
    if isinstance(dataset, JoinedDataset):
        parts = {name: witness_of(part, index) for name, part in dataset.at(index).items()}
        return {f"{fact} of {name!r}": value for name, own in parts.items() for fact, value in own.items()}
    if not isinstance(dataset, DomainDataset):
        return {}
    found = {}
    try:
        if isinstance(dataset, IrregularDataset):
            cut = {entity: bounds.tolist() for entity, bounds in dataset.reader.partition_of(index).bounds.items()}
            found[f"bounds of sample {index}"] = shortened(str(cut))
            if _is_stored(dataset):
                return found
        if is_url(getattr(dataset.reader, "path", "") or dataset.reader.paths[0]):
            return found  # each read, and perhaps each lookup of its place, is a request
        tell = getattr(next(iter(getattr(dataset.reader, "sources", ())), None), "witness", None)
        if tell is not None:  # of shard_dataset, which has no stored bytes
            return {f"values of {name!r} in sample {index}": digest for name, digest in tell(index).items()}
        plan = dataset.plan(index, 0)
        for name in list(plan.fields)[:_FIELDS]:
            ends = b"".join(map(_ends, plan.fields[name]))
            if ends:
                found[f"stored bytes of {name!r} in sample {index}"] = hashlib.sha256(ends).hexdigest()[:8]
    except (SciDataError, OSError):  # the reader raises the same error
        pass
    return found


def _ends(plan: ArrayPlan) -> bytes:
    paths, ranges = plan.ranges()
    if any(map(is_url, paths)):
        return b""
    chosen = ranges[np.linspace(0, len(ranges) - 1, min(_READS, len(ranges))).astype(int)] if len(ranges) else ranges
    pieces = []
    for path, start, nbytes in chosen.tolist():
        size = min(_BYTES, nbytes)
        pieces += [files().read(paths[path], start, size), files().read(paths[path], start + nbytes - size, size)]
    return b"".join(pieces)


def in_words(function: Callable[..., object] | None) -> str:
    """Name a callable so that two can be told apart on different nodes."""
    if function is None:
        return "None"
    own = getattr(function, "func", function)  # of a functools.partial
    code = getattr(getattr(own, "__func__", own), "__code__", None)
    name = getattr(own, "__qualname__", type(own).__qualname__)
    if code is None:
        return str(name)
    plain = [each for each in code.co_consts if isinstance(each, int | float | str | None)]
    content = f"{code.co_code.hex()} {code.co_names} {plain}"
    return f"{name} (line {code.co_firstlineno}, {hashlib.sha256(content.encode()).hexdigest()[:6]})"


def shortened(text: str) -> str:
    """Return a short text unchanged, and a long one as its beginning and a digest."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _digest(values: Array) -> str:
    content = str(values.tolist()).encode() if values.dtype.hasobject else np.ascontiguousarray(values).tobytes()
    return hashlib.sha256(content).hexdigest()[:8]
