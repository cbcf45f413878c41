"""A real S3 server on loopback (moto's), which counts requests and fails, stalls or cuts answers short on demand."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

KEY, SECRET = "AKIACANARYKEY0000001", "canary-secret-4f1c9d27e0"
BUCKET = "bucket"


class Wire:
    """Stands between the client and moto.

    Attributes
    ----------
    gets
        ``(path, Range header)`` of each GET of an object since :meth:`forget`.
    heads
        Paths of the HEADs.
    requests
        ``(kind, path, Range header, bytes of the answer's body)`` of each request that reads: ``"get"``, ``"head"`` or
        ``"list"``, and ``"mark"`` of a GET of ``/mark``, by which any process tells the phases of a test apart.
    latency
        Seconds that every answer waits.
    fault
        Called with the WSGI environment; returns None, ``"503"``, ``"slowdown"``, ``"reset"``, ``"cut"`` or ``"403"``.
    puts
        How many PUTs are taken before all are refused with 403.
    most
        Most requests in flight at once.
    """

    def __init__(self, app: Any) -> None:
        self._app, self._lock, self._flying = app, threading.Lock(), 0
        self.latency, self.most, self.puts = 0.0, 0, float("inf")
        self.fault: Callable[[dict[str, Any]], str | None] = lambda environ: None
        self.forget()

    def forget(self) -> None:
        self.gets: list[tuple[str, str]] = []
        self.heads: list[str] = []
        self.requests: list[tuple[str, str, str, int]] = []
        self.most = 0

    def __call__(self, environ: dict[str, Any], start: Any) -> Any:
        with self._lock:
            self._flying += 1
            self.most = max(self.most, self._flying)
            if environ["REQUEST_METHOD"] == "GET":
                self.gets.append((environ["PATH_INFO"], environ.get("HTTP_RANGE", "")))
            elif environ["REQUEST_METHOD"] == "HEAD":
                self.heads.append(environ["PATH_INFO"])
        start = self._counted(environ, start)
        if environ["PATH_INFO"] == "/mark":
            start("200 OK", [("Content-Length", "0")])
            return []
        try:
            if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
                time.sleep(self.latency)
                fault = self.fault(environ)
                if fault is not None:
                    return _FAULTS[fault](self._app, environ, start)
            elif environ["REQUEST_METHOD"] == "PUT":
                self.puts -= 1
                if self.puts < 0:
                    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                    return _FAULTS["403"](self._app, environ, start)
            return self._app(environ, start)
        finally:
            with self._lock:
                self._flying -= 1

    def _counted(self, environ: dict[str, Any], start: Any) -> Any:
        """Return a function that begins an answer, and counts the request."""
        kind, path = environ["REQUEST_METHOD"].lower(), environ["PATH_INFO"]
        if kind not in ("get", "head"):
            return start
        if "list-type=" in environ.get("QUERY_STRING", ""):
            kind = "list"

        def begin(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            nbytes = 0 if kind == "head" else int(dict(headers).get("Content-Length", 0))
            with self._lock:
                name = "mark" if path == "/mark" else kind
                self.requests.append((name, path, environ.get("HTTP_RANGE", ""), nbytes))
            return start(status, headers, *rest)

        return begin


def _error(status: str, code: str) -> Callable[..., list[bytes]]:
    def answer(app: Any, environ: dict[str, Any], start: Any) -> list[bytes]:
        body = f"<Error><Code>{code}</Code><Message>please wait</Message></Error>".encode()
        start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    return answer


def _reset(app: Any, environ: dict[str, Any], start: Any) -> list[bytes]:
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError


def _cut(app: Any, environ: dict[str, Any], start: Any) -> Iterator[bytes]:
    """Answer with all headers and half of the body."""
    body = b"".join(app(environ, start))
    yield body[: len(body) // 2]
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


_FAULTS: dict[str, Callable[..., Any]] = {
    "503": _error("503 Service Unavailable", "ServiceUnavailable"),
    "slowdown": _error("503 Slow Down", "SlowDown"),
    "403": _error("403 Forbidden", "AccessDenied"),
    "reset": _reset,
    "cut": _cut,
}


class Server:
    """The server's address, its wire, and a way to put files into its bucket."""

    def __init__(self, endpoint: str, wire: Wire) -> None:
        self.endpoint, self.wire = endpoint, wire

    @property
    def options(self) -> dict[str, Any]:
        return {
            "endpoint_url": self.endpoint,
            "key": KEY,
            "secret": SECRET,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )

    def put(self, path: Path, name: str) -> str:
        """Upload a file or folder; return its URL."""
        client = self.client()
        for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
            key = name if path.is_file() else f"{name}/{file.relative_to(path).as_posix()}"
            client.put_object(Bucket=BUCKET, Key=key, Body=file.read_bytes())
        self.wire.forget()
        return f"s3://{BUCKET}/{name}"


@contextmanager
def serve() -> Iterator[Server]:
    pytest.importorskip("s3fs", reason="S3 needs s3fs")
    pytest.importorskip("moto", reason="S3 is served by moto")
    pytest.importorskip("flask", reason="moto's server needs flask")
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    wire = moto._server.app = Wire(moto._server.app)  # type: ignore[union-attr]
    host, port = moto.get_host_and_port()
    server = Server(f"http://{host}:{port}", wire)
    try:
        server.client().create_bucket(Bucket=BUCKET)
        gc.collect()
        gc.freeze()  # 400,000 objects of botocore's models, which each later collection would look through
        yield server
    finally:
        moto.stop()
