"""PhysicsNeMo's models of its package, as they are there, on plain parameters."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tests.models.cases import Case, image


def made(module: str, name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(import_module(f"physicsnemo.models.{module}"), name)(**options)


def cases() -> dict[str, Case]:
    afno = {"inp_shape": [32, 32], "in_channels": 3, "out_channels": 2, "patch_size": [4, 4], "embed_dim": 16}
    fno = {"in_channels": 3, "out_channels": 2, "latent_channels": 8, "num_fno_layers": 2, "num_fno_modes": 4}
    unet = {"in_channels": 3, "out_channels": 2, "model_depth": 2, "feature_map_channels": (4, 4, 8, 8)}
    pangu = {"img_size": (24, 32), "embed_dim": 8, "num_heads": (1, 2, 2, 1), "window_size": (2, 3, 4)}
    found = {
        "AFNO": image(made("afno", "AFNO", **afno, depth=2, num_blocks=4), dtype=torch.float32, tolerance=1e-4),
        "FNO": image(made("fno", "FNO", **fno, padding=0)),
        "FNO padded": image(made("fno", "FNO", **fno, padding=3)),
        "Pangu": image(made("pangu", "Pangu", **pangu), 1, 72, 24, 32),
    }
    films = {
        "UNet": made("unet", "UNet", **unet, normalization_args={"num_groups": 2}),
        "UNet batch norm": made("unet", "UNet", **unet, normalization="batchnorm", gradient_checkpointing=False),
    }
    return found | {name: image(make, 1, 3, 8, 16, 16) for name, make in films.items()} | pictures() | points()


def pictures() -> dict[str, Case]:
    """Models of pictures, films and cubed spheres; those that diffuse have noise and classes, too."""
    single = {"dtype": torch.float32, "tolerance": 1e-4}
    unet = {"channel_mult": [1, 1], "num_blocks": 1, "attn_resolutions": [8], "channel_mult_emb": 2}
    noised = {"img_resolution": 16, "in_channels": 3, "out_channels": 2, "label_dim": 4, **unet}
    residual = {
        "encoder_type": "residual",
        "embedding_type": "fourier",
        "channel_mult_noise": 2,
        "resample_filter": [1, 3, 3, 1],
    }
    inputs = {"x": (2, 3, 16, 16), "noise_labels": (2,), "class_labels": (2, 4)}
    dit = {
        "input_size": (16, 16),
        "in_channels": 3,
        "patch_size": (4, 4),
        "hidden_size": 32,
        "depth": 2,
        "num_heads": 4,
        "condition_dim": 5,
    }
    dpot = {
        "inp_shape": 32,
        "patch_size": 8,
        "in_channels": 3,
        "out_channels": 2,
        "in_timesteps": 2,
        "num_blocks": 2,
        "embed_dim": 16,
        "out_layer_dim": 8,
        "depth": 2,
        "modes": 2,
        "norm_groups": 4,
    }
    fengwu = {
        "img_size": (24, 32),
        "pressure_level": 3,
        "embed_dim": 8,
        "num_heads": (1, 2, 2, 1),
        "window_size": (2, 3, 4),
    }
    rnn = {"input_channels": 3, "dimension": 2, "nr_latent_channels": 8, "nr_tsteps": 3, "nr_residual_blocks": 1}
    mod = {
        "inp_shape": [16, 16],
        "in_channels": 3,
        "out_channels": 2,
        "patch_size": [2, 2],
        "embed_dim": 16,
        "mod_dim": 64,
        "depth": 2,
        "num_blocks": 2,
    }
    regression = {"img_resolution": 16, "img_in_channels": 3, "img_out_channels": 2, "model_channels": 8, **unet}
    pix = {"in_channels": 3, "out_channels": 2}
    return {
        "SongUNet": named(made("diffusion_unets", "SongUNet", model_channels=8, **noised), inputs),
        "SongUNet residual": named(made("diffusion_unets", "SongUNet", model_channels=8, **noised, **residual), inputs),
        "SongUNetPosEmbd": named(made("diffusion_unets", "SongUNetPosEmbd", model_channels=8, N_grid_channels=4, **noised | {"in_channels": 7}), inputs),
        "DhariwalUNet": named(made("diffusion_unets", "DhariwalUNet", model_channels=64, **noised), inputs),
        "CorrDiffRegressionUNet": named(made("diffusion_unets", "CorrDiffRegressionUNet", model_type="SongUNet", **regression), {"x": (2, 2, 16, 16), "img_lr": (2, 3, 16, 16)}, **single),
        "StormCastUNet": image(made("diffusion_unets", "StormCastUNet", **regression), 2, 3, 16, 16, **single),
        "TopoDiff": named(made("topodiff", "TopoDiff", model_channels=64, **{k: v for k, v in noised.items() if k != "label_dim"} | {"in_channels": 5}), {"x": (2, 3, 16, 16), "cons": (2, 2, 16, 16), "timesteps": (2,)}),
        "DiT": named(made("dit", "DiT", **dit), {"x": (2, 3, 16, 16), "t": (2,), "condition": (2, 5)}, **single),
        "DLWP": image(made("dlwp", "DLWP", nr_input_channels=3, nr_output_channels=2, nr_initial_channels=4), 2, 3, 6, 16, 16, cut={"x": (3, 4)}),
        "DPOT": image(made("dpot", "DPOTNet", **dpot), 2, 32, 32, 2, 3, cut={"x": (1, 2)}),
        "FengWu": image(made("fengwu", "Fengwu", **fengwu), 1, 19, 24, 32),
        "ModAFNO": named(made("afno", "ModAFNO", **mod), {"x": (2, 3, 16, 16), "mod": (2, 1)}, **single),
        "Pix2Pix": image(made("pix2pix", "Pix2Pix", **pix, dimension=2, conv_layer_size=4, n_downsampling=2, n_upsampling=2, n_blocks=1)),
        "Pix2PixUnet": image(made("pix2pix", "Pix2PixUnet", **pix, n_downsampling=5, filter_size=4), 2, 3, 64, 64),
        "One2ManyRNN": image(made("rnn", "One2ManyRNN", **rnn), 2, 3, 1, 16, 16, cut={"x": (3, 4)}),
        "Seq2SeqRNN": image(made("rnn", "Seq2SeqRNN", **rnn), 2, 3, 3, 16, 16, cut={"x": (3, 4)}),
        "SRResNet": image(made("srrn", "SRResNet", **pix, conv_layer_size=4, n_resid_blocks=1, scaling_factor=2), 2, 3, 8, 8, 8),
    }  # fmt: skip


def points() -> dict[str, Case]:
    """Models of points, in no order or of a grid."""
    small = {
        "functional_dim": 3,
        "out_dim": 2,
        "n_layers": 2,
        "n_hidden": 16,
        "n_head": 2,
        "slice_num": 4,
        "use_te": False,
    }
    inputs = {"fx": (2, 40, 3), "embedding": (2, 40, 2)}
    geo = {"local_embedding": (2, 40, 3), "geometry": (2, 30, 3), "global_embedding": (2, 1, 2)}
    mlp = {"in_features": 4, "layer_size": 8, "out_features": 3, "num_layers": 2}
    return {
        "FLARE": named(made("flare", "FLARE", embedding_dim=2, **small), inputs),
        "Transolver": named(made("transolver", "Transolver", embedding_dim=2, **small), inputs),
        "Transolver++ of a grid": named(made("transolver", "Transolver", embedding_dim=2, structured_shape=(8, 8), plus=True, **small), {"fx": (2, 8, 8, 3), "embedding": (2, 8, 8, 2)}),
        "GeoTransolver": named(made("geotransolver", "GeoTransolver", geometry_dim=3, global_dim=2, **small), geo),
        "FullyConnected": image(made("mlp", "FullyConnected", **mlp, skip_connections=True, adaptive_activations=True, weight_norm=True), 40, 4, cut={"x": (0, 1)}),
    }  # fmt: skip


def named(build: Callable[[], nn.Module], shapes: dict[str, tuple[int, ...]], **options: Any) -> Case:
    """A case of several inputs by name: pictures are cut by rows and columns, points by rows and features."""
    cut = {
        name: (2, 3) if len(shape) == 4 and name not in ("fx", "embedding") else (1, 2)
        for name, shape in shapes.items()
    }
    return Case(
        build=build,
        inputs=lambda: {name: torch.randn(shape, dtype=options.get("dtype")) for name, shape in shapes.items()},
        cut={name: dims for name, dims in cut.items() if len(shapes[name]) > 2 and shapes[name][1] > 1},
        **options,
    )
