"""PhysicsNeMo's ``ShardTensor``: to and from, without a copy. Written against 2.2."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from scidata.core.checks import optional_module
from scidata.core.keywords import checked_keywords
from scidata.errors import ShardLayoutError
from scidata.shard.tensor import ShardTensor


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
