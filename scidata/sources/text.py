"""Text variables, which sources leave out: what they are, and their attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import h5py

from scidata.core.types import Source
from scidata.sources.hdf5.walk import Naming, clean_attributes, damage_as_corrupt_data, open_h5
from scidata.sources.netcdf3 import Variable, read_header

__all__ = ["is_local", "netcdf3_variables", "text_attributes"]


def text_attributes(source: Source) -> dict[str, Mapping[str, Any]]:
    """Return the attributes of every variable that the source leaves out."""
    skipped: Mapping[str, str] = getattr(source, "skipped", {})
    if not skipped:
        return {}
    if source.format == "netcdf3":
        return {name: variable.attributes for name, variable in netcdf3_variables(source).items() if name in skipped}
    if source.format not in ("netcdf4", "hdf5"):
        return {}
    found: dict[str, Mapping[str, Any]] = {}
    with (
        open_h5(source.path, guarded=True) as h5,
        damage_as_corrupt_data(f"{source.path}: attributes of text variables"),
    ):
        for name in skipped:
            if is_local(h5, name):
                found[name] = clean_attributes(h5[name], Naming.hidden_attributes, f"{source.path}: {name!r}")
    return found


def is_local(h5: Any, name: str) -> bool:
    """Say whether a name is a dataset of this file itself: links may lead to files that nobody asked for."""
    link = h5.get(name, getlink=True)
    return isinstance(link, h5py.HardLink) and isinstance(h5[name], h5py.Dataset)


def netcdf3_variables(source: Source) -> dict[str, Variable]:
    """Return the variables of a NetCDF 3 file by name."""
    return {variable.name: variable for variable in read_header(source.path).variables}
