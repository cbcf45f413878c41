"""Samples of data sets: the named fields of one sample, or of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

import numpy as np
import torch

from scidata.core.checks import check_int, check_mapping
from scidata.core.html import card, sizes
from scidata.core.sample_source import SampleSource
from scidata.core.types import Array
from scidata.data.channels import Channels, Steps, TensorT, channels_of, take
from scidata.data.field_dims import dims_of_made
from scidata.errors import ConfigError, UnknownNameError, near_matches

#: A number for each row of a dim, sharded as the fields are; times as NumPy has them.
Coordinate: TypeAlias = torch.Tensor | Array


class _Coords(dict[str, Coordinate]):
    """Coordinates by dim; the error for an unknown dim suggests similar names."""

    def __missing__(self, dim: str) -> Coordinate:
        raise UnknownNameError(f"the sample has no coordinate {dim!r}{near_matches(dim, self)}")


class Origin(Protocol):
    """The interface between a sample and its data set."""

    has_coords: bool

    def space_coords(self, device: torch.device) -> dict[str, Coordinate]:
        """Return the coordinates shared by all samples, by dim."""

    def own_coords(self, index: int, step: int | None = None) -> dict[str, Array]:
        """Return the coordinates of one sample, or of one of its steps, by dim, as NumPy arrays."""

    def attributes(self, name: str) -> Mapping[str, object]:
        """Return the source's attributes of a field or a coordinate."""

    def steps_of(self, name: str) -> tuple[str | None, tuple[int, ...]]:
        """Return the step dim and the steps of a field in each sample: none for static fields, all for unknown ones."""

    def sources_of(self, index: int, step: int | None = None) -> tuple[SampleSource, ...]:
        """Return the sources of all steps of a sample, or of one."""


def call_transform(transform: Callable[[Any], Any] | None, sample: Any) -> Any:
    """Apply a data set's transform to a sample, or a joined one; an error names the transform's origin."""
    if transform is None:
        return sample
    try:
        return transform(sample)
    except Exception as e:
        e.add_note(f"in the transform of sample {sample.index}, {', '.join(map(str, sample.source))}")
        raise


