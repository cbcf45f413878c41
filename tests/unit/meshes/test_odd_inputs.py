"""Inputs at the edge of what there is: stored as they are, bit for bit, or refused by name; never silently wrong."""

import h5py
import numpy as np
import pytest

from scidata.errors import ConfigError, CorruptDataError, SciDataError, UnsupportedFormatError
from scidata.meshes.samples import read_samples
from scidata.store.format.store import open_store, verify
from scidata.store.partitioning.partition import partition
from tests.unit._parts import check_round_trip, random_bounds

RNG = np.random.default_rng(11)
XY = RNG.random((40, 2))
PERMUTED = RNG.permutation(39).reshape(13, 3)


def quads(width, height, *, wrap_x=False, wrap_y=False):
    """Cells of a grid of nodes, row by row."""
    nodes = np.arange(width * height).reshape(height, width)
    right, up = np.roll(nodes, -1, axis=1), np.roll(nodes, -1, axis=0)
    cells = np.stack([nodes, right, np.roll(right, -1, axis=0), up], axis=-1)
    return cells[: None if wrap_y else height - 1, : None if wrap_x else width - 1].reshape(-1, 4)


def globe(longitudes):
    """Two circles of latitude, one near the pole, and the quads between them, round the globe."""
    ring = np.asarray(longitudes, float)
    points = np.stack([np.tile(ring, 2), np.repeat([0.0, 80.0], len(ring))], axis=1)
    return {"points": points, "points@units": "degrees", "cells": quads(len(ring), 2, wrap_x=True)}


def write(path, arrays):
    """Write an HDF5 file: ``name@attribute`` is an attribute."""
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            if "@" not in name:
                file[name] = values
        for name, value in arrays.items():
            if "@" in name:
                array, attribute = name.split("@")
                file[array].attrs[attribute] = value
    return str(path)


MULTI = RNG.integers(0, 6, (2, 80))
TWO_WIDE = {
    "points": np.array([[0.0, 0], [1, 0], [0, 1], [1, 1]]),
    "points@period": [2.0, 2.0],
    "cells": quads(2, 2, wrap_x=True, wrap_y=True),
    "node/u": np.arange(4.0),
    "cell/k": np.arange(4.0),
}

