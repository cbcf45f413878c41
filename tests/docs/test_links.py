"""Links between files work where Markdown is read as it lies, on GitHub; in the site, Sphinx checks them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md"),
                 *(ROOT / "pipelines").glob("*.md"), *(ROOT / "scidata").rglob("*.md"), ROOT / "tests/bench/README.md"]
    if "_generated" not in path.parts
)  # fmt: skip


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^()\s]+)\)", text):
        if re.match(r"https?:|mailto:", target) or "_generated/" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(found.read_text(encoding="utf-8")), f"{page}: {target}"


@pytest.mark.parametrize("page", ["docs/index.md", "docs/compatibility/index.md"])
def test_figures_are_those_of_the_page_that_a_row_links_to(page: str) -> None:
    rows = [line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if re.match(r"\| .*\]\(", line)]
    assert rows
    for row in rows:
        (target,) = re.findall(r"\]\(([^()\s#]+)", row)
        linked = ((ROOT / page).parent / target).read_text(encoding="utf-8")
        figures = re.findall(r"\d[\d,.]*(?:e-\d+)?", re.sub(r"\]\(.*?\)", "", row))
        missing = [figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d])", linked)]
        assert not missing, f"{row}: {target} has no {missing}"
