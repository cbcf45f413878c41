"""What is done with the files of a case: everything that a user does with files of others."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import typer.main

import scidata
import scidata.cli.app
from scidata.core.options import ReadOptions
from scidata.data.grid_dataset import ShardedDataset
from scidata.errors import SciDataError
from scidata.grids.reader import GridReader
from scidata.store.raw_points.reader import PointsReader
from scidata.store.reading.reader import StoreReader
from tests.fuzz.seeds import Seed

__all__ = ["STEPS", "Step", "run_step", "threads_left"]

_HOME = os.path.dirname(os.path.abspath(scidata.__file__))
_MANY_BYTES = 1 << 30  # buffers that the fuzzer itself would have to make for a rank

#: ``[dtype, shape, digest]`` of each value, by name.
Values = dict[str, list[Any]]


@dataclass(kw_only=True)
class Step:
    """What one use of the files gave.

    Attributes
    ----------
    values
        What was read, even if an error came later.
    error
        Class and message; None where there was none.
    named
        Whether it is an error that scidata raises on purpose, or the system's about a file.
    frame
        The innermost line of scidata, or of the library that it called.
    output
        What a command printed.
    """

    values: Values = field(default_factory=dict)
    error: str | None = None
    kind: str = ""
    named: bool = True
    number: int | None = None
    frame: str = ""
    trace: str = ""
    output: str = ""


def _note(values: Values, name: str, value: Any) -> None:
    array = np.asarray(value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value)
    digest = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=12).hexdigest()
    values[name] = [array.dtype.str, list(array.shape), digest]


def _note_text(values: Values, name: str, value: Any) -> None:
    values[name] = ["text", [], str(value)]


def _paths(root: str, seed: Seed) -> Any:
    found = [os.path.join(root, name) for name in seed.targets]
    return found[0] if len(found) == 1 else found


def _said_kind(seed: Seed) -> str | None:
    return seed.options.get("kind") if seed.kind == "grid" else None


def _open(path: Any, seed: Seed, step: Step, threads: int, *, kind: str | None = None) -> None:
    """Open it as anybody would, and read the first and the last sample whole."""
    dataset: Any = scidata.open_dataset(path, num_threads=threads, kind=kind or _said_kind(seed))
    try:
        values = step.values
        _note(values, "length", len(dataset))
        for index in sorted({0, len(dataset) - 1}):
            if isinstance(dataset, ShardedDataset):  # what has lost its points may be one
                for name, tensor in dataset[index].items():
                    _note(values, f"{index}/{name}", tensor)
                    _note_text(values, f"{index}/{name} dims", dataset.dims(name))
                continue
            for name, array in dataset.read_local(index).arrays().items():
                _note(values, f"{index}/{name}", array)
            sample = dataset[index]
            for entity in dataset.entities:
                _note(values, f"{index}/{entity} ids", sample.original_id(entity))
            for name in dataset.fields:
                _note_text(values, f"{name} dims", dataset.dims(name))
                _note_text(values, f"{name} statistics", dataset.statistics(name))
    finally:
        dataset.close()


def _rank(path: Any, seed: Seed, step: Step, threads: int) -> None:
    """Read what rank 1 of 3 reads, with no process group."""
    if seed.kind == "grid":
        grid = GridReader(path, ReadOptions(num_threads=threads), axis_sizes={"domain": 3})
        try:
            specs = grid.buffer_specs({"domain": 1})
            if sum(int(np.prod(s.shape, dtype=object)) * s.dtype.itemsize for s in specs.values()) < _MANY_BYTES:
                buffers = {name: np.empty(s.shape, s.dtype) for name, s in specs.items()}
                grid.read_into(0, buffers, {"domain": 1})
                for name, array in buffers.items():
                    _note(step.values, name, array)
        finally:
            grid.close()
        return
    reader: Any
    if seed.kind == "points":
        reader = PointsReader(path, ReadOptions(num_threads=threads), num_parts=3)
    else:
        halo = {"halo": 1, "ghosts": "disk"} if "points" not in seed.name else {"halo": 0.2, "ghosts": "exchange"}
        reader = StoreReader(path, ReadOptions(num_threads=threads, **halo), num_parts=3)
    try:
        part = reader.read(0, 1)
        for name, array in part.arrays().items():
            _note(step.values, name, array)
        for entity, rows in part.index_maps.items():
            _note(step.values, f"{entity} bounds", rows.bounds)
            _note(step.values, f"{entity} ghosts", rows.ghosts)
    finally:
        reader.close()


def _as_grid(path: Any, seed: Seed, step: Step, threads: int) -> None:
    _open(path, seed, step, threads, kind="grid")


def _partition(path: Any, seed: Seed, step: Step, threads: int) -> None:
    """Write it as a store, and read that."""
    out = os.path.join(os.path.dirname(os.path.dirname(path)), "out.store")
    scidata.partition(path, out, **seed.options)
    store = StoreReader(out, ReadOptions(num_threads=1))
    try:
        for name, array in store.read(0, 0).arrays().items():
            _note(step.values, name, array)
    finally:
        store.close()


#: As ``scidata.cli.app.main`` makes it, but once: that takes longer than most commands.
_SCIDATA = typer.main.get_command(scidata.cli.app.app)


def _command(*words: str) -> Callable[[Any, Seed, Step, int], None]:
    def run(path: Any, seed: Seed, step: Step, threads: int) -> None:
        paths = [path] if isinstance(path, str) else path
        if words[0] == "plan" and len(paths) > 1:  # which takes a glob
            paths = [os.path.join(os.path.dirname(paths[0]), f"g[0-9]{os.path.splitext(paths[0])[1]}")]
        kind = ["--kind", _said_kind(seed)] if words[0] == "plan" and _said_kind(seed) else []
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                _SCIDATA.main([words[0], *paths, *words[1:], *kind], prog_name="scidata")
        except SystemExit as e:
            if e.code not in (0, None):
                step.error, step.kind = f"exit code {e.code}: {out.getvalue()}", "SystemExit"
                step.named = e.code in (1, 2)
        finally:
            step.output = out.getvalue()

    return run


Use = Callable[[Any, Seed, Step, int], None]

#: By name: for which kinds of seeds, in which share of the cases, and what.
STEPS: Mapping[str, tuple[tuple[str, ...], float, Use]] = {
    "open": (("grid", "points", "mesh", "store"), 1.0, _open),
    "rank": (("grid", "points", "store"), 1.0, _rank),
    "as grid": (("mesh",), 0.5, _as_grid),
    "inspect": (("grid", "points", "mesh", "store"), 0.4, _command("inspect")),
    "plan": (("grid", "store"), 0.15, _command("plan", "--domain", "3")),
    "partition": (("points", "mesh"), 0.7, _partition),
    "verify": (("store",), 1.0, _command("verify")),
}

_ABOUT_FILES = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
# a disk that is too small is found before anything is written; the limit on files gives EFBIG
_NUMBERS = {errno.ENXIO, errno.ENODEV, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOSPC}


def _frame(error: BaseException) -> str:
    """Return the innermost frame of scidata, and the one of a library below it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f.filename.startswith(_HOME)]
    if not ours:
        return f"{os.path.basename(frames[-1].filename)}:{frames[-1].name}" if frames else ""
    return f"{os.path.relpath(ours[-1].filename, os.path.dirname(_HOME))}:{ours[-1].name}"


def run_step(name: str, root: str, seed: Seed, *, threads: int) -> Step:
    """Use the files in one way, whatever happens."""
    step = Step()
    try:
        STEPS[name][2](_paths(root, seed), seed, step, threads)
    except BaseException as e:
        step.error, step.kind, step.frame = str(e), type(e).__name__, _frame(e)
        step.number = getattr(e, "errno", None)
        step.named = isinstance(e, (SciDataError, *_ABOUT_FILES)) or (isinstance(e, OSError) and e.errno in _NUMBERS)
        step.trace = "".join(traceback.format_exception(e))[-6000:]
    return step


def threads_left(seconds: float = 1.0) -> list[str]:
    """Return names of threads of scidata that are still there after a while."""
    deadline = time.monotonic() + seconds
    while True:
        found = [t.name for t in threading.enumerate() if t.name.startswith("scidata") and not t.daemon]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.01)
