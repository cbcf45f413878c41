"""Scores of forecasts, and plain means and sums of fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from scidata.core.keywords import checked_keywords
from scidata.core.types import FloatArray
from scidata.data.metrics.layout import Layout
from scidata.data.metrics.metric import Count, Metric
from scidata.data.metrics.weighting import WeightsByDim
from scidata.errors import ConfigError, check_known

#: A tensor, or fields by name, such as a sample.
Fields: TypeAlias = Tensor | Mapping[str, Any]
Index: TypeAlias = int | Sequence[int] | None


class Mean(Metric):
    """The mean of a field over its rows and over samples. Parameters are those of :class:`Metric`.

    Examples
    --------
    >>> mean = scidata.metrics.Mean(by="level", dims=("level", "latitude"), weights={"latitude": [1, 2, 1]})
    >>> mean.update(torch.tensor([[0.0, 1.0, 0.0], [4.0, 4.0, 4.0]]), index=0)
    >>> mean.compute()
    tensor([0.5000, 4.0000], dtype=torch.float64)
    """

    def pointwise(self, *values: Tensor) -> Tensor:
        """Return the field."""
        return values[0]

    @checked_keywords
    def update(self, values: Fields, *, index: Index = None, weights: WeightsByDim | None = None) -> None:
        """Add a sample or a batch of them. No communication. See :meth:`PairMetric.update`.

        Parameters
        ----------
        values : Tensor or Mapping[str, Tensor]
            A tensor, or fields by name.
        index : int or list[int] or None, optional
            The sample's number; a list of them for a batch.
        weights : Mapping[str, array_like] or None, optional
            By dim, of this sample.

        Examples
        --------
        >>> mean.update(torch.ones(2, 3), index=1)
        """
        self._update([values], ["the tensor"], index, weights)


class Sum(Mean):
    """The weighted sum of a field over its rows and over samples. Parameters are those of :class:`Metric`.

    Examples
    --------
    >>> total = scidata.metrics.Sum(dims=("cell",), weights={"cell": [0.5, 1.5]})
    >>> total.update(torch.tensor([2.0, 4.0]), index=0)
    >>> total.update(torch.tensor([1.0, 1.0]), index=1)
    >>> total.compute()
    tensor(9., dtype=torch.float64)
    """

    def of_sample(self, sums: Sequence[FloatArray], weight: FloatArray) -> FloatArray:
        """Return the sum."""
        return sums[0]

    def _mean(self, total: FloatArray, count: Count) -> FloatArray:
        return total


class PairMetric(Metric):
    """Base of metrics of predictions and targets. Parameters are those of :class:`Metric`.

    Examples
    --------
    >>> class Excess(scidata.metrics.PairMetric):
    ...     def pointwise(self, *values):
    ...         return (values[0] > values[1]).double()
    >>> excess = Excess()
    >>> excess.update(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([2.0, 2.0, 2.0, 2.0]), index=0)
    >>> excess.compute()
    tensor(0.5000, dtype=torch.float64)
    """

    @checked_keywords
    def update(
        self, prediction: Fields, target: Fields, *, index: Index = None, weights: WeightsByDim | None = None
    ) -> None:
        """Add a sample, or a batch; each rank of the domain passes its part. No communication.

        Parameters
        ----------
        prediction, target : Tensor or Mapping[str, Tensor]
            Tensors of one shape, or fields by name, of which those of ``prediction`` count. ShardTensors may be split
            unevenly, with empty parts, over any dims; a plain tensor beside them is the whole. On any device.
        index : int or list[int] or None, optional
            The sample's number; a list of them for a batch, along dim 0. One that was there before is left out.
            Default that of a :class:`scidata.Sample` among the two; without any, each call counts as another sample.
        weights : Mapping[str, array_like] or None, optional
            As those of the metric, of this sample: ``{"cell": sample["area"]}``.

        Raises
        ------
        ConfigError, ShardLayoutError, UnknownNameError
            Tensors, weights, names or indices that do not fit.

        Examples
        --------
        >>> excess.update(torch.tensor([1.0]), torch.tensor([2.0]), index=1)
        """
        self._update([prediction, target], ["prediction", "target"], index, weights)


class MSE(PairMetric):
    """Mean squared error. Parameters are those of :class:`Metric`.

    Examples
    --------
    >>> mse = scidata.metrics.MSE()
    >>> mse.update(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]), index=0)
    >>> mse.compute()
    tensor(2., dtype=torch.float64)
    """

    def pointwise(self, *values: Tensor) -> Tensor:
        """Return squared errors."""
        error = values[0] - values[1]
        return error * error


class RMSE(MSE):
    """Root mean squared error: the root of the mean over samples of their weighted mean squared errors.

    As WeatherBench 2 defines it (Rasp et al., JAMES 2024): the root comes last. Parameters are those of
    :class:`Metric`.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> ds = scidata.open_dataset("era5.zarr", fields=["u", "v"], steps=(0, 1))
    >>> weights = {"latitude": scidata.metrics.latitude_weights(ds)}
    >>> rmse = scidata.metrics.RMSE(weights=weights, by="level", dims=("level", "latitude", "longitude"))
    >>> for sample in scidata.DataLoader(ds, batch_size=None):  # persistence: the first step as forecast of the second
    ...     first, second = ({name: x[step] for name, x in sample.items()} for step in (0, 1))
    ...     rmse.update(first, second, index=sample.index)
    >>> rmse.compute()
    Sample(index=None, u (level: 3) float64, v (level: 3) float64)
    """

    def of_mean(self, mean: FloatArray) -> FloatArray:
        """Return the root."""
        return np.sqrt(mean)


class MAE(PairMetric):
    """Mean absolute error. Parameters are those of :class:`Metric`.

    Examples
    --------
    >>> mae = scidata.metrics.MAE(skipna=True)
    >>> mae.update(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([1.0, 1.0, 1.0]), index=0)
    >>> mae.compute()
    tensor(1., dtype=torch.float64)
    """

    def pointwise(self, *values: Tensor) -> Tensor:
        """Return absolute errors."""
        return (values[0] - values[1]).abs()


class Bias(PairMetric):
    """Mean error, prediction minus target. Parameters are those of :class:`Metric`.

    Examples
    --------
    >>> bias = scidata.metrics.Bias()
    >>> bias.update(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]), index=0)
    >>> bias.compute()
    tensor(1., dtype=torch.float64)
    """

    def pointwise(self, *values: Tensor) -> Tensor:
        """Return errors."""
        return values[0] - values[1]


class ACC(PairMetric):
    """Anomaly correlation coefficient: the mean over samples of the correlation of anomalies against a climatology.

    As WeatherBench 2 defines it: weighted, and without taking out the anomalies' own means. Other parameters are those
    of :class:`Metric`.

    Parameters
    ----------
    climatology : Tensor or Mapping[str, Tensor] or None, optional
        What anomalies are differences from: a tensor, or fields by name, of a sample's shape. Or give each sample's
        own to :meth:`update`.
    **options : Any
        Of :class:`Metric`.

    Examples
    --------
    >>> acc = scidata.metrics.ACC(climatology=torch.tensor([1.0, 1.0]))
    >>> acc.update(torch.tensor([2.0, 1.0]), torch.tensor([2.0, 2.0]), index=0)
    >>> acc.compute()
    tensor(0.7071, dtype=torch.float64)
    """

    def __init__(self, *, climatology: Fields | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.climatology = climatology

    def pointwise(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the anomalies' product and squares."""
        forecast, truth = values[0] - values[2], values[1] - values[2]
        return forecast * truth, forecast * forecast, truth * truth

    def of_sample(self, sums: Sequence[FloatArray], weight: FloatArray) -> FloatArray:
        """Return the correlation; the weights' sum cancels."""
        return sums[0] / (np.sqrt(sums[1]) * np.sqrt(sums[2]))

    @checked_keywords
    def update(
        self,
        prediction: Fields,
        target: Fields,
        climatology: Fields | None = None,
        *,
        index: Index = None,
        weights: WeightsByDim | None = None,
    ) -> None:
        """Add a sample or a batch. No communication. See :meth:`PairMetric.update`.

        Parameters
        ----------
        prediction, target, index, weights : as there
            As there.
        climatology : Tensor or Mapping[str, Tensor] or None, optional
            Of this sample: that of its day, say. Of a batch, one for all or one for each. Default the metric's own.

        Raises
        ------
        ConfigError
            No climatology, or one that does not fit.

        Examples
        --------
        >>> acc.update(torch.tensor([3.0, 1.0]), torch.tensor([3.0, 2.0]), index=1)
        """
        climatology = self.climatology if climatology is None else climatology
        if climatology is None:
            raise ConfigError("ACC needs a climatology: ACC(climatology=...), or update(..., climatology=...)")
        self._update([prediction, target, climatology], ["prediction", "target", "climatology"], index, weights)


