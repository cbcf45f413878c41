"""Timeline of the work of reader threads and the loop, as a trace for Perfetto or chrome://tracing.

Times are taken with ``perf_counter_ns`` and written on torch.profiler's clock, nanoseconds since 1970 less the file's
``baseTimeNanoseconds``, so that both traces line up. While none is recorded, all that is left is a look at
:data:`active`.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import threading
import time
from _thread import RLock  # threading.RLock may be a Python function
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from scidata.core.keywords import checked_keywords
from scidata.core.own_files import write_whole
from scidata.errors import ConfigError

_MAX_EVENTS = 2_000_000  # about 500 MB of JSON, more than viewers handle

_Thread: TypeAlias = tuple[int, int]  # process, thread
#: Process names, thread names, and events.
Packed: TypeAlias = tuple[dict[int, str], dict[_Thread, str], list[tuple[str, _Thread, int, int, dict[str, object]]]]

#: The current recorder. Read it once for a piece of work, and keep the value.
active: Recorder | None = None

#: Makes the range around a decoding for torch's profilers, which this wing does not know: a lock of nobody else, which
#: is entered without a call of Python, but where a loader reads while one of them is on.
decode_range: Callable[[], AbstractContextManager[object]] = RLock

_starting = threading.Lock()
_here = threading.local()


class Recorder:
    """Events of all threads and worker processes; adding one takes no lock."""

    def __init__(self) -> None:
        self._events: list[tuple[str, _Thread, int, int, dict[str, object]]] = []
        self._names: dict[_Thread, str] = {}
        self._processes: dict[int, str] = {}
        self._began = _clocks()
        self.dropped = 0

    def add(self, name: str, begin: int, end: int, **about: object) -> None:
        """Add an event of this thread from ``begin`` to ``end`` in ``perf_counter_ns``; arguments that are None are
        left out.
        """
        if len(self._events) >= _MAX_EVENTS:
            self.dropped += 1
            return
        thread = threading.current_thread()
        place = os.getpid(), thread.native_id or 0
        self._names[place] = thread.name
        self._events.append((name, place, begin, end, {k: v for k, v in about.items() if v is not None}))

    def packed(self) -> Packed:
        """Return the events for another process of this machine, which has the same clock."""
        return {os.getpid(): multiprocessing.current_process().name}, self._names, self._events

    def add_packed(self, found: Packed) -> None:
        """Add another process's events."""
        processes, names, events = found
        kept = events[: max(0, _MAX_EVENTS - len(self._events))]
        self.dropped += len(events) - len(kept)
        self._processes |= processes
        self._names |= names
        self._events += kept

    def to_json(self) -> dict[str, object]:
        """Return the trace in Chrome's format: ``ts`` and ``dur`` in µs."""
        (unix, perf), (unix_end, perf_end) = self._began, _clocks()
        rate = (unix_end - unix) / max(1, perf_end - perf)  # the system clock may be adjusted meanwhile
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
            for pid, name in self._processes.items()
        ]
        events += [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            for (pid, tid), name in self._names.items()
        ]
        for name, (pid, tid), begin, end, about in list(self._events):
            events.append(
                {
                    "ph": "X",
                    "cat": "scidata",
                    "name": name,
                    "pid": pid,
                    "tid": tid,
                    "ts": round((begin - perf) * rate) / 1e3,
                    "dur": round((end - begin) * rate) / 1e3,
                    "args": about,
                }
            )
        found: dict[str, object] = {"displayTimeUnit": "ms", "baseTimeNanoseconds": unix, "traceEvents": events}
        return found | ({"droppedEvents": self.dropped} if self.dropped else {})


def _clocks() -> tuple[int, int]:
    """Return one moment in nanoseconds since 1970 and in ``perf_counter_ns``: the closest of a few tries."""
    best: tuple[int, int, int] | None = None
    for _ in range(5):
        before, unix, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        if best is None or after - before < best[0]:
            best = after - before, unix, (before + after) // 2
    assert best is not None
    return best[1], best[2]


def span(name: str, **about: object) -> AbstractContextManager[object]:
    """Record the block as an event if a trace is recorded. Use it at most once per batch."""
    # an uncontended lock acts as an empty context that needs no Python call
    return RLock() if active is None else _recorded(active, name, about)


@contextmanager
def _recorded(recorder: Recorder, name: str, about: dict[str, object]) -> Iterator[None]:
    begin = time.perf_counter_ns()
    try:
        yield
    finally:
        recorder.add(name, begin, time.perf_counter_ns(), **about)


@contextmanager
def recorded_apart(index: int, *, wanted: bool) -> Iterator[Recorder | None]:
    """Record reading one sample separately, for the requesting process; do nothing unless ``wanted``."""
    global active  # noqa: PLW0603
    if not wanted:
        yield None
        return
    active = recorder = Recorder()
    set_sample(index)
    try:
        with span("sample", sample=index):
            yield recorder
    finally:
        active = None
        set_sample(None)


