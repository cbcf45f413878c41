"""``scidata bench --pipeline``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from scidata._cli.arguments import usage_error
from scidata._cli.output import console, human_bytes, make_table, print_json
from scidata.pipeline_bench import PipelineRow, bench_pipeline

__all__ = ["run_pipeline"]


def run_pipeline(
    path: str,
    *,
    fields: Sequence[str] | None,
    workers: str | None,
    samples: int | None,
    step_ms: float | None,
    repeats: int,
    as_json: bool,
) -> None:
    """Measure, and print a table or JSON."""
    numbers = _numbers(workers or "0,1,2,4")
    step = None if step_ms is None else step_ms / 1e3
    rows, step = bench_pipeline(
        path, fields=fields, workers=numbers, num_samples=samples or 20, step=step, repeats=repeats
    )
    if as_json:
        print_json({"path": path, "repeats": repeats, "step": step, "rows": [asdict(row) for row in rows]})
        return
    out = console()
    out.print(path, style="bold", soft_wrap=True)
    out.print(
        f"medians of {repeats} rounds, page cache warm, one thread a sample; wait of a loop whose step takes "
        f"{1e3 * step:.1f} ms\n"
    )
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
