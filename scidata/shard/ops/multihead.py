"""``nn.MultiheadAttention`` with the sequence or the batch sharded, in the operations of the table.

The projections act on each row alone; what crosses ranks is ``scaled_dot_product_attention``, or gathered keys and
values where the weights are asked for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.op_table import register_op, unsupported
from scidata.shard.ops.align import bind, is_sharded, specs_of, whole_along
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import nested_from_mask

_NAMES = """
    query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn dropout_p
    out_proj_weight out_proj_bias training key_padding_mask need_weights attn_mask use_separate_proj_weight
    q_proj_weight k_proj_weight v_proj_weight static_k static_v average_attn_weights is_causal
"""


def _refuse(func: Any, given: dict[str, Any]) -> None:
    specs = specs_of([*given.values()])
    if not any(is_sharded(given[name]) for name in ("query", "key", "value")):
        raise unsupported(func, "plain inputs meet sharded masks or parameters", *specs)
    for name in ("static_k", "static_v"):
        if given.get(name) is not None:
            raise unsupported(func, f"{name} is not supported", *specs, remedy="build the layer without it")
    if given["embed_dim_to_check"] % given["num_heads"]:
        raise ValueError(f"{given['num_heads']} heads do not divide the width {given['embed_dim_to_check']}")


def _projected(given: dict[str, Any]) -> list[Tensor]:
    """Return query, key and value after their projections."""
    operands = [given["query"], given["key"], given["value"]]
    bias = given["in_proj_bias"]
    if given.get("use_separate_proj_weight"):
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    elif operands[0] is operands[1] is operands[2]:
        return list(F.linear(operands[0], given["in_proj_weight"], bias).chunk(3, -1))
    else:
        weights = list(given["in_proj_weight"].chunk(3))
    biases = [None] * 3 if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip(operands, weights, biases, strict=True)]


def _mask(given: dict[str, Any], shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor | None:
    """Merge attention and padding masks to one that is added to scores ``(batch, heads, L, S)``."""
    batch, rows, columns = shape
    mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
    if mask is not None:
        if mask.ndim not in (2, 3) or tuple(mask.shape[-2:]) != (rows, columns):
            raise RuntimeError(f"attn_mask must be (..., {rows}, {columns}), not {tuple(mask.shape)}")
        mask = _additive(mask, dtype)
        mask = mask.unsqueeze(0).unsqueeze(0) if mask.ndim == 2 else mask.view(batch, -1, rows, columns)
    if padding is not None:
        if isinstance(padding, ShardTensor):  # each rank wants all of it, and it has no width
            padding = padding.full_tensor()
        if tuple(padding.shape) != (batch, columns):
            raise RuntimeError(f"key_padding_mask must be {(batch, columns)}, not {tuple(padding.shape)}")
        padding = _additive(padding, dtype).view(batch, 1, 1, columns)
        mask = padding if mask is None else mask + padding
    return mask


def _with_extra_keys(
    given: dict[str, Any], key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Append the keys and values that every query may attend to: learned ones, and zeros."""
    for extra in ("bias", "zero"):
        if not (given["bias_k"] is not None if extra == "bias" else given.get("add_zero_attn")):
            continue
        shape = (1, *key.shape[1:])
        zeros = torch.zeros(shape, dtype=key.dtype, device=key.device)
        ends = [given["bias_k"].expand(shape), given["bias_v"].expand(shape)] if extra == "bias" else [zeros, zeros]
        key, value = (torch.cat([x, end]) for x, end in zip((key, value), ends, strict=True))
        mask = None if mask is None else F.pad(mask, (0, 1))
    return key, value, mask


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask is true where nothing attends."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


@register_op(nested_from_mask)
def takes_nested_path(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Send ``nn.TransformerEncoder`` past its nested tensors, which without autograd give zeros for padded rows."""
    if not torch.is_grad_enabled():
        remedy = "build nn.TransformerEncoder with enable_nested_tensor=False"
        raise unsupported(func, "nested tensors have no sharded form", *specs_of(args), remedy=remedy)
    return False


@register_op(F.multi_head_attention_forward)
def multi_head(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Project, attend and project, as torch does."""
    given = bind(_NAMES, args, kwargs, training=True, need_weights=True, average_attn_weights=True)
    _refuse(func, given)
    batched = given["query"].ndim == 3
    if not batched:
        same = given["query"] is given["key"] is given["value"]
        opened = [given[name].unsqueeze(1) for name in ("query", "key", "value")]
        given |= dict(zip(("query", "key", "value"), opened[:1] * 3 if same else opened, strict=True))
        if given.get("key_padding_mask") is not None:
            given["key_padding_mask"] = given["key_padding_mask"].unsqueeze(0)
    (rows, batch, width), columns, heads = given["query"].shape, given["key"].shape[0], given["num_heads"]
    causal = bool(given.get("is_causal"))
    if causal and given.get("attn_mask") is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    causal = causal and given.get("key_padding_mask") is None and not given["need_weights"]
    query, key, value = _projected(given)
    mask = None if causal else _mask(given, (batch, rows, columns), query.dtype)
    key, value, mask = _with_extra_keys(given, key, value, mask)
    query, key, value = (x.reshape(*x.shape[:2], heads, -1).permute(1, 2, 0, 3) for x in (query, key, value))
    dropout = given["dropout_p"] if given["training"] else 0.0
    weights = None
    if given["need_weights"]:
        key, value = whole_along(key, -2), whole_along(value, -2)
        scores = query * math.sqrt(1.0 / query.shape[-1]) @ key.transpose(-2, -1)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        weights = F.dropout(weights, dropout) if dropout else weights
        attended = weights @ value
        weights = weights.mean(1) if given["average_attn_weights"] else weights
    else:
        attended = F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=causal)
    joined = attended.permute(2, 0, 1, 3).reshape(rows, batch, width)
    result = F.linear(joined, given["out_proj_weight"], given["out_proj_bias"])
    if batched:
        return result, weights
    return result.squeeze(1), None if weights is None else weights.squeeze(0)
