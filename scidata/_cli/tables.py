"""Reports and plans as tables for people. JSON comes from the reports themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scidata._cli.output import console, human_bytes, make_table, ratio
from scidata._cli.planning import DomainPlan
from scidata.inspect import StoreReport

__all__ = ["MANY_RANKS", "print_bullets", "print_plan", "print_report"]

MANY_RANKS = 32  # beyond it only the summary and a few ranks are shown


def print_bullets(heading: str, lines: Sequence[str], style: str) -> None:
    """Print a list under a heading; nothing where it is empty."""
    from rich.text import Text

    out = console()
    for line in lines:
        text = Text(f"{heading}: ", style=style)
        text.append(line, style="default")
        out.print(text, soft_wrap=True)


def print_report(report: StoreReport) -> None:
    """Print what ``scidata inspect`` found."""
    out = console()
    files = f" and {len(report.paths) - 1} more files" if len(report.paths) > 1 else ""
    out.print(f"{report.paths[0]}{files}  ({report.format})", style="bold", soft_wrap=True)
    out.print(f"kind: {report.kind} ({report.kind_reason})", soft_wrap=True)
    if report.fields:
        samples = f"{report.sample_dim} ({report.num_samples} samples)" if report.sample_dim else "none (one sample)"
        out.print(f"by default: sample dimension {samples}, shard dimension {report.shard_dim}", soft_wrap=True)
    out.print()
    columns = ("array", "dims", "shape", "dtype", "chunks", "codecs", "role", "units", "size")
    table = make_table(columns, left=("array", "dims", "dtype", "codecs", "role", "units"))
    for array in report.arrays:
        shards = f" in {_shape(array.shards)}" if array.shards else ""
        table.add_row(
            array.name,
            ", ".join(array.dims),
            _shape(array.shape),
            array.dtype,
            _shape(array.chunks) + shards,
            " ".join(array.codecs) or "raw",
            "field" if array.is_data else (array.role or ""),
            array.units or "",
            human_bytes(array.nbytes),
        )
    out.print(table)
    print_bullets("skipped", [f"{name}: {reason}" for name, reason in report.skipped.items()], "yellow")
    print_bullets("warning", report.warnings, "yellow")


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"


def print_plan(plan: DomainPlan, about: Mapping[str, Any], *, every_rank: bool) -> None:
    """Print what ``scidata plan`` found; ``about`` is the description that JSON begins with."""
    out = console()
    out.print(f"{about['path']}: {', '.join(about['fields'])}", style="bold", soft_wrap=True)
    split = ", ".join(f"{dim} over {about['domain'][axis]} ranks" for dim, axis in about["shard"].items()) or "nothing"
    out.print(f"split: {split}; sample {plan.sample} of {about['num_samples']}{_along(about)}", soft_wrap=True)
    out.print()
    several = len(about["fields"]) > 1 or len(about["shard"]) > 1
    columns = ["rank", "owned rows", *(["halo"] if about["halo"] else []), "local shape", "memory", "wanted", "fetched"]
    columns += ["decoded", "fetched\n/wanted", "decoded\n/wanted", "chunks"]
    table = make_table(columns, left=("owned rows", "halo"))
    shown = list(range(plan.num_ranks))
    labels = {rank: str(rank) for rank in shown}
    if plan.num_ranks > MANY_RANKS and not every_rank:
        labels = _telling_ranks(plan)
        shown = list(labels)
    for rank in shown:
        table.add_row(*_rank_row(labels[rank], plan.rank(rank), bool(about["halo"])))
    totals = plan.totals()
    table.add_row("all", "", *([""] if about["halo"] else []), "", *_byte_cells(totals))
    out.print(table)
    if len(shown) < plan.num_ranks:
        out.print(f"{plan.num_ranks} ranks, of which the best, the median and the worst; --all or --json lists all")
    if several and len(about["fields"]) > 1:
        out.print(f"local shape is that of {about['fields'][0]}; bytes are of all fields")
    out.print(f"balance (most / mean owned cells): {plan.balance:.3f}")
    out.print(f"chunks read by more than one rank: {plan.shared_chunks}")
    if about["dp"] is not None:
        out.print(
            f"dp {about['dp']} x domain {plan.num_ranks} = world size {about['world_size']}; "
            f"{about['samples_per_dp_rank']} samples for each dp rank"
        )
    print_bullets("note", plan.notes, "yellow")
    print_bullets("try", about["suggestions"], "green")


def _along(about: Mapping[str, Any]) -> str:
    steps = f", steps {','.join(map(str, about['steps']))}" if list(about["steps"]) != [0] else ""
    return f" along {about['sample_dim']}{steps}" if about["sample_dim"] else ""


def _telling_ranks(plan: DomainPlan) -> dict[int, str]:
    """Return the cheapest, the median and the dearest rank by bytes decoded and fetched, with a label."""
    wanted = np.maximum(plan.bytes_wanted, 1)
    order = np.argsort(np.maximum(plan.bytes_fetched, plan.bytes_decoded) / wanted, kind="stable")
    picks = {int(order[0]): "best", int(order[len(order) // 2]): "median", int(order[-1]): "worst"}
    return {rank: f"{label} {rank}" for rank, label in picks.items()}


def _rank_row(label: str, rank: Mapping[str, Any], with_halo: bool) -> list[str]:
    owned = ", ".join(f"{dim} {start}:{stop}" for dim, (start, stop) in rank["owned"].items())
    halo = [", ".join(f"{dim} {lo}+{hi}" for dim, (lo, hi) in rank["halo"].items())] if with_halo else []
    shape = next(iter(rank["local_shape"].values()))
    return [label, owned, *halo, _shape(shape), *_byte_cells(rank)]


def _byte_cells(sums: Mapping[str, Any]) -> list[str]:
    return [
        human_bytes(sums["bytes_memory"]),
        human_bytes(sums["bytes_wanted"]),
        human_bytes(sums["bytes_fetched"]),
        human_bytes(sums["bytes_decoded"]),
        ratio(sums["amplification"]),
        ratio(sums["decode_amplification"]),
        str(sums["num_chunks"]),
    ]
