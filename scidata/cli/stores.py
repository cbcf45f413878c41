"""``scidata inspect`` and ``scidata plan`` for partitioned stores: options in, tables or JSON out."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from scidata.cli.arguments import usage_error
from scidata.cli.output import console, human_bytes, make_table, print_json, ratio
from scidata.cli.plan_output import PlanOutput
from scidata.cli.progress import progress
from scidata.cli.tables import byte_cells, print_bullets, print_notes, print_ranks, print_world, shape_text, shown_ranks
from scidata.core.options import ReadOptions
from scidata.meshes.hetero import rows_named
from scidata.store.format.manifest import Number
from scidata.store.format.places import folder_of, is_store
from scidata.store.plan import StorePlan, describe_store, plan_store
from scidata.store.reading.reader import StoreReader
from scidata.store.reading.report import FieldReport, PartitionedReport, inspect_partitioned

_MANY_SAMPLES = 16
_MANY_COMPONENTS = 3


def names_store(path: str) -> bool:
    """Say whether a path is a partitioned store, also one whose writing was interrupted."""
    if is_store(path):
        return True
    if not os.path.isdir(path):
        return False
    stem, suffix = os.path.splitext(folder_of(0))
    prefix = stem.rstrip("0")
    return any(name.startswith((prefix, f".tmp-{prefix}")) and suffix in name for name in os.listdir(path))


# -- inspect -----------------------------------------------------------------------------------------------------------


def run_inspect(path: str, *, sample: int, as_json: bool) -> None:
    """Print what a store holds and how well one of its samples can be cut."""
    report = inspect_partitioned(path, sample=sample)
    if as_json:
        print_json(report.to_dict())
    else:
        _print_report(report)


def _print_report(report: PartitionedReport) -> None:
    out = console()
    out.print(f"{report.path}  (scidata store)", style="bold", soft_wrap=True)
    sphere = ", on the sphere" if report.on_sphere else ""
    wraps = f", periodic by {' x '.join(f'{width:g}' for width in report.period)}" if report.period else ""
    out.print(f"kind: {report.kind}{sphere}{wraps}; order {report.order}{_edges_text(report)}", soft_wrap=True)
    out.print()
    _print_samples(report)
    out.print()
    _print_fields(report)
    if report.quality is not None:
        out.print()
        _print_quality(report)
    notes = ((sample.name, note) for sample in report.samples for note in sample.notes)
    print_notes(notes, _MANY_SAMPLES, more=report.notes)


def _edges_text(report: PartitionedReport) -> str:
    parts = [f"{name} {value}" for name in ("edges", "weights") if (value := report.settings.get(name)) is not None]
    return "".join(f", {part}" for part in parts)


def _print_samples(report: PartitionedReport) -> None:
    entities = list(report.counts)
    table = make_table(["sample", "name", *map(rows_named, entities), "size"], left=("name",))
    for sample in report.samples[:_MANY_SAMPLES]:
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
    sizes = {sample.counts[field.entity] for sample in report.samples}
    if len(sizes) == 1:
        return shape_text(field.shape)
    return "x".join("N" if dim == field.entity_dim else str(size) for dim, size in enumerate(field.shape))


def _figure(value: Number) -> str:
    """Return a statistic, of each component where there are a few."""
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


# -- stage -------------------------------------------------------------------------------------------------------------


def num_parts_of(axis_sizes: Mapping[str, int]) -> int:
    """Return the ranks that share a sample of a store, which has one axis."""
    if len(axis_sizes) > 1:
        split = "x".join(map(str, axis_sizes.values()))
        raise usage_error(
            "--domain",
            f"{split} splits two dimensions of a grid; the rows of a store are in one sequence, along a curve through "
            f"space, and are cut in one: --domain {math.prod(axis_sizes.values())}.",
        )
    return next(iter(axis_sizes.values()))


# -- plan --------------------------------------------------------------------------------------------------------------


def run_plan(path: str, axis_sizes: Mapping[str, int], options: ReadOptions, output: PlanOutput) -> None:
    """Plan a sample of a store for every rank of a domain and print it."""
    num_parts = num_parts_of(axis_sizes)
    output.check_picture()
    reader = StoreReader(path, options, num_parts=num_parts)
    output.check_sample(reader.num_samples)
    alone = replace(options, fields=(), sample_dim=False, steps=(0,), isel=None)
    topology = StoreReader(path, alone, num_parts=num_parts)
    with progress("planning", reader.num_parts) as tick:
        plan = plan_store(reader, topology, output.sample, tick=tick)
    about = describe_store(plan, weights=options.weights, dp=output.dp)
    notes: list[str] = []
    if output.plot is not None:
        from scidata.data.pictures.store_parts import draw_sample

        ratios = [plan.sums(rank)["amplification"] for rank in range(plan.num_ranks)]
        overall = plan.sums()["amplification"]
        notes = draw_sample(reader.store, plan.cut, plan.ghosts, output.plot, ratios=ratios, overall=overall)
    output.show(plan, about, print_store_plan, notes)


def print_store_plan(plan: StorePlan, about: Mapping[str, Any], *, every_rank: bool) -> None:
    """Print the plan of a store's sample."""
    out, entity = console(), plan.cut.entity
    out.print(f"{about['path']}: {', '.join(about['fields']) or 'no fields'}", style="bold", soft_wrap=True)
    by = f" by {about['weights']}" if about["weights"] else ""
    out.print(
        f"split: {rows_named(entity)} over {plan.num_ranks} ranks{by}; sample {plan.sample} ({_sample_text(about)}) of "
        f"{about['num_samples']}",
        soft_wrap=True,
    )
    out.print()
    others = [e for e in plan.cut.bounds if e != entity]
    columns = ["rank", "rows", rows_named(entity), *map(rows_named, others), "ghosts", "ghosts\n/rows", "neigh-\nbours"]
    columns += ["edges\ncut"] if plan.num_cut_edges is not None else []
    byte_columns = ("wanted", "fetched", "decoded", "fetched\n/wanted", "decoded\n/wanted", "chunks")
    table = make_table([*columns, *byte_columns])
    for rank, label in shown_ranks(plan, every_rank).items():
        found = plan.rank(rank)
        rows = "{}:{}".format(*found["owned"][entity])
        table.add_row(label, rows, *_row_cells(found, [entity, *others]), *byte_cells(found))
    totals = plan.totals() | {"num_neighbours": None}
    table.add_row("all", "", *_row_cells(totals, [entity, *others]), *byte_cells(totals))
    print_ranks(plan, every_rank, table)
    out.print(_halo_text(about, entity), soft_wrap=True)
    out.print("bytes are those of fields and of the index arrays that say which rows, edges and cells these are")
    if plan.by_relation:
        _print_relations(plan)
    balance = ", ".join(f"{rows_named(e)} {plan.balance(e):.3f}" for e in [entity, *others])
    out.print(f"balance (most / mean of a rank): {balance}")
    print_world(plan, about)
    if not plan.exact:
        print_bullets("note", ["some sizes are estimated from decoded sizes"], "yellow")


