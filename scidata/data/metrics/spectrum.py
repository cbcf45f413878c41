"""Power spectra along a dim that is whole on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scidata.data.metrics.layout import Layout
from scidata.data.metrics.scores import Mean
from scidata.errors import ConfigError, UnknownNameError, near_matches

_ROWS = 16


class Spectrum(Mean):
    """Power by wavenumber along a dim, such as longitude; the mean over the other dims and over samples.

    Power of wavenumber k is ``|F_k|²`` of the discrete Fourier transform F over the number of points, of k and -k
    together, so that the sum over all k is the mean square of the field. (WeatherBench 2 counts the highest wavenumber
    of an even number of points twice, and has each circle's length as a factor.) Other parameters are those of
    :class:`Metric`.

    Parameters
    ----------
    dim
        Along which; not sharded. The result has a dim ``wavenumber`` last: ``(..., num_points // 2 + 1)``.

    Examples
    --------
    >>> spectrum = scidata.metrics.Spectrum("longitude", dims=("latitude", "longitude"))
    >>> angle = torch.arange(8, dtype=torch.float64) * (2 * torch.pi / 8)
    >>> spectrum.update(torch.stack([1 + torch.cos(2 * angle)] * 3), index=0)
    >>> spectrum.compute().round(decimals=6)
    tensor([1.0000, 0.0000, 0.5000, 0.0000, 0.0000], dtype=torch.float64)
    """

    _made_dims = ("wavenumber",)

    def __init__(self, dim: str = "longitude", **options: Any) -> None:
        super().__init__(**options)
        self.dim = dim
        if dim in self.by:
            raise ConfigError(f"by={dim!r} is the dim that the spectrum is along; its wavenumbers are kept in any case")

    def _described(self) -> str:
        return f"{super()._described()[:-1]}, dim={self.dim!r})"

    def _quantities(self, values: Sequence[Tensor], layout: Layout) -> tuple[Sequence[Tensor], Layout]:
        if self.dim not in layout.dims:
            raise UnknownNameError(f"the field has no dim {self.dim!r}{near_matches(self.dim, layout.dims)}")
        dim = layout.dims.index(self.dim)
        num_points = layout.global_shape[dim]
        if layout.split[dim]:
            others = [name for name in layout.dims if name != self.dim]
            shard = f"shard={{{others[-1]!r}: ...}}" if others else "another shard="
            raise ConfigError(
                f"a spectrum along {self.dim!r}, which is sharded: open the data set with {shard}, "
                f"or redistribute() the field so that another dim ({', '.join(others)}) is"
            )
        power = _power(values[0].movedim(dim, -1), num_points)
        rest = layout.without(dim)
        made = replace(
            rest,
            dims=(*rest.dims, "wavenumber"),
            global_shape=(*rest.global_shape, power.shape[-1]),
            local_shape=(*rest.local_shape, power.shape[-1]),
            offsets=(*rest.offsets, 0),
            split=(*rest.split, False),
        )
        return [power], made


def _power(rows: Tensor, num_points: int) -> Tensor:
    """Return the power of each wavenumber of the rows."""
    flat = rows.reshape(-1, num_points)
    num_rows = len(flat)
    # always as many rows at once: a transform's last bits may depend on how many it is given
    padded = torch.cat([flat, flat.new_zeros((-num_rows % _ROWS, num_points))]).view(-1, _ROWS, num_points)
    blocks = [torch.fft.rfft(block.clone(), norm="forward") for block in padded]
    transformed = (
        torch.cat(blocks)[:num_rows] if blocks else flat.new_zeros((0, num_points // 2 + 1)).to(torch.complex128)
    )
    real, imag = transformed.real, transformed.imag
    power = real * real + imag * imag
    power[:, 1 : (num_points + 1) // 2] *= 2
    return power.reshape(*rows.shape[:-1], num_points // 2 + 1)
