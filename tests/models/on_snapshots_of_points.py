"""Models of public repositories of points, meshes and atoms."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.models.cases import Case
from tests.models.neighbourhoods import stand_in
from tests.models.on_snapshots import SINGLE, case, edges, forget_layers, of


@contextmanager
def stood_in(name: str) -> Iterator[None]:
    """Stand in for a module while another is imported; what it is asked for is never called here."""
    absent = name not in sys.modules and find_spec(name) is None
    if absent:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = []
        sys.modules[name].__getattr__ = {}.get  # type: ignore[method-assign]
    try:
        yield
    finally:
        if absent:
            del sys.modules[name]


GRAPH = {"x": "nodes", "edge_index": "index"}


def noether() -> dict[str, Case]:
    """Points of a body's surface and of the air around it; some are anchors that all others attend to."""
    at = "Emmi-AI+noether/src"

    def config(name: str, **how: Any) -> Any:
        return getattr(of(at, "noether.core.schemas.models"), name)(kind="", name="", hidden_dim=24, **how)

    block = {"hidden_dim": 24, "num_heads": 2, "mlp_expansion_factor": 2}
    specs = {"position_dim": 3, "surface_output_dims": {"p": 1}, "volume_output_dims": {"u": 3}}

    def ab_upt(*physics: str, **pool: Any) -> Case:
        def build() -> nn.Module:
            pooling = {"hidden_dim": 24, "input_dim": 3} | pool
            small = config("AnchorBranchedUPTConfig", geometry_depth=1, physics_blocks=list(physics), num_surface_blocks=1, num_volume_blocks=1, data_specs=specs, supernode_pooling_config=pooling, transformer_block_config=block | {"use_rope": True})  # fmt: skip
            return of(at, "noether.modeling.models").AnchoredBranchedUPT(small)  # type: ignore[no-any-return]

        points = {"geometry_position": 40, "surface_anchor_position": 12, "volume_anchor_position": 14, "query_surface_position": 20, "query_volume_position": 24}  # fmt: skip
        given: dict[str, Any] = {name: lambda num=num, own=name == "geometry_position": torch.rand(*([] if own else [1]), num, 3) for name, num in points.items()}  # fmt: skip

        def call(model: nn.Module, **given: Any) -> Any:
            return model(**given, geometry_supernode_idx=torch.arange(0, 40, 5), geometry_batch_idx=torch.zeros(40, dtype=torch.long))  # fmt: skip

        cut = {name: (0, 1) if name == "geometry_position" else (1, 2) for name in points}
        return case(build, cut, call, **given, options=SINGLE)

    def upt(**how: Any) -> Case:
        def build() -> nn.Module:
            rope = how.get("use_rope", False)
            small = config("UPTConfig", num_heads=2, mlp_expansion_factor=2, approximator_depth=1, data_specs=specs, supernode_pooling_config={"hidden_dim": 24, "input_dim": 3, "radius": 0.4}, approximator_config=block | how, decoder_config={"input_dim": 3, "depth": 1, "perceiver_block_config": block | how}, use_rope=rope)  # fmt: skip
            return of(at, "noether.modeling.models").UPT(small)  # type: ignore[no-any-return]

        def call(model: nn.Module, **given: Any) -> Any:
            return model(torch.zeros(40, dtype=torch.long), torch.arange(0, 40, 5), **given)

        given: dict[str, Any] = {"surface_position": lambda: torch.rand(40, 3), "query_position": lambda: torch.rand(1, 30, 3)}  # fmt: skip
        return case(build, {"surface_position": (0, 1), "query_position": (1, 2)}, call, **given, options=SINGLE)  # fmt: skip

    def tokens(name: str, **how: Any) -> Case:
        def build() -> nn.Module:
            return getattr(of(at, "noether.modeling.models"), name)(config(f"{how.pop('config', name)}Config", depth=2, transformer_block_config=block | how))  # type: ignore[no-any-return]  # fmt: skip

        return case(build, {"x": (1, 2)}, lambda model, x: model(x, attn_kwargs={}), x=(2, 40, 24))

    slices = {"attention_arguments": {"num_slices": 4}}
    return {
        "AB-UPT": ab_upt("perceiver", "shared", "cross", radius=0.4),
        "AB-UPT, joint, nearest": ab_upt("joint", "perceiver", k=5),
        "AB-UPT, relative positions": ab_upt("perceiver", "shared", radius=0.4, spool_pos_mode="absrelpos"),
        "UPT": upt(),
        "UPT, rope": upt(use_rope=True),
        "Transformer": tokens("Transformer"),
        "Transolver": tokens("Transolver", attention_constructor="transolver", **slices),
        "Transolver++": tokens("Transolver", attention_constructor="transolver_plusplus", **slices),
    }


