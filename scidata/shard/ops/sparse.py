"""Matrices of torch's sparse layouts that are made of sharded indices and values: whole on each rank.

Their constructors ask no ``__torch_function__``: they reach the dispatcher by the operators that they are made of. A
matrix is then a plain tensor, of which each rank holds all elements, as it does of edges that are plain; so are its
products with others. The gradients of its values are those of one process.
"""

from __future__ import annotations

from torch import Tensor

from scidata.errors import UnsupportedShardOp
from scidata.shard.comm.operators import is_capturing
from scidata.shard.op_table import TensorFunction
from scidata.shard.ops.align import whole
from scidata.shard.ops.arguments import handles


@handles(
    "aten._sparse_coo_tensor_with_dims_and_tensors",
    "aten.sparse_compressed_tensor.comp_plain_value",
    "aten.sparse_compressed_tensor.comp_plain_value_size",
    "aten.max.dim",  # of indices, where no size is given
    "aten.min.dim",
)
def of_whole_parts(func: TensorFunction, *args: object, **kwargs: object) -> Tensor:
    """Gather indices and values, and call the operator on these. Collective."""
    if is_capturing():
        raise UnsupportedShardOp("sparse matrices are made, which a captured step cannot hold")
    return func(*[whole(func, x) for x in args], **kwargs)
