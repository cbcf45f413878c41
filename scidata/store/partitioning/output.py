"""The output folder of a run: files that may be in it, and locks, so that two runs on one folder do not mix.

A whole run, or the one that finishes the parts of an array, holds ``.lock`` alone; the parts of a SLURM array share it
and hold one lock each. The kernel lets go of a lock when its process ends, however that ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scidata.core.own_files import is_still, make_folder, open_own
from scidata.errors import ConfigError, OutputError
from scidata.store.format.durable import remove
from scidata.store.format.places import FOLDER, MANIFEST, TABLE

_LOCK = ".lock"
_SAMPLE = re.compile(r"sample-(\d{6,})\.zarr")
_TEMPORARY = re.compile(
    r"\.tmp-(sample-(\d{6,})\.zarr(\.scratch|\.try-[0-9a-f]+)?|(manifest\.json|samples\.bin)(\.[0-9a-f]+)?)"
)
_PART_LOCK = re.compile(r"\.lock-part-(\d+)-of-(\d+)")


@dataclass(frozen=True)
class Part:
    """One of ``num_parts`` runs, counted from 0, that share the samples: this one has every ``num_parts``-th."""

    index: int
    num_parts: int

    def __post_init__(self) -> None:
        if self.num_parts < 1 or not 0 <= self.index < self.num_parts:
            raise ConfigError(
                f"part {self.index}/{self.num_parts}: parts are counted from 0, so {self.num_parts} parts are 0/"
                f"{self.num_parts} to {self.num_parts - 1}/{self.num_parts}"
            )

    @classmethod
    def parse(cls, text: str) -> Part:
        """Read ``"3/8"``."""
        match = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", text)
        if match is None:
            raise ConfigError(f"part {text!r}: expected i/n with i counted from 0, as in 0/8")
        return cls(int(match[1]), int(match[2]))

    @property
    def lock(self) -> str:
        """Name of its lock file."""
        return f".lock-part-{self.index}-of-{self.num_parts}"


@contextlib.contextmanager
def claim_output(out: str, part: Part | None) -> Iterator[None]:
    """Make and hold the folder; ConfigError where it has other files, or another run is writing there."""
    import fcntl

    _check_contents(out)
    new = not os.path.isdir(out)
    make_folder(out)
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(_locked(os.path.join(out, _LOCK), shared=part is not None))
        if part is not None:
            stack.enter_context(_locked(os.path.join(out, part.lock)))
            _check_other_arrays(out, part)
        _check_contents(out)
        try:
            yield
        finally:
            if part is None:
                _remove_locks(out)
                if new:
                    with contextlib.suppress(OSError):  # it holds something: then it is of use
                        os.rmdir(out)
            elif os.path.exists(os.path.join(out, MANIFEST)):  # a finished store keeps no locks
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove_locks(out)


def _check_contents(out: str) -> None:
    if not os.path.lexists(out):
        return
    if not os.path.isdir(out):
        raise OutputError(f"{out}: exists and is no folder; choose another output")
    patterns, known = (_SAMPLE, _TEMPORARY, _PART_LOCK), (MANIFEST, TABLE, _LOCK)
    names = sorted(name for name in os.listdir(out) if name not in known)
    foreign = [name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)]
    if foreign:
        raise OutputError(
            f"{out}: holds {foreign[0]!r}, which is no part of a scidata store; choose a new folder for the output"
        )


@contextlib.contextmanager
def _locked(path: str, *, shared: bool = False) -> Iterator[int]:
    import fcntl

    while True:
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise OutputError(
                f"{os.path.dirname(path)}: another run is writing there ({os.path.basename(path)} is locked); wait "
                "until it ends, or choose another output"
            ) from None
        except OSError as e:
            os.close(descriptor)
            if e.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise OutputError(
                    f"{os.path.dirname(path)}: its file system has no locks (flock), so two runs could mix; write to "
                    "another one, or mount it with flock"
                ) from e
            raise
        if is_still(descriptor, path):
            break
        os.close(descriptor)  # the run before this one removed the file between the two calls
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _check_other_arrays(out: str, part: Part) -> None:
    """Refuse to run beside parts of an array of another size: the two would write the same samples."""
    for name in sorted(os.listdir(out)):
        match = _PART_LOCK.fullmatch(name)
        if match is not None and int(match[2]) != part.num_parts:
            with _locked(os.path.join(out, name)):
                pass


@contextlib.contextmanager
def marked_run(out: str) -> Iterator[str]:
    """Give the run that holds the folder alone a name, by which processes of other machines know that it still does.

    The name is the content of the lock file: opening a file asks a network file system for its content of now, while
    names of files may be remembered for a minute.
    """
    run = uuid.uuid4().hex
    _write_lock(out, run)
    try:
        yield run
    finally:
        _write_lock(out, "")


def _write_lock(out: str, text: str) -> None:
    descriptor = open_own(os.path.join(out, _LOCK), os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(descriptor, text.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_current(out: str, run: str) -> bool:
    """Whether the folder is seen here, and held by the run of that name."""
    try:
        with open(open_own(os.path.join(out, _LOCK), os.O_RDONLY), encoding="ascii", errors="replace") as file:
            return file.read() == run
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False


def finished_samples(out: str) -> list[int]:
    """Return the indices of the samples that are there under their final name."""
    names = os.listdir(out) if os.path.isdir(out) else []
    return sorted(int(match[1]) for match in map(_SAMPLE.fullmatch, names) if match)


def remove_samples(out: str, indices: Iterable[int]) -> None:
    """Remove the manifest, so that nothing opens as valid any more, then the samples."""
    remove(os.path.join(out, MANIFEST), os.path.join(out, TABLE))
    wanted = set(indices)
    for name in os.listdir(out):
        match = _SAMPLE.fullmatch(name)
        if match is not None and int(match[1]) in wanted:
            # under a temporary name first: half a sample must not pass for a whole one
            temporary = os.path.join(out, f".tmp-{name}")
            remove(temporary)
            os.rename(os.path.join(out, name), temporary)
            remove(temporary)


def remove_temporaries(out: str, indices: Iterable[int] | None, *, but: Iterable[int] = ()) -> None:
    """Remove the leavings of interrupted runs: of some samples, or of all, but for some which go on."""
    wanted, spared = None if indices is None else set(indices), {*map(FOLDER.format, but)}
    for name in os.listdir(out):
        match = _TEMPORARY.fullmatch(name)
        if match is None or match[1].removesuffix(".scratch") in spared:
            continue
        if wanted is None or (match[2] is not None and int(match[2]) in wanted):
            remove(os.path.join(out, name))


def _remove_locks(out: str) -> None:
    """Remove the lock files; only the run that holds the folder alone may."""
    for name in os.listdir(out):
        if name == _LOCK or _PART_LOCK.fullmatch(name):
            os.unlink(os.path.join(out, name))
