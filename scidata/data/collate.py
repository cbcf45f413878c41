"""Batch samples: stack grids; unite meshes, clouds and graphs as one sample without edges between its parts, with
``batch`` to tell them apart.

A rank's rows of the union are its rows of each sample, one after the other; so the union's global ids run rank by
rank, and ghosts, sorted by them, come by owner, then by sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import overload

import numpy as np
import torch
from torch import Tensor

from scidata.core.index_map import IndexMap
from scidata.core.keywords import checked_keywords
from scidata.core.types import IntArray
from scidata.data.channels import TensorT
from scidata.data.irregular_sample import IrregularSample
from scidata.data.joined_sample import JoinedPart, JoinedSample
from scidata.data.local_fields import LocalFields, stacked
from scidata.data.sample import Sample
from scidata.data.topology import Cells, Place, Relation, Topology, shard_rows
from scidata.errors import ConfigError, FieldMismatchError
from scidata.shard import ShardTensor
from scidata.store.reading.part import LocalPart


class _Rows:
    def __init__(self, maps: Sequence[IndexMap]) -> None:
        self.maps = maps
        sizes = np.stack([np.diff(m.bounds) for m in maps])  # (num_samples, num_parts)
        before = np.cumsum(sizes, axis=0) - sizes
        bounds = np.sum([m.bounds for m in maps], axis=0)
        part = maps[0].part
        ghosts = [m.ghosts - m.bounds[m.owners] + bounds[m.owners] + before[i, m.owners] for i, m in enumerate(maps)]
        every = np.concatenate(ghosts)
        self.order = np.argsort(every, kind="stable")
        keys = tuple(m.key for m in maps)
        self.index_map = IndexMap(
            bounds=bounds, part=part, ghosts=every[self.order], key=None if None in keys else ("union", *keys)
        )
        self.first = before[:, part]  # local id of each sample's first owned row
        place = np.empty(len(every), np.int64)
        place[self.order] = np.arange(len(every))
        self.ghost_places = np.split(place, np.cumsum([len(g) for g in ghosts])[:-1])

    @cached_property
    def tables(self) -> list[Tensor]:
        return [
            torch.from_numpy(np.concatenate([first + np.arange(m.num_owned), self.index_map.num_owned + places]))
            for first, m, places in zip(self.first, self.maps, self.ghost_places, strict=True)
        ]

    def new_ids(self, sample: int, ids: Tensor) -> Tensor:
        return self.tables[sample].to(ids.device)[ids]

    def join(self, values: Sequence[Tensor], dim: int) -> Tensor:
        """Concatenate local tensors of owned rows and ghosts in the union's order."""
        pairs = list(zip(values, self.maps, strict=True))
        owned = [v.narrow(dim, 0, m.num_owned) for v, m in pairs]
        ghosts = torch.cat([v.narrow(dim, m.num_owned, m.num_ghost) for v, m in pairs], dim)
        order = torch.from_numpy(self.order).to(ghosts.device)
        return torch.cat([*owned, ghosts.index_select(dim, order)], dim)


def unite(samples: Sequence[IrregularSample]) -> IrregularSample:
    """Unite samples. No communication.

    Raises FieldMismatchError: the samples differ in fields, in entities, or in dims other than their entities';
    ConfigError: one of them is a union, or holds a field ``batch``.
    """
    first = samples[0]
    _check(samples)
    rows = {e: _Rows([s.index_map(e) for s in samples]) for e in first.entities}
    fields: dict[str, Tensor] = {}
    held: dict[str, Tensor] = {}
    for name in first:
        place = first.places[name]
        space = rows[place.entity]
        if all(name in s.held for s in samples):
            held[name] = space.join([s.held[name] for s in samples], place.dim)
            local = held[name].narrow(place.dim, 0, space.index_map.num_owned)
        else:
            tensors = [s[name] for s in samples]
            local = torch.cat([t.to_local() if isinstance(t, ShardTensor) else t for t in tensors], place.dim)
        fields[name] = shard_rows(local, space.index_map, place.dim, first.device_mesh)
    device = next((x.device for x in fields.values()), torch.device("cpu"))
    of_batch = first.batch_entities
    for name, entity in of_batch.items():
        nodes = rows[entity]
        numbers = [torch.full((m.num_local,), i, device=device) for i, m in enumerate(nodes.maps)]
        batch = nodes.join(numbers, 0)
        if first.ghosts == "disk":
            held[name] = batch
        fields[name] = shard_rows(batch[: nodes.index_map.num_owned], nodes.index_map, 0, first.device_mesh)
    return type(first)(
        fields,
        dims={**first.dims, **{name: (entity,) for name, entity in of_batch.items()}},
        index=[s.index for s in samples if isinstance(s.index, int)],
        places={**first.places, **{name: Place(entity, 0) for name, entity in of_batch.items()}},
        topology=_topology(samples, rows),
        held=held,
        ghosts=first.ghosts,
        graph_values={name: _joined_values([s.graph_values[name] for s in samples]) for name in first.graph_values},
    )


