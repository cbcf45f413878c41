"""``JoinedDataset``: samples of several data sets with the same key, such as a time, as one data set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from scidata.core.checks import sample_number
from scidata.core.keywords import checked_keywords
from scidata.core.types import Array, BoolArray, BufferSpec, Empty, IntArray
from scidata.data.adapter import DatasetAdapter
from scidata.data.combined_dataset import CombinedDataset, combined_dataset, leaf_of
from scidata.data.composed import ComposedDataset
from scidata.data.irregular_dataset import IrregularDataset
from scidata.data.joined_sample import JoinedPart, JoinedSample, by_part, flat
from scidata.data.keys import Match
from scidata.data.local_fields import LocalFields
from scidata.data.sample import call_transform
from scidata.data.statistics_table import Statistics
from scidata.errors import ConfigError, check_known
from scidata.plan.totals import ReadPlan
from scidata.read.context import NO_READ, ReadStats

_COARSE_BLOCKS = 8  # of a stretch: a chunk across its end is decoded again in one of eight cases


class JoinedDataset(ComposedDataset[JoinedSample]):
    """Samples of several data sets, joined by key. Made by :func:`join`.

    Each data set reads as it does by itself, with its own cut, pool, cache and transform; the loader reads all of a
    sample together. Blocks of ``shuffle="blocks"`` are of samples that share chunks in all of them.

    Attributes
    ----------
    keys : numpy.ndarray
        The key of each sample, ``(len(self),)``.
    own_transform
        Called with each sample, after the parts' own.
    mesh, dp_axis
        Those of all.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> ds = scidata.open_dataset("era5.zarr", fields=["u"])
    >>> pairs = scidata.join({"now": ds, "next": ds}, on="time", at={"next": "6h"})
    >>> len(pairs), pairs.fields, str(pairs.keys[-1])
    (3, ('now/u', 'next/u'), '2020-01-01T12:00:00.000000000')
    """

    def __init__(
        self,
        datasets: Mapping[str, CombinedDataset[Any]],
        match: Match,
        *,
        said: str,
        transform: Callable[[JoinedSample], object] | None = None,
    ) -> None:
        super().__init__(datasets)
        self._parts, self.keys, self._said, self.own_transform = dict(datasets), match.keys, said, transform
        self._texts, self._normalised = match.texts, frozenset[str]()
        self._lacks: dict[str, BoolArray] = {name: rows < 0 for name, rows in match.rows.items() if (rows < 0).any()}

    # -- samples and fields --------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}: {part.datasets[0]!r}" for name, part in self._parts.items())
        return f"JoinedDataset({len(self)} samples {self._said} of {parts})"

    def explain(self) -> str:
        """Describe how the data sets were joined, how many samples of each are left out, and the first of these.

        Examples
        --------
        >>> print(pairs.explain())
        3 samples joined on 'time', how='inner', at={'next': '6h'}
        'now': 3 of 4 samples; 1 left out, the first 2020-01-01T18:00:00
        'next': 3 of 4 samples; 1 left out, the first 2020-01-01T00:00:00
        no sample of 'next' for the key 2020-01-01T18:00:00
        """
        return "\n".join([f"{len(self)} samples {self._said}", *self._texts])

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields, ``"part/field"``."""
        return tuple(f"{name}/{field}" for name, part in self._parts.items() for field in part.fields)

    @property
    def fingerprint(self) -> str:
        """Digest of the data sets and of the matched samples."""
        lacks = {name: np.flatnonzero(own).tolist() for name, own in self._lacks.items()}
        content = [[name, part.fingerprint, lacks.get(name)] for name, part in self._parts.items()]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def counts(self, entity: str | None = None) -> IntArray:
        """Return how many rows of an entity each sample has, ``(len(self),)``, of all parts that have rows."""
        total = np.zeros(len(self), np.int64)
        for name, part in self._parts.items():
            if isinstance(leaf_of(part), IrregularDataset):
                total += np.where(self._lacks.get(name, False), 0, part.counts(entity))
        return total

    @checked_keywords
    def plan(self, index: int, rank: int | None = None) -> ReadPlan:
        """Plan the reads of a rank for a sample, default this one, of fields ``"part/field"``."""
        index = sample_number(index, len(self))
        plans = {name: part.plan(index, rank) for name, part in self.at(index).items()}
        own = max((plan.rank for plan in plans.values()), default=0)
        return ReadPlan(index=index, rank=own, fields=flat({name: plan.fields for name, plan in plans.items()}))

    def _named(self) -> list[tuple[str, DatasetAdapter]]:
        return list(zip(self._parts, self._sources, strict=True))

    def at(self, index: int) -> dict[str, CombinedDataset[Any]]:
        """Return the parts of a sample by name, each with the sample's number."""
        return {name: part for name, part in self._parts.items() if not self._is_lacking(name, index)}

    @property
    def parts(self) -> dict[str, CombinedDataset[Any]]:
        """By name, each data set's samples in the join, in the join's order, without missing ones."""
        return {
            name: combined_dataset([part], np.flatnonzero(~self._lacks[name])) if name in self._lacks else part
            for name, part in self._parts.items()
        }

    # -- blocks --------------------------------------------------------------------------------------------------

    def blocks(self) -> IntArray:
        """Return which samples share chunks in all parts, a number for each block: see ``blocks`` of grids."""
        return self._blocks()[1]

    def stretches(self) -> IntArray:
        """Return which blocks share chunks with those next to them in any part."""
        every, block_of = self._blocks()
        firsts = np.unique(block_of, return_index=True)[1]
        runs = np.stack([part.stretches()[firsts] for part in self._with_blocks()])
        goes_on = np.concatenate([own[:, 1:] == own[:, :-1] for own in (every, runs)]).any(axis=0)
        coarse = every[np.argmin([len(np.unique(own)) for own in every])] // _COARSE_BLOCKS
        pairs = np.stack([np.cumsum(np.append(True, ~goes_on)), coarse])
        return np.unique(pairs, axis=1, return_inverse=True)[1].reshape(-1)[block_of]

    def _blocks(self) -> tuple[IntArray, IntArray]:
        """Return each part's blocks, ``(parts, blocks)``, and each sample's; parts without shared chunks make none."""
        found = [part.blocks() for part in self._with_blocks()]
        if not found:
            raise ConfigError("blocks: no part says which samples share chunks, as grids do; use shuffle=True")
        shared = [own for own in found if len(np.unique(own)) < len(own)]
        if not shared:
            return (every := np.stack(found)), np.arange(every.shape[1])
        every, block_of = np.unique(np.stack(shared), axis=1, return_inverse=True)
        return every, block_of.reshape(-1)

    def _with_blocks(self) -> list[CombinedDataset[Any]]:
        return [part for part in self._parts.values() if hasattr(leaf_of(part), "blocks")]

    def shared_reads(self, index: int) -> Sequence[object]:
        """Return the blocks of decoded rows that the parts of a sample share with those of others."""
        return [read for part in self.at(index).values() for read in part.shared_reads(index)]

    # -- normalising ---------------------------------------------------------------------------------------------

    @checked_keywords
    def normalise(
        self,
        stats: Mapping[str, Statistics],
        *,
        fields: Mapping[str, str | Sequence[str]] | None = None,
        method: str = "mean_std",
    ) -> JoinedDataset:
        """Return these samples, the parts that ``stats`` names normalised as their data sets' own ``normalise`` does.

        Parameters
        ----------
        stats : Mapping[str, Statistics]
            By part; of the samples that are in the join: ``scidata.statistics`` of its :attr:`parts`.
        fields : Mapping[str, str or Sequence[str]] or None, optional
            By part: fields to normalise; default all floating ones.
        method : str, default "mean_std"
            As of ``normalise`` of other data sets.

        Raises
        ------
        UnknownNameError, FieldMismatchError, ConfigError
            No such part; statistics that do not fit.

        Examples
        --------
        >>> stats = {name: scidata.statistics(part) for name, part in pairs.parts.items()}
        >>> abs(pairs.normalise(stats)[0]["next"]["u"].mean()) < 1
        tensor(True)
        """
        chosen = {} if fields is None else fields
        check_known("normalise: no part", [*stats, *chosen], self._parts)
        made: JoinedDataset = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._parts = {
            name: part.normalise(stats[name], fields=chosen.get(name), method=method) if name in stats else part
            for name, part in self._parts.items()
        }
        made._normalised = frozenset(stats)
        made._sources = tuple(map(DatasetAdapter, made._parts.values()))
        return made

    def denormalise(self, sample: Any) -> Any:
        """Return a sample, a batch, or tensors by part and field, in the units that :meth:`normalise` left.

        Raises ConfigError where this join is not normalised.
        """
        if not self._normalised:
            raise ConfigError("denormalise: this join is not normalised; ask the one that normalise() returned")
        parts = {
            name: self._parts[name].denormalise(part) if name in self._normalised else part
            for name, part in sample.items()
        }
        return sample.replace(parts) if isinstance(sample, JoinedSample) else parts

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def transform(self) -> Callable[[JoinedSample], object] | None:
        """The parts' own transforms, followed by the join's; None if there is none."""
        nothing = self.own_transform is None and all(part.transform is None for part in self._parts.values())
        return None if nothing else self._transform

    def _transform(self, sample: JoinedSample) -> object:
        assert isinstance(sample.index, int)
        parts = {
            name: call_transform(self._of_sample(name, sample.index).transform, part) for name, part in sample.items()
        }
        return call_transform(self.own_transform, sample.replace(parts))

    def _of_sample(self, name: str, index: int) -> Any:
        """Return the data set that provides a part of a sample; for a missing part, the one that makes empty clouds."""
        part = self._parts[name]
        return leaf_of(part) if self._is_lacking(name, index) else part

    def _is_lacking(self, name: str, index: int) -> bool:
        return name in self._lacks and bool(self._lacks[name][index])

    def read_local(self, index: int) -> object:
        """Read this rank's part of one sample of each data set. Thread-safe, no collectives."""
        return self.epoch_reader()(index)

    def epoch_reader(
        self, epoch: tuple[object, ...] | None = None, *, empty: Empty = np.empty
    ) -> Callable[[int], JoinedPart]:
        """Return :meth:`read_local` bound to the present epoch, for reading ahead."""
        epochs = self.epoch if epoch is None else epoch
        reads = {name: _reader(source, own, empty) for (name, source), own in zip(self._named(), epochs, strict=True)}

        def read(index: int) -> JoinedPart:
            parts, stats = dict[str, Any](), NO_READ
            for name in self._parts:
                if self._is_lacking(name, index):
                    parts[name] = leaf_of(self._parts[name]).empty_local()
                    continue
                parts[name], own = reads[name](index)
                stats += own
            return JoinedPart(index=index, parts=parts, stats=stats)

        return read

    def assemble(self, local: Any, *, index: int | list[int] | None = None, batched: bool = False) -> JoinedSample:
        """Wrap local parts as their data sets do: of one sample, or of a batch if all parts are grids.

        ``index``: of the sample, or of those of a batch; parts that a worker of torch's loader has read know it.
        ``batched``: the tensors have a batch dim 0.
        """
        if isinstance(local, JoinedSample):
            return local
        if isinstance(local, LocalFields | JoinedPart):
            index = local.index if index is None else index
        if index is None:
            raise ConfigError("assemble: which sample is it? pass index=, or a list of them for a batch")
        fields = local.fields() if isinstance(local, LocalFields) else local
        parts = local.parts if isinstance(local, JoinedPart) else by_part(fields, list(self._parts))
        found = {}
        for name, part in parts.items():
            if isinstance(index, int) and self._is_lacking(name, index):
                found[name] = self._empty(name, part, index)
                continue
            tensors = {n: torch.as_tensor(x) for n, x in part.items()} if isinstance(part, Mapping) else part
            found[name] = self._parts[name].assemble(tensors, index=index, batched=batched)
        return JoinedSample(found, key=self.keys[index], index=index)

    def _empty(self, name: str, part: object, index: int) -> Any:
        sample = leaf_of(self._parts[name]).assemble(part)
        sample.index = index
        return sample

    def __getitem__(self, index: int) -> Any:
        index = sample_number(index, len(self))
        if self.mesh is None and any(getattr(leaf_of(part), "detached", False) for part in self._parts.values()):
            return self._of_worker(index)
        if self.mesh is not None and get_worker_info() is not None:
            return self._of_worker(index)
        parts = {}
        for name, part in self._parts.items():
            if self._is_lacking(name, index):
                leaf = leaf_of(part)
                parts[name] = call_transform(leaf.transform, self._empty(name, leaf.empty_local(), index))
            else:
                parts[name] = part[index]
        return call_transform(self.own_transform, JoinedSample(parts, key=self.keys[index], index=index))

    def _of_worker(self, index: int) -> object:
        """Return a worker's item, which :meth:`assemble` wraps in the parent process."""
        return self.read_local(index)


