"""ShardTensor: one tensor over the ranks of a domain, its op table, and the collectives and halo exchange below it."""

from scidata.shard.ops import attention, layers, linalg, metadata, pointwise, reductions, shapes  # noqa: F401 - the table
from scidata.shard.ops.registry import register_op, shard_ops
from scidata.shard.spec import HaloDim, ShardSpec
from scidata.shard.tensor import ShardTensor, scatter_tensor

__all__ = ["HaloDim", "ShardSpec", "ShardTensor", "register_op", "scatter_tensor", "shard_ops"]
