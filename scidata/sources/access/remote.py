"""Requests to object stores and web servers through fsspec: tried again, checked, no credentials in errors."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import Any, TypeAlias

from scidata.core.urls import Url, Version
from scidata.errors import (
    SciDataError,
    ShortReadError,
    SourceChangedError,
    UnsupportedFormatError,
)
from scidata.sources.access import retry
from scidata.sources.access.filesystems import current
from scidata.sources.access.held import Held
from scidata.sources.access.retry import Attempts, causes, is_transient, status_of

#: Bytes a second that a server gives at the least; and bytes in flight that need no time of their own.
_SLOWEST, _SMALL = 128 << 10, 1 << 20
_PIECE = 256 << 10
MAX_LISTED = 1000  # objects of one answer; no server gives more


def clean_error(url: Url, error: BaseException) -> Exception:
    """Return an error of the same kind whose text, causes and frames hold no credentials of ``url``.

    Raise it after the ``except`` block: inside, the original would be its context.
    """
    text = url.public(str(error)) or type(error).__name__
    status, kinds = status_of(error), list(causes(error))
    numbers = {e.errno for e in kinds if isinstance(e, OSError)}
    if isinstance(error, SciDataError):
        return type(error)(text)
    if _is_beyond_end(error):
        return ShortReadError(f"{url}: ends before the bytes that were expected; it is truncated: upload it again")
    if status in (401, 403, 407) or any(isinstance(e, PermissionError) for e in kinds):
        return PermissionError(
            errno.EACCES, f"{url}: access was refused ({text}); check storage_options, or whether the URL has expired"
        )
    missing = status is None and any(isinstance(e, FileNotFoundError) for e in kinds) and not is_transient(error)
    if status in (404, 410) or missing:
        return FileNotFoundError(errno.ENOENT, f"{url}: there is no such object")
    for kind in (NotADirectoryError, IsADirectoryError, NotImplementedError, ImportError, KeyError):
        if isinstance(error, kind):
            return kind(f"{url}: {text}")
    if isinstance(error, FileNotFoundError):  # so fsspec says of an outage, too: the reason is what caused it
        error, text = kinds[-1], url.public(str(kinds[-1]))
    said = f"{type(error).__name__}: {text}" if str(url) in text else f"{url}: {type(error).__name__}: {text}"
    number = next((n for n in numbers if n), None)
    return OSError(said) if number is None else OSError(number, said)


def _is_beyond_end(error: BaseException) -> bool:
    invalid = any(isinstance(e, OSError) and e.errno == errno.EINVAL for e in causes(error))
    return status_of(error) == 416 or (invalid and "range" in str(error).lower())


class _Outcome:
    """Decides after each failure of one request: wait so long, or give up with this error."""

    def __init__(self, url: Url, method: str, options: dict[str, Any]) -> None:
        known = url.seen.get(str(url)) if method == "document" else None
        own = options.get("nbytes") or (known.size if known is not None else None) or 0
        more = max(own, current().load.nbytes) - _SMALL  # what is in flight shares the line
        limit = max(1.0, retry.RETRY.total_wait) + max(0, more) / _SLOWEST
        self._url = url
        self._attempts = Attempts(retry.RETRY, str(url), limit=limit)
        self.seconds = 0.0

    def time_left(self) -> float:
        """Return how long the attempt that begins now may take."""
        self.seconds = self._attempts.time_left()
        return self.seconds

    def late(self) -> TimeoutError:
        """Return the error of an attempt that took longer."""
        return TimeoutError(
            errno.ETIMEDOUT, f"no whole answer within {self.seconds:.1f} s; scidata.set_retry(total_wait=) gives more"
        )

    def after(self, error: Exception) -> tuple[float, Exception | None]:
        clean = clean_error(self._url, error)
        said = (clean.strerror if isinstance(clean, OSError) else None) or str(clean)
        wait = self._attempts.wait_after(error, said)
        if wait is not None:
            return wait, None
        if self._attempts.number > 1 and is_transient(error):
            clean = self._attempts.exhausted(clean, said)
        return 0, clean


class _CutShortError(ConnectionResetError):
    """A body that has fewer bytes than the object has there."""


def _checked(data: Any, url: Url, offset: int, nbytes: int, size: int | None) -> bytes:
    """Check how many bytes came; ``size`` is the object's, asked for where they are not as many as wanted."""
    if len(data) == nbytes:
        return bytes(data) if not isinstance(data, bytes) else data
    if size is not None and len(data) == size >= offset + nbytes:  # the server ignored the range and sent all
        return bytes(data[offset : offset + nbytes])
    if size is not None and size >= offset + nbytes:
        raise _CutShortError(errno.ECONNRESET, f"{url}: the body ended after {len(data)} of {nbytes} bytes")
    raise ShortReadError(
        f"{url}: gave {len(data)} bytes from {offset} on, but {nbytes} were expected; "
        "the object is truncated: upload it again"
    )


