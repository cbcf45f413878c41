"""State that a module's Python reads besides its arguments, and the check that it is as at capture.

A graph is good as long as the module would run the same operations again: while its attributes, those of its parts and
of the objects that they hold, and the globals and closures that its functions name, are the same values. Tensors among
them may change in value where the graph reads them anew: parameters and buffers. Of others the versions are compared.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from scidata.shard.compile.reach import SKIPPED, Others, Reached, Walk, facts_of, is_equal, refuse_sparse

#: Of buffers that no result of a training step depends on.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_FEW = 16  # numbers of a buffer that are compared at each step
_values: Callable[[Mapping[Any, Any]], Iterable[Any]] = methodcaller("values")


@dataclass
class Fixed:
    """A buffer whose values a graph takes for granted."""

    held: dict[str, Any]
    name: str
    x: Tensor
    values: Tensor
    facts: tuple[object, ...]

    def holds(self) -> bool:
        """Whether it holds the same values, where it may have been written to."""
        facts = facts_of(self.x)
        if facts != self.facts and facts[1:] == self.facts[1:] and torch.equal(self.x, self.values):
            self.facts = facts
        return self.held[self.name] is self.x and facts == self.facts


class Snapshot:
    """State of some objects and of everything that they reach, at the time of creation.

    ``places``: where parameters and buffers are kept: of each tensor the dicts and names.
    ``assigned``: attributes of modules, as dicts and names, which the call assigns tensors to; of these the kinds of
    tensors are compared.
    """

    def __init__(
        self,
        roots: Iterable[object],
        codes: Mapping[int, Any] | None = None,
        ran: Container[int] = (),
        assigned: Sequence[tuple[dict[str, Any], str]] = (),
    ) -> None:
        self._roots, self.assigned = list(roots), assigned
        walk = Walk(self._roots, codes, ran, assigned)
        self.modules: list[nn.Module] = walk.modules
        self._reached = walk.seen
        self._held = walk.held
        self._held_keys = [*chain.from_iterable(self._held)]
        self._none = [x is None for x in chain.from_iterable(map(_values, self._held))]
        by_id: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for held in self._held:
            for name, x in held.items():
                if x is not None:
                    refuse_sparse(x)
                    by_id.setdefault(id(x), []).append((held, name))
        self.places = list(by_id.values())
        self._tied = [each for each in self.places if len(each) > 1]
        self.fixed: list[Fixed] = []
        self._take(walk.found(by_id))

    def _take(self, found: Reached) -> None:
        self._found = found
        self._maps, self._copies = [m for m, _ in found.maps], [copy for _, copy in found.maps]
        self._remember_maps()
        self._lists, self._items = [x for x, _ in found.lists], [kept for _, kept in found.lists]
        self._list_sizes, self._all_items = [*map(len, self._items)], [*chain.from_iterable(self._items)]
        self._absent = [(scope, absent) for scope, _, absent in found.scopes if absent]
        self._getters = [(scope, _getter(names)) for scope, names, _ in found.scopes if names]
        self._named = [x for _, names, _ in found.scopes for x in names.values()]
        self._cells, self._cell_values = [c for c, _ in found.cells], [x for _, x in found.cells]
        self._functions = found.functions
        self._function_facts = _facts_of(self._functions)
        self._types = [*map(type, found.objects)]

    def _remember_maps(self) -> None:
        self._map_sizes = [*map(len, self._maps)]
        self._keys = [*chain.from_iterable(self._copies)]
        self._map_values = [*chain.from_iterable(map(_values, self._copies))]

    def narrowed(self, codes: Mapping[int, Any]) -> Snapshot:
        """Return a snapshot without objects that are named only by functions that have not run (code ids given).

        Places are those of this one.
        """
        new = Snapshot(self._roots, codes, (), self.assigned)
        new.modules, new.places, new._tied, new.fixed = self.modules, self.places, self._tied, self.fixed
        new._held, new._held_keys, new._none = self._held, self._held_keys, self._none
        return new

    def fix(self, *, floats: bool) -> bool:
        """Take buffers of integers for values that stay, not for what is read anew; with ``floats`` also short ones of
        floating numbers, such as quantiles; returns whether there are any of the last kind asked for.

        Counters, integers without a dim, and statistics are left; flags are not.
        """
        places, self.places = self.places, []
        for each in places:
            held, name = each[0]
            x = held[name]
            is_float = x.is_floating_point() or x.is_complex()
            stays = name not in STATISTICS and x.numel() <= _FEW if is_float else x.ndim > 0 or x.dtype == torch.bool
            if type(x) in (Tensor, nn.Buffer) and stays and floats >= is_float:
                self.fixed.append(Fixed(held, name, x, x.clone(), facts_of(x)))
            else:
                self.places.append(each)
        return any(each.x.is_floating_point() or each.x.is_complex() or not floats for each in self.fixed)

    # -- comparing -----------------------------------------------------------------------------------------------

    def holds(self) -> bool:
        """Whether nothing has changed. Asked before each step: lists are compared at once, by identity."""
        try:
            return self._holds()
        except Exception:  # a parameter is gone, or values cannot be compared: they are others
            return False

    def reaches(self, objects: Iterable[object]) -> bool:
        """Whether one of some objects is among those reached."""
        return any(id(x) in self._reached for x in objects)

    def newly_assigned(self) -> list[tuple[dict[str, Any], str]]:
        """Return the modules' attributes that hold other tensors now, and held tensors or None."""
        of_modules = {id(vars(module)): vars(module) for module in self.modules}
        return [
            (of_modules[place], name)
            for values, kept in zip(self._maps, self._copies, strict=True)
            if (place := id(values.held if isinstance(values, Others) else values)) in of_modules
            for name, x in values.items()
            if isinstance(x, Tensor) and x is not kept.get(name, x) and isinstance(kept[name], Tensor | None)
        ]

    def has_drawn(self) -> bool:
        """Whether random numbers were drawn of a generator that no graph knows."""
        return any(pickle.dumps(get()) != state for get, _, state in self._found.states)

    def _holds(self) -> bool:
        found = self._found
        if any(found.empty) or [*chain.from_iterable(self._held)] != self._held_keys:
            return False
        if [x is None for x in chain.from_iterable(map(_values, self._held))] != self._none:
            return False
        for first, *others in self._tied:
            if any(held[name] is not first[0][first[1]] for held, name in others):
                return False
        if not all(each.holds() for each in self.fixed):
            return False
        if not self._same_maps() or not all(map(is_, map(type, found.objects), self._types)):
            return False
        if [*map(len, self._lists)] != self._list_sizes:
            return False
        if not all(map(is_, chain.from_iterable(self._lists), self._all_items)) and not self._same_items():
            return False
        if any(not scope.keys().isdisjoint(absent) for scope, absent in self._absent):
            return False
        named = chain.from_iterable([get(scope) for scope, get in self._getters])
        if not all(map(is_, named, self._named)) and not self._same_names():
            return False
        if not all(map(is_equal, [cell.cell_contents for cell in self._cells], self._cell_values)):
            return False
        return (
            all(map(is_, _facts_of(self._functions), self._function_facts))
            and all(getattr(x, name, found) is kept for x, name, kept in found.slots)
            and all(get() == kept for get, kept in found.asked)
        )

    def _same_maps(self) -> bool:
        maps = self._maps
        if (
            [*map(len, maps)] == self._map_sizes
            and all(map(is_, chain.from_iterable(maps), self._keys))
            and all(map(is_, chain.from_iterable(map(_values, maps)), self._map_values))
        ):
            return True
        for values, kept in zip(maps, self._copies, strict=True):
            now, before = (([*x.keys() - SKIPPED] if x.keys() & SKIPPED else [*x]) for x in (values, kept))
            if not all(map(is_equal, now, before)) or len(now) != len(before):
                return False
            found = dict(values.items())  # not by [], which may make new ones of what is held
            if not all(is_equal(found[name], kept[name]) for name in now):
                return False
        self._copies = [dict(x.items()) for x in maps]  # equal, and other objects: to be found at once next time
        self._remember_maps()
        return True

    def _same_items(self) -> bool:
        if not all(all(map(is_equal, x, kept)) for x, kept in zip(self._lists, self._items, strict=True)):
            return False
        self._all_items = [*chain.from_iterable(self._lists)]
        return True

    def _same_names(self) -> bool:
        if not all(is_equal(scope[name], x) for scope, names, _ in self._found.scopes for name, x in names.items()):
            return False
        self._named = [scope[name] for scope, names, _ in self._found.scopes for name in names]
        return True

    # -- putting back --------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Put everything back: a capture has run the module once more than an eager step does."""
        filled: list[tuple[Any, list[Any]]] = [(x, []) for x in self._found.empty if x]
        for x, kept in (*zip(self._lists, self._items, strict=True), *filled):
            if [*map(id, x)] != [*map(id, kept)]:
                x.clear()
                x.extend(kept) if isinstance(x, list | deque) else x.update(kept)
        for values, copy in zip(self._maps, self._copies, strict=True):
            if isinstance(values, Others):
                values.put(copy)
            elif isinstance(values, dict) and (
                [*values] != [*copy] or not all(map(is_, values.values(), copy.values()))
            ):
                values.clear()
                values.update(copy)
        for scope, names, absent in self._found.scopes:
            scope.update(names)
            for name in absent & scope.keys():
                del scope[name]
        for cell, x in zip(self._cells, self._cell_values, strict=True):
            cell.cell_contents = x
        for put in self._found.puts:
            put()
        for _, put_state, state in self._found.states:
            put_state(pickle.loads(state))


def _getter(names: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Iterable[Any]]:
    if len(names) > 1:
        return itemgetter(*names)
    return lambda scope: [scope[name] for name in names]


def _facts_of(functions: Iterable[Any]) -> list[object]:
    return [x for f in functions for x in (f.__code__, f.__defaults__, f.__kwdefaults__)]
