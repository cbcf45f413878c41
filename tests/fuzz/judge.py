"""Whether what a case gave is right, an error that says what is wrong, other values, or a fault of scidata."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from tests.fuzz.mutations import Damage
from tests.fuzz.probe import Step
from tests.fuzz.seeds import Seed

__all__ = ["Verdict", "differs", "judge"]

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_TOO_MUCH = (errno.EFBIG, errno.ENOMEM)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a case came to.

    Attributes
    ----------
    outcome
        ``"right"``, ``"error"`` (named), ``"different"`` (values, where no checksum shows it), or ``"failure"``.
    fault, step, frame, message, trace
        Of a failure: what it is in a word, in which use of the file, where in scidata, and what it said.
    """

    outcome: str
    fault: str = ""
    step: str = ""
    frame: str = ""
    message: str = ""
    trace: str = ""


def differs(root: str, seed: Seed) -> bool:
    """Say whether a file of the seed is gone, or has other bytes."""
    for folder, _, names in os.walk(seed.folder):
        for name in names:
            sound = os.path.join(folder, name)
            here = os.path.join(root, os.path.relpath(sound, seed.folder))
            try:
                if not stat.S_ISREG(os.stat(here).st_mode):
                    return True
                with open(sound, "rb") as a, open(here, "rb") as b:
                    if a.read() != b.read():
                        return True
            except OSError:
                return True
    return False


def _is_checked(seed: Seed, damage: Damage) -> bool:
    """Say whether a checksum must show the damage, so that no other value may come of it."""
    if damage.strict or (seed.sealed and not damage.forged):
        return True
    if seed.weak and not damage.flips:
        return False
    return bool(damage.spans) and all(
        any(name == file and start <= a and b <= stop for file, start, stop in seed.checked)
        for name, a, b in damage.spans
    )


def _failure(fault: str, name: str, step: Step, message: str = "") -> Verdict:
    text = message or f"{step.kind}: {step.error}"
    return Verdict(outcome="failure", fault=fault, step=name, frame=step.frame, message=text[:600], trace=step.trace)


def _judge_error(name: str, step: Step) -> Verdict | None:
    if step.error is None:
        return None
    if step.kind == "MemoryError" or step.number in _TOO_MUCH:
        return _failure("blow-up", name, step)
    if not step.named:
        return _failure("bare exception", name, step)
    if not step.error.strip():
        return _failure("empty message", name, step)
    if step.kind != "SystemExit" and (found := _CONTROL.search(step.error)):
        return _failure("control characters", name, step, f"{found.group()!r} in: {step.error!a}")
    return None


def judge(
    seed: Seed, damage: Damage, steps: Mapping[str, Step], sound: Mapping[str, Step], *, changed: bool, errors: str
) -> Verdict:
    """Judge a case.

    Parameters
    ----------
    steps, sound
        What each use gave, of the damaged files and of the sound ones.
    changed
        Whether any byte of the files differs.
    errors
        What came on the process's stderr besides.
    """
    checked = _is_checked(seed, damage)
    outcome = "right"
    for name, step in steps.items():
        if (verdict := _judge_error(name, step)) is not None:
            return verdict
        if "Traceback (most recent call last)" in step.output + errors:
            return _failure("traceback", name, step, (step.output + errors)[-600:])
        if found := _CONTROL.search(step.output):
            return _failure("control characters", name, step, f"{found.group()!r} in: {step.output!a}")
        wrong = [key for key, value in step.values.items() if sound[name].values.get(key) != value]
        if step.error is None:
            wrong += [key for key in sound[name].values if key not in step.values]
        if wrong and checked:
            was = {key: sound[name].values.get(key) for key in wrong[:2]}
            text = f"{len(wrong)} wrong, such as { {k: step.values.get(k) for k in was}!a}, was {was!a}"
            return _failure("wrong value", name, step, text)
        if name == "verify" and step.error is None and changed and not damage.forged:
            return _failure("verify passed", name, step, step.output)
        if step.error is not None and step.kind != sound[name].kind:
            outcome = "error" if outcome != "different" else outcome
        elif wrong:
            outcome = "different"
    return Verdict(outcome=outcome)
