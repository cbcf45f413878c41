"""Dangers of a mesh file that meshio reads: it may name other files, and claim memory that its size does not show.

meshio follows an XDMF's ``DataItem``, HDF5's external links and storage, Abaqus' ``*INCLUDE`` and files named like the
mesh, wherever they lie. Those in the folder of the mesh are its usual layout; others are refused unless allowed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from xml.etree import ElementTree
from xml.parsers import expat

import h5py

from scidata.errors import CorruptDataError, RefusedError, UnsupportedFormatError
from scidata.sources.access.files import files
from scidata.sources.hdf5.walk import damage_as_corrupt_data, open_h5, walk

_MAX_XML_BYTES = 2**30  # meshio holds all of it as objects, several times as large
_MAX_RATIO = 2**14  # of the decoded bytes of a data set to those stored: gzip has 2**10 at most
_SMALL_BYTES = 2**28  # less than that is decoded whatever the ratio
_PIECE = 2**16
_XML = (".xdmf", ".xmf", ".vtu", ".vtp", ".xml")
_HDF5 = (".med", ".h5m", ".cgns", ".cas.h5", ".msh.h5", ".dat.h5")
_INCLUDE = re.compile(rb"\*\s*INCLUDE\s*(,.*)?", re.IGNORECASE)


def check_outside(path: str, *, allow_external: bool) -> None:
    """Check a mesh file, and those that it leads to, before meshio reads them.

    Raises RefusedError: it leads out of its folder, and ``allow_external`` is not set; or its XML declares entities;
    UnsupportedFormatError, CorruptDataError: it claims far more bytes than it stores, or is no XML or HDF5 as its
    suffix says.
    """
    suffix = os.path.splitext(path)[1].lower()
    if suffix in _XML:
        _check_xml(path)
    # the folder of a file, and the folder of its target where it is a link
    roots = os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.dirname(os.path.realpath(path))
    for name, reference in _references(path, suffix):
        if not allow_external:
            _check_inside(path, name, reference, roots)
        if suffix == ".xml":
            _check_xml(name)
        if suffix in (".xdmf", ".xmf") and h5py.is_hdf5(name):
            _check_hdf5(name, allow_external=allow_external)
    if path.lower().endswith(_HDF5) and h5py.is_hdf5(path):
        _check_hdf5(path, allow_external=allow_external)


def _check_inside(path: str, name: str, reference: str, roots: tuple[str, ...]) -> None:
    target = "" if "\0" in name else os.path.realpath(name)
    if not any(target.startswith(root.rstrip("/") + "/") for root in roots):
        raise RefusedError(
            f"{path}: names the file {reference!r}, which is {target!r}, out of the folder of the mesh; copy it there, "
            "or, if you trust the mesh, say allow_external=True"
        )


def _references(path: str, suffix: str) -> Iterator[tuple[str, str]]:
    """Yield each other file that meshio reads: its path, found as meshio finds it, and the name that the mesh gives."""
    if suffix in (".xdmf", ".xmf"):
        yield from _of_xdmf(path)
    elif suffix == ".inp":
        yield from _of_abaqus(path)
    elif suffix in (".node", ".ele"):
        other = os.path.splitext(path)[0] + (".ele" if suffix == ".node" else ".node")
        yield other, os.path.basename(other)
    elif suffix == ".xml":  # DOLFIN's, with a file for each field
        folder, stem = os.path.dirname(os.path.realpath(path)), os.path.splitext(os.path.basename(path))[0]
        names = (name for name in os.listdir(folder) if name.startswith(f"{stem}_") and name.endswith(".xml"))
        yield from ((os.path.join(folder, name), name) for name in names)


def _of_xdmf(path: str) -> Iterator[tuple[str, str]]:
    folder = os.path.dirname(os.path.realpath(path))
    try:
        for _, element in ElementTree.iterparse(path):
            text, kind = (element.text or "").strip(), element.get("Format")
            if kind == "HDF":
                yield os.path.join(folder, text.split(":")[0]), text
            elif kind == "Binary":  # found from the current folder, not from that of the mesh
                yield text, text
            element.clear()
    except (ElementTree.ParseError, ValueError, LookupError) as e:
        raise CorruptDataError(f"{path}: is not well-formed XML: {e}; copy or write it again") from e


def _of_abaqus(path: str) -> Iterator[tuple[str, str]]:
    pending, seen = [path], {os.path.realpath(path)}
    while pending:
        holder = pending.pop()
        with open(holder, "rb") as file:
            lines = [line for line in file if _INCLUDE.match(line)]
        for line in lines:
            reference = os.fsdecode(line.split(b"=")[-1].strip())
            beside = os.path.join(os.path.dirname(holder), reference)
            name = reference if os.path.exists(reference) else beside
            yield name, reference  # the caller refuses it, before it is opened
            if os.path.realpath(name) in seen:
                raise RefusedError(f"{path}: includes {reference!r} twice, or in a circle; include each file once")
            seen.add(os.path.realpath(name))
            if os.path.isfile(name):
                pending.append(name)


def _check_xml(path: str) -> None:
    """Refuse entities, which can stand for gigabytes or other files: they are declared before the first element."""
    size = files().size(path)
    if size > _MAX_XML_BYTES:
        raise UnsupportedFormatError(
            f"{path}: has {size} bytes, but at most {_MAX_XML_BYTES} of XML are read; keep the arrays in HDF5"
        )
    parser, begun = expat.ParserCreate(), []

    def refuse(name: str, *_: object) -> None:
        raise RefusedError(f"{path}: declares the XML entity {name!r}, which no mesh needs; write it out")

    parser.EntityDeclHandler = refuse
    parser.StartElementHandler = lambda *_: begun.append(True)
    offset = 0
    while offset < size and not begun:
        piece = bytes(files().read(path, offset, min(_PIECE, size - offset)))
        offset += len(piece)
        try:
            parser.Parse(piece, False)
        except (expat.ExpatError, ValueError, LookupError):  # behind the first element it is meshio that says so
            break


def _check_hdf5(path: str, *, allow_external: bool) -> None:
    """Refuse links to other files, and data sets that are far larger than their stored bytes."""
    skipped: dict[str, str] = {}
    with open_h5(path) as h5, damage_as_corrupt_data(f"{path}: metadata"):
        for name, node, foreign in walk(h5, allow_external=allow_external, skipped=skipped):
            if not isinstance(node, h5py.Dataset) or node.shape is None:
                continue
            if not foreign and (node.is_virtual or node.external):
                if not allow_external:
                    skipped[name] = "an external data set"
                continue
            nbytes, stored = node.size * node.dtype.itemsize, node.id.get_storage_size()
            cut = zip(node.shape, node.chunks or node.shape, strict=True)
            padded = node.dtype.itemsize * math.prod(-(-n // max(c, 1)) * c for n, c in cut)
            # HDF5 unpacks all that a chunk stores, which is hardly more than the chunk
            if not foreign and (nbytes > max(_SMALL_BYTES, _MAX_RATIO * stored) or stored > 2 * padded + _PIECE):
                raise UnsupportedFormatError(
                    f"{path}: data set {name!r} of shape {node.shape} claims {nbytes} bytes, but {stored} are stored; "
                    "the file is damaged, or write its values"
                )
    for name, reason in skipped.items():
        if "external" in reason.split(";")[0]:
            raise RefusedError(
                f"{path}: {name!r} lies in another file ({reason.split(';')[0]}); if you trust the mesh, say "
                "allow_external=True"
            )
