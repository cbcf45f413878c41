"""``scidata.interpolate`` against SciPy and one process: values, adjoints, messages."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy.interpolate import RegularGridInterpolator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import scidata
from scidata.errors import ConfigError, UnsupportedShardOp
from scidata.shard import HaloDim, ShardSpec, ShardTensor
from scidata.shard.comm.transport import count_sent
from scidata.shard.rows.runs import exchange_halo
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of

LATS, LONS = 9, 8
SIZES = {2: [(5, 4), (0, 9)], 3: [(3, 3, 3), (8, 0, 1)]}
POINTS = {2: [(17, 23), (40, 0)], 3: [(0, 40, 0), (13, 14, 13)]}


def random(*shape, seed=1):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def coords(descends=False, regular=True):
    """Latitudes, which leave the poles out, and longitudes; irregular ones as a reduced or a regional grid has them."""
    lat = np.linspace(-80, 80, LATS) if regular else np.sort(80 - 160 * random(LATS, seed=7).numpy())
    lon = np.arange(LONS) * 360 / LONS if regular else np.sort(350 * random(LONS, seed=8).numpy())
    return (lat[::-1].copy(), lon) if descends else (lat, lon)


def places(lat, lon, num=40):
    """Points, of which some lie on rows, beyond the poles, on the other side of the date line, or nowhere."""
    x = torch.stack([random(num, seed=3) * 190 - 95, random(num, seed=4) * 900 - 400], 1)
    x[0], x[1], x[2] = torch.tensor([[lat[2], lon[1]], [lat[-1], lon[-1]], [lat[0], lon[0] + 720]])
    x[3, 1] = torch.nan
    return x


def by_scipy(field, positions, lat, lon, method, clip=False):
    """The oracle: the first longitude again at the end."""
    lat, lon = np.asarray(lat), np.asarray(lon)
    whole = np.concatenate([field, field[..., :1]], -1)
    first = np.moveaxis(whole, (-2, -1), (0, 1))
    kind = {"bilinear": "linear"}.get(method, method)
    of = RegularGridInterpolator(
        (lat, np.append(lon, lon[0] + 360)), first, kind, bounds_error=False, fill_value=np.nan
    )
    at = np.array(positions, np.float64)
    at[:, 0] = np.clip(at[:, 0], lat.min(), lat.max()) if clip else at[:, 0]
    at[:, 1] = lon[0] + np.remainder(at[:, 1] - lon[0], 360)
    return np.moveaxis(of(at), 0, -1)


def layouts(num_ranks):
    """Specs of a field (3, LATS, LONS) and of points on a mesh, None where plain."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    lon_sizes = [tuple(s * LONS // LATS for s in sizes[:-1]) for sizes in SIZES[num_ranks]]
    lon_sizes = [(*s, LONS - sum(s)) for s in lon_sizes]
    for rows, points in itertools.zip_longest(SIZES[num_ranks], POINTS[num_ranks]):
        yield (
            ShardSpec.on(mesh, (Shard(1),), (3, LATS, LONS), (rows,)),
            ShardSpec.on(mesh, (Shard(0),), (40, 2), (points,)),
        )
    yield ShardSpec.on(mesh, (Shard(2),), (3, LATS, LONS), (lon_sizes[0],)), None
    yield None, ShardSpec.on(mesh, (Shard(0),), (40, 2), (POINTS[num_ranks][0],))
    yield ShardSpec.even(mesh, (Shard(0),), (3, LATS, LONS)), ShardSpec.even(mesh, (Shard(0),), (40, 2))


