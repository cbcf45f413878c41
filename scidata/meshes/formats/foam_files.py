"""OpenFOAM's files: lists of numbers, fields and meshes, ascii or binary, labels of 32 or 64 bits, gzip'd or not.

A file says in its entry ``FoamFile`` how it is written (``format``, ``arch``) and what it holds (``class``). Binary
files of before 2018 do not say the width of their numbers: labels of 32 bits are tried first, scalars of 64. Format:
OpenFOAM's user guide, "Basic input/output file format", and the files that it writes.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scidata.core.own_files import write_whole
from scidata.core.types import AnyArray, FloatArray, IntArray
from scidata.errors import CorruptDataError, FieldMismatchError, UnsupportedFormatError
from scidata.meshes.formats.vtk_xml import values_of_text
from scidata.meshes.order.polyhedra import Faces

#: Number of values of a cell, by the class of a field.
COMPONENTS = {
    "volScalarField": 1,
    "volVectorField": 3,
    "volSphericalTensorField": 1,
    "volSymmTensorField": 6,
    "volTensorField": 9,
}
_HEADER = re.compile(rb"\bFoamFile\s*\{(.*?)\}", re.DOTALL)
_ENTRY = re.compile(rb"(\w+)\s+(\"[^\"]*\"|[^;]*?)\s*;")
_PATCH = re.compile(rb"([\w.:+-]+)\s*\{([^{}]*)\}")
_SKIPPED = re.compile(rb"(?:\s+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_COUNT = re.compile(rb"(\d{1,18})?\s*([({]?)")
_FIELD = re.compile(rb"^[ \t]*internalField\s+(?:(nonuniform)\s+(?:List<\w+>)?\s*|uniform\s+([^;]*);)", re.MULTILINE)
_UNITS = ("kg", "m", "s", "K", "mol", "A", "cd")
_HEAD = 1 << 14  # bytes within which a field says how it is written
_BANNER = b"// " + b"* " * 37 + b"//\n"
AGAIN = "copy it again, or write it again with OpenFOAM"


def existing(path: str) -> str | None:
    """Return the path of a file as it lies there, with ``.gz`` where it is packed; None if there is none."""
    return next((name for name in (path, f"{path}.gz") if os.path.isfile(name)), None)


@dataclass(frozen=True, kw_only=True, eq=False)
class FoamFile:
    """A file, or the head of one."""

    path: str  # as it lies there
    data: bytes  # its bytes, unpacked
    header: Mapping[str, str]  # the entries of ``FoamFile``
    begin: int  # where they end

    @classmethod
    def read(cls, path: str, *, head: bool = False) -> FoamFile:
        """Read a file, or its first bytes, packed or not.

        Raises CorruptDataError: it is not there, is cut off, or is no file of OpenFOAM.
        """
        found = existing(path)
        if found is None:
            raise CorruptDataError(f"{path}: is not there (nor with .gz), but the case needs it; {AGAIN}")
        try:
            with gzip.open(found) if found.endswith(".gz") else open(found, "rb") as file:
                data = file.read(_HEAD if head else -1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            raise CorruptDataError(f"{found}: cannot be unpacked ({e}); {AGAIN}") from e
        entry = _HEADER.search(data, 0, _HEAD)
        if entry is None:
            raise CorruptDataError(f"{found}: has no entry FoamFile in its first {_HEAD} bytes; {AGAIN}")
        header = {key.decode(): value.decode(errors="replace").strip('"') for key, value in _ENTRY.findall(entry[1])}
        return cls(path=found, data=data, header=header, begin=entry.end())

    @property
    def kind(self) -> str:
        """The class of what it holds."""
        return self.header.get("class", "")

    @property
    def is_binary(self) -> bool:
        """Whether its lists are bytes."""
        return self.header.get("format", "ascii") == "binary"

    def dtypes(self, kind: str) -> list[np.dtype[Any]]:
        """Return the dtypes that ``"label"`` or ``"scalar"`` may have in the file, the likely one first."""
        arch = self.header.get("arch", "")
        said = re.search(rf"{kind}=(32|64)", arch)
        widths = [int(said[1]) // 8] if said else [4, 8] if kind == "label" else [8, 4]
        order = ">" if arch.startswith("MSB") else "<"
        return [np.dtype(f"{order}{'i' if kind == 'label' else 'f'}{width}") for width in widths]

    def labels(self, at: int | None = None) -> tuple[IntArray, int]:
        """Read a list of labels, ``(num,)`` int64, and return where it ends."""
        values, end = self._list("label", 1, self.begin if at is None else at)
        return values.astype(np.int64), end

    def vectors(self) -> AnyArray:
        """Read a list of vectors: ``(num, 3)``."""
        return self._list("scalar", 3, self.begin)[0]

    def faces(self) -> tuple[IntArray, IntArray]:
        """Read a list of faces: where each begins among their nodes, and the last ends; and the nodes."""
        if self.kind == "faceCompactList":
            offsets, end = self.labels()
            nodes, _ = self.labels(end)
            if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(nodes) or (np.diff(offsets) < 0).any():
                raise CorruptDataError(
                    f"{self.path}: faces must begin at numbers that rise from 0 to {len(nodes)}, the number of their "
                    f"nodes; found {offsets[:1].tolist()} to {offsets[-1:].tolist()}; {AGAIN}"
                )
            return offsets, nodes
        if self.is_binary:
            raise UnsupportedFormatError(
                f"{self.path}: a binary list of class {self.kind!r}, which OpenFOAM wrote before 2.0; read are "
                "faceCompactList and ascii lists: run foamFormatConvert of a later version"
            )
        num, begin, _ = self._count(self.begin)
        if not num:
            return np.zeros(1, np.int64), np.empty(0, np.int64)
        text = self._text(begin, self._closing(begin, nested=True))
        values = self._numbers(
            text.replace(b"(", b" -1 ").replace(b")", b" "), "label"
        )  # a mark behind the size of each face
        starts = np.flatnonzero(values == -1) + 1
        sizes = values[starts - 2] if len(starts) else starts
        offsets = np.zeros(len(starts) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        if len(starts) != num or offsets[-1] != len(values) - 2 * num or (np.diff(starts) != sizes[:-1] + 2).any():
            raise CorruptDataError(
                f"{self.path}: says {num} faces, but has {len(starts)}, whose sizes add up to {offsets[-1]} of "
                f"{len(values) - 2 * len(starts)} nodes; {AGAIN}"
            )
        return offsets, np.delete(values, np.concatenate([starts - 1, starts - 2])).astype(np.int64)

    @property
    def units(self) -> str:
        """The dimensions of a field as CF writes units, such as ``kg m-1 s-2``; empty if there are none."""
        found = re.search(rb"^[ \t]*dimensions\s+\[([^\]]*)\]", self.data, re.MULTILINE)
        powers = found[1].split() if found else []
        named = zip(_UNITS, (power.decode(errors="replace") for power in powers), strict=False)
        return " ".join(unit if power == "1" else f"{unit}{power}" for unit, power in named if power.strip("-0."))

    def why_not(self) -> str | None:
        """Say why the values of a field, of which the head was read, cannot be read; None if they can."""
        found = _FIELD.search(self.data, self.begin)
        if found is None and len(self.data) < _HEAD:
            raise CorruptDataError(f"{self.path}: ends before internalField; {AGAIN}")
        if found is None:
            return f"has no internalField in its first {_HEAD} bytes"
        if found[1] is None and re.search(rb"[^\d\s().eE+-]", found[2]) and b"nan" not in found[2].lower():
            return f"is {found[2].decode(errors='replace')!r}, no number: OpenFOAM sets it when it runs"
        return None

    def field(self, num_cells: int) -> AnyArray:
        """Read the values of a field in the cells: ``(num_cells,)``, or ``(num_cells, components)``.

        Raises FieldMismatchError: it has another number of values.
        """
        components = COMPONENTS[self.kind]
        found = _FIELD.search(self.data, self.begin)
        if found is None or (reason := self.why_not()) is not None:
            raise CorruptDataError(f"{self.path}: {reason if found else 'has no internalField'}; {AGAIN}")
        if found[1] is None:
            value = self._numbers(found[2].translate(None, b"()"), "scalar")
            if len(value) != components:
                raise CorruptDataError(
                    f"{self.path}: internalField is {len(value)} numbers, but a {self.kind} has {components}; {AGAIN}"
                )
            values = np.repeat(value[None], num_cells, axis=0)
            return values[:, 0] if components == 1 else values
        values, _ = self._list("scalar", components, found.end())
        if len(values) != num_cells:
            raise FieldMismatchError(
                f"{self.path}: internalField has {len(values)} values, but the mesh has {num_cells} cells; it is of "
                f"another mesh, or damaged: {AGAIN}"
            )
        return values

    def _count(self, at: int) -> tuple[int, int, bytes]:
        """Return the number of items that a list says, where they begin, and the bracket before them."""
        skipped = _SKIPPED.match(self.data, at)
        found = _COUNT.match(self.data, skipped.end() if skipped else at)
        assert found is not None
        if found[1] is None:
            raise CorruptDataError(f"{self.path}: expected the length of a list at byte {at}; {AGAIN}")
        return int(found[1]), found.end(), found[2]

    def _list(self, kind: str, components: int, at: int) -> tuple[AnyArray, int]:
        num, begin, bracket = self._count(at)
        shape = (num,) if components == 1 else (num, components)
        if not num:
            end = begin + (1 if bracket and self.data[begin : begin + 1] in (b")", b"}") else 0)
            return np.empty(shape, self.dtypes(kind)[0].newbyteorder("=")), end
        if bracket == b"{":  # one value for all
            end = self.data.find(b"}", begin)
            value = self._numbers(self._text(begin, end).translate(None, b"()"), kind)
            if len(value) != components:
                raise CorruptDataError(
                    f"{self.path}: {len(value)} numbers in braces, where {components} are one value; {AGAIN}"
                )
            return np.repeat(value[None], num, axis=0).reshape(shape), end + 1
        if self.is_binary:
            for dtype in self.dtypes(kind):
                end = begin + num * components * dtype.itemsize
                if bracket and self.data[end : end + 1] == b")":
                    values = np.frombuffer(self.data, dtype, num * components, begin)
                    return values.astype(dtype.newbyteorder("="), copy=False).reshape(shape), end + 1
            raise CorruptDataError(
                f"{self.path}: a list of {num} values of {components} {kind}s does not end where they do (the file "
                f"has {len(self.data)} bytes, and says arch {self.header.get('arch', '')!r}); {AGAIN}"
            )
        end = self._closing(begin, nested=components > 1)
        values = self._numbers(self._text(begin, end).translate(bytes.maketrans(b"()", b"  ")), kind)
        if len(values) != num * components:
            raise CorruptDataError(
                f"{self.path}: says {num} values of {components}, but has {len(values)} numbers; {AGAIN}"
            )
        return values.reshape(shape), end + 1

    def _closing(self, begin: int, *, nested: bool) -> int:
        """Return where a list ends: at its last bracket, behind that of its last item where these have some."""
        found = re.compile(rb"\)\s*\)" if nested else rb"\)").search(self.data, begin)
        return -1 if found is None else found.end() - 1

    def _text(self, begin: int, end: int) -> bytes:
        if end < 0:
            raise CorruptDataError(f"{self.path}: a list that begins at byte {begin} does not end; {AGAIN}")
        text = self.data[begin:end]
        return re.sub(rb"//[^\n]*|/\*.*?\*/", b" ", text, flags=re.DOTALL) if b"/" in text else text

    def _numbers(self, text: bytes, kind: str) -> AnyArray:
        try:
            return values_of_text(text, np.dtype(np.int64 if kind == "label" else np.float64))
        except (ValueError, DeprecationWarning) as e:
            raise CorruptDataError(f"{self.path}: has something else than numbers in a list ({e}); {AGAIN}") from e


def dimensions_of(units: str) -> str | None:
    """Return the dimensions that :attr:`FoamFile.units` says; None if these are other units."""
    powers = dict.fromkeys(_UNITS, "0")
    for each in units.split():
        found = re.fullmatch(r"([A-Za-z]+)(-?[\d.]+)?", each)
        if found is None or found[1] not in powers:
            return None
        powers[found[1]] = found[2] or "1"
    return " ".join(powers.values())


def write_field(
    path: str, name: str, values: AnyArray, *, like: FoamFile, patches: Mapping[str, str], dimensions: str | None = None
) -> None:
    """Write a field of cells, whole or not at all.

    ``path``: the folder of its time.
    ``values``: ``(num_cells,)`` or ``(num_cells, 3, 6 or 9)``.
    ``like``: a file whose format (ascii or binary, widths of numbers, packed or not) it gets.
    ``patches``: the type of each patch's boundary condition; the values there are those of the cells beside them.
    ``dimensions``: as ``"0 1 -1 0 0 0 0"``; none by default.
    """
    by_components = {num: kind for kind, num in COMPONENTS.items() if kind != "volSphericalTensorField"}
    components = 1 if values.ndim == 1 else values.shape[1]
    if values.ndim > 2 or components not in by_components:
        raise FieldMismatchError(
            f"{path}/{name}: values of shape {values.shape}, but a field has (num_cells,) or (num_cells, 3, 6 or 9); "
            "write other components one by one"
        )
    kind, dtype = by_components[components], like.dtypes("scalar")[0]
    entries = {"version": "2.0", "format": "binary" if like.is_binary else "ascii", "class": kind}
    if "arch" in like.header:
        entries["arch"] = f'"{like.header["arch"]}"'
    entries |= {"location": f'"{os.path.basename(path)}"', "object": name}
    header = "".join(f"    {key:<12}{value};\n" for key, value in entries.items())
    if like.is_binary:
        body = np.ascontiguousarray(values, dtype).tobytes()
    else:
        rows = values.astype(dtype.newbyteorder("=")).reshape(len(values), -1).tolist()
        lines = (" ".join(map(repr, row)) for row in rows)
        body = ("\n" + "\n".join(lines if components == 1 else (f"({line})" for line in lines)) + "\n").encode()
    element = kind.removeprefix("vol").removesuffix("Field")
    boundary = "".join(
        f"    {patch}\n    {{\n        type {condition};\n    }}\n" for patch, condition in patches.items()
    )
    data = b"".join(
        [
            f"FoamFile\n{{\n{header}}}\n".encode(), _BANNER,
            f"\ndimensions      [{dimensions or '0 0 0 0 0 0 0'}];\n\n".encode(),
            f"internalField   nonuniform List<{element[0].lower()}{element[1:]}>\n{len(values)}\n(".encode(), body,
            f")\n;\n\nboundaryField\n{{\n{boundary}}}\n\n".encode(), _BANNER,
        ]
    )  # fmt: skip
    packed = like.path.endswith(".gz")
    write_whole(os.path.join(path, f"{name}.gz" if packed else name), gzip.compress(data, 6) if packed else data)


@dataclass(frozen=True, kw_only=True, eq=False)
class FoamPart:
    """A case, or one processor's share of it."""

    case: str
    mesh: str

    def file(self, name: str) -> FoamFile:
        """Read a file of the mesh."""
        return FoamFile.read(os.path.join(self.mesh, name))

    def sizes(self) -> tuple[int, int]:
        """Return the number of cells, and of inner faces."""
        owner = self.file("owner")
        said = dict(re.findall(r"(nCells|nInternalFaces):\s*(\d+)", owner.header.get("note", "")))
        if len(said) == 2:
            return int(said["nCells"]), int(said["nInternalFaces"])
        return int(owner.labels()[0].max(initial=-1)) + 1, int((self.file("neighbour").labels()[0] >= 0).sum())

    def faces(self, num_cells: int) -> Faces:
        """Read and check the faces."""
        offsets, nodes = self.file("faces").faces()
        owner, inner = self.file("owner").labels()[0], self.file("neighbour").labels()[0]
        if len(owner) != len(offsets) - 1 or len(inner) > len(owner):
            raise CorruptDataError(
                f"{self.mesh}: has {len(offsets) - 1} faces, {len(owner)} owners and {len(inner)} neighbours, but each "
                f"face has one owner, and inner faces have one neighbour; {AGAIN}"
            )
        neighbour = np.full(len(owner), -1, np.int64)
        neighbour[: len(inner)] = inner
        faces = Faces(offsets=offsets, nodes=nodes, owner=owner, neighbour=neighbour)
        return faces.checked(self.mesh, len(self.points), num_cells)

    @property
    def points(self) -> FloatArray:
        """The points, ``(num_points, 3)``."""
        return np.asarray(self.file("points").vectors(), np.float64)

    def patches(self) -> dict[str, dict[str, str]]:
        """Return the entries of each patch of the boundary."""
        file = self.file("boundary")
        return {
            name.decode(): {key.decode(): value.decode() for key, value in _ENTRY.findall(entries)}
            for name, entries in _PATCH.findall(file.data, file.begin)
        }


