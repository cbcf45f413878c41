"""One operation's samples on the ranks of a mesh: which are right, refused, or neither."""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core
from torch.utils._pytree import tree_leaves, tree_map_only

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec, ShardTensor
from scidata.testing.oracle import shard_of

# looks for a unittest in the stack, and there is none here: 0.1 s for each list of samples, twice
common_utils.extract_test_fn = core.extract_test_fn = lambda: None

#: Uninitialised results, or what is no function of tensors.
LEFT_OUT = {
    *(
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    ),
    *(
        "item",
        "is_nonzero",
        "tolist",
        "as_strided",
        "as_strided_copy",
        "as_strided_scatter",
        "_native_batch_norm_legit",
    ),
}
DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool, torch.float32)
#: Of values, relative and absolute; of bfloat16 the absolute one is of the largest value.
TOLERANCES = {torch.float32: 1e-4, torch.complex64: 1e-4, torch.bfloat16: 3e-2}
WAYS = ("all", "first")  # which tensors are sharded


@dataclass
class Found:
    """What became of an operation's samples."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    alone: Counter[str] = field(default_factory=Counter)  # of the function, all its tensors sharded
    notes: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, note: str = "") -> None:
        self.counts[kind] += 1
        if note and len(self.notes.setdefault(kind, [])) < 3:
            self.notes[kind].append(note)


def operations() -> dict[str, Any]:
    """Return the operations by name; variants of one function have names of their own."""
    named = {}
    for op in op_db:
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        if op.name not in LEFT_OUT and not op.name.startswith("_refs"):
            named[name] = op
    return named


def samples(
    op: Any, most: int, dtypes: Sequence[torch.dtype] = DTYPES
) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Make up to ``most`` samples, spread over all that there are, of the first dtype that the operation has."""
    dtype = next((d for d in dtypes if d in op.supported_dtypes("cpu")), None)
    if dtype is None:
        return
    torch.manual_seed(0)
    found = list(op.sample_inputs("cpu", dtype, requires_grad=False))
    step = max(1, len(found) // most)
    for sample in found[::step][:most]:
        tensors = [x for x in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, Tensor)]
        if all(x.layout is torch.strided for x in tensors):
            yield sample.input, tuple(sample.args), dict(sample.kwargs)


