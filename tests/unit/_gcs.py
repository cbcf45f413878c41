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
        if not self.tells_generations:
            return self._app(environ, start)

        def told(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            etag = dict(headers).get("ETag", "").strip('"')
            generation = str(int(etag[:12], 16)) if etag else ""
            if asked and asked[0] != generation:
                status = "404 Not Found"
            return start(status, [*headers, ("x-goog-generation", generation)] if etag else headers, *more)

        return self._app(environ, told)

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
