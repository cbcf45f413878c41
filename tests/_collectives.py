"""Counting what goes to process groups: collectives, and the bytes and messages that this rank sends."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Collectives"]


class Collectives(TorchDispatchMode):
    """Every collective passes the dispatcher, whatever function of torch.distributed started it.

    Attributes
    ----------
    names
        The operators that were called, in order.
    num_bytes, num_messages
        What this rank sends to others: reductions and gathers as in rings, of all-to-alls what is not empty. A
        broadcast counts as the root's messages to all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.num_bytes = self.num_messages = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(func.name())
            if func.namespace == "c10d":
                num_bytes, num_messages = _sent(func.name().removeprefix("c10d::").strip("_"), args)
                self.num_bytes += num_bytes
                self.num_messages += num_messages
        return func(*args, **(kwargs or {}))


def _sent(name: str, args: Any) -> tuple[int, int]:
    """Return how many bytes an operator sends from this rank to others, and in how many messages."""
    group = next(ProcessGroup.unbox(x) for x in args if not isinstance(x, Tensor | list | int | None))
    others = group.size() - 1
    if name == "alltoall_base":
        _, rows, _, _, counts = args[:5]
        shares = counts or [len(rows) // group.size()] * group.size()
        row = rows.nbytes // max(len(rows), 1)
        away = [n for rank, n in enumerate(shares) if n and rank != group.rank()]
        return row * sum(away), len(away)
    if name == "send":
        return sum(x.nbytes for x in args[0]), 1
    if name in ("recv", "barrier"):
        return 0, 0
    if name == "allgather_base":
        return args[1].nbytes * others, others
    if name == "allreduce":
        return 2 * sum(x.nbytes for x in args[0]) * others // group.size(), 2 * others
    if name == "broadcast":
        is_root = args[2] == group.rank()
        return (sum(x.nbytes for x in args[0]) * others, others) if is_root else (0, 0)
    raise AssertionError(f"what {name} sends is not known")
