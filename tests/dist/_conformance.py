"""What every entry of the op table has to pass: functions of one to four tensors, and how these are laid out.

Each function runs on whole tensors and on shards, forward and backward, in float64. Tensors are ``(7, 7, 7)`` where
nothing else is said, and sharded along each dim in turn, so that what a function does to a dim meets it both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tests.models.neighbourhoods import neighbourhood

EXTENT = 7


@dataclass(frozen=True, kw_only=True)
class Case:
    """A function and its tensors; ``dims`` lists which dim of each tensor may be sharded (None: plain)."""

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = ((7, 7, 7),)
    dims: tuple[tuple[int | None, ...], ...] = ((0,), (1,), (2,))
    low: float | None = None  # values lie in [low, low + 0.8); None: normal ones
    rtol: float = 1e-12


INDEX = torch.tensor([6, 0, 0, 3, 2])
ROWS = torch.tensor([1, 0, 1, 1, 0, 0, 1], dtype=torch.bool)
MASK = (torch.arange(343) % 3 == 0).view(7, 7, 7)
PLACES = torch.randint(0, 7, (7, 7, 7), generator=torch.Generator().manual_seed(3))
PLAIN = torch.linspace(-1, 1, 343, dtype=torch.float64).view(7, 7, 7)


def written(write: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Write to a copy, so that gradients go through what was written."""

    def function(x: Any) -> Any:
        y = x * 1.0
        write(y)
        return y

    return function


def setting(index: Any, value: Any) -> Callable[[Any], Any]:
    """``y[index] = value`` as a function."""
    return written(lambda y: y.__setitem__(index, value(y) if callable(value) else value))


