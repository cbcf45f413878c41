"""Measure a loader on the user's own data: its speed, its CPU time and the wait of a loop, by reader threads.

Beside it the two floors: ``preadv`` of the same byte ranges, and the decompressors alone on bytes that are in memory;
both into two buffers in turn, as a loop needs which keeps one sample while the next is read. Methods take turns, so
that a busy machine slows all of them; figures are medians.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from scidata.cli.arguments import KINDS, check_choice, parse_fields, usage_error
from scidata.cli.commands.bench import interleaved
from scidata.cli.commands.joined import read_join
from scidata.cli.output import console, human_bytes, make_table, print_json
from scidata.cli.progress import doing
from scidata.core.types import ByteArray
from scidata.core.urls import is_url, url_of
from scidata.data.grid_dataset import ShardedDataset
from scidata.data.irregular_dataset import IrregularDataset
from scidata.data.open_dataset import open_dataset
from scidata.errors import ConfigError
from scidata.loader.data_loader import DataLoader
from scidata.plan.array import ArrayPlan
from scidata.read.codecs import Pipeline, Scratch, pipeline_of
from scidata.sources.access.files import files

_MAX_PLANNED = 8  # samples of which the floors know the byte ranges; they go round


@dataclass(frozen=True, kw_only=True)
class PipelineRow:
    """One method, of ``"loader"``, ``"preadv"`` and ``"decompress"``; times are seconds of one sample.

    ``nbytes`` of the floors are the bytes that they read, and those that they decode. ``wait`` is the time that a loop
    waits in a step, and ``wait_share`` its part of the step.
    """

    method: str
    num_workers: int | None = None
    nbytes: int
    cpu: float
    wall: float
    wait: float | None = None
    wait_share: float | None = None


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


def bench_pipeline(
    path: str | Sequence[str],
    *,
    fields: Sequence[str] | None = None,
    kind: str | None = None,
    num_samples: int = 20,
    workers: Sequence[int] = (0, 1, 2, 4),
    step: float | None = None,
    repeats: int = 3,
    num_threads: int = 1,
) -> tuple[list[PipelineRow], float]:
    """Run a loader of local files with each number of reader threads; return rows, and the seconds of a step.

    A round has ``num_samples`` of the data set's samples, over and over where it has fewer, each read whole by
    ``num_threads`` threads. A ``step`` of the loop sleeps, as where a GPU computes: by default for twice the time of
    reading a sample without reader threads. Raises ConfigError: a URL, no samples, or numbers that make no sense.
    """
    paths = [path] if isinstance(path, str) else list(path)
    if any(map(is_url, paths)):
        raise ConfigError(f"{url_of(paths[0])}: bench measures local files; copy the store first")
    if repeats < 1 or num_samples < 1 or not workers or min(workers) < 0 or (step is not None and step < 0):
        raise ConfigError("samples and repeats must be at least 1, workers and the step not negative")
    ds: Any
    if paths[0].endswith(".toml"):
        ds = read_join(paths[0], num_threads=num_threads)[0]
    else:
        ds = open_dataset(paths if len(paths) > 1 else paths[0], fields=fields, kind=kind, num_threads=num_threads)
    with closing(ds):
        if not len(ds):
            raise ConfigError(f"{paths[0]}: there are no samples")
        return _measure(ds, num_samples, workers, step, repeats)


def _measure(
    ds: ShardedDataset | IrregularDataset, num_samples: int, workers: Sequence[int], step: float | None, repeats: int
) -> tuple[list[PipelineRow], float]:
    order = [i % len(ds) for i in range(num_samples)]
    loaders = {n: DataLoader(ds, None, sampler=order, num_workers=n) for n in workers}
    plans = plans_of(ds, range(min(len(ds), _MAX_PLANNED)))
    read, read_bytes = preadv_loop(plans)
    decode, decoded_bytes = decompressors(plans)
    methods: dict[int | str, Callable[[], object]] = {n: partial(deque, loader, 0) for n, loader in loaders.items()}
    methods["preadv"] = partial(read, num_samples)
    if decoded_bytes:
        methods["decompress"] = partial(decode, num_samples)
    times = interleaved(methods, repeats)
    if step is None:
        step = 2 * times[min(workers)][1] / num_samples
    rows = []
    for n, loader in loaders.items():
        wait = statistics.median(_wait(loader, step) for _ in range(repeats))
        nbytes = round(loader.stats()["bytes"] / loader.stats()["samples"])
        cpu, wall = (t / num_samples for t in times[n])
        share = wait / (step + wait) if step + wait else 0.0
        rows.append(
            PipelineRow(method="loader", num_workers=n, nbytes=nbytes, cpu=cpu, wall=wall, wait=wait, wait_share=share)
        )
    for name, nbytes in (("preadv", read_bytes), ("decompress", decoded_bytes)):
        if name in times:
            cpu, wall = (t / num_samples for t in times[name])
            rows.append(PipelineRow(method=name, nbytes=nbytes, cpu=cpu, wall=wall))
    return rows, step


def _wait(loader: DataLoader, step: float) -> float:
    """Return the wait of a step, from the second on: the first has nothing read ahead, whatever the loader does."""
    waited, num_steps = 0.0, 0
    began = time.perf_counter()
    for _ in loader:
        if num_steps:
            waited += time.perf_counter() - began
        num_steps += 1
        time.sleep(step)
        began = time.perf_counter()
    return waited / max(1, num_steps - 1)


# -- the floors ----------------------------------------------------------------------------------------------------


def plans_of(ds: ShardedDataset | IrregularDataset, indices: Sequence[int]) -> list[list[ArrayPlan]]:
    """Return the bytes read of some samples' fields; index arrays of a store are read once, and not counted."""
    found = [ds.plan(i).fields for i in indices]
    return [[plan for name in ds.fields for plan in fields[name]] for fields in found]


