"""Collectives of the stand-in: a backend of process groups called "simccl", as the packages of real devices bring one.

gloo does the work, on copies in the CPU's memory. torch calls a collective by an operator of its dispatcher, with the
tensors' device as the key: for tensors of the stand-in, that operator is this module's.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

NAME = "simccl"
_SIM, _CPU = torch.device("sim"), torch.device("cpu")


def register() -> None:
    """Make it the backend of groups for "sim"."""
    dist.Backend.register_backend(NAME, _gloo, devices=["sim"])
    library = torch.library.Library("c10d", "IMPL")
    warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)  # in the place of torch's own
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("c10d::") and "ProcessGroup" in str(schema):
            op = getattr(torch.ops.c10d, schema.name.removeprefix("c10d::"))
            library.impl(schema.name, _staged(op), "PrivateUse1", allow_override=True)
    register.library = library  # type: ignore[attr-defined]  # operators go with it


def _gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    backend._set_sequence_number_for_group()
    return backend


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _staged(op: Any) -> Any:
    def run(*args: Any) -> Any:
        flat, tree = tree_flatten(args)
        groups = [dist.ProcessGroup.unbox(x) for x in flat if "ProcessGroup" in str(getattr(x, "_type", lambda: "")())]
        for group in groups:
            if _CPU not in group._device_types:  # the same connections, for what is staged
                group._register_backend(_CPU, dist.ProcessGroup.BackendType.CUSTOM, group._get_backend(_SIM))
        copies = [x.cpu() if isinstance(x, torch.Tensor) else x for x in flat]
        before = [x.clone() if isinstance(x, torch.Tensor) else None for x in copies]
        found = op(*tree_unflatten(copies, tree))
        for work in tree_flatten(found)[0]:
            if not isinstance(work, torch.Tensor) and hasattr(work, "wait"):
                work.wait()
        back = {}
        for mine, copy, old in zip(flat, copies, before, strict=True):
            if isinstance(mine, torch.Tensor):
                back[id(copy)] = mine
                if not torch.equal(_bytes_of(copy), _bytes_of(old)):  # not of what is only sent: autograd keeps count
                    mine.copy_(copy)
        if op in (torch.ops.c10d.send, torch.ops.c10d.recv_):  # gloo's would wait for another message
            done = torch.futures.Future()
            done.set_result(None)
            return torch._C._distributed_c10d._create_work_from_future(done).boxed()
        return tree_map_only(torch.Tensor, lambda x: back.get(id(x), x), found)

    return run
