"""Each differentiable collective against one process's autograd on the full tensor, on uneven and empty parts."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from scidata.errors import ConfigError, ShardLayoutError
from scidata.shard.comm import transport
from scidata.shard.comm.collectives import (
    all_gather_v,
    indexed_all_to_all_v,
    reduce_scatter_v,
    slice_to_shard,
)
from scidata.shard.comm.rooted import gather_v, scatter_v
from scidata.shard.comm.sums import all_reduce_sum, replicate_all, replicate_to_shards
from scidata.shard.comm.transport import all_reduce_max, all_reduce_min, broadcast
from scidata.shard.rows.runs import halo_exchange_dim
from scidata.testing import run_ranks

SIZES = {1: [(4,)], 2: [(4, 1), (0, 3), (2, 2)], 3: [(1, 4, 2), (3, 0, 0), (0, 0, 2), (2, 2, 2)]}
RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3])


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def cases(num_ranks):
    for sizes in SIZES[num_ranks]:
        for dim in (0, 1, -1):
            for dtype in (torch.float64, torch.complex128):
                yield sizes, dim, dtype


def make(sizes, dim, dtype, rank, seed=0):
    """The full tensor (a leaf), this rank's part (a leaf), and a full tensor of weights for the loss."""
    shape = [3, 3, 3]
    shape[dim] = sum(sizes)
    full = random(*shape, seed=seed, dtype=dtype).requires_grad_()
    weight = random(*shape, seed=seed + 100, dtype=dtype)
    start = sum(sizes[:rank])
    part = full.detach().narrow(dim, start, sizes[rank]).clone().requires_grad_()
    return full, part, weight, lambda t: t.narrow(dim, start, sizes[rank])


def scalar(x):
    return (x * x.conj()).real.sum() if x.is_complex() else (x**3).sum()


def gathers_for_one_loss(rank, num_ranks):
    """A replicated result: each rank computes the same loss from it."""
    group = dist.group.WORLD
    for sizes, dim, dtype in cases(num_ranks):
        full, part, weight, mine = make(sizes, dim, dtype, rank)
        gathered = all_gather_v(part, sizes, dim, group, grad="own")
        assert torch.equal(gathered, full)
        scalar(gathered * weight).backward()
        scalar(full * weight).backward()
        close(part.grad, mine(full.grad))


@RANKS
def test_all_gather_v_of_a_replicated_result(num_ranks):
    run_ranks(gathers_for_one_loss, num_ranks)


def gathers_for_own_queries(rank, num_ranks):
    """A result that each rank uses with its own rows, as keys in attention: the loss is a sum over ranks."""
    group = dist.group.WORLD
    for sizes, dim, dtype in cases(num_ranks):
        full, part, _, mine = make(sizes, dim, dtype, rank)
        factors = [random(*full.shape, seed=7 + r, dtype=dtype) for r in range(num_ranks)]
        loss = scalar(all_gather_v(part, sizes, dim, group, grad="sum") * factors[rank])
        all_reduce_sum(loss, group).backward()
        sum(scalar(full * factor) for factor in factors).backward()
        close(part.grad, mine(full.grad))


@RANKS
def test_all_gather_v_of_a_result_used_differently(num_ranks):
    run_ranks(gathers_for_own_queries, num_ranks)


def reduces_and_scatters(rank, num_ranks):
    group = dist.group.WORLD
    for sizes, dim, dtype in cases(num_ranks):
        full, _, weight, mine = make(sizes, dim, dtype, rank)
        partials = [random(*full.shape, seed=7 + r, dtype=dtype).requires_grad_() for r in range(num_ranks)]
        own = partials[rank].detach().clone().requires_grad_()
        part = reduce_scatter_v(own, sizes, dim, group)
        expected = sum(partials)
        close(part, mine(expected))
        all_reduce_sum(scalar(part * mine(weight)), group).backward()
        scalar(expected * weight).backward()
        close(own.grad, partials[rank].grad)


@RANKS
def test_reduce_scatter_v(num_ranks):
    run_ranks(reduces_and_scatters, num_ranks)


def slices(rank, num_ranks):
    group = dist.group.WORLD
    for sizes, dim, dtype in cases(num_ranks):
        full, _, weight, mine = make(sizes, dim, dtype, rank)
        whole = full.detach().clone().requires_grad_()
        part = slice_to_shard(whole, sizes, dim, group)
        assert torch.equal(part, mine(full))
        if num_ranks > 1:
            part.mul_(1)  # not a view: may be changed in place
        all_reduce_sum(scalar(part * mine(weight)), group).backward()
        scalar(full * weight).backward()
        close(whole.grad, full.grad)  # the full gradient, on each rank


@RANKS
def test_slice_to_shard(num_ranks):
    run_ranks(slices, num_ranks)


