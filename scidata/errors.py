"""Every error scidata raises on purpose.

Each is also a subclass of the built-in error that a caller would expect, so ``except ValueError`` keeps working.
Messages name the store, the field, the chunk or row, the sample and the rank if they are known; then what was
expected, what was found, and one thing to do.

Examples
--------
>>> from scidata.testing import make_grid
>>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
>>> try:
...     scidata.open_dataset("era5.zarr", fields=["U"])
... except KeyError as e:  # an UnknownNameError, a SciDataError
...     print(e)
era5.zarr: no field 'U'; did you mean 'u'?
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


def visible(text: str, *, keep: str = "") -> str:
    """Return a text with control characters, bidirectional marks and the like as escapes; those in ``keep`` stay.

    Names come from data, and could otherwise move a terminal's cursor, rename its window or feign another text.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


class SciDataError(Exception):
    """Base of every error scidata raises on purpose. Its text has no control characters but line ends and tabs."""

    def __str__(self) -> str:
        return visible(super().__str__(), keep="\n\t")


class ConfigError(SciDataError, ValueError):
    """An argument that cannot be honoured: bounds, halo, alignment, sizes."""


class OutputError(ConfigError):
    """An output that is there already, is being written by another run, or is not whole yet."""


class UnknownNameError(SciDataError, KeyError):
    """A field, dimension, axis or codec that is not there. The message names the near matches."""

    def __str__(self) -> str:  # KeyError shows repr() of its argument, which doubles the quotes
        return visible(str(self.args[0]), keep="\n\t") if self.args else ""


class UnsupportedFormatError(SciDataError, ValueError):
    """A file that is of no known format, or uses a codec or layout that scidata does not read."""


class FieldMismatchError(SciDataError, ValueError):
    """Fields, or files of one series, that disagree in shape, dims, dtype or coordinates."""


class CorruptDataError(SciDataError, OSError):
    """Bytes on disk that are not what the metadata promises."""


class ShortReadError(CorruptDataError):
    """A file ends before the range that its metadata promises."""


class ChecksumError(CorruptDataError):
    """A chunk whose checksum does not match its bytes."""


class SourceChangedError(SciDataError, OSError):
    """A file or object was replaced while it was read."""


class TooLargeError(SciDataError, MemoryError):
    """More bytes than can be allocated: a part that is too large for this machine, or metadata that claim too much."""


class MissingChunkError(CorruptDataError, FileNotFoundError):
    """A chunk that should exist does not. ``allow_missing=True`` reads the fill value instead."""


class RefusedError(SciDataError, PermissionError):
    """Something legal in the format but dangerous in untrusted data: external links, pickled objects, ``..``."""


class LauncherError(SciDataError, RuntimeError):
    """The launcher's variables are incomplete or contradict the mesh that was asked for."""


class RankFailedError(SciDataError, RuntimeError):
    """Another rank failed, or died, so that this one cannot go on. The message has that rank's own error.

    Attributes
    ----------
    rank
        The rank that failed.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class ReadTimeoutError(SciDataError, TimeoutError, RuntimeError):
    """A batch was not read within the loader's ``timeout``."""


class WorkerDiedError(SciDataError, RuntimeError):
    """A worker process of a loader has ended before its time."""


class ClusterError(SciDataError, RuntimeError):
    """A cluster that cannot do the work: no scheduler answers, a worker sees other folders or has another version of
    scidata, workers died of one piece of it, or the connection was lost."""


class MissingDependencyError(SciDataError, ImportError):
    """An optional package is not installed; the message has the command that installs it."""


class ShardLayoutError(SciDataError, ValueError):
    """Local part, sizes and placements of a ShardTensor do not fit together."""


class UnsupportedShardOp(SciDataError, NotImplementedError):  # noqa: N818 - the name is part of the contract
    """An operation that ShardTensor does not support on these placements. It never guesses instead."""


def near_matches(name: str, known: Iterable[str], *, listed: bool = True) -> str:
    """Return ``"; did you mean 'u', 'v'?"`` for the end of an error message.

    Where none is near: the names there are, or nothing if they are not to be ``listed``.
    """
    names = sorted(map(str, known))
    lowered = {n.lower(): n for n in names}
    close = [lowered[m] for m in difflib.get_close_matches(str(name).lower(), lowered, n=3, cutoff=0.5)]
    if close:
        return "; did you mean " + ", ".join(repr(n) for n in close) + "?"
    if not listed:
        return ""
    if not names:
        return "; there are none"
    shown = ", ".join(repr(n) for n in names[:12])
    return f"; there are {shown}" + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def check_known(said: str, names: Iterable[object], known: Collection[object], about: str = "") -> None:
    """Raise UnknownNameError for the first name that is not known: ``said``, the name, ``about``, and near ones."""
    for name in names:
        if name not in known:
            raise UnknownNameError(f"{said} {name!r}{about}{near_matches(str(name), map(str, known))}")
