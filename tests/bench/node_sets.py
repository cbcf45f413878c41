"""Seconds and memory of GraphCast's graph: a 0.25-degree grid, an icosahedron of level 6, and the edges between them.

    python tests/bench/node_sets.py

Each step runs in a process of its own after the sets it needs; given are its CPU seconds, the peak of the process less
what it took before the step (so that the result counts too), and the bytes of the result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

STEPS = {
    "grid, its quads": "lat_lon(resolution)",
    "mesh": "icosahedral(level)",
    "multi-mesh edges": "multi_mesh_edges(level)",
    "grid to mesh: radius": "radius_edges(grid, mesh, radius)",
    "mesh to grid: containing triangle": "containing_cell_edges(mesh, grid)",
    "mesh to grid: 3 nearest": "nearest_edges(mesh, grid, 3)",
    "grid to mesh: 12 nearest": "nearest_edges(grid, mesh, 12)",
    "features of mesh to grid": "edge_features(mesh, grid, edges)",
}

RUN = """
import json, sys, time
from scidata.meshes.sets.containing import containing_cell_edges
from scidata.meshes.sets.neighbours import edge_features
from scidata.meshes.sets.grids import lat_lon
from scidata.meshes.sets.icosahedral import icosahedral, multi_mesh_edges
from scidata.meshes.sets.neighbours import longest_edge, nearest_edges, radius_edges

def memory(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))

level, resolution, step = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
if "grid" in step or "mesh," in step:
    mesh, grid = icosahedral(level), lat_lon(resolution)
    radius = 0.6 * longest_edge(mesh, multi_mesh_edges([level]))
if "edges)" in step:
    edges = containing_cell_edges(mesh, grid)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins here
before, begun = memory("VmRSS"), time.process_time()
made = eval(step)
seconds, peak = time.process_time() - begun, memory("VmHWM") - before
if hasattr(made, "points"):
    held = [made.points, made.cells.offsets, made.cells.connectivity, made.cells.cell_type]
    num = made.num_nodes
else:
    held, num = [made], max(made.shape)
print(json.dumps({"num": num, "seconds": seconds, "peak": peak, "made": sum(each.nbytes for each in held)}))
"""


def main() -> None:
    """Measure each step; a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", type=int, default=6)
    parser.add_argument("--resolution", type=float, default=0.25)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("| | nodes or edges | CPU | peak beyond what was there | of it the result |\n|---|---|---|---|---|")
    for name, step in STEPS.items():
        command = [sys.executable, "-c", RUN, str(options.level), str(options.resolution), step]
        rounds = [
            json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            for _ in range(options.rounds)
        ]
        best = min(rounds, key=lambda each: each["seconds"])
        print(
            f"| {name} | {best['num']:,} | {best['seconds']:.2f} s | {best['peak'] / 2**20:,.0f} MiB | "
            f"{best['made'] / 2**20:,.0f} MiB |",
            flush=True,
        )


if __name__ == "__main__":
    main()
