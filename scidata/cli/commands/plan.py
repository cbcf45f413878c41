"""``scidata plan`` for grids: options in, a table, JSON or a picture out."""

from __future__ import annotations

from collections.abc import Mapping

from scidata.cli.plan_output import PlanOutput
from scidata.cli.progress import progress
from scidata.cli.tables import print_plan
from scidata.core.options import ReadOptions
from scidata.data.raw_kind import kind_of_raw
from scidata.grids.plan import describe, plan_domain, suggestions
from scidata.grids.reader import GridReader


def run_plan(path: str, axis_sizes: Mapping[str, int], options: ReadOptions, output: PlanOutput) -> None:
    """Plan a sample of a grid for every rank of a domain and print it; ``axis_sizes`` are the domain's ranks."""
    found_kind, _ = kind_of_raw(path, options)
    if found_kind == "points":
        from scidata.cli.points import run_plan as plan_points

        plan_points(path, axis_sizes, options, output)
        return
    output.check_picture()
    reader = GridReader(path, options, axis_sizes=axis_sizes)
    output.check_sample(reader.num_samples)
    with progress("planning", reader.partition.num_parts * len(reader.fields)) as tick:
        found = plan_domain(reader, output.sample, tick=tick)
        about = describe(found, path=path, dp=output.dp) | {"suggestions": suggestions(found)}
    if output.plot is not None:
        from scidata.data.pictures.grid_parts import draw_reader

        ratios = [found.sums(rank)["amplification"] for rank in range(found.num_ranks)]
        draw_reader(reader, output.plot, ratios=ratios, overall=found.sums()["amplification"])
    output.show(found, about, print_plan, [])
