"""``scidata.partition``: raw meshes, clouds and graphs in, a store for any number of ranks out."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scidata.core.apart import check_apart
from scidata.core.checks import check_bytes, check_flag, check_int, refuse
from scidata.core.keywords import checked_keywords
from scidata.core.tasks.dask_jobs import executor_of
from scidata.core.tasks.work import Executor, Tick, Work
from scidata.core.urls import Url, absolute, is_url, local_path, url_of
from scidata.errors import ConfigError, CorruptDataError, OutputError
from scidata.meshes.order.measures import AskedGeometry, as_geometry
from scidata.meshes.reduced_points import resolved_nodes
from scidata.meshes.samples import as_names, read_samples
from scidata.sources.collections import is_step
from scidata.sources.unfinished import SUFFIX
from scidata.store.format.durable import remove, rename_over
from scidata.store.format.loading import gather
from scidata.store.format.manifest import SCHEMA_VERSION, SampleInfo
from scidata.store.format.places import MANIFEST
from scidata.store.format.samples import Samples
from scidata.store.format.store import read_sample_info, verify_sample, write_manifest
from scidata.store.format.treatments import TREATMENTS, treat_alike
from scidata.store.format.write import MAX_FIELD_BYTES
from scidata.store.partitioning import output
from scidata.store.partitioning.by_time import time_of
from scidata.store.partitioning.inputs import difference
from scidata.store.partitioning.output import Part
from scidata.store.partitioning.remote import RemoteSamples, check_folders, wait_until_seen
from scidata.store.partitioning.sample import PlannedSample, Task, plan_sample, process_sample
from scidata.store.partitioning.upload import RemoteFolder

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, kw_only=True)
class PartitionReport:
    """The result of a run.

    - ``num_samples``: samples of the whole store; this run had ``written`` and ``kept`` ones.
    - ``finished``: true where the manifest was written: the store opens.
    - ``counts``, ``nbytes``: over the samples of this run.
    - ``notes``: by sample: fallbacks of the order, repairs.
    - ``planned``: the samples of a dry run, else empty.
    """

    out: str
    num_samples: int
    written: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    finished: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0
    notes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    planned: tuple[PlannedSample, ...] = ()


@checked_keywords
def partition(
    inputs: Paths,
    out: str | os.PathLike[str],
    *,
    kind: str | None = None,
    mesh: str | os.PathLike[str] | None = None,
    points: str | Sequence[str] | None = None,
    entity: str | None = None,
    edges: str | Mapping[str, str] | None = None,
    nodes: Mapping[str, str | Sequence[int]] | None = None,
    fields: str | Sequence[str] | None = None,
    topology: str | None = None,
    geometry: AskedGeometry = None,
    order: str = "hilbert",
    weights: str | None = None,
    repair: str | Sequence[str] = (),
    keep: str | Sequence[str] = (),
    jobs: int = 1,
    client: Any = None,
    part: str | tuple[int, int] | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    allow_missing: bool = False,
    allow_external: bool = False,
    storage_options: Mapping[str, object] | None = None,
    max_field_bytes: int = MAX_FIELD_BYTES,
    memory: int | str | None = None,
    tick: Callable[[float], None] | None = None,
) -> PartitionReport:
    """Write a store that any number of ranks reads, from raw meshes, point clouds or graphs.

    Parameters
    ----------
    inputs : str or PathLike, or a list of them
        Files, globs or URLs; with ``mesh``, the file of the topology, all of them hold fields of one sample.
    out : str or PathLike
        A new folder; or a URL, ``s3://bucket/out.store``, to which the store is sent once it is whole: until then it
        lies in the folder for temporary files (``TMPDIR``), which needs room for it.
    kind : str or None, optional
        ``"mesh"``, ``"points"`` (also the nodes, or cells, of a mesh of any format, with their fields), ``"graph"`` or
        ``"hetero"`` (a graph between several node sets); default detected.
    mesh : str or PathLike or None, optional
        File of the topology, where the inputs hold fields on it.
    points : str or Sequence[str] or None, optional
        Names of the coordinates: one array ``(N, 2 or 3)``, or two or three ``(N,)``; default by name.
    entity : str or None, optional
        ``"cell"``: rows of a mesh, or points, are its cells, at their centres; default its nodes.
    edges : str or Mapping[str, str] or None, optional
        ``"edge_index"`` of the file, ``"cells"`` (of a mesh), ``"faces"`` (between cells), ``"nodes"`` (between cells
        that share a node; the field ``across_face`` is 1 where they share a face), ``"knn:8"`` or ``"radius:0.1"``; of
        a built graph, by relation, ``{"grid__to__mesh": "spacing:0.6"}``.
    nodes : Mapping[str, str or Sequence[int]] or None, optional
        Node sets of a graph that is built around the input: ``{"grid": "file", "mesh": "icosahedral:6"}``; see
        the module ``scidata.meshes.build`` for the rules of sets and relations. Numbers are the points on each latitude
        of a reduced Gaussian grid.
    fields : str or Sequence[str] or None, optional
        Names; default all that have a row for each node, point, cell or edge.
    topology : str or None, optional
        The mesh variable, where a UGRID file has several.
    geometry : bool, str, Sequence[str], Mapping[str, object] or None, optional
        Compute fields of each row, float64, in the unit of the points. True: ``area`` ``(N,)``, ``normal`` ``(N, 3)``
        of surfaces, ``volume`` ``(N,)`` of solids, of nodes their shares in the cells around them. Or names: these, and
        ``curvature`` ``(N,)``: mean curvature, positive where the surface bends away from its normals (Meyer et al.
        2003; of cells the mean of their corners), NaN on its border. ``{"sdf": "car.stl"}``: ``(N,)``, the distance to
        a closed surface, negative inside (exact; Baerentzen and Aanaes 2005; needs the extra ``vtk``), of any mesh
        format; ``"{folder}/*.stl"`` or ``"stl/{name}.stl"`` has each sample's folder or name; ``"boundary"``: that of
        the solids themselves. A field of the file that has such a name is kept in its place. Default: True if points
        are the cells of a mesh.
    order : str, default "hilbert"
        ``"hilbert"``, ``"rcb"``, ``"metis"`` (needs the extra ``metis``, smallest halos) or ``"rows"`` (as given).
        ``"shuffle"``, of points: at random, for ``subsample=``, which then reads no more than it draws and walks
        through all rows, each once, before any comes again; in leaves of 16,384 rows, or ``"shuffle:4096"``, along the
        curve inside each. ``"time:dates"``, of tables: by the times of a column; ``open_dataset(out, time="dates",
        window=…)`` reads them in windows.
    weights : str or None, optional
        Costs that the store's prefix sums count: None for rows, ``"edges"`` for edges by destination, else a field.
    repair : str or Sequence[str], default ()
        Kinds of faults that may be left out of the store, or ``"all"``; see ``scidata.meshes.order.faults.REMEDIES``.
    keep : str or Sequence[str], default ()
        Kinds of faults that stay as they are: ``"crowded_faces"``, ``"duplicate_edges"``, ``"self_loops"``.
    jobs : int, default 1
        Samples processed at once, each in a process of its own.
    client : Any, optional
        A ``distributed.Client`` (extra ``dask``) in place of ``jobs``: the workers of its cluster write the samples,
        some in each task, and this process the manifest. They see inputs and output under the same absolute paths, have
        the same version of scidata, and may come, go and die meanwhile. The store is the same, byte for byte.
    part : str or tuple[int, int] or None, optional
        ``"i/n"`` or ``(i, n)``: only every ``n``-th sample from ``i`` on, for job arrays; ``scidata partition
        --finalize`` then ends the store.
    dry_run : bool, default False
        Only describe the samples that would be written.
    overwrite : bool, default False
        Replace the store that is there. It stays until the new one is whole, which is written beside it as
        ``OUT.unfinished`` and so needs the room; ``resume`` goes on with a run that was killed. With ``part`` samples
        are replaced in their place.
    resume : bool, default False
        Keep its samples that are whole, by their digests, and write the others. The inputs of those that are kept
        must be the same in name and content (not in time or folder): they are read again, as the samples are. All
        options must be, too, but that ``repair`` and ``keep`` may allow more.
    storage_options : Mapping[str, object] or None, optional
        Arguments of the file system that ``out`` lies in, where it is a URL.
    max_field_bytes : int, default MAX_FIELD_BYTES
        Largest field that is held in memory; a larger one goes through a scratch file in ``out``.
    memory : int or str or None, optional
        Memory that a process may take, as bytes or ``"8G"`` (powers of 1024), for each of ``jobs``; default no limit.
        Samples that take more in memory (``dry_run`` says how much) are put in order in passes over scratch files in
        ``out``; the store is the same, byte for byte. Rows may be more than there is room for. Refused where they
        take more in memory: repairs, order ``"metis"``, edges by ``knn`` and ``radius``, ``weights``, fields on mesh
        edges, graphs between several node sets, OpenFOAM cases. Files
        of other formats than the plain layout, VTKHDF and ``edge_index`` are read whole, which takes 8 bytes more for
        each node of a cell.
        With ``resume`` a run that was killed, or interrupted, goes on inside a sample, after the last pass, or
        array of the store, that was done.
    allow_missing, allow_external : bool, default False
        As in :func:`scidata.open_dataset`.
    tick : Callable[[float], None] or None, optional
        Called with the share of a sample that was done, at most 1 for each of the samples of this run.

    Notes
    -----
    Memory, for each of ``jobs``: at most 3 times the points, cells and edges of a sample at 8 bytes a number, or those
    once and a field being written, which takes ``max_field_bytes`` and 0.3 GB; more where edges are made by ``knn`` or
    ``radius``, or cut by ``metis``. Measured: ``tests/bench/partition_memory.py``. ``memory`` limits it.

    Returns
    -------
    PartitionReport

    Raises
    ------
    ConfigError
        The output exists, another run is writing it, an input of a sample that is kept has changed, or an argument
        means nothing for a sample.
    CorruptDataError
        A sample with faults that are not to be repaired; they are listed.
    ClusterError
        With ``client``: a worker cannot do it, workers died of a sample, or the scheduler was lost; the samples before
        are kept for ``resume``.
    OSError
        The disk is full: the samples before are kept for ``resume``; the store does not open.

    Examples
    --------
    >>> import h5py
    >>> import numpy as np
    >>> ids = np.arange(6)
    >>> with h5py.File("ring.h5", "w") as file:  # six nodes in a ring, edges both ways
    ...     file["pos"] = np.stack([np.cos(ids * np.pi / 3), np.sin(ids * np.pi / 3)], axis=1)
    ...     file["edge_index"] = np.stack([np.r_[ids, (ids + 1) % 6], np.r_[(ids + 1) % 6, ids]])
    ...     file["speed"] = ids.astype("f4")
    >>> report = scidata.partition("ring.h5", "ring.store", order="rows")
    >>> scidata.open_dataset("ring.store")[0]["speed"]
    tensor([0., 1., 2., 3., 4., 5.])
    """
    executor = executor_of(jobs, client)
    if executor.is_remote:
        if part is not None:
            raise ConfigError("part=: is for job arrays, and excludes client=, whose workers share all samples")
        inputs, mesh = _absolute(inputs), None if mesh is None else _absolute(mesh)[0]
    choice: dict[str, Any] = {
        "kind": "points" if kind is None and time_of(str(order)) else kind,
        "points": as_names("points", points),
        "entity": entity,
        "edges": dict(edges) if isinstance(edges, Mapping) else edges,
        "fields": as_names("fields", fields),
        "topology": topology,
    }
    if nodes is not None:
        choice["nodes"] = resolved_nodes(nodes)
    if geometry is not None:
        choice["geometry"] = geometry if isinstance(geometry, bool) else as_geometry(geometry)
    flags = {"dry_run": dry_run, "overwrite": overwrite, "resume": resume}
    for name, value in {**flags, "allow_missing": allow_missing, "allow_external": allow_external}.items():
        check_flag(name, value)
    task = Task(
        samples=read_samples(inputs, mesh=mesh, allow_missing=allow_missing, allow_external=allow_external, **choice),
        choice=choice,
        order=order,
        weights=weights,
        repair=as_names("repair", repair) or (),
        keep=as_names("keep", keep) or (),
        allow_missing=allow_missing,
        max_field_bytes=check_int("max_field_bytes", max_field_bytes, least=1),
        memory=None if memory is None else check_bytes("memory", memory),
    )
    chosen = Part.parse(part) if isinstance(part, str) else None if part is None else Part(*part)
    if overwrite and resume:
        raise ConfigError("overwrite and resume exclude each other: one removes what the other keeps")
    if not isinstance(out, str | os.PathLike):
        raise ConfigError(f"out={out!r}: expected the path of a new folder, not {type(out).__name__}")
    target = os.fspath(out)
    target = os.path.expanduser(local_path(target) or target)
    if is_url(target):
        why = f"means nothing for {url_of(target)}, to which a store is sent once it is whole; write to a folder for it"
        refuse({"resume": resume, "part": part is not None, "client": client is not None}, why)
        target = url_of(target, storage_options)
    first, step = (0, 1) if chosen is None else (chosen.index, chosen.num_parts)
    indices = range(first, len(task.samples), step)
    check_apart(
        target, (path for index in range(len(task.samples)) for path in task.samples.inputs(index)), "the store"
    )
    remote = RemoteFolder(target) if isinstance(target, Url) else None
    if remote is not None:
        remote.check_free(overwrite=overwrite)
    if dry_run:
        if remote is None and not (overwrite or resume):
            _check_free(target, [i for i in output.finished_samples(target) if chosen is None or i in indices])
        planned = tuple(plan_sample(index, task.header(index), order) for index in indices)
        nbytes = sum(sample.nbytes for sample in planned)
        return PartitionReport(out=target, num_samples=len(task.samples), planned=planned, nbytes=nbytes)
    if not os.path.isdir(target):
        _find_inputs(task, indices)
    run = functools.partial(
        _run, task, indices=indices, part=chosen, executor=executor, tick=tick or (lambda share: None)
    )
    if remote is None:
        return run(target, overwrite=overwrite, resume=resume)
    remote.check_writable()
    with tempfile.TemporaryDirectory(prefix="scidata-store-") as scratch:
        report = run(os.path.join(scratch, "store"), overwrite=False, resume=False)
        remote.upload(report.out)
    return replace(report, out=str(target))


def _absolute(paths: Paths) -> list[str]:
    """Return paths and globs as processes with other working folders understand them."""
    every = [paths] if isinstance(paths, str | os.PathLike) else paths
    names = [os.fspath(path) for path in every]
    return [name if is_url(name) else absolute(name) for name in names]


def _find_inputs(task: Task, indices: range) -> None:
    """Raise for a file that is missing before the output is made, which its message would list as a near name."""
    for index in indices:
        paths = task.samples.inputs(index)
        if not all(is_url(path) or os.path.lexists(path) or is_step(path) for path in paths):
            task.samples.header(index)  # some paths name a group in a file


def _check_free(out: str, there: Sequence[int]) -> None:
    """Raise if there is a store, or samples of one."""
    manifest = os.path.exists(os.path.join(out, MANIFEST))
    if there or manifest:
        found = "a finished store" if manifest else f"an unfinished store of {len(there)} samples"
        raise OutputError(f"{out}: {found} is there; --resume completes it, --overwrite replaces it")


def _run(
    task: Task,
    out: str,
    indices: range,
    *,
    part: Part | None,
    executor: Executor,
    overwrite: bool,
    resume: bool,
    tick: Tick,
) -> PartitionReport:
    with output.claim_output(out, part):
        there = [index for index in output.finished_samples(out) if part is None or index in indices]
        manifest = os.path.exists(os.path.join(out, MANIFEST))
        beside = os.path.realpath(out) + SUFFIX  # the store that is to replace this one
        if part is None and ((overwrite and manifest) or (resume and os.path.isdir(beside))):
            if overwrite:
                remove(os.path.join(beside, MANIFEST))  # it is no finished store any more
            report = _run(
                task, beside, indices, part=None, executor=executor, overwrite=overwrite, resume=resume, tick=tick
            )
            rename_over(beside, os.path.realpath(out))  # a run that is killed meanwhile goes on with ``resume``
            return replace(report, out=out)
        if not (overwrite or resume):
            _check_free(out, there)
        if overwrite:
            output.remove_samples(out, there)
            there = []
        whose = None if part is None else indices
        output.remove_temporaries(out, whose, but=indices if resume else ())
        kept = _whole_samples(task, out, there)
        for _ in kept:
            tick(1.0)
        todo = [index for index in indices if index not in kept]
        if todo and manifest:
            output.remove_samples(out, ())
        try:
            _process(task, out, todo, executor=executor, tick=tick)
        except BaseException:
            output.remove_temporaries(out, todo, but=todo if task.memory else ())  # what can go on stays
            raise
        output.remove_temporaries(out, whose)
        infos = (read_sample_info(out, index) for index in indices)
        samples = write_manifest(out, infos) if part is None else gather(infos, out)
    return _report(out, len(task.samples), samples, written=todo, kept=kept, finished=part is None)


def _process(task: Task, out: str, indices: list[int], *, executor: Executor, tick: Tick) -> None:
    """Write samples."""
    work = Work(
        job=functools.partial(process_sample, task, out),
        name="sample",
        label=lambda index: f"sample {index} ({task.samples.names[index]})",
        after="; finished samples are kept: run again with --resume",
    )
    if not executor.is_remote:
        executor.run(work, indices, tick=tick)
    elif indices:
        with output.marked_run(out) as run:
            there = os.path.abspath(out)
            check = functools.partial(check_folders, there, run, task.samples.inputs(indices[0]))
            samples = RemoteSamples(task=task, out=there, run=run)
            executor.run(replace(work, job=samples, check=check), indices, tick=tick)
        wait_until_seen(out, indices)
        output.remove_temporaries(out, None)  # of workers that died


def _whole_samples(task: Task, out: str, there: Iterable[int]) -> list[int]:
    """Return the samples of an earlier run that need not be written again; remove damaged ones.

    Raises ConfigError: they were made from other inputs or with other options.
    """
    whole = []
    for index in there:
        try:
            _check_origin(task, out, read_sample_info(out, index))
            verify_sample(out, index)
        except CorruptDataError:
            output.remove_samples(out, [index])
        else:
            whole.append(index)
    return whole


def _check_origin(task: Task, out: str, info: SampleInfo) -> None:
    """Refuse a sample that this run would not have made: cheap comparisons first, then the content of its inputs."""
    where = f"{out}: sample {info.index} ({info.name})"
    same = info.recipe == task.recipe and treat_alike(info.settings, task.settings)
    if not same or info.num_samples != len(task.samples):
        raise OutputError(
            f"{where} was made from other inputs or with other options ({_difference(info, task)}); resume with the "
            "same ones, or --overwrite"
        )
    for path, recorded in zip(task.samples.inputs(info.index), info.inputs, strict=False):
        if (how := difference(path, recorded)) is not None:
            raise OutputError(
                f"{where} was made from another {path}: {how}; resume with the file as it was, or --overwrite to make "
                "all samples anew"
            )


def _difference(info: SampleInfo, task: Task) -> str:
    now = json.loads(json.dumps(task.settings))
    alike = treat_alike(info.settings, now)
    if info.version != SCHEMA_VERSION:
        return f"it is of the store's schema version {info.version}, now {SCHEMA_VERSION}"
    for name, value in now.items():
        before = info.settings.get(name)
        if before != value and not (alike and name in TREATMENTS):
            return f"{name} was {before!r}, now {value!r}"
    if info.num_samples != len(task.samples):
        return f"there were {info.num_samples} samples, now {len(task.samples)}"
    before = [found.name for found in info.inputs]
    names = [os.path.basename(path.rstrip("/")) for path in task.samples.inputs(info.index)]
    if before != names:
        return f"its input was {', '.join(before)}, now {', '.join(names)}"
    return "names of other inputs, or their order, differ"


def _report(
    out: str, num_samples: int, samples: Samples, *, written: list[int], kept: list[int], finished: bool
) -> PartitionReport:
    return PartitionReport(
        out=out,
        num_samples=num_samples,
        written=tuple(written),
        kept=tuple(kept),
        finished=finished,
        counts=samples.counts(),
        nbytes=sum(samples.nbytes()),
        notes={info.name: info.notes for info in samples.noted() if info.notes},
    )


def finalize(out: str | os.PathLike[str]) -> PartitionReport:
    """Write the manifest of a store whose parts are all done.

    Raises ConfigError: samples are missing, a part is still running, or there is no store; CorruptDataError,
    FieldMismatchError: a sample's description is damaged, or the samples do not agree.
    """
    target = os.fspath(out)
    if not output.finished_samples(target):
        raise OutputError(f"{target}: there are no samples to finish; run `scidata partition SOURCE... {target}` first")
    with output.claim_output(target, None):
        there = output.finished_samples(target)
        expected = read_sample_info(target, there[0]).num_samples
        missing = sorted(set(range(expected)) - set(there))
        if missing:
            shown = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
            raise OutputError(
                f"{target}: {len(missing)} of {expected} samples are missing ({shown}); run their parts again with "
                "--resume, then --finalize"
            )
        if len(there) > expected:
            raise OutputError(f"{target}: has {len(there)} samples, but was made of {expected}; runs were mixed")
        output.remove_temporaries(target, None)
        samples = write_manifest(target, (read_sample_info(target, index) for index in there))
    return _report(target, expected, samples, written=[], kept=there, finished=True)
