"""``CombinedDataset``: renumbered samples of other data sets."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import TypeVar  # with defaults, before Python 3.13

from scidata.core.checks import sample_number
from scidata.core.html import card
from scidata.core.keywords import checked_keywords
from scidata.core.sample_source import SampleSource
from scidata.core.types import AnyArray, BufferSpec, Empty, IntArray
from scidata.data.adapter import DatasetAdapter
from scidata.data.collate import collate
from scidata.data.composed import ComposedDataset
from scidata.data.joined_sample import JoinedPart, JoinedSample
from scidata.data.keys import joined_keys
from scidata.data.local_fields import LocalFields
from scidata.data.order import MAX_LISTED, Mixture
from scidata.data.sample import Sample
from scidata.data.scaling import numbers_of
from scidata.data.statistics_table import Statistics
from scidata.errors import ConfigError
from scidata.store.reading.part import LocalPart


def _digest(numbers: IntArray) -> str:
    return hashlib.sha256(numbers.astype("<i8").tobytes()).hexdigest()


_T = TypeVar("_T", bound=np.generic)
SampleT = TypeVar("SampleT", bound=Sample[Any] | JoinedSample, covariant=True, default=Sample)


class CombinedDataset(ComposedDataset[SampleT]):
    """Renumbered samples of other data sets. Made by :func:`subset`, :func:`concat`, :func:`mix`.

    Reads as its data sets do, and applies each one's own transform. ``sample.index`` is the number here.

    Attributes
    ----------
    datasets : tuple
        Where the samples come from.
    mesh, dp_axis
        Theirs, which must be the same.
    mixture : Mixture or None
        What :class:`scidata.DistributedSampler` makes of the ratios of :func:`mix`.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> ds = scidata.open_dataset("era5.zarr", fields=["u"])
    >>> late = scidata.subset(scidata.concat(ds, ds), range(4, 8))
    >>> isinstance(late, scidata.CombinedDataset), len(late), late[0].index
    (True, 4, 0)
    """

    def __init__(
        self, datasets: Sequence[Any], chosen: IntArray | None = None, *, mixture: Mixture | None = None
    ) -> None:
        self.datasets = tuple(datasets)
        super().__init__(dict(enumerate(self.datasets)))
        parts = [list(getattr(leaf_of(dataset), "parts", ())) for dataset in self.datasets]  # of joins
        if others := [own for own in parts if sorted(own) != sorted(parts[0])]:
            raise ConfigError(f"data sets have the parts {parts[0]} and {others[0]}: give joins of the same names")
        self.mixture = mixture
        self._chosen = chosen  # samples of the only data set; None: all samples, one data set after another
        self._starts = [0, *itertools.accumulate(map(len, self.datasets))]

    # -- samples and fields -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._starts[-1] if self._chosen is None else len(self._chosen)

    def __repr__(self) -> str:
        return f"CombinedDataset({len(self)} samples of {', '.join(map(repr, self.datasets))})"

    def _repr_html_(self) -> str:
        rows = [
            (number, type(each).__name__, len(each), ", ".join(each.fields))
            for number, each in enumerate(self.datasets)
        ]
        facts = {"samples": len(self), "mixed by": None if self.mixture is None else self.mixture.takes}
        return card("CombinedDataset", facts, ("data set", "kind", "samples", "fields"), rows)

    def locate(self, index: int) -> tuple[int, int]:
        """Return which data set a sample comes from, and its number there.

        Parameters
        ----------
        index : int
            The sample.

        Raises
        ------
        IndexError
            There is no such sample.

        Examples
        --------
        >>> late.locate(1)
        (0, 5)
        """
        index = sample_number(index, len(self))
        if self._chosen is not None:
            return 0, int(self._chosen[index])
        part = bisect.bisect_right(self._starts, index) - 1
        return part, index - self._starts[part]

    def samples_of(self, number: int) -> IntArray:
        """Return which samples of one of the data sets are in this one, each once, sorted, int64.

        Parameters
        ----------
        number : int
            Of the data set, in the order in which they were given.

        Examples
        --------
        >>> late.samples_of(0).tolist()
        [4, 5, 6, 7]
        """
        every = np.arange(len(self.datasets[number]), dtype=np.int64) if self._chosen is None else self._chosen
        return np.unique(every)

    def sample_keys(self, on: str) -> npt.NDArray[Any]:
        """Return each sample's value of a key, ``(len(self),)``, from its data set."""
        return self._own(joined_keys([dataset.sample_keys(on) for dataset in self.datasets]))

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields that all data sets have."""
        first, *others = (dataset.fields for dataset in self.datasets)
        return tuple(name for name in first if all(name in other for other in others))

    @property
    def fingerprint(self) -> str:
        """Digest of the data sets, of the chosen samples and of their numbering."""
        content = {
            "datasets": [str(getattr(dataset, "fingerprint", "")) for dataset in self.datasets],
            "numbering": self.numbering(),
            "mixture": None if self.mixture is None else [self.mixture.lengths, self.mixture.takes],
        }
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def numbering(self) -> list[str]:
        """Return digests of the chosen samples of each data set and of their order."""
        if self._chosen is not None:
            return [_digest(np.zeros(len(self), np.int64)), _digest(self._chosen)]
        if len(self) > MAX_LISTED:
            return [f"in turn: {self._starts}"] * 2
        lengths = np.diff(self._starts)
        parts, rows = np.repeat(np.arange(len(lengths)), lengths), np.arange(len(self))
        return [_digest(parts), _digest(rows - np.array(self._starts)[parts])]

    @property
    def transform(self) -> Callable[[Any], object] | None:
        """The data sets' own transforms; None if no data set has one."""
        return None if all(dataset.transform is None for dataset in self.datasets) else self._transform

    def _transform(self, sample: Sample[Any]) -> object:
        number = sample.index
        assert isinstance(number, int)
        part, sample.index = self.locate(number)  # a data set's own transform knows its own numbering
        own = self.datasets[part].transform
        return self._renumbered(sample if own is None else own(sample), number)

    def counts(self, entity: str | None = None) -> IntArray:
        """Return how many rows of an entity each sample has, ``(len(self),)``: of stores only."""
        if len(self) > MAX_LISTED:
            raise ConfigError(f"counts: of {len(self)} samples, too many to list; ask each data set for its own")
        return self._own(np.concatenate([dataset.counts(entity) for dataset in self.datasets]))

    def _own(self, values: npt.NDArray[_T]) -> npt.NDArray[_T]:
        """Select the values of these samples from those of all samples of the data sets."""
        return values if self._chosen is None else values[self._chosen]

    def blocks(self) -> IntArray:
        """Return which samples share chunks, a number for each block, ``(len(self),)``: of grids only."""
        return self._numbers("blocks")

    def stretches(self) -> IntArray:
        """Return which blocks share chunks with those next to them, ``(len(self),)``: of grids only."""
        return self._numbers("stretches")

    def _numbers(self, name: str) -> IntArray:
        for source in self._sources:
            if source.lacks("blocks"):
                raise ConfigError(
                    f"blocks: {type(source.dataset).__name__} does not say which samples share chunks, as grids do; "
                    "use shuffle=True"
                )
        found = [
            dataset.blocks() if source.lacks(name) else getattr(dataset, name)()
            for dataset, source in zip(self.datasets, self._sources, strict=True)
        ]
        firsts = np.cumsum([0, *(int(each.max(initial=-1)) + 1 for each in found)])
        return self._own(np.concatenate([first + each for first, each in zip(firsts, found, strict=False)]))

    def shared_reads(self, index: int) -> Sequence[object]:
        """Return the blocks of decoded rows that a sample shares with others of its data set."""
        part, own = self.locate(index)
        return self._sources[part].shared_reads(own)

    @checked_keywords
    def plan(self, index: int, rank: int | None = None) -> Any:
        """Plan the reads of a rank of the domain, default this one, for a sample, as the sample's data set does."""
        part, own = self.locate(index)
        return self.datasets[part].plan(own, rank)

    def sources_of(self, index: int) -> tuple[SampleSource, ...]:
        """Return where the steps of a sample come from: :attr:`Sample.source`, without reading values."""
        part, own = self.locate(index)
        return self.datasets[part].sources_of(own)

    # -- normalising ---------------------------------------------------------------------------------------------

    @checked_keywords
    def normalise(
        self, stats: Statistics, *, fields: str | Sequence[str] | None = None, method: str = "mean_std"
    ) -> CombinedDataset[SampleT]:
        """Return these samples, normalised as each data set's own ``normalise`` does; raises its errors."""
        datasets = [dataset.normalise(stats, fields=fields, method=method) for dataset in self.datasets]
        return combined_dataset(datasets, self._chosen, mixture=self.mixture)

    def denormalise(self, sample: Any) -> Any:
        """Return a sample, a batch, or tensors by field, in the units that :meth:`normalise` left.

        Raises ConfigError where nothing is normalised; or it is not known of which data set a sample is, or a batch is
        of several, and they are normalised differently: with levels in another order, say.
        """
        index = sample.index if isinstance(sample, Sample | JoinedSample) else None
        first, *others = self._come_from([index] if isinstance(index, int) else index)
        if any(numbers_of(first.normalising) != numbers_of(other.normalising) for other in others):
            raise ConfigError(
                "denormalise: these may be of several data sets, which are normalised differently; ask the data set "
                "that they are of"
            )
        return first.denormalise(sample)

    def _come_from(self, indices: Sequence[int] | None) -> list[Any]:
        """Return the data sets that some samples come from; None: any."""
        found = []
        for number, dataset in enumerate(self.datasets):
            own = None if indices is None else [at for part, at in map(self.locate, indices) if part == number]
            if own is None or own:
                found += dataset._come_from(own) if isinstance(dataset, CombinedDataset) else [dataset]
        return found

    # -- reading -------------------------------------------------------------------------------------------------

    def read_local(self, index: int) -> object:
        """Read this rank's part of one sample. Thread-safe, no collectives."""
        part, own = self.locate(index)
        return self.datasets[part].read_local(own)

    def epoch_reader(
        self, epoch: tuple[object, ...] | None = None, *, empty: Empty = np.empty
    ) -> Callable[[int], object]:
        """Return :meth:`read_local` bound to the present epoch, for reading ahead.

        ``empty`` makes the arrays that are read into, of data sets whose samples differ in size.
        """
        epochs = self.epoch if epoch is None else epoch
        reads = [source.reader(own, empty=empty) for source, own in zip(self._sources, epochs, strict=True)]

        def read(index: int) -> object:
            part, own = self.locate(index)
            return reads[part](own)

        return read

    def assemble(self, local: Any, *, index: int | list[int] | None = None, batched: bool = False) -> SampleT:
        """Wrap local parts as their data set does: of one sample, or of a batch of them; a sample stays as it is.

        ``index``: of the sample, or of those of a batch; parts that a worker of torch's loader has read know it.
        ``batched``: the tensors have a batch dim 0.
        """
        if isinstance(local, Sample | JoinedSample):
            return local  # type: ignore[return-value]  # of the data sets' kind
        if index is None:
            index = local.index if isinstance(local, LocalFields) else getattr(local, "number", None)
        if index is None:
            raise ConfigError(
                "assemble: which sample is it? pass index=, or a list of them for a batch, or to torch's loader "
                "collate_fn=scidata.collate, which keeps them"
            )
        if isinstance(index, int):
            part, own = self.locate(index)
            return self._renumbered(self._sources[part].assemble(local, index=own), index)
        places = [self.locate(i) for i in index]
        if len({part for part, _ in places}) == 1:
            dataset = self.datasets[places[0][0]]
            return self._renumbered(dataset.assemble(local, index=[own for _, own in places], batched=True), index)
        fields = local.fields() if isinstance(local, LocalFields) else local
        rows = [{name: values[row] for name, values in fields.items()} for row in range(len(index))]
        samples: list[Any] = [self.assemble(row, index=i) for row, i in zip(rows, index, strict=True)]
        return self._renumbered(collate(samples), index)

    def __getitem__(self, index: int) -> SampleT:
        part, own = self.locate(index)
        return self._renumbered(self.datasets[part][own], index % len(self))

    @staticmethod
    def _renumbered(sample: Any, index: int | list[int]) -> SampleT:
        if isinstance(sample, Sample | JoinedSample):  # workers have parts, and a transform may return anything
            sample.index = index
        elif isinstance(sample, LocalFields):
            sample.number(index)
        elif isinstance(sample, LocalPart | JoinedPart):
            sample = replace(sample, number=index)
        renumbered: SampleT = sample
        return renumbered


