"""Models of smaller packages: MONAI's networks, efficient attention, perceivers, flows."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tests.models.cases import Case, image


def made(module: str, name: str, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(import_module(module), name)(*args, **options)


def tokens(build: Callable[[], nn.Module], *shape: int, **options: Any) -> Case:
    """A case of rows of features, cut along the rows (and the features)."""
    return image(build, *(shape or (2, 32, 16)), **{"cut": {"x": (1, 2)}} | options)


#: MONAI, on pictures of one channel: arguments by name.
MONAI: dict[str, dict[str, Any]] = {
    "UNet": {"spatial_dims": 2, "in_channels": 3, "out_channels": 2, "channels": (4, 8, 8), "strides": (2, 2), "num_res_units": 1},
    "BasicUNet": {"spatial_dims": 2, "in_channels": 3, "out_channels": 2, "features": (4, 4, 8, 8, 8, 4)},
    "BasicUNetPlusPlus": {"spatial_dims": 2, "in_channels": 3, "out_channels": 2, "features": (4, 4, 8, 8, 8, 4)},
    "AttentionUnet": {"spatial_dims": 2, "in_channels": 3, "out_channels": 2, "channels": (4, 8, 8), "strides": (2, 2)},
    "DynUNet": {"spatial_dims": 2, "in_channels": 3, "out_channels": 2, "kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [4, 8, 8]},
    "FlexibleUNet": {"in_channels": 3, "out_channels": 2, "backbone": "efficientnet-b0"},
    "SegResNet": {"spatial_dims": 2, "in_channels": 3, "out_channels": 2, "init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1,)},
    "SegResNetVAE": {"input_image_size": (32, 32), "spatial_dims": 2, "in_channels": 3, "out_channels": 2, "init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1,)},
    "HighResNet": {"spatial_dims": 2, "in_channels": 3, "out_channels": 2},
    "VNet": {"spatial_dims": 2, "in_channels": 1, "out_channels": 2},
    "UNETR": {"in_channels": 3, "out_channels": 2, "img_size": (32, 32), "feature_size": 4, "hidden_size": 12, "mlp_dim": 24, "num_heads": 3, "spatial_dims": 2},
    "SwinUNETR": {"in_channels": 3, "out_channels": 2, "feature_size": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1), "spatial_dims": 2},
    "ViT": {"in_channels": 3, "img_size": (32, 32), "patch_size": (8, 8), "hidden_size": 12, "mlp_dim": 24, "num_layers": 2, "num_heads": 3, "spatial_dims": 2},
    "ViTAutoEnc": {"in_channels": 3, "img_size": (32, 32), "patch_size": (4, 4), "hidden_size": 12, "mlp_dim": 24, "num_layers": 2, "num_heads": 3, "spatial_dims": 2},
    "AutoEncoder": {"spatial_dims": 2, "in_channels": 3, "out_channels": 2, "channels": (4, 8), "strides": (2, 2)},
    "DenseNet": {"spatial_dims": 2, "in_channels": 3, "out_channels": 2, "init_features": 8, "growth_rate": 4, "block_config": (2, 2)},
    "resnet10": {"spatial_dims": 2, "n_input_channels": 3, "num_classes": 2},
    "SENet": {"spatial_dims": 2, "in_channels": 3, "block": "se_bottleneck", "layers": (1, 1, 1, 1), "groups": 1, "reduction": 16},
    "EfficientNetBN": {"model_name": "efficientnet-b0", "spatial_dims": 2, "pretrained": False},
    "AutoencoderKL": {"spatial_dims": 2, "in_channels": 3, "out_channels": 2, "channels": (8, 8), "num_res_blocks": (1, 1), "attention_levels": (False, True), "latent_channels": 3, "norm_num_groups": 4},
    "VQVAE": {"spatial_dims": 2, "in_channels": 3, "out_channels": 2, "channels": (8, 8), "num_res_layers": 1, "num_res_channels": (8, 8), "downsample_parameters": ((2, 4, 1, 1), (2, 4, 1, 1)), "upsample_parameters": ((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)), "num_embeddings": 16, "embedding_dim": 8},
    "PatchDiscriminator": {"spatial_dims": 2, "in_channels": 3, "channels": 4, "num_layers_d": 2},
    "RegUNet": {"spatial_dims": 2, "in_channels": 3, "out_channels": 2, "num_channel_initial": 4, "depth": 2},
    "GlobalNet": {"image_size": (32, 32), "spatial_dims": 2, "in_channels": 3, "num_channel_initial": 4, "depth": 2},
    "LocalNet": {"spatial_dims": 2, "in_channels": 3, "out_channels": 2, "num_channel_initial": 4, "extract_levels": (0, 1, 2)},
    "MedNeXt": {"spatial_dims": 2, "in_channels": 3, "out_channels": 2, "init_filters": 4, "blocks_down": (1, 1, 1, 1), "blocks_bottleneck": 1, "blocks_up": (1, 1, 1, 1)},
    "Quicknat": {"num_classes": 2, "num_channels": 3, "num_filters": 4},
}  # fmt: skip
TOKENS: dict[str, Callable[[], nn.Module]] = {
    "Linformer": made("linformer", "Linformer", 16, 32, 2, k=8, heads=2),
    "Performer": made("performer_pytorch", "Performer", dim=16, depth=1, heads=2, dim_head=8),
    "LinearAttentionTransformer": made("linear_attention_transformer", "LinearAttentionTransformer", dim=16, depth=1, max_seq_len=32, heads=2),
    "AxialAttention": made("axial_attention", "AxialAttention", dim=16, heads=2, num_dimensions=1, dim_index=2),
}  # fmt: skip


def cases() -> dict[str, Case]:
    nets = "monai.networks.nets"
    shapes = {"VNet": (2, 1, 32, 32), "SwinUNETR": (1, 3, 64, 64), "EfficientNetBN": (2, 3, 64, 64)}
    single = {"dtype": torch.float32, "tolerance": 1e-4}  # of models that name it
    found = {
        f"MONAI {name}": image(made(f"{nets}.mednext" if name == "MedNeXt" else nets, name, **how), *shapes.get(name, ()), **single if name in ("VQVAE", "GlobalNet") else {})
        for name, how in MONAI.items()
    }  # fmt: skip
    found |= {name: tokens(make) for name, make in TOKENS.items()}
    mixer = {"image_size": 32, "channels": 3, "patch_size": 8, "dim": 16, "depth": 1, "num_classes": 4}
    found["MLP-Mixer"] = image(made("mlp_mixer_pytorch", "MLPMixer", **mixer))
    found["gMLP vision"] = image(
        made("g_mlp_pytorch", "gMLPVision", image_size=32, patch_size=8, num_classes=4, dim=16, depth=1)
    )
    found["AxialImageTransformer"] = image(
        made("axial_attention", "AxialImageTransformer", dim=4, depth=1, heads=2, reversible=False), 2, 4, 8, 8
    )
    perceiver = {
        "input_channels": 3,
        "input_axis": 2,
        "num_freq_bands": 2,
        "max_freq": 4.0,
        "depth": 1,
        "num_latents": 4,
        "latent_dim": 8,
        "num_classes": 3,
        "latent_heads": 2,
    }
    found["Perceiver"] = image(made("perceiver_pytorch", "Perceiver", **perceiver), 2, 32, 32, 3, cut={"x": (1, 2)})
    found["RealNVP (FrEIA)"] = tokens(real_nvp, 32, 6, cut={"x": (0, 1)})
    found["SSIM"] = image(Ssim, 1, 3, 32, 32)
    return found


class Ssim(nn.Module):
    """A loss by structural similarity to a scaled picture."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 1, 1) * 0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return import_module("pytorch_msssim").ssim(x, x * self.scale, data_range=2.0, win_size=7)


def real_nvp() -> nn.Module:
    framework, modules = import_module("FrEIA.framework"), import_module("FrEIA.modules")
    flow = framework.SequenceINN(6)
    for _ in range(2):
        flow.append(
            modules.AllInOneBlock,
            subnet_constructor=lambda a, b: nn.Sequential(nn.Linear(a, 8), nn.Tanh(), nn.Linear(8, b)),
        )
    return flow
