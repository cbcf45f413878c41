"""segmentation-models-pytorch: every decoder on a small encoder, and encoders with attention."""

from __future__ import annotations

from functools import partial

import segmentation_models_pytorch as smp

from tests.models.cases import Case, image

DECODERS = {
    "Unet": {"decoder_channels": (16, 8, 8, 4, 4)},
    "Unet scse": {"decoder_channels": (16, 16, 16, 16, 16), "decoder_attention_type": "scse"},
    "Unet interpolation": {"decoder_channels": (16, 8, 8, 4, 4), "decoder_interpolation": "bilinear"},
    "UnetPlusPlus": {"decoder_channels": (16, 8, 8, 4, 4)},
    "MAnet": {"decoder_channels": (16, 8, 8, 4, 4), "decoder_pab_channels": 4},
    "Linknet": {},
    "FPN": {"decoder_pyramid_channels": 8, "decoder_segmentation_channels": 32},
    "PSPNet": {"psp_out_channels": 8},
    "DeepLabV3": {"decoder_channels": 8},
    "DeepLabV3Plus": {"decoder_channels": 8},
    "PAN": {"decoder_channels": 8},
    "UPerNet": {"decoder_channels": 8},
    "Segformer": {"decoder_segmentation_channels": 8},
    "DPT": {},
}


def cases() -> dict[str, Case]:
    found = {}
    for name, options in DECODERS.items():
        if name == "DPT":
            encoder, more = "tu-test_vit3", {"dynamic_img_size": True, "encoder_depth": 4}
        else:
            encoder, more = "mobilenet_v2" if name == "DeepLabV3" else "tu-test_resnet", {}
        build = partial(getattr(smp, name.split()[0]), encoder, encoder_weights=None, classes=2, **options, **more)
        side = 128 if name == "PAN" else 64
        found[name] = image(build, 2, 3, side, side)
    for encoder in ("mit_b0", "mobileone_s0", "tu-test_convnext", "tu-test_efficientnet", "tu-pvt_v2_b0"):
        depth = (
            {"encoder_depth": 4, "decoder_channels": (16, 8, 8, 4)} if "convnext" in encoder or "pvt" in encoder else {}
        )
        options = {"decoder_channels": (16, 8, 8, 4, 4)} | depth
        found[f"Unet on {encoder}"] = image(
            partial(smp.Unet, encoder, encoder_weights=None, classes=2, **options), 2, 3, 64, 64
        )
    aux = {"classes": 3, "pooling": "avg", "dropout": 0.3}
    found["Unet with classes"] = image(
        partial(smp.Unet, "tu-test_resnet", encoder_weights=None, decoder_channels=(16, 8, 8, 4, 4), aux_params=aux),
        2,
        3,
        64,
        64,
    )
    return found
