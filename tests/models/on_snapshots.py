"""Models of public repositories that are no packages: ``SCIDATA_SNAPSHOTS`` names a folder of their snapshots.

``docs/compatibility/models.md`` lists the repositories; ``camlab-ethz/poseidon`` is in ``camlab-ethz+poseidon``. Those
that are not there are left out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partialmethod
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import chain, pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.cases import Case

FOLDER = Path(os.environ.get("SCIDATA_SNAPSHOTS", "snapshots"))
SINGLE = {"dtype": torch.float32, "tolerance": 1e-4}  # of models that name it


def attention(q: Tensor, k: Tensor, v: Tensor, attn_bias: Any = None, **_: Any) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=attn_bias).transpose(1, 2)


def attention_of_runs(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *_: Any, dropout_p: float = 0.0, **__: Any
) -> Tensor:
    """Attend within runs of rows that end where ``ends`` says, each by itself."""
    bounds = ends.tolist()
    runs = [[x[i:j][None] for x in (q, k, v)] for i, j in pairwise(bounds)]
    return torch.cat([attention(*run)[0] for run in runs])


#: What snapshots import and may be absent, by its first name or whole, and what models need of it.
ABSENT: dict[str, dict[str, Any]] = {
    name: {}
    for name in [
        "wandb",
        "moviepy",
        "ogb",
        "torch_sparse",
        "sklearn",
        "xformers",
        "matscipy",
        "fasteners",
        "nnja_ai",
        "anemoi.datasets",
        "cv2",
        "imageio",
        "skimage",
        "lpips",
        "fvcore",
        "nni",
        "hickle",
        "numpy.lib.arraypad",
        "tbparse",
        "vesin",
        "cartopy",
        "mllam_data_prep",
        "mlflow",
        "parse",
    ]
} | {
    "nn_module.fourier_neural_operator": {},
    "flash_attn": {"flash_attn_func": attention, "flash_attn_varlen_func": attention_of_runs},
    "weathergen.common": {},
    "weathergen.common.config": {},
    "xformers.ops": {"memory_efficient_attention": attention, "unbind": torch.unbind},
}


class StandIns(MetaPathFinder, Loader):
    """Finds a module in place of one that is absent; what it has no value of is a class."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        is_absent = name in ABSENT or (top in ABSENT and getattr(sys.modules.get(top), "__file__", "") == "stand-in")
        return ModuleSpec(name, self, is_package=True) if is_absent else None

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = "stand-in"
        module.__getattr__ = lambda name: type(name, (nn.Module,), {})  # type: ignore[method-assign]
        vars(module).update(ABSENT.get(module.__name__, {}))


sys.meta_path.append(StandIns())  # last, so that what is installed is found before


def of(repository: str, module: str, *, bare: Sequence[str] = ()) -> Any:
    """Import a module of a snapshot, alone: several have a "models" and a "utils". ``bare`` packages run no code of theirs."""
    root = FOLDER / repository
    where = {}  # of all before any is taken out, as those without a file look for the ones that they are in
    for name, each in list(sys.modules.items()):
        file = getattr(each, "__file__", None)
        where[name] = [file] if file else [str(x) for x in getattr(each, "__path__", [])]
    for name, places in where.items():
        if places and all(x.startswith(f"{FOLDER}/") and not x.startswith(f"{root}/") for x in places):
            del sys.modules[name]
    sys.path[:] = [str(root), *(x for x in sys.path if not x.startswith(f"{FOLDER}/"))]
    for package in bare:
        if package not in sys.modules:
            sys.modules[package] = ModuleType(package)
            folder = str(root / package.replace(".", "/"))
            sys.modules[package].__path__, sys.modules[package].__file__ = [folder], folder
    return import_module(module)


