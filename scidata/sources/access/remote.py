"""Requests for objects: made again where they fail for a passing reason, checked, no credentials in errors.

An attempt is made by one of three: obstore (on a thread, which waits), an asynchronous file system of fsspec (on
fsspec's event loop), or another file system of fsspec (on a thread of its own, since nothing ends a call that hangs).
"""

from __future__ import annotations

import asyncio
import errno
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Unpack

from scidata.core.urls import Url, Version
from scidata.errors import MissingDependencyError
from scidata.sources.access import object_stores, retry, web
from scidata.sources.access.answers import (
    check_document,
    check_version,
    checked,
    is_beyond_end,
    is_pinned,
    lost_version,
    noted,
    version_of,
    whole,
)
from scidata.sources.access.filesystems import Place, current
from scidata.sources.access.in_memory import InMemoryUrl
from scidata.sources.access.kept_urls import Came, KeptUrl, RequestOptions
from scidata.sources.access.object_stores import AnswerError, Bucket, UnservedError
from scidata.sources.access.outcomes import Outcome, clean_error, in_time
from scidata.sources.access.retry import is_transient

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from obstore.store import ObjectStore


def _request_here(
    url: Url, method: str, options: RequestOptions, once: Callable[[Outcome], Any], wanted: Callable[[], bool]
) -> Any:
    """Make a request on this thread, by ``once`` for each attempt."""
    outcome = Outcome(url, method, options)
    while True:
        try:
            return once(outcome)
        except UnservedError:
            raise
        except Exception as e:
            pause, error = outcome.after(outcome.late() if type(e) is TimeoutError and e.errno is None else e)
        if error is not None:
            raise error
        if not wanted() or current().is_ending():
            raise InterruptedError(errno.EINTR, f"{url}: nobody waits for it any more")
        time.sleep(pause)


async def _request_async(url: Url, method: str, options: RequestOptions, place: Place) -> Any:
    """Do as :func:`_request_here` on fsspec's event loop."""
    outcome = Outcome(url, method, options)
    while True:
        try:
            async with asyncio.timeout(outcome.time_left()) as limit:
                return await _once_async(url, method, options, place)
        except Exception as e:
            pause, error = outcome.after(outcome.late() if limit.expired() else e)
        if error is not None:
            raise error
        await asyncio.sleep(pause)


# -- by fsspec ---------------------------------------------------------------------------------------------------------


async def _once_async(url: Url, method: str, options: RequestOptions, place: Place) -> Any:
    fs, path = place.fs, place.path
    if method == "range":
        offset, nbytes = options["offset"], options["nbytes"]
        try:
            if place.is_web:
                data, size = await web.read(url, fs, path, (offset, nbytes))
            else:
                data = await fs._cat_file(path, start=offset, end=offset + nbytes)
                size = await _note_version(url, place)
                if len(data) == size != nbytes:  # of a server that ignores ranges
                    data = data[offset : offset + nbytes]
        except Exception as e:
            if is_beyond_end(e):
                await _note_version(url, place)  # raises where it is shorter since it was replaced
            raise
        return checked(data, url, offset, nbytes, size)
    if method == "document":
        most = options["most"]
        if place.is_web:
            return whole(*await web.read(url, fs, path, None, most), url)
        check_document(url, (await fs._info(path)).get("size"), most)
        return whole(await fs._cat_file(path), None, url)
    if method == "info":
        return noted(url, await web.info(url, fs, path) if place.is_web else await fs._info(path))
    return await fs._ls(path, detail=True)


async def _note_version(url: Url, place: Place) -> int | None:
    """Ask which version was read, since fsspec does not say it of a range; return the object's size."""
    version = version_of(await place.fs._info(place.path))
    check_version(url, version)
    return version.size


def _ask_here(url: Url, method: str, options: RequestOptions, fs: AbstractFileSystem, path: str) -> Any:
    if method == "range":
        offset, nbytes = options["offset"], options["nbytes"]
        data = fs.cat_file(path, start=offset, end=offset + nbytes)
        size = fs.info(path).get("size") if len(data) != nbytes else None
        return checked(data, url, offset, nbytes, size)
    if method == "document":
        check_document(url, fs.info(path).get("size"), options["most"])
        return whole(fs.cat_file(path), None, url)
    return noted(url, fs.info(path)) if method == "info" else fs.ls(path, detail=True)


# -- by obstore --------------------------------------------------------------------------------------------------------


def _once_by_store(url: Url, method: str, options: RequestOptions, bucket: Bucket, key: str, outcome: Outcome) -> Any:
    if method in ("range", "document"):
        return _read_by_store(url, options, bucket, key, outcome)
    store = _store(bucket, outcome)
    if method == "info":
        return noted(url, object_stores.info(store, key))
    return object_stores.ls(store, key) if method == "ls" else object_stores.page(store, key, options["after"])


def _store(bucket: Bucket, outcome: Outcome) -> ObjectStore:
    """Return a store whose requests may take as long as this one, or somewhat longer: few, each keeps connections."""
    wanted = outcome.time_left()
    least = max(1.0, retry.RETRY.total_wait) / (2 if retry.RETRY.attempts > 1 else 1)
    if wanted < least / 4:  # an attempt would take longer than there is
        raise TimeoutError
    seconds = least
    while seconds < wanted * 0.85:
        seconds *= 4
    outcome.seconds = seconds
    return bucket.store(seconds, least)


