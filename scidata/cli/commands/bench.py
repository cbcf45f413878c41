"""``scidata bench``: times plain slicing, the format's own library at its best, scidata, and the ceiling on a file.

The ceiling is ``preadv`` of as many bytes as are wanted, from the page cache into a reused buffer: the least
work of any reader. Methods take turns, so that a busy machine slows all of them; figures are medians.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from scidata.cli.arguments import check_choice, parse_fields, usage_error
from scidata.cli.output import console, human_bytes, make_table, print_json, ratio
from scidata.cli.progress import doing
from scidata.core.options import ReadOptions
from scidata.core.types import Array, ArrayLayout, Segment, Selection, Source
from scidata.core.urls import is_url, url_of
from scidata.data.raw_kind import kind_of_raw
from scidata.errors import ConfigError, check_known
from scidata.plan.array import PlanFamily, chunks_needed
from scidata.read import read_plan
from scidata.sources import open_source
from scidata.sources.access.files import files
from scidata.store.format.places import is_store

K = TypeVar("K")

_MAX_FIELDS = 3
_SLAB = 8  # a slab is one part in eight, as of one rank of eight


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One method on one field: ``cpu`` and ``wall`` are medians, in seconds, of reading ``nbytes`` decoded bytes.

    ``case`` is ``"full"``, leading rows of the whole field, or ``"slab"``, an eighth of them along one dimension.
    Ratios are times of the ``preadv`` ceiling over those of this method: higher is better.
    """

    field: str
    case: str
    method: str
    nbytes: int
    cpu: float
    wall: float
    cpu_ratio: float
    wall_ratio: float


