"""What is done to a sound file: bytes, files, metadata, links, bombs. Each a function of random numbers alone."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from scidata.store.format.manifest import dump_json
from tests.fuzz.seeds import Seed, Span

__all__ = ["MUTATIONS", "Damage", "damage"]

Rng = np.random.Generator

_METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata", "manifest.json")
_HDF5 = b"\x89HDF\r\n\x1a\n"
_HDF5_PARTS = (
    b"GCOL",
    b"OHDR",
    b"OCHK",
    b"TREE",
    b"SNOD",
    b"HEAP",
    b"FRHP",
    b"FHDB",
    b"FHIB",
    b"BTHD",
    b"BTLF",
    b"BTIN",
)
_INTEGERS = (
    0,
    1,
    2,
    3,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    2**64 - 1,
)


@dataclass(frozen=True, kw_only=True)
class Damage:
    """What was done.

    Attributes
    ----------
    text
        For the report.
    spans
        The bytes that changed, where a checksum over them must show it; empty where none can.
    flips
        Whether at most two bits changed: sums that are weak find those, too.
    strict
        Right values or an error, whatever the format: what is cut off or gone must not be made up, and what lies
        outside of the store not be read.
    forged
        The store's own digests were made anew: its values may differ, for they are signed by nobody.
    """

    text: str
    spans: tuple[Span, ...] = ()
    flips: bool = False
    strict: bool = False
    forged: bool = False


class Tree:
    """The files of one case: read, and replaced as a whole, since they are hard links to the sound ones."""

    def __init__(self, root: str, seed: Seed) -> None:
        self.root, self.seed = Path(root), seed
        self.outside = self.root.parent / "outside"
        self.files = sorted(str(p.relative_to(root)) for p in self.root.rglob("*") if p.is_file())
        self.metadata = [f for f in self.files if os.path.basename(f) in _METADATA]
        self.data = [f for f in self.files if os.path.basename(f) not in _METADATA]

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        (self.root / name).unlink()
        (self.root / name).write_bytes(data)

    def pick(self, rng: Rng, names: Sequence[str]) -> str:
        return names[int(rng.integers(len(names)))]

    def some_file(self, rng: Rng) -> str:
        """Return one of the files: mostly of data, for there are many of metadata."""
        return self.pick(rng, self.data if self.data and (not self.metadata or rng.random() < 0.7) else self.metadata)


# -- bytes -------------------------------------------------------------------------------------------------------------


def _place(rng: Rng, data: bytes, where: str) -> int:
    size = max(1, len(data))
    if where == "head":
        return int(min(rng.integers(1 + min(size - 1, 512)), size - 1))
    if where == "tail":
        return size - 1 - int(rng.integers(min(size, 80)))
    if where == "parts":
        found = [m.start() for m in re.finditer(b"|".join(_HDF5_PARTS), data)]
        if found:
            return min(size - 1, found[int(rng.integers(len(found)))] + int(rng.integers(96)))
    return int(rng.integers(size))


def _flip(tree: Tree, rng: Rng, where: str, count: int) -> Damage:
    name = tree.some_file(rng)
    data = bytearray(tree.read(name) or b"\0")
    spans = []
    for _ in range(count):
        at, bit = _place(rng, data, where), int(rng.integers(8))
        data[at] ^= 1 << bit
        spans.append((name, at, at + 1))
    tree.write(name, bytes(data))
    return Damage(text=f"{name}: bits flipped at {[s[1] for s in spans]}", spans=tuple(spans), flips=count <= 2)


def flip(tree: Tree, rng: Rng) -> Damage:
    """One bit anywhere."""
    return _flip(tree, rng, "any", 1)


def flips(tree: Tree, rng: Rng) -> Damage:
    """A few bits anywhere."""
    return _flip(tree, rng, "any", int(rng.integers(2, 8)))


def flip_header(tree: Tree, rng: Rng) -> Damage:
    """A few bits of a file's first bytes."""
    return _flip(tree, rng, "head", int(rng.integers(1, 4)))


def flip_index(tree: Tree, rng: Rng) -> Damage:
    """A few bits of a file's last bytes, where indexes of shards and checksums lie, or of the structures of HDF5."""
    return _flip(tree, rng, "parts" if rng.random() < 0.6 else "tail", int(rng.integers(1, 4)))


