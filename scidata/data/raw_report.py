"""Contents of a store, from its metadata alone: arrays, guessed kind, default split, and layouts that read badly."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from scidata.core.options import ReadOptions
from scidata.core.types import ArrayLayout, Source
from scidata.data.raw_kind import partition_command
from scidata.errors import SciDataError, UnsupportedFormatError
from scidata.grids.choices import left_out_text
from scidata.grids.gaps import find_gaps
from scidata.grids.reader import GridReader
from scidata.meshes.formats.columns import with_columns
from scidata.meshes.formats.meshio import open_any
from scidata.read.inflate import decoder_text
from scidata.sources.cf import role_of, tells_time
from scidata.sources.kinds import ELSEWHERE, common_points, data_fields, kind_of
from scidata.sources.paths import expand_paths
from scidata.store.format.places import is_store

_SMALL_CHUNK = 64 * 1024
_MOST_COMPARED = 64  # files that are samples
_HUGE_CHUNK = 256 * 1024**2
_MOST_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class ArrayReport:
    """One array: ``role`` is its CF axis (``T Z Y X``), ``is_data`` tells fields from coordinates."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]
    shards: tuple[int, ...] | None
    codecs: tuple[str, ...]
    role: str | None
    units: str | None
    nbytes: int
    is_data: bool


@dataclass(frozen=True, kw_only=True)
class StoreReport:
    """Result of :func:`inspect_store`.

    - ``paths``, ``format``: the files of the series, and the format of the first.
    - ``kind``, ``kind_reason``: ``grid``, ``points``, ``mesh`` or ``graph``, and the sign of it.
    - ``sample_dim``, ``num_samples``, ``shard_dim``, ``fields``: what :func:`scidata.open_dataset` would do by default
      on a 1-D domain; None if it could not open it.
    - ``inflated``: which library decodes zlib and gzip; None if no array has them.
    - ``warnings``: reads that will be slow, or not as expected; each with a remedy.
    """

    paths: tuple[str, ...]
    format: str
    kind: str
    kind_reason: str
    sample_dim: str | None
    num_samples: int | None
    shard_dim: str | None
    fields: tuple[str, ...]
    arrays: tuple[ArrayReport, ...]
    skipped: Mapping[str, str]
    inflated: str | None
    warnings: tuple[str, ...]


def inspect_store(path: str | Sequence[str]) -> StoreReport:
    """Describe a store, or the files of a series, from metadata and coordinates; raises the errors of opening it."""
    paths = expand_paths(path)
    if is_store(paths[0]):
        raise UnsupportedFormatError(
            f"{paths[0]}: is a partitioned store; scidata.store.reading.report.inspect_partitioned describes it"
        )
    with closing(open_any(paths[0])) as source:
        fields = set(data_fields(source))
        kind, reason = kind_of(source)
        reader, warnings = None, list[str]()
        if kind == "grid":
            reader, complaint = _default_reader(paths)
            warnings += [complaint] if complaint else []
        else:
            command = partition_command(path, kind, reason, source)
            mesh = ", the file with the mesh" if reason.endswith(ELSEWHERE) else ""
            warnings.append(f"kind {kind}: ranks read their parts of it from a store; write it once: {command}{mesh}")
            warnings += _others(source, paths)
        table = with_columns(source)
        warnings += _windows(table) if kind == "points" or table is not source else ()
        sample_dim = reader.sample_dim if reader else None
        shard_dim = next(iter(reader.partition.axis_of_dim), None) if reader else None
        if kind == "grid":  # others are written anew before ranks read them
            warnings += _layout_warnings(source, sorted(fields), sample_dim, shard_dim)
        if reader:
            warnings += _reader_warnings(reader)
        return StoreReport(
            paths=paths,
            format=source.format,
            kind=kind,
            kind_reason=reason,
            sample_dim=sample_dim,
            num_samples=reader.num_samples if reader else None,
            shard_dim=shard_dim,
            fields=tuple(reader.fields if reader else ()),
            arrays=tuple(_array_report(layout, name in fields) for name, layout in source.arrays.items()),
            skipped=dict(getattr(source, "skipped", {})),
            inflated=decoder_text(source.arrays.values()),
            warnings=tuple(warnings),
        )


def _reader_warnings(reader: GridReader) -> Iterator[str]:
    """Yield warnings about omitted arrays, assumptions, and gaps between samples."""
    if reader.choice.left_out:
        yield left_out_text(reader.choice.left_out, reader.choice.reference.name)
    yield from filter(None, (reader.choice.taken_text, *reader.gap_texts))
    if reader.sample_dim is not None:  # gaps in time matter only for windows of steps
        gaps = find_gaps(reader.series, reader.partition.selected[reader.sample_dim])
        if gaps is not None:
            yield f"{gaps.text}; {gaps.remedy}"


def _others(first: Source, paths: Sequence[str]) -> Iterator[str]:
    """List how further files, each a sample, differ from the first."""
    if len(paths) == 1:
        return
    shown = min(len(paths), _MOST_COMPARED)
    alike = 1
    for path in paths[1:shown]:
        with closing(open_any(path)) as source:
            if texts := list(_differences(first, source)):
                yield f"{path}: {'; '.join(texts[:3])}{'; …' if len(texts) > 3 else ''}"
            alike += not texts
    left = f"; {len(paths) - shown} more were not looked at" if shown < len(paths) else ""
    yield f"each of the {len(paths)} files is a sample; shown is the first, {alike} have its arrays{left}"


def _windows(source: Source) -> Iterator[str]:
    """Name the columns of times from which a table can take windows."""
    rows = common_points(source) or ()
    size = rows[0].shape[:1] if rows else ()
    names = [x.name for x in source.arrays.values() if rows and x.shape[:1] == size and tells_time(x)]
    if names:
        yield f"{', '.join(names)}: times of rows; windows of them are samples: time={names[0]!r}, window='6h'"


