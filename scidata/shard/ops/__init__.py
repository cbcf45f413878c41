"""The op table of ShardTensor: one module per family of torch functions, each adding its entries when imported."""

from scidata.shard.op_table import register_op, shard_ops

__all__ = ["register_op", "shard_ops"]
