"""Counting what goes to process groups."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Collectives"]


class Collectives(TorchDispatchMode):
    """Every collective passes the dispatcher, whatever function of torch.distributed started it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))