async def _request_async(url: Url, method: str, options: dict[str, Any], fs: Any, path: str) -> Any:
    outcome = _Outcome(url, method, options)
    while True:
        try:
            async with asyncio.timeout(outcome.time_left()) as limit:
                return await _once_async(url, method, options, fs, path)
        except Exception as e:
            pause, error = outcome.after(outcome.late() if limit.expired() else e)
        if error is not None:
            raise error
        await asyncio.sleep(pause)


async def _once_async(url: Url, method: str, options: dict[str, Any], fs: Any, path: str) -> Any:
    get = _getter(fs)
    if method == "range":
        offset, nbytes = options["offset"], options["nbytes"]
        try:
            if get is None:
                data = await fs._cat_file(path, start=offset, end=offset + nbytes)
                size = (await fs._info(path)).get("size") if len(data) != nbytes else None
            else:
                data, size = await get(url, fs, path, f"bytes={offset}-{offset + nbytes - 1}")
        except Exception as e:
            if not _is_beyond_end(e):
                raise
            _check_version(url, _version_of(await fs._info(path)))  # shorter since it was replaced, or truncated
            raise
        return _checked(data, url, offset, nbytes, size)
    if method == "document":
        most = options["most"]
        if get is not None:
            return _whole(*await get(url, fs, path, None, most), url)
        check_document(url, (await fs._info(path)).get("size"), most)
        return _whole(await fs._cat_file(path), None, url)
    if method == "page":
        return await _get_page(fs, path, **options)
    return _noted(url, method, await getattr(fs, f"_{method}")(path, **options))


async def _get_page(fs: Any, path: str, after: str) -> tuple[dict[str, Version], bool]:
    bucket, key, _ = fs.split_path(path)
    start = f"{key}/" if key else ""
    answer = await fs._call_s3(
        "list_objects_v2", Bucket=bucket, Prefix=start, StartAfter=start + after, MaxKeys=MAX_LISTED
    )
    found = {item["Key"].removeprefix(start): _version_of(item, item["Size"]) for item in answer.get("Contents", ())}
    return found, not answer.get("IsTruncated")


def _noted(url: Url, method: str, found: Any) -> Any:
    """Compare what ``info`` says with what was seen before."""
    if method != "info" or found.get("type") == "directory":
        return found
    version = _version_of(found)
    known = url.seen.get(str(url))
    if known is not None and _is_pinned(url, known, version):
        return found | {"size": known.size}  # of the version that is read
    _check_version(url, version)
    return found


