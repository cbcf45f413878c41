"""The check that every entry of the op table has to pass: equal to one process, forward and backward.

Public, because whoever registers an op needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from scidata.device_mesh import devices
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import tree_leaves

T = TypeVar("T")


def shard_of(full: Tensor, spec: ShardSpec) -> ShardTensor:
    """Cut this rank's part out of a tensor that each rank holds; no communication, no shared memory."""
    local = full.detach()
    for dim, start in enumerate(spec.offsets):
        local = local.narrow(dim, start, spec.local_shape[dim])
    return ShardTensor(local.clone(memory_format=torch.contiguous_format), spec)


def _differentiable(x: object) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def assert_like_one_process(
    function: Callable[..., T],
    inputs: Sequence[Tensor],
    specs: Sequence[ShardSpec | None],
    *,
    rtol: float = 1e-12,
    atol: float = 1e-12,
    seed: int = 0,
) -> T:
    """Run ``function`` on whole tensors and on shards, and compare results and gradients. Collective.

    Parameters
    ----------
    inputs
        The whole tensors, the same on each rank. Those that require grad are differentiated.
    specs
        The layout of each input; None leaves it plain.

    Raises
    ------
    AssertionError
        A value, gradient, shape or dtype differs from one process.
    """
    whole = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    parts: list[Tensor] = []
    for x, spec in zip(inputs, specs, strict=True):
        part = x.detach().clone() if spec is None else shard_of(x, spec)
        parts.append(part.requires_grad_(x.requires_grad))
    devices.seed(seed)
    expected = function(*whole)
    devices.seed(seed)
    found = function(*parts)
    pairs = list(zip(tree_leaves(expected), tree_leaves(found), strict=True))
    for theirs, ours in pairs:
        if not isinstance(theirs, Tensor):
            assert ours == theirs, f"{ours} is not {theirs}"
            continue
        assert ours.shape == theirs.shape, f"shape {tuple(ours.shape)} is not {tuple(theirs.shape)}"
        assert _differentiable(ours) == _differentiable(theirs), "requires_grad differs from one process"
        full = ours.full_tensor() if isinstance(ours, ShardTensor) else ours
        assert type(full) is Tensor
        torch.testing.assert_close(full, theirs, rtol=rtol, atol=atol, equal_nan=True)
    pairs = [pair for pair in pairs if _differentiable(pair[0])]
    if pairs:
        _compare_gradients(whole, parts, pairs, rtol, atol)
    return found


def _compare_gradients(
    whole: list[Tensor], parts: list[Tensor], pairs: list[tuple[Tensor, Tensor]], rtol: float, atol: float
) -> None:
    leaves = [(x, p) for x, p in zip(whole, parts, strict=True) if x.requires_grad]
    seeds = [torch.randn_like(theirs) for theirs, _ in pairs]
    expected = torch.autograd.grad([p[0] for p in pairs], [x for x, _ in leaves], seeds, allow_unused=True)
    outputs = [ours.local if isinstance(ours, ShardTensor) else ours for _, ours in pairs]
    local_seeds = [
        shard_of(s, ours.spec).local if isinstance(ours, ShardTensor) else s
        for s, (_, ours) in zip(seeds, pairs, strict=True)
    ]
    locals_ = [p.local if isinstance(p, ShardTensor) else p for _, p in leaves]
    found = torch.autograd.grad(outputs, locals_, local_seeds, allow_unused=True)
    for (x, part), ours, theirs in zip(leaves, found, expected, strict=True):
        local = part.local if isinstance(part, ShardTensor) else part
        grad = torch.zeros_like(local) if ours is None else ours
        wanted = torch.zeros_like(x) if theirs is None else theirs
        if isinstance(part, ShardTensor):  # of a layout that was given: each rank compares its own rows
            wanted = shard_of(wanted, part.spec).local
        torch.testing.assert_close(grad, wanted, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"gradient: {m}")
