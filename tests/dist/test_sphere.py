"""torch-harmonics' kernels on shards, here by stand-ins of the same names and arguments, where it is not installed.

Its own layers run in ``python -m tests.models --library harmonics``.
"""

import importlib.util

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from scidata.shard import ShardSpec
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process

LAT, LON, BASIS = 6, 8, 2


def lists(lat_out):
    """Neighbours of each row, of the rows in a random order: starts, kernels, rows, neighbours, weights."""
    draw = torch.Generator().manual_seed(4)
    starts, kernels, rows, neighbours = [0], [], [], []
    for pair in torch.randperm(BASIS * lat_out, generator=draw).tolist():
        count = 1 + pair % 3
        kernels += [pair // lat_out] * count
        rows += [pair % lat_out] * count
        neighbours += torch.randperm(LAT * LON, generator=draw)[:count].sort().values.tolist()
        starts.append(len(rows))
    weights = torch.rand(len(rows), generator=draw, dtype=torch.float64)
    return [*map(torch.tensor, (starts, kernels, rows, neighbours)), weights]


def entries(starts, kernels, rows, neighbours, weights):
    for i in range(len(starts) - 1):
        for n in range(int(starts[i]), int(starts[i + 1])):
            yield int(kernels[n]), int(rows[n]), int(neighbours[n]) // LON, int(neighbours[n]) % LON, weights[n]


def contract(x, starts, kernels, rows, neighbours, weights, basis, lat_out, lon_out):
    step = x.shape[3] // lon_out
    out = [[x.new_zeros(*x.shape[:2], lon_out) for _ in range(lat_out)] for _ in range(basis)]
    for kernel, row, lat, lon, weight in entries(starts, kernels, rows, neighbours, weights):
        out[kernel][row] = out[kernel][row] + weight * x[:, :, lat].roll(-lon, -1)[..., ::step]
    parts = [torch.stack(each, 2) if each else x.new_zeros(*x.shape[:2], 0, lon_out) for each in out]
    return torch.stack(parts, 2)


def contract_back(x, starts, kernels, rows, neighbours, weights, basis, lat_out, lon_out):
    step = lon_out // x.shape[4]
    out = [x.new_zeros(*x.shape[:2], lon_out) + x.sum() * 0 for _ in range(lat_out)]
    for kernel, row, lat, lon, weight in entries(starts, kernels, rows, neighbours, weights):
        spread = torch.zeros_like(out[lat])
        spread[..., ::step] = weight * x[:, :, kernel, row]
        out[lat] = out[lat] + spread.roll(lon, -1)
    return torch.stack(out, 2)


def neighbourhood(
    keys, values, queries, weights, neighbours, starts, arcs, arc_starts, heads, lon_in, lat_out, lon_out
):
    assert len(starts) == len(arc_starts) == lat_out + 1
    assert arc_starts[-1] == len(arcs)
    rows = []
    for row in range(lat_out):
        near = neighbours[int(starts[row]) : int(starts[row + 1])]
        around = (near % lon_in)[None] + torch.arange(lon_out)[:, None] * (lon_in // lon_out)
        lat, lon = near // lon_in, around % lon_in
        scores = (keys[:, lat, lon] * queries[:, row, :, None]).sum(-1) + weights[lat].log()
        rows.append((scores.softmax(-1)[..., None] * values[:, lat, lon]).sum(2))
    return torch.stack(rows, 1) if rows else values.new_zeros(len(values), 0, lon_out, values.shape[3])


def kernels():
    """Return torch's operators by name; define them where torch-harmonics does not."""
    if importlib.util.find_spec("torch_harmonics"):
        import torch_harmonics  # noqa: F401  (it registers them)
    else:
        ints, lists = "int k, int h, int w", "Tensor a, Tensor b, Tensor c, Tensor d, Tensor e"
        for name, run in (("contraction", contract), ("transpose_contraction", contract_back)):
            torch.library.define(f"disco_kernels::_disco_s2_{name}_optimized", f"(Tensor x, {lists}, {ints}) -> Tensor")
            torch.library.impl(f"disco_kernels::_disco_s2_{name}_optimized", "CompositeImplicitAutograd", run)
        name = "attention_kernels::_neighborhood_s2_attention_optimized"
        torch.library.define(name, f"(Tensor k, Tensor v, Tensor q, {lists}, int n, int i, int o, int p) -> Tensor")
        torch.library.impl(name, "CompositeImplicitAutograd", neighbourhood)
    return torch.ops.disco_kernels, torch.ops.attention_kernels


def check(rank, num_ranks):
    disco, attention = kernels()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w")) if num_ranks == 4 else None
    mesh = mesh or init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    placements = [Shard(2), Shard(3)] if num_ranks == 4 else [Shard(2)]
    starts = torch.tensor([0, 3, 5, 9, 10, 14, 15])
    near = torch.randperm(LAT * LON, generator=torch.Generator().manual_seed(5))[:15]
    quad = torch.linspace(0.5, 1, LAT, dtype=torch.float64)

    def attend(x):
        x = x.permute(0, 2, 3, 1)
        given = (quad, near, starts, torch.zeros(15, 3), starts, 1, LON, LAT, LON)
        return attention._neighborhood_s2_attention_optimized(x, x.sin(), x.cos(), *given)

    functions = {
        "contraction": lambda x: disco._disco_s2_contraction_optimized(x, *lists(LAT), BASIS, LAT, LON),
        "coarser": lambda x: disco._disco_s2_contraction_optimized(x, *lists(3), BASIS, 3, LON // 2),
        "transposed": lambda x: disco._disco_s2_transpose_contraction_optimized(
            torch.stack([x, x.sin()], 2), *lists(LAT), BASIS, LAT, LON
        ),
        "attention": attend,
    }
    if importlib.util.find_spec("torch_harmonics"):
        del functions["attention"]  # in float32 alone
    for sizes in {2: [(4, 2), (0, 6)], 3: [(3, 2, 1), (0, 4, 2)], 4: [(4, 2), (0, 6)]}[num_ranks]:
        for name, function in functions.items():
            x = torch.randn(2, 3, LAT, LON, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            given = {0: sizes} | ({1: (5, 3)} if num_ranks == 4 else {})
            specs = [ShardSpec.even(mesh, placements, x.shape, given)]
            if num_ranks == 2:  # the channels
                specs.append(ShardSpec.even(mesh, [Shard(1)], x.shape, {0: (2, 1)}))
            if num_ranks == 4:  # longitudes alone
                specs.append(ShardSpec.even(mesh, [Replicate(), Shard(3)], x.shape, {1: (5, 3)}))
            for spec in specs:
                try:
                    assert_like_one_process(function, [x.requires_grad_()], [spec])
                except BaseException as error:
                    raise AssertionError(f"{name}: {spec}") from error


def test_kernels_of_the_sphere():
    for num_ranks in (2, 3, 4):
        run_ranks(check, num_ranks, timeout=200)
