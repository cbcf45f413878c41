"""The ``scidata`` command: arguments in, calls, tables or JSON out.

Everything heavy (NumPy, torch, the formats) is imported by the command that needs it, so that ``scidata --help``
answers at once.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from scidata.errors import SciDataError, near_matches

if TYPE_CHECKING:
    from scidata.grid_reader import GridReader

__all__ = ["app", "main"]

_EXIT_FAILED, _EXIT_INTERRUPTED = 1, 130


class _Group(typer.core.TyperGroup):
    """Turns expected errors into one line and the exit code, unless ``--debug`` is given."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # `scidata plan … | head`: the framework ends quietly
        except (SciDataError, OSError) as e:
            if ctx.meta.get("scidata.debug"):
                raise
            from scidata._cli.output import print_error

            print_error(_message(e))
            raise typer.Exit(_EXIT_FAILED) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(_EXIT_INTERRUPTED) from None


def _near(error: OSError) -> str:
    """Return names like that of a file that is not there, for the end of the message."""
    folder, name = os.path.split(str(error.filename))
    if not isinstance(error, FileNotFoundError) or not os.path.isdir(folder or "."):
        return ""
    return near_matches(name, os.listdir(folder or "."))


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and not isinstance(error, SciDataError) and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}{_near(error)}" if error.filename else error.strerror
    return str(error) or type(error).__name__


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Rank-aware reading of grids, meshes, point clouds and graphs: what files hold, what each rank reads of them.",
)


def _set_debug(ctx: typer.Context, value: bool) -> bool:
    if value:
        ctx.meta["scidata.debug"] = True  # shared by the group and its commands
    return value


def _print_version(value: bool) -> None:
    if value:
        from scidata import __version__

        typer.echo(f"scidata {__version__}")
        raise typer.Exit


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Debug = Annotated[
    bool, typer.Option("--debug", callback=_set_debug, is_eager=True, help="Show the traceback of an error.")
]
Fields = Annotated[
    list[str] | None, typer.Option("--fields", metavar="NAME,...", help="Arrays to read; all by default.")
]


