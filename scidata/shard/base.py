"""The attributes of a ShardTensor: the interface between it and the operations, internal to this package.

:class:`scidata.ShardTensor` adds its constructors and methods. Modules that it is built upon take a ``ShardBase``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import Tensor
from torch.autograd import Function

from scidata.device_mesh.board import begin
from scidata.errors import ShardLayoutError
from scidata.shard.op_table import HANDLERS, TRANSFORMS
from scidata.shard.spec import HaloDim, ShardSpec, Strides
from scidata.shard.torch_internals import (
    DYNAMO,
    Saved,
    forbid_address,
    keep_out_of_graphs,
    make_wrapper,
    version_of,
    watch_checkpoints,
    watch_data,
    watch_functions,
    watch_scripts,
    watch_transforms,
)

_watched: list[type] = []  # not empty once torch is patched, which the first tensor does
_late: dict[str, Callable[[], object]] = {DYNAMO: keep_out_of_graphs}  # by names of modules


def when_loaded(module: str, do: Callable[[], object]) -> None:
    """Call a function once that module is loaded: at the next tensor that is made, the first or a later one."""
    _late[module] = do


class ViewState:
    """Which memory a tensor shares with others in one process: see :mod:`scidata.shard.views`. Here none."""

    __slots__ = ()

    def refresh(self) -> None:
        """Copy from the original again if it was written to. Collective then."""

    def will_require_grad(self) -> bool:
        """Whether the tensor will require grad once it is refreshed."""
        return False

    def detached(self) -> ViewState:
        """Return this state without an autograd graph."""
        return self

    def put_back(self) -> None:
        """Copy writes to the tensor to its original."""


def _save(x: Tensor, save: Callable[[Tensor], Any]) -> Any:
    """Save a tensor that may be sharded, for a checkpoint that runs again; kept ghost rows are saved with it.

    Collective where a copy has to be brought up to date.
    """
    if not isinstance(x, ShardBase) or not x.local.requires_grad or vars(x):
        return save(x)
    x.refresh()  # now: it would be written to while the checkpoint runs
    kind, spec, halo, state, strides = type(x), x.spec, x.halo, x.copied, x.global_strides
    return Saved(save(x.local), lambda local: kind(local, spec, halo=halo, copied=state, global_strides=strides))


class ShardBase(Tensor):
    """A tensor that holds this rank's part of a larger one, its layout and its halo.

    Plain attributes, since each operation reads them. Only functions that write to tensors set them.
    """

    __slots__ = ("copied", "global_strides", "halo", "local", "padded", "padded_version", "spec")

    local: Tensor  # this rank's part
    spec: ShardSpec  # the layout
    halo: Mapping[int, HaloDim]  # the halo that was asked for, by tensor dim; empty where none was
    padded: Tensor | None  # the part with its halo, where that is held: :meth:`held_halo` says whether it is good
    padded_version: int  # the version of ``padded`` in which its ghosts were good
    copied: ViewState | None  # set where the tensor is a copy for which torch would have a view
    # strides of the whole tensor in one process. None: row-major; ``UNKNOWN`` of :mod:`scidata.shard.memory`: nobody
    # knows
    global_strides: Strides | None

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        spec: ShardSpec,
        *,
        padded: Tensor | None = None,
        halo: Mapping[int, HaloDim] | None = None,
        copied: ViewState | None = None,
        global_strides: Strides | None = None,
    ) -> Self:
        """Wrap without checks beyond the local shape; handlers of the op table call this."""
        if not _watched:
            _watched.append(ShardBase)
            begin()
            watch_functions(ShardBase, lambda cls, args, kwargs: HANDLERS[Function](cls, (), args, kwargs))
            watch_transforms(ShardBase, TRANSFORMS)
            watch_scripts(ShardBase)
            watch_data(ShardBase)
            watch_checkpoints(_save)
        for name in _late:
            if name in sys.modules:
                _late.pop(name)()
                break  # the dict has changed; others at the next tensor
        if local.shape != spec.local_shape:
            raise ShardLayoutError(
                f"the local part has shape {tuple(local.shape)}, but the layout gives this rank "
                f"{spec.local_shape} ({spec})"
            )
        self: Self = make_wrapper(cls, spec.global_shape, dtype=local.dtype, device=local.device, requires_grad=False)
        forbid_address(self)
        self.local = local
        self.spec = spec
        self.padded = padded
        self.padded_version = 0 if padded is None else version_of(padded)
        self.halo = halo or {}
        self.copied = copied
        self.global_strides = global_strides
        return self

    def like(self, local: Tensor, spec: ShardSpec, copied: ViewState | None, strides: Strides | None) -> ShardBase:
        """Return a ShardTensor, for modules that do not know that class."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Copy again if this is a copy whose original was written to. Collective then, if making the copy was."""
        if self.copied is not None:
            self.copied.refresh()

    def facts(self) -> Tensor:
        """Return a tensor with the part's dtype, device and ``requires_grad``."""
        return self.local

    def version(self) -> int:
        """Return a number that differs after each write to the part."""
        return version_of(self.local)

    def held_halo(self) -> Tensor | None:
        """Return the padded part while its ghosts are good: not after a write to the owned part alone."""
        padded = self.padded
        if padded is None or self.local.requires_grad or version_of(padded) != self.padded_version:
            return None
        return padded
