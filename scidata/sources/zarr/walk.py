"""Find every array of a Zarr store: from consolidated metadata if there is some, else folder by folder."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from scidata.errors import RefusedError, UnsupportedFormatError
from scidata.sources.pointers import check_pointer
from scidata.sources.zarr.metadata import ArrayRecord, parse_v2, parse_v3
from scidata.sources.zarr.tree import Tree
from scidata.sources.zarr.values import text_as_bytes

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # half of a character, as JSON spells it
_T = TypeVar("_T")
#: Documents at the top of a store: of those before others, the first that is there tells all (behind a URL each takes a
#: request).
_TOP = (("zarr.json",), (".zmetadata",), (".zarray", ".zgroup", ".zattrs"))
_MAX_NODES = 200_000  # links can make a small folder look like an endless one


@dataclass(kw_only=True)
class Contents:
    """Contents of a store: records of the arrays that can be read, errors of those that cannot, by name.

    ``texts``: of errors, arrays of text, as if their values were bytes.
    ``pending`` is the tree whose arrays have not been looked for: :meth:`find` reads one, :meth:`complete` all.
    """

    format: str
    attributes: dict[str, object]
    records: dict[str, ArrayRecord] = field(default_factory=dict)
    errors: dict[str, UnsupportedFormatError | RefusedError] = field(default_factory=dict)
    texts: dict[str, ArrayRecord] = field(default_factory=dict)
    pending: Tree | None = None

    def add(self, name: str, parse: Callable[..., ArrayRecord], *meta: object, store: str, prefix: str) -> None:
        """Parse one array; one that is not understood does not keep the others from being read."""
        try:
            self.records[name] = parse(*meta, store=store, name=name, prefix=prefix)
        except (UnsupportedFormatError, RefusedError) as e:
            self.errors[name] = e
            if (text := text_as_bytes(meta[0])) is not None:
                with contextlib.suppress(UnsupportedFormatError, RefusedError):
                    self.texts[name] = parse(text, *meta[1:], store=store, name=name, prefix=prefix)

    def add_nodes(self, nodes: Mapping[str, dict[str, Any]], store: str) -> None:
        """Parse nodes in their order, those that are arrays."""
        for name, node in sorted(nodes.items(), key=lambda item: item[0].split("/")):
            if self.format == "zarr2":
                self.add(name, parse_v2, node["array"], node["attributes"], store=store, prefix=name)
            elif node.get("node_type") == "array":
                self.add(name, parse_v3, node, store=store, prefix=name)

    def find(self, name: str, store: str) -> None:
        """Read the metadata of one array at the top, if there is one, and arrays have not been looked for."""
        if self.pending is None or name in self.errors or "/" in name or name in ("", ".", ".."):
            return
        read = _nodes_v3 if self.format == "zarr3" else _nodes_v2
        self.add_nodes(read(self.pending, [name])[0], store)

    def complete(self, store: str) -> None:
        """Read the metadata of all arrays, if they have not been looked for."""
        if self.pending is not None:
            whole = Contents(format=self.format, attributes=self.attributes)
            whole.add_nodes(_levels(self.pending, _nodes_v3 if self.format == "zarr3" else _nodes_v2), store)
            self.records, self.errors, self.pending = whole.records | self.records, whole.errors, None
            self.texts = whole.texts


def read_json(raw: bytes, where: str) -> dict[str, object]:
    """Parse a JSON object, or raise UnsupportedFormatError."""
    try:
        text = raw.decode("utf-8-sig")
        value = json.loads(text)
        if _SURROGATE.search(text):  # a pair is one character; a half is none, and cannot be written anywhere
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:  # ValueError: bad JSON and bad UTF-8
        check_pointer(raw, where)
        raise UnsupportedFormatError(
            f"{where}: not valid JSON in UTF-8 ({type(e).__name__}, {len(raw)} bytes); "
            "the file is truncated or damaged: copy or write it again"
        ) from e
    return _entry(value, where)


def checked_node(key: str, where: str) -> str:
    """Refuse a path in consolidated metadata that names anything but a folder below the store."""
    parts = key.split("/")
    if any(p in ("", ".", "..") for p in parts) or "\0" in key or "\\" in key:
        raise RefusedError(f"{where}: metadata names the node {key!r}, which is not a path inside the store")
    return key


def _entry(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise UnsupportedFormatError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def _levels(
    tree: Tree, read: Callable[[Tree, list[str]], tuple[dict[str, dict[str, Any]], list[str]]]
) -> dict[str, dict[str, Any]]:
    nodes: dict[str, dict[str, Any]] = {}
    groups, seen = [""], 0
    while groups:
        folders = [child for group in groups for child in tree.folders(group)]
        seen += len(folders)
        if seen > _MAX_NODES:
            raise UnsupportedFormatError(f"{tree.location('')}: more than {_MAX_NODES} folders; open a group of it")
        found, groups = read(tree, folders)
        nodes |= found
    return nodes


def _own_name(tree: Tree) -> str:
    return tree.location("").rstrip("/").rpartition("/")[2] or "array"


# -- v3 -------------------------------------------------------------------------------------------------------------


def _consolidated_v3(meta: Mapping[str, object], where: str, prefix: str = "") -> dict[str, dict[str, object]] | None:
    holder = meta.get("consolidated_metadata")
    if not isinstance(holder, dict) or holder.get("kind") != "inline" or not isinstance(holder.get("metadata"), dict):
        return None
    nodes = {}
    for key, value in holder["metadata"].items():
        name = prefix + checked_node(key, where)
        nodes[name] = _entry(value, f"{where}: node {name!r}")
        nodes.update(_consolidated_v3(nodes[name], where, name + "/") or {})
    return nodes


def _nodes_v3(tree: Tree, folders: list[str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    nodes = {
        key.removesuffix("/zarr.json"): read_json(raw, tree.location(key))
        for key, raw in tree.get([f"{f}/zarr.json" for f in folders]).items()
    }
    return nodes, [name for name, node in nodes.items() if node.get("node_type") == "group"]


def _find_v3(tree: Tree, store: str, raw: bytes, *, lazily: bool) -> Contents:
    where = tree.location("zarr.json")
    meta = read_json(raw, where)
    kind = meta.get("node_type")
    if meta.get("zarr_format") != 3 or kind not in ("array", "group"):
        raise UnsupportedFormatError(
            f"{where}: zarr_format {meta.get('zarr_format')!r} and node_type {kind!r}; expected 3 and 'group' or "
            "'array'; is this a Zarr store?"
        )
    if kind == "array":
        contents, name = Contents(format="zarr3", attributes={}), _own_name(tree)
        contents.add(name, parse_v3, meta, store=store, prefix="")
        return contents
    contents = Contents(format="zarr3", attributes=_entry(meta.get("attributes") or {}, f"{where}: attributes"))
    nodes = _consolidated_v3(meta, where)
    if nodes is None and lazily:
        contents.pending = tree
    else:
        contents.add_nodes(_levels(tree, _nodes_v3) if nodes is None else nodes, store)
    return contents


# -- v2 -------------------------------------------------------------------------------------------------------------


def _consolidated_v2(metadata: Mapping[str, object], where: str) -> dict[str, dict[str, object]]:
    nodes = {}
    for key, value in metadata.items():
        if key.endswith("/.zarray"):
            name = checked_node(key.removesuffix("/.zarray"), where)
            nodes[name] = {"array": _entry(value, f"{where}: {key}"), "attributes": metadata.get(f"{name}/.zattrs")}
    return nodes


def _nodes_v2(tree: Tree, folders: list[str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    nodes: dict[str, dict[str, Any]] = {}
    found = tree.get([f"{f}/{file}" for f in folders for file in (".zarray", ".zattrs")])
    others = [f"{f}/.zgroup" for f in folders if f"{f}/.zarray" not in found]
    found |= tree.get(others)
    for folder in folders:
        if f"{folder}/.zarray" in found:
            array, attributes = (
                read_json(found[k], tree.location(k)) if k in found else None
                for k in (f"{folder}/.zarray", f"{folder}/.zattrs")
            )
            nodes[folder] = {"array": array, "attributes": attributes}
    return nodes, [f for f in folders if f"{f}/.zgroup" in found and f not in nodes]


def _find_v2(tree: Tree, store: str, found: Mapping[str, bytes], *, lazily: bool) -> Contents:
    loaded = {key: read_json(raw, tree.location(key)) for key, raw in found.items() if key != ".zgroup"}
    if ".zmetadata" in loaded:
        where = tree.location(".zmetadata")
        metadata = _entry(loaded[".zmetadata"].get("metadata"), f"{where}: metadata")
        loaded |= {key: _entry(metadata[key], f"{where}: {key}") for key in (".zarray", ".zattrs") if key in metadata}
    if ".zarray" in loaded:
        contents, name = Contents(format="zarr2", attributes={}), _own_name(tree)
        contents.add(name, parse_v2, loaded[".zarray"], loaded.get(".zattrs"), store=store, prefix="")
        return contents
    contents = Contents(format="zarr2", attributes=loaded.get(".zattrs", {}))
    if ".zmetadata" in loaded:
        contents.add_nodes(_consolidated_v2(metadata, where), store)
        return contents
    read_json(found[".zgroup"], tree.location(".zgroup"))
    if lazily:
        contents.pending = tree
    else:
        contents.add_nodes(_levels(tree, _nodes_v2), store)
    return contents


def _find_named(tree: Tree, store: str, names: Sequence[str]) -> Contents:
    keys = {name: f"{checked_node(name, store)}/zarr.json" for name in names}
    found = tree.get(["zarr.json", *keys.values()])
    if "zarr.json" not in found:
        raise FileNotFoundError(f"{store}: there is no zarr.json; the store is incomplete: write it again")
    meta = read_json(found["zarr.json"], tree.location("zarr.json"))
    contents = Contents(format="zarr3", attributes=_entry(meta.get("attributes") or {}, f"{store}: attributes"))
    for name, key in keys.items():
        if key in found:
            contents.add(name, parse_v3, read_json(found[key], tree.location(key)), store=store, prefix=name)
    return contents


def find_arrays(tree: Tree, store: str, names: Sequence[str] | None = None, *, lazily: bool = False) -> Contents:
    """Describe every array below ``tree``, which is a group or an array; v3 where both formats are there.

    ``names`` are those that a v3 group is known to have: no folder is listed then, which a web server cannot.
    ``lazily`` leaves the arrays of a group without consolidated metadata to :meth:`Contents.find`. Raises
    FileNotFoundError: there is nothing at the path; UnsupportedFormatError: no Zarr metadata, or a metadata file that
    is not JSON (named); RefusedError: a link or a name in the metadata that leads out of the store.
    """
    if names is not None:
        return _find_named(tree, store, names)
    found: dict[str, bytes] = {}
    for keys in _TOP:
        found = found or tree.get(keys)
    if "zarr.json" in found:
        return _find_v3(tree, store, found["zarr.json"], lazily=lazily)
    if found.keys() & {".zarray", ".zgroup", ".zmetadata"}:
        return _find_v2(tree, store, found, lazily=lazily)
    if not tree.exists():
        raise FileNotFoundError(f"{store}: there is no such store; check the path")
    raise UnsupportedFormatError(
        f"{store}: found none of zarr.json, .zgroup, .zarray, .zmetadata; is this the store's top folder?"
    )
