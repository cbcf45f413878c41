"""Shared by tests: Handler."""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import threading
import time


class Handler(http.server.BaseHTTPRequestHandler):
    """A web server that knows ranges and lists nothing; counts, waits and fails as it is told."""

    protocol_version = "HTTP/1.1"
    lock = threading.Lock()
    gets: list = []  # noqa: RUF012 - of the fixture
    latency, most, flying = 0.0, 0, 0
    fault = staticmethod(lambda key: None)

    def __init__(self, *args, root):
        self.root = root
        super().__init__(*args)

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        cls = Handler
        with cls.lock:
            cls.gets.append((self.path, self.headers.get("Range", "")))
            cls.flying += 1
            cls.most = max(cls.most, cls.flying)
        try:
            time.sleep(cls.latency)
            self._answer()
        finally:
            with cls.lock:
                cls.flying -= 1

    def _answer(self):
        path = os.path.join(self.root, self.path.lstrip("/"))
        fault = Handler.fault((self.command, self.path, self.headers.get("Range", "")))
        if fault == "503":
            return self._send(503, b"")
        if fault == "reset":
            self.close_connection = True
            return self.connection.shutdown(2)
        if not os.path.isfile(path):
            return self._send(404, b"")
        with open(path, "rb") as file:
            body = file.read()
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found is None:
            return self._send(200, body, cut=fault == "cut")
        begin, end = int(found[1]), int(found[2]) + 1
        where = {"Content-Range": f"bytes {begin}-{min(end, len(body)) - 1}/{len(body)}"}
        return self._send(206, body[begin:end], where, cut=fault == "cut")

    def _send(self, status, body, headers=None, *, cut=False):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Accept-Ranges": "bytes", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True
            self.connection.shutdown(2)

    def log_message(self, *args):
        pass
