"""Attention on shards against one process: sequence, heads and batch sharded, masks, causal."""

import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import scidata
from scidata.errors import ConfigError, UnsupportedShardOp
from scidata.shard import ShardSpec
from scidata.shard.attention import algorithms, ring
from scidata.shard.attention.algorithms import chosen_algorithm, note_algorithm
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of
from tests.dist._layers import Spy

LAYOUTS = {1: [(7,)], 2: [(4, 3), (7, 0)], 3: [(3, 2, 2), (0, 5, 2)]}
ATTENTION = F.scaled_dot_product_attention


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def check_attention(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))

    def split(dim, shape, sizes):
        return ShardSpec.even(mesh, [Shard(dim)], shape, {0: sizes})

    for sizes in LAYOUTS[num_ranks]:
        torch.default_generator.manual_seed(15)
        query, key, value = normal(2, 3, 7, 4), normal(2, 3, 7, 4), normal(2, 3, 7, 5)
        rows = [split(2, x.shape, sizes) for x in (query, key, value)]
        assert_like_one_process(ATTENTION, [query, key, value], rows)
        assert_like_one_process(ATTENTION, [query, key, value], [rows[0], None, None])
        assert_like_one_process(ATTENTION, [query, key, value], [rows[0], rows[1], None])
        assert_like_one_process(ATTENTION, [query, key, value], [None, rows[1], rows[2]])
        assert_like_one_process(lambda q, k, v: ATTENTION(q, k, v, is_causal=True), [query, key, value], rows)
        assert_like_one_process(lambda q, k, v: ATTENTION(q, k, v, scale=0.3), [query, key, value], rows)
        bias = normal(7, 7)
        with_mask = lambda q, k, v, m: ATTENTION(q, k, v, attn_mask=m)  # noqa: E731
        assert_like_one_process(with_mask, [query, key, value, bias], [*rows, None])
        assert_like_one_process(with_mask, [query, key, value, normal(2, 1, 7, 7)], [*rows, None])
        assert_like_one_process(with_mask, [query, key, value, normal(1, 7)], [*rows, None])
        assert_like_one_process(with_mask, [query, key, value, bias], [*rows, split(0, (7, 7), sizes)])
        samples = [normal(7, 2, 3, 4) for _ in range(3)]  # some ranks have none, and backward sums the bias's gradient
        for given in (normal(3, 3), normal(1, 2, 3, 3), normal(7, 1, 3, 3), normal(2, 1, 1)):
            batch = [split(0, samples[0].shape, sizes)] * 3
            assert_like_one_process(with_mask, [*samples, given], [*batch, None])
            assert_like_one_process(with_mask, [*samples, given], [batch[0], None, None, None])
        band = (torch.arange(7)[:, None] - torch.arange(7)).abs() < 3
        assert_like_one_process(with_mask, [query, key, value, band], [*rows, None])
        # another sequence, split differently
        long = [normal(2, 3, 14, 4), normal(2, 3, 14, 5)]
        twice = [split(2, x.shape, [2 * n for n in reversed(sizes)]) for x in long]
        assert_like_one_process(ATTENTION, [query, *long], [rows[0], *twice])
        assert_like_one_process(lambda q, k, v: ATTENTION(q, k, v, is_causal=True), [query, *long], [rows[0], *twice])
        # heads, then batch
        for shape, dim in [((2, 7, 3, 4), 1), ((7, 2, 3, 4), 0)]:
            three = [normal(*shape) for _ in range(3)]
            assert_like_one_process(ATTENTION, three, [split(dim, shape, sizes)] * 3)
            assert_like_one_process(ATTENTION, three, [split(dim, shape, sizes), None, None])
            assert_like_one_process(
                lambda q, k, v: ATTENTION(q, k, v, is_causal=True), three, [split(dim, shape, sizes)] * 3
            )
        grouped = [normal(2, 4, 7, 4), normal(2, 2, 7, 4), normal(2, 2, 7, 4)]
        specs = [split(2, x.shape, sizes) for x in grouped]
        assert_like_one_process(lambda q, k, v: ATTENTION(q, k, v, enable_gqa=True), grouped, specs)
        flat = [normal(7, 4) for _ in range(3)]
        assert_like_one_process(
            lambda q, k, v: ATTENTION(q[None], k[None], v[None]), flat, [split(0, (7, 4), sizes)] * 3
        )


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_attention(num_ranks):
    run_ranks(check_attention, num_ranks)


