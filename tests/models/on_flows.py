"""Normalising flows of normflows, nflows and zuko: the log density of rows of six numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tests.models.cases import Case, image

HIDDEN = {"hidden_features": [16, 16]}
ZUKO: dict[str, dict[str, Any]] = {
    "NICE": HIDDEN, "RealNVP": HIDDEN, "MAF": HIDDEN, "NSF": HIDDEN, "NCSF": HIDDEN, "SOSPF": HIDDEN, "BPF": HIDDEN, "GF": HIDDEN, "GMM": {},
    "NAF": HIDDEN | {"network": HIDDEN, "signal": 4}, "UNAF": HIDDEN | {"network": HIDDEN, "signal": 4}, "CNF": HIDDEN,
}  # fmt: skip
NFLOWS: dict[str, dict[str, Any]] = {
    "MaskedAffineAutoregressiveTransform": {"features": 6, "hidden_features": 8},
    "MaskedPiecewiseQuadraticAutoregressiveTransform": {"features": 6, "hidden_features": 8, "num_bins": 4, "tails": "linear"},
    "MaskedPiecewiseRationalQuadraticAutoregressiveTransform": {"features": 6, "hidden_features": 8, "num_bins": 4, "tails": "linear"},
    "AdditiveCouplingTransform": {}, "AffineCouplingTransform": {},
    "PiecewiseLinearCouplingTransform": {"tails": "linear", "num_bins": 4},
    "PiecewiseQuadraticCouplingTransform": {"tails": "linear", "num_bins": 4},
    "PiecewiseCubicCouplingTransform": {"tails": "linear", "num_bins": 4},
    "PiecewiseRationalQuadraticCouplingTransform": {"tails": "linear", "num_bins": 4},
    "NaiveLinear": {"features": 6}, "LULinear": {"features": 6}, "QRLinear": {"features": 6, "num_householder": 3},
    "SVDLinear": {"features": 6, "num_householder": 4}, "HouseholderSequence": {"features": 6, "num_transforms": 3},
    "ActNorm": {"features": 6}, "BatchNorm": {"features": 6}, "LeakyReLU": {}, "LogTanh": {},
    "PiecewiseRationalQuadraticCDF": {"shape": [6], "num_bins": 4, "tails": "linear"},
}  # fmt: skip
#: Arguments of each flow, by its name.
NORMFLOWS: dict[str, tuple[Any, ...]] = {
    "AffineConstFlow": ((6,),), "ActNorm": ((6,),), "LULinearPermute": (6,), "InvertibleAffine": (6,),
    "MaskedAffineAutoregressive": (6, 8), "CoupledRationalQuadraticSpline": (6, 1, 8), "AutoregressiveRationalQuadraticSpline": (6, 1, 8),
    "AffineCouplingBlock": ("net",), "MaskedAffineFlow": ("mask",), "PeriodicWrap": ([1, 2],), "PeriodicShift": ([1, 2],),
    "CircularCoupledRationalQuadraticSpline": (6, 1, 8, [1, 2]), "CircularAutoregressiveRationalQuadraticSpline": (6, 1, 8, [1, 2]),
}  # fmt: skip


class LogDensity(nn.Module):
    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        density: torch.Tensor = self.flow.log_prob(x) if hasattr(self.flow, "log_prob") else self.flow().log_prob(x)
        return density


def of_zuko(name: str) -> nn.Module:
    return LogDensity(getattr(import_module("zuko.flows"), name)(6, **ZUKO[name]))


def of_nflows(name: str) -> nn.Module:
    options = dict(NFLOWS[name])
    if "Coupling" in name:
        net = import_module("nflows.nn.nets").ResidualNet
        options |= {"mask": [1, 0] * 3, "transform_net_create_fn": partial(net, hidden_features=8)}
    transforms = import_module("nflows.transforms")
    made = transforms.CompositeTransform(
        [transforms.ReversePermutation(6), getattr(transforms, name)(**options), transforms.LULinear(6)]
    )
    return LogDensity(
        import_module("nflows.flows").Flow(made, import_module("nflows.distributions").StandardNormal([6]))
    )


def of_normflows(name: str) -> nn.Module:
    nf = import_module("normflows")
    given = {"net": lambda: nf.nets.MLP([3, 8, 6]), "mask": lambda: torch.tensor([1.0, 0.0] * 3)}
    args = [given[x]() if isinstance(x, str) else x for x in NORMFLOWS[name]]
    more = {"t": nf.nets.MLP([6, 8, 6]), "s": nf.nets.MLP([6, 8, 6])} if name == "MaskedAffineFlow" else {}
    flows = [getattr(nf.flows, name)(*args, **more), nf.flows.LULinearPermute(6)]
    return LogDensity(nf.NormalizingFlow(nf.distributions.DiagGaussian(6), flows))


def cases() -> dict[str, Case]:
    makers: dict[Callable[[str], nn.Module], Any] = {of_zuko: ZUKO, of_nflows: NFLOWS, of_normflows: NORMFLOWS}
    return {
        f"{make.__name__[3:]} {name}": image(partial(make, name), 40, 6, cut={"x": (0, 1)})
        for make, names in makers.items()
        for name in names
    }