_SHAPES: dict[str, Callable[[Any], Any]] = {
    "permute": lambda x: [x.permute(2, 0, 1), torch.permute(x, (1, 2, 0))],
    "transpose": lambda x: [x.transpose(1, -1), torch.transpose(x, 0, 1), x.mT, torch.adjoint(x), x.adjoint()],
    "swap": lambda x: [x.swapaxes(0, 1), x.swapdims(0, 2), torch.swapaxes(x, 1, 2), torch.swapdims(x, 0, 1)],
    "movedim": lambda x: [x.movedim(1, 0), torch.movedim(x, (0, 1), (2, 0)), x.moveaxis(0, 2), torch.moveaxis(x, 2, 0)],
    "matrix": lambda x: [x[0].T, x[1].t(), torch.t(x[2])],
    "squeeze": lambda x: [x[:, 2:3].squeeze(1), torch.squeeze(x.unsqueeze(1), 1), x[:1].squeeze()],
    "unsqueeze": lambda x: [x.unsqueeze(0), torch.unsqueeze(x, -1)],
    "expand": lambda x: [x.expand(2, 7, 7, 7), x[:, :1].expand(-1, 5, 7), torch.broadcast_to(x, (1, 7, 7, 7))],
    "broadcast": lambda x: [x.broadcast_to(2, 7, 7, 7), x[:, :, :1].expand_as(x)],
    "repeat": lambda x: [x.repeat(1, 3, 2), x.repeat(2, 1, 2, 1), x.tile(2, 1), torch.tile(x, (2,))],
    "repeat_interleave": lambda x: [x.repeat_interleave(2, 1), torch.repeat_interleave(x, 3, dim=0), x.repeat_interleave(INDEX.new_tensor([2, 0, 1, 3, 0, 1, 1]), 1), x.repeat_interleave(2)],
    "getitem": lambda x: [x[:, 0], x[-1, 2:5], x[:, 1:], x[::2, 5:1], x[2:6:3, None], x[..., 3, None], x[1, 2, 3:]],
    "index": lambda x: [x[:, INDEX], x[[3, 0]], x[INDEX], x[..., INDEX], x[0, :, [1, 2]], x[:, None, INDEX]],
    "permuted": lambda x: [x[torch.arange(7).flip(0)], x[:, :, torch.tensor([], dtype=torch.long)]],
    "select": lambda x: [x.select(1, 3), torch.select(x, 0, -1)],
    "unbind": lambda x: [*x.unbind(1), *torch.unbind(x)],
    "narrow": lambda x: [x.narrow(1, 2, 3), torch.narrow(x, 0, -2, 2), torch.narrow_copy(x, 2, 0, 0)],
    "narrow_copy": lambda x: x.narrow_copy(1, 1, 4),
    "split": lambda x: [*x.split(2, 1), *torch.split(x, [3, 4], 0), *x.split_with_sizes([1, 6]), *x.unsafe_split(4, 2)],
    "split_copy": lambda x: [*torch.split_with_sizes(x, [2, 5], 1), *torch.unsafe_split(x, 3)],
    "chunk": lambda x: [*x.chunk(3, 1), *torch.chunk(x, 2), *x.unsafe_chunk(2, 2), *torch.unsafe_chunk(x, 4, 1)],
    "tensor_split": lambda x: [*x.tensor_split((1, 5), 1), *torch.tensor_split(x, 3, dim=0)],
    "index_select": lambda x: [x.index_select(1, INDEX), torch.index_select(x, 0, INDEX)],
    "roll": lambda x: [x.roll(2, 1), torch.roll(x, (-9, 1), (0, 2))],
    "flip": lambda x: [x.flip(1), torch.flip(x, [0, 2]), x.fliplr(), torch.flipud(x), torch.fliplr(x), x.flipud()],
    "pad": lambda x: [F.pad(x, (0, 0, 2, 1)), F.pad(x, (1, 0, -2, 3, 0, 2), value=2.0)],
    "pad_modes": lambda x: [F.pad(x, (2, 1, 3, 2), mode=mode) for mode in ("reflect", "circular", "replicate")],
    "cat": lambda x: [torch.cat([x, x * 2], 1), torch.concat([x, PLAIN, x[:, :, :2]], -1), torch.concatenate([x, x])],
    "stack": lambda x: [torch.stack([x, PLAIN], 1), torch.stack([x, x.sin()], -1)],
    "setitem": setting((slice(None), 0), 2.0),
    "setitem_row": setting((slice(None), 3), lambda y: y[:, 4] * 2),
    "setitem_slice": setting((slice(None), slice(1, 4)), PLAIN[:, :3]),
    "setitem_single": setting((1, 3, 2), 4.0),
    "setitem_index": setting((slice(None), torch.tensor([5, 2])), lambda y: y[:, :2] * 2),
    "setitem_mask": written(lambda y: y.__setitem__(y.detach() > 0.2, 0.0)),
    "setitem_rows": setting((slice(None), ROWS), 0.5),
    "write_slice": written(lambda y: y[:, ::3].mul_(2)),
    "clone": lambda x: [x.clone(), torch.clone(x), x.detach(), torch.detach(x), x.contiguous(), x.type_as(PLAIN), x.data],
    "casts": lambda x: [x.to(torch.float32), x.double(), x.float(), x.half(), x.bfloat16()],
    "integers": lambda x: [getattr(x.detach(), name)() for name in ("int", "long", "short", "char", "byte", "bool", "cpu")],
    "like": lambda x: [torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 3.0), torch.zeros_like(x, dtype=torch.int)],
    "random_like": lambda x: [torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 9)],
    "random": lambda x: [getattr(torch.zeros_like(x), n)() for n in ("uniform_", "normal_", "exponential_", "bernoulli_")],
    "random_too": lambda x: [torch.zeros_like(x).random_(5), torch.zeros_like(x).log_normal_(), torch.zeros_like(x).cauchy_()],
    "random_geometric": lambda x: torch.zeros_like(x).geometric_(0.5),
    "dropout": lambda x: [F.dropout(x, 0.3), torch.dropout(x, 0.6, True), F.dropout(x, 0.5, False), F.dropout(x, 1.0), *torch.native_dropout(x, 0.3, True), *torch.native_dropout(x, 0.3, False)],
    "dropout_channels": lambda x: [F.dropout1d(x, 0.3), F.dropout2d(x[None], 0.5), F.dropout3d(x[None], 0.4)],
    "dropout_alpha": lambda x: [F.alpha_dropout(x, p, True) for p in (0.3, 1.0)] + [F.feature_alpha_dropout(x, 0.3, True), F.feature_alpha_dropout(x, 0.3)],
    "dropout_inplace": written(lambda y: [F.dropout(y, 0.3, inplace=True), F.alpha_dropout(y, 0.3, True, True), F.feature_alpha_dropout(y, 0.3, True, True)]),
    "multinomial": lambda x: [torch.multinomial(x.detach()[0].abs(), 3), x.detach()[:, 0].exp().t().multinomial(9, replacement=True), x.detach()[0, 0].abs().multinomial(2)],
    "softmax": lambda x: [F.softmax(x, 1), torch.softmax(x, 0), x.softmax(-1), F.softmin(x, 1)],
    "log_softmax": lambda x: [F.log_softmax(x, 1), torch.log_softmax(x, 0), x.log_softmax(-1, dtype=torch.float64)],
    "special_softmax": lambda x: [torch.special.softmax(x, 1), torch.special.log_softmax(x, 0)],
    "cumsum": lambda x: [x.cumsum(1), torch.cumsum(x, 0), x.detach().long().cumsum(2)],
    "cumprod": lambda x: [x.cumprod(1), torch.cumprod(x, 0)],
    "logcumsumexp": lambda x: [x.logcumsumexp(1), torch.logcumsumexp(x, 0)],
    "gather": lambda x: [x.gather(1, PLACES), torch.gather(x, 0, PLACES[:, :, :7])],
    "take_along_dim": lambda x: [torch.take_along_dim(x, PLACES[:, :2], 1), x.take_along_dim(PLACES[:1, :1], 2)],
    "scatter": lambda x: [x.scatter(1, PLACES[:, :1], 2.0), torch.scatter(x, 0, PLACES[:1], PLAIN[:1])],
    "scatter_add": lambda x: [x.scatter_add(1, PLACES, x), torch.scatter_add(x, 0, PLACES, PLAIN)],
    "scatter_reduce": lambda x: [x.scatter_reduce(1, PLACES, PLAIN, r) for r in ("sum", "amax", "mean")],
    "scatter_reduce_too": lambda x: torch.scatter_reduce(x, 0, PLACES, x, "amin", include_self=False),
    "index_add": lambda x: [x.index_add(1, INDEX, PLAIN[:, :5], alpha=2), torch.index_add(x, 0, torch.arange(7), x)],
    "index_copy": lambda x: [x.index_copy(1, INDEX[3:], x[:, :2]), torch.index_copy(x, 2, INDEX[:2], PLAIN[..., :2])],
    "index_fill": lambda x: [x.index_fill(1, INDEX, 3.0), torch.index_fill(x, 0, INDEX, 1.0)],
    "index_reduce": lambda x: [x.index_reduce(1, INDEX, PLAIN[:, :5], "amax"), torch.index_reduce(x, 0, INDEX, PLAIN[:5], "mean")],
    "scatter_in_place": written(lambda y: y.scatter_(1, PLACES[:, :1], 2.0).scatter_add_(0, PLACES, PLAIN)),
    "reduce_in_place": written(lambda y: y.scatter_reduce_(1, PLACES, PLAIN, "sum")),
    "index_reduce_in_place": written(lambda y: y.index_reduce_(0, INDEX, PLAIN[:5], "amin")),
    "index_in_place": written(lambda y: y.index_add_(1, INDEX, PLAIN[:, :5]).index_fill_(0, INDEX, 1.0).index_copy_(2, INDEX[:2], PLAIN[..., :2])),
}  # fmt: skip


