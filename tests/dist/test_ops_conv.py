"""Convolutions on shards against one process: kernels that reach over bounds, over whole parts, and none."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from scidata.core.bounds import window
from scidata.errors import UnsupportedShardOp
from scidata.shard import HaloDim, ShardSpec, ShardTensor
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of
from tests.dist._layers import COLUMNS, GRIDS, LAYOUTS, ROWS, Spy, check_cases, grid_mesh, mesh_of, random

RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
IMAGE = (2, 4, ROWS, COLUMNS)

CASES = {
    "3x3": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [IMAGE, (3, 4, 3, 3), (3,)], 2),
    "no padding": (F.conv2d, [IMAGE, (3, 4, 4, 2), (3,)], 2),
    "wider than parts": (lambda x, w: F.conv2d(x, w, padding=(8, 3)), [IMAGE, (3, 4, 17, 7)], 2),
    "stride": (lambda x, w: F.conv2d(x, w, stride=(3, 2), padding=(2, 1)), [IMAGE, (3, 4, 5, 3)], 2),
    "stride over kernel": (lambda x, w: F.conv2d(x, w, stride=(4, 3)), [IMAGE, (3, 4, 2, 2)], 2),
    "patches": (lambda x, w, b: F.conv2d(x, w, b, stride=(4, 3)), [IMAGE, (3, 4, 4, 3), (3,)], 2),
    "dilation": (lambda x, w: F.conv2d(x, w, padding=(4, 2), dilation=(4, 2)), [IMAGE, (3, 4, 3, 3)], 2),
    "groups": (lambda x, w: F.conv2d(x, w, padding=1, groups=2), [IMAGE, (6, 2, 3, 3)], 2),
    "same": (lambda x, w: F.conv2d(x, w, padding="same", dilation=(3, 1)), [IMAGE, (3, 4, 4, 2)], 2),
    "valid, by name": (lambda x, w: F.conv2d(input=x, weight=w, padding="valid"), [IMAGE, (3, 4, 2, 3)], 2),
    "pointwise": (F.conv2d, [IMAGE, (3, 4, 1, 1), (3,)], 2),
    "unbatched": (lambda x, w: F.conv2d(x, w, padding=1), [(4, ROWS, COLUMNS), (3, 4, 3, 3)], 1),
    "columns": (lambda x, w: F.conv2d(x, w, padding=1, stride=2), [(2, 4, COLUMNS, ROWS), (3, 4, 3, 3)], 3),
    "batch": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(ROWS, 3, 4, 4), (3, 3, 3, 3), (3,)], 0),
    "channels": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(2, ROWS, 8, 6), (3, ROWS, 3, 3), (3,)], 1),
    "channels, transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2), [(2, ROWS, 8, 6), (ROWS, 3, 2, 2)], 1),
    "channels alone": (lambda x, w, b: F.conv1d(x, w, b), [(1, ROWS, 1), (3, ROWS, 1), (3,)], 1),
    "1d": (lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=2), [(2, 4, ROWS), (3, 4, 5), (3,)], 2),
    "3d": (lambda x, w: F.conv3d(x, w, padding=1, stride=(1, 2, 1)), [(1, 2, 4, ROWS, COLUMNS), (2, 2, 3, 3, 3)], 3),
    "transposed": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
        [IMAGE, (4, 3, 3, 3), (3,)],
        2,
    ),
    "transposed patches": (lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2), [IMAGE, (4, 3, 2, 2), (3,)], 2),
    "transposed with gaps": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=(5, 3), output_padding=(4, 1)),
        [IMAGE, (4, 3, 2, 1), (3,)],
        2,
    ),
    "transposed, dilation, groups": (
        lambda x, w: F.conv_transpose2d(x, w, dilation=(5, 2), padding=(2, 1), groups=2),
        [IMAGE, (4, 3, 4, 3)],
        2,
    ),
    "transposed 1d": (lambda x, w: F.conv_transpose1d(x, w, stride=3, padding=2), [(2, 4, ROWS), (4, 2, 5)], 2),
    "transposed 3d": (
        lambda x, w: F.conv_transpose3d(x, w, stride=(1, 2, 1)),
        [(1, 2, 3, ROWS, COLUMNS), (2, 2, 2, 3, 2)],
        3,
    ),
    "down and up": (
        lambda x, v, w: F.conv_transpose2d(F.conv2d(x, v, stride=2, padding=1), w, stride=2, padding=1) + x,
        [IMAGE, (4, 4, 3, 3), (4, 4, 3, 3)],
        2,
    ),
}


def check_convolutions(rank, num_ranks):
    check_cases(CASES, num_ranks)


@pytest.mark.slow_for("4")
@RANKS
def test_convolutions(num_ranks):
    run_ranks(check_convolutions, num_ranks)


def check_modules(rank, num_ranks):
    """``nn.Conv2d`` pads by ``F.pad`` in all modes but zeros."""
    mesh = mesh_of(num_ranks)
    for sizes in LAYOUTS[num_ranks]:
        spec = ShardSpec.even(mesh, [Shard(2)], IMAGE, {0: sizes})
        for mode in ("zeros", "circular", "reflect", "replicate"):
            torch.default_generator.manual_seed(1)
            conv = nn.Conv2d(4, 3, 5, padding=2, padding_mode=mode).double()
            parameters = [p.detach().requires_grad_() for p in conv.parameters()]

            def run(x, weight, bias, conv=conv):
                return torch.func.functional_call(conv, {"weight": weight, "bias": bias}, (x,))

            found = assert_like_one_process(run, [random(*IMAGE), *parameters], [spec, None, None])
            assert found.spec.sizes == spec.sizes
        up = nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1).double()
        assert_like_one_process(lambda x, up=up: up(x, (2 * ROWS, 2 * COLUMNS)), [random(*IMAGE)], [spec])


@RANKS
def test_modules_in_all_padding_modes(num_ranks):
    run_ranks(check_modules, num_ranks)


def check_owners(rank, num_ranks):
    """An output row is its middle input row's owner's; an extent that was there before is split as it was."""
    mesh = mesh_of(num_ranks)

    def sizes_after(sizes, function):
        x = shard_of(random(1, 1, sum(sizes), 2), ShardSpec.even(mesh, [Shard(2)], (1, 1, sum(sizes), 2), {0: sizes}))
        return function(x).spec.sizes[0]

    ones = lambda *kernel: torch.ones(1, 1, *kernel, dtype=torch.float64)  # noqa: E731
    down = lambda x: F.conv2d(x, ones(3, 1), stride=(2, 1), padding=(1, 0))  # noqa: E731
    assert sizes_after((20, 3), lambda x: F.conv2d(x, ones(3, 1), padding=(1, 0))) == (20, 3)
    assert sizes_after((20, 3), down) == (10, 2)
    assert sizes_after((7, 5), down) == (4, 2)
    assert sizes_after((1, 22), lambda x: F.conv2d(x, ones(3, 1))) == (0, 21)
    assert sizes_after((8, 4), lambda x: F.conv2d(x, ones(4, 1), stride=(4, 1))) == (2, 1)
    up = lambda x: F.conv_transpose2d(x, ones(2, 1), stride=(2, 1))  # noqa: E731
    assert sizes_after((4, 2), up) == (8, 4)
    assert sizes_after((7, 5), lambda x: up(down(x))) == (7, 5)
    assert sizes_after((7, 5), lambda x: up(up(down(down(x) + 1)).mul(2))) == (7, 5)


def test_who_owns_an_output_row():
    run_ranks(check_owners, 2)


def check_rounds(rank, num_ranks):
    weight = random(4, 4, 3, 3, seed=1)
    for mesh, placements, sizes, axes in [
        (mesh_of(4), [Shard(2)], {0: (6, 6, 6, 5)}, 1),
        (grid_mesh(), [Shard(2), Shard(3)], {"h": (12, 11), "w": (5, 4)}, 2),
    ]:
        spec = ShardSpec.even(mesh, placements, IMAGE, sizes)
        x = shard_of(random(*IMAGE), spec).requires_grad_()
        with Spy() as spy:
            F.conv2d(x, random(4, 4, 1, 1))
            assert spy.counts == {}
            y = F.conv2d(x, weight.detach(), padding=1)
            assert spy.counts == {"all_to_all_single": axes}
            y.sum().backward()
            # small sums of more than two ranks are exchanges, too
            assert spy.counts == ({"all_to_all_single": 3} if axes == 1 else {"all_to_all_single": 4, "all_reduce": 2})
        with torch.no_grad(), Spy() as spy:
            F.conv2d(x, weight, padding=1)
            assert spy.counts == {"all_to_all_single": axes}
    patches = shard_of(random(2, 4, 24, 8), ShardSpec.even(mesh_of(4), [Shard(2)], (2, 4, 24, 8)))
    with Spy() as spy:
        F.conv2d(patches, weight, stride=3)
        assert spy.counts == {}


def test_one_round_for_each_axis_and_none_where_kernels_stay_inside():
    run_ranks(check_rounds, 4)


def padded_of(full, spec, halo):
    """The owned rows and halo, as a reader would have read them."""
    for dim in {*spec.sharded, *halo}:
        widths = halo.get(dim, HaloDim(lo=0, hi=0))
        rows = window(*spec.dim_bounds(dim), **vars(widths))
        full = full.index_select(
            dim, torch.tensor([r for s in rows for r in range(s.start, s.start + s.count)], dtype=torch.int64)
        )
    return ShardTensor.from_padded(full.clone(), spec, halo)


#: halos of an image cut into rows, and the exchanges of a 5 x 3 convolution
HALOS = [({2: HaloDim(lo=2, hi=3)}, 0), ({2: HaloDim(lo=2, hi=1)}, 1), ({3: HaloDim(lo=1, hi=1)}, 1)]


def check_disk_halo(rank, num_ranks):
    """A halo that was read is used where it is wide enough on every rank; otherwise rows are exchanged."""
    full, weight = random(*IMAGE, grad=False), random(3, 4, 5, 3, seed=1)
    expected = F.conv2d(full, weight, padding=(2, 1))
    whole = F.conv2d(F.pad(full, (0, 0, 2, 2), mode="circular"), weight, padding=(0, 1))
    mesh = mesh_of(num_ranks)
    for sizes in LAYOUTS[num_ranks]:
        spec = ShardSpec.even(mesh, [Shard(2)], IMAGE, {0: sizes})
        for halo, exchanges in HALOS:
            x = padded_of(full, spec, halo)
            with Spy() as spy:
                y = F.conv2d(x, weight, padding=(2, 1))
                if min(sizes) > 2:
                    assert spy.counts.get("all_to_all_single", 0) == exchanges
            torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-12, atol=1e-12)
            (grad,) = torch.autograd.grad(y.sum(), weight)
            (wanted,) = torch.autograd.grad(expected.sum(), weight, retain_graph=True)
            torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-12)
        x = padded_of(full, spec, {2: HaloDim(lo=2, hi=2, periodic=True), 3: HaloDim(lo=1, hi=0)})
        y = F.conv2d(x, weight, padding=(2, 1))
        torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-12, atol=1e-12)
        y = F.conv2d(F.pad(x, (0, 0, 2, 2), mode="circular"), weight, padding=(0, 1))
        torch.testing.assert_close(y.full_tensor(), whole, rtol=1e-12, atol=1e-12)
    if num_ranks == 4:
        for rows, columns in GRIDS:
            spec = ShardSpec.even(grid_mesh(), [Shard(2), Shard(3)], IMAGE, {"h": rows, "w": columns})
            x = padded_of(full, spec, {2: HaloDim(lo=2, hi=2), 3: HaloDim(lo=1, hi=1)})
            with Spy() as spy:
                y = F.conv2d(x, weight, padding=(2, 1))
                assert spy.counts == {}
            torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_halo_from_disk(num_ranks):
    run_ranks(check_disk_halo, num_ranks)


def check_second_derivatives(rank, num_ranks):
    spec = ShardSpec.even(mesh_of(num_ranks), [Shard(2)], IMAGE, {0: LAYOUTS[num_ranks][1]})

    def penalty(x, weight):
        loss = F.conv2d(x, weight, stride=2, padding=1).pow(3).sum()
        (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
        return grad.pow(2).sum()

    assert_like_one_process(penalty, [random(*IMAGE), random(3, 4, 3, 3, seed=1)], [spec, None], rtol=1e-10)


def test_second_derivatives():
    run_ranks(check_second_derivatives, 3)


def check_refused(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    x = shard_of(random(2, 4, 8, 6), ShardSpec.even(mesh, [Shard(2)], (2, 4, 8, 6), {0: (5, 3)}))
    with pytest.raises(UnsupportedShardOp, match="Remedy"):
        F.conv2d(torch.zeros(1, 4, 4, 4), x[:, :, :2, :2])
    with pytest.raises(RuntimeError, match="gives"):
        F.conv2d(x, torch.zeros(3, 4, 9, 1))


def test_what_is_refused():
    run_ranks(check_refused, 2)
