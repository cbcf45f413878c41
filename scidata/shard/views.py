"""ShardTensors that are copies although torch returns views: writes to one show in the other, or are refused.

``y = x[2:5]`` copies rows to other ranks, where torch has ``y`` share memory with ``x``. ``y.copied`` is a ``Copy``
with the base ``x``. A write to ``x`` makes ``y`` old: its next use copies again. A write to ``y`` is copied back to
``x``, or raises if that is not possible.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scidata.shard.base import ShardBase, ViewState
from scidata.shard.op_table import TorchFunction, is_in_place, unsupported
from scidata.shard.spec import UNKNOWN, row_major
from scidata.shard.torch_internals import base_of, is_of_leaf, shares_memory, tree_map_only, version_of

_PARTLY = ("masked", "index", "scatter", "put", "__setitem__")  # torch writes so to expanded tensors, too
_REPEATED = "several elements of what is written to are one in memory"
_writes = [0]  # counts writes in inference mode, in which torch counts no versions


class Copy(ViewState):
    """A copy of what is a view in one process.

    ``base``: the ShardTensor that it would be a view of.
    ``local``: this rank's part of the copy. Views of it are copies too, in the same sense.
    ``take``: copies again: returns the present values of ``local``. Collective if the copy was.
    ``put``: writes ``local`` to the base; None if that is not done.
    """

    __slots__ = ("base", "follows_graph", "layout", "local", "may_be_base", "put", "seen", "take")

    def __init__(
        self, base: ShardBase, local: Tensor, take: Callable[[], Tensor], put: Callable[[], object] | None = None
    ) -> None:
        self.base, self.local, self.take, self.put = base, local, take, put
        self.seen, self.follows_graph, self.layout = _version(base), True, base.spec
        self.may_be_base = False  # in one process: of contiguous()

    def refresh(self) -> None:
        """Copy again if the base was written to. Collective then, if making the copy was."""
        if self.base.copied is not None:
            self.base.copied.refresh()
        if self.seen != (now := _version(self.base)):
            self.check_layout()
            # values written to the base keep their graph, also where the first use is under no_grad
            graph = not (self.local.is_leaf and self.local.requires_grad)
            with torch.inference_mode() if self.local.is_inference() else torch.set_grad_enabled(graph):
                once = tuple([slice(1) if step == 0 else slice(None) for step in self.local.stride()])  # of expand()
                self.local[once].copy_(self.take()[once])
            self.seen = now

    def will_require_grad(self) -> bool:
        """Whether ``local`` will require grad once it is refreshed: values written to the base may."""
        return self.follows_graph and self.seen != _version(self.base) and bool(self.base.requires_grad)

    def detached(self) -> Copy:
        """Return this state without an autograd graph, for a tensor that shares memory with this one or a view of
        it.
        """

        def put() -> None:
            with torch.no_grad():
                self.put_back()

        def take() -> Tensor:
            with torch.no_grad():
                return self.take()

        copied = Copy(self.base, self.local.detach(), take, None if self.put is None else put)
        copied.seen, copied.follows_graph = self.seen, False
        return copied

    def check_layout(self) -> None:
        """Raise if the base has changed its shape since, by ``base.t_()`` for example."""
        if self.base.spec != self.layout:
            reason = "a tensor was written to whose shape was changed in place after this copy of it was made"
            raise unsupported(Tensor.copy_, reason, self.layout, self.base.spec, remedy="clone() the copy before that")

    def put_back(self) -> None:
        """Copy these values back to the base."""
        assert self.put is not None
        self.check_layout()
        count = _writes[0]
        self.put()
        _writes[0] = count  # one write: some ranks have a copy where others have a view
        self.seen = _version(self.base)


def refuse_no_gradient(x: ShardBase) -> None:
    """Raise if the gradient of a tensor that shares memory with this one in one process was retained."""
    copied = x.copied
    if isinstance(copied, Copy) and copied.may_be_base and copied.base.local.grad is not None:
        raise unsupported(Tensor.contiguous, "whether this is the tensor itself is not known", x.spec)


class Whole(ViewState):
    """Mark of a gradient made by autograd, or computed from one: which of its elements share memory is unknown.

    All elements of a sum's gradient are: a write to one shows in all. So it is written to as a whole, or not.
    """

    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count


def gradient_of(x: ShardBase, local: Tensor) -> ShardBase:
    """Wrap a gradient that autograd made: its strides are not known (of a sum's gradient, all are 0)."""
    # contiguous() would leave parts without elements expanded; a custom function's view cannot be written to
    if local._base is not None or local.stride() != row_major(local.shape):
        local = local.clone(memory_format=torch.contiguous_format)
    return x.like(local, x.spec, Whole(x.spec.global_size.numel()), UNKNOWN)


def part_of_gradient(base: Tensor, part: Tensor) -> Tensor | None:
    """Return the gradient of a part that is a view, from the gradient of its base."""
    if base.grad is None:
        return None
    laid = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device=base.device).copy_(base.grad)
    return laid.as_strided(part.shape, part.stride(), part.storage_offset() - base.storage_offset()).clone()


