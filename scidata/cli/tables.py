"""Reports and plans as tables for people. JSON comes from the reports themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scidata.cli.commands.inspect import StoreReport
from scidata.cli.output import console, human_bytes, make_table, ratio
from scidata.errors import visible
from scidata.grids.plan import DomainPlan
from scidata.plan.totals import RankReads

if TYPE_CHECKING:
    from scidata.cli.escaped import EscapedTable

MANY_RANKS = 32  # beyond it only the summary and a few ranks are shown


def print_bullets(heading: str, lines: Sequence[str], style: str) -> None:
    """Print a list under a heading; nothing where it is empty."""
    out = console()
    for line in lines:
        out.print_parts((f"{heading}: ", style), (line, "default"))


def print_notes(notes: Iterable[tuple[str, str]], most: int, *, more: Sequence[str] = ()) -> None:
    """Print what is noted of samples, by (name, note): equal notes of several samples on one line."""
    names: dict[str, list[str]] = {}
    for name, note in notes:
        names.setdefault(note, []).append(name)
    lines = [f"{n[0]}{f' and {len(n) - 1} more' if len(n) > 1 else ''}: {note}" for note, n in names.items()]
    rest = [f"{len(lines) - most} more; --json lists all"] if len(lines) > most else []
    print_bullets("note", [*lines[:most], *rest, *more], "yellow")


def print_report(report: StoreReport) -> None:
    """Print what ``scidata inspect`` found."""
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
    print_bullets("skipped", [f"{name}: {reason}" for name, reason in report.skipped.items()], "yellow")
    print_bullets("warning", report.warnings, "yellow")


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as ``"241x480"``."""
    return "x".join(map(str, shape)) if shape else "scalar"


def print_plan(plan: DomainPlan, about: Mapping[str, Any], *, every_rank: bool) -> None:
    """Print what ``scidata plan`` found; ``about`` is the description that JSON begins with."""
    out = console()
    out.print(f"{about['path']}: {', '.join(about['fields'])}", style="bold", soft_wrap=True)
    split = ", ".join(f"{dim} over {about['domain'][axis]} ranks" for dim, axis in about["shard"].items()) or "nothing"
    out.print(f"split: {split}; sample {plan.sample} of {about['num_samples']}{_along(about)}", soft_wrap=True)
    out.print()
    dims = [visible(dim) for dim in plan.rank(0)["owned"]]  # headers may have line ends, names not
    wanted = ["owned", "halo"] if about["halo"] else ["wanted"]
    columns = ["rank", *dims, "local shape", *wanted, "fetched", "decoded", "fetched\n/wanted", "decoded\n/wanted"]
    table = make_table([*columns, "chunks"], left=dims)
    for rank, label in shown_ranks(plan, every_rank).items():
        table.add_row(*_rank_row(label, plan.rank(rank)))
    totals = plan.totals()
    table.add_row("all", *("" for _ in dims), "", *byte_cells(totals, halo=bool(about["halo"])))
    print_ranks(plan, every_rank, table)
    if about["halo"]:
        out.print("rows are the owned ones, with the halo's rows below+above them in brackets; both are wanted")
        out.print(f"ranks read {ratio(totals['halo_amplification'])} times what they own, for the halo")
    if len(about["fields"]) > 1:
        out.print(f"local shape is that of {about['fields'][0]}; bytes are of all fields")
    out.print(f"memory of a rank: at most {human_bytes(int(plan.bytes_memory.max()))}, halo included")
    out.print(f"balance (most / mean owned cells): {plan.balance:.3f}")
    out.print(f"chunks read by more than one rank: {plan.shared_chunks}")
    print_world(plan, about)
    print_bullets("note", plan.notes, "yellow")
    print_bullets("try", about["suggestions"], "green")


def _along(about: Mapping[str, Any]) -> str:
    given, many = about["steps"], isinstance(about["steps"], dict)
    texts = [f"{name}={','.join(map(str, each))}" for name, each in given.items()] if many else map(str, given)
    steps = "" if given == [0] else f", steps {(' ' if many else ',').join(texts)}"
    dims = about["sample_dim"]
    return f" along {dims if isinstance(dims, str) else ', '.join(dims)}{steps}" if dims else ""


def shown_ranks(plan: RankReads, every_rank: bool) -> dict[int, str]:
    """Return the ranks to show, with labels: of many the cheapest, the median and the dearest by bytes."""
    if plan.num_ranks <= MANY_RANKS or every_rank:
        return {rank: str(rank) for rank in range(plan.num_ranks)}
    wanted = np.maximum(plan.bytes_wanted, 1)
    order = np.argsort(np.maximum(plan.bytes_fetched, plan.bytes_decoded) / wanted, kind="stable")
    picks = {int(order[0]): "best", int(order[len(order) // 2]): "median", int(order[-1]): "worst"}
    return {rank: f"{label} {rank}" for rank, label in picks.items()}


def print_ranks(plan: RankReads, every_rank: bool, table: EscapedTable) -> None:
    """Print the table of ranks, and which of them it leaves out."""
    out = console()
    out.print(table)
    if plan.num_ranks > MANY_RANKS and not every_rank:
        out.print(f"{plan.num_ranks} ranks, of which the best, the median and the worst; --all or --json lists all")


def print_world(plan: RankReads, about: Mapping[str, Any]) -> None:
    """Print how samples spread over groups of ranks, where their number is known."""
    if about["dp"] is not None:
        console().print(
            f"dp {about['dp']} x domain {plan.num_ranks} = world size {about['world_size']}; "
            f"{about['samples_per_dp_rank']} samples for each dp rank"
        )


def _rank_row(label: str, rank: Mapping[str, Any]) -> list[str]:
    rows = []
    for dim, (start, stop) in rank["owned"].items():
        halo = "({}+{})".format(*rank["halo"][dim]) if dim in rank["halo"] else ""
        rows.append(f"{start}:{stop} {halo}".rstrip())
    return [
        label,
        *rows,
        shape_text(next(iter(rank["local_shape"].values()))),
        *byte_cells(rank, halo=bool(rank["halo"])),
    ]


def byte_cells(sums: Mapping[str, Any], *, halo: bool = False) -> list[str]:
    """Return the cells of bytes, amplifications and chunks that a row of a plan ends with."""
    wanted = ("bytes_owned", "bytes_halo") if halo else ("bytes_wanted",)
    return [
        *(human_bytes(sums[name]) for name in wanted),
        human_bytes(sums["bytes_fetched"]),
        human_bytes(sums["bytes_decoded"]),
        ratio(sums["amplification"]),
        ratio(sums["decode_amplification"]),
        str(sums["num_chunks"]),
    ]
