"""Spectra of which few columns are used: other ranks' rows are fetched once the columns are known.

A Fourier layer transforms a field, keeps a few modes, and puts its results for them among zeros. If a field is cut
along its rows, each rank first transforms its own rows along the other dims. Only the columns that are then selected
are exchanged, to be transformed along the rows. In the inverse transform each rank has all the modes and computes its
own rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from scidata.core.bounds import even_sizes
from scidata.shard.comm.collectives import all_gather_v
from scidata.shard.comm.sums import replicate_to_shards
from scidata.shard.op_table import TensorFunction, TorchFunction, unsupported
from scidata.shard.ops.moving import as_sharded, cut_to, moved_off, there_and_back, to_layout
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import has_dual_level, is_transforming, version_of
from scidata.shard.views import Copy

_WHOLE = slice(None)
_MOST = 4  # times a mean part of the spectrum, what each rank holds of its columns on the way back


class Later(ShardTensor):
    """A tensor whose part is computed at its first use, collectively."""

    sample: Tensor  # a tensor of the same dtype and device, which requires grad where this does
    computed: Tensor | None  # this rank's part, None until then

    def __init__(self, spec: ShardSpec, sample: Tensor) -> None:
        self.sample, self.computed = sample, None
        self.seen, self.with_graph, self.is_passed = 0, torch.is_grad_enabled(), False

    @staticmethod
    def __new__(cls, spec: ShardSpec, sample: Tensor, *others: object) -> Later:
        """Wrap a one-element stand-in for the part."""
        return ShardTensor.__new__(cls, _outline(spec, sample), spec)

    @property
    def local(self) -> Tensor:
        """This rank's part. Collective at the first use."""
        self.settle()
        assert self.computed is not None
        return self.computed

    @local.setter
    def local(self, part: Tensor) -> None:
        self.computed = part

    def compute(self) -> Tensor:
        """Compute this rank's part."""
        raise NotImplementedError

    def outline(self) -> Tensor:
        """Return a tensor of the part's shape, dtype and device; of one element until the part is there."""
        return _outline(self.spec, self.sample) if self.computed is None else self.computed

    def facts(self) -> Tensor:
        """Return the sample in place of a missing part."""
        return self.sample

    def version(self) -> int:
        """Return a number that changes with each write; computing the part is no write."""
        if self.sample.is_inference():  # without versions
            return -1
        return 0 if self.computed is None else version_of(self.computed) - self.seen

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of all parts."""
        return self.sample.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where this rank's part lies."""
        return self.sample.device

    @property
    def requires_grad(self) -> bool:
        """Whether the part has a graph."""
        return super().requires_grad if self.computed is not None else self.facts().requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def settle(self) -> None:
        """Compute the part before it is written to. Collective if it is missing."""
        if self.computed is None:
            with self._as_made():
                self.computed = self.sample = self.compute()
            self.seen = version_of(self.computed)

    @contextmanager
    def _as_made(self) -> Iterator[None]:
        """Compute in the grad mode of creation, not of the first use."""
        with torch.inference_mode(self.sample.is_inference()), torch.set_grad_enabled(self.with_graph):
            yield

    def passed(self) -> None:
        """Note that gradients of this tensor's elements may reach its source without it."""
        self.is_passed |= torch.is_grad_enabled() and self.requires_grad

    def refuse_passed(self, func: TorchFunction) -> None:
        """Raise if the requested gradient may be incomplete."""
        if self.is_passed:
            reason = "it was used before all of it was computed, so that its gradient is not known"
            raise unsupported(func, reason, self.spec, remedy="clone() it before it is used")

    def retain_grad(self) -> None:
        """Keep the gradient of a tensor that was not used yet."""
        self.refuse_passed(Tensor.retain_grad)
        super().retain_grad()

    def register_hook(self, hook: Callable[[ShardTensor], Tensor | None]) -> RemovableHandle:
        """Call ``hook`` with the gradient of a tensor that was not used yet."""
        self.refuse_passed(Tensor.register_hook)
        return super().register_hook(hook)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return (
            super().__repr__() if self.computed is not None else f"ShardTensor({self.spec}, computed when it is used)"
        )


def _outline(spec: ShardSpec, sample: Tensor) -> Tensor:
    return sample.new_empty(()).expand(spec.local_shape)


