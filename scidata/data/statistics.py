"""``statistics`` of a data set's fields in one pass over its samples, by a process, several, or all ranks."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from scidata.core.checks import check_flag, names_of
from scidata.core.keywords import checked_keywords
from scidata.core.passes import FieldPass
from scidata.core.tasks.dask_jobs import executor_of
from scidata.core.tasks.work import Executor, Tick, Work
from scidata.core.types import IntArray
from scidata.data.combine import as_combined
from scidata.data.combined_dataset import CombinedDataset
from scidata.data.domain_dataset import DomainDataset
from scidata.data.field_moments import FieldMoments, Stretch, check_paths, cut_evenly, gather_one
from scidata.data.joined_dataset import JoinedDataset
from scidata.data.statistics_table import FieldStatistics, Labels, Statistics
from scidata.data.stored_statistics import period_of_anemoi, statistics_of_anemoi, statistics_of_store
from scidata.errors import ConfigError, FieldMismatchError, RankFailedError, check_known
from scidata.shard.comm.agreement import gather_bytes
from scidata.store.reading.reader import StoreReader

_MAX_CELLS = 1 << 16  # per field: each takes some hundred bytes, and a microsecond of Python per row
_KINDS = "biuf"


@checked_keywords
def statistics(
    dataset: Any,
    *,
    by: str | Sequence[str] = (),
    fields: str | Sequence[str] | None = None,
    differences: bool = True,
    stored: bool | None = None,
    jobs: int = 1,
    client: object = None,
    tick: Callable[[float, float], None] | None = None,
) -> Statistics:
    """Return mean, deviation and extremes of each field over the samples, and of its differences between steps.

    One pass in the order of the data, in bounded memory: each chunk is decoded once. Sums are exact, and rounded once
    at the end, so the same values give the same bits for any number of ranks, jobs or files. Without a mesh, or with
    one rank, this process reads all, or ``jobs`` others. With a mesh each rank of the domain reads its own part, halo
    and ghosts left out, the dp ranks share the samples, and one exchange at the end gives all of them the result:
    collective, then.

    Values are decoded, but not yet changed by ``normalise``, ``local_transform`` or ``transform``; all rows count, even
    if ``subsample`` draws some. Each value counts once, even if several windows of ``steps`` share it, or all samples
    do. The period is the one left by ``sel``, ``isel`` and :func:`scidata.subset`.

    Parameters
    ----------
    dataset : Any
        Of :func:`scidata.open_dataset`, or made of such.
    by : str or Sequence[str], default ()
        Dims whose rows get separate statistics: ``"level"``. Fields without the dim get one value for all.
    fields : str or Sequence[str] or None, optional
        Their names; default all.
    differences : bool, default True
        Also of ``x[t + 1] - x[t]`` in float64, along the dim of samples as ``isel`` leaves it. Not from one trajectory,
        stored sample or group of a file to the next, nor over gaps: where a coordinate says when rows are, steps that
        are not within half of the median step around it are skipped and counted.
    stored : bool or None, optional
        Statistics stored with the data. True: those alone, and no field is read: of a store, of all of its
        samples, without differences, infinite values among the missing; of anemoi's Zarr by variable, of the period
        chosen when it was made. None: those of a store where they answer the question, to
        1e-12. False: none.
    jobs : int, default 1
        Processes, of data sets without a mesh. A script that asks for several does so below
        ``if __name__ == "__main__":``.
    client : object, optional
        A ``distributed.Client`` (extra ``dask``) in place of ``jobs``: the workers of its cluster read. They see the
        data under the same paths (open them by absolute ones, or start workers in the same folder), and have the same
        version of scidata. The result is the same, bit for bit.
    tick : Callable[[float, float], None] or None, optional
        Called with the rows that are done, and how many there are.

    Raises
    ------
    ClusterError
        With ``client``: a worker cannot do it, workers died of a part of the data, or the scheduler was lost.
    ConfigError, UnknownNameError
        What cannot be honoured: dims that no field has, or that number samples; jobs or a client besides ranks; stored
        figures that are not there, or are of something else.
    FieldMismatchError
        Data sets that were combined label a dim of ``by`` differently.
    RankFailedError
        Another rank could not read its part.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> ds = scidata.open_dataset("era5.zarr", fields=["u"], isel={"time": slice(0, 3)})
    >>> stats = scidata.statistics(ds, by="level")
    >>> stats["u"].mean.shape, stats["u"].difference_count.tolist()  # 2 steps of 7 x 8 points
    ((3,), [112, 112, 112])
    >>> again = scidata.statistics(ds, by="level", jobs=1)
    >>> bool((again["u"].std == stats["u"].std).all())  # bit for bit
    True
    """
    executor = executor_of(jobs, client)
    check_flag("differences", differences)
    dataset = as_combined(dataset)
    leaves = _leaves(dataset)
    names = list(dict.fromkeys(dataset.fields if fields is None else names_of("fields", fields)))
    check_known("statistics: no field", names, dataset.fields)
    dims = list(dict.fromkeys(names_of("by", by)))
    ranks = _Ranks.of(leaves[0].dataset)
    if ranks.groups and (jobs > 1 or client is not None):
        given, name = (f"jobs={jobs}", "jobs") if client is None else ("client", "it")
        raise ConfigError(f"{given}: the {ranks.num_ranks} ranks of the mesh share the work; leave {name} out")
    passes: dict[str, list[FieldPass]] = {
        name: [leaf.dataset.reader.field_pass(name, leaf.samples, ranks.part) for leaf in leaves] for name in names
    }
    own = {} if stored is False else _stored(leaves, names, dims, differences=differences, only=bool(stored))
    if stored and all(labels is not None for _, labels in own.values()):
        dims = ["variable"]
    kept = _kept_by(dataset, dims, passes)
    labels = {dim: _labels(dim, [passes[name] for name in names if dim in kept[name]]) for dim in dims}
    stretches = [
        Stretch(rows=rows, by=kept[name], differences=differences, first=first, last=last)
        for name in names
        if name not in own
        for rows in passes[name]
        for first, last in _cuts(rows.bounds, ranks, executor)
    ]
    total = sum(each.num_rows for each in stretches)
    paths, alone = [str(leaf.path) for leaf in leaves], jobs == 1 and client is None
    done = (lambda share: None) if tick is None else (lambda share: tick(share, total))
    digest = json.dumps([str(dataset.fingerprint), names, dims, differences])
    moments = ranks.merged(lambda: _gathered(stretches, paths, executor, done, alone=alone), digest)
    found = {
        name: own[name][0]
        if name in own
        else _field(passes[name], kept[name], moments.get(name), differences=differences)
        for name in names
    }
    period: Mapping[str, object] = _period(leaves, passes)
    if any(known is not None for _, known in own.values()):  # the period is that of the stored ones
        period = period_of_anemoi(leaves[0].dataset.reader)
    return Statistics(
        fields=found, labels=labels, path=leaves[0].path, period=period, fingerprint=str(dataset.fingerprint),
        source="store" if len(own) == len(names) else "data",
    )  # fmt: skip


# -- the data to read --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _Leaf:
    """A data set that reads files, and the requested samples of it."""

    dataset: DomainDataset[Any, Any]
    samples: IntArray

    @property
    def path(self) -> str:
        reader = self.dataset.reader
        return str(getattr(reader, "path", None) or reader.paths[0])


def _leaves(dataset: object, samples: IntArray | None = None) -> list[_Leaf]:
    """Return the data sets of a combination, each with its samples in the combination."""
    if isinstance(dataset, DomainDataset):
        if dataset.detached:
            raise ConfigError("statistics needs the mesh, which a worker process does not have; call it in the parent")
        return [_Leaf(dataset=dataset, samples=np.arange(len(dataset)) if samples is None else samples)]
    if isinstance(dataset, JoinedDataset):
        raise ConfigError(
            "statistics: of a join, gather those of each part: {name: scidata.statistics(part) for name, part in "
            "ds.parts.items()}; its normalise takes them"
        )
    if not isinstance(dataset, CombinedDataset):
        raise ConfigError(f"statistics: expected a data set of scidata.open_dataset, not {type(dataset).__name__}")
    found = []
    for number, inner in enumerate(dataset.datasets):
        chosen = dataset.samples_of(number)
        if samples is not None:  # this data set's samples in the combination
            places = [dataset.locate(i) for i in samples.tolist()]
            chosen = np.unique(np.array([own for part, own in places if part == number], np.int64))
        found += _leaves(inner, chosen)
    return found


def _stored(
    leaves: Sequence[_Leaf], names: Sequence[str], by: Sequence[str], *, differences: bool, only: bool
) -> dict[str, tuple[FieldStatistics, Labels]]:
    """Return the statistics stored with the data, by field, with labels of variables."""
    reader = leaves[0].dataset.reader
    found: dict[str, tuple[FieldStatistics, Labels]] = {}
    for name in names if len(leaves) == 1 else ():
        if isinstance(reader, StoreReader):
            samples, steps = leaves[0].samples, differences and not only
            own = statistics_of_store(reader, name, samples, by, differences=steps, exactly=not only)
            if own is not None:
                found[name] = own, None
        elif only and hasattr(reader, "series") and list(by) in ([], ["variable"]):
            known = statistics_of_anemoi(reader, name)
            if known is not None:
                found[name] = known
    if only and len(found) < len(names):
        lacking = ", ".join(name for name in names if name not in found)
        raise ConfigError(
            f"stored=True: the data have no figures of {lacking} of their own, of all samples, rows and times; leave "
            "it out, and they are gathered"
        )
    return found


def _kept_by(dataset: Any, by: Sequence[str], passes: Mapping[str, Sequence[FieldPass]]) -> dict[str, tuple[str, ...]]:
    """Return the dims by which each field's statistics are kept."""
    known = {name: [dim for dim in rows[0].dims if dim in rows[0].kept] for name, rows in passes.items()}
    every = list(dict.fromkeys(dim for dims in known.values() for dim in dims))
    check_known("statistics: by names", by, every, ", along which no field has rows that all samples share")
    kept = {name: tuple(dim for dim in by if dim in dims) for name, dims in known.items()}
    for name, rows in passes.items():
        if rows[0].dtype.kind not in _KINDS:
            raise ConfigError(
                f"statistics: field {name!r} is {rows[0].dtype}, of which there is no mean; choose fields"
            )
        num_cells = math.prod(rows[0].size(dim) for dim in kept[name])
        if num_cells > _MAX_CELLS:
            raise ConfigError(
                f"statistics: {num_cells} figures of {name!r} by {', '.join(kept[name])}, and {_MAX_CELLS} are kept at "
                "most; choose fewer dims"
            )
    return kept


