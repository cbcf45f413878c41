"""Faults put into scidata on purpose, which the fuzzer must notice: ``python -m tests.fuzz --planted``."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn
from unittest import mock

import numpy as np

import scidata
import scidata.cli.commands.partition
import scidata.read.codecs
import scidata.read.run_encoded
from scidata.errors import CorruptDataError
from scidata.store.reading.reader import StoreReader
from tests.fuzz.run import Case, Limits, Runner, prepare, run_cases, scratch

__all__ = ["run_planted"]

_open = scidata.open_dataset


def _crash() -> None:
    ctypes.string_at(8)


def _hang() -> None:
    time.sleep(1000)


def _wait_for_thread() -> None:
    thread = threading.Thread(target=lambda: time.sleep(1000), name="scidata-read")
    thread.start()
    thread.join()


def _blow_up() -> None:
    np.ones(400 << 20)


def _fill_disk() -> None:
    with open(os.path.join("/dev/shm", f"scidata-planted-{os.getpid()}"), "wb") as file:
        os.unlink(file.name)
        for _ in range(400):
            file.write(bytes(1 << 20))


def _bare() -> NoReturn:
    raise KeyError("u")


def _recursion() -> None:
    _recursion()


def _leave_thread() -> None:
    threading.Thread(target=lambda: time.sleep(5), name="scidata-read").start()


def _traceback_of_thread() -> None:
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()


class _RawError(CorruptDataError):
    __str__ = Exception.__str__  # without what escapes the text of scidata's errors


def _escape() -> NoReturn:
    raise _RawError("field '\x1b[31mred' is damaged")


def _say_nothing() -> NoReturn:
    raise CorruptDataError("")


@contextlib.contextmanager
def _when_opened(what: Callable[[], Any]) -> Iterator[None]:
    """Do something before a data set is opened."""

    def opened(*args: Any, **options: Any) -> Any:
        what()
        return _open(*args, **options)

    with mock.patch.object(scidata, "open_dataset", opened):
        yield


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
    """Checksums of chunks are not compared."""
    with (
        mock.patch.object(scidata.read.codecs, "check_crc32c", return_value=None),
        mock.patch.object(scidata.read.run_encoded, "check_crc32c", return_value=None),
    ):
        yield


@contextlib.contextmanager
def _other_values() -> Iterator[None]:
    """Stores give zeros."""
    read = StoreReader.read

    def zeros(*args: Any, **options: Any) -> Any:
        part = read(*args, **options)
        return dataclasses.replace(part, fields={name: values * 0 for name, values in part.fields.items()})

    with mock.patch.object(StoreReader, "read", zeros):
        yield


@contextlib.contextmanager
def _unverified() -> Iterator[None]:
    """``scidata verify`` finds everything sound."""
    with mock.patch.object(scidata.cli.commands.partition, "verify", return_value=None):
        yield


_OPENED: Mapping[str, tuple[Callable[[], Any], str]] = {
    "crash": (_crash, "crash"),
    "hang": (_hang, "hang"),
    "hang in a thread": (_wait_for_thread, "hang"),
    "blow-up": (_blow_up, "blow-up"),
    "disk": (_fill_disk, "blow-up"),
    "bare": (_bare, "bare exception"),
    "recursion": (_recursion, "bare exception"),
    "thread left": (_leave_thread, "hang"),
    "thread traceback": (_traceback_of_thread, "traceback"),
    "escape": (_escape, "control characters"),
    "no message": (_say_nothing, "empty message"),
}


def _cases_of(runner: Runner, format: str, seed: str, mutations: tuple[str, ...], count: int) -> list[Case]:
    """Return the first cases of a seed with some mutations."""
    found = []
    for case in (Case(format, number) for number in range(2000)):
        name, mutation = (x if isinstance(x, str) else x.name for x in runner.choose(case)[:2])
        if name == seed and mutation in mutations:
            found.append(case)
    return found[:count]


def run_planted() -> None:
    """Run a few cases with each fault in place.

    Prints a line for each: its name, what the fuzzer should call it, and what it called each case.
    """
    with scratch() as folder:
        runner = prepare(folder, ("netcdf3", "zarr3", "store"), 0, Limits(seconds=3), 2, None)
        plain = _cases_of(runner, "netcdf3", "netcdf3/classic", ("bit",), 3)
        checked = _cases_of(runner, "zarr3", "zarr3/crc32c", ("bit", "bits", "run"), 12)
        stored = _cases_of(runner, "store", "store/mesh", ("bit", "run"), 8)
        plants = [(name, word, _when_opened(what), plain) for name, (what, word) in _OPENED.items()]
        plants += [
            ("unchecked", "wrong value", _unchecked(), checked),
            ("other values", "wrong value", _other_values(), stored),
            ("unverified", "verify passed", _unverified(), stored),
        ]
        for name, word, plant, cases in plants:
            with plant:
                said = [o.verdict.fault or "none" for o in run_cases(runner, cases, 2)]
            print(f"{name}: {word}: {', '.join(said)}", flush=True)
