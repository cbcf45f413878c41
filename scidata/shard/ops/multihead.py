"""``nn.MultiheadAttention`` with the sequence or the batch sharded, in the operations of the table.

The projections act on each row alone. ``scaled_dot_product_attention`` crosses ranks, or keys and values are gathered
where the weights are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.op_table import TorchFunction, unsupported
from scidata.shard.ops.align import is_sharded, plain_of, specs_of
from scidata.shard.ops.arguments import handles
from scidata.shard.ops.moving import whole_along
from scidata.shard.torch_internals import nested_from_mask

Given = Tensor | None
Triple = tuple[Tensor, Tensor, Tensor]


def _projected(operands: Triple, weights: Sequence[Given] | None, packed: Given, bias: Given) -> Sequence[Tensor]:
    """Project query, key and value, by three weights or one joint weight."""
    if weights is None:
        assert packed is not None
        if operands[0] is operands[1] is operands[2]:
            return F.linear(operands[0], packed, bias).chunk(3, -1)
        weights = packed.chunk(3)
    biases = [None] * 3 if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip(operands, weights, biases, strict=True) if w is not None]


def _merged(mask: Given, padding: Given, shape: tuple[int, int, int], dtype: torch.dtype) -> Given:
    """Merge attention and padding masks to one additive mask for scores ``(batch, heads, L, S)``."""
    batch, rows, columns = shape
    if mask is not None:
        if mask.ndim not in (2, 3) or tuple(mask.shape[-2:]) != (rows, columns):
            raise RuntimeError(f"attn_mask must be (..., {rows}, {columns}), not {tuple(mask.shape)}")
        mask = _additive(mask, dtype)
        mask = mask.unsqueeze(0).unsqueeze(0) if mask.ndim == 2 else mask.view(batch, -1, rows, columns)
    if padding is not None:
        padding = plain_of(padding)  # each rank wants all of it, and it has no width
        if tuple(padding.shape) != (batch, columns):
            raise RuntimeError(f"key_padding_mask must be {(batch, columns)}, not {tuple(padding.shape)}")
        padding = _additive(padding, dtype).view(batch, 1, 1, columns)
        mask = padding if mask is None else mask + padding
    return mask


def _with_keys(key: Tensor, value: Tensor, mask: Given, more: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Given]:
    """Append a key and a value that every query may attend to."""
    shape = (1, *key.shape[1:])
    key, value = torch.cat([key, more[0].expand(shape)]), torch.cat([value, more[1].expand(shape)])
    return key, value, None if mask is None else F.pad(mask, (0, 1))


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask, true where attention is forbidden, to an additive one; return other masks unchanged."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


@handles(nested_from_mask)
def takes_nested_path(func: TorchFunction, *args: Tensor) -> bool:
    """Send ``nn.TransformerEncoder`` past its nested tensors, which without autograd give zeros for padded rows."""
    if not torch.is_grad_enabled():
        remedy = "build nn.TransformerEncoder with enable_nested_tensor=False"
        raise unsupported(func, "nested tensors have no sharded form", *specs_of(args), remedy=remedy)
    return False


@handles(F.multi_head_attention_forward)
def multi_head(
    func: TorchFunction,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Given,
    in_proj_bias: Given,
    bias_k: Given,
    bias_v: Given,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Given,
    training: bool = True,
    key_padding_mask: Given = None,
    need_weights: bool = True,
    attn_mask: Given = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Given = None,
    k_proj_weight: Given = None,
    v_proj_weight: Given = None,
    static_k: Given = None,
    static_v: Given = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Given]:
    """Project, attend and project, as torch does."""
    operands = query, key, value
    specs = specs_of([*operands, attn_mask, key_padding_mask, in_proj_weight, in_proj_bias, out_proj_weight])
    if not any(map(is_sharded, operands)):
        raise unsupported(func, "plain inputs meet sharded masks or parameters", *specs)
    if static_k is not None or static_v is not None:
        name = "static_v" if static_k is None else "static_k"
        raise unsupported(func, f"{name} is not supported", *specs, remedy="build the layer without it")
    if embed_dim_to_check % num_heads:
        raise ValueError(f"{num_heads} heads do not divide the width {embed_dim_to_check}")
    batched = query.ndim == 3
    if not batched:
        first = query.unsqueeze(1)  # one tensor where all three are: they are projected together
        opened = [first if x is query else x.unsqueeze(1) for x in (key, value)]
        operands = first, opened[0], opened[1]
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    (rows, batch, width), columns = operands[0].shape, key.shape[0]
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    causal = is_causal and key_padding_mask is None and not need_weights
    separate = [q_proj_weight, k_proj_weight, v_proj_weight] if use_separate_proj_weight else None
    query, key, value = _projected(operands, separate, in_proj_weight, in_proj_bias)
    mask = None if causal else _merged(attn_mask, key_padding_mask, (batch, rows, columns), query.dtype)
    if bias_k is not None and bias_v is not None:
        key, value, mask = _with_keys(key, value, mask, (bias_k, bias_v))
    if add_zero_attn:
        zeros = torch.zeros((), dtype=key.dtype, device=key.device)
        key, value, mask = _with_keys(key, value, mask, (zeros, zeros))
    heads = num_heads, width // num_heads
    query, key, value = (x.reshape(*x.shape[:2], *heads).permute(1, 2, 0, 3) for x in (query, key, value))
    dropout, weights = dropout_p if training else 0.0, None
    if need_weights:
        key, value = whole_along(key, -2), whole_along(value, -2)
        scores = query * math.sqrt(1.0 / query.shape[-1]) @ key.transpose(-2, -1)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        weights = F.dropout(weights, dropout) if dropout else weights
        attended = weights @ value
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        attended = F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=causal)
    joined = attended.permute(2, 0, 1, 3).reshape(rows, batch, width)
    result = F.linear(joined, out_proj_weight, out_proj_bias)
    if batched:
        return result, weights
    return result.squeeze(1), None if weights is None else weights.squeeze(0)