def split(extent: int, num_ranks: int, *, empty: bool) -> tuple[int, ...]:
    """Return uneven sizes, one of them 0 if ``empty``."""
    if num_ranks == 1:
        return (extent,)
    if num_ranks == 2:
        return (0, extent) if empty else (extent - extent // 3, extent // 3)
    last = extent // 3
    rest = extent - last
    middle = 0 if empty else rest // 3
    return (rest - middle, middle, last, *[0] * (num_ranks - 3))


def variants(op: Any) -> dict[str, Callable[..., Any]]:
    """Return the function, method, in-place and ``out=`` forms."""
    named = {"function": op.op, "method": op.method_variant, "in place": op.inplace_variant}
    named["out="] = partial(_into_out, op.op) if op.supports_out else None
    return {name: form for name, form in named.items() if form is not None}


def _into_out(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the function's results, written into tensors of their layout, and these tensors.

    Of plain tensors they are what the function itself returns: ``ihfftn`` of torch 2.13 writes conjugates to ``out=``.
    """
    with torch.no_grad():
        found = function(*args, **kwargs)
        out = tree_map_only(Tensor, torch.zeros_like, found)
        torch.default_generator.manual_seed(1)
        result = function(*args, **kwargs, out=out)
        if any(isinstance(x, ShardTensor) for x in tree_leaves((args, kwargs))):
            return [result, out]
        return [None if result is None else found, found]


def on_ranks(
    rank: int,
    num_ranks: int,
    names: list[str],
    most: int,
    done: Path,
    rival: bool = False,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> None:
    """Run operations one after the other; the first rank adds what it found to a file. Collective."""
    for name in names:
        found = run(name, most, rank, num_ranks, rival=rival, dtypes=dtypes)
        if rank == 0:
            with done.open("ab") as file:
                pickle.dump(found, file)


def run(
    name: str, most: int, rank: int, num_ranks: int, *, rival: bool = False, dtypes: Sequence[torch.dtype] = DTYPES
) -> Found:
    """Run an operation's samples; ``rival``: as DTensors, the functions alone, all tensors cut by ``torch.chunk``.

    Collective; raises where ranks are no longer in step.
    """
    warnings.simplefilter("ignore")
    op = operations()[name]
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    found = Found(name)
    for i, sample in enumerate(samples(op, most, dtypes)):
        for k, (form, function) in enumerate(list(variants(op).items())[: 1 if rival else None]):
            for way in WAYS[: 1 if rival else None]:
                for dim in (0, -1):
                    case = f"sample {i}, {form}, {way} on {dim}"
                    place = _as_dtensors if rival else partial(_as_shards, num_ranks=num_ranks, empty=(i + k) % 2 == 1)
                    kind, note = _outcome(op, function, form, sample, way, dim, partial(place, mesh))
                    kinds: list[Any] = [None] * num_ranks
                    dist.all_gather_object(kinds, kind)
                    if len(set(kinds)) > 1:
                        kind, note = "divergent", f"{kinds} {note}"
                    if kind:
                        found.add(kind, f"{case}: {note}" if note else "")
                        found.alone[kind] += form == "function" and way == "all"
    return found


def _as_shards(mesh: Any, x: Tensor, dim: int, *, num_ranks: int, empty: bool) -> Tensor:
    sizes = split(x.shape[dim], num_ranks, empty=empty)
    return shard_of(x, ShardSpec.even(mesh, [Shard(dim % x.ndim)], x.shape, {0: sizes}))


def _as_dtensors(mesh: Any, x: Tensor, dim: int) -> Tensor:
    return distribute_tensor(x.detach().clone(), mesh, [Shard(dim % x.ndim)]).detach()


def _outcome(
    op: Any, function: Any, form: str, sample: Any, way: str, dim: int, place: Callable[[Tensor, int], Tensor]
) -> tuple[str | None, str]:
    """Return what became of one call, and a word on it; None where no tensor can be sharded."""
    tensors = [x for x in tree_leaves(sample) if isinstance(x, Tensor)]
    chosen = [x for x in (tensors if way == "all" else tensors[:1]) if x.ndim and 0 not in x.shape]
    if not chosen or (way == "first" and len(tensors) == 1):
        return None, ""
    differentiable = op.supports_autograd and form not in ("in place", "out=")
    placed = {id(x) for x in chosen}

    def leaf(x: Tensor) -> Tensor:
        return x.detach().clone().requires_grad_(differentiable and (x.is_floating_point() or x.is_complex()))

    def shard(x: Tensor) -> Tensor:
        return place(x, dim).requires_grad_(leaf(x).requires_grad) if id(x) in placed else leaf(x)

    whole = tree_map_only(Tensor, leaf, sample)
    want, error = _called(function, form, whole)
    parts = tree_map_only(Tensor, shard, sample)
    got, refused = _called(function, form, parts)
    if isinstance(refused, UnsupportedShardOp):
        return ("refused" if error is None else "error"), str(refused).split(". Layout")[0]
    if refused is not None:
        return ("error", "") if error is not None else ("other error", f"{type(refused).__name__}: {refused}"[:300])
    if error is not None and "not differentiable" in str(error):  # of what nobody differentiates: running statistics
        return "error", ""
    if error is not None:
        return "accepted", f"torch: {type(error).__name__}: {error}"[:200]
    message = _compare(want, got)
    if message is None and differentiable:
        message, refused = _gradients(want, got, whole, parts)
        if isinstance(refused, UnsupportedShardOp):
            return "refused", f"backward: {refused}".split(". Layout")[0]
        if refused is not None:
            return "other error", f"backward: {type(refused).__name__}: {refused}"[:300]
    return ("right", "") if message is None else ("wrong", message)


def _called(function: Any, form: str, sample: Any) -> tuple[Any, Exception | None]:
    first, args, kwargs = sample
    torch.default_generator.manual_seed(1)
    try:
        result = function(first, *args, **kwargs)
        return (result if form != "in place" else [result, first]), None
    except Exception as error:
        return None, error


def _whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, ShardTensor | DTensor) else x


def _compare(want: Any, got: Any) -> str | None:
    wanted, given = tree_leaves(want), tree_leaves(got)
    if len(wanted) != len(given):
        return f"{len(given)} results, not {len(wanted)}"
    for x, y in zip(wanted, map(_whole, given), strict=True):
        if not isinstance(x, Tensor):
            if x != y:
                return f"{y!r}, not {x!r}"
            continue
        if not isinstance(y, Tensor) or x.shape != y.shape or x.dtype != y.dtype:
            return f"{getattr(y, 'shape', y)} {getattr(y, 'dtype', '')}, not {tuple(x.shape)} {x.dtype}"
        tolerance = TOLERANCES.get(x.dtype, 1e-9)
        if x.is_floating_point() or x.is_complex():
            size = float(x.detach().abs().nan_to_num(0, 0, 0).max()) if x.dtype == torch.bfloat16 and x.numel() else 1
            if not torch.allclose(x, y, rtol=tolerance, atol=tolerance * max(1, size), equal_nan=True):
                return f"values differ by {float((x - y).detach().abs().max()):.2g}"
        elif not torch.equal(x, y):
            return "values differ"
    return None


def _gradients(want: Any, got: Any, whole: Any, parts: Any) -> tuple[str | None, Exception | None]:
    wanted = [x for x in tree_leaves(want) if isinstance(x, Tensor) and x.requires_grad]
    given = [
        y for x, y in zip(tree_leaves(want), tree_leaves(got), strict=True) if isinstance(x, Tensor) and x.requires_grad
    ]
    if not wanted:
        return None, None

    def loss(results: list[Any], plain: list[Tensor]) -> Tensor:
        total: Any = 0
        for i, (y, x) in enumerate(zip(results, plain, strict=True)):
            weight = torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64).view(x.shape).to(x.dtype) * (i + 1)
            part = ((y.full_tensor() if isinstance(y, DTensor) else y) * weight).sum()
            total = total + (torch.view_as_real(part).sum() if part.is_complex() else part)
        return total

    try:
        loss(wanted, wanted).backward()
    except Exception:
        return None, None
    try:
        loss(given, wanted).backward()
    except Exception as error:
        return None, error
    for x, y in zip(tree_leaves(whole), tree_leaves(parts), strict=True):
        if isinstance(x, Tensor) and x.requires_grad and x.grad is not None:
            if y.grad is None:
                if x.grad.any():
                    return "no gradient", None
                continue
            if (message := _compare(x.grad, y.grad)) is not None:
                return f"gradient: {message}", None
    return None, None
