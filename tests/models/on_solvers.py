"""Solvers of partial differential equations, and Aurora."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.cases import Case
from tests.models.on_others import made
from tests.models.on_snapshots import SINGLE, case


def cases() -> dict[str, Case]:
    return the_well() | forecasts()


def the_well() -> dict[str, Case]:
    """The models that are measured on the_well."""
    ends: dict[str, Any] = {"dim_in": 3, "dim_out": 2, "n_spatial_dims": 2, "spatial_resolution": (32, 32)}
    kinds: dict[str, dict[str, Any]] = {
        "AViT": {"hidden_dim": 48, "num_heads": 2, "processor_blocks": 2},
        "DilatedResNet": {"blocks": 1, "levels_per_block": 2, "hidden_dim": 8},
        "ReFNO": {"hidden_dim": 8, "blocks": 2},
        "UNetClassic": {"init_features": 4},
        "UNetConvNext": {"init_features": 4, "stages": 2, "blocks_per_stage": 1, "blocks_at_neck": 1},
    }
    at = "the_well.benchmark.models"
    found = {name: case(made(at, name, **ends, **how), {"x": (1, 2)} if "FNO" in name or name == "AViT" else {"x": (2, 3)}, lambda model, x: model(x), x=(2, 32, 32, 3) if "FNO" in name or name == "AViT" else (2, 3, 32, 32)) for name, how in kinds.items()}  # fmt: skip
    cube = {"dim_in": 3, "dim_out": 2, "n_spatial_dims": 3, "spatial_resolution": (16, 16, 16)}
    found["UNetClassic 3-D"] = case(made(at, "UNetClassic", **cube, init_features=4), {"x": (2, 3)}, lambda model, x: model(x), x=(2, 3, 16, 16, 16))  # fmt: skip
    return {f"the_well {name}": each for name, each in found.items()}


def forecasts() -> dict[str, Case]:
    """Aurora, on a made-up state of the weather."""
    small = {"encoder_depths": (1, 1), "encoder_num_heads": (1, 2), "decoder_depths": (1, 1), "decoder_num_heads": (2, 1), "embed_dim": 16, "num_heads": 2, "window_size": (2, 2, 2), "latent_levels": 4}  # fmt: skip
    surface, static, air = ("2t", "10u", "10v", "msl"), ("lsm", "z", "slt"), ("z", "u", "v", "t", "q")

    def aurora(model: nn.Module, surf: Tensor, fixed: Tensor, atmos: Tensor) -> Any:
        from aurora import Batch, Metadata

        lat, lon = torch.linspace(90, -90, 17)[:16], torch.linspace(0, 360, 33)[:32]
        meta = Metadata(lat=lat, lon=lon, time=(datetime(2020, 6, 1, 12),), atmos_levels=(100, 250, 500, 850))
        given = ({name: x[:, i] for i, name in enumerate(names)} for names, x in ((surface, surf), (air, atmos)))
        surf_vars, atmos_vars = given
        out = model(Batch(surf_vars, dict(zip(static, fixed, strict=True)), atmos_vars, meta))
        return [*out.surf_vars.values(), *out.atmos_vars.values()]

    shapes = {"surf": (1, 4, 2, 16, 32), "fixed": (3, 16, 32), "atmos": (1, 5, 2, 4, 16, 32)}
    cut = {name: (len(shape) - 2, len(shape) - 1) for name, shape in shapes.items()}
    return {
        "Aurora": case(made("aurora", "Aurora", **small, use_lora=False), cut, aurora, **shapes, options=SINGLE),
        "Aurora, LoRA": case(made("aurora", "Aurora", **small, stabilise_level_agg=True), cut, aurora, **shapes, options=SINGLE),
    }  # fmt: skip
