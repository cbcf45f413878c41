"""``scidata.partition``: raw meshes, clouds and graphs in, a store for any number of ranks out."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scidata._files import files, is_url
from scidata.errors import ConfigError, CorruptDataError, near_matches
from scidata.partition.checks import REMEDIES, Finding, Repaired, check_sample, repair
from scidata.series import expand_paths
from scidata.store import MANIFEST, output, read_sample_info, verify_sample, write_manifest
from scidata.store.jobs import run_jobs
from scidata.store.manifest import SCHEMA_VERSION, Manifest, SampleInfo
from scidata.store.ordered import ORDERS, OrderOptions, order_sample
from scidata.store.output import Part
from scidata.store.write import MAX_FIELD_BYTES, write_sample
from scidata.topology import RawSample, RawSamples, SampleHeader, parse_edges, read_samples

__all__ = ["KEEPABLE", "PartitionReport", "PlannedSample", "finalize", "partition"]

#: Findings that spoil nothing: they may also be kept as they are.
KEEPABLE = ("crowded_faces", "duplicate_edges", "self_loops")

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, kw_only=True)
class PlannedSample:
    """What a dry run says of a sample: rows of each entity (None: known only once edges are made) and bytes."""

    index: int
    name: str
    kind: str
    counts: dict[str, int | None]
    nbytes: int
    fields: dict[str, str]
    left_out: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class PartitionReport:
    """What a run did.

    Attributes
    ----------
    num_samples
        Of the whole store; this run had ``written`` and ``kept`` ones.
    finished
        True where the manifest was written: the store opens.
    counts, nbytes
        Over the samples of this run.
    notes
        By sample: fallbacks of the order, repairs.
    planned
        Of a dry run, else empty.
    """

    out: str
    num_samples: int
    written: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    finished: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0
    notes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    planned: tuple[PlannedSample, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Task:
    """Everything that decides what the store will hold; pickles, so that every process does the same."""

    inputs: tuple[str, ...]
    kind: str | None
    mesh: str | None
    points: tuple[str, ...] | None
    edges: str | None
    fields: tuple[str, ...] | None
    topology: str | None
    order: OrderOptions
    repair: tuple[str, ...]
    keep: tuple[str, ...]
    allow_missing: bool
    allow_external: bool
    max_field_bytes: int

    def __post_init__(self) -> None:
        if self.order.order not in ORDERS:
            hint = near_matches(self.order.order, ORDERS)
            raise ConfigError(f"order must be one of {', '.join(ORDERS)}, not {self.order.order!r}{hint}")
        for kind in self.repair:
            if kind != "all" and kind not in REMEDIES:
                raise ConfigError(f"{kind!r} is no repair{near_matches(kind, [*REMEDIES, 'all'])}")
        for kind in self.keep:
            if kind not in KEEPABLE:
                raise ConfigError(f"{kind!r} cannot be kept; what can: {', '.join(KEEPABLE)}")

    @functools.cached_property
    def samples(self) -> RawSamples:
        """The raw samples; metadata is read when they are asked."""
        return read_samples(
            self.inputs,
            kind=self.kind,
            mesh=self.mesh,
            points=self.points,
            edges=self.edges,
            fields=self.fields,
            topology=self.topology,
            allow_missing=self.allow_missing,
            allow_external=self.allow_external,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The options that the manifest records."""
        return {
            "order": self.order.order,
            "weights": self.order.weights,
            "kind": self.kind,
            "points": self.points,
            "edges": self.edges,
            "fields": self.fields,
            "topology": self.topology,
            "repair": self.repair,
            "keep": self.keep,
        }

    @functools.cached_property
    def recipe(self) -> str:
        """Digest of options and inputs, by name and size: what resumed and partial runs must agree in."""
        sources = [
            (os.path.basename(p.rstrip("/")), _size(p)) for p in (*self.inputs, *([self.mesh] if self.mesh else []))
        ]
        data = [SCHEMA_VERSION, self.settings, self.allow_missing, sources]
        return hashlib.blake2b(json.dumps(data).encode(), digest_size=8).hexdigest()