def of_processors(part: FoamPart, faces: Faces, number: int) -> Iterator[tuple[tuple[int, int], int, IntArray]]:
    """Yield, for each patch to another processor, both numbers, its place among those to it, and the cells at it."""
    seen: dict[int, int] = {}
    for name, entries in part.patches().items():
        if entries.get("type") == "processor":
            other, first, num = (int(entries.get(key, "-1")) for key in ("neighbProcNo", "startFace", "nFaces"))
            if first < 0 or num < 0 or first + num > len(faces.owner):
                raise CorruptDataError(
                    f"{part.mesh}: patch {name} is the faces {first} to {first + num} of {len(faces.owner)}; {AGAIN}"
                )
            yield (number, other), seen.setdefault(other, 0), faces.owner[first : first + num]
            seen[other] += 1


def point_numbers(parts: Sequence[FoamPart]) -> IntArray | None:
    """Return the number of each point of all parts in the case that was cut; None if a part does not say."""
    names = [os.path.join(part.mesh, "pointProcAddressing") for part in parts]
    if len(parts) == 1 or not all(map(existing, names)):
        return None
    found = [FoamFile.read(name).labels()[0] for name in names]
    for name, numbers, part in zip(names, found, parts, strict=True):
        if len(numbers) != (num := len(part.points)):
            raise CorruptDataError(f"{name}: has {len(numbers)} numbers of points, but there are {num}; {AGAIN}")
    return np.concatenate(found)