def upt() -> dict[str, Case]:
    """An encoder of points by edges to supernodes, a model of tokens, and a decoder of points asked for."""
    at = "ml-jku+UPT/src"

    class Whole(nn.Module):
        def __init__(self, *parts: nn.Module) -> None:
            super().__init__()
            self.encoder, self.latent, self.decoder = parts

        def forward(self, x: Tensor | None, mesh_pos: Tensor, query_pos: Tensor, mesh_edges: Tensor) -> Any:
            features = () if x is None else (x,)
            batch = torch.zeros(len(mesh_pos), dtype=torch.long)
            tokens = self.encoder(*features, mesh_pos, mesh_edges, batch)
            num = query_pos.shape[1]
            return self.decoder(self.latent(tokens), query_pos, torch.zeros(num, dtype=torch.long), [0])

    def net(encoder: str, decoder: str, features: int | None) -> Case:
        def made(kind: str, name: str, ends: dict[str, Any], context: dict[str, Any], **how: Any) -> nn.Module:
            parts = name.split("_")
            model = getattr(of(at, f"models.{kind}s.{name}" if kind != "latent" else f"models.latent.{name}"), "".join(x.capitalize() for x in parts))  # fmt: skip
            return model(**ends, static_ctx=context, **how)  # type: ignore[no-any-return]

        def build() -> nn.Module:
            context: dict[str, Any] = {"ndim": 2}
            encode = made("encoder", encoder, {"input_shape": (None, features or 2)}, context, gnn_dim=16, enc_dim=16, perc_dim=16, enc_depth=1, enc_num_attn_heads=2, perc_num_attn_heads=2, num_latent_tokens=4)  # fmt: skip
            latent = made("latent", "transformer_model", {"input_shape": (4, 16)}, context, dim=16, depth=1, num_attn_heads=2)  # fmt: skip
            how = {"dim": 16, "num_attn_heads": 2} | ({"depth": 1} if "transformer" in decoder else {})
            return Whole(encode, latent, made("decoder", decoder, {"input_shape": (4, 16), "output_shape": (None, 2)}, context, **how))  # fmt: skip

        def supernodes() -> Tensor:
            src, dst = edges(24, 90)
            return torch.stack([dst, src], 1)

        given: dict[str, Any] = {"mesh_pos": lambda: torch.rand(24, 2), "query_pos": lambda: torch.rand(1, 30, 2), "mesh_edges": supernodes}  # fmt: skip
        given |= {"x": (24, features)} if features else {"x": lambda: None}
        cut = {"mesh_pos": (0, 1), "query_pos": (1, 2)} | ({"x": (0, 1)} if features else {})
        return case(build, cut, **given, options=SINGLE)

    return {
        "UPT of flows": net("cfd_pool_transformer_perceiver", "cfd_transformer_perceiver", 3),
        "UPT of a car's surface": net("rans_pool_transformer_perceiver", "rans_perceiver", None),
    }


def airfrans() -> dict[str, Case]:
    at = "Extrality+AirfRANS"
    sizes = {"encoder": [5, 8, 8], "decoder": [8, 8, 4], "nb_hidden_layers": 2, "size_hidden_layers": 8, "bn_bool": True, "base_nb": 4, "nb_scale": 3, "layer": "SAGE", "pool": "random", "pool_ratio": [0.5, 0.5], "list_r": [0.6, 0.8], "max_neighbors": 8, "batchnorm": True, "res": True}  # fmt: skip

    def net(name: str, **how: Any) -> Case:
        def build() -> nn.Module:
            model = getattr(of(at, f"models.{name}"), name)
            ends = [import_module("models.MLP").MLP(sizes[end], batch_norm=False) for end in ("encoder", "decoder")]
            return model(sizes | how, *ends)  # type: ignore[no-any-return]

        def call(model: nn.Module, x: Tensor, edge_index: Any) -> Any:
            return model(SimpleNamespace(x=x, edge_index=edge_index, batch=torch.zeros(24, dtype=torch.long)))

        return case(
            build,
            GRAPH,
            call,
            x=lambda: torch.rand(24, 5),
            edge_index=lambda: edges(24, 90),
            options=SINGLE if name == "PointNet" else {},
        )

    return {
        "GraphSAGE": net("GraphSAGE"),
        "PointNet": net("PointNet"),
        "Graph U-Net, random": net("GUNet"),
        "Graph U-Net, top-k": net("GUNet", pool="topk", batchnorm=False),
    }


