"""Sparse matrices of sharded indices and values are those of one process, and so are the gradients of their values."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec, ShardTensor
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of
from tests.dist._graphs import NUM_NODES
from tests.dist._pyg import _close, _parts

INDICES = torch.tensor([[0, 0, 1, 3, 3, 5, 6], [1, 2, 3, 4, 6, 1, 2]])
POINTERS = torch.tensor([0, 2, 3, 3, 5, 5, 6, 7])
SIZE = (7, 7)
LAYOUTS = {1: [(7,)], 2: [(5, 2), (0, 7)], 3: [(4, 1, 2), (4, 0, 3)], 4: [(5, 2), (7, 0)]}


def coo(indices, values, **options):
    return torch.sparse_coo_tensor(indices, values, SIZE, **options)


FUNCTIONS = {
    "coo": lambda i, v, x: coo(i, v) @ x,
    "coo, coalesced": lambda i, v, x: coo(i, v, is_coalesced=True).values() * 2,
    "coo, not coalesced": lambda i, v, x: coo(i % 3, v).coalesce().values(),
    "coo without a size": lambda i, v, x: torch.sparse_coo_tensor(i, v) @ x,
    "csr": lambda i, v, x: torch.sparse_csr_tensor(POINTERS, i[1], v, SIZE) @ x,
    "csr without a size": lambda i, v, x: torch.sparse_csr_tensor(POINTERS, i[1], v.detach()) @ x,
    "csc": lambda i, v, x: torch.sparse_csc_tensor(POINTERS, i[1], v, SIZE) @ x,
    "compressed": lambda i, v, x: torch.sparse_compressed_tensor(POINTERS, i[1], v, SIZE, layout=torch.sparse_csr) @ x,
    "a product of two": lambda i, v, x: [*_parts_of((coo(i, v) @ coo(i.flip(0), v * 2)).coalesce())],
    "columns": lambda i, v, x: coo(i, v.detach()).index_select(1, i[0]).coalesce().values(),
    "transposed": lambda i, v, x: coo(i, v).t() @ x + torch.sparse.mm(coo(i, v.cos()), x),
}


def _parts_of(matrix):
    return matrix.indices(), matrix.values()


def check(rank, num_ranks):
    mesh = init_device_mesh("cpu", (2, 2) if num_ranks == 4 else (num_ranks,))
    x = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    values = torch.linspace(-1, 1, 7, dtype=torch.float64).requires_grad_()
    for sizes in LAYOUTS[num_ranks]:

        def spec(dim, *shape, sizes=sizes):
            places = [Shard(dim), *[Shard(1) if len(shape) > 1 and dim == 0 else Replicate()] * (mesh.ndim - 1)]
            return ShardSpec.even(mesh, places, shape, {0: sizes})

        for name, function in FUNCTIONS.items():
            try:
                assert_like_one_process(function, [INDICES, values, x], [spec(1, 2, 7), spec(0, 7), spec(0, 7, 3)])
            except Exception as error:
                raise AssertionError(f"{name} at {sizes}") from error


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.filterwarnings("ignore")
def test_like_one_process(num_ranks):
    run_ranks(check, num_ranks)


def check_edges(rank, num_ranks):
    """Edges that were joined with self-loops on each rank come in the order of one process, or not at all."""
    from torch_geometric.utils import add_self_loops

    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    index = _parts(mesh, (6, 5), rank).edge_index
    looped, whole = add_self_loops(index)[0], add_self_loops(index.full_tensor())[0]
    numbers = torch.arange(whole.shape[1])
    for edges, weight in ((looped, looped[0] * numbers), (whole, whole[0] * numbers)):
        matrix = torch.sparse_coo_tensor(edges, weight, (NUM_NODES, NUM_NODES))
        found = matrix._indices(), matrix._values()
        for mine, theirs in zip(found, (whole, whole[0] * numbers), strict=True):
            _close(mine, theirs, "edges")
    unknown = ShardTensor(looped.local, looped.spec.with_edge_parts(None))
    for function in (
        lambda: torch.sparse_coo_tensor(unknown, torch.ones(whole.shape[1]), (NUM_NODES, NUM_NODES)),
        unknown.tolist,
        unknown.numpy,
    ):
        with pytest.raises(UnsupportedShardOp, match="their order is not that of one process"):
            function()


def test_edges():
    run_ranks(check_edges, 2)


def check_sample(rank, num_ranks):
    """The matrix is a plain tensor: the same on each rank."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    spec = ShardSpec.even(mesh, [Shard(0)], (7,), {0: (5, 2)})
    matrix = coo(INDICES, shard_of(torch.arange(7.0), spec))
    assert type(matrix) is torch.Tensor
    assert matrix.layout is torch.sparse_coo
    assert torch.equal(matrix.to_dense(), coo(INDICES, torch.arange(7.0)).to_dense())


def test_it_is_plain():
    run_ranks(check_sample, 2)