def _labels(dim: str, passes: Sequence[Sequence[FieldPass]]) -> Labels:
    """Return the labels of a dim's rows, equal in all data sets; ``passes`` of each field with the dim."""
    labels: Labels = None
    for of_field in passes:
        sizes, found = {rows.size(dim) for rows in of_field}, [rows.labels(dim) for rows in of_field]
        if len(sizes) > 1 or any(list(other or ()) != list(found[0] or ()) for other in found[1:]):
            shown = " and ".join(str(other) for other in found[:2]) if len(sizes) == 1 else f"{sorted(sizes)} rows"
            raise FieldMismatchError(
                f"statistics: the data sets differ along {dim!r}: {shown}; figures by it need the same rows"
            )
        labels = labels if found[0] is None else tuple(found[0])
    return labels


def _period(leaves: Sequence[_Leaf], passes: Mapping[str, Sequence[FieldPass]]) -> dict[str, object]:
    period: dict[str, object] = {"samples": sum(len(leaf.samples) for leaf in leaves)}
    for rows in passes.values():
        spans = [span for each in rows if (span := each.span()) is not None]
        if len(spans) == len(rows) and spans:
            dim, first, _ = spans[0]
            num_rows = sum(len(each.is_step) for each in rows)
            return period | {"dim": dim, "first": first, "last": spans[-1][2], "rows": num_rows}
    return period


