"""Whose part of a grid points lie in: that of the lower row of the cell that interpolation finds."""

import itertools

import numpy as np
import pytest
import torch

from scidata.core.bounds import owners_of
from scidata.core.grid_cut import GridCut
from scidata.errors import ConfigError
from scidata.shard.ops.rectilinear import grid_of

BOUNDS = [(0, 9), (0, 4, 9), (0, 0, 5, 9), (0, 8, 9), (0, 1, 9, 9), (0, 3, 3, 9)]


@pytest.mark.parametrize(("bounds", "descends", "wraps"), [*itertools.product(BOUNDS, (False, True), (False, True))])
def test_points_go_to_the_lower_row_of_their_cell(bounds, descends, wraps):
    rows = np.sort(np.random.default_rng(0).random(9) * 355) - 20
    rows = rows[::-1] if descends else rows
    low, high = (-400, 800) if wraps else (rows.min(), rows.max())
    x = np.concatenate([rows, np.random.default_rng(1).uniform(low, high, 200)])
    grid = grid_of([9], [rows], "bilinear", [360.0 * wraps], "nan", has_nan=True)
    before, after = (corner.rows[0] for corner in grid.find(torch.from_numpy(x)[:, None]).corners)
    lower = torch.minimum(before, after)
    lower = torch.where((before - after).abs() > 1, 8, lower)  # between the last row and the first
    found = GridCut.of([(0, rows, bounds, wraps)]).owners(np.stack([x, x], 1), on_sphere=wraps)
    assert np.array_equal(found, owners_of(bounds, lower.numpy()))


def test_two_dims_and_places_outside():
    cut = GridCut.of([(1, [90, 0, -90], [0, 1, 3], False), (0, [0, 90, 180, 270], [0, 2, 4], True)])
    points = np.array([[10, 80], [10, -80], [200, 95], [-10, -95], [np.nan, 0], [370, 0]])
    assert cut.num_parts == 4
    assert cut.owners(points, on_sphere=True).tolist() == [0, 2, 1, 3, 1, 0]


def test_messages():
    for rows in ([0.0], [0, 2, 1], [0, 0, 1]):
        with pytest.raises(ConfigError, match="ascend or descend strictly"):
            GridCut.of([(0, rows, [0, 1, len(rows)], False)])
