"""``open_dataset``: sample index in, the named fields of this rank's part out, as ShardTensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.data import Dataset, get_worker_info

from scidata.device_mesh import axes_of, domain_mesh
from scidata.errors import ConfigError, UnknownNameError, UnsupportedFormatError, near_matches
from scidata.grid_reader import GridReader
from scidata.irregular import IrregularDataset
from scidata.plan import ReadPlan
from scidata.points_reader import PointsReader
from scidata.read import ReadStats
from scidata.sample import Sample
from scidata.series import expand_paths
from scidata.shard import HaloDim, ShardSpec, ShardTensor
from scidata.sources import open_source
from scidata.store import is_store
from scidata.store_reader import CACHE_BYTES, StoreReader
from scidata.subsample import make_subsample
from scidata.topologies import exodus, graph, mpas, plain, points, ugrid, vtkhdf
from scidata.types import BufferSpec

__all__ = ["ShardedDataset", "open_dataset"]

_KINDS = ("grid", "points", "mesh", "graph")
# NumPy has no bfloat16: such fields are read as float32 and cast once, when they become tensors
_READ_AS = {torch.float16: np.float16, torch.bfloat16: np.float32, torch.float32: np.float32, torch.float64: np.float64}


def open_dataset(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    mesh: DeviceMesh | None = None,
    *,
    fields: Sequence[str] | str | None = None,
    kind: str | None = None,
    sample_dim: str | int | None = None,
    steps: Sequence[int] = (0,),
    shard: Mapping[str | int, str] | None = None,
    isel: Mapping[str, Any] | None = None,
    bounds: Any = "even",
    weights: npt.ArrayLike | Mapping[str, npt.ArrayLike] | str | None = None,
    align: int | Mapping[str, int] = 1,
    halo: float | Mapping[str, int | tuple[int, int]] = 0,
    ghosts: str | None = None,
    periodic: str | Sequence[str] = (),
    decode: bool = True,
    dtype: torch.dtype | None = None,
    transform: Callable[[Sample], Sample] | None = None,
    dp: str = "dp",
    allow_missing: bool = False,
    allow_external: bool = False,
    subsample: Mapping[str, int] | None = None,
    subsample_block: int | str = 1,
    subsample_seed: int = 0,
    num_threads: int = 4,
    cache_bytes: int | None = None,
) -> ShardedDataset | IrregularDataset:
    """Open a gridded data set, or a store of meshes, clouds or graphs: each rank reads only its part of a sample.

    Every rank of the domain calls it with the same arguments; it reads metadata and never communicates.

    Parameters
    ----------
    path
        A Zarr store, HDF5 or NetCDF file, URL, or a list or glob of files that follow each other along ``sample_dim``;
        or a store written by ``scidata partition``, which gives an :class:`~scidata.irregular.IrregularDataset`.
    mesh
        From :func:`scidata.init_mesh` or ``init_device_mesh``. None reads whole samples as plain tensors.
    fields
        Names of arrays; default all that lie on the grid of the largest one. A field without a sharded dimension is
        replicated.
    kind
        ``"grid"``, ``"mesh"``, ``"points"`` or ``"graph"``; default detected. Meshes and graphs need a store. Raw
        points are read in the order of their files, each of which is a sample; ghosts need a store.
    sample_dim
        Dimension that numbers the samples; default the first that is not sharded. Stores: default the one whose name
        says time (or ``"sample"``, of fields from several files), where fields that are read have one: then every
        time of every stored sample is a sample, and fields without time are in each. False: stored samples whole.
    steps
        Offsets along ``sample_dim``. One step drops that dimension; several keep it, one row per step. Steps stay
        inside one stored sample.
    shard
        ``{dim: mesh axis}``, such as ``{"latitude": "domain"}`` or ``{"lat": "h", "lon": "w"}``. Default: latitude,
        then longitude, by CF metadata or name, if they have enough rows.
    isel
        Global crop, stride, index or list of indices of any dimension, before the split; stores: of any but those of
        nodes, points, cells and edges.
    bounds
        ``"even"``, ``"chunk"`` (chunk edges, unless that unbalances the ranks by more than a quarter) or explicit
        ``[0, …, N]``, one more than ranks; ``{dim: …}`` on a 2-D domain.
    weights
        Cost of each selected row, or the name of a field that is summed over the other dimensions: bounds then balance
        the sum. Stores: ``"edges"``, a field of nodes (points), or one cost of each in the source's order.
    align
        Bounds fall on multiples of it, such as a ViT's patch size.
    halo
        Grids: ``{dim: width}`` or ``{dim: (below, above)}``; a number means every sharded dimension. Meshes and graphs:
        hops along edges. Points: a radius, to the nearest images where the domain wraps. Stores only
        have one number.
    ghosts
        Stores: ``"disk"`` reads the halo's rows of all fields too, the default where there is a halo; ``"exchange"``
        leaves them to an exchange between the ranks.
    periodic
        Dimensions whose halo wraps.
    decode
        Apply CF ``scale_factor``, ``add_offset`` and fill values (to NaN).
    dtype
        Of floating fields; default what CF metadata says. bfloat16 is read as float32 and cast.
    transform
        Called with each :class:`Sample`, returns one.
    dp
        Name of the mesh's data-parallel axis.
    allow_missing
        Read absent chunks as the fill value; for stores that leave out empty chunks on purpose.
    allow_external
        Also read HDF5 external storage, external links and virtual datasets.
    subsample
        Meshes, clouds and graphs: ``{"point": 100_000}`` draws that many rows of each sample anew in each epoch
        (``DataLoader.set_epoch``), without replacement, every row equally likely; all of a sample that has no more.
        The ranks of a domain draw the same, and each reads its own. Of a mesh, ``"cell"`` draws cells, with their nodes
        and the edges between these; ``"node"`` draws nodes, with the cells and edges that lie between drawn ones.
    subsample_block
        Rows that are drawn together. 1 draws single rows, which costs about as much as reading all where a chunk holds
        a drawn row each; ``"chunk"`` draws whole chunks (of a store 1024 rows, neighbours in space unless it was
        written with ``order="rows"`` from shuffled rows) and reads no more than it draws; numbers between trade one
        for the other, see ``plan``. The number of rows is rounded up to whole blocks.
    subsample_seed
        Of the draws, which are a function of seed, epoch and index of the sample.
    num_threads
        Threads that fetch and decode chunks side by side, in each process.
    cache_bytes
        Stores: edges, cells and index maps that were read are kept for further times of the same stored sample, at most
        so many bytes of them; default 512 MiB. A sample that does not fit is read anew each time.

    Raises
    ------
    FileNotFoundError, UnsupportedFormatError, UnknownNameError, FieldMismatchError, ConfigError
        What metadata alone shows to be wrong, the same on every rank.

    Examples
    --------
    On each rank of two, under torchrun::

        mesh = scidata.init_mesh(domain=2)
        ds = scidata.open_dataset("era5.zarr", mesh, shard={"latitude": "domain"}, halo={"latitude": 2})
        ds[0]["u"].shape       # (level, 241, 480): the whole field
        ds[0]["u"].to_local()  # this rank's rows of it, all that was read but for the halo
    """
    drawn = make_subsample(subsample, block=subsample_block, seed=subsample_seed)
    if kind is not None and kind not in _KINDS:
        raise ConfigError(f"kind must be one of {', '.join(_KINDS)}, not {kind!r}{near_matches(kind, _KINDS)}")
    if dtype is not None and dtype not in _READ_AS:
        raise ConfigError(f"dtype must be a floating torch dtype, not {dtype}; integer fields keep their own")
    if mesh is None and (halo or shard):
        what = f"halo={halo}" if halo else f"shard={shard}"
        raise ConfigError(f"{what} needs a mesh: pass scidata.init_mesh(), which also works in a single process")
    if isinstance(path, str | os.PathLike) and is_store(path):
        given = {"shard": shard is not None, "align": align != 1, "periodic": bool(periodic), "decode": not decode}
        given |= {"allow_missing": allow_missing, "allow_external": allow_external}
        for name, present in given.items():
            if present:
                raise ConfigError(f"{name}: means nothing for {os.fspath(path)}, a partitioned store; leave it out")
        return _open_store(
            path,
            mesh,
            kind=kind,
            dp=dp,
            transform=transform,
            dtype=dtype,
            halo=halo,
            ghosts=ghosts,
            fields=fields,
            sample_dim=sample_dim,
            steps=steps,
            isel=isel,
            bounds=bounds,
            weights=weights,
            subsample=drawn,
            num_threads=num_threads,
            cache_bytes=CACHE_BYTES if cache_bytes is None else cache_bytes,
        )
    if cache_bytes is not None:
        raise ConfigError(
            "cache_bytes: means nothing for grids and raw points, which have no edges or cells to keep; leave it out"
        )
    given = {"sample_dim": sample_dim is not None, "steps": tuple(steps) != (0,), "shard": shard is not None}
    given |= {"isel": isel is not None, "align": align != 1, "periodic": bool(periodic)}
    if _kind_of_raw(path, kind, allow_external, like_grid=any(given.values())) == "points":
        shown = os.fspath(path) if isinstance(path, str | os.PathLike) else "SOURCE..."
        for name, present in given.items():
            if present:
                raise ConfigError(f"{name}: means nothing for points, of which each file is a sample; leave it out")
        if halo or ghosts is not None:
            what = f"halo={halo}" if halo else f"ghosts={ghosts!r}"
            raise ConfigError(
                f"{what}: raw points are read in the order of their file, in which neighbours lie anywhere; put them "
                f"in order once: scidata partition {shown} OUT --kind points, then open OUT"
            )
        dp_axis, domain = _axes(mesh, dp, None)
        axis, num_parts = _one_axis(mesh, domain, shown)
        cloud = PointsReader(
            path,
            num_parts=num_parts,
            fields=fields,
            bounds=bounds,
            weights=weights,
            decode=decode,
            dtype=None if dtype is None else _READ_AS[dtype],
            subsample=drawn,
            allow_missing=allow_missing,
            allow_external=allow_external,
            num_threads=num_threads,
        )
        return IrregularDataset(cloud, mesh, dp_axis=dp_axis, domain_axis=axis, dtype=dtype, transform=transform)
    if ghosts is not None:
        raise ConfigError(f"ghosts={ghosts!r}: the halo of a grid is always read from disk; leave ghosts out")
    if drawn is not None:
        raise ConfigError(f"subsample={subsample}: grids are not drawn from; crop or stride them with isel")
    dp_axis, domain = _axes(mesh, dp, shard)
    reader = GridReader(
        path,
        axis_sizes={axis: mesh.size(_names(mesh).index(axis)) for axis in domain} if mesh is not None else None,
        fields=fields,
        sample_dim=sample_dim,
        steps=steps,
        shard=shard if mesh is not None else {},
        isel=isel,
        bounds=bounds,
        weights=weights,
        align=align,
        halo=halo,
        periodic=periodic,
        decode=decode,
        dtype=None if dtype is None else _READ_AS[dtype],
        allow_missing=allow_missing,
        allow_external=allow_external,
        num_threads=num_threads,
    )
    return ShardedDataset(reader, mesh, dp_axis=dp_axis, dtype=dtype, transform=transform)


def _open_store(
    path: str | os.PathLike[str],
    mesh: DeviceMesh | None,
    *,
    kind: str | None,
    dp: str,
    transform: Callable[[Sample], Sample] | None,
    dtype: torch.dtype | None,
    halo: Any,
    ghosts: str | None,
    **options: Any,
) -> IrregularDataset:
    dp_axis, domain = _axes(mesh, dp, None)
    axis, num_parts = _one_axis(mesh, domain, os.fspath(path))
    reader = StoreReader(
        path,
        num_parts=num_parts,
        halo=halo,
        ghosts=ghosts or ("disk" if halo else "exchange"),
        dtype=None if dtype is None else _READ_AS[dtype],
        **options,
    )
    if kind not in (None, reader.kind):
        raise ConfigError(f"kind={kind!r}: {os.fspath(path)} is a store of kind {reader.kind!r}")
    return IrregularDataset(reader, mesh, dp_axis=dp_axis, domain_axis=axis, dtype=dtype, transform=transform)


def _one_axis(mesh: DeviceMesh | None, domain: tuple[str, ...], shown: str) -> tuple[str | None, int]:
    """Return the domain's axis and its ranks: None and 1 without one."""
    if len(domain) > 1:
        raise ConfigError(
            f"{shown}: meshes, points and graphs are cut along one domain axis, and the mesh has {', '.join(domain)}; "
            "make it with init_mesh(domain=N)"
        )
    if mesh is None or not domain:
        return None, 1
    return domain[0], mesh.size(_names(mesh).index(domain[0]))


