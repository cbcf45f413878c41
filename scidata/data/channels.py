"""Stack fields of different rank (surface fields, levels, steps) as channels of one tensor, and split them again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from typing_extensions import TypeVar  # with defaults, before Python 3.13

from scidata.core.checks import names_of
from scidata.core.keywords import checked_keywords
from scidata.errors import ConfigError, FieldMismatchError, check_known
from scidata.shard import ShardTensor
from scidata.sources.cf import names_time
from scidata.sources.kinds import numbers_cells

#: Of fields: ``ShardTensor`` where the data set has a mesh with a domain, else plain.
TensorT = TypeVar("TensorT", bound=torch.Tensor, covariant=True, default=torch.Tensor)
#: The labels of a field's rows along one of its dims, None where nothing labels them.
LabelsOf: TypeAlias = Callable[[str, str], Sequence[object] | None]
#: The dim of steps, and the offsets that a sample has of a field.
StepsOf: TypeAlias = Callable[[str], tuple[str | None, tuple[int, ...]]]
#: Offsets to take, one of which leaves no dim of steps; by field, of which ``"*"`` are all others.
Steps: TypeAlias = int | Sequence[int] | Mapping[str, int | Sequence[int]]


class NamedFields(Protocol[TensorT]):
    """Fields by name, and the names of their dims: a sample or a batch."""

    @property
    def dims(self) -> Mapping[str, tuple[str, ...]]:
        """Names of each field's dims."""

    def __getitem__(self, name: str, /) -> TensorT:
        """Return a field."""


