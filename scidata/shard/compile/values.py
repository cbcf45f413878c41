"""Arguments and results of a captured call: the tensors that a graph takes, and the guarded facts about them.

Each leaf of the arguments is a plain tensor, a ShardTensor, or a value that is compared. Of a ShardTensor the graph
takes the local part, with its halo where that is held, and ghosts that are here already; the layout is in the key.
"""

from __future__ import annotations

import enum
import itertools
import types
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import Buffer

from scidata.core.cache import Cache
from scidata.shard.base import ShardBase, ViewState
from scidata.shard.comm.sums import deferral
from scidata.shard.compile.objects import attributes_of, maker_of, named
from scidata.shard.compile.reach import SIMPLE_TYPES, NotCapturedError, refuse_sparse
from scidata.shard.compile.torch_internals import memory_facts
from scidata.shard.graphs.ghosts import held_ghosts, keep_ghosts
from scidata.shard.graphs.local_graph import HopCounts
from scidata.shard.graphs.routed import RoutedIndex
from scidata.shard.graphs.targets import FilledTensor
from scidata.shard.rows.runs import owned_of
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import storage_of, tree_flatten, tree_unflatten, version_of
from scidata.shard.views import Copy, Whole

_Shard = TypeVar("_Shard", bound=ShardBase)
_PLAIN = (Tensor, nn.Parameter, Buffer)


_layouts: Cache[int] = Cache(4096, "lru")
_count = itertools.count()
_MOST_VALUES = 16


def _number_of(spec: ShardSpec) -> int:
    """Return a number shared by equal layouts, including their carried facts."""
    number: int | None = spec.__dict__.get("_number")
    if number is None:
        groups = tuple(axis.group.group_name for axis in spec.axes)  # meshes of the same ranks may have others
        facts = (spec, spec.exchange, tuple(spec.past_sizes.items()), spec.edge_parts, groups)
        number = spec.__dict__["_number"] = _layouts.get_or_make(facts, lambda: next(_count))
    return number


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One leaf of nested values."""

    key: Hashable  # all that a graph takes for granted
    tensors: tuple[Tensor, ...]  # the tensors that vary from call to call
    make: Callable[..., Any]  # rebuilds the leaf from other tensors of the same kind
    is_fixed: bool = False  # whether other tensors of it do not vary
    is_copy: bool = False  # of what is a view in one process
    objects: tuple[Any, ...] = ()  # itself, if it is an object of attributes, and those that these hold
    argument: int | None = None  # of a result: which of the arguments' objects it is
    same: int | None = None  # of a result: which earlier one it is

    def by_value(self, *, keeps: bool) -> Leaf:
        """Return the leaf with its integer tensors turned into constants, copied if ``keeps``."""
        fixed = [(i, x.clone() if keeps else x) for i, x in enumerate(self.tensors) if not _varies(x)]

        def make(*tensors: Tensor) -> Any:
            left = [*tensors]
            for i, x in fixed:
                left.insert(i, x)
            return self.make(*left)

        left = tuple(filter(_varies, self.tensors))
        return replace(self, tensors=left, make=make, is_fixed=True) if fixed else self


def _varies(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class Values:
    """Numbers the contents of integer tensors, the last few of each argument: equal contents share a number."""

    def __init__(self) -> None:
        self._known: dict[int, deque[tuple[Tensor, int]]] = {}

    def key(self, leaves: Sequence[Leaf]) -> tuple[int, ...]:
        """Return the numbers of the leaves' tensors."""
        fixed = [x.detach() for leaf in leaves for x in leaf.tensors if not _varies(x)]
        return tuple(itertools.starmap(self._number_of, enumerate(fixed)))

    def _number_of(self, place: int, x: Tensor) -> int:
        known = self._known.setdefault(place, deque(maxlen=_MOST_VALUES))
        for kept, number in known:
            if (kept.shape, kept.dtype, kept.device) == (x.shape, x.dtype, x.device) and torch.equal(kept, x):
                return number
        known.appendleft((x.clone(), next(_count)))
        return known[0][1]


def _settled(x: Any) -> Any:
    """Return the ShardTensor that replaced a constant which was written to and is of nodes."""
    return x.settled() if isinstance(x, FilledTensor) and not x.spec.is_replicated else x