def _kind_of_raw(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    kind: str | None,
    allow_external: bool,
    *,
    like_grid: bool,
) -> str:
    """Return ``"grid"`` or ``"points"``; say which command to run where raw data is neither.

    ``like_grid``: arguments that only grids have are given.
    """
    if kind in ("grid", "points"):
        return kind
    found = kind
    if kind is None:
        source = open_source(expand_paths(path)[0], allow_external=allow_external)
        if any(module.detect(source) for module in (vtkhdf, ugrid, mpas, exodus)):
            found = "mesh"
        elif graph.detect(source):
            found = "graph"
        elif not like_grid and plain.detect(source) and points.detect(source):
            found = "mesh"
        elif not like_grid and points.is_cloud(source):
            return "points"
    if found is not None:
        shown = os.fspath(path) if isinstance(path, str | os.PathLike) else "SOURCE..."
        raise UnsupportedFormatError(
            f"{shown}: kind {found!r} is read from a store, which serves any number of ranks; write it once: "
            f"scidata partition {shown} OUT --kind {found}, then open OUT"
            + ("; or say kind='grid'" if kind is None else "")
        )
    return "grid"


class ShardedDataset(Dataset[Sample]):
    """Samples of a gridded data set, of which this rank reads its part. Made by :func:`open_dataset`.

    Indexing never communicates, although all ranks of a domain are meant to index alike. Pickles as paths and options
    and reopens its files lazily. In a worker process, which has no process group, a sample is a dict of plain local
    tensors, halo included, that :meth:`assemble` wraps in the parent.

    Attributes
    ----------
    mesh : DeviceMesh or None
        As given; None in a worker process.
    dp_axis : str or None
        Name of the data-parallel axis, None where the mesh has none.
    transform
        Called with each sample.
    """

    def __init__(
        self,
        reader: GridReader,
        mesh: DeviceMesh | None,
        *,
        dp_axis: str | None,
        dtype: torch.dtype | None,
        transform: Callable[[Sample], Sample] | None,
    ) -> None:
        self.reader = reader
        self.mesh = mesh
        self.dp_axis = dp_axis
        self.transform = transform
        self._dtype = dtype
        self._detached = False
        axes = tuple(reader.partition.axis_sizes)
        self._coordinate = {} if mesh is None else {axis: mesh.get_local_rank(axis) for axis in axes}
        self._domain: DeviceMesh | None = domain_mesh(mesh, axes) if mesh is not None and axes else None

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields."""
        return self.reader.fields

    @property
    def rank(self) -> int:
        """Place of this rank in its domain: the ``rank`` of :meth:`plan`."""
        sizes = tuple(self.reader.partition.axis_sizes.values())
        return int(np.ravel_multi_index(tuple(self._coordinate.values()), sizes)) if self._coordinate else 0

    @property
    def fingerprint(self) -> str:
        """Digest of what decides the samples: fields, shapes, dtypes, crop and steps."""
        return self.reader.fingerprint()

    def dims(self, name: str) -> tuple[str, ...]:
        """Return the dimensions of a field of one sample."""
        return self.reader.dims(name)

    def global_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a field of one whole sample."""
        return self.reader.global_shape(name)

    def coordinate(self, dim: str) -> npt.NDArray[Any] | None:
        """Return the whole selected coordinate of a dimension, ``(size,)``, or None where it has none."""
        return self.reader.coordinate(dim)

    def __len__(self) -> int:
        return self.reader.num_samples

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {self.reader.global_shape(name)}" for name in self.fields)
        return f"ShardedDataset({self.reader.paths[0]!r}, {len(self)} samples, {shapes})"

    def plan(self, index: int, rank: int | None = None) -> ReadPlan:
        """Plan what a rank of the domain reads of a sample; any rank, default this one. Reads metadata only."""
        return self.reader.plan(index, self.rank if rank is None else rank)

    # -- reading -------------------------------------------------------------------------------------------------

    def buffer_specs(self) -> dict[str, BufferSpec]:
        """Return shape and dtype of this rank's part of each field, halo included; the same for every sample."""
        return self.reader.buffer_specs(self._coordinate)

    def read_into(self, index: int, out: Mapping[str, npt.NDArray[Any]]) -> ReadStats:
        """Read this rank's part into buffers shaped as :meth:`buffer_specs`. Thread-safe, no collectives."""
        return self.reader.read_into(index, out, self._coordinate)

    def read_local(self, index: int) -> dict[str, torch.Tensor]:
        """Read this rank's part, halo included, as plain tensors."""
        buffers = {name: np.empty(spec.shape, spec.dtype) for name, spec in self.buffer_specs().items()}
        self.read_into(index, buffers)
        return {name: torch.from_numpy(buffer) for name, buffer in buffers.items()}

    def __getitem__(self, index: int) -> Sample:
        local = self.read_local(index)
        if self._detached or (self.mesh is not None and get_worker_info() is not None):
            return local  # type: ignore[return-value]  # a worker has no process group; assemble() wraps in the parent
        sample = self.assemble(local, index=index % len(self))
        return self.transform(sample) if self.transform is not None else sample

    def assemble(
        self,
        local: Mapping[str, torch.Tensor],
        *,
        index: int | list[int] | None = None,
        batched: bool | None = None,
    ) -> Sample:
        """Wrap local parts, halo included, as a sample of ShardTensors.

        Parameters
        ----------
        local
            A tensor for each field, shaped as :meth:`buffer_specs`; with a batch dim 0 before it if ``batched``.
        batched
            Default: found from the number of dims.

        Raises
        ------
        ConfigError
            Called in a worker process, or with tensors that do not have this rank's shapes.
        """
        if self._detached:
            raise ConfigError("assemble() needs the mesh, which a worker process does not have; call it in the parent")
        specs = self.buffer_specs()
        tensors, dims = {}, {}
        for name, tensor in local.items():
            if name not in specs:
                raise UnknownNameError(f"assemble: no field {name!r}{near_matches(name, specs)}")
            expected = specs[name].shape
            lead = tensor.ndim - len(expected)
            has_batch = lead == 1 if batched is None else batched
            if lead != int(has_batch) or tuple(tensor.shape[lead:]) != expected:
                raise ConfigError(
                    f"assemble: field {name!r} has shape {tuple(tensor.shape)}, but this rank's part is {expected}"
                    + (" after the batch dim" if has_batch else "")
                )
            narrow = self._dtype is torch.bfloat16 and tensor.is_floating_point()
            tensors[name] = self._wrap(name, tensor.to(torch.bfloat16) if narrow else tensor, has_batch)
            dims[name] = (("batch",) if has_batch else ()) + self.reader.dims(name)
        return Sample(tensors, dims=dims, index=index)

    def _wrap(self, name: str, tensor: torch.Tensor, has_batch: bool) -> torch.Tensor:
        if self._domain is None:
            return tensor
        partition, dims, lead = self.reader.partition, self.reader.dims(name), int(has_batch)
        placements: list[Placement] = []
        sizes: list[tuple[int, ...] | None] = []
        for axis in partition.axis_sizes:
            dim = next(d for d, a in partition.axis_of_dim.items() if a == axis)
            if dim in dims:
                placements.append(Shard(dims.index(dim) + lead))
                sizes.append(tuple(np.diff(partition.bounds[dim]).tolist()))
            else:
                placements.append(Replicate())
                sizes.append(None)
        spec = ShardSpec(
            device_mesh=self._domain,
            placements=tuple(placements),
            global_shape=(*tensor.shape[:lead], *self.reader.global_shape(name)),
            sizes=tuple(sizes),
        )
        halo = {
            i + lead: HaloDim(lo=partition.halo[d][0], hi=partition.halo[d][1], periodic=d in partition.periodic)
            for i, d in enumerate(dims)
            if d in partition.halo
        }
        return ShardTensor.from_padded(tensor, spec, halo)

    def close(self) -> None:
        """End the reading threads and close the files; the next read starts them again."""
        self.reader.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"mesh": None, "_domain": None, "_detached": self._detached or self.mesh is not None}


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or ())


def _axes(
    mesh: DeviceMesh | None, dp: str, shard: Mapping[str | int, str] | None
) -> tuple[str | None, tuple[str, ...]]:
    """Return the dp axis, if the mesh has it, and the domain axes in mesh order."""
    if mesh is None:
        return None, ()
    if shard is None:
        return axes_of(mesh, dp=dp)
    for axis in shard.values():
        if axis not in _names(mesh):
            raise UnknownNameError(f"shard: the mesh has no axis {axis!r}{near_matches(axis, _names(mesh))}")
        if axis == dp:
            raise ConfigError(f"shard splits a dimension over {dp!r}, the data-parallel axis; use a domain axis")
    return axes_of(mesh, dp=dp, domain=tuple(a for a in _names(mesh) if a in shard.values()))
