"""Means of gradients over all ranks of a mesh, in buckets that are under way while backward goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from scidata.device_mesh.groups import explaining
from scidata.device_mesh.torch_internals import RLock, is_profiled, named
from scidata.errors import ConfigError
from scidata.shard.comm.transport import SUM_IN, broadcast
from scidata.shard.torch_internals import backward_pass, copy_each, when_backward_ends

_FIRST_BYTES = 2**20  # a small first bucket starts communication early


def part_of(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor that tensor parallelism splits, on the same memory."""
    if not isinstance(x, DTensor):  # asked of each parameter in each step
        return x
    with torch.no_grad():
        return x.to_local()


@dataclass(eq=False)
class _Bucket:
    """Parameters of one dtype whose gradients travel together."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    num_bytes: int = 0
    missing: set[int] = field(default_factory=set)  # ids of those that this backward pass has not reached yet
    flat: Tensor | None = None
    work: dist.Work | None = None

    def wait(self) -> None:
        """Wait until the sum has arrived in ``flat``."""
        assert self.work is not None
        with explaining():
            self.work.wait()


class GradientBuckets:
    """Average the gradients of parameters over a group in every backward pass.

    The mean is taken of all that ``.grad`` holds: gradients that were averaged before and have been added to are right
    too, since a mean leaves equal values as they are. Buckets go out in one order on all ranks, each as soon as it is
    complete, and the others when backward ends. With buckets ``[d, c]`` and ``[b, a]`` and gradients that arrive as d,
    b, c, a: the first goes out after c, the second after a; where a is not used, the second goes out at the end. The
    first pass takes the parameters in reverse; later ones in the order in which the first rank's gradients came in the
    first pass.

    A parameter that no rank used keeps its ``.grad``, None as in one process. Each bucket carries a flag for each
    parameter, so that this costs no collective.

    ``finished``: called at the end of each backward pass that averaged.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        bucket_bytes: int,
        finished: Callable[[], None],
    ) -> None:
        self._group, self._finished = group, finished
        self._frozen = {n: p for n, p in parameters.items() if not p.requires_grad}
        self._names = {id(p): n for n, p in parameters.items() if p.requires_grad}
        self._trained = trained = [p for p in parameters.values() if p.requires_grad]
        self._number = {id(p): i for i, p in enumerate(trained)}
        self._bucket_bytes, self._is_ordered = bucket_bytes, False
        self._deal(list(reversed(trained)))
        self._used: set[int] = set()  # since the last mean, also while it was put off
        self._is_on = True
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def _deal(self, order: list[nn.Parameter]) -> None:
        self._buckets = _fill(order, self._bucket_bytes)
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._reset()

    def _reset(self) -> None:
        for bucket in self._buckets:
            bucket.missing = {id(p) for p in bucket.parameters}
            bucket.flat = bucket.work = None
        self._num_sent: int = 0
        self._task: int | None = None
        self._came: list[int] = []

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Let gradients add up on each rank; the next backward pass outside averages all of it."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

    def average(self) -> None:
        """Average all gradients now, those that were set without a backward pass too; not while it is put off."""
        if not self._is_on:
            return
        self._used.update(id(p) for p in self._trained if p.grad is not None)
        self._task = backward_pass()
        self._finish()

    def _arrived(self, parameter: Tensor) -> None:
        if parameter.grad is None:  # a compiled graph has it among its inputs, and no gradient for it
            return
        self._check(parameter)
        self._used.add(id(parameter))
        if not self._is_on:
            return
        task = backward_pass()
        if task != self._task:  # its end is heard of once; passes inside a pass have ends of their own
            self._task = task
            when_backward_ends(self._finish)
        missing = self._bucket_of[id(parameter)].missing
        if id(parameter) not in missing:
            self._abandon()
            raise ConfigError(
                f"the gradient of {self._names[id(parameter)]!r} came twice before a backward pass was over: the pass "
                "before failed, or checkpoint(use_reentrant=True) runs passes inside it. Use use_reentrant=False; "
                "after a failed pass, zero_grad() and repeat the step on all ranks"
            )
        missing.discard(id(parameter))
        if not self._is_ordered:
            self._came.append(self._number[id(parameter)])
        while self._num_sent < len(self._buckets) and not self._buckets[self._num_sent].missing:
            self._send()

    def _check(self, parameter: Tensor) -> None:
        grad = parameter.grad
        assert grad is not None
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad = grad.redistribute(placements=parameter.placements)  # torch leaves some partial
        if grad.layout != torch.strided or grad.requires_grad:
            kind = "has a graph of its own" if grad.requires_grad else "is sparse"
            remedy = "take it by torch.autograd.grad" if grad.requires_grad else "use sparse=False"
            raise ConfigError(f"the gradient of {self._names[id(parameter)]!r} {kind}, and is not averaged; {remedy}")

    @torch.no_grad()
    def _send(self) -> None:
        bucket = self._buckets[self._num_sent]
        self._num_sent += 1
        grads = [part_of(p.grad if p.grad is not None else torch.zeros_like(p)) for p in bucket.parameters]
        flags = [float(id(p) in self._used) for p in bucket.parameters]
        first = grads[0]
        if all(flags):
            flag_row = first.new_ones(len(flags))  # made on the device: a copy would wait
        else:
            flag_row = torch.tensor(flags, dtype=first.dtype, device=first.device)
        with named("bucket") if is_profiled() else RLock():
            flat = torch.cat([*(g.reshape(-1) for g in grads), flag_row])
            bucket.flat = flat.to(SUM_IN.get(flat.dtype, flat.dtype))
            bucket.work = dist.all_reduce(_real(bucket.flat), group=self._group, async_op=True)

    @torch.no_grad()
    def _finish(self) -> None:
        if self._task is None:  # a pass inside this one has sent everything
            return
        thawed = [n for n, p in self._frozen.items() if p.requires_grad]
        if thawed:
            self._abandon()
            raise ConfigError(
                f"parameter {thawed[0]!r} required no gradient when parallelize was called, so its gradient is not "
                "averaged; call parallelize while it is trainable, and freeze it afterwards"
            )
        while self._num_sent < len(self._buckets):
            self._send()
        for bucket in self._buckets:
            bucket.wait()
            self._unpack(bucket)
        self._used.clear()
        if self._is_ordered:
            self._reset()
        else:
            self._reorder()
        self._finished()

    def _reorder(self) -> None:
        """Deal anew by the order of arrival: buckets fill one after another, and unused parameters come last."""
        came = set(self._came)
        order = self._came + [i for i in reversed(range(len(self._trained))) if i not in came]
        first = torch.tensor(order, device=self._trained[0].device)
        broadcast(first, 0, self._group)
        self._is_ordered = True
        self._deal([self._trained[i] for i in first.tolist()])

    def _unpack(self, bucket: _Bucket) -> None:
        flat = bucket.flat
        assert flat is not None
        _real(flat).div_(dist.get_world_size(self._group))
        sizes = [*(part_of(p).numel() for p in bucket.parameters), len(bucket.parameters)]
        *means, flags = torch.split(flat, sizes)
        used = [id(p) in self._used for p in bucket.parameters]
        if not all(used):  # only then their values matter: on a device, reading them waits for it
            used = [flag != 0 for flag in flags.tolist()]
        targets, sources = [], []
        for parameter, mean, is_used in zip(bucket.parameters, means, used, strict=True):
            if not is_used:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            target = part_of(parameter.grad)
            targets.append(target)
            sources.append(mean.view(target.shape))
        if targets:
            copy_each(targets, sources)

    def _abandon(self) -> None:
        for bucket in self._buckets[: self._num_sent]:
            bucket.wait()
        self._used.clear()
        self._reset()


#: The buckets of each model with strategy "ddp".
BUCKETS: weakref.WeakKeyDictionary[nn.Module, GradientBuckets] = weakref.WeakKeyDictionary()


def _real(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat) if flat.is_complex() else flat


def _fill(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Deal parameters to buckets in their order, one open bucket a dtype."""
    buckets: list[_Bucket] = []
    opened: dict[torch.dtype, _Bucket] = {}
    for parameter in parameters:
        bucket = opened.get(parameter.dtype)
        if bucket is None:
            bucket = opened[parameter.dtype] = _Bucket()
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        bucket.num_bytes += part_of(parameter).numel() * parameter.element_size()
        limit = min(bucket_bytes, _FIRST_BYTES) if bucket is buckets[0] else bucket_bytes
        if bucket.num_bytes >= limit:
            del opened[parameter.dtype]
    return buckets
