"""A real server of Google Cloud Storage's JSON interface on loopback (gcp-storage-emulator), which counts requests."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

BUCKET = "bucket"


class Server:
    """The server's address, what it was asked for, and a way to put files into its bucket.

    Attributes
    ----------
    gets
        ``(object, Range header)`` of each download since :meth:`forget`.
    tells_generations
        Whether downloads say the object's generation, as the service does.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.tells_generations = endpoint, True
        self.forget()

    def forget(self) -> None:
        self.gets: list[tuple[str, str]] = []

    @property
    def options(self) -> dict[str, Any]:
        return {"endpoint_url": self.endpoint, "token": "anon", "project": "test"}

    def ask(self, method: str, path: str, data: bytes | None = None) -> Any:
        request = urllib.request.Request(self.endpoint + path, data=data, method=method)
        request.add_header("Content-Type", "application/octet-stream" if "/upload/" in path else "application/json")
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read() or b"null")

    def put(self, path: Path, name: str) -> str:
        """Upload a file or folder; return its URL."""
        for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
            key = name if path.is_file() else f"{name}/{file.relative_to(path).as_posix()}"
            where = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={urllib.parse.quote(key, safe='')}"
            self.ask("POST", where, file.read_bytes())
        self.forget()
        return f"gs://{BUCKET}/{name}"

    def delete(self, name: str) -> None:
        key = urllib.parse.quote(name.removeprefix(f"gs://{BUCKET}/"), safe="")
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.endpoint}/storage/v1/b/{BUCKET}/o/{key}", method="DELETE")
        ):
            pass


@contextmanager
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    # gcsfs asks Google by gRPC what kind of bucket it is, which no emulator answers; it looks when it is imported
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    pytest.importorskip("gcsfs", reason="gs:// needs gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="it is served by gcp-storage-emulator")
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers import objects

    made = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    made.start()
    server = Server(f"http://127.0.0.1:{made._api._httpd.server_port}")
    download = objects.download

    def counted_download(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
        bucket, key = request.params["bucket_name"], request.params["object_id"]
        server.gets.append((key, request.get_header("range", "")))
        asked = request.query.get("generation")
        found = None
        with suppress(NotFound):
            found = storage.get_file_obj(bucket, key)
        if found is not None and server.tells_generations:
            response["x-goog-generation"] = found["generation"]
            if asked and asked[0] != found["generation"]:
                response.status = objects.HTTPStatus.NOT_FOUND
                return
        download(request, response, storage, *args, **kwargs)

    monkeypatch.setattr(objects, "download", counted_download)
    for _, methods in emulator.HANDLERS:
        if methods.get("GET") is download:
            monkeypatch.setitem(methods, "GET", counted_download)
    try:
        yield server
    finally:
        made.stop()
