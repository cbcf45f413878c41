"""The tree of nodes of a CGNS file, of either format: HDF5, or ADF, the format before it, which many tools still write.

An HDF5 file has a group for each node, with its values in a data set named " data". ADF has nodes, lists of children
and pieces of values at addresses in the file. Source: ``ADF_internals.c`` of the CGNS library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import h5py
import numpy as np

from scidata.core.types import AnyArray
from scidata.errors import CorruptDataError, UnsupportedFormatError
from scidata.sources.hdf5.walk import damage_as_corrupt_data, open_h5

_TYPES = {"I4": "i4", "I8": "i8", "U4": "u4", "U8": "u8", "R4": "f4", "R8": "f8", "B1": "u1", "C1": "u1"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Node:
    """A node: a name, a label that says what it is, values, and further nodes.

    ``values()`` reads all values, ``(num_values,)``: the first of several indices changes first.
    """

    name: str
    label: str
    values: Callable[[], AnyArray]
    children: Callable[[], list[Node]]

    def of(self, *labels: str) -> list[Node]:
        """Return the nodes below it that have one of some labels."""
        return [node for node in self.children() if node.label in labels]

    def child(self, name: str) -> Node | None:
        """Return the node below it of this name."""
        return next((node for node in self.children() if node.name == name), None)

    @property
    def text(self) -> str:
        """Its values, which are letters."""
        return self.values().astype(np.uint8).tobytes().decode("ascii", "replace").strip(" \0")


@contextmanager
def open_tree(path: str) -> Iterator[Node]:
    """Open the root of a file; raises UnsupportedFormatError where it is neither of HDF5 nor of ADF."""
    with open(path, "rb") as file:
        head = file.read(32)
        is_adf = head[4:24] == b"ADF Database Version"
        data = head + file.read() if is_adf else b""
    if is_adf:
        yield _adf(path, data)
        return
    if not h5py.is_hdf5(path):
        raise UnsupportedFormatError(f"{path}: is no CGNS: neither HDF5 nor ADF; copy or write it again")
    with open_h5(path) as h5, damage_as_corrupt_data(f"{path}: its tree"):
        yield _of_group(h5)


def _of_group(group: h5py.Group) -> Node:
    name, group = str(group.name).rpartition("/")[2], group.get(" link", group)  # a node elsewhere, by its own name
    label = group.attrs.get("label", b"")
    return Node(
        name=name,
        label=label.decode() if isinstance(label, bytes) else str(label),
        values=lambda: np.ravel(group[" data"][()]) if " data" in group else np.empty(0),
        children=lambda: [_of_group(x) for x in group.values() if isinstance(x, h5py.Group)],
    )


def _adf(path: str, data: bytes) -> Node:
    """Return the root. Counts are hexadecimal; addresses and lengths too, but of version B, where they are binary."""
    order, is_binary = {b"L": "<", b"B": ">"}.get(data[100:101], ""), data[25:26] == b"B"
    if not order:
        raise UnsupportedFormatError(f"{path}: is ADF of numbers that are not IEEE's; convert it by adf2hdf")

    def number(at: int, length: int = 8) -> int:
        found = data[at : at + length]
        return int.from_bytes(found, "little" if order == "<" else "big") if is_binary else int(found, 16)

    def address(at: int) -> int:
        return number(at) * 4096 + number(at + 8, 4)

    def node(at: int) -> Node:
        texts = [data[at + a : at + a + 32].decode("ascii", "replace").strip(" \0") for a in (4, 36, 96)]
        if data[at : at + 4] != b"NoDe" or texts[2] not in ("MT", *_TYPES):  # LK: a link, perhaps to another file
            raise CorruptDataError(f"{path}: no node, or a link, lies at byte {at}; copy it, or write it without links")
        return Node(name=texts[0], label=texts[1], values=lambda: values(at, *texts), children=lambda: children(at))

    def children(at: int) -> list[Node]:
        return [node(address(address(at + 84) + 48 + 44 * i)) for i in range(int(data[at + 68 : at + 76], 16))]

    def values(at: int, name: str, _: str, kind: str) -> AnyArray:
        if kind == "MT":
            return np.empty(0)
        size = math.prod(number(at + 130 + 8 * i) for i in range(int(data[at + 128 : at + 130], 16)))
        num, first, dtype = int(data[at + 226 : at + 230], 16), address(at + 230), np.dtype(order + _TYPES[kind])
        pieces = [first] if num == 1 else [address(first + 16 + 24 * i) for i in range(num)]
        found = b"".join(data[x + 16 : address(x + 4)] for x in pieces)[: size * dtype.itemsize]
        if len(found) != size * dtype.itemsize:
            raise CorruptDataError(f"{path}: node {name!r} has {len(found)} bytes of {size} values; copy it again")
        return np.frombuffer(found, dtype).astype(dtype.newbyteorder("="), copy=False)

    return node(address(134))