def schnetpack() -> dict[str, Case]:
    """Atoms, with edges to those near; representations of atoms, and energies with forces from them."""
    at = "atomistic-machine-learning+schnetpack/src"

    def net(name: str, *, output: str = "", **how: Any) -> Case:
        def build() -> nn.Module:
            models, parts = of(at, "schnetpack.representation"), import_module("schnetpack.nn")
            sizes = {"n_interactions": 2, "radial_basis": parts.GaussianRBF(6, 3.0), "cutoff_fn": parts.CosineCutoff(3.0)}  # fmt: skip
            model = getattr(models, name)(n_atom_basis=8, **sizes, **how)
            if not output:
                return model  # type: ignore[no-any-return]
            energy = import_module("schnetpack.atomistic").Atomwise(n_in=8, output_key="energy", aggregation_mode=output)  # fmt: skip
            return nn.ModuleList([model, energy])

        def call(model: Any, pos: Tensor, z: Tensor, edge_index: Any) -> Any:
            names = import_module("schnetpack.properties")
            src, dst = edge_index[0], edge_index[1]
            given = {names.Z: z, names.R: pos, names.Rij: pos[src] - pos[dst], names.idx_i: dst, names.idx_j: src}
            given |= {names.idx_m: torch.zeros(24, dtype=torch.long), names.n_atoms: torch.tensor([24])}
            if not output:
                out = model(given)
                return out["scalar_representation"], out.get("vector_representation")
            return model[1](model[0](given))["energy"]

        def bonds() -> Tensor:
            both = edges(24, 110)
            return both[:, both[0] != both[1]]

        cut = {"pos": "nodes", "z": "nodes", "edge_index": "index"}
        return case(build, cut, call, pos=lambda: torch.rand(24, 3), z=lambda: torch.randint(1, 9, (24,)), edge_index=bonds, options=SINGLE)  # fmt: skip

    return {
        "SchNet": net("SchNet"),
        "SchNet, energy": net("SchNet", output="sum"),
        "PaiNN": net("PaiNN"),
        "PaiNN, mean energy": net("PaiNN", output="avg"),
        "SO3net": net("SO3net", lmax=1),
    }


def erwin() -> dict[str, Case]:
    """Balls of points, as its compiled tree makes them; edges are given."""
    at = "maxxxzdn+erwin/models"

    def build() -> nn.Module:
        with stood_in("torch_cluster"):  # it is called for edges that are not given alone
            small = {"c_in": 5, "c_hidden": [8, 16], "ball_sizes": [8, 8], "enc_num_heads": [2, 2], "enc_depths": [1, 1], "dec_num_heads": [2], "dec_depths": [1], "strides": [2], "mp_steps": 1}  # fmt: skip
            return of(at, "erwin").ErwinTransformer(**small, rotate=0)  # type: ignore[no-any-return]

    def call(model: nn.Module, x: Tensor, pos: Tensor, edge_index: Any) -> Any:
        batch = torch.zeros(24, dtype=torch.long)
        order = torch.argsort(torch.rand(24))
        tree, real = torch.cat([order, order[:8]]), torch.arange(32) < 24
        return model(x, pos, batch, edge_index=edge_index, tree_idx=tree, tree_mask=real, tree_idx_rot=[None] * 3)

    graph = {"x": "nodes", "pos": "nodes", "edge_index": "index"}
    return {"Erwin": case(build, graph, call, x=(24, 5), pos=(24, 3), edge_index=lambda: edges(24, 90))}


