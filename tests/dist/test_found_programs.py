"""Small programs that random ones were cut down to: each of them was wrong once, or ranks differed."""

from collections import defaultdict

import pytest

from tests.programs.__main__ import outcomes
from tests.programs.program import Given, Program


def given(name, shape, *splits, grad=False):
    """A tensor that is sharded: a dim and sizes for each mesh axis."""
    dims, sizes = zip(*splits, strict=True)
    return Given(name, shape, grad, dims, sizes)


GRADIENT = "(v0,) = torch.autograd.grad({}, [x0], retain_graph=True)"
#: Mesh, tensors, lines, and what is refused of them.
FOUND = {
    "what an einsum keeps of parts of no row and of one is written to": (
        (3,),
        [given("x0", (6, 5, 4), (2, (0, 1, 3)), grad=True), Given("x1", (6, 5, 4), False, None)],
        ["v0 = torch.einsum('abc,abc->ba', x0, x1)", "x1.mul_(2)", "total(v0).backward()"],
        0,
    ),
    "what a softmax was taken of is written to": (
        (3,),
        [given("x0", (4,), (0, (1, 1, 2)), grad=True)],
        ["v0 = x0.flip(0)", "v1 = v0.log_softmax(-1)", "v0.fill_(v0.sum())", "total(v1.diff(dim=0)).backward()"],
        0,
    ),
    "a detached view of a leaf takes on a graph and is written to": (
        (3,),
        [given("x0", (1, 5, 4), (2, (1, 3, 0)), grad=True)],
        [
            "v0 = x0.view(-1)",
            "v1 = v0.detach()",
            "v1[:] += v0.clone()",
            "v1.masked_fill_(v1 > 0.1, -0.3)",
            "total(v1).backward()",
        ],
        0,
    ),
    "rows named by ids on shards beside plain numbers, padded, and seen as numbers of another width": (
        (3,),
        [given("x0", (6, 3, 4), (0, (4, 0, 2)), grad=True)],
        [
            "v0 = (x0.detach()[:, 0, 0].abs() * 3).long().clamp(max=5)",
            "v1 = x0[v0[:, None], torch.tensor([2, 0])]",
            "v2 = x0.detach()[:, torch.tensor([[2], [0]]), v0 % 4]",
            "v3 = torch.nn.functional.pad(v1[:, 0, :3], (1, 0)).detach().view(torch.int16)",
            "total(v1).backward()",
        ],
        0,
    ),
    "what was shuffled of parts of no row or one is written to": (
        (3,),
        [given("x0", (2, 4, 1, 1), (1, (0, 4, 0)), grad=True), given("x1", (1, 3, 2), (1, (1, 2, 0)))],
        [
            "v0 = torch.channel_shuffle(x0, 1)",
            "v1 = torch.nn.functional.pixel_unshuffle(x1[None], 1)",
            "v2 = torch.nn.functional.pixel_shuffle(x1[:, :1, None, 1:].expand(-1, 4, -1, -1), 2)",
            "x1 += 1",
            "total(v0 * 2).backward()",
            "with torch.no_grad(): x0.mul_(3)",
        ],
        0,
    ),
    "a gradient of joined rows, of which a rank has none, is differentiated": (
        (3,),
        [given("x0", (2,), (0, (1, 1, 0)), grad=True), given("x1", (4,), (0, (1, 3, 0)), grad=True)],
        [
            "v0 = torch.cat([x0, x0], 0)",
            "v1 = x1.scatter_add(0, torch.tensor([0, 2]), x0)",
            "total(v0 * v0).backward(create_graph=True)",
            "(v2,) = torch.autograd.grad(total(v1 * v1 * v1), [x1], create_graph=True)",
            "total(v2 * v2).backward(create_graph=True)",
        ],
        0,
    ),
    "rows and columns are named by ids on shards, of which some have one row": (
        (3,),
        [given("x0", (6, 3, 4), (0, (4, 0, 2)), grad=True)],
        [
            "v0 = (x0.detach()[:, 0, 0].abs() * 3).long().clamp(max=2)",
            "v1 = x0[v0[:1], v0[1:2], None]",
            "v2 = x0[v0[4:5], v0] + x0[v0, v0[:1]].sin()",
            "total(v1 * v2).backward()",
        ],
        0,
    ),
    "a median is written to": (
        (2, 2),
        [given("x0", (2, 1, 3), (2, (1, 2)), (1, (1, 0)), grad=True)],
        ["v0 = x0.clone().median(1).values", "v0[:-1] = v0[1:2, 0:3].clone()", "total(v0).backward()"],
        0,
    ),
    "a moved view of what takes on a graph": (
        (3,),
        [given("x0", (1, 4, 5), (1, (1, 3, 0))), Given("x1", (5, 1, 1), True, None)],
        ["v0 = x0.reshape(10, 2)", "x0.permute(2, 0, 1).copy_(x1.sin())"],
        0,
    ),
    "a moved view is first looked at without gradients": (
        (3,),
        [given("x0", (1, 4, 5), (1, (1, 3, 0))), Given("x1", (5, 1, 1), True, None)],
        [
            "v0 = x0.reshape(10, 2)",
            "x0.permute(2, 0, 1).copy_(x1.sin())",
            "with torch.no_grad(): v1 = v0.sum()",
            "total(v0).backward()",
        ],
        0,
    ),
    "lines of which there are none are sorted": (
        (3,),
        [given("x0", (4, 0), (0, (1, 3, 0)), grad=True)],
        [
            "v0 = x0.sort(0).values",
            "v1 = x0.topk(2, 0).values",
            "v2 = x0.argsort(0)",
            "total(v0 * v2 + v1.sum()).backward()",
        ],
        0,
    ),
    "a mask of no rows takes nothing": (
        (3,),
        [given("x0", (7, 2), (0, (1, 0, 6)), grad=True)],
        ["v0 = x0[7:]", "v1 = v0[torch.zeros(0, 2, dtype=torch.bool)]", "total(v1).backward()"],
        0,
    ),
    "heads attend to no rows": (
        (2,),
        [given("x0", (0, 2, 4), (0, (0, 0)), grad=True)],
        [
            "torch.manual_seed(0)",
            "v0 = torch.nn.MultiheadAttention(4, 2).double()(x0, x0, x0)[0]",
            "total(v0).backward()",
        ],
        0,
    ),
    "of what there is nothing, differences are that itself": (
        (2,),
        [given("x0", (3, 4), (0, (2, 1))), Given("x1", (2, 0), True, None)],
        ["v0 = x0[:, :0].diff(dim=1)", "x0[1:, 3:3] = x1", "total(v0 * 2).backward()"],
        0,
    ),
    "a part without elements is seen as pairs of real numbers": (
        (3,),
        [given("x0", (1, 3), (0, (1, 0, 0)), grad=True)],
        [
            "v0 = torch.view_as_real(torch.fft.rfft(x0, dim=0))",
            "v1 = torch.einsum('ab,ubv->b', x0, v0)",
            "total(v1[2:] * 2).backward()",
        ],
        0,
    ),
    "a product is written to through a view, then itself": (
        (3,),
        [given("x0", (1, 1, 6), (0, (0, 1, 0))), Given("x1", (), True, None)],
        ["v0 = x0.prod()", "v0.reshape(1, 1).sub_(x1.sin())", "F.relu(v0, inplace=True)", "total(v0).backward()"],
        0,
    ),
    "the gradient of what may be a tensor itself": (
        (3,),
        [given("x0", (4, 2, 4), (0, (0, 0, 4)), grad=True)],
        [
            "(v0,) = torch.autograd.grad(x0.exp().sum(), [x0], create_graph=True)",
            "v1 = v0.log_softmax(1)",
            "v2 = v1.contiguous()",
            "(v3,) = torch.autograd.grad(total(v1.exp()), [v2], allow_unused=True)",
        ],
        1,
    ),
    "what an einsum keeps of parts of one row and of more is written to": (
        (2, 2),
        [given("x0", (3, 6, 4), (2, (3, 1)), (0, (3, 0))), Given("x1", (6, 3, 2, 1), True, None)],
        ["v0 = x0.clone()", "v1 = torch.einsum('abcd,buv->vdau', x1, v0)", "v0.fill_(1)", "total(v1).backward()"],
        0,
    ),
    "one row of what is expanded is changed": (
        (2,),
        [given("x0", (1,), (0, (0, 1)))],
        ["v0 = x0.squeeze(0).expand(3)", "v0[...][None, -3] *= ramp(1)"],
        0,
    ),
    "rows of what is expanded are assigned": (
        (3,),
        [given("x0", (1, 1, 5), (1, (1, 0, 0)))],
        ["v0 = x0.expand(3, -1, -1)", "v0.swapaxes(0, 0)[:, -1, :] = -0.3"],
        1,
    ),
    "strides for which several orders would do": (
        (3,),
        [given("x0", (2, 1), (1, (1, 0, 0)))],
        ["v0 = x0.unsqueeze(1).expand(-1, 2, -1).swapaxes(-1, 0)", "v1 = v0 - x0.detach()", "v2 = torch.rand_like(v1)"],
        0,
    ),
    "random numbers like a product of gradients": (
        (3,),
        [given("x0", (4, 5, 1), (0, (0, 2, 2)), grad=True)],
        [
            "(v0,) = torch.autograd.grad(total(x0 * x0), [x0], create_graph=True)",
            "v1 = torch.einsum('abc,auv->vub', F.pad(x0, (2, 2)), v0)",
            "v2 = torch.rand_like(v1)",
        ],
        1,
    ),
    "the gradient of a gradient that may be contiguous": (
        (2,),
        [given("x0", (6, 5), (0, (1, 5)), grad=True)],
        [
            "(v0,) = torch.autograd.grad(total(x0 * x0), [x0], create_graph=True)",
            "v0.retain_grad()",
            "v1 = v0.contiguous()",
            "total(v1).backward()",
        ],
        1,
    ),
    "backward leaves a graph where there are no rows": (
        (3,),
        [given("x0", (2, 1), (0, (2, 0, 0)), grad=True)],
        ["v0 = x0 * 1", "v1 = v0.view(-1)", "v0.mul_(2)", "v1.exp().sum().backward(create_graph=True)"],
        0,
    ),
    "backward leaves a graph": (
        (3,),
        [given("x0", (2, 2), (0, (2, 0, 0)), grad=True), given("x1", (2, 2), (1, (0, 1, 1)), grad=True)],
        [
            "v0 = x0 * 1",
            "v0.retain_grad()",
            "total((v0 * x1).exp()).backward(create_graph=True)",
            "total(v0.grad * x0.grad).backward()",
        ],
        0,
    ),
    "a graph where there are no rows, behind a view that was written to": (
        (3,),
        [given("x0", (2, 1), (0, (2, 0, 0)), grad=True)],
        [
            "v0 = x0 * 1",
            "v1 = v0.view(-1)",
            "v0.mul_(2)",
            "(v2,) = torch.autograd.grad(v1.exp().sum(), [v0], create_graph=True)",
        ],
        0,
    ),
    "a write to a copy of windows that overlap": (
        (2, 2),
        [given("x1", (5, 1, 4), (1, (0, 1)), (2, (0, 4)))],
        [
            "v1 = x1.unfold(0, 2, 1).squeeze(1)",
            "v1[:4, 3, 1:] = 0.5",
            "v2 = x1.unfold(0, 2, 1)[1].squeeze(0)",
            "v2.zero_()",
        ],
        1,
    ),
    "a gradient that is kept of a quantile whose view was written to": (
        (2, 2),
        [given("x0", (1, 1, 4), (2, (0, 4)), (0, (1, 0)), grad=True)],
        [
            "v0, v1 = x0.chunk(2, -1)",
            "v2 = v1.quantile(0.3, dim=0)",
            "v3 = v2.squeeze(0)",
            "v2.squeeze(0).lerp_(v3 * 0.5, 0.25)",
            "v2.retain_grad()",
            "total(v3).backward(retain_graph=True)",
        ],
        0,
    ),
    "a write to repeated elements of what was computed from a gradient": (
        (2, 2),
        [given("x1", (4, 1, 3), (2, (2, 1)), (0, (4, 0)))],
        [
            "v1 = torch.autograd.functional.hvp(lambda t: total(t.cumsum(-1) * t), x1, torch.ones_like(x1))[1]",
            "v3 = torch.where(v1 > 0.5, v1, -0.5)",
            "v3.expand(-1, 3, -1).chunk(2, -1)[0].add_(1.0)",
        ],
        1,
    ),
    "a sort of a row that every rank has, differentiated": (
        (3,),
        [given("x1", (1, 6, 2), (1, (5, 1, 0)), grad=True)],
        ["v0 = x1 @ x1.mT", "v2 = v0[0::2, -2, ...]", "v5 = v2.sort(-1).values", "total(v5).backward()"],
        0,
    ),
    "resizing of no samples": (
        (3,),
        [given("x1", (1, 4, 4), (0, (0, 1, 0)), grad=True)],
        [
            "v0 = x1[1:, 1:, ::2]",
            "v1 = F.interpolate(v0, scale_factor=2.0, mode='linear', align_corners=True)",
            "total(v1).backward()",
        ],
        0,
    ),
    "windows of what was written to since": (
        (2, 2),
        [given("x0", (6, 5), (0, (1, 5)), (1, (5, 0)), grad=True)],
        ["v0 = x0.repeat(1, 1)", "v1 = v0.unfold(0, 4, 1)", "v0.detach().mul_(0.5)", "total(v1).backward()"],
        0,
    ),
    "a view of a row that every rank has, as it came": (
        (3,),
        [given("x0", (2, 4, 4), (1, (0, 1, 3)))],
        [
            "with torch.no_grad(): v0 = x0[:-1, :, None, 1:][:, 0, -1, :-1].clone()",
            "v1 = v0.movedim(-2, -1)",
            "v0.sub_(v0[0:1, 0:2].clone() * 2)",
            "v0 *= ramp(2).requires_grad_()",
        ],
        0,
    ),
    "the gradient of one element is written to": (
        (2, 2),
        [given("x0", (1, 1), (1, (1, 0)), (0, (1, 0)), grad=True)],
        [
            "(v0,) = torch.autograd.grad(x0.sum(), [x0], create_graph=True)",
            "v0.addcmul_(x0.sin(), v0.sin(), value=0.5)",
            "total(v0).backward()",
        ],
        0,
    ),
    "gradients of gradients where a slice of a leaf that was written to leaves no rows": (
        (3,),
        [given("x0", (2, 4, 3), (1, (2, 2, 0)), grad=True)],
        [
            "v0 = x0[-2, :-2, 1:]",
            "v1 = x0[0]",
            "with torch.no_grad(): x0.copy_(x0.sin())",
            "(v2,) = torch.autograd.grad(total(v0.softmax(0) * v1[:2, 1:]), [x0], create_graph=True)",
            "total(v2 * v2).backward()",
        ],
        0,
    ),
    "random numbers like an expanded row that was moved": (
        (2,),
        [given("x0", (4, 5, 2), (0, (0, 4)))],
        [
            "v0 = x0.unfold(0, 1, 1)[:1].movedim(-2, 0).unsqueeze(1).expand(-1, 2, -1, -1, -1)[:, :, 0]",
            "v1 = torch.empty_like(v0).uniform_(generator=seeded(5))",
        ],
        0,
    ),
    "a part of a gradient whose elements are one in memory": (
        (3,),
        [given("x0", (4, 1), (0, (2, 0, 2)), grad=True)],
        [GRADIENT.format("x0.sum()"), "F.dropout(v0[-4, :1, None], 0.4, inplace=True)", "v0[1:2] = 3.0"],
        2,
    ),
    "a gradient where a mask is true": (
        (2,),
        [given("x0", (4, 5), (1, (2, 3)), grad=True)],
        [GRADIENT.format("total(x0)"), "v0[v0 > 0] = 1.0", "v0.t().mul_(2)"],
        1,
    ),
    "a gradient that is written to as a whole": (
        (3,),
        [given("x0", (2, 6), (0, (2, 0, 0)), grad=True)],
        [GRADIENT.format("total(x0.sin())"), "v0.addcmul_(x0, v0[0:2].clone(), value=0.5)", "v0.mul_(x0.sum())"],
        0,
    ),
    "contiguous() of a gradient is the gradient": (
        (3,),
        [given("x0", (1, 5), (0, (1, 0, 0)), grad=True)],
        [GRADIENT.format("total(x0)"), "v1 = v0.contiguous()", "v1.fill_(3.0)"],
        1,
    ),
    "a row of what is expanded along the sharded dim": (
        (2,),
        [given("x0", (1, 4), (0, (1, 0)))],
        ["v0 = x0.expand(3, -1)[2]", "v0.fill_(2.0)"],
        1,
    ),
    "a column of what is expanded": (
        (2,),
        [given("x0", (1, 1), (1, (0, 1)), grad=True)],
        ["v0 = x0.expand(3, -1)[:, -1]", "v0.detach().narrow(-1, 2, 1).fill_(2.0)"],
        1,
    ),
    "random numbers for a row that was moved": (
        (2,),
        [given("x0", (1, 4, 5), (0, (0, 1)), grad=True)],
        [
            "v0 = x0.movedim(-1, -2).squeeze(0)",
            "v1 = F.dropout(v0, 0.4)",
            "v2 = torch.rand_like(v0)",
            "v3 = x0.mul(2).mT[0]",
            "v3.uniform_()",
        ],
        0,
    ),
    "a reshape that is no view of a row that was moved": (
        (3,),
        [given("x0", (3, 6, 5), (1, (5, 1, 0)))],
        ["v0 = x0.tensor_split(3, 1)[2].select(-2, -2)", "v1 = v0.reshape(15)", "v1.mul_(2.0)", "v2 = v0 + 1"],
        0,
    ),
    "gradients that are retained are row-major": (
        (2,),
        [given("x0", (4, 5, 4), (2, (1, 3)), grad=True), given("x1", (1, 1), (1, (1, 0)), grad=True)],
        [
            "v0 = x0[:-1, -1, -3]",
            "v1 = x1.expand(2, -1)",
            "v2 = torch.einsum('ab,uvw->buwv', x1, x0)",
            "[v.retain_grad() for v in (v0, v1, v2)]",
            "[total(v).backward() for v in (v0, v1, v2)]",
        ],
        0,
    ),
    "the gradient of one number that is put where a mask is true": (
        (2,),
        [given("x0", (4, 6, 3), (1, (6, 0))), Given("x1", (3,), True, None)],
        ["v0 = x0[x0 > 0]", "v0[v0 >= -0.4] = x1.mean()", "total(v0).backward()"],
        0,
    ),
    "plain values are added to copies that every rank has": (
        (3,),
        [given("x0", (2, 5), (0, (0, 2, 0)))],
        [
            "v0, v1 = x0.unbind(-2)",
            "v0.scatter_add_(0, (v0 > 0).long() * 4, v0.sin())",
            "v1[1:].index_add_(0, torch.tensor([0, 0]), ramp(2))",
        ],
        0,
    ),
    "a copy that was expanded is old": (
        (3,),
        [given("x0", (1, 2), (1, (0, 2, 0)))],
        [
            "v0 = x0.expand(3, -1).detach()[:3, :-1]",
            "v1 = v0.unsqueeze(0).expand(2, -1, -1).view(2, 3)",
            "v0[:, torch.tensor([0])] = v0[0:3, 0:1].clone()",
        ],
        0,
    ),
    "real numbers are written to after their spectrum of several dims": (
        (3,),
        [given("x0", (4, 4), (0, (3, 1, 0)), grad=True)],
        ["v0 = x0 * 2", "v1 = torch.fft.fftn(v0).imag", "v0[-1, 1:] = ramp()", "total(v1).backward()"],
        0,
    ),
    "values that are split are put into a view that is on all ranks": (
        (3,),
        [given("x0", (1, 5, 3), (2, (0, 1, 2))), given("x1", (1, 5, 3), (0, (1, 0, 0)))],
        ["v0 = x1 * 2", "v0.view(3, 5, 1)[...] = x0.tensor_split(3, -1)[0]"],
        0,
    ),
    "each row of an expanded tensor has a gradient of its own": (
        (2,),
        [given("x0", (1, 4), (0, (0, 1)), grad=True)],
        ["v0 = x0.expand(3, -1)", "v0.retain_grad()", "total(v0.gather(0, (v0 > 0).long() * 2)).backward()"],
        0,
    ),
    "rows of what has one row at the stride of another dim": (
        (2,),
        [given("x0", (2, 6, 1, 4), (3, (4, 0)))],
        ["v0 = x0.swapaxes(0, 2)[:, torch.tensor([2, 2])]"],
        0,
    ),
    "what a product keeps of parts of two rows and of none is written to": (
        (3,),
        [given("x0", (2, 5, 3), (0, (2, 0, 0))), Given("x1", (4, 3), True, None)],
        ["v0, v1 = x0.chunk(2, 1)", "v2 = v1 @ x1.mT", "v1[-2, ...] += 0.25", "total(v2).backward()"],
        0,
    ),
    "weights meet rows that a product copies, and that are written to": (
        (2,),
        [given("x0", (3, 3, 5), (0, (1, 2))), Given("x1", (4, 3), True, None)],
        ["v0 = x0.mT", "v1 = F.linear(v0, x1)", "v0.mul_(2)", "total(v1).backward()"],
        0,
    ),
    "pairs of complex numbers are written to by a view, and have gradients of any strides": (
        (3,),
        [given("x0", (6, 3), (0, (0, 5, 1)), grad=True)],
        [
            "v0 = torch.view_as_real(torch.fft.rfft(x0, dim=1))",
            "v0[0::2, 2:2, :-1] *= ramp(3, 1, 1)",
            "total(torch.fft.fftn(v0).imag).backward()",
        ],
        0,
    ),
    "a view is written to by rows, takes on a graph, and is written to as a whole": (
        (2,),
        [given("x0", (1, 4), (1, (4, 0))), given("x1", (4, 1), (0, (4, 0)), grad=True)],
        ["v0 = x0.mT", "v0[torch.tensor([3, 0, 1])] += x1[0:3]", "v0 *= x1", "total(v0).backward()"],
        0,
    ),
    "an expanded tensor of few ranks is made flat, and is old": (
        (3,),
        [given("x0", (1, 1, 6), (1, (0, 0, 1)), grad=True)],
        [
            "v0 = x0.tensor_split(3, -1)[2]",
            "v1 = v0.expand(3, -1, -1).flatten(1, 2)",
            "v0.detach().permute(0, 2, 1).mul_(ramp())",
            "total(v1).backward()",
        ],
        0,
    ),
    "a view of a sum over ranks is taken, whose gradient is retained, and the sum is written to": (
        (3,),
        [given("x0", (6, 4), (0, (0, 5, 1)), grad=True)],
        [
            "v0 = (x0 * 2).sum(0)",
            "v0.retain_grad()",
            "v1 = v0[1:2]",
            "F.relu(v0, inplace=True)",
            "total(v1).backward()",
        ],
        0,
    ),
    "what was resampled and pooled to the extents that it had is written to": (
        (3,),
        [given("x0", (2, 2, 3), (0, (1, 0, 1)), grad=True), given("x1", (2, 4, 4), (2, (2, 0, 2)))],
        [
            "v0 = F.interpolate(x0, [3], mode='linear')",
            "v1 = F.adaptive_max_pool1d(x1, [4])",
            "v2 = F.adaptive_avg_pool2d(x1, [4, 4])",
            "v3 = F.interpolate(x1[None], [4, 4], mode='area')",
            "v0.mul_(2)",
            "v1.add_(1)",
            "v2.sub_(3)",
            "v3.zero_()",
            "total(v0).backward()",
        ],
        0,
    ),
    "tensors of no elements are gated and marked among classes": (
        (3,),
        [given("x0", (6, 3, 4), (0, (0, 2, 4)), grad=True)],
        [
            "v0 = x0[6:, 2, 4:].reshape(0)",
            "v1 = F.glu(v0)",
            "v2 = F.one_hot((x0[:, :0] > 0).long(), 3)",
            "v3 = F.instance_norm(x0[:, :, :0])",
            "v4 = torch.trapezoid(x0[6:], dim=0)",
        ],
        0,
    ),
    "running extremes beside ranks without a row are differentiated twice": (
        (3,),
        [given("x0", (4, 2), (1, (2, 0, 0)), grad=True)],
        ["v0 = torch.cummin(x0, 1).values", "total(v0 * v0).backward(create_graph=True)", "v1 = x0.grad * 2"],
        0,
    ),
    "elements before a view of one process are taken by their places in memory": (
        (3,),
        [given("x0", (4, 2, 1), (2, (0, 1, 0)))],
        ["v0 = x0.select(0, 1).unbind(1)[0]", "v1 = v0.as_strided([1], [1], 1)"],
        1,
    ),
    "rows that were mapped along a later dim, and one-hot rows of a transposed tensor, lie as torch has them": (
        (3,),
        [given("x0", (4, 5, 2), (2, (0, 1, 1))), given("x1", (3, 4), (1, (2, 0, 2)))],
        [
            "v0 = torch.vmap(lambda t: t.softmax(0), 1, 1)(x0)",
            "v1 = F.one_hot((x1.mT > 0).long(), 3)",
            "v2 = torch.sparse.mm(ramp(2, 3).to_sparse_csr(), x1)",
            "v3 = torch.isin((x1.mT > 0).long(), torch.tensor([1]))",
        ],
        0,
    ),
    "a result of attention to keys of fewer dims is written to": (
        (3,),
        [given("x0", (1, 3, 6, 5), (2, (0, 4, 2)), grad=True), given("x1", (3, 6, 5), (1, (0, 4, 2)), grad=True)],
        [
            "v0 = F.scaled_dot_product_attention(x0, x1, x1, is_causal=True)",
            "v0.view(-1)[21] += ramp()",
            "total(v0).backward()",
        ],
        0,
    ),
    "groups of one number on a rank are normalised, where there are more in all": (
        (3,),
        [given("x0", (4, 3, 1), (0, (1, 3, 0)), grad=True)],
        ["v0 = F.group_norm(x0, 3)", "v1 = F.group_norm(x0[:1], 3)", "total(v0).backward()"],
        0,
    ),
    "a sparse tensor is made of a copy, and covariances have up to two dims": (
        (3,),
        [given("x0", (1, 3, 2), (0, (0, 1, 0)))],
        ["v0 = x0[0]", "v1 = v0.to_sparse() @ ramp(2, 3)", "v2 = torch.cov(v0)", "v3 = torch.cov(x0)"],
        0,
    ),
    "features of a table are split where the ids are": (
        (2, 2),
        [given("x0", (3, 4), (0, (1, 2)), (1, (0, 4)), grad=True), given("x1", (3, 4), (0, (1, 2)), (1, (1, 3)))],
        ["v0 = F.embedding((x0 > 0).long(), x0)", "v1 = F.embedding((x1 > 0).long(), x1)", "total(v0).backward()"],
        0,
    ),
    "ids are split where the features of a table are, whose rows are split, too": (
        (2, 2),
        [
            given("x0", (3, 6), (1, (4, 2)), (0, (0, 3)), grad=True),
            Given("x1", (1, 6), False, (0, None), ((1, 0), None)),
        ],
        ["v0 = F.embedding((x1 > 0).long(), x0)", "total(v0).backward()"],
        0,
    ),
    "products have as many dims as in torch": (
        (3,),
        [given("x0", (2, 4, 1), (1, (3, 1, 0)))],
        [
            "v0 = torch.addmm(ramp(4, 1), x0, ramp(1, 1))",
            "v1 = torch.linalg.multi_dot([x0, x0.mT, x0])",
            "v2 = torch.mm(x0, ramp(1, 2))",
        ],
        0,
    ),
    "ids between new dims, of a tensor that is not row-major, lie as kernels have it": (
        (3,),
        [given("x0", (2, 2), (0, (1, 1, 0)))],
        [
            "v0 = x0.mT.tanh()[None, torch.tensor([1, 0], dtype=torch.int64), :, None]",
            "v0.mT.reshape(4).sub_(ramp(4))",
        ],
        1,
    ),
    "a view's base was written to, on all ranks": (
        (3,),
        [given("x0", (4, 3, 2), (2, (0, 2, 0)), grad=True)],
        [
            "v0 = torch.fft.fft(x0.chunk(2, -3)[0], dim=-3).real",
            "v1 = F.group_norm(v0[None], 2)",
            "v0[:, :, :] += v0 * 0.5",
            "total(v1).backward(retain_graph=True)",
        ],
        1,
    ),
    "a retained gradient of what is written to, through a view of before": (
        (2, 2),
        [given("x0", (1, 3, 1), (0, (0, 1)), (1, (3, 0)), grad=True)],
        [
            "v0 = F.pixel_shuffle(x0[None].expand(-1, 4, -1, -1), 2)",
            "v0.retain_grad()",
            "v1 = v0.permute(2, 1, 3, 0)",
            "F.relu(v0, inplace=True)",
            "total(v1).backward(retain_graph=True)",
        ],
        0,
    ),
    "a retained gradient of a new tensor, of which a part here is a view": (
        (2, 2),
        [given("x0", (2, 4), (1, (0, 4)), (0, (2, 0)), grad=True)],
        [
            "v0 = torch.block_diag(x0 * 2, x0)",
            "v1 = v0.flatten(0, 1)",
            "v0.retain_grad()",
            "v0[:1, :] = ramp(1, 8)",
            "total(v1).backward(retain_graph=True)",
        ],
        0,
    ),
    "pairs of numbers that a write to another view of them has moved": (
        (2,),
        [given("x0", (5, 1), (1, (1, 0)), grad=True)],
        [
            "v0 = torch.view_as_real(torch.fft.rfft(x0, dim=1))",
            "with torch.no_grad(): v0.select(0, 1).copy_(0.0)",
            "total(v0.sum().exp()).backward(retain_graph=True)",
        ],
        0,
    ),
    "the gradient of a scan has a graph on ranks without elements": (
        (2,),
        [given("x0", (6, 4), (1, (0, 4)), grad=True)],
        [
            "(v0,) = torch.autograd.grad(total(x0.logcumsumexp(0)), [x0], create_graph=True)",
            "(v1,) = torch.autograd.grad(total(x0.cumprod(1)), [x0], create_graph=True)",
            "total(v0).backward(retain_graph=True)",
            "total(v1).backward(retain_graph=True)",
        ],
        0,
    ),
    "a call's result that is written to, where it is a view": (
        (3,),
        [given("x0", (3, 2), (0, (1, 1, 1)), grad=True)],
        [
            "v0 = torch.combinations(x0.flatten()[:4])",
            "v1 = F.conv1d(v0[None], ramp(2, 6, 2), None, [1], 'same', [1], 1)",
            "v1[...] += 0.0",
            "v0[v0 >= -0.4] = 0.0",
            "total(v1).backward(retain_graph=True)",
        ],
        1,
    ),
    "a write to a copy of what retains its gradient": (
        (2,),
        [given("x0", (2, 4), (1, (1, 3)), grad=True)],
        [
            "v0 = x0 * 2",
            "v1 = v0.flatten(0, 1)",
            "v0.retain_grad()",
            "v1.mul_(2.0)",
            "total(v1).backward(retain_graph=True)",
        ],
        1,
    ),
    "pairs of numbers that are transposed": (
        (2, 2),
        [given("x0", (4, 5, 6), (1, (4, 1)), (2, (6, 0)), grad=True)],
        [
            "v0 = torch.view_as_real(torch.fft.rfft(x0, dim=1)).transpose(-4, -1)",
            "v0.masked_fill_(v0 > 0.1, -1.0)",
            "total(torch.gradient(v0, dim=2)[0]).backward(retain_graph=True)",
        ],
        0,
    ),
    "a gradient that is retained for a view alone": (
        (3,),
        [given("x0", (4, 2, 5), (2, (2, 1, 2)), grad=True)],
        [
            "v0 = torch.stack([x0, ramp(4, 2, 5)], 2)",
            "v1, v2 = v0.chunk(2, 1)",
            "v1.retain_grad()",
            "total(v2).backward(retain_graph=True)",
        ],
        0,
    ),
    "a write to a result of attention, which some ranks' kernels keep": (
        (3,),
        [given("x1", (3, 3), (1, (0, 2, 1)), grad=True)],
        [
            "v0 = x1[1:, None, None, ::2]",
            "v1 = F.scaled_dot_product_attention(v0, v0, v0, is_causal=False)",
            "v1.add_(v0)",
            "total(v0).backward(retain_graph=True)",
            "total(v1).backward(retain_graph=True)",
        ],
        0,
    ),
    "ids that are out of range, of values without elements": (
        (2,),
        [given("x0", (3, 1), (0, (1, 2))), given("x1", (3, 4), (0, (2, 1)))],
        [
            "v0 = x0[1:, 1:].clone()",
            "v0.index_add_(0, (x1[:1, 0] > -9.0).long() * -1, ramp(1, 0))",
            "v1 = ramp(2, 0).index_add_(0, (x1[:, 0] > -9.0).long() * -1, x1[:, :0])",
            "v2 = x1[:, :0].scatter_add(0, torch.full((2, 0), 7), ramp(2, 0))",
        ],
        0,
    ),
    "rows beside one another of a map over a tensor that is whole": (
        (3,),
        [given("x0", (4, 3), (1, (0, 0, 3)))],
        ["v0 = x0.unbind(-1)[2].reshape(2, 2)", "v1 = torch.func.vmap(lambda t: t.softmax(-1), 1, 1)(v0)"],
        0,
    ),
    "transforms of dims of the same stride": (
        (3,),
        [given("x0", (4, 4, 6), (2, (1, 3, 2)))],
        ["v0 = torch.fft.rfft(x0.unfold(2, 2, 1), dim=0)", "v1 = torch.fft.ifft(x0.unfold(2, 2, 1), dim=0)"],
        0,
    ),
    "pairs of numbers without elements on one rank, a transposed part of which is written to": (
        (2, 2),
        [given("x0", (2, 3, 4), (0, (2, 0)), (1, (2, 1)), grad=True)],
        [
            "v0 = torch.view_as_real(torch.fft.rfft(x0, dim=-1))",
            "v0.mT[:0, 1:, :] *= ramp(2, 1, 3)",
            "total(torch.where(v0.chunk(2, 1)[1] > -1.0, v0.chunk(2, 1)[1], 2.0)).backward()",
        ],
        0,
    ),
    "a part of what is seen as pairs without elements, of a tensor with elements": (
        (2,),
        [given("x0", (3, 4), (0, (2, 1)), grad=True)],
        [
            "v0 = torch.view_as_real(torch.fft.rfft(x0, dim=-1))",
            "v0[:0].mul_(2.0)",
            "v0.mT[:0, 1:].mul_(2.0)",
            "total(v0).backward()",
        ],
        0,
    ),
    "gradients of attention's gradients on a rank without samples": (
        (2,),
        [given("x0", (2, 4, 2), (0, (2, 0)), grad=True)],
        [
            "v0 = x0.clamp(max=0.1)",
            "v1 = F.scaled_dot_product_attention(x0, v0, v0, x0 @ v0.mT > 0)",
            "(v2,) = torch.autograd.grad(v1.sum(), [v0], create_graph=True)",
            "total(v2).backward()",
        ],
        0,
    ),
    "a write to a part of an expanded gradient, as large as the gradient is": (
        (2,),
        [given("x0", (2,), (0, (1, 1)))],
        [
            "v0 = torch.func.grad(lambda t: (t * t).sum())(x0)",
            "v0.unsqueeze(0).expand(2, -1)[0:, 1::2] += 1.0",
            "v0 = torch.autograd.functional.jvp(lambda t: (t * t).sin(), x0, torch.ones_like(x0))[1]",
            "v0.unsqueeze(0).expand(2, -1)[0:, 1::2] += 1.0",
        ],
        2,
    ),
    "a checkpoint of a view whose memory was written to": (
        (2,),
        [given("x0", (4,), (0, (4, 0)), grad=True)],
        [
            "v0 = x0[-2]",
            "x0[::2, None].detach().view(2).normal_()",
            "v1 = checkpoint(lambda t: (t * t).sin() + t, v0, use_reentrant=False)",
            "total(v1).backward()",
        ],
        0,
    ),
}
MESHES = defaultdict(list)
for name, (mesh, *_) in FOUND.items():
    MESHES[mesh].append(name)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_right_or_refused(mesh):
    names = MESHES[mesh]
    programs = [Program(0, mesh, tuple(given), tuple(lines)) for _, given, lines, _ in map(FOUND.get, names)]
    found = [(o.kind, o.note, o.refused.total()) for _, o in outcomes(programs)]
    assert dict(zip(names, found, strict=True)) == {name: ("right", "", FOUND[name][3]) for name in names}