def _version(x: ShardBase) -> tuple[int, int]:
    """Return a number that changes with each write; all ranks compute the same."""
    count = x.version()
    return count, _writes[0] if count < 0 else 0


def written(target: ShardBase) -> None:
    """Note a write to the own part: ghosts are old now, and the write to a copy goes back to its original."""
    _writes[0] += 1
    target.padded = None
    find_place(target.local)
    if target.copied is not None:
        target.copied.put_back()


def find_place(part: Tensor) -> None:
    """Give a view that was written to its new place in the graph: until asked, torch may take it for a leaf."""
    if _has_place(part) and not part.numel() and part._base.is_complex() and not part.is_complex():  # type: ignore[union-attr]
        compact_gradient(part)
    base = base_of(part)
    for known in [*_compacted.values()]:  # the write has moved views of the same memory, too
        x = known()
        if x is not None and x is not part and x._base is base and _has_place(x):
            _lay_gradient(x)


def _has_place(part: Tensor) -> bool:
    """Look for a view's place in the graph; return whether it has one."""
    if not part.requires_grad or part._base is None:
        return False
    try:
        return part.grad_fn is not None
    except RuntimeError:  # of one of several, or made under no_grad: torch says so where it is used
        return False


#: Parts without elements whose gradients are copied, by their ids.
_compacted: dict[int, weakref.ref[Tensor]] = {}


def compact_gradient(part: Tensor) -> None:
    """Have backward copy the gradient of a part without elements: it may have any strides, torch sees some as complex.

    After a write to the memory the view has another place in the graph, and needs it again.
    """
    _lay_gradient(part)
    number = id(part)
    _compacted[number] = weakref.ref(part, lambda _: _compacted.pop(number, None))


def _lay_gradient(part: Tensor) -> None:
    """Have pairs lie side by side where the gradient is seen as complex: torch's contiguous() keeps strides there."""
    node = part.grad_fn
    while node is not None and node.name() != "ViewAsRealBackward0":
        node = next((before for before, _ in node.next_functions), None)
    if node is not None:
        node.register_prehook(_with_pairs)


