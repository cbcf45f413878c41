"""What a store's ``manifest.json`` says of all samples: their sums, and the samples themselves. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scidata.errors import FieldMismatchError
from scidata.store.format.manifest import (
    FieldInfo,
    RunningStatistics,
    SampleInfo,
    StoredMoments,
    described,
    dump_json,
    plain,
    sealed,
)
from scidata.store.format.samples import Group, Samples, Way
from scidata.store.format.treatments import either_treats, treat_alike

#: Of a manifest that holds its samples as a table; of versions before it is that of its samples, each of which is
#: there in full.
MANIFEST_VERSION = 4

ALIKE = ("version", "kind", "entity", "on_sphere", "period", "recipe")
_ROWS = 4096  # whose figures are merged from one table
_MOMENTS = ("count", "mean", "std", "min", "max")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a whole store: fields and statistics over all samples, and the samples themselves."""

    version: int
    kind: str
    entity: str
    order: str
    on_sphere: bool
    period: tuple[float, ...] | None
    recipe: str
    settings: Mapping[str, object]
    entities: tuple[str, ...]
    counts: Mapping[str, int]
    bbox: tuple[tuple[float, ...], tuple[float, ...]] | None
    fields: Mapping[str, FieldInfo]
    statistics: Mapping[str, StoredMoments]
    samples: Samples


def make_manifest(samples: Samples, store: str) -> Manifest:
    """Sum up samples, which must agree in kind, recipe and fields."""
    first = samples[0]
    settings = first.settings
    check_groups(samples, store)
    for sample in samples.firsts():
        if not treat_alike(settings, sample.settings):
            raise FieldMismatchError(
                f"{store}: sample {sample.index} ({sample.name}) keeps faults that others repair, or repairs what they "
                "keep; write all samples with the same --repair and --keep"
            )
        settings = either_treats(settings, sample.settings) if sample.settings != settings else settings
    boxes = [_box(group) for group in samples.groups if group.first.bbox is not None]
    bbox = None
    if boxes:
        low, high = np.min([box[0] for box in boxes], axis=0), np.max([box[1] for box in boxes], axis=0)
        bbox = (tuple(low.tolist()), tuple(high.tolist()))
    return Manifest(
        version=MANIFEST_VERSION,
        kind=first.kind,
        entity=first.entity,
        order=str(first.settings.get("order", "rows")),
        on_sphere=first.on_sphere,
        period=first.period,
        recipe=first.recipe,
        settings=settings,
        entities=tuple(sorted(first.counts)),  # files keep no order of keys
        counts=samples.counts(),
        bbox=bbox,
        fields=first.fields,
        statistics=_merged(samples) if len(samples) > 1 else first.statistics,
        samples=samples,
    )


def _box(group: Group) -> tuple[Any, Any]:
    assert group.first.bbox is not None
    corners = [
        np.stack([group.column(("bbox", i, k)) for k in range(len(corner))], axis=1)
        for i, corner in enumerate(group.first.bbox)
    ]
    return corners[0].min(axis=0), corners[1].max(axis=0)


def _merged(samples: Samples) -> dict[str, StoredMoments]:
    """Merge the figures of samples one after the other, of all fields at once."""
    first = samples.groups[0].first.statistics
    # the number of components; None for plain numbers
    widths = {path: len(x.count) if isinstance(x.count, tuple) else None for path, x in first.items()}
    places = [
        (path, component)
        for path, width in widths.items()
        for component in ([()] if width is None else [(i,) for i in range(width)])
    ]
    total = RunningStatistics(len(places))
    for start in range(0, len(samples) if places else 0, _ROWS):
        rows = {"start": start, "stop": min(start + _ROWS, len(samples))}
        count, *figures = (
            np.stack([samples.column("statistics", path, part, *i, **rows) for path, i in places], axis=1)
            for part in _MOMENTS
        )
        fills = (0.0, 0.0, np.inf, -np.inf)
        mean, std, low, high = (np.nan_to_num(x, nan=fill) for x, fill in zip(figures, fills, strict=True))
        for each in zip(count, mean, std * std * count, low, high, strict=True):
            total.merge_moments(*each)
    result, begin, found = total.result(), 0, {}
    for path, width in widths.items():
        end = begin + (width or (width is None))
        parts = {part: getattr(result, part)[begin:end] for part in _MOMENTS}
        found[path] = StoredMoments(**(parts if width is not None else {part: x[0] for part, x in parts.items()}))
        begin = end
    return found


def document(manifest: Manifest, **changes: object) -> str:
    """Return the JSON of a manifest, with what it says of its samples, and of which version it is."""
    return dump_json(sealed(plain({**vars(manifest), **changes})))


def old_document(manifest: Manifest) -> str:
    """Return the JSON of a manifest as versions before 4 wrote it, with each sample in full."""
    samples = [described(info) for info in manifest.samples]
    return document(manifest, version=manifest.samples.groups[0].first.version, samples=samples)


def check_groups(samples: Samples, store: str) -> None:
    """Check that samples may lie in one store. Raises FieldMismatchError."""
    first = samples[0]
    for i, group in enumerate(samples.groups):
        check_alike(first, group.first, store)
        for path, info in first.fields.items():
            for dim, size in list(enumerate(first.arrays[path].shape))[info.entity_dim + 1 :]:
                way: Way = ("arrays", path, "shape", dim)
                if way in group.places and len(other := np.flatnonzero(group.column(way) != size)):
                    check_alike(first, samples[samples.index_of(i, int(other[0]))], store)


def check_alike(first: SampleInfo, other: SampleInfo, store: str) -> None:
    """Check that two samples may lie in one store. Raises FieldMismatchError."""

    def differ(name: str, expected: object, found: object) -> FieldMismatchError:
        return FieldMismatchError(
            f"{store}: sample {other.index} ({other.name}) has {name} {found}, but sample {first.index} "
            f"({first.name}) has {expected}; choose the fields that all samples share, or write two stores"
        )

    for name in ALIKE:
        if getattr(first, name) != getattr(other, name):
            raise differ(name, getattr(first, name), getattr(other, name))
    if first.counts.keys() != other.counts.keys():
        raise differ("entities", sorted(first.counts), sorted(other.counts))
    if first.values.keys() != other.values.keys():
        raise differ("values of the whole", sorted(first.values), sorted(other.values))
    if first.fields.keys() != other.fields.keys():
        raise differ("fields", sorted(first.fields), sorted(other.fields))
    for path, info in first.fields.items():
        found = other.fields[path]
        if info is not found and replace(info, attributes={}) != replace(found, attributes={}):
            raise differ(f"field {path!r} as", f"{info.dtype} {info.dims}", f"{found.dtype} {found.dims}")
        shapes = [each.arrays[path].shape[each.fields[path].entity_dim + 1 :] for each in (first, other)]  # components
        if shapes[0] != shapes[1]:
            raise differ(f"components of {path!r}:", shapes[0], shapes[1])
