"""Neural operators on grids, and between points and grids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import neuralop.models as models
import torch

from tests.models.cases import Case, image

SMALL = {"in_channels": 3, "out_channels": 2, "hidden_channels": 8}
FNO = {**SMALL, "n_modes": (6, 6), "n_layers": 2}
CUBE = {"fno_n_modes": (4, 4, 4), "fno_hidden_channels": 6, "fno_n_layers": 2}
GNO = {"in_channels": 3, "out_channels": 2, **CUBE, "gno_embed_channels": 4}
FOUND_HERE = {"gno_use_open3d": False, "gno_use_torch_scatter": False}


def grid(make: Callable[[], Any], *shape: int) -> Case:
    return image(make, *(shape or (2, 3, 24, 20)))


def cases() -> dict[str, Case]:
    fno = {
        "FNO": {},
        "FNO 1-D": {"n_modes": (6,)},
        "FNO 3-D": {"n_modes": (4, 4, 4)},
        "FNO group norm": {"norm": "group_norm"},
        "FNO instance norm": {"norm": "instance_norm"},
        "FNO padded": {"domain_padding": 0.25},
        "FNO finer": {"resolution_scaling_factor": 2},
        "FNO separable": {"separable": True, "hidden_channels": 8},
        "FNO preactivation": {"preactivation": True},
        "FNO no grid": {"positional_embedding": None},
        "FNO linear skips": {"channel_mlp_skip": "linear", "fno_skip": "soft-gating"},
        "FNO dropout": {"channel_mlp_dropout": 0.3},
        "FNO tanh": {"stabilizer": "tanh"},
        "FNO CP": {"factorization": "CP", "rank": 0.5},
        "FNO Tucker": {"factorization": "Tucker", "rank": 0.5},
        "FNO TT": {"factorization": "TT", "rank": 0.5},
        "FNO complex": {"complex_data": True},
    }
    shapes = {"FNO 1-D": (2, 3, 40), "FNO 3-D": (1, 3, 12, 8, 10)}
    found = {
        name: grid(lambda o=options: models.FNO(**FNO | o), *shapes.get(name, ())) for name, options in fno.items()
    }
    found["FNO 1-D"] = Case(**{**vars(found["FNO 1-D"]), "cut": {"x": (2,)}})
    found["FNO complex"] = Case(
        build=found["FNO complex"].build,
        inputs=lambda: {"x": torch.randn(2, 3, 24, 20)},
        cut={"x": (2, 3)},
        call=lambda model, x: model(x + 1j * x.flip(1)),
        dtype=torch.float32,  # its skips convert to complex64
        tolerance=1e-4,
    )
    found["TFNO"] = grid(lambda: models.TFNO(**FNO))
    found["TFNO reconstructed"] = grid(lambda: models.TFNO(**FNO, implementation="reconstructed"))
    uno = {
        **SMALL, "lifting_channels": 8, "projection_channels": 8, "n_layers": 3,
        "channel_mlp_skip": "linear", "uno_out_channels": [8, 8, 8], "uno_n_modes": [[6, 6], [4, 4], [6, 6]],
        "uno_scalings": [[1.0, 1.0], [0.5, 0.5], [2, 2]],
    }  # fmt: skip
    found["UNO"] = grid(lambda: models.UNO(**uno))
    found["UQNO"] = grid(lambda: models.UQNO(base_model=models.FNO(**FNO), residual_model=models.FNO(**FNO)))
    codano = {
        "n_layers": 2, "n_modes": [[6, 6], [6, 6]], "hidden_variable_codimension": 4, "lifting_channels": 8,
        "projection_channels": 8, "n_heads": [2, 2], "attention_scaling_factors": [1, 1],
        "per_layer_scaling_factors": [[1, 1], [1, 1]],
    }  # fmt: skip
    found["CODANO"] = grid(lambda: models.CODANO(**codano))
    if hasattr(models, "SFNO"):
        found["SFNO"] = grid(lambda: models.SFNO(**FNO | {"n_modes": (6, 12)}), 2, 3, 24, 48)
    if hasattr(models, "LocalNO"):
        local = {**FNO, "default_in_shape": (24, 20), "disco_kernel_shape": [2, 4], "conv_padding_mode": "zeros"}
        found["LocalNO"] = grid(lambda: models.LocalNO(**local))
        found["LocalNO no DISCO"] = grid(lambda: models.LocalNO(**local | {"disco_layers": False}))
        found["LocalNO periodic"] = grid(
            lambda: models.LocalNO(**local | {"disco_layers": False, "conv_padding_mode": "periodic"})
        )
    return found | _between_points_and_grids()


def _cube(side: int) -> torch.Tensor:
    line = torch.linspace(0, 1, side)
    return torch.stack(torch.meshgrid(line, line, line, indexing="ij"), -1)


def _between_points_and_grids() -> dict[str, Case]:
    def gino_inputs() -> Mapping[str, Any]:
        points = torch.rand(1, 40, 3)
        return {"input_geom": points, "latent_queries": _cube(6)[None], "output_queries": torch.rand(20, 3),
                "x": torch.randn(1, 40, 3)}  # fmt: skip

    gino = {
        **GNO, "fno_in_channels": 3, "in_gno_radius": 0.3, "out_gno_radius": 0.3, **FOUND_HERE,
        "in_gno_channel_mlp_hidden_layers": [8], "out_gno_channel_mlp_hidden_layers": [8],
    }  # fmt: skip
    fnogno = {
        **GNO, "gno_radius": 0.3, "gno_channel_mlp_hidden_layers": [8], **FOUND_HERE,
    }  # fmt: skip

    def fnogno_inputs() -> Mapping[str, Any]:
        return {"in_p": _cube(6), "out_p": torch.rand(40, 3), "f": torch.randn(6, 6, 6, 3)}

    return {
        "GINO": Case(build=lambda: models.GINO(**gino), inputs=gino_inputs, cut={"input_geom": (1,), "x": (1,)}),
        "GINO latent grid": Case(build=lambda: models.GINO(**gino), inputs=gino_inputs, cut={"latent_queries": (1,)}),
        "FNOGNO": Case(build=lambda: models.FNOGNO(**fnogno), inputs=fnogno_inputs, cut={"f": (0, 1)}),
        "FNOGNO points": Case(build=lambda: models.FNOGNO(**fnogno), inputs=fnogno_inputs, cut={"out_p": (0,)}),
    }