def _with_pairs(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(x if x is None or x.numel() else x.new_empty(x.shape) for x in grads)


def compact(part: Tensor) -> Tensor:
    """Copy a part without elements, which may have any strides."""
    return part if part.numel() else part.clone(memory_format=torch.contiguous_format)


def become(x: ShardBase, other: ShardBase) -> None:
    """Turn a tensor into one of another shape, dtype or device; whoever holds it sees that."""
    own = x.__dict__
    torch.utils.swap_tensors(x, other)  # type: ignore[no-untyped-call]
    x.__dict__.update(own)


def _repeats(x: Tensor) -> bool:
    """Whether several elements are one in memory, as after expand()."""
    return isinstance(x, ShardBase) and _any_repeated(x.shape, x.global_strides or ())


def _any_repeated(shape: Sequence[int], strides: Sequence[int]) -> bool:
    return any(n > 1 and not step for n, step in zip(shape, strides, strict=False))


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether several elements may be one in memory, as after expand(), or in windows that overlap."""
    reach = 0
    for step, n in sorted(zip(strides, shape, strict=False)):
        if n > 1 and 0 <= step <= reach:
            return 0 not in shape
        reach += (n - 1) * step
    return False


def refuse_repeated(func: TorchFunction, x: ShardBase, index: tuple[Any, ...]) -> None:
    """Raise if several elements of a part, by slices and rows, share memory: torch raises for most such writes."""
    if _repeats(x) and x.global_strides is not None:
        part = torch.empty_strided(x.shape, x.global_strides, device="meta")[index]
        if _any_repeated(part.shape, part.stride()):
            raise unsupported(func, _REPEATED, x.spec, remedy="clone() it")


def refuse_write_to_copy(func: TorchFunction, x: Tensor) -> None:
    """Raise if ``x`` is a copy that is a view in torch, unless the written values can be put back.

    Also where several of its elements are one in memory: torch raises on ranks whose parts have any.
    """
    if not isinstance(x, ShardBase):
        return
    find_place(x.local)
    copied = x.copied
    counts = {x.spec.global_size.numel()}
    while isinstance(copied, Copy):
        if copied.put is None:
            reason = "a copy where torch would have made a view, so writing to it would not reach the original"
            remedy = "clone() it, write it as an expression, or write to the original by an index: x[i] = ..."
            raise unsupported(func, reason, x.spec, remedy=remedy)
        copied.check_layout()
        if copied.follows_graph and torch.is_grad_enabled() and "_retained" in vars(copied.base):
            reason = "the original's gradient is retained, which would not pass through it after a write to this copy"
            raise unsupported(func, reason, x.spec, remedy="write to the original, or clone() it")
        base, copied = copied.base, copied.base.copied
        counts.add(base.spec.global_size.numel())
        if overlaps(base.shape, base.global_strides or ()):  # of which the copy has each by itself
            raise unsupported(func, "several elements of the original are one in memory", x.spec, remedy="clone() it")
    if isinstance(copied, Whole) and (counts != {copied.count} or func.__name__.startswith(_PARTLY)):
        reason = "it writes to a part of what was computed by autograd, of which several elements may be one in memory"
        raise unsupported(func, reason, x.spec, remedy="clone() it")
    if _repeats(x):
        raise unsupported(func, _REPEATED, x.spec, remedy="clone() it")
    copied = x.copied
    while isinstance(copied, Copy) and copied.follows_graph and x.local.requires_grad and torch.is_grad_enabled():
        x, copied = copied.base, copied.base.copied
        if is_of_leaf(x.local):  # torch's own error would come when the copy has changed
            raise RuntimeError(f"{func.__name__}: a view of a leaf that requires grad is written to in place")


def call_on_copies(
    func: TorchFunction, copies: Sequence[ShardBase], args: tuple[Any, ...], kwargs: dict[str, object]
) -> object:
    """Call a function on the plain values of replicated copies; put back the values that it changes.

    A result that shares memory with a copy is a copy, too.
    """
    name = func.__name__
    by_name = is_in_place(func) or name in ("__setitem__", "__set__") or kwargs.get("inplace") is True
    if name == "__setitem__" and _is_there(*args):
        return None
    targets = [x for x in copies if by_name and x.local is args[0]]
    before = [version_of(x.local) for x in copies]
    for x in targets:
        refuse_write_to_copy(func, x)
    result = func(*args, **kwargs)
    changed = [
        x
        for x, old in zip(copies, before, strict=True)
        if version_of(x.local) != old or (old < 0 and any(x is target for target in targets))
    ]
    for x in changed:
        refuse_write_to_copy(func, x)
    for x in changed:
        written(x)
    return tree_map_only(Tensor, lambda x: _as_copy(x, copies), result)


def _is_there(target: Tensor, index: Any, value: object) -> bool:
    """Whether an assigned value is the very same part: ``x[i] *= y`` ends so, after ``x[i]`` has been changed."""
    if type(value) is not Tensor or not shares_memory(value, target):
        return False
    part = target[index]
    same = (part.shape, part.stride(), part.storage_offset()) == (value.shape, value.stride(), value.storage_offset())
    return shares_memory(part, value) and same


def _as_copy(result: Tensor, copies: Sequence[ShardBase]) -> Tensor:
    for x in copies:
        if shares_memory(result, x.local):
            return x.like(result, x.spec.replicated(result.shape), x.copied, None)
    return result
