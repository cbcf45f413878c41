"""Capture by running: a function runs once on tensors without values, and torch's operators are written down.

What runs are the handlers of :mod:`scidata.shard.ops`, under AOTAutograd: the graph is of local parts, with the
collectives of :mod:`scidata.shard.comm.operators` inside it, forward and backward. No rank communicates meanwhile, and
no value is read: for bools and integers code is given those of an eager call, which the graph checks when it runs;
other reads raise, and the function is run eagerly. The collectives of a graph are those of an eager step in the same
order, so that ranks with a graph and ranks without one meet.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from operator import getitem, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from scidata.device_mesh.devices import ATTENTION_KERNELS
from scidata.shard.base import ShardBase
from scidata.shard.comm.operators import capturing, is_check, is_operator
from scidata.shard.comm.sums import defer, deferral, num_deferred
from scidata.shard.compile.backward import Again
from scidata.shard.compile.objects import attributes_of, changed, leaves_in, named
from scidata.shard.compile.overlap import overlap, settling, share_results
from scidata.shard.compile.reach import (
    AssignsError,
    ChangesError,
    EffectError,
    NotCapturedError,
    ReadsError,
    WritesError,
)
from scidata.shard.compile.state import STATISTICS, Snapshot
from scidata.shard.compile.torch_internals import (
    Compiler,
    Constants,
    be_parameter,
    boxed,
    captured_function,
    drawing_in_order,
    draws,
    is_of_backward,
    keep_in_forward,
    lists_of_weights,
    make_boxed,
    recomputing,
    tracing,
    unreadable,
)
from scidata.shard.compile.values import Leaf, aliases_of, facts, leaf_of, objects_of, results_of
from scidata.shard.compile.watch import Watch
from scidata.shard.torch_internals import has_values, storage_of, tree_flatten, tree_leaves, tree_unflatten, version_of
from scidata.shard.views import find_place, overlaps

_MOST_SAID = 400  # characters of an error; inductor shows whole kernels


@dataclass(kw_only=True)
class Captured:
    """A call that was captured."""

    snapshot: Snapshot
    facts: list[Hashable]
    run: Callable[..., Any]
    again: Again
    # operations, collectives: of the graphs, forward, and backward where there is one
    operations: list[int] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    constants: list[tuple[Tensor, int]] = field(default_factory=list)
    # results of collectives, by their numbers, which the graph takes for granted
    expected: dict[int, Tensor] = field(default_factory=dict)
    num_assumed: int = 0  # of bools and integers that the graph takes for granted, and checks
    num_missed: int = 0  # calls since the last for which it was right
    is_compiled: bool = False
    is_by_value: bool = False  # whether integers among the arguments are constants of it
    _held: list[Tensor] = field(default_factory=list)  # as they were when they were last looked at closely
    _briefly: object = None
    _storages: set[int] = field(default_factory=set)

    def holds(self, leaves: Sequence[Leaf]) -> bool:
        """Whether the graph is good for another call."""
        if self.snapshot.reaches(objects_of(leaves)):
            return False
        if not self.snapshot.holds() or any(version_of(x) != version for x, version in self.constants):
            return False
        try:
            held = _collect(self.snapshot.places, ())
            briefly = num_deferred(), [(x.data_ptr(), x.requires_grad, x.dtype, x.shape, x.stride()) for x in held]
            given = [storage_of(x) for leaf in leaves for x in leaf.tensors]
            is_same = all(map(is_, held, self._held)) and briefly == self._briefly
            if is_same and self._storages.isdisjoint(given):
                return True
            if facts_of_places(self.snapshot, leaves) != self.facts:
                return False
        except NotCapturedError:  # a parameter is of another class
            return False
        self._held, self._briefly, self._storages = held, briefly, {*map(storage_of, held)}
        return True

    @property
    def takes_for_granted(self) -> bool:
        """Whether the graph may be left in its midst, where values are others than it was captured for."""
        return bool(self.expected or self.num_assumed)

    @property
    def next_left_out(self) -> Sequence[int] | None:
        """Numbers of the results that a loss has left out, if they differ from those of the capture."""
        return self.again.next_left_out

    def __str__(self) -> str:
        ways = zip(("forward", "backward"), self.operations, self.collectives, strict=False)
        checks = [f"{self.num_assumed} values checked"] if self.num_assumed else []
        return ", ".join([*(f"{num} operations {way} ({sent} collectives)" for way, num, sent in ways), *checks])


def facts_of_places(snapshot: Snapshot, leaves: Sequence[Leaf]) -> list[Hashable]:
    """Return the guarded facts of each parameter and buffer, and which of them share a storage."""
    held = _collect(snapshot.places, ())
    return [*map(facts, held), aliases_of(_collect(snapshot.places, leaves))]


class _CompiledError(Exception):
    """Ends the first call of a graph, before it has computed anything."""


def casts() -> list[tuple[str, bool, torch.dtype]]:
    """Return the autocast settings of each kind of device."""
    device = torch.accelerator.current_accelerator(check_available=True)
    kinds = ("cpu",) if device is None else ("cpu", device.type)
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


def capture(
    function: Callable[..., Any],
    leaves: Sequence[Leaf],
    firsts: Sequence[int],
    tree: Any,
    snapshot: Snapshot,
    compilers: tuple[Compiler, Compiler],
    left_out: Sequence[int] | None,
    known: Sequence[tuple[str, Tensor]],
    reads: Mapping[Hashable, Sequence[bool | int]],
    written_to: Sequence[int],
    *,
    fuses: bool,
    folds: bool,
) -> Captured:
    """Capture a call; raises NotCapturedError.

    ``firsts``: of each leaf the place of the first that is the same tensor.
    No loss uses the results whose numbers are ``left_out``; None: those that it assigns to modules. With ``folds``,
    what is computed of constants alone is not captured, but computed, so that its values can be read. ``known`` are
    results of its collectives in an eager call, ``reads`` the bools and integers that code read there. To the tensors
    of the places ``written_to``, which require grad, the call writes: its graph returns what they hold then.
    """
    places, constants, watch = snapshot.places, Constants(folds=folds), Watch()
    results: list[Leaf] = []
    result_trees: list[Any] = []
    by_value = bool(snapshot.fixed) or any(leaf.is_fixed for leaf in leaves)
    latest: list[Tensor] = []  # of the last run
    unread = [_unread(held[name]) for held, name in snapshot.assigned]
    num_forward: list[int] = []  # collectives of the forward pass
    viewed: list[int] = []  # tensors of which a result is a view, made anew outside the graph
    rebinds: list[tuple[dict[str, Any], str]] = []  # buffers that the call puts others in the places of
    without_graph: list[bool] = []  # of tensors that require grad: whether writes to them have no derivative
    changes: list[tuple[int, str, bool]] = []  # of attributes of the arguments' objects, as by ``changed``
    tensors = _collect(places, leaves)
    makes, trains = [(leaf.make, len(leaf.tensors)) for leaf in leaves], [x.requires_grad for x in tensors]
    put_off = {i: found.groups for i, x in enumerate(tensors) if x.requires_grad and (found := deferral(x)) is not None}

    share = any(isinstance(each, tuple) and each[1:] != (0, each[0]) for each in aliases_of(tensors))

    def call(
        tensors: Sequence[Tensor], context: AbstractContextManager[object], *, is_eager: bool = False
    ) -> tuple[list[Leaf], Any]:
        tensors = [x.clone() if i in written_to else x for i, x in enumerate(tensors)]
        nodes = [tensors[i].grad_fn for i in written_to]
        swapped = _swapped(places, tensors[: len(places)], snapshot.modules)
        with swapped as rebound, _assigned(snapshot.assigned, unread) as new:
            left = iter(tensors[len(places) :])
            made_each = [make(*[next(left) for _ in range(num)]) for make, num in makes]
            given = [made_each[i] for i in firsts]
            args, kwargs = tree_unflatten(given, tree)
            objects = [x for x in leaves_in(given, dicts=True) if attributes_of(x)]
            held = [*chain.from_iterable(map(attributes_of, objects))]
            kept = [*map(named, held)]

            def is_leaf(x: object) -> bool:
                return type(x) is torch.Size or any(x is each for each in objects)

            arguments = _Arguments((args, kwargs, kept), is_leaf)
            with context, nullcontext() if is_eager else _unchanged(arguments, tensors):
                result = function(*args, **kwargs)
        if arguments.have_changed() or sum(len(attributes_of(x)) for x in objects) != len(held):
            raise ChangesError("it changes a container among its arguments")
        changes[:] = changed([*map(named, held)], kept)
        values = [held[i].get(name) for i, name, _ in changes]
        flat, result_tree = tree_flatten((result, values), is_leaf)
        shards = [x for x in leaves_in(given) if isinstance(x, ShardBase)]
        rebinds[:] = [places[i][0] for i in rebound]
        after = [tensors[i] for i in written_to]
        without_graph[:] = [x.grad_fn is node for x, node in zip(after, nodes, strict=True)]
        after = [x.detach() if is_so else x for x, is_so in zip(after, without_graph, strict=True)]
        return results_of((*flat, *rebound.values(), *new, *after), shards, objects), result_tree

    @contextmanager
    def inside() -> Iterator[None]:
        """Run a checkpoint's function again as its forward was run."""
        held = _swapped(places, latest[: len(places)], snapshot.modules)
        with held, constants, _assigned(snapshot.assigned, unread, some=True):
            yield

    def on_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
        calls.clear()  # the last run is the one that is written down
        latest[:] = tensors
        for i, groups in put_off.items():
            defer(tensors[i], groups)
        versions = [*map(version_of, tensors)]
        results[:], result_trees[:] = (found := call(tensors, constants.assuming(reads)))[0], [found[1]]
        if assigned := snapshot.newly_assigned():
            raise AssignsError(assigned)
        if not snapshot.holds():  # check each run: two changes may cancel
            raise EffectError("its forward changes attributes or globals")
        written = {i for i, version in enumerate(versions) if version_of(tensors[i]) != version}
        if learned := [i for i in written if tensors[i].requires_grad]:
            if constants.has_checkpoints:
                raise EffectError("it writes to an argument that requires grad, and has checkpoints")
            raise WritesError(learned)
        if any(i >= len(places) for i in (*written, *written_to)) and any(leaf.is_copy for leaf in leaves):
            raise EffectError("it writes to an argument, and one is a copy for which torch has a view")
        names = [each[0][1] for each in places]
        again.written = [i for i in written if i >= len(places) or names[i] not in STATISTICS]
        if written and share:
            raise EffectError("it writes to an argument, and some share memory")
        if any(x is given for x in _tensors_of(results) for given in tensors[: len(places)]):
            raise EffectError("a result is a parameter or a buffer")
        num_forward[:] = [calls.num]
        given_back = _tensors_of(results)
        if any(x.requires_grad and _has_windows(x) for x in given_back):
            raise EffectError("windows that overlap in memory are a result, whose gradients torch's graphs lose")
        places_of = {*map(storage_of, given_back)}
        viewed[:] = [i for i, x in enumerate(tensors) if storage_of(x) in places_of]
        told = calls.results if any(x.requires_grad for x in given_back) else ()  # of another run, in backward
        if by_value:  # values computed from integers must not become constants of the graph
            if not all(constants.has_made(x) for x in given_back if has_values(x)):
                raise NotCapturedError("a result may share memory with integers among the arguments or buffers")
            given_back = tuple(x.clone() if has_values(x) else x for x in given_back)
        others, kept = results[: len(results) - len(written_to)], results[len(results) - len(written_to) :]
        if any(leaf.same is not None for leaf in kept) or not {*map(storage_of, _tensors_of(kept))}.isdisjoint(
            map(storage_of, _tensors_of(others))
        ):
            raise EffectError("a result shares memory with an argument that it writes to, which requires grad")
        num_returned = len(_tensors_of(others[: len(others) - len(snapshot.assigned)]))
        if left_out is None:  # no loss is expected to use what is assigned
            again.left_out = [i for i in range(num_returned, len(given_back)) if given_back[i].requires_grad]
        if again.left_out and len({*map(storage_of, given_back)}) < len(given_back):
            given_back = tuple(x.clone() if i in again.left_out else x for i, x in enumerate(given_back))
        return *[x.detach() if i in again.left_out else x for i, x in enumerate(given_back)], *told

    def joined(gm: GraphModule) -> bool:
        watch.stop()  # partitioners run code of other packages
        for node in _collectives(gm):
            keep_in_forward(node, is_forward=is_check(node.target) or node.args[-1] in range(*num_forward))
        for node in filter(lambda node: draws(node.target), gm.graph.nodes):
            keep_in_forward(node, is_forward=not is_of_backward(node))
            if not node.users and isinstance(node.meta["val"], tuple):  # partitioners take it for a tensor
                with gm.graph.inserting_after(node):
                    first = gm.graph.call_function(getitem, (node, 0))
                first.meta = {**node.meta, "val": node.meta["val"][0]}
        return constants.has_checkpoints

    def check(*graphs: GraphModule) -> None:
        """Before anything is compiled."""
        watch.stop()
        if constants.errors:
            raise NotCapturedError(constants.errors[0])
        if watch.effects or snapshot.has_drawn() or not snapshot.holds():
            raise EffectError(watch.effects[0] if watch.effects else "its forward draws random numbers of Python's")
        made.snapshot = again.snapshot = snapshot.narrowed(watch.codes)
        made.operations = [sum(node.op == "call_function" for node in gm.graph.nodes) for gm in graphs]
        checks = [[is_check(node.target) for node in _collectives(gm)] for gm in graphs]
        made.collectives, made.num_assumed = [each.count(False) for each in checks], sum(map(sum, checks))
        made.expected, again.sends = {**calls.expected}, sum(made.collectives[1:]) > 0
        if sum(made.collectives) != calls.num:
            raise NotCapturedError("its collectives are not those of an eager step")
        found = [*constants.read.values(), *[each for gm in graphs for each in _constants(gm)]]
        fixed = {storage_of(each.x) for each in snapshot.fixed}
        made.constants += [(x, version) for x, version in found if storage_of(x) not in fixed]
        again.draws = any(draws(node.target) for node in graphs[0].graph.nodes)
        if len(graphs) > 1:
            grads = next(iter(reversed(graphs[1].graph.nodes))).args[0]
            if isinstance(grads, Sequence) and len(grads) == len(trains):
                of_graph = [i for i, is_trained in enumerate(trains) if is_trained and i not in viewed]
                again.unused = [i for i in of_graph if grads[i] is None]
                taken = [bool(node.users) for node in graphs[0].graph.nodes if node.op == "placeholder"]
                again.unread = [i for i in again.unused if len(taken) == len(trains) and not taken[i]]
                if len(again.unused) == sum(trains):  # the graph's results would not require grad, as eager ones do
                    raise NotCapturedError("none of its inputs gets a gradient")

    def compiler(compile_graph: Compiler, *, is_forward: bool) -> Compiler:
        def compiled(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            if not made.operations:  # without backward
                check(gm)
            if is_forward:
                share_results(gm)
            if not made.takes_for_granted:
                overlap(gm)
            if fuses:
                _order(gm, _collectives(gm))
            else:
                _reshape(gm)
            as_it_is = make_boxed(gm.forward)
            try:
                graph = settling(compile_graph(gm, inputs))
            except Exception as e:
                if not made.is_compiled:
                    raise
                warnings.warn(f"scidata.compile: {again.name}: backward is run uncompiled: {_said(e)}", stacklevel=2)
                return as_it_is
            if made.is_compiled:
                return graph  # of backward, which is compiled when it is first run

            def start(inputs: list[Any]) -> Any:
                if not made.is_compiled:
                    raise _CompiledError
                return graph(inputs)

            return boxed(start)

        return compiled

    compilers = compiler(compilers[0], is_forward=True), compiler(compilers[1], is_forward=False)
    compiled = captured_function(on_tensors, *compilers, joined, check, fuses=fuses)

    def run(leaves: Sequence[Leaf]) -> Any:
        given_tensors = _collect(places, leaves)
        tensors = [*given_tensors]
        for i in written_to:
            tensors[i] = tensors[i].clone()
        inputs = again.inputs(tensors)
        found = compiled(*inputs)
        num = sum(len(leaf.tensors) for leaf in results)
        left = iter(again.watched(found[:num], found[num:], inputs, tensors))
        objects = objects_of(leaves)
        given: list[Any] = []
        for leaf in results:
            given.append(leaf.make(*[next(left) for _ in leaf.tensors]))
            if leaf.argument is not None:
                given[-1] = objects[leaf.argument]
            elif leaf.same is not None:
                given[-1] = given[leaf.same]
        held_after = [*rebinds, *snapshot.assigned]
        num_returned = len(given) - len(held_after) - len(written_to)
        for (held, name), x in zip(held_after, given[num_returned:], strict=False):
            held[name] = x
        for i, x, is_so in zip(written_to, given[num_returned + len(held_after) :], without_graph, strict=True):
            with torch.no_grad() if is_so else nullcontext():
                find_place(given_tensors[i].copy_(x))
        result, values = tree_unflatten(given[:num_returned], result_trees[0])
        attributes = [*chain.from_iterable(map(attributes_of, objects))]
        for (i, name, is_there), x in zip(changes, values, strict=True):
            attributes[i].update({name: x}) if is_there else attributes[i].pop(name)
        return result

    again = Again(
        function=lambda tensors: _tensors_of(call(tensors, nullcontext(), is_eager=True)[0]),
        snapshot=snapshot,
        held=len(places),
        put_off=put_off,
        casts=casts(),
        left_out=left_out or (),
    )
    made = Captured(snapshot=snapshot, facts=facts_of_places(snapshot, leaves), run=run, again=again)
    with capturing(known, constants) as calls, tracing(), recomputing(constants, inside), watch:
        try:
            compiled(*[x.view_as(x) if x.requires_grad else x for x in tensors])
        except _CompiledError:
            made.is_compiled = True
        except Exception as e:
            snapshot.restore()
            is_known = isinstance(e, NotCapturedError)
            if isinstance(e, EffectError) or (is_known and not constants.is_read):
                raise
            raise (ReadsError if constants.is_read else NotCapturedError)(str(e) if is_known else _said(e)) from e
    return made


def _said(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    said = text if len(text) <= _MOST_SAID else f"{text[: _MOST_SAID - 1]}…"
    if "file too short" in text:
        said += "; a compiler was killed while it wrote that file: remove it, and the run's other ranks' beside it"
    return said


class _Arguments:
    """What nested arguments hold, to see whether a function changes them."""

    def __init__(self, arguments: Any, is_leaf: Callable[[object], bool]) -> None:
        self._arguments, self._is_leaf = arguments, is_leaf
        self.flat, self._tree = tree_flatten(arguments, is_leaf)

    def have_changed(self) -> bool:
        """Whether they hold others than before."""
        flat, tree = tree_flatten(self._arguments, self._is_leaf)
        return [*map(id, flat)] != [*map(id, self.flat)] or tree != self._tree


@contextmanager
def _unchanged(arguments: _Arguments, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Raise if a function changes more of its arguments than values, or changes modes of torch."""

    def facts() -> tuple[Any, ...]:
        found = [x for x in (*tensors, *arguments.flat) if isinstance(x, Tensor)]
        of_tensors = [(type(x), x.shape, x.stride(), x.dtype, x.requires_grad) for x in found]
        return of_tensors, *surroundings(), torch.get_rng_state().tolist()

    before, modes = facts(), (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_rng_state())
    yield
    if facts() != before:
        torch.set_grad_enabled(modes[0])
        torch.set_default_dtype(modes[1])
        torch.set_rng_state(modes[2])
        raise EffectError("its forward changes its arguments, torch's modes or random numbers, besides values")


def surroundings() -> tuple[Hashable, ...]:
    """Return the modes of torch that a function computes with."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.mha.get_fastpath_enabled(),
        *[is_enabled() for is_enabled in ATTENTION_KERNELS],
    )


@contextmanager
def _swapped(
    places: Sequence[Sequence[tuple[dict[str, Any], str]]], tensors: Sequence[Tensor], modules: Iterable[nn.Module]
) -> Iterator[dict[int, Tensor]]:
    """Put tensors in the places of the modules' parameters and buffers.

    Yields a dict that has at the end, by the numbers of the places, the tensors that the call put in those of buffers.
    """
    found: dict[int, Tensor] = {}
    lists = [(vars(x), weights) for x in modules if (weights := lists_of_weights(x))]
    before = [held[0][0][held[0][1]] for held in places]
    try:
        for each, x, was in zip(places, tensors, before, strict=True):
            be_parameter(x, was)
            for held, name in each:
                held[name] = x
        yield found
        for i, (each, x, was) in enumerate(zip(places, tensors, before, strict=True)):
            new, *others = [held.get(name) for held, name in each]
            if all(now is x for now in (new, *others)):
                continue
            if isinstance(was, nn.Parameter) or others or type(new) is not type(x) or new.requires_grad:
                raise EffectError("its forward assigns parameters, or buffers of several modules or with graphs")
            found[i] = new
    finally:
        for each, x in zip(places, before, strict=True):
            for held, name in each:
                held[name] = x
        for attributes, weights in lists:
            attributes.update(weights)


def _has_windows(x: Tensor) -> bool:
    """Whether a tensor's elements overlap in memory otherwise than by ``expand``."""
    dims = [(n, step) for n, step in zip(x.shape, x.stride(), strict=True) if step]
    return overlaps([n for n, _ in dims], [step for _, step in dims])


def _unread(x: object) -> object:
    """Return a tensor in place of one that no graph may read; None stays."""
    if not isinstance(x, Tensor):
        return x
    leaf = leaf_of(x)
    return leaf.make(*map(unreadable, leaf.tensors))


@contextmanager
def _assigned(
    places: Sequence[tuple[dict[str, Any], str]], unread: Sequence[object], *, some: bool = False
) -> Iterator[list[Any]]:
    """Yield a list that has at the end what the call assigned to attributes, which are then put back.

    What they held is replaced by tensors that cannot be read: a graph has not what an earlier call left there. With
    ``some``, not all need to be assigned.
    """
    before, found = [held[name] for held, name in places], list[Any]()
    for (held, name), x in zip(places, unread, strict=True):
        held[name] = x
    try:
        yield found
    finally:
        found += [held.get(name) for held, name in places]
        for (held, name), x in zip(places, before, strict=True):
            held[name] = x
    if not some and any(new is x or not isinstance(new, Tensor) for new, x in zip(found, unread, strict=True)):
        raise EffectError("its forward assigns tensors to a module in some calls")


def _collect(places: Sequence[Sequence[tuple[dict[str, Any], str]]], leaves: Sequence[Leaf]) -> list[Tensor]:
    tensors = [each[0][0][each[0][1]] for each in places]
    for leaf in leaves:
        tensors += leaf.tensors
    return tensors


def _tensors_of(leaves: Sequence[Leaf]) -> tuple[Tensor, ...]:
    return tuple(x for leaf in leaves for x in leaf.tensors)


def _constants(gm: GraphModule) -> list[tuple[Tensor, int]]:
    """Return the tensors with values that the graph holds: from plans of exchanges, closures and globals."""
    found = []
    for node in gm.graph.nodes:
        if node.op != "get_attr":
            continue
        x = getattr(gm, node.target)
        if isinstance(x, Tensor):
            if x.requires_grad:
                raise NotCapturedError(
                    "it uses a tensor that requires grad, and is neither an argument nor a parameter"
                )
            found.append((x, version_of(x)))
    return found


def _collectives(gm: GraphModule) -> list[Node]:
    """Return what keeps its order: collectives, and checks of values, which decide what comes next."""
    found = [node for node in gm.graph.nodes if node.op == "call_function"]
    return [node for node in found if is_operator(node.target) or is_check(node.target)]


def _reshape(gm: GraphModule) -> None:
    """Turn views into reshapes, which copy where a kernel's result has other strides than torch infers.

    So has the gradient of layer norm. A graph writes to no view, so that a copy does as well.
    """
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    gm.recompile()


def _order(gm: GraphModule, collectives: Sequence[Node]) -> None:
    """Make all collectives appear to write to one tensor, so that compilers keep all of them in order; so with random
    numbers.
    """
    graph = gm.graph
    for nodes in filter(None, (collectives, [node for node in graph.nodes if draws(node.target)])):
        with graph.inserting_before(next(iter(node for node in graph.nodes if node.op != "placeholder"))):
            kind: Any = {"dtype": torch.float32, "device": torch.device("cpu"), "layout": torch.strided}
            order = graph.call_function(torch.ops.aten.full.default, ([1], 0.0), {**kind, "pin_memory": False})
        order.meta["val"] = tree_leaves(nodes[0].meta["val"])[0].new_zeros(1, dtype=torch.float32, device="cpu")
        for node in nodes:
            if draws(node.target):
                node.target, node.args = drawing_in_order(node.target), (order, *node.args)
            else:
                node.target = node.target.overloadpacket.ordered
                node.args = (*node.args, order)
            node.meta.pop("eager_input_vals", None)  # which ask for the strides that eager code had
    gm.recompile()