def neural_lam() -> dict[str, Case]:
    """States of a grid's points; the graphs of a mesh above them are the model's, whole on all ranks."""
    at = "mllam+neural-lam"
    num, sizes = 36, (9, 4)

    def links(num_from: int, num_to: int, count: int) -> Tensor:
        draw = torch.Generator().manual_seed(count)
        rest = torch.randint(0, num_to, (count - num_to,), generator=draw)
        return torch.stack([torch.randint(0, num_from, (count,), generator=draw), torch.cat([torch.arange(num_to), rest])])  # fmt: skip

    class Store:
        root_path = Path("unused")
        num_grid_points = num

        def get_num_data_vars(self, category: str) -> int:
            return {"state": 3, "forcing": 2, "static": 1}[category]

        def get_vars_names(self, category: str) -> list[str]:
            return ["u", "v", "t"]

        def get_xy_extent(self, category: str) -> list[float]:
            return [0.0, 1.0, 0.0, 1.0]

        def get_dataarray(self, **_: Any) -> Any:
            return SimpleNamespace(values=np.linspace(0, 1, num)[:, None])

        def get_standardization_dataarray(self, category: str) -> Any:
            one = SimpleNamespace(values=np.array([1.0, 2.0, 3.0]))
            return SimpleNamespace(state_mean=one, state_std=one, state_diff_mean_standardized=one, state_diff_std_standardized=one)  # fmt: skip

    def net(name: str, levels: int, **how: Any) -> Case:
        def build() -> nn.Module:
            models = of(at, "neural_lam.models.step_predictors.graph")
            lists = of(at, "neural_lam.utils.buffer_list").BufferList

            def graph(module: nn.Module, *_: Any, **__: Any) -> bool:
                """Register a made-up graph, of the names and shapes of those that are read from files."""
                mesh = sizes[:levels]
                made: dict[str, Any] = {"g2m": [(num, mesh[0], 60)], "m2g": [(mesh[0], num, 70)], "m2m": [(n, n, 3 * n) for n in mesh], "mesh_up": [], "mesh_down": []}  # fmt: skip
                if levels > 1:
                    made |= {"mesh_up": [(mesh[0], mesh[1], 12)], "mesh_down": [(mesh[1], mesh[0], 14)]}
                for key, each in made.items():
                    index, values = [links(*x) for x in each], [torch.rand(count, 3) for *_, count in each]
                    flat = key in ("g2m", "m2g") or (key == "m2m" and levels == 1)
                    for kind, found in (("edge_index", index), ("features", values)):
                        if flat:
                            module.register_buffer(f"{key}_{kind}", found[0], persistent=False)
                        else:
                            setattr(module, f"{key}_{kind}", lists(found, persistent=False))
                static = [torch.rand(n, 2) for n in mesh]
                if levels > 1:
                    module.mesh_static_features = lists(static, persistent=False)
                else:
                    module.register_buffer("mesh_static_features", static[0], persistent=False)
                return levels > 1

            import_module("neural_lam.utils").load_and_register_graph = graph
            aggregate = import_module("neural_lam.gnn_layers").InteractionNet.aggregate
            aggregate.__annotations__ |= {"ptr": Tensor, "dim_size": int}  # PyG 2.8 cannot read "int | None"
            return getattr(models, name)(Store(), hidden_dim=8, processor_layers=2, **how)  # type: ignore[no-any-return]

        given = {"prev_state": (2, num, 3), "prev_prev_state": (2, num, 3), "forcing": (2, num, 6)}
        return case(build, dict.fromkeys(given, (1, 2)), **given, options=SINGLE)

    return {
        "GraphLAM": net("GraphLAM", 1),
        "GraphLAM, propagation, spread": net("GraphLAM", 1, output_std=True, g2m_gnn_type="PropagationNet", m2g_gnn_type="PropagationNet"),
        "HiLAM": net("HiLAM", 2),
        "HiLAM, parallel": net("HiLAMParallel", 2, output_clamping_lower={"u": -4.0}, output_clamping_upper={"u": 4.0}),
    }  # fmt: skip