def _size(path: str) -> int | None:
    return os.path.getsize(path) if not is_url(path) and os.path.isfile(path) else None


def partition(
    inputs: Paths,
    out: str | os.PathLike[str],
    *,
    kind: str | None = None,
    mesh: str | os.PathLike[str] | None = None,
    points: str | Sequence[str] | None = None,
    edges: str | None = None,
    fields: str | Sequence[str] | None = None,
    topology: str | None = None,
    order: str = "hilbert",
    weights: str | None = None,
    repair: str | Sequence[str] = (),
    keep: str | Sequence[str] = (),
    jobs: int = 1,
    part: str | tuple[int, int] | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    allow_missing: bool = False,
    allow_external: bool = False,
    max_field_bytes: int = MAX_FIELD_BYTES,
    tick: Callable[[float], None] | None = None,
) -> PartitionReport:
    """Write a store that any number of ranks reads, from raw meshes, point clouds or graphs.

    Parameters
    ----------
    inputs
        Files, globs or URLs; with ``mesh``, the file of the topology, all of them hold fields of one sample.
    out
        A new folder.
    kind, points, edges, fields, topology, allow_missing, allow_external
        As in :func:`scidata.topology.read_samples`.
    order
        ``"hilbert"``, ``"rcb"``, ``"metis"`` (needs the extra ``metis``, smallest halos) or ``"rows"`` (as given).
    weights
        What the store's prefix sums count: None rows, ``"edges"`` edges by destination, else a field's values.
    repair
        Kinds of faults that may be left out of the store, or ``"all"``; see ``scidata.partition.checks.REMEDIES``.
    keep
        Kinds of faults that stay as they are: ``"crowded_faces"``, ``"duplicate_edges"``, ``"self_loops"``.
    jobs
        Samples processed at once, each in a process of its own.
    part
        ``"i/n"`` or ``(i, n)``: only every ``n``-th sample from ``i`` on, for job arrays; :func:`finalize` then ends
        the store.
    dry_run
        Only say what would be written.
    overwrite
        Remove the store that is there.
    resume
        Keep its samples that are whole, by their digests, and write the others. The inputs must be the same; their
        names and sizes are compared, not their content.
    max_field_bytes
        Largest field that is held in memory; a larger one goes through a scratch file in ``out``.
    tick
        Called with the share of a sample that was done, at most 1 for each of the samples of this run.

    Returns
    -------
    PartitionReport

    Raises
    ------
    ConfigError
        The output exists, another run is writing it, or an argument or a sample that does not allow what was asked.
    CorruptDataError
        A sample with faults that are not to be repaired; they are listed.
    OSError
        The disk is full: the samples before are kept for ``resume``; the store does not open.
    """
    task = _Task(
        inputs=expand_paths(inputs),
        kind=kind,
        mesh=None if mesh is None else os.fspath(mesh),
        points=_names(points),
        edges=edges,
        fields=_names(fields),
        topology=topology,
        order=OrderOptions(order=order, weights=weights),
        repair=_names(repair) or (),
        keep=_names(keep) or (),
        allow_missing=allow_missing,
        allow_external=allow_external,
        max_field_bytes=max_field_bytes,
    )
    chosen = Part.parse(part) if isinstance(part, str) else None if part is None else Part(*part)
    if overwrite and resume:
        raise ConfigError("overwrite and resume exclude each other: one removes what the other keeps")
    if jobs < 1:
        raise ConfigError(f"jobs must be at least 1, not {jobs}")
    target = os.fspath(out)
    if is_url(target):
        raise ConfigError(f"{target}: stores are written to a local folder; copy it to the URL afterwards")
    first, step = (0, 1) if chosen is None else (chosen.index, chosen.num_parts)
    indices = range(first, len(task.samples), step)
    if dry_run:
        planned = tuple(_planned(index, task.samples.header(index)) for index in indices)
        nbytes = sum(sample.nbytes for sample in planned)
        return PartitionReport(out=target, num_samples=len(task.samples), planned=planned, nbytes=nbytes)
    return _run(
        task,
        target,
        indices,
        part=chosen,
        jobs=jobs,
        overwrite=overwrite,
        resume=resume,
        tick=tick or (lambda share: None),
    )


