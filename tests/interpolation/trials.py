"""One random interpolation: a grid of one to three dims, points in and around it, and how ranks hold both."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from scipy.interpolate import RegularGridInterpolator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import scidata
from scidata.shard import HaloDim, ShardSpec, ShardTensor
from scidata.shard.rows.runs import exchange_halo
from scidata.testing.oracle import assert_like_one_process, shard_of


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is interpolated, and how."""

    field: np.ndarray
    positions: np.ndarray
    coords: list[np.ndarray]
    period: list[float]
    outside: list[str]
    method: str

    def by_scipy(self) -> np.ndarray:
        """Return the values, ``(*lead, num_points)``; where a dim wraps, its first row comes again."""
        num_lead = self.field.ndim - len(self.coords)
        values = np.moveaxis(self.field, range(num_lead), range(-num_lead, 0)) if num_lead else self.field
        at, grid = self.positions.copy(), []
        for d, rows in enumerate(self.coords):
            low, descends = rows.min(), rows[0] > rows[-1]
            if self.period[d]:
                again, end = values.take([-1 if descends else 0], d), [low + self.period[d]]
                values = np.concatenate([again, values] if descends else [values, again], d)
                at[:, d] = low + np.remainder(at[:, d] - low, self.period[d])
                rows = np.concatenate([end, rows] if descends else [rows, end])  # noqa: PLW2901
            elif self.outside[d] == "clip":
                at[:, d] = np.clip(at[:, d], low, rows.max())
            grid.append(rows)
        if not len(at):
            return np.zeros((*self.field.shape[:num_lead], 0))
        kind = {"bilinear": "linear"}.get(self.method, self.method)
        found = RegularGridInterpolator(grid, values, kind, bounds_error=False, fill_value=np.nan)(at)
        return np.moveaxis(found, 0, -1)


def make_trial(rng) -> Trial:
    """Draw one: rows that ascend or descend, places on rows and beyond, NaN in both."""
    extents = rng.integers(2, 8, rng.integers(1, 4))
    coords, period = [], []
    for extent in extents:
        rows = np.cumsum(rng.uniform(0.05, 2, extent)) if rng.random() < 0.5 else np.arange(extent) * 1.5
        coords.append(rows[::-1].copy() if rng.random() < 0.4 else rows)
        period.append(float(np.ptp(rows) + rng.uniform(0.1, 2)) if rng.random() < 0.4 else 0.0)
    num = int(rng.integers(0, 30))
    positions = np.stack([rng.uniform(rows.min() - 2, rows.max() + 2, num) for rows in coords], 1)
    on_rows = rng.random(positions.shape) < 0.2
    positions[on_rows] = np.stack([rng.choice(rows, num) for rows in coords], 1)[on_rows]
    positions[rng.random(positions.shape) < 0.02] = np.nan
    field = rng.random((*rng.integers(1, 3, rng.integers(0, 3)), *extents))
    if rng.random() < 0.3:
        field.flat[rng.integers(field.size)] = np.nan
    outside = [str(each) for each in rng.choice(["nan", "clip"], len(extents))]
    method = str(rng.choice(["bilinear", "nearest"]))
    return Trial(field=field, positions=positions, coords=coords, period=period, outside=outside, method=method)


def _parts(rng, extent, num):
    return tuple(np.diff([0, *np.sort(rng.integers(0, extent + 1, num - 1)), extent]).tolist())


def _spec(rng, mesh, shape, dims):
    """Split dims by axis of the mesh, unevenly, into parts that may be empty."""
    sizes = tuple(None if d is None else _parts(rng, shape[d], mesh.shape[a]) for a, d in enumerate(dims))
    return ShardSpec.on(mesh, tuple(Replicate() if d is None else Shard(d) for d in dims), tuple(shape), sizes)


def layouts(rng, meshes, trial):
    """Draw the layouts of the field and of the points; None: plain."""
    mesh, flat = meshes[rng.integers(len(meshes))]
    ndim, num_axes = trial.field.ndim, len(mesh.shape)
    dims = [int(d) if rng.random() < 0.85 else None for d in rng.permutation(max(ndim, num_axes))[:num_axes]]
    field = _spec(rng, mesh, trial.field.shape, [d if d is not None and d < ndim else None for d in dims])
    axis = rng.integers(num_axes)
    points = (
        None,
        _spec(rng, flat, trial.positions.shape, [0]),
        _spec(rng, mesh, trial.positions.shape, [0 if a == axis else None for a in range(num_axes)]),
    )
    return field if rng.random() < 0.93 else None, points[rng.integers(3)]


def check_trial(rng, trial, field, points) -> None:
    """Hold values against SciPy, gradients against one process, and values by a halo from disk against both."""
    function = partial(
        scidata.interpolate, coords=trial.coords, method=trial.method, period=trial.period, outside=trial.outside
    )
    x, at = torch.from_numpy(trial.field), torch.from_numpy(trial.positions)
    inputs = [x.clone().requires_grad_(), at.clone().requires_grad_(trial.method == "bilinear")]
    expected, found = trial.by_scipy(), [assert_like_one_process(function, inputs, [field, points])]
    if field is not None:
        lead, halo = x.ndim - at.shape[1], {}
        for d in field.sharded:
            if d >= lead:
                halo[d] = HaloDim(lo=rng.integers(3), hi=rng.integers(3), periodic=bool(trial.period[d - lead]))
        padded = ShardTensor.from_padded(exchange_halo(shard_of(x, field).local, field, halo), field, halo)
        places = at if points is None else shard_of(at, points)
        found += [function(padded, places), function(padded, places)]  # the second by the plan that is kept
    for each in found:
        whole = each.full_tensor() if isinstance(each, ShardTensor) else each
        np.testing.assert_allclose(whole.detach().numpy(), expected, rtol=1e-9, atol=1e-9)


def run_trials(rank: int, num_ranks: int, seed: int, num: int) -> None:
    """Run trials with seeds from ``seed`` on; of an even number of ranks also on meshes of two axes."""
    flat = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    meshes = [(flat, flat)]
    if num_ranks % 2 == 0:
        mesh = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("h", "w"))
        meshes += [(mesh, mesh._flatten("all"))] * 2
    for number in range(seed, seed + num):
        rng = np.random.default_rng(number)
        trial = make_trial(rng)
        field, points = layouts(rng, meshes, trial)
        try:
            check_trial(rng, trial, field, points)
        except BaseException as e:
            e.add_note(f"seed {number}, field {field}, points {points}, {trial}")
            raise
