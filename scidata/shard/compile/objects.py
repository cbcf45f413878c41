"""Objects among the arguments of a captured call, with tensors for attributes: data classes, namespaces, PyG's batches.

A graph takes the tensors of their attributes, and what the call assigns to attributes is assigned after each run of it.
So are dicts that a call changes.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from scidata.shard.torch_internals import tree_leaves

#: What a class defines where its instances have more state than their attributes.
_OF_STATE = ("__copy__", "__getstate__", "__new__", "__reduce__", "__reduce_ex__", "__setstate__")
_OF_STORES = ("_mapping", "_parent")  # in the dict of a store of PyTorch Geometric's, and no attributes


def attributes_of(x: object) -> list[dict[str, Any]]:
    """Return the dicts that hold all of an object's state; none where there may be more to it.

    Of ``Data``, ``HeteroData`` and ``Batch`` of PyTorch Geometric each store has two, of which the second is its own.
    A dict is its own.
    """
    if type(x) is dict:
        return [x]
    if isinstance(x, getattr(sys.modules.get("torch_geometric.data.data"), "BaseData", ())):
        stores: list[Any] = x.stores  # type: ignore[attr-defined]
        return [held for store in stores for held in (store._mapping, vars(store))]
    kind: Any = type(x)
    return [vars(x)] if _has_attributes_alone(kind) else []


@lru_cache(1024)
def _has_attributes_alone(kind: type) -> bool:
    if kind is SimpleNamespace:
        return True
    is_plain = all(getattr(kind, name, None) is getattr(object, name, None) for name in _OF_STATE)
    return is_plain and kind.__dictoffset__ != 0 and not any(vars(each).get("__slots__") for each in kind.__mro__)


def named(held: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes among what such a dict holds."""
    return {name: x for name, x in held.items() if name not in _OF_STORES or "_mapping" not in held}


def is_dict(x: object) -> bool:
    """Whether it is a dict, and not of a class of its own."""
    return type(x) is dict


def leaves_in(values: object, above: tuple[object, ...] = (), *, dicts: bool = False) -> Iterator[Any]:
    """Yield the leaves of nested values, each object before the leaves of its attributes; ``above`` hold the values.

    With ``dicts``, those that no object holds are such objects.
    """
    for x in tree_leaves(values, is_dict if dicts else None):
        yield x
        attributes = attributes_of(x)
        if attributes and not any(x is each for each in above):
            yield from leaves_in([*map(named, attributes)], (*above, x))


def changed(held: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> Iterator[tuple[int, str, bool]]:
    """Yield what differs in some dicts from before: of which dict, the name, and whether it is there."""
    for i, (now, was) in enumerate(zip(held, before, strict=True)):
        for name in {**was, **now}:
            if name not in now or name not in was or now[name] is not was[name]:
                yield i, name, name in now


def maker_of(x: object) -> Callable[[list[dict[str, Any]]], Any]:
    """Return a function that makes such an object of other attributes."""
    empty: Any = copy.copy(x)
    for held in attributes_of(empty):
        for name in named(held):
            del held[name]

    def make(attributes: list[dict[str, Any]]) -> Any:
        made = copy.copy(empty)
        for held, values in zip(attributes_of(made), attributes, strict=True):
            held.update(values)
        return made

    return make
