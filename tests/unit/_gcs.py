"""Google Cloud Storage's XML interface on loopback, as obstore asks it: moto's server, with generations of objects."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit import _s3

BUCKET = _s3.BUCKET


class Server:
    """The server's address, what it was asked for, and a way to put files into its bucket.

    Attributes
    ----------
    gets
        ``(object, Range header)`` of each download since :meth:`forget`.
    tells_generations
        Whether downloads say the object's generation, as the service does.
    """

    def __init__(self, s3: _s3.Server) -> None:
        self._s3, self._app, self.tells_generations = s3, s3.wire._app, True
        s3.wire._app = self._answer
        self.options = {"endpoint_url": s3.endpoint, "token": "anon", "project": "test"}

    def _answer(self, environ: dict[str, Any], start: Any) -> Any:
        """Take an ETag's digits for a generation; of another one than is asked for there is nothing."""
        asked = urllib.parse.parse_qs(environ["QUERY_STRING"]).get("generation")
        said: list[Any] = []
        body = self._app(environ, lambda *args: said.append(args))
        status, headers = said[0][:2]
        etag = dict(headers).get("ETag", "").strip('"')
        if etag and self.tells_generations:
            generation = str(int(etag[:12], 16))
            if asked and asked[0] != generation:
                start("404 Not Found", [("Content-Length", "0")])
                return []
            headers = [*headers, ("x-goog-generation", generation)]
        start(status, headers)
        return body

    @property
    def gets(self) -> list[tuple[str, str]]:
        found = [(path.removeprefix(f"/{BUCKET}").lstrip("/"), span) for path, span in self._s3.wire.gets]
        return [(key, span) for key, span in found if key]  # no listings

    def forget(self) -> None:
        self._s3.wire.forget()

    def put(self, path: Path, name: str) -> str:
        """Upload a file or folder; return its URL."""
        client = self._s3.client()
        for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
            key = name if path.is_file() else f"{name}/{file.relative_to(path).as_posix()}"
            client.put_object(Bucket=BUCKET, Key=key, Body=file.read_bytes(), ACL="public-read")
        self.forget()
        return f"gs://{BUCKET}/{name}"


@contextmanager
def serve() -> Iterator[Server]:
    pytest.importorskip("obstore", reason="gs:// is read by obstore here")
    with _s3.serve() as s3:
        yield Server(s3)