class BufferedCombined(CombinedDataset[SampleT]):
    """Combination of grids whose local parts have equal shapes and are read into the same buffers."""

    def buffer_specs(self) -> dict[str, BufferSpec]:
        """Return shape and dtype of this rank's part of each field."""
        return dict(self.datasets[0].buffer_specs())

    def read_into(self, index: int, out: Mapping[str, AnyArray], *, epoch: tuple[object, ...] | None = None) -> object:
        """Read this rank's part into buffers shaped as :meth:`buffer_specs`. Thread-safe, no collectives."""
        part, own = self.locate(index)
        return self._sources[part].filler(None if epoch is None else epoch[part])(own, out)


def leaf_of(dataset: Any) -> Any:
    """Return the first data set at the bottom of a combination, one that reads files."""
    while isinstance(dataset, CombinedDataset):
        dataset = dataset.datasets[0]
    return dataset


def combined_dataset(
    datasets: Sequence[Any], chosen: IntArray | None = None, *, mixture: Mixture | None = None
) -> CombinedDataset[Any]:
    """Combine data sets, or ``chosen`` samples of a single one; share buffers if the shapes allow it."""
    sources = [DatasetAdapter(dataset) for dataset in datasets]
    for source in sources:
        if source.lacks("read_local", "assemble", "mesh"):
            raise ConfigError(
                f"{type(source.dataset).__name__} is no data set of scidata.open_dataset; torch's Subset and "
                "ConcatDataset take any"
            )
    specs = [dict(source.dataset.buffer_specs()) if source.has_buffers else None for source in sources]
    same = specs[0] is not None and all(spec == specs[0] for spec in specs)
    return (BufferedCombined if same else CombinedDataset)(datasets, chosen, mixture=mixture)