def run_bench(
    path: str,
    only_pipeline: Mapping[str, object],
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


def bench_path(
    path: str,
    *,
    fields: Sequence[str] | None = None,
    kind: str | None = None,
    repeats: int = 5,
    max_bytes: int = 256 << 20,
    num_threads: int | None = None,
) -> list[BenchRow]:
    """Measure some fields of a local file, by default the largest three: up to ``max_bytes`` of their leading rows.

    ``kind`` times the arrays of any file as they lie. Without it meshes and graphs, which are read from a store, are
    refused. Raises ConfigError, UnknownNameError, UnsupportedFormatError: a URL, whose network would be measured; an
    unknown field; a mesh or a graph.
    """
    if is_url(path):
        raise ConfigError(f"{url_of(path)}: bench measures local files; copy the store first")
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, not {repeats}")
    kind_of_raw(path, ReadOptions(kind=kind))
    with closing(open_source(path)) as source:
        rows: list[BenchRow] = []
        threads = num_threads or os.cpu_count() or 1
        with ThreadPoolExecutor(threads, thread_name_prefix="scidata-bench") as executor:
            for layout in _chosen(source, fields):
                for case, selection in _cases(layout, max_bytes).items():
                    rows += _bench_case(source, layout, case, selection, repeats, executor)
        return rows


def _chosen(source: Source, fields: Sequence[str] | None) -> list[ArrayLayout]:
    arrays = source.arrays
    if fields is None:
        return sorted((a for a in arrays.values() if a.nbytes), key=lambda a: -a.nbytes)[:_MAX_FIELDS]
    check_known(f"{source.path}: no field", fields, arrays)
    return [arrays[name] for name in fields]


def _cases(layout: ArrayLayout, max_bytes: int) -> dict[str, Selection]:
    """Return leading rows of everything, and of them a middle eighth along one dimension."""
    shape = list(layout.shape)
    if shape and layout.nbytes > max_bytes:
        shape[0] = max(1, shape[0] * max_bytes // layout.nbytes)
    full = tuple((Segment(start=0, count=n),) for n in shape)
    splittable = [d for d, n in enumerate(shape) if n >= _SLAB]
    if not splittable:
        return {"full": full}
    # Along the first dimension a slab is a shorter full read; ranks split the next one.
    dim = splittable[1] if len(splittable) > 1 and splittable[0] == 0 else splittable[0]
    part = shape[dim] // _SLAB
    slab = tuple((Segment(start=3 * part, count=part),) if d == dim else s for d, s in enumerate(full))
    return {"full": full, "slab": slab}


def _bench_case(
    source: Source, layout: ArrayLayout, case: str, selection: Selection, repeats: int, executor: ThreadPoolExecutor
) -> list[BenchRow]:
    shape = tuple(sum(s.count for s in dim) for dim in selection)
    out = np.zeros(shape, layout.dtype.newbyteorder("="))
    box = tuple(slice(dim[0].start, dim[0].start + dim[0].count) for dim in selection)

    family = PlanFamily((), shape)  # as a data set plans: one lookup for all reads of a selection

    def own(threads: ThreadPoolExecutor | None) -> Callable[[], object]:
        def run() -> object:
            plan = family.plan(layout, selection, source.locate)
            return read_plan(plan, out, source=source, executor=threads, allow_missing=True)

        return run

    methods: dict[str, Callable[[], object]] = {
        **_library(source, layout, box, out),
        "scidata": own(None),
        "scidata threads": own(executor),
        "preadv": _ceiling(source, layout, selection, out),
    }
    medians = interleaved(methods, repeats)
    floor_cpu, floor_wall = medians["preadv"]
    rows = []
    for name, (cpu, wall) in medians.items():
        ratios = {"cpu_ratio": floor_cpu / max(cpu, 1e-9), "wall_ratio": floor_wall / max(wall, 1e-9)}
        rows.append(
            BenchRow(field=layout.name, case=case, method=name, nbytes=out.nbytes, cpu=cpu, wall=wall, **ratios)
        )
    return rows


def interleaved(methods: Mapping[K, Callable[[], object]], repeats: int) -> dict[K, tuple[float, float]]:
    """Let methods take turns after a rehearsal; return CPU and wall seconds of each, medians."""
    taken: dict[K, list[tuple[float, float]]] = {name: [] for name in methods}
    for number in range(repeats + 1):
        for name, method in methods.items():
            wall, cpu = time.perf_counter(), time.process_time()
            method()
            if number:
                taken[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return {
        name: (statistics.median(t[0] for t in found), statistics.median(t[1] for t in found))
        for name, found in taken.items()
    }


def _ceiling(source: Source, layout: ArrayLayout, selection: Selection, out: Array) -> Callable[[], object]:
    """Return a read of ``out.nbytes`` bytes of the files concerned, over and over where they hold fewer."""
    if layout.fallback:
        paths = [source.path] if os.path.isfile(source.path) else []
    else:
        refs = source.locate(layout, chunks_needed(layout, selection))
        paths = [refs.paths[i] for i in np.unique(refs.path_index[refs.path_index >= 0]).tolist()]
        paths = [path for path in paths if not is_url(path)]  # of a reference set, chunks that are in the set itself
    sizes = {p: os.path.getsize(p) for p in paths}
    buffer = out.reshape(-1).view(np.uint8)

    def run() -> object:
        done = 0
        while done < buffer.size and any(sizes.values()):
            for path, size in sizes.items():
                count = min(size, buffer.size - done)
                if count:
                    files().read_into(path, 0, [buffer[done : done + count]])
                    done += count
        return done

    return run


def _library(
    source: Source, layout: ArrayLayout, box: tuple[slice, ...], out: Array
) -> dict[str, Callable[[], object]]:
    if source.format.startswith("zarr"):
        import zarr
        from zarr.core.buffer import default_buffer_prototype

        array: Any = zarr.open(source.path, mode="r")
        if layout.name and not isinstance(array, zarr.Array):
            array = array[layout.name]
        into = default_buffer_prototype().nd_buffer.from_numpy_array(out)
        return {"slicing": lambda: array[box], "library": lambda: array.get_basic_selection(box, out=into)}
    if source.format in ("hdf5", "netcdf4"):
        import h5py

        with suppress(ImportError):
            import hdf5plugin  # noqa: F401 - registers filters
        dataset = h5py.File(source.path, "r")[layout.name]
        return {"slicing": lambda: dataset[box], "library": lambda: dataset.read_direct(out, box)}
    if source.format in ("icechunk", "kerchunk", "kerchunk-parquet"):
        return {}  # these have several libraries, and no best call
    try:
        import netCDF4
    except ImportError:
        return {}
    variable = netCDF4.Dataset(source.path).variables[layout.name]
    variable.set_auto_maskandscale(False)
    return {"slicing": lambda: variable[box]}
