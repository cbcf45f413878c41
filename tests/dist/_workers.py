"""Worker processes of ranks, forked by the server that the ranks come from, which has torch loaded."""

import multiprocessing.forkserver
from multiprocessing.context import ForkServerContext


def forked() -> ForkServerContext:
    """Return the context of those, in a rank of ``run_ranks``: they start at once, where spawned ones take seconds."""
    server = multiprocessing.forkserver._forkserver
    assert server._forkserver_address, "not a rank"
    # Python would have each rank start a server of its own
    server.ensure_running = multiprocessing.forkserver.ensure_running = bool
    return multiprocessing.get_context("forkserver")
