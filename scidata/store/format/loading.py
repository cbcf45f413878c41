"""Reads the description of a store or a sample: every key is checked before anything relies on it. Pure.

A manifest may be damaged, or made to do harm: errors name the sample and the key.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from scidata.errors import CorruptDataError, RefusedError
from scidata.sources.pointers import check_pointer
from scidata.store.format.entries import MOST, Entry, Readers, damaged, is_count, is_number, shown
from scidata.store.format.manifest import (
    CHECKSUMS,
    SCHEMA_VERSION,
    ArrayInfo,
    FieldInfo,
    InputInfo,
    Manifest,
    SampleInfo,
    StoredMoments,
    check_alike,
    digest_of,
    dump_json,
)
from scidata.store.format.node_sets import rows_of_sets
from scidata.store.format.places import folder_of
from scidata.store.format.streamed import Items, parse_object
from scidata.store.format.treatments import TREATMENTS
from scidata.store.format.values import check_value
from scidata.store.format.write import BLOCK_ROWS

_KINDS = ("mesh", "points", "graph", "hetero")
_SPACES = (None, "pos", "unit_sphere")
_MOMENTS = ("count", "mean", "std", "min", "max")
_SEAL = re.compile(rb'\n "digest": "([0-9a-f]{32})",\n')  # of the whole document: that line alone has one space
_SURROGATE = re.compile("[\ud800-\udfff]")


@functools.lru_cache(256)
def _is_dtype(text: str) -> bool:
    """Whether it is a dtype that values have: no objects, no records."""
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
    shape, chunks, shards, itemsize = info.shape, info.chunks, info.shards, np.dtype(info.dtype).itemsize
    if math.prod(max(n, 1) for n in shape) * itemsize > MOST:
        entry.wrong("shape", f"a shape of less than 2**63 bytes of {info.dtype}")
    if chunks is not None and (len(chunks) != len(shape) or 0 in chunks or math.prod(chunks) * itemsize > MOST):
        entry.wrong("chunks", f"the shape of chunks of {shape}")
    fits = shards is None or (len(shards) == len(chunks or ()) and 0 not in shards)
    if shards and not (fits and all(n % c == 0 for n, c in zip(shards, chunks or (), strict=True))):
        entry.wrong("shards", f"the shape of files of chunks of {chunks}")
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
    """Return the options of a run; those about faults are looked at again."""
    settings = entry.free(key)
    options = Entry(settings, entry.where, ascii(key), optional=None)
    for name in settings.keys() & set(TREATMENTS):
        options.texts(name)
    return settings


def _size(entry: Entry, key: str) -> int | None:
    return None if entry.data[key] is None else entry.count(key)


_INPUT: Readers = {"name": Entry.text, "size": _size, "digest": Entry.optional_text}


def _inputs(entry: Entry, key: str) -> tuple[InputInfo, ...]:
    if not isinstance(entry.data[key], list):
        entry.wrong(key, "a list")
    each = (Entry(data, entry.where, f"{key!r}[{i}]", _INPUT) for i, data in enumerate(entry.data[key]))
    return tuple(InputInfo(**one.values(_INPUT)) for one in each)


class _Fields:
    """Reads the fields of samples: those of one store are nearly always the same, and then made once."""

    def __init__(self) -> None:
        self._data: object = None
        self._fields: dict[str, FieldInfo] = {}

    def read(self, entry: Entry, key: str) -> dict[str, FieldInfo]:
        if self._data is None or entry.data[key] != self._data:
            fields = entry.each(key, _field)
            for path, info in fields.items():
                if path != info.path:
                    entry.fail(path, f"is said to be the field {ascii(info.path)[:80]}")
            self._data, self._fields = entry.data[key], fields
        return self._fields


#: Of samples and of all of them together, but for fields, which are read by :class:`_Fields`.
_BOTH: Readers = {
    "kind": Entry.text, "entity": Entry.text, "on_sphere": Entry.flag, "recipe": Entry.text, "settings": _settings,
    "counts": lambda entry, key: entry.each(key, _count), "bbox": _bbox, "period": _period,
    "statistics": lambda entry, key: entry.each(key, _moments),
}  # fmt: skip
_SAMPLE: Readers = _BOTH | {
    "index": Entry.count, "num_samples": Entry.count, "name": Entry.text, "folder": Entry.text,
    "kind": lambda entry, key: entry.one_of(key, _KINDS), "source_counts": _BOTH["counts"],
    "block_space": lambda entry, key: entry.one_of(key, _SPACES),
    "arrays": lambda entry, key: entry.each(key, _array), "inputs": _inputs, "notes": Entry.texts,
    "values": lambda entry, key: entry.each(key, check_value), "documents": Entry.text,
}  # fmt: skip
_MANIFEST: Readers = _BOTH | {"order": Entry.text, "entities": Entry.texts}


def _sample(data: object, where: str, fields: _Fields) -> SampleInfo:
    readers = _SAMPLE | {"fields": fields.read}
    entry = Entry(data, where, "", readers, optional=("documents", "inputs", "values"))
    index, folder = entry.count("index"), entry.text("folder")
    if folder != folder_of(index):
        _refuse_folder(entry, folder, index)
    info = SampleInfo(**entry.values(readers))
    _check_sample(entry, info)
    return info


def _refuse_folder(entry: Entry, folder: str, index: int) -> NoReturn:
    if "/" in folder or folder in ("", ".", ".."):
        raise RefusedError(
            f"{entry.where}: 'folder' names {ascii(folder)[:120]}, which may lie outside the store; a sample's folder "
            f"is {folder_of(index)}: do not trust this store, write it again"
        )
    entry.wrong("folder", repr(folder_of(index)))


def _check_sample(entry: Entry, info: SampleInfo) -> None:
    """Check keys against each other: arrays that every sample has, and their rows."""
    if info.entity not in info.counts:
        entry.wrong("entity", f"one of {', '.join(info.counts)}")
    if not info.source_counts.keys() >= info.counts.keys():
        entry.wrong("source_counts", f"a number for each of {', '.join(info.counts)}")
    num_rows, num_cells = info.counts[info.entity], info.counts.get("cell", 0)
    num_blocks = -(-num_rows // BLOCK_ROWS)
    rows = {**rows_of_sets(entry, info), "blocks/weight_prefix": num_blocks + 1}
    if info.block_space is not None:
        rows |= {f"{info.entity}/pos": num_rows, "blocks/bbox": num_blocks}
    if "cell/indptr" in info.arrays:
        rows |= {"cell/offsets": num_cells + 1, "cell/connectivity": None, "cell/type": num_cells}
        rows |= {"cell/original_id": num_cells, "cell/indptr": num_rows + 1}
    if info.documents is not None:
        rows[CHECKSUMS] = None
    for path, num in rows.items():
        array = info.arrays.get(path)
        if array is None:
            entry.fail("arrays", f"lacks {path!r}, which every such sample has")
        if not array.shape or num not in (None, array.shape[0]):
            entry.fail("arrays", f"has {path!r} of shape {array.shape}, but {num} rows are counted")
    for path, array in info.arrays.items():
        if any(part in ("", ".", "..") for part in path.split("/")) or "\\" in path or "\0" in path:
            raise RefusedError(f"{entry.where}: 'arrays' names {ascii(path)[:120]}, which is no path inside a sample")
        if info.documents is not None and array.chunks is None:
            entry.fail("arrays", f"says nothing of the chunks of {ascii(path)[:80]}")
        if info.documents is not None and (array.shards is None) != (info.version < 3):
            entry.fail("arrays", f"says of some arrays alone how they lie in files, not of {ascii(path)[:80]}")
    if info.documents is not None and info.arrays[CHECKSUMS] != _checksums_of(info):
        entry.fail("arrays", f"has {CHECKSUMS!r} that are not one for each chunk")
    if info.block_space is not None:
        _check_coordinates(entry, info)
    _check_fields(entry, info)


def _check_coordinates(entry: Entry, info: SampleInfo) -> None:
    shape = info.arrays[f"{info.entity}/pos"].shape
    if len(shape) != 2:
        entry.fail("arrays", f"has positions of shape {shape}, not a row of coordinates each")
    if info.bbox is not None and len(info.bbox[0]) != shape[1]:
        entry.wrong("bbox", f"corners of {shape[1]} coordinates")
    if info.period is not None and len(info.period) != shape[1]:
        entry.wrong("period", f"a width along each of {shape[1]} coordinates")


def _checksums_of(info: SampleInfo) -> ArrayInfo:
    """Return the only possible array of checksums, but for its digest."""
    total = sum(
        math.prod(-(-n // c) for n, c in zip(array.shape, array.chunks or (), strict=False))
        for path, array in info.arrays.items()
        if path != CHECKSUMS
    )
    shards = None if info.version < 3 else ()
    return replace(info.arrays[CHECKSUMS], shape=(total,), dtype="<u4", chunks=(total,), shards=shards)


def _check_fields(entry: Entry, info: SampleInfo) -> None:
    for path, field in info.fields.items():
        array = info.arrays.get(path)
        if array is None or len(array.shape) != len(field.dims) or array.dtype != field.dtype:
            entry.fail("fields", f"has {ascii(path)[:80]}, of which there is no array of such dims and dtype")
        if array.shape[field.entity_dim] != info.counts.get(field.entity):
            entry.fail("fields", f"has {ascii(path)[:80]}, whose array has not a row for each {field.entity[:80]!a}")
    for path, figures in info.statistics.items():
        if path not in info.fields:
            entry.fail("statistics", f"has {ascii(path)[:80]}, which is no field")
        tail = info.arrays[path].shape[info.fields[path].entity_dim + 1 :]
        found = len(figures.count) if isinstance(figures.count, tuple) else None
        if found != (math.prod(tail) if tail else None):
            entry.fail("statistics", f"has figures of {ascii(path)[:80]} that are not one for each component")


def load_sample(data: object, where: str) -> SampleInfo:
    """Rebuild a sample's description from the plain data of :func:`scidata.store.format.manifest.sealed`.

    Raises
    ------
    CorruptDataError
        It does not match its digest, or a key of it is missing or wrong.
    RefusedError
        It names a place outside the store.
    """
    try:
        rest = _unsealed(data, where)
        _check_text(rest, where)
        return _sample(rest, where, _Fields())
    except RecursionError:
        raise _too_deep(where) from None


def load_manifest(raw: bytes, where: str) -> Manifest:
    """Rebuild a manifest from its JSON.

    Raises
    ------
    CorruptDataError
        No JSON, no manifest, another schema version, one that does not match its digest, or a key that is missing or
        wrong; the message names the sample and the key.
    FieldMismatchError
        Samples that cannot lie in one store.
    RefusedError
        It names a place outside the store.
    """
    try:
        data = _parsed(raw, where)
        version = data.get("version") if isinstance(data, dict) else None
        if isinstance(data, dict) and not (type(version) is int and 1 <= version <= SCHEMA_VERSION):
            raise CorruptDataError(
                f"{where}: has schema version {shown(version)}, this scidata reads 1 to {SCHEMA_VERSION}; "
                "write the store again, or use the scidata that wrote it"
            )
        data = _unsealed(data, where, raw)
        if b"\\u" in raw:  # scidata writes none but those of control characters
            _check_text(data, where)
        return _manifest(data, where)
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
    """Return an object without its digest, if the two agree; ``raw`` is its JSON, if it is a document."""
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


def _manifest(data: dict[str, Any], where: str) -> Manifest:
    fields = _Fields()
    readers = _MANIFEST | {"fields": fields.read}
    entry = Entry(data, where, "", (*readers, "version", "samples"))
    found = data["samples"]
    if not isinstance(found, Items) or not found:
        entry.wrong("samples", "a list of samples")
    samples = tuple(_sample(sample, f"{where}: sample {i}", fields) for i, sample in enumerate(found))
    manifest = Manifest(version=data["version"], samples=samples, **entry.values(readers))
    _check_sums(entry, manifest)
    return manifest


def _check_beside(first: SampleInfo, sample: SampleInfo, where: str) -> None:
    """Check that figures and corners of two samples can be summed up."""
    entry = Entry({"statistics": sample.statistics, "bbox": sample.bbox}, where, "", optional=None)
    if sample.statistics.keys() != first.statistics.keys():
        entry.wrong("statistics", "figures of the same fields as of the first sample")
    if first.bbox is not None and sample.bbox is not None and len(sample.bbox[0]) != len(first.bbox[0]):
        entry.wrong("bbox", "corners of as many coordinates as those of the first sample")


def _check_sums(entry: Entry, manifest: Manifest) -> None:
    """Check those sums over samples that are cheap to check; :func:`~scidata.store.format.store.verify` does all."""
    first = manifest.samples[0]
    for name in ("version", "kind", "entity", "on_sphere", "period", "recipe"):
        if getattr(manifest, name) != getattr(first, name):
            entry.wrong(name, f"that of the samples, {shown(getattr(first, name))},")
    if manifest.entities != tuple(sorted(first.counts)):
        entry.wrong("entities", f"those of the samples, {', '.join(sorted(first.counts))},")
    seen: set[int] = set()
    for number, sample in enumerate(manifest.samples):
        if sample.index in seen:
            raise damaged(f"{entry.where}: sample {number}", f"'index' is {sample.index}, as of a sample before")
        seen.add(sample.index)
        check_alike(first, sample, entry.where)
        _check_beside(first, sample, f"{entry.where}: sample {number}")
    if manifest.fields != first.fields:
        entry.wrong("fields", "those of the samples")
    if manifest.statistics.keys() != first.statistics.keys():
        entry.wrong("statistics", "figures of the samples' fields")
    for path, figures in manifest.statistics.items():
        if np.shape(figures.count) != np.shape(first.statistics[path].count):
            entry.wrong("statistics", f"as many figures of {path[:80]!a} as samples have")
    sums = {name: sum(sample.counts[name] for sample in manifest.samples) for name in first.counts}
    if manifest.counts != sums:
        entry.wrong("counts", "the sums of the samples'")
