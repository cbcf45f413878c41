"""torchvision's models of pictures and of films; detection computes boxes, whose number depends on values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.resnet import Bottleneck
from torchvision.models.segmentation.deeplabv3 import DeepLabHead, DeepLabV3
from torchvision.models.segmentation.fcn import FCN, FCNHead
from torchvision.models.segmentation.lraspp import LRASPP
from torchvision.models.swin_transformer import (
    PatchMergingV2,
    SwinTransformer,
    SwinTransformerBlockV2,
)
from torchvision.models.video.mvit import MSBlockConfig
from torchvision.models.video.swin_transformer import SwinTransformer3d

from tests.models.cases import Case, image

#: Name, side of the picture.
PICTURES = {
    "resnet18": 64,
    "mobilenet_v2": 64, "mobilenet_v3_small": 64, "mnasnet0_5": 64, "shufflenet_v2_x0_5": 64, "squeezenet1_1": 64,
    "regnet_x_400mf": 64, "regnet_y_400mf": 64, "efficientnet_b0": 64,
}  # fmt: skip
SWIN = {"patch_size": [4, 4], "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}


class Backbone(nn.Module):
    """Two maps, as the feature extractors of the segmentation models give them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        low = self.first(x)
        high = self.second(low)
        return {"low": low, "high": high, "aux": low, "out": high}


def cases() -> dict[str, Case]:
    small = {"num_classes": 5}
    found = {name: image(partial(getattr(models, name), **small), 2, 3, side, side) for name, side in PICTURES.items()}
    made: dict[str, Callable[[], Any]] = {
        "densenet": lambda: models.DenseNet(4, (2, 2, 2), 8, num_classes=5),
        "densenet dropout": lambda: models.DenseNet(4, (2, 2, 2), 8, drop_rate=0.2, num_classes=5),
        "vit": lambda: models.VisionTransformer(64, 16, 2, 3, 24, 48, num_classes=5),
        "vit dropout": lambda: models.VisionTransformer(64, 16, 2, 3, 24, 48, 0.2, 0.0, num_classes=5),
        "swin": lambda: SwinTransformer(**SWIN, num_classes=5),
        "swin stochastic depth": lambda: SwinTransformer(**SWIN, stochastic_depth_prob=0.3, num_classes=5),
        "swin v2": lambda: SwinTransformer(
            **SWIN, num_classes=5, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2
        ),
        "maxvit": lambda: models.MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=5),
        "resnext": lambda: models.ResNet(Bottleneck, [1, 1, 1, 1], 5, groups=4, width_per_group=4),
        "convnext": lambda: models.ConvNeXt([CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 1)], 0.1, num_classes=5),
        "deeplabv3": lambda: DeepLabV3(Backbone(), DeepLabHead(16, 5, [2, 4]), FCNHead(8, 5)),
        "fcn": lambda: FCN(Backbone(), FCNHead(16, 5), FCNHead(8, 5)),
        "lraspp": lambda: LRASPP(Backbone(), 8, 16, 5, 8),
    }
    found |= {name: image(make, 2, 3, 64, 64) for name, make in made.items()}
    found["googlenet"] = image(lambda: models.googlenet(aux_logits=False, init_weights=False), 2, 3, 64, 64)
    mvit = [MSBlockConfig(1, 12, 12, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
            MSBlockConfig(2, 12, 24, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 2, 2])]  # fmt: skip
    films: dict[str, Callable[[], Any]] = {
        "video swin": lambda: SwinTransformer3d([2, 4, 4], 12, [2, 2], [2, 4], [2, 4, 4], num_classes=5),
        "video mvit": lambda: models.video.MViT((32, 32), 8, mvit, True, False, True, 0.0, num_classes=5),
        "video r3d": lambda: models.video.r3d_18(num_classes=5),
        "video mc3": lambda: models.video.mc3_18(num_classes=5),
        "video r2plus1d": lambda: models.video.r2plus1d_18(num_classes=5),
    }
    for name, make in films.items():
        found[name] = Case(**{**vars(image(make, 2, 3, 8, 32, 32)), "cut": {"x": (3, 4)}})
    return found
