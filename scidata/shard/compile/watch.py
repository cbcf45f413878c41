"""What Python of the user's runs while a step is captured, as a profiler sees it."""

from __future__ import annotations

import datetime
import gc
import os
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from scidata.shard.base import ShardBase
from scidata.shard.comm.sums import deferral
from scidata.shard.compile.reach import EffectError, is_foreign, touches
from scidata.shard.torch_internals import tree_leaves

_EFFECTS = frozenset({"print", "input", "open", "breakpoint"})
_SEEDS = frozenset({"manual_seed", "seed"})
_CLOCKS = frozenset({"now", "today", "utcnow"})
_TRANSFORMS = torch.func.vjp.__globals__["__name__"]
_FUNCTIONS = torch.nn.functional.__name__
_VALUES = frozenset({"numpy", "item", "tolist", "data_ptr"})


def _is_put_off(x: object) -> bool:
    if not isinstance(x, torch.Tensor) or isinstance(x, ShardBase):
        return False
    return x.requires_grad and deferral(x) is not None


def _is_plain(given: Mapping[str, Any]) -> bool:
    return not isinstance(given["input"], ShardBase)


def _keeps_an_extent(given: Mapping[str, Any]) -> bool:
    """Whether a plain tensor is resampled by a scale that leaves an extent as it is, which the kernel copies."""
    x, factors = given["input"], given["scale_factor"]
    if factors is None or not _is_plain(given):
        return False
    each = [factors] * (x.ndim - 2) if isinstance(factors, int | float) else factors
    return any(f != 1 and int(n * f) == n for n, f in zip(x.shape[2:], each, strict=False))


#: Functions of which torch's compiler makes other values than their kernels give. Those of ShardTensors are refused in
#: their handlers.
_OTHERWISE = {"interpolate": _keeps_an_extent, "multi_margin_loss": _is_plain, "multilabel_margin_loss": _is_plain}


@contextmanager
def noting(codes: dict[int, types.CodeType]) -> Iterator[None]:
    """Note which code runs, by its id."""

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call":
            codes.setdefault(id(frame.f_code), frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        _put_back(before)


def may_watch() -> bool:
    """Whether a profiler that looks now can be put back; torch's, which looks for stacks, cannot."""
    profiler = sys.getprofile()
    return profiler is None or callable(profiler) or hasattr(profiler, "enable")


def _put_back(profiler: Any) -> None:
    """Have a profiler look again; before Python 3.12 cProfile's are no functions, and install themselves."""
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        profiler.enable()


class Watch:
    """Notes which code runs inside, and calls that a graph would leave out.

    ``codes``: by id, code that is not of a library, with the globals that it sees.
    ``effects``: what it does for more than its result, or with another result each time: "forward calls print".
    """

    def __init__(self) -> None:
        self.codes: dict[int, tuple[types.CodeType, dict[str, Any]]] = {}
        self.effects: list[str] = []
        self._foreign: dict[int, types.CodeType] = {}
        self._before: Any = None
        self._looks = self._collects = False

    def __enter__(self) -> Watch:
        self._before, self._looks = sys.getprofile(), True
        self._collects = gc.isenabled()
        gc.disable()  # which may call functions of others at any time
        known, asked, urandom, note = self._foreign, self.codes, os.urandom, self._note

        def look(frame: types.FrameType, event: str, called: Any) -> None:
            # of millions of events, nearly all are of code that is known, or return from some
            if event == "call":
                if id(frame.f_code) not in known:
                    note(frame, event, called)
            elif (event == "c_call" and (id(frame.f_code) in asked or called is urandom)) or event == "c_exception":
                note(frame, event, called)

        sys.setprofile(look)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Look no more; does nothing the second time."""
        if self._looks:
            self._looks = False
            _put_back(self._before)
            if self._collects:
                gc.enable()

    def _refuse(self, reason: str) -> None:
        """Raise in the code that is about to run: where it catches that, the reason is here."""
        self.effects.append(reason)
        raise EffectError(reason)

    def _is_asked(self, frame: types.FrameType | None) -> bool:
        """Whether code that is not of a library called this, and not by way of torch, which draws for itself."""
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("torch"):
            if id(frame.f_code) in self.codes:
                return True
            frame = frame.f_back
        return False

    def _note(self, frame: types.FrameType, event: str, called: Any) -> None:
        code = frame.f_code
        if event == "call":
            if id(code) in self.codes:
                return
            module = frame.f_globals.get("__name__")
            if not is_foreign(module):
                self.codes[id(code)] = code, frame.f_globals
                if touched := touches(code):
                    self._refuse(f"{code.co_name} {touched}")
                return
            if module == "torch.random" and code.co_name in _SEEDS:
                self._refuse(f"it calls torch.{code.co_name}")
            elif module == _FUNCTIONS and code.co_name in _OTHERWISE:
                if _OTHERWISE[code.co_name](frame.f_locals):
                    self._refuse(f"torch's compiler computes F.{code.co_name} otherwise than its kernel")
            elif module == _TRANSFORMS:  # whose gradients of parameters are summed at once
                self._refuse(f"it calls torch.func.{code.co_name}")
            elif module == "torch.autograd" and code.co_name == "grad":
                if self._is_asked(frame.f_back) and any(map(_is_put_off, tree_leaves(frame.f_locals["inputs"]))):
                    self._refuse("it asks for a gradient of a parameter, whose sum over the ranks a graph puts off")
            elif module == "random" and code.co_name == "__init__":
                if frame.f_locals.get("x") is None and self._is_asked(frame.f_back):
                    self._refuse("it draws random numbers without a seed")
            else:
                self._foreign[id(code)] = code
        elif called is os.urandom:
            if self._is_asked(frame):
                self._refuse("it draws random numbers without a seed")
        elif event == "c_exception" and isinstance(getattr(called, "__self__", None), torch.Tensor):
            if called.__name__ in _VALUES:  # code that catches the error takes another path than eagerly
                self.effects.append(f"{code.co_name} calls {called.__name__}")
        elif event == "c_call":
            name = called.__name__
            owner = getattr(called, "__self__", None)
            if called.__module__ == "time" or (name in _EFFECTS and called.__module__ in ("builtins", "io", "_io")):
                self._refuse(f"{code.co_name} calls {name}")
            elif name in _CLOCKS and isinstance(owner, type) and issubclass(owner, datetime.date):
                self._refuse(f"{code.co_name} calls {owner.__name__}.{name}")
