"""Reads a file of ``torch.save`` in a process of its own: ``python torch_worker.py PATH FOLDER``.

Imports nothing of scidata. By ``weights_only``, so that nothing in the file is run: tensors, and PyTorch Geometric's
containers of them where that is installed. The folder gets an array a file, and ``arrays.json``, which has their
names; or ``error``, of a file that is not read, or ``damage``.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import re
import resource
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from torch_geometric.data import HeteroData
    from torch_geometric.data.data import BaseData
    from torch_geometric.data.storage import BaseStorage

_RATIO, _SLACK = 16, 1 << 28  # how much larger than the file its values may be
_FOR_TORCH = 4 << 30  # bytes of memory that reading takes at most, beside values


class DamagedError(Exception):
    """A file that is not as ``torch.save`` left it."""


def check_archive(path: str) -> int:
    """Compare the checksums of all entries, where ``torch.save`` wrote any; return how large the values may be.

    All of the file is read for the values anyway, so that this costs a second pass over memory.
    """
    most = _RATIO * os.path.getsize(path) + _SLACK
    if not zipfile.is_zipfile(path):  # of before version 1.6, which had no checksums
        return most
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if (total := sum(entry.file_size for entry in entries)) > most:
            raise DamagedError(f"its entries claim {total} bytes, far more than the file has")
        if any(entry.CRC for entry in entries) and (bad := archive.testzip()) is not None:
            raise DamagedError(f"entry {bad!r} does not match its checksum")
    return most


def _geometric() -> ModuleType | None:
    """Import PyTorch Geometric's containers, which takes longer than torch; None where it is not installed."""
    try:
        return importlib.import_module("torch_geometric.data")
    except ImportError:
        return None


def _load(path: str) -> object:
    """Load a file; one that holds PyTorch Geometric's containers fails at first, and again where that is missing."""
    load = partial(torch.load, path, map_location="cpu", weights_only=True)
    try:
        return load()
    except pickle.UnpicklingError as e:
        if "GLOBAL torch_geometric." not in str(e) or (data := _geometric()) is None:
            raise
    from torch_geometric.data import data as parts
    from torch_geometric.data import storage

    known = [data.Data, data.HeteroData, parts.DataEdgeAttr, parts.DataTensorAttr]
    known += [storage.BaseStorage, storage.GlobalStorage, storage.NodeStorage, storage.EdgeStorage]
    with torch.serialization.safe_globals(known):
        return load()


class _Array(NamedTuple):
    """A tensor, the entity that it has a row for each of and along which dim, and whether it is the bytes of JSON."""

    tensor: torch.Tensor
    entity: str | None = None
    dim: int = 0
    is_json: bool = False


def _samples(found: object) -> Iterator[tuple[str, dict[str, _Array | str]]]:
    """Yield the samples of the file: one without a name, or several by number."""
    if isinstance(found, tuple) and len(found) in (2, 3) and isinstance(found[1], Mapping) and (pyg := _geometric()):
        from torch_geometric.data.separate import separate  # of InMemoryDataset.save, which joins all samples

        whole = pyg.Data.from_dict(found[0]) if isinstance(found[0], Mapping) else found[0]
        lengths = {len(bounds) - 1 for bounds in found[1].values()}
        for i in range(max(lengths, default=0)):
            yield str(i), _arrays(separate(type(whole), whole, i, found[1], decrement=False))
    elif isinstance(found, Sequence) and found and not isinstance(found[0], int | float | str):  # of a text, too
        for i, each in enumerate(found):
            yield str(i), _arrays(each)
    else:
        yield "", _arrays(found)


def _arrays(sample: Any) -> dict[str, _Array | str]:
    """Return the tensors of one sample, a graph's by entity; for attributes left out, the reason."""
    if isinstance(sample, torch.Tensor):
        return {"data": _Array(sample)}
    if isinstance(sample, Mapping):
        found = {str(name): _Array(value) for name, value in sample.items() if isinstance(value, torch.Tensor)}
        if isinstance(number := sample.get("num_nodes"), int):
            found["num_nodes"] = _Array(torch.tensor(number))
        return {**found}
    if hasattr(sample, "edge_types"):
        return _arrays_of_sets(sample)
    if not hasattr(sample, "is_node_attr"):
        raise TypeError(f"holds {type(sample).__name__}, not tensors, dicts of tensors or PyTorch Geometric's Data")
    keys = set(sample.keys())
    if {"x_s", "x_t"} <= keys and "num_nodes" not in keys:
        raise ValueError("x_s and x_t make it a graph between two node sets, which is kept as a HeteroData")
    own: dict[str, _Array | str] = {}
    own |= _of_store(sample, sample, ("node/", "edge/", "graph/"), given=("face", "edge_index", "pos"))
    if "face" in keys:
        own["cells"] = _Array(sample.face.T)
    own |= {name: _Array(sample[name]) for name in ("edge_index", "pos") if name in keys}
    if sample.num_nodes is not None:
        own["num_nodes"] = _Array(torch.tensor(sample.num_nodes))
    return own


