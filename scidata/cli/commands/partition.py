"""``scidata partition`` and ``scidata verify``: progress on stderr, the report on stdout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from scidata.cli.arguments import check_choice, cluster, usage_error
from scidata.cli.output import console, human_bytes, make_table, print_bullets, print_json, print_notes
from scidata.cli.progress import progress
from scidata.core.urls import public_text
from scidata.errors import ConfigError
from scidata.meshes.hetero import rows_named
from scidata.meshes.samples import read_samples
from scidata.store.format.store import open_store, verify
from scidata.store.partitioning.ordered import ORDERS
from scidata.store.partitioning.output import Part
from scidata.store.partitioning.partition import PartitionReport, finalize, partition

_MANY_SAMPLES = 32  # beyond it a dry run shows the first ones


def run_partition(paths: Sequence[str], options: dict[str, Any], *, dask: str | None, as_json: bool) -> None:
    """Partition ``paths[:-1]`` into ``paths[-1]`` and print a report; ``dask`` is the address of a cluster."""
    if len(paths) < 2:
        raise usage_error("SOURCE... OUT", "give the inputs, then the output folder.")
    *inputs, out = paths
    check_choice("--order", options["order"].partition(":")[0], ORDERS)
    part = None
    if options["part"] is not None:
        try:
            part = Part.parse(options["part"])
        except ConfigError as e:
            raise usage_error("--part", f"{e}.") from None
    if dask is not None and part is not None:
        raise usage_error("--dask", "excludes --part, which is for job arrays: its workers share all samples.")
    if options["dry_run"]:
        report = partition(inputs, out, **options)
    else:
        num_samples = len(read_samples(list(inputs), mesh=options["mesh"]))  # of this run, from names alone
        if part is not None:
            num_samples = len(range(part.index, num_samples, part.num_parts))
        with cluster(dask, options["jobs"]) as client, progress("partitioning", num_samples, " samples") as tick:
            report = partition(inputs, out, **options, client=client, tick=tick)
    _print(report, as_json=as_json)


def run_finalize(paths: Sequence[str], *, as_json: bool) -> None:
    """Write the manifest of the store ``paths[0]`` and print its contents."""
    if len(paths) != 1:
        raise usage_error("--finalize", "give the output folder alone.")
    _print(finalize(paths[0]), as_json=as_json)


def run_verify(path: str, *, as_json: bool) -> bool:
    """Verify a store and print the first fault; return True if it is sound."""
    with progress("verifying", len(open_store(path))) as tick:
        fault = verify(path, tick=tick)
    store = None if fault is not None else open_store(path)
    if as_json:
        counts = {} if store is None else dict(store.manifest.counts)
        print_json({"path": public_text(path), "ok": fault is None, "fault": fault and asdict(fault), "counts": counts})
        return fault is None
    if store is None:
        console().print(f"fault: {fault}", style="red", soft_wrap=True)
    else:
        rows = ", ".join(f"{num} {rows_named(entity)}" for entity, num in store.manifest.counts.items())
        console().print(f"{store.path}: sound: {len(store)} samples, {rows}", soft_wrap=True)
    return fault is None


def _print(report: PartitionReport, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(report))
        return
    out = console()
    if report.planned:
        _print_planned(report)
        return
    rows = ", ".join(f"{num} {rows_named(entity)}" for entity, num in report.counts.items())
    kept = f", {len(report.kept)} kept" if report.kept and report.written else ""
    done = f"{len(report.written)} written{kept}" if report.written else f"{len(report.kept)} there already"
    out.print(f"{report.out}: {done} of {report.num_samples} samples", style="bold", soft_wrap=True)
    out.print(f"{rows}; {human_bytes(report.nbytes)}", soft_wrap=True)
    if not report.finished:
        out.print(f"when all parts are done: scidata partition --finalize {report.out}", soft_wrap=True)
    print_notes(((name, note) for name, found in report.notes.items() for note in found), _MANY_SAMPLES)


def _print_planned(report: PartitionReport) -> None:
    out = console()
    first = report.planned[0]
    out.print(f"would write {len(report.planned)} of {report.num_samples} samples to {report.out}", style="bold")
    table = make_table(["sample", "kind", *first.counts, "size"], left=("sample", "kind"))
    for sample in report.planned[:_MANY_SAMPLES]:
        numbers = ["?" if num is None else str(num) for num in sample.counts.values()]
        table.add_row(sample.name, sample.kind, *numbers, f"≥ {human_bytes(sample.nbytes)}")
    out.print(table)
    if len(report.planned) > _MANY_SAMPLES:
        out.print(f"{len(report.planned) - _MANY_SAMPLES} more; --json lists all")
    out.print(f"in all at least {human_bytes(report.nbytes)}")
    most = max(sample.memory for sample in report.planned)
    out.print(f"memory of a process: about {human_bytes(most + (384 << 20))}; with less, --memory, in passes over disk")
    print_bullets("field", [f"{name}: {about}" for name, about in first.fields.items()], "green")
    print_bullets("left out", [f"{name}: {reason}" for name, reason in first.left_out.items()], "yellow")
