"""``create``: begin or resume an output, and return its writer."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh

from scidata.core.apart import check_apart
from scidata.core.checks import check_flag, check_int, check_mapping, refuse
from scidata.core.keywords import checked_keywords
from scidata.core.urls import url_of
from scidata.data.grid_dataset import ShardedDataset
from scidata.data.irregular_dataset import IrregularDataset
from scidata.data.output.fields import OutputLayout, distinct_dims
from scidata.data.output.flat_output import FlatOutput
from scidata.data.output.like import GridLike, RowsLike
from scidata.data.output.owner import Owner, living, refusal
from scidata.data.output.packed_file import PackedFileOutput
from scidata.data.output.part_writer import Output
from scidata.data.output.places import Begun, LocalPlace, Place, begun_at, place_of, say_begun, written_steps
from scidata.data.output.ranks import Ranks
from scidata.data.output.routes import RowsBack
from scidata.data.output.sample_files import FilesLike, FilesOutput, FilesWriter
from scidata.data.output.tile_writer import TileWriter, tiles_of
from scidata.data.output.vtkhdf_output import VtkhdfOutput
from scidata.data.output.writer import Writer
from scidata.data.output.zarr_output import ZarrOutput
from scidata.device_mesh import axes_of
from scidata.errors import ConfigError, FieldMismatchError, OutputError, near_matches

_FORMATS = ("zarr", "zarr2", "netcdf", "hdf5", "vtkhdf")
_OF_SAMPLES = ("vtp", "vtu", "vtkhdf", "xdmf")  # allowed with one file per sample
_ZARR = _FORMATS[:2]
_SUFFIXES = {
    ".zarr": "zarr", ".nc": "netcdf", ".nc4": "netcdf", ".cdf": "netcdf", ".h5": "hdf5", ".hdf5": "hdf5",
    ".hdf": "hdf5", ".vtkhdf": "vtkhdf",
}  # fmt: skip
_EACH = ("files", *(f"{name} files" for name in _OF_SAMPLES))  # one file per sample: in its source's format, or new
_ORDERS = ("source", "store")
_ENCODINGS = ("source", "plain")


@checked_keywords
def create(
    path: str | os.PathLike[str],
    *,
    like: ShardedDataset[Any] | IrregularDataset[Any],
    mesh: DeviceMesh | None = None,
    fields: Sequence[str] | Mapping[str, Mapping[str, Any] | None] | None = None,
    times: Any = None,
    format: Literal["zarr", "zarr2", "netcdf", "hdf5", "vtkhdf", "vtp", "vtu", "xdmf"] | None = None,
    chunks: Mapping[str, int] | None = None,
    shards: Mapping[str, int] | None = None,
    codec: Literal["blosc", "lz4", "zstd", "zlib", "none"] | None = None,
    encoding: Literal["source", "plain"] = "source",
    attributes: Mapping[str, Any] | None = None,
    order: Literal["source", "store"] = "source",
    sample: int | Sequence[int] | None = None,
    topology: str | os.PathLike[str] | None = None,
    tiles: Literal["crop", "blend"] | None = None,
    in_flight: int = 2,
    copy: bool = True,
    resume: bool = False,
    overwrite: bool = False,
    takeover: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Writer:
    """Begin to write samples: each rank writes its own part, in the background; no rank ever holds a whole sample.

    ``writer[step] = sample`` takes ShardTensors however they are split. Chunks that lie across the bounds of parts are
    completed by an exchange of their rows, so each is written once, whole, by the rank that has most of it: the output
    is the same, byte for byte, for any number of ranks. With bounds on the edges of chunks nothing is exchanged.

    Until :meth:`Writer.close` a local output lies at ``path.unfinished``, and one in an object store has an attribute
    that says so, which ``open_dataset`` refuses. A run that was killed goes on with ``resume=True``, on any number of
    ranks. Collective over all ranks of ``mesh``.

    Parameters
    ----------
    path : str or PathLike
        A file or folder, or a URL. All ranks must see it. Of meshes, points and graphs a path without a suffix is a
        folder that gets a file for each sample: the sample's source, by its name, with the fields added. Fields of the
        source's names are replaced, all others stay. ``writer[i]`` takes sample ``i`` of ``like``.
    like : ShardedDataset or IrregularDataset
        The data set whose dims, coordinates, attributes and encoding the output has. Of meshes, points and graphs the
        tensors are split as they were read; ``fields`` of it take ``like``, the packing and ``attributes``.
    mesh : DeviceMesh or None, optional
        Of the ranks that write; default that of ``like``.
    fields : Sequence[str] or Mapping[str, Mapping[str, Any] or None] or None, optional
        Names of its fields, default all; or options by name: ``{"u": None, "precip": {"like": "u", "attributes":
        {"units": "mm"}}}``, or ``{"mask": {"dims": ("latitude", "longitude"), "dtype": "int8"}}``. Also
        ``scale_factor``, ``add_offset`` and ``_FillValue``; ``sizes`` of dims that the data set has not. Of meshes,
        points and graphs: ``{"force": {"entity": "node", "components": 3, "dtype": "float32"}}``.
    times : Any, optional
        What the steps are labelled with: dates, numbers in the units of the source, or a number of steps. Several dims
        of steps as a mapping: ``{"time": starts, "lead": hours}``; then step ``i * len(hours) + k`` is hour ``k`` of
        start ``i``. Default: a step for each sample of ``like``.
    format : {"zarr", "zarr2", "netcdf", "hdf5", "vtkhdf", "vtp", "vtu", "xdmf"} or None, optional
        ``"zarr"`` (v3), ``"zarr2"``, ``"netcdf"`` (NetCDF-4), ``"hdf5"``, or ``"vtkhdf"`` for ParaView (of meshes, with
        ``topology``); default by the suffix of ``path``. The arrays of a single file lie contiguously, and each rank
        writes its rows where they belong, unless ``codec`` compresses them. Of a file for each sample: None is the
        source's, if that is VTP, VTU (a copy of each piece), VTKHDF, HDF5 or OpenFOAM; ``"vtp"``,
        ``"vtu"``, ``"vtkhdf"`` and ``"xdmf"`` are new files of the source's points and cells and the fields alone.
        Beside several lies one whose steps they are: ``series.pvd`` (VTP, VTU), ``series.hdf`` (VTKHDF's grids) or
        ``series.xmf``.
    chunks : Mapping[str, int] or None, optional
        Sizes by dimension. Default: one step, and the source's chunks, in parts of at most 4 MiB. Steps that share a
        chunk are to be given one after another, by one domain.
    shards : Mapping[str, int] or None, optional
        Sizes by dimension of files that hold several chunks (Zarr v3); default a file for each chunk.
    codec : {"blosc", "lz4", "zstd", "zlib", "none"} or None, optional
        Of Zarr's chunks: ``"blosc"`` (the default: Zstandard 3 behind a byte shuffle), ``"lz4"`` (the same of LZ4,
        several times faster), ``"zstd"``, ``"none"``. Those of v3 also carry a crc32c. Of NetCDF-4 and HDF5:
        ``"zlib"`` (level 1 behind a byte shuffle, which every reader has): ranks compress their chunks and keep them
        beside the output, and the first rank puts the file together at the end; or ``"none"``, the default.
    encoding : {"source", "plain"}, default "source"
        ``"source"``: dtype, scale, offset and fill value as there. ``"plain"``: values as the data set decodes them.
    attributes : Mapping[str, Any] or None, optional
        Of the whole, besides those of the source.
    order : {"source", "store"}, default "source"
        Of the rows of meshes, points and graphs: ``"source"`` puts them back where they were in the files that were
        partitioned; ``"store"`` leaves them as they are, so that nothing changes hands but strips along bounds.
    sample : int or Sequence[int] or None, optional
        Of a store of several meshes: the one whose rows are written, by default the first. Of a file for each sample:
        the samples that are written, by default all.
    topology : str or PathLike or None, optional
        The file that has the mesh (UGRID, MPAS, …): its arrays without times are written, too, so that the output
        shows the fields on it. The first rank reads it once. Of a file for each sample: the folder that has the
        sources, where they are not where they were, as seen from the store.
    tiles : {"crop", "blend"} or None, optional
        Where ``like`` has tiles (``patch=Patches(…, order="regular")``): ``writer[i]`` takes tile ``i``, from any rank,
        and steps are put together of their tiles. ``"crop"``, the default, takes each up to the middle of its overlaps,
        bit for bit; ``"blend"`` weights them there, less towards their edges.
    in_flight : int, default 2
        Steps whose parts may wait to be written; ``writer[step] = ...`` waits for room. Memory is bounded by them.
    copy : bool, default True
        False: tensors on the CPU are not copied; changed in place before they are written, they raise. Those on CUDA
        are copied to pinned memory on a stream of their own.
    resume : bool, default False
        Go on with an output that was begun, or begin it. Of a finished output, no step is missing.
    overwrite : bool, default False
        Begin again; an earlier output is replaced at the end, and stays until the new one is whole. Refused while
        another run writes the output: its process is alive on this machine, or gave a sign of life in the last minute
        on another one.
    takeover : bool, default False
        With ``overwrite``: begin again although another run writes the output. That run fails, and says so, at its next
        step or its end.
    storage_options : Mapping[str, Any] or None, optional
        Of a URL, as in :func:`open_dataset`.

    Raises
    ------
    OutputError
        The output is there, was begun as another one, is written by another run, or is an input.
    ConfigError, UnknownNameError
        Arguments that contradict each other or the data set.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> ds = scidata.open_dataset("era5.zarr", fields=["u", "v"])
    >>> with scidata.create("doubled.zarr", like=ds) as writer:
    ...     for step in range(len(ds)):
    ...         writer[step] = {name: 2 * field for name, field in ds[step].items()}
    >>> again = scidata.open_dataset("doubled.zarr", fields=["u"])
    >>> bool((again[3]["u"] == 2 * ds[3]["u"]).all())
    True
    """
    _check_choices(encoding=encoding, format=format, order=order)
    _check_how(resume=resume, overwrite=overwrite, takeover=takeover)
    check_int("in_flight", in_flight, least=1)
    check_mapping("attributes", attributes, "{'title': 'a forecast'}")
    place = place_of(url_of(os.fspath(path), storage_options))
    of_rows, is_folder = isinstance(like, IrregularDataset), os.fspath(path).endswith("/")
    kind = _format_of(str(place.path), format, of_rows=of_rows, is_folder=is_folder)
    made: GridLike | RowsLike
    if isinstance(like, ShardedDataset):
        made = GridLike(like.reader, fields, encoding)
        refuse({"topology": topology is not None, "order": order != "source"}, "grids have no order of their own")
    elif isinstance(like, IrregularDataset) and kind in _EACH:
        refuse(
            {"chunks": chunks is not None, "shards": shards is not None, "attributes": attributes is not None,
             "order": order != "source"}, "a file for each sample has none",
        )  # fmt: skip
        if not isinstance(topology, str | os.PathLike | None):
            raise ConfigError(f"create: topology= names the folder that has the sources, and is {topology!r}")
        moved = None if topology is None else os.path.expanduser(os.fspath(topology))
        made = FilesLike(like, fields, sample, moved, None if kind == "files" else kind.removesuffix(" files"))
    elif isinstance(like, IrregularDataset):
        if not isinstance(sample, int | None):
            raise ConfigError("create: sample: one file has one sample's rows; for several name a folder")
        made = RowsLike(like, fields, order, sample or 0, None if topology is None else os.fspath(topology))
    else:
        raise ConfigError(f"create: like= takes a data set of open_dataset, not a {type(like).__name__}")
    for each in place.written:
        check_apart(each, made.inputs, "the output")
    if codec is None:
        codec = "blosc" if kind in _ZARR else "none"
    is_flat = codec == "none" and kind not in _ZARR  # each rank writes its own rows, wherever its bounds lie
    layout = _layout(made, times, chunks, shards, attributes, is_flat=is_flat)
    _check_dtypes(layout, kind)
    output = _output(place, layout, kind, codec, chunks, shards, made)
    cut = tiles_of(like.reader, tiles, place, layout.num_steps, layout.step_chunk)
    mesh = like.mesh if mesh is None else mesh
    dp_axis, axes = axes_of(mesh, dp=like.dp_axis) if mesh is not None else (None, ())
    if mesh == like.mesh and not set(like.domain_axes) <= set(axes):  # over one of members, say
        axes = like.domain_axes
    ranks = Ranks(mesh, axes, dp_axis)
    owner = Owner(place, ranks.run)
    try:
        said = f"{kind} {'zlib, a file for each chunk,' if codec == 'zlib' else codec} {layout.digest()}"
        said = said if cut is None else f"{said} {hashlib.sha256(cut.digest.encode()).hexdigest()[:8]}"
        if ranks.share(said, lambda each: len(set(each))) > 1:
            raise OutputError(
                f"{place.path}: ranks were asked to write different things there; give all of them the same"
            )
        is_finished = ranks.run_on_first(
            lambda: _begin(place, output, said, owner, resume=resume, overwrite=overwrite, takeover=takeover)
        )
        is_finished, place.suffix = ranks.share([is_finished, place.suffix], itemgetter(0))
        if not is_finished:
            output.open(ranks.run)
        written = None if is_finished else written_steps(place)
        back = RowsBack(ranks, ids) if isinstance(made, RowsLike) and (ids := made.rows()) is not None else None
        routes = {} if back is None else {name: back.route(field) for name, field in layout.fields.items()}
        make: Callable[..., Writer] = Writer if cut is None else partial(TileWriter, tiles=cut)
        if isinstance(made, FilesLike):
            make = FilesWriter
        return make(
            place, layout, output=output, ranks=ranks, owner=owner, written=written, in_flight=in_flight, copy=copy,
            routes=routes,
        )  # fmt: skip
    except BaseException as e:
        ranks.tell(e)
        output.close()
        if ranks.is_first:
            owner.release()
        ranks.close()
        raise


def _check_choices(**given: str | None) -> None:
    formats = (*_FORMATS, *(each for each in _OF_SAMPLES if each not in _FORMATS))
    for name, known in (("encoding", _ENCODINGS), ("format", formats), ("order", _ORDERS)):
        if given[name] is not None and given[name] not in known:
            near = near_matches(str(given[name]), known, listed=False)
            raise ConfigError(f"create: {name}={given[name]!r} is none of {', '.join(known)}{near}")


def _check_dtypes(layout: OutputLayout, kind: str) -> None:
    for name, each in layout.fields.items():
        dtype = each.packing.dtype
        if dtype.kind == "c":
            raise ConfigError(
                f"create: field {name!r} is {dtype}, which is not written; declare two, of .real and .imag"
            )
        if kind == "netcdf" and (wide := {"bool": "int8", "float16": "float32"}.get(dtype.name)):
            raise ConfigError(f"create: NetCDF has no {dtype}; give fields={{{name!r}: {{'dtype': {wide!r}}}}}")


def _check_how(**flags: bool) -> None:
    for name, value in flags.items():
        check_flag(name, value)
    if flags["takeover"] and not flags["overwrite"]:
        raise ConfigError("create: takeover=True takes an output from another run; give overwrite=True, too")
    if flags["resume"] and flags["overwrite"]:
        raise ConfigError("create: resume=True goes on, and overwrite=True begins again; give one of them")


def _layout(
    made: GridLike | RowsLike,
    times: object,
    chunks: Mapping[str, int] | None,
    shards: Mapping[str, int] | None,
    attributes: Mapping[str, Any] | None,
    *,
    is_flat: bool,
) -> OutputLayout:
    """Return the layout of the output; ``is_flat``: arrays have no chunks."""
    sizes, labels = made.steps(times)
    fields = distinct_dims(made.fields(chunks, shards), sizes)
    for each in fields.values():
        if twice := set(sizes) & set(each.dims):
            raise FieldMismatchError(f"create: field {each.name!r} has dim {min(twice)!r}, which is that of the steps")
    if is_flat:
        fields = {name: replace(each, chunks=tuple(1 for _ in each.shape)) for name, each in fields.items()}
    last = list(sizes)[-1]
    return OutputLayout(
        fields=fields,
        step_dims=sizes,
        variables=(*labels, *made.variables(fields)),
        attributes={**made.attributes(), **(attributes or {})},
        step_chunk=min((chunks or {}).get(last, 1), sizes[last]),
    )


def _format_of(path: str, given: str | None, *, of_rows: bool, is_folder: bool) -> str:
    suffix = os.path.splitext(path)[1].lower()
    if of_rows and (not suffix or (is_folder and suffix not in _SUFFIXES)) and given in (None, *_OF_SAMPLES):
        return "files" if given is None else f"{given} files"
    if given in _OF_SAMPLES and given not in _FORMATS:
        raise ConfigError(f"{path}: format={given!r} is of a file for each sample of meshes; name a folder")
    kind = given or _SUFFIXES.get(suffix)
    if kind is None:
        kinds = ", ".join(map(repr, _FORMATS))
        raise ConfigError(f"{path}: the suffix {suffix!r} says nothing of the format; give format={kinds}")
    return kind


def _output(
    place: Place, layout: OutputLayout, kind: str, codec: str, chunks: object, shards: object, like: GridLike | RowsLike
) -> Output | FilesOutput:
    if kind in _ZARR:
        if kind == "zarr2" and shards:
            raise ConfigError("create: Zarr v2 has no shards; write format='zarr'")
        return ZarrOutput(place, layout, zarr_format=3 if kind == "zarr" else 2, codec=codec)
    if shards:
        raise ConfigError(f"create: shards: {kind} files have none; leave it out")
    if codec not in ("zlib", "none") or (codec == "zlib" and kind == "vtkhdf"):
        known = "'zlib' or 'none'" if kind != "vtkhdf" else "'none'"
        raise ConfigError(f"create: codec={codec!r}: {kind} files are written with {known}")
    if chunks and codec == "none":
        also = "" if kind == "vtkhdf" else ", or compress them with codec='zlib'"
        raise ConfigError(f"create: chunks: arrays of {kind} files lie contiguously; leave it out{also}")
    if not isinstance(place, LocalPlace):
        what = "a folder of files" if kind in _EACH else f"a {kind} file"
        raise ConfigError(f"{place.path}: {what} is written to a file system; write Zarr to an object store")
    if isinstance(like, FilesLike):
        return FilesOutput(place, like, layout, is_packed=codec == "zlib")
    if codec == "zlib":
        return PackedFileOutput(place, layout, kind=kind)
    if kind != "vtkhdf":
        return FlatOutput(place, layout, kind=kind)
    if not isinstance(like, RowsLike):
        raise ConfigError("create: VTKHDF is written of meshes; write a grid as NetCDF or Zarr")
    return VtkhdfOutput(place, layout, geometry=like.geometry())


def _begin(
    place: Place, output: Output | FilesOutput, layout: str, owner: Owner, *, resume: bool, overwrite: bool,
    takeover: bool,
) -> bool:  # fmt: skip
    """Make the output, or check that the existing one is the same. Returns True if it is finished."""
    with place.locked():
        other = living(place)
        if other is not None and not takeover:
            raise refusal(place, other)
        begun = begun_at(place) if place.is_begun and not overwrite else None
        goes_on = resume and begun is not None and begun.layout is not None and place.is_begun
        if goes_on and begun is not None and begun.layout != layout:
            raise OutputError(
                f"{place.path}: another output was begun there ({begun.layout}, and this is {layout}): other fields, "
                "sizes, chunks, times or encoding; give the same, or begin again with overwrite=True"
            )
        if not goes_on and place.is_finished and not overwrite:
            if resume:
                place.forget_progress()
                return True
            raise OutputError(f"{place.path} is there already; give overwrite=True to replace it, or another path")
        if begun is not None and not resume:
            raise OutputError(
                f"{place.path} was begun and is unfinished; go on with resume=True, or begin again with overwrite=True"
            )
        runs = (*begun.runs, owner.run) if goes_on and begun is not None else (owner.run,)
        place.begin()
        owner.take()
        if not goes_on:
            place.clear(None if other is None else owner.run, owner.files)
        say_begun(place, Begun(layout=layout if goes_on else None, runs=runs))
    if goes_on:
        output.resume()
    else:
        output.create()
        say_begun(place, Begun(layout=layout, runs=runs))
    return False
