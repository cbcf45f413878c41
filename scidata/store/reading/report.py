"""What is in a partitioned store: fields and statistics from its manifest, and how well one sample's order cuts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scidata.errors import ConfigError, FieldMismatchError
from scidata.meshes.hetero import rows_named
from scidata.meshes.order.csr import CSR, csr_from_edges
from scidata.meshes.order.neighbours import near_edges
from scidata.meshes.order.quality import Quality, measure_quality
from scidata.store.format.manifest import StoredMoments
from scidata.store.format.samples import Samples
from scidata.store.format.store import Store, open_store
from scidata.store.reading.numbering import number_samples

_NEIGHBOURS = 6  # of points without edges: as many as a network or an interpolation would join
_MANY_POINTS = 2_000_000  # beyond it neighbours take minutes to find


@dataclass(frozen=True, kw_only=True)
class FieldReport:
    """One field; ``shape`` is that of the first sample, statistics are over all samples."""

    name: str
    entity: str
    dtype: str
    dims: tuple[str, ...]
    entity_dim: int
    shape: tuple[int, ...]
    units: str | None
    statistics: StoredMoments | None


@dataclass(frozen=True, kw_only=True)
class PartitionedReport:
    """What :func:`inspect_partitioned` finds.

    - ``path``, ``kind``, ``order``, ``on_sphere``, ``period``, ``settings``, ``bbox``: as the manifest says;
      ``settings`` are the options that the store was written with.
    - ``counts``: rows of each entity over all samples.
    - ``sample_dim``, ``num_read``: how ``open_dataset`` numbers samples by default: the dim whose rows are samples
      (None: there is none), and how many there are; None if fields have to be chosen first.
    - ``fields``: one entry each, of the samples as they are stored.
    - ``samples``: as they are stored.
    - ``quality``: of the sample ``quality_sample``, in parts of equal numbers of rows; None if it has no rows, or
      neither edges nor positions.
    - ``quality_edges``: whose ends the quality counts, in words.
    - ``notes``: what is not as one would expect.
    """

    path: str
    kind: str
    order: str
    on_sphere: bool
    period: tuple[float, ...] | None
    settings: Mapping[str, object]
    bbox: tuple[tuple[float, ...], tuple[float, ...]] | None
    counts: Mapping[str, int]
    nbytes: int
    sample_dim: str | None
    num_read: int | None
    fields: tuple[FieldReport, ...]
    samples: Samples
    quality_sample: int
    quality_edges: str
    quality: Quality | None
    notes: tuple[str, ...]


def inspect_partitioned(
    path: str | os.PathLike[str], *, sample: int = 0, num_parts: Sequence[int] = (2, 8, 64)
) -> PartitionedReport:
    """Describe a store that ``scidata partition`` wrote; reads positions and edges of one sample to judge its order.

    - ``sample``, ``num_parts``: which sample is cut, and into how many parts; numbers larger than its rows are left
      out.
    """
    store = open_store(path)
    manifest, info = store.manifest, store.sample(sample)
    num_rows = info.counts[info.entity]
    notes = []
    if any(part < 1 for part in num_parts):
        raise ConfigError(f"number of parts must be at least 1, not {min(num_parts)}")
    kept = [parts for parts in num_parts if parts <= num_rows]
    if len(kept) < len(num_parts):
        notes.append(f"sample {sample} has {num_rows} {rows_named(info.entity)}: cut into no more than that many parts")
    sample_dim = num_read = None
    try:
        numbering = number_samples(store, list(manifest.fields.values()))
        sample_dim, num_read = numbering.sample_dim, numbering.num_samples
    except FieldMismatchError as e:
        notes.append(str(e))
    quality, edges, complaint = _quality(store, sample, kept)
    notes += complaint
    if quality is not None:
        notes += _quality_notes(quality, info.entity, sample, counts_edges="edge" in info.counts)
    return PartitionedReport(
        path=store.path,
        kind=manifest.kind,
        order=manifest.order,
        on_sphere=manifest.on_sphere,
        period=manifest.period,
        settings=manifest.settings,
        bbox=manifest.bbox,
        counts=manifest.counts,
        samples=manifest.samples,
        nbytes=sum(manifest.samples.nbytes()),
        sample_dim=sample_dim,
        num_read=num_read,
        fields=tuple(
            FieldReport(
                name=field.name,
                entity=field.entity,
                dtype=str(np.dtype(field.dtype).newbyteorder("=")),
                dims=field.dims,
                entity_dim=field.entity_dim,
                shape=store.sample(0).arrays[field_path].shape,
                units=field.units,
                statistics=manifest.statistics.get(field_path),
            )
            for field_path, field in manifest.fields.items()
        ),
        quality_sample=sample,
        quality_edges=edges,
        quality=quality,
        notes=tuple(notes),
    )


def _quality(store: Store, index: int, num_parts: Sequence[int]) -> tuple[Quality | None, str, list[str]]:
    """Measure a sample's order; with it the edges that were counted, and why there is nothing to count."""
    info = store.sample(index)
    num_rows, pos = info.counts[info.entity], f"{info.entity}/pos"
    if num_rows == 0:
        return None, "none", [f"sample {index} is empty"]
    points = store.read(index, pos) if pos in info.arrays else None
    if "edge" in info.counts:
        src = store.read(index, "csr/src")
        csr = CSR(
            indptr=store.read(index, "csr/indptr").astype(np.int64),
            src=src.astype(src.dtype.newbyteorder("=")),
            edge_id=np.arange(len(src), dtype=np.int64),
        )
        return measure_quality(csr, points, num_parts=num_parts), "the store's edges", []
    if info.kind == "hetero":
        return None, "none", []
    if points is None:
        return None, "none", [f"sample {index} has neither edges nor positions: its order cannot be judged"]
    if num_rows > _MANY_POINTS:
        return None, "none", [f"sample {index} has {num_rows} points and no edges: its order is not judged"]
    src_dst = near_edges(points, "knn", _NEIGHBOURS, on_sphere=info.on_sphere)
    csr = csr_from_edges(src_dst[0], src_dst[1], num_rows)
    return measure_quality(csr, points, num_parts=num_parts), f"each point's {_NEIGHBOURS} nearest others", []


def _quality_notes(quality: Quality, entity: str, sample: int, *, counts_edges: bool) -> list[str]:
    notes = []
    if quality.num_duplicate_points:
        notes.append(f"sample {sample}: {quality.num_duplicate_points} {entity}s lie where another one does")
    if not counts_edges:  # components of nearest neighbours are the search's, not the data's
        return notes
    if quality.num_isolated:
        notes.append(f"sample {sample}: {quality.num_isolated} {entity}s have no edge")
    joined = quality.num_components - quality.num_isolated
    if joined > 1:
        others = "other " if quality.num_isolated else ""
        notes.append(f"sample {sample}: the {others}{entity}s are {joined} components without an edge between them")
    return notes
