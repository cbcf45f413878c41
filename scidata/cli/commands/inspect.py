"""``scidata inspect``: a report on raw files or on a partitioned store, as a table or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from scidata.cli.arguments import names_store, usage_error
from scidata.cli.output import (
    console,
    human_bytes,
    make_table,
    print_bullets,
    print_json,
    print_notes,
    ratio,
    shape_text,
)
from scidata.data.raw_report import StoreReport, inspect_store
from scidata.meshes.hetero import rows_named
from scidata.store.format.manifest import Number, plain
from scidata.store.reading.report import FieldReport, PartitionedReport, inspect_partitioned

_MANY_SAMPLES = 16
_MANY_COMPONENTS = 3
_OF_SAMPLES = ("index", "name", "counts", "source_counts", "nbytes", "notes")


def run_inspect(paths: Sequence[str], *, sample: int | None, as_json: bool) -> None:
    """Describe files, or a store and how well one of its samples can be cut."""
    if paths[0].endswith(".toml"):
        from scidata.cli.commands.joined import run_inspect_join

        run_inspect_join(paths[0], as_json=as_json)
        return
    stores = [path for path in paths if names_store(path)]
    if stores and len(paths) > 1:
        raise usage_error("PATH...", f"{stores[0]} is a partitioned store; inspect one of them at a time.")
    if sample is not None and not stores:
        raise usage_error("--sample", "is for stores that `scidata partition` wrote; leave it out.")
    if stores:
        partitioned = inspect_partitioned(stores[0], sample=sample or 0)
        if as_json:
            samples = [{name: getattr(each, name) for name in _OF_SAMPLES} for each in partitioned.samples]
            print_json(plain({**vars(partitioned), "samples": samples}))
        else:
            _print_partitioned(partitioned)
        return
    report = inspect_store(paths if len(paths) > 1 else paths[0])
    if as_json:
        print_json(asdict(report))
    else:
        _print_raw(report)


def _print_raw(report: StoreReport) -> None:
    out = console()
    files = f" and {len(report.paths) - 1} more files" if len(report.paths) > 1 else ""
    out.print(f"{report.paths[0]}{files}  ({report.format})", style="bold", soft_wrap=True)
    out.print(f"kind: {report.kind} ({report.kind_reason})", soft_wrap=True)
    if report.fields:
        samples = f"{report.sample_dim} ({report.num_samples} samples)" if report.sample_dim else "none (one sample)"
        split = "no shard dimension, name one" if report.shard_dim is None else f"shard dimension {report.shard_dim}"
        out.print(f"by default: sample dimension {samples}, {split}", soft_wrap=True)
    out.print()
    columns = ("array", "dims", "shape", "dtype", "chunks", "codecs", "role", "units", "size")
    table = make_table(columns, left=("array", "dims", "dtype", "codecs", "role", "units"))
    for array in report.arrays:
        shards = f" in {shape_text(array.shards)}" if array.shards else ""
        table.add_row(
            array.name,
            ", ".join(array.dims),
            shape_text(array.shape),
            array.dtype,
            shape_text(array.chunks) + shards,
            " ".join(array.codecs) or "raw",
            "field" if array.is_data else (array.role or ""),
            array.units or "",
            human_bytes(array.nbytes),
        )
    out.print(table)
    if report.inflated:
        out.print(report.inflated, soft_wrap=True)
    print_bullets("skipped", [f"{name}: {reason}" for name, reason in report.skipped.items()], "yellow")
    print_bullets("warning", report.warnings, "yellow")


def _print_partitioned(report: PartitionedReport) -> None:
    out = console()
    out.print(f"{report.path}  (scidata store)", style="bold", soft_wrap=True)
    sphere = ", on the sphere" if report.on_sphere else ""
    wraps = f", periodic by {' x '.join(f'{width:g}' for width in report.period)}" if report.period else ""
    chosen = {name: value for name in ("edges", "weights") if (value := report.settings.get(name)) is not None}
    order = ", ".join([str(report.order), *(f"{name} {value}" for name, value in chosen.items())])
    out.print(f"kind: {report.kind}{sphere}{wraps}; order {order}", soft_wrap=True)
    out.print()
    _print_samples(report)
    out.print()
    _print_fields(report)
    if report.quality is not None:
        out.print()
        _print_quality(report)
    notes = ((sample.name, note) for sample in report.samples.noted() for note in sample.notes)
    print_notes(notes, _MANY_SAMPLES, more=report.notes)


def _print_samples(report: PartitionedReport) -> None:
    entities = list(report.counts)
    table = make_table(["sample", "name", *map(rows_named, entities), "size"], left=("name",))
    for sample in map(report.samples.__getitem__, range(min(len(report.samples), _MANY_SAMPLES))):
        counts = []
        for entity in entities:
            left_out = sample.source_counts.get(entity, 0) - sample.counts[entity]
            counts.append(f"{sample.counts[entity]}" + (f" (-{left_out})" if left_out > 0 else ""))
        table.add_row(str(sample.index), sample.name, *counts, human_bytes(sample.nbytes))
    if len(report.samples) > 1:
        label = f"{len(report.samples)} samples"
        table.add_row("all", label, *(str(report.counts[e]) for e in entities), human_bytes(report.nbytes))
    console().print(table)
    if len(report.samples) > _MANY_SAMPLES:
        console().print(f"{len(report.samples) - _MANY_SAMPLES} more samples; --json lists all")
    if report.sample_dim is not None:
        each = f"each {report.sample_dim} of each" if len(report.samples) > 1 else f"each {report.sample_dim}"
        console().print(f"opens as {report.num_read} samples: {each}", soft_wrap=True)


def _print_fields(report: PartitionedReport) -> None:
    columns = ("field", "entity", "dims", "shape", "dtype", "units", "mean", "std", "min", "max")
    table = make_table(columns, left=columns[:6])
    for field in report.fields:
        units, stats = field.units or "", field.statistics
        figures = [""] * 4 if stats is None else [_figure(x) for x in (stats.mean, stats.std, stats.min, stats.max)]
        row = (field.name, field.entity, ", ".join(field.dims), _field_shape(field, report), field.dtype)
        table.add_row(*row, units, *figures)
    console().print(table)
    if not report.fields:
        console().print("no fields: positions and topology alone")


def _field_shape(field: FieldReport, report: PartitionedReport) -> str:
    """Return the shape, with the entity's size as ``N`` where samples differ in it."""
    if len(np.unique(report.samples.column("counts", field.entity))) == 1:
        return shape_text(field.shape)
    return "x".join("N" if dim == field.entity_dim else str(size) for dim, size in enumerate(field.shape))


def _figure(value: Number) -> str:
    if isinstance(value, tuple):
        more = ", …" if len(value) > _MANY_COMPONENTS else ""
        return ", ".join(f"{item:.4g}" for item in value[:_MANY_COMPONENTS]) + more
    return f"{value:.4g}"


def _print_quality(report: PartitionedReport) -> None:
    quality, out = report.quality, console()
    assert quality is not None
    out.print(f"sample {report.quality_sample} cut evenly; edges counted: {report.quality_edges}", soft_wrap=True)
    columns = ("parts", "balance", "edge\nbalance", "edges\ncut", "ghosts\n/rows", "most\nghosts/rows")
    table = make_table([*columns, "neighbours\nmean", "neighbours\nmost"])
    for part in quality.parts:
        ratios = [ratio(part.balance), ratio(part.edge_balance), f"{100 * part.edge_cut:.2f} %"]
        halo = [f"{part.halo:.3f}", f"{part.max_halo:.3f}"]
        table.add_row(str(part.num_parts), *ratios, *halo, f"{part.mean_neighbours:.1f}", str(part.max_neighbours))
    out.print(table)
