"""Results that depend on where one process has a tensor's elements in memory: random numbers, strides, what is a view."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import scidata
from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec, ShardTensor
from scidata.shard.torch_internals import tree_leaves
from scidata.testing import fake_group, run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of

CHANNELS_LAST = torch.ones(5, 7, 3, 3, dtype=torch.float64).to(memory_format=torch.channels_last)


def written(write):
    def function(x):
        y = x * 1
        write(y)
        return y

    return function


DRAWN = {
    "transpose": lambda x: F.dropout(x.transpose(1, 2), 0.5),
    "permute": lambda x: F.dropout(x.permute(3, 1, 0, 2) + 1, 0.5),
    "patches": lambda x: F.dropout(x.flatten(2).transpose(1, 2), 0.5),
    "einsum": lambda x: F.dropout(torch.einsum("abcd,ebfd->aebcf", x, torch.ones(3, 7, 2, 7).double()), 0.5),
    "attention": lambda x: F.dropout(F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3), 0.5),
    "reshape": lambda x: F.dropout(x.transpose(1, 2).reshape(8, 7, 7), 0.5),
    "contiguous": lambda x: F.dropout(x.mT.contiguous(), 0.5),
    "layer norm": lambda x: F.dropout(F.layer_norm(x.transpose(2, 3), (4,)), 0.5),
    "cat": lambda x: F.dropout(torch.cat([x.transpose(1, 2), x.transpose(1, 2)], 0), 0.5),
    "sum": lambda x: F.dropout(x.transpose(1, 2).sum(0), 0.5),
    "plain sum": lambda x: [F.dropout(x.permute(3, 2, 1, 0).sum((d, e)), 0.5) for d, e in ((1, 2), (0, 2), (0, 1))],
    "alpha": lambda x: F.alpha_dropout(x.transpose(1, 2), 0.5, True),
    "channels": lambda x: F.dropout2d(x.transpose(1, 2), 0.5),
    "rand_like": lambda x: [torch.rand_like(x.mT), torch.randn_like(x[..., 1:3]), torch.randint_like(x.mT, 9)],
    "in place": written(lambda y: y.mT.normal_()),
    "slices": written(lambda y: [y[:, :, 1:3].normal_(), y[:, 2:5].uniform_(), y.transpose(0, 3).bernoulli_(0.5)]),
    "inplace=": written(lambda y: F.dropout(y.transpose(0, 2), 0.5, inplace=True)),
    "moved": lambda x: (
        F.dropout(x.transpose(1, 2).redistribute(placements=[Replicate()]), 0.5)
        if isinstance(x, ShardTensor)
        else F.dropout(x.transpose(1, 2), 0.5)
    ),
}
VIEWS = {
    "view": lambda x: x.view(-1),
    "reshape": lambda x: x.reshape(14, 14),
    "flatten": lambda x: x.flatten(0, 1),
    "row": lambda x: x[2],
    "rows": lambda x: x[:, 1],
    "last": lambda x: x[:, :, 5],
    "unbind": lambda x: x.unbind(0)[3] + 0 * x.unbind(2)[6].sum() if x.requires_grad else x.unbind(2)[6],
    "squeeze": lambda x: x[3:4].squeeze(0),
    "unflatten": lambda x: x.unflatten(1, (2, 2)).flatten(2),
    "single": lambda x: x[3:4].view(-1),
    "nothing": lambda x: x[:0].reshape(0),
    "of a copy": lambda x: x.view(-1)[5:60].view(11, 5),
    "of a row": lambda x: x[2].view(-1)[3:9],
    "transposed": lambda x: x.transpose(0, 2).reshape(-1),  # a copy in one process too
    "contiguous": lambda x: x.mT.contiguous(),
    "part": lambda x: x[:, :, :2].contiguous(),
    "steps": lambda x: x.reshape(-1)[2:40:3],
    "expand": lambda x: x[:1].expand(5, -1, -1),
}


def base_written(take):
    def function(x):
        base = x * 1
        y = take(base)
        base.mul_(2)
        base[1:3] = 7.0
        return [base, y, y * 3]

    return function


def copy_written(take):
    def function(x):
        base = x * 1
        y, row = take(base), base[0]
        y.add_(1)
        y.mul_(2)
        return [base, y, row, y.sum()]

    return function


def differentiated(take):
    def function(x):
        base = x * 1
        y = take(base)
        base.mul_(x)
        before = y * 2
        y.mul_(3)
        return [before, base * x, y]

    return function


def detached_written(take):
    def function(x):
        base = x * 1
        y = take(base)
        y.detach().mul_(2)
        base.data.add_(1)
        y.detach()[..., :1].sub_(0.5)
        return [base, y, y * 3]

    return function


def check(rank, num_ranks, layouts):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, 7, 4, 7, dtype=torch.float64, generator=generator)
    cube = torch.randn(7, 4, 7, dtype=torch.float64, generator=generator)
    for place, sizes in enumerate(layouts):
        for dim in (1, 3):
            spec = ShardSpec.even(mesh, [Shard(dim)], image.shape, {0: sizes})
            for name, function in DRAWN.items():
                if (name, dim) != ("attention", 3):  # the keys would be sharded as the queries are
                    _run(f"{name} at {spec}", function, [image], [spec])
            if dim == 1:  # the channels are not
                for order in ((0, 3, 1, 2), (0, 3, 2, 1)):
                    function = lambda x, order=order: F.dropout(F.group_norm(x.permute(order), 1), 0.5)  # noqa: E731
                    _run(f"group norm at {spec}", function, [image], [spec])
            if dim == 3:
                function = lambda x: F.dropout(F.conv2d(x, CHANNELS_LAST, padding=1), 0.5)  # noqa: E731
                _run(f"convolution at {spec}", function, [image], [spec])
        for dim in (0, 2):
            spec = ShardSpec.even(mesh, [Shard(dim)], cube.shape, {0: sizes})
            for name, take in VIEWS.items():
                for inference in (False, True)[: 1 if place else 2]:
                    with torch.inference_mode(inference):
                        x = cube.clone()
                        _run(f"base of {name} at {spec}", base_written(take), [x], [spec])
                        if name != "expand":
                            _run(f"copy {name} at {spec}", copy_written(take), [x], [spec])
                if name != "expand":
                    x = cube.clone().requires_grad_()
                    _run(f"gradient of {name} at {spec}", differentiated(take), [x], [spec])
                    _run(f"detached {name} at {spec}", detached_written(take), [x], [spec])
                    if name not in ("transposed", "contiguous", "part", "unbind"):  # copies in one process too
                        leaf = shard_of(cube, spec).requires_grad_()
                        y = take(leaf)
                        with pytest.raises(RuntimeError, match="leaf"):
                            y.mul_(2)
                        y = y.full_tensor() if isinstance(y, ShardTensor) else y
                        assert torch.equal(y, take(cube)), name


def _run(name, function, inputs, specs):
    try:
        assert_like_one_process(function, inputs, specs)
    except Exception as error:
        raise AssertionError(name) from error


@pytest.mark.slow_for("layouts=[(4, 3), (0, 7)]", "layouts=[(1, 1, 5)]")
@pytest.mark.parametrize("layouts", [[(7,)], [(4, 3), (0, 7)], [(4, 0, 3), (5, 1, 1)], [(1, 1, 5)]])
def test_like_one_process(layouts):
    run_ranks(check, len(layouts[0]), layouts, timeout=240)


def last(x):
    """Lay out with channels last; of one channel or row, too, where ``to`` would return the tensor itself."""
    layout = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
    return torch.empty(x.shape, dtype=x.dtype, memory_format=layout).copy_(x)


def drawn(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))  # the same on each rank


#: Tensors that are not row-major, of which parts are given.
LAID = {
    "channels last": last(drawn(3, 4, 6, 5)),
    "one channel": last(drawn(2, 1, 6, 5)),
    "one column": last(drawn(2, 4, 6, 1)),
    "volumes": last(drawn(2, 3, 4, 5, 2)),
    "turned": drawn(5, 7).T,
    "permuted": drawn(3, 4, 6).permute(1, 2, 0),
}
DRAWS = [
    lambda x: F.dropout(x, 0.5),
    lambda x: F.feature_alpha_dropout(x, 0.5, True),
    lambda x: [torch.bernoulli(x), x.bernoulli(0.3)],
    lambda x: [torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 9)],
    lambda x: [getattr(x.clone(), name)() for name in ("normal_", "uniform_", "exponential_", "bernoulli_")],
    lambda x: F.gumbel_softmax(x, dim=0),
    lambda x: F.dropout(copy.deepcopy(x).relu().flatten(1), 0.5),
    lambda x: F.dropout(x.contiguous(), 0.5),
    lambda x: F.dropout(F.conv2d(x, torch.ones(2, x.shape[1], 3, 3), padding=1)) if x.ndim == 4 else x,
    lambda x: [*x.stride(), x.is_contiguous()],
]


def check_made(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    for name, whole in LAID.items():
        for dim in range(whole.ndim):
            n = whole.shape[dim]
            for sizes in {1: [(n,)], 2: [(n - 1, 1)], 3: [(n, 0, 0), (n - 1, 0, 1)]}[num_ranks]:
                part = whole.split(sizes, dim)[rank]
                made = [
                    ShardTensor.from_local(part, mesh, [Shard(dim)]),
                    scidata.scatter_tensor(whole if rank == 0 else None, 0, mesh, [Shard(dim)], sizes={0: sizes}),
                ]
                if num_ranks == 1 or name == "turned":
                    shapes = [tuple(each.shape) for each in whole.split(sizes, dim)]
                    made.append(ShardTensor.from_local(part, mesh, [Shard(dim)], sharding_shapes={0: shapes}))
                    if 0 in sizes or (num_ranks > 1 and 1 in sizes):  # others may not see how the whole lies
                        x = made.pop()
                        if rank == 0:
                            with pytest.raises(UnsupportedShardOp, match="order in memory"):
                                F.dropout(x)
                for x in made:  # where the order in memory is known, any draw follows it: all are done of the first
                    for i, draw in enumerate(DRAWS if x is made[0] else (DRAWS[0], DRAWS[-1])):
                        torch.manual_seed(3)
                        expected = tree_leaves(draw(whole))
                        torch.manual_seed(3)
                        found = [y.full_tensor() if isinstance(y, ShardTensor) else y for y in tree_leaves(draw(x))]
                        torch.testing.assert_close(found, expected, msg=lambda m: f"{name} {i} {x.spec}: {m}")  # noqa: B023


@pytest.mark.slow_for("2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_tensors_made_of_parts_lie_as_they_do(num_ranks):
    run_ranks(check_made, num_ranks)


def check_model(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True).double()
    patches = nn.Conv2d(3, 8, 2, 2).double()

    def model(x):
        return layer(patches(x).flatten(2).transpose(1, 2))

    x = torch.randn(2, 3, 8, 4, dtype=torch.float64).requires_grad_()
    spec = ShardSpec.even(mesh, [Shard(2)], x.shape, {0: (2, 6) if num_ranks == 2 else (4, 2, 2)})
    assert_like_one_process(model, [x], [spec])
    assert_like_one_process(lambda x: checkpoint(turned, x, use_reentrant=False), [x], [spec])


def turned(x):
    return F.dropout(x.mT, 0.5).tanh() * x.mT


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_transformer_with_dropout(num_ranks):
    run_ranks(check_model, num_ranks)


#: Places in the memory of a (4, 12, 6) tensor, and of one of the same shape whose rows lie outermost.
PLACES = {
    "itself": (((4, 12, 6), (72, 6, 1)), ((4, 12, 6), (6, 24, 1))),
    "turned": (((6, 12, 4), (1, 6, 72)), ((6, 12, 4), (1, 24, 6))),
    "chunks that overlap": (((4, 5, 4, 6), (72, 12, 6, 1)), ((4, 5, 4, 6), (6, 48, 24, 1))),
    "every other row": (((4, 6, 6), (72, 12, 1)), ((4, 6, 6), (6, 48, 1))),
    "windows of every other": (((4, 3, 4, 6), (72, 12, 12, 1)), ((4, 3, 4, 6), (6, 48, 48, 1))),
    "windows of windows": (((4, 2, 3, 4, 6), (72, 24, 12, 6, 1)), ((4, 2, 3, 4, 6), (6, 96, 48, 24, 1))),
    "all as one dim": (((7, 30), (40, 1)), ((7, 30), (40, 1))),
    "a diagonal": (((4,), (78,)), ((4,), (30,))),
    "a row, repeated": (((3, 1, 12), (0, 5, 6)), ((3, 1, 12), (0, 7, 24))),
    "nothing": (((4, 0), (72, 6)), ((4, 0), (6, 24))),
}


def check_places(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    x = torch.randn(4, 12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for name, taken in PLACES.items():
        for dim, of_three in ((0, (3, 0, 1)), (1, (7, 0, 5)), (1, (2, 9, 1)), (2, (1, 3, 2))):
            sizes = {1: (x.shape[dim],), 2: (of_three[0], sum(of_three[1:])), 3: of_three}[num_ranks]
            spec = ShardSpec.even(mesh, [Shard(dim)], x.shape, {0: sizes})
            for lies, (size, stride) in zip(("row-major", "rows outermost"), taken, strict=True):

                def places(x, lies=lies, size=size, stride=stride):
                    y = x * 2 if lies == "row-major" else (x * 2).transpose(0, 1).contiguous().transpose(0, 1)
                    z = torch.as_strided(y, size, stride)
                    return [F.dropout(z, 0.5), z * 3, *(z.stride() if z.numel() else ())]

                _run(f"{name}, {lies}, at {spec}", places, [x], [spec])
    y = shard_of(x.detach(), spec)
    for part, size, stride in (
        (y, (5, 72), (72, 1)),
        (y[:, :10], (4, 11, 6), (72, 6, 1)),
        (y[:1].expand(4, -1, -1), (2,), (1,)),
    ):
        with pytest.raises(UnsupportedShardOp, match="beside the tensor's own"):
            part.as_strided(size, stride)


@pytest.mark.slow_for("2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_elements_by_their_places(num_ranks):
    run_ranks(check_places, num_ranks)


#: Functions whose results lie as they do for reasons of their own: of (2, 8, 6, 4) with channels last.
LAID_OUT = {
    "pad": lambda x: F.pad(x, [1, 0, 2, 1]),
    "pad by edges": lambda x: F.pad(x, [1, 0, 0, 1], "replicate"),
    "circular pad": lambda x: F.pad(x, [1, 1, 1, 1], "circular"),
    "shuffled pixels": lambda x: F.pixel_shuffle(x, 2),
    "shuffled channels": lambda x: F.channel_shuffle(x, 4),
    "group norm of a part": lambda x: F.group_norm(x[:, :, ::2], 2),
    "in place": lambda x: F.relu(x * 1, inplace=True),
    "the tensor itself": lambda x: [(y := x * 1), F.leaky_relu(y, inplace=True) is y][0],
    "power of a number": lambda x: 2.0**x,
    "ldexp": lambda x: torch.ldexp(x, torch.ones(4, dtype=x.dtype)),
    "reversed": lambda x: torch.rsub(x, x[:, :1].contiguous()),
    "repeated": lambda x: x.repeat_interleave(2, 3),
    "sizes that are tensors": lambda x: x.view(2, torch.tensor(4), 2, 6, 4),
    "narrow": lambda x: x.narrow(3, torch.tensor(1), 2),
    "binary cross entropy": lambda x: F.binary_cross_entropy(
        x.sigmoid(), torch.full((2, 8, 6, 4), 0.5, dtype=x.dtype), reduction="none"
    ),
}


def check_laid_out(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    whole = torch.randn(2, 8, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = whole.to(memory_format=torch.channels_last).requires_grad_()
    for sizes in {1: [(6,)], 2: [(5, 1), (0, 6)], 3: [(3, 0, 3), (1, 4, 1)]}[num_ranks]:
        spec = ShardSpec.even(mesh, [Shard(2)], x.shape, {0: sizes})
        for name, function in LAID_OUT.items():

            def drawn(x, function=function):
                y = function(x.contiguous(memory_format=torch.channels_last))
                return [F.dropout(y, 0.5), *y.stride()]

            _run(f"{name} at {spec}", drawn, [x], [spec])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_results_lie_as_kernels_lay_them(num_ranks):
    run_ranks(check_laid_out, num_ranks)


def check_unknown(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    x = shard_of(torch.randn(6, 4), ShardSpec.even(mesh, [Shard(0)], (6, 4)))
    y = torch.fft.irfft(x.T + 0j, n=6)  # of which torch's inference is not sure
    with pytest.raises(UnsupportedShardOp, match=r"order in memory, which is not known.*contiguous"):
        F.dropout(y)
    assert F.dropout(y.contiguous()).shape == (4, 6)
    flat = y.reshape(-1)
    with pytest.raises(UnsupportedShardOp, match="copy"):
        flat.add_(1)
    y.add_(1)
    with pytest.raises(UnsupportedShardOp, match="whether this is a view"):
        flat.sum()
    z = x[:1].expand(3, 4)
    with pytest.raises(UnsupportedShardOp, match="copy"):
        z.mul_(2)
    for tensor in (x, x.redistribute(placements=[Replicate()]), x[2]):
        before = tensor.shape, tensor.local.shape
        with pytest.raises(UnsupportedShardOp, match="does not change in place"):
            tensor.resize_(2, 2)
        assert (tensor.shape, tensor.local.shape) == before
    whole = torch.arange(24.0).view(6, 4)
    turned = shard_of(whole, ShardSpec.even(x.spec.device_mesh, [Shard(0)], (6, 4)))
    row = turned[2]
    assert torch.equal(turned.t_().full_tensor(), whole.T)
    leaf = turned.clone().requires_grad_()
    with torch.no_grad():
        leaf.t_()
    (leaf * 3).sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), torch.full((6, 4), 3.0))
    made = turned.clone().requires_grad_() * 2
    with torch.no_grad(), pytest.raises(UnsupportedShardOp, match="graph would be lost"):
        made.t_()
    assert (turned.size(), turned.stride(), turned.dim()) == ((4, 6), (1, 4), 2)
    assert row.sum() == whole[2].sum()
    turned.mul_(2)
    with pytest.raises(UnsupportedShardOp, match="changed in place"):
        row.sum()
    with pytest.raises(UnsupportedShardOp, match="change ranks"):
        shard_of(whole[:1], ShardSpec.even(x.spec.device_mesh, [Shard(0)], (1, 4), {0: (1, 0)})).squeeze_()
    x.data = x.detach() * 2
    with pytest.raises(UnsupportedShardOp, match="another layout"):
        x.data = torch.ones(6, 4)


def test_what_is_not_known_raises():
    run_ranks(check_unknown, 2)


def test_copies_go_with_their_last_use():
    """Without the collector: what keeps a copy and its base together is no circle."""
    gc.disable()
    try:
        with fake_group(2):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
            spec = ShardSpec.even(mesh, [Shard(1)], (2, 7, 3))
            for take in (lambda x: x.reshape(14, 3), lambda x: x[:, 2], lambda x: x.unbind(1)[0], lambda x: x.view(-1)):
                x = ShardTensor(torch.rand(spec.local_shape), spec)
                y = take(x)
                assert y.copied is not None
                parts = weakref.ref(x.local), weakref.ref(y.local)
                del x, y
                assert [part() for part in parts] == [None, None]
    finally:
        gc.enable()
