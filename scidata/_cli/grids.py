"""``scidata plan`` for grids: options in, a table, JSON or a picture out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scidata._cli.arguments import usage_error
from scidata._cli.output import console, print_json, progress
from scidata._cli.planning import describe, plan_domain, suggestions
from scidata._cli.tables import print_plan
from scidata.grid_reader import GridReader
from scidata.raw_kind import kind_of_raw

__all__ = ["run_plan"]


def run_plan(
    path: str,
    options: Mapping[str, Any],
    *,
    kind: str | None,
    like_grid: bool,
    sample: int,
    dp: int | None,
    plot: str | None,
    overwrite: bool,
    every_rank: bool,
    as_json: bool,
) -> None:
    """Plan a sample of a grid for every rank of a domain and print it.

    Parameters
    ----------
    options
        As :class:`~scidata.grid_reader.GridReader` takes them.
    kind
        ``"grid"`` or ``"points"`` takes the arrays of any file as a grid; None looks at the file.
    like_grid
        Whether options that only grids have are given: what could be a cloud then is a grid.
    """
    kind_of_raw(path, kind, False, like_grid=like_grid)
    if plot is not None:
        from scidata.plot import check_picture

        check_picture(plot, overwrite=overwrite)

    def remake(**changed: Any) -> GridReader:
        return GridReader(path, **(dict(options) | changed))

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
        console().print(f"picture: {plot}", soft_wrap=True)