SPARSE = torch.where(PLAIN[0, :5] < -0.9, PLAIN[0, :5], 0).to_sparse()


def _out(function: Callable[..., Any], *dtypes: torch.dtype) -> Callable[[Any], Any]:
    """Write the results to tensors of ``out=``: plain ones without elements, and others like the first operand."""

    def run(x: Any) -> Any:
        x = x.detach()
        plain = [torch.empty(0, dtype=dtype, device=x.device) for dtype in dtypes or (x.dtype,)]
        like = [torch.empty_like(x, dtype=dtype) for dtype in dtypes or (x.dtype,)]
        return [function(x, out=tuple(out) if dtypes[1:] else out[0]) for out in (plain, like)]

    return run


#: Written to ``out=``, drawn by parameters of each element, and operators below torch's public functions.
_BELOW: dict[str, Callable[[Any], Any]] = {
    "out": lambda x: [_out(torch.exp)(x), _out(lambda y, out: torch.maximum(y, PLAIN, out=out))(x), _out(lambda y, out: torch.matmul(y, PLAIN, out=out))(x)],
    "out_of_two": _out(lambda y, out: torch.sort(y, 1, out=out), torch.float64, torch.int64),
    "out_of_joined": _out(lambda y, out: torch.cat([y[3:], y[:3]], out=out)),
    "out_of_sums": lambda x: torch.sum(x.detach(), (0, 1), out=torch.empty_like(x.detach()[0, 0])),
    "drawn": lambda x: [torch.normal(x, 2.0), torch.normal(x, x.exp()), torch.normal(1.0, x.exp()), torch.poisson(x.exp())],
    "drawn_too": lambda x: [torch._standard_gamma(x.exp()), torch._sample_dirichlet(x.detach().exp()), torch.binomial(torch.full_like(x.detach(), 9), torch.sigmoid(x.detach()))],
    "init": lambda x: [f(torch.empty_like(x)) for f in (torch.nn.init.normal_, torch.nn.init.uniform_, torch.nn.init.zeros_, torch.nn.init.kaiming_uniform_)] + [torch.nn.init.eye_(torch.empty_like(x[0]))],
    "distribution": lambda x: torch.distributions.Independent(torch.distributions.Normal(x, x.exp()), 1).log_prob(PLAIN),
    "are_true": lambda x: [torch._is_all_true(x > 0), torch._is_any_true(x > 0), torch.is_same_size(x, PLAIN)],
    "softmax_backward": lambda x: [torch._softmax_backward_data(x, x.softmax(1), 1, x.dtype), torch._log_softmax_backward_data(x, x.log_softmax(0), 0, x.dtype)],
    "complex_norm": lambda x: [torch.norm(torch.complex(x, x.sin())), torch.linalg.vector_norm(torch.complex(x, x), 3, 1), torch.linalg.matrix_norm(torch.complex(x, x))],
    "sparse": lambda x: [torch.sparse.mm(SPARSE, x[0]), SPARSE @ x[:, 1], torch.mv(SPARSE.to_sparse_csr(), x[1, 2]), SPARSE.to_sparse_csr() @ x[2], x[2] @ SPARSE.T, torch.bmm(torch.stack([SPARSE] * 7), x)],
    "sparse_too": lambda x: [torch.ops.aten._sparse_mm(SPARSE, x[0]), torch.ops.aten._sparse_mm.default(SPARSE, x[0]), torch.sparse.addmm(x[0, :5], SPARSE, x[1]), F.linear(x[0], SPARSE)],
    "shape_in_place": lambda x: [written(lambda y: y.transpose_(0, 2).mul_(2).unsqueeze_(1).swapaxes_(0, 1).squeeze_(0))(x), written(lambda y: [y.mT.mul_(3), y.swapdims_(1, 2), y.mT.mul_(2)])(x), (x[0] * 2).t_()],
    "whole_meanwhile": lambda x: [torch.segment_reduce(x, "max", lengths=torch.tensor([2, 1, 4]), axis=0), torch.segment_reduce(x, "mean", offsets=torch.tensor([[0, 2, 7]] * 7), axis=1), *F.fractional_max_pool2d(x[None], 2, output_size=3, return_indices=True), F.fractional_max_pool3d(x[None], 2, output_ratio=0.5)],
    "bags": lambda x: [F.embedding_bag(torch.tensor([1, 2, 0, 6, 3, 3]), x[0], torch.tensor([0, 2, 2, 5]), mode=mode) for mode in ("sum", "mean", "max")] + [F.embedding_bag(INDEX, x[:, 0], torch.tensor([0, 2, 5]), mode="sum", include_last_offset=True, per_sample_weights=x[0, 0, :5])],
    "packed": lambda x: [torch.nn.utils.rnn.pack_padded_sequence(x, [7, 6, 6, 5, 3, 2, 1], batch_first=True).data],
    "native_norms": lambda x: [*torch.native_batch_norm(x, PLAIN[0, 0], None, None, None, True, 0.1, 1e-5), *torch.native_group_norm(x, PLAIN[0, 0], None, 7, 7, 7, 7, 1e-5), torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False)],
}  # fmt: skip