def check_two_axes(rank, num_ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))
    torch.manual_seed(16)
    three = [normal(2, 4, 7, 3) for _ in range(3)]
    for heads, rows in [((3, 1), (4, 3)), ((2, 2), (0, 7))]:
        spec = ShardSpec.even(mesh, [Shard(1), Shard(2)], (2, 4, 7, 3), {"h": heads, "w": rows})
        only = ShardSpec.even(mesh, [Replicate(), Shard(2)], (2, 4, 7, 3), {"w": rows})
        assert_like_one_process(ATTENTION, three, [spec] * 3)
        assert_like_one_process(ATTENTION, three, [spec, only, None])
        assert_like_one_process(lambda q, k, v: ATTENTION(q, k, v, is_causal=True), three, [spec] * 3)


def test_heads_and_sequence():
    run_ranks(check_two_axes, 4)


# -- a sharded sequence: three ways ---------------------------------------------------------------------------------

ALGORITHMS = ("gather", "ring", "heads")
SPLIT = (slice(0, 5), slice(5, 8))
SEQUENCES = {1: [(9,)], 2: [(8, 1), (0, 9)], 3: [(1, 0, 8)], 4: [(2, 6, 0, 1)]}
RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])


def masks():
    """Masks of 9 queries and keys, some of which leave a row without any key."""
    torch.manual_seed(3)
    band = (torch.arange(9)[:, None] - torch.arange(9)).abs() < 3
    nothing = band.clone()
    nothing[4] = False
    padding = torch.tensor([True] * 6 + [False] * 3)
    return [band, nothing, padding[None], padding[None, None, None].expand(2, 1, 1, 9).clone()]


def check_ways(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    for sizes in SEQUENCES[num_ranks]:

        def split(shape, dim, times=1, sizes=sizes):
            return ShardSpec.even(mesh, [Shard(dim)], shape, {0: [times * n for n in sizes]})

        torch.default_generator.manual_seed(17)
        three = [normal(2, 5, 9, 4), normal(2, 5, 9, 4), normal(2, 5, 9, 3)]
        rows = [split(x.shape, 2) for x in three]
        shared = [normal(2, 4, 9, 4), normal(2, 2, 9, 4), normal(2, 2, 9, 4)]
        long = [normal(2, 5, 18, 4), normal(2, 5, 18, 3)]
        longer = [split(x.shape, 2, 2) for x in long]
        for way in ALGORITHMS:
            with scidata.attention(way):
                found = assert_like_one_process(ATTENTION, three, rows)
                assert found.spec == split((2, 5, 9, 3), 2)
                assert_like_one_process(lambda *x: ATTENTION(*x, is_causal=True), three, rows)
                assert_like_one_process(lambda *x: ATTENTION(*x, scale=0.3), [three[0]] * 3, [rows[0]] * 3)
                assert_like_one_process(lambda *x: ATTENTION(*x, is_causal=True), [three[0]] * 3, [rows[0]] * 3)
                assert_like_one_process(
                    ATTENTION, [x.detach()[0].requires_grad_() for x in three], [split(x.shape[1:], 1) for x in three]
                )
                assert_like_one_process(ATTENTION, [three[0], *long], [rows[0], *longer])
                assert_like_one_process(lambda *x: ATTENTION(*x, is_causal=True), [three[0], *long], [rows[0], *longer])
                for mask in masks():
                    assert_like_one_process(ATTENTION, [*three, mask], [*rows, None])
                for mask in (normal(9, 9), normal(2, 1, 9, 9), normal(2, 5, 1, 9), normal(1, 1, 9, 1)):
                    assert_like_one_process(ATTENTION, [*three, mask], [*rows, None])
                assert_like_one_process(ATTENTION, [*three, normal(9, 9)], [*rows, split((9, 9), 0)])
                assert_like_one_process(ATTENTION, [*three, normal(9, 9)], [*rows, split((9, 9), 1)])
                assert_like_one_process(ATTENTION, [*three, masks()[3]], [*rows, split((2, 1, 1, 9), 3)])
                if way != "heads":
                    specs = [split(x.shape, 2) for x in shared]
                    assert_like_one_process(lambda *x: ATTENTION(*x, enable_gqa=True), shared, specs)


@pytest.mark.slow_for("4")
@RANKS
def test_three_ways_one_result(num_ranks):
    run_ranks(check_ways, num_ranks)


def check_ways_beside_another_axis(rank, num_ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))
    torch.manual_seed(18)
    three = [normal(3, 4, 7, 4) for _ in range(3)]
    for way in ALGORITHMS:
        with scidata.attention(way):
            for first in (0, None, 1) if way != "heads" else (0, None):
                placement = Replicate() if first is None else Shard(first)
                sizes = {"w": (6, 1), **({} if first is None else {"h": (three[0].shape[first] - 1, 1)})}
                spec = ShardSpec.even(mesh, [placement, Shard(2)], (3, 4, 7, 4), sizes)
                assert_like_one_process(ATTENTION, three, [spec] * 3)
                assert_like_one_process(lambda *x: ATTENTION(*x, is_causal=True), three, [spec] * 3)


