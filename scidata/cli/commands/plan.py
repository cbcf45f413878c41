"""``scidata plan``: the reads of every rank of a domain as a table, JSON or a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scidata.cli.arguments import names_store, num_parts_of, usage_error
from scidata.cli.output import console, human_bytes, make_table, print_bullets, print_json, ratio, shape_text
from scidata.cli.progress import progress
from scidata.core.options import ReadOptions
from scidata.core.types import IntArray
from scidata.core.urls import public_text
from scidata.data.node import memory_share
from scidata.data.raw_kind import kind_of_raw
from scidata.errors import visible
from scidata.grids.plan import GridPlan, cheaper_cuts, layout_advice, plan_grid
from scidata.grids.reader import GridReader
from scidata.loader.promise import promise_of
from scidata.meshes.hetero import rows_named
from scidata.store.plan import StorePlan, forecast_ghosts, plan_store
from scidata.store.raw_points.reader import PointsReader
from scidata.store.raw_points.windows_reader import points_reader
from scidata.store.reading.reader import StoreReader

MANY_RANKS = 32  # beyond it only the summary and a few ranks are shown

_BYTES = ("fetched", "decoded", "fetched\n/wanted", "decoded\n/wanted", "chunks")


@dataclass(frozen=True, kw_only=True)
class PlanOutput:
    """Which sample is planned, and how that is shown: the options that all kinds share, as typed."""

    sample: int
    dp: int | None
    plot: str | None
    overwrite: bool
    every_rank: bool
    counted: bool
    as_json: bool


def run_plan(path: str, axis_sizes: Mapping[str, int], options: ReadOptions, output: PlanOutput) -> None:
    """Plan a sample for every rank of a domain and print it; ``axis_sizes`` are the domain's ranks."""
    reader = reader_of(path, axis_sizes, options, output)
    if not 0 <= output.sample < reader.num_samples:
        raise usage_error("--sample", f"{output.sample} is out of range: there are {reader.num_samples} samples.")
    if output.counted:
        _print_counted(reader, output)
        return
    plan, tips = planned(reader, output.sample)
    notes = [] if output.plot is None else _draw(plan, output.plot)
    if output.as_json:
        picture = {} if output.plot is None else {"plot": output.plot, "plot_notes": notes}
        print_json(as_plain(plan, path, output.dp, tips) | picture)
        return
    print_plan(plan, public_text(path), dp=output.dp, tips=tips or (), every_rank=output.every_rank)
    if output.plot is not None:
        console().print(f"picture: {output.plot}", soft_wrap=True)
        print_bullets("note", notes, "yellow")


def planned(
    reader: GridReader | StoreReader | PointsReader, sample: int
) -> tuple[GridPlan | StorePlan, list[str] | None]:
    """Plan a sample for every rank of a domain; also name cheaper options, of a grid."""
    if isinstance(reader, GridReader):
        with progress("planning", reader.partition.num_parts * len(reader.fields)) as tick:
            plan = plan_grid(reader, sample, tick=tick)
            return plan, suggestions(plan)
    with progress("planning", reader.num_parts) as tick:
        return plan_store(reader, sample, tick=tick), None


def as_plain(plan: GridPlan | StorePlan, path: str, dp: int | None, tips: list[str] | None) -> dict[str, object]:
    """Return a plan as JSON has it; ``tips``, of grids, name cheaper options."""
    more = {} if tips is None else {"suggestions": tips}
    ranks = [plan.rank(rank) for rank in range(plan.num_ranks)]
    return {**plan.about(dp), **more, "path": public_text(path), "totals": plan.totals(), "ranks": ranks}


def reader_of(
    path: str, axis_sizes: Mapping[str, int], options: ReadOptions, output: PlanOutput
) -> GridReader | StoreReader | PointsReader:
    """Open the data; before that refuse a picture that cannot be drawn."""
    if names_store(path) and options.time is None:
        num_parts = num_parts_of(axis_sizes)
        _check_picture(output)
        return StoreReader(path, options, num_parts=num_parts)
    if options.kind in ("mesh", "graph"):
        raise usage_error("--kind", f"a raw {options.kind} is not planned; write it as a store, and plan that.")
    kind, _ = kind_of_raw(path, options)
    if kind == "grid":
        _check_picture(output)
        num_ranks = math.prod(axis_sizes.values()) * (output.dp or 1)
        return GridReader(path, options, axis_sizes=axis_sizes, memory_bytes=memory_share(num_ranks))
    if output.plot is not None:
        raise usage_error("--plot", f"draws grids and stores; write one: scidata partition {path} OUT --kind points.")
    return points_reader(path, options, num_parts=math.prod(axis_sizes.values()))