def case(build: Callable[[], nn.Module], cut: Mapping[str, Any], call: Any = None, **shapes: Any) -> Case:
    """Return a case of inputs by name: shapes, or what makes them; ``options`` are the case's own."""
    options = shapes.pop("options", {})
    dtype = options.get("dtype")

    def inputs() -> dict[str, Any]:
        return {k: torch.randn(x, dtype=dtype) if isinstance(x, tuple) else x() for k, x in shapes.items()}

    return Case(build=build, inputs=inputs, cut=cut, **({"call": call} if call else {}), **options)


def cases() -> dict[str, Case]:
    from tests.models import on_snapshots_of_fields, on_snapshots_of_points

    found: dict[str, Case] = {}
    more = (on_snapshots_of_fields.REPOSITORIES, on_snapshots_of_points.REPOSITORIES)
    for repository, make in chain(REPOSITORIES.items(), *(x.items() for x in more)):
        if (FOLDER / repository).is_dir():
            found |= {f"{repository.partition('+')[2]} {name}": each for name, each in make().items()}
    return found


def neural_solver_library() -> dict[str, Case]:
    """Solvers on points of a 16 x 16 grid as rows, and on points in no order."""
    default = {"geotype": "structured_2D", "time_input": False, "space_dim": 2, "fun_dim": 3, "out_dim": 2, "shapelist": [16, 16], "task": "steady", "n_hidden": 16, "n_layers": 2, "n_heads": 2, "act": "gelu", "mlp_ratio": 1, "dropout": 0.0, "unified_pos": 0, "ref": 8, "slice_num": 4, "modes": 4, "psi_dim": 4, "attn_type": "linear", "mwt_k": 3, "standardize_query_pos": False, "num_output_tokens": 8}  # fmt: skip

    def made(name: str, **how: Any) -> Case:
        build = lambda: of("thuml+Neural-Solver-Library", f"models.{name}").Model(SimpleNamespace(**default | how))  # noqa: E731
        num = 256 if how.get("geotype") != "unstructured" else 40
        return case(build, {"x": (1, 2), "fx": (1, 2)}, x=(2, num, 2), fx=(2, num, 3))

    plain = ("F_FNO", "FNO", "Factformer", "GNOT", "Galerkin_Transformer", "LSM", "MWT", "ONO", "Swin_Transformer", "Transformer", "Transolver", "UPT", "U_FNO", "U_NO", "U_Net")  # fmt: skip
    points = ("F_FNO", "FNO", "GNOT", "Galerkin_Transformer", "LSM", "ONO", "Transformer", "Transolver", "UPT", "U_Net")
    found = {name: made(name) for name in plain}
    found |= {f"{name} of points": made(name, geotype="unstructured", shapelist=None) for name in points}
    return found | {"ONO, Nystrom": made("ONO", attn_type="nystrom"), "ONO, self-attention": made("ONO", attn_type="selfAttention")}  # fmt: skip


