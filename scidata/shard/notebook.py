"""A ShardTensor's layout as a notebook shows it, axis by axis. No communication."""

from __future__ import annotations

from scidata.core.html import card
from scidata.shard.spec import ShardSpec


def layout_card(spec: ShardSpec, facts: dict[str, object]) -> str:
    """Return a page's table of a layout; ``facts`` are said before it."""
    rows = []
    for axis, dim, sizes in zip(spec.axes, spec.dims, spec.sizes, strict=True):
        parts = "" if sizes is None else ", ".join(map(str, sizes[:16])) + (", …" if len(sizes) > 16 else "")
        rows.append((axis.name or "", "replicated" if dim is None else f"dim {dim}", parts, axis.rank))
    shapes = {"global shape": tuple(spec.global_shape), "this rank's part": tuple(spec.local_shape)}
    return card("ShardTensor", shapes | facts, ("mesh axis", "shards", "sizes of the ranks", "this rank"), rows)
