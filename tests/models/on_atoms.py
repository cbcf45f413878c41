"""MACE, of atoms: energies, and the forces that are their gradients."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.models.cases import Case
from tests.models.on_snapshots import case, edges

CUT = {"pos": "nodes", "edge_index": "index"}


def bonds() -> Tensor:
    both = edges(24, 110)
    return both[:, both[0] != both[1]]


def cases() -> dict[str, Case]:
    def mace(name: str, forces: bool, **how: Any) -> Case:
        def build() -> nn.Module:
            parts, irreps = import_module("mace.modules"), import_module("e3nn.o3").Irreps
            block = parts.interaction_classes["RealAgnosticResidualInteractionBlock"]
            return getattr(parts, name)(r_max=3.0, num_bessel=4, num_polynomial_cutoff=3, max_ell=2, interaction_cls=block, interaction_cls_first=block, num_interactions=2, num_elements=2, hidden_irreps=irreps("4x0e + 4x1o"), MLP_irreps=irreps("4x0e"), atomic_energies=np.array([1.0, 2.0]), avg_num_neighbors=4, atomic_numbers=[1, 6], correlation=2, gate=torch.nn.functional.silu, **how)  # type: ignore[no-any-return]  # fmt: skip

        def call(model: nn.Module, pos: Tensor, node_attrs: Tensor, edge_index: Any) -> Any:
            num = edge_index.shape[1]
            data = {"positions": pos, "node_attrs": node_attrs, "edge_index": edge_index, "batch": torch.zeros(24, dtype=torch.long), "ptr": torch.tensor([0, 24]), "shifts": torch.zeros(num, 3), "unit_shifts": torch.zeros(num, 3), "cell": torch.zeros(3, 3)}  # fmt: skip
            out = model(data, training=True, compute_force=forces)
            return [out[key] for key in ("energy", *(["forces"] if forces else []))]

        one_hot = lambda: torch.eye(2)[torch.randint(0, 2, (24,))]  # noqa: E731
        return case(build, CUT | {"node_attrs": "nodes"}, call, pos=lambda: 2 * torch.rand(24, 3), node_attrs=one_hot, edge_index=bonds, options={"tolerance": 1e-6})  # fmt: skip

    shifted = {"atomic_inter_scale": 1.5, "atomic_inter_shift": 0.5}
    return {
        "MACE": mace("MACE", False),
        "MACE, forces": mace("MACE", True),
        "ScaleShiftMACE, forces": mace("ScaleShiftMACE", True, **shifted),
    }
