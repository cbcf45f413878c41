"""vit-pytorch: a small variant of each of its architectures."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tests.models.cases import Case, image

#: By their parameters' names, for the classes that have these.
SMALL = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 4,
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 24,
    "dim_head": 8,
}
PLAIN = [
    "attn_residual_with_dca_simple_vit.SimpleViT",
    "deepvit.DeepViT",
    "jet_vit.JetViT",
    "learnable_memory_vit.ViT",
    "looped_vit.LoopedViT",
    "mp3.ViT",
    "normalized_vit.nViT",
    "parallel_vit.ViT",
    "rvt.RvT",
    "simple_flash_attn_vit.SimpleViT",
    "simple_uvit.SimpleUViT",
    "simple_vit.SimpleViT",
    "simple_vit_attn_residual.SimpleViTAttnResidual",
    "simple_vit_orthog_residual_update.SimpleViT",
    "simple_vit_with_patch_dropout.SimpleViT",
    "simple_vit_with_qk_norm.SimpleViT",
    "simple_vit_with_register_tokens.SimpleViT",
    "simple_vit_with_relative_proj_pos_bias.SimpleViT",
    "simple_vit_with_sparse_gating.SimpleViTWithSparseGating",
    "simple_vit_with_specialized_cls.SimpleViT",
    "simple_vit_with_value_residual.SimpleViT",
    "vat.ViT",
    "vit.ViT",
    "vit_5.ViT",
    "vit_detpool.ViTDetPool",
    "vit_for_small_dataset.ViT",
    "vit_with_decorr.ViT",
    "vit_with_keel_post_ln.ViT",
    "vit_with_patch_dropout.ViT",
    "vit_with_patch_merger.ViT",
    "na_vit.NaViT",
]
MORE: dict[str, dict[str, Any]] = {
    "ats_vit.ViT": {"max_tokens_per_depth": (12, 8)},
    "cait.CaiT": {"cls_depth": 1, "layer_dropout": 0.05},
    "cross_vit.CrossViT": {"image_size": 64, "sm_dim": 8, "lg_dim": 16, "sm_enc_depth": 1, "lg_enc_depth": 1, "sm_enc_mlp_dim": 16, "lg_enc_mlp_dim": 16, "sm_patch_size": 16, "lg_patch_size": 32},
    "cvt.CvT": {"s1_emb_dim": 8, "s2_emb_dim": 8, "s3_emb_dim": 16, "s2_heads": 2, "s3_heads": 2, "s2_depth": 1, "s3_depth": 1, "side": 64},
    "levit.LeViT": {"image_size": 64, "dim": (8, 16), "depth": 1, "heads": 2, "mlp_mult": 2, "stages": 2, "dim_key": 4, "dim_value": 8},
    "look_vit.LookViT": {"image_size": 64, "patch_size": 16, "highres_patch_size": 8, "heads": 2},
    "max_vit.MaxViT": {"depth": (1, 1), "window_size": 2, "dim_conv_stem": 8},
    "max_vit_with_registers.MaxViT": {"depth": (1, 1), "window_size": 2, "dim_conv_stem": 8},
    "mobile_vit.MobileViT": {"image_size": (64, 64), "patch_size": (2, 2), "dims": [8, 12, 16], "channels": [8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 16], "side": 64},
    "nest.NesT": {"num_hierarchies": 2, "block_repeats": (1, 1)},
    "pit.PiT": {"depth": (1, 1)},
    "regionvit.RegionViT": {"dim": (8, 8, 16, 16), "depth": (1, 1, 1, 1), "window_size": 4, "side": 128},
    "scalable_vit.ScalableViT": {"depth": (1, 1), "heads": (2, 2), "reduction_factor": (2, 1), "window_size": (2, 2), "ssa_dim_key": 8, "ssa_dim_value": 8, "iwsa_dim_key": 8, "iwsa_dim_value": 8},
    "simple_vit_with_fft.SimpleViT": {"freq_patch_size": 8},
    "simple_vit_with_hyper_connections.SimpleViT": {"num_residual_streams": 2},
    "twins_svt.TwinsSVT": {"s1_emb_dim": 8, "s2_emb_dim": 8, "s3_emb_dim": 16, "s4_emb_dim": 16, "s1_local_patch_size": 2, "s2_local_patch_size": 2, "s3_local_patch_size": 2, "s4_local_patch_size": 1, "s1_global_k": 2, "s2_global_k": 2, "s3_global_k": 1, "s4_global_k": 1, "s3_depth": 1, "side": 64},
    "xcit.XCiT": {"cls_depth": 1},
}  # fmt: skip
FILM = {"image_patch_size": 8, "frames": 4, "frame_patch_size": 2}
FILMS: dict[str, dict[str, Any]] = {
    "simple_flash_attn_vit_3d.SimpleViT": FILM,
    "simple_vit_3d.SimpleViT": FILM,
    "vit_3d.ViT": FILM,
    "vivit.ViViT": FILM | {"spatial_depth": 1, "temporal_depth": 1},
    "vivit_with_moss.ViViT": FILM | {"spatial_depth": 1, "temporal_depth": 1},
}
LINES = ("simple_vit_1d.SimpleViT", "vit_1d.ViT")


def small(name: str, **more: Any) -> nn.Module:
    made = getattr(import_module(f"vit_pytorch.{name.partition('.')[0]}"), name.partition(".")[2])
    known = inspect.signature(made.__init__).parameters
    model: nn.Module = made(**{key: value for key, value in SMALL.items() if key in known} | more)
    return model


def cases() -> dict[str, Case]:
    found = {}
    for name, given in {**{key: {} for key in PLAIN}, **MORE}.items():
        more, side = {k: v for k, v in given.items() if k != "side"}, given.get("side", given.get("image_size", 32))
        found[name] = image(lambda name=name, more=more: small(name, **more), 2, 3, side, side)
    for name, more in FILMS.items():
        found[name] = image(lambda name=name, more=more: small(name, **more), 2, 3, 4, 32, 32, cut={"x": (3, 4)})
    for name in LINES:
        found[name] = image(lambda name=name: small(name, seq_len=32), 2, 3, 32, cut={"x": (2, 1)})
        found[name] = Case(**{**vars(found[name]), "dtype": torch.float32, "tolerance": 1e-4})
    return found