def leaf_of(x: Any) -> Leaf:
    """Describe an argument; raises NotCapturedError."""
    x = _settled(x)
    kind = type(x)
    if kind in SIMPLE_TYPES:
        return Leaf(key=(kind, repr(x) if kind in (float, complex) else x), tensors=(), make=lambda: x)
    if kind in _PLAIN:
        if vars(x):
            raise NotCapturedError(f"an argument has attributes of its own: {', '.join(vars(x))}")
        return Leaf(key=(facts(x), "plain"), tensors=(x,), make=_same)
    if isinstance(x, ShardBase):
        return _leaf_of_shard(x, facts)
    if isinstance(x, enum.Enum | type | types.FunctionType | types.BuiltinFunctionType | nn.Module):
        return Leaf(key=(kind, id(x), _Holder(x)), tensors=(), make=lambda: x)
    if kind is slice:
        parts = [x.start, x.stop, x.step]
        if all(type(part) in SIMPLE_TYPES for part in parts):
            return Leaf(key=(slice, *map(type, parts), *parts), tensors=(), make=lambda: x)
    if kind is HopCounts:
        return Leaf(key=(kind, *x), tensors=(), make=lambda: HopCounts(x))
    if attributes_of(x):
        return _leaf_of_object(x, leaf_of)
    raise NotCapturedError(f"an argument is a {kind.__name__}")


def _leaf_of_object(x: Any, leaf_of: Callable[[Any], Leaf]) -> Leaf:
    """Describe an object by its attributes, of which ``leaf_of`` describes each."""
    try:
        flat, tree = tree_flatten([*map(named, attributes_of(x))])
        leaves = [*map(leaf_of, flat)]
    except RecursionError:
        raise NotCapturedError("an argument holds itself") from None
    parts, make_of = [(leaf.make, len(leaf.tensors)) for leaf in leaves], maker_of(x)

    def make(*tensors: Tensor) -> Any:
        left = iter(tensors)
        return make_of(tree_unflatten([make(*itertools.islice(left, num)) for make, num in parts], tree))

    kind: Any = type(x)
    return Leaf(
        key=(kind, tree, *[leaf.key for leaf in leaves]),
        tensors=tuple(t for leaf in leaves for t in leaf.tensors),
        make=make,
        objects=(x, *[each for leaf in leaves for each in leaf.objects]),
    )


class _Holder:
    """Holds an object in a key, so that its id stays its own."""

    def __init__(self, x: object) -> None:
        self._x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Holder) and other._x is self._x

    def __hash__(self) -> int:
        return id(self._x)


def _same(x: Tensor) -> Tensor:
    return x


def facts(x: Tensor) -> Hashable:
    """Return the guarded facts of a graph's input tensor; raise for kinds that a graph cannot take."""
    if type(x) not in _PLAIN:
        raise NotCapturedError(f"it uses a {type(x).__name__}")
    refuse_sparse(x)
    found = deferral(x) if x.requires_grad else None
    return memory_facts(x), None if found is None else found.groups


def _leaf_of_shard(x: ShardBase, facts: Callable[[Tensor], Hashable]) -> Leaf:
    x.refresh()
    halo, spec, strides, found = dict(x.halo), x.spec, x.global_strides, _found_of(x)
    of_halo = tuple((dim, *vars(each).values()) for dim, each in halo.items())
    state = x.copied if isinstance(x.copied, Whole) else None
    key = (type(x), _number_of(spec), strides, found, of_halo, type(x.copied))
    if isinstance(x, RoutedIndex):
        if x.is_written:
            raise NotCapturedError("an edge index was written to")
        exchanges, owned = x.exchanges, x._owned
        return Leaf(
            key=(*key, *map(_Holder, exchanges), owned, facts(x.local), facts(x.local_ids)),
            tensors=(x.local, x.local_ids),
            make=lambda local, ids: _with_found(
                RoutedIndex(local, spec, exchanges=exchanges, ids=ids, owned=owned), found
            ),
        )
    if type(x) is not ShardTensor:
        raise NotCapturedError(f"an argument is a {type(x).__name__}")
    padded, ghosts = x.held_halo(), held_ghosts(x)
    base = x.local if padded is None else padded
    tensors: tuple[Tensor, ...] = (base,)
    of_ghosts: Hashable = ()
    if ghosts is not None:
        rows, dim, exchange = ghosts
        tensors, of_ghosts = (base, rows), (dim, _Holder(exchange), facts(rows))

    def make(base: Tensor, *ghosts_again: Tensor) -> ShardTensor:
        if padded is not None:
            made = ShardTensor(owned_of(base, spec, halo), spec, padded=base, halo=halo, global_strides=strides)
        else:
            made = ShardTensor(base, spec, halo=halo, global_strides=strides)
        for again in ghosts_again:
            keep_ghosts(made, again, exchange, dim)
        made.copied = state
        return _with_found(made, found)

    return Leaf(
        key=(*key, padded is not None, facts(base), of_ghosts),
        tensors=tensors,
        make=make,
        is_copy=isinstance(x.copied, Copy),
    )


