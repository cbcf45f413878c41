"""One rank asks object stores for metadata, and all take its answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from scidata.sources.access.answers import SharedAnswers
from scidata.sources.access.filesystems import current


@contextmanager
def open_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Let one rank ask object stores for metadata, and the others take its answers. Collective.

    Each rank opens data for itself otherwise, so that 1,000 ranks ask 1,000 times for the same objects. Here the first
    one opens them, sends the answers that it got (at most 256 MiB), and the others open them with these. What they ask
    beyond is asked as ever. Files of local disks are opened as ever, too.

    Parameters
    ----------
    group : ProcessGroup, optional
        Ranks that open the same data; None for all. Without a process group nothing is shared.

    Examples
    --------
    >>> with scidata.open_together():
    ...     ds = scidata.open_dataset("s3://bucket/era5.zarr", mesh)  # doctest: +SKIP
    """
    given: list[dict[object, object] | None] = [None]
    is_shared = dist.is_initialized() and dist.get_world_size(group) > 1
    is_first = is_shared and dist.get_rank(group) == 0
    if is_shared and not is_first:
        dist.broadcast_object_list(given, group=group, group_src=0)
    current().answers = answers = SharedAnswers(given[0]) if is_shared else None
    try:
        yield
    finally:
        current().answers = None
        if is_first and answers is not None:
            dist.broadcast_object_list([answers.found], group=group, group_src=0)
