"""The accelerator of this process, whatever its name: cuda (NVIDIA and ROCm), xpu, or one that a package registers.

The one place that knows torch's modules of devices. torch has one kind of accelerator in a process. Importing this
starts none, nor does asking whether there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Whether each of the kernels may be chosen that compute attention; torch keeps these of all devices under one name.
ATTENTION_KERNELS: list[Callable[[], bool]] = [
    getattr(torch.backends.cuda, f"{name}_sdp_enabled") for name in ("flash", "mem_efficient", "math", "cudnn")
]


def is_accelerator(device: torch.device) -> bool:
    """Whether a device is one of the accelerator's, with streams and events; Apple's ``mps`` has none."""
    found = torch.accelerator.current_accelerator()
    return found is not None and device.type == found.type != "mps"


def accelerator() -> str | None:
    """Return the kind of accelerator that this process can use; None without one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and is_accelerator(found) else None


def kinds() -> list[str]:
    """Name the kinds of accelerators that there may be, here or on other machines."""
    return sorted({"cuda", "xpu", accelerator() or "cuda"})


def is_started() -> bool:
    """Whether this process uses the accelerator already."""
    found = torch.accelerator.current_accelerator()
    if found is None or not is_accelerator(found):
        return False
    asked = getattr(torch.get_device_module(found), "is_initialized", None)  # registered modules may have none
    return bool(asked()) if asked is not None else accelerator() is not None


def current_device(kind: str) -> torch.device:
    """Return the current device of a kind, with its index if it is an accelerator, of which each thread has one."""
    device = torch.device(kind)
    return torch.device(kind, torch.accelerator.current_device_index()) if is_accelerator(device) else device


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Make a stream, and its device, the current ones of this thread; ``with stream`` serves one thread at a time."""
    with torch.accelerator.device_index(stream.device.index):
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def random_states() -> list[Tensor]:
    """Return the states of the random generators that are in use: the CPU's, and that of the current device."""
    states = [torch.default_generator.get_state()]
    return [*states, _module().get_rng_state()] if is_started() else states


def seed(number: int) -> None:
    """Seed like ``torch.manual_seed``, which takes 7 ms to format a stack for each unused kind of device."""
    torch.default_generator.manual_seed(number)
    if is_started():
        _module().manual_seed_all(number)


def uuid_of(device: torch.device) -> str:
    """Return a globally unique device name; empty if torch has none."""
    properties = getattr(_module(), "get_device_properties", lambda _: None)(device)
    return str(getattr(properties, "uuid", ""))


def _module() -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator())


def default_backend(kind: str) -> str | None:
    """Name the backend of process groups that torch has for a kind of device: nccl (ROCm too), xccl, gloo; or None."""
    return dist.Backend.default_device_backend_map.get(kind)


def is_bound(group: dist.ProcessGroup | None) -> bool:
    """Whether to tell a process group which device this rank has: it connects at once then, and can be split.

    torch asks groups of gloo, such as that of a writer, for a backend of that device: they have one for CUDA only.
    """
    kind = kind_of(group)
    return kind != "cpu" and kind in dist.Backend.backend_capability["gloo"]


def kind_of(group: dist.ProcessGroup | None) -> str:
    """Return the kind of device on which a group communicates: the accelerator if it has a backend for it."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    found = torch.accelerator.current_accelerator()
    own = backends.get(found.type) if found is not None and is_accelerator(found) else None
    return "cpu" if found is None or own is None or own == backends.get("cpu") else found.type
