"""Attention to one block of keys: result and log-sum-exp, from which the results of several blocks are merged.

Torch's flash kernels where they take the operands, else matrix products. In backward a kernel gets the merged result
and log-sum-exp, so that its probabilities are those of the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scidata.shard.torch_internals import flash, flash_backward, flash_cpu, flash_cpu_backward

_NONE = float("-inf")  # the log-sum-exp of no key


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention to some of the keys: ``out`` ``(..., L, Ev)`` and ``lse`` ``(..., L)``, float32 or wider."""

    out: Tensor
    lse: Tensor


def _kernel(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> str:
    """Name the kernel that takes these operands."""
    plain = bias is None and query.ndim == 4 and query.shape[-1] == value.shape[-1] and key.shape[-2] > 0
    if not plain or 0 in query.shape:
        return "products"
    if query.device.type == "cuda":
        half = query.dtype in (torch.float16, torch.bfloat16)
        # the kernels pad other widths in a wrapper that does not hand out the log-sum-exp
        return "flash" if half and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256 else "products"
    return "flash_cpu" if query.device.type == "cpu" else "products"


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = query @ key.transpose(-2, -1) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(above, _NONE)
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """A row without any key has none, not NaN."""
    return torch.exp(scores - lse.masked_fill(lse == _NONE, 0).unsqueeze(-1))


def block_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> Partial:
    """Attend to a block of keys. ``causal``: queries and keys are the same rows."""
    kernel = _kernel(query, key, value, bias)
    if kernel == "flash":
        out, lse = flash(query, key, value, 0.0, causal, False, scale=scale)[:2]
        return Partial(out.float(), lse)
    if kernel == "flash_cpu":
        out, lse = flash_cpu(query, key, value, 0.0, causal, attn_mask=None, scale=scale)
        return Partial(out.to(lse.dtype), lse)
    scores = _scores(query, key, bias, causal, scale)
    lse = scores.logsumexp(-1) if key.shape[-2] else scores.new_full(scores.shape[:-1], _NONE)
    return Partial(_probabilities(scores, lse) @ value.to(scores.dtype), lse)


def merge(first: Partial | None, second: Partial) -> Partial:
    """Return attention to the keys of both (online softmax; Milakov and Gimelshein, 2018)."""
    if first is None:
        return second
    lse = torch.logaddexp(first.lse, second.lse)
    safe = lse.masked_fill(lse == _NONE, 0)
    parts = [each.out * torch.exp(each.lse - safe).unsqueeze(-1) for each in (first, second)]
    return Partial(parts[0] + parts[1], lse)


def block_backward(
    grad: Tensor,
    operands: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    whole: Partial,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and of the scores (None where there is no bias), of one block.

    Parameters
    ----------
    whole
        Attention to all keys.
    """
    query, key, value = operands
    kernel = _kernel(query, key, value, bias)
    if kernel == "flash":
        # one block is one sequence for each sample: the tables of packed sequences and the seeds of dropout are empty
        nothing = torch.zeros((), dtype=torch.int64, device=query.device)
        cumulative = (None, None, query.shape[-2], key.shape[-2])
        rest = (0.0, causal, nothing, nothing)
        out = whole.out.to(query.dtype)
        found = flash_backward(grad, query, key, value, out, whole.lse, *cumulative, *rest, scale=scale)
        return found[0], found[1], found[2], None
    if kernel == "flash_cpu":
        out = whole.out.to(query.dtype)
        how = (0.0, causal)
        found = flash_cpu_backward(grad, query, key, value, out, whole.lse, *how, attn_mask=None, scale=scale)
        return found[0], found[1], found[2], None
    probabilities = _probabilities(_scores(query, key, bias, causal, scale), whole.lse)
    wide = grad.to(probabilities.dtype)
    inner = (wide * whole.out).sum(-1, keepdim=True)
    d_scores = probabilities * (wide @ value.to(wide.dtype).transpose(-2, -1) - inner)
    d_query = d_scores @ key.to(wide.dtype) * scale
    d_key = d_scores.transpose(-2, -1) @ query.to(wide.dtype) * scale
    return d_query, d_key, probabilities.transpose(-2, -1) @ wide, d_scores