def _version_of(info: Any, size: int | None = None) -> Version:
    """Return what an answer of fsspec's file systems tells objects' contents apart by."""

    def first(*names: str) -> str | None:
        return next((str(info[name]) for name in names if info.get(name) not in (None, "")), None)

    return Version(
        size=info.get("size") if size is None else size,
        etag=_without_weakness(first("ETag", "etag")),
        version=first("VersionId", "generation", "version_id"),
        modified=first("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "created"),
    )


def _without_weakness(etag: str | None) -> str | None:
    return None if etag is None else etag.removeprefix("W/")


def _check_version(url: Url, version: Version) -> None:
    difference = url.seen.changed(str(url), version)
    if difference:
        raise SourceChangedError(
            f"{url}: was replaced while it was read ({difference}); open the data set again, once writing has ended"
        )


def _is_pinned(url: Url, known: Version, found: Version) -> bool:
    """Whether an object was replaced in a bucket that keeps the version that was seen first: go on with that."""
    if known.version is None or found.version is None or not known.differs(found):
        return False
    url.seen.pinned.add(str(url))
    return True


def check_document(where: str, nbytes: int | None, most: int) -> None:
    """Refuse a document that is larger than ``most`` bytes, before it is read.

    Raises
    ------
    UnsupportedFormatError
    """
    if nbytes is not None and nbytes > most:
        raise UnsupportedFormatError(
            f"{where}: has {nbytes} bytes, but at most {most} of one metadata document are read; open the groups below "
            "it one by one, or write smaller attributes"
        )


_Getter: TypeAlias = Callable[..., Awaitable[tuple[bytes, int | None]]]


def _getter(fs: Any) -> _Getter | None:
    """Return what reads an object and the headers of the answer, of file systems that keep these to themselves."""
    own = getattr(type(fs)._cat_file, "__qualname__", "")
    return {"S3FileSystem._cat_file": _get_s3, "HTTPFileSystem._cat_file": _get_http}.get(own)


async def _get_s3(url: Url, fs: Any, path: str, span: str | None, most: int | None = None) -> tuple[bytes, int | None]:
    """Read an object of S3; of a versioned bucket the version that was first seen, where that was replaced."""
    bucket, key, asked = fs.split_path(path)
    known = url.seen.get(str(url))
    options = {"Bucket": bucket, "Key": key} | ({} if span is None else {"Range": span})
    if asked or (known is not None and str(url) in url.seen.pinned):
        options["VersionId"] = asked or known.version  # type: ignore[union-attr]
    while True:
        try:
            answer = await fs._call_s3("get_object", **options)
        except Exception as e:
            if "VersionId" in options and not asked and not is_transient(e):
                raise SourceChangedError(
                    f"{url}: was replaced while it was read, and version {options['VersionId']}, which was seen first, "
                    f"cannot be read ({url.public(str(e))}); open the data set again"
                ) from None
            raise
        body = answer["Body"]
        try:
            size = _total(answer.get("ContentRange")) if span is not None else answer.get("ContentLength")
            version = _version_of(answer, size)
            if known is not None and "VersionId" not in options and _is_pinned(url, known, version):
                options["VersionId"] = known.version
                continue
            _check_version(url, version)
            if most is not None:
                check_document(url, size, most)
            return await body.read(), size
        finally:
            body.close()


async def _get_http(
    url: Url, fs: Any, path: str, span: str | None, most: int | None = None
) -> tuple[bytes, int | None]:
    """Read from a web server."""
    session = await fs.set_session()
    options = dict(fs.kwargs)
    # as fsspec asks for the size: a compressed answer would be another representation, with another ETag
    headers = dict(options.pop("headers", None) or {}) | {"Accept-Encoding": "identity"}
    headers |= {} if span is None else {"Range": span}
    async with session.get(fs.encode_url(path), headers=headers, **options) as answer:
        if answer.status >= 400:
            fs._raise_not_found_for_status(answer, path)
        encoded = answer.headers.get("Content-Encoding") not in (None, "", "identity")
        length = answer.headers.get("Content-Length") if answer.status == 200 and not encoded else None
        size = _total(answer.headers.get("Content-Range")) if answer.status == 206 else int(length) if length else None
        _check_version(url, _version_of(answer.headers, size))
        if most is None:
            return await answer.read(), size
        data = bytearray()
        check_document(url, size, most)
        async for piece in answer.content.iter_chunked(_PIECE):  # not every server says how much comes
            data += piece
            check_document(url, len(data), most)
        return bytes(data), size


def _total(content_range: str | None) -> int | None:
    """Return the size of the object in ``bytes 0-9/1234``."""
    total = (content_range or "").rpartition("/")[2]
    return int(total) if total.isdecimal() else None


def _whole(data: Any, size: int | None, url: Url) -> bytes:
    """Check that all of an object came, as far as its size is known."""
    known = url.seen.get(str(url))
    size = known.size if size is None and known is not None else size
    if size is not None and len(data) < size:
        raise _CutShortError(errno.ECONNRESET, f"{url}: the body ended after {len(data)} of {size} bytes")
    return data if isinstance(data, bytes) else bytes(data)


def _request_here(url: Url, method: str, options: dict[str, Any], fs: Any, path: str) -> Any:
    outcome = _Outcome(url, method, options)
    while True:
        try:
            return _in_time(outcome, lambda: _once_here(url, method, options, fs, path))
        except Exception as e:
            pause, error = outcome.after(e)
        if error is not None:
            raise error
        time.sleep(pause)


def _in_time(outcome: _Outcome, call: Callable[[], Any]) -> Any:
    """Wait for a call in a thread of its own: one that hangs is left behind, since nothing else ends it."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as e:
            done.set_exception(e)

    threading.Thread(target=run, daemon=True, name="scidata-request").start()
    wait([done], timeout=outcome.time_left())
    if not done.done():
        raise outcome.late()
    return done.result()


def _once_here(url: Url, method: str, options: dict[str, Any], fs: Any, path: str) -> Any:
    if method == "range":
        offset, nbytes = options["offset"], options["nbytes"]
        data = fs.cat_file(path, start=offset, end=offset + nbytes)
        size = fs.info(path).get("size") if len(data) != nbytes else None
        return _checked(data, url, offset, nbytes, size)
    if method == "document":
        check_document(url, fs.info(path).get("size"), options["most"])
        return _whole(fs.cat_file(path), None, url)
    return _noted(url, method, getattr(fs, method)(path, **options))


def _find(url: Url) -> tuple[Any, str, bool]:
    try:
        return current().find(url)
    except Exception as e:  # a class's constructor, which may repeat its arguments
        error = clean_error(url, e)
    raise error


def start(url: Url, method: str, options: dict[str, Any]) -> Future[Any]:
    """Start one request; the future's error is clean."""
    if isinstance(url, Held):
        return current().pool().submit(url.read, options["offset"], options["nbytes"])
    fs, path, asynchronous = _find(url)
    if asynchronous:
        return asyncio.run_coroutine_threadsafe(_request_async(url, method, options, fs, path), fs.loop)
    return current().pool().submit(_request_here, url, method, options, fs, path)


def request(url: Url, method: str, **options: Any) -> Any:
    """Ask for ``info`` or ``ls``, or read a ``document`` whole; again where it fails for a passing reason.

    Raises
    ------
    FileNotFoundError, PermissionError, OSError
        Without credentials. The last one says how often it was tried.
    """
    if isinstance(url, Held):
        return url.read(options["offset"], options["nbytes"])
    fs, path, asynchronous = _find(url)
    if not asynchronous:
        return _request_here(url, method, options, fs, path)
    future = asyncio.run_coroutine_threadsafe(_request_async(url, method, options, fs, path), fs.loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()  # the wait was interrupted
        raise


def checks_versions(url: Url) -> bool:
    """Whether each range that is read of an object is compared with the version that was seen first."""
    fs, _, asynchronous = _find(url)
    return asynchronous and _getter(fs) is not None


def page(url: Url, after: str) -> tuple[dict[str, Version], bool] | None:
    """List objects below a URL: so many of them, in order, from the first one after a key on.

    Returns
    -------
    dict of str to Version, bool
        By key relative to the URL; and whether these are the last ones. None where a server has no such listing, does
        not allow it, or keeps no order.
    """
    fs, _, asynchronous = _find(url)
    if not asynchronous or not hasattr(fs, "_call_s3") or "?" in url.target:
        return None
    try:
        found, is_last = request(url, "page", after=after)
    except OSError as e:
        if is_transient(e):
            raise
        return None
    keys = [after, *found]
    return (found, is_last) if keys == sorted(keys) else None


def fetch(url: Url, offset: int, nbytes: int) -> bytes:
    """Read one range.

    Raises
    ------
    ShortReadError
        The object ends before it; a body cut short on the way is fetched again instead.
    """
    return request(url, "range", offset=offset, nbytes=nbytes)  # type: ignore[no-any-return]
