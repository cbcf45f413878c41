"""Models of public repositories of fields on grids: weather, films and fluids."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.models.cases import Case, image
from tests.models.on_snapshots import SINGLE, case, made, of


def ace() -> dict[str, Case]:
    at = "ai2cm+ace"
    bare = ["fme", "fme.core", "fme.ace", "fme.ace.models"]

    def net(module: str, name: str, *args: Any, **how: Any) -> Callable[[], nn.Module]:
        return lambda: getattr(of(at, f"fme.ace.models.{module}", bare=bare), name)(*args, **how)

    size = {"embed_dim": 8, "num_layers": 2}
    kinds = {
        "": {},
        ", dhconv": {"operator_type": "dhconv"},
        ", half resolution inside": {"operator_type": "dhconv", "scale_factor": 2, "residual_filter_factor": 1},
        ", non-linear": {"filter_type": "non-linear"},
    }
    found = {
        f"SFNO{words}": image(net("modulus.sfnonet", "SphericalFourierNeuralOperatorNet", SimpleNamespace(), img_shape=(16, 32), in_chans=3, out_chans=2, spectral_layers=1, **size, **how), 2, 3, 16, 32, **SINGLE)
        for words, how in kinds.items()
    }  # fmt: skip
    shapes = {"inp_shape": (16, 32), "out_shape": (16, 32)}
    fcn3 = {"n_atmo_channels": 2, "n_atmo_groups": 2, "n_surf_channels": 2, "n_aux_channels": 1, "n_atmo_diagnostic_channels": 0, "n_surf_diagnostic_channels": 0, "scale_factor": 2, "num_layers": 2, "atmo_embed_dim": 4, "surf_embed_dim": 4, "aux_embed_dim": 4}  # fmt: skip
    given = {"x_atmo": (1, 4, 16, 32), "x_surf": (1, 2, 16, 32), "x_aux": (1, 1, 16, 32)}
    samudra = {"ch_width": [4, 8], "dilation": [1, 2], "n_layers": [1, 1]}

    def graphcast() -> nn.Module:
        lat, lon = torch.meshgrid(torch.linspace(-84, 84, 12), torch.linspace(0, 345, 24), indexing="ij")
        grid = SimpleNamespace(img_shape=(12, 24), horizontal_coordinates=SimpleNamespace(meshgrid=(lat, lon)))
        return net("graphcast.main", "GraphCast", 3, 2, grid, 8, meshes=1, processor_steps=2)()

    return found | {
        "makani's SFNO": image(net("makani.sfnonet", "SphericalFourierNeuralOperatorNet", inp_chans=3, out_chans=2, **shapes, **size), 2, 3, 16, 32, **SINGLE),
        "FourCastNet 3": case(net("makani_fcn3.models.networks.fourcastnet3", "AtmoSphericNeuralOperatorNet", **fcn3, **shapes), dict.fromkeys(given, (2, 3)), **given, options=SINGLE),
        "Samudra": image(net("ocean.m2lines.samudra", "Samudra", 3, 2, **samudra)),
        "Samudra, zonal, batch norm": image(net("ocean.m2lines.samudra", "Samudra", 3, 2, norm="batch", zonally_periodic_upsample=True, **samudra)),
        "LandNet": image(net("land.land_net", "LandNet", img_shape=(16, 32), input_channels=3, hidden_dims=[8, 8], output_channels=2, use_positional_embedding=True), 2, 3, 16, 32),
        "GraphCast": image(graphcast, 2, 3, 12, 24, **SINGLE),
        "SwinIR": image(lambda: of(at, "fme.downscaling.modules.swinir", bare=[*bare, "fme.downscaling", "fme.downscaling.modules"]).SwinIR(img_size=16, in_chans=3, out_chans=3, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4, mlp_ratio=2, drop_path_rate=0.0), 2, 3, 16, 16),
    }  # fmt: skip


def openstl() -> dict[str, Case]:
    """Films: pictures cut by rows and columns; models that recur take them in patches, channels last."""
    at = "chengtan9907+OpenSTL"
    sizes = {"in_shape": (2, 1, 16, 16), "patch_size": 2, "filter_size": 5, "stride": 1, "layer_norm": 0, "pre_seq_length": 2, "aft_seq_length": 2, "total_length": 4, "reverse_scheduled_sampling": 0, "tau": 2, "cell_mode": "normal", "model_mode": "normal", "sr_size": 2, "device": "cpu", "decouple_beta": 0.1, "embed_dim": 8, "depths": 2, "num_heads": 2, "window_size": 4}  # fmt: skip
    blocks = ("incepu", "gsta", "convmixer", "convnext", "hornet", "mlp", "moga", "poolformer", "swin", "uniformer", "van", "vit", "tau")  # fmt: skip

    def net(name: str, *args: Any, **how: Any) -> Callable[[], nn.Module]:
        return lambda: getattr(of(at, "openstl.models", bare=["openstl"]), name)(*args, **how)

    def recurrent(name: str, **how: Any) -> Case:
        call = lambda model, x: model(x, torch.zeros(1, 2, 8, 8, 4), return_loss=True)  # noqa: E731
        build = net(f"{name}_Model", 2, [4, 4], SimpleNamespace(**sizes | how))
        return case(build, {"x": (2, 3)}, call, x=(1, 4, 8, 8, 4))

    found = {f"SimVP {kind}": image(net("SimVP_Model", in_shape=(2, 1, 32, 32), hid_S=4, hid_T=16, N_S=2, N_T=2, model_type=kind), 1, 2, 1, 32, 32, cut={"x": (3, 4)}) for kind in blocks}  # fmt: skip
    found |= {
        name: recurrent(name) for name in ("ConvLSTM", "PredRNN", "PredRNNpp", "PredRNNv2", "MIM", "MAU", "E3DLSTM")
    }
    swin = {"x": (1, 4, 16, 16, 1)}
    loss = lambda model, x: model(x, return_loss=True)  # noqa: E731
    film = lambda model, x: model(x[:, :2], x[:, 2:], torch.zeros(49, 7, 7))  # noqa: E731
    return found | {
        "ConvLSTM, layer norm": recurrent("ConvLSTM", layer_norm=1),
        "SwinLSTM-B": case(net("SwinLSTM_B_Model", SimpleNamespace(**sizes)), {"x": (2, 3)}, loss, **swin),
        "SwinLSTM-D": case(net("SwinLSTM_D_Model", [2, 2], [2, 2], [2, 4], SimpleNamespace(**sizes | {"window_size": 2})), {"x": (2, 3)}, loss, **swin),
        "PhyDNet": case(net("PhyDNet_Model", SimpleNamespace(**sizes)), {"x": (3, 4)}, film, x=(1, 4, 1, 16, 16)),
        "MMVP": case(net("MMVP_Model", (2, 1, 32, 32), aft_seq_length=2, hid_S=4, hid_T=8), {"x_raw": (3, 4)}, x_raw=(1, 2, 1, 32, 32)),
    }  # fmt: skip


def multiple_physics() -> dict[str, Case]:
    sizes = {"patch_size": (16, 16), "embed_dim": 24, "processor_blocks": 2, "n_states": 4, "block_type": "axial", "time_type": "attention", "space_type": "axial_attention", "num_heads": 3, "bias_type": "rel", "gradient_checkpointing": False}  # fmt: skip
    build = made("PolymathicAI+multiple_physics_pretraining/models", "avit", "build_avit", SimpleNamespace(**sizes))
    call = lambda model, x: model(x, torch.tensor([[0, 1, 2]]), torch.tensor([[0, 0]]))  # noqa: E731
    return {"AViT": case(build, {"x": (3, 4)}, call, x=(2, 1, 3, 64, 64), options={"train": False})}


def metnet() -> dict[str, Case]:
    at, small = "openclimatefix+metnet", {"input_channels": 3, "sat_channels": 3, "output_channels": 2, "hidden_dim": 16, "num_att_layers": 1, "num_att_heads": 4, "forecast_steps": 3, "temporal_dropout": 0.0}  # fmt: skip
    films = {"imgs": (1, 2, 3, 64, 64)}
    two = {"input_channels": 3, "sat_channels": 3, "output_channels": 2, "input_size": 64, "lstm_channels": 4, "encoder_channels": 8, "upsampler_channels": 8, "lead_time_features": 8, "num_input_timesteps": 2, "encoder_dilations": (1, 2), "center_crop_size": 8, "forecast_steps": 3, "use_preprocessor": False}  # fmt: skip
    three = {"high_res_in_channels": 3, "low_res_in_channels": 2, "hidden_channels": 32, "num_resnet_blocks": 1, "num_maxvit_blocks": 1, "grid_height": 32, "grid_width": 32, "crop_4km": 16, "crop_8km": 8, "crop_16km": 4, "crop_output": 8, "forecast_steps": 3, "topographical_channels": 2, "surface_output_channels": 3, "hrrr_output_channels": 2, "precip_output_channels": 2}  # fmt: skip
    fine = {"high_res_input": (1, 3, 32, 32), "low_res_input": (1, 2, 32, 32)}

    def net(name: str, module: str, **how: Any) -> Callable[[], nn.Module]:
        return lambda: getattr(of(at, f"metnet.models.{module}", bare=["metnet", "metnet.models"]), name)(**how)

    at_one = lambda model, **given: model(**given, lead_time=1)  # noqa: E731
    return {
        "MetNet": case(net("MetNet", "metnet", input_size=64, use_preprocessor=False, **small), {"imgs": (3, 4)}, at_one, **films),
        "MetNet, preprocessor": case(net("MetNet", "metnet", input_size=16, **small), {"imgs": (3, 4)}, at_one, **films),
        "MetNet, single shot": case(net("MetNetSingleShot", "metnet_single_shot", input_size=64, use_preprocessor=False, **small), {"imgs": (3, 4)}, **films),
        "MetNet-2": case(net("MetNet2", "metnet2", **two), {"x": (3, 4)}, at_one, x=(1, 2, 3, 64, 64)),
        "MetNet-3": case(net("MetNet3", "metnet3", **three), dict.fromkeys(fine, (2, 3)), at_one, **fine),
    }  # fmt: skip


def nowcasting() -> dict[str, Case]:
    """A generator that draws a latent field of its own, and its judges, which take frames at random."""
    at = "openclimatefix+skillful_nowcasting"

    def generator() -> nn.Module:
        parts = of(at, "dgmr.common", bare=["dgmr"])
        context = parts.ContextConditioningStack(input_channels=1, output_channels=32, num_context_steps=4)
        latent = parts.LatentConditioningStack(shape=(2, 2, 2), output_channels=128)
        nets = import_module("dgmr.generators")
        return nets.Generator(context, latent, nets.Sampler(forecast_steps=2, latent_channels=128, context_channels=32))  # type: ignore[no-any-return]

    def judge(name: str, **how: Any) -> Case:
        build = lambda: getattr(of(at, "dgmr.discriminators", bare=["dgmr"]), name)(input_channels=1, **how)  # noqa: E731
        return case(build, {"x": (3, 4)}, x=(2, 6, 1, 64, 64), options={"tolerance": 1e-6})

    return {
        "DGMR generator": case(generator, {"x": (3, 4)}, x=(1, 4, 1, 64, 64)),
        "DGMR spatial judge": judge("SpatialDiscriminator", num_timesteps=2, num_layers=1),
        "DGMR temporal judge": judge("TemporalDiscriminator", num_layers=1),
    }


def fourcastnet() -> dict[str, Case]:
    params = SimpleNamespace(patch_size=4, N_in_channels=3, N_out_channels=2, num_blocks=2)
    build = made("NVlabs+FourCastNet", "networks.afnonet", "AFNONet", params, img_size=(16, 32), embed_dim=16, depth=2)
    return {"AFNONet": image(build, 2, 3, 16, 32, **SINGLE)}


def geoarches() -> dict[str, Case]:
    at = "INRIA+geoarches"
    sizes = {"tensor_size": (4, 12, 24), "emb_dim": 8, "cond_dim": 6, "num_heads": (1, 2, 2, 1), "window_size": (1, 3, 6), "droppath_coeff": 0.0}  # fmt: skip

    def net(**how: Any) -> Case:
        build = lambda: of(at, "geoarches.backbones.archesweather", bare=["geoarches", "geoarches.backbones"]).ArchesWeatherCondBackbone(**sizes, **how)  # noqa: E731  # fmt: skip
        return case(build, {"x": (3, 4)}, x=(1, 8, 4, 12, 24), cond_emb=(1, 6))

    return {"ArchesWeather": net(), "ArchesWeather, gated": net(mlp_layer="swiglu", depth_multiplier=1)}


def fourierflow() -> dict[str, Case]:
    at = "alasdairtran+fourierflow"
    small = {"n_layers": 2, "share_weight": True, "factor": 2, "ff_weight_norm": True, "n_ff_layers": 2, "layer_norm": False}  # fmt: skip
    sizes = {"width": 8, "input_dim": 3} | small
    points = {"u": lambda: torch.rand(1, 40, 2), "code": (1, 42)}

    def net(module: str, name: str, **how: Any) -> Callable[[], nn.Module]:
        """Return the model; weights drawn beside it, as their norm is taken when it is built."""
        bare = ["fourierflow", "fourierflow.modules"]
        return lambda: getattr(of(at, f"fourierflow.modules.{module}", bare=bare), name)(**how)

    return {
        "F-FNO": case(net("factorized_fno.grid_2d", "FNOFactorized2DBlock", modes=4, **sizes), {"x": (1, 2)}, x=(2, 16, 16, 3), options=SINGLE),
        "F-FNO, forked": case(net("factorized_fno.grid_2d", "FNOFactorized2DBlock", modes=4, use_fork=True, **sizes | {"layer_norm": True}), {"x": (1, 2)}, x=(2, 16, 16, 3), options=SINGLE),
        "F-FNO of a bent grid": case(net("factorized_fno.mesh_2d", "FNOFactorizedMesh2D", modes_x=4, modes_y=4, **sizes), {"x": (1, 2)}, x=(2, 16, 16, 1), options=SINGLE),
        "F-FNO of a bent grid in 3-D": case(net("factorized_fno.mesh_3d", "FNOFactorizedMesh3D", modes_x=2, modes_y=2, modes_z=2, output_dim=2, **sizes | {"input_dim": 4}), {"x": (1, 2)}, x=(1, 8, 8, 6, 1), options=SINGLE),
        "F-FNO of points": case(net("factorized_fno.point_cloud_2d", "FNOFactorizedPointCloud2D", modes1=4, modes2=4, width=8, in_channels=2, out_channels=1, n_layers=2, s1=8, s2=8), {"u": (1, 2)}, lambda model, u, code: model(u), **points, options=SINGLE),
        "FNO": case(net("zongyi_fno.grid_2d", "FNOZongyi2DBlock", modes1=4, modes2=4, width=8, input_dim=3, n_layers=2), {"x": (1, 2)}, x=(2, 16, 16, 3), options=SINGLE),
        "FNO of a bent grid": case(net("zongyi_fno.mesh_2d", "FNOMesh2D", modes1=4, modes2=4, width=8, n_layers=2), {"x": (1, 2)}, x=(2, 16, 16, 2), options=SINGLE),
        "CNO factorized": case(net("factorized_cno.grid_2d", "CNOFactorized2DBlock", modes=4, **sizes), {"x": (1, 2)}, x=(2, 16, 16, 3), options=SINGLE),
    }  # fmt: skip


def weather_generator() -> dict[str, Case]:
    """Engines of tokens of cells; its flash attention is stood in for by torch's own."""
    at, bare = "ecmwf+WeatherGenerator/src", ["weathergen", "weathergen.model", "weathergen.utils"]
    shared = {"with_flash_attention": True, "norm_type": "LayerNorm", "norm_eps": 1e-5, "mlp_norm_eps": 1e-5, "attention_dtype": "fp32", "ae_global_dim_embed": 16, "ae_local_dim_embed": 16, "ae_local_num_queries": 2}  # fmt: skip
    local = {"ae_local_num_blocks": 2, "ae_local_num_heads": 2, "ae_local_dropout_rate": 0.1, "ae_local_with_qk_lnorm": True}  # fmt: skip
    whole = {"ae_global_num_blocks": 2, "ae_global_num_heads": 2, "ae_global_dropout_rate": 0.1, "ae_global_with_qk_lnorm": True, "ae_global_att_dense_rate": 1.0, "ae_global_mlp_hidden_factor": 2}  # fmt: skip

    def engine(name: str, *args: Any, **how: Any) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            engines = of(at, "weathergen.model.engines", bare=bare)
            return getattr(engines, name)(SimpleNamespace(**shared | how), *args)  # type: ignore[no-any-return]

        return build

    def embed() -> nn.Module:
        build = of(at, "weathergen.model.embeddings", bare=bare).StreamEmbedTransformer
        model = build("channels", 2, 6, 5, 16, 12, 2, 2, embed_size_centroids=4)
        for each in model.modules():
            if hasattr(each, "dtype"):
                each.dtype = torch.float32
        return model  # type: ignore[no-any-return]

    lens = torch.tensor([0, 7, 9, 4, 12, 8])
    return {
        "tokens of a stream": case(embed, {"x_in": (0, 1), "centroids": (0, 1)}, x_in=(24, 6, 5), centroids=(24, 5), options=SINGLE),
        "tokens of cells": case(engine("LocalAssimilationEngine", **local), {"x": (0, 1)}, lambda model, x: model(x, lens, False), x=(40, 16), options=SINGLE),
        "tokens of all cells": case(engine("GlobalAssimilationEngine", 12, **whole), {"x": (1, 2)}, lambda model, x: model(x, False), x=(1, 24, 16), options=SINGLE),
    }  # fmt: skip


REPOSITORIES: dict[str, Callable[[], dict[str, Case]]] = {
    "ai2cm+ace": ace,
    "chengtan9907+OpenSTL": openstl,
    "PolymathicAI+multiple_physics_pretraining": multiple_physics,
    "openclimatefix+metnet": metnet,
    "openclimatefix+skillful_nowcasting": nowcasting,
    "NVlabs+FourCastNet": fourcastnet,
    "INRIA+geoarches": geoarches,
    "alasdairtran+fourierflow": fourierflow,
    "ecmwf+WeatherGenerator": weather_generator,
}
