"""What Python of the user's runs while a step is captured, as a profiler sees it."""

from __future__ import annotations

import datetime
import gc
import sys
import types
from typing import Any

from scidata.shard.compile.reach import EffectError, is_foreign, touches

_EFFECTS = frozenset({"print", "input", "open", "breakpoint"})
_SEEDS = frozenset({"manual_seed", "seed"})
_CLOCKS = frozenset({"now", "today", "utcnow"})


class Watch:
    """Notes which code runs inside, and calls that a graph would leave out.

    Attributes
    ----------
    codes
        By id, code that is not of a library, with the globals that it sees.
    effects
        What it does for more than its result, or with another result each time: "forward calls print".
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
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Look no more; does nothing the second time."""
        if self._looks:
            self._looks = False
            sys.setprofile(self._before)
            if self._collects:
                gc.enable()

    def _refuse(self, reason: str) -> None:
        """Raise in the code that is about to run: where it catches that, the reason is here."""
        self.effects.append(reason)
        raise EffectError(reason)

    def _note(self, frame: types.FrameType, event: str, called: Any) -> None:
        code = frame.f_code
        if event == "call":
            if id(code) in self._foreign or id(code) in self.codes:
                return
            module = frame.f_globals.get("__name__")
            if not is_foreign(module):
                self.codes[id(code)] = code, frame.f_globals
                if touched := touches(code):
                    self._refuse(f"{code.co_name} {touched}")
                return
            if module == "torch.random" and code.co_name in _SEEDS:
                self._refuse(f"it calls torch.{code.co_name}")
            else:
                self._foreign[id(code)] = code
        elif event == "c_call" and id(code) in self.codes:
            name = called.__name__
            owner = getattr(called, "__self__", None)
            if called.__module__ == "time" or (name in _EFFECTS and called.__module__ in ("builtins", "io", "_io")):
                self._refuse(f"{code.co_name} calls {name}")
            elif name in _CLOCKS and isinstance(owner, type) and issubclass(owner, datetime.date):
                self._refuse(f"{code.co_name} calls {owner.__name__}.{name}")
