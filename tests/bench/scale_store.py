"""Work of the process that keeps the ranks' common store, by the number of ranks, while all is well.

    python tests/bench/scale_store.py [--ranks 64 1024 16384] [--seconds 10]

A torch TCPStore in a process of its own, and one connection a rank, over which goes what the board sends: ``before``,
seven messages a look and four looks a second; ``now``, the two or three of a sign of life, each second (8 s at most),
two more every other time that compare what was called, and a wait for the next event. CPU is that of the server's
process. ``told``: seconds from an event's post until half and all of the ranks have read it, and the server's CPU of
that. ``reached``: the share of the looks that the clients got through in time; CPU is then scaled up to all. They speak
torch's protocol over plain sockets, so that 16,384 fit in a few processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import selectors
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch.distributed as dist

_NUM_PROCESSES = 4
_RANKS_A_SECOND, _LONGEST_BEAT = 1024, 8.0
_READING = b'{"iteration": 1, "step": 123, "checksum": 1234567, "indices": [1, 2, 3, 4], "data": "f00", "name": "a"}'
_BEAT = (
    b'{"beat": 12, "loops": {"loader1": [1, 123, "reading"]}, '
    b'"calls": {"11": [12345, 1234567890], "27": [12345, 1234567890]}}'
)
_DOMAIN = 8  # ranks of a domain, and of a machine
_EVENT = b'{"kind": "failed", "rank": 7, "text": "%s"}' % (b"x" * 200)
_SET, _COMPARE_SET, _GET, _ADD, _CHECK, _WAIT = 1, 2, 3, 4, 5, 6  # torch/csrc/distributed/c10d/TCPStoreBackend.hpp


def pack(kind: int, *parts: bytes | int) -> bytes:
    """Return a message: texts with their lengths, and numbers."""
    said = [struct.pack("<q", p) if isinstance(p, int) else struct.pack("<Q", len(p)) + p for p in parts]
    return bytes([kind]) + b"".join(said)


class Client:
    """One rank's connection."""

    def __init__(self, port: int, rank: int) -> None:
        self.rank, self.seen = rank, 0.0
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(b"\0" + struct.pack("<I", 0x3C85F7CE))
        self.set("rank/0", _READING)
        self.set(f"beat/{rank}", _BEAT)

    def answer(self, size: int) -> bytes:
        """Return an answer of so many bytes."""
        return self.socket.recv(size, socket.MSG_WAITALL)

    def value(self) -> bytes:
        """Return an answer that is a value."""
        return self.answer(*struct.unpack("<Q", self.answer(8)))

    def set(self, key: str, value: bytes) -> None:
        """Set a value; the server says nothing."""
        self.socket.sendall(pack(_SET, b"/" + key.encode(), value))

    def has(self, key: str) -> bool:
        """Ask whether there is a value."""
        self.socket.sendall(pack(_CHECK, 1, b"/" + key.encode()))
        return self.answer(1) == b"\0"

    def get(self, key: str) -> bytes:
        """Return a value as torch does, which waits for it first."""
        self.wait(key)
        self.answer(1)
        self.socket.sendall(pack(_GET, b"/" + key.encode()))
        return self.value()

    def wait(self, key: str) -> None:
        """Begin to wait for a value; there is a byte to read when it is there."""
        self.socket.sendall(pack(_WAIT, 1, b"/" + key.encode()))

    def find(self, key: str) -> bytes:
        """Return a value in one message."""
        self.socket.sendall(pack(_COMPARE_SET, b"/" + key.encode(), b"-", b"-"))
        return self.value()

    def count(self, key: str) -> int:
        """Return a counter."""
        self.socket.sendall(pack(_ADD, b"/" + key.encode(), 0))
        return int(struct.unpack("<q", self.answer(8))[0])

    def look(self, protocol: str, turn: int) -> None:
        """Send what a rank sends at once."""
        neighbour = f"beat/{self.rank}"
        if protocol == "now":
            self.find("rank/0")
            self.set(f"beat/{self.rank}", _BEAT)
            if turn % 8 == 0:
                self.count("events")
            if self.rank % _DOMAIN == _DOMAIN - 1:  # the next rank is on another machine
                self.find(neighbour)
            if turn % 2 == 0:  # what the next ranks of the domain and of the dp axis have called
                self.find(neighbour)
                self.find(f"beat/{max(0, self.rank - _DOMAIN)}")
            return
        self.set(f"rank/{self.rank}", _READING)
        if self.has("rank/0"):
            self.get("rank/0")
        if turn % 4 == 1:
            self.set(f"beat/{self.rank}", _BEAT)
        if self.has("events/0") and not self.seen:
            self.get("events/0")
            self.seen = time.monotonic()
        if turn % 4 == 2 and self.has(neighbour):
            self.get(neighbour)