def set_sample(index: int | None) -> None:
    """Set the sample that this thread reads from now on."""
    _here.sample = index


def get_sample() -> int | None:
    """Return the sample that this thread reads, if known."""
    return getattr(_here, "sample", None)


@checked_keywords
@contextmanager
def trace(path: str | os.PathLike[str], *, torch_trace: str | os.PathLike[str] | None = None) -> Iterator[Recorder]:
    """Record the work of this process's readers and loops for Perfetto (https://ui.perfetto.dev).

    Events are ``sample`` (one sample in a reader thread, and again in the worker process that it waits for), in it
    ``read``, ``decode`` and ``copy`` with field and bytes, and ``local transform``; ``begin copy`` to the device; and
    in the loop's thread ``wait`` and ``transform``. Each costs microseconds.

    Parameters
    ----------
    path : str or PathLike
        JSON, replaced where it exists; compressed where it ends in ``.gz``.
    torch_trace : str or PathLike or None, optional
        What ``torch.profiler.profile.export_chrome_trace`` has written by the end of the block; its events are put
        into the same file, on one time axis.

    Raises
    ------
    ConfigError
        A trace is being recorded already.
    FileNotFoundError
        There is no folder for ``path``.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> loader = scidata.DataLoader(scidata.open_dataset("era5.zarr", fields=["u"]), num_workers=1)
    >>> with scidata.trace("reading.json"):
    ...     for batch in loader:
    ...         pass
    >>> import json
    >>> with open("reading.json") as file:
    ...     names = {event["name"] for event in json.load(file)["traceEvents"]}
    >>> names >= {"sample", "read", "decode", "copy", "wait"}
    True

    With ``torch_trace``, beside the events of torch.profiler::

        with scidata.trace("all.json", torch_trace="torch.json"):
            with torch.profiler.profile() as profiler:
                train(loader)
            profiler.export_chrome_trace("torch.json")
    """
    global active  # noqa: PLW0603 - one for all threads; without a trace, reading it is the only cost
    path = os.path.expanduser(os.fspath(path))
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):  # fail now, not after hours of tracing
        raise FileNotFoundError(f"{path}: there is no folder {folder} to write the trace to; make it first")
    with _starting:
        if active is not None:
            raise ConfigError("scidata.trace: a trace is being recorded already; end it first")
        active = recorder = Recorder()
    try:
        yield recorder
    finally:
        active = None
        _save(recorder.to_json(), path)
    if torch_trace is not None:
        merge_traces([torch_trace, path], path)


@checked_keywords
def merge_traces(paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
    """Merge several traces into one file, on the time axis of the first.

    Parameters
    ----------
    paths : Sequence[str or PathLike]
        Of :func:`scidata.trace` and of torch.profiler, of one rank or several; JSON, or gzip of it.
    out : str or PathLike
        May be one of them.

    Raises
    ------
    ConfigError
        A file that is no trace.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> loader = scidata.DataLoader(scidata.open_dataset("era5.zarr", fields=["u"]), num_workers=1)
    >>> for rank in range(2):
    ...     with scidata.trace(f"rank{rank}.json"):
    ...         for batch in loader:
    ...             pass
    >>> scidata.merge_traces(["rank0.json", "rank1.json"], "all.json.gz")
    """
    if isinstance(paths, str | os.PathLike):
        raise ConfigError(f"merge_traces: expected a list of traces, not {paths!r} alone")
    if not paths:
        raise ConfigError("merge_traces: no traces are given")
    merged, *others = [_load(path) for path in paths]
    base = int(merged.get("baseTimeNanoseconds", 0))
    for other in others:
        shift = (int(other.get("baseTimeNanoseconds", 0)) - base) / 1e3
        for event in other["traceEvents"]:
            if "ts" in event:
                event["ts"] = round(event["ts"] + shift, 3)
        merged["traceEvents"] += other["traceEvents"]
    _save(merged, out)


def _load(path: str | os.PathLike[str]) -> dict[str, Any]:
    data = Path(path).expanduser().read_bytes()
    try:
        found = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except ValueError as e:
        raise ConfigError(f"{os.fspath(path)}: not a trace ({e}); export it again") from e
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise ConfigError(f"{os.fspath(path)}: not a trace: it has no list of traceEvents; export it again")
    return found


def _save(content: Mapping[str, object], path: str | os.PathLike[str]) -> None:
    data = json.dumps(content, separators=(",", ":")).encode()
    name = os.path.expanduser(os.fspath(path))
    write_whole(name, gzip.compress(data) if name.endswith(".gz") else data)
