"""``scidata stats``: progress on stderr, figures on stdout as a table or JSON, and in a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
import torch

from scidata.cli.arguments import cluster
from scidata.cli.output import console, make_table, print_bullets, print_json
from scidata.cli.progress import progress
from scidata.core.options import ReadOptions
from scidata.core.urls import is_url, public_text
from scidata.data.open_dataset import open_dataset
from scidata.data.statistics import statistics
from scidata.data.statistics_table import Statistics, as_plain, check_place
from scidata.sources.paths import expand_paths

_MANY = 60  # rows of the table
_COLUMNS = ("count", "missing", "mean", "std", "min", "max")


def run_stats(
    paths: Sequence[str],
    options: ReadOptions,
    *,
    by: Sequence[str],
    differences: bool,
    stored: bool | None,
    jobs: int,
    dask: str | None,
    out: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Gather the statistics of a data set and print them."""
    if out is not None:
        check_place(out, expand_paths(paths), overwrite=overwrite)
    floating = None if options.dtype is None else getattr(torch, str(options.dtype))
    here = os.path.join(os.getcwd(), "")
    named = list(paths)
    if dask is not None:  # whose workers have other working folders
        named = [path if is_url(path) or path.startswith(("/", "~")) else here + path for path in paths]
    dataset = open_dataset(
        named[0] if len(named) == 1 else named, dtype=floating, kind=options.kind, fields=options.fields,
        isel=options.isel, sel=options.sel, sample_dim=options.sample_dim, allow_missing=options.allow_missing,
        positions=options.positions, time=options.time, window=options.window, every=options.every, where=options.where,
    )  # fmt: skip
    with closing(dataset), cluster(dask, jobs) as client, progress("statistics", 100, " %") as tick:
        found = statistics(
            dataset, by=by, differences=differences, stored=stored, jobs=jobs, client=client,
            tick=lambda share, total: tick(100 * share / max(1, total)),
        )  # fmt: skip
    if named != list(paths):  # the output is the same as without a cluster
        found = replace(found, path=found.path.removeprefix(here))
    if out is not None:
        found.save(out, overwrite=overwrite)
    if as_json:
        print_json(as_plain(found))
    else:
        _print(found, out)


def _print(stats: Statistics, out: str | None) -> None:
    screen, period = console(), stats.period
    screen.print(f"{public_text(stats.path)}: {', '.join(stats)}", style="bold", soft_wrap=True)
    first, last = period.get("first"), period.get("last")
    about = [f"{period['samples']} samples"] if "samples" in period else []
    about += [f"{period['dim']} {first} to {last}"] if first is not None else []
    about += ["as the data have them of themselves"] if stats.source == "store" else []
    screen.print(", ".join(about), soft_wrap=True)
    screen.print()
    dims = list(dict.fromkeys(dim for found in stats.values() for dim in found.dims))
    with_steps = any(found.differences is not None for found in stats.values())
    more = ("steps", "mean of steps", "std of steps") if with_steps else ()
    table = make_table(["field", *dims, "units", *_COLUMNS, *more], left=("field", "units"))
    rows = list(stats.rows())
    for row in rows[:_MANY]:
        cells = [str(row.get(dim, "")) for dim in dims]
        numbers = [_text(row[name]) for name in _COLUMNS]
        steps = [_text(row.get(f"difference_{name}")) for name in ("count", "mean", "std")] if with_steps else []
        table.add_row(row["field"], *cells, row["units"] or "", *numbers, *steps)
    screen.print(table)
    if len(rows) > _MANY:
        screen.print(f"{len(rows) - _MANY} more; --json and --out list all")
    for name, found in stats.items():
        notes = [f"{int(found.infinite.sum())} infinite values are left out"] if np.any(found.infinite) else []
        if found.skipped:
            notes.append(f"{found.skipped} pairs of rows are not one usual step apart, and make no difference")
        print_bullets("note", [f"{name}: {note}" for note in notes], "yellow")
    if out is not None:
        screen.print(f"written to {out}", soft_wrap=True)


def _text(value: float | int | None) -> str:
    return "" if value is None else f"{value}" if isinstance(value, int) else f"{value:.6g}"
