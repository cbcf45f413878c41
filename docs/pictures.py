"""Draws the pictures of the pages from the library's own arithmetic: ``python docs/pictures.py FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path


def draw_all(folder: Path) -> None:
    """Write all pictures as SVG; those that are there are replaced."""
    folder.mkdir(exist_ok=True)


if __name__ == "__main__":
    draw_all(Path(sys.argv[1]))
