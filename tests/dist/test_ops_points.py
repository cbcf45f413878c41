"""Grids, distances, tables, margins and recurrent layers on shards against one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec, ShardTensor
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of

LAYOUTS = {1: [(12,)], 2: [(7, 5), (12, 0)], 3: [(5, 3, 4), (0, 11, 1), (1, 1, 10)]}
IDS = torch.tensor([[3, 0, 11], [3, 3, 7], [1, 2, 11], [5, 5, 5]] * 3)  # (12, 3)
CLASSES = torch.arange(12) % 4
SIGNS = torch.tensor([1, -1, -1] * 4)


def _sampled(**how):
    return lambda x, grid: F.grid_sample(x, grid.tanh() * 1.2, align_corners=False, **how)


def _places(x):
    return (x.detach() * 3).abs().long()


#: function, shapes, sharded dim of each tensor (extent 12), None: plain
CASES = [
    (_sampled(), [(2, 3, 12, 5), (2, 6, 4, 2)], [2, None]),
    (_sampled(), [(2, 3, 12, 5), (2, 12, 4, 2)], [2, None]),
    (_sampled(mode="nearest"), [(2, 3, 12, 5), (2, 12, 4, 2)], [2, 1]),
    (_sampled(mode="bicubic"), [(2, 3, 4, 12), (2, 12, 4, 2)], [3, 1]),
    (_sampled(padding_mode="border"), [(2, 3, 5, 12), (2, 4, 12, 2)], [None, 2]),
    (_sampled(padding_mode="reflection"), [(12, 3, 4, 3), (12, 2, 4, 2)], [0, 0]),
    (_sampled(), [(12, 3, 4, 3), (12, 2, 4, 2)], [0, None]),
    (_sampled(), [(12, 3, 4, 3), (12, 2, 4, 2)], [None, 0]),
    (_sampled(), [(2, 12, 4, 3), (2, 2, 4, 2)], [1, None]),
    (_sampled(), [(1, 2, 12, 4, 3), (1, 2, 12, 3, 3)], [2, 2]),
    (lambda t: F.affine_grid(t, (12, 1, 4, 3), align_corners=False), [(12, 2, 3)], [0]),
    (lambda t: F.affine_grid(t.view(2, 3, 4), [2, 1, 2, 4, 3], align_corners=True), [(2, 12)], [1]),
    (lambda a, b: [torch.cdist(a, b), torch.cdist(a, b, 1.0)], [(12, 3), (5, 3)], [0, None]),
    (lambda a, b: [torch.cdist(a, b), torch.cdist(a, b, 3.0)], [(12, 3), (12, 3)], [0, 0]),
    (lambda a, b: torch.cdist(a, b), [(30, 3), (12, 3)], [None, 0]),
    (lambda a, b: torch.cdist(a, b, compute_mode="use_mm_for_euclid_dist"), [(12, 5), (6, 5)], [0, None]),
    (lambda a, b: torch.cdist(a, b), [(12, 4, 3), (12, 5, 3)], [0, 0]),
    (lambda a, b: torch.cdist(a, b), [(4, 12, 3), (12, 3)], [1, 0]),
    (lambda a, b: torch.cdist(a, b), [(12, 4, 3), (1, 5, 3)], [0, None]),
    (lambda a, b: torch.cdist(a, b), [(2, 5, 12), (2, 3, 12)], [2, 2]),
    (lambda x: [F.pdist(x), torch.pdist(x, 1.0)], [(12, 3)], [0]),
    (lambda a, b: [F.pairwise_distance(a, b), torch.pairwise_distance(a, b, 1.0, keepdim=True)], [(12, 3)] * 2, [0, 0]),
    (lambda a, b: F.pairwise_distance(a, b), [(4, 12), (12,)], [1, 0]),
    (lambda w: F.embedding(IDS, w), [(12, 5)], [0]),
    (lambda w: F.embedding(IDS, w, padding_idx=-7), [(12, 5)], [0]),
    (lambda w: F.embedding(IDS, w), [(12, 12)], [1]),
    (lambda x, w: F.embedding(_places(x), w), [(12, 3), (12, 5)], [0, 0]),
    (lambda x, w: F.embedding(_places(x), w, 2), [(2, 12), (12, 5)], [1, 0]),
    (lambda x, w: F.embedding(_places(x), w, padding_idx=2), [(2, 12), (15, 5)], [1, None]),
    (lambda x, w: F.embedding_bag(_places(x), w), [(12, 3), (15, 5)], [0, None]),
    (lambda x, w: F.embedding_bag(_places(x), w, mode="max", padding_idx=1), [(12, 3), (12, 5)], [0, 0]),
    (lambda x, w: F.embedding_bag(_places(x), w, mode="sum", per_sample_weights=x), [(2, 12), (15, 5)], [1, None]),
    (lambda w: F.embedding_bag(IDS, w), [(12, 12)], [1]),
    (lambda x: [F.one_hot(_places(x)), F.one_hot(_places(x), 20)], [(3, 12)], [1]),
    (lambda a, b, v: F.gaussian_nll_loss(a, b, v.square()), [(2, 12, 3)] * 3, [1, 1, 1]),
    (lambda a, b, v: F.gaussian_nll_loss(a, b, v.square(), True, 0.5, "sum"), [(3, 12), (3, 12), (3, 1)], [1, None, None]),
    (lambda a, b, v: F.gaussian_nll_loss(a, b, v.square(), reduction="none"), [(12, 3), (12, 3), (12,)], [0, 0, 0]),
    (lambda a, b: F.gaussian_nll_loss(a, b, 2.0), [(12, 3)] * 2, [0, None]),
    (lambda a, b: [F.margin_ranking_loss(a, b, SIGNS, 0.3, reduction=r) for r in ("mean", "none")], [(12,)] * 2, [0, 0]),
    (lambda a: [F.hinge_embedding_loss(a, SIGNS, 0.3, reduction=r) for r in ("mean", "sum")], [(12,)], [0]),
    (lambda a, b: F.cosine_embedding_loss(a, b, SIGNS, 0.1), [(12, 4)] * 2, [0, 0]),
    (lambda a, b, c: [F.triplet_margin_loss(a, b, c, swap=s, p=1.5) for s in (False, True)], [(12, 4)] * 3, [0, 0, None]),
    (lambda a, b, c: F.triplet_margin_with_distance_loss(a, b, c, margin=0.4), [(12, 4)] * 3, [0, 0, 0]),
    (
        lambda a, b, c: F.triplet_margin_with_distance_loss(a, b, c, distance_function=lambda x, y: (x - y).abs().sum(-1)),
        [(2, 12)] * 3,
        [1, 1, 1],
    ),
    (lambda a, w: F.multilabel_soft_margin_loss(a, (a > 0).double(), weight=w), [(12, 4), (4,)], [0, None]),
    (lambda a: F.multilabel_soft_margin_loss(a, (a > 0).double(), reduction="none"), [(4, 12)], [1]),
    (lambda a, w: [F.multi_margin_loss(a, CLASSES, p, 0.5, w.detach().abs()) for p in (1, 2)], [(12, 4), (4,)], [0, None]),
    (lambda a: F.multi_margin_loss(a, CLASSES[:3], reduction="none"), [(3, 12)], [1]),
    (lambda a: F.multi_margin_loss(a, CLASSES[2]), [(12,)], [0]),
    (lambda a: F.multilabel_margin_loss(a, IDS.clamp(max=2) - 1, reduction="sum"), [(12, 3)], [0]),
]  # fmt: skip


def check_cases(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    for i, (function, shapes, dims) in enumerate(CASES):
        torch.default_generator.manual_seed(13)
        inputs = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]
        for layout in LAYOUTS[num_ranks]:
            specs = [
                None if d is None else ShardSpec.even(mesh, [Shard(d)], s, {0: layout})
                for d, s in zip(dims, shapes, strict=True)
            ]
            try:
                assert_like_one_process(function, inputs, specs)
            except Exception as error:
                raise AssertionError(f"case {i} at {layout}") from error


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_like_one_process(num_ranks):
    run_ranks(check_cases, num_ranks)


def check_two_axes(rank, num_ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))
    torch.default_generator.manual_seed(14)
    given = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in [(2, 3, 12, 6), (2, 12, 6, 2), (12, 6)]]
    sizes = {"h": (7, 5), "w": (6, 0)}

    def spec(i, *dims):
        placements = [Replicate() if d is None else Shard(d) for d in dims]
        used = {name: sizes[name] for name, d in zip("hw", dims, strict=True) if d is not None}
        return ShardSpec.even(mesh, placements, given[i].shape, used)

    for image, grid in ((spec(0, 2, 3), None), (spec(0, 2, None), spec(1, 1, 2)), (spec(0, 2, 3), spec(1, None, 2))):
        assert_like_one_process(_sampled(), given[:2], [image, grid])
    for rows, others in ((spec(2, 0, 1), spec(2, 0, None)), (spec(2, 0, None), spec(2, None, 1))):
        assert_like_one_process(torch.cdist, [given[2], given[2]], [rows, others])
    half = shard_of(given[2].detach().bfloat16(), spec(2, 0, 1))
    with pytest.raises(NotImplementedError, match="BFloat16"):  # also where a rank has no rows
        torch.cdist(half, half)
    assert torch.cdist(half[:0], half).shape == (0, 12)
    for table, ids in ((spec(2, 0, 1), None), (spec(2, 0, 1), spec(2, 0, None)), (spec(2, 0, None), spec(2, 0, 1))):
        assert_like_one_process(lambda w, x: F.embedding(_places(x), w, 1), [given[2], given[2]], [table, ids])


def test_two_axes():
    run_ranks(check_two_axes, 4)


# -- recurrent -------------------------------------------------------------------------------------------------------


def _cells():
    for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        yield kind(3, 4), [(12, 3)], [0]
        yield kind(3, 4, bias=False), [(12, 3)], [0]
        yield kind(12, 4), [(5, 12)], [1]
    yield nn.RNNCell(3, 4, nonlinearity="relu"), [(12, 3), (12, 4)], [0, 0]
    yield nn.GRUCell(3, 12), [(5, 3), (5, 12)], [None, 1]
    yield nn.GRUCell(3, 4), [(12, 3), (12, 4)], [None, 0]
    cell = nn.LSTMCell(3, 4)
    yield lambda x, h, c: cell(x, (h, c)), [(12, 3), (12, 4), (12, 4)], [0, None, 0]
    yield nn.GRUCell(12, 4), [(12,)], [0]


def _layers():
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        yield kind(3, 4, 2, bidirectional=True), [(5, 12, 3)], [1]
        yield kind(3, 4, batch_first=True), [(12, 5, 3)], [0]
        yield kind(3, 4, batch_first=True), [(5, 12, 3)], [1]
        yield kind(3, 4), [(12, 1, 3)], [0]
        yield kind(12, 4, bias=False), [(4, 2, 12)], [2]
        yield kind(3, 4, 3, dropout=0.4, batch_first=True, bidirectional=True), [(12, 5, 3)], [0]
        yield kind(3, 4), [(12, 3)], [0]
    yield nn.RNN(3, 4, nonlinearity="relu"), [(5, 12, 3), (1, 12, 4)], [1, 1]
    yield nn.GRU(3, 4), [(12, 5, 3), (1, 5, 4)], [0, None]
    layer, drop = nn.LSTM(3, 4, proj_size=2), nn.GRU(3, 4, batch_first=True)
    yield lambda x, h, c: layer(x, (h, c)), [(5, 12, 3), (1, 12, 2), (1, 12, 4)], [1, 1, None]
    yield lambda x: F.dropout(drop(x)[0], 0.5), [(12, 5, 3)], [0]  # by order in memory


def check_recurrent(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    torch.default_generator.manual_seed(15)
    for i, (module, shapes, dims) in enumerate((*_cells(), *_layers())):
        learned = {}
        if isinstance(module, nn.Module):
            learned = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
        elif module.__closure__:
            module.__closure__[0].cell_contents.double()

        def function(*given, module=module, names=tuple(learned)):
            if not names:
                return module(*given)
            parameters = dict(zip(names, given[-len(names) :], strict=True))
            return torch.func.functional_call(module, parameters, given[: -len(names)])

        inputs = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]
        for layout in LAYOUTS[num_ranks]:
            specs = [
                None if d is None else ShardSpec.even(mesh, [Shard(d)], s, {0: layout})
                for d, s in zip(dims, shapes, strict=True)
            ]
            try:
                assert_like_one_process(function, [*inputs, *learned.values()], [*specs, *[None] * len(learned)])
            except Exception as error:
                raise AssertionError(f"case {i} ({module}) at {layout}") from error


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_recurrent_layers(num_ranks):
    run_ranks(check_recurrent, num_ranks)


# -- refusals ----------------------------------------------------------------------------------------------------------


def check_errors(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    rows = shard_of(torch.randn(12, 4), ShardSpec.even(mesh, [Shard(0)], (12, 4), {0: (12, 0)}))
    steps = shard_of(torch.randn(5, 12, 4), ShardSpec.even(mesh, [Shard(1)], (5, 12, 4), {0: (12, 0)}))
    with pytest.raises(UnsupportedShardOp, match="Remedy"):
        F.embedding(_places(rows), torch.randn(20, 3), max_norm=1.0)
    for call in (
        lambda: torch.cdist(rows, torch.randn(5, 3)),
        lambda: F.grid_sample(steps[None], torch.randn(2, 3, 3, 2), align_corners=False),
        lambda: F.embedding(torch.tensor([3, 12]), rows),
        lambda: F.one_hot(_places(rows), 1),
        lambda: F.gaussian_nll_loss(rows, rows, -1.0),
        lambda: F.gaussian_nll_loss(rows, rows, rows),
        lambda: F.triplet_margin_loss(rows, rows, rows, margin=0),
        lambda: F.margin_ranking_loss(rows, rows, SIGNS),
        lambda: nn.GRUCell(4, 3)(rows, torch.zeros(11, 3)),
    ):
        with pytest.raises((RuntimeError, IndexError, ValueError)) as caught:
            call()
        assert not isinstance(caught.value, UnsupportedShardOp)


def test_errors():
    run_ranks(check_errors, 2)


def check_neighbours(rank, num_ranks):
    """Rows and their distances stay where they are; of two sharded tensors, the second is gathered."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    points = torch.randn(12, 3)
    for sizes in LAYOUTS[num_ranks]:
        x = shard_of(points, ShardSpec.even(mesh, [Shard(0)], (12, 3), {0: sizes}))
        distances = torch.cdist(x, x)
        assert isinstance(distances, ShardTensor)
        assert distances.spec.sizes_of(0) == sizes
        sampled = F.grid_sample(x.view(1, 1, 12, 3), torch.zeros(1, 12, 2, 2), align_corners=False)
        assert sampled.spec.sizes_of(0) == sizes


def test_where_results_lie():
    run_ranks(check_neighbours, 3)
