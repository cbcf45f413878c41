"""scidata: each rank reads only its part of a sample, from Zarr, HDF5 or NetCDF, as a ShardTensor.

Names are imported on first use, so that the command line answers without loading torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scidata import errors as errors
    from scidata.core.index_map import IndexMap as IndexMap
    from scidata.core.patches import Patches as Patches
    from scidata.core.sample_source import SampleSource as SampleSource
    from scidata.core.trace import merge_traces as merge_traces
    from scidata.core.trace import trace as trace
    from scidata.data import metrics as metrics
    from scidata.data.channels import Channels as Channels
    from scidata.data.collate import collate as collate
    from scidata.data.combine import concat as concat
    from scidata.data.combine import mix as mix
    from scidata.data.combine import subset as subset
    from scidata.data.combined_dataset import CombinedDataset as CombinedDataset
    from scidata.data.grid_dataset import ShardedDataset as ShardedDataset
    from scidata.data.hetero_sample import HeteroSample as HeteroSample
    from scidata.data.irregular_dataset import IrregularDataset as IrregularDataset
    from scidata.data.irregular_sample import IrregularSample as IrregularSample
    from scidata.data.join import join as join
    from scidata.data.joined_dataset import JoinedDataset as JoinedDataset
    from scidata.data.joined_sample import JoinedSample as JoinedSample
    from scidata.data.open_dataset import open_dataset as open_dataset
    from scidata.data.open_together import open_together as open_together
    from scidata.data.output.create import create as create
    from scidata.data.output.writer import Writer as Writer
    from scidata.data.patch_dataset import PatchDataset as PatchDataset
    from scidata.data.sample import Sample as Sample
    from scidata.data.shard_dataset import shard_dataset as shard_dataset
    from scidata.data.statistics import statistics as statistics
    from scidata.data.statistics_table import Statistics as Statistics
    from scidata.device_mesh import init_mesh as init_mesh
    from scidata.device_mesh.stop_signal import StopSignal as StopSignal
    from scidata.interop.shard_tensors import from_dtensor as from_dtensor
    from scidata.interop.shard_tensors import from_physicsnemo as from_physicsnemo
    from scidata.interop.shard_tensors import to_dtensor as to_dtensor
    from scidata.interop.shard_tensors import to_physicsnemo as to_physicsnemo
    from scidata.loader.data_loader import DataLoader as DataLoader
    from scidata.loader.neighbor_loader import ClusterLoader as ClusterLoader
    from scidata.loader.neighbor_loader import NeighborLoader as NeighborLoader
    from scidata.loader.sampler import DistributedSampler as DistributedSampler
    from scidata.meshes.order.cuts import balanced_bounds as balanced_bounds
    from scidata.meshes.sets.nested import Cutout as Cutout
    from scidata.meshes.sets.nested import cutout as cutout
    from scidata.shard import ShardTensor as ShardTensor
    from scidata.shard import register_op as register_op
    from scidata.shard import shard_ops as shard_ops
    from scidata.shard.attention.algorithms import attention as attention
    from scidata.shard.comm.collectives import all_gather_v as all_gather_v
    from scidata.shard.comm.collectives import indexed_all_to_all_v as indexed_all_to_all_v
    from scidata.shard.comm.collectives import reduce_scatter_v as reduce_scatter_v
    from scidata.shard.comm.rooted import gather_v as gather_v
    from scidata.shard.comm.rooted import scatter_v as scatter_v
    from scidata.shard.compile import compile as compile
    from scidata.shard.explain import explain as explain
    from scidata.shard.gathering import gather as gather
    from scidata.shard.graphs.ghosts import halo_exchange as halo_exchange
    from scidata.shard.graphs.routed import start_exchange as start_exchange
    from scidata.shard.ops.at_points import interpolate as interpolate
    from scidata.shard.parallel import no_sync as no_sync
    from scidata.shard.parallel import parallelize as parallelize
    from scidata.shard.parallel.buffers import sync_module_over_mesh as sync_module_over_mesh
    from scidata.shard.scatter_tensor import scatter_tensor as scatter_tensor
    from scidata.sources.access.retry import set_retry as set_retry
    from scidata.store.partitioning.partition import partition as partition

__version__ = "0.1.0"

#: Where names are defined.
_NAMES = {
    "scidata.core.index_map": ("IndexMap",),
    "scidata.core.patches": ("Patches",),
    "scidata.core.sample_source": ("SampleSource",),
    "scidata.core.trace": ("merge_traces", "trace"),
    "scidata.data.channels": ("Channels",),
    "scidata.data.collate": ("collate",),
    "scidata.data.combine": ("concat", "mix", "subset"),
    "scidata.data.combined_dataset": ("CombinedDataset",),
    "scidata.data.statistics_table": ("Statistics",),
    "scidata.data.grid_dataset": ("ShardedDataset",),
    "scidata.data.irregular_dataset": ("IrregularDataset",),
    "scidata.data.hetero_sample": ("HeteroSample",),
    "scidata.data.irregular_sample": ("IrregularSample",),
    "scidata.data.join": ("join",),
    "scidata.data.joined_dataset": ("JoinedDataset",),
    "scidata.data.joined_sample": ("JoinedSample",),
    "scidata.data.open_dataset": ("open_dataset",),
    "scidata.data.open_together": ("open_together",),
    "scidata.data.output.create": ("create",),
    "scidata.data.output.writer": ("Writer",),
    "scidata.data.patch_dataset": ("PatchDataset",),
    "scidata.data.sample": ("Sample",),
    "scidata.data.shard_dataset": ("shard_dataset",),
    "scidata.data.statistics": ("statistics",),
    "scidata.device_mesh": ("init_mesh",),
    "scidata.device_mesh.stop_signal": ("StopSignal",),
    "scidata.interop.shard_tensors": ("from_dtensor", "from_physicsnemo", "to_dtensor", "to_physicsnemo"),
    "scidata.loader.data_loader": ("DataLoader",),
    "scidata.loader.neighbor_loader": ("ClusterLoader", "NeighborLoader"),
    "scidata.loader.sampler": ("DistributedSampler",),
    "scidata.meshes.order.cuts": ("balanced_bounds",),
    "scidata.meshes.sets.nested": ("Cutout", "cutout"),
    "scidata.shard": ("ShardTensor", "register_op", "scatter_tensor", "shard_ops"),
    "scidata.shard.attention.algorithms": ("attention",),
    "scidata.shard.comm.collectives": ("all_gather_v", "indexed_all_to_all_v", "reduce_scatter_v"),
    "scidata.shard.comm.rooted": ("gather_v", "scatter_v"),
    "scidata.shard.compile": ("compile",),
    "scidata.shard.explain": ("explain",),
    "scidata.shard.gathering": ("gather",),
    "scidata.shard.ops.at_points": ("interpolate",),
    "scidata.shard.graphs.ghosts": ("halo_exchange",),
    "scidata.shard.graphs.routed": ("start_exchange",),
    "scidata.shard.parallel": ("no_sync", "parallelize"),
    "scidata.shard.parallel.buffers": ("sync_module_over_mesh",),
    "scidata.sources.access.retry": ("set_retry",),
    "scidata.store.partitioning.partition": ("partition",),
}
#: What opt_einsum, and tensorly with it, looks for in the package of an array's class, or else takes it for NumPy's.
_ASKED_BY_OPT_EINSUM = ("einsum", "tensordot", "transpose")
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = {"errors": "scidata.errors", "metrics": "scidata.data.metrics"}

__all__ = sorted([*_HOME, *_MODULES, "__version__"])  # noqa: PLE0605 - strings all, spelled once, above


def _imported(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    elif name in _ASKED_BY_OPT_EINSUM and "opt_einsum" in sys.modules:
        value = getattr(importlib.import_module("opt_einsum.backends.torch"), name)
    else:
        hint = "" if name.startswith("_") else _near(name)
        raise AttributeError(f"module 'scidata' has no attribute {name!r}{hint}")
    globals()[name] = value
    return value


def _near(name: str) -> str:
    from scidata.errors import near_matches

    return near_matches(name, __all__, listed=False)


if not TYPE_CHECKING:  # to type checkers, a name that is not above is a mistake
    __getattr__ = _imported


def __dir__() -> list[str]:
    return __all__
