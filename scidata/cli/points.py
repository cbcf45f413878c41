"""``scidata plan`` of raw points: cut along the rows of each file, as ``open_dataset`` does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from scidata.cli.arguments import usage_error
from scidata.cli.plan_output import PlanOutput
from scidata.cli.progress import progress
from scidata.cli.stores import print_store_plan
from scidata.core.options import ReadOptions
from scidata.plan.totals import TOTALS
from scidata.store.plan import StorePlan
from scidata.store.raw_points.reader import PointsReader


def run_plan(path: str, axis_sizes: Mapping[str, int], options: ReadOptions, output: PlanOutput) -> None:
    """Plan a sample for every rank of a domain and print it."""
    if output.plot is not None:
        raise usage_error("--plot", f"draws grids and stores; write one: scidata partition {path} OUT --kind points.")
    reader = PointsReader(path, options, num_parts=math.prod(axis_sizes.values()))
    output.check_sample(reader.num_samples)
    sums = np.zeros((len(TOTALS), reader.num_parts), np.int64)
    exact = True
    with progress("planning", reader.num_parts) as tick:
        for rank in range(reader.num_parts):
            plan = reader.plan(output.sample, rank)
            sums[:, rank] = [getattr(plan, name) for name in TOTALS]
            exact &= plan.exact
            tick()
    found = StorePlan(
        reader=reader,
        sample=output.sample,
        cut=reader.partition_of(output.sample),
        ghosts=(np.empty(0, np.int64),) * reader.num_parts,
        num_cut_edges=None,
        num_neighbours=np.zeros(reader.num_parts, np.int64),
        by_relation={},
        **dict(zip(TOTALS, sums, strict=True)),
        exact=exact,
    )
    output.show(found, _described(found, weights=options.weights, dp=output.dp), print_store_plan, [])


def _described(plan: StorePlan, *, weights: object, dp: int | None) -> dict[str, Any]:
    """Describe what was planned with the keys that stores have."""
    reader, index = plan.reader, plan.sample
    assert isinstance(reader, PointsReader)
    return {
        "path": str(reader.path),
        "kind": reader.kind,
        "raw": True,
        "fields": list(reader.fields),
        "global_shape": {name: list(reader.global_shape(name, index)) for name in reader.fields},
        "num_samples": reader.num_samples,
        "sample": index,
        "sample_dim": None,
        "rows": [],
        "name": reader.names[index],
        "counts": {"point": int(plan.cut.bounds["point"][-1])},
        "domain": plan.num_ranks,
        "bounds": {"point": plan.cut.bounds["point"].tolist()},
        "weights": weights,
        "halo": 0,
        "num_hops": 0,
        "ghosts": reader.ghosts,
        "dp": dp,
        "world_size": plan.num_ranks * (dp or 1),
        "samples_per_dp_rank": -(-reader.num_samples // (dp or 1)),
        "exact": plan.exact,
    }
