"""The keyword arguments of ``open_dataset`` as types: those of its overloads, and those that data sets take."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from scidata.core.checks import check_function
from scidata.core.options import Align, Bounds, Crop, Halo, SampleDim, Steps, Weights
from scidata.data.local_transform import LocalTransform
from scidata.errors import ConfigError

# NumPy has no bfloat16: such fields are read as float32 and cast once, when they become tensors
_READ_AS = {torch.float16: np.float16, torch.bfloat16: np.float32, torch.float32: np.float32, torch.float64: np.float64}


class Wrapping(TypedDict):
    """Conversions that a data set makes of the values that its reader reads."""

    dtype: torch.dtype | None
    transform: Callable[[Any], Any] | None
    local_transform: LocalTransform | None


def check_wrapping(wrapping: Wrapping) -> None:
    """Refuse functions that are none, and dtypes that are not floating."""
    check_function("transform", wrapping["transform"])
    check_function("local_transform", wrapping["local_transform"])
    dtype = wrapping["dtype"]
    if dtype is not None and dtype not in _READ_AS:
        raise ConfigError(
            f"dtype must be a floating torch dtype, such as torch.float32, not {dtype!r}; integer fields keep their own"
        )


def numpy_dtype(dtype: torch.dtype | None) -> npt.DTypeLike | None:
    """Return the NumPy dtype in which floating fields are read; None keeps theirs."""
    return None if dtype is None else _READ_AS[dtype]


class Options(TypedDict, total=False):
    """The arguments of :func:`scidata.open_dataset` that do not decide its result's type, for its overloads."""

    fields: Sequence[str] | str | None
    sample_dim: SampleDim
    steps: Steps
    gaps: Literal["skip", "error", "allow"]
    isel: Crop | None
    sel: Crop | None
    bounds: Bounds
    weights: Weights
    align: Align
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
    storage_options: Mapping[str, object] | None
