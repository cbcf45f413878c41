"""The options of the commands: name, type and help of each."""

from __future__ import annotations

from collections.abc import Callable
from os.path import expanduser as _home
from typing import Annotated

import typer

_PRINTED = "What is printed"
_READ = "What is read"
_SPLIT = "How a sample is split"
_STORE = "Partitioned stores"
_TABLES = "Tables of observations"
_ROWS = "Rows and edges of the store"
_FAULTS = "Faulty input"
_RUN = "How it runs"
_PIPELINE = "With --pipeline"


def _argument(metavar: str, text: str) -> object:
    return typer.Argument(metavar=metavar, help=text)


def _option(
    metavar: str, text: str, panel: str | None = None, *, parser: Callable[[str], object] | None = None
) -> object:
    return typer.Option(metavar=metavar, help=text, rich_help_panel=panel, parser=parser)


def _flag(name: str, text: str, panel: str | None = None, *, at_once: Callable[..., object] | None = None) -> object:
    """Declare a flag; ``at_once`` is called where it is met, before other options are looked at."""
    return typer.Option(name, help=text, rich_help_panel=panel, callback=at_once, is_eager=at_once is not None)


def _whole(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``least`` on, which names a wrong value."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not a whole number.") from None
        if number < least:
            raise typer.BadParameter(f"{number} is less than {least}.")
        return number

    return parse


def _milliseconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number of milliseconds.") from None
    if not 0 <= number < float("inf"):
        raise typer.BadParameter(f"{text} is negative or infinite.")
    return number


def _set_debug(ctx: typer.Context, value: bool) -> bool:
    if value:
        ctx.meta["scidata.debug"] = True  # shared by the group and its commands
    return value


def _print_version(value: bool) -> None:
    if value:
        from scidata import __version__

        typer.echo(f"scidata {__version__}")
        raise typer.Exit


# -- all commands ------------------------------------------------------------------------------------------------------

Json = Annotated[bool, _flag("--json", "Print JSON instead of a table.", _PRINTED)]
Debug = Annotated[bool, _flag("--debug", "Show the traceback of an error.", _PRINTED, at_once=_set_debug)]
RootDebug = Annotated[bool, _flag("--debug", "Show the traceback of an error.", at_once=_set_debug)]
Version = Annotated[bool, _flag("--version", "Print the version.", at_once=_print_version)]
Fields = Annotated[list[str] | None, _option("NAME,...", "Arrays to read; default all.", _READ)]

# -- inspect -----------------------------------------------------------------------------------------------------------

DataPaths = Annotated[
    list[str], _argument("PATH...", "A file, Zarr store, scidata store or URL; a glob or list of a series of files.")
]
InspectSample = Annotated[
    int | None, _option("N", "The sample whose order is judged; default 0.", _STORE, parser=_whole(0))
]

# -- plan --------------------------------------------------------------------------------------------------------------