def _attend_near(query: Any, key: Any, value: Any, *args: Any, **named: Any) -> Any:
    """Take two dims for those of a grid, and the last for features."""
    return neighbourhood(*(x[None, :, :, None] for x in (query, key, value)), *args, **named)


#: Where two sharded dims are merged, or covered by one mask or several index tensors.
_MERGING: dict[str, Callable[[Any], Any]] = {
    "neighborhood attention": lambda x: _attend_near(x, x * 2, x.cos(), 3, dilation=2),
    "neighborhood attention, strided": lambda x: _attend_near(x, x, x, (4, 3), stride=(2, 3), is_causal=(False, True)),
    "reshape": lambda x: [x.reshape(49, 7), torch.reshape(x, (7, 49)), x.reshape(-1), x.reshape_as(PLAIN.view(49, 7))],
    "view": lambda x: [x.view(7, 7, 7, 1), x.view(49, 7).view_as(PLAIN.view(7, 49))],
    "flatten": lambda x: [x.flatten(), torch.flatten(x, 1), x.ravel(), torch.ravel(x).unflatten(0, (7, 49))],
    "unflatten": lambda x: [torch.unflatten(x.repeat(1, 2, 1), 1, (2, 7)), x.repeat(2, 2, 1).reshape(28, 7, 7)],
    "roll_flat": lambda x: x.roll(3),
    "indices": lambda x: [x[INDEX, INDEX], x[INDEX, :, INDEX], x[:, INDEX[:4].view(2, 2)], x[INDEX[:, None], INDEX]],
    "mask": lambda x: [
        *[x[mask] for mask in (MASK, x.detach() > 0, MASK.byte(), (x.detach() > 0).byte())],
        *[x[:, rows] for rows in (MASK[0], ROWS, (x.detach() > 0)[0, 0].byte())],
        *[x[ROWS], x[ROWS, :, ROWS]],
    ],
}


