"""PhysicsNeMo's models of its package, as they are there, on plain parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tests.models.cases import Case, image
from tests.models.neighbourhoods import stand_in


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
    return (
        found | {name: image(make, 1, 3, 8, 16, 16) for name, make in films.items()} | pictures() | points() | meshes()
    )


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

    def near(**how: Any) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            stand_in()
            return made("dit", "DiT", **dit | {"input_size": (24, 20)}, attn_kwargs={"attn_kernel": 3}, **how)()

        return build

    return {
        "SongUNet": named(made("diffusion_unets", "SongUNet", model_channels=8, **noised), inputs),
        "SongUNet residual": named(made("diffusion_unets", "SongUNet", model_channels=8, **noised, **residual), inputs),
        "SongUNetPosEmbd": named(made("diffusion_unets", "SongUNetPosEmbd", model_channels=8, N_grid_channels=4, **noised | {"in_channels": 7}), inputs),
        "DhariwalUNet": named(made("diffusion_unets", "DhariwalUNet", model_channels=64, **noised), inputs),
        "CorrDiffRegressionUNet": named(made("diffusion_unets", "CorrDiffRegressionUNet", model_type="SongUNet", **regression), {"x": (2, 2, 16, 16), "img_lr": (2, 3, 16, 16)}, **single),
        "StormCastUNet": image(made("diffusion_unets", "StormCastUNet", **regression), 2, 3, 16, 16, **single),
        "TopoDiff": named(made("topodiff", "TopoDiff", model_channels=64, **{k: v for k, v in noised.items() if k != "label_dim"} | {"in_channels": 5}), {"x": (2, 3, 16, 16), "cons": (2, 2, 16, 16), "timesteps": (2,)}),
        "DiT": named(made("dit", "DiT", **dit), {"x": (2, 3, 16, 16), "t": (2,), "condition": (2, 5)}, **single),
        "DiT natten": named(near(attention_backend="natten2d"), {"x": (2, 3, 24, 20), "t": (2,), "condition": (2, 5)}, **single),
        "DiT natten, rotary": named(near(attention_backend="natten2d_rope"), {"x": (2, 3, 24, 20), "t": (2,), "condition": (2, 5)}, **single),
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


def meshes() -> dict[str, Case]:
    """Models of graphs, and of cars' surfaces and the air around them."""
    net = {"input_dim_nodes": 4, "input_dim_edges": 4, "output_dim": 2, "processor_size": 2, "hidden_dim_processor": 8, "hidden_dim_node_encoder": 8, "hidden_dim_edge_encoder": 8, "hidden_dim_node_decoder": 8}  # fmt: skip

    def on_graph(module: str, name: str, call: Any = None, **how: Any) -> Case:
        def inputs() -> dict[str, Any]:
            draw = torch.Generator().manual_seed(5)
            src, dst = torch.randint(0, 24, (2, 90), generator=draw)
            order = torch.argsort(dst, stable=True)
            given = {"x": torch.randn(24, 4), "pos": torch.randn(24, 3), "edge_attr": torch.randn(90, 4)}
            return given | {"edge_index": torch.stack([src[order], dst[order]])}

        def plain(model: nn.Module, x: Any, graph: Any) -> Any:
            return model(x, graph.edge_attr, graph)

        def calls(model: nn.Module, x: Any, pos: Any, edge_attr: Any, edge_index: Any) -> Any:
            from torch_geometric.data import Data

            return (call or plain)(model, x, Data(edge_index=edge_index, edge_attr=edge_attr, pos=pos, num_nodes=24))

        cut = {"x": "nodes", "pos": "nodes", "edge_attr": "edges", "edge_index": "index"}
        return Case(build=made(f"meshgraphnet.{module}", name, **net | how), inputs=inputs, cut=cut, call=calls)

    def hybrid(model: nn.Module, x: Any, graph: Any) -> Any:
        graph.edge_index = torch.cat([graph.edge_index, graph.edge_index], 1)  # of the mesh, and of the world
        return model(x, graph.edge_attr, graph.edge_attr * 0.5, graph)

    def strides(model: nn.Module, x: Any, graph: Any) -> Any:
        levels = [torch.arange(0, 24, 2), torch.arange(0, 12, 2)]
        rings = [torch.stack([torch.arange(num), torch.arange(1, num + 1) % num]) for num in (24, 12, 6)]
        return model(x, graph.edge_attr, graph, rings, levels)

    def figure(num: int) -> Case:
        return named(made("figconvnet.figconvunet", "FIGConvUNet", in_channels=3, out_channels=2, kernel_size=3, hidden_channels=[3, 4, 4], num_levels=2, mlp_channels=[8, 8]), {"vertices": (1, num, 3)}, dtype=torch.float32, tolerance=1e-4)  # fmt: skip

    swin = {"img_size": (6, 32, 64), "patch_size": (6, 1, 1), "in_chans": 5, "out_chans": 5, "embed_dim": 32, "num_groups": 4, "num_heads": 2, "window_size": 8}  # fmt: skip
    return {
        "MeshGraphNet": on_graph("meshgraphnet", "MeshGraphNet"),
        "MeshGraphNet mean, split sums": on_graph("meshgraphnet", "MeshGraphNet", aggregation="mean", do_concat_trick=True, num_processor_checkpoint_segments=2),
        "MeshGraphKAN": on_graph("meshgraphkan", "MeshGraphKAN"),
        "HybridMeshGraphNet": on_graph("hybrid_meshgraphnet", "HybridMeshGraphNet", hybrid),
        "BiStrideMeshGraphNet": on_graph("bsms_mgn", "BiStrideMeshGraphNet", strides),
        "SwinRNN": image(made("swinvrnn", "SwinRNN", **swin), 1, 5, 6, 32, 64, cut={"x": (3, 4)}),
        "DoMINO": domino("two-loop"), "DoMINO one loop": domino("one-loop"),
        "FIGConvUNet": figure(60),
    }  # fmt: skip