def made(repository: str, module: str, name: str, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    """Return what builds a model of a snapshot; names of lists in "params" are one argument."""
    return lambda: getattr(of(repository, module), name)(*args, **options)


def poseidon() -> dict[str, Case]:
    def scot(**how: Any) -> nn.Module:
        model = of("camlab-ethz+poseidon", "scOT.model")
        model.ScOT.get_head_mask = lambda self, mask, num, *rest: [None] * num  # transformers 5 has none
        size = {"image_size": 32, "patch_size": 4, "num_channels": 3, "num_out_channels": 3, "embed_dim": 8}
        depth = {"depths": [1, 1], "num_heads": [1, 2], "skip_connections": [1, 0], "window_size": 4}
        return model.ScOT(model.ScOTConfig(**size, **depth, use_conditioning=True, drop_path_rate=0.0, **how))

    given = {"pixel_values": (2, 3, 32, 32), "time": (2,)}
    found = {"ScOT": {}, "ScOT, ResNet": {"residual_model": "resnet"}, "ScOT, residual": {"learn_residual": True}}
    return {name: case(lambda how=how: scot(**how), {"pixel_values": (2, 3)}, **given) for name, how in found.items()}


def dpot() -> dict[str, Case]:
    at, small = "HaoZhongkai+DPOT", {"img_size": 32, "patch_size": 8, "in_channels": 3, "out_channels": 2, "in_timesteps": 2, "n_blocks": 2, "embed_dim": 16, "out_layer_dim": 8, "depth": 2, "modes": 2}  # fmt: skip
    flat = case(made(at, "models.dpot", "DPOTNet", **small), {"x": (1, 2)}, x=(2, 32, 32, 2, 3))
    film = made(at, "models.dpot3d", "DPOTNet3D", **small | {"img_size": 16})
    return {"DPOTNet": flat, "DPOTNet3D": case(film, {"x": (1, 2)}, x=(2, 16, 16, 16, 2, 3))}


def oformer() -> dict[str, Case]:
    """An encoder and a decoder of points."""

    class Both(nn.Module):
        def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
            super().__init__()
            self.encoder, self.decoder = encoder, decoder

        def forward(self, x: Tensor, pos: Tensor) -> Any:
            return self.decoder(self.encoder(x, pos), pos, pos)

    def build() -> nn.Module:
        of("BaratiLab+OFormer/uniform_grids/nn_module", "attention_module")
        encoder, decoder = (
            of("BaratiLab+OFormer/uniform_grids", f"nn_module.{x}_module") for x in ("encoder", "decoder")
        )
        return Both(encoder.SpatialEncoder2D(5, 16, 16, 2, 2, 8), decoder.PointWiseDecoder2DSimple(16, 2, 8))

    return {"SpatialEncoder2D": case(build, {"x": (1, 2), "pos": (1, 2)}, x=(2, 64, 5), pos=(2, 64, 2))}


def aroma() -> dict[str, Case]:
    how = {"num_channels": 3, "hidden_dim": 16, "dim": 16, "num_self_attentions": 1, "num_latents": 6, "latent_dim": 4, "latent_heads": 2, "latent_dim_head": 8, "cross_heads": 2, "cross_dim_head": 8, "scales": [2, 3], "mlp_feature_dim": 8, "depth_inr": 2, "num_freq": 4}  # fmt: skip
    given = {"images": (2, 40, 3), "coords": (2, 40, 2)}
    both = dict.fromkeys(given, (1, 2))
    dit = made(
        "LouisSerrano+aroma",
        "aroma.DIT",
        "DiT",
        input_size=4,
        num_tokens=20,
        in_channels=4,
        hidden_size=16,
        depth=2,
        num_heads=2,
    )
    return {
        "encoder and decoder": case(made("LouisSerrano+aroma", "aroma.encoder_decoder", "AROMAEncoderDecoderKL", **how), both, **given),
        "DiT": case(dit, {"x": (1, 2)}, x=(2, 40, 4), t=(2,), options=SINGLE),
    }  # fmt: skip


def orthogonal() -> dict[str, Case]:
    at, how = "zhijie-group+Orthogonal-Neural-operator", {"space_dim": 2, "n_layers": 2, "n_hidden": 16, "n_head": 2, "psi_dim": 4, "fun_dim": 3, "out_dim": 2, "orth": True}  # fmt: skip
    both = {"x": (1, 2), "fx": (1, 2)}
    kinds = ("linear", "selfAttention", "nystrom", "galerkin")
    return {f"ONO2 {kind}": case(made(at, "ONOmodel2", "ONO2", **how, attn_type=kind), both, x=(2, 40, 2), fx=(2, 40, 3)) for kind in kinds}  # fmt: skip


def latent_neural_operator() -> dict[str, Case]:
    at = "L-I-M-I-T+LatentNeuralOperator/LNO-PyTorch/ForwardProblem"
    sizes = (2, 6, 16, 2, 2, 2, 3, 2)
    how = {"model_attr": {"time": False}, "act": "GELU"}
    call = lambda model, x, y: model(x, y)  # noqa: E731
    both = {"x": (1, 2), "y": (1, 2)}
    return {f"LNO {kind}": case(made(at, "module.model", "LNO", *sizes, attn=kind, **how), both, call, x=(2, 40, 2), y=(2, 40, 3)) for kind in ("Attention_Vanilla", "Galerkin")}  # fmt: skip


def pdearena() -> dict[str, Case]:
    ends = {"n_input_scalar_components": 1, "n_input_vector_components": 1, "n_output_scalar_components": 1, "n_output_vector_components": 1, "time_history": 2, "time_future": 1, "hidden_channels": 8, "activation": "gelu"}  # fmt: skip
    at, on = "microsoft+pdearena", {"x": (3, 4)}
    x, unet = (2, 2, 3, 32, 32), {"ch_mults": (1, 2), "is_attn": (False, True), "n_blocks": 1, "mid_attn": True}

    def net(module: str, name: str, **how: Any) -> Case:
        return case(made(at, f"pdearena.modules.{module}", name, **ends | how), on, x=x)

    def resnet(block: str, **how: Any) -> Case:
        def build() -> nn.Module:
            module = of(at, "pdearena.modules.twod_resnet")
            kind = getattr(module, block)
            few = type(block, (kind,), {"__init__": partialmethod(kind.__init__, **how)})
            return module.ResNet(block=few, num_blocks=[1, 1], norm=not how, **ends)

        return case(build, on, x=x, options=SINGLE)

    def timed(module: str, **how: Any) -> Case:
        conditioned = made(
            at, f"pdearena.modules.conditioned.{module}", "Unet", **ends, **how, param_conditioning="scalar"
        )
        return case(conditioned, on, x=x, time=lambda: torch.rand(2), z=lambda: torch.rand(2), options=SINGLE)

    return {
        "Unet": net("twod_unet", "Unet", **unet, norm=True), "Unet 1x1": net("twod_unet", "Unet", **unet, use1x1=True),
        "Unet2015": net("twod_unet2015", "Unet2015"), "Unetbase": net("twod_unetbase", "Unetbase"),
        "ResNet": resnet("BasicBlock"), "ResNet dilated": resnet("DilatedBasicBlock"), "FNO": resnet("FourierBasicBlock", modes1=4, modes2=4),
        "Unet conditioned": timed("twod_unet", **unet, norm=True),
    }  # fmt: skip


def pdebench() -> dict[str, Case]:
    at, on = "pdebench+PDEBench", {"x": (2, 3)}
    fno = made(at, "pdebench.models.fno.fno", "FNO2d", 2, modes1=4, modes2=4, width=8, initial_step=3)
    cube = made(at, "pdebench.models.fno.fno", "FNO3d", 2, modes1=2, modes2=2, modes3=2, width=6, initial_step=3)
    unet = "pdebench.models.unet.unet"
    return {
        "FNO2d": case(fno, {"x": (1, 2), "grid": (1, 2)}, x=(2, 16, 16, 6), grid=(2, 16, 16, 2)),
        "FNO3d": case(cube, {"x": (1, 2), "grid": (1, 2)}, x=(2, 8, 8, 8, 6), grid=(2, 8, 8, 8, 3)),
        "UNet2d": case(made(at, unet, "UNet2d", 3, 2, init_features=4), on, x=(2, 3, 32, 32)),
        "UNet3d": case(made(at, unet, "UNet3d", 3, 2, init_features=4), on, x=(2, 3, 16, 16, 16)),
        "UNet1d": case(made(at, unet, "UNet1d", 3, 2, init_features=4), {"x": (2, 1)}, x=(2, 3, 32)),
    }


def convolutional_neural_operator() -> dict[str, Case]:
    at = "camlab-ethz+ConvolutionalNeuralOperator"
    cno = made(f"{at}/CNO2d_simplified", "CNO2d", "CNO2d", 3, 2, 32, 2, N_res=1, N_res_neck=1, channel_multiplier=4)
    return {"CNO2d": case(cno, {"x": (2, 3)}, x=(2, 3, 32, 32))}


def makani() -> dict[str, Case]:
    at, sphere = "NVIDIA+makani", {"inp_shape": (16, 32), "out_shape": (16, 32), "inp_chans": 3, "out_chans": 2, "embed_dim": 8, "num_layers": 2}  # fmt: skip
    patches = {"inp_shape": (16, 32), "patch_size": (2, 2), "inp_chans": 3, "out_chans": 2, "embed_dim": 16}
    fcn3 = {"inp_shape": (16, 32), "out_shape": (16, 32), "scale_factor": 2, "num_layers": 2, "channel_names": ["u10m", "t2m", "u500", "v500", "u850", "v850"], "atmo_embed_dim": 4, "surf_embed_dim": 4, "aux_embed_dim": 4}  # fmt: skip
    on, x = {"x": (2, 3)}, (1, 3, 16, 32)
    nets = "makani.models.networks"
    sfno, sno = (f"Spherical{name}NeuralOperatorNet" for name in ("Fourier", ""))
    return {
        "SFNO": case(made(at, f"{nets}.sfnonet", sfno, **sphere, scale_factor=2), on, x=x, options=SINGLE),
        "SFNO diagonal": case(made(at, f"{nets}.sfnonet", sfno, **sphere, scale_factor=2, operator_type="diagonal"), on, x=x, options=SINGLE),
        "FNO": case(made(at, f"{nets}.sfnonet", sfno, **sphere, scale_factor=2, spectral_transform="fft"), on, x=x, options=SINGLE),
        "SNO": case(made(at, f"{nets}.snonet", sno, **sphere, scale_factor=2), on, x=x, options=SINGLE),
        "AFNO": case(made(at, f"{nets}.afnonet", "AdaptiveFourierNeuralOperatorNet", **patches, num_layers=2, num_blocks=2), on, x=x, options=SINGLE),
        "AFNO v2": case(made(at, f"{nets}.afnonet_v2", "AdaptiveFourierNeuralOperatorNet", **patches, num_layers=2, num_blocks=2), on, x=x, options=SINGLE),
        "ViT": case(made(at, f"{nets}.vit", "VisionTransformer", **patches, depth=2, num_heads=2), on, x=x, options=SINGLE),
        "FCN3": case(made(at, f"{nets}.fourcastnet3", "AtmoSphericNeuralOperatorNet", **fcn3), on, x=(1, 6, 16, 32), options=SINGLE),
        "Pangu": case(made(at, f"{nets}.pangu", "Pangu", inp_shape=(24, 48), out_shape=(24, 48), patch_size=(2, 4, 4), window_size=(2, 3, 6)), on, lambda model, x: model(x), x=(1, 5, 24, 48), options=SINGLE),
    }  # fmt: skip


def climax() -> dict[str, Case]:
    setattr(np, "float", float)  # noqa: B010 - an old name
    names = ["t2m", "u10", "v10"]
    how = {"img_size": [16, 32], "patch_size": 4, "embed_dim": 16, "depth": 2, "decoder_depth": 1, "num_heads": 2, "drop_path": 0.0, "drop_rate": 0.0}  # fmt: skip

    def call(model: nn.Module, x: Tensor) -> Any:
        return model(x, None, torch.tensor([0.1, 0.2], dtype=x.dtype), names, names[:2], None, None)[1]

    return {"ClimaX": case(made("microsoft+ClimaX/src", "climax.arch", "ClimaX", names, **how), {"x": (2, 3)}, call, x=(2, 3, 16, 32))}  # fmt: skip


def stormer() -> dict[str, Case]:
    names = ["t2m", "u10", "v10"]
    build = made("tung-nd+stormer", "stormer.models.hub.stormer", "Stormer", [16, 32], names, patch_size=4, hidden_size=16, depth=2, num_heads=2)  # fmt: skip
    call = lambda model, x: model(x, names, torch.tensor([6.0, 12.0], dtype=x.dtype))  # noqa: E731
    return {"Stormer": case(build, {"x": (2, 3)}, call, x=(2, 3, 16, 32))}


def prithvi() -> dict[str, Case]:
    def build(shifting: bool) -> nn.Module:
        mu = {f"input_scalers_{kind}": torch.rand(3) + 0.5 for kind in ("mu", "sigma")}
        static = {f"static_input_scalers_{kind}": torch.rand(4) + 0.5 for kind in ("mu", "sigma")}
        return of("NASA-IMPACT+Prithvi-WxC", "PrithviWxC.model").PrithviWxC(in_channels=3, input_size_time=2, in_channels_static=4, input_scalers_epsilon=0.0, static_input_scalers_epsilon=0.0, output_scalers=torch.rand(3), n_lats_px=16, n_lons_px=32, patch_size_px=(2, 2), mask_unit_size_px=(8, 8), mask_ratio_inputs=0.0, mask_ratio_targets=0.0, embed_dim=16, n_blocks_encoder=1, n_blocks_decoder=1, mlp_multiplier=2, n_heads=2, dropout=0.0, drop_path=0.0, parameter_dropout=0.0, residual="climate", masking_mode="local", positional_encoding="absolute", encoder_shifting=shifting, decoder_shifting=shifting, **mu, **static)  # fmt: skip

    def call(model: nn.Module, **given: Any) -> Any:
        return model(given | {"lead_time": torch.tensor([6.0, 12.0]), "input_time": torch.tensor([3.0, 6.0])})

    given = {"x": (2, 2, 3, 16, 32), "y": (2, 3, 16, 32), "static": (2, 4, 16, 32), "climate": (2, 3, 16, 32)}
    cut = {name: (len(shape) - 2, len(shape) - 1) for name, shape in given.items()}
    return {f"PrithviWxC{words}": case(lambda on=on: build(on), cut, call, **given) for words, on in (("", False), (", shifting", True))}  # fmt: skip


def archesweather() -> dict[str, Case]:
    how = {"lon_resolution": 48, "lat_resolution": 24, "emb_dim": 8, "cond_dim": 6, "num_heads": (1, 2, 2, 1), "droppath_coeff": 0.0, "patch_size": (2, 2, 2), "window_size": (1, 3, 6), "surface_ch": 3, "level_ch": 2}  # fmt: skip
    build = made("gcouairon+ArchesWeather", "backbones.archesweather", "ArchesWeatherCond", **how)
    given = {"input_surface": (1, 3, 24, 48), "input_level": (1, 2, 13, 24, 48), "cond_emb": (1, 6)}
    return {"ArchesWeather": case(build, {"input_surface": (2, 3), "input_level": (3, 4)}, **given)}


def segnn() -> dict[str, Case]:
    """Points with edges drawn at random, and spherical harmonics of the edges' directions."""

    def build() -> nn.Module:
        model = of("RobDHess+Steerable-E3-GNN", "models.segnn.segnn")
        irreps = import_module("e3nn.o3").Irreps
        hidden = import_module("models.balanced_irreps").BalancedIrreps(1, 12, True)
        return model.SEGNN(irreps("2x0e+1x1o"), hidden, irreps("1x1o"), irreps("1x0e+1x1o"), irreps("1x0e+1x1o"), num_layers=2, task="node", additional_message_irreps=irreps("1x0e"))  # fmt: skip

    def call(model: nn.Module, **given: Any) -> Any:
        graph = SimpleNamespace(**given, additional_message_features=None, batch=None)
        graph.node_attr = torch.cat([torch.ones_like(given["pos"][:, :1]), given["pos"]], 1)
        graph.additional_message_features = given["edge_attr"][:, :1]
        graph.has_isolated_nodes = graph.contains_isolated_nodes = bool  # False
        return model(graph)

    return {"SEGNN": case(build, {"x": "nodes", "pos": "nodes", "edge_attr": "edges", "edge_index": "index"}, call, x=(24, 5), pos=(24, 3), edge_attr=(90, 4), edge_index=lambda: edges(24, 90))}  # fmt: skip


def edges(num_nodes: int, num_edges: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(5)
    src, dst = torch.randint(0, num_nodes, (2, num_edges), generator=draw)
    dst[:num_nodes] = torch.arange(num_nodes)
    order = torch.argsort(dst, stable=True)
    return torch.stack([src[order], dst[order]])


REGISTERED: dict[str, set[str]] = {}  # with GraphGym, before any snapshot


def forget_layers() -> None:
    """Forget what another snapshot has registered with GraphGym."""
    register = vars(import_module("torch_geometric.graphgym.register"))
    for name, known in ((name, x) for name, x in register.items() if name.endswith("_dict")):
        for key in known.keys() - REGISTERED.setdefault(name, set(known)):
            del known[key]


def graph_transformers(repository: str, module: str, layer: str, *args: Any, **how: Any) -> dict[str, Case]:
    """Layers of a ``Data`` that they write to, with edges drawn at random."""

    def build() -> nn.Module:
        forget_layers()
        return nn.ModuleList(getattr(of(repository, module), layer)(8, 8, 2, *args, **how) for _ in range(2))

    def call(model: nn.Module, x: Tensor, edge_attr: Tensor, edge_index: Any) -> Any:
        from torch_geometric.data import Data

        data = Data(x=x, edge_attr=edge_attr, edge_index=edge_index, batch=torch.zeros(24, dtype=torch.long))
        data.expander_edge_attr, data.expander_edge_index, data.num_nodes = edge_attr, edge_index, 24
        data.log_deg = torch.arange(24, dtype=x.dtype)
        for each in model:
            data = each(data)
        return data.x, data.edge_attr

    return {layer: case(build, {"x": "nodes", "edge_attr": "edges", "edge_index": "index"}, call, x=(24, 8), edge_attr=(90, 8), edge_index=lambda: edges(24, 90))}  # fmt: skip


def grit() -> dict[str, Case]:
    def config() -> Any:
        from yacs.config import CfgNode

        return CfgNode({"bn_momentum": 0.1, "bn_no_runner": False, "attn": {}})

    return graph_transformers("LiamMa+GRIT", "grit.layer.grit_layer", "GritTransformerLayer", cfg=config())


def exphormer() -> dict[str, Case]:
    return graph_transformers(
        "hamed1375+Exphormer", "graphgps.layer.Exphormer", "ExphormerFullLayer", activation="relu"
    )


def pde_transformer() -> dict[str, Case]:
    sizes = {"in_channels": 2, "out_channels": 2, "hidden_size": 16, "depth": [1] * 7, "num_heads": 2, "patch_size": 2, "window_size": 4, "class_dropout_prob": 0.0}  # fmt: skip
    call = lambda model, x: getattr(y := model(x, torch.tensor([1, 2]), torch.tensor([0, 1])), "sample", y)  # noqa: E731

    def net(module: str, name: str, *args: Any, **how: Any) -> Case:
        def build() -> nn.Module:
            mixed = of(
                "tum-pbs+pde-transformer/pdetransformer/core", f"mixed_channels.{module}", bare=["mixed_channels"]
            )
            return getattr(mixed, name)(*args, **how)

        ends = (lambda model, x: model(x, torch.tensor([0, 1]))) if name == "UNet" else call
        return case(build, {"x": (2, 3)}, ends, x=(2, 2, 32, 32), options=SINGLE)

    return {
        "PDETransformer": net("pde_transformer", "PDEImpl", **sizes, periodic=False),
        "PDETransformer, periodic": net("pde_transformer", "PDEImpl", **sizes, periodic=True),
        "UNet": net("unet", "UNet", 32, 2, 32, 2, (1, 2), 1, (False, True)),
        "FactFormer2D": net("factformer", "FactFormer2D", 2, 32),
    }  # fmt: skip


def gaot() -> dict[str, Case]:
    """Points to a grid that all ranks have, a transformer there, and back to the points."""
    at = "camlab-ethz+GAOT"

    def net(**how: Any) -> Case:
        def build() -> nn.Module:
            magno, attention = of(at, "src.model.layers.magno"), of(at, "src.model.layers.attn")
            small = magno.MAGNOConfig(
                radius=0.4, hidden_size=8, lifting_channels=8, neighbor_search_method="native", **how
            )
            width = attention.TransformerConfig(patch_size=2, hidden_size=16, num_layers=2)
            args = SimpleNamespace(magno=small, transformer=width)
            model = of(at, "src.model.gaot").GAOT(3, 2, SimpleNamespace(args=args, latent_tokens_size=(4, 4)))
            ticks = torch.linspace(0, 1, 4)
            model.register_buffer("latent", torch.cartesian_prod(ticks, ticks))
            return model  # type: ignore[no-any-return]

        call = lambda model, xcoord, pndata: model(model.latent.to(xcoord.dtype), xcoord, pndata)  # noqa: E731
        return case(
            build, {"xcoord": (0, 1), "pndata": (1, 2)}, call, xcoord=lambda: torch.rand(40, 2), pndata=(1, 40, 3)
        )

    return {"GAOT": net(use_geoembed=False), "GAOT, geometric embedding": net(embedding_method="pointnet")}


def compared_with_erwin() -> dict[str, Case]:
    """What Erwin is compared with in its repository."""
    at = "maxxxzdn+erwin/models"
    batch = lambda: torch.zeros(24, dtype=torch.long)  # noqa: E731

    def call(model: nn.Module, x: Tensor, pos: Tensor, edge_index: Any = None) -> Any:
        return model(x, pos, batch(), edge_index=edge_index)

    graph = {"x": "nodes", "pos": "nodes", "edge_index": "index"}
    given: dict[str, Any] = {"x": (24, 5), "pos": (24, 3)}
    attention = made(at, "transolver", "Transolver", 16, 16, 8, 2, 2, 3)
    return {
        "MPNN": case(made(at, "mpnn", "MPNN", 5, 2, 16, 3), graph, call, **given, edge_index=lambda: edges(24, 90)),
        "Transolver": case(attention, {"x": (0, 1), "pos": (0, 1)}, call, x=(24, 16), pos=(24, 3)),
    }


#: What makes the cases of each.
REPOSITORIES: dict[str, Callable[[], dict[str, Case]]] = {
    "thuml+Neural-Solver-Library": neural_solver_library,
    "HaoZhongkai+DPOT": dpot,
    "BaratiLab+OFormer": oformer,
    "LouisSerrano+aroma": aroma,
    "zhijie-group+Orthogonal-Neural-operator": orthogonal,
    "L-I-M-I-T+LatentNeuralOperator": latent_neural_operator,
    "camlab-ethz+poseidon": poseidon,
    "microsoft+pdearena": pdearena,
    "pdebench+PDEBench": pdebench,
    "camlab-ethz+ConvolutionalNeuralOperator": convolutional_neural_operator,
    "NVIDIA+makani": makani,
    "microsoft+ClimaX": climax,
    "tung-nd+stormer": stormer,
    "NASA-IMPACT+Prithvi-WxC": prithvi,
    "gcouairon+ArchesWeather": archesweather,
    "RobDHess+Steerable-E3-GNN": segnn,
    "LiamMa+GRIT": grit,
    "hamed1375+Exphormer": exphormer,
    "tum-pbs+pde-transformer": pde_transformer,
    "camlab-ethz+GAOT": gaot,
    "maxxxzdn+erwin": compared_with_erwin,
}