def _update(index: Any, value: Any = 1.5) -> Callable[[Any], Any]:
    """``y[index] += value``: a view or a copy that is written to, then assigned."""

    def write(y: Any) -> None:
        y[index] += value

    return written(write)


#: Written through rows, slices, masks and index tensors.
_WRITES: dict[str, Callable[[Any], Any]] = {
    "update_row": _update((slice(None), 2)),
    "update_first": _update(-1),
    "update_rows": _update((-1, 3)),
    "update_element": _update((1, 2, 3)),
    "update_slice": _update((slice(None), slice(2, 5))),
    "update_steps": _update(slice(0, 6, 2)),
    "update_mask": _update(MASK),
    "update_masked_rows": _update((slice(None), ROWS)),
    "update_index": _update((torch.tensor([0, -2]),)),
    "row_in_place": written(lambda y: y[2].transpose(0, 1).mul_(2).add_(y.mean())),
    "row_written": written(lambda y: y[:, 3].scatter_(0, PLACES[:2, 0], 1.0)),
    "row_relu": written(lambda y: F.relu(y[3], inplace=True)),
    "row_of_row": written(lambda y: [y[3].__setitem__(1, 2.0), y[2][1].mul_(3), y[:, 1, 2].add_(1)]),
    "row_select": written(lambda y: y.select(1, 3).unsqueeze(0).sub_(y[:, 3].exp())),
    "put_mask": setting(MASK, lambda y: torch.arange(int(MASK.sum()), dtype=torch.float64)),
    "put_masked": setting(MASK.byte(), lambda y: y[MASK] * 2),
    "put_mask_rows": setting((slice(None), ROWS), lambda y: y[:, :4] * 3),
    "put_plain": setting(ROWS, PLAIN[:4]),
    "put_behind": setting((slice(None), MASK[0]), PLAIN.flatten()[: int(MASK[0].sum())]),
    "put_indices": setting((torch.tensor([0, 5]), torch.tensor([3, 3])), lambda y: y[0, :2] * 2),
    "put_apart": setting((torch.tensor([0, 5]), slice(None), torch.tensor([3, -4])), lambda y: y[0, :2] * 2),
    "put_grid": setting((torch.tensor([[0], [5]]), torch.tensor([3, 1])), lambda y: y[0, :2, None] * 2),
    "put_row_index": setting((slice(None), 3, torch.tensor([0, 5])), lambda y: y[1, :, :2] * 2),
    "put_row_mask": setting((3, ROWS), lambda y: y[1, :4] * 2),
    "put_sharded_mask": written(lambda y: y.__setitem__(y.detach()[:, 0, 0] > 0.1, y[6] * 2)),
    "put_where": written(lambda y: y.__setitem__(y.detach() > 0.3, y[y.detach() > 0.3] * 2)),
    "put_sharded_index": written(lambda y: y.__setitem__((y.detach()[:, 0, 0] > 0).long(), 3.0)),
    "put_slice": setting((2, slice(1, 4)), lambda y: y[0, 2:5]),
    "put_row": setting(0, lambda y: y[:1]),
    "put_new_dim": setting((slice(None), None, 2), lambda y: y[:, None, 3]),
}


