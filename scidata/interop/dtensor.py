"""torch's ``DTensor``: to and from, without a copy, where the layout is one that a DTensor can have."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from scidata.core.bounds import chunk_sizes
from scidata.core.keywords import checked_keywords
from scidata.errors import ShardLayoutError
from scidata.shard.tensor import ShardTensor


@checked_keywords
def to_dtensor(tensor: ShardTensor) -> DTensor:
    """Return the same tensor as a ``DTensor`` on the same memory. No communication; gradients flow back.

    A DTensor does not say how large its parts are: they are those of ``torch.chunk``, ``ceil(n / ranks)`` rows each
    until none are left. 10 rows over 4 ranks are 3, 3, 3, 1 there, where ``bounds="even"`` gives 3, 3, 2, 2.

    Parameters
    ----------
    tensor : ShardTensor
        Its halo, if any, is left behind.

    Raises
    ------
    ShardLayoutError
        Parts of other sizes. Explicit bounds in ``open_dataset``, or ``redistribute`` to the sizes that the message
        gives, make them fit.

    Examples
    --------
    On each of two ranks:

    >>> mesh = scidata.init_mesh(domain=2)
    >>> from torch.distributed.tensor import Shard
    >>> x = scidata.scatter_tensor(torch.arange(4.0), 0, mesh["domain"], [Shard(0)])
    >>> scidata.to_dtensor(x).full_tensor()
    tensor([0., 1., 2., 3.])
    """
    if not isinstance(tensor, ShardTensor):
        raise ShardLayoutError(f"to_dtensor takes a ShardTensor, not {type(tensor).__name__}")
    spec = tensor.spec
    for dim, axis in spec.sharded.items():
        found, wanted = spec.sizes_of(axis), chunk_sizes(spec.global_shape[dim], spec.axes[axis].size)
        if tuple(found) != wanted:
            raise ShardLayoutError(
                f"a DTensor's parts are those of torch.chunk: along dim {dim} it needs {wanted} rows, and this tensor "
                f"has {tuple(found)}; redistribute it to those sizes, or open the data set with such bounds"
            )
    stride = torch.empty(spec.global_shape, device="meta").stride()
    return DTensor.from_local(
        tensor.to_local(),
        tensor.device_mesh,
        list(tensor.placements),
        run_check=False,
        shape=torch.Size(spec.global_shape),
        stride=stride,
    )


@checked_keywords
def from_dtensor(tensor: DTensor) -> ShardTensor:
    """Return a ``DTensor`` as a ShardTensor on the same memory. No communication; gradients flow back.

    Parameters
    ----------
    tensor : DTensor
        With ``Shard(dim)`` and ``Replicate()`` placements.

    Raises
    ------
    ShardLayoutError
        Not a DTensor, a placement other than ``Shard(dim)`` and ``Replicate()`` (``redistribute`` it first), two mesh
        axes that shard one dim, or a local part that is not that of ``torch.chunk``. What ``DTensor.from_local`` makes
        of uneven parts without a ``shape`` cannot be told: its ranks each believe in another global shape.

    Examples
    --------
    On each of two ranks:

    >>> mesh = scidata.init_mesh(domain=2)
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> x = scidata.from_dtensor(distribute_tensor(torch.arange(5.0), mesh["domain"], [Shard(0)]))
    >>> x.sharding_shapes()
    {0: (torch.Size([3]), torch.Size([2]))}
    """
    return ShardTensor.from_dtensor(tensor)
