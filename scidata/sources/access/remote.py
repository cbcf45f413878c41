"""Requests to object stores and web servers through fsspec: tried again, checked, no credentials in errors."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

from scidata.core.urls import Url, Version
from scidata.sources.access import store_requests
from scidata.sources.access.answers import (
    check_document,
    check_status,
    check_version,
    checked,
    is_beyond_end,
    is_pinned,
    lost_version,
    noted,
    size_of_range,
    version_of,
    whole,
)
from scidata.sources.access.filesystems import Place, current
from scidata.sources.access.in_memory import InMemoryUrl
from scidata.sources.access.kept_urls import Came, KeptUrl
from scidata.sources.access.outcomes import Outcome, clean_error, in_time
from scidata.sources.access.retry import is_transient

_PIECE = 256 << 10
MAX_LISTED = 1000  # objects of one answer; no server gives more


async def _request_async(url: Url, method: str, options: dict[str, Any], fs: Any, path: str) -> Any:
    outcome = Outcome(url, method, options)
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
                data, size = await get(url, fs, path, (offset, nbytes))
        except Exception as e:
            if not is_beyond_end(e):
                raise
            check_version(url, version_of(await fs._info(path)))  # shorter since it was replaced, or truncated
            raise
        return checked(data, url, offset, nbytes, size)
    if method == "document":
        most = options["most"]
        if get is not None:
            return whole(*await get(url, fs, path, None, most), url)
        check_document(url, (await fs._info(path)).get("size"), most)
        return whole(await fs._cat_file(path), None, url)
    if method == "page":
        return await (_get_page if hasattr(fs, "_call_s3") else _get_page_gcs)(fs, path, **options)
    if method == "folder":
        return await _get_folder(fs, path)
    if method == "info" and get is _get_http:
        return noted(url, method, await _info_http(url, fs, path))
    return noted(url, method, await getattr(fs, f"_{method}")(path, **options))


async def _get_page(fs: Any, path: str, after: str) -> tuple[dict[str, Version], bool]:
    bucket, key, _ = fs.split_path(path)
    start = f"{key}/" if key else ""
    answer = await fs._call_s3(
        "list_objects_v2", Bucket=bucket, Prefix=start, StartAfter=start + after, MaxKeys=MAX_LISTED
    )
    found = {item["Key"].removeprefix(start): version_of(item, item["Size"]) for item in answer.get("Contents", ())}
    return found, not answer.get("IsTruncated")


async def _get_page_gcs(fs: Any, path: str, after: str) -> tuple[dict[str, Version], bool]:
    bucket, key = fs.split_path(path)[:2]
    start = f"{key}/" if key else ""
    answer = await fs._call(
        "GET", "b/{}/o", bucket, prefix=start, startOffset=start + after, maxResults=MAX_LISTED, json_out=True
    )
    found = {item["name"].removeprefix(start): version_of(item, int(item["size"])) for item in answer.get("items", ())}
    return {name: version for name, version in found.items() if name > after}, not answer.get("nextPageToken")


async def _get_folder(fs: Any, path: str) -> dict[str, Any]:
    """Return what ``info`` says of a folder of S3, where there is no object of that name."""
    bucket, key, _ = fs.split_path(path)
    answer = await fs._call_s3("list_objects_v2", Bucket=bucket, Prefix=f"{key}/", Delimiter="/", MaxKeys=1)
    if not answer.get("Contents") and not answer.get("CommonPrefixes"):
        raise FileNotFoundError(path)
    return {"name": path, "type": "directory", "size": 0}


#: The first byte and the number of bytes.
Span: TypeAlias = tuple[int, int]
_Getter: TypeAlias = Callable[..., Awaitable[tuple[bytes, int | None]]]


def _range_header(span: Span | None) -> dict[str, str]:
    return {} if span is None else {"Range": f"bytes={span[0]}-{sum(span) - 1}"}


def _getter(fs: Any) -> _Getter | None:
    """Return what reads an object and the headers of the answer, of file systems that keep these to themselves."""
    own = getattr(type(fs)._cat_file, "__qualname__", "")
    return _GETTERS.get(own)


async def _get_s3(url: Url, fs: Any, path: str, span: Span | None, most: int | None = None) -> tuple[bytes, int | None]:
    """Read an object of S3; of a versioned bucket the version that was first seen, where that was replaced."""
    bucket, key, asked = fs.split_path(path)
    known = url.seen.get(str(url))
    options = {"Bucket": bucket, "Key": key} | _range_header(span)
    if asked or (known is not None and str(url) in url.seen.pinned):
        options["VersionId"] = asked or known.version  # type: ignore[union-attr]
    while True:
        try:
            answer = await fs._call_s3("get_object", **options)
        except Exception as e:
            if "VersionId" in options and not asked and not is_transient(e):
                raise lost_version(url, options["VersionId"], str(e)) from None
            raise
        body = answer["Body"]
        try:
            cut, size = _sent(url, span, answer.get("ContentRange"), answer.get("ContentLength"))
            version = version_of(answer, size)
            if known is not None and "VersionId" not in options and is_pinned(url, known, version):
                options["VersionId"] = known.version
                continue
            check_version(url, version)
            if most is not None:
                check_document(url, size, most)
            return (await body.read())[cut], size
        finally:
            body.close()


async def _get_gcs(
    url: Url, fs: Any, path: str, span: Span | None, most: int | None = None
) -> tuple[bytes, int | None]:
    """Read an object of Google Cloud Storage; where it was replaced, the generation that was first seen, if it is kept.

    Headers tell the generation, which ``gcsfs`` keeps to itself. Zonal buckets are read by gRPC, which only it does.
    """
    if span is not None and hasattr(fs, "_is_zonal_bucket") and await fs._is_zonal_bucket(fs.split_path(path)[0]):
        data = await fs._cat_file(path, start=span[0], end=sum(span))
        return data, (await fs._info(path)).get("size") if len(data) < span[1] else None
    if most is not None:
        check_document(url, (await fs._info(path)).get("size"), most)
    known = url.seen.get(str(url))
    generation = known.version if known is not None and str(url) in url.seen.pinned else None
    while True:
        where = fs.url(path) + (f"&generation={generation}" if generation else "")
        try:
            headers, data = await fs._call("GET", where, headers=_range_header(span))
        except FileNotFoundError as e:
            if generation:
                raise lost_version(url, generation, str(e)) from None
            raise
        cut, size = _sent(url, span, headers.get("Content-Range"), len(data))
        version = Version(size=size, version=headers.get("x-goog-generation"))
        if generation is None and known is not None and is_pinned(url, known, version):
            generation = known.version
            continue
        check_version(url, version)
        return data[cut], size


def _sent(url: Url, span: Span | None, content_range: str | None, length: int | None) -> tuple[slice, int | None]:
    """Return what of a body is wanted, and the size of the object: of a server that sent all, too."""
    if span is None or content_range is None:
        return slice(None) if span is None else slice(span[0], sum(span)), length
    return slice(None), size_of_range(url, span, content_range)


async def _get_http(
    url: Url, fs: Any, path: str, span: Span | None, most: int | None = None
) -> tuple[bytes, int | None]:
    """Read from a web server."""
    session = await fs.set_session()
    options = dict(fs.kwargs)
    # as fsspec asks for the size: a compressed answer would be another representation, with another ETag
    headers = dict(options.pop("headers", None) or {}) | {"Accept-Encoding": "identity"} | _range_header(span)
    async with session.get(fs.encode_url(path), headers=headers, **options) as answer:
        if answer.status >= 400:
            fs._raise_not_found_for_status(answer, path)
        encoding = answer.headers.get("Content-Encoding", "") or "identity"
        check_status(url, answer.status, encoding, asked_part=span is not None)
        if span is not None and answer.status == 206:
            size = size_of_range(url, span, answer.headers.get("Content-Range"))
            check_version(url, version_of(answer.headers, size))
            return await answer.read(), size
        length = answer.headers.get("Content-Length") if encoding == "identity" else None
        size = int(length) if length else None
        check_version(url, version_of(answer.headers, size))
        if most is not None:
            check_document(url, size, most)
        return await _part_of_body(answer, span, url, most), size


async def _part_of_body(answer: Any, span: Span | None, url: Url, most: int | None) -> bytes:
    """Read no more of an answer than is wanted: not every server says how much comes, or cuts ranges."""
    begin, end = (0, None) if span is None else (span[0], sum(span))
    data, at = bytearray(), 0
    async for piece in answer.content.iter_chunked(_PIECE):
        data += piece[max(0, begin - at) : None if end is None else max(0, end - at)]
        at += len(piece)
        if most is not None:
            check_document(url, at, most)
        if end is not None and at >= end:
            break
    return bytes(data)


async def _info_http(url: Url, fs: Any, path: str) -> dict[str, Any]:
    """Ask for the size by HEAD; of a server that does not say it then, by a range of one byte."""
    info = dict(await fs._info(path))
    if info.get("size") is None:
        info["size"] = (await _get_http(url, fs, path, (0, 1)))[1]
    return info


_GETTERS: dict[str, _Getter] = {
    "S3FileSystem._cat_file": _get_s3,
    "GCSFileSystem._cat_file": _get_gcs,
    "ExtendedGcsFileSystem._cat_file": _get_gcs,
    "HTTPFileSystem._cat_file": _get_http,
}


def _request_here(url: Url, method: str, options: dict[str, Any], fs: Any, path: str) -> Any:
    outcome = Outcome(url, method, options)
    while True:
        try:
            return in_time(outcome, lambda: _once_here(url, method, options, fs, path))
        except Exception as e:
            pause, error = outcome.after(e)
        if error is not None:
            raise error
        time.sleep(pause)


def _once_here(url: Url, method: str, options: dict[str, Any], fs: Any, path: str) -> Any:
    if method == "range":
        offset, nbytes = options["offset"], options["nbytes"]
        data = fs.cat_file(path, start=offset, end=offset + nbytes)
        size = fs.info(path).get("size") if len(data) != nbytes else None
        return checked(data, url, offset, nbytes, size)
    if method == "document":
        check_document(url, fs.info(path).get("size"), options["most"])
        return whole(fs.cat_file(path), None, url)
    return noted(url, method, getattr(fs, method)(path, **options))


def _find(url: Url) -> Place:
    try:
        return current().find(url)
    except Exception as e:  # a class's constructor, which may repeat its arguments
        error = clean_error(url, e)
    raise error


def start(url: Url, method: str, options: dict[str, Any], wanted: Callable[[], bool] = lambda: True) -> Future[Any]:
    """Start one request; the future's error is clean. What is not ``wanted`` any more is not tried again."""
    if isinstance(url, InMemoryUrl):
        return current().pool().submit(url.read, options["offset"], options["nbytes"])
    if isinstance(url, KeptUrl):
        return url.keeper.start(url, method, options, wanted)
    place = _find(url)
    if not place.is_async:
        return current().pool().submit(_request_here, url, method, options, place.fs, place.path)
    by_store = _by_store(url, method, options, place)
    if by_store is not None:
        return current().store_pool().submit(by_store, wanted)
    return _start_async(url, method, options, place)