class BufferedJoined(JoinedDataset):
    """Join of grids only, read into the buffers of all parts, by ``"part/field"``."""

    def buffer_specs(self) -> dict[str, BufferSpec]:
        """Return shape and dtype of this rank's part of each field."""
        return flat({name: source.dataset.buffer_specs() for name, source in self._named()})

    def read_into(self, index: int, out: Mapping[str, Array], *, epoch: tuple[object, ...] | None = None) -> ReadStats:
        """Read this rank's part into buffers shaped as :meth:`buffer_specs`. Thread-safe, no collectives."""
        buffers, stats = by_part(out, list(self._parts)), NO_READ
        epochs = [None] * len(buffers) if epoch is None else epoch
        for (name, source), own in zip(self._named(), epochs, strict=True):
            stats += _counts_of(source.filler(own)(index, buffers[name]))
        return stats

    def read_local(self, index: int) -> dict[str, torch.Tensor]:
        """Read this rank's part of all fields, by ``"part/field"``."""
        return flat({name: source.dataset.read_local(index) for name, source in self._named()})

    def _of_worker(self, index: int) -> object:
        parts = {name: part[index] for name, part in self._parts.items()}
        wholes = [part.is_whole for part in parts.values() if isinstance(part, LocalFields)]
        fields = flat({n: part.fields() if isinstance(part, LocalFields) else part for n, part in parts.items()})
        return LocalFields.of(fields, index, is_whole=all(wholes)) if wholes else fields


def _reader(source: DatasetAdapter, epoch: object, empty: Empty) -> Callable[[int], tuple[Any, ReadStats]]:
    """Return a function that reads this rank's part of a sample into arrays allocated by ``empty``."""
    if source.has_buffers:
        specs, into = source.dataset.buffer_specs(), source.filler(epoch)

        def fill(index: int) -> tuple[Any, ReadStats]:
            arrays = {name: empty(spec.shape, spec.dtype) for name, spec in specs.items()}
            return arrays, _counts_of(into(index, arrays))

        return fill
    read = source.reader(epoch, empty=empty)

    def part_and_stats(index: int) -> tuple[Any, ReadStats]:
        part = read(index)
        return part, _counts_of(getattr(part, "stats", None))

    return part_and_stats


def _counts_of(stats: object) -> ReadStats:
    """Return the counters of a read, if it is scidata's."""
    return stats if isinstance(stats, ReadStats) else NO_READ
