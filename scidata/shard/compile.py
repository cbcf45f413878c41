"""``torch.compile`` around ShardTensors: a graph break, never a trace of what lies inside."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["keep_out_of_graphs"]

_told: list[Any] = []


def keep_out_of_graphs(*, load: bool = False) -> None:
    """Tell Dynamo to run this package's functions as they are; where it is not loaded yet, only if ``load``.

    A function of a compiled model that meets a ShardTensor then runs as if not compiled, with the reason in
    ``TORCH_LOGS=graph_breaks``; functions on plain tensors are compiled as ever.
    """
    if _told or not (load or "torch._dynamo" in sys.modules):
        return
    from torch._dynamo import trace_rules

    trace_rules.add("scidata")
    _told.append(trace_rules)
