"""The descriptions of a store's samples: dataclasses, their JSON, and figures of fields. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeAlias

import numpy as np

from scidata.core.types import Array
from scidata.meshes.order.quality import GhostCounts

#: Of a sample; raised whenever an older reader would misread a newer one. 2 binds chunks to their places, see
#: ``checksums.py``, and has every byte of a store checked. 3 says how arrays lie in files, so that reading parses no
#: metadata of Zarr. Stores of versions before are read as they were.
SCHEMA_VERSION = 3
#: The field of edges between cells that share a node: whether they share a face.
ACROSS = "across_face"

#: Path of the array of all chunks' checksums inside a sample; see ``checksums.py``.
CHECKSUMS = "checksums"

#: A plain number, or one per component of a field of several.
Number: TypeAlias = float | tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class StoredMoments:
    """Figures for normalising a field; one per component (the dims after the entity's) if it has several.

    ``count`` are the finite values that went in; the others are NaN if there are none. ``std`` is that of the
    population.
    """

    count: int | tuple[int, ...]
    mean: Number
    std: Number
    min: Number
    max: Number


@dataclass(frozen=True, kw_only=True)
class FieldInfo:
    """One field: its entity, its dims as in the source, and the place of the entity's dim among them.

    ``dtype`` is NumPy's little-endian code, ``<f4``.
    """

    name: str
    entity: str
    dtype: str
    dims: tuple[str, ...]
    entity_dim: int
    units: str | None = None
    attributes: Mapping[str, object] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The array's path inside a sample."""
        return f"{self.entity}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class ArrayInfo:
    """Shape, dtype, digest and layout of one stored array.

    Values lie in C order, little-endian, each chunk followed by its crc32c: that is the same for all.

    - ``chunks``: their shape; None in schema version 1.
    - ``shards``: shape of the files that several chunks share, empty if each chunk is a file; None before schema
      version 3.
    """

    shape: tuple[int, ...]
    dtype: str
    digest: str
    chunks: tuple[int, ...] | None = None
    shards: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class InputInfo:
    """A file or folder that a sample was made of: its name without folders, its bytes, and the digest of them.

    ``size`` and ``digest`` are None behind a URL. ``relative_folder`` is where it lay, as seen from the folder that the
    store lies in; None behind a URL, and in stores that do not say.
    """

    name: str
    size: int | None
    digest: str | None
    relative_folder: str | None = None


@dataclass(frozen=True, kw_only=True)
class SampleHead:
    """The description of a sample that its source gives, and the store keeps.

    - ``index``, ``num_samples``: its place among the samples of the run that wrote it.
    - ``recipe``: digest of the options it was made with: samples of different recipes do not mix.
    - ``period``: width of the domain along each coordinate where it wraps, 0 if it does not; None if none does.
    - ``notes``: notes for the maker: fallbacks of the order, repairs.
    - ``values``: of the whole sample, by name, as :func:`scidata.store.format.values.encode_values` writes them.
    """

    index: int
    num_samples: int
    name: str
    kind: str
    entity: str
    on_sphere: bool
    recipe: str
    period: tuple[float, ...] | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    inputs: tuple[InputInfo, ...] = ()
    notes: tuple[str, ...] = ()
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def head(self) -> dict[str, Any]:
        """Return these entries alone, also of a subclass."""
        return {entry.name: getattr(self, entry.name) for entry in fields(SampleHead)}


@dataclass(frozen=True, kw_only=True)
class SampleInfo(SampleHead):
    """One sample of a store.

    - ``counts``, ``source_counts``: rows of each entity, and how many the source has of it: more where a repair left
      some out.
    - ``bbox``: ``(2, ndim)`` lower and upper corner of the positions as given; None without positions or rows.
    - ``block_space``: coordinates of ``blocks/bbox``: ``"pos"``, or ``"unit_sphere"`` (x, y, z) for longitudes and
      latitudes; None without positions.
    - ``ghosts``: of equal parts, as :func:`scidata.meshes.order.quality.count_ghosts` counts them.
    - ``documents``: digest of the ``zarr.json`` of its groups and arrays, but for its own; None in schema version 1.
    """

    folder: str
    counts: Mapping[str, int]
    source_counts: Mapping[str, int]
    bbox: tuple[tuple[float, ...], tuple[float, ...]] | None
    block_space: str | None
    arrays: Mapping[str, ArrayInfo]
    fields: Mapping[str, FieldInfo]
    statistics: Mapping[str, StoredMoments]
    ghosts: GhostCounts = field(default_factory=dict)
    documents: str | None = None

    @property
    def version(self) -> int:
        """The schema version that it was written by."""
        if self.documents is None:
            return 1
        return 2 if self.arrays[CHECKSUMS].shards is None else 3

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, decoded."""
        return sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in self.arrays.values())


class RunningStatistics:
    """Mean, deviation and range of a field in one pass over blocks (Chan, Golub, LeVeque 1983), in float64.

    The same blocks in the same order give the same bits.
    """

    def __init__(self, num_components: int | None) -> None:
        size = 1 if num_components is None else num_components
        self._plain = num_components is None
        self._count = np.zeros(size, np.int64)
        self._mean = np.zeros(size)
        self._m2 = np.zeros(size)
        self._min = np.full(size, np.inf)
        self._max = np.full(size, -np.inf)

    def add(self, block: Array) -> None:
        """Take in values whose last dims are the components (``block`` has ``rows * components`` values)."""
        values = block.reshape(-1, len(self._mean)).astype(np.float64)
        finite = np.isfinite(values)
        count = finite.sum(axis=0)
        if not count.any():
            return
        every = bool(finite.all())
        kept = values if every else np.where(finite, values, 0.0)
        mean = kept.sum(axis=0) / np.maximum(count, 1)
        delta = kept - mean if every else np.where(finite, values - mean, 0.0)
        low = kept.min(axis=0) if every else np.where(finite, values, np.inf).min(axis=0)
        high = kept.max(axis=0) if every else np.where(finite, values, -np.inf).max(axis=0)
        self.merge_moments(count, mean, (delta * delta).sum(axis=0), low, high)

    def merge(self, stats: StoredMoments) -> None:
        """Take in the figures of another part of the data."""
        count = np.atleast_1d(np.asarray(stats.count, np.int64))
        mean, std, low, high = (
            np.nan_to_num(np.atleast_1d(np.asarray(x, np.float64)), nan=fill)
            for x, fill in ((stats.mean, 0.0), (stats.std, 0.0), (stats.min, np.inf), (stats.max, -np.inf))
        )
        self.merge_moments(count, mean, std * std * count, low, high)

    def merge_moments(self, count: Any, mean: Any, m2: Any, low: Any, high: Any) -> None:
        """Take in figures of each component, with sums of squared deviations."""
        total = self._count + count
        share = count / np.maximum(total, 1)
        delta = np.where(count > 0, mean - self._mean, 0.0)
        self._m2 += np.where(count > 0, m2, 0.0) + delta * delta * self._count * share
        self._mean += delta * share
        self._count = total
        self._min, self._max = np.minimum(self._min, low), np.maximum(self._max, high)

    def result(self) -> StoredMoments:
        """Return the statistics so far."""
        some = self._count > 0
        std = np.sqrt(self._m2 / np.maximum(self._count, 1))
        columns = [self._count, *(np.where(some, x, np.nan) for x in (self._mean, std, self._min, self._max))]
        return statistics_of([x.reshape(()) for x in columns] if self._plain else columns)


def statistics_of(figures: Sequence[Array]) -> StoredMoments:
    """Return statistics of five arrays: plain numbers where these have no dims."""
    values = [x.item() if x.ndim == 0 else tuple(x.reshape(-1).tolist()) for x in figures]
    return StoredMoments(count=values[0], mean=values[1], std=values[2], min=values[3], max=values[4])


def dump_json(data: Mapping[str, object]) -> str:
    """Return JSON without NaN (null instead), the same for the same data."""
    return json.dumps(plain(data), indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def plain(value: object) -> Any:
    """Return a value as JSON has it, without NaN (None instead)."""
    if isinstance(value, Mapping):
        return {_text(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if is_dataclass(value):
        return plain(vars(value))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int | bool | None):
        return value
    return _text(value)


def _text(value: object) -> str:
    text = str(value)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def described(info: SampleInfo) -> dict[str, Any]:
    """Return a sample's description as plain data, without keys that came later, where they say nothing."""
    data: dict[str, Any] = plain(info)
    for each in (data, *data["arrays"].values(), *data["inputs"]):
        for key in each.keys() & {"values", "documents", "chunks", "shards", "relative_folder", "ghosts"}:
            if each[key] in (None, {}):
                del each[key]
    return data


def sealed(description: SampleInfo | Mapping[str, object]) -> dict[str, object]:
    """Return a description as plain data with a digest of itself."""
    data = described(description) if isinstance(description, SampleInfo) else description
    return {**data, "digest": digest_of(dump_json(data).encode())}


def digest_of(*parts: bytes | memoryview) -> str:
    """Return the digest of some bytes, one after the other."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def merge_statistics(parts: Iterable[StoredMoments], num_components: int | None) -> StoredMoments:
    """Return the figures of several parts of a field's data together."""
    total = RunningStatistics(num_components)
    for part in parts:
        total.merge(part)
    return total.result()