def graph_weather() -> dict[str, Case]:
    """Points of a grid, with the model's graph of hexagons; and models of pictures that it has beside them."""
    at = "openclimatefix+graph_weather"
    places = [(lat, lon) for lat in range(-80, 81, 20) for lon in range(0, 360, 30)]
    num = len(places)
    small = {"resolution": 0, "feature_dim": 3, "aux_dim": 1, "node_dim": 8, "edge_dim": 8, "num_blocks": 2, "hidden_dim_processor_node": 8, "hidden_dim_processor_edge": 8, "hidden_dim_decoder": 8}  # fmt: skip
    bare = ["graph_weather"]

    def net(module: str, name: str, *args: Any, **how: Any) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            sys.modules["dgl.sparse"] = None  # type: ignore[assignment]  # it is not needed, and may be half there
            return getattr(of(at, f"graph_weather.models.{module}", bare=bare), name)(*args, **how)  # type: ignore[no-any-return]

        return build

    def forecaster(**how: Any) -> Case:
        return case(net("forecast", "GraphWeatherForecaster", places, **small, **how), {"features": (1, 2)}, features=(2, num, 4), options=SINGLE)  # fmt: skip

    lon, lat = np.arange(0, 360, 30), np.arange(-80, 81, 20)
    mesh: dict[str, Any] = {"grid_lon": lon, "grid_lat": lat, "output_features_dim": 2, "hidden_dims": [8, 8], "num_blocks": 1, "num_heads": 2, "splits": 0, "num_hops": 1}  # fmt: skip
    noised = {"corrupted_targets": (2, 12, 9, 2), "prev_inputs": (2, 12, 9, 6), "noise_levels": lambda: torch.rand(2, 1) + 0.1}  # fmt: skip
    cloud = {"points": (1, 40, 2), "features": (1, 40, 3)}

    def weather_mesh() -> nn.Module:
        stand_in()
        ends = {f"{end}_{name}": num for end in ("encoder", "decoder") for name, num in (("num_conv_blocks", 1), ("num_transformer_layers", 1), ("hidden_dim", 4))}  # fmt: skip
        model = net(
            "weathermesh.weathermesh2",
            "WeatherMesh",
            *[None] * 3,
            [6],
            3,
            2,
            4,
            8,
            processor_num_layers=1,
            kernel=(3, 5, 3),
            num_heads=2,
            **ends,
        )()
        model.listed = nn.ModuleList(model.processors)  # which is a list
        return model

    def forecast(model: nn.Module, **given: Any) -> Any:
        return tuple(vars(model(**given, forecast_steps=2)).values())

    pictures = {"image_size": 16, "patch_size": 4, "channels": 3, "depth": 1, "heads": 2, "mlp_dim": 8, "dim_head": 4}
    return {
        "forecaster": forecaster(),
        "forecaster, checkpoints": forecaster(use_checkpointing=True),
        "GraphCast": case(net("graphcast.model", "GraphCast", places, 0, 3, 3, 8, 2), {"features": (1, 2)}, features=(2, num, 3), options=SINGLE),
        "GraphCast, one graph for all": case(net("graphcast.model", "GraphCast", places, 0, 3, 3, 8, 2, efficient_batching=True), {"features": (1, 2)}, features=(2, num, 3), options=SINGLE),
        "GenCast denoiser": case(net("gencast.denoiser", "Denoiser", input_features_dim=3, **mesh), {"corrupted_targets": (1, 2), "prev_inputs": (1, 2)}, **noised, options=SINGLE),
        "FGN": case(net("fgn.model", "FunctionalGenerativeNetwork", input_features_dim=3, noise_dimension=4, **mesh), {"previous_weather_state": (1, 2)}, previous_weather_state=(2, 12, 9, 3), options=SINGLE),
        "CaFA": case(net("cafa.model", "CaFAForecaster", 3, 2, model_dim=8, processor_depth=2, num_heads=2, dim_head=4), {"x": (2, 3)}, x=(2, 3, 16, 16), options=SINGLE),
        "Aurora of points": case(net("aurora.model", "AuroraModel", 3, 2, latent_dim=16, num_layers=2), dict.fromkeys(cloud, (1, 2)), **cloud, options=SINGLE),
        "WeatherMesh": case(weather_mesh, {"surface": (2, 3), "pressure": (3, 4)}, forecast, surface=(2, 3, 14, 16), pressure=(2, 2, 4, 14, 16)),
        "FengWu-GHR of pictures": case(net("fengwu_ghr.layers", "ImageMetaModel", **pictures), {"x": (2, 3)}, lambda model, x: model(x), x=(2, 3, 16, 16), options=SINGLE),
        "FengWu-GHR of points": case(net("fengwu_ghr.layers", "MetaModel", places, **pictures), {"x": (1, 2)}, lambda model, x: model(x), x=(2, num, 3), options=SINGLE),
    }  # fmt: skip