def preadv_loop(plans: Sequence[Sequence[ArrayPlan]]) -> tuple[Callable[[int], None], int]:
    """Return a loop over samples that reads their byte ranges into buffers, and the mean bytes of a sample."""
    samples = []
    for sample in plans:
        ranges = []
        for plan in sample:
            paths, rows = plan.ranges()
            ranges += [(paths[p], offset, nbytes) for p, offset, nbytes in rows.tolist()]
        samples.append(ranges)
    sizes = [sum(nbytes for _, _, nbytes in ranges) for ranges in samples]
    buffers = [np.zeros(max(sizes, default=0), np.uint8).data for _ in range(2)]

    def run(num_samples: int) -> None:
        cache = files()
        for i in range(num_samples):
            at, buffer = 0, buffers[i % 2]
            for path, offset, nbytes in samples[i % len(samples)]:
                if not cache.read_at_once(path, offset, buffer[at : at + nbytes]):
                    cache.read_into(path, offset, [buffer[at : at + nbytes]])
                at += nbytes

    return run, round(statistics.mean(sizes))


def decompressors(plans: Sequence[Sequence[ArrayPlan]]) -> tuple[Callable[[int], None], int]:
    """Return a loop that decodes samples' chunks from memory into buffers; and the mean bytes decoded, 0 of raw."""
    samples = [[chunk for plan in sample for chunk in _chunks(plan)] for sample in plans]
    sizes = [sum(pipeline.nbytes for pipeline, _ in chunks) for chunks in samples]
    buffers, scratch = [np.zeros(max(sizes, default=0), np.uint8) for _ in range(2)], Scratch()

    def run(num_samples: int) -> None:
        for i in range(num_samples):
            at, buffer = 0, buffers[i % 2]
            for pipeline, data in samples[i % len(samples)]:
                pipeline.decode(data, buffer[at : at + pipeline.nbytes], scratch)
                at += pipeline.nbytes

    return run, round(statistics.mean(sizes))


def _chunks(plan: ArrayPlan) -> list[tuple[Pipeline, ByteArray]]:
    """Read the encoded chunks of a plan, each with its decoder."""
    if plan.encoded is None or plan.refs is None:
        return []
    refs, found = plan.refs, []
    for row, nbytes in zip(plan.encoded.chunk_row.tolist(), plan.encoded.nbytes.tolist(), strict=True):
        skipped = 0 if refs.skipped_codecs is None else int(refs.skipped_codecs[row])
        path = refs.paths[int(refs.path_index[row])]
        data = files().read(path, int(refs.offset[row]), int(refs.nbytes[row]))
        found.append((pipeline_of(plan.layout.codecs, skipped, nbytes), np.frombuffer(data, np.uint8)))
    return found