def test_three_ways_beside_a_sharded_batch():
    run_ranks(check_ways_beside_another_axis, 4)


def check_uneven_batch(rank, num_ranks):
    """Ranks of few samples choose the way of those of many: a mask's gradient is summed over both."""
    algorithms._ROUND = 1000
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("domain", "dp"))
    operands, mask = [normal(5, 2, n, 4) for n in (4, 24, 24)], normal(1, 2, 4, 24)
    specs = [ShardSpec.even(mesh, [Shard(2), Shard(0)], tuple(x.shape), {1: (4, 1)}) for x in operands]
    note_algorithm()
    assert_like_one_process(F.scaled_dot_product_attention, [*operands, mask], [*specs, None])
    return note_algorithm()


def test_an_uneven_batch_beside_the_sequence():
    assert run_ranks(check_uneven_batch, 4) == ["heads"] * 4


def check_dtypes(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    shape = (1, 2, 32, 8)
    spec = ShardSpec.even(mesh, [Shard(2)], shape, {0: (20, 12)})
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 4e-2)):
        three = [torch.randn(shape, dtype=dtype).requires_grad_() for _ in range(3)]
        for x in three:
            dist.broadcast(x.detach(), 0)
        for way in ALGORITHMS:
            with scidata.attention(way):
                assert_like_one_process(ATTENTION, three, [spec] * 3, rtol=tolerance, atol=tolerance)


def test_other_dtypes():
    run_ranks(check_dtypes, 2)


def check_choice(rank, num_ranks):
    assert chosen_algorithm(2, 8, 2**20, 2**21) == chosen_algorithm(4, 8, 2**18, 2**19) == "gather"
    assert chosen_algorithm(4, 8, 2**20, 2**21) == chosen_algorithm(2, 8, 2**30, 2**31) == "heads"
    assert chosen_algorithm(4, 8, 2**20, 2**21, 2**20) == chosen_algorithm(4, 6, 2**20, 2**21) == "gather"
    assert chosen_algorithm(8, 8, 2**18, 9 * 2**18) == "gather"  # 8 query heads to each of keys
    assert chosen_algorithm(4, 6, 2**30, 2**31) == chosen_algorithm(4, 0, 2**30, 2**31) == "ring"
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    three = [shard_of(normal(1, 2, 8, 4), ShardSpec.even(mesh, [Shard(2)], (1, 2, 8, 4))) for _ in range(3)]
    for way, names in (("gather", {"all_gather"}), ("ring", {"all_to_all_single"}), ("auto", {"all_gather"})):
        with scidata.attention(way), Spy() as spy:
            ATTENTION(*three)
        assert set(spy.counts) == names
    with pytest.raises(ConfigError, match="did you mean"), scidata.attention("rings"):
        pass
    with scidata.attention("heads"), pytest.raises(UnsupportedShardOp, match="heads"):
        ATTENTION(*(x[0, 0] for x in three))  # no heads


