"""The METIS order on real graphs, in its real subprocess, which may crash."""

import signal
import sys

import numpy as np
import pytest
from scipy.spatial import Delaunay

from scidata.errors import ConfigError, MissingDependencyError, SciDataError
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.cells import edges_of_cells
from scidata.meshes.order.csr import csr_from_edges
from scidata.meshes.order.hilbert import order_hilbert
from scidata.meshes.order.metis import order_metis
from scidata.meshes.order.quality import measure_quality


def triangles(num_points):
    """Points in a square and the CSR of their triangulation."""
    points = np.random.default_rng(0).random((num_points, 2)) ** 2
    cells = Delaunay(points).simplices
    types = np.full(len(cells), 5, np.uint8)
    offsets, nodes = np.arange(len(cells) + 1) * 3, cells.ravel().astype(np.int64)
    edges = edges_of_cells(RawCells(offsets=offsets, connectivity=nodes, cell_type=types), num_points)
    return points, csr_from_edges(*edges, num_points)


def by_metis(csr, points, num_parts=256):
    return order_metis(np.stack([csr.src, csr.dst()]), csr.num_nodes, points, num_parts)


def halos(csr, order, num_parts):
    new_row = np.empty(len(order), np.int64)
    new_row[order] = np.arange(len(order))
    in_order = csr_from_edges(new_row[csr.src], new_row[csr.dst()], len(order))
    return [part.halo for part in measure_quality(in_order, num_parts=num_parts).parts]


@pytest.fixture(scope="module")
def graph():
    return triangles(6_000)


def test_one_order_has_smaller_halos_at_every_power_of_two(graph):
    pytest.importorskip("pymetis", reason="the extra metis is not installed")
    points, csr = graph
    order, notes = by_metis(csr, points, 64)
    assert notes == []
    assert sorted(order.tolist()) == list(range(6_000))
    curve, _ = order_hilbert(points)
    for of_metis, of_curve in zip(halos(csr, order, (4, 8, 32)), halos(csr, curve, (4, 8, 32)), strict=True):
        assert of_metis < 0.95 * of_curve
    assert np.array_equal(order, by_metis(csr, points, 64)[0])  # the same each time


def test_directed_graphs_with_loops_and_isolated_nodes_are_symmetrised(graph):
    pytest.importorskip("pymetis", reason="the extra metis is not installed")
    _, csr = graph
    dst = csr.dst()
    one_way = csr.src < dst
    src, dst = csr.src[one_way], dst[one_way]
    loops = np.arange(0, 6_000, 7)
    directed = csr_from_edges(np.concatenate([src, loops, src[:50]]), np.concatenate([dst, loops, dst[:50]]), 6_500)
    order, _ = by_metis(directed, None, 8)
    assert sorted(order.tolist()) == list(range(6_500))
    assert halos(directed, order, (8,))[0] < 0.1


def test_rows_keep_their_order_inside_a_part_without_points(graph):
    pytest.importorskip("pymetis", reason="the extra metis is not installed")
    _, csr = graph
    order, _ = by_metis(csr, None, 4)
    assert (np.diff(order) < 0).sum() <= 3


def test_a_small_graph_is_left_in_the_points_order():
    pytest.importorskip("pymetis", reason="the extra metis is not installed")
    points, csr = triangles(40)
    order, notes = by_metis(csr, points, 256)
    assert np.array_equal(order, order_hilbert(points)[0])
    assert "too few" in notes[0]
    assert order_metis(np.empty((2, 0), np.int64), 0, np.empty((0, 2)))[0].tolist() == []


def test_a_crash_of_metis_is_an_error_that_says_so(graph, tmp_path, monkeypatch):
    # a METIS that ends its process, found before any that is installed
    fake = "import os, signal\nclass Options:\n    def __init__(self, **k): pass\n"
    (tmp_path / "pymetis.py").write_text(f"{fake}def part_graph(*a, **k): os.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    points, csr = graph
    with pytest.raises(SciDataError, match=rf"{signal.SIGSEGV.name} on a graph of 6000 nodes.*--order hilbert"):
        by_metis(csr, points)
    (tmp_path / "pymetis.py").write_text(f"{fake}def part_graph(*a, **k): raise RuntimeError('out of memory')\n")
    with pytest.raises(SciDataError, match=r"exit code 1.*RuntimeError: out of memory"):
        by_metis(csr, points)


def test_a_missing_pymetis_names_the_extra(graph, monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    points, csr = graph
    with pytest.raises(MissingDependencyError, match=r"pip install 'pymetis>="):
        by_metis(csr, points)


def test_wrong_arguments_are_refused(graph):
    pytest.importorskip("pymetis", reason="the extra metis is not installed")
    points, csr = graph
    with pytest.raises(ConfigError, match="power of two, not 100"):
        by_metis(csr, points, 100)
    with pytest.raises(ConfigError, match="5 points for a graph of 6000 nodes"):
        by_metis(csr, points[:5])
    with pytest.raises(ConfigError, match="outside the 6000 nodes"):
        order_metis(np.stack([csr.src + 1, csr.dst()]), csr.num_nodes, points)
