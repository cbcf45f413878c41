"""Opening an HDF5 file, walking it, and naming its objects: all about names and links."""

from __future__ import annotations

import atexit
import itertools
import math
import os
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import h5py
import numpy as np
import numpy.typing as npt

from scidata.core.types import ArrayLayout
from scidata.core.urls import is_url
from scidata.errors import CorruptDataError, SciDataError, ShortReadError, UnsupportedFormatError
from scidata.sources.access.files import files, retried, version_at
from scidata.sources.access.retry import is_transient
from scidata.sources.hdf5.heaps import GuardedFile
from scidata.sources.hdf5.sessions import open_sessions

_HDF5_ATTRIBUTES = frozenset({"DIMENSION_LIST", "REFERENCE_LIST", "DIMENSION_LABELS"})
_MAX_ATTRIBUTE_BYTES = 2**26
_MAX_DEPTH = 64  # of groups in groups; HDF5 takes minutes to find its way in a file of a thousand
#: The errors of h5py on damaged metadata, which are nearly any.
DAMAGE = (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError)
_PLAIN_CLASSES = (h5py.h5t.INTEGER, h5py.h5t.FLOAT, h5py.h5t.STRING, h5py.h5t.VLEN)  # of attributes
_SCALE_ATTRIBUTES = frozenset({"CLASS", "NAME"})


#: Files that HDF5 reads through Python. It closes them after Python has ended, and crashes, if a daemon thread still
#: holds one.
_streamed: WeakValueDictionary[int, h5py.File] = WeakValueDictionary()
_count = itertools.count()


@atexit.register
def _close_streamed() -> None:
    for h5 in [*_streamed.values()]:
        h5.close()


def open_h5(path: str, *, guarded: bool = False, stream: GuardedFile | None = None) -> h5py.File:
    """Open a file or URL for reading.

    - ``guarded``: for reading attributes: one whose heap would hold HDF5 for ever fails. URLs always are. What lies in
      other files cannot be read through it.
    - ``stream``: what HDF5 then reads it through; by default one of its own.

    Raises FileNotFoundError: nothing is there; CorruptDataError: HDF5 cannot open it; ShortReadError where it ends too
    early.
    """
    if stream is None and (guarded or is_url(path)):
        stream = GuardedFile(path)
    if stream is None:
        # a clear FileNotFoundError, where HDF5's own names a function
        open_sessions.close_older(path, version_at(path))
    try:
        if stream is not None:
            if not is_url(path) and heeds_locks() and files().is_locked(path):
                raise BlockingIOError("its lock is held")
            h5 = _streamed[next(_count)] = h5py.File(stream, "r")
            return h5
        # best-effort: file systems without locks can be read, a file that somebody is writing is refused
        return retried(path, lambda: h5py.File(path, "r", locking="best-effort"))
    except BlockingIOError as e:
        raise BlockingIOError(
            f"{path}: is being written by another process; wait for it to end, or set HDF5_USE_FILE_LOCKING=FALSE "
            f"if that is stale ({e})"
        ) from e
    except (FileNotFoundError, PermissionError):
        raise
    except (OSError, RuntimeError, ValueError) as e:
        if is_transient(e):
            raise
        kind = ShortReadError if "truncated" in str(e) else CorruptDataError
        raise kind(f"{path}: {files().size(path)} bytes that HDF5 cannot open: {e}; copy or write it again") from e


def heeds_locks() -> bool:
    """Return True if HDF5 would refuse a file that is locked, which its own variable decides."""
    return os.environ.get("HDF5_USE_FILE_LOCKING", "").upper() not in ("FALSE", "0")


@contextmanager
def damage_as_corrupt_data(label: str) -> Iterator[None]:
    """Raise CorruptDataError for the errors of h5py on damaged metadata."""
    try:
        yield
    except SciDataError:
        raise
    except DAMAGE as e:
        if is_transient(e):
            raise
        raise CorruptDataError(f"{label} cannot be read by HDF5: {e}; copy or write the file again") from e


def has_netcdf_marks(path: str) -> bool:
    """Return True if the netCDF library (or h5netcdf) wrote the file."""
    return _has_marks(path) if is_url(path) else retried(path, lambda: _has_marks(path))


def _has_marks(path: str) -> bool:
    marks = ("_Netcdf4Dimid", "_Netcdf4Coordinates")
    with open_h5(path, guarded=True) as h5, damage_as_corrupt_data(f"{path}: metadata"):
        if "_NCProperties" in h5.attrs or "_nc3_strict" in h5.attrs:
            return True
        nodes = (node for _, node, _ in walk(h5, allow_external=False, skipped={}))
        return any(mark in node.attrs for node in nodes if isinstance(node, h5py.Dataset) for mark in marks)


