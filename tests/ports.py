"""Ports for process groups that tests start by hand."""

import random
import socket

_OURS = range(10_000, 32_000)  # Linux gives connections a port from 32,768 by itself
_random = random.SystemRandom()


def free_port() -> int:
    """Return a port that nobody listens at.

    Not one that the system chooses: until rank 0 listens there, seconds later, the system may give the same to any
    connection of a test beside this one; rank 0 then ends, and the others wait for it for half an hour.
    """
    while True:
        port = _random.choice(_OURS)
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