def mp_pde() -> dict[str, Case]:
    """Points of a line in time windows, with edges to their neighbours."""
    at = "brandstetter-johannes+MP-Neural-PDE-Solvers"
    pde = SimpleNamespace(L=2.0, tmax=3.0, dt=0.1)

    def net(module: str, name: str, **how: Any) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            with stood_in("torch_cluster"):
                return getattr(of(at, f"experiments.{module}"), name)(pde, time_window=20, **how)  # type: ignore[no-any-return]

        return build

    def call(model: nn.Module, x: Tensor, pos: Tensor, edge_index: Any) -> Any:
        batch = torch.zeros(24, dtype=torch.long)
        return model(SimpleNamespace(x=x, pos=pos, edge_index=edge_index, batch=batch))

    graph = {"x": "nodes", "pos": "nodes", "edge_index": "index"}
    return {
        "MP-PDE": case(net("models_gnn", "MP_PDE_Solver", hidden_features=128, hidden_layer=2), graph, call, x=(24, 20), pos=(24, 2), edge_index=lambda: edges(24, 90), options=SINGLE),
        "CNN": case(net("models_cnn", "BaseCNN", hidden_channels=8), {"u": (2, 1)}, u=(2, 20, 40), options=SINGLE),
    }  # fmt: skip


def graph_gps() -> dict[str, Case]:
    at = "rampasek+GraphGPS"

    def net(module: str, name: str, *args: Any, **how: Any) -> Case:
        def build() -> nn.Module:
            forget_layers()
            of(at, "graphgps")
            make = getattr(import_module(f"graphgps.layer.{module}"), name)
            return nn.ModuleList(make(*args, **how) for _ in range(2))

        def call(model: nn.Module, x: Tensor, edge_attr: Tensor, edge_index: Any) -> Any:
            from torch_geometric.data import Batch

            data = Batch(x=x, edge_attr=edge_attr, edge_index=edge_index, batch=torch.zeros(24, dtype=torch.long))
            for each in model:
                data = each(data)
            return data.x, data.edge_attr

        cut = {"x": "nodes", "edge_attr": "edges", "edge_index": "index"}
        return case(build, cut, call, x=(24, 8), edge_attr=(90, 8), edge_index=lambda: edges(24, 90), options={"tolerance": 1e-6})  # fmt: skip

    pairs = {"GatedGCN, Transformer": ("CustomGatedGCN", "Transformer"), "GINE, Performer": ("GINE", "Performer"), "GENConv, Transformer": ("GENConv", "Transformer"), "GAT, none": ("GAT", "None")}  # fmt: skip
    found = {f"GPS of {name}": net("gps_layer", "GPSLayer", 8, *kinds, 2) for name, kinds in pairs.items()}
    return found | {
        "Graphormer": net("graphormer_layer", "GraphormerLayer", 8, 2, 0.0, 0.0, 0.0),
        "SAN": net("san_layer", "SANLayer", 0.1, 8, 8, 2, False, None),
        "SAN 2": net("san2_layer", "SAN2Layer", 0.1, 8, 8, 2, False, None),
    }


