"""One small variant of each family of timm."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import timm

from tests.models.cases import Case, image

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
SIZED = {"img_size": 64}
#: By name: what makes it small.
PICTURES: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": VIT,
    "vit_relpos_small_patch16_224": VIT,
    "vit_srelpos_small_patch16_224": VIT,
    "test_vit": SIZED,
    "test_vit2": SIZED,
    "test_vit3": SIZED,
    "test_vit4": SIZED,
    "deit_tiny_patch16_224": VIT,
    "deit_tiny_distilled_patch16_224": VIT,
    "deit3_small_patch16_224": VIT,
    "beit_base_patch16_224": VIT,
    "beitv2_base_patch16_224": VIT,
    "eva02_tiny_patch14_224": VIT,
    "vit_small_patch16_dinov3": VIT,
    "vit_small_patch14_reg4_dinov2": VIT,
    "flexivit_small": VIT,
    "cait_xxs24_224": {**VIT, "num_heads": 4},
    "convit_tiny": VIT,
    "xcit_nano_12_p16_224": {**VIT, "patch_size": 16},
    "samvit_base_patch16": {**VIT, "window_size": 2, "global_attn_indexes": (1,)},
    "test_resnet": {},
    "test_byobnet": {},
    "test_efficientnet": {},
    "test_efficientnet_gn": {},
    "test_efficientnet_ln": {},
    "test_efficientnet_evos": {},
    "test_convnext": {},
    "test_convnext2": {},
    "test_convnext3": {},
    "test_mambaout": {},
    "test_nfnet": {},
    "test_coatnet": SIZED,
    "test_maxvit": SIZED,
    "test_vit_relpos": SIZED,
    "swin_tiny_patch4_window7_224": {
        "img_size": 64,
        "window_size": 4,
        "embed_dim": 12,
        "depths": (2, 2),
        "num_heads": (2, 4),
    },
    "swinv2_tiny_window8_256": {
        "img_size": 64,
        "window_size": 4,
        "embed_dim": 12,
        "depths": (2, 2),
        "num_heads": (2, 4),
    },
    "swinv2_cr_tiny_ns_224": {"img_size": 64, "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 4)},
    "mobilevit_xxs": {},
    "mobilevitv2_050": {},
    "davit_tiny": {"embed_dims": (12, 24), "num_heads": (2, 4), "depths": (1, 1), "window_size": 4},
    "gcvit_xxtiny": SIZED,
    "levit_128s": SIZED,
    "levit_conv_128s": SIZED,
    "botnet26t_256": SIZED,
    "halonet26t": {"side": 256},
    "lambda_resnet26t": {},
    "bat_resnext26ts": {"side": 256},
    "eca_botnext26ts_256": SIZED,
    "coat_tiny": SIZED,
    "coat_lite_tiny": SIZED,
    "convnext_atto": {},
    "convnextv2_atto": {},
    "pvt_v2_b0": {},
    "twins_svt_small": SIZED,
    "twins_pcpvt_small": SIZED,
    "poolformer_s12": {},
    "poolformerv2_s12": {},
    "caformer_s18": {},
    "convformer_s18": {},
    "efficientnet_b0": {},
    "mobilenetv3_small_050": {},
    "mobilenetv2_035": {},
    "mobilenetv4_conv_small_035": {},
    "mobilenetv4_hybrid_medium": {},
    "densenet121": {"growth_rate": 4, "block_config": (2, 2, 2, 2)},
    "mixer_s32_224": SIZED,
    "resmlp_12_224": SIZED,
    "gmlp_ti16_224": SIZED,
    "resnest14d": {},
    "res2net50_14w_8s": {},
    "skresnet18": {},
    "ecaresnet26t": {},
    "seresnet18": {},
    "resnet10t": {},
    "resnetv2_18": {},
    "dla34": {},
    "dpn48b": {},
    "vovnet39a": {},
    "ese_vovnet19b_dw": {},
    "selecsls42": {},
    "hrnet_w18_small": {},
    "hgnetv2_b0": {},
    "cspresnet50": {},
    "regnetx_002": {},
    "regnety_002": {},
    "repvgg_a0": {},
    "rexnet_100": {},
    "ghostnet_050": {},
    "ghostnetv3_050": {},
    "mixnet_s": {},
    "mobileone_s0": {},
    "efficientformer_l1": {"side": 224},
    "efficientformerv2_s0": {"img_size": 64},
    "efficientvit_b0": {},
    "efficientvit_m0": {"img_size": 64},
    "edgenext_xx_small": {},
    "fastvit_t8": {},
    "fasternet_t0": {},
    "inception_next_atto": {},
    "repghostnet_050": {},
    "repvit_m0_9": {},
    "shvit_s1": {},
    "starnet_s050": {},
    "swiftformer_xs": {},
    "tiny_vit_5m_224": {},
    "tnt_s_legacy_patch16_224": {"img_size": 64, "depth": 2},
    "visformer_tiny": SIZED,
    "vitamin_small_224": SIZED,
    "volo_d1_224": SIZED,
    "crossvit_9_240": {"side": 240},
    "focalnet_tiny_srf": {},
    "hiera_tiny_224": {"img_size": 64},
    "hieradet_small": {},
    "iformer_t": {},
    "mambaout_femto": {},
    "mvitv2_tiny": {"img_size": 64},
    "naflexvit_base_patch16_gap": {"embed_dim": 24, "depth": 2, "num_heads": 3},
    "nest_tiny": {"img_size": 64},
    "nextvit_small": {},
    "pit_ti_224": {"img_size": 64},
    "rdnet_tiny": {},
    "sequencer2d_s": {"img_size": 64},
    "xception41": {},
    "inception_v3": {"side": 96},
    "nf_regnet_b0": {},
    "csatv2": {},
    "tresnet_m": {},
    "eca_nfnet_l0": {},
    "vit_tiny_r_s16_p8_224": SIZED,
    "maxxvit_rmlp_nano_rw_256": SIZED,
    "lcnet_050": {},
    "efficientvim_m1": {},
    "cpubone_nano": {},
    "lowformer_b0": {},
    "hgnet_tiny": {},
}
#: More variants: pictures of 32 by 32 for the first, of 64 by 64 for the others.
SMALL_VITS = """vit_medium_patch16_gap_240 vit_small_patch16_rope_224 vit_small_patch16_rope_mixed_224 vit_wee_patch16_reg1_gap_256
    vit_betwixt_patch16_rope_reg4_gap_256 vit_dpwee_patch16_reg1_gap_256 aimv2_large_patch14_224 beit3_base_patch16_224
    eva02_base_patch14_224 vit_so150m_patch16_reg4_gap_256 vit_pwee_patch16_reg1_gap_256 vit_base_patch16_siglip_224"""
MORE = """hardcorenas_a lcnet_035 fbnetc_100 tinynet_e semnasnet_075 mnasnet_small gernet_s regnetz_005 ghostnetv2_100 mobilenetv1_100
    tf_efficientnetv2_b0 resnet18d edgenext_x_small repghostnet_058 starnet_s1 convnext_zepto_rms legacy_seresnet18 spnasnet_100
    resnet14t mobilevitv2_075 nf_resnet26 convnextv2_femto resnetv2_18d"""
PICTURES |= dict.fromkeys(SMALL_VITS.split(), VIT) | {name: {} for name in MORE.split()}


def cases() -> dict[str, Case]:
    found = {}
    for name, options in PICTURES.items():
        small = dict(options)
        side = small.pop("side", small.get("img_size", 64))
        found[name] = image(partial(timm.create_model, name, num_classes=5, **small), 2, 3, side, side)
    for name in ("test_efficientnet_evos", "efficientvit_b0"):  # .float() in norms, in attention
        found[name] = replace(found[name], tolerance=1e-4)
    for name in (
        "inception_v3",
        "efficientvim_m1",
    ):  # norms over two numbers in the end, which make rounding errors large
        found[name] = replace(found[name], tolerance=1e-6)
    return found
