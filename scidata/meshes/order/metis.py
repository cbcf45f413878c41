"""Order by METIS: parts that nest, so that one order has METIS's halos at any power of two, each in Hilbert order.

G. Karypis and V. Kumar, "A fast and high quality multilevel scheme for partitioning irregular graphs" (1998), through
pymetis. METIS ends its process on a bad graph, so it runs in one of its own, and only on checked, symmetric graphs.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile

import numpy as np
import numpy.typing as npt

from scidata.core.install import install_hint
from scidata.core.types import IntArray
from scidata.errors import ConfigError, MissingDependencyError, SciDataError
from scidata.meshes.order.csr import csr_from_edges, symmetrise
from scidata.meshes.order.hilbert import order_hilbert

# Nodes per part below which parts are not worth having: METIS leaves parts of small graphs empty.
_MIN_NODES = 32


def order_metis(
    edge_index: IntArray,
    num_nodes: int,
    points: npt.ArrayLike | None,
    num_parts: int = 256,
    *,
    on_sphere: bool = False,
) -> tuple[IntArray, list[str]]:
    """Return an order of the nodes in which METIS's nested parts follow each other.

    ``edge_index``: ``(2, num_edges)`` sources and destinations, directed or not; both directions of every edge are
    used, self-loops are not.
    ``points``: ``(num_nodes, 2 or 3)`` for the order inside the parts, or None to keep the order of rows there.
    ``num_parts``: a power of two. Fewer are made of a small graph.
    Returns the old row at each new row, ``(num_nodes,)`` int64; and sentences for the user, where anything is unusual.
    Raises MissingDependencyError: pymetis is not installed.
    Raises ConfigError: a number of parts that is no power of two, points that do not fit the nodes, or a graph with a
    node out of range or too many edges for METIS's 32-bit indices.
    Raises SciDataError: METIS crashed.
    """
    if importlib.util.find_spec("pymetis") is None:
        raise MissingDependencyError(
            f"the order 'metis' needs pymetis: {install_hint('metis')}, or use the order 'hilbert'"
        )
    if num_parts < 1 or num_parts & (num_parts - 1):
        raise ConfigError(f"the number of METIS's nested parts must be a power of two, not {num_parts}")
    if points is not None and len(np.asarray(points)) != num_nodes:
        raise ConfigError(f"{len(np.asarray(points))} points for a graph of {num_nodes} nodes")
    notes: list[str] = []
    inside = np.arange(num_nodes, dtype=np.int64)
    if points is not None:
        inside, notes = order_hilbert(points, on_sphere=on_sphere)
    while num_parts > 1 and num_nodes < num_parts * _MIN_NODES:
        num_parts //= 2
    if num_parts == 1:
        return inside, [*notes, f"{num_nodes} nodes are too few to be cut by METIS; the order is that of the points"]
    parts = _run_metis(symmetrise(edge_index[0], edge_index[1], num_nodes), num_nodes, num_parts)
    # small integers are sorted by a radix sort, which is stable: the points' order stays inside each part
    return inside[np.argsort(parts[inside].astype(np.uint16), kind="stable")], notes


def _run_metis(edge_index: IntArray, num_nodes: int, num_parts: int) -> npt.NDArray[np.int32]:
    if edge_index.shape[1] > np.iinfo(np.int32).max:
        raise ConfigError(
            f"METIS counts edges in 32 bits, and the symmetric graph has {edge_index.shape[1]}: use --order hilbert"
        )
    csr = csr_from_edges(edge_index[0], edge_index[1], num_nodes)
    with tempfile.TemporaryDirectory(prefix="scidata-metis-") as folder:
        np.save(os.path.join(folder, "indptr.npy"), csr.indptr.astype(np.int32))
        np.save(os.path.join(folder, "indices.npy"), csr.src.astype(np.int32, copy=False))
        worker = os.path.join(os.path.dirname(__file__), "metis_worker.py")
        # -P: the worker's folder, which has a metis.py too, is not searched for modules
        command = [sys.executable, "-P", worker, folder, str(num_parts)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SciDataError(_crash_message(done, num_nodes, csr.num_edges))
        parts: npt.NDArray[np.int32] = np.load(os.path.join(folder, "parts.npy"))
    return parts


def _crash_message(done: subprocess.CompletedProcess[str], num_nodes: int, num_edges: int) -> str:
    if done.returncode < 0:
        how = f"was ended by {signal.Signals(-done.returncode).name}"
    else:
        how = f"failed with exit code {done.returncode}"
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return (
        f"METIS {how} on a graph of {num_nodes} nodes and {num_edges} directed edges; use --order hilbert instead. "
        f"It said: {said[-1] if said else 'nothing'}"
    )
