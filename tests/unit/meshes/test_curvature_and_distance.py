"""Curvature and signed distance as fields of a store: against spheres, cylinders and tori, and against brute force."""

from pathlib import Path

import numpy as np
import pytest

import scidata
from scidata.errors import ConfigError, UnknownNameError, UnsupportedFormatError
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.surfaces import curvature_of_nodes, signed_distance
from tests.writers import write_hdf5


def rings(num_u, num_v, place, *, closed=True):
    """Points ``place(u, v)`` and triangles of a surface that closes along v, and along u if ``closed``."""
    u, v = np.meshgrid(np.arange(num_u) / num_u, np.arange(num_v) / num_v, indexing="ij")
    i, j = np.meshgrid(np.arange(num_u if closed else num_u - 1), np.arange(num_v), indexing="ij")
    a, b, c, d = (x % num_u * num_v + y % num_v for x, y in ((i, j), (i + 1, j), (i + 1, j + 1), (i, j + 1)))
    triangles = np.concatenate([np.stack([a, b, c], axis=-1), np.stack([a, c, d], axis=-1)]).reshape(-1, 3)
    return np.stack(place(2 * np.pi * u, 2 * np.pi * v), axis=-1).reshape(-1, 3), triangles


def torus(num, large=1.0, small=0.35):
    out = lambda v: large + small * np.cos(v)  # noqa: E731
    place = lambda u, v: (out(v) * np.cos(u), out(v) * np.sin(u), small * np.sin(v))  # noqa: E731
    points, triangles = rings(2 * num, num, place)
    away = np.hypot(points[:, 0], points[:, 1])
    return points, triangles, (2 * away - large) / (2 * small * away)


def sphere(radius=2.0):
    """An icosahedron, refined three times."""
    gold = (1 + 5**0.5) / 2
    base = [(0, a, b * gold) for a in (-1, 1) for b in (-1, 1)]
    points = np.array([np.roll(each, k) for k in range(3) for each in base])
    near = [(a, b, c) for a in range(12) for b in range(12) for c in range(12) if a < b < c
            if max(np.linalg.norm(points[x] - points[y]) for x, y in ((a, b), (b, c), (a, c))) < 2.1]  # fmt: skip
    triangles = np.array([t if np.linalg.det(points[list(t)]) > 0 else t[::-1] for t in near])
    for _ in range(3):
        corners = points[triangles]
        middles = (corners + np.roll(corners, -1, axis=1)) / 2
        a, b, c, ab, bc, ca = (x[:, k] for x in (corners, middles) for k in range(3))
        every = np.concatenate([[a, ab, ca], [ab, b, bc], [ca, bc, c], [ab, bc, ca]], axis=1)
        points, triangles = np.unique(every.transpose(1, 0, 2).reshape(-1, 3), axis=0, return_inverse=True)
        triangles = triangles.reshape(-1, 3)
    return points * radius / np.linalg.norm(points, axis=1)[:, None], triangles


def cells_of(triangles):
    return RawCells(offsets=3 * np.arange(len(triangles) + 1), connectivity=triangles.ravel(),
                    cell_type=np.full(len(triangles), 5, np.uint8))  # fmt: skip


def write(path, points, cells, **fields):
    sizes = [len(cell) for cell in cells]
    kinds = np.array([0, 0, 3, 5, 9])[sizes]
    arrays = {
        "cells/offsets": np.cumsum([0, *sizes]),
        "cells/connectivity": np.concatenate(cells),
        "cells/types": kinds,
    }
    return write_hdf5(path, {"points": points, **arrays, **fields})