def _check_picture(output: PlanOutput) -> None:
    if output.plot is not None:
        from scidata.data.pictures.grid_parts import check_picture

        check_picture(output.plot, overwrite=output.overwrite)


def _draw(plan: GridPlan | StorePlan, path: str) -> list[str]:
    """Draw the cut; return the names of parts that are left out."""
    from scidata.data.pictures.grid_parts import draw_reader
    from scidata.data.pictures.store_parts import draw_sample

    ratios = [plan.sums(rank)["amplification"] for rank in range(plan.num_ranks)]
    overall = plan.sums()["amplification"]
    if isinstance(plan, GridPlan):
        draw_reader(plan.reader, path, ratios=ratios, overall=overall)
        return []
    assert isinstance(plan.reader, StoreReader)  # raw points have no picture
    return draw_sample(plan.reader.store, plan.cut, plan.ghosts, path, ratios=ratios, overall=overall)


def suggestions(plan: GridPlan) -> list[str]:
    """Name options, or other chunks, that would lower the amplification, with the new value."""
    texts = []
    for changed, other in cheaper_cuts(plan):
        asked = " ".join(f"--{name} {value}" for name, value in changed.items())
        balance = f" (balance {other.balance:.2f})" if other.balance > 1.05 else ""
        texts.append(f"{asked} gives {other.cost:.2f} instead of {plan.cost:.2f}{balance}")
    return texts + layout_advice(plan)


# -- tables ------------------------------------------------------------------------------------------------------------


def print_plan(
    plan: GridPlan | StorePlan, path: str, *, dp: int | None = None, tips: Sequence[str] = (), every_rank: bool
) -> None:
    """Print a plan as a table, with notes under it."""
    fields = ", ".join(plan.reader.fields) or "no fields"
    console().print(f"{path}: {fields}", style="bold", soft_wrap=True)
    if isinstance(plan, GridPlan):
        _print_grid(plan, every_rank)
    else:
        _print_store(plan, every_rank)
    if dp is not None:
        console().print(
            f"dp {dp} x domain {plan.num_ranks} = world size {plan.num_ranks * dp}; "
            f"{-(-plan.reader.num_samples // dp)} samples for each dp rank"
        )
    print_bullets("note", plan.notes, "yellow")
    print_bullets("try", tips, "green")


def _print_ranks(
    plan: GridPlan | StorePlan,
    every_rank: bool,
    columns: Sequence[str],
    cells_of: Callable[[int | None], list[str]],
    *,
    left: Sequence[str] = (),
) -> None:
    """Print a row for each rank, or some of many, and of all; ``cells_of`` gives the cells after the label."""
    table = make_table(["rank", *columns, *_BYTES], left=left)
    for rank, label in _shown_ranks(plan, every_rank).items():
        table.add_row(label, *cells_of(rank), *_byte_cells(plan, rank))
    table.add_row("all", *cells_of(None), *_byte_cells(plan, None))
    console().print(table)
    if plan.num_ranks > MANY_RANKS and not every_rank:
        console().print(
            f"{plan.num_ranks} ranks, of which the best, the median and the worst; --all or --json lists all"
        )