def domino(how: str) -> Case:
    """Geometry as points, grids around it, and points where the answer is asked for."""

    def build() -> nn.Module:
        config = import_module("physicsnemo.models.domino.config")
        options = copy.deepcopy(config.DEFAULT_MODEL_PARAMS)
        for part in ("geometry_local", "nn_basis_functions", "aggregation_model", "parameter_model"):
            options[part]["base_layer"] = 16
        options["geometry_rep"]["geo_conv"]["base_neurons"] = options["position_encoder"]["base_neurons"] = 16
        options |= {"interp_res": [8, 8, 8], "solution_calculation_mode": how, "num_neighbors_surface": 5}
        model = import_module("physicsnemo.models.domino.model").DoMINO
        return model(input_features=3, output_features_vol=4, output_features_surf=5, model_parameters=options)

    points = {"pos_volume_closest": 3, "pos_volume_center_of_mass": 3, "pos_surface_center_of_mass": 3, "geometry_coordinates": 3, "sdf_nodes": 1, "surface_mesh_centers": 3, "surface_normals": 3, "volume_mesh_centers": 3}  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {name: (1, 30, width) for name, width in points.items()}
    shapes |= {"surface_mesh_neighbors": (1, 30, 4, 3), "surface_neighbors_normals": (1, 30, 4, 3), "surface_areas": (1, 30), "surface_neighbors_areas": (1, 30, 4)}  # fmt: skip
    cut = dict.fromkeys(shapes, (1,))
    shapes |= {"grid": (1, 8, 8, 8, 3), "surf_grid": (1, 8, 8, 8, 3), "sdf_grid": (1, 8, 8, 8), "sdf_surf_grid": (1, 8, 8, 8)}  # fmt: skip
    cut |= dict.fromkeys(("grid", "surf_grid", "sdf_grid", "sdf_surf_grid"), (1, 2))
    shapes |= {"volume_min_max": (1, 2, 3), "surface_min_max": (1, 2, 3), "global_params_values": (1, 2, 1), "global_params_reference": (1, 2, 1)}  # fmt: skip

    def inputs() -> dict[str, Any]:
        return {name: torch.rand(shape, dtype=torch.float32) + ("area" in name) for name, shape in shapes.items()}

    single: dict[str, Any] = {"dtype": torch.float32, "tolerance": 1e-4}
    return Case(build=build, inputs=inputs, cut=cut, call=lambda model, **given: model(given), **single)


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