def test_mean_curvature_of_known_surfaces(tmp_path):
    points, triangles = sphere(2.0)
    found = curvature_of_nodes(points, cells_of(triangles))
    np.testing.assert_allclose(found, 0.5, rtol=0.02)
    assert np.allclose(curvature_of_nodes(points, cells_of(triangles[:, ::-1])), -found)  # seen from inside
    errors = []
    for num in (16, 32):
        points, triangles, expected = torus(num)
        errors.append(np.abs(curvature_of_nodes(points, cells_of(triangles)) - expected).max())
    assert errors[1] < 0.005
    assert errors[1] < errors[0] / 3.5, "second order"
    points, triangles = rings(12, 40, lambda u, v: (0.5 * np.cos(v), 0.5 * np.sin(v), u), closed=False)
    found = curvature_of_nodes(points, cells_of(triangles[:, ::-1]))
    ends = (points[:, 2] == 0) | (points[:, 2] == points[:, 2].max())
    assert np.isnan(found[ends]).all()
    np.testing.assert_allclose(found[~ends], 1.0, rtol=1e-9)


def test_a_store_has_curvature_of_nodes_and_of_cells(tmp_path):
    points, triangles = rings(12, 40, lambda u, v: (0.5 * np.cos(v), 0.5 * np.sin(v), u), closed=False)
    write(tmp_path / "pipe.h5", points, triangles[:, ::-1])
    for entity in (None, "cell"):
        report = scidata.partition(
            tmp_path / "pipe.h5", tmp_path / str(entity), entity=entity, geometry="area,curvature"
        )
        found = scidata.open_dataset(tmp_path / str(entity))[0]
        values = found["curvature"].numpy()
        np.testing.assert_allclose(values[~np.isnan(values)], 1.0, rtol=1e-9)
        assert np.isnan(values).sum() == (80 if entity is None else 0)
        assert ("NaN in 80 rows" in str(report.notes)) == (entity is None)
        assert "area" in found
        assert "normal" not in found


def by_brute_force(at, points, triangles):
    """The distance to the nearest of all triangles, as the least of those to faces, edges and corners."""
    a, b, c = (points[triangles[:, k]] for k in range(3))
    normal = np.cross(b - a, c - a)
    normal /= np.linalg.norm(normal, axis=1)[:, None]
    found = []
    for point in at:
        height = ((point - a) * normal).sum(axis=1)
        foot, inside, least = point - height[:, None] * normal, np.ones(len(a), bool), np.inf
        for one, other in ((a, b), (b, c), (c, a)):
            along = other - one
            inside &= (np.cross(along, foot - one) * normal).sum(axis=1) >= 0
            t = np.clip(((point - one) * along).sum(axis=1) / (along**2).sum(axis=1), 0, 1)
            least = min(least, np.linalg.norm(point - one - t[:, None] * along, axis=1).min())
        found.append(min(least, np.abs(height[inside]).min(initial=np.inf)))
    return np.array(found)


def test_signed_distance_is_exact_and_negative_inside():
    pytest.importorskip("vtkmodules")
    rng = np.random.default_rng(0)
    points, triangles, _ = torus(12)
    far, close = rng.uniform(-1.6, 1.6, (300, 3)), points[rng.integers(0, len(points), 100)]
    at = np.concatenate([far, close + rng.normal(0, 1e-3, close.shape), points[:20]])
    found = signed_distance(at, points, triangles, "test")
    np.testing.assert_allclose(np.abs(found), by_brute_force(at, points, triangles), atol=1e-14)
    # inside where rays upwards cross the surface an odd number of times
    a, b, c = (points[triangles[:, k]] for k in range(3))
    e1, e2, up = b - a, c - a, np.array([0, 0, 1.0])
    p, det = np.cross(up, e2), (e1 * np.cross(up, e2)).sum(axis=1)
    for point, distance in zip(at[:400], found, strict=False):
        s = point - a
        u, q = (s * p).sum(axis=1) / det, np.cross(s, e1)
        v, t = (q * up).sum(axis=1) / det, (q * e2).sum(axis=1) / det
        assert ((u > 0) & (v > 0) & (u + v < 1) & (t > 0)).sum() % 2 == (distance < 0)
    soup = points[triangles].reshape(-1, 3)  # as an STL file has it, and looking in
    looking_in = np.arange(len(soup)).reshape(-1, 3)[:, ::-1]
    assert np.array_equal(signed_distance(at[:50], soup, looking_in, "test") < 0, found[:50] < 0)


