"""Reads a file of ``torch.save``, or of DGL, in a process of its own: ``python torch_worker.py PATH FOLDER``.

Imports nothing of scidata. By ``weights_only``, so that nothing in the file is run: tensors, and PyTorch Geometric's
containers of them if that is installed. The folder gets ``arrays.npy``, one array after the other, and
``arrays.json``, which has their names; or ``error``, of a file that is not read, or ``damage``.
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
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from torch_geometric.data import HeteroData
    from torch_geometric.data.data import BaseData
    from torch_geometric.data.storage import BaseStorage

DGL = bytes.fromhex("3fa1b446f04f2edd")  # what its save_graphs begins with
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
    """Import PyTorch Geometric's containers, which takes longer than torch; None if it is not installed."""
    try:
        return importlib.import_module("torch_geometric.data")
    except ImportError:
        return None


def _batch_of(cls: Any, base: Any) -> Any:
    """Return an empty ``Batch``, as its pickle asks for; of graphs of a subclass of ``Data``, of ``Data``."""
    from torch_geometric.data import Batch, Data, HeteroData

    return Batch(_base_cls=HeteroData if base is HeteroData else Data)


class _BatchMaker:
    """Stands for the object that a ``Batch`` pickles to be made by."""

    def __new__(cls) -> Any:
        return _batch_of


def _never_called(self: object, *args: Any, **kwargs: Any) -> None:
    """Begin an object of a class that pickle makes without it, from their state: a file may ask for any call."""
    raise pickle.UnpicklingError(f"calls {type(self).__name__}")


def _load(path: str) -> object:
    """Load a file; one that holds PyTorch Geometric's containers fails at first, and again if that is missing.

    Subclasses of ``Data`` are read as ``Data``: none of their code is there to be run.
    """
    load = partial(torch.load, path, map_location="cpu", weights_only=True)
    known: list[Any] = []
    refused: Exception | None = None
    while True:
        try:
            with torch.serialization.safe_globals(known):
                found: object = load()
        except pickle.UnpicklingError as e:
            unknown = re.search(r"GLOBAL (\S+) was not an allowed global", str(e))
            if unknown is None or (data := _geometric()) is None:
                raise refused or e from None
            name = unknown[1]
            if not known:
                known = _containers(data)
            elif not name.startswith(("torch", "numpy", "builtins.")) and all(name != each[1] for each in known):
                known.append((type(name.rpartition(".")[2], (data.Data,), {"__init__": _never_called}), name))
            else:
                raise
            refused = e
        else:
            break
    own = tuple(each for each, _ in known if getattr(each, "__init__", None) is _never_called)
    several = found if isinstance(found, Sequence) and not isinstance(found, str) else [found]
    strange = any(isinstance(each, own) and "_store" not in vars(each) for each in several)
    if refused and own and (strange or isinstance(found, Mapping)):
        raise refused  # other objects than graphs
    return found


class _Dtype:
    """Stands for NumPy's dtype, of numbers as OGB's counts of nodes."""

    def __init__(self, code: str, *_: object) -> None:
        self.dtype = np.dtype(code)

    def __setstate__(self, state: Sequence[Any]) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


def _scalar(of: _Dtype, data: bytes) -> Any:
    """Return a number that NumPy has pickled."""
    return np.frombuffer(data, of.dtype)[0].item()


