"""``shard_dataset``: a map-style data set of whole tensors, cut over the domain like grids.

Its samples are rows of one store along the dim ``sample``, each a chunk that only ``dataset[i]`` can read, so that all
that grids have serves it: halos, bounds, steps, plans, statistics, a node's ranks that read for each other.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset

from scidata.core.cache import Cache
from scidata.core.checks import names_of
from scidata.core.keywords import checked_keywords
from scidata.core.options import Align, Bounds, Crop, Halo, ReadOptions, Steps, Weights
from scidata.core.types import AnyArray, ArrayLayout, ChunkRefs, Files, IntArray
from scidata.data.grid_dataset import ShardedDataset
from scidata.data.local_fields import LocalTransform
from scidata.data.openers import Wrapping, check_wrapping, numpy_dtype, open_grid
from scidata.errors import ConfigError, FieldMismatchError, check_known

_KEPT = 4  # cached samples, since several fields or steps are read one after another
_numbers = itertools.count()

#: Names of the dims of a sample's tensors: of each by name, or of all with so many dims.
Dims: TypeAlias = Mapping[str, Sequence[str]] | Sequence[str] | None


@checked_keywords
def shard_dataset(
    dataset: Dataset[Any],
    mesh: DeviceMesh | None = None,
    *,
    dims: Dims = None,
    fields: Sequence[str] | str | None = None,
    shard: Mapping[str | int, str] | None = None,
    steps: Steps = (0,),
    isel: Crop | None = None,
    bounds: Bounds = "even",
    weights: Weights = None,
    align: Align = 1,
    halo: Halo = 0,
    periodic: str | Sequence[str] = (),
    decode: str = "rank",
    dtype: torch.dtype | None = None,
    transform: Callable[[Any], Any] | None = None,
    local_transform: LocalTransform | None = None,
    dp: str = "dp",
    num_threads: int = 4,
    pool_bytes: int | None = None,
) -> ShardedDataset[Any]:
    """Cut the samples of a map-style torch data set over the domain: each rank keeps its part, with halo.

    Nothing can be read of a part alone: **each rank of a domain asks for whole samples**, ``dataset[i]``, and
    ``plan`` counts them so. ``decode="node"`` has one rank of a node ask for each sample, and hand the others their
    parts. Write the data to Zarr once where that is too slow.

    A sample has a field for each tensor, array or number of ``dataset[i]``: ``"data"`` of a single one, the keys of a
    dict, ``"0"``, ``"1"``, … of a tuple, ``"input/u"`` of nested ones. All samples have the same shapes, and
    ``dataset[i]`` gives the same on all ranks, of which the first sample is compared: draw random numbers by the index,
    or augment in ``transform`` with ``sample.generator``. One thread at a time calls it.

    Parameters
    ----------
    dataset : torch.utils.data.Dataset
        With ``__len__`` and ``__getitem__``; pickles, where worker processes are used.
    dims : Mapping[str, Sequence[str]] or Sequence[str] or None, optional
        Names of the tensors' dims, ``{"input": ("channel", "lat", "lon")}``, or one list for all tensors with so many;
        default ``"input.0"``, ``"input.1"``, ….
    fields : Sequence[str] or str or None, optional
        Those to take; default all, which must then be tensors, arrays or numbers.
    mesh, shard, steps, isel, bounds, weights, align, halo, periodic, dtype, transform, local_transform, dp : optional
        As of :func:`scidata.open_dataset`; ``steps`` are offsets to other samples.
    decode : str, default "rank"
        ``"node"``: one rank of a node asks for each sample.
    num_threads, pool_bytes : int, optional
        As of :func:`scidata.open_dataset`.

    Raises
    ------
    ConfigError
        No map-style data set, or an entry that is no tensor.
    UnknownNameError
        Names of fields, or of dims, that there are not.

    Examples
    --------
    >>> class Weather(torch.utils.data.Dataset):
    ...     def __len__(self):
    ...         return 4
    ...
    ...     def __getitem__(self, index):
    ...         return {"u": torch.full((3, 7, 8), float(index)), "season": index // 2}
    >>> ds = scidata.shard_dataset(Weather(), dims=("level", "lat", "lon"))
    >>> len(ds), ds.fields, tuple(ds[3]["u"].shape), ds[3]["season"]
    (4, ('u', 'season'), (3, 7, 8), tensor(1))

    On each of two ranks, under torchrun:

    >>> mesh = scidata.init_mesh(domain=2)
    >>> ds = scidata.shard_dataset(Weather(), mesh, dims=("level", "lat", "lon"), halo={"lat": 1})
    >>> ds[0]["u"].sharding_shapes()
    {0: (torch.Size([3, 4, 8]), torch.Size([3, 3, 8]))}
    >>> ds.plan(0).bytes_fetched  # the whole sample, on either rank
    680
    """
    wrapping: Wrapping = {"dtype": dtype, "transform": transform, "local_transform": local_transform}
    check_wrapping(wrapping)
    source = TensorSource(dataset, dims, fields, dtype)
    options = ReadOptions(
        kind="grid", fields=list(source.arrays), sample_dim="sample", steps=steps, isel=isel, shard=shard,
        bounds=bounds, weights=weights, align=align, halo=halo, periodic=periodic, decode=decode,
        dtype=numpy_dtype(dtype), num_threads=num_threads, pool_bytes=pool_bytes,
    )  # fmt: skip
    return open_grid(source.path, source, mesh, options, dp=dp, **wrapping)


class TensorSource:
    """A map-style data set as one store."""

    format = "torch data set"
    attributes: Mapping[str, Any] = {}

    def __init__(self, dataset: Any, dims: Dims, fields: Sequence[str] | str | None, dtype: torch.dtype | None) -> None:
        kind = type(dataset).__name__
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or isinstance(dataset, str | bytes):
            raise ConfigError(f"shard_dataset: expected a data set with __len__ and __getitem__, not {kind}")
        if not len(dataset):
            raise ConfigError(f"shard_dataset: {kind} has no samples")
        # equal on all ranks, so that a node's ranks know which samples they share
        self.path = f"shard_dataset {next(_numbers)} of {kind}"
        self._dataset, self._lock = dataset, threading.Lock()
        self._samples: Cache[dict[str, AnyArray]] = Cache(_KEPT, "lru")
        self._fields = None if fields is None else names_of("fields", fields)
        self._wide = dtype is torch.bfloat16
        first = self._sample(0)
        check_known("shard_dataset: no field", self._fields or (), first, " in a sample")
        if isinstance(dims, Mapping):
            check_known("dims: no field", dims, first, " in a sample")
        elif dims is not None:
            dims = names_of("dims", dims)
        self.arrays = {name: self._layout(name, first[name], dims) for name in self._fields or first}
        self._files = Files((), f"{self.path} {self.witness(0)}".encode())

    def _layout(self, name: str, values: AnyArray, dims: Dims) -> ArrayLayout:
        named = dims.get(name) if isinstance(dims, Mapping) else dims
        default = tuple(f"{name}.{i}" for i in range(values.ndim))
        if named is None or (not isinstance(dims, Mapping) and len(named) != values.ndim):
            named = default
        if len(named) != values.ndim or "sample" in named:
            raise ConfigError(
                f"dims: {name!r} has shape {values.shape}, and names {tuple(named)}: one of each, not 'sample'"
            )
        shape = (len(self._dataset), *values.shape)
        return ArrayLayout(
            store=self.path, name=name, shape=shape, dims=("sample", *named), dtype=values.dtype,
            chunks=(1, *values.shape), axis_order=tuple(range(len(shape))), fallback=True,
        )  # fmt: skip

    def _sample(self, index: int) -> dict[str, AnyArray]:
        def read() -> dict[str, AnyArray]:
            with self._lock:
                found = self._dataset[index]
            wanted = self._fields
            each = _leaves(found, "")
            return {name: self._as_array(name, x) for name, x in each if wanted is None or name in wanted}

        return self._samples.get_or_make(index, read, once=True)

    def _as_array(self, name: str, value: object) -> AnyArray:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            if value.dtype is torch.bfloat16:
                if not self._wide:
                    raise ConfigError(
                        f"shard_dataset: {name!r} is bfloat16, which NumPy lacks: pass dtype=torch.bfloat16"
                    )
                value = value.float()
            return value.numpy()
        if isinstance(value, bool | int | float | np.generic | np.ndarray) and np.asarray(value).dtype.kind in "biufc":
            return np.asarray(value)
        raise ConfigError(
            f"shard_dataset: {name!r} of a sample is {type(value).__name__}, no tensor, array or number; name the "
            "others with fields="
        )

    def locate(self, layout: ArrayLayout, chunks: IntArray) -> ChunkRefs:
        """Report every sample as present."""
        nowhere = np.zeros(len(chunks), np.int64)
        return ChunkRefs(paths=(self.path,), path_index=nowhere, offset=nowhere, nbytes=nowhere)

    def read_box(self, layout: ArrayLayout, box: tuple[slice, ...], out: AnyArray) -> None:
        """Copy a box of some samples into ``out``."""
        for row, index in enumerate(range(*box[0].indices(layout.shape[0]))):
            sample = self._sample(index)
            values = sample.get(layout.name)
            if values is None or (values.shape, values.dtype) != (layout.shape[1:], layout.dtype):
                found = "is not there" if values is None else f"is {values.dtype} of shape {values.shape}"
                raise FieldMismatchError(
                    f"{self.path}: field {layout.name!r} of sample {index} {found}, and of sample 0 {layout.dtype} of "
                    f"shape {layout.shape[1:]}; all samples must be alike"
                )
            out[row] = values[box[1:]]

    def witness(self, index: int) -> dict[str, str]:
        """Return digests of the values of a sample, by field."""
        sample = self._sample(index)
        return {name: hashlib.sha256(sample[name].tobytes()).hexdigest()[:8] for name in self.arrays}

    def check_unchanged(self, layout: ArrayLayout, paths: Sequence[str]) -> None:
        """Do nothing: there are no known files."""

    def files_of(self, layout: ArrayLayout, chunks: IntArray) -> Files:
        """Return no files: only ranks of one run share samples."""
        return self._files

    def close(self) -> None:
        """Drop the cached samples."""
        self._samples.clear()

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())


def _leaves(value: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, tuple | list) and not isinstance(value, Mapping):
        keys = getattr(value, "_fields", range(len(value)))  # of a named tuple
        value = dict(zip(map(str, keys), value, strict=True))
    if not isinstance(value, Mapping):
        yield name or "data", value
        return
    for key, each in value.items():
        yield from _leaves(each, f"{name}/{key}" if name else str(key))
