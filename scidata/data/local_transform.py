"""A user's function of this rank's part of a sample, run where the part is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import torch

from scidata.core import trace
from scidata.core.types import Array
from scidata.errors import ConfigError, UnknownNameError, near_matches

#: From a part's tensors by name, ghosts and halo included, to those that change; shapes and dtypes stay.
LocalTransform: TypeAlias = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]


def apply_locally(transform: LocalTransform | None, arrays: Mapping[str, Array]) -> None:
    """Change the arrays as the function says.

    Raises
    ------
    UnknownNameError, ConfigError
        It has made a field that was not read, or one of another shape or dtype.
    """
    if transform is None:
        return
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    with trace.span("local transform", sample=trace.get_sample()):
        result = transform(dict(tensors))
    if not isinstance(result, Mapping):
        raise ConfigError(f"local_transform returned {type(result).__name__}; return the fields, by name")
    for name, changed in result.items():
        if name not in tensors:
            raise UnknownNameError(
                f"local_transform made a field {name!r}, which was not read{near_matches(name, tensors)}; make new "
                "fields in transform"
            )
        own = tensors[name]
        if (changed.shape, changed.dtype) != (own.shape, own.dtype):
            raise ConfigError(
                f"local_transform made {name!r} {tuple(changed.shape)} {changed.dtype}, but this rank's part is "
                f"{tuple(own.shape)} {own.dtype}; change shapes and dtypes in transform"
            )
        if changed.data_ptr() != own.data_ptr() or changed.stride() != own.stride():
            np.copyto(arrays[name], changed.numpy())