def _differences(first: Source, other: Source) -> Iterator[str]:
    """Name arrays missing from one of two files, or of other dtype or dims; lengths may differ between samples."""
    if lacking := [name for name in first.arrays if name not in other.arrays]:
        yield f"lacks {', '.join(lacking)}"
    if added := [name for name in other.arrays if name not in first.arrays]:
        yield f"has also {', '.join(added)}"
    for name, layout in first.arrays.items():
        found = other.arrays.get(name)
        if found is not None and (found.dtype, len(found.dims)) != (layout.dtype, len(layout.dims)):
            shapes = [f"{x.dtype} {'x'.join(map(str, x.shape))}" for x in (found, layout)]
            yield f"{name} is {shapes[0]}, not {shapes[1]}"


def _codec_texts(layout: ArrayLayout) -> tuple[str, ...]:
    texts = []
    for codec in layout.codecs:
        level = codec.config.get("clevel", codec.config.get("level"))
        inner = f"{codec.config['cname']}" if "cname" in codec.config else ""
        detail = ",".join(str(part) for part in (inner, level) if part not in ("", None))
        texts.append(f"{codec.name}({detail})" if detail else codec.name)
    return tuple(texts)


def _array_report(layout: ArrayLayout, is_data: bool) -> ArrayReport:
    units = layout.attributes.get("units")
    return ArrayReport(
        **{name: getattr(layout, name) for name in ("name", "dims", "shape", "chunks", "shards", "nbytes")},
        dtype=str(layout.dtype),
        codecs=_codec_texts(layout),
        role=None if is_data else role_of(layout),
        units=str(units) if units not in (None, "") else None,
        is_data=is_data,
    )


def _default_reader(paths: Sequence[str]) -> tuple[GridReader | None, str | None]:
    """Open the store as ``open_dataset`` would on two ranks; if that fails, return the reason."""
    try:
        return GridReader(paths, ReadOptions(num_threads=1), axis_sizes={"domain": 2}), None
    except (SciDataError, OSError) as e:
        complaint = str(e)
    try:
        return GridReader(paths, ReadOptions(num_threads=1)), complaint  # one rank has nothing to split
    except (SciDataError, OSError) as e:
        what = "cannot be opened as one data set" if len(paths) == 1 else "the files are not one data set"
        return None, f"{what}: {e}"


def _layout_warnings(
    source: Source, names: Sequence[str], sample_dim: str | None, shard_dim: str | None
) -> Iterator[str]:
    """List causes of slow reads, one line each: the worst field, with the other affected fields."""
    dims = {name: source.arrays[name].dims for name in names}
    if unnamed := [name for name in names if dims[name] and all(re.fullmatch(r"dim_\d+", d) for d in dims[name])]:
        yield f"{_listed(unnamed)}: no dimension names; shard, halo and isel take dim_0, dim_1, … or positions"
    found: dict[str, list[tuple[float, str, str]]] = {}
    for name in names:
        for cause, size, text in _causes(source.arrays[name], sample_dim, shard_dim):
            found.setdefault(cause, []).append((size, name, text))
    for each in found.values():
        worst = max(each, key=lambda one: one[0])
        several = len({text for _, _, text in each}) > 1
        yield f"{_listed([name for _, name, _ in each])}: {f'{worst[1]} has ' if several else ''}{worst[2]}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (f" and {n} more" if (n := len(names) - _MOST_NAMED) > 0 else "")


def _causes(layout: ArrayLayout, sample_dim: str | None, shard_dim: str | None) -> Iterator[tuple[str, float, str]]:
    """Yield causes of slow reads of one field: the kind, the severity, and a description."""
    sizes = dict(zip(layout.dims, layout.shape, strict=True))
    chunk = dict(zip(layout.dims, layout.chunks, strict=True))
    num_chunks, mib = math.prod(layout.num_chunks), layout.chunk_nbytes / 1024**2
    if layout.fallback:
        codecs = " ".join(_codec_texts(layout)) or "no codecs"
        remedy = "rewrite with zstd or blosc to read in parallel"
        yield "library", layout.nbytes, f"{codecs}: decoded by the format's own library, one chunk at a time; {remedy}"
    rows = chunk.get(sample_dim or "", 1)
    if layout.codecs and rows > 1:
        text = f"chunks of {rows} rows of {sample_dim}, which a sample alone decodes whole; "
        text += "in the order of the file, or with DistributedSampler(shuffle='blocks'), each is decoded once"
        yield "samples", rows, text
    if layout.codecs and shard_dim in chunk and chunk[shard_dim] >= sizes[shard_dim] > 1:
        text = f"one chunk spans all {sizes[shard_dim]} rows of {shard_dim}, so every rank decodes the whole of it; "
        yield "shard", sizes[shard_dim], f"{text}rechunk {shard_dim}, or shard another dimension"
    if layout.codecs and layout.chunk_nbytes > _HUGE_CHUNK:
        yield "huge", mib, f"chunks of {mib:.0f} MiB, which are decoded whole; rechunk to 1 to 16 MiB"
    if layout.chunk_nbytes < _SMALL_CHUNK and num_chunks > 64:
        text = f"{num_chunks} chunks of {1024 * mib:.1f} KiB; many small reads are slow: rechunk to 1 to 16 MiB"
        yield "small", num_chunks, text
    packing = [name for name in ("scale_factor", "add_offset") if name in layout.attributes]
    if packing and layout.dtype.kind == "f":
        yield "packed", 1, f"{layout.dtype} and yet {' and '.join(packing)}, applied when decoding"
