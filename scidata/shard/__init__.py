"""ShardTensor: one tensor over the ranks of a domain, its op table, and the collectives and halo exchange below it."""

from importlib import import_module
from pkgutil import iter_modules

from scidata.core.keywords import checked_keywords
from scidata.shard import op_table, ops
from scidata.shard.op_table import shard_ops
from scidata.shard.scatter_tensor import scatter_tensor
from scidata.shard.spec import HaloDim, ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.transforms import derivatives, maps  # noqa: F401

for _module in iter_modules(ops.__path__):  # each adds its entries to the table when it is imported
    import_module(f"{ops.__name__}.{_module.name}")

register_op = checked_keywords(op_table.register_op)  # for users; the table's own entries need no such check

__all__ = ["HaloDim", "ShardSpec", "ShardTensor", "register_op", "scatter_tensor", "shard_ops"]
