"""scidata: each rank reads only its part of a sample, from Zarr, HDF5 or NetCDF, as a ShardTensor.

Names are imported on first use, so that the command line answers without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scidata import errors as errors
    from scidata._retry import set_retry as set_retry
    from scidata._trace import merge_traces as merge_traces
    from scidata._trace import trace as trace
    from scidata.combine import CombinedDataset as CombinedDataset
    from scidata.combine import concat as concat
    from scidata.combine import mix as mix
    from scidata.combine import subset as subset
    from scidata.dataset import ShardedDataset as ShardedDataset
    from scidata.device_mesh import init_mesh as init_mesh
    from scidata.index_map import IndexMap as IndexMap
    from scidata.interop.dtensor import from_dtensor as from_dtensor
    from scidata.interop.dtensor import to_dtensor as to_dtensor
    from scidata.interop.physicsnemo import from_physicsnemo as from_physicsnemo
    from scidata.interop.physicsnemo import to_physicsnemo as to_physicsnemo
    from scidata.irregular import IrregularDataset as IrregularDataset
    from scidata.irregular_sample import IrregularSample as IrregularSample
    from scidata.loader import DataLoader as DataLoader
    from scidata.opening import open_dataset as open_dataset
    from scidata.partitioning import partition as partition
    from scidata.sample import Sample as Sample
    from scidata.sample import collate as collate
    from scidata.sampler import DistributedSampler as DistributedSampler
    from scidata.shard import ShardTensor as ShardTensor
    from scidata.shard import register_op as register_op
    from scidata.shard import scatter_tensor as scatter_tensor
    from scidata.shard import shard_ops as shard_ops
    from scidata.shard.attention_ways import attention as attention
    from scidata.shard.collectives import all_gather_v as all_gather_v
    from scidata.shard.collectives import indexed_all_to_all_v as indexed_all_to_all_v
    from scidata.shard.collectives import reduce_scatter_v as reduce_scatter_v
    from scidata.shard.graph import halo_exchange as halo_exchange
    from scidata.shard.ops.graph import start_exchange as start_exchange
    from scidata.shard.parallel import no_sync as no_sync
    from scidata.shard.parallel import parallelize as parallelize
    from scidata.shard.rooted import gather_v as gather_v
    from scidata.shard.rooted import scatter_v as scatter_v

__version__ = "0.1.0"

_HOME = {
    "CombinedDataset": "scidata.combine",
    "DataLoader": "scidata.loader",
    "DistributedSampler": "scidata.sampler",
    "IndexMap": "scidata.index_map",
    "IrregularDataset": "scidata.irregular",
    "IrregularSample": "scidata.irregular_sample",
    "Sample": "scidata.sample",
    "ShardTensor": "scidata.shard",
    "ShardedDataset": "scidata.dataset",
    "all_gather_v": "scidata.shard.collectives",
    "attention": "scidata.shard.attention_ways",
    "collate": "scidata.sample",
    "concat": "scidata.combine",
    "from_dtensor": "scidata.interop.dtensor",
    "from_physicsnemo": "scidata.interop.physicsnemo",
    "gather_v": "scidata.shard.rooted",
    "halo_exchange": "scidata.shard.graph",
    "indexed_all_to_all_v": "scidata.shard.collectives",
    "init_mesh": "scidata.device_mesh",
    "merge_traces": "scidata._trace",
    "mix": "scidata.combine",
    "no_sync": "scidata.shard.parallel",
    "open_dataset": "scidata.opening",
    "parallelize": "scidata.shard.parallel",
    "partition": "scidata.partitioning",
    "reduce_scatter_v": "scidata.shard.collectives",
    "register_op": "scidata.shard",
    "scatter_tensor": "scidata.shard",
    "scatter_v": "scidata.shard.rooted",
    "set_retry": "scidata._retry",
    "shard_ops": "scidata.shard",
    "subset": "scidata.combine",
    "trace": "scidata._trace",
    "to_dtensor": "scidata.interop.dtensor",
    "to_physicsnemo": "scidata.interop.physicsnemo",
    "start_exchange": "scidata.shard.ops.graph",
}

__all__ = sorted([*_HOME, "__version__", "errors"])  # noqa: PLE0605 - strings all, spelled once, above


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name == "errors":
        value = importlib.import_module("scidata.errors")
    else:
        hint = "" if name.startswith("_") else _near(name)
        raise AttributeError(f"module 'scidata' has no attribute {name!r}{hint}")
    globals()[name] = value
    return value


def _near(name: str) -> str:
    from scidata.errors import near_matches

    return near_matches(name, __all__, listed=False)


def __dir__() -> list[str]:
    return __all__