def _cuts(bounds: IntArray, ranks: _Ranks, executor: Executor) -> list[tuple[int, int]]:
    """Return the blocks of a pass that this rank reads, by parallel part."""
    if not len(bounds) or bounds[-1] == 0:
        return []
    num = executor.num_parts(len(bounds) - 1)
    cuts = [cut_evenly(bounds, ranks.num_shares * num, ranks.share * num + part) for part in range(num)]
    return [(first, last) for first, last in cuts if last > first]


def _gathered(
    stretches: Sequence[Stretch], paths: Sequence[str], executor: Executor, tick: Tick, *, alone: bool
) -> dict[str, FieldMoments]:
    """Gather all stretches and merge those of a field as they arrive: sums are exact in any order."""
    work = Work(
        job=functools.partial(gather_one, stretches),
        name="part",
        label=lambda index: f"part {index} of {len(stretches)}, of field {stretches[index].rows.name!r}",
        check=functools.partial(check_paths, paths, os.getcwd()),
    )
    totals: dict[str, FieldMoments] = {}

    def take(index: int, moments: FieldMoments) -> None:
        name = stretches[index].rows.name
        if name in totals:
            totals[name].merge(moments)
        else:
            totals[name] = moments

    longest_first = sorted(range(len(stretches)), key=lambda i: -stretches[i].num_rows)
    executor.run(work, range(len(stretches)) if alone else longest_first, tick=tick, take=take)
    return totals


