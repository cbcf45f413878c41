"""Fourier layers that keep few modes: what one process computes, whatever is done to their spectra between."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import scidata
from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of
from tests._collectives import Collectives

SHAPE, CUBE, MODES = (2, 3, 23, 9), (1, 2, 11, 6, 8), 4
SIZES = {1: [(23,)], 2: [(12, 11), (0, 23)], 3: [(20, 0, 3), (8, 8, 7)]}


def normal(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype).requires_grad_()


def whole(x):
    return x.full_tensor() if isinstance(x, scidata.ShardTensor | DTensor) else x


def mixed(spectrum, weight):
    return torch.einsum("bixy,ioxy->boxy", spectrum, weight)


def corners(x, weight, out, m=MODES):
    out[:, :, :m, :m] = mixed(x[:, :, :m, :m], weight[0])
    out[:, :, -m:, :m] = mixed(x[:, :, -m:, :m], weight[1])
    return out


def by_zeros_like(x, weight):
    spectrum = torch.fft.rfft2(x)
    return torch.fft.irfft2(corners(spectrum, weight, torch.zeros_like(spectrum)), s=x.shape[-2:])


def by_plain_zeros(x, weight):
    """As the layers of the first FNO, and of PhysicsNeMo."""
    spectrum = torch.fft.rfft2(x)
    zeros = torch.zeros(*x.shape[:-1], x.shape[-1] // 2 + 1, dtype=torch.complex128)
    return torch.fft.irfft2(corners(spectrum, weight, zeros), s=(x.size(-2), x.size(-1)))


def by_new_zeros(x, weight):
    spectrum = torch.fft.rfft2(x)
    return torch.fft.irfft2(corners(spectrum, weight, spectrum.new_zeros(spectrum.shape)), s=x.shape[-2:])


def by_shifts(x, weight, like=True):
    """As neuraloperator's layers, finer, and with another norm."""
    spectrum = torch.fft.fftshift(torch.fft.rfftn(x, norm="ortho", dim=[-2, -1]), dim=[-2])
    middle = (slice(None), slice(None), slice(11 - MODES, 11 + MODES), slice(MODES))
    out = torch.zeros_like(spectrum) if like else torch.zeros(spectrum.shape, dtype=spectrum.dtype)
    out[middle] = mixed(spectrum[middle], torch.cat([*weight], 2))
    return torch.fft.irfftn(torch.fft.ifftshift(out, dim=[-2]), s=[30, 14], dim=[-2, -1], norm="ortho")


def by_complex(x, weight):
    spectrum = torch.fft.fft2(torch.complex(x, x.flip(3)))
    return torch.fft.ifft2(corners(spectrum, weight, torch.zeros_like(spectrum))).real


def in_place(x, weight):
    """Slices are views: writes to them, and to the spectrum after, show in both."""
    spectrum = torch.fft.rfft2(x)
    low, row = spectrum[:, :, :MODES, :MODES], spectrum[:, :, 2:5, :2]
    low *= weight[0][0, 0]
    spectrum[:, :, 3] = 0
    return torch.view_as_real(low.sum((2, 3))), torch.view_as_real(row), torch.fft.irfft2(spectrum, s=x.shape[-2:])


def used_otherwise(x, weight):
    """Other columns, all of it, single rows, and zeros that are read or written to otherwise."""
    spectrum = torch.fft.rfft2(x)
    found = [spectrum[..., :2], spectrum[:, :, ::3, 3:], spectrum[:, :, 5], spectrum[0, :, None, 2:4], spectrum * 2]
    zeros = torch.zeros_like(spectrum)
    zeros[:, :, 1:3, :2] = found[0][:, :, 1:3]
    zeros[:, :, 2:4, :2] = found[0][:, :, 5:7]
    zeros[:, :, 0] = 1
    other = torch.zeros_like(torch.fft.rfft2(x))
    other[:, 1:, :3, :3] = mixed(spectrum[:, :, :3, :3], weight[0][:, :, :3, :3])[:, 1:]
    return [*(torch.view_as_real(y) for y in found), torch.fft.irfft2(zeros), torch.fft.irfft2(other.clone())]


def first_without_graph(x, weight):
    spectrum = torch.fft.rfft2(x)
    with torch.no_grad():
        size = spectrum[:, :, :2, :2].abs().sum() + 0 * spectrum.abs().sum()
    return by_zeros_like(x, weight) + (spectrum[:, :, :2, :2].abs() / (1 + size)).sum()


