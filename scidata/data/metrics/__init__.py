"""Metrics over any number of ranks, equal to those of one process bit for bit, each sample counted once.

Examples
--------
>>> rmse = scidata.metrics.RMSE(dims=("latitude",), weights={"latitude": [1, 2, 1]})
>>> rmse.update(torch.tensor([0.0, 2.0, 4.0]), torch.tensor([0.0, 0.0, 0.0]), index=7)
>>> rmse.compute()
tensor(2.4495, dtype=torch.float64)
"""

from scidata.data.metrics.metric import Metric
from scidata.data.metrics.scores import ACC, CRPS, MAE, MSE, RMSE, Bias, Mean, PairMetric, Spectrum, Sum
from scidata.data.metrics.weighting import latitude_weights, level_weights

__all__ = [
    "ACC",
    "CRPS",
    "MAE",
    "MSE",
    "RMSE",
    "Bias",
    "Mean",
    "Metric",
    "PairMetric",
    "Spectrum",
    "Sum",
    "latitude_weights",
    "level_weights",
]
