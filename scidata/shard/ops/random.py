"""Random numbers: dropout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.ops.align import specs_of
from scidata.shard.ops.registry import register_op, unsupported


@register_op(F.dropout, torch.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d)
def dropout(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The identity where nothing is dropped."""
    given = {
        "p": 0.5,
        "training": True,
        **dict(zip(("input", "p", "training", "inplace"), args, strict=False)),
        **kwargs,
    }
    if given["p"] != 0 and given.get("train", given["training"]):
        raise unsupported(
            func,
            "random numbers of one process cannot be reproduced on parts",
            *specs_of(args),
            remedy="use p=0, or eval()",
        )
    kept: Tensor = given["input"]
    return kept
