"""``open_dataset``: recognise a path, and choose its reader and data set."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict, Unpack, overload

import numpy.typing as npt
import torch
from torch.distributed.device_mesh import DeviceMesh

from scidata.core.checks import Duration, names_of
from scidata.core.keywords import checked_keywords
from scidata.core.options import (
    ONLY_POINTS,
    Align,
    Bounds,
    Crop,
    Halo,
    ReadOptions,
    SampleDim,
    Steps,
    Weights,
    Where,
)
from scidata.core.patches import Patches
from scidata.core.urls import url_of
from scidata.data.local_fields import LocalTransform
from scidata.data.openers import Wrapping, check_wrapping, cut_of, numpy_dtype, open_grid, open_points, open_store
from scidata.data.raw_kind import kind_of_raw
from scidata.errors import ConfigError, check_known
from scidata.interop.xarray import Lazy, is_xarray, lazy_of
from scidata.sources.paths import check_paths
from scidata.store.format.places import is_store

if TYPE_CHECKING:
    from scidata.data.channels import TensorT
    from scidata.data.grid_dataset import ShardedDataset
    from scidata.data.irregular_dataset import IrregularDataset
    from scidata.data.irregular_sample import IrregularSample
    from scidata.data.sample import Sample
    from scidata.shard import ShardTensor

    _OfGrids: TypeAlias = Callable[[Sample[TensorT]], Any]
    _OfMeshes: TypeAlias = Callable[[IrregularSample[TensorT]], Any]


class XarrayObject(Protocol):
    """An xarray ``Dataset`` or ``DataArray``; xarray need not be installed."""

    encoding: Any

    def to_netcdf(self, *args: Any, **options: Any) -> Any:
        """Write it."""


Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | XarrayObject


class Options(TypedDict, total=False):
    """The arguments of :func:`scidata.open_dataset` that do not affect its result type, for its overloads."""

    fields: Sequence[str] | str | None
    sample_dim: SampleDim
    steps: Steps
    gaps: Literal["skip", "error", "allow"]
    isel: Crop | None
    sel: Crop | None
    patch: Mapping[str, int] | Patches | None
    bounds: Bounds
    weights: Weights
    align: Align
    cut_like: ShardedDataset[Any] | Mapping[str, npt.ArrayLike] | None
    halo: Halo
    ghosts: str | None
    edges: str | None
    periodic: str | Sequence[str]
    decode: bool | str
    dtype: torch.dtype | None
    local_transform: LocalTransform | None
    dp: str
    allow_missing: bool
    allow_external: bool
    subsample: Mapping[str, int] | None
    subsample_block: int | str
    subsample_seed: int
    positions: Sequence[str] | str | None
    time: str | None
    window: Duration | None
    every: Duration | None
    where: Where | None
    coords: bool
    destagger: bool
    num_threads: int
    cache_bytes: int | None
    pool_bytes: int | None
    cache_dir: str | os.PathLike[str] | None
    cache_disk_bytes: int | None
    storage_options: Mapping[str, object] | None


# With a mesh, fields are ShardTensors. `kind` and `shard` say of which class the data set is. Where neither is given,
# the file decides, and the result is Any: of a union, checkers refuse `sample.to_pyg()` since grids lack it. No two
# overloads that take a transform overlap: checkers would not choose among them where it is a lambda. The last is for a
# kind that is a variable.


# fmt: off
@overload
def open_dataset(
    path: Paths, mesh: DeviceMesh, *, kind: Literal["grid"], shard: Mapping[str | int, str] | None = None,
    transform: _OfGrids[ShardTensor] | None = None, **options: Unpack[Options],
) -> ShardedDataset[ShardTensor]: ...


@overload
def open_dataset(
    path: Paths, mesh: None = None, *, kind: Literal["grid"],
    transform: _OfGrids[torch.Tensor] | None = None, **options: Unpack[Options],
) -> ShardedDataset: ...


@overload
def open_dataset(
    path: Paths, mesh: DeviceMesh, *, kind: Literal["mesh", "points", "graph"],
    transform: _OfMeshes[ShardTensor] | None = None, **options: Unpack[Options],
) -> IrregularDataset[ShardTensor]: ...


@overload
def open_dataset(
    path: Paths, mesh: None = None, *, kind: Literal["mesh", "points", "graph"],
    transform: _OfMeshes[torch.Tensor] | None = None, **options: Unpack[Options],
) -> IrregularDataset: ...


@overload
def open_dataset(
    path: Paths, mesh: DeviceMesh, *, kind: None = None, shard: Mapping[str | int, str],
    transform: _OfGrids[ShardTensor] | None = None, **options: Unpack[Options],
) -> ShardedDataset[ShardTensor]: ...


@overload
def open_dataset(
    path: Paths, mesh: DeviceMesh | None = None, *, kind: None = None, shard: None = None,
    transform: Callable[[Any], Any] | None = None, **options: Unpack[Options],
) -> Any: ...


@overload
def open_dataset(
    path: Paths, mesh: DeviceMesh | None = None, *, kind: str | None, shard: Mapping[str | int, str] | None = None,
    **options: Unpack[Options],
) -> Any: ...
# fmt: on


@checked_keywords
def open_dataset(
    path: Paths,
    mesh: DeviceMesh | None = None,
    *,
    fields: Sequence[str] | str | None = None,
    kind: str | None = None,
    sample_dim: SampleDim = None,
    steps: Steps = (0,),
    gaps: str = "skip",
    shard: Mapping[str | int, str] | None = None,
    isel: Crop | None = None,
    sel: Crop | None = None,
    patch: Mapping[str, int] | Patches | None = None,
    bounds: Bounds = "even",
    weights: Weights = None,
    align: Align = 1,
    cut_like: ShardedDataset[Any] | Mapping[str, npt.ArrayLike] | None = None,
    halo: Halo = 0,
    ghosts: str | None = None,
    edges: str | None = None,
    periodic: str | Sequence[str] = (),
    decode: bool | str = True,
    dtype: torch.dtype | None = None,
    transform: Callable[[Any], Any] | None = None,
    local_transform: LocalTransform | None = None,
    dp: str = "dp",
    allow_missing: bool = False,
    allow_external: bool = False,
    subsample: Mapping[str, int] | None = None,
    subsample_block: int | str = 1,
    subsample_seed: int = 0,
    positions: Sequence[str] | str | None = None,
    time: str | None = None,
    window: Duration | None = None,
    every: Duration | None = None,
    where: Where | None = None,
    coords: bool = False,
    destagger: bool = False,
    num_threads: int = 4,
    cache_bytes: int | None = None,
    pool_bytes: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_disk_bytes: int | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> ShardedDataset[Any] | IrregularDataset[Any]:
    """Open a gridded data set, or a store of meshes, clouds or graphs: each rank reads only its part of a sample.

    Every rank of the domain calls it with the same arguments; it reads metadata and never communicates.

    Parameters
    ----------
    path : str or PathLike, or a list of them
        A Zarr store, HDF5 or NetCDF file, URL, or a list or glob of files that follow each other along ``sample_dim``;
        or a store written by ``scidata partition``, which gives an :class:`~scidata.IrregularDataset`. Or a reference
        set of kerchunk or VirtualiZarr, or an Icechunk repository: ``repo``, ``repo@branch=dev``, ``repo@tag=v1`` or
        ``repo@snapshot=…``. Or an ``xarray.Dataset`` or ``DataArray`` that nobody has loaded or computed with: its
        variables and rows of the file that it was opened from.
    mesh : DeviceMesh or None, optional
        From :func:`scidata.init_mesh` or ``init_device_mesh``. None reads whole samples as plain tensors.
    fields : Sequence[str] or str or None, optional
        Names of arrays; default all that lie on the grid of the largest one, of those with time if there are any. A
        field without a sharded dimension is replicated; one without the sample dimension is read once, and all samples
        share its tensor.
    kind : str or None, optional
        ``"grid"``, ``"mesh"``, ``"points"`` or ``"graph"``; default detected. Meshes and graphs need a store. Raw
        points are read in the order of their files, each of which is a sample; ghosts need a store.
    sample_dim : str, int, a list of them, False or None, optional
        Dimension that numbers the samples; default the first that is not sharded, but time where that is one of levels,
        or of members of an ensemble. Several, the last one of steps: ``("trajectory", "time")``, or ``("member",
        "time")``, gives the times of each, and windows of ``steps`` stay inside it. False: all is one sample. Stores:
        default the one whose name says time (or ``"sample"``, of fields from several files), where fields that are
        read have one: then every time of every stored sample is a sample, and fields without time are in each. False:
        stored samples whole.
    steps : Sequence[int] or Mapping[str, Sequence[int]], default (0,)
        Offsets along ``sample_dim``. One step drops that dimension; several keep it, one row per step. Steps stay
        inside one stored sample, and one group of a file. Of grids also by field: ``{"u": (-1, 0, 1), "v": (0, 1)}``;
        fields that it does not name have those of ``"*"``, by default (0,). There are as many samples as the steps of
        all fields allow.
    gaps : str, default "skip"
        Of grids, where times along ``sample_dim`` do not follow each other in their usual step (a missing file or
        date, a time that comes twice): ``"skip"`` leaves out the samples whose steps reach over that, and those of
        dates that anemoi names as ``missing_dates``, and says so in a warning; ``"error"`` refuses; ``"allow"`` takes
        neighbouring rows for neighbouring steps. Months, years and the calendars of models have no gaps.
    shard : Mapping[str or int, str] or None, optional
        ``{dim: mesh axis}``, such as ``{"latitude": "domain"}`` or ``{"lat": "h", "lon": "w"}``. Default: latitude,
        then longitude, by CF metadata or name, if they have enough rows.
    isel : Mapping[str, int or slice or Sequence[int]] or None, optional
        Global crop, stride, index or list of indices of any dimension, before the split; stores: of any but those of
        nodes, points, cells and edges.
    sel : Mapping[str, value or slice or list] or None, optional
        The same by the values of coordinates, of grids: ``{"level": [500, 850], "time": slice("1990", "2015")}``, as
        xarray takes them: slices hold both ends, and go the way that the coordinate goes. Of windows of a table, those
        that begin then: ``{"dates": slice("2019", "2021-06")}``.
    patch : Mapping[str, int] or Patches or None, optional
        Grids: samples are patches, ``{"lat": 128, "lon": 128}`` rows of each global sample, at places that are drawn
        anew in each epoch (``DataLoader.set_epoch``), the same on all ranks; several of each, tiles, or places by
        weights or at edges of chunks: :class:`scidata.Patches`. ``bounds``, ``align`` and ``weights`` are those of a
        patch; its halo has rows of the grid beyond its edges, too.
    bounds : str or Sequence[int], or a mapping by dim, default "even"
        ``"even"``, ``"chunk"`` (chunk edges, unless that unbalances the ranks by more than a quarter) or explicit
        ``[0, …, N]``, one more than ranks; ``{dim: …}`` on a 2-D domain.
    weights : array_like or str, a mapping by dim, or None, optional
        Cost of each selected row, or the name of a field that is summed over the other dimensions: bounds then balance
        the sum. Stores: ``"edges"``, a field of nodes (points), or one cost of each in the source's order;
        ``"measured"``: evenly, then by what ranks' parts took (:meth:`IrregularDataset.rebalance`).
    align : int or Mapping[str, int], default 1
        Bounds fall on multiples of it, such as a ViT's patch size.
    cut_like : ShardedDataset or Mapping[str, Sequence[float]] or None, optional
        Raw points and windows: a data set of a grid, opened with the same mesh. Each rank gets the points in its part
        of the grid, whose values :func:`scidata.interpolate` finds without exchange where the grid has a halo of one
        row above (``halo={"latitude": (0, 1)}``). Or the ends of all parts along a coordinate, in the order of the
        ranks: ``{"latitude": [90, 30, -30, -90]}``. Each rank reads the positions of all points, and its own rows of
        other fields.
    halo : int or float, a mapping, or a list of relations, default 0
        Grids: ``{dim: width}`` or ``{dim: (below, above)}``; a number means every sharded dimension. Meshes and graphs:
        hops along edges; meshes also ``"cells"``, a hop and all cells that have an owned node:
        :attr:`IrregularSample.cells_with_ghosts` (where cells are the rows, all that share a node with an owned one;
        the store needs ``edges="nodes"``). Points: a radius, to the nearest images where the domain wraps. Stores only
        have one number. Graphs between several node sets: layers along all relations, or which relations
        the layers of a model follow, in their order: ``{"grid__to__mesh": 1, "mesh__to__mesh": 4}``, or a list of
        relations, of which several in one layer are a tuple.
    ghosts : str or None, optional
        Stores: ``"disk"`` reads the halo's rows of all fields too, the default where there is a halo; ``"exchange"``
        leaves them to an exchange between the ranks.
    edges : str or None, optional
        Points, in a store or raw: ``"knn:16"``, from each point's nearest others, or ``"radius:0.1"``, from all so near
        (on a sphere in degrees), found when a sample is read, of drawn points with ``subsample``. Each rank has those
        that end at its points, as one process finds them; :attr:`IrregularSample.edge_index`. Of a store a rank reads
        its points and those near them; of raw files, and of a draw, the positions of all. Edges that never change are
        better stored: ``scidata partition --edges``.
    periodic : str or Sequence[str], default ()
        Dimensions whose halo wraps.
    decode : bool or str, default True
        Apply CF ``scale_factor``, ``add_offset`` and fill values (to NaN). ``"node"``, of grids: and the ranks of a
        domain that share a node decode chunks that several of them need for each other, through memory, where they
        would decode more than 1.1 times as much else; ``"rank"``, as True: each rank for itself.
    dtype : torch.dtype or None, optional
        Of floating fields; default that of CF metadata. bfloat16 is read as float32 and cast.
    transform : Callable[[Any], Any] or None, optional
        Called with each :class:`Sample`, returns one; in the thread that uses it, on the device of
        ``DataLoader(device=)``. Random numbers: ``sample.generator``.
    local_transform : Callable[[dict], dict] or None, optional
        Called with the tensors of this rank's part by name, halo and ghosts included, where they are read: in a
        reader thread, in the loop's (small samples), or in a worker process (then it must pickle). Returns the changed
        tensors by name; shapes and dtypes stay. No rank sees the others' rows. Fields shared by samples are then read
        with each sample, too.
    dp : str, default "dp"
        Name of the mesh's data-parallel axis.
    allow_missing : bool, default False
        Read absent chunks as the fill value; for stores that leave out empty chunks on purpose.
    allow_external : bool, default False
        Also read HDF5 external storage, external links and virtual datasets, and follow references of a set to outside
        its folder, bucket or host, without its credentials.
    subsample : Mapping[str, int] or None, optional
        Meshes, clouds and graphs: ``{"point": 100_000}`` draws that many rows of each sample anew in each epoch
        (``DataLoader.set_epoch``), without replacement, every row equally likely; all of a sample that has no more.
        Of points in a store with ``order="shuffle"`` epochs walk through all rows: none comes again before all have
        come, and no more is read than is drawn.
        The ranks of a domain draw the same, and each reads its own. Of a mesh, ``"cell"`` draws cells, with their nodes
        and the edges between these; ``"node"`` draws nodes, with the cells and edges that lie between drawn ones.
        Graphs between several node sets: ``{"grid": 20_000, "mesh": 5_000}``, with all rows of sets that are not named,
        and the edges both of whose ends are there.
    subsample_block : int or str, default 1
        Rows that are drawn together. 1 draws single rows, which costs about as much as reading all where a chunk holds
        a drawn row each; ``"chunk"`` draws whole chunks (of a store 1024 rows, neighbours in space unless it was
        written with ``order="rows"`` from shuffled rows) and reads no more than it draws; numbers between trade one
        for the other, see ``plan``. The number of rows is rounded up to whole blocks.
    subsample_seed : int, default 0
        Of the draws, which are a function of seed, epoch and index of the sample.
    positions : Sequence[str] or str or None, optional
        Raw points: names of their coordinates, one array of shape ``(N, 2 or 3)`` or two or three of ``(N,)``; default
        by CF's attributes, or the usual names. ``pos`` has x (longitude) first, in whichever order they are named.
    time : str or None, optional
        Of a table of observations: its column of times, in which rows are sorted. Then samples are windows of it, the
        rows in ``[t, t + window)``, and the column is a field: seconds since ``t``. Files follow each other. The first
        rows of all hours are found once and kept in ``cache_dir``, or beside the data. Also of a store of points, best
        one of ``scidata.partition(…, order="time:dates")``.
    window : str or timedelta or int or None, optional
        How long a window is: ``"6h"``, ``"30min"``; a number where times are integers without units.
    every : str or timedelta or int or None, optional
        From one window's begin to the next, counted from 1970-01-01T00; default ``window``.
    where : Mapping[str, value or slice or Sequence] or None, optional
        Rows of a table that are read, by the values of columns: ``{"qc": (0, 1), "bt": slice(150, 350)}``. Slices hold
        both ends, and no missing value: ``slice(None)`` is all that is there. Values are compared decoded, also with
        ``decode=False``. Texts choose rows by a column of text, which is no field.
    coords : bool, default False
        Grids: samples show their coordinates, times decoded, as :attr:`Sample.coords`.
    destagger : bool, default False
        Grids as WRF has them: fields on faces (dims ``…_stag``) are read as the means of the faces of each cell.
    num_threads : int, default 4
        Threads that fetch and decode chunks side by side, in each process.
    cache_bytes : int or None, optional
        Stores: edges, cells and index maps that were read are kept for further times of the same stored sample, at most
        so many bytes of them; default 512 MiB. So are fields without times, up to 128 MiB besides. What does not fit is
        read anew each time.
    pool_bytes : int or None, optional
        Grids whose chunks hold several steps, and windows of several steps: decoded rows of this rank's part are kept
        for other samples, at most so many bytes of them in each process, so that a chunk is decoded once for all steps
        in it. For orders in which samples of a chunk come close to each other: as they are stored, or
        ``DistributedSampler(shuffle="blocks")``. A loader sees from its order which chunks are worth it, and reads them
        ahead. Default: all of this rank's part, in any order, where it fits, else the need of these orders, within an
        eighth of the available memory, shared with the other ranks of the node; ``plan`` says how much. 0 keeps
        nothing.
    cache_dir : str or PathLike or None, optional
        Grids: a folder on a local disk in which decoded rows of this rank's part are kept for other epochs and runs, of
        data behind URLs or that have to be decoded; raw local arrays are read where they are, which costs no more. Any
        number of ranks and jobs may use one folder. The source's files are looked at before kept rows of them are
        used first: those of a changed file are read again. ``scidata stage`` fills it ahead of a job. The metadata of
        many HDF5 and NetCDF files are kept there as well, as ``scidata index`` keeps them. Stores behind
        URLs and on network file systems: blocks of their files are kept there, for any number of ranks; a store that is
        written again has others.
    cache_disk_bytes : int or None, optional
        At most so many bytes of them, those used longest ago go first; default half of the free space on that disk.
    storage_options : Mapping[str, object] or None, optional
        URLs: arguments of fsspec's file system, such as ``{"endpoint_url": …, "key": …, "secret": …}`` or
        ``{"anon": True}`` of s3fs. No message, plan or state shows it, nor the user, password and query of a URL; a
        pickle of the data set holds it, since worker processes open the files anew. How patiently reads
        are tried again: :func:`scidata.set_retry`. Of reference sets also ``"targets"``: options by prefix of
        those URLs that references may lead to, besides their own place.

    Raises
    ------
    FileNotFoundError, UnsupportedFormatError, UnknownNameError, FieldMismatchError, ConfigError
        What metadata alone shows to be wrong, the same on every rank.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> ds = scidata.open_dataset("era5.zarr", fields=["u"], steps=(0, 1))  # whole samples, plain tensors
    >>> len(ds), tuple(ds[0]["u"].shape)
    (3, (2, 3, 7, 8))

    On each of two ranks, under torchrun:

    >>> mesh = scidata.init_mesh(domain=2)
    >>> ds = scidata.open_dataset("era5.zarr", mesh, shard={"latitude": "domain"}, halo={"latitude": 2})
    >>> u = ds[0]["u"]
    >>> tuple(u.shape), u.sharding_shapes()  # the whole, and the rows of it that each rank has read
    ((3, 7, 8), {0: (torch.Size([3, 4, 8]), torch.Size([3, 3, 8]))})
    """
    if is_xarray(path):
        path, fields, isel, decode = _of_xarray(lazy_of(path), fields, isel, decode)
    path = _located(path, storage_options)
    wrapping: Wrapping = {"dtype": dtype, "transform": transform, "local_transform": local_transform}
    check_wrapping(wrapping)
    options = ReadOptions(
        kind=kind, fields=fields, sample_dim=sample_dim, steps=steps, gaps=gaps, isel=isel, sel=sel, patch=patch,
        decode=decode, dtype=numpy_dtype(dtype), coords=coords, destagger=destagger,
        subsample=subsample, subsample_block=subsample_block, subsample_seed=subsample_seed,
        positions=positions, time=time, window=window, every=every, where=where,
        shard=shard, bounds=bounds, weights=weights, align=align,
        cut_like=cut_of(cut_like), halo=halo, ghosts=ghosts, edges=edges, periodic=periodic,
        allow_missing=allow_missing, allow_external=allow_external, num_threads=num_threads, cache_bytes=cache_bytes,
        pool_bytes=pool_bytes, cache_dir=cache_dir, cache_disk_bytes=cache_disk_bytes,
    )  # fmt: skip
    if mesh is None and (halo or shard):
        given = f"halo={halo!r}" if halo else f"shard={shard}"
        raise ConfigError(f"{given} needs a mesh: pass scidata.init_mesh(), which also works in a single process")
    if isinstance(path, str) and is_store(path):
        if time is not None:
            return open_points(path, mesh, options, dp=dp, **wrapping)
        options.refuse(*ONLY_POINTS, why="means nothing for a store, but for raw points")
        return open_store(path, mesh, options, dp=dp, **wrapping)
    options.refuse("cache_bytes", why="means nothing for grids and raw points, which have no edges or cells to keep")
    raw, first = kind_of_raw(path, options)
    if raw == "points":
        return open_points(path, mesh, options, dp=dp, **wrapping)
    options.refuse(*ONLY_POINTS, "edges", why="means nothing for a grid, but for points (kind='points')")
    return open_grid(path, first, mesh, options, dp=dp, **wrapping)


def _of_xarray(
    lazy: Lazy, fields: Sequence[str] | str | None, isel: Crop | None, decode: bool | str
) -> tuple[str, Sequence[str] | str, Crop, bool | str]:
    """Return path, fields, isel and decode of an xarray object, merged with the user's arguments."""
    if isel and lazy.isel:
        raise ConfigError(
            f"isel={isel!r}: the object of xarray is cropped already, of {', '.join(lazy.isel)}; do it once"
        )
    check_known("the object of xarray has no field", names_of("fields", fields or ()), lazy.fields)
    return lazy.path, lazy.fields if fields is None else fields, isel or lazy.isel, decode if lazy.decodes else False


def _located(path: Paths, options: Mapping[str, object] | None) -> str | tuple[str, ...]:
    if isinstance(path, str | os.PathLike):
        return url_of(os.path.expanduser(os.fspath(path)), options)
    check_paths(path)
    assert isinstance(path, Iterable)
    return tuple(url_of(os.path.expanduser(os.fspath(item)), options) for item in path)