def _reductions() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    def both(name: str, **how: Any) -> Callable[[Any], Any]:
        return lambda x: [getattr(torch, name)(x, **how), getattr(x, name)(**how)]

    for name in ("sum", "mean", "var", "std", "amax", "amin", "logsumexp", "nansum", "any", "all"):
        yield name, both(name, dim=1)
        yield f"{name}_dims", both(name, dim=(0, 2), keepdim=True)
        if name != "logsumexp":
            yield f"{name}_all", lambda x, n=name: getattr(x, n)()
    for name in ("max", "min", "argmax", "argmin", "prod"):
        yield name, both(name, dim=1)
        yield f"{name}_keepdim", both(name, dim=0, keepdim=True)
        yield f"{name}_all", lambda x, n=name: [getattr(torch, n)(x), getattr(x, n)()]
    yield "correction", lambda x: [x.var(1, correction=0), torch.std(x, 0, unbiased=False), torch.var_mean(x, 1)]
    yield "std_mean", lambda x: torch.std_mean(x, (0, 1), correction=2, keepdim=True)
    for order in (2, 1, 3, 0, float("inf"), -float("inf")):
        yield (
            f"norm_{order}",
            lambda x, p=order: [torch.linalg.vector_norm(x, p, 1), x.norm(p, (0, 2)), torch.norm(x, p)],
        )
    yield "count_nonzero", lambda x: [torch.count_nonzero(x, 1), (x > 0).count_nonzero()]
    yield "special_logsumexp", lambda x: torch.special.logsumexp(x, 1)


