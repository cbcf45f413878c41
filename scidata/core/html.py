"""HTML tables for notebooks: data sets, samples, tensors, plans and loaders. Names are escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from scidata.core.urls import public_text
from scidata.errors import visible

_CELL = "padding:1px 8px;text-align:{}"
_BOX = "font-family:monospace;font-size:12px;border:1px solid #bbb;border-radius:4px;padding:6px;display:inline-block"
MANY = 24  # rows shown; longer tables are cut


def escaped(value: object) -> str:
    """Return a text for HTML: without markup, control characters and URL secrets."""
    return html.escape(visible(public_text(str(value))))


def card(
    title: str,
    facts: Mapping[str, object] | None = None,
    columns: Sequence[str] = (),
    rows: Iterable[Sequence[object]] = (),
) -> str:
    """Return HTML with a title, named facts, and a table.

    ``facts``: None and empty texts are left out.
    ``columns, rows``: the first column is names, aligned to the left; so is all text but numbers.
    """
    parts = [f"<b>{escaped(title)}</b>"]
    said = {name: value for name, value in (facts or {}).items() if value is not None and value != ""}
    parts += [f"<div>{escaped(name)}: {escaped(value)}</div>" for name, value in said.items()]
    every = [tuple(row) for row in rows]
    if every:
        parts.append(_table(columns, every))
    return f'<div style="{_BOX}">{"".join(parts)}</div>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f'<th style="{_CELL.format("left")}">{escaped(name)}</th>' for name in columns)
    body = ["<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows[:MANY]]
    if len(rows) > MANY:
        body.append(f'<tr><td colspan="{len(columns)}">{len(rows) - MANY} more</td></tr>')
    return f'<table style="border-collapse:collapse"><tr>{head}</tr>{"".join(body)}</table>'


def _cell(value: object) -> str:
    side = "right" if isinstance(value, int | float) else "left"
    return f'<td style="{_CELL.format(side)}">{escaped(value)}</td>'


def sizes(dims: Sequence[str], shape: Sequence[int]) -> str:
    """Return ``"level: 3, latitude: 241"``."""
    return ", ".join(f"{dim}: {size}" for dim, size in zip(dims, shape, strict=True))


def nbytes(count: float) -> str:
    """Return a size as ``"12.3 MiB"``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
