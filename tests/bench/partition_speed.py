"""Times of the orders and of what follows, and their halos, on a clustered cloud, triangle and tet meshes.

    python tests/bench/partition_speed.py --scale 0.1 --parts 8

At scale 1 they have 2 M, 1 M and 0.75 M nodes: 5 GB of memory and some ten minutes. Two times are given: CPU seconds of
this process and its children, and wall seconds, each the least of some runs. Halos are 1-hop ghosts of all parts in %
of the nodes. The cloud's edges are those from the nearest points, of which ``--neighbours`` says how many: its halos
grow with their number. ``rows`` are plain ranges of rows as they were made, at random; ``k-way`` is METIS for this one
number of parts alone, ``metis`` the nested order that serves any.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
from scipy.spatial import Delaunay

from scidata.meshes.geometry import RawCells
from scidata.meshes.order.cells import cell_owner, edges_of_cells
from scidata.meshes.order.csr import CSR, csr_from_edges, symmetrise
from scidata.meshes.order.curve import hilbert_keys
from scidata.meshes.order.cuts import cut_bounds
from scidata.meshes.order.hilbert import order_hilbert, order_rcb
from scidata.meshes.order.ids import ranges
from scidata.meshes.order.metis import order_metis
from scidata.meshes.order.neighbours import near_edges
from scidata.meshes.order.quality import quality_of_parts

T = TypeVar("T")

#: Nodes of each kind at scale 1.
NODES = {
    "cloud": 2_000_000,
    "triangles": 1_000_000,
    "tets": 750_000,
    "graded-triangles": 1_000_000,
    "graded-tets": 750_000,
}


def clustered_points(num: int, rng: np.random.Generator) -> np.ndarray:
    """Points around 60 centres of very different widths, and a thin background."""
    centres, widths = rng.random((60, 3)), 10 ** rng.uniform(-2.5, -0.8, 60)
    which = rng.integers(0, 60, num)
    points = centres[which] + widths[which, None] * rng.standard_normal((num, 3))
    points[: num // 10] = rng.random((num // 10, 3))
    return points


def graded_points(num: int, num_axes: int, rng: np.random.Generator) -> np.ndarray:
    """Points round a disc or ball, ever denser towards it: as many from each distance to twice that distance."""
    directions = rng.standard_normal((num, num_axes))
    return directions * (0.5 * 40 ** rng.random(num) / np.linalg.norm(directions, axis=1))[:, None]


def points_of(kind: str, num: int, rng: np.random.Generator) -> np.ndarray:
    """Make the points of one kind of sample: meshes are graded round a body, or uniform in a square or cube."""
    if kind == "cloud":
        return clustered_points(num, rng)
    num_axes = 3 if kind.endswith("tets") else 2
    return graded_points(num, num_axes, rng) if kind.startswith("graded") else rng.random((num, num_axes))


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    return sum(
        r.ru_utime + r.ru_stime
        for r in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


def ghosts_of(csr: CSR, start: int, stop: int, num_hops: int) -> np.ndarray:
    """The nodes that ``[start, stop)`` does not own and that reach it along at most so many edges."""
    reached = np.arange(start, stop)
    for _ in range(num_hops):
        reached = np.union1d(reached, csr.src[ranges(csr.indptr[reached], csr.indptr[reached + 1])])
    return reached[(reached < start) | (reached >= stop)]


def timed(what: str, times: dict[str, Any], call: Callable[[], T], repeat: int = 1) -> T:
    """Run a call, note its least CPU and wall time."""
    best = []
    for _ in range(repeat):
        cpu, wall = cpu_seconds(), time.perf_counter()
        result = call()
        best.append((round(cpu_seconds() - cpu, 4), round(time.perf_counter() - wall, 4)))
    times[what] = {"cpu_s": min(b[0] for b in best), "wall_s": min(b[1] for b in best)}
    return result


def edges_of(kind: str, points: np.ndarray, times: dict[str, Any], num_neighbours: int) -> np.ndarray:
    """Make the edges of one kind of sample."""
    if kind == "cloud":
        return timed("near_edges", times, lambda: near_edges(points, "knn", num_neighbours))
    cells = Delaunay(points).simplices
    size = cells.shape[1]
    offsets, types = np.arange(len(cells) + 1) * size, np.full(len(cells), 5 if size == 3 else 10, np.uint8)
    nodes = cells.ravel().astype(np.int64)
    timed("cell_owner", times, lambda: cell_owner(offsets, nodes))
    made = RawCells(offsets=offsets, connectivity=nodes, cell_type=types)
    return timed("edges_of_cells", times, lambda: edges_of_cells(made, len(points)))


def order_by_kway(given: CSR, num_parts: int, times: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Order by METIS's k-way parts: the order and their bounds."""
    import pymetis

    edges = symmetrise(given.src, given.dst(), given.num_nodes)
    both = csr_from_edges(edges[0], edges[1], given.num_nodes)

    def cut() -> np.ndarray:
        options = pymetis.Options(seed=1)
        indptr = both.indptr.astype(np.int32)
        return np.asarray(
            pymetis.part_graph(num_parts, xadj=indptr, adjncy=both.src, recursive=False, options=options)[1]
        )

    parts = timed("order_k-way", times, cut)
    bounds = np.concatenate([[0], np.cumsum(np.bincount(parts, minlength=num_parts))])
    return np.argsort(parts, kind="stable"), bounds


