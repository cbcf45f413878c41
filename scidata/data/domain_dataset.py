"""``DomainDataset``: common base of data sets of all kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset, get_worker_info

from scidata.core.checks import as_index, names_of, sample_number
from scidata.core.html import card, sizes
from scidata.core.keywords import checked_keywords
from scidata.core.sample_source import SampleSource
from scidata.core.types import Array, IntArray
from scidata.data.keys import as_keys
from scidata.data.local_fields import LocalTransform
from scidata.data.sample import Coordinate, Sample, call_transform
from scidata.data.scaling import Scale, scales_of
from scidata.data.statistics_table import Statistics
from scidata.device_mesh import domain_mesh
from scidata.errors import ConfigError
from scidata.plan.totals import ReadPlan
from scidata.shard.comm.indexed import note

if TYPE_CHECKING:
    from scidata.grids.reader import GridReader
    from scidata.store.raw_points.reader import PointsReader
    from scidata.store.reading.reader import StoreReader


#: Plans and reads any rank's part of any sample of some kind of data, without torch and communication.
ReaderT = TypeVar("ReaderT", bound="GridReader | StoreReader | PointsReader")
SampleT = TypeVar("SampleT", bound=Sample[Any], covariant=True)
SampleInT = TypeVar("SampleInT", bound=Sample[Any])


class DomainDataset(Dataset[SampleT], ABC, Generic[ReaderT, SampleT]):
    """Samples of which this rank reads its part; subclasses add how a kind of data is read and wrapped.

    Indexing never communicates, although all ranks of a domain are meant to index alike. Pickles as paths and options
    and reopens its files lazily. In a worker process, which has no process group, a sample is the part that
    ``read_local`` returns, and ``assemble`` wraps it in the parent.

    Attributes
    ----------
    mesh : DeviceMesh or None
        As given; None in a worker process.
    dp_axis : str or None
        Name of the data-parallel axis, None if the mesh has none.
    transform
        Called with each sample.
    local_transform
        Called with each part that is read.
    has_coords
        Whether samples show their coordinates.
    """

    _cached: tuple[str, ...] = ()  # attributes that copies and pickles make anew

    def __init__(
        self,
        reader: ReaderT,
        mesh: DeviceMesh | None,
        axes: Sequence[str],
        *,
        dp_axis: str | None,
        dtype: torch.dtype | None,
        transform: Callable[[Any], Any] | None,
        local_transform: LocalTransform | None = None,
        has_coords: bool = False,
    ) -> None:
        self.reader = reader
        self.mesh = mesh
        self.dp_axis = dp_axis
        self.transform = transform
        self.local_transform = local_transform
        self.has_coords = has_coords
        self._dtype = dtype
        self._scales: Mapping[str, Scale] = {}
        self._unscaled: tuple[str | None, ...] = ()  # fields that say where and when a row is
        self._normalised: tuple[Statistics, str | Sequence[str] | None, str] | None = None
        self._local_scales: Mapping[str, Scale] = {}
        self._detached = False
        self._coordinate: dict[str, int] = {}
        self._rank, self._domain = 0, None
        if mesh is not None and axes:
            self._coordinate = {axis: mesh.get_local_rank(axis) for axis in axes}
            self._domain = domain_mesh(mesh, axes)
            self._rank = int(np.ravel_multi_index(tuple(self._coordinate.values()), self._domain.shape))

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields."""
        return self.reader.fields

    @property
    def rank(self) -> int:
        """Coordinates of this rank in its domain, the ``rank`` of :meth:`plan`."""
        return self._rank

    @property
    def domain_axes(self) -> tuple[str, ...]:
        """Names of the mesh's axes whose ranks hold parts of a sample."""
        return tuple(self._coordinate)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of floating fields; None: as stored, or as decoded."""
        return self._dtype

    @property
    def detached(self) -> bool:
        """Whether this is a copy without a mesh in a worker process."""
        return self._detached

    @property
    def fingerprint(self) -> str:
        """Digest of fields, shapes and steps; for stores also of values."""
        return self.reader.fingerprint()

    def dims(self, name: str) -> tuple[str, ...]:
        """Return the dimensions of a field of one sample.

        Parameters
        ----------
        name : str
            A field.

        Examples
        --------
        >>> from scidata.testing import make_grid
        >>> _ = make_grid("era5.zarr")
        >>> scidata.open_dataset("era5.zarr").dims("u")
        ('level', 'latitude', 'longitude')
        """
        return self.reader.dims(name)

    def sample_keys(self, on: str) -> npt.NDArray[Any]:
        """Return each sample's value of a key (its time, for example), ``(len(self),)``. Reads no fields.

        Of grids the label along a dimension that numbers samples, or another array on those dimensions alone, at the
        step 0 (where ``steps`` has none, at its first); of stores a value of the whole sample, or its ``"name"``; of
        windows of a table their begin, as ``"time"`` or by the column's name.

        Parameters
        ----------
        on : str
            The name.

        Returns
        -------
        ndarray
            Times are ``datetime64[ns]`` where that has them, else objects of cftime; others are numbers, or text.

        Raises
        ------
        ConfigError
            There is no such name; those that there are, are listed.

        Examples
        --------
        >>> scidata.open_dataset("era5.zarr").sample_keys("time")[:2]
        array(['2020-01-01T00:00:00.000000000', '2020-01-01T06:00:00.000000000'],
              dtype='datetime64[ns]')
        """
        return as_keys(self.reader.sample_keys(on))

    def __len__(self) -> int:
        return self.reader.num_samples

    def steps_of(self, name: str) -> tuple[str | None, tuple[int, ...]]:
        """Return the step dim and the steps of a field in each sample: none for static fields, all for unknown ones."""
        return self.reader.steps_of(name)

    def sources_of(self, index: int, step: int | None = None) -> tuple[SampleSource, ...]:
        """Return the source of each step of a sample: see :attr:`Sample.source`."""
        return self.reader.sources_of(index, step)

    def space_coords(self, device: torch.device) -> dict[str, Coordinate]:
        """Return the coordinates shared by all samples, by dim: see :attr:`Sample.coords`. Grids only."""
        return {}

    def own_coords(self, index: int, step: int | None = None) -> dict[str, Array]:
        """Return the coordinates of one sample, or of one of its steps, by dim."""
        return {}

    @abstractmethod
    def attributes(self, name: str) -> dict[str, object]:
        """Return the source's attributes of a field or coordinate; empty if there is no such array.

        Parameters
        ----------
        name : str
            A field, or of grids a coordinate.
        """

    def _repr_html_(self) -> str:
        mesh = None if self.mesh is None else sizes(self.mesh.mesh_dim_names or (), self.mesh.shape)
        facts = {"samples": len(self), "mesh": mesh, "transform": getattr(self.transform, "__name__", self.transform)}
        title, more, columns, rows = self._described()
        return card(title, {**more, **facts}, columns, rows)

    @abstractmethod
    def _described(self) -> tuple[str, Mapping[str, object], Sequence[str], Sequence[Sequence[object]]]:
        """Return title, facts by name, and columns and rows of the table of fields for a notebook."""

    @checked_keywords
    def plan(self, index: int, rank: int | None = None) -> ReadPlan:
        """Plan the reads of one rank of the domain, default this one, for a sample.

        Parameters
        ----------
        index : int
            The sample.
        rank : int or None, optional
            A rank of the domain; default this one.

        Examples
        --------
        >>> scidata.open_dataset("era5.zarr").plan(0).bytes_wanted > 0
        True
        """
        return self._plan(as_index(index), self.rank if rank is None else rank)

    def _plan(self, index: int, rank: int) -> ReadPlan:
        return self.reader.plan(index, rank)

    @checked_keywords
    def plot(
        self,
        index: int = 0,
        field: str | None = None,
        *,
        isel: Mapping[str, int] | None = None,
        parts: bool = True,
        path: str | None = None,
    ) -> Any:
        """Draw a field of one sample as stored, before transforms, with the borders between the ranks' parts.

        Reads the whole sample on the rank that calls it, without communication. Of a grid a plane is drawn; with
        cartopy installed, longitudes and latitudes as a map. Cells of flat meshes are filled; of solid ones the surface
        is, with the octant nearest the viewer cut away. Needs matplotlib (extra ``plot``).

        Parameters
        ----------
        index : int, default 0
            The sample.
        field : str or None, optional
            Its name; default that of most dimensions in grids, else the first one of nodes, points or cells. The first
            component is drawn.
        isel : Mapping[str, int] or None, optional
            Grids: rows of dimensions that are not drawn, default the first: ``{"level": 3}``.
        parts : bool, default True
            Also draw the ranks' parts.
        path : str or None, optional
            A file to write; its suffix is the format.

        Returns
        -------
        matplotlib.figure.Figure
            A notebook shows it; ``figure.axes[0]`` has the field.

        Raises
        ------
        MissingDependencyError
            matplotlib is not installed.
        UnknownNameError, ConfigError, IndexError
            No such field, dimension, row or sample; a field of edges, no positions, rows drawn anew in each epoch.
        """
        return self._draw(sample_number(index, len(self)), field, isel or {}, parts, path)

    @abstractmethod
    def _draw(
        self, index: int, field: str | None, isel: Mapping[str, int] | None, parts: bool, path: str | None
    ) -> Any:
        """Draw a field."""

    @abstractmethod
    def read_local(self, index: int) -> Any:
        """Read this rank's part. Thread-safe, no collectives."""

    @abstractmethod
    def assemble(self, local: Any, *, index: int | None = None) -> SampleT:
        """Wrap this rank's part of a sample, the result of :meth:`read_local`. No communication."""

    def __getitem__(self, index: int) -> SampleT:
        index = as_index(index)
        local = self.read_local(index)
        if self._detached or (self.mesh is not None and get_worker_info() is not None):
            return self._of_worker(local, index % len(self))  # no process group here
        self._note(index % len(self))
        return call_transform(self.transform, self.assemble(local, index=index % len(self)))

    def _of_worker(self, local: Any, index: int) -> Any:
        """Return a worker's item, which :meth:`assemble` wraps in the parent process."""
        return local

    def _note(self, *indices: int) -> None:
        """Note the sample, so that the next collective checks that the ranks of its domain have the same one."""
        if self._domain is not None:
            for index in indices:
                note(f"sample {index} of {len(self)}", self._domain.get_all_groups())

    # -- normalising ---------------------------------------------------------------------------------------------

    @checked_keywords
    def normalise(
        self, stats: Statistics, *, fields: str | Sequence[str] | None = None, method: str = "mean_std"
    ) -> Self:
        """Return a data set whose samples are ``(x - mean) / std``, in the same dtypes.

        Values are normalised where they are read, halo and ghosts included, before ``local_transform`` and
        ``transform``. Decoded chunks that are kept, in memory or in ``cache_dir``, stay as they are and serve both.

        Parameters
        ----------
        stats
            From :func:`scidata.statistics`, or ``Statistics.load(path)``: of other periods, files or ranks if need be,
            and of other fields besides. Figures by level go by the labels of the levels, in any order.
        fields
            Those to be normalised; default all floating ones but ``pos`` and times of rows. Integers stay as they are.
        method
            ``"mean_std"``; ``"min_max"``, ``(x - min) / (max - min)``; or ``"std"``, ``x / std``.

        Raises
        ------
        UnknownNameError, FieldMismatchError
            There are no statistics of a field, or of one of its levels; or they are in other units.
        ConfigError
            A deviation of 0: a field, or a level, of one value everywhere; or an integer field.

        Examples
        --------
        >>> from scidata.testing import make_grid
        >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
        >>> ds = scidata.open_dataset("era5.zarr", fields=["u"])
        >>> normal = ds.normalise(scidata.statistics(ds, by="level"))
        >>> u = torch.stack([normal[i]["u"] for i in range(4)])
        >>> u.dtype, bool((u.mean(dim=(0, 2, 3)).abs() < 1e-5).all()), round(float(u[:, 0].std(correction=0)), 5)
        (torch.float32, True, 1.0)
        >>> torch.allclose(normal.denormalise(normal[2])["u"], ds[2]["u"], atol=1e-5)
        True
        """
        if self._scales:
            raise ConfigError("normalise: the data set is normalised already; normalise the one that it was made of")
        none = np.empty(0, np.int64)
        passes = {name: self.reader.field_pass(name, none, self._rank) for name in self.fields}
        made = object.__new__(type(self))
        made.__dict__.update({name: value for name, value in self.__dict__.items() if name not in self._cached})
        if fields is None:
            fields = [name for name in self.fields if passes[name].dtype.kind == "f" and name not in self._unscaled]
        found = scales_of({name: self.dims(name) for name in self.fields}, passes, stats, fields, method)
        made._normalised = stats, fields, method
        made._scales, made._local_scales = found, {n: scale.local(self._local_rows(n)) for n, scale in found.items()}
        return made

    @checked_keywords
    def view(
        self,
        *,
        fields: str | Sequence[str] | None = None,
        steps: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> Self:
        """Return a data set of the same open files with other fields or steps, such as the initial state, forcings or
        targets of a forecast.

        It is cut and normalised like this data set: all fields, or the ones given to ``normalise``. It has none of the
        transforms. No file is opened.

        Parameters
        ----------
        fields, steps : as of :func:`scidata.open_dataset`
            Default those of this data set.
        transform : Callable[[Sample], Any] or None, optional
            Called with each sample.

        Raises
        ------
        ConfigError
            The samples are not of grids, nor of a store; or fields and steps that do not fit.

        Examples
        --------
        >>> pairs = scidata.open_dataset("era5.zarr", fields=["u"], steps=(0, 1))
        >>> each = pairs.view(steps=(0,))
        >>> len(pairs), len(each), bool((pairs[2].step(1)["u"] == each[3]["u"]).all())
        (3, 4, True)
        """
        given = {name: value for name, value in (("fields", fields), ("steps", steps)) if value is not None}
        view: Callable[..., ReaderT] | None = getattr(self.reader, "view", None)
        if view is None:
            raise ConfigError("view: raw points are opened anew; of grids and stores alone there are views")
        made = type(self)(
            view(**given), self.mesh, self.domain_axes, dp_axis=self.dp_axis, dtype=self._dtype, transform=transform,
            has_coords=self.has_coords,
        )  # fmt: skip
        if self._normalised is None:
            return made
        stats, names, method = self._normalised
        chosen = None if names is None else [name for name in names_of("fields", names) if name in made.fields]
        return made.normalise(stats, fields=chosen, method=method)

    @property
    def normalising(self) -> Mapping[str, Scale]:
        """Offset and scale of each normalised field, subtracted and divided by: arrays that broadcast to it."""
        return dict(self._scales)

    @overload
    def denormalise(self, sample: SampleInT) -> SampleInT: ...

    @overload
    def denormalise(self, sample: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]: ...

    def denormalise(self, sample: Any) -> Any:
        """Return a sample, a batch, or tensors by field (a model's output), in the units that :meth:`normalise` left.

        ``x * std + mean``, differentiable; of ShardTensors on the parts that ranks have, halo included, without
        communication. Tensors have the field's dims, or others, of a batch say, before them; steps may be fewer, and
        of one the dim may lack. Fields that are not normalised stay as they are.

        Raises
        ------
        ConfigError
            Nothing of this data set is normalised, or a tensor has fewer dims than its field.
        """
        if not self._scales:
            raise ConfigError("denormalise: this data set is not normalised; ask the one that normalise() returned")
        scales = {name: scale for name, scale in self._scales.items() if name in sample}
        if isinstance(sample, Sample):
            return sample.map_fields({n: partial(s.inverse, dims=sample.dims[n]) for n, s in scales.items()})
        dim = self.steps_of("")[0]
        return {name: scales[name].inverse(x, step_dim=dim) if name in scales else x for name, x in sample.items()}

    def _local_rows(self, name: str) -> Mapping[str, IntArray]:
        """Return the range of a field's rows that this rank holds, halo included, along each split dim."""
        return {}

    def _normalise_locally(self, arrays: Mapping[str, Array]) -> None:
        for name, scale in self._local_scales.items():
            if name in arrays:
                scale.apply(arrays[name])

    def _check_attached(self) -> None:
        if self._detached:
            raise ConfigError("assemble() needs the mesh, which a worker process does not have; call it in the parent")

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Cast to a dtype that NumPy lacks."""
        narrow = self._dtype is torch.bfloat16 and tensor.is_floating_point()
        return tensor.to(torch.bfloat16) if narrow else tensor

    def close(self) -> None:
        """End the reading threads and close the files; the next read starts them again."""
        self.reader.close()

    def __getstate__(self) -> dict[str, object]:
        kept = {name: value for name, value in self.__dict__.items() if name not in self._cached}
        return kept | {"mesh": None, "_domain": None, "_detached": self._detached or self.mesh is not None}
