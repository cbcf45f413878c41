"""diffusers: what denoises, and the autoencoders around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import diffusers as df
import torch

from tests.models.cases import Case

BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
DOWN, UP = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
CROSS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}


def case(make: Callable[[], Any], cut: Mapping[str, Any], inputs: Callable[[], Mapping[str, Any]]) -> Case:
    return Case(build=make, inputs=inputs, cut=cut, call=lambda model, **given: model(**given, return_dict=False))


def step(*shape: int) -> dict[str, Any]:
    return {"sample": torch.randn(shape), "timestep": torch.tensor([3, 7])}


def latent(channels: int = 4, *, text: int = 0, **more: Callable[[], Any]) -> Callable[[], Mapping[str, Any]]:
    def inputs() -> Mapping[str, Any]:
        given: dict[str, Any] = {"hidden_states": torch.randn(2, channels, 16, 16), "timestep": torch.tensor([3, 7])}
        if text:
            given["encoder_hidden_states"] = torch.randn(2, 6, text)
        return given | {name: value() for name, value in more.items()}

    return inputs


def cases() -> dict[str, Case]:
    rows = {"sample": (2, 3)}
    cells = {"hidden_states": (2, 3)}

    def picture() -> Mapping[str, Any]:
        return {"sample": torch.randn(2, 3, 32, 32)}

    def unet() -> Mapping[str, Any]:
        return step(2, 3, 32, 32)

    def conditioned() -> Mapping[str, Any]:
        return {**step(2, 4, 16, 16), "encoder_hidden_states": torch.randn(2, 6, 12)}

    cross = {**BLOCKS, **CROSS, "cross_attention_dim": 12, "attention_head_dim": 4, "sample_size": 16}
    vae = {**BLOCKS, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    dit = {**HEADS, "sample_size": 16, "patch_size": 2, "in_channels": 4}
    tokens = {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
    }

    def flux() -> Mapping[str, Any]:
        return {
            "hidden_states": torch.randn(1, 24, 16), "encoder_hidden_states": torch.randn(1, 6, 12),
            "pooled_projections": torch.randn(1, 12), "timestep": torch.tensor([0.5]),
            "img_ids": torch.arange(72.0).view(24, 3), "txt_ids": torch.zeros(6, 3),
        }  # fmt: skip

    film = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1}
    found = {
        "UNet2D": case(lambda: df.UNet2DModel(32, 3, 3, down_block_types=DOWN, up_block_types=UP, attention_head_dim=4, **BLOCKS), rows, unet),
        "UNet2D dropout": case(lambda: df.UNet2DModel(32, 3, 3, down_block_types=DOWN, up_block_types=UP, dropout=0.2, **BLOCKS), rows, unet),
        "UNet2D scale shift": case(
            lambda: df.UNet2DModel(32, 3, 3, down_block_types=("ResnetDownsampleBlock2D",) * 2, up_block_types=("ResnetUpsampleBlock2D",) * 2,
                                   resnet_time_scale_shift="scale_shift", **BLOCKS), rows, unet),
        "UNet2D skip": case(lambda: df.UNet2DModel(32, 3, 3, down_block_types=("SkipDownBlock2D",) * 2, up_block_types=("SkipUpBlock2D",) * 2,
                                                  block_out_channels=(32, 32), layers_per_block=1), rows, unet),
        "UNet2DCondition": case(lambda: df.UNet2DConditionModel(**cross), rows, conditioned),
        "UNet2DCondition linear": case(lambda: df.UNet2DConditionModel(**cross, use_linear_projection=True), rows, conditioned),
        "AutoencoderKL": case(lambda: df.AutoencoderKL(latent_channels=4, **vae), rows, picture),
        "AutoencoderTiny": case(lambda: df.AutoencoderTiny(encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1)), rows, picture),
        "AutoencoderDC": case(lambda: df.AutoencoderDC(encoder_block_out_channels=(8, 16), decoder_block_out_channels=(8, 16), latent_channels=4, attention_head_dim=4,
                              encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1), encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)),
                              encoder_block_types=("ResBlock", "EfficientViTBlock"), decoder_block_types=("ResBlock", "EfficientViTBlock")), rows, picture),
        "VQModel": case(lambda: df.VQModel(latent_channels=4, num_vq_embeddings=8, **vae), rows, picture),
        "AsymmetricAutoencoderKL": case(lambda: df.AsymmetricAutoencoderKL(down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
                                        down_block_out_channels=(8,), up_block_out_channels=(8,), norm_num_groups=4), rows, picture),
        "DiT": case(lambda: df.DiTTransformer2DModel(**dit, norm_num_groups=4, num_embeds_ada_norm=10), cells, latent(class_labels=lambda: torch.tensor([1, 2]))),
        "Transformer2D": case(lambda: df.Transformer2DModel(2, 8, 16, norm_num_groups=4, cross_attention_dim=12), cells,
                              lambda: {"hidden_states": torch.randn(2, 16, 16, 16), "encoder_hidden_states": torch.randn(2, 6, 12)}),
        "PixArt": case(lambda: df.PixArtTransformer2DModel(**dit, out_channels=4, cross_attention_dim=16, caption_channels=12, norm_num_groups=4), cells,
                       latent(text=12, added_cond_kwargs=lambda: {"resolution": None, "aspect_ratio": None})),
        "Sana": case(lambda: df.SanaTransformer2DModel(**dit, out_channels=4, num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=12),
                     cells, latent(text=12)),
        "SD3": case(lambda: df.SD3Transformer2DModel(**dit, joint_attention_dim=12, caption_projection_dim=16, pooled_projection_dim=12, out_channels=4, pos_embed_max_size=8), cells,
                    latent(text=12, pooled_projections=lambda: torch.randn(2, 12))),
        "AuraFlow": case(lambda: df.AuraFlowTransformer2DModel(16, 2, 4, 1, 1, 8, 2, 12, 16, pos_embed_max_size=64), cells, latent(text=12)),
        "Lumina2": case(lambda: df.Lumina2Transformer2DModel(16, 2, 4, hidden_size=16, num_layers=1, num_refiner_layers=1, num_attention_heads=2, num_kv_heads=1, cap_feat_dim=12,
                                                             axes_dim_rope=(2, 2, 4), axes_lens=(32, 32, 32)), cells,
                        latent(text=12, encoder_attention_mask=lambda: torch.ones(2, 6, dtype=torch.bool))),
        "Flux": case(lambda: df.FluxTransformer2DModel(**tokens, joint_attention_dim=12, pooled_projection_dim=12, axes_dims_rope=(2, 2, 4)), {"hidden_states": (1,), "img_ids": (0,)}, flux),
        "Latte": case(lambda: df.LatteTransformer3DModel(**dit, out_channels=4, cross_attention_dim=16, caption_channels=12, video_length=2), {"hidden_states": (3, 4)},
                      lambda: {"hidden_states": torch.randn(1, 4, 2, 16, 16), "timestep": torch.tensor([3]), "encoder_hidden_states": torch.randn(1, 6, 12)}),
        "Wan": case(lambda: df.WanTransformer3DModel(**film, in_channels=4, out_channels=4, text_dim=12, freq_dim=8, ffn_dim=16), {"hidden_states": (3, 4)},
                    lambda: {"hidden_states": torch.randn(1, 4, 2, 16, 16), "timestep": torch.tensor([3]), "encoder_hidden_states": torch.randn(1, 6, 12)}),
        "CogVideoX": case(lambda: df.CogVideoXTransformer3DModel(**film | {"attention_head_dim": 16}, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=12, sample_width=16, sample_height=16, sample_frames=5,
                                                                  max_text_seq_length=6), {"hidden_states": (3, 4)},
                          lambda: {"hidden_states": torch.randn(1, 2, 4, 16, 16), "timestep": torch.tensor([3]), "encoder_hidden_states": torch.randn(1, 6, 12)}),
        "LTX": case(lambda: df.LTXVideoTransformer3DModel(**film, in_channels=4, out_channels=4, cross_attention_dim=24, caption_channels=12), {"hidden_states": (1,)},
                    lambda: {"hidden_states": torch.randn(1, 32, 4), "timestep": torch.tensor([3]), "encoder_hidden_states": torch.randn(1, 6, 12), "encoder_attention_mask": torch.ones(1, 6),
                             "num_frames": 2, "height": 4, "width": 4}),
        "Prior": case(lambda: df.PriorTransformer(2, 8, 2, 16, 6), {"encoder_hidden_states": (1,)},
                      lambda: {"hidden_states": torch.randn(2, 16), "timestep": torch.tensor([3, 7]), "proj_embedding": torch.randn(2, 16), "encoder_hidden_states": torch.randn(2, 6, 16)}),
    }  # fmt: skip
    for name in ("AutoencoderDC", "Sana", "Wan"):  # .float() in their code
        found[name] = replace(found[name], tolerance=1e-4)
    return found
