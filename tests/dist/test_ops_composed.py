"""Functions that others make up, triangles and diagonals, and whole matrices, against one process."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from scidata.shard import ShardSpec
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of

aten = torch.ops.aten
LAYOUTS = {1: [(5,)], 2: [(4, 1), (0, 5)], 3: [(3, 1, 1), (4, 0, 1)]}
PLACES = torch.tensor([0.0, 0.5, 2.0, 2.5, 4.0], dtype=torch.float64)
PLAIN = torch.linspace(-1, 1, 125, dtype=torch.float64).view(5, 5, 5)
EYE = torch.eye(5, dtype=torch.float64)


@torch.jit.script
def scripted(x, others: list[torch.Tensor]):
    for other in others:
        x = x * other + torch.view_as_real(torch.view_as_complex(x[..., :2].contiguous())).sum()
    return x


def set_by_data(x):
    """A parameter that is set by the first batch, as in a flow, and an activation of one number."""
    own = torch.nn.Parameter(torch.zeros(5, 5).to(x))
    own.data = x.detach().std(0)
    return own * x + F.prelu(x[0, 0, 0], x[0, 0, :1])


def definite(x):
    return x @ x.mT + 3 * EYE


def written(write):
    def function(x):
        y = x * 1
        write(y)
        return y

    return function


CASES = {
    "diagonals of sums": lambda x: [torch.einsum("iij->ij", x), torch.einsum("i...i", x), torch.einsum("iik,kki->i", x, x)],
    "masks of plain": lambda x: [PLAIN[x > 0], PLAIN[x[:, 0, 0] > 0], PLAIN.expand(2, 5, 5, 5)[:, x > 0]],
    "gradients in a batch": lambda x: torch.autograd.grad((x * x).sin(), x, torch.stack([x, x * 2]), is_grads_batched=True, create_graph=True),
    "data is set": set_by_data,
    "diff": lambda x: [torch.diff(x), x.diff(n=2, dim=0), x.diff(dim=1, prepend=x, append=x[:, :2]), x.diff(9, 2)],
    "diff of bools": lambda x: (x > 0).diff(dim=0),
    "gradient": lambda x: [*torch.gradient(x), *torch.gradient(x, spacing=0.5, dim=1, edge_order=2)],
    "gradient at places": lambda x: [*torch.gradient(x, spacing=(PLACES,) * 3, edge_order=2)],
    "two rows": lambda x: torch.gradient(x[:2], dim=0),
    "trapezoid": lambda x: [torch.trapezoid(x, dim=d) for d in range(3)] + [torch.trapz(x, PLACES), torch.trapezoid(x, x)],
    "cumulative": lambda x: [torch.cumulative_trapezoid(x, dx=2, dim=d) for d in range(3)],
    "stacks": lambda x: [torch.hstack([x, x]), torch.vstack([x, PLAIN]), torch.dstack([x[0], x[1]]), torch.row_stack([x[0, 0], x[1, 1]])],
    "columns": lambda x: [torch.column_stack([x[0, 0], x[1]]), torch.hstack([x[0, 0], x[0, 1]]), torch.vstack([x[0], x[0]])],
    "splits": lambda x: [*x.hsplit([1, 3]), *torch.vsplit(x, 5), *x.dsplit((2,)), *x[0, 0].hsplit(5)],
    "at least": lambda x: [*torch.atleast_1d(x[0, 0, 0], x), *torch.atleast_2d([x[0], x[0, 0]]), torch.atleast_3d(x[1])],
    "meshgrid": lambda x: [*torch.meshgrid(x[0, 0], x[0, :3, 0], indexing="ij"), *torch.meshgrid([x[0, 0], x[0, 1, :2]], indexing="xy")],
    "broadcast": lambda x: [*torch.broadcast_tensors(x, x[:, :1], PLAIN[0])],
    "blocks": lambda x: [torch.block_diag(x[0], x[0, 0], PLAIN[0]), torch.cartesian_prod(x[0, 0], x[1, :2, 0]), torch.combinations(x[0, 1])],
    "rot90": lambda x: [x.rot90(k, d) for k in range(-1, 4) for d in ((0, 1), (2, 0))],
    "iterated": lambda x: [*x, *reversed(x), torch.tensor(7.0 in x)],
    "scatters": lambda x: [torch.slice_scatter(x, x[:2] * 2, 0, 1, 5, 2), x.select_scatter(x[0], 1, -1), x.diagonal_scatter(x[0], 0, 1, 2)],
    "unravelled": lambda x: [*torch.unravel_index((x.detach() * 0).long() + 77, (5, 4, 6))],
    "summed to": lambda x: [x.sum_to_size(5, 1), x.sum_to_size((1, 5, 5)), x.sum_to_size(5, 5, 5)],
    "tensordot": lambda x: [torch.tensordot(x, x), torch.tensordot(x, PLAIN, ([0, 2], [1, 0])), torch.tensordot(x, x[:1], ([0], [0]))],
    "inner": lambda x: [x.inner(x[0]), torch.inner(x, PLAIN), x[0, 0].vdot(x[0, 1]), torch.linalg.vecdot(x, PLAIN, dim=1)],
    "kron": lambda x: [torch.kron(x[:, :2, :2], x[0, :2, :2]), x[0].kron(EYE), torch.kron(EYE[0], x[0, 0])],
    "chains": lambda x: [torch.linalg.multi_dot([x[0, 0], x[0], x[1]]), torch.chain_matmul(x[0], x[1], x[2])],
    "cross": lambda x: [torch.cross(x[:, :3], x[:, 2:], dim=1), torch.linalg.cross(x[..., 1:4], PLAIN[..., :3]), x[:3].cross(x[2:])],
    "dist": lambda x: [x.dist(PLAIN), torch.dist(x, x.flip(0), 1), x.renorm(2, 1, 0.5), torch.renorm(x, 1, -1, 99.0)],
    "vander": lambda x: [torch.vander(x.detach()[0, 0], 3), torch.vander(x.detach()[0, 0], increasing=True), torch.linalg.vander(x, N=3)],
    "cov": lambda x: [x[0].cov(), torch.cov(x[0, 0]), torch.cov(x[0], correction=0, fweights=torch.arange(5), aweights=PLACES), x[0].corrcoef()],
    "aminmax": lambda x: [*torch.aminmax(x), *x.aminmax(dim=1, keepdim=True)],
    "triangles": lambda x: [x.tril(), torch.triu(x, 1), x.tril(-2), written(lambda y: y.tril_(1))(x)],
    "in place": lambda x: [written(lambda y: y.cumsum_(0))(x), written(lambda y: y.renorm_(2, 0, 0.5))(x), written(lambda y: y[0].fill_diagonal_(2.0))(x)],
    "diagonals": lambda x: [x.diagonal(o, a, b) for a, b in ((0, 1), (1, 2), (2, 0)) for o in (-4, -1, 0, 3, 5)],
    "a diagonal is written to": written(lambda y: [y.diagonal(o, a, b).mul_(3) for o, a, b in ((1, 0, 2), (-1, 0, 1))]),
    "diag": lambda x: [x[0].diag(1), torch.diag(x[0, 0], -2), x[0].trace(), x[0, :2].diagflat(1), torch.linalg.diagonal(x, offset=1)],
    "embedded": lambda x: [torch.diag_embed(x, o, a, b) for o, a, b in ((0, -2, -1), (2, 0, 2), (-1, 1, 0))],
    "norms": lambda x: [torch.linalg.norm(x), torch.linalg.norm(x, 1, 0), torch.linalg.norm(x[0], "nuc"), torch.linalg.norm(x, 2, (0, 2), True)],
    "matrix norms": lambda x: [torch.linalg.matrix_norm(x, o, d) for o in ("fro", 1, -1, float("inf"), -2) for d in ((0, 1), (2, 1))],
    "matrices": lambda x: [torch.linalg.inv(definite(x)), torch.det(x), *torch.linalg.slogdet(x), torch.linalg.matrix_power(x, 3), x.matrix_exp()],
    "decomposed": lambda x: [torch.linalg.cholesky(definite(x)), *torch.linalg.qr(x), torch.linalg.svdvals(x), torch.linalg.eigvalsh(definite(x)), torch.linalg.pinv(x)],
    "solved": lambda x: [torch.linalg.solve(definite(x), PLAIN), torch.linalg.solve(definite(PLAIN), x), torch.linalg.solve(definite(x)[0], x[0, 0]), torch.linalg.solve_triangular(definite(x).tril(), x, upper=False)],
    "one matrix": lambda x: [torch.linalg.inv(definite(x[0])), x[1].logdet().nan_to_num(), torch.linalg.cond(definite(x))],
    "least squares": lambda x: [*torch.linalg.lstsq(x, PLAIN), *torch.linalg.lstsq(x[..., :2], x, driver="gels")],
    "operators": lambda x: [aten.slice.Tensor(x, 1, 1, -1, 2), aten.native_dropout_backward(x, x.detach() > 0, 2.0), aten._softmax_backward_data(x, x.softmax(1), 1, x.dtype)],
    "softmax of nothing": lambda x: aten._safe_softmax(torch.where(PLAIN[:, :1] > 0.2, float("-inf"), x), 2),
    "means and deviations": lambda x: [*torch.native_layer_norm(x, (5,), PLAIN[0, 0], PLAIN[0, 1], 1e-5)],
    "back from a pool": lambda x: aten.max_pool2d_with_indices_backward(PLAIN[:, :3, :3], x, [2, 2], [2, 2], [1, 1], [1, 1], False, F.max_pool2d(x.detach(), 2, 2, 1, return_indices=True)[1]),
    "antialiased": lambda x: [F.interpolate(x[:, None], s, mode=m, antialias=True) for s in ((2, 7), (5, 3)) for m in ("bilinear", "bicubic")],
    "padded to the longest": lambda x: [torch.nn.utils.rnn.pad_sequence([x, x[:2], PLAIN[:3]], first, 0.5, side) for first in (True, False) for side in ("left", "right")],
    "of lists": lambda x: [*torch._foreach_add([x, x[0]], [PLAIN, PLAIN[0]], alpha=2), *torch._foreach_norm([x, x[1]], 1), *torch._foreach_maximum([x], 0.3), *torch._foreach_pow([x, x], [2.0, 3.0]), *torch._foreach_max([x])],
    "of TorchScript": lambda x: [scripted(x, [PLAIN, x]), scripted(PLAIN, others=[x])],
    "lists are written to": written(lambda y: [torch._foreach_mul_([y, y[1]], [PLAIN, PLAIN[0]]), torch._foreach_addcdiv_([y[0], y[2]], [PLAIN[0], PLAIN[1]], [PLAIN[1] + 2, PLAIN[3] ** 2 + 1], [0.5, 2.0]), torch._foreach_lerp_([y], [PLAIN], 0.25)]),
    "pairs": lambda x: [torch.view_as_complex(x[..., :2].clone()), written(lambda y: torch.view_as_complex(y).mul_(1j))(x[..., :4].reshape(5, 5, 2, 2))],
    "spectrogram": lambda x: torch.stft(F.pad(x.flatten(1), (0, 7)), 8, 4, window=torch.hann_window(8, dtype=torch.float64), return_complex=True),
}  # fmt: skip


def check(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    x = torch.randn(5, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for i, (name, function) in enumerate(CASES.items()):
        for dim in range(3):
            spec = ShardSpec.even(
                mesh, [Shard(dim)], x.shape, {0: LAYOUTS[num_ranks][(i + dim) % len(LAYOUTS[num_ranks])]}
            )
            try:
                assert_like_one_process(function, [x], [spec], rtol=1e-10, atol=1e-10)
            except Exception as error:
                raise AssertionError(f"{name} at {spec}") from error
    spec = ShardSpec.even(mesh, [Shard(0)], x.shape)
    part = shard_of(x, spec)
    for wrong, error in [
        (lambda: torch.gradient(part, edge_order=3), "order 3"),
        (lambda: part.hsplit(2), "not divisible"),
        (lambda: torch.tensordot(part, PLAIN[:3]), "do not match"),
        (lambda: torch.linalg.cross(part, part), "must have length 3"),
        (lambda: part.diagonal(0, 1, 1), "are the same"),
        (lambda: torch.linalg.matrix_norm(part, 3), "no norm 3"),
    ]:
        with pytest.raises(RuntimeError, match=error):
            wrong()


def check_two_axes(rank, num_ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))
    x = torch.randn(5, 5, 5, dtype=torch.float64).requires_grad_()
    for dims in ((0, 1), (2, 0)):
        spec = ShardSpec.even(mesh, [Shard(d) for d in dims], x.shape, {0: (4, 1), 1: (0, 5)})
        for name in (
            "diagonals",
            "a diagonal is written to",
            "triangles",
            "in place",
            "matrices",
            "matrix norms",
            "padded to the longest",
            "of lists",
            "lists are written to",
            "diagonals of sums",
            "data is set",
        ):
            try:
                assert_like_one_process(CASES[name], [x], [spec], rtol=1e-10, atol=1e-10)
            except Exception as error:
                raise AssertionError(f"{name} at {spec}") from error


def test_two_axes():
    run_ranks(check_two_axes, 4)


@pytest.mark.slow_for("2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_like_one_process(num_ranks):
    run_ranks(check, num_ranks)