PlanPath = Annotated[
    str, _argument("PATH", "A file, Zarr store, scidata store or URL; or a glob of a series of files.")
]
Domain = Annotated[
    str, _option("P|PxQ", "Ranks that share a sample: 8; or 2x4, over two dimensions of a grid.", _SPLIT)
]
Dp = Annotated[int | None, _option("N", "So many such groups, each on other samples.", _SPLIT, parser=_whole(1))]
Shard = Annotated[
    list[str] | None,
    _option(
        "DIM[=AXIS]",
        "Grids: dimension to split, once for each number of --domain; default latitude, then longitude.",
        _SPLIT,
    ),
]
Halo = Annotated[
    list[str] | None,
    _option(
        "[DIM=]N[:M]",
        "Neighbours' rows that are read too: N on each side, or N below and M above; may be repeated. Stores: hops "
        "along edges, or a radius of points; between node sets also layers by relation, in their order: "
        "grid__to__mesh=1,mesh__to__mesh=4. Default 0.",
        _SPLIT,
    ),
]
Periodic = Annotated[
    list[str] | None, _option("DIM", "Grids: dimension that wraps, and its halo with it; may be repeated.", _SPLIT)
]
Bounds = Annotated[
    list[str] | None,
    _option(
        "[DIM=]even|chunk|0,...,N",
        "Where ranks begin: even, the default; at edges of chunks; or at these rows. May be repeated.",
        _SPLIT,
    ),
]
Align = Annotated[
    list[str] | None,
    _option("[DIM=]N", "Grids: bounds fall on multiples of N, such as a ViT's patch size; may be repeated.", _SPLIT),
]
Weights = Annotated[
    str | None,
    _option("FIELD|edges", "Bounds balance the sum of this field, or a store's edges, not the rows.", _SPLIT),
]
Isel = Annotated[
    list[str] | None, _option("DIM=A:B:C|I", "Crop, stride or index before the split; may be repeated.", _READ)
]
SampleDim = Annotated[
    str | None,
    _option(
        "DIM[,DIM]",
        "Dimension that numbers the samples, default the first that is not split; trajectory,time for the times of "
        "each trajectory. none: all is one sample; of stores, samples as they were stored.",
        _READ,
    ),
]
Steps = Annotated[
    list[str] | None,
    _option(
        "[FIELD=]I,...",
        "Rows along it that make one sample: 0,1 for input and target; default 0. Of a grid also by field, u=-1,0,1, "
        "with *=0 for all others. Repeatable.",
        _READ,
    ),
]
Sample = Annotated[int, _option("N", "The sample to plan.", _READ, parser=_whole(0))]
Dtype = Annotated[str | None, _option("float16|32|64", "Of floating fields in memory; default the file's.", _READ)]
Kind = Annotated[
    str | None, _option("grid|points", "Take the arrays of a raw file as they lie, as this; default detected.", _READ)
]
Positions = Annotated[
    list[str] | None, _option("NAME,...", "Points: arrays of coordinates; default by their names.", _TABLES)
]
Time = Annotated[str | None, _option("NAME", "Samples are windows of a table, by this column of times.", _TABLES)]
Window = Annotated[str | None, _option("SPAN", "How long a window is: 6h, 30min.", _TABLES)]
Every = Annotated[str | None, _option("SPAN", "From one window to the next; default --window.", _TABLES)]
Where = Annotated[
    list[str] | None,
    _option("NAME=V,...|A:B", "Rows that are read, by a column: qc=0,1 or bt=150:350. May be repeated.", _TABLES),
]
Ghosts = Annotated[
    str | None,
    _option(
        "disk|exchange", "How fields of ghosts come: read, the default with --halo; or sent by their owners.", _STORE
    ),
]
Plot = Annotated[str | None, _option("FILE.png", "Also draw every rank's part and halo.", _PRINTED, parser=_home)]
OverwritePicture = Annotated[bool, _flag("--overwrite", "Replace the picture if it exists.", _PRINTED)]
EveryRank = Annotated[bool, _flag("--all", "List every rank, also where there are many.", _PRINTED)]
Counted = Annotated[
    bool, _flag("--counted", "Only ghosts, as partition counted them for 8 to 1024 ranks: no edges are read.", _PRINTED)
]

# -- partition, verify -------------------------------------------------------------------------------------------------

PartitionPaths = Annotated[
    list[str], _argument("SOURCE... OUT", "Files, globs or URLs, then the new folder of the store.")
]
PartitionKind = Annotated[str | None, _option("mesh|points|graph", "What the sources are; default detected.", _READ)]
Mesh = Annotated[str | None, _option("FILE", "The file of the mesh, where the sources hold fields on it.", _READ)]
Topology = Annotated[str | None, _option("NAME", "The mesh variable, where a UGRID file has several.", _READ)]
Points = Annotated[
    str | None,
    _option(
        "NAME,...", "Arrays of coordinates: one of (N, 2) or (N, 3), or two or three of (N,); default by name.", _READ
    ),
]
Entity = Annotated[str | None, _option("cell", "Rows of a mesh, or points, are its cells; default its nodes.", _ROWS)]
Edges = Annotated[
    str | None,
    _option(
        "RULE",
        "Which rows are neighbours. edge_index: as the file says, default of graphs. cells: along edges of cells, "
        "default of meshes. faces: across faces, default with --entity cell. nodes: of cells that share a node. "
        "knn:8: the 8 nearest. radius:0.1: all within it. With --nodes, by relation: "
        "grid__to__mesh=spacing:0.6,mesh__near__mesh=levels.",
        _ROWS,
    ),
]
Nodes = Annotated[
    str | None,
    _option(
        "SET=RULE,...",
        "Build a graph between node sets around the file, with --edges by relation. file: its own points. "
        "icosahedral:6, healpix:64, gaussian:O96, latlon:1.0: generated; voxel:0.1, farthest:512: of its points; "
        "gaussian:FILE: by its points on each latitude.",
        _ROWS,
    ),
]
Order = Annotated[
    str,
    _option(
        "hilbert|rcb|metis|rows|shuffle|time:COLUMN",
        "Order of the rows. metis: smallest halos, takes longest. rows: as in the file. shuffle: points at random, for "
        "draws in training; shuffle:4096 in leaves of so many rows. time:dates: a table by its times, for windows.",
        _ROWS,
    ),
]
Geometry = Annotated[
    str | None,
    _option(
        "NAME,...|none",
        "Also store this of the rows: area,normal,volume (default where points are cells), curvature, sdf=SURFACE: "
        "signed distance to the surface in a file ({name}, {folder}: of the sample), or sdf=boundary.",
        _ROWS,
    ),
]
PartitionWeights = Annotated[
    str | None, _option("FIELD|edges", "What a row costs, for balanced bounds; default 1.", _ROWS)
]
Repair = Annotated[
    list[str] | None, _option("FAULT,...|all", "Leave out what has these faults instead of refusing it.", _FAULTS)
]
Keep = Annotated[
    list[str] | None,
    _option("FAULT,...", "Keep it as it is: self_loops, duplicate_edges, crowded_faces.", _FAULTS),
]
Jobs = Annotated[int, _option("N", "Samples processed at once.", _RUN, parser=_whole(1))]
Dask = Annotated[
    str | None,
    _option(
        "ADDRESS", "Instead of --jobs: workers of the Dask cluster there, tcp://host:8786 or a scheduler file.", _RUN
    ),
]
Part = Annotated[str | None, _option("I/N", "Only every N-th sample, from I = 0 on: one task of a SLURM array.", _RUN)]
PartitionMemory = Annotated[
    str | None,
    _option(
        "BYTES", "Most memory of a process: 8G, say; what is larger goes in passes over disk. Default no limit.", _RUN
    ),
]
Finalize = Annotated[bool, _flag("--finalize", "Give OUT alone: finish the store once all parts are done.", _RUN)]
DryRun = Annotated[bool, _flag("--dry-run", "Only list the samples that would be written.", _RUN)]
OverwriteStore = Annotated[bool, _flag("--overwrite", "Replace the store that is there.", _RUN)]
Resume = Annotated[bool, _flag("--resume", "Go on with the store that is there; whole samples stay.", _RUN)]
Store = Annotated[str, _argument("STORE", "A store that `scidata partition` wrote.")]