def test_the_way_is_chosen_by_size_or_by_the_user():
    run_ranks(check_choice, 2)


def check_told(rank, num_ranks):
    """What is chosen sends least, is told, and gives what one process does, of uneven parts and with masks."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    torch.manual_seed(24)
    for shape, expected in (((1, 3, 240, 64), "heads"), ((1, 4, 240, 64), "gather"), ((1, 3, 24, 64), "gather")):
        three, mask = [normal(*shape) for _ in range(3)], torch.rand(shape[2], shape[2]) > 0.3
        specs = [ShardSpec.even(mesh, [Shard(2)], shape, {0: (shape[2] - 7, 0, 7)})] * 3
        for options in ({}, {"is_causal": True}, {"attn_mask": mask}):
            assert_like_one_process(lambda *x, o=options: ATTENTION(*x, **o), three, specs, rtol=1e-11)
        sharded = [shard_of(x, spec) for x, spec in zip(three, specs, strict=True)]
        (op,) = scidata.explain(ATTENTION, *sharded).ops
        assert op.rule == f"attention, {expected}"
        sent = {}
        for way in ALGORITHMS if expected == "heads" else ():
            with scidata.attention(way):
                sent[way] = sum_over_ranks(scidata.explain(ATTENTION, *sharded).bytes_sent)
        assert not sent or sum_over_ranks(op.bytes_sent) == min(sent.values())


def sum_over_ranks(count):
    total = torch.tensor(count)
    dist.all_reduce(total)
    return int(total)


def test_what_is_chosen_is_told():
    run_ranks(check_told, 3)


class Memory(TorchDispatchMode):
    """The largest tensor that is made, and the most bytes of all that are alive at a time."""

    def __init__(self):
        super().__init__()
        self.largest, self.peak, self.alive = 0, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.largest = max([self.largest, *(x.nbytes // 8 for x in made)])  # in elements of float64
        self.alive = [ref for ref in self.alive if ref() is not None] + [weakref.ref(x) for x in made]
        storages = [x.untyped_storage() for ref in self.alive if (x := ref()) is not None]
        self.peak = max(self.peak, sum({each.data_ptr(): each.nbytes() for each in storages}.values()))
        return result


def check_memory(rank, num_ranks, way):
    """What a rank makes and holds in one call, forward and backward."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    block, width = 16, 4
    shape = (1, 2, block * num_ranks, width)
    spec = ShardSpec.even(mesh, [Shard(2)], shape)
    three = [shard_of(normal(*shape), spec).requires_grad_() for _ in range(3)]
    with scidata.attention(way), Memory() as memory:
        out = ATTENTION(*three)
        out.backward(out.detach())
    return memory.largest, memory.peak


def test_ring_memory_grows_with_the_block_not_with_the_sequence():
    """From 3 ranks on, a rank holds its own block, the current one and the one on its way."""
    ring, gathered = ([run_ranks(check_memory, n, way) for n in (3, 6)] for way in ("ring", "gather"))
    (largest, peak), (largest_of_six, peak_of_six) = (map(max, zip(*each, strict=True)) for each in ring)
    assert largest == largest_of_six <= 2 * 2 * 16 * 16
    assert peak_of_six <= 1.02 * peak
    peak, peak_of_six = (max(most for _, most in each) for each in gathered)
    assert peak_of_six > 1.5 * peak


