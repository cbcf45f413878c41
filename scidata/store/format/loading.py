"""Reads the description of a store or a sample: every key is checked before anything relies on it. Pure.

A manifest may be damaged, or made to do harm: errors name the sample and the key.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np

from scidata.errors import CorruptDataError, RefusedError
from scidata.meshes.order.quality import GhostCounts
from scidata.sources.pointers import check_pointer
from scidata.store.format.entries import Entry, Readers, damaged, is_count, is_number, shown
from scidata.store.format.manifest import (
    ArrayInfo,
    FieldInfo,
    InputInfo,
    SampleInfo,
    StoredMoments,
    described,
    digest_of,
    dump_json,
)
from scidata.store.format.places import folder_of
from scidata.store.format.sample_checks import check_sample
from scidata.store.format.samples import Column, Gathered, Group, ReadTable, Samples, Table, Way, columns_of, row_dtype
from scidata.store.format.streamed import Items, parse_object, refuse_constant
from scidata.store.format.sums import ALIKE, MANIFEST_VERSION, Manifest, check_groups
from scidata.store.format.treatments import TREATMENTS
from scidata.store.format.values import check_value

_KINDS = ("mesh", "points", "graph", "hetero")
_SPACES = (None, "pos", "unit_sphere")
_MOMENTS = ("count", "mean", "std", "min", "max")
_SEAL = re.compile(rb'\n "digest": "([0-9a-f]{32})",\n')  # of the whole document: that line alone has one space
_SURROGATE = re.compile("[\ud800-\udfff]")


@functools.lru_cache(256)
def _is_dtype(text: str) -> bool:
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError, SyntaxError, OverflowError, MemoryError, RecursionError):
        return False
    return dtype.kind not in "OV" and dtype.itemsize > 0


def _dtype(entry: Entry, key: str) -> str:
    text = entry.text(key)
    if not _is_dtype(text):
        entry.wrong(key, "NumPy's code of a dtype")
    return text


_ARRAY: Readers = {
    "shape": Entry.counts, "dtype": _dtype, "digest": Entry.text, "chunks": Entry.counts, "shards": Entry.counts,
}  # fmt: skip


def _array(data: object, where: str, key: str) -> ArrayInfo:
    entry = Entry(data, where, key, _ARRAY, optional=("chunks", "shards"))
    info = ArrayInfo(**entry.values(_ARRAY))
    if info.chunks is not None and len(info.chunks) != len(info.shape):
        entry.wrong("chunks", f"the shape of chunks of {info.shape}")
    if info.shards and len(info.shards) != len(info.chunks or ()):
        entry.wrong("shards", f"the shape of files of chunks of {info.chunks}")
    return info


_FIELD: Readers = {
    "name": Entry.text, "entity": Entry.text, "dtype": _dtype, "dims": Entry.texts, "entity_dim": Entry.count,
    "units": Entry.optional_text, "attributes": Entry.free,
}  # fmt: skip


def _field(data: object, where: str, key: str) -> FieldInfo:
    entry = Entry(data, where, key, _FIELD)
    info = FieldInfo(**entry.values(_FIELD))
    if info.entity_dim >= len(info.dims):
        entry.wrong("entity_dim", f"one of {len(info.dims)} dims")
    return info


def _moments(data: object, where: str, key: str) -> StoredMoments:
    entry = Entry(data, where, key, _MOMENTS)
    several = isinstance(entry.data["count"], list)
    values: dict[str, Any] = {"count": entry.counts("count") if several else entry.count("count")}
    for name in _MOMENTS[1:]:
        found = entry.data[name] if several else [entry.data[name]]
        if not isinstance(found, list) or not all(x is None or is_number(x) for x in found):
            entry.wrong(name, "numbers" if several else "a number")
        if several and len(found) != len(values["count"]):
            entry.wrong(name, f"{len(values['count'])} numbers")
        numbers = tuple(math.nan if x is None else x for x in found)
        values[name] = numbers if several else numbers[0]
    return StoredMoments(**values)


def _bbox(entry: Entry, key: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    corners = entry.data[key]
    if corners is None:
        return None
    right = isinstance(corners, list) and len(corners) == 2 and all(isinstance(c, list) for c in corners)
    if not right or len(corners[0]) != len(corners[1]) or not all(map(is_number, [*corners[0], *corners[1]])):
        entry.wrong(key, "two corners")
    return tuple(corners[0]), tuple(corners[1])


def _period(entry: Entry, key: str) -> tuple[float, ...] | None:
    return None if entry.data[key] is None else entry.numbers(key)


def _count(value: object, where: str, key: str) -> int:
    if not is_count(value):
        raise damaged(where, f"{key} is {shown(value)}, but a number of rows was expected")
    return int(value)


def _settings(entry: Entry, key: str) -> dict[str, object]:
    settings = entry.free(key)
    options = Entry(settings, entry.where, ascii(key), optional=None)
    for name in settings.keys() & set(TREATMENTS):
        options.texts(name)
    return settings


def _size(entry: Entry, key: str) -> int | None:
    return None if entry.data[key] is None else entry.count(key)


_INPUT: Readers = {
    "name": Entry.text, "size": _size, "digest": Entry.optional_text, "relative_folder": Entry.optional_text,
}  # fmt: skip


def _inputs(entry: Entry, key: str) -> tuple[InputInfo, ...]:
    if not isinstance(entry.data[key], list):
        entry.wrong(key, "a list")
    where = entry.where
    each = (Entry(data, where, f"{key!r}[{i}]", _INPUT, ("relative_folder",)) for i, data in enumerate(entry.data[key]))
    return tuple(InputInfo(**one.values(_INPUT)) for one in each)


def _fields(entry: Entry, key: str) -> dict[str, FieldInfo]:
    fields = entry.each(key, _field)
    for path, info in fields.items():
        if path != info.path:
            entry.fail(path, f"is said to be the field {ascii(info.path)[:80]}")
    return fields


def _ghosts(entry: Entry, key: str) -> GhostCounts:
    inner = Entry(entry.data[key], entry.where, ascii(key), optional=None)
    for parts in inner.data:
        if not (parts.isascii() and parts.isdecimal()) or len(inner.counts(parts)) != 2:
            inner.wrong(parts, "two numbers of ghosts, for a number of parts")
    return {parts: inner.counts(parts) for parts in inner.data}


#: Of samples and of all of them together.
_BOTH: Readers = {
    "kind": Entry.text, "entity": Entry.text, "on_sphere": Entry.flag, "recipe": Entry.text, "settings": _settings,
    "counts": lambda entry, key: entry.each(key, _count), "bbox": _bbox, "period": _period,
    "fields": _fields, "statistics": lambda entry, key: entry.each(key, _moments),
}  # fmt: skip
_SAMPLE: Readers = _BOTH | {
    "index": Entry.count, "num_samples": Entry.count, "name": Entry.text, "folder": Entry.text,
    "kind": lambda entry, key: entry.one_of(key, _KINDS), "source_counts": _BOTH["counts"],
    "block_space": lambda entry, key: entry.one_of(key, _SPACES),
    "arrays": lambda entry, key: entry.each(key, _array), "inputs": _inputs, "notes": Entry.texts,
    "values": lambda entry, key: entry.each(key, check_value), "documents": Entry.text,
    "ghosts": _ghosts,
}  # fmt: skip
_MANIFEST: Readers = _BOTH | {"order": Entry.text, "entities": Entry.texts}


def _sample(data: object, where: str) -> SampleInfo:
    entry = Entry(data, where, "", _SAMPLE, optional=("documents", "inputs", "values", "ghosts"))
    index, folder = entry.count("index"), entry.text("folder")
    if folder != folder_of(index):
        _refuse_folder(entry, folder, index)
    info = SampleInfo(**entry.values(_SAMPLE))
    check_sample(entry, info)
    return info


def _refuse_folder(entry: Entry, folder: str, index: int) -> NoReturn:
    if "/" in folder or folder in ("", ".", ".."):
        raise RefusedError(
            f"{entry.where}: 'folder' names {ascii(folder)[:120]}, which may lie outside the store; a sample's folder "
            f"is {folder_of(index)}: do not trust this store, write it again"
        )
    entry.wrong("folder", repr(folder_of(index)))


def load_sample(data: object, where: str) -> SampleInfo:
    """Rebuild a sample's description from the plain data of :func:`scidata.store.format.manifest.sealed`.

    Raises CorruptDataError: it does not match its digest, or a key of it is missing or wrong; RefusedError: it names a
    place outside the store.
    """
    try:
        rest = _unsealed(data, where)
        _check_text(rest, where)
        return _sample(rest, where)
    except RecursionError:
        raise _too_deep(where) from None


def gather(infos: Iterable[SampleInfo], where: str) -> Samples:
    """Return descriptions of samples as columns: some hundred bytes each."""
    rows = Gathered()
    for info in infos:
        rows.add(described(info))
    return _gathered(rows, where)


def _gathered(rows: Gathered, where: str) -> Samples:
    said, table = rows.described()
    read: ReadTable = lambda start, stop: table[start:stop]  # noqa: E731
    if not said["groups"]:  # of a part of a run that has none
        return Samples(said, Table(0, read, said["digest"], where), [], None, _read_text, where)
    return _samples(said, read, where)


def _samples(said: dict[str, Any], read: ReadTable, where: str) -> Samples:
    """Return the samples that a manifest describes; ``said`` are its groups, and size and digest of the table.

    Raises CorruptDataError.
    """
    entry = Entry(said, where, "'samples'", ("groups", "nbytes", "digest"))
    nbytes, found = entry.count("nbytes"), said["groups"]
    if not isinstance(found, list) or not found:
        entry.wrong("groups", "a list of groups of samples")
    heads = [_group(group, where, f"'samples'['groups'][{i}]") for i, group in enumerate(found)]
    num = sum(head[0] for head in heads)
    start = 4 * num if len(heads) > 1 else 0
    expected = start + sum(n * row_dtype(columns).itemsize + sum(texts) for n, _, columns, texts in heads)
    if nbytes != expected:
        entry.wrong("nbytes", f"{expected}, as groups take,")
    table = Table(nbytes, read, entry.text("digest"), where)
    order = None
    if start:
        order = np.frombuffer(table.read(0, start), "<u4")
        if np.bincount(order, minlength=len(heads)).tolist() != [head[0] for head in heads]:
            raise damaged(where, "its table has other groups of samples")
    groups = []
    for head in heads:
        groups.append(Group(*head, table, start))
        start = groups[-1].stop
    samples = Samples(said, table, groups, order, _read_text, where)
    for i in range(len(groups)):
        _check_rows(samples, i, where)
    return samples


def _group(data: object, where: str, key: str) -> tuple[int, SampleInfo, list[Column], tuple[int, ...]]:
    """Return the number of samples of a group, its first, the columns in which others differ, and sizes of texts."""
    entry = Entry(data, where, key, ("num", "first", "columns", "texts"))
    first = _sample(entry.data["first"], f"{where}: {key}")
    possible = {column.way: column for column in columns_of(entry.data["first"])}
    try:
        columns = [possible[tuple(way)] for way in entry.data["columns"]]
    except (KeyError, TypeError, ValueError):
        entry.wrong("columns", "ways to values of samples")
    num, texts = entry.count("num"), entry.counts("texts")
    ways = [column.way for column in columns]
    if num < 1 or len(set(ways)) < len(ways) or ("index",) not in ways:
        entry.wrong("columns", f"each way once, and the index, of {num} samples")
    if len(texts) != sum(column.kind == "text" for column in columns):
        entry.wrong("texts", "a size for each column of texts")
    return num, first, columns, texts


def _read_text(way: Way, text: bytes, where: str) -> object:
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as e:
        raise damaged(where, f"its {way[-1]} are no JSON") from e
    _check_text(value, where)
    read: Callable[[Entry, str], object] = _SAMPLE.get(str(way[-1]), Entry.free)
    return read(Entry({way[-1]: value}, where, "", optional=None), str(way[-1]))


def _check_rows(samples: Samples, number: int, where: str) -> None:
    group = samples.groups[number]
    ends = dict.fromkeys(group.texts, 0)
    for start, rows in group.pieces():
        numbers = {each: rows[str(i)] for i, each in enumerate(group.columns) if each.kind in ("int", "float")}
        try:
            check_sample(Entry(described(group.first), where, "", optional=None), group.first, numbers)
        except (CorruptDataError, RefusedError):
            for row in range(start, start + len(rows)):  # find it, and say which it is
                index = samples.index_of(number, row)
                _sample(described(samples[index]), f"{where}: sample {index}")
            raise
        for i, (begin, end) in group.texts.items():
            steps = np.diff(rows[str(i)], prepend=ends[i])
            ends[i] = int(rows[str(i)][-1])
            is_last = start + len(rows) == group.num
            if steps.min() < 0 or ends[i] > end - begin or (is_last and ends[i] < end - begin):
                raise damaged(where, "its table has texts that do not lie one after the other")


def load_manifest(raw: bytes, where: str, read: Callable[[int], ReadTable]) -> Manifest:
    """Rebuild a manifest from its JSON.

    - ``read``: opens the file of the table, which has so many bytes, if the manifest does not hold it itself.

    Raises CorruptDataError: no JSON, no manifest, another schema version, one that does not match its digest, or a key
    that is missing or wrong; the message names the sample and the key; FieldMismatchError: samples that cannot lie in
    one store; RefusedError: it names a place outside the store.
    """
    try:
        data = _parsed(raw, where)
        version = data.get("version") if isinstance(data, dict) else None
        if isinstance(data, dict) and not (type(version) is int and 1 <= version <= MANIFEST_VERSION):
            raise CorruptDataError(
                f"{where}: has schema version {shown(version)}, this scidata reads 1 to {MANIFEST_VERSION}; "
                "write the store again, or use the scidata that wrote it"
            )
        data = _unsealed(data, where, raw)
        if b"\\u" in raw:  # scidata writes none but those of control characters
            _check_text(data, where)
        return _manifest(data, where, read)
    except RecursionError:
        raise _too_deep(where) from None


def _parsed(raw: bytes, where: str) -> object:
    try:
        return parse_object(raw.decode(), "samples")
    except UnicodeDecodeError as e:
        raise CorruptDataError(f"{where}: is not UTF-8; it is damaged: write the store again") from e
    except ValueError as e:
        check_pointer(raw, where)
        said = ascii(str(e))[1:-1][:120]
        raise CorruptDataError(f"{where}: is not JSON ({said}); it is damaged: write the store again") from e


def _too_deep(where: str) -> CorruptDataError:
    return CorruptDataError(f"{where}: is nested too deep; it is damaged, or made to do harm: copy the store again")


def _unsealed(data: object, where: str, raw: bytes = b"") -> dict[str, Any]:
    if not isinstance(data, dict) or "digest" not in data:
        raise CorruptDataError(f"{where}: holds no description of a scidata store; write the store again")
    rest = {key: value for key, value in data.items() if key != "digest"}
    found = None
    if (seal := _SEAL.search(raw)) is not None:  # as it was written: its bytes, without making them again
        view = memoryview(raw)
        found = digest_of(view[: seal.start() + 1], view[seal.end() :])
    if found != data["digest"] and digest_of(dump_json(_plain(rest)).encode()) != data["digest"]:
        raise CorruptDataError(f"{where}: does not match its own digest: it is damaged or was edited; write it again")
    return rest


def _plain(data: dict[str, object]) -> dict[str, object]:
    return {key: list(value) if isinstance(value, Items) else value for key, value in data.items()}


def _check_text(value: object, where: str, key: str = "") -> None:
    """Refuse lone surrogates, which no file of UTF-8 and no terminal can hold."""
    if isinstance(value, str) and _SURROGATE.search(value):
        raise CorruptDataError(f"{where}: {key} is {ascii(value)[:80]}, which is no text; write the store again")
    if isinstance(value, dict):
        for name, item in value.items():
            inner = f"{key}[{ascii(name)[:80]}]"
            _check_text(name, where, inner)
            _check_text(item, where, inner)
    elif isinstance(value, list | Items):
        for i, item in enumerate(value):
            _check_text(item, where, f"{key}[{i}]")


def _manifest(data: dict[str, Any], where: str, read: Callable[[int], ReadTable]) -> Manifest:
    entry = Entry(data, where, "", (*_MANIFEST, "version", "samples"))
    found = data["samples"]
    if data["version"] < MANIFEST_VERSION:
        samples = _old_samples(entry, found)
    else:
        samples = _samples(*_said(entry, found, read), where)
    version = samples.groups[0].first.version
    if data["version"] not in (version, MANIFEST_VERSION):
        entry.wrong("version", f"that of the samples, {version},")
    manifest = Manifest(version=data["version"], samples=samples, **entry.values(_MANIFEST))
    _check_sums(entry, manifest)
    return manifest


def _said(entry: Entry, found: object, read: Callable[[int], ReadTable]) -> tuple[dict[str, Any], ReadTable]:
    said = Entry(found, entry.where, "'samples'", ("groups", "nbytes", "digest", "table"))
    rest = {key: value for key, value in said.data.items() if key != "table"}
    if said.data["table"] is None:
        return rest, read(said.count("nbytes"))
    try:
        table = base64.b64decode(said.text("table"), validate=True)
    except ValueError:
        said.wrong("table", "the bytes of a table, as base64")
    if len(table) != said.count("nbytes"):
        said.wrong("nbytes", f"{len(table)}, as the table has,")
    return rest, lambda start, stop: table[start:stop]


def _old_samples(entry: Entry, found: object) -> Samples:
    """Return the samples of a manifest that has each in full."""
    if not isinstance(found, Items) or not found:
        entry.wrong("samples", "a list of samples")
    rows = Gathered()
    for i, data in enumerate(found):
        where = f"{entry.where}: sample {i}"
        try:
            if rows.add(data):
                _sample(data, where)  # others of its group are checked as rows
        except ValueError as e:
            _sample(data, where)
            raise damaged(where, f"it has a number that none can be ({e})") from e
    return _gathered(rows, entry.where)


def _check_sums(entry: Entry, manifest: Manifest) -> None:
    samples = manifest.samples
    first = samples.groups[0].first
    for name in ALIKE[1:]:
        if getattr(manifest, name) != getattr(first, name):
            entry.wrong(name, f"that of the samples, {shown(getattr(first, name))},")
    if manifest.entities != tuple(sorted(first.counts)):
        entry.wrong("entities", f"those of the samples, {', '.join(sorted(first.counts))},")
    index = samples.column("index")
    if len(np.unique(index)) < len(index):
        order = np.argsort(index, kind="stable")
        number = int(order[1:][np.diff(index[order]) == 0].min())
        raise damaged(f"{entry.where}: sample {number}", f"'index' is {index[number]}, as of a sample before")
    check_groups(samples, entry.where)
    for i, sample in enumerate(samples.firsts()):
        _check_beside(first, sample, f"{entry.where}: sample {samples.index_of(i, 0)}")
    if manifest.fields != first.fields:
        entry.wrong("fields", "those of the samples")
    if manifest.statistics.keys() != first.statistics.keys():
        entry.wrong("statistics", "figures of the samples' fields")
    for path, figures in manifest.statistics.items():
        if np.shape(figures.count) != np.shape(first.statistics[path].count):
            entry.wrong("statistics", f"as many figures of {path[:80]!a} as samples have")
    if manifest.counts != samples.counts():
        entry.wrong("counts", "the sums of the samples'")


def _check_beside(first: SampleInfo, sample: SampleInfo, where: str) -> None:
    """Check that figures and corners of two samples can be summed up."""
    entry = Entry({"statistics": sample.statistics, "bbox": sample.bbox}, where, "", optional=None)
    if sample.statistics.keys() != first.statistics.keys():
        entry.wrong("statistics", "figures of the same fields as of the first sample")
    if first.bbox is not None and sample.bbox is not None and len(sample.bbox[0]) != len(first.bbox[0]):
        entry.wrong("bbox", "corners of as many coordinates as those of the first sample")
