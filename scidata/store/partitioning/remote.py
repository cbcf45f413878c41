"""Samples of a run that processes of other machines write; this machine cannot see when these end.

Such a process may do a sample that another is doing too, or still be at it when the run is over and the next one has
begun. So each try writes into a folder of its own, and moves the sample to its place only while the run still holds the
output. All tries of a run write the same bytes: the first to come is taken.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from scidata.core.own_files import sync
from scidata.core.tasks.work import Tick
from scidata.errors import OutputError
from scidata.sources.paths import check_seen
from scidata.store.format.durable import remove
from scidata.store.format.places import folder_of
from scidata.store.partitioning.output import is_current
from scidata.store.partitioning.sample import Task, process_sample

_LOOK_S = 1.0  # between looks at whether the run still holds the output
_SEEN_S = 90.0  # NFS remembers the content of a folder for up to 60 s


def check_folders(out: str, run: str, inputs: Iterable[str]) -> None:
    """Raise OutputError if this machine does not see a run's output, FileNotFoundError where it lacks inputs."""
    if not is_current(out, run):
        raise OutputError(
            f"it does not see {out} as the client does; the output must be on a file system that workers and client "
            "share, under the same path"
        )
    check_seen(inputs, "inputs")


@dataclass(frozen=True, kw_only=True)
class RemoteSamples:
    """The samples of a run, as other machines do them. Pickles.

    - ``out``: absolute.
    - ``run``: its name, by :func:`scidata.store.partitioning.output.marked_run`.
    """

    task: Task
    out: str
    run: str

    def __call__(self, index: int, tick: Tick) -> None:
        """Write one sample, unless an earlier try of this run has."""
        folder = folder_of(index)
        final = os.path.join(self.out, folder)
        if os.path.isdir(final):
            tick(1.0)
            return
        watched = _Watched(tick, self)
        watched.raise_if_over()
        own = os.path.join(self.out, f".tmp-{folder}.try-{uuid.uuid4().hex[:16]}")
        try:
            os.mkdir(own)
            process_sample(self.task, own, index, watched, store=self.out)
            watched.raise_if_over()
            try:
                os.rename(os.path.join(own, folder), final)
            except OSError as e:
                if e.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # the first wins
                    raise
            sync(self.out)
        except OSError as e:
            if e.filename == own:  # a name that no user knows
                e.filename = self.out
            raise
        finally:
            with contextlib.suppress(OSError):  # the client, or the next run, has removed it, or will
                remove(own)


class _Watched:
    """Takes shares of a sample that are done, and ends it where the run is over."""

    def __init__(self, tick: Tick, samples: RemoteSamples) -> None:
        self._tick, self._samples = tick, samples
        self._looked = time.monotonic()

    def __call__(self, share: float) -> None:
        self._tick(share)
        if time.monotonic() - self._looked >= _LOOK_S:
            self.raise_if_over()

    def raise_if_over(self) -> None:
        if not is_current(self._samples.out, self._samples.run):
            raise OutputError(f"{self._samples.out}: the run that this sample is of is over")
        self._looked = time.monotonic()


def wait_until_seen(out: str, indices: Iterable[int]) -> None:
    """Wait until samples that other machines have written are seen here."""
    deadline = time.monotonic() + _SEEN_S
    missing = [index for index in indices if not os.path.isdir(os.path.join(out, folder_of(index)))]
    while missing:
        if time.monotonic() > deadline:
            raise OutputError(
                f"{out}: {len(missing)} samples that workers have written are not seen here, {missing[0]} for one; "
                "look whether all of them write to this folder, and run again with --resume"
            )
        time.sleep(0.5)
        os.listdir(out)
        missing = [index for index in missing if not os.path.isdir(os.path.join(out, folder_of(index)))]
