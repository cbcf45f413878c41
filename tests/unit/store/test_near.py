"""Points of meshes, edges found where points are read, and draws that walk through a shuffled store."""

import numpy as np
import pytest

import scidata
from scidata.core.options import ReadOptions
from scidata.errors import ConfigError
from scidata.store.raw_points.reader import PointsReader
from scidata.store.reading.reader import StoreReader
from scidata.store.reading.subsample import Walk
from tests.writers import write_hdf5

POINTS = 5000


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    """A cloud with twelve points in one place, as a file, along a curve, and shuffled in leaves of two chunks."""
    folder = tmp_path_factory.mktemp("near")
    rng = np.random.default_rng(0)
    points = rng.random((POINTS, 3))
    points[100:111] = points[0]
    raw = write_hdf5(folder / "cloud.h5", {"points": points, "p": np.arange(POINTS, dtype="f8")})
    scidata.partition(raw, folder / "curve", kind="points")
    scidata.partition(raw, folder / "shuffled", kind="points", order="shuffle:2048")
    return points, raw, str(folder / "curve"), str(folder / "shuffled")


def whole_of(reader, epoch):
    """Positions, source rows and edges of all parts, by ids of the whole; each part's edges end at its own rows."""
    parts = [reader.read(0, part, epoch=epoch) for part in range(reader.num_parts)]
    edges = []
    for part in parts:
        rows, pairs = part.index_maps["point"], part.relations["edge"]
        assert pairs[1].max(initial=-1) < rows.num_owned
        assert len(np.unique(pairs[0][pairs[0] >= rows.num_owned])) == rows.num_ghost  # no ghost is without an edge
        edges.append(rows.to_global(pairs.reshape(-1)).reshape(2, -1))
    fields = [np.concatenate([part.fields[name] for part in parts]) for name in ("pos", "p")]
    return (*fields, np.concatenate(edges, axis=1))


def by_hand(pos, rule, targets, width=np.inf):
    """Edges to some targets, from all distances, to nearest images in a width; of equally far sources the first."""
    kind, _, number = rule.partition(":")
    expected = []
    for target in targets:
        away = np.abs(pos - pos[target])
        away = np.sqrt((np.minimum(away, width - away) ** 2).sum(axis=1))
        away[target] = np.inf
        near = (
            np.argsort(away, kind="stable")[: int(number)] if kind == "knn" else np.flatnonzero(away <= float(number))
        )
        expected.append(np.sort(near))
    return np.stack([np.concatenate(expected), np.repeat(targets, [len(near) for near in expected])])