def _start_async(url: Url, method: str, options: dict[str, Any], place: Place) -> Future[Any]:
    fs = place.fs
    return asyncio.run_coroutine_threadsafe(_request_async(url, method, options, fs, place.path), fs.loop)


def _by_store(url: Url, method: str, options: dict[str, Any], place: Place) -> Callable[..., Any] | None:
    """Return what makes a request by obstore, on the thread that calls it; None where fsspec has to make it."""
    stores = place.stores
    if stores is None or not stores.serves(method) or (at := stores.place(place.path)) is None:
        return None

    def by_fsspec(method: str, options: dict[str, Any]) -> Any:
        return _start_async(url, method, options, place).result()

    return functools.partial(store_requests.request, url, method, options, stores, at, by_fsspec)


def request(url: Url, method: str, **options: Any) -> Any:
    """Ask for ``info`` or ``ls``, or read a ``document`` whole; again where it fails for a passing reason.

    Raises
    ------
    FileNotFoundError, PermissionError, OSError
        Without credentials. The last one says how often it was tried.
    """
    if isinstance(url, InMemoryUrl):
        return url.read(options["offset"], options["nbytes"])
    if isinstance(url, KeptUrl):
        found = url.keeper.start(url, method, options, lambda: True).result()
        return found.data if isinstance(found, Came) else found
    place = _find(url)
    if not place.is_async:
        return _request_here(url, method, options, place.fs, place.path)
    by_store = _by_store(url, method, options, place)
    if by_store is None:
        future = _start_async(url, method, options, place)
    elif threading.current_thread() is not threading.main_thread():
        return by_store()
    else:  # which a user may interrupt
        future = current().store_pool().submit(by_store)
    try:
        return future.result()
    except BaseException:
        future.cancel()  # the wait was interrupted
        raise


def checks_versions(url: Url) -> bool:
    """Whether each range that is read of an object is compared with the version that was seen first."""
    place = _find(url)
    return place.is_async and _getter(place.fs) is not None


def page(url: Url, after: str) -> tuple[dict[str, Version], bool] | None:
    """List objects below a URL: so many of them, in order, from the first one after a key on.

    Returns
    -------
    dict of str to Version, bool
        By key relative to the URL; and whether these are the last ones. None where a server has no such listing, does
        not allow it, or keeps no order.
    """
    place = _find(url)
    lists = place.is_async and (hasattr(place.fs, "_call_s3") or _getter(place.fs) is _get_gcs)
    if not lists or "?" in url.target:
        return None
    try:
        found, is_last = request(url, "page", after=after)
    except OSError as e:
        if is_transient(e):
            raise
        return None
    keys = [after, *found]
    return (found, is_last) if keys == sorted(keys) else None


def fetch(url: Url, offset: int, nbytes: int) -> Any:
    """Read one range; return it as a buffer of bytes.

    Raises
    ------
    ShortReadError
        The object ends before it; a body cut short on the way is fetched again instead.
    """
    return request(url, "range", offset=offset, nbytes=nbytes)
