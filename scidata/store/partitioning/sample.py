"""One sample of a run of ``scidata partition``: from its raw file, checked, to its place in the store.

A :class:`Task` pickles, so that every process of a run, and every part of a job array, does the same.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scidata.errors import ConfigError, CorruptDataError, near_matches
from scidata.meshes.checks import findings_of
from scidata.meshes.order.faults import REMEDIES, Finding
from scidata.meshes.order.shuffle import leaf_rows_of
from scidata.meshes.sample import HeteroHeader, RawSample, SampleHeader, parse_edges, stored_kind
from scidata.meshes.samples import RawSamples
from scidata.store.format.durable import remove
from scidata.store.format.journal import Journal
from scidata.store.format.manifest import SCHEMA_VERSION, InputInfo, SampleHead, dump_json
from scidata.store.format.treatments import TREATMENTS
from scidata.store.format.values import encode_values
from scidata.store.format.write import OrderedSample, no_room_named, scratch_of, write_sample
from scidata.store.partitioning.by_time import time_of, with_times
from scidata.store.partitioning.inputs import describe_input
from scidata.store.partitioning.ordered import ORDERS, order_sample
from scidata.store.partitioning.passes import order_in_passes
from scidata.store.partitioning.room import bytes_in_memory, room_of, why_not

#: Findings that spoil nothing: they may also be kept as they are.
KEEPABLE = ("crowded_faces", "duplicate_edges", "self_loops")

_STEPS = 1  # raised where passes write other scratch files than before
_MOST_NAMED = 4  # arrays that are not in the store


@dataclass(frozen=True, kw_only=True)
class PlannedSample:
    """A sample of a dry run: rows of each entity (None: known only once edges are made) and bytes.

    ``memory`` is about what the sample's arrays take while they are put in order in memory.
    """

    index: int
    name: str
    kind: str
    counts: dict[str, int | None]
    nbytes: int
    fields: dict[str, str]
    left_out: dict[str, str]
    memory: int


@dataclass(frozen=True, kw_only=True)
class Task:
    """All that decides the content of the store; pickles, so that every process does the same."""

    samples: RawSamples  # the raw samples; metadata is read when they are asked
    # the arguments of :func:`scidata.meshes.samples.read_samples` that choose fields and rows, in its order
    choice: Mapping[str, object]
    order: str
    weights: str | None
    repair: tuple[str, ...]
    keep: tuple[str, ...]
    allow_missing: bool
    max_field_bytes: int
    memory: int | None = None  # bytes that the process may take; larger samples are put in order in passes over disk

    def __post_init__(self) -> None:
        known = leaf_rows_of(str(self.order)) or time_of(str(self.order))
        if self.order not in ORDERS and known is None:
            hint = near_matches(self.order, ORDERS)
            raise ConfigError(f"order must be one of {', '.join(ORDERS)}, not {self.order!r}{hint}")
        if not isinstance(self.weights, str | None):
            kind = type(self.weights).__name__
            raise ConfigError(f"weights={self.weights!r}: expected a field's name or 'edges', not {kind}")
        for kind in self.repair:
            if kind != "all" and kind not in REMEDIES:
                raise ConfigError(f"{kind!r} is no repair{near_matches(kind, [*REMEDIES, 'all'])}")
        for kind in self.keep:
            if kind not in KEEPABLE:
                hint = near_matches(kind, KEEPABLE) if kind not in REMEDIES else ""
                raise ConfigError(f"{kind!r} cannot be kept{hint}; what can: {', '.join(KEEPABLE)}")

    def header(self, index: int) -> SampleHeader | HeteroHeader:
        """Describe a sample by its metadata."""
        return with_times(self.samples.header(index), self.order)

    @property
    def settings(self) -> dict[str, object]:
        """The options that the manifest records."""
        return {
            "order": self.order,
            "weights": self.weights,
            **self.choice,
            "repair": self.repair,
            "keep": self.keep,
        }

    @functools.cached_property
    def recipe(self) -> str:
        """Digest of options and names of inputs, which resumed and partial runs must have in common.

        Options about faults are left out: all faults of finished samples were dealt with.
        """
        names = [os.path.basename(path.rstrip("/")) for path in self.samples.files]
        settings = {name: value for name, value in self.settings.items() if name not in TREATMENTS}
        data = [SCHEMA_VERSION, settings, self.allow_missing, names]
        return hashlib.blake2b(json.dumps(data).encode(), digest_size=8).hexdigest()


def process_sample(
    task: Task, out: str, index: int, tick: Callable[[float], None], *, store: str | None = None
) -> None:
    """Read, check, order and write one sample into a folder, which becomes that of the store, or goes into it."""
    header = task.header(index)  # a folder that is no sample is refused before all files below it are read
    inputs = tuple([describe_input(path, store or out) for path in task.samples.inputs(index)])
    journal = _journal(task, out, index, header, inputs)
    try:
        sample, largest_field = _ordered(task, out, index, header, inputs, journal, tick), task.max_field_bytes
        if task.memory is not None:
            largest_field = max(min(largest_field, room_of(task.memory) // 4), 1)
        free = shutil.disk_usage(out).free
        if sample.nbytes > free and not journal.is_resumed:
            raise OSError(
                errno.ENOSPC,
                f"sample {index} ({sample.name}) takes {sample.nbytes} bytes, and {free} are free; free some space and "
                "run again with --resume, or write to another disk",
                out,
            )
        write_sample(out, sample, max_field_bytes=largest_field, tick=lambda share: tick(share / 2), journal=journal)
    except Exception:
        if journal.folder is not None:  # it would not do better from there on
            remove(journal.folder)
        raise


def _journal(
    task: Task, out: str, index: int, header: SampleHeader | HeteroHeader, inputs: tuple[InputInfo, ...]
) -> Journal:
    """Return what an earlier run has done of a sample in passes; without a folder if it has room in memory."""
    if task.memory is None or bytes_in_memory(header, task.order) <= room_of(task.memory) or _why_not(header, task):
        return Journal(None, "")
    known = all(each.digest is not None for each in inputs)  # of URLs it is not known whether they are the same
    key = [_STEPS, task.recipe, task.settings, task.memory, inputs if known else uuid.uuid4().hex]
    return Journal(scratch_of(out, index), dump_json({"key": key}))


def _why_not(header: SampleHeader | HeteroHeader, task: Task) -> str | None:
    """Return why a sample is not put in order in passes; None if it is."""
    if isinstance(header, SampleHeader) and (header.as_points or header.measures or leaf_rows_of(task.order)):
        return "points of a mesh, geometry and shuffled rows are made of all rows at once"
    return why_not(header, task.order)


class _NeedsRepairError(Exception):
    """Some rows are to be left out, which passes do not do."""


def _ordered(
    task: Task, out: str, index: int, header: SampleHeader | HeteroHeader, inputs: tuple[InputInfo, ...],
    journal: Journal, tick: Callable[[float], None],
) -> OrderedSample:  # fmt: skip
    """Read, check and order one sample; its cells and edges as they were read are let go before it is written."""
    needed, done = bytes_in_memory(header, task.order), 0.0
    reason = _why_not(header, task)

    def head_of(raw: RawSample, findings: list[Finding]) -> SampleHead:
        if _allowed(raw, task, findings):
            raise _NeedsRepairError
        return _head(task, index, inputs, raw, [])

    def advance(share: float) -> None:
        nonlocal done
        done += share / 2
        tick(share / 2)

    if reason is None:
        assert isinstance(header, SampleHeader)
        how: dict[str, Any] = {"by": task.order, "weights": task.weights, "keep": task.keep, "memory": task.memory}
        try:
            with no_room_named(out, index, header.name):
                sample = order_in_passes(header, head_of, journal=journal, tick=advance, **how)
            tick(0.5 - done)
            return sample
        except _NeedsRepairError:
            reason = "repairs need all of it"
    if task.memory is not None and needed > room_of(task.memory):
        raise ConfigError(
            f"sample {header.name}: takes about {needed} bytes in memory, but memory={task.memory} leaves "
            f"{room_of(task.memory)}, and it is not put in order in passes over disk: {reason}. Or allow more"
        )
    raw = header.read()
    every = findings_of(raw)
    every = [found for found in every if not (raw.as_points and found.kind == "crowded_faces")]
    findings = _allowed(raw, task, every)
    head = _head(task, index, inputs, raw, findings)
    tick(0.5 - done)
    return order_sample(raw, head, by=task.order, weights=task.weights, findings=findings)


def _head(task: Task, index: int, inputs: tuple[InputInfo, ...], raw: RawSample, findings: list[Finding]) -> SampleHead:
    notes = (*map(_repaired, findings), *_lost(raw.left_out))
    return SampleHead(
        index=index,
        num_samples=len(task.samples),
        name=raw.name,
        kind=raw.stored_as[0],
        entity=raw.stored_as[1],
        on_sphere=raw.on_sphere,
        recipe=task.recipe,
        period=raw.period,
        settings=task.settings,
        inputs=inputs,
        notes=notes,
        values=encode_values(raw.values),
    )


def _lost(left_out: Mapping[str, str]) -> Iterator[str]:
    """Yield a note on the arrays of the source that are not in the store."""
    if left_out:
        named = [f"{name} ({reason})" for name, reason in list(left_out.items())[:_MOST_NAMED]]
        more = f" and {len(left_out) - len(named)} more, which --dry-run lists" if len(left_out) > len(named) else ""
        yield f"left out: {', '.join(named)}{more}"


def _allowed(raw: RawSample, task: Task, every: list[Finding]) -> list[Finding]:
    """Return the faults of a sample that are not kept, all of which may be repaired, or raise CorruptDataError."""
    findings = [f for f in every if f.kind not in task.keep]
    if not findings:
        return []
    if kept := [f.kind for f in every if f.kind in task.keep and f.kind != "crowded_faces"]:
        raise ConfigError(
            f"sample {raw.name}: {kept[0]} are to be kept, but {findings[0].message}; a repair would drop them too: "
            "repair both, or mend the source"
        )
    allowed = [f for f in findings if f.repairable and ("all" in task.repair or f.kind in task.repair)]
    refused = [f for f in findings if f not in allowed]
    if refused:
        keeping = {kind: f", or keep {kind!r}" for kind in KEEPABLE if kind != "crowded_faces"}
        raise CorruptDataError(f"sample {raw.name}: " + "; ".join(f.message + keeping.get(f.kind, "") for f in refused))
    return findings


def _repaired(finding: Finding) -> str:
    where = f" of {finding.entity}" if finding.entity else ""
    rows = list(finding.first_rows)
    return f"repaired {finding.kind}{where}: {finding.count}, of rows {rows} on; {REMEDIES[finding.kind]}"


def plan_sample(index: int, header: SampleHeader | HeteroHeader, order: str) -> PlannedSample:
    """Describe a sample from metadata alone."""
    values = sum(math.prod(f.shape) * f.dtype.itemsize for f in header.fields.values() if -1 not in f.shape)
    if isinstance(header, HeteroHeader):
        counts = dict(header.sizes)
        nbytes = values + sum(16 * (num or 0) for num in counts.values())
    else:
        counts, nbytes = _planned(header)
        nbytes += values
    return PlannedSample(
        index=index,
        name=header.name,
        kind=header.kind,
        counts=counts,
        nbytes=nbytes,
        fields={
            name: f"{f.dtype} {f.shape if -1 not in f.shape else 'made of its edges,'} on {f.entity}"
            for name, f in header.fields.items()
        },
        left_out=dict(header.left_out),
        memory=bytes_in_memory(header, order),
    )


def _planned(header: SampleHeader) -> tuple[dict[str, int | None], int]:
    """Return the rows of each entity, and the bytes of all but fields."""
    sizes, entity = header.topology.sizes, header.entity
    if header.as_points:
        entity = (stored_kind(True, header.edges) or ("", ""))[1]
        sizes = {entity: sizes[header.entity]}
    counts: dict[str, int | None] = {entity: sizes[entity]}
    num_cells = 0 if entity == "cell" else sizes.get("cell", 0)
    if "cell" in sizes:
        counts["cell"] = sizes["cell"]
    if header.edges is not None:
        rule, number = parse_edges(str(header.edges))
        nearest = sizes[entity] * min(int(number), sizes[entity] - 1) if rule == "knn" else None
        counts["edge"] = sizes.get("edge") if rule == "edge_index" else nearest
    rows = counts[entity] or 0
    return counts, rows * 8 + num_cells * 17 + (counts.get("edge") or 0) * 12
