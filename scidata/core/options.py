"""The user's read options, built when a data set is opened and passed down unchanged to its reader."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy.typing as npt

from scidata.core.checks import (
    Duration,
    check_choice,
    check_field_steps,
    check_flag,
    check_int,
    check_mapping,
    check_optional_int,
    refuse,
)
from scidata.core.grid_cut import GridCut
from scidata.core.patches import Patches
from scidata.core.types import IntArray
from scidata.errors import ConfigError, near_matches

#: As a user names it: a dimension, several, none (False), or the default (None).
SampleDim: TypeAlias = str | int | Sequence[str | int] | None
#: Rows of some dims, or values of their coordinates: an index, a slice or a list of them.
Crop: TypeAlias = Mapping[str, Any] | Mapping[str | int, Any]
#: Offsets along the sample dimension: of all fields, or by field.
Steps: TypeAlias = Sequence[int] | Mapping[str, Sequence[int]]
#: A cost per row, for each dim or node set, or the name of a field.
Weights: TypeAlias = npt.ArrayLike | Mapping[str, npt.ArrayLike] | str | None
#: Rows below and above, or one number for both.
HaloWidth: TypeAlias = int | tuple[int, int]
#: Relation of one layer of a model, or several for one layer.
Layer: TypeAlias = str | tuple[str, ...]
#: A width, widths by dim, ``"cells"``, or the relations of a model's layers.
Halo: TypeAlias = (
    float
    | Literal["cells"]
    | HaloWidth
    | Mapping[str, HaloWidth]
    | Mapping[str | int, HaloWidth]
    | list[str]
    | list[Layer]
    | tuple[Layer, ...]
)
#: How bounds are chosen, or explicit bounds.
Cut: TypeAlias = str | Sequence[int] | IntArray
#: The same for all samples, by dim, or by stored sample.
Bounds: TypeAlias = Cut | Mapping[str, Cut] | Mapping[int, Cut] | Mapping[str | int, Cut]
#: Multiples on which bounds fall, for all dims or by dim.
Align: TypeAlias = int | Mapping[str, int] | Mapping[str | int, int]

#: Table rows by a column's values: one, several, or a slice with both ends included.
Where: TypeAlias = Mapping[str, Any]

#: Options of grids only.
ONLY_GRIDS = ("shard", "align", "periodic", "sel", "coords", "destagger", "gaps", "patch")
#: Options of raw points only: their location, and the table rows that are samples.
ONLY_POINTS = ("positions", "time", "window", "every", "where", "cut_like")
#: Options that choose which rows along a dimension are samples.
SAMPLES = ("sample_dim", "steps", "isel")

_KINDS = ("grid", "points", "mesh", "graph")
_GAPS = ("skip", "error", "allow")
_DECODE = ("rank", "node")


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadOptions:
    """Arguments of :func:`scidata.open_dataset` that select data, with equal meaning and defaults.

    Readers of grids, stores and raw points take it whole; options that mean nothing to them are at their defaults.
    ``dtype`` is NumPy's: the one that floating fields are read as.
    """

    kind: str | None = None
    fields: Sequence[str] | str | None = None
    sample_dim: SampleDim = None
    steps: Steps = (0,)
    gaps: str = "skip"
    isel: Crop | None = None
    sel: Crop | None = None
    patch: Mapping[str, int] | Patches | None = None
    decode: bool | str = True
    dtype: npt.DTypeLike | None = None
    coords: bool = False
    destagger: bool = False
    subsample: Mapping[str, int] | None = None
    subsample_block: int | str = 1
    subsample_seed: int = 0
    positions: Sequence[str] | str | None = None
    time: str | None = None
    window: Duration | None = None
    every: Duration | None = None
    where: Where | None = None
    # how ranks share a sample
    shard: Mapping[str | int, str] | None = None
    bounds: Bounds = "even"
    weights: Weights = None
    align: Align = 1
    cut_like: GridCut | None = None
    halo: Halo = 0
    ghosts: str | None = None
    edges: str | None = None
    periodic: str | Sequence[str] = ()
    # how files are reached and cached
    allow_missing: bool = False
    allow_external: bool = False
    num_threads: int = 4
    cache_bytes: int | None = None
    pool_bytes: int | None = None
    cache_dir: str | os.PathLike[str] | None = None
    cache_disk_bytes: int | None = None

    def __post_init__(self) -> None:
        check_mapping("isel", self.isel, "{'level': 3}")
        check_mapping("sel", self.sel, "{'level': 500}")
        if self.patch is not None:
            object.__setattr__(self, "patch", Patches.of(self.patch))
        check_mapping("shard", self.shard, "{'latitude': 'domain'}")
        for name in ("coords", "destagger", "allow_missing", "allow_external"):
            check_flag(name, getattr(self, name))
        if isinstance(self.decode, str):
            if self.decode not in _DECODE:
                raise ConfigError(
                    f"decode must be True, False, 'rank' or 'node', not {self.decode!r}"
                    f"{near_matches(self.decode, _DECODE)}"
                )
        else:
            check_flag("decode", self.decode)
        check_field_steps(self.steps)
        check_choice("gaps", self.gaps, _GAPS)
        if self.kind is not None:
            check_choice("kind", self.kind, _KINDS)
        check_int("num_threads", self.num_threads, least=0)
        check_optional_int("cache_bytes", self.cache_bytes, least=0)
        check_optional_int("pool_bytes", self.pool_bytes, least=0)
        self._check_windows()
        if self.cache_dir is None and self.cache_disk_bytes is not None:
            raise ConfigError("cache_disk_bytes: means nothing without cache_dir; leave it out")

    def _check_windows(self) -> None:
        check_mapping("where", self.where, "{'qc': (0, 1)}")
        given = {name: getattr(self, name) is not None for name in ONLY_POINTS}
        if self.time is None:
            without = {name: given[name] for name in ("window", "every", "where")}
            refuse(without, "means nothing without time=, the column of times of a table")
        elif not isinstance(self.time, str):
            raise ConfigError(f"time={self.time!r}: expected the name of a column")
        elif self.window is None:
            raise ConfigError(f"time={self.time!r}: say how long a window of it is, such as window='6h'")
        if self.kind not in (None, "points"):
            refuse(given, f"means nothing for kind={self.kind!r}, but for points")

    @property
    def decodes(self) -> bool:
        """Whether packed values are decoded by CF rules."""
        return bool(self.decode)

    @property
    def by_node(self) -> bool:
        """Whether the ranks of a node decode chunks for each other."""
        return self.decode == "node"

    def refuse(self, *names: str, why: str) -> None:
        """Raise if any of these options is given."""
        refuse(dict.fromkeys(self.given(*names), True), why)

    def given(self, *names: str) -> list[str]:
        """Return the options among these that are neither default nor empty."""
        return [name for name in names if not _is_default(getattr(self, name), getattr(DEFAULTS, name))]


def _is_default(value: object, default: object) -> bool:
    if isinstance(value, str | bytes | Mapping | Sequence) and not value:
        return True
    return value is default or bool(value == default)


#: All options at their defaults.
DEFAULTS = ReadOptions()