def _print_relations(plan: StorePlan) -> None:
    """Print the ghosts and cut edges of each relation, of all ranks and of that with most."""
    columns = ["relation", "edges", "ghosts", "most of\na rank", "edges\ncut", "most of\na rank", "%\ncut"]
    with_others = any(each[2].any() for each in plan.by_relation.values())
    columns += ["of others,\ncomputed too", "most of\na rank"] if with_others else []
    table = make_table(columns, left=("relation",))
    for name, each in plan.by_relation.items():
        num = int(plan.cut.bounds[name][-1])
        figures = [str(count) for row in each[: 2 + with_others] for count in (row.sum(), row.max())]
        cut = f"{100 * each[1].sum() / num:.2f}" if num else "-"
        table.add_row(name, str(num), *figures[:4], cut, *figures[4:])
    console().print(table)


def _sample_text(about: Mapping[str, Any]) -> str:
    """Name a sample: by its stored sample, and its rows along the dimension that numbers samples."""
    if about["sample_dim"] is None:
        return str(about["name"])
    return f"{about['name']}, {about['sample_dim']} {','.join(map(str, about['rows']))}"


def _row_cells(found: Mapping[str, Any], entities: Sequence[str]) -> list[str]:
    owned = found["num_owned"][entities[0]]
    cells = [str(found["num_owned"][entity]) for entity in entities]
    cells += [str(found["num_ghosts"]), f"{found['num_ghosts'] / owned:.3f}" if owned else "-"]
    cells.append("" if found["num_neighbours"] is None else str(found["num_neighbours"]))
    return cells if found["num_cut_edges"] is None else [*cells, str(found["num_cut_edges"])]


def _halo_text(about: Mapping[str, Any], entity: str) -> str:
    """Say whose rows the ghosts are, and how they come."""
    how = "read from disk" if about["ghosts"] == "disk" else "sent by their owners, not read"
    if about["kind"] == "hetero":
        along = " > ".join(" and ".join(layer) for layer in about["layers"])
        return f"ghosts: rows of other ranks that layers along {along} need; their fields are {how}"
    reasons = (
        [f"{about['num_hops']} hop{'s' if about['num_hops'] > 1 else ''} along edges"] if about["num_hops"] else []
    )
    if about["kind"] == "points" and about["halo"]:
        reasons.append(f"a radius of {about['halo']:g}")
    if "cell" in about["counts"] and entity != "cell":
        reasons.append("its own cells' corners")
    if not reasons and about.get("raw"):
        return "ghosts: none; a store has those within a radius"
    if not reasons:
        return "ghosts: none, as there are neither edges nor cells; --halo R adds those within a radius"
    return f"ghosts: {rows_named(entity)} of other ranks within {', and '.join(reasons)}; their fields are {how}"