def period_of(protocol: str, num_ranks: int) -> float:
    """Return the seconds from one look to the next."""
    if protocol == "before":
        return 0.25 * max(1.0, num_ranks / _RANKS_A_SECOND)
    return min(_LONGEST_BEAT, max(1.0, num_ranks / _RANKS_A_SECOND))


def serve(pipe: Connection) -> None:
    """Keep the store; answer with the seconds of CPU so far, until told to end."""
    # an IPv4 socket: torch looks up the name of each client, which may ask a name server where the address is IPv6
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    pipe.send(store.port)
    while pipe.recv() is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(used.ru_utime + used.ru_stime)


def be_ranks(pipe: Connection, port: int, ranks: range) -> None:
    """Be some ranks: look, and hear of an event, as told."""
    clients = [Client(port, rank) for rank in ranks]
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        what, *arguments = order
        if what == "look":
            pipe.send(look(clients, *arguments))
        else:
            wait(clients, pipe)
        pipe.send([client.seen for client in clients])


def look(clients: Sequence[Client], protocol: str, period: float, until: float) -> int:
    """Send looks until a time, each rank's at its own place in the period; return how many."""
    began, count = time.monotonic(), 0
    while True:
        turn, place = divmod(count, len(clients))
        due, now = began + (turn + place / len(clients)) * period, time.monotonic()
        if max(now, due) >= until:
            time.sleep(max(0.0, until - now))
            return count
        time.sleep(max(0.0, due - now))
        clients[place].look(protocol, turn)
        count += 1


def wait(clients: Sequence[Client], pipe: Connection) -> None:
    """Wait at the server for an event, as each rank's listener does, and read it."""
    with selectors.DefaultSelector() as selector:
        for client in clients:
            client.seen = 0.0
            client.wait("events/1")
            selector.register(client.socket, selectors.EVENT_READ, client)
        pipe.send("waits")
        missing = len(clients)
        while missing:
            for key, _ in selector.select():
                client = key.data
                client.answer(1)
                client.count("events")
                client.find("events/1")
                client.seen = time.monotonic()
                selector.unregister(client.socket)
                missing -= 1


def measure(num_ranks: int, seconds: float) -> None:
    """Print the figures of a number of ranks."""
    context = multiprocessing.get_context("spawn")
    server_pipe, far = context.Pipe()
    processes = [context.Process(target=serve, args=(far,))]
    processes[0].start()
    port = server_pipe.recv()
    pipes = []
    for first in range(_NUM_PROCESSES):
        near, far = context.Pipe()
        processes.append(context.Process(target=be_ranks, args=(far, port, range(first, num_ranks, _NUM_PROCESSES))))
        processes[-1].start()
        pipes.append(near)

    def cpu() -> float:
        server_pipe.send("cpu")
        found: float = server_pipe.recv()
        return found

    def tell(*order: object) -> None:
        for pipe in pipes:
            pipe.send(order)

    def answers() -> list[object]:
        return [pipe.recv() for pipe in pipes]

    answers()
    writer = Client(port, num_ranks)
    for protocol in ("before", "now"):
        period = period_of(protocol, num_ranks)
        length = period * max(2, round(seconds / period))
        used = cpu()
        tell("look", protocol, period, time.monotonic() + length)
        looks = sum(pipe.recv() for pipe in pipes)
        used = cpu() - used
        answers()
        planned = num_ranks * length / period
        if protocol == "before":
            tell("look", protocol, period, time.monotonic() + 3 * period)
            time.sleep(period)
            posted = time.monotonic()
            writer.set("events/0", _EVENT)
        else:
            tell("wait")
        answers()
        tells = cpu()
        if protocol == "now":
            posted = time.monotonic()
            writer.set("events/1", _EVENT)
        told = sorted(at - posted for pipe in pipes for at in pipe.recv() if at)
        tells = cpu() - tells if protocol == "now" else 0.0  # else in the looks
        print(
            f"{num_ranks:6} {protocol:7} {period:6.2f} {looks / planned:8.0%} {1e6 * used / looks:9.0f} "
            f"{used / looks * planned / length:8.2%} {statistics.median(told):9.3f} {told[-1]:9.3f} {tells:9.3f}",
            flush=True,
        )
    for pipe in [*pipes, server_pipe]:
        pipe.send(None)
    for process in processes:
        process.join()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 16384])
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    print(" ranks         period, s reached  µs/look  of a core, told half, s  all  CPU of it, s")
    for num_ranks in args.ranks:
        measure(num_ranks, args.seconds)


if __name__ == "__main__":
    main()