# -- stage -------------------------------------------------------------------------------------------------------------

StagePath = Annotated[
    str, _argument("SOURCE", "A grid: a file, Zarr store, URL, or a glob of a series of files. Or a scidata store.")
]
CacheDir = Annotated[str, _argument("CACHE", "The folder that the training script names as cache_dir.")]
Ranks = Annotated[
    list[str] | None, _option("R|A-B,...", "Only these ranks of the domain; default all. May be repeated.", _SPLIT)
]
AllowMissing = Annotated[
    bool, _flag("--allow-missing", "Read absent chunks as the fill value, as allow_missing=True does.", _READ)
]
CacheBytes = Annotated[
    str | None,
    _option("BYTES", "Most bytes in CACHE: 500G, say; default half of the free space on its disk.", _RUN),
]
StageJobs = Annotated[
    int, _option("N", "Blocks of a grid, or parts of a store, that are fetched at once.", _RUN, parser=_whole(1))
]

# -- index -------------------------------------------------------------------------------------------------------------

IndexPaths = Annotated[
    list[str], _argument("PATH...", "Files, or globs in quotes: HDF5, NetCDF-4 and NetCDF-3 of local file systems.")
]
IndexOut = Annotated[
    str | None,
    _option("CACHE", "Write it to this folder, which training names as cache_dir; default beside the files.", _RUN),
]

# -- stats -------------------------------------------------------------------------------------------------------------

By = Annotated[
    list[str] | None, _option("DIM,...", "Figures of each row of these dims, level say; may be repeated.", _PRINTED)
]
Out = Annotated[str | None, _option("FILE.json", "Also write them exactly, for ds.normalise.", _PRINTED, parser=_home)]
OverwriteOut = Annotated[bool, _flag("--overwrite", "Replace the file if it exists.", _PRINTED)]
Sel = Annotated[
    list[str] | None,
    _option(
        "DIM=A:B|V,...",
        "The period, or levels, by the values of coordinates: time=1990:2015, level=500,850. Times of day as an "
        "interval: time=2020-01-01T06:00/2020-02-01T00:00. May be repeated.",
        _READ,
    ),
]
NoDifferences = Annotated[
    bool, _flag("--no-differences", "Leave out the differences from one step to the next.", _READ)
]
StatsJobs = Annotated[int, _option("N", "Processes that read side by side.", _RUN, parser=_whole(1))]
Stored = Annotated[
    bool, _flag("--stored", "Only statistics stored with the data, a store's or anemoi's; read no field.", _READ)
]

# -- bench, demo -------------------------------------------------------------------------------------------------------

BenchPath = Annotated[
    str, _argument("PATH", "A local file or Zarr store; with --pipeline, a scidata store or a glob too.")
]
Repeats = Annotated[int, _option("N", "Timed rounds; figures are medians.", parser=_whole(1))]
Pipeline = Annotated[bool, _flag("--pipeline", "Time a DataLoader instead, beside preadv and the decompressor.")]
Workers = Annotated[str | None, _option("N,...", "Numbers of reader threads; default 0,1,2,4.", _PIPELINE)]
Samples = Annotated[int | None, _option("N", "Samples of a round; default 20.", _PIPELINE, parser=_whole(1))]
StepMs = Annotated[
    float | None, _option("MS", "Time of a training step; default twice a read.", _PIPELINE, parser=_milliseconds)
]
DemoRanks = Annotated[int, _option("N", "Ranks that share each sample, at most 15.", parser=_whole(1))]
DemoSteps = Annotated[int, _option("N", "Training steps.", parser=_whole(1))]
KeepDir = Annotated[str | None, _option("DIR", "Keep data and results in this new folder.", parser=_home)]
