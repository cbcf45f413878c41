"""Finds the fenced blocks of a page, and compares what they print with what the page shows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^( *)(```+|~~~+)\s*([^\s`]*)[^`]*$")
_MARK = re.compile(r"^ *<!-- (not run|numbers vary|sketch|in a shell)(?:: (.*?))? -->$")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block.

    Attributes
    ----------
    language
        The word after the fence.
    line
        Of the page, counted from 1: that of the block's first line.
    marks
        Comments right above it: ``<!-- not run: REASON -->``, ``<!-- numbers vary -->``, ``<!-- sketch -->``.
    shown
        What the page shows as the block's output: the ``text`` block that follows, but for blank lines at once.
    """

    language: str
    text: str
    line: int
    marks: dict[str, str]
    shown: str | None = None

    @property
    def file(self) -> str | None:
        """The name of the script that the block is, by its first line (or that after ``#!``), ``# NAME.py``."""
        found = re.match(r"(?:#!.*\n)?# (\w+\.(?:py|sh|slurm))\n", self.text)
        return found[1] if found else None


def is_notebook(text: str) -> bool:
    """Whether Sphinx executes the page."""
    return text.startswith("---\n") and "kernelspec:" in text.split("\n---\n", 1)[0]


def pages() -> list[str]:
    """Every page whose blocks the tests run; notebooks run when the site is built."""
    found = [
        ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md", "pipelines/README.md")
    ] + sorted(path for path in (ROOT / "docs").rglob("*.md") if "_generated" not in path.parts)
    return [path.relative_to(ROOT).as_posix() for path in found if not is_notebook(path.read_text(encoding="utf-8"))]


def blocks_of(text: str) -> list[Block]:
    """Return the blocks of a page in order, each ``text`` block with what it is the output of."""
    lines = text.splitlines()
    found: list[Block] = []
    marks: dict[str, str] = {}
    adjacent = False  # nothing but blank lines since the last block ended
    at = 0
    while at < len(lines):
        fence, mark = _FENCE.match(lines[at]), _MARK.match(lines[at])
        if fence is None:
            if mark:
                marks[mark[1]] = mark[2] or ""
                adjacent = adjacent and mark[1] == "numbers vary"
            elif lines[at].strip():
                marks, adjacent = {}, False
            at += 1
            continue
        indent, ticks, language = fence.groups()
        end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == ticks)
        body = "".join(line.removeprefix(indent) + "\n" for line in lines[at + 1 : end])
        last = found[-1] if found else None
        if language == "text" and adjacent and last and last.shown is None and "sketch" not in marks:
            found[-1] = Block(
                language=last.language, text=last.text, line=last.line, marks=last.marks | marks, shown=body
            )
        else:
            found.append(Block(language=language, text=body, line=at + 2, marks=marks))
        marks, adjacent, at = {}, True, end + 1
    return found


def differs(printed: str, shown: str, *, numbers_vary: bool = False, any_order: bool = False) -> str | None:
    """Say how an output differs from what the page shows, None where it does not.

    In what is shown, ``…`` stands for any text, and alone in a line for any lines. ``numbers_vary``: any number for any
    other, with any spaces. ``any_order``: of lines, for what several ranks print.
    """
    got, want = _lines(printed), _lines(shown)
    if any_order:
        got, want = sorted(got), sorted(want, key=lambda line: line.replace("…", ""))
    if numbers_vary:
        got, want = ([re.sub(r"\s+", " ", _NUMBER.sub("0", line)) for line in side] for side in (got, want))
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "…" else re.escape(line).replace("…", ".*") + r"\n" for line in want
    )
    if re.fullmatch(pattern, "".join(line + "\n" for line in got)):
        return None
    return "printed:\n" + "\n".join(got) + "\nshown:\n" + "\n".join(want)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]
