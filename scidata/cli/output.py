"""Output of the commands: data on stdout, as a table or as JSON; errors and progress on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from scidata.core.urls import public_text

if TYPE_CHECKING:
    from scidata.cli.escaped import EscapedConsole, EscapedTable

_PIPED_WIDTH = 240  # a pipe has no width: wide enough that no column is folded


def is_terminal(stream: object) -> bool:
    """Return True if progress may be drawn on the stream."""
    return bool(getattr(stream, "isatty", lambda: False)())


def console(*, stderr: bool = False) -> EscapedConsole:
    """Return a console on the current stdout (or stderr); text is printed as it is, without markup."""
    from scidata.cli.escaped import EscapedConsole

    stream = sys.stderr if stderr else sys.stdout
    return EscapedConsole(file=stream, width=None if is_terminal(stream) else _PIPED_WIDTH)


def make_table(columns: Sequence[str], *, left: Sequence[str] = ()) -> EscapedTable:
    """Return an empty table; columns are aligned to the right, as numbers are, except those in ``left``."""
    from scidata.cli.escaped import EscapedTable

    table = EscapedTable()
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    return table


def print_json(data: object) -> None:
    """Print one JSON document to stdout; numbers that JSON lacks become null, and URLs show no secret."""
    text = public_text(json.dumps(_finite(data), indent=2, allow_nan=False, ensure_ascii=False))
    if not text.replace("\n", "").isprintable():
        # JSON escapes only characters below U+0020: not C1 controls, bidirectional marks, lone surrogates
        text = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
    print(text)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_error(message: str) -> None:
    """Print one ``error:`` line to stderr, red on a terminal; URLs in it show no secret."""
    console(stderr=True).print_parts(("error: ", "bold red"), (" ".join(message.split()), "red"))


def human_bytes(num_bytes: float | None) -> str:
    """Return a size as ``"12.3 MiB"``."""
    if num_bytes is None:
        return "?"
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    if unit == "B":
        return f"{size:.0f} B"
    return f"{size:.0f} {unit}" if size >= 100 else f"{size:.1f} {unit}"


def ratio(value: float | None) -> str:
    """Return an amplification or a balance as text."""
    return "-" if value is None else f"{value:.2f}"


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as ``"241x480"``."""
    return "x".join(map(str, shape)) if shape else "scalar"


def print_bullets(heading: str, lines: Sequence[str], style: str) -> None:
    """Print a list under a heading; nothing if it is empty."""
    out = console()
    for line in lines:
        out.print_parts((f"{heading}: ", style), (line, "default"))


def print_notes(notes: Iterable[tuple[str, str]], most: int, *, more: Sequence[str] = ()) -> None:
    """Print notes on samples, by (name, note): equal notes of several samples on one line."""
    names: dict[str, list[str]] = {}
    for name, note in notes:
        names.setdefault(note, []).append(name)
    lines = [f"{n[0]}{f' and {len(n) - 1} more' if len(n) > 1 else ''}: {note}" for note, n in names.items()]
    rest = [f"{len(lines) - most} more; --json lists all"] if len(lines) > most else []
    print_bullets("note", [*lines[:most], *rest, *more], "yellow")
