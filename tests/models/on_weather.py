"""Models of the weather: those of miles-credit, and anemoi's whole encoders, processors and decoders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.cases import Case, image
from tests.models.on_others import made

GRID = {"image_height": 32, "image_width": 32, "frames": 1, "channels": 2, "surface_channels": 2, "input_only_channels": 1, "levels": 3}  # fmt: skip
CROSSFORMER = {**GRID, "dim": (8, 16, 32, 64), "depth": (1, 1, 1, 1), "dim_head": 4, "global_window_size": (4, 2, 2, 1), "local_window_size": 2, "cross_embed_kernel_sizes": ((4, 8), (2, 4), (2, 4), (2, 4)), "cross_embed_strides": (2, 2, 2, 2)}  # fmt: skip
SIZES = {"data": 40, "hidden": 12}
LAYERS = "anemoi.models.layers"


def cases() -> dict[str, Case]:
    padded = {
        "padding_conf": {"activate": True, "mode": "earth", "pad_lat": [16, 16], "pad_lon": [16, 16]},
        "use_spectral_norm": False,
    }
    fuxi = {
        **GRID,
        "frames": 2,
        "patch_height": 4,
        "patch_width": 4,
        "dim": 16,
        "num_groups": 4,
        "num_heads": 2,
        "depth": 2,
        "window_size": 4,
    }
    swin = {
        "img_size": (32, 32),
        "window_size": (4, 4),
        "channels": 2,
        "levels": 3,
        "surface_channels": 2,
        "input_only_channels": 1,
        "embed_dim": 8,
        "depths": (1, 1),
        "num_heads": (1, 1),
    }
    unet = {"architecture": {"name": "unet", "encoder_name": "resnet18", "encoder_weights": None}}
    found = {
        "CrossFormer": film(made("credit.models.crossformer", "CrossFormer", **CROSSFORMER)),
        "CrossFormer padded": film(made("credit.models.crossformer", "CrossFormer", **CROSSFORMER, **padded)),
        "WXFormer": film(made("credit.models.wxformer.crossformer", "CrossFormer", **CROSSFORMER)),
        "NextGenWXFormer": film(made("credit.models.wxformer.wxformer_next", "NextGenWXFormer", **CROSSFORMER, col_attn_heads=2)),
        "CAMulator": film(made("credit.models.camulator", "Camulator", **CROSSFORMER), dtype=torch.float32, tolerance=1e-4),
        "FuXi": film(made("credit.models.fuxi", "Fuxi", **fuxi), frames=2),
        "Swin": film(made("credit.models.swin", "SwinTransformerV2Cr", **swin)),
        "UNet": film(made("credit.models.unet", "SegmentationModel", **GRID, **unet), train=False),
    }  # fmt: skip
    found = {f"credit {name}": case for name, case in found.items()}
    for mapper, processor in product(("GNN", "GraphTransformer", "Transformer"), repeat=2):
        found[f"anemoi {mapper}, {processor}"] = Case(
            build=lambda mapper=mapper, processor=processor: anemoi(mapper, processor),
            inputs=lambda: {"x": torch.randn(1, 2, 1, SIZES["data"], 4)},
            cut={"x": (3, 4)},
            call=lambda model, x: model({"data": x}),
        )
    return found


def film(build: Callable[[], nn.Module], frames: int = 1, **options: Any) -> Case:
    return image(build, 1, 9, frames, 32, 32, cut={"x": (3, 4)}, **options)


class Columns:
    """Which variables are forecast and which are given, as anemoi numbers them."""

    def __init__(self, prognostic: Sequence[int], forcing: Sequence[int]) -> None:
        self.prognostic, self.forcing, self.diagnostic = map(torch.tensor, (prognostic, forcing, []))
        self.full = torch.arange(len(self))

    def __len__(self) -> int:
        return len(self.prognostic) + len(self.forcing)


def anemoi(mapper: str, processor: str) -> nn.Module:
    """A model of 40 points, 12 hidden ones, and edges drawn at random between them."""
    from omegaconf import OmegaConf
    from torch_geometric.data import HeteroData

    draw = torch.Generator().manual_seed(3)
    graph = HeteroData()
    for name, size in SIZES.items():
        graph[name].x, graph[name].num_nodes = torch.rand(size, 2, generator=draw), size
    for (a, b), num in {("data", "hidden"): 80, ("hidden", "hidden"): 40, ("hidden", "data"): 100}.items():
        ends: list[Tensor] = [torch.randint(0, SIZES[name], (num,), generator=draw) for name in (a, b)]
        ends[1][: SIZES[b]] = torch.arange(SIZES[b])
        graph[a, "to", b].edge_index, graph[a, "to", b].edge_length = (
            torch.stack(ends),
            torch.rand(num, 1, generator=draw),
        )
    common = {"num_channels": 8, "num_chunks": 1, "cpu_offload": False, "layer_kernels": None, "mlp_hidden_ratio": 2, "num_heads": 2, "graph_attention_backend": "pyg", "mlp_extra_layers": 0, "qk_norm": True, "shard_strategy": "edges", "window_size": None, "dropout_p": 0.0, "attention_implementation": "scaled_dot_product_attention", "sub_graph_edge_attributes": ["edge_length"], "trainable_size": 2}  # fmt: skip
    to_hidden = {"_target_": f"{LAYERS}.mapper.{mapper}ForwardMapper", **common}
    to_data = {"_target_": f"{LAYERS}.mapper.{mapper}BackwardMapper", "initialise_data_extractor_zero": False, **common}
    features = ["coordinates", "trainable_parameters"] if mapper == "GNN" else ["encoded_data", "coordinates"]
    parts = {
        "model": {"hidden_nodes_name": "hidden", "latent_skip": True},
        "node_trainable_parameters": {"data": 4, "hidden": 3},
        "encoders": {
            "e": {"source_datasets": ["data"], "dataset_fusing_strategy": "not_supported", "mapper": to_hidden}
        },
        "decoders": {"d": {"target_datasets": ["data"], "target_node_features": features, "mapper": to_data}},
        "latent_aggregator": {"_target_": f"{LAYERS}.aggregator.SumAggregator"},
        "processor": {"_target_": f"{LAYERS}.processor.{processor}Processor", "num_layers": 2, **common},
        "residual": {"_target_": f"{LAYERS}.residual.SkipConnection", "step": -1},
        "bounding": [],
        "sparse_projector": {},
    }
    columns = SimpleNamespace(input=Columns(range(3), [3]), output=Columns(range(3), []))
    return import_module("anemoi.models.models").AnemoiModelEncProcDec(
        model_config=OmegaConf.create({"model": parts}),
        data_indices={"data": SimpleNamespace(model=columns)},
        statistics={"data": {}},
        n_step_input=2,
        n_step_output=1,
        graph_data=graph,
    )