class Attributes:
    """The attributes of one object, each of which is read once at most, when it is asked for."""

    def __init__(self, obj: h5py.HLObject) -> None:
        self.obj, self.names = obj, dict.fromkeys(obj.attrs)
        self._values: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def read(self, name: str, where: str = "") -> Any:
        """Return one that is there: see :func:`attribute_of`."""
        if name not in self._values:
            self._values[name] = attribute_of(self.obj, name, where)
        return self._values[name]


def clean_attributes(attributes: Attributes, hidden: frozenset[str], where: str) -> dict[str, Any]:
    """Return attributes that are text or numbers: as str, and arrays of one element as scalars of their dtype."""
    scale = is_scale(attributes)
    values = {}
    for name in attributes.names:
        if name in hidden or (scale and name in _SCALE_ATTRIBUTES) or not is_text(name):
            continue
        try:
            value = plain_value(attributes.read(name, where))
        except TypeError:  # a type without NumPy equivalent: cannot be a number that CF needs
            continue
        except (OSError, RuntimeError, LookupError, ValueError, ArithmeticError, MemoryError) as e:
            if isinstance(e, SciDataError):
                raise
            raise CorruptDataError(f"{where}: attribute {name!r} cannot be read: {e}") from e
        if value is not None:
            values[name] = value
    return values


def is_text(name: object) -> bool:
    """Say whether a name is one: those that are not UTF-8 h5py gives as bytes, or with halves of characters in them."""
    try:
        return isinstance(name, str) and b"\0" not in name.encode()
    except UnicodeEncodeError:
        return False


def attribute_of(obj: h5py.HLObject, name: str, where: str = "") -> Any:
    """Read one attribute, after looking at its size."""
    found = h5py.h5a.open(obj.id, name.encode())
    shape, stored = found.shape, found.get_type()
    nbytes = math.prod(map(int, shape or ())) * stored.get_size()
    if nbytes > _MAX_ATTRIBUTE_BYTES:
        raise CorruptDataError(
            f"{where or obj.file.filename}: attribute {name!r} claims {nbytes} bytes, but at most "
            f"{_MAX_ATTRIBUTE_BYTES} are read; the file is damaged, or write it as an array"
        )
    if shape is None or stored.get_class() not in _PLAIN_CLASSES:
        return obj.attrs[name]
    return _value_of(found, shape, stored.dtype)


