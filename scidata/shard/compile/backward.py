"""What the backward graph of a captured call cannot do, done by running the call once more, eagerly.

A graph's backward pass cannot be differentiated, and needs a gradient for every result. So if ``create_graph=True``
asks for a derivative, or the loss uses only some of the results, the eager function is run again on the same inputs,
and autograd differentiates that run; likewise if only some gradients are requested, as the graph sums all. In that run
the forward collectives return their results in the graph: this rank sends the messages of an eager step, whatever other
ranks run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from scidata.device_mesh.board import common_postings, has_peers, record_error
from scidata.errors import UnsupportedShardOp
from scidata.shard.base import ShardBase
from scidata.shard.comm.operators import telling
from scidata.shard.compile.objects import leaves_in
from scidata.shard.compile.state import STATISTICS, Snapshot
from scidata.shard.compile.torch_internals import graph_of, results_of_graph, watch_backward
from scidata.shard.torch_internals import (
    accumulating,
    backward_pass,
    is_accumulated,
    is_needed,
    keeps_graph,
    version_of,
)


@dataclass(eq=False, kw_only=True)
class Again:
    """A captured call that can be run once more."""

    function: Callable[[Sequence[Tensor]], Sequence[Tensor]]  # takes all tensors, and returns those of the results
    snapshot: Snapshot
    held: int  # how many of the tensors are parameters and buffers; the others are of arguments
    put_off: dict[int, frozenset[str]]  # of parameters whose sums are put off: the groups, by place among the tensors
    casts: Sequence[tuple[str, bool, torch.dtype]]  # Autocast of devices: whether it is on, and the dtype
    # numbers of results that require grad, for whose gradients there is no graph, as no loss uses them
    left_out: Sequence[int]
    unused: Sequence[int] = ()  # places of tensors that require grad, and get none
    unread: Sequence[int] = ()  # of these, those that no result depends on
    written: Sequence[int] = ()  # places of buffers and arguments that it writes to, and computes with
    draws: bool = False  # whether it draws random numbers
    sends: bool = False  # whether its backward graph has collectives
    next_left_out: Sequence[int] | None = None  # other such numbers, by a backward pass since
    name: str = ""
    mesh: DeviceMesh | None = None  # whose ranks make such calls together

    @property
    def of_left_out(self) -> list[int]:
        """Places of the unused tensors that results which are left out depend on."""
        return [i for i in self.unused if i not in self.unread]

    def inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the graph's input tensors; those with gradients are views made by :class:`_Inputs`."""
        found = [*tensors]
        for i in self.unused:
            found[i] = found[i].detach()
        trained = [i for i, x in enumerate(found) if x.requires_grad]
        if trained and torch.is_grad_enabled():
            views: Any = _Inputs.apply((self, trained, tensors), *[found[i] for i in trained], *found[self.held :])  # type: ignore[no-untyped-call, unused-ignore]
            for i, x in zip(trained, views, strict=True):
                found[i] = x
        return found

    def drawn(self, tensors: Sequence[Tensor]) -> list[tuple[Any, Tensor]]:
        """Return the sources of its random numbers, and their states."""
        sources: list[Any] = []
        if self.draws:
            others = {x.device for x in tensors} - {torch.device("cpu")}
            sources = [torch, *map(torch.get_device_module, others)]
        return [(source, source.get_rng_state()) for source in sources]

    def watched(
        self, results: Sequence[Tensor], told: Sequence[Tensor], inputs: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return results that check before backward whether the backward graph applies; ``told`` are the results of its
        collectives.
        """
        node = next(filter(None, map(graph_of, results)), None)
        if node is None or results_of_graph(node) is None:
            return results
        watch_backward(node, self._backward)
        if (of_inputs := self.inputs_of(node)) is not None:
            of_inputs.told = told
        found = [*results]
        if self.left_out:
            given = [*[results[i] for i in self.left_out], *[x for x in inputs if x.requires_grad]]
            given += [tensors[i] for i in self.of_left_out]
            others: Any = _LeftOut.apply(self, *given)  # type: ignore[no-untyped-call, unused-ignore]
            for i, x in zip(self.left_out, others, strict=True):
                found[i] = x
        return found

    def _backward(self, node: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        """Return the gradients of a graph's inputs; None if its backward graph applies."""
        inputs = self.inputs_of(node)
        of_results = {i: grads[k] for i, k in (results_of_graph(node) or {}).items()}
        given = {i: grad for i, grad in of_results.items() if grad is not None}
        if len(given) < len(of_results):
            if not given:
                return (None,) * len(node.next_functions)
            self.next_left_out = [*self.left_out, *(of_results.keys() - given.keys())]
        elif not torch.is_grad_enabled() and (inputs is None or self._takes_all(inputs)):
            return None
        if inputs is None:
            return None
        found = self.gradients(inputs, given)
        return tuple(found.get(inputs.trained[k]) if each is inputs else None for each, k in node.next_functions)

    def _takes_all(self, inputs: Any) -> bool:
        """Whether the present pass takes all gradients that the graph sums, and averages the deferred ones."""
        nodes = zip(inputs.trained, inputs.next_functions, strict=False)
        return all(
            is_accumulated(node) if i in self.put_off and is_needed(node) else not self.sends or is_needed(node)
            for i, (node, _) in nodes
        )

    def inputs_of(self, node: Any) -> Any:
        """Return the node of :class:`_Inputs` before this one; None if the call had other inputs."""
        return next((each for each, _ in node.next_functions if getattr(each, "again", None) is self), None)

    def gradients(self, inputs: Any, of_results: Mapping[int, Tensor]) -> dict[int, Tensor | None]:
        """Run the call again, and return the gradients of its tensors by position."""
        create_graph = torch.is_grad_enabled()
        self._check(inputs)
        if create_graph and self.mesh is not None and inputs.last_told != backward_pass():
            inputs.last_told = backward_pass()
            tell_ranks(self.name, self.mesh, "by a graph" if self.sends else "")
        nodes = {i: node for i, (node, _) in zip(inputs.trained, inputs.next_functions, strict=False)}
        places = [*filter(lambda i: is_needed(nodes[i]), nodes), *self.of_left_out]
        averaged = [nodes[i] for i in nodes.keys() & self.put_off.keys() if is_accumulated(nodes[i])]
        buffers = [x if x.requires_grad else x.clone() for x in inputs.held]  # which the function may write to
        arguments = [x.clone() if i in self.written else x for i, x in enumerate(inputs.saved_tensors, self.held)]
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            # views, as an argument may have been computed from another, or by an earlier call from the parameters:
            # autograd is not to go on from it
            tensors = [x.view_as(x) if x.requires_grad else x for x in (*buffers, *arguments)]
            for source, state in inputs.drawn:
                stack.callback(source.set_rng_state, source.get_rng_state())
                source.set_rng_state(state)
            for kind, is_on, dtype in self.casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on))
            with telling([x.clone() for x in inputs.told]):
                results = self.function(tensors)
        used, grads, chosen = [results[i] for i in of_results], [*of_results.values()], [tensors[i] for i in places]
        with accumulating(averaged):
            found = torch.autograd.grad(used, chosen, grads, create_graph=create_graph, allow_unused=True)
        return dict(zip(places, found, strict=True))

    def _check(self, inputs: Any) -> None:
        changed = [i for i, x in enumerate(inputs.held) if version_of(x) != inputs.versions[i]]
        names = {self.snapshot.places[i][0][1] for i in changed} - {*STATISTICS}
        if names or not self.snapshot.holds():
            error = UnsupportedShardOp(
                "a compiled call is run again in backward, for create_graph=True or as the loss uses some of its "
                f"results only, and {f'its {min(names)!r}' if names else 'its module'} has changed since. "
                "Remedy: in such steps call the module's forward(...), which is not compiled"
            )
            record_error(error)  # the others may be in a collective by now
            raise error