def _read_by_store(url: Url, options: RequestOptions, bucket: Bucket, key: str, outcome: Outcome) -> Any:
    """Read a range or all of an object; of a versioned bucket the version that was first seen, once it is replaced."""
    store, known = _store(bucket, outcome), url.seen.get(str(url))
    offset, nbytes, most = options.get("offset", 0), options.get("nbytes", 0), options.get("most", 0)
    span = (offset, offset + nbytes) if nbytes else None
    pinned = None if known is None or str(url) not in url.seen.pinned else known.version
    while True:
        try:
            data, found = object_stores.read(store, key, span, pinned, most, url)
        except AnswerError as e:
            if pinned is not None and not is_transient(e):
                raise lost_version(url, pinned, str(e)) from None
            if not is_beyond_end(e):
                raise
            noted(url, object_stores.info(store, key))  # raises where it is shorter since it was replaced
            if known is None or str(url) not in url.seen.pinned:
                raise
            pinned = known.version
            continue
        if known is not None and pinned is None and is_pinned(url, known, found):
            pinned = known.version
            continue
        check_version(url, found)
        return whole(data, found.size, url) if span is None else checked(data, url, offset, nbytes, found.size)


# -- all ---------------------------------------------------------------------------------------------------------------


def _find(url: Url) -> Place:
    try:
        return current().find(url)
    except Exception as e:  # a class's constructor, which may repeat its arguments
        error = clean_error(url, e)
    raise error


def _by_fsspec(url: Url, method: str, options: RequestOptions, wanted: Callable[[], bool]) -> Future[Any]:
    place = _find(url)
    if place.is_async:
        return asyncio.run_coroutine_threadsafe(_request_async(url, method, options, place), place.fs.loop)
    ask = functools.partial(_ask_here, url, method, options, place.fs, place.path)
    once = functools.partial(in_time, call=ask)
    return current().pool("request").submit(_request_here, url, method, options, once, wanted)


def _by_store(
    url: Url, method: str, options: RequestOptions, bucket: Bucket, key: str, wanted: Callable[[], bool]
) -> Any:
    once = functools.partial(_once_by_store, url, method, options, bucket, key)
    try:
        bucket.prepare()
        return _request_here(url, method, options, once, wanted)
    except UnservedError as e:
        bucket.is_served &= not e.for_good
        said = url.public(str(e))
    if method == "page":  # fsspec lists all or nothing
        raise OSError(errno.ENOTSUP, f"{url}: {said}")
    try:
        future = _by_fsspec(url, method, options, wanted)
    except MissingDependencyError as e:
        text = str(e).removeprefix(f"{url}: ")
        raise MissingDependencyError(f"{url}: obstore cannot read it ({said}); by fsspec, {text}") from None
    return future.result()


def start(url: Url, method: str, options: RequestOptions, wanted: Callable[[], bool] = lambda: True) -> Future[Any]:
    """Start one request; the future's error is clean. What is not ``wanted`` any more is not tried again."""
    if isinstance(url, InMemoryUrl):
        return current().pool("request").submit(url.read, options["offset"], options["nbytes"])
    if isinstance(url, KeptUrl):
        return url.keeper.start(url, method, options, wanted)
    found = current().bucket(url)
    if found is None:
        return _by_fsspec(url, method, options, wanted)
    return current().pool("request").submit(_by_store, url, method, options, *found, wanted)


def request(url: Url, method: str, **options: Unpack[RequestOptions]) -> Any:
    """Ask for ``info`` or ``ls``, or read a ``range``, or a ``document`` whole.

    Raises
    ------
    FileNotFoundError, PermissionError, OSError
        Without credentials. The last one says how often it was tried.
    """
    if isinstance(url, InMemoryUrl):
        return url.read(options["offset"], options["nbytes"])
    found = None if isinstance(url, KeptUrl) else current().bucket(url)
    if found is not None and threading.current_thread() is not threading.main_thread():
        return _by_store(url, method, options, *found, lambda: True)
    future = start(url, method, options)  # a wait that a user may interrupt
    try:
        answer = future.result()
    except BaseException:
        future.cancel()
        raise
    return answer.data if isinstance(answer, Came) else answer


def checks_versions(url: Url) -> bool:
    """Whether each range that is read of an object is compared with the version that was seen first."""
    return current().bucket(url) is not None or _find(url).is_async


def page(url: Url, after: str) -> tuple[dict[str, Version], bool] | None:
    """List objects below a URL: so many of them, in order, from the first one after a key on.

    Returns
    -------
    dict of str to Version, bool
        By key relative to the URL; and whether these are the last ones. None where a server has no such listing, does
        not allow it, or keeps no order.
    """
    if current().bucket(url) is None:
        return None
    try:
        found, is_last = request(url, "page", after=after)
    except OSError as e:
        if is_transient(e):
            raise
        return None
    keys = [after, *found]
    return (found, is_last) if keys == sorted(keys) else None


def fetch(url: Url, offset: int, nbytes: int) -> bytes | memoryview:
    """Read one range; return it as a buffer of bytes.

    Raises
    ------
    ShortReadError
        The object ends before it; a body cut short on the way is fetched again instead.
    """
    found: bytes | memoryview = request(url, "range", offset=offset, nbytes=nbytes)
    return found
