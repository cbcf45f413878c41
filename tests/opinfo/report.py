"""The table of torch's operations in Markdown, beside DTensor's."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

START, END = "## Other dtypes", "\n## How this was run"
_PASSED = {"right", "error"}  # error: torch's own, for what one process refuses too


def table(results: Sequence[Mapping[str, Any]], rivals: Sequence[Mapping[str, Any]], words: str) -> str:
    """Return the page: totals, and a row for each operation."""
    theirs = {each["name"]: Counter(each["counts"]) for each in rivals}
    ours = {each["name"]: Counter(each["counts"]) for each in results if set(each["counts"]) - {"error"}}
    total = sum(ours.values(), Counter())
    whole = [name for name, counts in ours.items() if _all_right(counts)]
    lines = ["# torch's samples of its operations, on shards", ""]
    lines += [
        f"**Of torch's {len(ours)} sampled operations {len(whole)} are right in every call**; of the calls "
        f"{total['right']:,} are right, {total['refused']:,} refused, {_others(total):,} wrong.",
        "",
    ]
    good = [name for name, counts in theirs.items() if _all_right(counts) and name in ours]
    tried = [name for name, counts in theirs.items() if set(counts) - {"error"} and name in ours]
    if tried:
        alone = {each["name"]: each["alone"] for each in results}
        less = [f"`{name}`" for name in good if not _all_right(alone[name])]
        stuck = [f"`{name}`" for name, counts in theirs.items() if counts["broken"]]
        lines += [
            "DTensor gets the functions alone, all their tensors sharded along dim 0 or -1, cut by `torch.chunk`: of "
            f"{len(tried)} operations it has {len(good)} all right. Of these scidata has {len(good) - len(less)} "
            f"({1 - len(less) / max(1, len(good)):.1%}) all right in these calls, on uneven parts and empty ones; not: "
            f"{', '.join(less) or 'none'}.",
            "",
            f"{len(stuck)} operations ended in DTensor's ranks out of step, or in none being done in time: "
            f"{', '.join(stuck) or 'none'}.",
            "",
            "The columns also count methods, in-place forms, and calls of which the first tensor alone is sharded.",
            "",
        ]
    lines += ["| operation | right | refused | neither | DTensor |", "|---|---|---|---|---|"]
    for name, counts in sorted(ours.items()):
        beside = theirs.get(name, Counter())
        tries = sum(n for kind, n in beside.items() if kind != "error")
        rival = f"{beside['right']} of {tries}" if tries else ""
        found = counts["right"], counts["refused"] or "", _others(counts) or "", rival
        lines.append(f"| `{name}` | {' | '.join(map(str, found))} |")
    lines += ["", "## How this was run", "", words]
    return "\n".join(lines) + "\n"


def with_columns(page: str, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Add what runs in other dtypes counted to the rows of a page, in place of what was there, and their totals."""
    rows = re.findall(r"^\| `(.+?)` \|(?: ([^|]*)\|){4}", page, re.M)
    by_name = {
        dtype: {each["name"]: each for each in results if set(each["counts"]) - {"error"}}
        for dtype, results in runs.items()
    }
    lines = []
    body, end, rest = page.partition(END)
    on_page = {name for name, _ in rows}
    more = sorted({name for found in by_name.values() for name in found} - on_page)
    body = body.partition(START)[0].rstrip()
    last = body.rindex(f"| `{rows[-1][0]}` |")
    after = body.index("|\n", last) + 2 if "|\n" in body[last:] else len(body)
    body = body[:after].rstrip() + "".join(f"\n| `{name}` |  |  |  |  |" for name in more) + "\n" + body[after:]
    for line in body.rstrip().splitlines():
        cells = line.split("|")[1:6] if line.startswith("|") else []
        if cells and cells[0].strip() == "operation":
            cells += [f" {dtype} " for dtype in runs]
        elif cells and cells[0].startswith("---"):
            cells += ["---" for _ in runs]
        elif cells:
            name = cells[0].strip(" `")
            cells += [
                f" {_cell(Counter(found[name]['counts'])) if name in found else ''} " for found in by_name.values()
            ]
        lines.append(f"|{'|'.join(cells)}|" if cells else line)
    theirs = {name: rival.split() for name, rival in rows}
    good = [name for name, words in theirs.items() if words and words[0] == words[-1] != "0"]
    lines += ["", START]
    for dtype, found in by_name.items():
        total = sum((Counter(each["counts"]) for each in found.values()), Counter())
        whole = sum(_all_right(each["counts"]) for each in found.values())
        both = [name for name in good if found.get(name, {}).get("alone")]
        less = [f"`{name}`" for name in both if not _all_right(found[name]["alone"])]
        share = 1 - len(less) / max(1, len(both))
        lines += [
            "",
            f"**{dtype}**: {total['right']:,} calls right, {total['refused']:,} refused, {_others(total):,} neither; "
            f"{whole} of {len(found)} operations all right. Of the operations that DTensor has all right, {len(both)} "
            f"have samples here; {len(both) - len(less)} ({share:.1%}) are all right in these calls; not: "
            f"{', '.join(less) or 'none'}.",
        ]
    return "\n".join(lines) + "\n" + end + rest


def _cell(counts: Mapping[str, int]) -> str:
    others = {"refused": counts["refused"], "neither": _others(counts)}
    return ", ".join([str(counts["right"]), *(f"{n} {kind}" for kind, n in others.items() if n)])


def _all_right(counts: Mapping[str, int]) -> bool:
    return bool(counts.get("right")) and set(counts) <= _PASSED


def _others(counts: Mapping[str, int]) -> int:
    return sum(n for kind, n in counts.items() if kind not in (*_PASSED, "refused"))
