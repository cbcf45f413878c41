"""ShardTensor itself: making, layouts, halos, autograd, and being a tensor."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from scidata.core.bounds import window
from scidata.errors import ShardLayoutError, UnsupportedShardOp
from scidata.shard import HaloDim, ShardSpec, ShardTensor, scatter_tensor, shard_ops
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of

LAYOUTS = {1: [(7,)], 2: [(4, 3), (7, 0), (1, 6)], 3: [(3, 2, 2), (0, 5, 2), (7, 0, 0)]}
GRID = [((4, 3), (2, 3)), ((7, 0), (1, 4)), ((6, 1), (0, 5))]


def mesh_of(num_ranks):
    return init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))


def padded_of(full, spec, halo):
    """The owned rows and halo, as a reader would have read them."""
    for dim, widths in halo.items():
        bounds, part = spec.dim_bounds(dim)
        segments = window(bounds, part, **vars(widths))
        rows = [full.narrow(dim, s.start, s.count) for s in segments]
        full = torch.cat(rows, dim) if rows else full.narrow(dim, 0, 0)
    for dim in spec.sharded:
        if dim not in halo:
            full = full.narrow(dim, spec.offsets[dim], spec.local_shape[dim])
    return full.clone()


def check_making(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    full = torch.arange(42.0).reshape(2, 7, 3)
    for sizes in LAYOUTS[num_ranks]:
        spec = ShardSpec.even(mesh, [Shard(1)], full.shape, {0: sizes})
        local = shard_of(full, spec).to_local()
        x = ShardTensor.from_local(local, mesh, [Shard(-2)])
        assert x.spec == spec
        assert x.to_local() is local
        assert torch.equal(x.full_tensor(), full)
        assert type(x.full_tensor()) is torch.Tensor
        assert x.device_mesh is mesh
        assert x.placements == (Shard(1),)
        same = ShardTensor.from_local(full, mesh, [Replicate()])
        assert torch.equal(same.full_tensor(), full)
        if num_ranks > 1:
            with pytest.raises(ShardLayoutError, match="do not form one tensor"):
                ShardTensor.from_local(torch.zeros(2, 3 + rank, 3 + rank), mesh, [Shard(1)])
            with pytest.raises(ShardLayoutError, match=r"float64.*int64|int64.*float64"):
                ShardTensor.from_local(torch.zeros(2, dtype=[torch.float64, torch.int64][rank % 2]), mesh, [Shard(0)])
            with pytest.raises(ShardLayoutError, match="do not form one tensor"):
                ShardTensor.from_local(torch.zeros([2] * (rank + 1)), mesh, [Shard(0)])
        for src in range(num_ranks):
            whole = full if rank == src else None
            y = scatter_tensor(whole, src, mesh, [Shard(1)], sizes={"domain": sizes}, requires_grad=True)
            assert y.spec == spec
            assert y.requires_grad
            assert y.is_leaf
            assert torch.equal(y.to_local(), local)
            z = scatter_tensor(whole, src, mesh, [Shard(1)], global_shape=(2, 7, 3), dtype=torch.float32)
            assert torch.equal(z.full_tensor(), full)
            z = scatter_tensor(whole, src, mesh, (Replicate(),))
            assert torch.equal(z.to_local(), full)
            with pytest.raises(ShardLayoutError, match="sent shape"):
                scatter_tensor(whole, src, mesh, [Shard(1)], global_shape=(7, 2, 3))
        with pytest.raises(ShardLayoutError, match="not in the device mesh"):
            scatter_tensor(full, 17, mesh, [Shard(1)])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_making_and_scattering(num_ranks):
    run_ranks(check_making, num_ranks)


def check_redistribute(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    torch.manual_seed(0)
    full = torch.randn(7, 2, 7, dtype=torch.float64).requires_grad_()
    layouts = LAYOUTS[num_ranks]
    targets = [
        ([Replicate()], None),
        ([Shard(0)], None),
        ([Shard(2)], {0: layouts[-1]}),
        (None, {"domain": layouts[-1]}),
    ]
    for sizes, (placements, new) in itertools.product(layouts, targets):
        spec = ShardSpec.even(mesh, [Shard(0)], full.shape, {0: sizes})

        def there(x, placements=placements, new=new):
            return x.redistribute(placements=placements, sizes=new) * 1.0 if isinstance(x, ShardTensor) else x * 1.0

        def and_back(x, placements=placements, new=new, sizes=sizes):
            if not isinstance(x, ShardTensor):
                return x.sin() * 2
            y = x.redistribute(placements=placements, sizes=new)
            return ShardTensor(y.to_local().sin(), y.spec).redistribute(mesh, [Shard(0)], sizes={0: sizes}) * 2

        assert_like_one_process(there, [full], [spec])
        back = assert_like_one_process(and_back, [full], [spec])
        assert back.spec == spec
        assert_like_one_process(
            lambda x: x.full_tensor() if isinstance(x, ShardTensor) else x.view_as(x), [full], [spec]
        )
        x = shard_of(full, spec)
        assert x.redistribute(placements=[Shard(0)]) is x  # sizes are kept
        assert (
            x.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(0)], sizes={0: sizes}).spec == spec
        )
    with pytest.raises(ShardLayoutError, match="another mesh"):
        x.redistribute(init_device_mesh("cpu", (num_ranks, 1)), [Shard(0), Replicate()])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_redistribute(num_ranks):
    run_ranks(check_redistribute, num_ranks)


def check_grid(rank, num_ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))
    torch.manual_seed(0)
    full = torch.randn(3, 7, 5, dtype=torch.float64).requires_grad_()
    for rows, columns in GRID:
        spec = ShardSpec.even(mesh, [Shard(1), Shard(2)], full.shape, {"h": rows, "w": columns})
        x = ShardTensor.from_local(shard_of(full, spec).to_local(), mesh, [Shard(1), Shard(2)])
        assert x.spec == spec
        assert torch.equal(x.full_tensor(), full)
        explicit = ShardTensor.from_local(x.to_local(), mesh, [Shard(1), Shard(2)], sharding_shapes=x.sharding_shapes())
        assert explicit.spec == spec
        for src in range(4):
            whole = full.detach() if rank == src else None
            sizes = {"h": rows, "w": columns}
            assert torch.equal(
                scatter_tensor(whole, src, mesh, [Shard(1), Shard(2)], sizes=sizes).to_local(), x.to_local()
            )
            half = scatter_tensor(whole, src, mesh, [Replicate(), Shard(1)], sizes={"w": rows})
            assert torch.equal(half.full_tensor(), full)
            half = scatter_tensor(whole, src, mesh, [Shard(1), Replicate()], sizes={"h": rows})
            assert torch.equal(half.full_tensor(), full)
        for placements, sizes in [
            ([Shard(2), Shard(1)], {"h": columns, "w": rows}),
            ([Replicate(), Shard(1)], {"w": rows}),
            ([Replicate(), Shard(2)], None),
            ([Shard(0), Shard(2)], {"h": (0, 3)}),
        ]:
            function = lambda t, p=placements, s=sizes: (  # noqa: E731
                t.redistribute(placements=p, sizes=s) if isinstance(t, ShardTensor) else t * 1.0
            )
            assert_like_one_process(function, [full], [spec])
    # (3, 2) over 'w' on one row of the mesh, (2, 3) on the other: no tensor
    with pytest.raises(ShardLayoutError, match="do not form one tensor"):
        ShardTensor.from_local(torch.zeros(2, 3 if rank in (0, 3) else 2), mesh, [Shard(0), Shard(1)])


def test_two_axes():
    run_ranks(check_grid, 4)


HALOS = [
    {1: HaloDim(lo=1, hi=2)},
    {1: HaloDim(lo=2, hi=1, periodic=True)},
    {1: HaloDim(lo=5, hi=9)},
    {1: HaloDim(lo=9, hi=3, periodic=True), 2: HaloDim(lo=1, hi=1, periodic=True)},
]


COLUMN, IMAGE = torch.linspace(-1, 1, 7)[:, None], torch.linspace(0, 2, 35).reshape(7, 5)
HALO_OPS = [
    lambda a, b: (a - 0.5) / 2,
    lambda a, b: a * b + torch.where(a > b, a, b),
    lambda a, b: a * torch.tensor(1.5),
    lambda a, b: a * COLUMN + IMAGE,
    lambda a, b: IMAGE - a.exp().clamp(max=2).float(),
    lambda a, b: a.clone().add_(b).mul_(COLUMN).detach().to(torch.float32),
]


def check_halos(rank, num_ranks, shape_of_mesh, names, layouts):
    mesh = init_device_mesh("cpu", shape_of_mesh, mesh_dim_names=names)
    placements = [Shard(1), Shard(2)][: len(names)]
    torch.manual_seed(1)
    full, other = torch.randn(2, 7, 5, dtype=torch.float64), torch.randn(2, 7, 5, dtype=torch.float64)
    for sizes, halo in itertools.product(layouts, HALOS):
        spec = ShardSpec.even(mesh, placements, full.shape, dict(enumerate(sizes)))
        x = ShardTensor.from_padded(padded_of(full, spec, halo), spec, halo)
        y = ShardTensor.from_padded(padded_of(other, spec, halo), spec, halo)
        assert x.local_with_halo() is x.padded
        assert torch.equal(x.full_tensor(), full)
        for function in HALO_OPS:
            kept = function(x, y)
            assert kept.held_halo() is not None
            expected = padded_of(function(full, other), spec, halo)
            torch.testing.assert_close(kept.local_with_halo(), expected, rtol=0, atol=0)
            torch.testing.assert_close(kept.full_tensor(), function(full, other), rtol=0, atol=0)
        moved = copy.deepcopy(x)
        assert torch.equal(moved.local_with_halo(), x.local_with_halo())
        # what drops the halo says the same values after an exchange
        bare = shard_of(full, spec)
        asked = {d: (w.lo, w.hi) for d, w in halo.items()}
        wraps = [d for d, w in halo.items() if w.periodic]
        assert torch.equal(bare.local_with_halo(asked, periodic=wraps), x.local_with_halo())
        product = x * bare
        assert product.held_halo() is None
        assert torch.equal(product.local_with_halo(), padded_of(full * full, spec, halo))
        written = copy.deepcopy(x)
        written.to_local().mul_(2)  # behind the tensor's back
        assert torch.equal(written.local_with_halo(), padded_of(full * 2, spec, halo))
        written = copy.deepcopy(x)
        written += bare
        assert torch.equal(written.local_with_halo(), padded_of(full * 2, spec, halo))
        assert (x.transpose(1, 2)).halo == {}
        # gradients go home through the exchange
        weight = torch.randn(2, 7, 5, dtype=torch.float64)
        leaf = full.clone().requires_grad_()
        window_sum = (padded_of(leaf, spec, halo) * padded_of(weight, spec, halo)).square().sum()
        part = copy.deepcopy(x).requires_grad_()
        with_halo = (part * 1.0).local_with_halo()
        assert torch.equal(with_halo.detach(), x.local_with_halo())
        loss = (with_halo * padded_of(weight, spec, halo)).square().sum()
        torch.testing.assert_close(loss, window_sum)
        loss.backward()
        (ours,) = torch.autograd.grad(window_sum, leaf)
        summed = ours.clone()
        torch.distributed.all_reduce(summed)
        torch.testing.assert_close(part.grad.full_tensor(), summed, rtol=1e-12, atol=1e-12)
    with pytest.raises(ShardLayoutError, match="pass widths"):
        bare.local_with_halo()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_halos_are_kept_by_pointwise_ops_and_exchanged_otherwise(num_ranks):
    run_ranks(check_halos, num_ranks, (num_ranks,), ("domain",), [[sizes] for sizes in LAYOUTS[num_ranks]])


def test_halos_on_two_axes():
    run_ranks(check_halos, 4, (2, 2), ("h", "w"), GRID)


def check_autograd(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    torch.manual_seed(2)
    full = torch.randn(7, 3, dtype=torch.float64)
    for sizes in LAYOUTS[num_ranks]:
        spec = ShardSpec.even(mesh, [Shard(0)], full.shape, {0: sizes})
        x = shard_of(full, spec)
        assert not x.requires_grad
        x.requires_grad = True
        assert x.is_leaf
        assert x.grad is None
        assert x.grad_fn is None
        y = x.square()
        assert y.requires_grad
        assert not y.is_leaf
        assert y.grad_fn is not None
        y.retain_grad()
        seen = []
        handle = y.register_hook(lambda grad, seen=seen: seen.append(grad.spec) or grad * 2)
        y.sum().backward()
        assert seen == [spec]
        assert isinstance(x.grad, ShardTensor)
        assert torch.equal(x.grad.full_tensor(), 4 * full)
        assert y.grad.spec == spec
        handle.remove()
        for returned in (1, full, torch.ones(7), x[:-1]):
            y = x * 2
            y.register_hook(lambda grad, returned=returned: returned)
            with pytest.raises(ShardLayoutError, match="a hook must return"):
                y.sum().backward()
        y = ShardTensor.from_local(full.clone().requires_grad_(), mesh, [Replicate()])
        y.register_hook(lambda grad: grad * 3)  # of what is replicated, results are plain
        (y * 2).sum().backward()
        assert torch.equal(y.grad.to_local(), torch.full_like(full, 6))
        x.grad = None
        x.square().backward(shard_of(torch.ones_like(full), spec))
        assert torch.equal(x.grad.full_tensor(), 2 * full)
        with pytest.raises(UnsupportedShardOp, match="reduce to a loss"):
            x.square().backward()
        weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
        ours = torch.autograd.grad((x * weight).square().mean(), [x, weight])
        theirs = torch.autograd.grad((full.requires_grad_() * weight).square().mean(), [full, weight])
        torch.testing.assert_close(ours[0].full_tensor(), theirs[0], rtol=1e-12, atol=0)
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-12, atol=0)
        with pytest.raises(UnsupportedShardOp, match="grad_outputs"):
            torch.autograd.grad(x * 2, x)
        # second derivatives
        (g,) = torch.autograd.grad((x * weight).pow(3).mean(), weight, create_graph=True)
        (h,) = torch.autograd.grad(g.square().sum(), weight)
        (g,) = torch.autograd.grad((full * weight).pow(3).mean(), weight, create_graph=True)
        (expected,) = torch.autograd.grad(g.square().sum(), weight)
        torch.testing.assert_close(h, expected, rtol=1e-12, atol=0)
        with torch.no_grad():
            assert not (x * 2).requires_grad
        with torch.inference_mode():
            assert torch.equal((x * 2).full_tensor(), full * 2)
        parameter = torch.nn.Parameter(shard_of(full, spec))
        assert isinstance(parameter, ShardTensor)
        assert parameter.requires_grad
        full = full.detach()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_autograd(num_ranks):
    run_ranks(check_autograd, num_ranks)


def check_being_a_tensor(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    sizes = LAYOUTS[num_ranks][-1]
    full = torch.arange(21.0).reshape(7, 3)
    spec = ShardSpec.even(mesh, [Shard(0)], full.shape, {0: sizes})
    x = shard_of(full, spec)
    assert isinstance(x, torch.Tensor)
    assert torch.is_tensor(x)
    assert torch.is_floating_point(x)
    assert x.shape == (7, 3)
    assert (x.size(0), x.dim(), x.numel(), len(x), x.element_size()) == (7, 2, 21, 7, 4)
    assert x.dtype == torch.float32
    assert x.device.type == "cpu"
    assert not x.is_cuda
    assert x.is_contiguous()
    for text in (repr(x), str(x), f"{x}"):
        for part in ("Shard(0) on 'domain'", str(sizes), "torch.float32", "cpu", "(7, 3)"):
            assert part in text
    assert len({x, x, shard_of(full, spec)}) == 2
    deep = copy.deepcopy({"a": x, "b": x})
    assert deep["a"] is deep["b"]
    assert deep["a"].to_local().data_ptr() != x.to_local().data_ptr() or not x.to_local().numel()
    assert torch.equal(deep["a"].full_tensor(), full)
    assert x.double().dtype == x.to(torch.float64).dtype == torch.float64
    assert x.half().to_local().dtype == torch.float16
    assert x.to("cpu") is x
    assert x.detach().spec == spec
    one = shard_of(full[:1, :1], ShardSpec.even(mesh, [Shard(0)], (1, 1), {0: (1,) + (0,) * (num_ranks - 1)}))
    assert one.item() == float(one) == 0.0
    assert not one
    same = x.redistribute(placements=[Replicate()])
    assert isinstance(same, ShardTensor)
    assert type(same + 1) is torch.Tensor
    assert torch.equal(same.cumsum(0), full.cumsum(0))  # no rule needed: it is a plain tensor
    assert same.tolist() == full.tolist()
    assert isinstance(same.to(torch.float64), ShardTensor)
    with pytest.raises(UnsupportedShardOp, match=r"linalg\.tensorsolve.*Shard\(0\) on 'domain' sizes"):
        torch.linalg.tensorsolve(x, x)
    # nothing slips below the table: not what calls torch.ops directly, nor what bypasses __torch_function__
    with pytest.raises(UnsupportedShardOp):
        torch.ops.aten.add(x, 1)
    with pytest.raises(UnsupportedShardOp), torch._C.DisableTorchFunctionSubclass():
        torch.add(x, 1)
    with pytest.raises(UnsupportedShardOp), torch._C.DisableTorchFunctionSubclass():
        torch.ops.aten.cumsum(x, 0)
    with pytest.raises(UnsupportedShardOp):
        torch.ops.aten.relu(x)
    from torch.distributed.tensor import DTensor

    with pytest.raises((TypeError, RuntimeError)):
        x + DTensor.from_local(torch.ones(7, 3), mesh, [Replicate()])
    assert "torch.nn.functional.layer_norm" in shard_ops()
    assert list(shard_ops()) == sorted(shard_ops())
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(x, torch.ones(4, 3)).dtype == torch.bfloat16


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_being_a_tensor(num_ranks):
    run_ranks(check_being_a_tensor, num_ranks)
