"""scidata's two engines for object stores, obstore and fsspec, in one run: single ranged requests, and whole reads.

    PYTHONPATH=. python tests/bench/object_engines.py requests --repeats 5
    PYTHONPATH=. python tests/bench/object_engines.py reads --repeats 5 --latency 0 20
    PYTHONPATH=. python tests/bench/object_engines.py flight --requests 8 16 32 64 128
    PYTHONPATH=. python tests/bench/object_engines.py gaps --gaps 64 256 1024

``requests`` asks for ranges of one object, of a web server or as S3. ``reads`` reads every other sample of a Zarr grid:
raw chunks of 65 KiB, zstd, shards, and raw chunks of 4 MiB. ``flight`` tries numbers of requests in flight, and
``gaps`` asks for 64 ranges of 64 KiB with gaps between them, one by one or several at once with the gaps, over a line
of ``--bandwidth`` MB/s that all share. The server, a process of its own, answers from memory on loopback after
``--latency`` ms, as S3 with any credentials, so that the client's own work is what is measured. Medians of interleaved
rounds; CPU is the client's.
"""

import argparse
import functools
import itertools
import multiprocessing
import os
import re
import socket
import statistics
import tempfile
import threading
import time
from email.utils import formatdate

import numpy as np
import zarr

from scidata.core.urls import url_of
from scidata.grids.reader import GridReader
from scidata.sources.access import filesystems, object_stores
from scidata.sources.access.fetches import Fetches, Range

TOTAL = 64 << 20


class Line:
    """One line that all answers share: so many bytes a second, each waits for those before it."""

    def __init__(self, bandwidth):
        self.bandwidth, self.free, self.lock = bandwidth, 0.0, threading.Lock()

    def wait(self, nbytes):
        if not self.bandwidth:
            return
        with self.lock:
            self.free = max(self.free, time.monotonic()) + nbytes / self.bandwidth
            until = self.free
        time.sleep(max(0.0, until - time.monotonic()))


def _answer(connection, files, settings, line):
    buffer, own = b"", Line(0)
    while True:
        while b"\r\n\r\n" not in buffer:
            more = connection.recv(65536)
            if not more:
                return
            buffer += more
        head, buffer = buffer.split(b"\r\n\r\n", 1)
        method, path = head.split(b" ", 2)[:2]
        data = files.get(path.decode().removeprefix("/bucket"))
        if settings[0]:
            time.sleep(settings[0])
        line.bandwidth, own.bandwidth = settings[1:]
        if data is None:
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            continue
        asked = re.search(rb"[Rr]ange: bytes=(\d+)-(\d+)", head)
        first, stop = (int(asked[1]), min(int(asked[2]) + 1, len(data))) if asked else (0, len(data))
        status = "206 Partial Content" if asked else "200 OK"
        said = f"Content-Length: {stop - first}\r\n"
        said += f"Content-Range: bytes {first}-{stop - 1}/{len(data)}\r\n" if asked else ""
        said += f'ETag: "a"\r\nLast-Modified: {formatdate(10**9, usegmt=True)}\r\nAccept-Ranges: bytes\r\n'
        connection.sendall(f"HTTP/1.1 {status}\r\n{said}\r\n".encode())
        for begin in range(first, stop if method == b"GET" else first, 1 << 18):
            piece = memoryview(data)[begin : min(begin + (1 << 18), stop)]
            line.wait(len(piece))
            own.wait(len(piece))
            connection.sendall(piece)


def serve(pipe, settings, folder):
    files = {"/x": bytes(TOTAL)}
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            with open(path, "rb") as file:
                files["/" + os.path.relpath(path, folder)] = file.read()
    listener, line = socket.create_server(("127.0.0.1", 0), backlog=512), Line(0)
    pipe.send(listener.getsockname()[1])
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_answer, args=(connection, files, settings, line), daemon=True).start()