def check_no_second_derivative(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    x = shard_of(normal(1, 2, 8, 4), ShardSpec.even(mesh, [Shard(2)], (1, 2, 8, 4))).requires_grad_()
    with scidata.attention("ring"):
        loss = ATTENTION(x, x, x).sum()
    with pytest.raises(UnsupportedShardOp, match="second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_a_second_derivative_of_the_ring_raises():
    run_ranks(check_no_second_derivative, 2)


def check_refused(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    x = torch.randn(2, 4, 4, 4)
    batch, heads, rows, width = (ShardSpec.even(mesh, [Shard(d)], x.shape) for d in range(4))
    other = ShardSpec.even(mesh, [Shard(1)], x.shape, {0: (3, 1)})
    three = [normal(2, 4, 4, 4) for _ in range(3)]
    for specs in ([batch, heads, heads], [heads, rows, rows], [width] * 3, [heads, other, other], [rows, heads, heads]):
        assert_like_one_process(ATTENTION, three, specs)
    for mask, dim in ((normal(2, 1, 4, 4), 0), (normal(2, 4, 1, 4), 1), (normal(4, 4), 0)):
        for spec in (batch, heads, rows):
            specs = [spec] * 3 + [ShardSpec.even(mesh, [Shard(dim)], mask.shape, {0: (mask.shape[dim], 0)})]
            assert_like_one_process(ATTENTION, [*three, mask], specs)
    three = [shard_of(x, rows) for _ in range(3)]
    with pytest.raises(UnsupportedShardOp, match="Remedy"):
        ATTENTION(*three, is_causal=True, attn_mask=torch.ones(4, 4, dtype=torch.bool))
    odd = ShardSpec.even(mesh, [Shard(1)], x.shape, {0: (3, 1)})
    two = ShardSpec.even(mesh, [Shard(1)], (2, 2, 4, 4))
    grouped = [normal(2, 4, 4, 4), normal(2, 2, 4, 4), normal(2, 2, 4, 4)]
    assert_like_one_process(lambda q, k, v: ATTENTION(q, k, v, enable_gqa=True), grouped, [odd, two, two])


def test_layouts_that_do_not_meet():
    run_ranks(check_refused, 2)


def check_groups(rank, num_ranks):
    """Grouped queries: 6 heads of queries, 3 or 1 of keys and values."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    torch.manual_seed(22)
    query = normal(2, 6, 9, 4)
    mask = torch.randn(2, 6, 9, 9, dtype=torch.float64)
    for count in (3, 1):
        key, value = normal(2, count, 9, 4), normal(2, count, 9, 5)
        for options in ({}, {"is_causal": True}, {"attn_mask": mask}):
            function = lambda q, k, v, o=options: ATTENTION(q, k, v, enable_gqa=True, **o)  # noqa: E731
            for sizes in SEQUENCES[num_ranks]:
                specs = [ShardSpec.even(mesh, [Shard(2)], x.shape, {0: sizes}) for x in (query, key, value)]
                for way in ALGORITHMS:
                    with scidata.attention(way):
                        assert_like_one_process(function, [query, key, value], specs, rtol=1e-11)
            heads = [count] + [0] * (num_ranks - 1)
            specs = [
                ShardSpec.even(mesh, [Shard(1)], x.shape, {0: [n * x.shape[1] // count for n in heads]})
                for x in (query, key, value)
            ]
            for chosen in (specs, [specs[0], None, None], [None, *specs[1:]]):
                assert_like_one_process(function, [query, key, value], chosen, rtol=1e-11)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_grouped_queries(num_ranks):
    run_ranks(check_groups, num_ranks)


def check_dropout(rank, num_ranks):
    """Weights are dropped as one process drops them with the same seed."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    torch.manual_seed(23)
    query, key, value = normal(2, 4, 9, 4), normal(2, 2, 9, 4), normal(2, 2, 9, 3)
    blocked = torch.rand(9, 9) > 0.3
    blocked[4] = False
    for options in ({}, {"is_causal": True}, {"attn_mask": blocked}, {"attn_mask": torch.randn(9, 9).double()}):
        function = lambda q, k, v, o=options: ATTENTION(q, k, v, dropout_p=0.3, enable_gqa=True, **o)  # noqa: E731
        for sizes in SEQUENCES[num_ranks]:
            rows = [ShardSpec.even(mesh, [Shard(2)], x.shape, {0: sizes}) for x in (query, key, value)]
            for specs in (rows, [rows[0], None, None], [None, *rows[1:]]):
                assert_like_one_process(function, [query, key, value], specs, rtol=1e-11)
    # nobody knows how what is padded lies in memory; weights are made anew
    padded = lambda q, k, v: ATTENTION(F.pad(q.transpose(1, 3), (1, 0))[..., 1:].transpose(1, 3), k, v, dropout_p=0.3)  # noqa: E731
    assert_like_one_process(padded, [query[:, :2], key, value], [rows[1], *rows[1:]], rtol=1e-11)
    spec = ShardSpec.even(mesh, [Shard(0)], (9, 2, 6), {0: sizes})
    for settings in ({"dropout": 0.3}, {"add_bias_kv": True}, {"add_zero_attn": True, "add_bias_kv": True}):
        layer = nn.MultiheadAttention(6, 3, **settings).double()
        x, parameters = normal(9, 2, 6), list(parameters_of(layer).values())
        padding = torch.tensor([[False] * 7 + [True] * 2, [False] * 9])
        causal = torch.ones(9, 9, dtype=torch.bool).triu(1)
        for options in (
            {"need_weights": True, "key_padding_mask": padding, "attn_mask": causal},
            {"need_weights": False, "key_padding_mask": padding},
            {"need_weights": False},
            {"need_weights": False, "attn_mask": causal, "is_causal": True},
        ):
            own = run_module(layer, **options)
            given = [x, *parameters]
            specs = [spec, *[None] * len(parameters)]
            assert_like_one_process(lambda a, *p, own=own: own(a, a, a, *p), given, specs, rtol=1e-11)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_dropped_weights_and_extra_keys(num_ranks):
    run_ranks(check_dropout, num_ranks)


# -- modules --------------------------------------------------------------------------------------------------------


def parameters_of(module):
    return {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}


def run_module(module, **options):
    """Return a function of inputs and of the module's parameters."""
    names = list(parameters_of(module))

    def run(*operands):
        inputs, parameters = operands[: len(operands) - len(names)], operands[len(operands) - len(names) :]
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), inputs, options)

    return run


def check_multihead(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    blocked = torch.ones(9, 9, dtype=torch.bool).triu(1)
    padding = torch.tensor([[False] * 7 + [True] * 2, [False] * 9])
    sizes = SEQUENCES[num_ranks][-1]
    for batch_first in (True, False):
        torch.default_generator.manual_seed(19)
        shape, dim = ((2, 9, 6), 1) if batch_first else ((9, 2, 6), 0)
        spec = ShardSpec.even(mesh, [Shard(dim)], shape, {0: sizes})
        layer = nn.MultiheadAttention(6, 3, batch_first=batch_first).double()
        x, y, parameters = normal(*shape), normal(*shape), list(parameters_of(layer).values())
        rest = [None] * len(parameters)
        for options in (
            {"need_weights": False},
            {"need_weights": True},
            {"need_weights": True, "average_attn_weights": False, "attn_mask": blocked},
            {"need_weights": False, "attn_mask": blocked, "is_causal": True},
            {"need_weights": False, "attn_mask": blocked.repeat(6, 1, 1), "key_padding_mask": padding},
        ):
            own = run_module(layer, **options)
            assert_like_one_process(lambda a, *p, own=own: own(a, a, a, *p), [x, *parameters], [spec, *rest])
            assert_like_one_process(
                lambda a, b, *p, own=own: own(a, b, b, *p), [x, y, *parameters], [spec, spec, *rest]
            )
        masked = lambda a, m, *p, layer=layer: run_module(layer, need_weights=False, key_padding_mask=m)(a, a, a, *p)  # noqa: E731
        split = ShardSpec.even(mesh, [Shard(1)], padding.shape, {0: sizes})
        assert_like_one_process(masked, [x, padding, *parameters], [spec, split, *rest])
    layer = nn.MultiheadAttention(6, 2, kdim=4, vdim=3, bias=False).double()
    flat = [normal(9, 6), normal(9, 4), normal(9, 3)]
    specs = [ShardSpec.even(mesh, [Shard(0)], f.shape, {0: sizes}) for f in flat]
    parameters = list(parameters_of(layer).values())
    assert_like_one_process(run_module(layer), [*flat, *parameters], [*specs, *[None] * len(parameters)])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_multihead_attention(num_ranks):
    run_ranks(check_multihead, num_ranks)


def check_encoder(rank, num_ranks):
    """In eval torch has a fast path of one kernel for the whole layer: sharded tensors must not take it."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    padding = torch.tensor([[False] * 7 + [True] * 2, [False] * 9])
    causal = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    for way in ALGORITHMS:
        for training, norm_first in ((True, False), (False, True), (False, False)):
            torch.default_generator.manual_seed(20)
            layer = nn.TransformerEncoderLayer(
                8, 4, 12, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64
            )
            model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).train(training)
            parameters = list(parameters_of(model).values())
            for sizes in SEQUENCES[num_ranks][-1:]:
                spec = ShardSpec.even(mesh, [Shard(1)], (2, 9, 8), {0: sizes})
                for options in ({}, {"src_key_padding_mask": padding}, {"mask": causal, "is_causal": True}):
                    with scidata.attention(way):
                        run = run_module(model, **options)
                        inputs = [normal(2, 9, 8), *parameters]
                        assert_like_one_process(run, inputs, [spec, *[None] * len(parameters)], rtol=1e-11)
            with torch.no_grad(), scidata.attention(way):
                x = torch.randn(2, 9, 8, dtype=torch.float64)
                found = model.eval()(shard_of(x, spec)).full_tensor()
                torch.testing.assert_close(found, model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_transformer_encoder(num_ranks):
    run_ranks(check_encoder, num_ranks)


def check_multihead_refused(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    x = shard_of(torch.randn(9, 2, 6), ShardSpec.even(mesh, [Shard(0)], (9, 2, 6)))
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 4, batch_first=True), 1).eval()
    y = shard_of(torch.randn(2, 9, 6), ShardSpec.even(mesh, [Shard(1)], (2, 9, 6)))
    with torch.no_grad(), pytest.raises(UnsupportedShardOp, match="enable_nested_tensor=False"):
        encoder(y, src_key_padding_mask=torch.zeros(2, 9, dtype=torch.bool))
    layer, static = nn.MultiheadAttention(6, 2), torch.zeros(4, 9, 3)
    weights = [layer.in_proj_weight, layer.in_proj_bias]
    out = [layer.out_proj.weight, layer.out_proj.bias]
    with pytest.raises(UnsupportedShardOp, match="static_k"):
        F.multi_head_attention_forward(x, x, x, 6, 2, *weights, None, None, False, 0.0, *out, static_k=static)


def test_options_of_multihead_attention_that_raise():
    run_ranks(check_multihead_refused, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_kernels_of_a_block_agree(causal):
    """The flash kernel's result, log-sum-exp and gradients are those of matrix products; parts merge to the whole."""
    torch.manual_seed(21)
    query, key, value = (torch.randn(2, 3, 8, 4, dtype=torch.float64) for _ in range(3))
    assert ring._kernel(query, key, value, None) == "flash_cpu"
    no_bias = torch.zeros(1, 1, dtype=torch.float64)
    assert ring._kernel(query, key, value, no_bias) == "products"
    found, expected = (ring.block_forward(query, key, value, b, causal, 0.5) for b in (None, no_bias))

    def summed(part):
        return part.mean(), part.peak + part.total.log()

    torch.testing.assert_close(summed(found), summed(expected), rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(query)
    operands = query, key, value
    whole = ring.Partial(expected.mean(), expected.peak, expected.total)
    ours, theirs = (ring.block_backward(grad, operands, b, whole, causal, 0.5) for b in (None, no_bias))
    torch.testing.assert_close(ours[:3], theirs[:3], rtol=1e-12, atol=1e-12)
    if not causal:
        parts = [ring.block_forward(query, key[:, :, s], value[:, :, s], None, False, 0.5) for s in SPLIT]
        merged = ring.merge(ring.merge(None, parts[0]), parts[1])
        torch.testing.assert_close(summed(merged), summed(expected), rtol=1e-12, atol=1e-12)
