"""The check that every entry of the op table has to pass: equal to one process, forward and backward.

Public, because a user's own rule needs it, too: :func:`check_op` makes the ranks and the layouts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from scidata.core.bounds import even_sizes
from scidata.core.checks import check_int
from scidata.core.keywords import checked_keywords
from scidata.device_mesh import devices
from scidata.errors import ConfigError, UnsupportedShardOp
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import shares_memory, tree_leaves
from scidata.testing.ranks import Reference, reference, referenced, run_ranks

T = TypeVar("T")
#: Along which dim each tensor is cut; None: each rank has all of it.
Dims: TypeAlias = Sequence[int | None]
#: How closely results on shards follow one process, relatively and absolutely: sums come in another order.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def layouts_of(extent: int, num_ranks: int) -> list[tuple[int, ...]]:
    """Return ways to cut rows: evenly, most on one rank, none on the first, on a middle or on the last rank."""
    found = [even_sizes(extent, num_ranks)]
    if num_ranks > 1:
        most = max(0, extent - num_ranks + 1)
        found += [tuple(most if r == big else min(1, extent) for r in range(num_ranks)) for big in (0, 1)]
        for empty in sorted({0, num_ranks // 2, num_ranks - 1}):
            sizes = list(even_sizes(extent, num_ranks - 1))
            found.append((*sizes[:empty], 0, *sizes[empty:]))
    return [sizes for sizes in dict.fromkeys(found) if sum(sizes) == extent]


def specs_of(mesh: DeviceMesh, shapes: Sequence[Sequence[int]], dims: Dims, turn: int) -> list[ShardSpec | None]:
    """Return a layout of each tensor, tensors of one extent alike; a second axis cuts the next dim, or replicates."""
    specs: list[ShardSpec | None] = []
    for shape, dim in zip(shapes, dims, strict=True):
        if dim is None:
            specs.append(None)
            continue
        placements: list[Placement] = [Shard(dim)]
        if mesh.ndim > 1:
            is_cut = len(shapes) == 1 and len(shape) > 1
            placements.append(Shard((dim + 1) % len(shape)) if is_cut else Replicate())
        sizes: dict[int | str, Sequence[int]] = {}
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                layouts = layouts_of(shape[placement.dim], mesh.size(axis))
                sizes[axis] = layouts[(turn + 2 * axis) % len(layouts)]
        specs.append(ShardSpec.even(mesh, placements, shape, sizes))
    return specs


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

    ``inputs``: the whole tensors, the same on each rank. Those that require grad are differentiated.
    ``specs``: the layout of each input; None leaves it plain.
    Raises AssertionError: a value, gradient, shape or dtype differs from one process, or a result has an input's memory
    that has memory of its own in one process.
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
        _compare_memory(theirs, ours, whole, parts)
        torch.testing.assert_close(full, theirs, rtol=rtol, atol=atol, equal_nan=True)
    pairs = [pair for pair in pairs if _differentiable(pair[0])]
    if pairs:
        _compare_gradients(whole, parts, pairs, rtol, atol)
    return found


def _compare_memory(theirs: Tensor, ours: Tensor, whole: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Raise if a result shares memory with an input that does not in one process: a write would change both."""
    local = ours.local if isinstance(ours, ShardTensor) else ours
    for x, part in zip(whole, parts, strict=True):
        given = part.local if isinstance(part, ShardTensor) else part
        if shares_memory(local, given):
            assert shares_memory(theirs, x), "a result has the memory of an input, which it has not in one process"


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