class Spectrum(Later):
    """A field transformed along its unsharded dims, to be transformed along the others later.

    - ``source``: the field, transformed along all dims but these.
    - ``dims``: of the transform that is left.
    - ``transform``: that takes a tensor whose ``dims`` are not sharded.
    """

    def __init__(
        self,
        spec: ShardSpec,
        sample: Tensor,
        source: ShardTensor,
        dims: Sequence[int],
        transform: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(spec, sample)
        self.source, self.dims, self.transform = source, tuple(dims), transform
        self.columns: dict[object, Tensor] = {}  # transformed, by the slices of other dims

    def compute(self) -> Tensor:
        """Transform all of it, and bring it back."""
        self.columns.clear()
        self.source = there_and_back(self.source, self.dims, self.transform)  # the old value is released
        return self.source.local

    def sliced(self, items: Sequence[object]) -> ShardTensor | None:
        """Return slices, sending only their columns; None if all columns are wanted. Collective."""
        slices = tuple(item for item in items if isinstance(item, slice))
        if self.computed is not None or not len(slices) == len(items) == self.ndim:
            return None
        ends = [item.indices(n) for item, n in zip(slices, self.shape, strict=True)]
        if any(start >= stop or step < 1 for start, stop, step in ends):
            return None
        outer = tuple(_WHOLE if d in self.dims else slice(*each) for d, each in enumerate(ends))
        inner = tuple(slice(*each) if d in self.dims else _WHOLE for d, each in enumerate(ends))
        key = tuple(each for d, each in enumerate(ends) if d not in self.dims)
        if key not in self.columns:
            if self.columns or all(each == (0, n, 1) for each, n in zip(ends, self.shape, strict=True)):
                return None  # of others, too: from now on as any tensor
            with self._as_made():
                kept = as_sharded(self.source[outer], self.source.spec)
                self.columns[key] = self.transform(moved_off(kept, self.dims))
        self.passed()
        part = as_sharded(self.columns[key][inner], self.spec)

        def take() -> Tensor:
            return to_layout(as_sharded(self[slices], self.spec), part.spec).local

        def put() -> None:
            self[slices] = ShardTensor(part.local, part.spec)

        return ShardTensor(part.local, part.spec, copied=Copy(self, part.local, take, put))

    def shifted(self, shift: TensorFunction, dims: Sequence[int]) -> Spectrum:
        """Return the spectrum after ``fftshift`` or ``ifftshift`` along some dims."""
        self.passed()
        now, later = [d for d in dims if d not in self.dims], [d for d in dims if d in self.dims]
        source = shift(self.source, now) if now else self.source
        transform = self.transform
        after = (lambda x: shift(transform(x), later)) if later else transform
        assert isinstance(source, ShardTensor)
        return Spectrum(self.spec, self.sample, source, self.dims, after)


class Blank(Later):
    """Zeros in the layout of a spectrum, and the values written to slices of them."""

    def __init__(self, spec: ShardSpec, sample: Tensor) -> None:
        super().__init__(spec, sample)
        self.with_graph = True  # what is written without a graph has none
        self.written: list[tuple[tuple[slice, ...], Tensor]] = []
        self.shifts: list[tuple[TensorFunction, tuple[int, ...]]] = []

    def compute(self) -> Tensor:
        """Write to zeros of the whole layout."""
        whole: Tensor = ShardTensor(self.sample.new_zeros(self.spec.local_shape), self.spec)
        for items, value in self.written:
            whole[items] = value
        for shift, dims in self.shifts:
            whole = shift(whole, dims)
        return as_sharded(whole, self.spec).local

    def facts(self) -> Tensor:
        """Return a written value that has a graph, or the sample."""
        return next((value for _, value in self.written if value.requires_grad), self.sample)

    def write(self, items: Sequence[object], value: object) -> bool:
        """Note values written to slices; return whether that is possible."""
        slices = tuple(item for item in items if isinstance(item, slice))
        if self.computed is not None or self.shifts or not isinstance(value, Tensor):
            return False
        if not len(slices) == len(items) == self.ndim:
            return False
        ends = [item.indices(n) for item, n in zip(slices, self.shape, strict=True)]
        if any(step != 1 for _, _, step in ends) or tuple(value.shape) != tuple(b - a for a, b, _ in ends):
            return False
        self.written.append((tuple(slice(*each) for each in ends), value.to(self.dtype, copy=True)))
        return True

    def shifted(self, shift: TensorFunction, dims: Sequence[int]) -> Blank:
        """Return the blank after ``fftshift`` or ``ifftshift`` along some dims."""
        self.passed()
        new = Blank(self.spec, self.sample)
        new.written, new.shifts = [*self.written], [*self.shifts, (shift, tuple(dims))]
        return new

    def transformed(self, kind: str, sizes: Mapping[int, int], norm: str | None) -> Tensor | None:
        """Transform back along dims, the last one with ``torch.fft.<kind>``; None if another way is better.

        Collective in backward: gradients of what was written are added up.
        """
        *others, last = sizes
        spec, shape = self.spec, list(self.shape)
        stops = [items[last].stop for items, _ in self.written]
        if self.computed is not None or not stops or any(last in dims for _, dims in self.shifts):
            return None
        if last in spec.sharded or not {*spec.sharded} <= {*others} or is_transforming() or has_dual_level():
            return None
        shape[last] = max(1, *stops)
        num_parts = math.prod(spec.axes[axis].size for axis in spec.sharded.values())
        if math.prod(shape) * num_parts > _MOST * math.prod(spec.global_shape):
            return None
        columns = self.sample.new_zeros(shape)
        for items, value in self.written:
            columns[items] = _whole(value, spec)
        for shift, dims in self.shifts:
            columns = shift(columns, dims)
        target = resized(spec, {d: sizes[d] for d in others}).with_rows(last, shape[last])
        for d in sorted(others, key=lambda d: d not in spec.sharded):  # the cut ones first, which leaves fewer rows
            columns = torch.fft.ifft(columns, sizes[d], d, norm)
            if d in spec.sharded:
                start = min(target.offsets[d], sizes[d] - 1)
                columns = columns.narrow(d, start, max(1, target.local_shape[d]))  # kernels take no empty ones
        self.passed()
        transform = getattr(torch.fft, kind)
        result: Tensor = transform(ShardTensor(cut_to(columns, target), target), sizes[last], last, norm)
        return result


def _whole(value: Tensor, spec: ShardSpec) -> Tensor:
    """Return a value whole on each rank, for use with its own rows. Collective if it is sharded."""
    own = as_sharded(value, spec)
    local = own.local
    for axis, dim in enumerate(own.spec.dims):
        if dim is not None:
            grad: Literal["own", "sum"] = "own" if spec.dims[axis] is None else "sum"
            local = all_gather_v(local, own.spec.sizes_of(axis), dim, spec.group(axis), grad=grad)
        elif spec.dims[axis] is not None:
            local = replicate_to_shards(local, [spec.group(axis)])
    return local


def resized(spec: ShardSpec, extents: Mapping[int, int]) -> ShardSpec:
    """Give dims new extents; sharded dims with a new extent are cut evenly."""
    for d, n in extents.items():
        if n != spec.global_shape[d]:
            axis = spec.sharded.get(d)
            spec = spec.with_rows(d, n if axis is None else even_sizes(n, spec.axes[axis].size))
    return spec


def spectrum(x: ShardTensor, kind: str, sizes: Mapping[int, int | None], norm: str | None) -> Spectrum | None:
    """Transform dims, the last one with ``torch.fft.<kind>``, sharded ones later; None if all are sharded.

    Also where derivatives are taken that end before the result is used.
    """
    *others, last = sizes
    dims = [d for d in sizes if d in x.spec.sharded]
    if last in dims or not dims or is_transforming() or has_dual_level():
        return None
    if kind == "fft" and x.requires_grad and not x.is_complex():
        copied = x.clone()  # as torch does: the copy is not written to
        assert isinstance(copied, ShardTensor)
        x = copied
    source = getattr(torch.fft, kind)(x, sizes[last], last, norm)
    for d in others:
        if d not in dims:
            source = torch.fft.fft(source, sizes[d], d, norm)
    lengths = {d: sizes[d] or x.shape[d] for d in dims}
    transform = partial(torch.fft.fftn, s=[*lengths.values()], dim=dims, norm=norm)
    return Spectrum(resized(source.spec, lengths), source.local, source, dims, transform)