def meets_a_parameter(rank, num_ranks):
    """A replicated weight on sharded rows, a mean over all rows: weight and rows get one process's gradients."""
    group = dist.group.WORLD
    for sizes in SIZES[num_ranks]:
        full, part, _, mine = make(sizes, 0, torch.float64, rank)
        weight = random(3, seed=5).requires_grad_()
        reference = weight.detach().clone().requires_grad_()
        rows = part * replicate_to_shards(weight, [group, None])
        loss = all_reduce_sum(scalar(rows), group) / sum(sizes)
        (loss**2 + weight.sum()).backward()  # the loss is used further, and the weight elsewhere too
        (((scalar(full * reference) / sum(sizes)) ** 2) + reference.sum()).backward()
        close(weight.grad, reference.grad)
        close(part.grad, mine(full.grad))


@RANKS
def test_parameters_and_sums(num_ranks):
    run_ranks(meets_a_parameter, num_ranks)


def gathers_to_one(rank, num_ranks):
    group = dist.group.WORLD
    for sizes, dim, dtype in cases(num_ranks):
        for root in range(num_ranks):
            full, part, weight, mine = make(sizes, dim, dtype, rank)
            gathered = gather_v(part, sizes, dim, root, group)
            if rank == root:
                assert torch.equal(gathered, full)
                loss = scalar(gathered * weight)
            else:
                assert gathered.shape[dim] == 0
                loss = gathered.sum().abs()
            loss.backward()
            scalar(full * weight).backward()
            close(part.grad, mine(full.grad))


@RANKS
def test_gather_v(num_ranks):
    run_ranks(gathers_to_one, num_ranks)


def scatters_from_one(rank, num_ranks):
    group = dist.group.WORLD
    for sizes, dim, dtype in cases(num_ranks):
        for root in range(num_ranks):
            full, _, weight, mine = make(sizes, dim, dtype, rank)
            source = full.detach().clone().requires_grad_() if rank == root else None
            part = scatter_v(source, sizes, dim, root, group)
            assert torch.equal(part, mine(full))
            scalar(part * mine(weight)).backward()
            scalar(full * weight).backward()
            if rank == root:
                close(source.grad, full.grad)
    x = torch.arange(4 * num_ranks, dtype=torch.int16) if rank == 0 else None
    assert scatter_v(x, [4] * num_ranks, 0, 0, group).tolist() == list(range(4 * rank, 4 * rank + 4))


@RANKS
def test_scatter_v(num_ranks):
    run_ranks(scatters_from_one, num_ranks)


def sends_rows(rank, num_ranks):
    """Ghost rows by index, repeats and empty lists included, against plain indexing of the full tensor."""
    group = dist.group.WORLD
    for sizes in SIZES[num_ranks]:
        full, part, _, mine = make(sizes, 0, torch.float64, rank)
        generator = torch.Generator().manual_seed(3)
        wanted = [  # [receiver][owner]: rows of the owner
            [torch.randint(size, ((r + 2 * p) % 4,), generator=generator) if size else torch.empty(0, dtype=torch.int64)
             for p, size in enumerate(sizes)]
            for r in range(num_ranks)
        ]  # fmt: skip
        counts = [len(index) for index in wanted[rank]]
        ghosts = indexed_all_to_all_v(part, [wanted[r][rank] for r in range(num_ranks)], counts, group)
        starts = [sum(sizes[:p]) for p in range(num_ranks)]
        rows = [torch.cat([index + starts[p] for p, index in enumerate(wanted[r])]) for r in range(num_ranks)]
        assert torch.equal(ghosts, full[rows[rank]])
        all_reduce_sum(scalar(ghosts), group).backward()
        sum(scalar(full[index]) for index in rows).backward()
        close(part.grad, mine(full.grad))


@RANKS
def test_indexed_all_to_all_v(num_ranks):
    run_ranks(sends_rows, num_ranks)


def differentiates_twice(rank, num_ranks):
    """A gradient penalty: the gradient of the squared gradient, through every pair."""
    group = dist.group.WORLD
    sizes = SIZES[num_ranks][0]
    indices = [torch.arange(sizes[rank])] * num_ranks

    def through(x, weight):
        scaled = x * replicate_to_shards(weight, [group])
        whole = all_gather_v(scaled, sizes, 0, group, grad="own") ** 2
        back = slice_to_shard(whole, sizes, 0, group)
        keys = all_gather_v(back, sizes, 0, group, grad="sum")
        summed = reduce_scatter_v(keys**2, sizes, 0, group) / num_ranks
        moved = indexed_all_to_all_v(summed, indices, sizes, group)
        return all_reduce_sum((moved**2).sum(), group) / num_ranks

    full, part, _, mine = make(sizes, 0, torch.float64, rank)
    weight = random(3, seed=5).requires_grad_()
    reference = weight.detach().clone().requires_grad_()
    gx, gw = torch.autograd.grad(through(part, weight), (part, weight), create_graph=True)
    (all_reduce_sum((gx**2).sum(), group) + (gw**2).sum()).backward()
    gx, gw = torch.autograd.grad(((full * reference) ** 8).sum(), (full, reference), create_graph=True)
    ((gx**2).sum() + (gw**2).sum()).backward()
    torch.testing.assert_close(part.grad, mine(full.grad), rtol=1e-11, atol=0)
    torch.testing.assert_close(weight.grad, reference.grad, rtol=1e-11, atol=0)


