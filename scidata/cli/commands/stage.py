"""``scidata stage``: progress on stderr, a report on stdout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from scidata.cli.arguments import names_store, num_parts_of, parse_ranks
from scidata.cli.output import console, human_bytes, print_json
from scidata.cli.progress import progress
from scidata.core.options import ReadOptions
from scidata.core.urls import public_text
from scidata.data.raw_kind import kind_of_raw
from scidata.grids.reader import GridReader
from scidata.grids.staging import Staging
from scidata.read.context import Staged
from scidata.read.disk_cache import DiskCache, make_cache
from scidata.store.reading.reader import StoreReader
from scidata.store.reading.staging import StoreStaging


def run_stage(
    path: str, axis_sizes: Mapping[str, int], options: ReadOptions, *, ranks: Sequence[str], jobs: int, as_json: bool
) -> None:
    """Fill the folder ``options.cache_dir`` with the parts of some ranks, and print a report."""
    chosen = parse_ranks(ranks, math.prod(axis_sizes.values()))
    disk = make_cache(options.cache_dir, options.cache_disk_bytes)
    if names_store(path):
        found = _stage_store(StoreReader(path, options, num_parts=num_parts_of(axis_sizes)), chosen, jobs, disk)
    else:
        _, first = kind_of_raw(path, options, like_grid=True)
        found = _stage_grid(GridReader(path, options, axis_sizes=axis_sizes, first=first), chosen, jobs, disk)
    report = {**found, "path": public_text(path), "cache": options.cache_dir, "cache_bytes": disk.max_bytes}
    report["ranks"] = chosen
    if as_json:
        print_json(report)
    else:
        _print(report)


def _stage_grid(reader: GridReader, ranks: Sequence[int], jobs: int, disk: DiskCache) -> dict[str, Any]:
    with closing(reader):
        staging = Staging(reader, ranks)
        if staging.num_left:
            needed, limit, left = map(human_bytes, (staging.num_bytes, disk.max_bytes, staging.bytes_left))
            _warn(
                f"{needed} do not fit in the {limit} of {reader.options.cache_dir}: the last {left} are left out; "
                "give more --cache-bytes, or fewer ranks"
            )
        with progress("staging", staging.num_parts - staging.num_left) as tick:
            staged = staging.run(jobs=jobs, tick=tick)
        names = sorted(set(reader.fields) - reader.pool.worth.on_disk)
    more = {"bytes": staging.num_bytes, "bytes_left": staging.bytes_left, "bytes_decoded": staged.stats.bytes_decoded}
    return _counted(replace(staged, left=staging.num_left)) | more | {"not_kept": names}


def _stage_store(reader: StoreReader, ranks: Sequence[int], jobs: int, disk: DiskCache) -> dict[str, Any]:
    staged, names = Staged(), list(reader.fields)
    with closing(reader):
        if reader.store.kept is not None:
            staging, names = StoreStaging(reader, ranks), []
            with progress("staging", staging.num_parts) as tick:
                staged = staging.run(jobs=jobs, tick=tick)
    if staged.left:
        limit, cache = human_bytes(disk.max_bytes), reader.options.cache_dir
        _warn(f"{limit} of {cache} are full: the last {staged.left} parts are left out; give more --cache-bytes")
    return _counted(staged) | {"not_kept": names}


def _counted(staged: Staged) -> dict[str, Any]:
    found = {name: count for name, count in vars(staged).items() if name != "stats"}
    parts = staged.written + staged.there + staged.left + staged.unknown
    nbytes = staged.bytes_written + staged.bytes_there
    return {"parts": parts, **found, "bytes": nbytes, "bytes_fetched": staged.stats.bytes_fetched}


def _warn(text: str) -> None:
    console(stderr=True).print(f"warning: {text}", style="yellow", soft_wrap=True)


def _print(report: Mapping[str, Any]) -> None:
    out = console()
    held = human_bytes(report["bytes_written"] + report["bytes_there"])
    ready = report["written"] + report["there"]
    out.print(f"{report['cache']}: {ready} of {report['parts']} parts, {held}", style="bold", soft_wrap=True)
    out.print(
        f"{report['written']} written, {report['there']} there already; {human_bytes(report['bytes_fetched'])} fetched",
        soft_wrap=True,
    )
    if report["left"]:
        out.print(f"{report['left']} do not fit", style="yellow")
    if report["unknown"]:
        out.print(f"{report['unknown']} not kept: nothing that the source says would show a change", style="yellow")
    if report["not_kept"]:
        names = ", ".join(report["not_kept"])
        out.print(f"not kept, raw on a local disk already: {names}", style="yellow", soft_wrap=True)