STORED = {
    "no cells": ({"points": XY, "cells": np.empty((0, 3), int), "u": XY}, {}),
    "one node": ({"points": XY[:1], "cells": np.empty((0, 3), int), "u": XY[:1]}, {}),
    "no points": ({"points": np.empty((0, 3)), "u": np.empty((0, 2))}, {}),
    "neighbours of one point": ({"points": XY[:1], "u": XY[:1]}, {"edges": "knn:3"}),
    "points within a radius of none": ({"points": np.empty((0, 3)), "u": np.empty(0)}, {"edges": "radius:0.3"}),
    "isolated nodes": ({"pos": XY, "edge_index": np.empty((2, 0), int), "u": XY}, {}),
    "nodes in no cell": ({"points": XY, "cells": [[0, 1, 2]], "u": XY}, {}),
    "points in one place": ({"points": np.zeros((50, 3)), "u": np.arange(50)}, {"edges": "knn:4"}),
    "points in one place, rcb": ({"points": np.zeros((50, 3)), "u": np.arange(50)}, {"order": "rcb"}),
    "points on a line": ({"points": XY[:, :1] * [1, 0, 0], "u": XY}, {}),
    "far from the origin": ({"points": 1e12 + XY, "u": XY}, {"edges": "knn:4"}),
    "the smallest numbers": ({"points": XY * 5e-322, "u": XY}, {}),
    "halves": ({"points": XY.astype("f2"), "u": XY.astype("f2")}, {}),
    "big-endian": (
        {
            "points": XY.astype(">f4"),
            "cells": PERMUTED.astype(">i2"),
            "u": XY.astype(">f8"),
            "k": np.arange(13, dtype=">u2"),
        },
        {},
    ),
    "unsigned": (
        {"points": (XY * 9).astype("u4"), "cells": PERMUTED.astype("u8"), "u": RNG.integers(0, 1 << 64, 40, "u8")},
        {},
    ),
    "bytes for nodes": ({"points": XY, "cells": PERMUTED.astype("i1"), "u": XY > 0.5}, {}),
    "names": ({"points": XY, "température": XY, "速度 x": XY, "flow/mean/u": XY, "flow/u": XY, "U": XY, "u": XY}, {}),
    "no channels": ({"points": XY, "u": np.empty((40, 0), "f4"), "scalar": 1.0}, {}),
    "no finite value": ({"points": XY, "u": np.full(40, np.nan), "v": np.r_[np.inf, np.zeros(39)]}, {}),
    "parallel edges": (
        {"pos": XY[:6], "edge_index": MULTI, "edge/w": np.arange(80.0)},
        {"keep": "self_loops,duplicate_edges"},
    ),
    "a cost of nothing": ({"points": XY, "w": np.zeros(40)}, {"weights": "w"}),
    "across the date line": ({**globe(np.linspace(-180, 179, 30)), "u": np.arange(60)}, {}),
    "two ranges of longitude": ({**globe(np.r_[170:181, -179:-169]), "u": np.arange(42)}, {}),
    "poles": (
        {"points": np.stack([XY[:, 0] * 360, np.repeat([90.0, -90], 20)], 1), "points@units": "degrees", "u": XY},
        {"edges": "knn:3", "kind": "graph"},
    ),
    "two cells round a torus": (TWO_WIDE, {"keep": "crowded_faces"}),
    "two cells round a torus, as rows": (TWO_WIDE, {"keep": "crowded_faces", "entity": "cell"}),
    "padded with -1": ({"points": XY, "cells": [[0, 1, 2, -1], [3, 4, 5, 6]], "k": [1.0, 2.0]}, {}),
    "counted from one": ({"points": XY, "cells": PERMUTED + 1, "cells@start_index": 1, "k": np.arange(13.0)}, {}),
    "lines and vertices": (
        {"points": XY, "cells/offsets": [0, 1, 3, 7], "cells/connectivity": np.arange(7), "cells/types": [1, 3, 4]},
        {},
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_is_stored_as_it_is(tmp_path, name):
    arrays, options = STORED[name]
    source, store = write(tmp_path / "raw.h5", arrays), str(tmp_path / "store")
    partition(source, store, **options)
    assert verify(store) is None
    raw = read_samples(source, **{k: v for k, v in options.items() if k in ("kind", "entity", "edges")})[0]
    topology = ("points", "pos", "cells", "edge_index", "scalar")
    fields = {n for n in arrays if "@" not in n and not n.startswith(topology)}
    assert len(raw.fields) == len(fields) - (options.get("entity") == "cell")  # those of nodes are left out
    num_rows = open_store(store).sample(0).counts[raw.entity]
    check_round_trip(source, store, 3 if num_rows else 8, sample=raw)  # also more parts than rows
    check_round_trip(source, store, 4, sample=raw, bounds=random_bounds(num_rows, 4, RNG))
    if "weights" in options:
        check_round_trip(source, store, 5, sample=raw, weights=options["weights"])


FROM_ZERO = np.array([[1, 2, 3, 0], [4, 5, 6, 7], [36, 37, 38, 39]])
REFUSED = {
    "a start_index that is wrong": (
        {"points": XY, "cells": FROM_ZERO, "cells@start_index": 1},
        {},
        "indices run from 0 to 39, where 1 to 40 were expected",
    ),
    "no start_index": ({"points": XY, "cells": FROM_ZERO + 1}, {}, "give it the attribute start_index = 1"),
    "no start_index of pairs": (
        {"pos": XY[:3], "edge_index": [[1, 2, 3], [2, 3, 1]]},
        {},
        "'edge_index' has no start_index",
    ),
    "no start_index of lists": (
        {"points": XY[:3], "cells/offsets": [0, 3], "cells/connectivity": [1, 2, 3]},
        {},
        "'cells/connectivity' has no start_index",
    ),
    "a start_index that is no integer": (
        {"points": XY, "cells": PERMUTED, "cells@start_index": 0.5},
        {},
        "start_index is 0.5, but an integer",
    ),
    "a hole in a cell": ({"points": XY, "cells": [[0, -1, 1, 2]]}, {}, "1 of 1 cells lack a node"),
    "NaN for a cost": ({"points": XY, "w": np.r_[np.nan, np.ones(39)]}, {"weights": "w"}, "negative, NaN or infinite"),
    "costs without a sum": ({"points": XY, "w": np.full(40, 1e308)}, {"weights": "w"}, "no finite sum"),
    "a name of Zarr's": ({"points": XY, "zarr.json": XY}, {}, "'zarr.json' on point has a name that cannot be"),
    "a name that is too long": ({"points": XY, "x" * 300: XY}, {}, "has a name that cannot be that of a folder"),
    "a field in a field": (
        {"pos": XY, "edge_index": [[0], [1]], "node/flow": XY, "flow/u": XY},
        {},
        "'flow/u' on node lies inside another one, 'node/flow'",
    ),
    "numbers of 128 bits": ({"points": XY, "u": XY.astype("g")}, {"fields": "u"}, "no real number of at most 64 bits"),
    "complex numbers": ({"points": XY, "u": XY + 1j}, {"fields": "u"}, "no real number of at most 64 bits"),
    "polyhedra": (
        {"points": XY, "cells/offsets": [0, 8], "cells/connectivity": np.arange(8), "cells/types": [42]},
        {},
        "filter Tetrahedralize), or, for finite volumes, write the cells as nodes of a graph",
    ),
    "cells twice round a torus": (TWO_WIDE, {}, "4 faces lie between more than two cells"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(tmp_path, name):
    arrays, options, message = REFUSED[name]
    source, store = write(tmp_path / "raw.h5", arrays), tmp_path / "store"
    with pytest.raises(SciDataError) as caught:
        partition(source, store, **options)
    assert message in str(caught.value)
    assert isinstance(caught.value, ConfigError | CorruptDataError | UnsupportedFormatError)
    assert not store.exists() or not any(name.startswith(("sample", ".tmp", "manifest")) for name in store.iterdir())


def test_coordinates_that_were_never_written(tmp_path):
    netcdf4 = pytest.importorskip("netCDF4", reason="writes the files")
    source = str(tmp_path / "raw.nc")
    with netcdf4.Dataset(source, "w") as file:
        file.createDimension("point", 5)
        for name in ("x", "y"):
            file.createVariable(name, "f4", ("point",))
        file["x"][:] = np.arange(5)
        file["y"][:4] = np.arange(4)
    with pytest.raises(CorruptDataError, match=r"1 of 5 points have a NaN or infinite coordinate \(first rows: \[4\]"):
        partition(source, tmp_path / "store", points="x,y")
    report = partition(source, tmp_path / "store", points="x,y", repair="nan_points")
    assert report.counts == {"point": 4}


def test_samples_of_any_sizes_in_one_store(tmp_path):
    sizes = [50, 0, 1, 200]
    files = [
        write(tmp_path / f"s{i}.h5", {"points": RNG.random((n, 3)), "point/u": RNG.random((n, 2))})
        for i, n in enumerate(sizes)
    ]
    store = str(tmp_path / "store")
    assert partition(files, store).counts == {"point": 251}
    assert verify(store) is None
    opened = open_store(store)
    for index, file in enumerate(files):
        ids = opened.read(index, "point/original_id")
        with h5py.File(file) as raw:
            assert np.array_equal(opened.read(index, "point/u"), raw["point/u"][()][ids])
        assert np.array_equal(np.sort(ids), np.arange(sizes[index]))