@dataclass(frozen=True, kw_only=True)
class Channels:
    """Which fields are which channels of a tensor ``(channel, *dims)``, or ``(batch, channel, *dims)``.

    Made by :meth:`Sample.channels` and :meth:`ShardedDataset.channels`. Nothing here communicates: dims that ranks
    split stay as they are, uneven parts included.

    Attributes
    ----------
    dims
        The trailing dims, which fields keep: latitude and longitude, for example.
    slices
        The channels of each field.
    shapes
        The extents of the other dims of each field; its channels go through them, the last dim fastest.
    names
        A name for each channel: the field, with the labels of levels and the offsets of steps, or their numbers.
    picked
        Of fields of which some steps are taken: the dim of steps, how many there are, and the rows; a number drops it.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> ds = scidata.open_dataset("era5.zarr", fields=["u", "t"], steps={"u": (-1, 0)}, isel={"level": slice(2)})
    >>> channels = ds.channels()
    >>> for name in channels.names:
    ...     print(name)
    u[time=-1, level=1000]
    u[time=-1, level=550]
    u[time=0, level=1000]
    u[time=0, level=550]
    t[level=1000]
    t[level=550]
    >>> batch = scidata.collate([ds[0], ds[1]])
    >>> x = channels.stack(batch)
    >>> tuple(x.shape), bool((channels.unstack(x)["u"] == batch["u"]).all())
    ((2, 6, 7, 8), True)
    """

    dims: tuple[str, ...]
    slices: Mapping[str, slice]
    shapes: Mapping[str, tuple[int, ...]]
    names: tuple[str, ...]
    picked: Mapping[str, tuple[str, int, int | tuple[int, ...]]] = field(default_factory=dict)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields, in their order."""
        return tuple(self.slices)

    def __len__(self) -> int:
        return len(self.names)

    def stack(self, sample: NamedFields[TensorT]) -> TensorT:
        """Return the fields of a sample, or of a batch, as channels of one tensor, in the dtype that they promote to.

        ShardTensors give a ShardTensor of the same parts, with the halo that was read unless a field requires grad.

        Parameters
        ----------
        sample : Sample
            Has the fields.

        Raises
        ------
        UnknownNameError, FieldMismatchError
            A field that the sample lacks, or has in another shape.

        Examples
        --------
        >>> tuple(channels.stack(ds[0]).shape)
        (6, 7, 8)
        """
        fields, flat = zip(*[self._flat(sample, name) for name in self.slices], strict=True)
        axis = int(sample.dims[self.fields[0]][:1] == ("batch",))
        halos = [
            {dim - x.ndim: width for dim, width in x.halo.items()} if isinstance(x, ShardTensor) else {} for x in fields
        ]
        inside = all(dim >= -len(self.dims) for dim in halos[0])
        if halos[0] and inside and all(halo == halos[0] for halo in halos) and not any(x.requires_grad for x in fields):
            # other operations would leave the halo behind
            parts = [_flattened(x.local_with_halo(), axis, x.ndim - len(self.dims) - axis) for x in fields]
            spec = flat[0].spec.with_rows(axis, len(self))
            return ShardTensor.from_padded(torch.cat(parts, dim=axis), spec, halos[0])  # type: ignore[return-value]
        return torch.cat(flat, dim=axis)  # type: ignore[return-value]

    def _flat(self, sample: NamedFields[torch.Tensor], name: str) -> tuple[torch.Tensor, torch.Tensor]:
        field: torch.Tensor = sample[name]
        dims = sample.dims[name]
        if name in self.picked:
            dim, num, rows = self.picked[name]
            if dim in dims and field.shape[at := dims.index(dim)] == num:  # unless they are selected already
                field, dims = take(field, at, rows), dims[:at] + dims[at + isinstance(rows, int) :]
        batch = int(dims[:1] == ("batch",))
        lead = tuple(field.shape[batch : field.ndim - len(self.dims)])
        if dims[len(dims) - len(self.dims) :] != self.dims or lead != self.shapes[name]:
            raise FieldMismatchError(
                f"field {name!r} has dims {dims} of {tuple(field.shape)}; the channels are made of "
                f"{self.shapes[name]} and {self.dims}"
            )
        return field, _flattened(field, batch, len(lead))

    def unstack(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split a tensor of these channels, a model's result for one, into fields of their own shapes.

        Parameters
        ----------
        x : Tensor
            ``(channel, *dims)``, or with others before the channels, such as a batch; their extents may differ from
            those of the samples. Of a ShardTensor, ShardTensors of the same parts.

        Raises
        ------
        FieldMismatchError
            It has another number of channels.

        Examples
        --------
        >>> list(channels.unstack(channels.stack(ds[0])))
        ['u', 't']
        """
        axis = x.ndim - len(self.dims) - 1
        if axis < 0 or x.shape[axis] != len(self):
            raise FieldMismatchError(f"unstack: {tuple(x.shape)} does not have {len(self)} channels before {self.dims}")
        found = {}
        for name, rows in self.slices.items():
            part, shape = x.narrow(axis, rows.start, rows.stop - rows.start), self.shapes[name]
            found[name] = part.squeeze(axis) if not shape else part if len(shape) == 1 else part.unflatten(axis, shape)  # type: ignore[no-untyped-call]
        return found


def take(x: torch.Tensor, dim: int, rows: int | Sequence[int]) -> torch.Tensor:
    """Return one row (without its dim) or several rows along an unsharded dim; the halo that was read is kept."""

    def part(x: torch.Tensor) -> torch.Tensor:
        if isinstance(rows, int):
            return x.select(dim, rows)
        is_run = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        return x.narrow(dim, rows[0], len(rows)) if is_run else x.index_select(dim, torch.tensor(rows, device=x.device))

    if not isinstance(x, ShardTensor) or not x.halo or x.requires_grad:
        return part(x)
    drops = isinstance(rows, int)
    spec = x.spec.without({dim}) if isinstance(rows, int) else x.spec.with_rows(dim, len(rows))
    halo = {at - (drops and at > dim): width for at, width in x.halo.items()}
    return ShardTensor.from_padded(part(x.local_with_halo()), spec, halo)


def _flattened(x: torch.Tensor, first: int, num: int) -> torch.Tensor:
    return x.unsqueeze(first) if not num else x if num == 1 else x.flatten(first, first + num - 1)


