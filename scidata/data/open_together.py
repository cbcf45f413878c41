"""Let one rank fetch metadata from object stores for all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from scidata.core.keywords import checked_keywords
from scidata.sources.access.filesystems import current


@checked_keywords
@contextmanager
def open_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Let one rank fetch metadata from object stores and share the answers with the others. Collective.

    Otherwise each rank sends its own requests. The first rank of the group opens the data and sends the responses, at
    most 1,024, to the others, which open the same data with these and request only missing ones. Local files are
    opened as usual.

    Parameters
    ----------
    group : ProcessGroup, optional
        Ranks that open the same data, all of which enter; None for all ranks. One rank alone shares nothing.

    Raises
    ------
    Exception
        What opening raises; that nothing is there, on each rank.

    Examples
    --------
    >>> with scidata.open_together():
    ...     ds = scidata.open_dataset("s3://bucket/era5.zarr", mesh)  # doctest: +SKIP
    """
    answers: list[dict[object, Any]] = [{}]
    is_shared = dist.is_initialized() and dist.get_world_size(group) > 1
    is_first = is_shared and dist.get_rank(group) == 0
    if is_shared and not is_first:
        dist.broadcast_object_list(answers, group=group, group_src=0)
    current().answers = answers[0] if is_shared else None
    try:
        yield
    finally:
        current().answers = None
        if is_first:
            dist.broadcast_object_list(answers, group=group, group_src=0)
