"""Web servers whose answers are not what was asked for: the right bytes, or an error that names what was wrong."""

from __future__ import annotations

import gzip
import http.server
import threading
from itertools import pairwise
from typing import ClassVar

import pytest

from scidata.core.urls import url_of
from scidata.errors import CorruptDataError, RefusedError, ShortReadError, SourceChangedError, UnsupportedFormatError
from scidata.sources.access import retry
from scidata.sources.access.files import files
from scidata.sources.access.first_reads import read_tail
from scidata.sources.access.remote import request

pytest.importorskip("aiohttp", reason="fsspec needs aiohttp to read http://")

CONTENT = bytes(range(256)) * 4
SIZE = len(CONTENT)
SECRET = "SECRET-CANARY"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers in the way that the first part of a path names."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[tuple[int, str]]] = []

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body):
        how, span = self.path.split("/")[1].replace("-", " "), self.headers.get("Range")
        self.seen.append((self.server.server_address[1], str(self.headers)))
        if how == "no answer" and span and span.startswith("bytes=-"):
            self.close_connection = True
            return
        begin, end = [int(each or -1) for each in span.removeprefix("bytes=").split("-")] if span else (0, SIZE - 1)
        if begin < 0:
            begin, end = (0, end) if how == "tail misread" else (max(0, SIZE - end), SIZE - 1)
        end = min(end, SIZE - 1)
        status, data = (206 if span else 200), CONTENT[begin : end + 1]
        headers = {"Content-Range": f"bytes {begin}-{end}/{SIZE}"} if span else {}
        chunked = False
        match how:
            case "other bytes":
                data, headers["Content-Range"] = CONTENT[begin + 1 : end + 2], f"bytes {begin + 1}-{end + 1}/{SIZE}"
            case "garbage" | "unnamed":
                headers = {"Content-Range": "bytes garbage"} if how == "garbage" else {}
            case "total unknown":
                headers["Content-Range"] = f"bytes {begin}-{end}/*"
            case "another total" if begin > 300:
                headers["Content-Range"] = f"bytes {begin}-{end}/{10 * SIZE}"
            case "whole" | "whole chunked" | "whole gzip":
                status, data, headers = 200, CONTENT, {}
                chunked = how == "whole chunked"
            case "chunked":
                chunked = True
            case "short" | "long":
                data, chunked = (data[:-1], True) if how == "short" else (data + b"XX", True)
            case "another etag":
                headers["ETag"] = f'"{len(self.seen)}"'
            case "no content":
                status, data, headers = 204, b"", {}
            case "part unasked":
                status, data, headers = 206, CONTENT[:10], {"Content-Range": f"bytes 0-9/{SIZE}"}
            case "unsatisfiable":
                status, data, headers = 416, b"", {"Content-Range": f"bytes */{SIZE}"}
            case "no tails" if span and span.startswith("bytes=-"):
                status, data, headers = 501, b"", {}
            case "head lies" if self.command == "HEAD":
                data = data[:-5]
            case "to a file" | "to nowhere" | "in circles":
                to = {"to a file": "file:///etc/passwd", "to nowhere": "http://[bad/", "in circles": self.path}[how]
                status, data, headers = 302, b"", {"Location": to}
            case "elsewhere" | "elsewhere for part" if how == "elsewhere" or span:
                status, data, headers = 307, b"", {"Location": f"http://127.0.0.1:{self.server.other}/honest/x?signed"}
            case "back home":
                status, data, headers = 302, b"", {"Location": "../honest/x"}
        if "gzip" in how:
            data, headers["Content-Encoding"] = gzip.compress(data) if how != "gzip lie" else data, "gzip"
        self.send_response(status)
        headers |= {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(len(data))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body and chunked:
            for i, j in pairwise([*range(0, len(data), 100), len(data)]):
                self.wfile.write(b"%x\r\n%b\r\n" % (j - i, data[i:j]))
            self.wfile.write(b"0\r\n\r\n")
        elif body:
            self.wfile.write(data)

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    other = 0

    def handle_error(self, *args):  # clients go away in the middle of an answer
        pass


@pytest.fixture(scope="module")
def servers():
    both = [Server(("127.0.0.1", 0), Handler) for _ in range(2)]
    for server in both:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    both[0].other = both[1].server_address[1]
    yield both
    for server in both:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def _one_attempt_more(monkeypatch):
    monkeypatch.setattr(retry, "RETRY", retry.Retry(attempts=2, first_wait=0.01, total_wait=20))
    Handler.seen.clear()


def at(servers, how, **options):
    return url_of(f"http://127.0.0.1:{servers[0].server_address[1]}/{how.replace(' ', '-')}/x", options)


RANGES = {
    "honest": None,
    "whole": None,
    "whole chunked": None,
    "whole gzip": None,
    "chunked": None,
    "total unknown": None,
    "back home": None,
    "elsewhere": None,
    "other bytes": (CorruptDataError, "300 to 399 were asked for, and the answer names others: 'bytes 301-400/1024'"),
    "garbage": (CorruptDataError, "names others: 'bytes garbage'; the server, or a proxy"),
    "unnamed": (CorruptDataError, "the answer does not name them"),
    "another total": (SourceChangedError, "size was 1024 and is 10240"),
    "short": (OSError, "the body ended after 99 of 100 bytes"),
    "long": (CorruptDataError, "100 bytes were asked for, and 102 came"),
    "another etag": (SourceChangedError, "etag was"),
    "no content": (CorruptDataError, "answered 204, when a part of it was asked for"),
    "unsatisfiable": (ShortReadError, "ends before the bytes"),
    "gzip": (UnsupportedFormatError, "parts of it compressed (Content-Encoding: gzip)"),
    "gzip lie": (UnsupportedFormatError, "parts of it compressed (Content-Encoding: gzip)"),
    "to a file": (RefusedError, "redirects to file://, which is not followed"),
    "to nowhere": (UnsupportedFormatError, "redirects to something that is no URL"),
    "in circles": (UnsupportedFormatError, "redirects again and again"),
}


@pytest.mark.parametrize("how", RANGES)
def test_a_range(servers, how):
    url = at(servers, how)
    expected = RANGES[how]
    if expected is None:
        assert bytes(files().read(url, 300, 100)) == CONTENT[300:400]
        assert bytes(files().read(url, 0, SIZE)) == CONTENT
        return
    kind, said = expected
    with pytest.raises(kind) as caught:
        [files().read(url, begin, 100) for begin in (300, 400)]
    text = str(caught.value)
    assert said in text
    assert str(url) in text
    assert "\n" not in text


DOCUMENTS = {
    "honest": None,
    "chunked": None,
    "whole gzip": None,  # nobody asked for a part, so that it is decoded as a whole
    "elsewhere": None,
    "no content": (CorruptDataError, "answered 204, when all of it was asked for"),
    "part unasked": (CorruptDataError, "answered 206, when all of it was asked for"),
    "gzip lie": (OSError, "ContentEncodingError|ClientPayloadError"),
    "to a file": (RefusedError, "redirects to file://"),
}


@pytest.mark.parametrize("how", DOCUMENTS)
def test_a_whole_document(servers, how):
    expected = DOCUMENTS[how]
    if expected is None:
        assert request(at(servers, how), "document", most=1 << 20) == CONTENT
        return
    with pytest.raises(expected[0], match=expected[1]):
        request(at(servers, how), "document", most=1 << 20)


TAILS = {  # requests at most, or the error
    "honest": 1,
    "whole": 1,
    "elsewhere": 2,
    "no tails": 3,
    "no answer": 4,  # of which aiohttp repeats one, where it had the connection from before
    "tail misread": 3,
    "other bytes": (CorruptDataError, "were asked for, and the answer names others: 'bytes"),
    "short": (OSError, "the body ended after 99 of 100 bytes"),
    "long": (CorruptDataError, "100 bytes were asked for, and 102 came"),
    "whole chunked": (OSError, "does not say how large it is"),
    "whole gzip": (OSError, "does not say how large it is"),
    "gzip": (UnsupportedFormatError, "parts of it compressed"),
    "to a file": (RefusedError, "redirects to file://"),
}


@pytest.mark.parametrize("how", TAILS)
def test_the_last_bytes(servers, how):
    expected = TAILS[how]
    if isinstance(expected, int):
        assert read_tail(at(servers, how), 100) == (CONTENT[-100:], SIZE)
        assert len(Handler.seen) <= expected
        assert read_tail(at(servers, how), 2 * SIZE) == (CONTENT, SIZE)
        return
    with pytest.raises(expected[0], match=expected[1]):
        read_tail(at(servers, how), 100)


SIZES = {
    "honest": None,
    "chunked": None,  # by a range
    "elsewhere": None,
    "gzip": (UnsupportedFormatError, "parts of it compressed"),
    "whole gzip": (OSError, "does not say how large it is"),
    "to a file": (RefusedError, "redirects to file://"),
    "in circles": (UnsupportedFormatError, "redirects again and again"),
}


@pytest.mark.parametrize("how", SIZES)
def test_a_size(servers, how):
    expected = SIZES[how]
    if expected is None:
        assert files().size(at(servers, how)) == SIZE
        return
    with pytest.raises(expected[0], match=expected[1]):
        files().size(at(servers, how))


def test_a_size_that_was_a_lie(servers):
    url = at(servers, "head lies")
    assert files().size(url) == SIZE - 5
    with pytest.raises(SourceChangedError, match="size was 1019 and is 1024"):
        files().read(url, 0, 10)


@pytest.mark.filterwarnings("ignore:.*(BasicAuth|auth):DeprecationWarning")
def test_another_host_learns_nothing(servers):
    import aiohttp

    private = {
        "headers": {"X-Api-Key": SECRET, "Cookie": SECRET, "Proxy-Authorization": SECRET},
        "cookies": {"c": SECRET},
        "client_kwargs": {
            "headers": {"X-Token": SECRET},
            "cookies": {"d": SECRET},
            "auth": aiohttp.BasicAuth("user", SECRET),
        },
    }
    encoded = aiohttp.BasicAuth("user", SECRET).encode()
    for how in ("elsewhere", "elsewhere for part"):
        url = at(servers, how, **private)
        assert files().size(url) == SIZE
        assert bytes(files().read(url, 300, 100)) == CONTENT[300:400]
    own, other = ("".join(text for port, text in Handler.seen if port == s.server_address[1]) for s in servers)
    assert SECRET in own
    assert encoded in own
    assert "bytes=300-399" in other
    assert SECRET not in other
    assert encoded not in other
    assert "Cookie" not in other
    back = at(servers, "back home", **private)  # a redirect on the same host keeps them
    Handler.seen.clear()
    assert bytes(files().read(back, 0, 10)) == CONTENT[:10]
    assert all(SECRET in text for _, text in Handler.seen)