def measure(kind: str, points: np.ndarray, options: argparse.Namespace) -> dict[str, Any]:
    """Order one sample in every way and cut it."""
    times: dict[str, Any] = {}
    num = len(points)
    edge_index = edges_of(kind, points, times, options.neighbours)
    given = csr_from_edges(edge_index[0], edge_index[1], num)
    timed("hilbert_keys", times, lambda: hilbert_keys(points), options.repeat)
    orders: dict[str, Callable[[], np.ndarray]] = {
        "rows": lambda: np.arange(num),
        "hilbert": lambda: order_hilbert(points)[0],
        "rcb": lambda: order_rcb(points),
        "metis": lambda: order_metis(edge_index, num, points)[0],
    }
    quality = {}
    for name in options.orders:
        bounds = cut_bounds(np.arange(num + 1), options.parts)
        if name == "k-way":
            order, bounds = order_by_kway(given, options.parts, times)
        else:
            order = timed(f"order_{name}", times, orders[name], 1 if name == "metis" else options.repeat)
        new_row = np.empty(num, np.int64)
        new_row[order] = np.arange(num)
        src, dst = new_row[edge_index[0]], new_row[edge_index[1]]
        csr = timed(f"csr_{name}", times, lambda s=src, d=dst: csr_from_edges(s, d, num), options.repeat)
        by_edges = cut_bounds(csr.indptr, options.parts)
        start, stop = bounds[options.parts // 2], bounds[options.parts // 2 + 1]
        ghosts = timed(
            f"4_hops_{name}",
            times,
            lambda c=csr, a=start, b=stop: ghosts_of(c, a, b, 4),
            options.repeat,
        )
        times[f"4_hops_{name}"]["ghosts"] = len(ghosts)
        quality[name] = asdict(quality_of_parts(csr, bounds))
        quality[name]["edge_balance_cut_by_edges"] = quality_of_parts(csr, by_edges).edge_balance
    return {"kind": kind, "num_nodes": num, "num_edges": edge_index.shape[1], "times": times, "quality": quality}


def main() -> None:
    """Measure what was asked for; a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--neighbours", type=int, default=6)
    parser.add_argument("--kinds", nargs="+", choices=NODES, default=[*NODES])
    parser.add_argument("--orders", nargs="+", default=["rows", "hilbert", "rcb", "metis", "k-way"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    for kind in options.kinds:
        points = points_of(kind, int(NODES[kind] * options.scale), rng)
        found = measure(kind, points, options)
        if options.json:
            print(json.dumps(found), flush=True)
            continue
        print(f"\n{kind}: {found['num_nodes']} nodes, {found['num_edges']} directed edges, {options.parts} parts")
        for name, entry in found["quality"].items():
            print(
                f"  {name:8} halo {100 * entry['halo']:6.2f} %  edge cut {100 * entry['edge_cut']:6.2f} %  "
                f"balance {entry['balance']:.3f}  edges {entry['edge_balance']:.3f} "
                f"(cut by edges {entry['edge_balance_cut_by_edges']:.3f})"
            )
        for what, entry in found["times"].items():
            print(f"  {what:16} {entry['cpu_s']:8.3f} s CPU {entry['wall_s']:8.3f} s wall")


if __name__ == "__main__":
    main()
