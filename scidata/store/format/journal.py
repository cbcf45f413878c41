"""What is finished of a sample that is made over disk: a run that was killed goes on inside it.

A journal lies among the scratch files of a sample, and has a line of JSON for each step that is done. The files that a
step made carry its name and are described with their checksums; those that it used up go once its line is written. So
after a kill at any moment the files of the last line are there, whole; all others are of a step that is done again.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from scidata.core.own_files import make_own_folder, open_own
from scidata.errors import CorruptDataError
from scidata.store.format.durable import remove
from scidata.store.format.spools import Buckets, Spool

T = TypeVar("T")
_NAME = "journal"


class Journal:
    """The steps of one sample that are done, in a folder that is made, or goes on as it is; None: nothing is kept.

    ``key`` says what the result depends on. Where it was another, or any file is not what was written, all begins anew.
    """

    def __init__(self, folder: str | None, key: str) -> None:
        self.folder = folder
        self._now, self._num, self._used, self._done = "", 0, list[str](), dict[str, Any]()
        self.is_resumed = False  # whether an earlier run has done some steps
        if folder is None:
            return
        make_own_folder(folder)
        path = os.path.join(folder, _NAME)
        kept, live = 0, {_NAME}
        try:
            with open(open_own(path, os.O_RDONLY), "rb") as file:
                kept, live = self._load(file.read(), key)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, CorruptDataError):
            self._done = {}
        self.is_resumed = bool(self._done)
        for name in set(os.listdir(folder)) - live:
            remove(os.path.join(folder, name))
        with open(open_own(path, os.O_WRONLY | os.O_CREAT), "r+b") as file:
            file.truncate(kept)
        if not kept:
            self._write({"key": key})

    def _load(self, content: bytes, key: str) -> tuple[int, set[str]]:
        """Take in all whole lines; return their bytes and the names of the files that have to be there."""
        lines = content.split(b"\n")[:-1]
        if not lines or json.loads(lines[0])["key"] != key:
            raise ValueError(key)
        spools: dict[str, Spool] = {}
        for line in lines[1:]:
            step = json.loads(line)
            self._done[step["step"]] = self._decoded(step["made"], spools)
            for name in step["used"]:
                del spools[name]
        for spool in spools.values():
            spool.check()
        return len(b"\n".join(lines)) + 1, {_NAME, *spools}

    def step(self, name: str, make: Callable[[], T]) -> T:
        """Return the result of a step: that of an earlier run, or ``make()``, which is written down.

        Results are spools, buckets, arrays, texts, numbers, None, and tuples and dicts of them.
        """
        if self.folder is None:
            return make()
        if name in self._done:
            done: T = self._done[name]
            return done
        self._now = f"{len(self._done)}-"
        made = make()
        self._write({"step": name, "made": _encoded(made), "used": [*map(os.path.basename, self._used)]})
        self._done[name], self._now = None, ""
        for path in self._used:
            os.unlink(path)
        self._used.clear()
        return made

    def path(self) -> str | None:
        """Return the name of a new file of the step that is being done; None: there is no folder."""
        self._num += 1
        return None if self.folder is None else os.path.join(self.folder, f"{self._now}{self._num}")

    def remove(self, path: str) -> None:
        """Remove a file: at once where the step that is being done made it, else when that is done."""
        if self._now and not os.path.basename(path).startswith(self._now):
            self._used.append(path)
        else:
            os.unlink(path)

    def _write(self, line: dict[str, Any]) -> None:
        assert self.folder is not None
        with open(open_own(os.path.join(self.folder, _NAME), os.O_WRONLY | os.O_APPEND), "ab") as file:
            file.write(json.dumps(line).encode() + b"\n")

    def _decoded(self, data: Any, spools: dict[str, Spool]) -> Any:
        if isinstance(data, list):
            return tuple([self._decoded(each, spools) for each in data])
        if not isinstance(data, dict):
            return data
        kind, value = next(iter(data.items()))
        if kind == "spool":
            name, dtype, shape, num, crc = value
            path = os.path.join(str(self.folder), os.path.basename(name))
            spools[name] = Spool(path, np.dtype((dtype, tuple(shape))), written=(num, crc), remove=self.remove)
            return spools[name]
        if kind == "buckets":
            bounds, columns = (self._decoded(each, spools) for each in value)
            return Buckets(bounds, columns)
        if kind == "array":
            text, dtype, shape = value
            return np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
        return {name: self._decoded(each, spools) for name, each in value.items()}


def _encoded(made: object) -> object:
    if isinstance(made, Spool):
        name = os.path.basename(made.path or "")
        return {"spool": [name, made.dtype.str, made.shape[1:], len(made), made.crc]}
    if isinstance(made, Buckets):
        return {"buckets": [_encoded(made.bounds), _encoded(made.columns)]}
    if isinstance(made, np.ndarray):
        return {"array": [base64.b64encode(made.tobytes()).decode(), made.dtype.str, made.shape]}
    if isinstance(made, dict):
        return {"dict": {name: _encoded(each) for name, each in made.items()}}
    return [_encoded(each) for each in made] if isinstance(made, list | tuple) else made