def test_stores_have_the_distance_to_a_file_each_and_to_their_own_boundary(tmp_path):
    pytest.importorskip("vtkmodules")
    points, triangles = sphere(1.0)
    rng = np.random.default_rng(1)
    clouds = [rng.uniform(-2, 2, (200, 3)) for _ in range(2)]
    for index, cloud in enumerate(clouds):
        write(tmp_path / f"run_{index}" / f"car_{index}.h5", points * (index + 1), triangles)
        write_hdf5(tmp_path / f"run_{index}" / "flow.h5", {"points": cloud})
    options = {"kind": "points", "geometry": {"sdf": "{folder}/car_*.h5"}}
    scidata.partition(str(tmp_path / "run_*" / "flow.h5"), tmp_path / "flow", **options)
    ds = scidata.open_dataset(tmp_path / "flow")
    assert [Path(path).name for path in ds[1].source[0].inputs] == ["flow.h5", "car_1.h5"]
    write(tmp_path / "run_1" / "car_1.h5", points * 3, triangles)  # resuming finds out that it has changed
    with pytest.raises(ConfigError, match=r"car_1\.h5"):
        scidata.partition(str(tmp_path / "run_*" / "flow.h5"), tmp_path / "flow", resume=True, **options)
    for index, cloud in enumerate(clouds):
        sample = ds[index]
        assert np.array_equal(sample["pos"].numpy(), cloud[sample.original_id("point").numpy()])
        away = np.linalg.norm(sample["pos"].numpy(), axis=1) - (index + 1)
        np.testing.assert_allclose(sample["sdf"].numpy(), away, atol=0.02 * (index + 1))
    corners = np.stack(np.meshgrid([0, 1.0], [0, 1.0], [0, 1.0, 2.0, 3.0], indexing="ij"), axis=-1).reshape(-1, 3)
    box = [0, 8, 12, 4, 1, 9, 13, 5]
    arrays = {"cells/offsets": [0, 8, 16, 24], "cells/types": [12] * 3,
              "cells/connectivity": [node + k for k in range(3) for node in box]}  # fmt: skip
    write_hdf5(tmp_path / "box.h5", {"points": corners, **arrays})
    scidata.partition(tmp_path / "box.h5", tmp_path / "box", entity="cell", geometry=["sdf=boundary", "volume"])
    assert scidata.open_dataset(tmp_path / "box")[0]["sdf"].tolist() == [-0.5] * 3  # the middles of three cubes


@pytest.mark.parametrize(
    ("geometry", "error", "words"),
    [
        ("curvatur", UnknownNameError, "did you mean 'curvature'"),
        ("sdf", ConfigError, "sdf=car.stl"),
        (5, ConfigError, "geometry=5: expected a name"),
        ({"sdf": "open.h5"}, ConfigError, "no inside: 4 edges of its 2 triangles"),
        ({"sdf": "*.h5"}, ConfigError, "leads to 3 files"),
        ("volume", ConfigError, "no volume, but area"),
        ("sdf=solid.h5", UnsupportedFormatError, r"\(tetra\)"),
    ],
)
def test_what_is_not_defined_is_refused_by_name(tmp_path, monkeypatch, geometry, error, words):
    monkeypatch.chdir(tmp_path)
    square = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0.0]])
    write("open.h5", square, [[0, 1, 2, 3]])
    write("turned.h5", square, [[0, 1, 2], [0, 3, 2]])
    arrays = {"cells/offsets": [0, 4], "cells/connectivity": range(4), "cells/types": [10]}
    write_hdf5("solid.h5", {"points": square + np.eye(4)[3, :, None], **arrays})
    with pytest.raises(error, match=words):
        scidata.partition("open.h5", "out", geometry=geometry)
