"""Outputs of ``scidata.create`` that have not come to their end: missing steps would be read as fill values."""

from __future__ import annotations

import re

from scidata.core.types import Source
from scidata.errors import OutputError

#: Attribute of a group of Zarr that is being written, or was when the run was killed.
UNFINISHED = "scidata_unfinished"
#: What the name of an output ends in until it is whole: files have no attribute that could be taken away at the end.
SUFFIX = ".unfinished"
UNFINISHED_NAME = re.compile(re.escape(SUFFIX) + "(/|$)")


def check_finished(source: Source) -> None:
    """Raise if not all steps of an output have been written."""
    why = source.attributes.get(UNFINISHED)
    if why is None and UNFINISHED_NAME.search(source.path):
        why = "its name says that scidata.create has not come to its end; go on with resume=True"
    if why is not None:
        raise OutputError(
            f"{source.path} is unfinished: {why}; allow_missing=True reads what there is, and fill values for the rest"
        )
