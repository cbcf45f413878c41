"""Rows put in order over disk, with little memory, against rows put in order in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scidata.errors import ConfigError
from scidata.meshes.order.hilbert import order_hilbert, order_rcb
from scidata.meshes.sample import RawSample
from scidata.store.format.journal import Journal
from scidata.store.format.spools import Spool
from scidata.store.partitioning.room import Room
from scidata.store.partitioning.rows import order_rows

NUM = 9_000  # in order "rcb" bisected twice


def clouds() -> dict[str, np.ndarray]:
    """Return points of every kind that an order treats in a way of its own."""
    rng = np.random.default_rng(0)
    plane, solid = rng.normal(size=(NUM, 2)), rng.random((NUM, 3))
    far = solid * 1e-9  # all others have few keys, and the box of the middle ones is taken
    far[77] = [5e3, 0, 0]
    clusters = solid * 1e-12 + rng.integers(0, 2, (NUM, 1))  # no box helps
    lat = np.repeat(np.linspace(-90, 90, 100), NUM // 100)
    lattice = (
        np.stack(np.unravel_index(rng.permutation(NUM), (20, 20, 30)), axis=1) - 10.0
    )  # medians are values of many
    repeated = np.concatenate([solid[: NUM // 2]] * 2) - 0.5
    return {
        "in the plane": plane,
        "an outlier": far,
        "clusters": clusters,
        "a sphere": np.stack([np.tile(np.arange(NUM // 100) * 3.0, 100), lat], axis=1),
        "a lattice": lattice,
        "repeated": np.where(rng.random(repeated.shape) < 0.01, -0.0, repeated),
        "few": solid[:3],
    }


CLOUDS = clouds()


@pytest.mark.parametrize("by", ["hilbert", "rcb"])
@pytest.mark.parametrize("case", CLOUDS)
def test_rows_get_the_order_that_they_get_in_memory(tmp_path: Path, case: str, by: str) -> None:
    points, on_sphere = CLOUDS[case], case == "a sphere"
    spool = Spool(str(tmp_path / "points"), (np.float64, points.shape[1:]))
    spool.append(points)
    raw = RawSample(name="a", kind="points", on_sphere=on_sphere, num_nodes=len(points))
    expected = (
        order_hilbert(points, on_sphere=on_sphere) if by == "hilbert" else (order_rcb(points, on_sphere=on_sphere), [])
    )
    crowded = case in ("an outlier", "clusters") and by == "hilbert"
    for nbytes in (150_000, 1 << 20) if crowded else (150_000,):
        room = Room(Journal(str(tmp_path / str(nbytes)), ""), nbytes)
        if crowded and nbytes < 1 << 20:
            with pytest.raises(ConfigError, match=r"of its 9000 points share keys .* use --order rcb, or allow more"):
                order_rows(raw, spool, len(points), by, room)
            continue
        order, notes = order_rows(raw, spool, len(points), by, room)
        assert isinstance(order, Spool)
        assert np.array_equal(order, expected[0])
        assert notes == expected[1]
        assert bool(notes) == (by == "hilbert" and case in ("an outlier", "clusters", "repeated"))
