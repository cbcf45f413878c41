"""The table of torch's operations in Markdown, beside DTensor's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

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


def _all_right(counts: Mapping[str, int]) -> bool:
    return bool(counts.get("right")) and set(counts) <= _PASSED


def _others(counts: Mapping[str, int]) -> int:
    return sum(n for kind, n in counts.items() if kind not in (*_PASSED, "refused"))
