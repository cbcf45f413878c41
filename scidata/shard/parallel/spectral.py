"""Zeros that Fourier layers put their modes among, cut as the spectrum is, not whole on each rank.

``torch.zeros(shape)`` sees no sharded tensor, and makes a plain one: all that a layer computes from it would be
computed on every rank, and its gradient gathered. In the layers of PhysicsNeMo and neuraloperator, and in others of
that name, zeros in the shape of the spectrum that the layer has just taken are cut like it.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from scidata.shard.op_table import TorchFunction, Types
from scidata.shard.ops.spectra import Blank, Spectrum, resized

_ZEROS = (torch.zeros, torch.Tensor.new_zeros)


class _ZerosAsSpectra(TorchFunctionMode):
    """Notes spectra, and cuts zeros like the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Spectrum | None = None

    def __torch_function__(
        self, func: TorchFunction, types: Types, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Spectrum):
            self.last = result
        last = self.last
        if func not in _ZEROS or last is None or not isinstance(result, torch.Tensor):
            return result
        like = (result.dtype, result.device, result.ndim) == (last.dtype, last.device, last.ndim)
        if not like or result.requires_grad or any(result.shape[d] != last.shape[d] for d in last.spec.sharded):
            return result
        return Blank(resized(last.spec, dict(enumerate(result.shape))), last.sample.detach())


class _Entered(threading.local):
    """The modes of the layers that this thread is in."""

    def __init__(self) -> None:
        self.modes: list[ExitStack] = []


_entered = _Entered()


def _enter(module: nn.Module, args: object) -> None:
    _entered.modes.append(ExitStack())
    _entered.modes[-1].enter_context(_ZerosAsSpectra())


def _leave(module: nn.Module, args: object, result: object) -> None:
    _entered.modes.pop().close()


def cut_zeros(model: nn.Module) -> None:
    """Cut the zeros of a model's Fourier layers like their spectra."""
    for module in model.modules():
        if type(module).__name__.startswith("SpectralConv"):
            module.register_forward_pre_hook(_enter, prepend=True)
            module.register_forward_hook(_leave, always_call=True)