def _value_of(found: h5py.h5a.AttrID, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return numbers, text or references as h5py's ``attrs[name]`` does, which opens the attribute once more."""
    array = np.zeros(shape, dtype)
    found.read(array, mtype=h5py.h5t.py_create(dtype))
    if dtype.kind == "O" and h5py.check_string_dtype(dtype) is not None:
        texts = [text.decode("utf-8", "surrogateescape") for text in array.flat]
        array = np.array(texts, dtype).reshape(array.shape)
    return array[()] if array.ndim == 0 else array


def plain_value(value: object) -> Any:
    """Return an attribute as a Python or NumPy value; None if it is neither number nor text."""
    if isinstance(value, bytes | np.bytes_):
        return value.decode("utf-8", "replace")
    if isinstance(value, str):  # of variable length: h5py keeps bytes that are not UTF-8 as halves of characters
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return value
    if isinstance(value, h5py.Empty):
        return "" if value.dtype.kind in "OSU" else None
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "OSU":
            texts = [plain_value(v) for v in value.ravel().tolist()]
            if not all(isinstance(t, str) for t in texts):
                return None
            return texts[0] if len(texts) == 1 else texts
        if value.dtype.kind in "biufc":
            return value.reshape(-1)[0] if value.size == 1 else value
    return None


_NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable"  # as netCDF-C writes it, also into plain HDF5


class Naming:
    """What things are called in plain HDF5: paths; dimension scales, then labels, then ``dim_i``."""

    hidden_attributes = _HDF5_ATTRIBUTES

    def __init__(self, h5: h5py.File) -> None:
        self.h5 = h5

    def array_name(self, path: str) -> str:
        """Return the public name of the dataset at ``path`` (no leading slash)."""
        return path

    def is_hidden(self, attributes: Attributes) -> bool:
        """Return True if the dataset that has these attributes only names a dimension, and has no values."""
        if not is_scale(attributes) or "NAME" not in attributes:
            return False
        return str(plain_value(attributes.read("NAME"))).startswith(_NO_VARIABLE)

    def dims(self, attributes: Attributes, path: str) -> tuple[str, ...]:
        """Return one name per dimension of the dataset that has these attributes."""
        if attributes.obj.shape is None:
            return ()
        scales = scale_paths(attributes, path)
        labels = _labels(attributes)
        return tuple(
            posixpath.basename(scale) if scale else label or f"dim_{i}"
            for i, (scale, label) in enumerate(zip(scales, labels, strict=True))
        )

    def finish(self, arrays: dict[str, ArrayLayout]) -> dict[str, ArrayLayout]:
        """Complete the arrays, once every dataset was seen."""
        return arrays


def is_scale(attributes: Attributes) -> bool:
    """Say whether these are a dimension scale's attributes; HDF5's own H5DS functions free twice on damaged files."""
    return "CLASS" in attributes and plain_value(attributes.read("CLASS")) == "DIMENSION_SCALE"


def scale_paths(attributes: Attributes, path: str) -> tuple[str | None, ...]:
    """Return the path of each dimension's scale, the dataset's own where it is a one-dimensional scale."""
    dset = attributes.obj
    ndim = len(dset.shape)
    if ndim == 1 and is_scale(attributes):
        return (path,)
    attached = attributes.read("DIMENSION_LIST") if "DIMENSION_LIST" in attributes else ()
    if len(attached) != ndim:
        return (None,) * ndim
    return tuple(_target(dset, references) for references in attached)


def _target(dset: h5py.Dataset, references: npt.NDArray[np.object_]) -> str | None:
    try:
        name = h5py.h5r.get_name(references[0], dset.id) if len(references) else None
    except (ValueError, KeyError, RuntimeError):
        return None
    return name.decode().lstrip("/") if name else None


def _labels(attributes: Attributes) -> tuple[str, ...]:
    values = plain_value(attributes.read("DIMENSION_LABELS")) if "DIMENSION_LABELS" in attributes else None
    labels = [values] if isinstance(values, str) else values or ()
    ndim = len(attributes.obj.shape)
    return tuple(labels) if len(labels) == ndim else ("",) * ndim


def walk(h5: h5py.File, *, allow_external: bool, skipped: dict[str, str]) -> Iterator[tuple[str, h5py.HLObject, bool]]:
    """Yield ``(path, object, lies in another file)`` in the file's order, each group once however it is linked."""
    seen = {_identity(h5)}
    stack = [("", h5, False)]
    while stack:
        path, node, foreign = stack.pop()
        if path:
            yield path, node, foreign
        if not isinstance(node, h5py.Group):
            continue
        children = []
        for name in node:
            if not is_text(name):
                skipped[ascii(posixpath.join(path, os.fsdecode(name)))] = "its name is not UTF-8"
                continue
            child_path = f"{path}/{name}" if path else name
            is_hard = node.id.links.get_info(name.encode()).type == h5py.h5l.TYPE_HARD
            link = h5py.HardLink() if is_hard else node.get(name, getlink=True)
            outside = isinstance(link, h5py.ExternalLink)
            if isinstance(link, h5py.SoftLink):
                skipped[child_path] = f"a soft link; use its target {link.path!r}"
                continue
            if outside and not allow_external:
                skipped[child_path] = (
                    f"an external link to {link.filename!r}; allow_external=True follows it, if you trust it"
                )
                continue
            try:
                child = _opened(node, name) if is_hard else node[name]
            except (KeyError, OSError) as e:
                if not outside:
                    raise CorruptDataError(f"{node.file.filename}: object {child_path!r} cannot be opened: {e}") from e
                skipped[child_path] = f"an external link that leads nowhere: {link.filename!r}"
                continue
            if isinstance(child, h5py.Group):
                if _identity(child) in seen:
                    continue  # a hard link back to a group that was walked: cycles end here
                seen.add(_identity(child))
                if child_path.count("/") >= _MAX_DEPTH:
                    raise UnsupportedFormatError(
                        f"{node.file.filename}: has groups inside each other more than {_MAX_DEPTH} deep; it is "
                        "damaged, or made to do harm"
                    )
            children.append((child_path, child, foreign or outside))
        stack.extend(reversed(children))


def _opened(group: h5py.Group, name: str) -> h5py.HLObject:
    """Open an object of a group, without what h5py asks for each time."""
    found = h5py.h5o.open(group.id, name.encode())
    if isinstance(found, h5py.h5d.DatasetID):
        return h5py.Dataset(found, readonly=True)  # which lets h5py keep its shape
    return h5py.Group(found) if isinstance(found, h5py.h5g.GroupID) else group[name]


def _identity(obj: h5py.HLObject) -> tuple[int, int]:
    info = h5py.h5o.get_info(obj.id)
    return int(info.fileno), int(info.addr)
