"""``scidata bench``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from scidata.cli.arguments import KINDS, check_choice, parse_fields, usage_error
from scidata.cli.commands.bench import BenchRow, bench_path
from scidata.cli.output import console, human_bytes, make_table, print_json, ratio
from scidata.cli.progress import doing
from scidata.core.urls import is_url
from scidata.store.format.places import is_store

if TYPE_CHECKING:
    from scidata.cli.commands.pipeline_bench import PipelineRow


def run_bench(
    path: str,
    only_pipeline: Mapping[str, Any],
    *,
    fields: Sequence[str] | None,
    kind: str | None,
    repeats: int,
    as_json: bool,
) -> None:
    """Measure arrays, and print a table or JSON; ``only_pipeline`` are options that have no meaning here."""
    for option, value in only_pipeline.items():
        if value is not None:
            raise usage_error(option, "is for --pipeline.")
    check_choice("--kind", kind, ("grid", "points"))
    if not is_url(path) and is_store(path):
        raise usage_error("PATH", f"{path} is a partitioned store, which has its own order; add --pipeline.")
    doing("timing")
    rows = bench_path(path, fields=parse_fields(fields), kind=kind, repeats=repeats)
    if as_json:
        print_json({"path": path, "repeats": repeats, "rows": [asdict(row) for row in rows]})
    else:
        _print_bench(path, rows, repeats)


def _print_bench(path: str, rows: Sequence[BenchRow], repeats: int) -> None:
    out = console()
    out.print(path, style="bold", soft_wrap=True)
    out.print(f"medians of {repeats} rounds, page cache warm; ratios to preadv of the wanted bytes, higher is better")
    out.print()
    table = make_table(
        ("field", "case", "method", "bytes", "CPU", "wall", "CPU ratio", "wall ratio"), left=("field", "case", "method")
    )
    for row in rows:
        times = [f"{1e3 * seconds:.2f} ms" for seconds in (row.cpu, row.wall)]
        ratios = [ratio(row.cpu_ratio), ratio(row.wall_ratio)]
        table.add_row(row.field, row.case, row.method, human_bytes(row.nbytes), *times, *ratios)
    out.print(table)


def run_pipeline(
    path: str,
    *,
    fields: Sequence[str] | None,
    kind: str | None,
    workers: str | None,
    samples: int | None,
    step_ms: float | None,
    repeats: int,
    as_json: bool,
) -> None:
    """Measure a loader, and print a table or JSON."""
    from scidata.cli.commands.pipeline_bench import bench_pipeline  # torch

    check_choice("--kind", kind, KINDS)
    doing("timing")
    rows, step = bench_pipeline(
        path,
        fields=parse_fields(fields),
        kind=kind,
        workers=_numbers(workers or "0,1,2,4"),
        num_samples=samples or 20,
        step=None if step_ms is None else step_ms / 1e3,
        repeats=repeats,
    )
    if as_json:
        print_json({"path": path, "repeats": repeats, "step": step, "rows": [asdict(row) for row in rows]})
        return
    out = console()
    out.print(path, style="bold", soft_wrap=True)
    out.print(
        f"medians of {repeats} rounds, page cache warm, one thread a sample; wait of a loop whose step takes "
        f"{1e3 * step:.1f} ms"
    )
    out.print()
    columns = ("method", "bytes/sample", "MB/s", "CPU/sample", "wall/sample", "wait/step", "of the loop")
    table = make_table(columns, left=("method",))
    for row in rows:
        table.add_row(*_cells(row))
    out.print(table)


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [-1]
    if min(found) < 0:
        raise usage_error("--workers", f"{text!r}: numbers of reader threads, 0,1,2.")
    return found


def _cells(row: PipelineRow) -> list[str]:
    threads = f", {row.num_workers} threads" if row.num_workers != 1 else ", 1 thread"
    names = {
        "loader": f"loader{threads}",
        "preadv": "preadv of the same ranges",
        "decompress": "decompressor, from memory",
    }
    return [
        names[row.method],
        human_bytes(row.nbytes),
        f"{row.nbytes / row.wall / 1e6:.0f}" if row.wall else "-",
        f"{1e3 * row.cpu:.2f} ms",
        f"{1e3 * row.wall:.2f} ms",
        "" if row.wait is None else f"{1e3 * row.wait:.2f} ms",
        "" if row.wait_share is None else f"{100 * row.wait_share:.1f} %",
    ]