def _shown_ranks(plan: GridPlan | StorePlan, every_rank: bool) -> dict[int, str]:
    """Return the ranks to show, with labels: of many the cheapest, the median and the dearest by bytes."""
    if plan.num_ranks <= MANY_RANKS or every_rank:
        return {rank: str(rank) for rank in range(plan.num_ranks)}
    wanted = np.maximum(plan.bytes_wanted, 1)
    order = np.argsort(np.maximum(plan.bytes_fetched, plan.bytes_decoded) / wanted, kind="stable")
    picks = {int(order[0]): "best", int(order[len(order) // 2]): "median", int(order[-1]): "worst"}
    return {rank: f"{label} {rank}" for rank, label in picks.items()}


def _byte_cells(plan: GridPlan | StorePlan, rank: int | None) -> list[str]:
    sums = plan.sums(rank)
    return [
        human_bytes(sums["bytes_fetched"]),
        human_bytes(sums["bytes_decoded"]),
        ratio(sums["amplification"]),
        ratio(sums["decode_amplification"]),
        str(sums["num_chunks"]),
    ]


def _print_grid(plan: GridPlan, every_rank: bool) -> None:
    out, reader, partition = console(), plan.reader, plan.reader.partition
    sizes = partition.axis_sizes
    split = ", ".join(f"{dim} over {sizes[axis]} ranks" for dim, axis in partition.axis_of_dim.items()) or "nothing"
    out.print(f"split: {split}; sample {plan.sample} of {reader.num_samples}{_along(reader)}", soft_wrap=True)
    out.print()
    dims = [dim for dim in partition.sizes if dim in partition.axis_of_dim or dim in partition.halo]
    wanted, halo = plan.bytes_wanted, plan.bytes_halo
    parts = {"owned": wanted - halo, "halo": halo} if partition.halo else {"wanted": wanted}

    def cells(rank: int | None) -> list[str]:
        if rank is None:
            return [*("" for _ in dims), "", *(human_bytes(int(each.sum())) for each in parts.values())]
        at = partition.coordinate(rank)
        local = shape_text(reader.buffer_specs(at)[reader.fields[0]].shape)
        return [*(_rows(plan, dim, at) for dim in dims), local, *(human_bytes(int(x[rank])) for x in parts.values())]

    names = [visible(dim) for dim in dims]  # headers may have line ends, names not
    _print_ranks(plan, every_rank, [*names, "local shape", *parts], cells, left=names)
    if partition.halo:
        owned = int((wanted - halo).sum())
        out.print("rows are the owned ones, with the halo's rows below+above them in brackets; both are wanted")
        out.print(f"ranks read {ratio(int(wanted.sum()) / owned if owned else None)} times what they own, for the halo")
    if len(reader.fields) > 1:
        out.print(f"local shape is that of {reader.fields[0]}; bytes are of all fields")
    out.print(
        f"memory of a rank's part of a sample: at most {human_bytes(int(plan.bytes_memory.max()))}, halo included"
    )
    one, two = (promise_of(reader, int(plan.bytes_memory.argmax()), batch_size=size) for size in (1, 2))
    out.print(
        f"memory of a loader: about {human_bytes(one.total)} a rank (decoded rows, kept or on their way, "
        f"{human_bytes(one.pool)}, batches {human_bytes(one.batches)}, chunks in decoding {human_bytes(one.chunks)}), "
        f"and {human_bytes(two.total - one.total)} for each further sample of a batch",
        soft_wrap=True,
    )
    out.print(f"balance (most / mean owned cells): {plan.balance:.3f}")
    out.print(f"chunks read by more than one rank: {plan.shared_chunks}")


def _rows(plan: GridPlan, dim: str, at: Mapping[str, int]) -> str:
    """Return the rows that a rank owns along a dimension, and those of its halo in brackets."""
    partition = plan.reader.partition
    halo = "({}+{})".format(*partition.halo_rows(dim, at)) if dim in partition.halo else ""
    return "{}:{} {}".format(*partition.owned_rows(dim, at), halo).rstrip()


def _along(reader: GridReader) -> str:
    """Name the dimension of samples, and their steps where they have others than their own."""
    given = reader.field_steps.as_json()
    if isinstance(given, dict):
        texts = " ".join(f"{name}={','.join(map(str, each))}" for name, each in given.items())
    else:
        texts = ",".join(map(str, given))
    steps = "" if given == [0] else f", steps {texts}"
    return f" along {', '.join(reader.sample_dims)}{steps}" if reader.sample_dims else ""


def _print_store(plan: StorePlan, every_rank: bool) -> None:
    out, reader, entity = console(), plan.reader, plan.cut.entity
    weights = reader.options.weights
    out.print(
        f"split: {rows_named(entity)} over {plan.num_ranks} ranks{f' by {weights}' if weights is not None else ''}; "
        f"sample {plan.sample} ({_sample_text(plan)}) of {reader.num_samples}",
        soft_wrap=True,
    )
    out.print()
    entities = [entity, *(each for each in plan.cut.bounds if each != entity)]
    owned = {each: plan.num_owned(each) for each in entities}
    num_ghosts, num_cut = np.array([len(ids) for ids in plan.ghosts]), plan.num_cut_edges

    def cells(rank: int | None) -> list[str]:
        def of(counts: IntArray) -> int:
            return int(counts.sum() if rank is None else counts[rank])

        return [
            "" if rank is None else "{}:{}".format(*plan.cut.owned(entity, rank)),
            *(str(of(owned[each])) for each in entities),
            str(of(num_ghosts)),
            f"{of(num_ghosts) / of(owned[entity]):.3f}" if of(owned[entity]) else "-",
            "" if rank is None else str(plan.num_neighbours[rank]),
            *([] if num_cut is None else [str(of(num_cut))]),
            human_bytes(of(plan.bytes_wanted)),
        ]

    columns = ["rows", *map(rows_named, entities), "ghosts", "ghosts\n/rows", "neigh-\nbours"]
    columns += ["wanted"] if num_cut is None else ["edges\ncut", "wanted"]
    _print_ranks(plan, every_rank, columns, cells)
    out.print(_halo_text(plan), soft_wrap=True)
    out.print("bytes are those of fields and of the index arrays that say which rows, edges and cells these are")
    if plan.by_relation:
        _print_relations(plan)
    balance = ", ".join(f"{rows_named(each)} {plan.balance(each):.3f}" for each in entities)
    out.print(f"balance (most / mean of a rank): {balance}")


def _print_relations(plan: StorePlan) -> None:
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


def _print_counted(reader: GridReader | StoreReader | PointsReader, output: PlanOutput) -> None:
    """Print the ghosts that were counted when a store was written."""
    if not isinstance(reader, StoreReader):
        raise usage_error("--counted", "is for stores.")
    rows, info = forecast_ghosts(reader, output.sample), reader.sample_info(output.sample)
    num_rows = info.counts[info.entity]
    if output.as_json:
        print_json({"path": reader.path, "sample": output.sample, "num_rows": num_rows, "ghosts": rows})
        return
    table = make_table(
        ["ranks", f"{rows_named(info.entity)}\nof a rank", "ghosts", "ghosts\n/rows", "most of\na rank", ""]
    )
    for ranks, total, most, counted in (each.values() for each in rows):  # counted are those of many rows alone
        of_rows = -(-num_rows // ranks), total, f"{total / num_rows:.3f}", most, "" if counted else "about"
        table.add_row(str(ranks), *map(str, of_rows))
    console().print(table)


def _sample_text(plan: StorePlan) -> str:
    reader = plan.reader
    if isinstance(reader, PointsReader):
        return reader.sample_info(plan.sample).name
    name, dim = reader.sample_info(plan.sample).name, reader.numbering.sample_dim
    return name if dim is None else f"{name}, {dim} {','.join(map(str, reader.numbering.rows(plan.sample)))}"


def _halo_text(plan: StorePlan) -> str:
    """Say whose rows the ghosts are, and how they come."""
    reader, entity = plan.reader, plan.cut.entity
    if isinstance(reader, PointsReader):
        return "ghosts: none; a store has those within a radius"
    how = "read from disk" if reader.ghosts == "disk" else "sent by their owners, not read"
    if reader.kind == "hetero":
        along = " > ".join(" and ".join(layer) for layer in reader.layers)
        return f"ghosts: rows of other ranks that layers along {along} need; their fields are {how}"
    hops = reader.num_hops
    reasons = [f"{hops} hop{'s' if hops > 1 else ''} along edges"] if hops else []
    if reader.kind == "points" and reader.halo:
        reasons.append(f"a radius of {reader.halo:g}")
    if "cell" in reader.sample_info(plan.sample).counts and entity != "cell":
        reasons.append(
            "the corners of cells that have an owned one" if reader.ghost_cells else "its own cells' corners"
        )
    if not reasons:
        return "ghosts: none, as there are neither edges nor cells; --halo R adds those within a radius"
    return f"ghosts: {rows_named(entity)} of other ranks within {', and '.join(reasons)}; their fields are {how}"
