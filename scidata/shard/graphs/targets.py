"""Targets of scattered messages before their layout is known: a constant, or a plain tensor that is written to."""

from __future__ import annotations

from torch import Tensor

from scidata.errors import UnsupportedShardOp
from scidata.shard.op_table import HANDLERS, OF_THE_WHOLE, Handler, TorchFunction, Types
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import has_values, tree_leaves, tree_map_only


class FilledTensor(ShardTensor):
    """A constant of global shape that takes no memory until used.

    ``messages.new_zeros(shape)`` returns one. Whether it is sharded by nodes or whole on each rank shows only when
    something is scattered into it. For all other functions it is a plain tensor.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: Types, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        handler = HANDLERS.get(func)
        given = tree_leaves((args, kwargs)) if handler in _ACCEPT_FILLED else ()
        if handler in OF_THE_WHOLE or any(isinstance(x, ShardTensor) and not x.spec.is_replicated for x in given):
            return super().__torch_function__(func, types, args, kwargs)
        new_args, new_kwargs = tree_map_only(FilledTensor, FilledTensor.settled, (args, kwargs or {}))
        return func(*new_args, **new_kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> FilledTensor:
        """Set whether gradients are kept, in place."""
        self.settled()
        super().requires_grad_(requires_grad)
        return self

    def settled(self) -> Tensor:
        """Return the tensor that replaced this one: a ShardTensor of nodes, or a plain one in memory."""
        if not self.spec.is_replicated:
            return ShardTensor(self.local, self.spec)
        self.local = self.local.contiguous()
        return self.local

    def decide(self, local: Tensor, spec: ShardSpec) -> None:
        """Be sharded from now on."""
        if self.local.requires_grad:
            raise UnsupportedShardOp("a leaf that requires grad cannot take messages of a sharded graph in place")
        self.local, self.spec = local, spec


#: Handlers that take a FilledTensor as it is, where it meets shards.
_ACCEPT_FILLED: set[Handler] = set()


def accepts_filled(handler: Handler) -> Handler:
    """Mark a handler that accepts a FilledTensor and may choose its layout."""
    _ACCEPT_FILLED.add(handler)
    return handler


class MovedTensor(Tensor):
    """The class of a plain tensor once messages were scattered into it in place: it stands for the sharded result."""

    _result: Tensor

    @classmethod
    def become(cls, target: Tensor, result: Tensor) -> None:
        """Turn ``target`` into a stand-in for ``result``."""
        if (type(target) is not Tensor and has_values(target)) or target.requires_grad:
            raise UnsupportedShardOp(
                "a parameter or a tensor that requires grad cannot take messages of a sharded graph in place; "
                "use the form without underscore"
            )
        target.__class__ = cls
        assert isinstance(target, MovedTensor)
        target._result = result

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: Types, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        new_args, new_kwargs = tree_map_only(MovedTensor, lambda x: x.__dict__["_result"], (args, kwargs or {}))
        if getattr(func, "__name__", "") == "__get__":  # ShardTensor has attributes of its own
            return getattr(new_args[0], getattr(func, "__self__").__name__)  # noqa: B009
        return func(*new_args, **new_kwargs)
