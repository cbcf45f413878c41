"""The library's messages as the command line says them: ``halo={'latitude': 2}`` as ``--halo latitude=2``. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

_VALUE = r"""'[^']*'|"[^"]*"|\{[^{}]*\}|\[[^][]*\]|\([^()]*\)|[\w+-]+(?:\.\w+)*"""
_SLICE = re.compile(r"slice\(([^(),]+), ([^(),]+)(?:, None)?\)")
#: Said of a dimension, ``isel of 'level'``, or as a remedy, ``crop with isel``.
_BEFORE_DIM = ("halo", "isel", "sel", "bounds", "align", "weights")
_ALONE = ("isel", "sel", "steps", "align", "periodic", "shard")
#: What such a word may follow where it is no argument: of a URL, an attribute of a file, part of a longer name.
_NOT_AFTER = r"(?<![\w.?&/:-])(?<!attribute )"


def in_options(message: str, options: Mapping[str, str]) -> str:
    """Return a message with keyword arguments as options.

    Parameters
    ----------
    message
        As the library raises it.
    options
        Of the command, by the names of arguments: ``{"sample_dim": "--sample-dim"}``. Others stay as they are.
    """
    if not options:
        return message
    names = "|".join(map(re.escape, sorted(options, key=len, reverse=True)))
    # where the library itself says the option behind it, that is what stays
    given = re.compile(rf"{_NOT_AFTER}({names})=({_VALUE})?+(?!/)(?:\.\.\.|…)?(?: \((--[^()]*)\))?")
    message = given.sub(lambda found: found[3] or _typed(options[found[1]], found[2]), message)
    message = re.sub(
        rf"(^|: )({names})(?= names |: no |: field |: means nothing|: '| leaves | must be\b)",
        lambda found: found[1] + options[found[2]],
        message,
    )
    message = re.sub(rf"(^|: )({'|'.join(_BEFORE_DIM)})(?= of ')", lambda m: m[1] + options.get(m[2], m[2]), message)
    plain = [name for name in options if "_" in name]
    called = rf"\b(?:with|use|another) (?:{'|'.join(_ALONE)})|" if _ALONE else ""
    found = re.compile(rf"{_NOT_AFTER}(?:{called}{'|'.join(map(re.escape, plain)) or '(?!)'})\b(?![=./])")

    def reworded(match: re.Match[str]) -> str:
        before, _, name = match[0].rpartition(" ")
        return f"{before} {options.get(name, name)}".strip()

    return _SLICE.sub(_ends, found.sub(reworded, message))


def _ends(found: re.Match[str]) -> str:
    """Return a slice as options take it."""
    return ":".join("" if end == "None" else end for end in found.groups())


def _typed(option: str, value: str | None) -> str:
    """Return an option and a value as they are typed."""
    if value is None or value == "True":
        return option
    value = _SLICE.sub(lambda found: repr(_ends(found)), value)
    try:
        found = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return f"{option} {value}"
    if found is None:
        return f"no {option}"
    text = "none" if found is False else _text(found)
    return f"{option} {text}" if text else option


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        sides = {name: ":".join(map(str, item)) if isinstance(item, tuple) else item for name, item in value.items()}
        return ",".join(f"{name}={_text(item)}" for name, item in sides.items())
    if isinstance(value, list | tuple):
        return ",".join(_text(item) for item in value)
    return "" if value is ... else str(value)
