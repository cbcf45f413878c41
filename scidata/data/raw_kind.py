"""The kind of raw data; advice for meshes and graphs, which need a store first. No torch."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from scidata.core.options import ONLY_GRIDS, SAMPLES, ReadOptions
from scidata.core.types import Source
from scidata.errors import UnsupportedFormatError
from scidata.sources import open_source
from scidata.sources.kinds import ELSEWHERE, MESHES_IN_HDF5, check_no_mesh, common_points, kind_of
from scidata.sources.paths import expand_paths
from scidata.store.format.places import is_store

_MOST_NAMED = 4  # files in the printed command


def _open(path: str, allow_external: bool) -> Source:
    try:
        check_no_mesh(path)
        return open_source(path, allow_external=allow_external)
    except UnsupportedFormatError:
        from scidata.meshes.formats.meshio import open_any  # which a grid does without

        return open_any(path, allow_external=allow_external)


def kind_of_raw(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], options: ReadOptions, *, like_grid: bool = False
) -> tuple[str, Source | None]:
    """Return ``"grid"`` or ``"points"``, and the first file if it was opened; refuse other kinds with a remedy.

    The first of several files decides, unless the options name a kind. A cloud with options that only grids have, or
    with ``like_grid``, is a grid. Raises FileNotFoundError: nothing is there; UnsupportedFormatError: a mesh or a
    graph, which is read from a store; or no format that is known.
    """
    kind, allow_external = options.kind, options.allow_external
    if kind is None and (options.time is not None or options.positions is not None):
        return "points", None
    if kind in ("grid", "points"):
        return kind, None
    found, reason, source = kind, "", None
    if kind is None:
        source = _open(expand_paths(path)[0], allow_external)
        as_grid = like_grid or bool(options.given(*ONLY_GRIDS, *SAMPLES))
        found, reason = kind_of(source, like_grid=as_grid, fields=options.fields)
    tools = ("meshio", "openfoam", "vtu", "vtp", *MESHES_IN_HDF5.values())
    of_mesh_tools = source is not None and source.format in tools
    if found not in ("grid", "points") or of_mesh_tools:
        shown = os.fspath(path) if isinstance(path, str | os.PathLike) else "SOURCE..."
        folder = os.path.dirname(shown.rstrip("/"))
        if is_store(folder):
            raise UnsupportedFormatError(f"{shown}: one sample of the store {folder}; open the store instead")
        advice = "; or say kind='grid' (--kind grid), to take its arrays as they lie"
        raise UnsupportedFormatError(
            f"{shown}: kind {found!r}{reason and f' ({reason})'} is read from a store, which serves any number of "
            f"ranks; write it once: {partition_command(path, str(found), reason, source)}, then open OUT"
            + ("" if source is None or of_mesh_tools else advice)
        )
    return found, source


def partition_command(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], kind: str, reason: str, source: Source | None
) -> str:
    """Return the command that writes raw files as a store; ``kind`` and ``reason`` come from ``kind_of``."""
    given = [path] if isinstance(path, str | os.PathLike) else list(path)
    shown = " ".join(shlex.quote(os.fspath(each)) for each in given) if len(given) <= _MOST_NAMED else "SOURCE..."
    mesh = " --mesh TOPOLOGY" if reason.endswith(ELSEWHERE) else ""
    lacks_points = kind == "graph" and source is not None and common_points(source) is None
    return f"scidata partition {shown} OUT --kind {kind}{mesh}{' --order rows' if lacks_points else ''}"
