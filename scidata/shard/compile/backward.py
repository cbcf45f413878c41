"""What the backward graph of a captured call cannot do, done by running the call once more, eagerly.

A graph's backward pass has no derivative of its own, and takes a gradient of every result. So where
``create_graph=True`` asks for a derivative, or the loss uses some of the results only, the eager function is run again
on the same inputs, and autograd goes through that. Gradients that nobody averages are summed here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from scidata.errors import UnsupportedShardOp
from scidata.shard.comm.operators import group_of
from scidata.shard.comm.sums import all_reduce_sum
from scidata.shard.compile.state import Snapshot
from scidata.shard.compile.torch_internals import graph_of, results_of_graph, watch_backward
from scidata.shard.torch_internals import is_accumulated, version_of

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # no result of a training step depends on them


@dataclass(eq=False, kw_only=True)
class Again:
    """A captured call, as it can be run once more.

    Attributes
    ----------
    function
        Takes all tensors, and returns those of the results.
    held
        How many of the tensors are parameters and buffers; the others are of arguments.
    put_off
        Of parameters whose sums are put off: the groups, by place among the tensors.
    casts
        Autocast of devices: whether it is on, and the dtype.
    unused
        Places of tensors that require grad, and get none.
    draws
        Whether it draws random numbers.
    """

    function: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    snapshot: Snapshot
    held: int
    put_off: dict[int, frozenset[str]]
    casts: Sequence[tuple[str, bool, torch.dtype]]
    unused: frozenset[int] = frozenset()
    draws: bool = False

    def inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors as the graph gets them: those that get gradients as views, made by :class:`_Inputs`."""
        found = [x.detach() if i in self.unused else x for i, x in enumerate(tensors)]
        trained = [i for i, x in enumerate(found) if x.requires_grad]
        if trained and torch.is_grad_enabled():
            views: Any = _Inputs.apply((self, trained, found), *[found[i] for i in trained], *found[self.held :])  # type: ignore[no-untyped-call]
            for i, x in zip(trained, views, strict=True):
                found[i] = x
        return found

    def watch(self, results: Sequence[Tensor]) -> None:
        """Have the backward graph of these results run only where it is right."""
        node = next(filter(None, map(graph_of, results)), None)
        if node is not None and results_of_graph(node) is not None:
            watch_backward(node, self._backward)

    def _backward(self, node: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        """Return the gradients of a graph's inputs; None where its backward graph shall be run."""
        of_results = [grads[i] for i in results_of_graph(node) or ()]
        places: Sequence[tuple[Any, int]] = node.next_functions
        if all(grad is None for grad in of_results):
            return (None,) * len(places)
        inputs = next((each for each, _ in places if getattr(each, "again", None) is self), None)
        if inputs is None or not (torch.is_grad_enabled() or any(grad is None for grad in of_results)):
            return None
        found = self._run(inputs, of_results)
        return tuple(found[i] if each is inputs else None for each, i in places)

    def _run(self, inputs: Any, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        create_graph = torch.is_grad_enabled()
        self._check(inputs)
        held = [x if x.requires_grad else x.clone() for x in inputs.held]  # buffers, which the function may write to
        tensors = [*held, *inputs.saved_tensors]
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for source, state in inputs.drawn:
                stack.callback(source.set_rng_state, source.get_rng_state())
                source.set_rng_state(state)
            for kind, is_on, dtype in self.casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on))
            found = [x for x in self.function(tensors) if x.requires_grad]
        pairs = [(x, grad) for x, grad in zip(found, grads, strict=True) if grad is not None]
        results, given = zip(*pairs, strict=True)
        chosen = [tensors[i] for i in inputs.trained]
        return torch.autograd.grad(results, chosen, given, create_graph=create_graph, allow_unused=True)

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
        sources: list[Any] = []
        if ctx.again.draws:
            others = {x.device for x in tensors} - {torch.device("cpu")}
            sources = [torch, *map(torch.get_device_module, others)]
        ctx.drawn = [(source, source.get_rng_state()) for source in sources]
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


def _mean(grad: Tensor, names: frozenset[str]) -> Tensor:
    for group in filter(None, map(group_of, sorted(names))):
        grad = all_reduce_sum(grad, group) / group.size()
    return grad
