"""Where output comes to lie: unfinished beside its name until it is whole, and what has been written of it so far.

A local output is written as ``NAME.unfinished`` and renamed at its end; object stores cannot rename, so there the name
is its own, and an attribute says that it is unfinished. Beside it lies the folder ``NAME.progress``: what the output is
(``layout.json``), and for each rank of each run the steps of which it has written its part. A step is written when all
ranks of the domain say so; a run that goes on needs no more than that, on any number of ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Iterable, Sequence

from scidata.core.checks import optional_module
from scidata.core.urls import Url, local_path
from scidata.errors import CorruptDataError, OutputError
from scidata.store.format.durable import remove, write_text

_LAYOUT = "layout.json"


class LocalPlace:
    """An output on a file system of this machine, or one that it shares.

    Attributes
    ----------
    path
        Where it lies when it is finished.
    target
        Where it is written.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(os.path.expanduser(path)).rstrip("/")
        self.target = self.path + ".unfinished"
        self._folder = self.path + ".progress"

    @property
    def written(self) -> tuple[str, ...]:
        """All that is written, or replaced."""
        return self.path, self.target, self._folder

    @property
    def is_finished(self) -> bool:
        """Whether something lies there."""
        return os.path.lexists(self.path)

    @property
    def is_begun(self) -> bool:
        """Whether a run has begun it."""
        return os.path.exists(os.path.join(self._folder, _LAYOUT)) and os.path.exists(self.target)

    def clear(self) -> None:
        """Remove what is unfinished."""
        remove(self.target, self._folder)

    def begin(self) -> None:
        """Make the folder that the output lies in, and that of the progress."""
        os.makedirs(self._folder, exist_ok=True)

    def put(self, name: str, text: str) -> None:
        """Write a small file of the progress, whole."""
        write_text(os.path.join(self._folder, name), text)

    def beside(self, name: str) -> str:
        """Return the path of another file of the progress."""
        return os.path.join(self._folder, name)

    def all_beside(self, start: str, end: str) -> list[str]:
        """Return the paths of those whose names start and end so, in order."""
        names = sorted(os.listdir(self._folder))
        return [self.beside(name) for name in names if name.startswith(start) and name.endswith(end)]

    def documents(self) -> dict[str, str]:
        """Return the files of the progress."""
        found = {}
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(self._folder)):
                if name.endswith(".json") and not name.startswith("."):
                    with open(os.path.join(self._folder, name), encoding="utf-8") as file:
                        found[name] = file.read()
        return found

    def finish(self) -> None:
        """Let the finished output take its name; what lay there goes."""
        old = self.path + ".replaced"
        remove(old)
        if os.path.lexists(self.path):
            os.rename(self.path, old)
        os.rename(self.target, self.path)
        remove(old)
        self.forget_progress()

    def forget_progress(self) -> None:
        """Remove the folder of the progress."""
        remove(self._folder)

    def sync(self) -> None:
        """Wait until what was written is on disk."""
        descriptor = os.open(os.path.dirname(self.path), os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):  # of this file system alone
                os.sync()
        except AttributeError:  # not on Linux
            os.sync()
        finally:
            os.close(descriptor)