def integer(tree: Tree, rng: Rng) -> Damage:
    """A number of a binary file replaced by a large, negative or small one."""
    name = tree.some_file(rng)
    data = bytearray(tree.read(name))
    width = int(rng.choice([1, 2, 4, 8]))
    if len(data) < width:
        return append(tree, rng)
    at = min(_place(rng, data, str(rng.choice(["head", "head", "parts", "tail", "any"]))), len(data) - width)
    at -= at % (4 if rng.random() < 0.8 and at >= 4 else 1)
    value = _INTEGERS[int(rng.integers(len(_INTEGERS)))] % 256**width
    data[at : at + width] = value.to_bytes(width, str(rng.choice(["little", "big"])))  # type: ignore[arg-type]
    tree.write(name, bytes(data))
    return Damage(text=f"{name}: {width} bytes at {at} are the integer {value}", spans=((name, at, at + width),))


def run(tree: Tree, rng: Rng) -> Damage:
    """A run of bytes of zeros or ones."""
    name = tree.some_file(rng)
    data = bytearray(tree.read(name))
    at = _place(rng, data, "any")
    length = min(len(data) - at, int(2 ** rng.integers(0, 10)))
    fill = b"\0" if rng.random() < 0.5 else b"\xff"
    data[at : at + length] = fill * length
    tree.write(name, bytes(data))
    return Damage(text=f"{name}: {length} bytes at {at} are {fill!r}", spans=((name, at, at + length),))


