"""Ranks with a device each: processes of ``run_ranks`` that begin as torchrun's do."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from scidata.testing import run_ranks
from tests import ports

T = TypeVar("T")


def on_devices(fn: Callable[..., T], num_ranks: int, *args: object, timeout: float = 120) -> list[T]:
    """Run ``fn(rank, num_ranks, *args)`` on ranks with a device each, none of which has begun a process group."""
    if torch.accelerator.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} devices")
    port = ports.free_port()
    return run_ranks(_begin, num_ranks, port, fn, args, timeout=timeout, backend=None)


def _begin(rank: int, num_ranks: int, port: int, fn: Callable[..., T], args: tuple[object, ...]) -> T:
    place = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    return fn(rank, num_ranks, *args)
