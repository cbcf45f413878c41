"""Places of outputs: an unfinished output lies beside its final name, with a record of its finished steps.

A local output is written as ``NAME.unfinished`` and renamed at its end; object stores cannot rename, so there it has
its final name, and an attribute marks it as unfinished. If a finished output already has that name there, the new one
is ``NAME.unfinished``, too, and is copied once it is complete. A run that takes over from a living one writes to
``NAME.RUN.unfinished``, so that their files are not mixed.

Beside the output lies the folder ``NAME.progress``: its layout (``layout.json``), its owner
(:mod:`scidata.data.output.owner`), and for each rank of each run the steps whose parts it has written. A step is
complete once all ranks of the domain have recorded it; a run resumes from this record, on any number of ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from scidata.core.checks import optional_module
from scidata.core.own_files import make_folder, write_whole
from scidata.core.urls import Url, absolute, local_path
from scidata.errors import CorruptDataError, OutputError
from scidata.sources.unfinished import SUFFIX
from scidata.store.format.durable import remove, rename_over

_LAYOUT = "layout.json"
_ROOTS = ("zarr.json", ".zmetadata", ".zgroup", ".zattrs")  # documents that make a Zarr store
_SUFFIXES = re.compile(r"((\.[0-9a-f]{8})?\.unfinished)?")
_PATIENCE = 5.0  # s to wait for another process that inspects or takes an output of the same folder


class LocalPlace:
    """An output on a local or shared file system.

    - ``path``: where it lies when it is finished.
    - ``suffix``: the end of its name until then.
    """

    def __init__(self, path: str) -> None:
        self.path = absolute(path)
        self.suffix = SUFFIX
        self._folder = self.path + ".progress"

    @property
    def target(self) -> str:
        """The path written to."""
        return self.path + self.suffix

    @property
    def written(self) -> tuple[str, ...]:
        """All paths that are written or replaced."""
        return self.path, self.target, self._folder

    @property
    def is_finished(self) -> bool:
        """Whether the final path exists."""
        return os.path.lexists(self.path)

    @property
    def is_begun(self) -> bool:
        """Whether a run has begun it. Runs make no links, and nothing is written through a link."""
        is_ours = not (os.path.islink(self._folder) or os.path.islink(self.target))
        return is_ours and os.path.exists(self.beside(_LAYOUT)) and os.path.exists(self.target)

    def clear(self, takes_over: str | None, kept: Collection[str]) -> None:
        """Remove the unfinished output, and the progress files that are not kept.

        An output that a living run writes, and ``takes_over`` takes over, stays; the new one gets another name.
        """
        if takes_over is None:
            remove(self.target)
        self.suffix = SUFFIX if takes_over is None else f".{takes_over}{SUFFIX}"
        remove(*(self.beside(name) for name in os.listdir(self._folder) if name not in kept))

    def begin(self) -> None:
        """Make the folders of the output and of the progress."""
        if os.path.islink(self._folder):
            os.unlink(self._folder)
        os.makedirs(self._folder, exist_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock this folder, so that no other run takes or finishes an output in it, if the file system has locks."""
        folder, deadline = os.path.dirname(self.path), time.monotonic() + _PATIENCE
        make_folder(folder)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):
                while time.monotonic() < deadline:
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        time.sleep(0.01)
            yield
        finally:
            os.close(descriptor)

    def get(self, name: str) -> str | None:
        """Return a small progress file; None if it is missing."""
        try:
            with open(self.beside(name), encoding="utf-8") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def drop(self, *names: str) -> None:
        """Remove progress files."""
        remove(*map(self.beside, names))

    def put(self, name: str, text: str, *, new: bool = False) -> None:
        """Write a small progress file atomically; with ``new``, raise FileExistsError if it exists."""
        if new:
            os.close(os.open(self.beside(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        write_whole(self.beside(name), text.encode(), durable=True)

    def beside(self, name: str) -> str:
        """Return the path of another progress file."""
        return os.path.join(self._folder, name)

    def names(self) -> list[str]:
        """Return the sorted names of the progress files."""
        return sorted(os.listdir(self._folder)) if os.path.isdir(self._folder) else []

    def finish(self) -> None:
        """Rename the finished output to its path; an earlier output there is removed."""
        rename_over(self.target, self.path)
        if self.suffix != SUFFIX:
            remove(self.path + SUFFIX)  # of the previous owner, which has ended since
        self.forget_progress()

    def forget_progress(self) -> None:
        """Remove the progress folder."""
        remove(self._folder)

    def sync(self) -> None:
        """Wait until all written data is on disk."""
        descriptor = os.open(os.path.dirname(self.path), os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):  # only this file system
                os.sync()
        except AttributeError:  # not on Linux
            os.sync()
        finally:
            os.close(descriptor)


class RemotePlace:
    """An output in an object store. Attributes are those of :class:`LocalPlace`."""

    def __init__(self, url: Url) -> None:
        self.path, self.suffix = url, ""
        fsspec = optional_module("fsspec", f"{url}: URLs need fsspec", "cloud")
        self._fs, self._name = fsspec.core.url_to_fs(url.target.rstrip("/"), **dict(url.options))
        self._folder = self._name + ".progress"

    @property
    def target(self) -> Url:
        """The URL written to."""
        return Url(self.path.target.rstrip("/") + self.suffix, self.path.options)

    @property
    def written(self) -> tuple[str, ...]:
        """All URLs that are written or replaced."""
        return (self.path,)

    @property
    def is_finished(self) -> bool:
        """Whether the final name exists and no run is writing it."""
        return bool(self._exists(self._name)) and not (self.is_begun and not self.suffix)

    @property
    def is_begun(self) -> bool:
        """Whether a run has begun it."""
        return self._exists(f"{self._folder}/{_LAYOUT}")

    def _exists(self, name: str) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.exists(name))

    def clear(self, takes_over: str | None, kept: Collection[str]) -> None:
        """See :class:`LocalPlace`."""
        if takes_over is not None:
            self.suffix = f".{takes_over}{SUFFIX}"
        elif not self.is_begun and self._exists(self._name):
            self.suffix = SUFFIX
        progress = [each for each in self._fs.find(self._folder) if os.path.basename(each) not in kept]
        self._remove(*([] if takes_over else [self._name + self.suffix]), *progress)

    def _parts(self, name: str) -> list[list[str]]:
        """Return the objects below a name, with the documents that make it a store last."""
        every = self._fs.find(name)
        parts = [[each for each in every if (each[len(name) + 1 :] in _ROOTS) is last] for last in (False, True)]
        return [part for part in parts if part]

    def _remove(self, *names: str) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(name, recursive=True)
        self._fs.invalidate_cache()

    def begin(self) -> None:
        """Do nothing: object stores have no folders."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Do nothing: object stores have no locks. If two runs begin at once, the first one detects it."""
        yield

    def put(self, name: str, text: str, *, new: bool = False) -> None:
        """See :class:`LocalPlace`."""
        how = {"mode": "create"} if new else {}
        self._fs.pipe_file(f"{self._folder}/{name}", text.encode(), **how)

    def get(self, name: str) -> str | None:
        """Return a small progress file; None if it is missing."""
        try:
            found: bytes = self._fs.cat_file(f"{self._folder}/{name}")
        except FileNotFoundError:
            return None
        return found.decode()

    def drop(self, *names: str) -> None:
        """Remove progress files."""
        self._remove(*(f"{self._folder}/{name}" for name in names))

    def names(self) -> list[str]:
        """Return the sorted names of the progress files."""
        self._fs.invalidate_cache()
        return sorted(map(os.path.basename, self._fs.find(self._folder)))

    def finish(self) -> None:
        """Give the finished output its final name. If a run is killed meanwhile, ``resume=True`` repeats this."""
        if self.suffix:
            written = self._name + self.suffix
            for names in reversed(self._parts(self._name)):  # first the documents that make it a store
                self._remove(*names)
            for names in self._parts(written):
                self._fs.copy(names, [self._name + each.removeprefix(written) for each in names])
        self.forget_progress()
        if self.suffix:
            self._remove(written)

    def forget_progress(self) -> None:
        """Remove the progress folder."""
        self._remove(self._folder)

    def sync(self) -> None:
        """Do nothing: an object store has stored every write that it acknowledged."""


Place = LocalPlace | RemotePlace


def place_of(path: str | Url) -> Place:
    """Return the place of an output with this name."""
    local = local_path(path)
    return LocalPlace(local) if local is not None else RemotePlace(path)  # type: ignore[arg-type]  # url_of's


def say_written(place: Place, name: str, steps: Iterable[int]) -> None:
    """Record which steps a rank has written its part of, in a file ``steps-RUN-DOMAIN-RANK-of-RANKS.json``."""
    ranges: list[list[int]] = []
    for step in sorted(steps):
        if ranges and ranges[-1][1] == step:
            ranges[-1][1] = step + 1
        else:
            ranges.append([step, step + 1])
    place.put(name, json.dumps({"steps": ranges}))


@dataclass(frozen=True, kw_only=True)
class Begun:
    """The record of a begun output.

    - ``layout``: digest of its layout; None if a run was killed before it was made.
    - ``runs``: those whose steps count, the latest last.
    """

    layout: str | None
    runs: tuple[str, ...]


def say_begun(place: Place, begun: Begun) -> None:
    """Record the output, so that another run can resume it."""
    said = {"layout": begun.layout, "suffix": place.suffix, "runs": begun.runs}
    place.put(_LAYOUT, json.dumps(said, indent=1))


def begun_at(place: Place) -> Begun | None:
    """Return the record of a begun output, and set the place's suffix from it; None if there is no record."""
    text = place.get(_LAYOUT)
    if text is None:
        return None
    try:
        said = json.loads(text)
        begun = Begun(layout=said["layout"], runs=tuple(map(str, said["runs"])))
        if not _SUFFIXES.fullmatch(said["suffix"]) or not isinstance(begun.layout, str | None):
            raise ValueError("no suffix, or layout, of ours")
        place.suffix = said["suffix"]
    except (ValueError, TypeError, LookupError):
        raise OutputError(
            f"{place.path}: its progress does not describe an output; begin again with overwrite=True"
        ) from None
    return begun


def written_steps(place: Place) -> set[int]:
    """Return the steps that all ranks of one domain of a run have written."""
    said: dict[str, list[set[int]]] = {}
    sizes: dict[str, int] = {}
    begun = begun_at(place)
    starts = tuple(f"steps-{run}-" for run in (() if begun is None else begun.runs))
    for name in place.names():
        if not name.startswith(starts) or not name.endswith(".json") or (text := place.get(name)) is None:
            continue
        try:
            group, _, _, rank_of = name.removesuffix(".json").rsplit("-", 3)
            sizes[group] = int(rank_of)
            ranges = json.loads(text)["steps"]
            said.setdefault(group, []).append({s for start, stop in ranges for s in range(int(start), int(stop))})
        except (ValueError, KeyError, TypeError) as e:
            raise CorruptDataError(f"{place.path}: {name} of its progress is damaged ({e}); remove that file") from None
    whole = (set.intersection(*found) for group, found in said.items() if len(found) == sizes[group])
    return set[int]().union(*whole)
