"""The ``scidata`` command: arguments in, calls, tables or JSON out.

Everything heavy (NumPy, torch, the formats) is imported by the command that needs it, so that ``scidata --help``
answers at once.
"""

from __future__ import annotations

import sys
from typing import Any

import typer

from scidata.cli import options as opt
from scidata.cli.failures import FAILED, Group

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Each rank of a group reads only its own part of a sample: see what files hold and what each rank would read, "
    "prepare meshes, point clouds and graphs, and time it all.",
    epilog="A first look: scidata inspect FILE, then scidata plan FILE --domain 8. Exit codes: 0 done, 1 failed, "
    "2 wrong arguments, 130 interrupted.",
)


@app.callback()
def _root(debug: opt.RootDebug = False, version: opt.Version = False) -> None:
    pass


@app.command()
def inspect(
    paths: opt.DataPaths,
    sample: opt.InspectSample = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Show what a file or store holds: arrays, chunks, kind, default split, and slow layouts.

    \b
    scidata inspect era5.zarr
    scidata inspect 'era5_*.nc' --json
    """
    from scidata.cli.commands.inspect import run_inspect

    run_inspect(paths, sample=sample, as_json=as_json)


@app.command()
def plan(
    path: opt.PlanPath,
    domain: opt.Domain,
    dp: opt.Dp = None,
    shard: opt.Shard = None,
    halo: opt.Halo = None,
    periodic: opt.Periodic = None,
    bounds: opt.Bounds = None,
    align: opt.Align = None,
    weights: opt.Weights = None,
    fields: opt.Fields = None,
    isel: opt.Isel = None,
    sel: opt.Sel = None,
    sample_dim: opt.SampleDim = None,
    steps: opt.Steps = None,
    sample: opt.Sample = 0,
    dtype: opt.Dtype = None,
    kind: opt.Kind = None,
    positions: opt.Positions = None,
    time: opt.Time = None,
    window: opt.Window = None,
    every: opt.Every = None,
    where: opt.Where = None,
    ghosts: opt.Ghosts = None,
    plot: opt.Plot = None,
    overwrite: opt.OverwritePicture = False,
    every_rank: opt.EveryRank = False,
    counted: opt.Counted = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Show what each rank of a domain would read of a sample, without starting any.

    \b
    scidata plan era5.zarr --domain 8 --halo latitude=2
    scidata plan era5.zarr --domain 2x4 --shard latitude --shard longitude --bounds chunk
    scidata plan train.store --domain 64 --halo 2 --plot parts.png
    scidata plan obs.zarr --domain 8 --time dates --window 6h --where qc=0,1
    scidata plan pairs.toml --domain 4    # of a join
    """
    from scidata.cli import arguments as parse
    from scidata.cli.commands.plan import PlanOutput, run_plan

    axis_sizes = parse.parse_domain(domain)
    parse.check_choice("--kind", kind, parse.KINDS)
    if overwrite and plot is None:
        raise parse.usage_error("--overwrite", "is for the picture of --plot; leave it out.")
    options = parse.read_options(
        axis_sizes, of_store=time is None and parse.names_store(path), shard=shard, halo=halo, periodic=periodic,
        bounds=bounds, align=align, weights=weights, fields=fields, isel=isel, sel=sel, sample_dim=sample_dim,
        steps=steps, dtype=dtype, ghosts=ghosts, kind=kind, num_threads=1,
        positions=positions, time=time, window=window, every=every, where=where,
    )  # fmt: skip
    output = PlanOutput(
        sample=sample, dp=dp, plot=plot, overwrite=overwrite, every_rank=every_rank, counted=counted, as_json=as_json
    )
    if path.endswith(".toml"):
        if plot is not None or counted or vars(options) != vars(type(options)(num_threads=1)):
            raise parse.usage_error("PATH", f"{path} has the options of each part of a join: leave them out here.")
        from scidata.cli.commands.joined import run_plan_of_join

        run_plan_of_join(path, axis_sizes, output)
        return
    run_plan(path, axis_sizes, options, output)


@app.command()
def stats(
    paths: opt.DataPaths,
    by: opt.By = None,
    fields: opt.Fields = None,
    sel: opt.Sel = None,
    isel: opt.Isel = None,
    sample_dim: opt.SampleDim = None,
    dtype: opt.Dtype = None,
    kind: opt.Kind = None,
    positions: opt.Positions = None,
    time: opt.Time = None,
    window: opt.Window = None,
    every: opt.Every = None,
    where: opt.Where = None,
    no_differences: opt.NoDifferences = False,
    stored: opt.Stored = False,
    allow_missing: opt.AllowMissing = False,
    jobs: opt.StatsJobs = 1,
    dask: opt.Dask = None,
    out: opt.Out = None,
    overwrite: opt.OverwriteOut = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Mean, deviation and extremes of each field, and of its changes from step to step, for normalising.

    \b
    scidata stats era5.zarr --by level --sel time=1990:2015 --out stats.json
    scidata stats 'era5_*.nc' --fields u,v --jobs 8
    """
    from scidata.cli import arguments as parse

    parse.check_choice("--kind", kind, parse.KINDS)
    if overwrite and out is None:
        raise parse.usage_error("--overwrite", "is for the file of --out; leave it out.")
    options = parse.read_options(
        {"domain": 1}, of_store=False, fields=fields, isel=isel, sel=sel, sample_dim=sample_dim, dtype=dtype, kind=kind,
        allow_missing=allow_missing, positions=positions, time=time, window=window, every=every, where=where,
    )  # fmt: skip
    dims = parse.parse_names(by or ())
    from scidata.cli.commands.stats import run_stats

    run_stats(
        paths, options, by=dims, differences=not no_differences, stored=True if stored else None, jobs=jobs,
        dask=dask, out=out, overwrite=overwrite, as_json=as_json,
    )  # fmt: skip


@app.command()
def stage(
    path: opt.StagePath,
    cache: opt.CacheDir,
    domain: opt.Domain,
    rank: opt.Ranks = None,
    shard: opt.Shard = None,
    halo: opt.Halo = None,
    periodic: opt.Periodic = None,
    bounds: opt.Bounds = None,
    align: opt.Align = None,
    weights: opt.Weights = None,
    fields: opt.Fields = None,
    isel: opt.Isel = None,
    sel: opt.Sel = None,
    sample_dim: opt.SampleDim = None,
    steps: opt.Steps = None,
    dtype: opt.Dtype = None,
    ghosts: opt.Ghosts = None,
    allow_missing: opt.AllowMissing = False,
    cache_bytes: opt.CacheBytes = None,
    jobs: opt.StageJobs = 4,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Fill a cache with the rows that ranks will read of a grid or store; training reads them with cache_dir=CACHE.

    \b
    scidata stage s3://bucket/era5.zarr /local/cache --domain 8 --halo latitude=2
    scidata stage era5.zarr /local/cache --domain 64 --rank 8-15 --cache-bytes 500G    # the second node of 8
    scidata stage s3://bucket/train.store /local/cache --domain 64 --rank 8-15 --halo 2
    """
    from scidata.cli import arguments as parse
    from scidata.cli.commands.stage import run_stage

    axis_sizes = parse.parse_domain(domain)
    options = parse.read_options(
        axis_sizes, of_store=parse.names_store(path), shard=shard, halo=halo, periodic=periodic, bounds=bounds,
        align=align, weights=weights, fields=fields, isel=isel, sel=sel, sample_dim=sample_dim, steps=steps,
        dtype=dtype, ghosts=ghosts, allow_missing=allow_missing, cache_dir=cache,
        cache_disk_bytes=parse.parse_bytes(cache_bytes, "--cache-bytes"),
    )  # fmt: skip
    run_stage(path, axis_sizes, options, ranks=rank or (), jobs=jobs, as_json=as_json)


@app.command()
def index(paths: opt.IndexPaths, out: opt.IndexOut = None, as_json: opt.Json = False, debug: opt.Debug = False) -> None:
    """Read the metadata of many HDF5 and NetCDF files once, so that each rank opens them at the price of one.

    \b
    scidata index 'era5/*.nc'
    scidata index 'era5/*.nc' --out /local/cache    # training names cache_dir="/local/cache"
    """
    from scidata.cli.commands.index import run_index

    run_index(paths, out=out, as_json=as_json)


@app.command()
def partition(
    paths: opt.PartitionPaths,
    kind: opt.PartitionKind = None,
    mesh: opt.Mesh = None,
    topology: opt.Topology = None,
    points: opt.Points = None,
    fields: opt.Fields = None,
    entity: opt.Entity = None,
    edges: opt.Edges = None,
    nodes: opt.Nodes = None,
    geometry: opt.Geometry = None,
    order: opt.Order = "hilbert",
    weights: opt.PartitionWeights = None,
    repair: opt.Repair = None,
    keep: opt.Keep = None,
    jobs: opt.Jobs = 1,
    dask: opt.Dask = None,
    part: opt.Part = None,
    memory: opt.PartitionMemory = None,
    finalize: opt.Finalize = False,
    dry_run: opt.DryRun = False,
    overwrite: opt.OverwriteStore = False,
    resume: opt.Resume = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Write meshes, point clouds or graphs as a store that any number of ranks reads.

    \b
    scidata partition 'mesh_*.nc' train.store --jobs 4
    scidata partition fields.nc waves.store --mesh grid.nc
    scidata partition 'car_*.h5' cars.store --kind points --points xyz
    scidata partition 'case_*.vtu' flow.store --entity cell
    scidata partition 'car_*.vtp' cars.store --kind points --entity cell --order shuffle
    scidata partition 'obs_*.parquet' obs.store --order time:dates --memory 8G
    scidata partition era5.nc graph.store --nodes grid=file,mesh=icosahedral:5 --edges grid__to__mesh=spacing:0.6
    scidata partition wing.vtkhdf wing.store --memory 8G                      # larger ones in passes over disk
    scidata partition 'mesh_*.nc' train.store --part $SLURM_ARRAY_TASK_ID/8    # array 0-7
    scidata partition --finalize train.store                                  # after it
    scidata partition 'mesh_*.nc' train.store --dask tcp://node17:8786
    """
    from scidata.cli.arguments import parse_bytes, parse_fields, parse_names, parse_rules, usage_error
    from scidata.cli.commands.partition import run_finalize, run_partition

    if finalize:
        if part is not None or dry_run or overwrite or resume:
            raise usage_error("--finalize", "takes no --part, --dry-run, --overwrite or --resume.")
        run_finalize(paths, as_json=as_json)
        return
    if overwrite and resume:
        raise usage_error("--resume", "excludes --overwrite: one keeps the samples that the other removes.")
    options: dict[str, Any] = {
        "kind": kind,
        "mesh": mesh,
        "points": points,
        "entity": entity,
        "edges": parse_rules("--edges", edges) if edges is not None and "=" in edges else edges,
        "nodes": None if nodes is None else parse_rules("--nodes", nodes),
        "fields": parse_fields(fields),
        "topology": topology,
        "geometry": geometry,
        "order": order,
        "weights": weights,
        "repair": parse_names(repair or ()),
        "keep": parse_names(keep or ()),
        "jobs": jobs,
        "part": part,
        "memory": parse_bytes(memory, "--memory"),
        "dry_run": dry_run,
        "overwrite": overwrite,
        "resume": resume,
    }
    run_partition(paths, options, dask=dask, as_json=as_json)


@app.command()
def verify(path: opt.Store, as_json: opt.Json = False, debug: opt.Debug = False) -> None:
    """Reread every byte of a partitioned store and check its invariants; name the first fault.

    \b
    scidata verify train.store && sbatch train.slurm
    """
    from scidata.cli.commands.partition import run_verify

    if not run_verify(path, as_json=as_json):
        raise typer.Exit(FAILED)


@app.command()
def bench(
    path: opt.BenchPath,
    fields: opt.Fields = None,
    kind: opt.Kind = None,
    repeats: opt.Repeats = 5,
    pipeline: opt.Pipeline = False,
    workers: opt.Workers = None,
    samples: opt.Samples = None,
    step_ms: opt.StepMs = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Time reading: plain slicing, the format's own library, scidata, and preadv, which nothing beats; or a loader.

    \b
    scidata bench era5.zarr --fields u
    scidata bench train.store --pipeline --workers 0,2
    """
    common: dict[str, Any] = {"fields": fields, "kind": kind, "repeats": repeats, "as_json": as_json}
    if pipeline:
        from scidata.cli.commands.pipeline_bench import run_pipeline

        run_pipeline(path, workers=workers, samples=samples, step_ms=step_ms, **common)
        return
    from scidata.cli.commands.bench import run_bench

    run_bench(path, {"--workers": workers, "--samples": samples, "--step-ms": step_ms}, **common)


@app.command()
def demo(
    ranks: opt.DemoRanks = 2,
    steps: opt.DemoSteps = 5,
    keep: opt.KeepDir = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Train a small ViT on made-up data over several ranks of this machine, and compare with one process.

    \b
    scidata demo --ranks 3 --keep demo
    """
    from scidata.cli.commands.demo import run_demo

    if not run_demo(ranks=ranks, steps=steps, keep=keep, as_json=as_json):
        raise typer.Exit(FAILED)


def main() -> None:
    """Run the command line; the entry point of the ``scidata`` script."""
    for stream in (sys.stdout, sys.stderr):  # each line is seen at once, also in a pipe
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    app(prog_name="scidata")