class CRPS(PairMetric):
    """Continuous ranked probability score of an ensemble: E|X - y| - E|X - X'| / 2, the mean over rows and samples.

    Gneiting and Raftery, "Strictly proper scoring rules" (JASA 2007). Other parameters are those of :class:`Metric`;
    ``dims`` are those of the target.

    Parameters
    ----------
    member_dim : int, default 0
        The prediction's dim of members, in a sample: not counting a batch's. Where ranks share the members,
        ``update`` exchanges them for rows of another dim: collective over their axis.
    fair : bool, default True
        Take E|X - X'| over pairs of different members, ``M (M - 1)`` of them, which does not depend on the ensemble's
        size (Ferro, "Fair scores for ensemble forecasts", 2014; as WeatherBench 2). False: over all ``M²``, which
        is the score of the members' own distribution.
    **options : Any
        Of :class:`Metric`.

    Raises
    ------
    ConfigError
        A fair score of one member.

    Examples
    --------
    >>> crps = scidata.metrics.CRPS()
    >>> crps.update(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]), index=0)  # members 0 and 2, truth 1
    >>> crps.compute()
    tensor(0., dtype=torch.float64)
    """

    def __init__(self, *, member_dim: int = 0, fair: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self._extra_dims = (member_dim, None)
        self.fair = fair

    def _described(self) -> str:
        return f"{super()._described()[:-1]}, fair={self.fair})"

    def pointwise(self, *values: Tensor) -> Tensor:
        """Return the score of each element; the members lie along dim 0."""
        members, target = values
        num = len(members)
        if num < 2 and self.fair:
            raise ConfigError(
                f"a fair CRPS needs two members or more, not {num}; fair=False is the absolute error of one"
            )
        ranked = members.sort(0).values
        skill, spread = torch.zeros_like(target), torch.zeros_like(target)
        for i in range(num):  # in this order, independent of the number of elements
            skill += (members[i] - target).abs_()
            spread += ranked[i] * (2 * i - num + 1)  # the sum of all pairs' differences
        score = skill / num - spread / (num * (num - 1) if self.fair else num * num)
        return score.masked_fill(members.isnan().any(0) | target.isnan(), torch.nan)


_ROWS = 16


class Spectrum(Mean):
    """Power by wavenumber along a dim, such as longitude; the mean over the other dims and over samples.

    Power of wavenumber k is ``|F_k|²`` of the discrete Fourier transform F over the number of points, of k and -k
    together, so that the sum over all k is the mean square of the field. (WeatherBench 2 counts the highest wavenumber
    of an even number of points twice, and has each circle's length as a factor.) Other parameters are those of
    :class:`Metric`.

    Parameters
    ----------
    dim : str, default "longitude"
        Along which; not sharded. The result has a dim ``wavenumber`` last: ``(..., num_points // 2 + 1)``.
    **options : Any
        Of :class:`Metric`.

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
        check_known("the field has no dim", [self.dim], layout.dims)
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
    flat = rows.reshape(-1, num_points)
    num_rows = len(flat)
    # a fixed number of rows: the last bits of a transform may depend on it
    padded = torch.cat([flat, flat.new_zeros((-num_rows % _ROWS, num_points))]).view(-1, _ROWS, num_points)
    blocks = [torch.fft.rfft(block.clone(), norm="forward") for block in padded]
    transformed = (
        torch.cat(blocks)[:num_rows] if blocks else flat.new_zeros((0, num_points // 2 + 1)).to(torch.complex128)
    )
    real, imag = transformed.real, transformed.imag
    power = real * real + imag * imag
    power[:, 1 : (num_points + 1) // 2] *= 2
    return power.reshape(*rows.shape[:-1], num_points // 2 + 1)