def cut(tree: Tree, rng: Rng) -> Damage:
    """The end of a file cut off: anywhere, or at a multiple of 4 bytes, or all of it."""
    name = tree.some_file(rng)
    data = tree.read(name)
    at = int(rng.choice([0, rng.integers(max(1, len(data))), max(0, len(data) - 1), max(0, len(data) // 2 // 4 * 4)]))
    tree.write(name, data[:at])
    text = tree.seed.format in ("vtu", "vtp", "vtk", "gmsh", "xdmf")  # the end of a text may say nothing
    return Damage(text=f"{name}: cut to {at} of {len(data)} bytes", strict=name in tree.data and not text)


def append(tree: Tree, rng: Rng) -> Damage:
    """Bytes after the end of a file."""
    name = tree.some_file(rng)
    data = tree.read(name)
    more = data if rng.random() < 0.3 else rng.bytes(int(2 ** rng.integers(0, 12)))
    tree.write(name, data + more)
    return Damage(text=f"{name}: {len(more)} bytes after its end", strict=name in tree.data and bool(tree.metadata))


def insert(tree: Tree, rng: Rng) -> Damage:
    """A few bytes put in, or taken out, so that the rest moves."""
    name = tree.some_file(rng)
    data = tree.read(name)
    at, count = _place(rng, data, "any"), int(rng.integers(1, 9))
    tree.write(name, data[:at] + rng.bytes(count) + data[at:] if rng.random() < 0.5 else data[:at] + data[at + count :])
    return Damage(text=f"{name}: {count} bytes put in or taken out at {at}")


# -- files -------------------------------------------------------------------------------------------------------------


def exchange(tree: Tree, rng: Rng) -> Damage:
    """Two files change places, of one name if there are: chunks, shards, metadata of two arrays, or two samples."""
    first = tree.some_file(rng)
    folders = sorted(p.name for p in tree.root.glob("*/sample-*"))
    if len(folders) > 1 and rng.random() < 0.25:
        parent = next(tree.root.glob("*/sample-*")).parent
        a, b = (str(x) for x in rng.choice(folders, 2, replace=False))
        inner = str(rng.choice(["", *sorted({os.path.relpath(p, parent / a) for p in (parent / a).rglob("*")})]))
        if (parent / b / inner).exists():
            return _swap(tree, parent / a / inner, parent / b / inner)
    same = [f for f in tree.files if f != first and os.path.basename(f) == os.path.basename(first)]
    size = (tree.root / first).stat().st_size
    alike = [f for f in same if (tree.root / f).stat().st_size == size] or same
    others = alike or [f for f in tree.files if f != first]
    if not others:
        return duplicate(tree, rng)
    return _swap(tree, tree.root / first, tree.root / tree.pick(rng, others))


def _swap(tree: Tree, a: Path, b: Path) -> Damage:
    aside = tree.root / "aside"
    a.rename(aside)
    b.rename(a)
    aside.rename(b)
    return Damage(text=f"{a.relative_to(tree.root)} and {b.relative_to(tree.root)} exchanged")


def delete(tree: Tree, rng: Rng) -> Damage:
    """A file is gone, or a folder."""
    if rng.random() < 0.2 and (folders := sorted(p for p in tree.root.rglob("*") if p.is_dir())):
        folder = folders[int(rng.integers(len(folders)))]
        shutil.rmtree(folder)
        return Damage(text=f"{folder.relative_to(tree.root)}: gone")
    name = tree.some_file(rng)
    (tree.root / name).unlink()
    return Damage(text=f"{name}: gone", strict=name in tree.data and bool(tree.metadata))


def duplicate(tree: Tree, rng: Rng) -> Damage:
    """A file is a copy of another, or there once more under another name."""
    first, second = tree.some_file(rng), tree.some_file(rng)
    if first == second or rng.random() < 0.2:
        copy = tree.root / f"{first}.{rng.integers(10)}"
        shutil.copyfile(tree.root / first, copy)
        return Damage(text=f"{first}: there again as {copy.name}")
    tree.write(second, tree.read(first))
    return Damage(text=f"{second}: is a copy of {first}")


# -- metadata ----------------------------------------------------------------------------------------------------------

_TEXTS = (
    "", "\0", "a\0b", "\ud800", "x" * 1_000_000, "..", "../../../../etc/passwd", "/etc/passwd", "/",
    "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "u\r\nerror: made up", "\u202eabc", "NaN", "Infinity", "<f8", ">i2",
    "|O", "|V999999999999", "float64", "int128", "complex128", "r64", "<U1000000000", "<M8[ns]", "zstd", "lat", "time",
    "node", "C", "F", "file:///", "http://127.0.0.1:1/x", "%s%n{0}", "[bold]", "\u00e9\u4e2d",
)  # fmt: skip
_NUMBERS = (0, -1, 1, 2, 7, 1.5, -0.0, 1e308, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400)
_SPECIAL = (float("nan"), float("inf"), -float("inf"))
#: Attributes that readers act upon.
_ATTRIBUTES = (
    "scale_factor", "add_offset", "_FillValue", "missing_value", "valid_range", "valid_min", "valid_max", "units",
    "axis", "standard_name", "calendar", "coordinates", "_Unsigned", "_ARRAY_DIMENSIONS", "long_name", "period",
    "start_index", "num_nodes", "rows", "Conventions", "bounds", "location", "mesh", "on_a_sphere", "cf_role",
    "mesh_topology",
)  # fmt: skip
_DEEP = "@@nested 10,000 deep@@"


def _hostile(rng: Rng) -> Any:
    kind = int(rng.integers(7))
    if kind == 0:
        return None
    if kind == 1:
        return bool(rng.integers(2))
    if kind == 2:
        return _NUMBERS[int(rng.integers(len(_NUMBERS)))]
    if kind == 3:
        return _SPECIAL[int(rng.integers(3))] if rng.random() < 0.5 else _DEEP
    if kind == 4:
        return [_hostile(rng) for _ in range(int(rng.integers(4)))]
    if kind == 5:
        return {str(_text(rng))[:99]: _hostile(rng) for _ in range(int(rng.integers(3)))}
    return _text(rng)


def _text(rng: Rng) -> str:
    return _TEXTS[int(rng.integers(len(_TEXTS)))]


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container with each of its keys."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield data, key
        yield from _places(value)


def _near(value: Any, rng: Rng) -> Any:
    """Return a value of the same kind."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return [value + 1, value - 1, value * 2, -value, value * 1000 + 1, float(f"{value}"), str(value)][
            int(rng.integers(7))
        ]
    if isinstance(value, str):
        at = int(rng.integers(len(value) + 1))
        return value[:at] + _text(rng)[:9] + value[at + 1 :]
    if isinstance(value, list):
        return [value[:-1], [*value, *value[-1:]], value[::-1], value * 40, [value]][int(rng.integers(5))]
    return {} if rng.random() < 0.5 else [value]


def _change(data: Any, rng: Rng) -> str:
    places = list(_places(data))
    if not places:
        data["attributes"] = _hostile(rng)
        return "attributes"
    container, key = places[int(rng.integers(len(places)))]
    kind = rng.random()
    if kind < 0.12 and isinstance(container, dict):
        del container[key]
        return f"{key!r} is gone"
    if kind < 0.42:
        container[key] = _near(container[key], rng)
    elif kind < 0.5 and isinstance(container, dict):
        other = list(container)[int(rng.integers(len(container)))]
        container[key], container[other] = container[other], container[key]
        return f"{key!r} and {other!r} exchanged"
    elif kind < 0.62:
        dicts = [c[k] for c, k in places if k in ("attributes", ".zattrs") and isinstance(c[k], dict)]
        container = dicts[int(rng.integers(len(dicts)))] if dicts else data if isinstance(data, dict) else {}
        key = _ATTRIBUTES[int(rng.integers(len(_ATTRIBUTES)))]
        container[key] = _hostile(rng)
    else:
        container[key] = _hostile(rng)
    return f"{str(key)[:40]!r} is {ascii(container[key])[:60]}"


def _dump(data: Any, indent: int | None) -> bytes:
    text = json.dumps(data, indent=indent)
    for open_, close in (("[", "]"), ('{"a":', "}")):
        text = text.replace(json.dumps(_DEEP), open_ * 10_000 + "1" + close * 10_000, 1)
    return text.encode()


def _digest(data: dict[str, Any]) -> str:
    rest = {key: value for key, value in data.items() if key != "digest"}
    return hashlib.blake2b(dump_json(rest).encode(), digest_size=16).hexdigest()


def _sealed(data: Any) -> list[dict[str, Any]]:
    """Return the descriptions of a store that hold their own digests, innermost first."""
    values = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    found = [each for value in values for each in _sealed(value)]
    if isinstance(data, dict) and isinstance(data.get("digest"), str) and _digest(data) == data["digest"]:
        found.append(data)
    return found


def metadata(tree: Tree, rng: Rng) -> Damage:
    """A key or value of the JSON metadata: gone, of another type, huge, negative, deep, hostile text.

    Of our own stores half of the time under a new digest, so that it is believed.
    """
    name = tree.pick(rng, tree.metadata)
    data = json.loads(tree.read(name))
    seals = _sealed(data) if rng.random() < 0.5 else []
    texts = [_change(data, rng) for _ in range(int(rng.choice([1, 1, 1, 2, 4])))]
    for seal in seals:
        try:
            seal["digest"] = _digest(seal)
        except (ValueError, TypeError, RecursionError):
            seals = []
    raw = _dump(data, 2)
    if rng.random() < 0.05:
        raw = [raw[:-2] + b',"a":1,"a":2}', b"\xef\xbb\xbf" + raw, raw.decode().encode("utf-16"), b"[]", b"null", b"1"][
            int(rng.integers(6))
        ]
        texts.append("and the text of the JSON")
    tree.write(name, raw)
    return Damage(text=f"{name}: {'; '.join(texts)}{' (sealed anew)' if seals else ''}", forged=bool(seals))


_WORDS = (b"", b"-1", b"0", b"99999999999", b"9223372036854775808", b"nan", b"1e400", b"\x1b[31m", b"\xff")


def _tokens(tree: Tree, rng: Rng) -> Damage:
    """A word or number of a text file."""
    name = tree.pick(rng, tree.data)
    data = tree.read(name)
    words = list(re.finditer(rb"[A-Za-z0-9_.+-]+", data[:20_000]))
    texts = []
    for _ in range(int(rng.integers(1, 3))):
        word = words[int(rng.integers(len(words)))]
        old = word.group()
        new = rng.choice(
            [b"", b"-1", b"0", b"99999999999", b"9223372036854775808", b"nan", b"1e400", b"\x1b[31m", b"\xff"]
        )
        if re.fullmatch(rb"\d+", old) and rng.random() < 0.5:
            new = str(int(old) + int(rng.choice([-1, 1, 1000]))).encode()
        if rng.random() < 0.1:
            new = b"A" * 100_000
        data = data[: word.start()] + new + data[word.start() + len(old) :]
        texts.append(f"{old[:20]!r} is {new[:20]!r}")
        words = list(re.finditer(rb"[A-Za-z0-9_.+-]+", data[:20_000])) or words
    tree.write(name, data)
    return Damage(text=f"{name}: {'; '.join(texts)}")


# -- links -------------------------------------------------------------------------------------------------------------


def link(tree: Tree, rng: Rng) -> Damage:
    """Something that is no file in a file's place: links out, loops, devices, pipes, folders."""
    name = tree.some_file(rng)
    path = tree.root / name
    kind = str(
        rng.choice(["out", "folder out", "loop", "two", "zero", "pipe", "folder", "dangling", "passwd", "up", "root"])
    )
    strict = False
    tree.outside.mkdir()
    if kind == "folder out" and path.parent == tree.root:
        kind = "out"
    if kind == "folder out":
        path = path.parent
        shutil.move(path, tree.outside / "f")
        path.symlink_to(tree.outside / "f")
        return Damage(text=f"{path.relative_to(tree.root)}: a link to a folder outside")
    path.unlink()
    if kind == "out":
        sound = Path(tree.seed.folder)
        others = [f for f in tree.data if f != name and (sound / f).stat().st_size == (sound / name).stat().st_size]
        strict = name in tree.data and bool(others) and bool(tree.metadata)
        shutil.copyfile(sound / (tree.pick(rng, others) if strict else name), tree.outside / "x")
        path.symlink_to(tree.outside / "x")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "two":
        path.symlink_to(path.name + ".b")
        path.with_name(path.name + ".b").symlink_to(path.name)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        target = {"zero": "/dev/zero", "dangling": "nowhere", "passwd": "/etc/passwd", "up": "..", "root": "/"}[kind]
        path.symlink_to(target)
    return Damage(text=f"{name}: {kind}", strict=strict)


# -- bombs -------------------------------------------------------------------------------------------------------------


def zstd_bomb(num_bytes: int) -> bytes:
    """Return a frame of zeros that says nothing of its size: 4 bytes for each 128 KiB."""
    blocks, size = max(1, num_bytes >> 17), 1 << 17
    block = struct.pack("<I", 1 << 1 | size << 3)[:3] + b"\0"
    last = struct.pack("<I", 1 | 1 << 1 | size << 3)[:3] + b"\0"
    return b"\x28\xb5\x2f\xfd\x00\x38" + block * (blocks - 1) + last


def zstd_claim(num_bytes: int) -> bytes:
    """Return a frame of one byte that claims to hold so many."""
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", num_bytes) + b"\x09\x00\x00\x00"


def zlib_bomb(num_bytes: int, *, gzip: bool) -> bytes:
    """Return a stream of zeros, in blocks of 1 MiB of which each is compressed alone; its last checksum is wrong."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    head = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" if gzip else b"\x78\x9c"
    return head + block * max(1, num_bytes >> 20) + packer.flush() + bytes(8 if gzip else 4)


def _blosc_claim(data: bytes, rng: Rng) -> bytes:
    number = int(rng.choice([2**31 - 1, 2**31 - 17, 2**30, 0xFFFFFFFF]))
    field = int(rng.choice([4, 8, 12]))
    return data[:field] + struct.pack("<I", number) + data[field + 4 :] if len(data) >= 16 else data


def _zarr_bomb(tree: Tree, rng: Rng) -> Damage:
    arrays = [f for f in tree.metadata if b'"shape"' in tree.read(f) and "manifest" not in f]
    kind = str(rng.choice(["chunk", "chunk", "shape", "grid", "one", "inner", "digits"]))
    if kind == "chunk" and tree.data:
        name = tree.pick(rng, tree.data)
        data = [
            lambda: zstd_bomb(4 << 30), lambda: zstd_claim(2**40), lambda: zstd_claim(3 << 30),
            lambda: zlib_bomb(3 << 30, gzip=True), lambda: _blosc_claim(tree.read(name), rng),
            lambda: b"\x02\x01\x13\x04" + struct.pack("<III", 2**31 - 17, 2**18, 64) + bytes(48),
        ][int(rng.integers(6))]()  # fmt: skip
        tree.write(name, data)
        return Damage(text=f"{name}: a bomb of {len(data)} bytes")
    name = tree.pick(rng, arrays)
    data = json.loads(tree.read(name))
    for array in [d for d in _dicts(data) if isinstance(d.get("shape"), list)]:
        big = int(rng.choice([2**28, 2**30, 2**40, 2**62]))
        dim = int(rng.integers(max(1, len(array["shape"]))))
        chunks = array.get("chunks") or array.get("chunk_grid", {}).get("configuration", {}).get("chunk_shape") or [1]
        if kind in ("shape", "one") and array["shape"]:
            array["shape"][dim] = big
        if kind in ("grid", "inner"):
            array["shape"][:] = [2**10] * len(array["shape"])
            chunks[:] = [1] * len(chunks)
        if kind in ("one", "inner"):
            chunks[dim % len(chunks)] = big
        if kind == "inner":
            for codec in _dicts(array.get("codecs", [])):
                if "chunk_shape" in codec:
                    codec["chunk_shape"] = [1] * len(codec["chunk_shape"])
        if kind == "digits" and array["shape"]:
            array["shape"][dim] = "@big@"
    tree.write(name, json.dumps(data).replace('"@big@"', "9" * 5000).encode())
    return Damage(text=f"{name}: {kind}, chunks and shape of up to 2^62")


def _dicts(data: Any) -> Iterator[dict[str, Any]]:
    if isinstance(data, dict):
        yield data
    for value in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from _dicts(value)


def _hdf5_bomb(tree: Tree, rng: Rng) -> Damage:
    name = tree.pick(rng, [f for f in tree.data if tree.read(f)[:8] == _HDF5])
    tree.write(name, tree.read(name))  # no longer a hard link: it is changed in place
    path = tree.root / name
    with h5py.File(path, "r+") as file:
        names: list[str] = []
        file.visititems(lambda key, item: names.append(key) if isinstance(item, h5py.Dataset) and item.shape else None)
        victim = str(rng.choice(names))
        shape, dtype = file[victim].shape, file[victim].dtype
        kind = str(rng.choice(list(_HDF5_BOMBS)))
        attributes = dict(file[victim].attrs) if "attr" not in kind else {}
        if not kind.startswith("attr") and kind not in ("cycle", "groups"):
            del file[victim]
        try:
            _HDF5_BOMBS[kind](file, victim, shape, dtype, rng)
        except (TypeError, ValueError):  # of some shapes and dtypes h5py makes none: the array is gone
            kind += ", which cannot be written"
        if victim in file and isinstance(file.get(victim, getlink=True), h5py.HardLink):
            for key in ("units", "scale_factor"):
                if key in attributes and isinstance(file[victim], h5py.Dataset):
                    file[victim].attrs[key] = attributes[key]
    return Damage(text=f"{name}: {victim}: {kind}")


def _deflate_bomb(file: Any, name: str, shape: Any, dtype: Any, rng: Rng) -> None:
    chunks = tuple(max(1, n) for n in shape)
    dataset = file.create_dataset(name, shape=shape, dtype=dtype, chunks=chunks, compression="gzip")
    dataset.id.write_direct_chunk((0,) * len(shape), zlib_bomb(3 << 30, gzip=False))


def _huge_chunks(file: Any, name: str, shape: Any, dtype: Any, rng: Rng) -> None:
    chunks = (2**28, *[1] * (len(shape) - 1))
    dataset = file.create_dataset(name, shape=(2**40, *shape[1:]), dtype="u1", chunks=chunks, compression="gzip")
    dataset.id.write_direct_chunk((0,) * len(shape), zlib.compress(b"1"))


def _huge_grid(file: Any, name: str, shape: Any, dtype: Any, rng: Rng) -> None:
    file.create_dataset(name, shape=(2**40, *shape[1:]), dtype=dtype, chunks=(1,) * len(shape))


def _huge_plain(file: Any, name: str, shape: Any, dtype: Any, rng: Rng) -> None:
    file.create_dataset(name, shape=(2 ** int(rng.choice([34, 40, 58])), *shape[1:]), dtype="u1")


def _soft_loop(file: Any, name: str, shape: Any, dtype: Any, rng: Rng) -> None:
    file[name] = h5py.SoftLink("/" + name)


def _external(file: Any, name: str, shape: Any, dtype: Any, rng: Rng) -> None:
    target = str(rng.choice(["/etc/passwd", "nowhere.h5", "/dev/zero", os.path.basename(file.filename)]))
    file[name] = h5py.ExternalLink(target, "/" + name)


def _external_storage(file: Any, name: str, shape: Any, dtype: Any, rng: Rng) -> None:
    size = int(np.prod(shape)) * dtype.itemsize
    where = str(rng.choice(["/etc/passwd", "/dev/zero", "../x"]))
    file.create_dataset(name, shape=shape, dtype=dtype, external=[(where, 0, size)])


def _virtual(file: Any, name: str, shape: Any, dtype: Any, rng: Rng) -> None:
    layout = h5py.VirtualLayout(shape, dtype)
    layout[...] = h5py.VirtualSource(str(rng.choice([".", "/etc/passwd", "gone.h5"])), name, shape)
    file.create_virtual_dataset(name, layout)


def _odd_type(file: Any, name: str, shape: Any, dtype: Any, rng: Rng) -> None:
    odd = [
        h5py.string_dtype(),
        h5py.ref_dtype,
        h5py.vlen_dtype("f4"),
        np.dtype("V7"),
        np.dtype([("a", "f4")]),
        np.dtype("S9"),
    ]
    odd += [
        h5py.opaque_dtype(np.dtype("M8[s]")),
        h5py.enum_dtype({"a": 1}),
        np.dtype(("f4", (3,))),
        np.dtype("c16"),
        np.dtype("?"),
    ]
    file.create_dataset(name, shape=shape, dtype=odd[int(rng.integers(len(odd)))])


def _odd_shape(file: Any, name: str, shape: Any, dtype: Any, rng: Rng) -> None:
    odd: list[Any] = [
        (),
        (0,),
        (0, *shape),
        (*shape, 0),
        (*shape, 1),
        shape[:-1],
        (1,) * 32,
        tuple(n + 1 for n in shape),
    ]
    file.create_dataset(name, shape=odd[int(rng.integers(len(odd)))], dtype=dtype)


def _null(file: Any, name: str, shape: Any, dtype: Any, rng: Rng) -> None:
    file[name] = h5py.Empty(dtype)


def _group_instead(file: Any, name: str, shape: Any, dtype: Any, rng: Rng) -> None:
    file.create_group(name).create_dataset("x", data=[1])


def _cycle(file: Any, name: str, shape: Any, dtype: Any, rng: Rng) -> None:
    file.create_group("loop")["again"] = file["/"]


def _deep_groups(file: Any, name: str, shape: Any, dtype: Any, rng: Rng) -> None:
    group = file
    for _ in range(3000):
        group = group.create_group("g")
    group["w"] = np.zeros(shape, dtype)


def _attribute(file: Any, name: str, shape: Any, dtype: Any, rng: Rng) -> None:
    item = [file, file[name]][int(rng.integers(2))]
    key = str(
        rng.choice([*_ATTRIBUTES, "DIMENSION_LIST", "CLASS", "NAME", "_Netcdf4Dimid", "_nc3_strict", "Type", "NSteps"])
    )
    value = [
        "\x1b[31m", "x" * 60_000, "", h5py.Empty("f4"), np.array([], "f4"), float("nan"), -1, 2**63 - 1, b"\xff\xfe",
        np.array(["a", "b"], h5py.string_dtype()), np.zeros((3, 3)), np.void(b"abc"), True, 0.0, "../../x", "lat lon",
    ][int(rng.integers(16))]  # fmt: skip
    if key in item.attrs:
        del item.attrs[key]
    item.attrs[key] = value


def _attribute_text(file: Any, name: str, shape: Any, dtype: Any, rng: Rng) -> None:
    """A text that is not UTF-8, though it says so, of fixed or variable length."""
    space = h5py.h5s.create(h5py.h5s.SCALAR)
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(4)
    kind.set_cset(h5py.h5t.CSET_UTF8)
    key = str(rng.choice(["units", "long_name", "coordinates", "standard_name", "\x1b[31m"])).encode()
    item = file[name]
    if key.decode() in item.attrs:
        del item.attrs[key.decode()]
    attribute = h5py.h5a.create(item.id, key, kind, space)
    attribute.write(np.array(b"\xff\xfe\x80a", "S4"), mtype=kind)


def _odd_name(file: Any, name: str, shape: Any, dtype: Any, rng: Rng) -> None:
    file[str(rng.choice(["\x1b[31mred", "a b", "..", "x" * 5000, "\u202e", "u\n", "[b]"]))] = np.zeros(shape, dtype)


_HDF5_BOMBS: dict[str, Callable[[Any, str, Any, Any, Rng], None]] = {
    "deflate": _deflate_bomb,
    "huge chunks": _huge_chunks,
    "huge grid": _huge_grid,
    "huge": _huge_plain,
    "soft link to itself": _soft_loop,
    "external link": _external,
    "external storage": _external_storage,
    "virtual": _virtual,
    "odd type": _odd_type,
    "odd shape": _odd_shape,
    "null": _null,
    "a group": _group_instead,
    "cycle": _cycle,
    "groups": _deep_groups,
    "attribute": _attribute,
    "attribute again": _attribute,
    "attr text": _attribute_text,
    "odd name": _odd_name,
}


def _netcdf3_bomb(tree: Tree, rng: Rng) -> Damage:
    """A length in the header: records, dimensions, counts of lists, offsets."""
    name = tree.pick(rng, [f for f in tree.data if tree.read(f)[:3] == b"CDF"])
    data = bytearray(tree.read(name))
    end = min(len(data) - 8, 1200)
    at = int(rng.choice([4, 8, 12, int(rng.integers(1, end // 4)) * 4]))
    width = int(rng.choice([4, 8]))
    data[at : at + width] = (int(rng.choice([2**31 - 1, 2**31, 2**32 - 2, 2**28, 2**63 - 8])) % 256**width).to_bytes(
        width, "big"
    )
    tree.write(name, bytes(data))
    return Damage(text=f"{name}: a huge number at {at}")


def _xml_bomb(tree: Tree, rng: Rng) -> Damage:
    name = tree.seed.targets[0]
    text = tree.read(name).decode("utf-8", "replace")
    head, _, rest = text.partition("?>") if text.startswith("<?xml") else ("", "", text)
    rest = re.sub(r"<!DOCTYPE[^>]*>", "", rest, count=1)
    kind = str(rng.choice(["laughs", "external", "deep", "path", "dims", "wide"]))
    if kind == "laughs":
        entities = '<!ENTITY a0 "ha ha ha ha ha ha ha ha ">' + "".join(
            f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 10)
        )
        rest = f"<!DOCTYPE z [{entities}]>" + re.sub(r">([^<>]*\d[^<>]*)</", ">&a9;</", rest, count=1)
    elif kind == "external":
        rest = '<!DOCTYPE z [<!ENTITY x SYSTEM "file:///etc/passwd">]>' + re.sub(
            r">([^<>]*\d[^<>]*)</", ">&x;</", rest, count=1
        )
    elif kind == "deep":
        rest = re.sub(r"(</\w+>\s*)$", "<a>" * 20_000 + "</a>" * 20_000 + r"\1", rest)
    elif kind == "wide":
        rest = re.sub(r"(</\w+>\s*)$", lambda m: "<Grid/>" * 50_000 + m.group(1), rest)
    elif kind == "path":
        where = str(
            rng.choice(["/etc/passwd", "../outside/x", "/dev/zero", "nowhere.h5:/data0", "m.h5:/../..", "m.h5:/gone"])
        )
        rest = re.sub(r"m\.h5:/?\w+", where, rest, count=1) if "m.h5" in rest else rest.replace("XML", "HDF", 1)
    else:
        rest = re.sub(
            r'="(\d+)', lambda m: f'="{int(rng.choice([2**31, 2**40, 10**18, 0]))}', rest, count=int(rng.integers(1, 3))
        )
    tree.write(name, (f"{head}?>{rest}" if head else rest).encode())
    return Damage(text=f"{name}: XML, {kind}")


def _text_bomb(tree: Tree, rng: Rng) -> Damage:
    name = tree.seed.targets[0]
    data = tree.read(name)
    numbers = list(re.finditer(rb"(?<=[ \n\"])\d+(?=[ \n\"])", data))
    match = numbers[int(rng.integers(min(30, len(numbers))))]
    new = str(rng.choice([10**9, 10**11, 2**31, 2**40, 2**63, 10**30])).encode()
    tree.write(name, data[: match.start()] + new + data[match.end() :])
    return Damage(text=f"{name}: {match.group()!r} at {match.start()} is {new!r}")


def _numpy_bomb(tree: Tree, rng: Rng) -> Damage:
    """Give an array of NumPy's a shape that is far larger, in a header of the same length."""
    name = tree.seed.targets[0]
    data = tree.read(name)
    shapes = list(re.finditer(rb"'shape': \((\d+)([^}]*}) {16}", data))
    if not shapes:
        return integer(tree, rng)  # the headers are compressed, too
    match = shapes[int(rng.integers(len(shapes)))]
    new = b"9" * int(rng.integers(3, 17))
    head = b"'shape': (" + new + match.group(2)
    tree.write(name, data[: match.start()] + head.ljust(len(match.group())) + data[match.end() :])
    return Damage(text=f"{name}: {match.group(1)!r} rows at {match.start()} are {new!r}")


def bomb(tree: Tree, rng: Rng) -> Damage:
    """Metadata, or a compressed chunk, that claim gigabytes, and other abuse of what the format allows."""
    heads = {name: tree.read(name)[:8] for name in tree.data}
    if tree.metadata:
        return _zarr_bomb(tree, rng)
    if tree.seed.format in ("vtu", "vtp", "xdmf") and (_HDF5 not in heads.values() or rng.random() < 0.7):
        return _xml_bomb(tree, rng)
    if tree.seed.format in ("vtk", "gmsh"):
        return _text_bomb(tree, rng)
    if tree.seed.format == "numpy":
        return _numpy_bomb(tree, rng)
    if tree.seed.format in ("foam", "cgns") and _HDF5 not in heads.values():
        return _tokens(tree, rng) if tree.seed.name == "foam/ascii" else integer(tree, rng)
    return _hdf5_bomb(tree, rng) if _HDF5 in heads.values() else _netcdf3_bomb(tree, rng)


def words(tree: Tree, rng: Rng) -> Damage:
    """Metadata of whichever form: JSON, words of texts, numbers and structures of binary files."""
    if tree.metadata:
        return metadata(tree, rng)
    if tree.seed.format in ("vtu", "vtp", "vtk", "gmsh", "xdmf", "foam"):
        return _tokens(tree, rng)
    return bomb(tree, rng) if rng.random() < 0.7 else integer(tree, rng)


Mutation = Callable[[Tree, Rng], Damage]

#: By name, and how often of each hundred.
MUTATIONS: dict[str, tuple[Mutation, int]] = {
    "bit": (flip, 10),
    "bits": (flips, 6),
    "header bits": (flip_header, 8),
    "index bits": (flip_index, 10),
    "integer": (integer, 10),
    "run": (run, 5),
    "cut": (cut, 6),
    "append": (append, 3),
    "insert": (insert, 3),
    "exchange": (exchange, 7),
    "delete": (delete, 3),
    "duplicate": (duplicate, 3),
    "metadata": (words, 16),
    "link": (link, 4),
    "bomb": (bomb, 6),
}


def choose(rng: Rng) -> str:
    """Return the name of a mutation."""
    weights = np.array([weight for _, weight in MUTATIONS.values()], float)
    return str(rng.choice(list(MUTATIONS), p=weights / weights.sum()))


def damage(root: str, seed: Seed, name: str, rng: Rng) -> Damage:
    """Change a private copy of a seed's files."""
    return MUTATIONS[name][0](Tree(root, seed), rng)
