"""ShardTensor: one tensor over the ranks of a domain, its op table, and the collectives and halo exchange below it."""

# each of these adds its entries to the table when it is imported
from scidata.core.keywords import checked_keywords
from scidata.shard import op_table
from scidata.shard.op_table import shard_ops
from scidata.shard.ops import (  # noqa: F401
    attention,
    conv,
    counting,
    derived,
    elements,
    fft,
    functions,
    indexing,
    interpolate,
    joining,
    linalg,
    losses,
    matrices,
    metadata,
    multihead,
    neighbours,
    norm,
    points,
    pointwise,
    pooling,
    random,
    recurrent,
    reductions,
    reshaping,
    scan,
    scatter,
    selection,
    shapes,
    sorting,
    tables,
    windows,
    writing,
)
from scidata.shard.scatter_tensor import scatter_tensor
from scidata.shard.spec import HaloDim, ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.transforms import derivatives, maps  # noqa: F401

register_op = checked_keywords(op_table.register_op)  # for users; the table's own entries need no such check

__all__ = ["HaloDim", "ShardSpec", "ShardTensor", "register_op", "scatter_tensor", "shard_ops"]
