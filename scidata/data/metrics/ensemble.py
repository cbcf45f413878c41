"""Scores of ensembles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scidata.data.metrics.scores import PairMetric
from scidata.errors import ConfigError


class CRPS(PairMetric):
    """Continuous ranked probability score of an ensemble: E|X - y| - E|X - X'| / 2, the mean over rows and samples.

    Gneiting and Raftery, "Strictly proper scoring rules" (JASA 2007). Other parameters are those of :class:`Metric`;
    ``dims`` are those of the target.

    Parameters
    ----------
    member_dim
        The prediction's dim of members, in a sample: not counting a batch's. Not sharded.
    fair
        Take E|X - X'| over pairs of different members, ``M (M - 1)`` of them, which does not depend on the ensemble's
        size (Ferro, "Fair scores for ensemble forecasts", 2014; as WeatherBench 2). False: over all ``M²``, which
        is the score of the members' own distribution.

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
        """Return the score of each element, of members along dim 0."""
        members, target = values
        num = len(members)
        if num < 2 and self.fair:
            raise ConfigError(
                f"a fair CRPS needs two members or more, not {num}; fair=False is the absolute error of one"
            )
        ranked = members.sort(0).values
        skill, spread = torch.zeros_like(target), torch.zeros_like(target)
        for i in range(num):  # in this order, not in one that depends on how many elements there are
            skill += (members[i] - target).abs_()
            spread += ranked[i] * (2 * i - num + 1)  # the sum of all pairs' differences
        score = skill / num - spread / (num * (num - 1) if self.fair else num * num)
        return score.masked_fill(members.isnan().any(0) | target.isnan(), torch.nan)