@checked_keywords
def check_op(
    fn: Callable[..., object],
    *inputs: object,
    dims: Sequence[Dims] | None = None,
    num_ranks: Sequence[int] = (1, 2, 3),
    dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32),
    timeout: float = 120,
) -> list[str]:
    """Hold a function of tensors on shards against one process: values, shapes, dtypes, gradients, memory.

    Each rank runs ``fn`` on the whole inputs and on its parts of them, by even and uneven layouts and by layouts that
    leave a rank empty. A layout that ``fn`` refuses on all ranks alike is right, too; a result that shares
    an input's memory, where it has memory of its own in one process, is not.

    Parameters
    ----------
    fn : Callable[..., object]
        A function at the top of a module, which other processes import, and which registers the rule. It returns
        tensors, or trees of them.
    *inputs : object
        Tensors, whole; what is no tensor is passed on as it is. Floating tensors are differentiated.
    dims : Sequence[Sequence[int or None]] or None, optional
        Ways to cut the tensors: each names a dim of each tensor, None for one that stays plain. Default: each dim
        of the first tensor, and with it of all that have its shape.
    num_ranks : Sequence[int], default (1, 2, 3)
        Numbers of ranks to run on; 4 runs on 2 × 2 too. With a process group there already, its ranks run.
    dtypes : Sequence[torch.dtype], default (torch.float64, torch.float32)
        What floating inputs are converted to, and complex ones to the complex dtype that goes with it. Tolerances
        follow: 1e-12 for float64, 1e-5 for float32.
    timeout : float, default 120
        Seconds for each number of ranks.

    Returns
    -------
    list of str
        Layouts that were refused, by :class:`~scidata.errors.UnsupportedShardOp`, with the reason.

    Raises
    ------
    RankError
        A difference from one process, or another error: with the layout, the dtype and the traceback of each rank.
    ConfigError
        Inputs without a tensor, or dims that do not fit them.

    Examples
    --------
    >>> scidata.testing.check_op(torch.cumsum, torch.randn(7, 3), 0)
    []
    """
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if not tensors or any(isinstance(x, ShardTensor) for x in tensors):
        raise ConfigError("check_op cuts the inputs by itself: give it tensors of the whole, at least one")
    first = tensors[0]
    if not isinstance(num_ranks, Sequence):
        raise ConfigError(f"num_ranks={num_ranks!r}: expected several numbers of ranks, such as (1, 2, 3)")
    counts = [check_int("num_ranks", count, least=1) for count in num_ranks]
    if dims is None:
        dims = [[dim if x.shape == first.shape else None for x in tensors] for dim in range(first.ndim)]
    for way in dims:
        if not isinstance(way, Sequence):
            raise ConfigError(f"dims: {way} is no sequence of a dim (or None) of each tensor, such as [(0, None)]")
        fits = len(way) == len(tensors) and any(dim is not None for dim in way)
        if not fits or not all(dim is None or -x.ndim <= dim < x.ndim for dim, x in zip(way, tensors, strict=True)):
            shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
            raise ConfigError(f"dims: {way} names no dim (or None) of each of the {len(tensors)} tensors: {shapes}")
    arguments = (inputs, [list(way) for way in dims], list(dtypes))
    if torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
        return _check_layouts(fn, (world,), *arguments)
    target = fn if inspect.isbuiltin(fn) else reference(fn)  # torch's own are pickled as they are
    refused: list[str] = []
    for count in counts:
        for shape in [(count,), *([(2, 2)] if count == 4 else [])]:
            refused += run_ranks(_check_on_rank, count, target, shape, *arguments, timeout=timeout)[0]
    return refused


def _check_on_rank(
    rank: int,
    num_ranks: int,
    fn: Reference | Callable[..., object],
    mesh_shape: tuple[int, ...],
    inputs: Sequence[object],
    dims: Sequence[Dims],
    dtypes: Sequence[torch.dtype],
) -> list[str]:
    return _check_layouts(referenced(fn) if isinstance(fn, tuple) else fn, mesh_shape, inputs, dims, dtypes)


def _check_layouts(
    fn: Callable[..., object],
    mesh_shape: tuple[int, ...],
    inputs: Sequence[object],
    dims: Sequence[Dims],
    dtypes: Sequence[torch.dtype],
) -> list[str]:
    """Run every layout on the ranks that there are, in each dtype."""
    names = ("domain", "second")[: len(mesh_shape)]
    mesh = init_device_mesh(devices.kind_of(None), mesh_shape, mesh_dim_names=names)
    places = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]

    def function(*tensors: Tensor) -> object:
        given = dict(zip(places, tensors, strict=True))
        result = fn(*[given.get(i, x) for i, x in enumerate(inputs)])
        assert result is not None, "it returns nothing that could be compared"
        return result

    refused = []
    for dtype in dtypes:
        whole = [_prepared(x, dtype) for x in inputs if isinstance(x, Tensor)]
        for way in dims:
            shapes = [x.shape for x in whole]
            extents = {shape[dim] for shape, dim in zip(shapes, way, strict=True) if dim is not None}
            for turn in range(max(len(layouts_of(extent, mesh.size(0))) for extent in extents)):
                specs = specs_of(mesh, shapes, way, turn)
                shown = f"{mesh.size()} ranks, {dtype}: {', '.join(map(str, specs))}"
                try:
                    limit = TOLERANCE.get(dtype, 0.0)
                    assert_like_one_process(function, whole, specs, rtol=limit, atol=limit)
                except UnsupportedShardOp as error:
                    refused.append(f"{shown}: {error}")
                except Exception as error:
                    raise AssertionError(f"{getattr(fn, '__name__', fn)} on {shown}: {error}") from error
    return refused


def _prepared(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.is_complex():
        return x.detach().to(dtype.to_complex())
    return x.detach().to(dtype).requires_grad_() if x.is_floating_point() else x.detach()