def looked_at_in_between(x, weight):
    """Without gradients; what is made or looked at there has them later, what is shifted there has none."""
    spectrum, other = torch.fft.rfft2(x), torch.fft.rfft2(2 * x)
    with torch.inference_mode():
        spectrum.abs().sum(), other[:, :, :2, :2].abs().sum()
    with torch.no_grad():
        out, shifted = torch.zeros_like(spectrum), torch.fft.fftshift(torch.fft.rfft2(x), dim=2)
    assert not shifted.requires_grad
    out[:, :, :MODES, :MODES] = mixed(other[:, :, :MODES, :MODES], weight[0])
    return [torch.view_as_real(y) for y in (out * 1, spectrum * 2, other[:, :, :2, :2] * 1, shifted * 1)]


def no_modes(x, weight):
    spectrum = torch.fft.rfft2(x)
    out = torch.zeros_like(spectrum)
    out[:, :, :0, :0] = mixed(spectrum[:, :, :0, :0], weight[0][..., :0, :0])
    return torch.fft.irfft2(out)


def over_channels(x, weight):
    """Transforms several dims of parts that may be empty."""
    spectrum = torch.fft.rfftn(x, dim=(2, 1, 3))
    out = corners(spectrum, weight, torch.zeros_like(spectrum))
    return torch.fft.irfftn(out, dim=(2, 1, 3), s=(23, 3, 9))


CASES = {
    "zeros_like": by_zeros_like,
    "plain zeros": by_plain_zeros,
    "shifts": by_shifts,
    "shifts, plain zeros": lambda x, w: by_shifts(x, w, like=False),
    "complex": by_complex,
    "in place": in_place,
    "used otherwise": used_otherwise,
    "first without graph": first_without_graph,
    "looked at in between": looked_at_in_between,
    "no modes": no_modes,
    "over channels": over_channels,
    "checkpointed": lambda x, w: checkpoint(by_zeros_like, x, w, use_reentrant=False),
}


def in_space(x, weight):
    spectrum = torch.fft.rfftn(x, dim=(-3, -2, -1))
    out = torch.zeros_like(spectrum)
    for rows in (slice(3), slice(-3, None)):
        for lines in (slice(2), slice(-2, None)):
            where = (slice(None), slice(None), rows, lines, slice(3))
            out[where] = torch.einsum("bixyz,ioxyz->boxyz", spectrum[where], weight)
    return torch.fft.irfftn(out, s=x.shape[-3:], dim=(-3, -2, -1))


