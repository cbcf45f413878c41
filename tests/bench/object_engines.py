"""Time of a ranged request to a web server: scidata's engine, fsspec, beside obstore where it is installed.

    python tests/bench/object_engines.py --repeats 5

The server, a process of its own, answers from memory on loopback, so that the client's own work is most of what is
measured. Milliseconds a request, wall and CPU time of the client; medians of interleaved rounds.
"""

import argparse
import asyncio
import importlib.util
import multiprocessing
import re
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from scidata.core.urls import url_of
from scidata.sources.access.fetches import Fetches

TOTAL = 64 << 20


def _answer(connection, data):
    buffer = b""
    while True:
        while b"\r\n\r\n" not in buffer:
            more = connection.recv(65536)
            if not more:
                return
            buffer += more
        head, buffer = buffer.split(b"\r\n\r\n", 1)
        asked = re.search(rb"[Rr]ange: bytes=(\d+)-(\d+)", head)
        first, stop = (int(asked[1]), int(asked[2]) + 1) if asked else (0, len(data))
        said = f"Content-Length: {stop - first}\r\nContent-Range: bytes {first}-{stop - 1}/{len(data)}\r\n"
        seen = 'ETag: "a"\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\nAccept-Ranges: bytes\r\n'
        connection.sendall(f"HTTP/1.1 206 Partial Content\r\n{said}{seen}\r\n".encode())
        if not head.startswith(b"HEAD"):
            connection.sendall(memoryview(data)[first:stop])


def serve(pipe):
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    pipe.send(listener.getsockname()[1])
    data = bytes(TOTAL)
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_answer, args=(connection, data), daemon=True).start()


def with_scidata(url, size, count):
    fetches = Fetches([(url_of(f"{url}/x"), i * size % TOTAL, size) for i in range(count)])
    received = 0
    while (item := fetches.take()) is not None:
        if isinstance(item[1], Exception):
            raise item[1]
        received += len(item[1])
        fetches.release(item[0])
    fetches.close()
    return received


def with_obstore(url, size, count):
    import obstore

    store = _store(url)

    def get(i):
        return len(obstore.get_range(store, "x", start=i * size % TOTAL, length=size))

    with ThreadPoolExecutor(16) as threads:
        return sum(threads.map(get, range(count)))


def with_obstore_async(url, size, count):
    import obstore

    store = _store(url)

    async def every():
        room = asyncio.Semaphore(64)

        async def get(i):
            async with room:
                return len(await obstore.get_range_async(store, "x", start=i * size % TOTAL, length=size))

        return sum(await asyncio.gather(*map(get, range(count))))

    return asyncio.run(every())


def _store(url):
    from obstore.store import HTTPStore

    return HTTPStore.from_url(url, client_options={"allow_http": True})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 256, 4096], help="KiB of a range")
    args = parser.parse_args()
    engines = {"scidata": with_scidata}
    if importlib.util.find_spec("obstore"):
        engines |= {"obstore, threads": with_obstore, "obstore, async": with_obstore_async}
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{here.recv()}"
    print(f"{'KiB':>5} {'engine':18} {'wall ms':>8} {'CPU ms':>8}")
    for size in [kib << 10 for kib in args.sizes]:
        count = max(50, min(800, (200 << 20) // size))
        found = {}
        for _ in range(args.repeats):
            for name, engine in engines.items():
                wall, cpu = time.perf_counter(), time.process_time()
                assert engine(url, size, count) == size * count
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                found.setdefault(name, []).append((wall / count * 1e3, cpu / count * 1e3))
        for name, times in found.items():
            wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
            print(f"{size >> 10:5} {name:18} {wall:8.3f} {cpu:8.3f}")
    server.terminate()


if __name__ == "__main__":
    main()
