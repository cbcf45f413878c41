"""Objects by obstore, and what fsspec has to do as well: failures, versions, options, threads."""

from __future__ import annotations

import http.server
import os
import re
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ClassVar
from urllib.parse import urlsplit

import numpy as np
import pytest

from scidata.core.urls import url_of
from scidata.errors import ShortReadError, SourceChangedError, UnsupportedFormatError
from scidata.sources.access import fetches as fetches_module
from scidata.sources.access import filesystems, load, object_stores, remote, retry
from scidata.sources.access.fetches import Fetches, Range
from scidata.sources.access.files import files
from scidata.sources.access.load import FIRST_REQUESTS
from tests.unit._s3 import BUCKET, KEY, SECRET, serve

pytest.importorskip("obstore", reason="the engine that is tested")
pytest.importorskip("aiohttp", reason="fsspec needs aiohttp to read http://")

BODY = np.random.default_rng(0).integers(0, 256, 300_000).astype("u1").tobytes()


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves ``BODY`` under every name; ``how`` says what is wrong, and for how many requests."""

    protocol_version = "HTTP/1.1"
    how, times, version = "", 0, 0
    seen: ClassVar[list[tuple[str, str, dict[str, str]]]] = []

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        cls = type(self)
        self.seen.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
        if self.command == "GET" and cls.times > 0:
            cls.times -= 1
            getattr(self, f"answer_{self.how}")()
            return
        self.give(BODY)

    def give(self, body, *, status=206, cut=0, wait=0.0):
        begin, stop = 0, len(body)
        if status == 206 and (span := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))):
            begin, stop = int(span[1]), min(int(span[2]) + 1, len(body))
        part = status == 206 and "Range" in self.headers
        self.send_response(206 if part else 200)
        if part:
            self.send_header("Content-Range", f"bytes {begin}-{stop - 1}/{len(body)}")
        self.send_header("Content-Length", str(stop - begin))
        self.send_header("ETag", f'"{self.version}"')
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")  # Azure always says it
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut or wait:
            self.wfile.write(body[begin : begin + cut])
            time.sleep(wait)
            self.close_connection = True
        else:
            self.wfile.write(body[begin:stop])

    def refuse(self, status, **headers):
        code = {403: "AccessDenied", 404: "NoSuchKey", 500: "InternalError"}.get(status, "SlowDown")
        said = f"<Error><Code>{code}</Code><Message>please wait</Message></Error>".encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def answer_500(self):
        self.refuse(500)

    def answer_503(self):
        self.refuse(503)

    def answer_429(self):
        self.refuse(429, **{"Retry-After": "0"})

    def answer_truncated(self):
        self.give(BODY, cut=5)

    stall = 3.0

    def answer_stalled(self):
        self.give(BODY, cut=5, wait=self.stall)

    def answer_closed(self):
        self.close_connection = True

    def answer_whole(self):
        self.give(BODY, status=200)

    def answer_lost(self):
        self.refuse(302)

    def answer_403(self):
        self.refuse(403)

    def answer_404(self):
        self.refuse(404)

    def log_message(self, *args):
        pass


@pytest.fixture
def web(monkeypatch):
    for name, value in (("how", ""), ("times", 0), ("version", 0), ("seen", [])):
        monkeypatch.setattr(Handler, name, value)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def s3():
    with serve() as server:
        client = server.client()
        for key in ("plain", "a b/c#d+e~é=1.bin", "dir/c/0"):
            client.put_object(Bucket=BUCKET, Key=key, Body=BODY, ACL="public-read")
        yield server


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(retry, "RETRY", retry.Retry(attempts=4, first_wait=0.001, total_wait=2.0))


@pytest.fixture
def count(monkeypatch):
    """Ranges that obstore was asked for."""
    asked, read = [], object_stores.read
    monkeypatch.setattr(object_stores, "read", lambda *args: asked.append(args[1]) or read(*args))
    return asked


def read(url, offset=100, nbytes=5000):
    assert bytes(files().read(url, offset, nbytes)) == BODY[offset : offset + nbytes]


def at(server, name="a.bin"):
    """Return the URL of an object on a server that may be taken for S3."""
    options = {"endpoint_url": server, "key": KEY, "secret": SECRET, "client_kwargs": {"region_name": "us-east-1"}}
    return url_of(f"s3://{BUCKET}/{name}", options)


def break_it(how, times=2):
    Handler.how, Handler.times = how, times


def gets():
    return [path for method, path, _ in Handler.seen if method == "GET"]


# -- what may pass, and what may not -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["500", "503", "429", "truncated", "stalled", "closed"])
def test_what_may_pass_is_tried_again(web, engine, how, caplog):
    break_it(how, 1 if how == "stalled" else 2)
    read(at(web))
    (said,) = [r.getMessage() for r in caplog.records if r.name == "scidata"]
    assert "attempt 1 of 4" in said


@pytest.mark.parametrize("how", ["500", "503", "429", "truncated"])
def test_what_lasts_is_given_up(web, engine, how):
    break_it(how, 99)
    with pytest.raises(OSError, match=r"s3://bucket/a\.bin.*tried 4 times") as caught:
        read(at(web))
    assert len(gets()) == 4  # nobody below tries again, too
    if how.isdecimal():
        assert "please wait" in str(caught.value)


def test_a_server_that_stalls_is_given_up_in_time(web, engine, monkeypatch):
    break_it("stalled", 99)
    monkeypatch.setattr(Handler, "stall", 30.0)
    begin = time.monotonic()
    with pytest.raises(OSError, match=r"no whole answer within.*set_retry\(total_wait=\).*tried \d times"):
        read(at(web))
    assert time.monotonic() - begin < 15  # of 2, on a busy machine; the first answer would end at 30


@pytest.mark.parametrize(("how", "kind"), [("403", PermissionError), ("404", FileNotFoundError)])
def test_what_is_final_is_asked_once(web, engine, how, kind):
    break_it(how, 99)
    with pytest.raises(kind, match=r"/a\.bin"):
        read(at(web))
    assert len(gets()) == 1


def test_nobody_listens(engine):
    with pytest.raises(OSError, match=r"a\.bin.*(?i:connect).*tried \d times"):
        read(at("http://127.0.0.1:9"))


def test_beyond_the_end(web, engine):
    with pytest.raises(ShortReadError, match="truncated"):
        files().read(at(web), len(BODY) - 10, 20)


def test_replaced_in_between(web, engine):
    url = at(web)
    read(url)
    Handler.version = 1
    with pytest.raises(SourceChangedError, match="was replaced while it was read"):
        read(url)
    assert len(gets()) == 2
    # s3fs says of a range not of which version it is: a HEAD says it
    assert len(Handler.seen) == (2 if engine == "obstore" else 4)


def test_metadata_and_listings(s3, engine):
    url = url_of(f"s3://{BUCKET}", s3.options)
    s3.wire.fault = lambda environ: None
    assert bytes(remote.request(url.at("plain"), "document", most=len(BODY))) == BODY
    with pytest.raises(UnsupportedFormatError, match="at most 1000 of one metadata document"):
        remote.request(url.at("plain"), "document", most=1000)
    found = remote.request(url.at("dir"), "ls")
    assert [(each["name"].rpartition("/")[2], each["type"]) for each in found] == [("c", "directory")]


# -- left to fsspec ----------------------------------------------------------------------------------------------


def test_a_server_without_ranges_is_left_to_fsspec(web, count):
    break_it("whole", 99)
    for _ in range(3):
        read(at(web))  # of all that comes
    assert len(count) == 1
    assert len(gets()) == 4


def test_a_redirect_without_an_address_is_left_to_fsspec(web, count):
    """S3 answers so where a bucket is in another region; botocore finds out in which."""
    break_it("lost", 1)
    read(at(web))
    read(at(web))
    assert len(count) == 1


def test_web_servers_are_left_to_fsspec(web, count):
    read(url_of(f"{web}/a.bin"))
    assert not count


def test_proxies_of_the_environment(web, s3, count, monkeypatch):
    monkeypatch.setenv("http_proxy", web)
    monkeypatch.setattr(filesystems, "_filesystems", filesystems.FileSystems())
    read(url_of(f"s3://{BUCKET}/plain", s3.options))
    assert Handler.seen[-1][1].startswith(s3.endpoint)
    assert count


def test_own_certificates(monkeypatch, tmp_path):
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
    url = url_of("s3://bucket/a", {"key": KEY, "secret": SECRET, "default_block_size": 7})
    bucket, _ = filesystems.FileSystems().bucket(url)
    bucket.prepare()
    with pytest.raises(Exception, match=r"(?i)pem|certificate"):  # obstore has looked at it
        bucket.store(1.0, 1.0)


# -- S3 ----------------------------------------------------------------------------------------------------------


def headers_of(wire):
    """Note the headers of all requests."""
    found = []
    wire.fault = lambda environ: found.append(dict(environ)) or None
    return found


@pytest.mark.parametrize(
    ("options", "shows"),
    [
        ({}, KEY),
        ({"config_kwargs": {"s3": {"addressing_style": "path"}}}, KEY),
        ({"requester_pays": True}, KEY),
        ({"token": "a-session-token"}, "x-amz-security-token"),
        ({"anon": True}, ""),
    ],
)
def test_options_of_s3_are_translated(s3, count, options, shows, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-somebody-else")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    url = url_of(f"s3://{BUCKET}/plain", s3.options | options)
    asked = {}
    for engine in ("obstore", "fsspec"):
        monkeypatch.setattr(object_stores, "enabled", engine == "obstore")
        found = headers_of(s3.wire)
        read(url)
        assert [each["REQUEST_METHOD"] for each in found] == (["GET"] if engine == "obstore" else ["GET", "HEAD"])
        asked[engine] = found[0]
    assert len(count) == 1
    ours, theirs = asked["obstore"], asked["fsspec"]
    for name in ("PATH_INFO", "QUERY_STRING", "HTTP_RANGE", "HTTP_HOST", "HTTP_X_AMZ_SECURITY_TOKEN"):
        assert ours.get(name) == theirs.get(name)
    assert ours.get("HTTP_X_AMZ_REQUEST_PAYER") == theirs.get("HTTP_X_AMZ_REQUEST_PAYER")
    assert ("requester" in str(ours)) == ("requester_pays" in options)
    said = [each.get("HTTP_AUTHORIZATION", "") for each in (ours, theirs)]
    assert all(bool(text) == bool(shows) and shows in text.replace("X-Amz", "x-amz") for text in said)
    of_region = [re.search(r"Credential=([^,]+)", text) for text in said]
    assert len({None if found is None else found[1] for found in of_region}) == 1


def test_credentials_of_the_environment(s3, count, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOFENVIRONMENT001")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session-of-environment")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setattr(filesystems, "_filesystems", filesystems.FileSystems())  # these are known by options alone
    found = headers_of(s3.wire)
    for offset in (0, 7):
        read(url_of(f"s3://{BUCKET}/plain", {}), offset)
    assert len(count) == len(found) == 2
    assert all("AKIAOFENVIRONMENT001" in each["HTTP_AUTHORIZATION"] for each in found)
    assert all(each["HTTP_X_AMZ_SECURITY_TOKEN"] == "session-of-environment" for each in found)


@pytest.mark.parametrize(
    "options",
    [
        {"config_kwargs": {"signature_version": "s3"}},
        {"s3_additional_kwargs": {"SSECustomerAlgorithm": "AES256"}},
        {"client_kwargs": {"region_name": "us-east-1", "verify": False}},
        {"version_aware": True},
        {"config_kwargs": {"s3": {"use_accelerate_endpoint": False, "payload_signing_enabled": True}}},
    ],
)
def test_other_options_of_s3_are_left_to_fsspec(s3, options):
    bucket, _ = filesystems.current().bucket(url_of(f"s3://{BUCKET}/plain", s3.options | options))
    with pytest.raises(object_stores.UnservedError):
        bucket.prepare()


@pytest.mark.parametrize(
    ("endpoint", "style", "address"),
    [
        (None, "auto", "https://bucket.s3.eu-west-1.amazonaws.com"),
        (None, "path", "https://s3.eu-west-1.amazonaws.com"),
        ("https://minio.example:9000", "auto", "https://minio.example:9000"),
        ("https://minio.example:9000", "virtual", "https://bucket.minio.example:9000"),
    ],
)
def test_addresses_are_those_of_botocore(endpoint, style, address):
    config = {"s3": {"addressing_style": style}}
    options = {"key": KEY, "secret": SECRET, "client_kwargs": {"region_name": "eu-west-1"}, "config_kwargs": config}
    url = url_of("s3://bucket/a/b", options | ({"endpoint_url": endpoint} if endpoint else {}))
    bucket, key = filesystems.current().bucket(url)
    bucket.prepare()
    store = bucket.store(1.0, 1.0)
    place, asked = remote.place_of(url), []

    def catch(request, **_):
        asked.append(request.url)
        raise InterruptedError

    place.fs.s3.meta.events.register("before-send.s3.GetObject", catch)
    with pytest.raises(InterruptedError):
        place.fs.call_s3("get_object", Bucket="bucket", Key="a/b")
    assert store.config["endpoint"] == address
    below = "" if store.config["virtual_hosted_style_request"] == "true" else "/bucket"
    assert asked == [f"{address}{below}/{key}"]


def test_keys_of_s3_with_any_character(s3, count):
    read(url_of(f"s3://{BUCKET}/a b/c#d+e~é=1.bin", s3.options))
    assert count == ["a b/c#d+e~é=1.bin"]


def test_info_of_s3(s3, engine):
    url = url_of(f"s3://{BUCKET}", s3.options)
    s3.wire.fault = lambda environ: None
    s3.wire.forget()
    assert files().size(url.at("plain")) == len(BODY)
    assert len(s3.wire.heads) == 1
    with pytest.raises(IsADirectoryError):
        files().size(url.at("dir/c"))
    with pytest.raises(FileNotFoundError, match="nothing"):
        files().size(url.at("nothing"))
    assert len(s3.wire.heads) == 3
    s3.wire.fault = lambda environ: "403" if environ["REQUEST_METHOD"] == "HEAD" else None
    with pytest.raises(PermissionError, match="plain"):
        files().size(url_of(f"s3://{BUCKET}/plain", s3.options))
    s3.wire.fault = lambda environ: None


# -- Azure -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["az://box/a.bin", "abfs://box@account.dfs.core.windows.net/a.bin"])
def test_a_container_of_azure(web, count, monkeypatch, url):
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", web)
    signed = {"sas_token": f"sv=2020&sig={SECRET}", "account_name": "account"}
    read(url_of(url, signed))
    assert count == ["a.bin"]
    assert urlsplit(Handler.seen[0][1]).path == "/box/a.bin"
    assert f"sig={SECRET}" in Handler.seen[0][1]
    break_it("403", 99)
    with pytest.raises(PermissionError, match=r"a\.bin") as caught:
        read(url_of(url, signed))
    assert SECRET not in str(caught.value)


# -- threads and processes ---------------------------------------------------------------------------------------


def test_a_forked_process_reads_by_fsspec(s3, count):
    url = url_of(f"s3://{BUCKET}/plain", s3.options)
    s3.wire.fault = lambda environ: None
    read(url)
    assert len(count) == 1
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            threading.Timer(20, os._exit, [2]).start()  # a hang
            read(url)
            code = 0 if len(count) == 1 else 3
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    read(url)
    assert len(count) == 2


def test_what_is_closed_ends_and_counts_until_then(s3, count, monkeypatch):
    monkeypatch.setattr(retry, "RETRY", retry.Retry(total_wait=20.0))
    url = url_of(f"s3://{BUCKET}/plain", s3.options)
    monkeypatch.setattr(filesystems, "_filesystems", filesystems.FileSystems())
    ours = filesystems.current().load
    s3.wire.fault, s3.wire.latency = (lambda environ: None), 0.3
    fetches = Fetches([Range(url, i, 1000) for i in range(100)])
    time.sleep(0.1)
    fetches.close()
    fetches.close()  # as a read does that fails
    s3.wire.latency = 0.0
    assert 0 < ours.nbytes <= FIRST_REQUESTS * 1000
    end = time.monotonic() + 10
    while ours.nbytes or ours._requests:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert len(count) <= FIRST_REQUESTS
    read(url)


class Crowd(Handler):
    """Bears so many requests at once, and takes its time for each."""

    bears, latency, at_once, most = 8, 0.02, 0, 0
    lock = threading.Lock()

    def do_GET(self):
        cls = type(self)
        with cls.lock:
            cls.at_once += 1
            cls.most = max(cls.most, cls.at_once)
            refused = cls.at_once > cls.bears
        try:
            if not refused:
                time.sleep(cls.latency)
                self.give(BODY)
        finally:
            with cls.lock:
                cls.at_once -= 1
        if refused:
            self.refuse(503)


@pytest.mark.slow_for("fsspec")
def test_as_many_requests_as_a_server_bears(engine, monkeypatch, caplog):
    monkeypatch.setattr(retry, "RETRY", retry.Retry(first_wait=0.05))
    monkeypatch.setattr(load, "_ONE_CUT", 0.1)
    monkeypatch.setattr(filesystems, "_filesystems", filesystems.FileSystems())
    num_refused = lambda: sum("attempt 1 of" in r.getMessage() for r in caplog.records)  # noqa: E731
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Crowd) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = at(f"http://127.0.0.1:{server.server_port}")
        ours = filesystems.current().load
        assert ours.most_requests == FIRST_REQUESTS
        read_each(url, 400)
        assert ours.most_requests < FIRST_REQUESTS / 2
        caplog.clear()
        read_each(url, 400)
        assert num_refused() < 100  # one too many now and then; nothing like half of them
        monkeypatch.setattr(Crowd, "bears", 10**6)
        monkeypatch.setattr(Crowd, "most", 0)
        for _ in range(40):
            read_each(url, 100)
            if ours.most_requests == FIRST_REQUESTS:
                break
        assert ours.most_requests == FIRST_REQUESTS
        server.shutdown()


def read_each(url, count):
    fetches, wanted = Fetches([Range(url, i, 100) for i in range(count)]), set(range(count))
    while (item := fetches.take()) is not None:
        i, data = item
        assert bytes(data) == BODY[i : i + 100]
        fetches.release(i)
        wanted.remove(i)
    assert not wanted


def test_what_is_closed_is_not_tried_again(web, count):
    break_it("503", 10**6)
    fetches = Fetches([Range(at(web), i, 10) for i in range(8)])
    fetches.close()
    time.sleep(0.5)
    assert len(count) <= 16


def test_many_threads(s3, count):
    s3.wire.fault = lambda environ: None
    url = url_of(f"s3://{BUCKET}/plain", s3.options)
    failed = []

    def run(k):
        try:
            for i in range(10):
                read(url, 100 * k + i)
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(count) == 80


def test_without_obstore(web, monkeypatch):
    def missing(name="obstore"):
        raise ImportError(name)

    monkeypatch.setattr(object_stores, "_obstore", missing)
    read(at(web))


def test_a_message_that_is_not_understood_is_left_to_fsspec():
    error = object_stores._translation("Generic S3 error: something new")
    assert isinstance(error, object_stores.UnservedError)


def test_what_ends_since_another_failed_stands_in_front_of_no_error(web, monkeypatch):
    """A thread that waits hears that nothing is left, not that a request was given up."""

    class Late(Future):
        def cancel(self):  # under way: it ends by itself, while the others are cancelled
            self.set_exception(InterruptedError("nobody waits"))
            return False

    requests = [Future(), Late()]
    monkeypatch.setattr(fetches_module, "start", lambda *job, wanted: requests[job[2]["offset"]])
    fetches = Fetches([Range(at(web), i, 10) for i in range(2)])
    requests[0].set_exception(OSError("the first"))
    with ThreadPoolExecutor(1) as threads:
        assert str(fetches.take()[1]) == "the first"
        other = threads.submit(fetches.take)
        while not other.running():
            time.sleep(0.01)
        time.sleep(0.1)
        fetches.close()
        assert other.result() is None