#: What is found out of a tensor's values, at its first use by communication, and kept beside it.
_FOUND = ("_true_counts", "_no_ghosts")


def _found_of(x: ShardBase) -> tuple[Hashable, ...]:
    """Return the cached facts about a tensor's values, and about kept rows of an edge index."""
    held = vars(x)
    if not held:
        return ()
    version, counts = held.get("_true_counts", (None, None))
    kept = ((place, _found_of(row)) for place, row in held.get("_kept_rows", {}).items())
    rows = tuple(each for each in kept if each[1])
    found = counts if version == version_of(x.local) else None, held.get("_no_ghosts"), rows
    return found if any(each is not None and each != () for each in found) else ()


def _with_found(x: _Shard, found: tuple[Any, ...]) -> _Shard:
    if found:
        counts, no_ghosts, rows = found
        if counts is not None:
            vars(x)["_true_counts"] = version_of(x.local), counts
        if no_ghosts is not None:
            vars(x)["_no_ghosts"] = no_ghosts
        for place, known in rows:
            row: Any = x[place]
            _with_found(row, known)
    return x


def results_of(flat: Sequence[Any], inputs: Sequence[ShardBase], objects: Sequence[Any]) -> list[Leaf]:
    """Describe results during capture; ``inputs`` are the shards and ``objects`` the objects among the arguments."""
    leaves = []
    for i, (x, first) in enumerate(zip(flat, firsts_of(flat), strict=True)):
        argument = next((k for k, each in enumerate(objects) if x is each), None)
        if first == i and argument is None:
            leaves.append(_result_of(x, inputs, objects))
        else:
            same = first if first != i else None
            leaves.append(Leaf(key=None, tensors=(), make=lambda: None, argument=argument, same=same))
    return leaves


def _result_of(x: Any, inputs: Sequence[ShardBase], objects: Sequence[Any]) -> Leaf:
    if any(x is each for each in objects):
        raise NotCapturedError("a result holds an object that is among the arguments")
    x = _settled(x)
    if isinstance(x, Tensor) and not isinstance(x, ShardBase):
        return Leaf(key=None, tensors=(x,), make=_same)
    if attributes_of(x):
        return _leaf_of_object(x, lambda each: _result_of(each, inputs, objects))
    if not isinstance(x, ShardBase):
        return leaf_of(x)
    state: ViewState | None = x.copied
    while isinstance(state, Copy):
        if any(state.base is given for given in inputs):
            raise NotCapturedError("a result is a copy for which torch has a view of an argument")
        state = state.base.copied
    state = None if isinstance(x.copied, Copy) else x.copied
    if any(x.__dict__.get(name) is not None for name in _FOUND):
        raise NotCapturedError("a result keeps what it was found out to hold")
    if isinstance(x, RoutedIndex) or type(x) is not ShardTensor:
        raise NotCapturedError(f"a result is a {type(x).__name__}")
    leaf = _leaf_of_shard(x, lambda _: None)

    def make(*tensors: Tensor) -> ShardTensor:
        made: ShardTensor = leaf.make(*tensors)
        made.copied = state
        return made

    return Leaf(key=leaf.key, tensors=leaf.tensors, make=make)


def firsts_of(flat: Sequence[object]) -> tuple[int, ...]:
    """Return for each leaf the place of the first that is the same: code may compare them by ``is``."""
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(id(x), i) if isinstance(x, Tensor) or attributes_of(x) else i for i, x in enumerate(flat)
    )


def objects_of(leaves: Sequence[Leaf]) -> list[Any]:
    """Return the leaves' objects of attributes."""
    return [x for leaf in leaves for x in leaf.objects]


def aliases_of(tensors: Sequence[Tensor]) -> tuple[Hashable, ...]:
    """Return for each tensor the first that is the same, or lies in the same storage, and how far apart they begin."""
    first: dict[int, int] = {}
    same: dict[int, int] = {}
    found: list[Hashable] = []
    for i, x in enumerate(tensors):
        k = first.setdefault(storage_of(x), i)
        found.append(i if k == i else (k, x.storage_offset() - tensors[k].storage_offset(), same.get(id(x))))
        same.setdefault(id(x), i)
    return tuple(found)