def _joined_values(values: Sequence[object]) -> object:
    """Join graph-level values as PyTorch Geometric does: tensors along dim 0, numbers to a tensor, others to a list."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    if len(tensors) == len(values):
        return torch.cat([v.reshape(1) if v.ndim == 0 else v for v in tensors])
    if all(isinstance(v, int | float) for v in values):
        return torch.tensor(values)
    return list(values)


def _check(samples: Sequence[IrregularSample]) -> None:
    first = samples[0]
    for s in samples:
        if any(name in s for name in first.batch_entities):
            raise ConfigError(f"sample {s.index} has a field 'batch' already; unite single samples, once")
        if list(s) != list(first) or s.entities != first.entities or s.ghosts != first.ghosts:
            raise FieldMismatchError(
                f"sample {s.index} has fields {list(s)} on {s.entities}, but sample {first.index} has {list(first)} "
                f"on {first.entities}"
            )
        if s.graph_values.keys() != first.graph_values.keys():
            raise FieldMismatchError(
                f"sample {s.index} has values of the graph {sorted(s.graph_values)}, but sample {first.index} has "
                f"{sorted(first.graph_values)}"
            )
        for name in s:
            if s.places.get(name) is None or s.places[name] != first.places[name]:
                raise FieldMismatchError(
                    f"field {name!r} of sample {s.index} does not live on the same entity as in sample {first.index}; "
                    "a batch unites fields of nodes, points, cells and edges only"
                )
            dim = s.places[name].dim
            shapes = [(*x.shape[:dim], *x.shape[dim + 1 :], x.dtype) for x in (s[name], first[name])]
            if shapes[0] != shapes[1]:
                raise FieldMismatchError(
                    f"field {name!r} has shape {tuple(s[name].shape)} in sample {s.index} and "
                    f"{tuple(first[name].shape)} in sample {first.index}, unlike in more than rows"
                )


def _topology(samples: Sequence[IrregularSample], rows: Mapping[str, _Rows]) -> Topology:
    first = samples[0].topology
    return replace(
        first,
        index_maps={entity: space.index_map for entity, space in rows.items()},
        relations={
            name: _joined([s.topology.relations[name] for s in samples], rows, rows.get(name))
            for name in first.relations
        },
        cells=_cells([s.topology.cells for s in samples], rows[first.entity]),
        far_cells=_cells([s.topology.far_cells for s in samples], rows[first.entity], rows.get("cell")),
        read_ids=partial(_joined_ids, [s.topology.read_ids for s in samples]),
    )


def _joined_ids(reads: Sequence[Callable[[str], IntArray]], entity: str) -> IntArray:
    return np.concatenate([read(entity) for read in reads])


def _joined(relations: Sequence[Relation], rows: Mapping[str, _Rows], edges: _Rows | None) -> Relation:
    """Return one relation's edges of all samples in the union's numbering; without ids no edge is far."""
    source, name, target = relations[0].type

    def joined(parts: Sequence[Tensor]) -> Tensor:
        ends = [torch.cat([rows[of].new_ids(i, part[row]) for i, part in enumerate(parts)])
                for row, of in enumerate((source, target))]  # fmt: skip
        return torch.stack(ends)

    far = joined([each.far for each in relations])
    order = torch.from_numpy(np.empty(0, np.int64) if edges is None else edges.order).to(
        far.device
    )  # as the union's ghosts: by owner, then by sample
    return Relation((source, name, target), joined([each.own for each in relations]), far[:, order])


def _cells(cells: Sequence[Cells | None], nodes: _Rows, far: _Rows | None = None) -> Cells | None:
    """Join cells; ``far`` cells follow the order of the union's ghosts."""
    parts = [c._replace(connectivity=nodes.new_ids(i, c.connectivity)) for i, c in enumerate(cells) if c is not None]
    if not parts:
        return None
    return Cells.joined(parts, None if far is None else torch.from_numpy(far.order).to(parts[0].offsets.device))