def _losses() -> Iterator[Case]:
    both = ((0, 0), (1, 1), (2, None), (None, 1))
    names = [
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "kl_div",
        "poisson_nll_loss",
    ]
    for name in [*names, "binary_cross_entropy_with_logits", "soft_margin_loss"]:
        for how in ("mean", "sum", "none"):
            yield Case(
                name=f"{name}_{how}",
                function=lambda a, b, n=name, h=how: getattr(F, n)(a, b.detach() if n == "soft_margin_loss" else b, reduction=h),
                shapes=((7, 7, 7), (7, 7, 7)), dims=both, low=0.1,
            )  # fmt: skip
    weight = torch.linspace(0.2, 2, 7, dtype=torch.float64)
    extra: dict[str, Callable[..., Any]] = {
        "mse_weight": lambda a, b: [F.mse_loss(a, b, weight=PLAIN.abs(), reduction=r) for r in ("mean", "sum", "none")],
        "bce_weight": lambda a, b: F.binary_cross_entropy(a, b, weight=weight),
        "bce_pos_weight": lambda a, b: F.binary_cross_entropy_with_logits(a, b, pos_weight=weight, weight=PLAIN.abs()),
        "kl_batchmean": lambda a, b: F.kl_div(a, b, reduction="batchmean"),
        "probabilities": lambda a, b: F.cross_entropy(a, b, weight=weight, label_smoothing=0.1),
        "probabilities_none": lambda a, b: [F.cross_entropy(a, b, reduction=r) for r in ("none", "sum")],
        "cosine": lambda a, b: [F.cosine_similarity(a, b, d) for d in (0, 1, -1)],
        "broadcast": lambda a, b: F.mse_loss(a, b.mean(0, keepdim=True)),
    }
    for name, function in extra.items():
        yield Case(name=name, function=function, shapes=((7, 7, 7), (7, 7, 7)), dims=both, low=0.1)
    target = PLACES[:, 0]
    for how in ("mean", "sum", "none"):
        options = {"reduction": how, "ignore_index": 3}
        yield Case(
            name=f"cross_entropy_{how}",
            function=lambda a, o=options: [
                F.cross_entropy(a, target, **o),
                F.cross_entropy(a, target, weight, label_smoothing=0.2, **o),
                F.cross_entropy(a, target, label_smoothing=0.1, reduction=o["reduction"]),
                F.nll_loss(a, target, weight, **o),
            ],
        )
    lengths, several = [7, 5, 6, 7, 4, 7, 7], torch.tensor([2, 0, 1, 3, 2, 1, 2])
    for how in ("mean", "sum", "none"):
        yield Case(
            name=f"ctc_loss_{how}",
            function=lambda a, h=how: [
                F.ctc_loss(a.log_softmax(2), PLACES[0].clamp(min=1), lengths, several.tolist(), reduction=h),
                F.ctc_loss(a.log_softmax(2), PLACES[1, 0].repeat(2)[:11], torch.tensor(lengths), several, 3, h, True),
            ],
        )  # fmt: skip
    if hasattr(F, "linear_cross_entropy"):  # from torch 2.13 on
        yield Case(
            name="linear_cross_entropy",
            function=lambda a: [F.linear_cross_entropy(a[0], PLAIN[0], target[0], linear_bias=PLAIN[0, 0], reduction=r) for r in ("mean", "none")],
        )  # fmt: skip
    yield Case(
        name="cross_entropy_rows", function=lambda a: F.cross_entropy(a, target[0]), shapes=((7, 7),), dims=((0,), (1,))
    )
    yield Case(
        name="cross_entropy_one", function=lambda a: F.cross_entropy(a, target[0, 0]), shapes=((7,),), dims=((0,),)
    )