def _field(
    passes: Sequence[FieldPass], by: tuple[str, ...], moments: FieldMoments | None, *, differences: bool
) -> FieldStatistics:
    shape = tuple(passes[0].size(dim) for dim in by)
    if moments is None:  # of no samples
        moments = FieldMoments.empty(math.prod(shape))
    has_steps = differences and any(rows.has_steps for rows in passes)
    return FieldStatistics(
        dims=by,
        **moments.values.result().reshaped(shape).parts(),
        differences=moments.differences.result().reshaped(shape) if has_steps else None,
        skipped=sum(rows.num_skipped for rows in passes) if has_steps else 0,
        units=passes[0].units,
        dtype=str(passes[0].dtype),
    )


# -- ranks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ranks:
    """This rank's part of each sample, its share of the samples, and the groups over which sums are added."""

    part: int
    share: int
    num_shares: int
    groups: tuple[dist.ProcessGroup, ...]
    device: str

    @classmethod
    def of(cls, dataset: DomainDataset[Any, Any]) -> _Ranks:
        mesh, dp = dataset.mesh, dataset.dp_axis
        share, num_shares = 0, 1
        if mesh is not None and dp is not None:
            share, num_shares = mesh.get_local_rank(dp), dist.get_world_size(mesh.get_group(dp))
        axes = dataset.domain_axes if mesh is not None else ()
        groups = [] if mesh is None else [mesh.get_group(axis) for axis in ((dp,) if dp else ()) + axes]
        return cls(
            part=dataset.rank,
            share=share,
            num_shares=num_shares,
            groups=tuple(group for group in groups if dist.get_world_size(group) > 1),
            device="cpu" if mesh is None else mesh.device_type,
        )

    @property
    def num_ranks(self) -> int:
        return math.prod(dist.get_world_size(group) for group in self.groups)

    def merged(self, gather: Callable[[], dict[str, FieldMoments]], digest: str) -> dict[str, FieldMoments]:
        """Return the sums of all ranks; raise on all if one has failed. Collective, one exchange."""
        if not self.groups:
            return gather()
        own: Exception | None = None
        message: dict[str, object] = {"rank": dist.get_rank(), "digest": digest}
        try:
            message["fields"] = {name: moments.state() for name, moments in gather().items()}
        except Exception as e:  # the others wait for this rank's part
            own, message["error"] = e, f"{type(e).__name__}: {e}"
        found = [json.loads(each) for each in gather_bytes(json.dumps(message).encode(), self.groups, self.device)]
        if own is not None:
            raise own
        for other in sorted(found, key=lambda each: int(each["rank"])):
            if "error" in other:
                raise RankFailedError(f"statistics: rank {other['rank']} failed: {other['error']}", other["rank"])
            if other["digest"] != digest:
                raise ConfigError(
                    f"statistics: ranks {other['rank']} and {dist.get_rank()} ask for other fields, dims or samples: "
                    f"{other['digest']} and {digest}; give every rank the same"
                )
        totals: dict[str, FieldMoments] = {}
        for other in found:
            for name, state in other["fields"].items():
                moments = FieldMoments.of(state)
                totals.setdefault(name, FieldMoments.empty(moments.values.num_cells)).merge(moments)
        return totals
