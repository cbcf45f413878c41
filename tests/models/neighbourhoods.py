"""Neighborhood attention by torch's operators, in place of NATTEN's kernels, which have no backward on CPUs."""

import math

import torch
from torch.overrides import handle_torch_function, has_torch_function


def attended(row, other, extent, kernel, stride, dilation, is_causal):
    """Whether a row attends to another, as NATTEN's masks for torch's flexible attention say."""
    (i, rest), (j, rest_of_other) = divmod(row, dilation), divmod(other, dilation)
    num = (extent - rest + dilation - 1) // dilation
    if is_causal:
        leader = min(i // stride * stride + stride - 1, num - 1)
        return rest == rest_of_other and i >= j and leader - j < kernel
    left, right = kernel // 2, kernel // 2 + kernel % 2 - 1
    leader = min(i // stride * stride + stride // 2, num - 1)
    middle = min(max(leader, left), num - 1 - right)
    return rest == rest_of_other and middle - left <= j <= middle + right


def neighbourhood(query, key, value, kernel_size, **how):
    """Do what NATTEN does, whose kernels for CPUs have no backward and no doubles."""
    q, k, v = given = query, key, value
    if has_torch_function(given):
        return handle_torch_function(neighbourhood, given, *given, kernel_size, **how)
    num_dims, scale = q.ndim - 3, how.get("scale") or q.shape[-1] ** -0.5
    each = [
        [x] * num_dims if isinstance(x, int) else x
        for x in (kernel_size, how.get("stride", 1), how.get("dilation", 1), how.get("is_causal", False))
    ]
    masks = [
        torch.tensor([[attended(i, j, num, *how_of_dim) for j in range(num)] for i in range(num)])
        for num, *how_of_dim in zip(q.shape[1:], *each, strict=False)
    ]
    mask = masks[0]
    for x in masks[1:]:
        mask = torch.kron(mask.int(), x.int()).bool()
    q_flat, k_flat, v_flat = (x.flatten(1, num_dims).transpose(1, 2) for x in (q, k, v))
    if (more := how.get("additional_keys")) is not None:
        k_flat, v_flat = (
            torch.cat([x, y.transpose(1, 2)], 2) for x, y in ((k_flat, more), (v_flat, how["additional_values"]))
        )
        mask = torch.cat([mask, mask.new_ones(len(mask), more.shape[1])], 1)
    k_flat, v_flat = (x.repeat_interleave(q.shape[-2] // k.shape[-2], 1) for x in (k_flat, v_flat))
    scores = (q_flat @ k_flat.mT * scale).masked_fill(~mask, -math.inf)
    out = (scores.softmax(-1) @ v_flat).transpose(1, 2).unflatten(1, q.shape[1:-2])
    sums = scores.logsumexp(-1).transpose(1, 2).unflatten(1, q.shape[1:-2])
    return (out, sums) if how.get("return_lse") else out


#: Its rule is found by the name of NATTEN's own.
neighbourhood.__module__, neighbourhood.__qualname__ = "natten.functional", "neighborhood_attention_generic"


def stand_in() -> None:
    """Have NATTEN's functions and modules call it."""
    import natten.functional
    import natten.modules

    for module in (natten.functional, natten.modules):
        setattr(module, neighbourhood.__qualname__, neighbourhood)