@app.callback()
def _root(
    debug: Debug = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def inspect(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="A store, a glob, or the files of a series.")],
    sample: Annotated[
        int | None, typer.Option(metavar="N", help="Partitioned store: the sample whose order is judged; default 0.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a store holds: arrays, chunks, kind, default split, and what will read badly."""
    from scidata._cli.arguments import usage_error
    from scidata._cli.stores import names_store, run_inspect

    found = [path for path in paths if names_store(path)]
    if found and len(paths) > 1:
        raise usage_error("PATH...", f"{found[0]} is a partitioned store; inspect one of them at a time.")
    if found:
        run_inspect(found[0], sample=sample or 0, as_json=as_json)
        return
    if sample is not None:
        raise usage_error("--sample", "is for stores that `scidata partition` wrote; leave it out.")
    from scidata._cli.output import print_json
    from scidata._cli.tables import print_report
    from scidata.inspect import inspect_store

    report = inspect_store(paths if len(paths) > 1 else paths[0])
    if as_json:
        print_json(report.to_dict())
    else:
        print_report(report)


@app.command()
def plan(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A store, a glob of the files of a series, or a partitioned store.")
    ],
    domain: Annotated[str, typer.Option(metavar="P | PxQ", help="Ranks that share a sample: 8, or 2x4 on two dims.")],
    kind: Annotated[
        str | None, typer.Option(metavar="grid", help="Take the arrays of a raw mesh as grids; default detected.")
    ] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="Such groups, each on other samples.")] = None,
    shard: Annotated[
        list[str] | None, typer.Option(metavar="DIM[=AXIS]", help="Dimension to split; once for each domain axis.")
    ] = None,
    halo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[DIM=]N[:M]",
            help="Ghost rows below and above. Repeatable. Partitioned store: hops along edges, or a radius of points.",
        ),
    ] = None,
    ghosts: Annotated[
        str | None,
        typer.Option(
            metavar="exchange|disk", help="Partitioned store: how ghosts' fields come; with --halo read from disk."
        ),
    ] = None,
    bounds: Annotated[
        list[str] | None, typer.Option(metavar="[DIM=]even|chunk|0,...,N", help="Where ranks begin. Repeatable.")
    ] = None,
    align: Annotated[
        list[str] | None, typer.Option(metavar="[DIM=]N", help="Bounds fall on multiples of N. Repeatable.")
    ] = None,
    periodic: Annotated[
        list[str] | None, typer.Option(metavar="DIM", help="Dimension whose halo wraps. Repeatable.")
    ] = None,
    isel: Annotated[
        list[str] | None,
        typer.Option(metavar="DIM=A:B:C|I", help="Crop, stride or index before the split. Repeatable."),
    ] = None,
    fields: Fields = None,
    steps: Annotated[
        str | None, typer.Option(metavar="I,...", help="Offsets along the sample dimension; default 0.")
    ] = None,
    sample_dim: Annotated[
        str | None,
        typer.Option(
            metavar="DIM", help="Dimension that numbers the samples; none: samples of a partitioned store are whole."
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="FIELD|edges", help="Field whose sum over a row is the row's cost; edges: of a store."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(metavar="float32", help="Floating dtype in memory.")] = None,
    sample: Annotated[int, typer.Option(help="The sample to plan.")] = 0,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE.png", help="Also draw every rank's part and ghosts.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the picture if it exists.")] = False,
    every_rank: Annotated[bool, typer.Option("--all", help="List every rank, also of a large domain.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what each rank of a domain would read of a sample, without starting any."""
    from scidata._cli import arguments as parse
    from scidata.raw_kind import kind_of_raw

    axis_sizes = parse.parse_domain(domain)
    if _plan_of_store(
        path,
        axis_sizes,
        {
            "halo": halo or (),
            "ghosts": ghosts,
            "bounds": bounds or (),
            "weights": weights,
            "fields": parse.parse_names(fields or ()) or None,
            "dtype": parse.parse_dtype(dtype),
            "sample_dim": False if sample_dim == "none" else sample_dim,
            "steps": parse.parse_steps("0" if steps is None else steps),
            "isel": parse.parse_isel(isel or ()),
        },
        refused={
            "--shard": bool(shard),
            "--align": bool(align),
            "--periodic": bool(periodic),
        },
        sample=sample,
        dp=dp,
        plot=plot,
        overwrite=overwrite,
        every_rank=every_rank,
        as_json=as_json,
    ):
        return
    if kind not in (None, "grid", "points"):
        raise parse.usage_error("--kind", f"{kind!r} is none of grid, points; meshes and graphs are planned as stores.")
    only_grids = (shard, align, periodic, isel, steps, sample_dim)
    kind_of_raw(path, kind, False, like_grid=any(given is not None for given in only_grids))
    if ghosts is not None:
        raise parse.usage_error("--ghosts", "the halo of a grid is always read from disk; leave it out.")
    limits = parse.parse_bounds(bounds or ())
    split = parse.parse_shard(shard or (), axis_sizes)
    options: dict[str, Any] = {
        "axis_sizes": axis_sizes,
        "shard": split,
        "halo": parse.parse_halo(halo or ()),
        "bounds": limits,
        "align": parse.parse_align(align or ()),
        "periodic": parse.parse_names(periodic or ()),
        "isel": parse.parse_isel(isel or ()),
        "fields": parse.parse_names(fields or ()) or None,
        "steps": parse.parse_steps("0" if steps is None else steps),
        "sample_dim": sample_dim,
        "weights": weights,
        "dtype": parse.parse_dtype(dtype),
        "num_threads": 1,
    }
    if weights is not None and limits != "even":
        raise parse.usage_error("--weights", "weights decide the bounds; leave out --bounds.")
    _plan(path, options, sample=sample, dp=dp, plot=plot, overwrite=overwrite, every_rank=every_rank, as_json=as_json)


def _plan_of_store(path: str, *args: Any, **kwargs: Any) -> bool:
    """Plan a partitioned store, where ``path`` is one; say whether it is."""
    from scidata._cli.stores import names_store, run_plan

    if not names_store(path):
        return False
    run_plan(path, *args, **kwargs)
    return True


def _plan(
    path: str,
    options: dict[str, Any],
    *,
    sample: int,
    dp: int | None,
    plot: str | None,
    overwrite: bool,
    every_rank: bool,
    as_json: bool,
) -> None:
    from scidata._cli.arguments import usage_error
    from scidata._cli.output import print_json, progress
    from scidata._cli.planning import describe, plan_domain, suggestions
    from scidata._cli.tables import print_plan
    from scidata.grid_reader import GridReader

    if plot is not None:
        from scidata.plot import check_picture

        check_picture(plot, overwrite=overwrite)

    def remake(**changed: Any) -> GridReader:
        return GridReader(path, **(options | changed))

    reader = remake()
    if not 0 <= sample < reader.num_samples:
        raise usage_error("--sample", f"{sample} is out of range: there are {reader.num_samples} samples.")
    with progress("planning", reader.partition.num_parts * len(reader.fields)) as tick:
        found = plan_domain(reader, sample, tick=tick)
        about = describe(found, path=path, dp=dp) | {"suggestions": suggestions(found, remake, options)}
    if plot is not None:
        from scidata.plot import draw_reader

        draw_reader(reader, plot)
        about["plot"] = plot
    if as_json:
        print_json(about | {"totals": found.totals(), "ranks": [found.rank(r) for r in range(found.num_ranks)]})
        return
    print_plan(found, about, every_rank=every_rank)
    if plot is not None:
        typer.echo(f"picture: {plot}")


@app.command()
def partition(
    paths: Annotated[
        list[str], typer.Argument(metavar="SOURCE... OUT", help="Files or globs, then the new folder of the store.")
    ],
    kind: Annotated[str | None, typer.Option(metavar="mesh|points|graph", help="Detected by default.")] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="FILE", help="The topology's file; the sources hold fields on it.")
    ] = None,
    points: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Coordinates of a cloud: one (N, 2|3) array, or 2-3 of (N,).")
    ] = None,
    entity: Annotated[
        str | None, typer.Option(metavar="cell", help="A mesh's rows are its cells: finite volumes.")
    ] = None,
    edges: Annotated[
        str | None,
        typer.Option(metavar="cells|faces|edge_index|knn:K|radius:R", help="Where edges come from; default by kind."),
    ] = None,
    fields: Fields = None,
    topology: Annotated[
        str | None, typer.Option(metavar="NAME", help="Mesh variable, where a file has several.")
    ] = None,
    order: Annotated[str, typer.Option(metavar="hilbert|rcb|metis|rows", help="Order of the rows.")] = "hilbert",
    weights: Annotated[
        str | None, typer.Option(metavar="edges|FIELD", help="Cost of a row, for balanced bounds; 1 by default.")
    ] = None,
    repair: Annotated[
        list[str] | None, typer.Option(metavar="KIND,...|all", help="Leave out what is faulty, by kind of fault.")
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="KIND,...", help="Accept self_loops, duplicate_edges, crowded_faces.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Samples processed at once.")] = 1,
    part: Annotated[
        str | None, typer.Option(metavar="I/N", help="Every N-th sample from I = 0 on, for SLURM arrays.")
    ] = None,
    finalize: Annotated[
        bool, typer.Option("--finalize", help="Write the manifest after the last part; give OUT alone.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the store that is there.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Keep its samples that are whole.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write meshes, point clouds or graphs as a store that any number of ranks reads."""
    from scidata._cli.arguments import parse_names, usage_error
    from scidata._cli.partitioning import run_finalize, run_partition

    if finalize:
        if part is not None or dry_run or overwrite or resume:
            raise usage_error("--finalize", "takes no --part, --dry-run, --overwrite or --resume.")
        run_finalize(paths, as_json=as_json)
        return
    if overwrite and resume:
        raise usage_error("--resume", "excludes --overwrite: one keeps what the other removes.")
    options: dict[str, Any] = {
        "kind": kind,
        "mesh": mesh,
        "points": points,
        "entity": entity,
        "edges": edges,
        "fields": parse_names(fields or ()) or None,
        "topology": topology,
        "order": order,
        "weights": weights,
        "repair": parse_names(repair or ()),
        "keep": parse_names(keep or ()),
        "jobs": jobs,
        "part": part,
        "dry_run": dry_run,
        "overwrite": overwrite,
        "resume": resume,
    }
    run_partition(paths, options, as_json=as_json)


@app.command()
def verify(
    path: Annotated[str, typer.Argument(metavar="STORE", help="A store that `scidata partition` wrote.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Reread every digest of a store and check every invariant; name the first fault."""
    from scidata._cli.partitioning import run_verify

    if not run_verify(path, as_json=as_json):
        raise typer.Exit(_EXIT_FAILED)


@app.command()
def bench(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A local store.")],
    fields: Fields = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds of each method.")] = 5,
    pipeline: Annotated[
        bool, typer.Option("--pipeline", help="Time a DataLoader instead, beside preadv and the decompressor.")
    ] = False,
    workers: Annotated[str | None, typer.Option(metavar="N,...", help="--pipeline: reader threads; 0,1,2,4.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="--pipeline: samples of a round; 20.")] = None,
    step_ms: Annotated[
        float | None, typer.Option(min=0, help="--pipeline: a step of the loop that waits; twice a read by default.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time reading: plain slicing, the format's own library, scidata, and the preadv ceiling; or a whole loader."""
    from dataclasses import asdict

    from scidata._cli.arguments import parse_names, usage_error

    if pipeline:
        from scidata._cli.benching import run_pipeline

        names = parse_names(fields or ()) or None
        run_pipeline(
            path, fields=names, workers=workers, samples=samples, step_ms=step_ms, repeats=repeats, as_json=as_json
        )
        return
    for option, value in {"--workers": workers, "--samples": samples, "--step-ms": step_ms}.items():
        if value is not None:
            raise usage_error(option, "is for --pipeline.")
    from scidata._cli.output import print_json
    from scidata._cli.tables import print_bench
    from scidata.bench import bench_path

    rows = bench_path(path, fields=parse_names(fields or ()) or None, repeats=repeats)
    if as_json:
        print_json({"path": path, "repeats": repeats, "rows": [asdict(row) for row in rows]})
    else:
        print_bench(path, rows, repeats)


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(min=1, max=15, help="Ranks that share each sample.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 5,
    keep: Annotated[
        str | None, typer.Option(metavar="DIR", help="Keep the data and results in this new folder.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a small ViT on synthetic data over several local ranks, and compare with one process."""
    from scidata._cli.demo import run_demo

    if not run_demo(ranks=ranks, steps=steps, keep=keep, as_json=as_json):
        raise typer.Exit(_EXIT_FAILED)


def main() -> None:
    """Run the command line; the entry point of the ``scidata`` script."""
    app(prog_name="scidata")


if __name__ == "__main__":
    main()