def _containers(data: ModuleType) -> list[tuple[Any, str]]:
    from torch_geometric.data import data as parts
    from torch_geometric.data import storage

    batches = [type(data.Batch(_base_cls=base)) for base in (data.Data, data.HeteroData)]
    known = [data.Data, data.HeteroData, data.Batch, parts.DataEdgeAttr, parts.DataTensorAttr, *batches]
    known += [storage.BaseStorage, storage.GlobalStorage, storage.NodeStorage, storage.EdgeStorage]
    stands: list[tuple[Any, str]] = [(_BatchMaker, "torch_geometric.data.batch.DynamicInheritanceGetter")]
    stands += [(_batch_of, "_batch_of"), (_Dtype, "numpy.dtype")]
    stands += [(_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    return [*stands, *((each, f"{each.__module__}.{each.__qualname__}") for each in known)]


class _Array(NamedTuple):
    """A tensor, the entity that it has a row for each of and along which dim, and whether it is the bytes of JSON."""

    tensor: torch.Tensor
    entity: str | None = None
    dim: int = 0
    is_json: bool = False


#: Arrays by name; for attributes that are left out, the reason.
_Arrays: TypeAlias = dict[str, _Array | str]


def _samples(found: object) -> Iterator[tuple[str, _Arrays]]:
    """Yield the samples of the file: one without a name, or several by number."""
    is_numbered = True
    if isinstance(found, tuple) and len(found) in (2, 3, 4) and (found[1] is None or isinstance(found[1], Mapping)):
        several, is_numbered = _separated(found[0], found[1]), found[1] is not None  # of InMemoryDataset and TUDataset
    elif isinstance(found, Sequence) and found and not isinstance(found[0], int | float | str):  # of a text, too
        several = [graph for each in found for graph in (_split(each) or [each])]
    else:
        several = _split(found)
        is_numbered = bool(several)
    graphs = [_with_sets(each) for each in (several or [found])]
    entities = _entities(graphs)
    for i, graph in enumerate(graphs):
        yield (str(i) if is_numbered else ""), _arrays(graph, entities)


def _of_dgl(path: str) -> Iterator[tuple[str, _Arrays]]:
    """Yield the graphs of a file of DGL by number; a value of a graph for each of the file's labels."""
    os.environ["DGLBACKEND"] = "pytorch"  # else it writes a configuration into the home folder
    dgl: Any = importlib.import_module("dgl")
    graphs, labels = dgl.load_graphs(path)
    for i, graph in enumerate(graphs):
        several = len(graph.ntypes) > 1 or len(graph.etypes) > 1
        found: _Arrays = {f"graph/{name}": _Array(values[i]) for name, values in labels.items()}
        for kind in graph.ntypes:
            group = f"nodes/{kind}/" if several else "node/"
            found[f"{group}num_nodes" if several else "num_nodes"] = _Array(torch.tensor([graph.num_nodes(kind)]))
            found |= {f"{group}{name}": _Array(x, "node") for name, x in graph.nodes[kind].data.items()}
        for kind in graph.canonical_etypes:
            group = f"edges/{'__'.join(kind)}/" if several else "edge/"
            pairs = torch.stack(graph.edges(etype=kind, order="eid")).long()
            found[f"{group}edge_index" if several else "edge_index"] = _Array(pairs)
            found |= {f"{group}{name}": _Array(x, "edge") for name, x in graph.edges[kind].data.items()}
        yield str(i) if len(graphs) > 1 else "", found


def _separated(joined: Any, slices: Mapping[str, Any] | None) -> list[Any]:
    """Return the graphs that ``InMemoryDataset`` has joined; a single one has no slices."""
    pyg = _geometric()
    whole = pyg.Data.from_dict(joined) if pyg is not None and isinstance(joined, Mapping) else joined
    if isinstance(joined, Mapping) and pyg is not None and any(isinstance(name, tuple) for name in joined):
        whole = pyg.HeteroData.from_dict(joined)
    if slices is None:
        return [whole]
    from torch_geometric.data.separate import separate

    bounds = list(slices.values())
    if hasattr(whole, "edge_types"):  # by set and relation
        bounds = [each for of in bounds for each in (of.values() if isinstance(of, Mapping) else [of])]
    num = max((len(each) - 1 for each in bounds if each is not None), default=0)
    return [separate(type(whole), whole, i, slices, decrement=False) for i in range(num)]


def _split(found: Any) -> list[Any]:
    """Return the graphs of a ``Batch``; none of anything else."""
    return found.to_data_list() if hasattr(found, "to_data_list") and hasattr(found, "_slice_dict") else []


def _with_sets(graph: Any) -> Any:
    """Return a ``HeteroData`` where a ``Data`` holds several node sets: by ``_s`` and ``_t``, or in dicts as OGB's."""
    if not hasattr(graph, "is_node_attr") or hasattr(graph, "edge_types"):
        return graph
    keys = set(graph.keys())
    if not {"x_s", "x_t"} <= keys and "edge_index_dict" not in keys:
        return graph
    from torch_geometric.data import HeteroData

    made, relation = HeteroData(), ("s", "to", "t")
    for name, value in graph.to_dict().items():
        base, _, end = name.rpartition("_")
        if base and end in ("s", "t") and "x_s" in keys:
            of = (end, "to", end) if name.startswith("edge_") else end
            made[of][base] = value
        elif isinstance(value, Mapping):  # as of OGB: x_dict, edge_reltype
            for of, each in value.items():
                made[of][name.removesuffix("_dict")] = each
        elif name == "edge_index" or (name.startswith("edge_") and graph.is_edge_attr(name)):
            made[relation][name] = value
        elif name != "num_nodes":
            made[name] = value
    return made


def _entities(graphs: Sequence[Any]) -> dict[tuple[object, str], str | None]:
    """Return the entity of each tensor of each store: PyG's rules, of which all graphs of the file allow it.

    So ``y`` of one row a graph is the graph's, also of those of one node.
    """
    fitting: defaultdict[tuple[object, str], set[str]] = defaultdict(lambda: {"node", "edge"})
    for graph in graphs:
        for store in graph.stores if hasattr(graph, "stores") else ():
            sizes = {}
            if hasattr(store, "can_infer_num_nodes") and not isinstance(store._key, tuple):
                sizes["node"] = store.num_nodes
            if hasattr(store, "num_edges"):
                sizes["edge"] = store.num_edges
            for name, value in store.items():
                if isinstance(value, torch.Tensor):
                    dim = graph.__cat_dim__(name, value, store) if value.ndim else None
                    rows = value.shape[dim] if isinstance(dim, int) else None
                    fitting[store._key, name] &= {entity for entity, size in sizes.items() if size == rows}
    return {
        key: next(iter(sorted(found, reverse="edge" not in key[1])), None) for key, found in fitting.items()
    }  # "edge" is before "node"


def _arrays(sample: Any, entities: Mapping[tuple[object, str], str | None]) -> _Arrays:
    """Return the tensors of one sample, a graph's by entity."""
    if isinstance(sample, torch.Tensor):
        return {"data": _Array(sample)}
    if isinstance(sample, Mapping):
        found = {str(name): _Array(value) for name, value in sample.items() if isinstance(value, torch.Tensor)}
        if isinstance(number := sample.get("num_nodes"), int):
            found["num_nodes"] = _Array(torch.tensor(number))
        return {**found}
    if hasattr(sample, "edge_types"):
        return _arrays_of_sets(sample, entities)
    if not hasattr(sample, "is_node_attr"):
        raise TypeError(f"holds {type(sample).__name__}, not tensors, dicts of tensors or PyTorch Geometric's Data")
    keys = set(sample.keys())
    if keys & {"adj", "adj_t"} and "edge_index" not in keys:
        raise ValueError("its edges are in adj_t, a sparse matrix; save edge_index, of torch_geometric.utils")
    own: _Arrays = {}
    given = ("face", "edge_index", "pos")
    own |= _of_store(sample.stores[0], sample, ("node/", "edge/", "graph/"), given, entities)
    if "face" in keys:
        own["cells"] = _Array(sample.face.T)
    own |= {name: _Array(sample[name]) for name in ("edge_index", "pos") if name in keys}
    if sample.num_nodes is not None:
        own["num_nodes"] = _Array(torch.tensor(sample.num_nodes))
        if not keys & set(given):  # a graph all the same
            own["edge_index"] = _Array(torch.zeros((2, 0), dtype=torch.int64))
    return own


def _of_store(
    store: BaseStorage, whole: BaseData, groups: tuple[str, str, str], given: Sequence[str],
    entities: Mapping[tuple[object, str], str | None],
) -> Iterator[tuple[str, _Array | str]]:  # fmt: skip
    """Yield the attributes of a ``Data``, a set or a relation, in three groups: nodes, edges, neither in PyG's eyes."""
    for name in store.keys():  # noqa: SIM118 - it is no mapping
        value = store[name]
        if name in given or name == "num_nodes" or value is None:
            continue
        if not isinstance(value, torch.Tensor):
            yield f"{groups[2]}{name}", _as_json(value)
        elif ("index" in name or name == "face") and not value.is_floating_point():
            yield f"{groups[2]}{name}", "numbers nodes by its name (PyG), which have other numbers in a store"
        elif (entity := entities[store._key, name]) is not None:
            dim = whole.__cat_dim__(name, value, store) % value.ndim
            yield f"{groups[entity == 'edge']}{name}", _Array(value, entity, dim)
        else:
            yield f"{groups[2]}{name}", _Array(value)


def _as_json(value: object) -> _Array | str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return f"holds {type(value).__name__}, neither a tensor nor what JSON has"
    return _Array(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), is_json=True)


def _arrays_of_sets(sample: HeteroData, entities: Mapping[tuple[object, str], str | None]) -> _Arrays:
    """Return the tensors of a graph between node sets, in groups as ``scidata/meshes/formats/hetero.py`` has them."""
    found: _Arrays = {}
    for name in sample.node_types:
        store = sample[name]
        found |= _of_store(store, sample, (f"nodes/{name}/", "", f"graph/{name}/"), ("pos",), entities)
        if isinstance(store.get("pos"), torch.Tensor):
            found[f"nodes/{name}/pos"] = _Array(store.pos)
        if store.num_nodes is not None:
            found[f"nodes/{name}/num_nodes"] = _Array(torch.tensor([store.num_nodes]))
    for parts in sample.edge_types:
        group = "__".join(parts)
        names = "", f"edges/{group}/", f"graph/{group}/"
        found |= _of_store(sample[parts], sample, names, ("edge_index",), entities)
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
    """Write the arrays of a file, of at most so many bytes together, one after the other, and ``arrays.json``."""
    made: dict[str, dict[str, object]] = {}
    left_out: dict[str, str] = {}
    with open(path, "rb") as file:
        is_of_dgl = file.read(len(DGL)) == DGL
    with open(os.path.join(folder, "arrays.npy"), "wb") as file:
        for sample, arrays in _of_dgl(path) if is_of_dgl else _samples(_load(path)):
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
                np.save(file, values.to_dense().numpy(), allow_pickle=False)
                made[full] = {"entity": array.entity, "dim": array.dim, "is_json": array.is_json}
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