@RANKS
def test_second_derivatives(num_ranks):
    run_ranks(differentiates_twice, num_ranks)


def moves_every_dtype(rank, num_ranks):
    group = dist.group.WORLD
    sizes = SIZES[num_ranks][0]
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16]
    dtypes += [torch.float16, torch.bfloat16, torch.float32, torch.complex64]
    for dtype in dtypes:
        full = (random(sum(sizes), 2) * 10).to(torch.int64).to(dtype)
        part = full[sum(sizes[:rank]) :][: sizes[rank]]
        assert torch.equal(all_gather_v(part, sizes, 0, group), full)
        assert torch.equal(all_gather_v(part.mT, sizes, 1, group), full.mT)  # not contiguous
        if dtype not in (torch.bool, torch.uint16):
            assert torch.equal(all_reduce_sum(torch.ones(3, dtype=dtype), group), torch.full((3,), num_ranks).to(dtype))
            everyone = reduce_scatter_v(full, sizes, 0, group)
            assert torch.equal(everyone, part * num_ranks)
    conjugate = torch.complex(random(3), random(3)).conj()
    assert torch.equal(all_gather_v(conjugate, [3] * num_ranks, 0, group)[:3], conjugate)
    with pytest.raises(ConfigError, match="bools"):
        all_reduce_sum(torch.ones(1, dtype=torch.bool), group)


@RANKS
def test_every_dtype(num_ranks):
    run_ranks(moves_every_dtype, num_ranks)


def sums_in_float32(rank, num_ranks):
    """Large on one rank and small on the others, each in turn: in 16 bits, some order of adding loses the small ones."""
    group, ones = dist.group.WORLD, (1,) * num_ranks
    for dtype, large, small in ((torch.bfloat16, 1.0, 2.0**-8), (torch.float16, 2048.0, 1.0)):
        parts = torch.full((num_ranks, 3), small, dtype=dtype)
        parts[rank] = large
        total = torch.full((3,), large + 2 * small, dtype=dtype)
        assert total[0].item() == large + 2 * small
        assert large + parts[rank - 1, 0] == large  # in 16 bits

        def gradient_of(function, x, weight):
            x = x.clone().requires_grad_()
            (function(x) * weight).sum().backward()
            return x.grad

        found = {
            "all_reduce_sum": all_reduce_sum(parts, group),
            "reduce_scatter_v": reduce_scatter_v(parts, ones, 0, group)[0],
            "of a parameter": gradient_of(lambda x: replicate_to_shards(x, [group]), parts, parts),
            "of two parameters": gradient_of(lambda x: replicate_all([x, x.square()], [group])[0], parts, parts),
            "of keys": gradient_of(lambda x: all_gather_v(x, ones, 0, group, grad="sum"), parts[:1], parts)[0],
        }
        # a row and its two copies, in the halos of the others
        halo = lambda x: halo_exchange_dim(x, tuple(ones), 0, 1, 1, True, group)  # noqa: E731
        weight = halo(torch.tensor([rank]))  # whose row each is
        weight = torch.where(weight == rank, large, small).to(dtype)[:, None].expand(-1, 3)
        found["of a halo"] = gradient_of(halo, parts[:1], weight)[0]
        for name, sums in found.items():
            assert sums.dtype == dtype
            torch.testing.assert_close(sums, total.expand(sums.shape), rtol=0, atol=0, msg=name)


def test_half_precision_sums_are_wide():
    run_ranks(sums_in_float32, 3)


def extremes(rank, num_ranks):
    group = dist.group.WORLD
    nan, inf = float("nan"), float("inf")
    everyone = torch.tensor([[1.0, nan, -inf, inf], [3.0, 2.0, -inf, -inf], [2.0, 5.0, -inf, nan]])[:num_ranks]
    for dtype in (torch.float32, torch.bfloat16):
        high = all_reduce_max(everyone[rank].to(dtype), group)
        low = all_reduce_min(everyone[rank].to(dtype), group)
        torch.testing.assert_close(high.float(), everyone.amax(0), equal_nan=True)
        torch.testing.assert_close(low.float(), everyone.amin(0), equal_nan=True)
    assert all_reduce_max(torch.tensor([rank]), group).tolist() == [num_ranks - 1]
    assert all_reduce_max(torch.tensor([rank == 0]), group).tolist() == [True]
    assert all_reduce_min(torch.tensor([rank == 0]), group).tolist() == [num_ranks == 1]
    assert all_reduce_max(torch.empty(0), group).shape == (0,)