def interpolates(rank, num_ranks):
    every = itertools.product(("bilinear", "nearest"), ("nan", "clip"), (False, True))
    of_layouts = list(layouts(num_ranks))
    for number, (method, outside, descends) in enumerate(every):
        lat, lon = coords(descends, number % 4 < 2)
        field, positions = random(3, LATS, LONS), places(lat, lon)
        field[0, 4, 3] = torch.nan if number % 2 else 1.0
        expected = by_scipy(field.numpy(), positions, lat, lon, method, outside == "clip")
        differentiable = (True, method == "bilinear")
        inputs = [x.requires_grad_(d) for x, d in zip((field, positions), differentiable, strict=True)]

        function = partial(
            scidata.interpolate, coords=(lat, lon), period=(0, 360), method=method, outside=(outside, "nan")
        )
        for specs in of_layouts[number % 2 :: 2]:
            found = assert_like_one_process(function, inputs, specs)
            whole = found.full_tensor() if isinstance(found, ShardTensor) else found
            np.testing.assert_allclose(whole.detach().numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_values_and_adjoints(num_ranks):  # tests/interpolation has random ones, and meshes of two axes
    run_ranks(interpolates, num_ranks)


def with_halo(field, spec, lo, hi):
    """Cut a part with its halo, as a reader does."""
    halo = {spec.ndim - 2: HaloDim(lo=lo, hi=hi), spec.ndim - 1: HaloDim(lo=0, hi=1, periodic=True)}
    return ShardTensor.from_padded(exchange_halo(shard_of(field, spec).local, spec, halo), spec, halo)


def sends_nothing(rank, num_ranks):
    """Points between this rank's rows and the first of the next: one small agreement, none for the second field."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    lat, lon = coords()
    spec = ShardSpec.on(mesh, (Shard(1),), (3, LATS, LONS), ((3, 3, 3),))
    field, near = random(3, LATS, LONS), torch.from_numpy(lat[3 * rank : 3 * rank + 4])
    own = torch.stack([near[:-1].repeat(2) + 5, random(2 * len(near) - 2, seed=rank) * 360], 1)
    at = ShardTensor.from_local(own, mesh, [Shard(0)])
    x = with_halo(field, spec, 0, 1)
    counts = []
    for y in (x, 2 * x, x[:1], x.clone().requires_grad_()):
        before = count_sent()
        found = scidata.interpolate(y, at, (lat, lon), period=(0, 360))
        counts.append(count_sent() - before)
        whole = by_scipy(
            (2 * field if y is not x and y.shape == x.shape and not y.requires_grad else field)[: len(y)].numpy(),
            at.full_tensor(),
            lat,
            lon,
            "bilinear",
        )
        np.testing.assert_allclose(found.full_tensor().detach().numpy(), whole, rtol=1e-12)
    assert counts[0] == 4 * 8 * (num_ranks - 1)
    assert counts[1] == 0
    assert counts[3] > counts[0]  # cells of the next rank: a tensor that requires grad does not use its halo


def test_a_wide_halo_needs_no_exchange():
    run_ranks(sends_nothing, 3)


def other_dtypes(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    lat, lon = coords()
    specs = ShardSpec.even(mesh, (Shard(0),), (LATS, LONS)), ShardSpec.even(mesh, (Shard(0),), (40, 2))
    field, positions = random(LATS, LONS), places(lat, lon)
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.complex128, 1e-12)):
        x, at = field.to(dtype), positions.to(torch.float32)
        found = scidata.interpolate(shard_of(x, specs[0]), shard_of(at, specs[1]), (lat, lon), period=(0, 360))
        assert found.dtype == dtype
        expected = by_scipy(x.to(torch.complex128).numpy(), at, lat, lon, "bilinear")
        np.testing.assert_allclose(found.full_tensor().to(torch.complex128).numpy(), expected, rtol=rtol)
    classes, inside = (field * 9).long(), positions[4:].clone()
    inside[:, 0] *= 0.8
    at = scidata.scatter_tensor(inside, 0, mesh, [Shard(0)])
    found = scidata.interpolate(shard_of(classes, specs[0]), at, (lat, lon), method="nearest", period=(0, 360))
    assert found.dtype == torch.int64
    assert np.array_equal(found.full_tensor(), by_scipy(classes.numpy(), inside, lat, lon, "nearest"))
    # rows as coordinates; one dim, three dims
    x, at = random(7, 6, 5), random(20, 3, seed=2) * torch.tensor([6.0, 5.0, 4.0])
    parts = scidata.scatter_tensor(x, 0, mesh, [Shard(2)]), scidata.scatter_tensor(at, 0, mesh, [Shard(0)])
    expected = RegularGridInterpolator([np.arange(n) for n in x.shape], x.numpy())(at)
    np.testing.assert_allclose(scidata.interpolate(*parts).full_tensor(), expected, rtol=1e-12)
    expected = RegularGridInterpolator([np.arange(5)], x.movedim(-1, 0).numpy())(at[:, 2:])
    found = scidata.interpolate(parts[0], [parts[1][:, 2]]).full_tensor()
    np.testing.assert_allclose(found.movedim(-1, 0), expected, rtol=1e-12)


def differentiates_twice(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    lat, lon = coords()
    specs = ShardSpec.even(mesh, (Shard(0),), (LATS, LONS)), ShardSpec.even(mesh, (Shard(0),), (36, 2))
    field, positions = random(LATS, LONS), places(lat, lon)[4:] * torch.tensor([0.8, 1.0])

    def function(x, at):
        y = scidata.interpolate(x, at, (lat, lon), period=(0, 360))
        gradients = torch.autograd.grad((y**3).sum(), [getattr(t, "local", t) for t in (x, at)], create_graph=True)
        return [
            ShardTensor(g, t.spec) if isinstance(t, ShardTensor) else g for g, t in zip(gradients, (x, at), strict=True)
        ]

    inputs = field.requires_grad_(), positions.requires_grad_()
    assert_like_one_process(function, inputs, specs, rtol=1e-11)


def names_what_is_wrong(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    x = scidata.scatter_tensor(random(LATS, LONS), 0, mesh, [Shard(0)])
    lat, lon = coords()
    inside = ShardTensor.from_local(torch.zeros(3, 2), mesh, [Shard(0)])
    beyond = ShardTensor.from_local(torch.tensor([[0.0, 0.0], [85.0 * (rank == 1), 0.0]]), mesh, [Shard(0)])
    with pytest.raises(ConfigError, match=r"point 1 of rank 1, at \[85\.0, 0\.0\], is NaN or lies outside"):
        scidata.interpolate(x, beyond, (lat, lon), outside="error")
    with pytest.raises(ConfigError, match="point 1 of rank 1"):  # the field is plain, the points are not
        scidata.interpolate(random(LATS, LONS), beyond, (lat, lon), outside=("error", "nan"))
    with pytest.raises(ConfigError, match="point 1 of rank 1"):  # integers have no NaN
        scidata.interpolate((9 * x).long(), beyond, (lat, lon), method="nearest")
    for message, arguments, named in [
        ("method must be one of", (x, inside, (lat, lon)), {"method": "linear"}),
        ("outside must be one of", (x, inside, (lat, lon)), {"outside": "clamp"}),
        (r"coordinate 0 of the grid has shape \(8,\)", (x, inside, (lon, lon)), {}),
        ("ascend or descend strictly", (x, inside, (np.abs(lat), lon)), {}),
        ("less than its period 300", (x, inside, (lat, lon)), {"period": (0, 300)}),
        ("coords has 1 entries for 2 dims", (x, inside, (lat,)), {}),
        (r"positions of shape \(3,\)", (x, torch.zeros(3), (lat, lon)), {}),
        ("positions of shape .* and torch.int64", (x, torch.zeros(3, 2).long(), (lat, lon)), {}),
        ("a field of torch.int64", ((9 * x).long(), inside, (lat, lon)), {}),
        ("expected a width of each dim", (x, inside, (lat, lon)), {"period": ("0", "360")}),
        ("expected a width of each dim", (x, inside, (lat, lon)), {"period": (0, -360)}),
        ("period=360: expected one for each of the 2 dims", (x, inside, (lat, lon)), {"period": 360}),
        ("the field and positions are tensors", (x, np.zeros((3, 2)), (lat, lon)), {}),
        ("the field and positions are tensors", (np.zeros((9, 8)), inside, (lat, lon)), {}),
        (r"positions of shapes \[\(3,\), \(4,\)\]", (x, (torch.zeros(3), torch.zeros(4)), (lat, lon)), {}),
        ("two are needed", (x[:, :1], inside, (lat, lon[:1])), {}),
    ]:
        with pytest.raises(ConfigError, match=message):
            scidata.interpolate(*arguments, **named)
    alone = init_device_mesh("cpu", (num_ranks, 1), mesh_dim_names=("a", "b"))["b"]
    with pytest.raises(UnsupportedShardOp, match="lie on other ranks"):
        scidata.interpolate(x, ShardTensor.from_local(torch.zeros(3, 2), alone, [Shard(0)]), (lat, lon))


class Observes(torch.nn.Module):
    def __init__(self, coordinates):
        super().__init__()
        self.layer, self.coordinates = torch.nn.Conv2d(1, 1, 3, padding=1, dtype=torch.float64), coordinates

    def forward(self, x, at):
        return scidata.interpolate(self.layer(x), at, self.coordinates, period=(0, 360), outside="clip").square()


def compiled(rank, num_ranks):
    """A captured step falls back to eager code, and gives the same."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    torch.manual_seed(0)
    model = Observes(coords())
    x = scidata.scatter_tensor(random(1, 1, LATS, LONS), 0, mesh, [Shard(2)])
    step = scidata.compile(model, backend="aot_eager")
    for seed in (3, 3, 5):
        at = scidata.scatter_tensor(random(40, 2, seed=seed) * 150 - 75, 0, mesh, [Shard(0)])
        results = []
        for function in (model, step):
            model.zero_grad()
            loss = function(x, at).mean()
            loss.backward()
            results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def several(rank, num_ranks):
    other_dtypes(rank, num_ranks)
    differentiates_twice(rank, num_ranks)
    names_what_is_wrong(rank, num_ranks)
    dist.barrier()
    compiled(rank, num_ranks)


def test_dtypes_second_derivatives_messages_compiled_steps():
    run_ranks(several, 2)
