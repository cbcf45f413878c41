"""Plug-ins for DLIO, the I/O benchmark of MLPerf Storage: it times scidata on the files that it has written.

``reader.data_loader_classname=scidata.loader.dlio.Loader`` with ``reader.data_loader_sampler=index`` has scidata read
and batch the files; ``reader.reader_classname=scidata.loader.dlio.Reader`` reads single samples for DLIO's PyTorch
loader. Both read HDF5, NPZ, and Zarr stores under HDF5 files' names, since DLIO has no Zarr.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch.utils.data

from scidata.core.cache import Cache
from scidata.data.grid_dataset import ShardedDataset
from scidata.data.local_fields import LocalTransform
from scidata.data.open_dataset import open_dataset
from scidata.data.sample import Sample
from scidata.errors import ConfigError, FieldMismatchError
from scidata.loader.data_loader import DataLoader

_MOST_ALONE = 64  # data sets of one file each


class _Config(Protocol):
    """DLIO's ``ConfigArguments``, as far as they are used here: its options, lists of files and maps of samples."""

    format: object
    num_dset_per_record: int
    num_samples_per_file: int
    file_list_train: Sequence[str]
    file_list_eval: Sequence[str]
    train_global_index_map: Mapping[int, tuple[str, int]]  # of this rank, and in its order: file, and row in it
    val_global_index_map: Mapping[int, tuple[str, int]]
    batch_size: int
    batch_size_eval: int
    read_threads: int
    prefetch_size: int
    preprocess_time: object
    resized_image: npt.NDArray[np.generic]


def _config() -> _Config:
    found: _Config = importlib.import_module("dlio_benchmark.utils.config").ConfigArguments.get_instance()
    return found


def _preprocess(config: _Config) -> None:
    if config.preprocess_time:
        importlib.import_module("dlio_benchmark.utils.utility").sleep(config.preprocess_time)


def open_records(
    paths: Sequence[str], format: str, num_records: int = 1, local_transform: LocalTransform | None = None
) -> ShardedDataset:
    """Open files of DLIO as a data set that keeps nothing between epochs; ``num_records``: arrays a sample in HDF5."""
    if format not in ("hdf5", "npz"):
        raise ConfigError(f"dataset.format={format}: of DLIO's formats scidata reads hdf5 and npz")
    fields = ["x"] if format == "npz" else [f"records_{i}" for i in range(num_records)]
    dataset = open_dataset(
        list(paths),
        kind="grid",
        fields=fields,
        sample_dim=-1 if format == "npz" else 0,
        local_transform=local_transform,
        num_threads=1,  # besides those of the loader
        pool_bytes=0,
    )
    assert isinstance(dataset, ShardedDataset)
    return dataset


class Order(torch.utils.data.Sampler[int]):
    """The samples of this rank in the order that DLIO draws before each epoch."""

    def __init__(self, config: _Config, *, train: bool) -> None:
        self._config, self._train = config, train

    def _map(self) -> Mapping[int, tuple[str, int]]:
        return self._config.train_global_index_map if self._train else self._config.val_global_index_map

    def __iter__(self) -> Iterator[int]:
        return map(int, list(self._map()))

    def __len__(self) -> int:
        return len(self._map())


class Loader:
    """Data loader for DLIO: scidata's loader over all files of the training or evaluation set."""

    def __init__(self, format_type: object, dataset_type: object, epoch_number: int) -> None:
        self._config, self._train = _config(), str(dataset_type) == "train"

    def read(self) -> None:
        """Open the files; DLIO calls this once."""
        config = self._config
        paths = config.file_list_train if self._train else config.file_list_eval
        preprocess = self._preprocess if config.preprocess_time else None
        self._batches = DataLoader(
            open_records(paths, str(config.format), config.num_dset_per_record, preprocess),
            batch_size=config.batch_size if self._train else config.batch_size_eval,
            sampler=Order(config, train=self._train),
            num_workers=config.read_threads,
            prefetch_factor=max(2, config.prefetch_size) if config.read_threads else None,
            drop_last=True,
        )

    def _preprocess(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        _preprocess(self._config)
        return {}  # nothing has changed

    def next(self) -> Iterator[Sample[torch.Tensor]]:
        """Yield the batches of an epoch."""
        yield from self._batches

    def finalize(self) -> None:
        """Do nothing: DLIO calls this after each epoch."""


class Reader:
    """Reader for DLIO's PyTorch data loader: reads each sample, and returns the constant that DLIO's readers return."""

    def __init__(self, dataset_type: object, thread_index: int, epoch_number: int) -> None:
        self._config, self._train = _config(), str(dataset_type) == "train"
        self._all: ShardedDataset | None = None
        self._first: dict[str, int] = {}  # sample of each file in it
        self._alone: Cache[ShardedDataset] = Cache(_MOST_ALONE, "lru")
        self._memory: dict[str, npt.NDArray[np.generic]] = {}  # DLIO drops samples after reading

    def read_index(self, global_sample_idx: int, step: int) -> npt.NDArray[np.generic]:
        """Read a sample. Descriptions of files are kept from sample to sample, and a bounded number of descriptors."""
        config = self._config
        samples = config.train_global_index_map if self._train else config.val_global_index_map
        path, row = samples[global_sample_idx]
        if self._all is None:
            self._open(list(dict.fromkeys(path for path, _ in samples.values())))
        dataset = self._all if path in self._first else self._alone.get_or_make(path, lambda: self._opened([path]))
        assert dataset is not None
        for name, spec in dataset.buffer_specs().items():
            if name not in self._memory or self._memory[name].shape != spec.shape:
                self._memory[name] = np.empty(spec.shape, spec.dtype)
        dataset.read_into(self._first.get(path, 0) + int(row), self._memory)
        _preprocess(config)
        return config.resized_image

    def _opened(self, paths: Sequence[str]) -> ShardedDataset:
        return open_records(paths, str(self._config.format), self._config.num_dset_per_record)

    def _open(self, paths: Sequence[str]) -> None:
        """Open all files of this rank as one data set; open files of different shapes one by one when they are read."""
        num = self._config.num_samples_per_file
        try:
            self._all = self._opened(paths)
            if len(self._all) == num * len(paths):
                self._first = dict(zip(paths, range(0, len(self._all), num), strict=True))
        except FieldMismatchError:
            self._all = self._alone.put(paths[0], self._opened(paths[:1]))


with contextlib.suppress(ImportError):  # DLIO takes subclasses of these; without it, tests import this module
    importlib.import_module("dlio_benchmark.data_loader.base_data_loader").BaseDataLoader.register(Loader)
    importlib.import_module("dlio_benchmark.reader.reader_handler").FormatReader.register(Reader)
