"""Reads a file of ``torch.save`` in a process of its own: ``python torch_worker.py PATH FOLDER``.

Imports nothing of scidata. By ``weights_only``, so that nothing in the file is run: tensors, and PyTorch Geometric's
containers of them where that is installed. The folder gets an array a file, and ``arrays.json``, which says what they
are called; or ``error``.
"""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch


def _allow_geometric() -> Any:
    """Let ``torch.load`` make PyTorch Geometric's containers; return its package, None where it is not installed."""
    try:
        import torch_geometric.data as data
        from torch_geometric.data import data as parts
        from torch_geometric.data import storage
    except ImportError:
        return None
    known = [data.Data, data.HeteroData, parts.DataEdgeAttr, parts.DataTensorAttr]
    known += [storage.BaseStorage, storage.GlobalStorage, storage.NodeStorage, storage.EdgeStorage]
    torch.serialization.add_safe_globals(known)
    return data


def _samples(found: Any, geometric: Any) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield what the file holds: one sample without a name, or several by number."""
    if isinstance(found, tuple) and len(found) in (2, 3) and isinstance(found[1], Mapping) and geometric is not None:
        from torch_geometric.data.separate import separate  # what InMemoryDataset.save writes: all samples in one

        whole = geometric.Data.from_dict(found[0]) if isinstance(found[0], Mapping) else found[0]
        lengths = {len(bounds) - 1 for bounds in found[1].values()}
        for i in range(max(lengths, default=0)):
            yield str(i), _arrays(separate(type(whole), whole, i, found[1], decrement=False))
    elif isinstance(found, Sequence) and not isinstance(found, str) and found and not _is_number(found[0]):
        for i, each in enumerate(found):
            yield str(i), _arrays(each)
    else:
        yield "", _arrays(found)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | str)


def _arrays(sample: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of one sample: a graph's by entity, as far as it knows."""
    if isinstance(sample, torch.Tensor):
        return {"data": sample}
    if isinstance(sample, Mapping):
        return {str(name): value for name, value in sample.items() if isinstance(value, torch.Tensor)}
    if hasattr(sample, "edge_types"):
        return _arrays_of_sets(sample)
    if not hasattr(sample, "is_node_attr"):
        raise TypeError(f"holds {type(sample).__name__}, not tensors, dicts of tensors or PyTorch Geometric's Data")
    found = {}
    for name in sample.keys():  # noqa: SIM118 - it is no mapping
        value = sample[name]
        if not isinstance(value, torch.Tensor):
            continue
        if name == "face":
            found["cells"] = value.T
        elif name in ("edge_index", "pos"):
            found[name] = value
        else:
            group = "node/" if sample.is_node_attr(name) else "edge/" if sample.is_edge_attr(name) else ""
            found[group + name] = value
    return found


def _arrays_of_sets(sample: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a graph between node sets, in groups as ``scidata/meshes/formats/hetero.py`` has them."""
    found: dict[str, torch.Tensor] = {}
    for name in sample.node_types:
        store = sample[name]
        found |= {f"nodes/{name}/{key}": value for key, value in store.items() if isinstance(value, torch.Tensor)}
        if store.num_nodes is not None:
            found[f"nodes/{name}/num_nodes"] = torch.tensor([store.num_nodes])
    for parts in sample.edge_types:
        group = "__".join(parts)
        found |= {f"edges/{group}/{key}": v for key, v in sample[parts].items() if isinstance(v, torch.Tensor)}
    return found


def _reason(error: Exception) -> str:
    """Say in one line what was wrong: torch's own text has many, on how to load the file all the same."""
    unknown = re.search(r"GLOBAL (\S+) was not an allowed global", str(error))
    if unknown is not None:
        return f"it holds a {unknown.group(1)}"
    if "created by an older version of PyG" in str(error):  # its own advice is for data sets that it made itself
        return (
            "it holds PyTorch Geometric's Data as versions before 2.0 wrote it; where you trust the file, load it with "
            "the version that wrote it, and torch.save the dict of its tensors, {key: value for key, value in data}"
        )
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def main(path: str, folder: str) -> None:
    """Read one file."""
    geometric = _allow_geometric()
    try:
        made: dict[str, str] = {}
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        for sample, arrays in _samples(loaded, geometric):
            for name, tensor in arrays.items():
                full = f"{sample}/{name}" if sample else name
                values = tensor.detach()
                values = values.float() if values.dtype is torch.bfloat16 else values.resolve_conj().resolve_neg()
                made[full] = f"{len(made)}.npy"
                np.save(os.path.join(folder, made[full]), values.to_dense().numpy(), allow_pickle=False)
        text, name = json.dumps(made), "arrays.json"
    except Exception as e:
        text, name = _reason(e), "error"
    with open(os.path.join(folder, name), "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
