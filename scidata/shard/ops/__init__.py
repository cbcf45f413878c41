"""The op table of ShardTensor: one module per family of torch functions, each adding its entries when imported."""

from scidata.shard.ops.registry import register_op, shard_ops

__all__ = ["register_op", "shard_ops"]