def _of_store(
    store: BaseStorage, whole: BaseData, groups: tuple[str, str, str], given: Sequence[str]
) -> Iterator[tuple[str, _Array | str]]:
    """Yield the attributes of a ``Data``, a set or a relation, in three groups: nodes, edges, neither in PyG's eyes."""
    for name in store.keys():  # noqa: SIM118 - it is no mapping
        value = store[name]
        if name in given or name == "num_nodes" or value is None:
            continue
        if not isinstance(value, torch.Tensor):
            yield f"{groups[2]}{name}", _as_json(value)
        elif ("index" in name or name == "face") and not value.is_floating_point():
            yield f"{groups[2]}{name}", "numbers nodes by its name (PyG), which have other numbers in a store"
        elif store.is_node_attr(name) or store.is_edge_attr(name):
            entity = int(store.is_edge_attr(name))
            dim = whole.__cat_dim__(name, value, store) % value.ndim
            yield f"{groups[entity]}{name}", _Array(value, ("node", "edge")[entity], dim)
        else:
            yield f"{groups[2]}{name}", _Array(value)


def _as_json(value: object) -> _Array | str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return f"holds {type(value).__name__}, neither a tensor nor what JSON has"
    return _Array(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), is_json=True)


def _arrays_of_sets(sample: HeteroData) -> dict[str, _Array | str]:
    """Return the tensors of a graph between node sets, in groups as ``scidata/meshes/formats/hetero.py`` has them."""
    found: dict[str, _Array | str] = {}
    for name in sample.node_types:
        store = sample[name]
        found |= _of_store(store, sample, (f"nodes/{name}/", "", f"graph/{name}/"), given=("pos",))
        if isinstance(store.get("pos"), torch.Tensor):
            found[f"nodes/{name}/pos"] = _Array(store.pos)
        if store.num_nodes is not None:
            found[f"nodes/{name}/num_nodes"] = _Array(torch.tensor([store.num_nodes]))
    for parts in sample.edge_types:
        group = "__".join(parts)
        found |= _of_store(sample[parts], sample, ("", f"edges/{group}/", f"graph/{group}/"), given=("edge_index",))
        found[f"edges/{group}/edge_index"] = _Array(sample[parts].edge_index)
    for name, value in sample.stores[0].items():  # of the whole
        found[f"graph/{name}"] = _Array(value) if isinstance(value, torch.Tensor) else _as_json(value)
    return found


def _reason(error: Exception) -> str:
    """Return an error's message in one line; torch's own has many, on how to load the file all the same."""
    unknown = re.search(r"GLOBAL (\S+) was not an allowed global", str(error))
    if unknown is not None:
        return f"it holds a {unknown.group(1)}"
    if "created by an older version of PyG" in str(error):  # its own advice is for data sets that it made itself
        return (
            "it holds PyTorch Geometric's Data as versions before 2.0 wrote it; where you trust the file, load it with "
            "the version that wrote it, and torch.save the dict of its tensors, {key: value for key, value in data}"
        )
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def write_arrays(path: str, folder: str, most: int) -> None:
    """Write the arrays of a file, of at most so many bytes together, and ``arrays.json``."""
    made: dict[str, dict[str, object]] = {}
    left_out: dict[str, str] = {}
    for sample, arrays in _samples(_load(path)):
        for name, array in arrays.items():
            full = f"{sample}/{name}" if sample else name
            if isinstance(array, str):
                left_out[full] = array
                continue
            tensor = array.tensor
            most -= tensor.numel() * tensor.element_size()
            if most < 0:
                raise ValueError(
                    f"tensor {full!r} of shape {tuple(tensor.shape)} stands for far more values than the file has "
                    "(it is sparse, or expanded): save less of it"
                )
            values = tensor.detach()
            values = values.float() if values.dtype is torch.bfloat16 else values.resolve_conj().resolve_neg()
            file = f"{len(made)}.npy"
            np.save(os.path.join(folder, file), values.to_dense().numpy(), allow_pickle=False)
            made[full] = {"file": file, "entity": array.entity, "dim": array.dim, "is_json": array.is_json}
    _write(folder, "arrays.json", json.dumps({"arrays": made, "left_out": left_out}))


def _write(folder: str, name: str, text: str) -> None:
    with open(os.path.join(folder, name), "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def _limit(kind: int, most: int) -> None:
    """Lower a limit of this process; one that is lower stays."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main(path: str, folder: str) -> None:
    """Read one file."""
    try:
        most = check_archive(path)
        _limit(resource.RLIMIT_DATA, most + _FOR_TORCH)
        write_arrays(path, folder, most)
    except (DamagedError, zipfile.BadZipFile) as e:
        _write(folder, "damage", str(e))
    except Exception as e:
        _write(folder, "error", _reason(e))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
