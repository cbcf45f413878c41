"""Rich's console and table with text as it is: no markup, no control characters, no secrets of URLs.

Names of arrays, dimensions, units, files and samples come from data, which may be somebody else's. This is the place
where they go out.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scidata.core.urls import public_text
from scidata.errors import visible


def shown(text: str) -> str:
    """Return a text as it may go to a terminal."""
    return visible(public_text(text))


#: When a console has printed last.
spoke = SimpleNamespace(at=0.0)


class EscapedConsole(Console):
    """A console whose lines are one line each, whatever is in them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def print(self, *objects: object, **options: Any) -> None:
        """Print texts escaped; tables of Rich are escaped when they are filled."""
        spoke.at = time.monotonic()
        super().print(*(shown(item) if isinstance(item, str) else item for item in objects), **options)

    def print_parts(self, *parts: tuple[str, str]) -> None:
        """Print a line of (text, style)."""
        text = Text()
        for part, style in parts:
            text.append(shown(part), style=style)
        self.print(text, soft_wrap=True)


class EscapedTable(Table):
    """A table of texts; a newline breaks a column's header only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, **options)

    def add_column(self, header: object = "", *args: Any, **options: Any) -> None:
        """Add a column."""
        super().add_column("\n".join(map(shown, str(header).split("\n"))), *args, **options)

    def add_row(self, *cells: object, **options: Any) -> None:
        """Add a row of texts."""
        super().add_row(*(shown(str(cell)) for cell in cells), **options)
