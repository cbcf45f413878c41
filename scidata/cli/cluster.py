"""The Dask cluster that a command is given by ``--dask``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scidata.cli.arguments import usage_error
from scidata.core.tasks.dask_jobs import connected


@contextmanager
def cluster(address: str | None, jobs: int) -> Iterator[Any]:
    """Return a client of the cluster at an address; None without one."""
    if address is None:
        yield None
        return
    if jobs > 1:
        raise usage_error("--dask", "excludes --jobs: its workers are the processes.")
    # a lost connection is reported once, by the error that ends the command
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    with connected(address) as client:
        yield client
