"""ShardTensors in files, copies and modules; hooks on them, and gradients that are given."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import scidata
from scidata.errors import ShardLayoutError, UnsupportedShardOp
from scidata.shard import ShardSpec, ShardTensor
from scidata.testing import run_ranks
from scidata.testing.oracle import shard_of

WHOLE = torch.arange(42.0, dtype=torch.float64).view(7, 6)


class Held(nn.Module):
    """A module that holds a part of the data as a parameter and as a buffer."""

    def __init__(self, x):
        super().__init__()
        self.weight, self.inner = nn.Parameter(x.detach()), nn.Linear(6, 6).double()
        self.tied = self.weight
        self.register_buffer("values", x.detach() * 2)


def part(domain, sizes):
    mesh = scidata.init_mesh(domain=domain)
    mesh = mesh["h", "w"] if isinstance(domain, tuple) else mesh["domain"]
    spec = ShardSpec.even(mesh, [Shard(0), Shard(1)][: mesh.ndim], WHOLE.shape, {0: sizes})
    return shard_of(WHOLE, spec).requires_grad_()


def bytes_of(x):
    file = io.BytesIO()
    torch.save(x, file)
    return file.getvalue()


def load(data):
    return torch.load(io.BytesIO(data))  # weights_only


def save(rank, num_ranks, domain, sizes):
    x = part(domain, sizes)
    twin = copy.copy(x)
    twin.detach().mul_(2)
    assert torch.equal(x.full_tensor(), WHOLE * 2)
    x.detach().div_(2)
    back = pickle.loads(pickle.dumps(x))
    (back * x).sum().backward()
    assert (back.spec, back.is_leaf) == (x.spec, True)
    assert torch.equal(back.grad.full_tensor(), WHOLE)
    turned = load(bytes_of(x.detach().mT))
    assert turned.stride() == (1, 6)
    assert torch.equal(turned.full_tensor(), WHOLE.T)

    model = Held(x)
    saved = bytes_of(model.state_dict())
    first, optimiser = model.weight, torch.optim.SGD(model.parameters(), 0.5)
    for dtype in (torch.float32, torch.bfloat16):
        (model.weight * model.tied).sum().backward()
        model.to(dtype)
        assert model.tied is model.weight is first is optimiser.param_groups[0]["params"][0]
        assert model.weight.grad.dtype == (model.weight + 1).dtype == dtype
        optimiser.step()
        optimiser.zero_grad()
        assert not model.tied.full_tensor().any()  # w - 2 w / 2
        model.load_state_dict(load(saved))
        assert {p.dtype for p in model.state_dict().values()} == {dtype}
        assert model.weight.is_floating_point()
        assert model.weight.element_size() == dtype.itemsize
        assert len(list(model.parameters())) == 3
    model.double()
    model.weight.detach().zero_()
    before = model.weight
    model.load_state_dict(load(saved))
    assert model.to("cpu").weight is before
    assert torch.equal(model.weight.full_tensor() * 2, model.values.full_tensor())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin.weight.full_tensor(), WHOLE)
        assert isinstance(twin.weight, nn.Parameter)
        assert twin.tied is twin.weight is not model.weight
    return bytes_of({"x": x, "twice": x.detach() * 2}), saved


def load_again(rank, num_ranks, domain, files, reason):
    scidata.init_mesh(domain=domain)
    if reason is None:
        found = load(files[rank])
        assert torch.equal((found["x"] * 2 - found["twice"]).full_tensor(), torch.zeros_like(WHOLE))
        assert found["x"].requires_grad
        return
    with pytest.raises(ShardLayoutError, match=reason):
        load(files[rank % len(files)] if "axis" in reason else files[1 - rank])


def test_parts_are_saved_and_loaded():
    files = [file for file, _ in run_ranks(save, 2, 2, (0, 7))]
    run_ranks(load_again, 2, 2, files, None)
    run_ranks(load_again, 2, 2, files, "loads the part of rank")
    run_ranks(load_again, 2, 1, files, None)  # the group of all ranks is the same, and the mesh comes along
    grid = [file for file, _ in run_ranks(save, 4, (2, 2), (4, 3))]
    run_ranks(load_again, 4, (2, 2), grid, None)
    run_ranks(load_again, 2, 2, grid[:2], "without its axis 0")


def test_parts_are_not_loaded_before_the_mesh_is_there():
    (file, _), *_ = run_ranks(save, 2, 2, (4, 3))
    with pytest.raises(ShardLayoutError, match="init_mesh"):
        load(file)


def check_hooks(rank, num_ranks):
    x, y = part(2, (0, 7)), part(2, (0, 7))
    seen = []
    handle = x.register_post_accumulate_grad_hook(seen.append)
    (x * y).sum().backward(inputs=[x])
    assert [each is x for each in seen] == [True]
    assert torch.equal(x.grad.full_tensor(), WHOLE)
    assert y.grad is None
    handle.remove()
    ones = torch.ones_like(WHOLE)
    (x * y).backward(ones, inputs=x)
    torch.autograd.backward([x * y, x.sum()], [shard_of(ones, x.spec), torch.tensor(3.0, dtype=torch.float64)])
    assert torch.equal(x.grad.full_tensor(), 3 * WHOLE + 3)
    assert len(seen) == 1
    for given in (ones, shard_of(ones, ShardSpec.even(x.device_mesh, [Shard(1)], x.shape, {0: (6, 0)}))):
        (found,) = torch.autograd.grad(x * y, [x], given)
        assert torch.equal(found.full_tensor(), WHOLE)
    for wrong in (None, ones[:3]):
        with pytest.raises(UnsupportedShardOp, match="needs its gradient"):
            torch.autograd.backward(x * y, wrong)
    step = {x: torch.optim.AdamW([x], amsgrad=True)}  # by maximum(out=)

    def update(each):
        step[each].step()
        step[each].zero_grad()

    x.register_post_accumulate_grad_hook(update)
    whole = WHOLE.clone().requires_grad_()
    theirs = torch.optim.AdamW([whole], amsgrad=True)
    x.grad = None
    for _ in range(3):
        (x * x).sum().backward()
        (whole * whole).sum().backward()
        theirs.step()
        theirs.zero_grad()
    assert x.grad is None
    torch.testing.assert_close(x.full_tensor(), whole, rtol=1e-12, atol=1e-12)
    assert isinstance(x, ShardTensor)


def test_hooks_and_gradients_that_are_given():
    run_ranks(check_hooks, 2)
