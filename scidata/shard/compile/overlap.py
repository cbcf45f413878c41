"""Start exchanges of a graph as soon as their rows exist, and wait for them at first use, with other work between.

Collectives and random numbers stay in their order. Work waits until the next collective has been called, at most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from operator import getitem
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from scidata.shard.comm.operators import define, is_operator, operator
from scidata.shard.comm.transport import ROUTE, Transfer, as_held, sent_by_route
from scidata.shard.compile.torch_internals import boxed, computes, draws
from scidata.shard.torch_internals import storage_of

_aten: Any = torch.ops.aten
_scidata: Any = torch.ops.scidata
_CHEAP = frozenset(getattr(_aten, name).default for name in ("clone", "full", "new_full", "new_zeros", "zeros"))
_started: dict[int, dict[int, Transfer]] = defaultdict(dict)  # by thread, and by the storage of the received values


@operator(ROUTE, as_held)
def _start(x: Tensor, *route: Any) -> Tensor:
    """Like ``exchange``, but the values are valid only after ``finish`` of the result and of ``x``."""
    started = sent_by_route(x, *route, waits=False)
    _started[get_ident()][storage_of(started.received)] = started
    return started.received


def _finish(x: Tensor, _: Tensor) -> None:
    _started[get_ident()].pop(storage_of(x)).wait()


define("finish(Tensor(a!) x, Tensor sent) -> ()", _finish, lambda *_: None)


def settling(graph: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Make a graph wait first for exchanges that an earlier error in this thread left under way.

    Not where the error is raised: ranks that raised before may not have sent as yet.
    """

    def run(inputs: list[Any]) -> Any:
        left = _started[get_ident()]
        for place in [*left]:
            left.pop(place).wait()
        return graph(inputs)

    return boxed(run)


class _Order:
    """Nodes in a new order: ``found``, with each exchange a second time at the place where it is waited for."""

    def __init__(self, nodes: list[Node]) -> None:
        self.found: list[Node] = []
        self.work: dict[Node, int] = {}  # between the start of an exchange and its wait
        self._left = dict.fromkeys(nodes)
        self._under_way: list[Node] = []
        self._needs = {node: {*node.all_input_nodes} & self._left.keys() for node in nodes}
        last: list[Node] = []
        for node in nodes:  # these keep their order
            if draws(node.target) or (node.is_impure() and not is_operator(node.target)):
                self._needs[node] |= {*last}
                last = [node]

    def put(self, node: Node) -> None:
        waited = [each for each in self._under_way if each in self._needs[node]]
        self._under_way = [each for each in self._under_way if each not in waited]
        self.found += [*waited, node]
        del self._left[node]
        for each in self._under_way:
            self.work[each] += computes(node.target) and node.target not in _CHEAP
        if node.target is _scidata.exchange.default:
            self._under_way.append(node)
            self.work[node] = 0

    def put_with_needs(self, node: Node) -> None:
        needed, ahead = {node}, [node]
        for each in ahead:
            new = [x for x in self._needs[each] if x in self._left and x not in needed]
            needed.update(new)
            ahead += new
        for each in [each for each in self._left if each in needed]:
            self.put(each)

    def put_free(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node in self._left and not any(x in self._left or x in self._under_way for x in self._needs[node]):
                self.put(node)

    def go_on(self, before: list[Node], collective: Node | None) -> None:
        """Emit all nodes possible before the next collective; wait for all exchanges but the last one."""
        self.put_free(before)
        for each in [*self._under_way]:
            if each is not collective:
                self._under_way.remove(each)
                self.found.append(each)
                self.put_free(before)


def share_results(gm: GraphModule) -> None:
    """Return results of collectives without copies, unless earlier results share their memory."""
    output = gm.graph.output_node()
    given: list[Any] = [*output.args[0]]  # type: ignore[misc]
    kept = {i: x for i, x in enumerate(given) if isinstance(x, Node) and x.target is _aten.clone.default}
    kept = {i: x for i, x in kept.items() if x.kwargs.get("memory_format") is torch.preserve_format}  # of ``Calls``
    kept = {i: x for i, x in kept.items() if is_operator(x.all_input_nodes[0].target) and len(x.users) == 1}
    ahead = [x for x in given[: min(kept, default=0)] if isinstance(x, Node)]
    seen = {*ahead}
    for each in ahead:
        if not computes(each.target):
            ahead += {*each.all_input_nodes} - seen
            seen.update(each.all_input_nodes)
    output.args = ()
    for i, copy in kept.items():
        if copy.args[0] not in seen:
            given[i] = copy.args[0]
            gm.graph.erase_node(copy)
    output.args = (tuple(given),)
    gm.recompile()


def overlap(gm: GraphModule) -> None:
    """Let other work run while exchanges are under way."""
    graph = gm.graph
    if not any(node.target is _scidata.exchange.default for node in graph.nodes):
        return
    _part_gradients(gm)
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    places = [i for i, node in enumerate(nodes) if is_operator(node.target)]
    order = _Order(nodes)
    for place, end in zip(places, [*places[1:], len(nodes)], strict=True):
        order.put_with_needs(nodes[place])
        order.go_on(nodes[:end], nodes[place])
    order.go_on(nodes, None)
    output, waits = graph.output_node(), dict[Node, Node]()
    for node in order.found:
        output.prepend(waits.pop(node, node))
        if node.target is _scidata.exchange.default and order.work[node]:
            node.target = _scidata.start.default
            waits[node] = graph.call_function(_scidata.finish.default, (node, node.args[0]))
    gm.recompile()


def _is_sent(gradients: Node) -> bool:
    """Whether rows of the gradient of a convolution's input are sent next."""
    ahead = [each for each in gradients.users if each.target is getitem and each.args[1] == 0]
    for each in ahead:
        if each.target is _scidata.exchange.default:
            return True
        if not is_operator(each.target) and each.target is not _aten.convolution_backward.default:
            ahead += [x for x in each.users if x not in ahead]
    return False


def _part_gradients(gm: GraphModule) -> None:
    """Split convolution backwards, so that weight gradients are computed while input gradients are sent."""
    for node in [*gm.graph.nodes]:
        if node.target is not _aten.convolution_backward.default or not all(node.args[-1][:2]) or not _is_sent(node):
            continue
        of_weights = [each for each in node.users if each.target is getitem and each.args[1] != 0]
        with gm.graph.inserting_after(node):
            other = gm.graph.call_function(node.target, (*node.args[:-1], [False, *node.args[-1][1:]]))
        other.meta = {**node.meta, "val": (None, *node.meta["val"][1:])}
        node.args = (*node.args[:-1], [True, False, False])
        node.meta["val"] = (node.meta["val"][0], None, None)
        for each in of_weights:
            each.args = (other, each.args[1])
            other.append(each)
