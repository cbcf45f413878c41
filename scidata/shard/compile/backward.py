"""What the backward graph of a captured call cannot do, done by running the call once more, eagerly.

A graph's backward pass has no derivative of its own, and takes a gradient of every result. So where
``create_graph=True`` asks for a derivative, or the loss uses some of the results only, the eager function is run again
on the same inputs, and autograd goes through that. Gradients that nobody averages are summed here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from scidata.device_mesh.board import record_error
from scidata.errors import UnsupportedShardOp
from scidata.shard.comm.operators import group_of
from scidata.shard.comm.sums import all_reduce_sum
from scidata.shard.compile.state import Snapshot
from scidata.shard.compile.torch_internals import graph_of, results_of_graph, watch_backward
from scidata.shard.torch_internals import is_accumulated, version_of

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # no result of a training step depends on them


@dataclass(eq=False, kw_only=True)
class Again:
    """A captured call, as it can be run once more."""

    function: Callable[[Sequence[Tensor]], Sequence[Tensor]]  # takes all tensors, and returns those of the results
    snapshot: Snapshot
    held: int  # how many of the tensors are parameters and buffers; the others are of arguments
    put_off: dict[int, frozenset[str]]  # of parameters whose sums are put off: the groups, by place among the tensors
    casts: Sequence[tuple[str, bool, torch.dtype]]  # Autocast of devices: whether it is on, and the dtype
    # numbers of results that require grad, for whose gradients there is no graph, as no loss uses them
    left_out: Sequence[int]
    unused: Sequence[int] = ()  # places of tensors that require grad, and get none
    draws: bool = False  # whether it draws random numbers
    differs: bool = False  # whether it has collectives, and other ranks may run it eagerly, as they hold other integers
    next_left_out: Sequence[int] | None = None  # other such numbers, by a backward pass since

    def inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors as the graph gets them: those that get gradients as views, made by :class:`_Inputs`."""
        found = [*tensors]
        for i in self.unused:
            found[i] = found[i].detach()
        trained = [i for i, x in enumerate(found) if x.requires_grad]
        if trained and torch.is_grad_enabled():
            views: Any = _Inputs.apply((self, trained, tensors), *[found[i] for i in trained], *found[self.held :])  # type: ignore[no-untyped-call]
            for i, x in zip(trained, views, strict=True):
                found[i] = x
        return found

    def drawn(self, tensors: Sequence[Tensor]) -> list[tuple[Any, Tensor]]:
        """Return the sources of the random numbers that it draws, and their states."""
        sources: list[Any] = []
        if self.draws:
            others = {x.device for x in tensors} - {torch.device("cpu")}
            sources = [torch, *map(torch.get_device_module, others)]
        return [(source, source.get_rng_state()) for source in sources]

    def watched(
        self, results: Sequence[Tensor], inputs: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return results whose backward graph will be run only where it is right, of the tensors as the graph got them
        and as they are.
        """
        node = next(filter(None, map(graph_of, results)), None)
        if node is None or results_of_graph(node) is None:
            return results
        watch_backward(node, self._backward)
        found = [*results]
        if self.left_out:
            given = [*[results[i] for i in self.left_out], *[x for x in inputs if x.requires_grad]]
            given += [tensors[i] for i in self.unused]
            others: Any = _LeftOut.apply(self, *given)  # type: ignore[no-untyped-call]
            for i, x in zip(self.left_out, others, strict=True):
                found[i] = x
        return found

    def _backward(self, node: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        """Return the gradients of a graph's inputs; None where its backward graph shall be run."""
        of_results = {i: grads[k] for i, k in (results_of_graph(node) or {}).items()}
        given = {i: grad for i, grad in of_results.items() if grad is not None}
        if len(given) < len(of_results):
            if not given:
                return (None,) * len(node.next_functions)
            self.next_left_out = [*self.left_out, *(of_results.keys() - given.keys())]
        elif not torch.is_grad_enabled():
            return None
        inputs = self.inputs_of(node)
        if inputs is None:
            return None
        found = self.gradients(inputs, given)
        return tuple(found[inputs.trained[k]] if each is inputs else None for each, k in node.next_functions)

    def inputs_of(self, node: Any) -> Any:
        """Return the node of :class:`_Inputs` before this one; None where the call had other inputs."""
        return next((each for each, _ in node.next_functions if getattr(each, "again", None) is self), None)

    def gradients(self, inputs: Any, of_results: Mapping[int, Tensor]) -> dict[int, Tensor | None]:
        """Run the call again, and return the gradients of its tensors by their places."""
        create_graph = torch.is_grad_enabled()
        if create_graph and self.differs:  # the graph's rank has more collectives than a rank without one then
            error = UnsupportedShardOp(
                "create_graph=True in the backward pass of a compiled call that reads integers, which may differ from "
                "rank to rank. Remedy: in such steps call the module's forward(...), which is not compiled"
            )
            record_error(error)  # the others may be in a collective by now
            raise error
        self._check(inputs)
        held = [x if x.requires_grad else x.clone() for x in inputs.held]  # buffers, which the function may write to
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            # views, as one argument may have been computed from another: autograd is not to go on from it
            tensors = [*held, *[x.view_as(x) if x.requires_grad else x for x in inputs.saved_tensors]]
            for source, state in inputs.drawn:
                stack.callback(source.set_rng_state, source.get_rng_state())
                source.set_rng_state(state)
            for kind, is_on, dtype in self.casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on))
            results = self.function(tensors)
        places = [*inputs.trained, *self.unused]
        used, grads, chosen = [results[i] for i in of_results], [*of_results.values()], [tensors[i] for i in places]
        found = torch.autograd.grad(used, chosen, grads, create_graph=create_graph, allow_unused=True)
        return dict(zip(places, found, strict=True))

    def _check(self, inputs: Any) -> None:
        changed = [i for i, x in enumerate(inputs.held) if version_of(x) != inputs.versions[i]]
        names = {self.snapshot.places[i][0][1] for i in changed} - {*_STATISTICS}
        if names or not self.snapshot.holds():
            raise UnsupportedShardOp(
                "a compiled call is run again in backward, for create_graph=True or as the loss uses some of its "
                f"results only, and {f'its {min(names)!r}' if names else 'its module'} has changed since. "
                "Remedy: in such steps call the module's forward(...), which is not compiled"
            )