_num_told: Counter[str] = Counter()


def tell_ranks(name: str, mesh: DeviceMesh, how: str) -> None:
    """Post how this rank computes gradients that are differentiated; the last rank raises if ranks do not fit together.

    A graph's rank runs the call again for that, so that two backward passes meet other ranks where an eager one adds
    gradients first. ``how`` is "" where neither sends. No rank waits.
    """
    _num_told[name] += 1
    ranks: list[int] = mesh.mesh.flatten().tolist()
    posts, key = common_postings(), f"differentiated/{hash((*ranks,))}/{name}/{_num_told[name]}"
    found = posts.vote(key, len(ranks), how)
    if found is None:
        return
    posts.remove_vote(key)
    posts.remove(*[f"{key}/found/{i}" for i in range(len(found))])
    if "by a graph" in found and len({*found}) > 1:
        error = UnsupportedShardOp(
            f"create_graph=True in the backward pass of {name}, which some of ranks {', '.join(map(str, ranks))} run "
            "by a compiled graph and some without one. Remedy: in such steps call the module's forward(...) on all"
        )
        record_error(error)  # the others may be in a collective by now
        raise error


def mesh_of(arguments: object) -> DeviceMesh | None:
    """Return the mesh of the first sharded tensor among some arguments; None if there are no other ranks."""
    shard = next((x for x in leaves_in(arguments) if isinstance(x, ShardBase)), None)
    return None if shard is None or not has_peers() else shard.spec.device_mesh


def watch_results(results: object, tell: Callable[[], None]) -> None:
    """Call a function once in each backward pass that differentiates the gradients of some results."""
    last = -1

    def look(_: object) -> None:
        nonlocal last
        if torch.is_grad_enabled() and last != backward_pass():
            last = backward_pass()
            tell()

    for x in leaves_in(results):
        part = x.local if isinstance(x, ShardBase) else x
        if isinstance(part, Tensor) and part.grad_fn is not None:
            part.grad_fn.register_prehook(look)


class _Inputs(Function):
    """Hand on a call's inputs that get gradients, and keep all for another run."""

    @staticmethod
    def forward(ctx: Any, how: tuple[Again, list[int], list[Tensor]], *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.again, ctx.trained, tensors = how
        ctx.told, ctx.last_told = (), -1
        kept = [x.clone() if i in ctx.again.written else x for i, x in enumerate(tensors)]
        ctx.held = kept[: ctx.again.held]
        ctx.versions = [*map(version_of, ctx.held)]
        ctx.drawn = ctx.again.drawn(tensors)
        ctx.save_for_backward(*kept[ctx.again.held :])
        ctx.set_materialize_grads(False)
        return tuple([x.view_as(x) for x in xs[: len(ctx.trained)]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if not keeps_graph():
            ctx.told = ()
        return None, *grads, *[None] * (len(ctx.next_functions) - len(grads))


class _LeftOut(Function):
    """Pass on results without gradients in the graph: if a loss uses them, the call is run again."""

    @staticmethod
    def forward(ctx: Any, again: Again, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.again = again
        ctx.set_materialize_grads(False)
        return tuple([x.view_as(x) for x in tensors[: len(again.left_out)]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        again = ctx.again
        given = {i: grad for i, grad in zip(again.left_out, grads, strict=True) if grad is not None}
        if not given:
            return None, *(None,) * len(ctx.next_functions)
        again.next_left_out = [i for i in again.left_out if i not in given]
        inputs = again.inputs_of(ctx)
        found = again.gradients(inputs, given)
        return None, *[None] * len(grads), *[found.get(i) for i in (*inputs.trained, *again.of_left_out)]
