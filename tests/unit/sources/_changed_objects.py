"""Shared by tests: Handler, VERSIONED."""

from __future__ import annotations

import http.server
from email.utils import formatdate
from typing import ClassVar
from urllib.parse import urlsplit

VERSIONED = "versioned"


class Handler(http.server.BaseHTTPRequestHandler):
    """Objects in memory, with ranges; with an ETag, or a time, or neither."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, tuple[bytes, int]]] = {}
    tells = "etag"
    asked: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self):
        self.answer(body=True)

    def do_HEAD(self):
        self.answer(body=False)

    def answer(self, *, body):
        path = urlsplit(self.path).path
        self.asked.append((self.command, path))
        if path not in self.objects:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content, version = self.objects[path]
        size, span = len(content), self.headers.get("Range", "").removeprefix("bytes=")
        if span:
            begin, end = (int(x or -1) for x in span.split("-"))
            if begin < 0:
                begin, end = max(0, size - end), size - 1
            if begin >= size:
                self.send_response(416)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content = content[begin : end + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{begin + len(content) - 1}/{size}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        if self.tells == "etag":
            self.send_header("ETag", f'W/"{version}"' if span else f'"{version}"')
        if self.tells == "time":
            self.send_header("Last-Modified", formatdate(10**9 + version, usegmt=True))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *args):
        pass