def point_transformer() -> dict[str, Case]:
    """Points in voxels, in the orders of space-filling curves; convolutions are spconv's, of its package for CPUs."""
    at = "Pointcept+PointTransformerV3"

    def build() -> nn.Module:
        for name in ("ops", "cppcore"):  # which asks for a GPU's stream in its backward on CPUs
            import_module(f"spconv.pytorch.{name}").get_current_stream = lambda: 0
        small = {"stride": (2,), "enc_depths": (1, 1), "enc_channels": (8, 16), "enc_num_head": (1, 2), "enc_patch_size": (8, 8), "dec_depths": (1,), "dec_channels": (8,), "dec_num_head": (2,), "dec_patch_size": (8,), "drop_path": 0.0, "enable_flash": False}  # fmt: skip
        return of(".", f"{at}.model", bare=[at]).PointTransformerV3(5, **small)  # type: ignore[no-any-return]

    def grid() -> Tensor:
        draw = torch.randperm(512, generator=torch.Generator().manual_seed(3))[:40]
        return torch.stack([draw // 64, draw // 8 % 8, draw % 8], 1).int()

    def call(model: nn.Module, feat: Tensor, **given: Any) -> Any:
        grid_coord = given.get("grid_coord", grid())
        batch = torch.zeros(40, dtype=torch.long)
        return model({"feat": feat, "grid_coord": grid_coord, "coord": grid_coord.float(), "batch": batch}).feat

    return {
        "features": case(build, {"feat": (0, 1)}, call, feat=(40, 5), options=SINGLE),
        "points and features": case(build, {"feat": (0, 1), "grid_coord": (0, 1)}, call, feat=(40, 5), grid_coord=grid, options=SINGLE),
    }  # fmt: skip


class Bodies:
    """Graphs of which one was made, as DGL's."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)

    def batch_num_nodes(self) -> list[int]:
        return [len(each.ndata["x"]) for each in self.parts]


def gnot() -> dict[str, Case]:
    """Points of two bodies, which are padded to one length, and points of their surfaces; graphs are holders of points."""
    at = "HaoZhongkai+GNOT"

    def net(module: str, name: str, **how: Any) -> Case:
        def build() -> nn.Module:
            models = of(at, f"models.{module}")
            models.dgl = SimpleNamespace(unbatch=list)
            return getattr(models, name)(trunk_size=5, branch_sizes=[3], n_layers=2, n_hidden=16, n_head=2, **how)  # type: ignore[no-any-return]

        def call(model: nn.Module, first: Tensor, second: Tensor, surface: Tensor, u_p: Tensor) -> Any:
            return model(Bodies([SimpleNamespace(ndata={"x": x}) for x in (first, second)]), u_p, [surface])

        given = {"first": (20, 3), "second": (26, 3), "surface": (2, 15, 3), "u_p": (2, 2)}
        return case(build, {"first": (0, 1), "second": (0, 1), "surface": (1, 2)}, call, **given, options=SINGLE)

    return {
        "CGPTNO": net("cgpt", "CGPTNO"),
        "GNOT": net("mmgpt", "GNOT", space_dim=2, n_inner=2),
    }


def torchmd_net() -> dict[str, Case]:
    """Atoms; a kernel of warp finds those near each other."""
    at, sizes = "torchmd+torchmd-net", {"hidden_channels": 8, "num_layers": 2, "num_rbf": 6, "cutoff_upper": 0.6}

    def net(module: str, name: str, **how: Any) -> Case:
        build = lambda: getattr(of(at, f"torchmdnet.models.{module}"), name)(**sizes | how)  # noqa: E731

        def call(model: nn.Module, pos: Tensor, z: Tensor) -> Any:
            return model(z, pos, torch.zeros(24, dtype=torch.long))[:2]

        given: dict[str, Any] = {"pos": lambda: torch.rand(24, 3), "z": lambda: torch.randint(1, 9, (24,))}
        return case(build, {"pos": (0,), "z": (0,)}, call, **given, options=SINGLE)

    return {
        "TensorNet": net("tensornet", "TensorNet", static_shapes=False),
        "TorchMD-ET": net("torchmd_et", "TorchMD_ET", num_heads=2),
        "TorchMD-GN": net("torchmd_gn", "TorchMD_GN", num_filters=8),
    }


REPOSITORIES: dict[str, Callable[[], dict[str, Case]]] = {
    "Emmi-AI+noether": noether,
    "ml-jku+UPT": upt,
    "Extrality+AirfRANS": airfrans,
    "atomistic-machine-learning+schnetpack": schnetpack,
    "maxxxzdn+erwin": erwin,
    "mllam+neural-lam": neural_lam,
    "brandstetter-johannes+MP-Neural-PDE-Solvers": mp_pde,
    "rampasek+GraphGPS": graph_gps,
    "Pointcept+PointTransformerV3": point_transformer,
    "HaoZhongkai+GNOT": gnot,
    "torchmd+torchmd-net": torchmd_net,
    "openclimatefix+graph_weather": graph_weather,
}