class RemotePlace:
    """An output in an object store. Attributes as those of :class:`LocalPlace`."""

    def __init__(self, url: Url) -> None:
        self.path = self.target = url
        fsspec = optional_module("fsspec", f"{url}: URLs need fsspec", "cloud")
        self._fs, self._name = fsspec.core.url_to_fs(url.target.rstrip("/"), **dict(url.options))
        self._folder = self._name + ".progress"

    @property
    def written(self) -> tuple[str, ...]:
        """All that is written, or replaced."""
        return (self.path,)

    @property
    def is_finished(self) -> bool:
        """Whether something lies there that no run is writing."""
        self._fs.invalidate_cache()
        return bool(self._fs.exists(self._name)) and not self._fs.exists(f"{self._folder}/{_LAYOUT}")

    @property
    def is_begun(self) -> bool:
        """Whether a run has begun it."""
        self._fs.invalidate_cache()
        return bool(self._fs.exists(f"{self._folder}/{_LAYOUT}"))

    def clear(self) -> None:
        """Remove what is there."""
        for name in (self._name, self._folder):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(name, recursive=True)

    def begin(self) -> None:
        """Do nothing: object stores have no folders."""

    def put(self, name: str, text: str) -> None:
        """Write a small file of the progress, whole."""
        self._fs.pipe_file(f"{self._folder}/{name}", text.encode())

    def documents(self) -> dict[str, str]:
        """Return the files of the progress."""
        self._fs.invalidate_cache()
        try:
            names = self._fs.ls(self._folder, detail=False)
        except FileNotFoundError:
            return {}
        return {os.path.basename(each): self._fs.cat_file(each).decode() for each in names if each.endswith(".json")}

    def finish(self) -> None:
        """Forget the progress: the output has its name."""
        self.forget_progress()

    def forget_progress(self) -> None:
        """Remove the folder of the progress."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._folder, recursive=True)

    def sync(self) -> None:
        """Do nothing: what an object store has taken, it has."""


Place = LocalPlace | RemotePlace


def place_of(path: str | Url) -> Place:
    """Return where an output of this name comes to lie."""
    local = local_path(path)
    return LocalPlace(local) if local is not None else RemotePlace(path)  # type: ignore[arg-type]  # url_of's


class Journal:
    """The steps of which this rank has written its part, for all to see.

    Parameters
    ----------
    place
        Of the output.
    run
        Name of this run, domain and rank: ``RUN-DOMAIN-RANK``.
    num_ranks
        How many there are in the domain.
    """

    def __init__(self, place: Place, run: str, num_ranks: int) -> None:
        self._place, self._steps = place, set[int]()
        self._name = f"steps-{run}-of-{num_ranks}.json"

    def add(self, steps: Iterable[int]) -> None:
        """Say that this rank's part of some steps is written."""
        self._steps.update(steps)
        self._place.put(self._name, json.dumps({"steps": _ranges(self._steps)}))


def say_begun(place: Place, layout: str, *, is_made: bool) -> None:
    """Say what the output is, so that another run can go on with it."""
    place.put(_LAYOUT, json.dumps({"layout": layout, "made": is_made}, indent=1))


def begun_layout(place: Place) -> str | None:
    """Return what a run has said of the output that it began; None where it was killed before that was made.

    Raises
    ------
    OutputError
        What it said is no longer there.
    """
    try:
        document = json.loads(place.documents().get(_LAYOUT, ""))
    except ValueError:
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("layout"), str):
        raise OutputError(f"{place.path}: its progress says nothing of what was begun; begin again with overwrite=True")
    return document["layout"] if document.get("made") is True else None


def written_steps(place: Place) -> set[int]:
    """Return the steps that all ranks of a domain of some run have written. Raises as :func:`whole_steps`."""
    return set[int]().union(*whole_steps(place).values())


def whole_steps(place: Place) -> dict[str, set[int]]:
    """Return the steps that all ranks of a domain have written, by run and domain: ``RUN-DOMAIN``.

    Raises
    ------
    CorruptDataError
        What they have said is not what ranks say.
    """
    said: dict[str, list[set[int]]] = {}
    sizes: dict[str, int] = {}
    for name, text in place.documents().items():
        if not name.startswith("steps-"):
            continue
        try:
            group, rank_of = name.removesuffix(".json").rsplit("-", 3)[0], name.removesuffix(".json").rsplit("-", 1)[1]
            sizes[group] = int(rank_of)
            ranges = json.loads(text)["steps"]
            said.setdefault(group, []).append({s for start, stop in ranges for s in range(int(start), int(stop))})
        except (ValueError, KeyError, TypeError) as e:
            raise CorruptDataError(f"{place.path}: {name} of its progress is damaged ({e}); remove that file") from None
    return {
        group.removeprefix("steps-"): set.intersection(*found)
        for group, found in said.items()
        if len(found) == sizes[group]
    }


def _ranges(steps: Iterable[int]) -> list[Sequence[int]]:
    found: list[list[int]] = []
    for step in sorted(steps):
        if found and found[-1][1] == step:
            found[-1][1] = step + 1
        else:
            found.append([step, step + 1])
    return list(found)
