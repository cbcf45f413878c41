"""``compile``: run steps on shards as graphs, of the whole model if possible, else of its largest modules."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import RLock, get_ident
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from scidata.core.checks import check_choice, check_flag, check_int, check_mapping
from scidata.core.keywords import checked_keywords
from scidata.errors import ConfigError
from scidata.shard.attention.algorithms import chosen_by_user
from scidata.shard.comm.operators import OtherValuesError, expecting, tapes, telling
from scidata.shard.comm.operators import noting as keep
from scidata.shard.compile.backward import mesh_of, tell_ranks, watch_results
from scidata.shard.compile.capture import Captured, capture, casts, surroundings
from scidata.shard.compile.objects import is_dict, leaves_in
from scidata.shard.compile.reach import (
    AssignsError,
    ChangesError,
    EffectError,
    NotCapturedError,
    ReadsError,
    WritesError,
)
from scidata.shard.compile.state import Snapshot
from scidata.shard.compile.torch_internals import (
    Compiler,
    Reads,
    Run,
    called_module,
    checkpoint,
    compiled_call,
    eager_call,
    forward_of_wrapped,
    has_function_mode,
    has_global_hooks,
    has_hooks,
    inductor,
    make_boxed,
    set_compiled_call,
)
from scidata.shard.compile.values import Leaf, Values, aliases_of, firsts_of, leaf_of, objects_of
from scidata.shard.compile.watch import may_watch, noting
from scidata.shard.op_table import FALLBACKS
from scidata.shard.torch_internals import backward_pass, has_dual_level, is_in_a_mode, is_transforming, tree_flatten

_Model = TypeVar("_Model", bound=Callable[..., Any])
_BACKENDS = ("inductor", "aot_eager", "eager")
_MOST_SEEN = 256  # calls that have come once
_MANY_NEW = 32  # calls without a graph, one after the other, of which a warning tells
_MOST_USES = 2
_MOST_NOTES = 16  # of eager calls that have come once
_MOST_MISSED = 8.0  # calls that were ended by other values than their graphs took for granted
_MOST_MISSED_AT_ONCE = 2
_AMENDS = 1 / 32  # of one of these, by a call that was not
_inside: list[int] = []  # threads that run regions
_lock = RLock()
_capturing: list[int] = []  # the thread that captures


@dataclass(frozen=True, kw_only=True)
class Options:
    """How graphs are compiled, for all regions of a model."""

    backend: str | Compiler
    mode: str | None
    options: Mapping[str, Any] | None
    fullgraph: bool
    limit: int

    def compilers(self) -> tuple[Compiler, Compiler]:
        """Return the compilers of forward and backward graphs."""
        if self.backend == "inductor":
            return inductor(self.mode, self.options)
        if callable(self.backend):
            return self.backend, self.backend
        as_it_is: Compiler = lambda gm, inputs: make_boxed(gm.forward)  # noqa: E731
        return as_it_is, as_it_is


class Region:
    """A module or function whose calls are captured: the first call of a key runs eagerly, the second is captured.

    ``captured``: by key, one for each state of the module.
    ``reason``: why it is run eagerly; "" where it is not.
    ``parts``: the regions inside a module that is run eagerly.
    """

    def __init__(self, call: Callable[..., Any], module: nn.Module | None, name: str, options: Options) -> None:
        self._call, self._module, self.name, self._options = call, module, name, options
        self.captured: dict[Any, list[Captured]] = {}
        self.reason = ""
        self.parts: list[Region] = []
        self._seen: dict[Any, None] = {}  # keys
        self._left_out: dict[Any, list[Sequence[int]]] = {}  # by key: results that losses did not use, each time others
        self._told: set[str] = set()
        self._ran: dict[int, CodeType] = {}  # of the first call
        self._values: Values | None = None  # where integers among the arguments are constants of graphs
        self._takes_for_granted = False  # whether graphs may do so with bools and integers that code reads
        # by key, of eager calls: the results of collectives of integers, and what was read
        self._notes: dict[Any, tuple[list[tuple[str, torch.Tensor]], Reads]] = {}
        self._is_differentiated = False
        self._changes_dicts = False  # among its arguments
        self._num_new = 0  # calls that are the first of their key, one after the other
        self._num_missed = 0.0  # calls with other values than a graph takes for granted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module or function by a graph if there is one; in a checkpoint that runs again, as in its forward."""
        if get_ident() in tapes:
            return self._plainly(self._call, args, kwargs)
        if (around := checkpoint()) is None or (before := around.next_of(self)) is None:
            before = None
            is_special = FALLBACKS or has_function_mode() or is_in_a_mode() or is_transforming() or has_dual_level()
            is_eager = bool(self.reason or is_special or has_global_hooks())
        else:
            is_eager = before.graph is None
        if is_eager:
            return self._plainly(self._call, args, kwargs)
        with _running():
            if self._module is not None and has_hooks(self._module):
                return self._with_hooks(args, kwargs, before)
            return self._run(self._call, args, kwargs, before)

    def _plainly(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call without a graph; if gradients of the first are differentiated, run later ones eagerly, too."""
        result = call(*args, **kwargs)
        if torch.is_grad_enabled() and (mesh := mesh_of((args, kwargs))) is not None:

            def tell() -> None:
                self._is_differentiated |= not self.captured
                tell_ranks(self.name, mesh, "without a graph")

            watch_results(result, tell)
        return result

    def _with_hooks(self, args: Any, kwargs: Any, before: Run | None) -> Any:
        """Call a module's own hooks, and the graph in place of its forward."""
        module, forward = self._module, self._module.forward  # type: ignore[union-attr]
        own = vars(module).get("forward")

        def run(*args: Any, **kwargs: Any) -> Any:
            vars(module).pop("forward") if own is None else vars(module).update(forward=own)
            return self._run(forward, args, kwargs, before)

        vars(module)["forward"] = run
        try:
            return self._call(*args, **kwargs)
        finally:
            vars(module).pop("forward", None) if own is None else vars(module).update(forward=own)

    def _run(self, call: Callable[..., Any], args: Any, kwargs: Any, before: Run | None = None) -> Any:
        try:
            is_object = (lambda x: is_dict(x) and x is not kwargs) if self._changes_dicts else None
            flat, tree = tree_flatten((args, kwargs), is_object)
            leaves = [leaf_of(x) for x in flat]
        except NotCapturedError as e:
            return self._eagerly(call, args, kwargs, str(e))
        if before is not None:
            found: Captured = before.graph
            leaves = [leaf.by_value(keeps=False) for leaf in leaves] if found.is_by_value else leaves
            return self._by_graph(found, leaves, call, args, kwargs)
        # what a function computes with, besides its arguments
        what = firsts_of([*flat, *objects_of(leaves)]), *casts(), *surroundings(), chosen_by_user()
        key = tree, *[leaf.key for leaf in leaves], *what, aliases_of([x for leaf in leaves for x in leaf.tensors])
        all_leaves = leaves
        if self._is_differentiated:
            return self._eagerly(call, args, kwargs, "its gradients are differentiated (create_graph=True)")
        if self._values is not None:
            key = (*key, *self._values.key(leaves))
            leaves = [leaf.by_value(keeps=False) for leaf in leaves]
        group, is_backward = self.captured.get(key, []), backward_pass() != -1
        captured = next((each for each in group if each.holds(leaves)), None)
        if captured is not None and captured.num_missed >= _MOST_MISSED_AT_ONCE:
            group.remove(captured)  # and capture what is read now
            captured = None
        if captured is not None and (captured.next_left_out is None or is_backward):
            return self._by_graph(captured, leaves, call, args, kwargs)
        if captured is not None and captured.next_left_out is not None:
            group.remove(captured)
            self._left_out.setdefault(key, []).append(captured.next_left_out)
        left_out = self._left_out.get(key, [])
        if len(left_out) > _MOST_USES:
            self._tell("calls are run eagerly whose losses use now some of its results, and now others")
            return self._plainly(call, args, kwargs)
        if not may_watch():
            return self._plainly(call, args, kwargs)
        if not self._is_ready(key, is_backward=is_backward):
            return self._first(key, call, args, kwargs)
        if sum(map(len, self.captured.values())) >= self._options.limit:
            self._tell(f"other layouts are run eagerly: it was captured {self._options.limit} times, for as many")
            return self._plainly(call, args, kwargs)
        made, error = None, NotCapturedError()
        with _capture_alone() as is_alone:
            try:
                if is_alone:
                    made = self._captured(key, call, flat, all_leaves, tree, left_out[-1] if left_out else None)
            except NotCapturedError as e:
                error = e
        if not is_alone:  # without the lock: the call waits for other ranks, where a thread may wait for it
            return self._plainly(call, args, kwargs)
        if made is not None:
            made.again.name, made.again.mesh, made.is_by_value = self.name, mesh_of(flat), self._values is not None
            self.captured.setdefault(key, group).append(made)
            return self._by_graph(made, leaves, call, args, kwargs)
        if isinstance(error, ChangesError) and not self._changes_dicts:
            self._changes_dicts = True
            return self._run(call, args, kwargs)
        is_effect = isinstance(error, EffectError)
        if self._values is None and not is_effect and any(leaf.by_value(keeps=False).is_fixed for leaf in leaves):
            self._values = Values()
            return self._run(call, args, kwargs)
        if isinstance(error, ReadsError) and not self._takes_for_granted:
            self._takes_for_granted = True
            return self._first(key, call, args, kwargs)
        return self._eagerly(call, args, kwargs, str(error))

    def _first(self, key: Hashable, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the first call of a key eagerly, and note what its capture needs."""
        with nullcontext() if self._ran else noting(self._ran), self._noting(key):
            result = self._plainly(call, args, kwargs)
        self._num_new += 1
        if self._num_new == _MANY_NEW:
            self._tell(f"{_MANY_NEW} calls in a row had layouts or arguments that were new, and ran eagerly")
        if self._values is not None and self._num_new > _MOST_SEEN:
            self._open("integers among its arguments, whose values it reads, differ from call to call")
        return result

    @contextmanager
    def _noting(self, key: Hashable) -> Iterator[None]:
        """Note values that an eager call reads, where graphs take such for granted."""
        known: list[tuple[str, torch.Tensor]] = []
        reads = Reads()
        with (
            nullcontext() if self._values is None else keep(known),
            reads if self._takes_for_granted else nullcontext(),
        ):
            yield
        if self._needs_notes:
            self._notes[key] = known, reads
            if len(self._notes) > _MOST_NOTES:
                del self._notes[next(iter(self._notes))]

    @property
    def _needs_notes(self) -> bool:
        return self._takes_for_granted or self._values is not None

    def _by_graph(
        self, captured: Captured, leaves: Sequence[Leaf], call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a graph; if other ranks' integers differ from those it was captured for, continue eagerly from there."""
        self._num_new = 0
        if (around := checkpoint()) is not None:
            around.note(self, captured)
        if not captured.takes_for_granted:
            return captured.run(leaves)
        results: list[torch.Tensor] = []
        drawn = captured.again.drawn([x for leaf in leaves for x in leaf.tensors])
        try:
            with expecting(captured.expected, results):
                result = captured.run(leaves)
            captured.num_missed, self._num_missed = 0, max(0.0, self._num_missed - _AMENDS)
            return result
        except OtherValuesError:
            if around is not None:
                around.note(self, None)
            for source, state in drawn:
                source.set_rng_state(state)
        with telling(results):
            result = self._plainly(call, args, kwargs)
        captured.num_missed, self._num_missed = captured.num_missed + 1, self._num_missed + 1
        if self._num_missed >= _MOST_MISSED:
            self._open("values that it reads, or other ranks' integers, changed where its arguments' did not")
        return result

    def _captured(
        self,
        key: Hashable,
        call: Callable[..., Any],
        flat: Any,
        leaves: Sequence[Leaf],
        tree: Any,
        left_out: Sequence[int] | None,
    ) -> Captured:
        """Capture a call without values, else with those of constants, of integers among arguments and buffers, and
        at last of short buffers.
        """
        # whether values of constants are read; whether those of buffers are: 1 of integers, 2 of short ones, too
        ways, reason = [(False, 0), (True, 0), (True, 1), (True, 2)], NotCapturedError()
        notes = self._notes.pop(key) if self._needs_notes else ([], Reads())
        if self._values is not None:
            ways, leaves = ways[1:], [leaf.by_value(keeps=True) for leaf in leaves]
        for folds, fixes in ways:
            try:
                return self._capture(call, flat, leaves, tree, left_out, notes, folds=folds, fixes=fixes)
            except EffectError:
                raise
            except NotCapturedError as e:
                reason = reason if fixes else e
        raise reason

    def _eagerly(self, call: Callable[..., Any], args: Any, kwargs: Any, reason: str) -> Any:
        """Run a call that cannot be captured; if it raises, later calls are still tried."""
        result = self._plainly(call, args, kwargs)
        self._open(reason)
        return result

    def _is_ready(self, key: Hashable, *, is_backward: bool) -> bool:
        """Whether calls of a key may be captured: after the first, which makes what is exchanged once, and kept."""
        is_new = key not in self._seen or (self._needs_notes and key not in self._notes)
        if is_new and len(self._seen) >= _MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        self._seen[key] = None
        return not is_new and not is_backward

    def _capture(
        self,
        call: Callable[..., Any],
        flat: Sequence[Any],
        leaves: Sequence[Leaf],
        tree: Any,
        left_out: Sequence[int] | None,
        notes: tuple[Sequence[tuple[str, torch.Tensor]], Reads],
        *,
        folds: bool,
        fixes: int,
        assigned: Sequence[tuple[dict[str, Any], str]] = (),
        written: Sequence[int] = (),
    ) -> Captured:
        options, fuses = self._options, self._options.backend == "inductor"
        firsts, objects = firsts_of(flat), objects_of(leaves)
        others = [x for x in leaves_in(flat) if isinstance(x, nn.Module | type | FunctionType)]
        snapshot = Snapshot(
            [self._module or self._call, *others, *map(type, objects)], ran=self._ran, assigned=assigned
        )
        once = [x for i, leaf in enumerate(leaves) if firsts[i] == i for x in leaf.objects]
        if len({*map(id, once)}) < len(once) or snapshot.reaches(objects):
            raise NotCapturedError("the arguments hold an object twice, or one that the module holds")
        inside = [x for x in snapshot.modules if x is not self._module]
        hooked = next((type(x).__name__ for x in inside if has_hooks(x, refused=True)), None)
        if hooked is not None:
            raise NotCapturedError(f"a {hooked} inside it has hooks")
        if fixes and not snapshot.fix(floats=fixes > 1):
            raise NotCapturedError("it has no such buffers")
        given = leaves, firsts, tree, snapshot, options.compilers()
        try:
            return capture(call, *given, left_out, notes[0], notes[1].found, written, fuses=fuses, folds=folds)
        except AssignsError as e:
            assigned = [*assigned, *e.assigned]
        except WritesError as e:
            if {*e.written} <= {*written}:
                raise
            written = sorted({*written, *e.written})
        how: Any = {"folds": folds, "fixes": fixes, "assigned": assigned, "written": written}
        return self._capture(call, flat, leaves, tree, left_out, notes, **how)

    def _open(self, reason: str) -> None:
        """Run eagerly from now on, and let the modules inside be captured by themselves."""
        self.reason = reason
        if self._options.fullgraph:
            raise ConfigError(f"{self.name} cannot be captured as a whole: {reason}; leave fullgraph=True out")
        named = [] if self._module is None else [*self._module.named_children()]
        for name, module in named:
            self.parts += regions_below(module, f"{self.name}.{name}", self._options)
        for part in self.parts:
            part._takes_for_granted = self._takes_for_granted
        inside = f"; its parts are compiled: {', '.join(part.name for part in self.parts)}" if self.parts else ""
        self._tell(f"it is run eagerly: {reason}{inside}")

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            if not dist.is_initialized() or dist.get_rank() == 0:
                warnings.warn(f"scidata.compile: {self.name}: {text}", stacklevel=5)

    def __str__(self) -> str:
        found = [str(each) for group in self.captured.values() for each in group]
        return f"{self.name}: {'; '.join(found) or (self.reason and 'eager: ' + self.reason) or 'not captured yet'}"

    def walk(self) -> Iterator[Region]:
        """Yield this region and the regions inside it."""
        yield self
        for part in self.parts:
            yield from part.walk()


@contextmanager
def _running() -> Iterator[None]:
    """Run a region: not while another thread captures, when modules hold tensors without values."""
    thread = get_ident()
    _inside.append(thread)
    try:
        if _capturing and thread not in _capturing:
            with _lock:
                pass
        yield
    finally:
        _inside.remove(thread)


@contextmanager
def _capture_alone() -> Iterator[bool]:
    """Yield whether no other thread runs a region; threads that arrive meanwhile wait."""
    thread = get_ident()
    with _lock:
        _capturing.append(thread)
        try:
            yield all(each == thread for each in [*_inside])
        finally:
            _capturing.remove(thread)


def regions_below(module: nn.Module, name: str, options: Options) -> list[Region]:
    """Make a module a region; containers that are never called pass this on to their children, single operations are
    skipped.
    """
    children = [*module.named_children()]
    if type(module).forward is nn.Module.forward or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [each for part, child in children for each in regions_below(child, f"{name}.{part}", options)]
    if not children and type(module).__module__.startswith("torch.nn"):
        return []
    region = Region(eager_call(module), module, name, options)
    set_compiled_call(module, region)
    return [region]


def regions_of(model: object) -> list[Region]:
    """Return the regions of a compiled model, from the whole to its parts."""
    region = compiled_call(model) or forward_of_wrapped(model) or model
    return [*region.walk()] if isinstance(region, Region) else []


@checked_keywords
def compile(
    model: _Model,
    *,
    backend: str | Compiler = "inductor",
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    options: Mapping[str, Any] | None = None,
    limit: int = 8,
) -> _Model:
    """Run a model's steps on shards as compiled graphs, forward and backward, their collectives inside.

    A call of new layouts is run eagerly, its second captured: scidata's handlers run once on tensors without values,
    and what they do to the local parts is written down. No rank communicates for that, and a graph's collectives are
    those of an eager step, in the same order. A bool or an integer that code reads of its values is taken for granted:
    the graph checks it, and a call where it is another continues eagerly from there. Where more depends on values (a
    mask's number of rows), or a module inside has hooks, the module is run eagerly and its parts are compiled, with one
    warning that says why; :func:`scidata.explain` lists the graphs.

    A graph is used again while layouts, sizes, strides, dtypes, attributes of the modules, globals and closures that
    they name, autocast and grad mode are the same; else the call is captured anew, ``limit`` times, and is run eagerly
    from then on.

    ``torch.compile(model)`` and ``model.compile()`` of a model of :func:`scidata.parallelize` do the same.

    Parameters
    ----------
    model : Module or Callable
        A module is compiled in place, and keeps its class, its parameters and its hooks. Of a function a new one is
        returned.
    backend : str or Callable, default "inductor"
        ``"inductor"``; ``"aot_eager"`` runs the graphs by torch's operators; or a function of a graph of these and
        example tensors, which returns a function of a list of tensors.
    mode : str or None, optional
        As of ``torch.compile``.
    dynamic : bool or None, optional
        As of ``torch.compile``, but ``True`` is refused: sizes are part of layouts, so each has a graph.
    fullgraph : bool, default False
        Raise if the whole cannot be captured.
    options : Mapping[str, Any] or None, optional
        Of inductor, as of ``torch.compile``.
    limit : int, default 8
        Captures of each module, for different layouts and states.

    Returns
    -------
    Module or Callable
        The model.

    Raises
    ------
    ConfigError
        A model that cannot be called, an unknown backend, mode or option, ``dynamic=True``, or with ``fullgraph`` a
        model that cannot be captured.

    Examples
    --------
    >>> model = scidata.compile(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GELU()), backend="aot_eager")
    >>> for step in range(3):
    ...     y = model(torch.ones(1, 2))
    >>> print(scidata.explain(model, torch.ones(1, 2)).compiled[0])  # doctest: +ELLIPSIS
    Sequential: ... operations forward (0 collectives), ... operations backward (0 collectives)
    """
    if not callable(model):
        raise ConfigError(f"model: expected a module or a function, not {type(model).__name__}")
    if not callable(backend):
        check_choice("backend", backend, _BACKENDS)
    check_flag("fullgraph", fullgraph)
    check_mapping("options", options, '{"max_autotune": True}')
    check_flag("dynamic", dynamic or False)
    if dynamic:
        raise ConfigError("dynamic=True: sizes are part of layouts, so each has a graph of its own; leave it out")
    chosen = Options(
        backend=backend, mode=mode, options=options, fullgraph=fullgraph, limit=check_int("limit", limit, least=1)
    )
    chosen.compilers()  # raises for an unknown mode or option
    module = model if isinstance(model, nn.Module) else called_module(model)
    if module is not None:
        of_module: Any = Region(eager_call(module), module, type(module).__name__, chosen)
        if model is not module:
            return of_module
        set_compiled_call(module, of_module)
        if type(module).forward is nn.Module.forward:  # a list of modules, say, which is never called itself
            of_module.parts = regions_below(module, of_module.name, chosen)
        return model
    region = Region(model, None, getattr(model, "__name__", type(model).__name__), chosen)
    return functools.wraps(model)(region)  # type: ignore[return-value]