@pytest.mark.parametrize("rule", ["knn:5", "radius:0.06"])
def test_edges_of_any_number_of_parts_are_those_of_all_distances(cloud, rule):
    points, raw, curve, shuffled = cloud
    cases = [(StoreReader, curve, None), (PointsReader, raw, None), (StoreReader, curve, 700), (PointsReader, raw, 700),
             (StoreReader, shuffled, 700)]  # fmt: skip
    for make, path, num in cases:
        options = ReadOptions(kind="points", edges=rule, subsample=None if num is None else {"point": num})
        one = whole_of(make(path, options), epoch=2)
        pos, ids, edges = one
        assert np.array_equal(points[ids.astype(int)], pos)
        assert len(np.unique(ids)) == (num or POINTS)
        targets = np.unique(
            np.r_[np.arange(len(pos))[:: len(pos) // 60], np.flatnonzero((pos == points[0]).all(axis=1))]
        )
        assert np.array_equal(edges[:, np.isin(edges[1], targets)], by_hand(pos, rule, targets))
        for num_parts in (2, 3, 8) if num is None and path == curve else (3,):
            found = whole_of(make(path, options, num_parts=num_parts), epoch=2)
            assert all(map(np.array_equal, found, one)), (path, num, num_parts)


def test_a_part_with_fewer_points_than_neighbours_has_them_all(cloud):
    _, _, curve, _ = cloud
    reader = StoreReader(curve, ReadOptions(edges="knn:9", bounds=[0, 3, 3, POINTS]), num_parts=3)
    assert np.array_equal(whole_of(reader, 0)[2], whole_of(StoreReader(curve, ReadOptions(edges="knn:9")), 0)[2])


@pytest.mark.parametrize("rule", ["knn:4", "radius:0.08"])
def test_edges_lead_across_the_border_of_a_periodic_domain(tmp_path, rule):
    pos = np.random.default_rng(2).random((900, 3)) * [1, 2, 1] - [0.5, 0, 3]  # some images lie out of [0, width)
    about = {"points": {"period": [1.0, 2.0, 0.0]}}
    raw = write_hdf5(tmp_path / "c.h5", {"points": pos, "p": np.arange(900.0)}, attributes=about)
    scidata.partition(raw, tmp_path / "store", kind="points")
    width = np.array([1.0, 2.0, np.inf])
    for make, path, num in [(StoreReader, tmp_path / "store", None), (PointsReader, raw, 400)]:
        options = ReadOptions(kind="points", edges=rule, subsample=None if num is None else {"point": num})
        found, _, edges = whole_of(make(path, options), 0)
        targets = np.arange(0, len(found), 5)
        assert np.array_equal(edges[:, np.isin(edges[1], targets)], by_hand(found, rule, targets, width))
        assert (np.abs(found[edges[0]] - found[edges[1]]) > 0.9).any()
        assert np.array_equal(whole_of(make(path, options, num_parts=3), 0)[2], edges)


def test_more_neighbours_than_there_are_points(tmp_path):
    raw = write_hdf5(tmp_path / "c.h5", {"points": np.random.default_rng(0).random((36, 3))})
    report = scidata.partition(raw, tmp_path / "graph", kind="points", edges="knn:10000")
    assert report.counts["edge"] == 36 * 35
    assert "there are but 36 points" in str(report.notes)
    scidata.partition(raw, tmp_path / "store", kind="points")
    for make, path in [(StoreReader, tmp_path / "store"), (PointsReader, raw)]:
        with pytest.raises(ConfigError, match="at most knn:35"):
            make(path, ReadOptions(kind="points", edges="knn:36"))
        assert make(path, ReadOptions(kind="points", edges="knn:35")).read(0, 0).relations["edge"].shape == (2, 36 * 35)


def test_levels_of_a_cloud_and_the_edges_between_them(cloud, tmp_path):
    raw = cloud[1]
    nodes = {"fine": "file", "coarse": "voxel:0.25", "few": "farthest:20"}
    edges = {"fine__to__coarse": "radius:0.44", "coarse__to__fine": "knn:3", "coarse__to__few": "knn:4"}
    scidata.partition(raw, tmp_path / "store", kind="points", nodes=nodes, edges=edges)
    graph = scidata.open_dataset(tmp_path / "store", fields=["fine/pos", "coarse/pos", "few/pos"])[0]
    fine, coarse, few = (graph[f"{name}/pos"].numpy() for name in nodes)
    assert len(coarse) == 64
    cubes = np.floor((fine - fine.min(axis=0)) / 0.25).astype(int)
    source, target = graph.edge_index_dict["fine", "to", "coarse"].numpy()
    for node in range(0, 64, 9):  # each has all points of its cube, and is their mean
        cube = np.floor((coarse[node] - fine.min(axis=0)) / 0.25).astype(int)
        own = np.flatnonzero((cubes == cube).all(axis=1))
        np.testing.assert_allclose(fine[own].mean(axis=0), coarse[node], rtol=1e-12)
        assert set(own) <= set(source[target == node])
    away = np.linalg.norm(fine[:, None] - few[None], axis=2)
    assert len(np.unique(few, axis=0)) == 20
    assert away.min(axis=1).max() <= np.sort(np.linalg.norm(few[:, None] - few[None], axis=2), axis=1)[:, 1].min()


# -- a walk ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num", "wanted", "leaf"), [(1000, 70, 64), (1000, 999, 64), (50, 7, 64), (1000, 128, 128)])
def test_no_row_comes_again_before_all_have_come(num, wanted, leaf):
    draws = [Walk(num_global=num, num_drawn=wanted, leaf_rows=leaf, epoch=e, key=(3, 1)).rows() for e in range(num)]
    assert all(len(np.unique(rows)) == wanted for rows in draws)
    counts = np.bincount(np.concatenate(draws), minlength=num)
    assert (counts == wanted).all()  # num epochs are wanted passes
    once = np.concatenate(draws[: num // wanted])
    assert len(np.unique(once)) == len(once)
    for parts in (2, 3):
        walk = Walk(num_global=num, num_drawn=wanted, leaf_rows=leaf, epoch=5, key=(3, 1))
        cuts = [walk.cut(np.zeros(parts + 1, np.int64), part) for part in range(parts)]
        assert np.array_equal(np.concatenate([rows for _, rows in cuts]), draws[5])


def test_drawn_points_cost_what_they_hold(cloud):
    _, _, curve, shuffled = cloud
    options = ReadOptions(subsample={"point": 2048}, fields=["pos", "p"])

    def fetched(path, num_parts):
        reader = StoreReader(path, options, num_parts=num_parts)
        return sum(reader.plan(0, part, epoch=epoch).bytes_fetched for part in range(num_parts) for epoch in (0, 1))

    held = 2 * 2048 * 32  # bytes of positions and field, of two epochs
    assert fetched(shuffled, 1) < 1.01 * held + 2 * 1.01 * 2 * 1024 * 32  # whole leaves, but round the end of the rows
    assert fetched(shuffled, 2) < 1.3 * fetched(shuffled, 1)  # ranks share a chunk at most
    assert fetched(curve, 1) > 2.4 * held  # single rows, in every chunk: all there is
    seen = {tuple(StoreReader(shuffled, options).read(0, 0, epoch=e).fields["p"]) for e in range(3)}
    assert len(seen) == 3


def test_parts_of_a_draw_lie_together(tmp_path):
    """Of two ranks, each has one half of space: most neighbours are its own, though rows are shuffled."""
    raw = write_hdf5(tmp_path / "c.h5", {"points": np.random.default_rng(1).random((20_000, 3))})
    scidata.partition(raw, tmp_path / "store", kind="points", order="shuffle:8192")
    reader = StoreReader(tmp_path / "store", ReadOptions(edges="knn:6", subsample={"point": 8192}), num_parts=2)
    assert all(reader.read(0, part).index_maps["point"].num_ghost < 900 for part in range(2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"edges": "nearest:4"}, "expected 'edge_index', 'cells', 'faces', 'nodes', 'knn:8'"),
        ({"edges": "knn16"}, "did you mean 'knn:16'"),
        ({"edges": "cells"}, "'knn:8' or 'radius:0.1'"),
        ({"subsample": {"point": 9}, "subsample_block": "chunk"}, "shuffled store"),
        ({"subsample": {"point": 9}, "weights": "p"}, "shuffled store"),
    ],
)
def test_what_means_nothing(cloud, options, words):
    with pytest.raises(ConfigError, match=words):
        StoreReader(cloud[3], ReadOptions(**options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"order": "shuffle:none"}, "rows of a leaf"),
        ({"kind": "graph", "edges": "knn:3", "order": "shuffle"}, "for points"),
    ],
)
def test_what_cannot_be_shuffled(cloud, tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        scidata.partition(cloud[1], tmp_path / "store", **options)