@RANKS
def test_extremes(num_ranks):
    run_ranks(extremes, num_ranks)


def all_by_rings(rank, num_ranks):
    transport._AT_ONCE = 0  # as if all values were too large for one exchange
    gathers = (gathers_for_one_loss, gathers_for_own_queries, slices)
    for check in (*gathers, meets_a_parameter, differentiates_twice, moves_every_dtype, sums_in_float32, extremes):
        check(rank, num_ranks)


def test_large_values():
    run_ranks(all_by_rings, 3)


def refuses(rank, num_ranks):
    group = dist.group.WORLD
    x = torch.ones(2, 3)
    with pytest.raises(ShardLayoutError, match=r"3 sizes \(2, 2, 2\) were given for a group of 2 ranks"):
        all_gather_v(x, (2, 2, 2), 0, group)
    with pytest.raises(ShardLayoutError, match="must not be negative"):
        all_gather_v(x, (2, -1), 0, group)
    with pytest.raises(ShardLayoutError, match=f"rank {rank} holds 2 rows along dim 0 .* it 1"):
        all_gather_v(x, (1, 1), 0, group)
    with pytest.raises(ShardLayoutError, match="add up to 4, not 3"):
        slice_to_shard(x, (2, 2), 1, group)
    with pytest.raises(ShardLayoutError, match="dim 2 is out of range"):
        reduce_scatter_v(x, (2, 2), 2, group)
    with pytest.raises(ConfigError, match="dst=2 is not a rank"):
        gather_v(x, (2, 2), 0, 2, group)
    with pytest.raises(ShardLayoutError, match="add up to 4, not 3"):  # found on the source, raised on every rank
        scatter_v(torch.ones(3) if rank == 0 else None, (2, 2), 0, 0, group)
    with pytest.raises(ShardLayoutError, match="1 index tensors"):
        indexed_all_to_all_v(x, [torch.zeros(1, dtype=torch.int64)], [1, 0], group)


def test_wrong_sizes_are_refused_before_communicating():
    run_ranks(refuses, 2)


def test_without_a_group_everything_is_the_identity():
    x = random(4, 2).requires_grad_()
    assert all_gather_v(x, [4], 0, None) is x
    assert reduce_scatter_v(x, [4], 0, None) is x
    assert slice_to_shard(x, [4], 0, None) is x
    assert gather_v(x, [4], 0, 0, None) is x
    assert scatter_v(x, [4], 0, 0, None) is x
    assert all_reduce_sum(x, None) is x
    assert replicate_to_shards(x, [None]) is x
    assert torch.equal(indexed_all_to_all_v(x, [torch.tensor([2, 2])], [2], None), x[[2, 2]])


def on_groups_of_a_mesh(rank, num_ranks):
    """Every group has data of its own: what goes to another group, or to all ranks, shows."""
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "domain")).get_group("domain")
    row, here = divmod(rank, 2)
    sizes = (3, 1)
    full = random(4, 2, seed=row).requires_grad_()
    parts = full.detach().split(sizes)
    own = parts[here].clone().requires_grad_()
    assert torch.equal(all_gather_v(own, sizes, 0, group), full)
    assert torch.equal(slice_to_shard(full, sizes, 0, group), parts[here])
    assert torch.equal(scatter_v(full if here == 1 else None, sizes, 0, 1, group), parts[here])
    assert torch.equal(gather_v(own, sizes, 0, 1, group), full if here == 1 else full[:0])
    sent = full.detach() * (1 + here)
    close(reduce_scatter_v(sent, sizes, 0, group), 3 * parts[here])
    close(all_reduce_sum(sent, group), 3 * full)
    assert torch.equal(all_reduce_min(sent, group), torch.minimum(full, 2 * full))
    assert torch.equal(all_reduce_max(sent, group), torch.maximum(full, 2 * full))
    got = full.detach() + here
    broadcast(got, 1, group)
    assert torch.equal(got, full + 1)
    one, both = 1 + here + 10 * row, 3 + 20 * row  # gradients of this rank, and of its group
    for x, result, expected in (
        (own, all_gather_v(own, sizes, 0, group), one),
        (full, replicate_to_shards(full, [group]), both),
        (full, replicate_all([full], [group])[0], both),
    ):
        (grad,) = torch.autograd.grad((result * one).sum(), [x])
        close(grad, torch.full_like(grad, expected))


def test_on_groups_of_a_mesh():
    run_ranks(on_groups_of_a_mesh, 4)
