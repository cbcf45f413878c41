"""The arguments of ``open_dataset``, in three records: what to read, how to cut it, how to reach it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from scidata.core.checks import (
    check_field_steps,
    check_flag,
    check_function,
    check_int,
    check_mapping,
    check_optional_int,
    check_steps,
)
from scidata.data.local_transform import LocalTransform
from scidata.errors import ConfigError, near_matches
from scidata.read.disk_cache import DiskCache, make_cache
from scidata.store.reading.subsample import Subsample, make_subsample

#: A width, widths by dim, or the relations that the layers of a model follow.
Halo: TypeAlias = float | Mapping[str, int | tuple[int, int]] | list[Any] | tuple[Any, ...]  # a str is a Sequence
#: Offsets along the sample dimension: of all fields, or by field.
Steps: TypeAlias = Sequence[int] | Mapping[str, Sequence[int]]

_GAPS = ("skip", "error", "allow")
_KINDS = ("grid", "points", "mesh", "graph")
# NumPy has no bfloat16: such fields are read as float32 and cast once, when they become tensors
_READ_AS = {torch.float16: np.float16, torch.bfloat16: np.float32, torch.float32: np.float32, torch.float64: np.float64}


@dataclass(frozen=True, kw_only=True, eq=False)
class WhatToRead:
    """Which values make a sample, and what is made of them; see :func:`scidata.open_dataset`."""

    kind: str | None
    fields: Sequence[str] | str | None
    sample_dim: str | int | Sequence[str | int] | None
    steps: Steps
    isel: Mapping[str, Any] | None
    decode: bool | str
    dtype: torch.dtype | None
    transform: Callable[[Any], Any] | None
    local_transform: LocalTransform | None
    subsample: Mapping[str, int] | None
    subsample_block: int | str
    subsample_seed: int
    sel: Mapping[str, Any] | None = None
    coords: bool = False
    destagger: bool = False
    gaps: str = "skip"

    def __post_init__(self) -> None:
        check_mapping("isel", self.isel, "{'level': 3}")
        check_mapping("sel", self.sel, "{'level': 500}")
        check_flag("coords", self.coords)
        check_flag("destagger", self.destagger)
        check_function("transform", self.transform)
        check_function("local_transform", self.local_transform)
        if self.decode not in ("rank", "node"):
            if isinstance(self.decode, str):
                raise ConfigError(
                    f"decode must be True, False, 'rank' or 'node', not {self.decode!r}"
                    f"{near_matches(self.decode, ('rank', 'node'))}"
                )
            check_flag("decode", self.decode)
        check_field_steps(self.steps)
        if self.gaps not in _GAPS:
            raise ConfigError(
                f"gaps must be one of {', '.join(_GAPS)}, not {self.gaps!r}{near_matches(self.gaps, _GAPS)}"
            )
        self.draw()
        if self.kind is not None and self.kind not in _KINDS:
            raise ConfigError(
                f"kind must be one of {', '.join(_KINDS)}, not {self.kind!r}{near_matches(self.kind, _KINDS)}"
            )
        if self.dtype is not None and self.dtype not in _READ_AS:
            raise ConfigError(
                f"dtype must be a floating torch dtype, such as torch.float32, not {self.dtype!r}; integer fields keep "
                "their own"
            )

    @property
    def decodes(self) -> bool:
        """Whether packed values are decoded as CF says."""
        return bool(self.decode)

    @property
    def by_node(self) -> bool:
        """Whether the ranks of a node decode chunks for each other."""
        return self.decode == "node"

    @property
    def numpy_dtype(self) -> npt.DTypeLike | None:
        """What floating fields are read as; None keeps theirs."""
        return None if self.dtype is None else _READ_AS[self.dtype]

    @property
    def samples(self) -> dict[str, Any]:
        """What makes samples of the data along a dimension, as readers take it."""
        steps = self.steps if isinstance(self.steps, Mapping) else check_steps(self.steps)
        return {"sample_dim": self.sample_dim, "steps": steps, "isel": self.isel}

    @property
    def chosen_samples(self) -> dict[str, bool]:
        """Which of these were given."""
        defaults = {"sample_dim": None, "steps": (0,), "isel": None}
        return {name: value != defaults[name] for name, value in self.samples.items()}

    @property
    def labelled(self) -> dict[str, bool]:
        """Which arguments were given that only data with coordinates along its dims has."""
        by_field = {"steps by field": isinstance(self.steps, Mapping), "gaps": self.gaps != "skip"}
        return {"sel": bool(self.sel), "coords": self.coords, "destagger": self.destagger} | by_field

    @property
    def wrapping(self) -> dict[str, Any]:
        """What data sets make of the values, as they take it."""
        return {"dtype": self.dtype, "transform": self.transform, "local_transform": self.local_transform}

    def draw(self) -> Subsample | None:
        """Return the rows that each epoch draws, None for all."""
        return make_subsample(self.subsample, block=self.subsample_block, seed=self.subsample_seed)


@dataclass(frozen=True, kw_only=True, eq=False)
class HowToCut:
    """How ranks share a sample; see :func:`scidata.open_dataset`."""

    shard: Mapping[str | int, str] | None
    bounds: Any
    weights: npt.ArrayLike | Mapping[str, npt.ArrayLike] | str | None
    align: int | Mapping[str, int]
    halo: Halo
    ghosts: str | None
    periodic: str | Sequence[str]
    dp: str

    def __post_init__(self) -> None:
        check_mapping("shard", self.shard, "{'latitude': 'domain'}")

    @property
    def given_for_grids(self) -> dict[str, bool]:
        """Which arguments were given that only grids have."""
        return {"shard": self.shard is not None, "align": self.align != 1, "periodic": bool(self.periodic)}


@dataclass(frozen=True, kw_only=True, eq=False)
class HowToReach:
    """How files are read, and which of them are; see :func:`scidata.open_dataset`."""

    allow_missing: bool
    allow_external: bool
    num_threads: int
    cache_bytes: int | None
    pool_bytes: int | None
    cache_dir: str | os.PathLike[str] | None
    cache_disk_bytes: int | None

    def __post_init__(self) -> None:
        check_flag("allow_missing", self.allow_missing)
        check_flag("allow_external", self.allow_external)
        check_int("num_threads", self.num_threads, least=0)
        check_optional_int("pool_bytes", self.pool_bytes, least=0)
        self.disk()

    @property
    def trust(self) -> dict[str, Any]:
        """What is read besides, as readers of raw files take it."""
        return {"allow_missing": self.allow_missing, "allow_external": self.allow_external}

    def disk(self) -> DiskCache | None:
        """Return what keeps decoded parts on disk; None where nothing does."""
        if self.cache_dir is None:
            if self.cache_disk_bytes is not None:
                raise ConfigError("cache_disk_bytes: means nothing without cache_dir; leave it out")
            return None
        return make_cache(self.cache_dir, self.cache_disk_bytes)


class Options(TypedDict, total=False):
    """The arguments of :func:`scidata.open_dataset` whose types do not decide what comes out, for its overloads."""

    fields: Sequence[str] | str | None
    sample_dim: str | int | Sequence[str | int] | None
    steps: Steps
    gaps: Literal["skip", "error", "allow"]
    isel: Mapping[str, Any] | None
    sel: Mapping[str, Any] | None
    bounds: Any
    weights: npt.ArrayLike | Mapping[str, npt.ArrayLike] | str | None
    align: int | Mapping[str, int]
    halo: Halo
    ghosts: str | None
    periodic: str | Sequence[str]
    decode: bool | str
    dtype: torch.dtype | None
    local_transform: LocalTransform | None
    dp: str
    allow_missing: bool
    allow_external: bool
    subsample: Mapping[str, int] | None
    subsample_block: int | str
    subsample_seed: int
    coords: bool
    destagger: bool
    num_threads: int
    cache_bytes: int | None
    pool_bytes: int | None
    cache_dir: str | os.PathLike[str] | None
    cache_disk_bytes: int | None
    storage_options: Mapping[str, Any] | None