def check_layers(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    torch.manual_seed(0)
    x, weight = normal(*SHAPE), normal(2, 3, 3, MODES, MODES, dtype=torch.complex128)
    for sizes in SIZES[num_ranks]:
        for name, function in CASES.items():
            try:
                spec = ShardSpec.even(mesh, [Shard(2)], SHAPE, {0: sizes})
                assert_like_one_process(function, [x, weight], [spec, None], rtol=1e-10, atol=1e-11)
            except Exception as error:
                raise AssertionError(f"{name} at {sizes}") from error
        with torch.inference_mode():
            alone = in_place(x.clone(), weight)
            for got, want in zip(in_place(shard_of(x.clone(), spec), weight), alone, strict=True):
                torch.testing.assert_close(whole(got), want, rtol=1e-10, atol=1e-11)
        # as users train: float32, here of fields that lie far from zero, whose lowest mode is large
        single = [x.detach().float() + 300, weight.detach().to(torch.complex64)]
        for function in (by_zeros_like, by_new_zeros, by_shifts):
            given = [value.clone().requires_grad_() for value in single]
            assert_like_one_process(function, given, [spec, None], rtol=1e-5, atol=2e-3)
    for dim in (1, 3):
        spec = ShardSpec.even(mesh, [Shard(dim)], SHAPE)
        assert_like_one_process(by_zeros_like, [x, weight], [spec, None], rtol=1e-10, atol=1e-11)
    cube, weight = normal(*CUBE), normal(2, 2, 3, 2, 3, dtype=torch.complex128)
    for dim in (2, 3):
        spec = ShardSpec.even(mesh, [Shard(dim)], CUBE)
        assert_like_one_process(in_space, [cube, weight], [spec, None], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_layers_that_keep_few_modes(num_ranks):
    run_ranks(check_layers, num_ranks, timeout=120)


def check_two_axes(rank, num_ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))
    torch.manual_seed(1)
    x, weight = normal(*SHAPE), normal(2, 3, 3, MODES, MODES, dtype=torch.complex128)
    for placements in ([Shard(2), Shard(3)], [Shard(2), Replicate()], [Shard(0), Shard(2)], [Shard(2), Shard(1)]):
        spec = ShardSpec.even(mesh, placements, SHAPE)
        assert_like_one_process(by_zeros_like, [x, weight], [spec, None], rtol=1e-10, atol=1e-11)
    cube, weight = normal(*CUBE), normal(2, 2, 3, 2, 3, dtype=torch.complex128)
    for placements in ([Shard(2), Shard(3)], [Shard(3), Shard(2)]):
        spec = ShardSpec.even(mesh, placements, CUBE)
        assert_like_one_process(in_space, [cube, weight], [spec, None], rtol=1e-10, atol=1e-11)


def test_two_axes():
    run_ranks(check_two_axes, 4, timeout=120)


class SpectralConv2d(nn.Module):
    """Its zeros are plain, as in PhysicsNeMo."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(2, 3, 3, MODES, MODES, 2, dtype=torch.float64))

    def forward(self, x):
        if x is None:
            raise ValueError("nothing")
        return self.function(x, torch.view_as_complex(self.weight))


def check_parallelized(rank, num_ranks, strategy):
    mesh = scidata.init_mesh(domain=2)
    part = ShardSpec.even(mesh["domain"], [Shard(2)], SHAPE)
    for function in (by_plain_zeros, by_new_zeros, lambda x, w: by_shifts(x, w, like=False)):
        torch.manual_seed(0)
        alone = nn.Sequential(nn.Conv2d(3, 3, 1), SpectralConv2d(function), nn.Tanh(), SpectralConv2d(function))
        x = normal(*SHAPE)
        dist.broadcast(x.detach(), 0)
        model = scidata.parallelize(copy.deepcopy(alone.double()), mesh, strategy=strategy)
        with pytest.raises(ValueError, match="nothing"):
            model[1](None)
        model(shard_of(x, part)).square().mean().backward()  # the buckets' order
        model.zero_grad()
        y = model(shard_of(x, part))
        assert isinstance(y, scidata.ShardTensor)  # a plain one would be computed by each rank, and whole
        y.square().mean().backward()
        wanted = alone(x)
        wanted.square().mean().backward()
        torch.testing.assert_close(y.full_tensor(), wanted, rtol=1e-11, atol=1e-11)
        for got, want in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(got.grad), want.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_layers_with_plain_zeros_of_a_parallelized_model(strategy):
    run_ranks(check_parallelized, 4 if strategy == "fsdp" else 2, strategy)


def check_questions(rank, num_ranks):
    """What is asked on one rank alone sends nothing."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    x = shard_of(torch.randn(SHAPE), ShardSpec.even(mesh, [Shard(2)], SHAPE)).requires_grad_()
    spectrum = torch.fft.rfft2(x)
    zeros = torch.zeros_like(spectrum, dtype=spectrum.dtype, device=spectrum.device)
    with Collectives() as seen:
        if rank == 0:
            for each in (spectrum, zeros):
                text = f"{each} {each!r}"
                assert "computed when it is used" in text
                assert (each.shape, each.dtype, each.device) == ((2, 3, 23, 5), torch.complex64, x.device)
                assert (each.ndim, each.size(1), each.numel(), len(each)) == (4, 3, 690, 2)
                assert each.is_complex()
                assert torch.full_like(each, 2j).to_local()[0, 0, 0, 0] == 2j
                assert torch.equal(each.new_zeros(2), torch.zeros(2, dtype=each.dtype))
                assert each.requires_grad == (each is spectrum)
    assert seen.names == []
    dist.barrier()
    before = seen.num_bytes
    with Collectives() as seen:
        spectrum[:, :, :2, :2].abs().sum().backward()
    assert 0 < seen.num_bytes - before < 3000
    assert x.grad.abs().sum() > 0


def test_questions_send_nothing():
    run_ranks(check_questions, 2)


def check_late_gradients(rank, num_ranks):
    """What was used in part has no gradient of its own: asked for later, it would be that of other uses alone."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    x = shard_of(torch.randn(SHAPE), ShardSpec.even(mesh, [Shard(2)], SHAPE)).requires_grad_()
    spectrum, zeros = torch.fft.rfft2(x), torch.zeros_like(torch.fft.rfft2(x))
    zeros[:, :, :2, :2] = spectrum[:, :, :2, :2]
    loss = torch.fft.irfft2(zeros).square().sum()
    for used in (spectrum, zeros):
        with pytest.raises(UnsupportedShardOp, match="before all of it was computed"):
            used.retain_grad()
        with pytest.raises(UnsupportedShardOp, match="before all of it was computed"):
            used.register_hook(print)
        with pytest.raises(UnsupportedShardOp, match="before all of it was computed"):
            torch.autograd.grad(loss, [used])
    whole = torch.fft.rfft2(x).clone()
    (grad,) = torch.autograd.grad(whole[:, :, :2, :2].abs().sum() + whole.real.sum(), [whole])
    assert grad.shape == whole.shape


def test_gradients_asked_for_late():
    run_ranks(check_late_gradients, 2)
