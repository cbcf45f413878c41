"""The table of what became of the models."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version

#: What a model is that is several of these in different layouts: the first.
WORST = ("wrong", "divergent", "broken", "other error", "not run", "refused", "right")
_PACKAGES = {
    "smp": "segmentation-models-pytorch",
    "neuralop": "neuraloperator",
    "harmonics": "torch-harmonics",
    "pyg": "torch-geometric",
    "physicsnemo": "nvidia-physicsnemo",
    "weather": "miles-credit",
    "vits": "vit-pytorch",
    "flows": "normflows",
    "solvers": "the_well",
    "pina": "pina-mathlab",
    "atoms": "mace-torch",
}


def table(results: Iterable[Mapping[str, str]], command: str, day: str) -> str:
    """Return Markdown: how many models of each library are right, and what stops the others."""
    layouts: dict[str, None] = {}
    models: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for each in results:
        layouts[each["layout"]] = None
        models[each["library"]][each["name"]].setdefault(each["kind"], each["note"])
    lines = [
        "| library | models | right | refused | other | not run |",
        "|---|---|---|---|---|---|",
    ]
    totals: Counter[str] = Counter()
    reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for library, found in models.items():
        counts: dict[str, int] = defaultdict(int)
        for name, kinds in found.items():
            kind = min(kinds, key=WORST.index)
            counts[kind] += 1
            if kind != "right":
                reasons[kind][_reason(kind, kinds[kind])].append(f"{library} {name}")
        totals.update(counts)
        other = sum(counts[kind] for kind in WORST[:4])
        row = (len(found), counts["right"], counts["refused"], other, counts["not run"])
        lines.append(f"| {_versioned(library)} | {' | '.join(map(str, row))} |")
    for kind in WORST[:-1]:
        if reasons[kind]:
            lines += ["", f"## {kind.capitalize()}", ""]
            most = sorted(reasons[kind].items(), key=lambda pair: (-len(pair[1]), pair[0]))
            lines += [f"- {reason} ({len(names)}): {', '.join(names)}" for reason, names in most]
    wrong = sum(totals[kind] for kind in WORST[:4])
    run = totals["right"] + totals["refused"] + wrong
    first = (
        f"**{totals['right']} of the {run} public models that run give the results of one process**; "
        f"{totals['refused']} are refused by name, {wrong} are wrong."
    )
    last = (
        f"`{command}`, on {day}. Each model runs unmodified and in double precision, on a sample that is cut "
        f"as {_listed(layouts)}. Its loss, the gradients of its inputs and of all parameters, and its buffers are "
        "compared with one process."
    )
    return "\n".join(["# Public models on shards", "", first, "", *lines, "", "## How this was run", "", last]) + "\n"


def _reason(kind: str, note: str) -> str:
    if kind != "refused":
        return note.replace("|", "/")
    operation, _, rest = note.partition(": ")
    why = re.split(r"\. Layout:", rest)[0].removeprefix(operation).strip()
    return f"`{operation}`: {why}"


def _listed(layouts: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in layouts)


def _versioned(library: str) -> str:
    package = _PACKAGES.get(library, library)
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package
