"""Whole models, unmodified, on shards: loss, all gradients and buffers against one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import scidata
from scidata.shard import ShardSpec
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of
from tests.dist._layers import COLUMNS, GRIDS, LAYOUTS, ROWS, grid_mesh, mesh_of, random

IMAGE = (2, 3, ROWS, COLUMNS)


class Double(nn.Sequential):
    def __init__(self, inputs, outputs, norm):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1), norm(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), norm(outputs), nn.SiLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """Two levels down and up; odd extents, so that the way up is resized to the way down."""

    def __init__(self, norm=nn.BatchNorm2d, transposed=False):
        super().__init__()
        self.first, self.second, self.bottom = Double(3, 4, norm), Double(4, 8, norm), Double(8, 8, norm)
        self.up = nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1) if transposed else None
        self.third, self.fourth, self.head = Double(16, 4, norm), Double(8, 4, norm), nn.Conv2d(4, 3, 1)

    def forward(self, x):
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        bottom = self.bottom(F.avg_pool2d(second, 2, ceil_mode=True))
        if self.up is None:
            up = F.interpolate(bottom, size=second.shape[2:], mode="bilinear", align_corners=False)
        else:
            up = self.up(bottom, output_size=second.shape[2:])
        third = self.third(torch.cat([up, second], 1))
        return self.head(self.fourth(torch.cat([F.interpolate(third, size=first.shape[2:]), first], 1)))


class PhysicsAttention(nn.Module):
    """Points to slices, attention of slices, back to points (Transolver; Wu et al., 2024)."""

    def __init__(self, width=8, heads=2, slices=5):
        super().__init__()
        self.heads = heads
        self.inputs, self.slices = nn.Linear(width, 2 * width), nn.Linear(width // heads, slices)
        self.qkv, self.out = nn.Linear(width // heads, 3 * width // heads), nn.Linear(width, width)
        self.temperature = nn.Parameter(torch.full((1, heads, 1, 1), 0.5))

    def forward(self, x):
        batch, points, width = x.shape
        both = self.inputs(x).reshape(batch, points, 2, self.heads, width // self.heads)
        values, keys = both.permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(self.slices(keys) / self.temperature, -1)
        tokens = torch.einsum("bhnc,bhng->bhgc", values, weights) / (weights.sum(2).unsqueeze(-1) + 1e-5)
        tokens = F.scaled_dot_product_attention(*self.qkv(tokens).chunk(3, -1))
        back = torch.einsum("bhgc,bhng->bhnc", tokens, weights)
        return self.out(back.permute(0, 2, 1, 3).reshape(batch, points, width))


class Transolver(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.head = nn.Linear(3, 8), nn.Linear(8, 3)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(4))
        self.mixers = nn.ModuleList(PhysicsAttention() for _ in range(2))
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x):
        x = self.lift(x)
        for i, (mixer, mlp) in enumerate(zip(self.mixers, self.mlps, strict=True)):
            x = x + mixer(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(x)


class SpectralConv(nn.Module):
    """Mixes channels in the lowest frequencies along the last dim."""

    def __init__(self, channels=4, modes=3):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, dtype=torch.complex128) / channels)

    def forward(self, x):
        low = torch.fft.rfft(x, dim=-1)[..., : self.modes]
        return torch.fft.irfft(torch.einsum("bihm,iom->bohm", low, self.weight), n=x.shape[-1], dim=-1)


class FNO(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1)
        self.spectral = nn.ModuleList(SpectralConv() for _ in range(2))
        self.local = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, x):
        x = self.lift(x)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        return self.head(x)


def made(build):
    torch.manual_seed(5)
    return build().double()


def check_model(build, shape, layouts):
    """A step in training, then one in eval with the buffers of the first."""
    for spec in layouts:
        ours, theirs = made(build), made(build)
        for step in range(2):
            for model in (ours, theirs):
                model.train(step == 0).zero_grad()
            image, target = random(*shape, seed=step), random(*shape, seed=10 + step, grad=False)
            part = shard_of(image, spec).requires_grad_()
            expected = F.mse_loss(theirs(image), target)
            loss = F.mse_loss(ours(part), shard_of(target, spec))
            assert type(loss) is torch.Tensor
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
            expected.backward()
            loss.backward()
            found = [part.grad.full_tensor(), *(p.grad for p in ours.parameters())]
            wanted = [image.grad, *(p.grad for p in theirs.parameters())]
            for mine, other in zip(found, wanted, strict=True):
                # a bias before a normalisation has a gradient of rounding errors
                assert (mine - other).norm() <= 1e-12 * max(other.norm(), 1), (
                    spec,
                    (mine - other).norm() / other.norm(),
                )
            for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13)


def layouts_of(num_ranks, shape, dim):
    mesh = mesh_of(num_ranks)
    return [ShardSpec.even(mesh, [Shard(dim)], shape, {0: sizes}) for sizes in LAYOUTS[num_ranks]]


def check_images(rank, num_ranks):
    check_model(UNet, IMAGE, layouts_of(num_ranks, IMAGE, 2)[1:] or layouts_of(num_ranks, IMAGE, 2))
    chosen = layouts_of(num_ranks, IMAGE, 2)[-1:]
    check_model(lambda: UNet(lambda n: nn.GroupNorm(2, n), transposed=True), IMAGE, chosen)
    check_model(lambda: UNet(nn.InstanceNorm2d), IMAGE, chosen)
    check_model(FNO, IMAGE, chosen)
    if num_ranks == 4:
        mesh = grid_mesh()
        grids = [
            ShardSpec.even(mesh, [Shard(2), Shard(3)], IMAGE, {"h": rows, "w": columns}) for rows, columns in GRIDS
        ]
        check_model(UNet, IMAGE, grids)


RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])


@pytest.mark.slow_for("4")
@RANKS
def test_images(num_ranks):
    run_ranks(check_images, num_ranks)


def check_points(rank, num_ranks):
    check_model(Transolver, (2, ROWS, 3), layouts_of(num_ranks, (2, ROWS, 3), 1))
    build = lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)  # noqa: E731
    for way in ("gather", "ring", "heads"):
        with scidata.attention(way):
            check_model(build, (2, ROWS, 4), layouts_of(num_ranks, (2, ROWS, 4), 1)[-1:])


@RANKS
def test_points_and_sequences(num_ranks):
    run_ranks(check_points, num_ranks)


def check_fft(rank, num_ranks):
    """Of one dim and of several, sharded or not, of other extents before and after, and the parts of complex numbers."""
    shape = (2, ROWS, ROWS, COLUMNS)
    full = random(*shape)
    for spec in layouts_of(num_ranks, shape, 2)[:3]:
        stft = lambda x: torch.view_as_real(torch.stft(x[0, 0], 4, window=torch.hann_window(4), return_complex=True))  # noqa: E731
        assert_like_one_process(stft, [full], [spec])
    for dim in (1, 2):
        for spec in layouts_of(num_ranks, shape, dim)[:3]:
            for name, transform in {
                "rfft2": lambda x: torch.view_as_real(torch.fft.rfft2(x)),
                "one": lambda x: torch.fft.fft(x, dim=2).abs(),
                "all": lambda x: torch.fft.fftn(x).real,
                "two": lambda x: torch.fft.ifft2(input=x, dim=(0, -2)).imag,
                "shift": lambda x: [torch.fft.fftshift(x), torch.fft.ifftshift(x, dim=(2, 3))],
                "cropped": lambda x: torch.fft.rfftn(x, s=(4, 4)).angle(),
                "padded": lambda x: torch.fft.fft(x, 2 * ROWS, dim=2, norm="ortho").conj().abs(),
                "back": lambda x: torch.fft.irfft2(torch.fft.rfft2(x, norm="forward") * 2, s=x.shape[-2:]),
                "other dims": lambda x: torch.fft.fft2(x, dim=(1, -1)).abs(),
                "longer": lambda x: torch.fft.irfft(torch.fft.rfft(x, 7), n=COLUMNS),
                "complex": lambda x: torch.complex(x, x * 2).abs() + torch.polar(x.abs(), x).real,
            }.items():
                try:
                    assert_like_one_process(transform, [full.detach().requires_grad_()], [spec], rtol=1e-10, atol=1e-11)
                except Exception as error:
                    raise AssertionError(f"{name} at {spec}") from error


@RANKS
def test_fourier_transforms(num_ranks):
    run_ranks(check_fft, num_ranks, timeout=120)