class Server:
    """The server, and what opens it as S3 or as a web server."""

    def __init__(self, folder):
        context = multiprocessing.get_context("spawn")
        self.settings = context.Array("d", [0.0, 0.0, 0.0])  # seconds of latency, bytes a second of all, of one
        here, there = multiprocessing.Pipe()
        self.process = context.Process(target=serve, args=(there, self.settings, folder), daemon=True)
        self.process.start()
        self.web = f"http://127.0.0.1:{here.recv()}"
        self.options = {"endpoint_url": self.web, "key": "k" * 8, "secret": "s" * 8}
        self.options["client_kwargs"] = {"region_name": "us-east-1"}

    def url(self, kind, name):
        return url_of(f"s3://bucket/{name}", self.options) if kind == "s3" else url_of(f"{self.web}/{name}")


def fetch(url, ranges):
    fetches = Fetches([Range(url, offset, nbytes) for offset, nbytes in ranges])
    received = 0
    while (item := fetches.take()) is not None:
        if isinstance(item[1], Exception):
            raise item[1]
        received += len(item[1])
        fetches.release(item[0])
    fetches.close()
    return received


def measured(ways, repeats):
    """Call each way in turn; return the medians of wall and CPU seconds by name."""
    found = {name: [] for name in ways}
    for call in ways.values():
        call()  # connections
    for _ in range(repeats):
        for name, call in ways.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {name: [statistics.median(c) for c in zip(*times, strict=True)] for name, times in found.items()}


def by(engine, call):
    def run():
        object_stores.enabled = engine == "obstore"
        call()

    return run


ENGINES = {"s3": ("obstore", "fsspec") if object_stores.is_available() else ("fsspec",), "http": ("fsspec",)}