@overload
def collate(samples: Sequence[JoinedSample]) -> JoinedSample: ...


@overload
def collate(samples: Sequence[IrregularSample[TensorT]]) -> IrregularSample[TensorT]: ...


@overload
def collate(samples: Sequence[Sample[TensorT]]) -> Sample[TensorT]: ...


@checked_keywords
def collate(samples: Sequence[Sample] | Sequence[JoinedSample]) -> Sample | JoinedSample:
    """Stack the fields of several grid samples on a new dim 0; unite meshes, clouds and graphs disjointly.

    A union has the rows of all samples, which may differ in number, and a field ``batch`` that says of which sample a
    row is. One sample alone stays as it is. Also for torch's own loader, as ``collate_fn=scidata.collate``: of items
    that its worker processes have read ``ds.assemble(item)`` makes samples.

    Parameters
    ----------
    samples : Sequence[Sample]
        At least one sample, all of one data set or of data sets alike. Of a join each part becomes a batch.

    Raises
    ------
    FieldMismatchError
        The samples differ in fields or shapes, or are none.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> ds = scidata.open_dataset("era5.zarr", fields=["u"])
    >>> batch = scidata.collate([ds[0], ds[2]])
    >>> tuple(batch["u"].shape), batch.dims["u"], batch.index
    ((2, 3, 7, 8), ('batch', 'level', 'latitude', 'longitude'), [0, 2])
    """
    if isinstance(samples, Sample | JoinedSample | LocalFields | LocalPart | JoinedPart):
        return samples  # of torch's loader with batch_size=None
    if not isinstance(samples, Sequence):
        raise FieldMismatchError(f"collate makes a batch of a list of samples, not of {type(samples).__name__}")
    if samples and all(isinstance(sample, LocalFields) for sample in samples):
        return stacked(samples)  # type: ignore[arg-type, return-value]  # in a worker of torch's loader
    joined = [sample for sample in samples if isinstance(sample, JoinedSample)]
    if joined and len(joined) == len(samples):
        return _by_part(joined)
    plain = [sample for sample in samples if isinstance(sample, Sample)]
    if not samples or len(plain) < len(samples):
        kinds = {type(sample).__name__ for sample in samples}
        read = (
            "; ds.assemble(part) makes a sample of what a worker has read"
            if kinds & {"LocalPart", "JoinedPart"}
            else ""
        )
        found = ", ".join(sorted(kinds)) or "none"
        raise FieldMismatchError(f"collate makes a batch of one or more samples of a data set, not of {found}{read}")
    irregular = [sample for sample in samples if isinstance(sample, IrregularSample)]
    if irregular and len(irregular) < len(samples):
        raise FieldMismatchError("a batch holds samples of one data set; these are of several kinds")
    batch = unite(irregular) if irregular else _stacked(plain)
    batch.members = [member for sample in plain for member in sample.members]
    return batch


def _by_part(samples: Sequence[JoinedSample]) -> JoinedSample:
    parts = {name: collate([sample[name] for sample in samples]) for name in samples[0]}
    index = [sample.index for sample in samples if isinstance(sample.index, int)]
    return JoinedSample(parts, key=np.array([sample.key for sample in samples]), index=index)


def _stacked(samples: Sequence[Sample]) -> Sample:
    first = samples[0]
    for sample in samples[1:]:
        if list(sample) != list(first):
            raise FieldMismatchError(
                f"sample {sample.index} has fields {list(sample)}, but sample {first.index} has {list(first)}"
            )
        for name in first:
            if sample[name].shape != first[name].shape:
                raise FieldMismatchError(
                    f"field {name!r} has shape {tuple(sample[name].shape)} in sample {sample.index} and "
                    f"{tuple(first[name].shape)} in sample {first.index}; a batch needs one shape: use batch_size=None"
                )
    return Sample(
        {name: torch.stack([sample[name] for sample in samples]) for name in first},
        dims={name: ("batch", *dims) for name, dims in first.dims.items()},
        index=[sample.index for sample in samples if isinstance(sample.index, int)],
    )
