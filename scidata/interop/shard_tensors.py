"""torch's ``DTensor`` and PhysicsNeMo's ``ShardTensor`` (written against 2.2): to and from, without a copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from scidata.core.bounds import chunk_sizes
from scidata.core.checks import optional_module
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


@checked_keywords
def to_physicsnemo(tensor: ShardTensor) -> Any:
    """Return the same tensor as PhysicsNeMo's ``ShardTensor``, on the same memory. No communication.

    The sizes of all parts are passed on, so an uneven layout stays. A halo is left behind. Gradients flow
    back. What PhysicsNeMo computes on uneven parts is its own matter.

    Parameters
    ----------
    tensor : ShardTensor
        A tensor of any layout.

    Raises
    ------
    MissingDependencyError
        PhysicsNeMo is not installed.

    Examples
    --------
    With PhysicsNeMo installed::

        theirs = scidata.to_physicsnemo(batch["u"])  # a physicsnemo.domain_parallel.ShardTensor
    """
    theirs = _shard_tensor_class()
    shapes = {axis: [tuple(s) for s in shapes] for axis, shapes in tensor.sharding_shapes().items()}
    return theirs.from_local(tensor.to_local(), tensor.device_mesh, list(tensor.placements), sharding_shapes=shapes)


@checked_keywords
def from_physicsnemo(tensor: Tensor) -> ShardTensor:
    """Return PhysicsNeMo's ``ShardTensor`` as ours, on the same memory; gradients flow back.

    Without communication where their tensor knows the sizes of its parts, as it does unless an operation of theirs
    forgot them; then Collective.

    Parameters
    ----------
    tensor : Tensor
        A ``physicsnemo.domain_parallel.ShardTensor``.

    Raises
    ------
    MissingDependencyError
        PhysicsNeMo is not installed.
    ShardLayoutError
        Not such a tensor, or a placement other than ``Shard(dim)`` and ``Replicate()``.

    Examples
    --------
    With PhysicsNeMo installed::

        ours = scidata.from_physicsnemo(theirs)
        assert torch.equal(ours.to_local(), theirs.to_local())
    """
    theirs = _shard_tensor_class()
    if not isinstance(tensor, theirs):
        raise ShardLayoutError(f"from_physicsnemo takes PhysicsNeMo's ShardTensor, not {type(tensor).__name__}")
    placements = tuple(tensor.placements)
    for placement in placements:
        if type(placement) not in (Shard, Replicate):
            raise ShardLayoutError(
                f"placement {placement!r} has no counterpart; redistribute it to Shard(dim) or Replicate() first"
            )
    known = tensor._spec.sharding_shapes()
    shapes: dict[int | str, Any] = {
        axis: known[axis] for axis, placement in enumerate(placements) if isinstance(placement, Shard)
    }
    return ShardTensor.from_local(tensor.to_local(), tensor.device_mesh, placements, sharding_shapes=shapes)


def _shard_tensor_class() -> Any:
    return optional_module("physicsnemo.domain_parallel", "this needs PhysicsNeMo", "physicsnemo").ShardTensor