@checked_keywords
def channels_of(
    dims: Mapping[str, Sequence[str]],
    shapes: Mapping[str, Sequence[int]],
    fields: Sequence[str] | str | None,
    kept: Sequence[str] | None,
    labels: LabelsOf,
    steps: Steps | None = None,
    steps_of: StepsOf = lambda name: (None, ()),
) -> Channels:
    """Lay out fields, default all, as channels of one tensor with the dims and shapes of an unbatched sample.

    They keep the dims ``kept``: default the last two that all have, or the last one where that numbers cells. Raises
    UnknownNameError, ConfigError: no such field; fields that do not all end with the dims to keep.
    """
    chosen = list(dims) if fields is None else names_of("fields", fields)
    check_known("channels: the sample has no field", chosen, dims)
    ends = tuple(kept) if kept is not None else _common_end([tuple(dims[name]) for name in chosen])
    stray = next((name for name in chosen if tuple(dims[name])[len(dims[name]) - len(ends) :] != ends), None)
    if stray is not None or not ends:
        shown = "; ".join(f"{name} ({', '.join(dims[name])})" for name in chosen)
        raise ConfigError(
            f"channels: the fields do not all end with the same dims{f' {ends}' if ends else ''}: {shown}; choose "
            "fields that do with fields=, or say what they keep with dims="
        )
    slices, leads, names = dict[str, slice](), dict[str, tuple[int, ...]](), list[str]()
    picked = {} if steps is None else _picked({name: dims[name] for name in chosen}, steps, steps_of)
    for name in chosen:
        lead = tuple(dims[name])[: len(dims[name]) - len(ends)]
        rows = [labels(name, dim) or range(n) for dim, n in zip(lead, shapes[name], strict=False)]
        if name in picked:
            dim, _, taken = picked[name]
            at = lead.index(dim)
            if isinstance(taken, int):
                del rows[at]
                lead = lead[:at] + lead[at + 1 :]
            else:
                rows[at] = [rows[at][row] for row in taken]
        leads[name] = tuple(map(len, rows))
        slices[name] = slice(len(names), len(names) + math.prod(leads[name]))
        for place in itertools.product(*rows):
            labelled = [f"{label:g}" if isinstance(label, float) else label for label in place]
            said = ", ".join(f"{dim}={label}" for dim, label in zip(lead, labelled, strict=True))
            names.append(f"{name}[{said}]" if said else name)
    return Channels(dims=ends, slices=slices, shapes=leads, names=tuple(names), picked=picked)


def _picked(
    dims: Mapping[str, Sequence[str]], steps: Steps, steps_of: StepsOf
) -> dict[str, tuple[str, int, int | tuple[int, ...]]]:
    """Return the rows of the wanted steps of each field that has several steps."""
    by_field = steps if isinstance(steps, Mapping) else {"*": steps}
    check_known("channels: steps of field", [name for name in by_field if name != "*"], dims)
    picked = {}
    for name in dims:
        (dim, own), wanted = steps_of(name), by_field.get(name, by_field.get("*"))
        if wanted is None:
            continue
        offsets = [wanted] if isinstance(wanted, int) else list(wanted)
        has_dim = dim is not None and dim in dims[name]
        if lacking := [step for step in offsets if step not in own] if has_dim or len(own) == 1 else []:
            raise ConfigError(f"channels: field {name!r} has steps {own}, not {lacking[0]}; give steps= by field")
        if dim is not None and has_dim:
            rows = tuple(map(own.index, offsets))
            picked[name] = dim, len(own), rows[0] if isinstance(wanted, int) else rows
    return picked


def _common_end(dims: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the trailing dims that all fields share: at most two, not the time; one if that dim numbers cells."""
    common: tuple[str, ...] = ()
    for each in zip(*(reversed(own) for own in dims), strict=False):
        if len(set(each)) > 1 or names_time(each[0]):
            break
        common = (each[0], *common)
        if len(common) == 2 or numbers_cells(each[0]):
            break
    return common