def requests(args):
    server = Server(tempfile.mkdtemp())
    print(f"{'kind':5} {'KiB':>5} {'engine':8} {'wall ms':>8} {'CPU ms':>8}  a request")
    for kind in ("s3", "http"):
        for size in [kib << 10 for kib in args.sizes]:
            count = max(50, min(800, (200 << 20) // size))
            ranges = [(i * size % TOTAL, size) for i in range(count)]
            url = server.url(kind, "x")
            found = measured({e: by(e, functools.partial(fetch, url, ranges)) for e in ENGINES[kind]}, args.repeats)
            for name, (wall, cpu) in found.items():
                print(f"{kind:5} {size >> 10:5} {name:8} {wall / count * 1e3:8.3f} {cpu / count * 1e3:8.3f}")
    server.process.terminate()


#: Shapes, and how they are stored.
LAYOUTS = {
    "raw": ((64, 181, 360), {"chunks": (1, 46, 360), "compressors": None}),
    "zstd": ((64, 181, 360), {"chunks": (1, 46, 360)}),
    "sharded": ((64, 181, 360), {"chunks": (1, 16, 90), "shards": (8, 192, 360)}),
    "large": ((16, 721, 1440), {"chunks": (1, 721, 1440), "compressors": None}),
}


def write(path, shape, layout):
    rng = np.random.default_rng(0)
    group = zarr.open_group(path, mode="w")
    for name in ("u", "v"):
        dims = ("time", "latitude", "longitude")
        array = group.create_array(name, shape=shape, dtype="f4", dimension_names=dims, **layout)
        array[:] = np.round(rng.normal(size=shape) * 256) / 256
    zarr.consolidate_metadata(path)


def read_all(url):
    """Read every other sample, by a reader that knows nothing yet."""
    reader = GridReader(url_of(url.target, url.options))
    whole = reader.partition.coordinate(0)
    out = {name: np.empty(spec.shape, spec.dtype) for name, spec in reader.buffer_specs(whole).items()}
    for index in range(0, reader.num_samples, 2):
        reader.read_into(index, out, whole)


def reads(args):
    with tempfile.TemporaryDirectory() as folder:
        for name, layout in LAYOUTS.items():
            write(f"{folder}/{name}", *layout)
        server = Server(folder)
        print(f"{'kind':5} {'latency':>7} {'layout':8} {'engine':8} {'wall ms':>8} {'CPU ms':>8}  a sample of an epoch")
        for kind, latency, name in itertools.product(("s3", "http"), args.latency, LAYOUTS):
            server.settings[0] = latency / 1e3
            url = server.url(kind, name)
            found = measured({e: by(e, functools.partial(read_all, url)) for e in ENGINES[kind]}, args.repeats)
            for engine, times in found.items():
                wall, cpu = (t / (LAYOUTS[name][0][0] / 2) * 1e3 for t in times)
                print(f"{kind:5} {latency:7.0f} {name:8} {engine:8} {wall:8.2f} {cpu:8.2f}", flush=True)
        server.process.terminate()


def flight(args):
    server = Server(tempfile.mkdtemp())
    url = server.url("s3", "x")

    def run(most, ranges):
        filesystems.current().load._most = float(most)  # to begin with: it goes by the answers
        fetch(url, ranges)

    print(f"{'ms':>4} {'MB/s':>5} {'KiB':>5}  MB/s had with so many in flight: {args.requests}")
    for latency, bandwidth, kib in itertools.product(args.latency, args.bandwidth, args.sizes):
        server.settings[0], server.settings[1] = latency / 1e3, bandwidth * 1e6
        size = kib << 10
        count = max(128, min(512, (64 << 20) // size)) if size < 1 << 20 else (64 << 20) // size
        count = min(count, max(8, int((bandwidth or 1000) * 1e6 * 2 / size)))
        ranges = [(i * size % TOTAL, size) for i in range(count)]
        ways = {n: by(args.engine, functools.partial(run, n, ranges)) for n in args.requests}
        found = [count * size / wall / 1e6 for wall, _ in measured(ways, args.repeats).values()]
        print(f"{latency:4.0f} {bandwidth:5.0f} {kib:5} ", " ".join(f"{had:8.1f}" for had in found), flush=True)
    server.process.terminate()


def gaps(args):
    server = Server(tempfile.mkdtemp())
    server.settings[2] = args.connection * 1e6
    url, size, count = server.url("s3", "x"), 64 << 10, 64
    print(f"{'ms':>4} {'MB/s':>5} {'gap KiB':>7} {'apart ms':>9} {'across ms':>9} {'CPU':>6} {'CPU':>6}")
    for latency, bandwidth, kib in itertools.product(args.latency, args.bandwidth, args.gaps):
        server.settings[0], server.settings[1] = latency / 1e3, bandwidth * 1e6
        step = size + (kib << 10)
        most = max(1, (args.longest << 20) // step)  # in one request
        apart = [(i * step % (TOTAL - size), size) for i in range(count)]
        across = [(i * step % (TOTAL - (16 << 20)), min(most, count - i) * step) for i in range(0, count, most)]
        ways = {"apart": by(args.engine, functools.partial(fetch, url, apart))}
        ways["across"] = by(args.engine, functools.partial(fetch, url, across))
        (a, of_a), (b, of_b) = measured(ways, args.repeats).values()
        print(
            f"{latency:4.0f} {bandwidth:5.0f} {kib:7} {a * 1e3:9.1f} {b * 1e3:9.1f} {of_a * 1e3:6.1f} {of_b * 1e3:6.1f}"
        )
    server.process.terminate()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["requests", "reads", "flight", "gaps"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 256, 4096], help="KiB of a range")
    parser.add_argument("--latency", type=float, nargs="+", default=[0, 20], help="ms")
    parser.add_argument("--bandwidth", type=float, nargs="+", default=[0, 20, 200], help="MB/s of all; 0: any")
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 16, 32, 64], help="in flight to begin with")
    parser.add_argument("--connection", type=float, default=0, help="MB/s of one connection, for gaps")
    parser.add_argument("--longest", type=int, default=16, help="MiB of one request across gaps")
    parser.add_argument("--gaps", type=int, nargs="+", default=[16, 64, 256, 1024], help="KiB")
    parser.add_argument("--engine", choices=["obstore", "fsspec"], default="obstore")
    args = parser.parse_args()
    {"requests": requests, "reads": reads, "flight": flight, "gaps": gaps}[args.what](args)


if __name__ == "__main__":
    main()