def _names(names: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    return tuple(n.strip() for n in names.split(",") if n.strip()) if isinstance(names, str) else tuple(names)


def _run(
    task: _Task,
    out: str,
    indices: range,
    *,
    part: Part | None,
    jobs: int,
    overwrite: bool,
    resume: bool,
    tick: Callable[[float], None],
) -> PartitionReport:
    with output.claim_output(out, part):
        there = [index for index in output.finished_samples(out) if part is None or index in indices]
        manifest = os.path.exists(os.path.join(out, MANIFEST))
        if (there or manifest) and not (overwrite or resume):
            found = "a finished store" if manifest else f"an unfinished store of {len(there)} samples"
            raise ConfigError(f"{out}: {found} is there; --resume completes it, --overwrite replaces it")
        if overwrite:
            output.remove_samples(out, there)
            there = []
        output.remove_temporaries(out, None if part is None else indices)
        kept = _whole_samples(task, out, there)
        for _ in kept:
            tick(1.0)
        todo = [index for index in indices if index not in kept]
        if todo and manifest:
            output.remove_samples(out, ())
        try:
            run_jobs(functools.partial(_process, task, out), todo, num_jobs=jobs, tick=tick)
        except BaseException:
            output.remove_temporaries(out, todo)
            raise
        infos = [read_sample_info(out, index) for index in indices]
        finished = part is None and _finish(out, infos) is not None
    return _report(out, len(task.samples), infos, written=todo, kept=kept, finished=finished)


def _whole_samples(task: _Task, out: str, there: Iterable[int]) -> list[int]:
    """Return the samples of an earlier run that need not be written again; remove damaged ones.

    Raises
    ------
    ConfigError
        They were made from other inputs or with other options.
    """
    whole = []
    for index in there:
        try:
            info = verify_sample(out, index)
        except CorruptDataError:
            output.remove_samples(out, [index])
            continue
        if info.recipe != task.recipe or info.num_samples != len(task.samples):
            raise ConfigError(
                f"{out}: sample {index} ({info.name}) was made from other inputs or with other options "
                f"({_difference(info, task)}); resume with the same ones, or --overwrite"
            )
        whole.append(index)
    return whole


def _difference(info: SampleInfo, task: _Task) -> str:
    now = json.loads(json.dumps(task.settings))
    for name, value in info.settings.items():
        if now.get(name) != value:
            return f"{name} was {value!r}, now {now.get(name)!r}"
    if info.num_samples != len(task.samples):
        return f"there were {info.num_samples} samples, now {len(task.samples)}"
    return "names or sizes of the input files differ"


def _finish(out: str, infos: list[SampleInfo]) -> Manifest:
    manifest = write_manifest(out, infos)
    files().close()  # forget what this process had open of a store that was here before
    return manifest


def _report(
    out: str, num_samples: int, infos: list[SampleInfo], *, written: list[int], kept: list[int], finished: bool
) -> PartitionReport:
    entities = sorted({entity for info in infos for entity in info.counts})
    return PartitionReport(
        out=out,
        num_samples=num_samples,
        written=tuple(written),
        kept=tuple(kept),
        finished=finished,
        counts={entity: sum(info.counts.get(entity, 0) for info in infos) for entity in entities},
        nbytes=sum(info.nbytes for info in infos),
        notes={info.name: info.notes for info in infos if info.notes},
    )


def finalize(out: str | os.PathLike[str]) -> PartitionReport:
    """Write the manifest of a store whose parts are all done.

    Raises
    ------
    ConfigError
        Samples are missing, a part is still running, or there is no store.
    CorruptDataError, FieldMismatchError
        A sample's description is damaged, or the samples do not agree.
    """
    target = os.fspath(out)
    if not output.finished_samples(target):
        raise ConfigError(f"{target}: there are no samples to finish; run `scidata partition SOURCE... {target}` first")
    with output.claim_output(target, None):
        there = output.finished_samples(target)
        infos = [read_sample_info(target, index) for index in there]
        expected = infos[0].num_samples
        missing = sorted(set(range(expected)) - set(there))
        if missing:
            shown = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
            raise ConfigError(
                f"{target}: {len(missing)} of {expected} samples are missing ({shown}); run their parts again with "
                "--resume, then --finalize"
            )
        if len(there) > expected:
            raise ConfigError(f"{target}: has {len(there)} samples, but was made of {expected}; runs were mixed")
        output.remove_temporaries(target, None)
        _finish(target, infos)
    return _report(target, expected, infos, written=[], kept=there, finished=True)


def _process(task: _Task, out: str, index: int, tick: Callable[[float], None]) -> None:
    """Read, check, order and write one sample."""
    raw = task.samples[index]
    repaired, notes = _sound(raw, task)
    sample = order_sample(
        raw,
        task.order,
        index=index,
        num_samples=len(task.samples),
        recipe=task.recipe,
        settings=task.settings,
        repaired=repaired,
        notes=notes,
    )
    free = shutil.disk_usage(out).free
    if sample.nbytes > free:
        raise OSError(
            errno.ENOSPC,
            f"sample {index} ({raw.name}) takes {sample.nbytes} bytes, and {free} are free; free some space and run "
            "again with --resume, or write to another disk",
            out,
        )
    write_sample(out, sample, max_field_bytes=task.max_field_bytes, tick=tick)


def _sound(raw: RawSample, task: _Task) -> tuple[Repaired | None, tuple[str, ...]]:
    """Check a sample; return its arrays after the repairs that were allowed, and what they were.

    Raises
    ------
    CorruptDataError
        Faults that may be neither repaired nor kept.
    """
    every = check_sample(raw, num_nodes=raw.num_nodes)
    findings = [f for f in every if f.kind not in task.keep]
    if not findings:
        return None, ()
    if kept := [f.kind for f in every if f.kind in task.keep and f.kind != "crowded_faces"]:
        raise ConfigError(
            f"sample {raw.name}: {kept[0]} are to be kept, but {findings[0].message}; a repair would drop them too: "
            "repair both, or mend the source"
        )
    allowed = [f for f in findings if f.repairable and ("all" in task.repair or f.kind in task.repair)]
    refused = [f for f in findings if f not in allowed]
    if refused:
        raise CorruptDataError(f"sample {raw.name}: " + "; ".join(f.message + _ways_out(f) for f in refused))
    kinds = [f.kind for f in findings]
    return repair(raw, findings, kinds, num_nodes=raw.num_nodes), tuple(_repaired(f) for f in findings)


def _ways_out(finding: Finding) -> str:
    return f", or keep {finding.kind!r}" if finding.kind in KEEPABLE else ""


def _repaired(finding: Finding) -> str:
    return f"repaired {finding.kind}: {finding.count}, of rows {list(finding.first_rows)} on; {REMEDIES[finding.kind]}"


def _planned(index: int, header: SampleHeader) -> PlannedSample:
    """Describe a sample from metadata alone."""
    sizes = header.topology.sizes
    entity = "point" if header.kind == "points" else "node"
    counts: dict[str, int | None] = {entity: sizes[entity]}
    if "cell" in sizes:
        counts["cell"] = sizes["cell"]
    if header.edges is not None:
        counts["edge"] = _num_edges(header, sizes[entity])
    nbytes = sum(_nbytes(f.shape, f.dtype.itemsize) for f in header.fields.values())
    nbytes += counts[entity] * 8 + (counts.get("cell") or 0) * 17 + (counts.get("edge") or 0) * 12  # type: ignore[operator]
    return PlannedSample(
        index=index,
        name=header.name,
        kind=header.kind,
        counts=counts,
        nbytes=nbytes,
        fields={name: f"{f.dtype} {f.shape} on {f.entity}" for name, f in header.fields.items()},
        left_out=dict(header.left_out),
    )


def _nbytes(shape: tuple[int, ...], itemsize: int) -> int:
    total = itemsize
    for size in shape:
        total *= size
    return total


def _num_edges(header: SampleHeader, num_nodes: int) -> int | None:
    rule, number = parse_edges(str(header.edges))
    if rule == "edge_index":
        return header.topology.sizes.get("edge")
    return num_nodes * min(int(number), num_nodes - 1) if rule == "knn" else None