def _products() -> Iterator[Case]:
    square, vector, cube = (7, 7), (7,), (7, 7, 7)
    same = ((0, None), (1, None), (None, 1), (1, 0))
    for name in ("matmul", "mm"):
        yield Case(
            name=name,
            function=lambda a, b, n=name: [getattr(torch, n)(a, b), getattr(a, n)(b)],
            shapes=(square, square),
            dims=same,
        )
    yield Case(
        name="@", function=lambda a, b: [a @ b, a.__matmul__(b), b.__rmatmul__(a)], shapes=(square, square), dims=same
    )
    yield Case(
        name="bmm",
        function=lambda a, b: [torch.bmm(a, b), a.bmm(b)],
        shapes=(cube, cube),
        dims=((0, 0), (0, None), (1, None), (2, 1), (None, 2)),
    )
    yield Case(
        name="mv",
        function=lambda a, b: [torch.mv(a, b), a.mv(b)],
        shapes=(square, vector),
        dims=((0, None), (1, 0), (1, None)),
    )
    yield Case(
        name="dot", function=lambda a, b: [torch.dot(a, b), a.dot(b)], shapes=(vector, vector), dims=((0, 0), (0, None))
    )
    yield Case(
        name="outer",
        function=lambda a, b: [torch.outer(a, b), a.outer(b), torch.ger(a, b), a.ger(b)],
        shapes=(vector, vector),
        dims=((0, None), (None, 0)),
    )
    yield Case(
        name="linear",
        function=F.linear,
        shapes=(cube, square, vector),
        dims=((0, None, None), (1, None, None), (2, None, None), (2, 1, None), (None, 0, 0)),
    )
    yield Case(
        name="bilinear",
        function=lambda a, b, w: [F.bilinear(a, b, w, torch.ones(7, dtype=a.dtype)), torch.bilinear(a, b, w, None)],
        shapes=(square, square, cube),
        dims=((0, 0, None), (0, None, None), (1, None, None), (1, None, 1), (None, None, 0)),
    )
    for name, shapes, dims in [
        ("addmm", (square, square, square), ((0, 0, None), (None, 0, None), (None, 1, 0), (1, None, 1), (None, 1, None))),
        ("addmv", (vector, square, vector), ((0, 0, None), (None, 1, 0))),
        ("addr", (square, vector, vector), ((0, 0, None), (None, None, 0))),
        ("baddbmm", (cube, cube, cube), ((0, 0, 0), (None, 1, None), (None, 2, 1))),
        ("addbmm", (square, cube, cube), ((None, 0, 0), (0, 1, None))),
    ]:  # fmt: skip
        yield Case(
            name=name,
            shapes=shapes,
            dims=dims,
            function=lambda c, a, b, n=name: [getattr(torch, n)(c, a, b), getattr(c, n)(a, b, beta=0.5, alpha=2)],
        )
    places = SPARSE.coalesce().indices()
    yield Case(
        name="sparse values",
        function=lambda a, v: torch.sparse_coo_tensor(places, v, (5, 7)) @ a,
        shapes=(square, (places.shape[1],)),
        dims=((0, None), (1, None)),
    )
    for equation, shapes, dims in [
        ("bnc,dc->bnd", (cube, square), ((0, None), (1, None), (2, None), (2, 1), (None, 0))),
        ("bnc,bnd->bcd", (cube, cube), ((1, 1), (1, None), (0, 0))),
        ("...i,ij", (cube, square), ((0, None), (1, None), (2, 0))),
        ("...ij,...jk->...ik", (cube, square), ((0, None), (1, None), (2, 0))),
        ("ij,jk", (square, square), ((0, None), (1, 0))),
    ]:  # fmt: skip
        yield Case(name=equation, shapes=shapes, dims=dims, function=lambda a, b, e=equation: torch.einsum(e, a, b))


def cases() -> Iterator[Case]:
    """Yield every case but those of pointwise functions."""
    for name, function in _SHAPES.items():
        yield Case(name=name, function=function)
    for name, function in (_MERGING | _WRITES | _BELOW).items():
        yield Case(name=name, function=function)
    for name, function in _reductions():
        yield Case(name=name, function=function)
    yield from _losses()
    yield from _products()