class Sample(Mapping[str, TensorT]):
    """Fields by name, with their dims.

    To type checkers a ``Sample[ShardTensor]`` is one of a data set opened with a mesh, and may be passed where
    ``Sample`` is asked for.

    Parameters
    ----------
    fields : Mapping[str, Tensor]
        A ShardTensor for each field (a plain tensor where the data set has no mesh).
    dims : Mapping[str, tuple[str, ...]]
        Names of each field's dimensions; a batch has ``"batch"`` first.
    index : int or list[int] or None
        The sample's number in the data set; a list of them for a batch.
    origin : Origin or None, optional
        The data set, which knows its coordinates and files.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> sample = scidata.open_dataset("era5.zarr", fields=["u", "v"])[1]
    >>> sample["u"].shape, sample.dims["u"], sample.index
    (torch.Size([3, 7, 8]), ('level', 'latitude', 'longitude'), 1)
    >>> faster = sample.replace({"speed": (sample["u"] ** 2 + sample["v"] ** 2).sqrt()})
    >>> list(faster), faster.dims["speed"]
    (['u', 'v', 'speed'], ('level', 'latitude', 'longitude'))
    """

    def __init__(
        self,
        fields: Mapping[str, TensorT],
        *,
        dims: Mapping[str, tuple[str, ...]],
        index: int | list[int] | None,
        origin: Origin | None = None,
    ) -> None:
        self._fields = dict(fields)
        self.dims = dict(dims)
        self.index = index
        members = index if isinstance(index, list) else [] if index is None else [index]
        # each sample's data set, its number there (which differs in a union of data sets),
        # and the remaining step, if one was selected
        self.members: list[tuple[Origin, int, int | None]] = (
            [] if origin is None else [(origin, i, None) for i in members]
        )
        self._draws = (0, 0)
        self._generator: torch.Generator | None = None

    if not TYPE_CHECKING:  # hidden from type checkers, so that they report unknown attributes

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError that points to ``sample[name]``."""
            if name in self.__dict__.get("_fields", ()):
                raise AttributeError(f"{name!r} is a field, and fields of a sample are its keys: sample[{name!r}]")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def generator(self) -> torch.Generator:
        """Random numbers for a transform: on the CPU, a function of seed, epoch and index of the sample alone.

        So ranks that share a sample draw the same, if their draws do not depend on their part: an angle, an
        offset, a flip. Seed and epoch are those of the loader's sampler (:meth:`scidata.DataLoader.set_epoch`), 0
        outside of a loader. A sample made from it, by :meth:`replace` or :meth:`to`, goes on with it.
        """
        if self._generator is None:
            index = self.index if isinstance(self.index, int) else 0
            words = [word for number in (*self._draws, index) for word in (number % 2**32, number // 2**32 % 2**32)]
            state = np.random.SeedSequence(words).generate_state(1, np.uint64)
            self._generator = torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))
        return self._generator

    def seed_generator(self, seed: int, epoch: int) -> None:
        """Set the seed and epoch of :attr:`generator`; for loaders."""
        self._draws, self._generator = (seed, epoch), None

    def _with(self, **changed: object) -> Self:
        """Return a copy with some attributes changed, which continues this sample's random stream."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__ | {"dims": dict(self.dims)} | changed)
        if isinstance(self.index, int):
            made._generator = self.generator
        else:
            made.seed_generator(0, 0)
        return made

    @property
    def source(self) -> tuple[SampleSource, ...]:
        """Sources of the values: file, row and time of each step; in a batch, sample after sample.

        The files of a sample that a data set has read, whatever was done to it since; ``()`` of one made by hand.

        Examples
        --------
        >>> print(sample.source[0])
        era5.zarr[1] 2020-01-01T06:00:00
        """
        return tuple([source for origin, index, step in self.members for source in origin.sources_of(index, step)])

    def __getitem__(self, name: str) -> TensorT:
        try:
            return self._fields[name]
        except KeyError:
            raise UnknownNameError(f"the sample has no field {name!r}{near_matches(name, self._fields)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    @property
    def coords(self) -> dict[str, Coordinate]:
        """The coordinates of grids, by dim, if the data set was opened with ``coords=True``.

        Numbers are tensors ``(rows,)`` on the fields' device, of a sharded dim a ShardTensor with the fields' bounds
        and halo. Times are NumPy's ``datetime64`` (objects of cftime in other calendars). Those of the sample's own
        dims have its steps: ``()`` for one, ``(steps,)`` for several, after ``(batch,)`` in a batch. Where fields have
        other steps, ``coords["time"]`` has those of any of them, ascending, and ``coords["u_time"]`` those of ``u``.

        Raises
        ------
        ConfigError
            It was opened without, or is not a sample of a grid.
        UnknownNameError
            It has no coordinate of that name; near matches are named.
        """
        if not self.members or not self.members[0][0].has_coords:
            raise ConfigError(
                "this sample has no coordinates: open the data set with coords=True; only those of grids have some"
            )
        return _Coords(self._coords(next(iter(self.values())).device))

    def _coords(self, device: torch.device) -> dict[str, Coordinate]:
        if not self.members:
            return {}
        own = [origin.own_coords(index, step) for origin, index, step in self.members]
        dims = [dim for dim in own[0] if all(dim in each for each in own)]
        found: dict[str, Coordinate] = self.members[0][0].space_coords(device)
        for dim in dims:
            values = np.stack([each[dim] for each in own]) if isinstance(self.index, list) else own[0][dim]
            found[dim] = torch.from_numpy(values).to(device) if values.dtype.kind in "iuf" else values
        placed = getattr(self.members[0][0], "placed_coords", None)  # of patches
        if placed is not None:
            found |= placed(device, [origin for origin, *_ in self.members], batched=isinstance(self.index, list))
        return found

    def channels(
        self,
        fields: Sequence[str] | str | None = None,
        *,
        dims: Sequence[str] | None = None,
        steps: Steps | None = None,
    ) -> Channels:
        """Lay out fields of different rank (surface fields, levels, steps) as channels of one tensor.

        Parameters
        ----------
        fields : Sequence[str] or str or None, optional
            Those to stack, in this order; default all.
        dims : Sequence[str] or None, optional
            The dims that all of them end with, and keep; default the last two that all have, but for time, or the last
            one where that numbers cells. All others become channels.
        steps : int or Sequence[int] or Mapping or None, optional
            Steps to take, as of :meth:`stack`; default all.

        Raises
        ------
        UnknownNameError, ConfigError
            No such field or step; fields that do not all end with the dims to keep.

        Examples
        --------
        >>> sample.channels().names[0]
        'u[level=1000]'
        """
        batch = {name: int(own[:1] == ("batch",)) for name, own in self.dims.items()}
        labels = getattr(self.members[0][0], "labels_of", None) if self.members else None
        if steps is not None and not self.members:
            raise ConfigError("steps: the sample was not read from a data set, which says which rows are which step")
        return channels_of(
            {name: own[batch[name] :] for name, own in self.dims.items()},
            {name: tuple(tensor.shape)[batch[name] :] for name, tensor in self.items()},
            fields,
            dims,
            labels or (lambda name, dim: None),
            steps,
            *(origin.steps_of for origin, *_ in self.members[:1]),
        )

    def stack(
        self,
        fields: Sequence[str] | str | None = None,
        *,
        dims: Sequence[str] | None = None,
        steps: Steps | None = None,
    ) -> TensorT:
        """Return fields of different rank as channels of one tensor, ``(channel, lat, lon)`` after any batch dim.

        Call :meth:`channels` with the same arguments to know which channel is which field, and to take the tensor apart
        again. ShardTensors give a ShardTensor with the halo that was read; no communication.

        Parameters
        ----------
        fields : Sequence[str] or str or None, optional
            Fields to stack, in this order; default all.
        dims : Sequence[str] or None, optional
            Dims that all of them end with, and keep; default as of :meth:`channels`.
        steps : int or Sequence[int] or Mapping or None, optional
            Steps to take, by their offsets, of fields that have several: ``(-1, 0)`` for an input, ``(1,)`` or ``1``,
            without a dim of steps, for a target; or by field, ``{"solar": (0, 1), "*": 0}``. Default all.

        Raises
        ------
        UnknownNameError, ConfigError
            As of :meth:`channels`.

        Examples
        --------
        >>> from scidata.testing import make_grid
        >>> _ = make_grid("steps.zarr", num_times=4, num_lat=7, num_lon=8)
        >>> ds = scidata.open_dataset("steps.zarr", fields=["t", "u"], steps={"u": (-1, 0)}, isel={"level": 2})
        >>> x = ds[1].stack()  # of t (latitude, longitude) and u (time, latitude, longitude)
        >>> tuple(x.shape), ds.channels().names
        ((3, 7, 8), ('t', 'u[time=-1]', 'u[time=0]'))
        >>> ds[1].channels("u", steps=-1).names, bool((ds[1].stack("u", steps=-1)[0] == ds[1]["u"][0]).all())
        (('u',), True)
        """
        return self.channels(fields, dims=dims, steps=steps).stack(self)

    def shown_dims(self) -> Mapping[str, tuple[str, ...]]:
        """Return the dim names that mean the same in all fields."""
        return self.dims

    def to_xarray(self) -> Any:
        """Return the owned rows as an ``xarray.Dataset`` on the host; grids have coordinates and attributes.

        Halos and ghosts are left behind, so that the parts of all ranks, put together, are the sample.

        Raises
        ------
        MissingDependencyError
            xarray is not installed.

        Examples
        --------
        >>> sample.to_xarray()["u"].dims
        ('level', 'latitude', 'longitude')
        """
        from scidata.interop.xarray import dataset_of

        coords = self._coords(torch.device("cpu"))
        names = (*self, *coords) if self.members else ()
        return dataset_of(
            self._fields, self.shown_dims(), coords, {name: self.members[0][0].attributes(name) for name in names}
        )

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return a sample whose fields were passed through ``Tensor.to`` with these arguments.

        Parameters
        ----------
        *args : Any
            Arguments of ``torch.Tensor.to``.
        **kwargs : Any
            Arguments of ``torch.Tensor.to``.

        Examples
        --------
        >>> sample.to(torch.float64)["u"].dtype
        torch.float64
        """
        return self.replace({name: tensor.to(*args, **kwargs) for name, tensor in self.items()})

    def step(self, k: int) -> Self:
        """Return one step of a sample or of a batch: fields without the step dim; their halo is kept.

        Coordinates and :attr:`source` are those of that step. Fields without steps (static ones, a model's results)
        stay; fields with other steps are dropped.

        Parameters
        ----------
        k : int
            The offset, one of ``steps=`` of :func:`scidata.open_dataset`: -1 is the time before.

        Raises
        ------
        ConfigError
            No field has it; or the sample was made by hand, or has other steps than were read.

        Examples
        --------
        >>> sample = scidata.open_dataset("era5.zarr", fields=["u"], steps=(0, 1), coords=True)[1]
        >>> later = sample.step(1)
        >>> later.dims["u"], bool((later["u"] == sample["u"][1]).all()), later.coords["time"]
        (('level', 'latitude', 'longitude'), True, array('2020-01-01T12:00:00.000000000', dtype='datetime64[ns]'))
        """
        k = check_int("step: k", k)
        if not self.members:
            raise ConfigError(
                "step: the sample was not read from a data set, whose steps= say which rows are which step"
            )
        origin, _, left = self.members[0]
        picked: dict[str, tuple[int, int] | None] = {}  # axis and row
        known = origin.steps_of("")[1] if left is None else (left,)
        if k not in known:
            raise ConfigError(f"step: the sample has no step {k}, but {', '.join(map(str, known))}")
        for name, tensor in self.items():
            dim, steps = origin.steps_of(name)
            axis = self._axis_of(name, dim) if steps else None
            if axis is not None and tensor.shape[axis] != len(steps):
                raise ConfigError(f"step: field {name!r} has {tensor.shape[axis]} rows of {dim!r}, not steps {steps}")
            if k in steps or (axis is None and len(steps) != 1):
                picked[name] = None if axis is None else (axis, steps.index(k))
        return self._picked(k, picked)

    def _axis_of(self, name: str, dim: str | None) -> int | None:
        return self.dims[name].index(dim) if dim in self.dims[name] else None

    def replace(self, fields: Mapping[str, torch.Tensor], *, dims: Mapping[str, Sequence[str]] | None = None) -> Self:
        """Return a sample with these fields added or replaced.

        For transforms: ``lambda s: s.replace({"speed": (s["u"] ** 2 + s["v"] ** 2).sqrt()})``. A field has the dims of
        the old one of its name, or of one of the same shape, or those of them that its sizes leave no doubt of, such as
        a model's result for one step.

        Parameters
        ----------
        fields : Mapping[str, Tensor]
            Tensors by name.
        dims : Mapping[str, Sequence[str]] or None, optional
            Names of dims, of fields whose sizes do not tell; without, these are ``dim_0``, ``dim_1``, ….

        Raises
        ------
        ConfigError, UnknownNameError
            A field that is no tensor; dims that do not fit, or of another field.

        Examples
        --------
        >>> list(sample.replace({"w": 2 * sample["u"]}))
        ['u', 'v', 'w']
        >>> sample.replace({"mean": sample["u"].mean(0)}).dims["mean"]
        ('latitude', 'longitude')
        >>> sample.replace({"ranks": torch.ones(3, 5)}, dims={"ranks": ("level", "rank")}).dims["ranks"]
        ('level', 'rank')
        """
        check_mapping("fields", fields, "{'speed': tensor}")
        for name, tensor in fields.items():
            if not isinstance(tensor, torch.Tensor):
                raise ConfigError(f"replace: field {name!r} is a {type(tensor).__name__}, and must be a tensor")
        merged: dict[str, torch.Tensor] = {**self._fields, **fields}
        old = {name: (self.dims[name], tuple(tensor.shape)) for name, tensor in self._fields.items()}
        return self._with(_fields=merged, dims=self.dims | dims_of_made(fields, old, dims))

    def _picked(self, k: int, picked: Mapping[str, tuple[int, int] | None]) -> Self:
        """Return step ``k`` with these fields, each reduced to one row of an axis if one is given."""
        fields, dims = {}, {}
        for name, at in picked.items():
            fields[name] = self[name] if at is None else take(self[name], *at)
            dims[name] = tuple([dim for axis, dim in enumerate(self.dims[name]) if at is None or axis != at[0]])
        members = [(origin, index, k) for origin, index, _ in self.members]
        return self._with(_fields=fields, dims=dims, members=members)

    def map_fields(self, functions: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]) -> Self:
        """Return a sample with elementwise functions applied to some fields.

        Parameters
        ----------
        functions : Mapping[str, Callable[[Tensor], Tensor]]
            By field: a function of a tensor that keeps its shape.

        Examples
        --------
        >>> bool((sample.map_fields({"u": torch.neg})["u"] == -sample["u"]).all())
        True
        """
        return self.replace({name: function(self[name]) for name, function in functions.items()})

    def _repr_html_(self) -> str:
        local = [getattr(tensor, "to_local", lambda t=tensor: t)() for tensor in self.values()]
        columns = ("field", "dims", "dtype", "device", "this rank's part")
        rows = [
            (name, sizes(self.dims[name], x.shape), str(x.dtype).removeprefix("torch."), x.device, tuple(part.shape))
            for (name, x), part in zip(self.items(), local, strict=True)
        ]
        return card(type(self).__name__, {"index": self.index} | self._facts(), columns, rows)

    def _facts(self) -> dict[str, object]:
        return {}

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{name} ({', '.join(f'{d}: {n}' for d, n in zip(self.dims[name], tensor.shape, strict=True))}) "
            f"{str(tensor.dtype).removeprefix('torch.')}"
            for name, tensor in self.items()
        )
        return f"{type(self).__name__}(index={self.index}, {fields})"