class _Inputs(Function):
    """Hand on a call's inputs that get gradients, and keep all for another run.

    Gradients of parameters that are averaged later come from the graph as this rank's share times the ranks. Where
    ``torch.autograd.grad`` takes them, they are averaged here.
    """

    @staticmethod
    def forward(ctx: Any, how: tuple[Again, list[int], list[Tensor]], *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.again, ctx.trained, tensors = how
        ctx.held = tensors[: ctx.again.held]
        ctx.versions = [*map(version_of, ctx.held)]
        ctx.drawn = ctx.again.drawn(tensors)
        ctx.save_for_backward(*tensors[ctx.again.held :])
        ctx.set_materialize_grads(False)
        return tuple([x.view_as(x) for x in xs[: len(ctx.trained)]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        found = [*grads]
        for k, (i, grad) in enumerate(zip(ctx.trained, grads, strict=True)):
            node = ctx.next_functions[k][0]
            if grad is not None and i in ctx.again.put_off and node is not None and not is_accumulated(node):
                found[k] = _mean(grad, ctx.again.put_off[i])
        return None, *found, *[None] * (len(ctx.next_functions) - len(found))


class _LeftOut(Function):
    """Hand on results that the graph has no gradients for: where a loss uses them, the call is run again."""

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
        return None, *[None] * len(grads), *[found[i] for i in (*inputs.trained, *again.unused)]


def _mean(grad: Tensor, names: frozenset[str]) -> Tensor:
    for group in filter(None, map(group_of, sorted(names))):
        grad = all_reduce_sum(grad, group) / group.size()
    return grad
