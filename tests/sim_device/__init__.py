"""An accelerator made of threads (``sim.cpp``), for tests where there is no GPU: ``pytest -p tests.sim_device ...``.

torch has one accelerator in a process, and cannot let go of it: so it is loaded into a process of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import types
from functools import cache
from pathlib import Path

import torch
from torch.utils import cpp_extension

_SOURCE = Path(__file__).with_name("sim.cpp")
_OPTIONS = ["-O1", "-w", "-shared", "-fPIC", "-std=c++20"]
#: The name of the device.
NAME = "sim"
#: The variable of processes that it is loaded into.
CHOSEN = "SCIDATA_TESTS_ON_SIM"


class CannotBuildError(Exception):
    """There is no stand-in on this machine, for the reason that is given."""


def compiler() -> str | None:
    """Return the C++ compiler, or None."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


@cache
def build() -> Path:
    """Return the library, built once for each source, torch and compiler: in some 15 s."""
    found = compiler()
    if found is None:
        raise CannotBuildError("needs a C++ compiler, to build the stand-in for an accelerator")
    version = subprocess.run([found, "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256(b"\0".join([_SOURCE.read_bytes(), torch.__version__.encode(), version]))
    folder = Path(tempfile.gettempdir()) / f"scidata-sim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{key.hexdigest()[:16]}.so"
    with open(folder / "lock", "w") as lock:  # the others wait for the one that builds
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            begun = library.with_suffix(f".{os.getpid()}")
            includes = [f"-I{path}" for path in cpp_extension.include_paths()]
            libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
            command = [found, *_OPTIONS, *includes, str(_SOURCE), "-o", str(begun), *libraries]
            done = subprocess.run([*command, "-ltorch_cpu", "-lc10"], capture_output=True, text=True, check=False)
            if done.returncode:
                errors = [line for line in done.stderr.splitlines() if "error" in line]
                raise CannotBuildError(
                    f"{found} cannot build {_SOURCE.name} with torch {torch.__version__}: {errors[:3]}"
                )
            begun.rename(library)
    return library


@cache
def load() -> None:
    """Make the stand-in this process's accelerator, with collectives."""
    torch.ops.load_library(str(build()))
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=torch.ops.sim.started,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 4,
        current_device=torch.accelerator.current_device_index,
        set_device=torch.accelerator.set_device_index,
        device=torch.accelerator.device_index,
        Stream=torch.Stream,
        Event=torch.Event,
        current_stream=torch.accelerator.current_stream,
        stream=lambda stream: stream,
        synchronize=torch.accelerator.synchronize,
        memory_allocated=lambda device=0: torch.ops.sim.allocated(torch.device(device).index or 0),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        get_rng_state=lambda device=None: torch.default_generator.get_state(),  # operators that draw are the CPU's
        set_rng_state=lambda state, device=None: torch.default_generator.set_state(state),
        manual_seed_all=lambda seed: None,
        manual_seed=lambda seed: None,
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    from tests.sim_device import collectives

    collectives.register()


def pytest_configure() -> None:
    """Load it, as a plugin of pytest."""
    os.environ[CHOSEN] = "1"
    load()
