"""Training on a dp × domain mesh against one process on the full samples."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from scidata.device_mesh import axis_rank, axis_size, domain_mesh, init_mesh
from scidata.errors import ConfigError
from scidata.shard.parallel import parallelize
from scidata.shard.tensor import ShardTensor
from scidata.testing import run_ranks

SIZES = {1: (5,), 2: (4, 1), 3: (3, 0, 2)}  # rows of each domain rank


class Model(nn.Module):
    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.inner = nn.Linear(3, 4, dtype=torch.float64)
        self.outer = nn.Linear(4, 1, dtype=torch.float64)
        self.register_buffer("shift", torch.randn(4, generator=generator, dtype=torch.float64))
        self.register_buffer("steps", torch.tensor(seed))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x) + self.shift))


def sample(index):
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 + index), dtype=torch.float64)


def trains(rank, num_ranks, domain):
    mesh = init_mesh(domain=domain)
    dp, num_dp = axis_rank(mesh, "dp"), axis_size(mesh, "dp")
    model = parallelize(Model(seed=rank), mesh)  # other weights on each rank: those of rank 0 count
    reference = Model(seed=0)
    for name, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    sizes = SIZES[domain]
    for step in range(3):
        whole = sample(num_dp * step + dp)
        start = sum(sizes[: axis_rank(mesh, "domain")])
        local = whole[start : start + sizes[axis_rank(mesh, "domain")]]
        x = ShardTensor.from_local(local, domain_mesh(mesh, ("domain",)), (Shard(0),), sharding_shapes="infer")
        loss = (model(x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        losses = [(reference(sample(num_dp * step + d)) ** 2).mean() for d in range(num_dp)]
        torch.testing.assert_close(loss.detach(), losses[dp].detach(), rtol=1e-12, atol=1e-12)
        expected.zero_grad()
        (sum(losses) / num_dp).backward()
        for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-12, atol=1e-14, msg=name)
        optimizer.step()
        expected.step()


@pytest.mark.parametrize(("num_ranks", "domain"), [(1, 1), (2, 2), (2, 1), (3, 3), (3, 1), (4, 2)])
def test_gradients_are_those_of_one_process(num_ranks, domain):
    run_ranks(trains, num_ranks, domain)


def makes_weights_equal_on_two_axes(rank, num_ranks):
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, rank)
    wrapped = parallelize(model, init_mesh(domain=(2, 2), dp=1))
    assert wrapped is model
    assert model.weight.unique().tolist() == [0]


def test_two_domain_axes():
    run_ranks(makes_weights_equal_on_two_axes, 4)


def keeps_odd_tensors(rank, num_ranks):
    """Memory formats, empty, shared, complex, frozen."""
    model = nn.Module()
    model.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    model.tied = nn.Module()
    model.tied.weight = model.conv.weight
    model.register_buffer("empty", torch.empty(0))
    model.register_buffer("small", torch.tensor([rank], dtype=torch.int16))
    model.register_buffer("phase", torch.full((2,), complex(rank, 1)))
    model.requires_grad_(False)
    stride = model.conv.weight.stride()
    assert parallelize(model, init_mesh()) is model
    assert model.conv.weight.stride() == stride
    assert model.tied.weight is model.conv.weight
    assert model.small.item() == 0
    assert model.phase.tolist() == [1j, 1j]
    return model.conv.weight


def test_odd_tensors():
    weights = run_ranks(keeps_odd_tensors, 2)
    assert torch.equal(weights[0], weights[1])


class Scaled(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self, x):
        return (self.weight * x).sum()


def adds_short_floats(rank, num_ranks, dtype, large):
    model = parallelize(Scaled(dtype), init_mesh(domain=1))
    x = torch.ones(num_ranks, dtype=dtype)
    x[rank] = large  # whichever is added first, one of the elements loses both ones if sums are of 16 bits
    model(x).backward()
    assert model.weight.grad.dtype == dtype
    assert model.weight.grad.tolist() == [(large + 2) / 3] * 3


@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, 256.0), (torch.float16, 2056.0)])
def test_gradients_of_16_bits_are_added_in_wider_sums(dtype, large):
    run_ranks(adds_short_floats, 3, dtype, large)


def refuses(rank, num_ranks):
    mesh = init_mesh(domain=2)
    with pytest.raises(ConfigError, match=r"weight is float32 \(2, 2\).* on rank 0 and float32 \(2, 3\).* on rank 1"):
        parallelize(nn.Linear(2 + rank, 2), mesh)
    with pytest.raises(ConfigError, match=r"bias is .* on rank 0 and absent on rank 1"):
        parallelize(nn.Linear(2, 2, bias=rank == 0), mesh)
    with pytest.raises(ConfigError, match="weight' is on meta, but the mesh communicates on cpu"):
        parallelize(nn.Linear(2, 2, device="meta"), mesh)
    with pytest.raises(ConfigError, match="not initialised"):
        parallelize(nn.LazyLinear(2), mesh)
    with pytest.raises(ConfigError, match=r"must be 'ddp' or 'fsdp', not 'fspd'; did you mean 'fsdp'"):
        parallelize(nn.Linear(2, 2), mesh, strategy="fspd")
    with pytest.raises(ConfigError, match="are for strategy='fsdp'"):
        parallelize(nn.Linear(2, 2), mesh, units=(nn.Linear,))
    for strategy in ("ddp", "fsdp"):
        model = parallelize(nn.Linear(2, 2), mesh, strategy=strategy)
        with pytest.raises(ConfigError, match=r"call parallelize once|takes plain parameters"):
            parallelize(model, mesh)
    scalar = nn.Module()
    scalar.gain = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="cannot shard parameter 'gain', which has no dims"):
        parallelize(scalar, mesh, strategy="fsdp")
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    with pytest.raises(ConfigError, match="'0' cannot be a unit: it shares parameter 'weight'"):
        parallelize(tied, mesh, strategy="fsdp", units=(nn.Linear,))
    with pytest.raises(ConfigError, match=r"no module inside the model is one of \['Conv1d'\]"):
        parallelize(nn.Sequential(nn.Linear(2, 2)), mesh, strategy="fsdp", units=(nn.Conv1d,))
    without_dp = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    with pytest.raises(ConfigError, match="shards over the dp axis, and the mesh has none"):
        parallelize(nn.Linear(2, 2), without_dp, strategy="fsdp")


def test_refusals_are_alike_on_all_ranks():
    run_ranks(refuses, 2)


def test_without_a_mesh_the_model_is_as_it_was():
    model = nn.Linear(2, 2)
    assert parallelize(model, None) is model
