"""Requests for objects: made again where they fail for a passing reason, checked, no credentials in errors.

A thread makes each request and waits for it: by obstore, by an asynchronous file system of fsspec, or by another file
system of fsspec (on one more thread, since nothing ends a call that hangs).
"""

from __future__ import annotations

import errno
import functools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Unpack

from scidata.core.urls import Url, Version
from scidata.errors import MissingDependencyError
from scidata.sources.access import object_stores, retry, web
from scidata.sources.access.answers import (
    at_most,
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
from scidata.sources.access.kept_urls import Came, KeptUrl, RequestOptions
from scidata.sources.access.object_stores import AnswerError, Bucket, UnservedError
from scidata.sources.access.outcomes import Outcome, clean_error, in_time
from scidata.sources.access.retry import is_transient

if TYPE_CHECKING:
    from obstore.store import ObjectStore


_MAX_SHARED, _MAX_SHARED_BYTES = 1 << 10, 256 << 10  # answers that ranks share, and of a range: one of most files


def _request(
    url: Url, method: str, options: RequestOptions, once: Callable[[Outcome], Any], wanted: Callable[[], bool]
) -> Any:
    """Make a request, by ``once`` for each attempt."""
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


# -- by fsspec ---------------------------------------------------------------------------------------------------------


def _by_fsspec(url: Url, method: str, options: RequestOptions, wanted: Callable[[], bool]) -> Any:
    place = place_of(url)

    def once(outcome: Outcome) -> Any:
        if place.is_async:
            return _ask(url, method, options, place, time.monotonic() + outcome.time_left())
        return in_time(outcome, lambda: _ask(url, method, options, place, math.inf))

    return _request(url, method, options, once, wanted)


def _ask(url: Url, method: str, options: RequestOptions, place: Place, until: float) -> Any:
    fs, path, run = place.fs, place.path, functools.partial(place.run, until=until)
    if method == "ls":
        return run("ls", path, detail=True)
    if method == "info":
        return noted(url, run(web.info, url, fs, path) if place.is_web else run("info", path))
    if method == "document":
        if place.is_web:
            data, size = run(web.read, url, fs, path, None, options["most"])
            return whole(data, size, url)
        check_document(url, run("info", path).get("size"), options["most"])
        return whole(run("cat_file", path), None, url)
    offset, nbytes = options.get("offset", 0), options["nbytes"]

    def note_version() -> int | None:
        """Ask which version was read, since fsspec does not say it of a range; return the object's size."""
        version = version_of(run(web.info, url, fs, path) if place.is_web else run("info", path))
        check_version(url, version)
        return version.size

    if method == "first":
        try:
            if place.is_web:
                data, size = run(web.read, url, fs, path, (0, nbytes))
            else:
                data, size = run("cat_file", path, start=0, end=nbytes), None
        except Exception as e:
            if not is_beyond_end(e):
                raise
            data, size = b"", None  # of an empty object
        size = note_version() if size is None else size
        return at_most(data[:nbytes], url, nbytes, size)
    if method == "tail" and place.is_web:
        return run(web.read_tail, url, fs, path, nbytes)
    if method == "tail":  # obstore was to read it, and does not understand the server
        size = note_version()
        nbytes = min(nbytes, size or 0)
        return at_most(run("cat_file", path, start=(size or 0) - nbytes, end=size), url, nbytes, size)
    try:
        if place.is_web:
            data, size = run(web.read, url, fs, path, (offset, nbytes))
        else:
            data = run("cat_file", path, start=offset, end=offset + nbytes)
            size = note_version() if place.is_async or len(data) != nbytes else None
            if len(data) == size != nbytes:  # of a server that ignores ranges
                data = data[offset : offset + nbytes]
    except Exception as e:
        if place.is_async and is_beyond_end(e):
            note_version()  # raises where it is shorter since it was replaced
        raise
    return checked(data, url, offset, nbytes, size)


# -- by obstore --------------------------------------------------------------------------------------------------------


def _once_by_store(url: Url, method: str, options: RequestOptions, bucket: Bucket, key: str, outcome: Outcome) -> Any:
    if method in ("range", "document", "first", "tail"):
        return _read_by_store(url, method, options, bucket, key, outcome)
    store = _store(bucket, outcome)
    if method == "info":
        return noted(url, object_stores.info(store, key))
    return object_stores.ls(store, key) if method == "ls" else object_stores.page(store, key, options["after"])


def _store(bucket: Bucket, outcome: Outcome) -> ObjectStore:
    wanted = outcome.time_left()
    least = max(1.0, retry.RETRY.total_wait) / (2 if retry.RETRY.attempts > 1 else 1)
    if wanted < least / 4:  # an attempt would take longer than there is
        raise TimeoutError
    seconds = least
    while seconds < wanted * 0.85:
        seconds *= 4
    outcome.seconds = seconds
    return bucket.store(seconds, least)


def _read_by_store(url: Url, method: str, options: RequestOptions, bucket: Bucket, key: str, outcome: Outcome) -> Any:
    """Read a part or all of an object; of a versioned bucket the version that was first seen, once it is replaced."""
    store, known = _store(bucket, outcome), url.seen.get(str(url))
    offset, nbytes, most = options.get("offset", 0), options.get("nbytes", 0), options.get("most", 0)
    span: object_stores.Span = (offset, offset + nbytes) if nbytes else None
    if method == "tail":
        span = {"suffix": nbytes}
    pinned = None if known is None or str(url) not in url.seen.pinned else known.version
    while True:
        try:
            data, found = object_stores.read(store, key, span, pinned, most, url)
        except AnswerError as e:
            if pinned is not None and not is_transient(e):
                raise lost_version(url, pinned, str(e)) from None
            if not is_beyond_end(e):
                raise
            found_size = noted(url, object_stores.info(store, key)).get("size")  # raises where it was replaced
            if method in ("first", "tail") and found_size == 0:
                return b"", 0
            if known is None or str(url) not in url.seen.pinned:
                raise
            pinned = known.version
            continue
        if known is not None and pinned is None and is_pinned(url, known, found):
            pinned = known.version
            continue
        check_version(url, found)
        if method in ("first", "tail"):
            size = found.size
            if size is None:  # as it is stored: its content is encoded
                size = object_stores.info(store, key).get("size")
            return at_most(data, url, nbytes, size)
        return whole(data, found.size, url) if span is None else checked(data, url, offset, nbytes, found.size)


# -- all ---------------------------------------------------------------------------------------------------------------


def place_of(url: Url) -> Place:
    """Return the file system of fsspec that a URL lies in, and its path there; its errors name the URL."""
    try:
        return current().find(url)
    except Exception as e:  # a class's constructor, which may repeat its arguments
        error = clean_error(url, e)
    raise error


def _by_store(
    url: Url, method: str, options: RequestOptions, bucket: Bucket, key: str, wanted: Callable[[], bool]
) -> Any:
    once = functools.partial(_once_by_store, url, method, options, bucket, key)
    try:
        bucket.prepare()
        return _request(url, method, options, once, wanted)
    except UnservedError as e:
        bucket.is_served &= not e.for_good
        said = url.public(str(e))
    if method == "page":  # fsspec lists all or nothing
        raise OSError(errno.ENOTSUP, f"{url}: {said}")
    try:
        return _by_fsspec(url, method, options, wanted)
    except MissingDependencyError as e:
        text = str(e).removeprefix(f"{url}: ")
        raise MissingDependencyError(f"{url}: obstore cannot read it ({said}); by fsspec, {text}") from None


def start(url: Url, method: str, options: RequestOptions, wanted: Callable[[], bool] = lambda: True) -> Future[Any]:
    """Start one request; the future's error is clean. What is not ``wanted`` any more is not tried again."""
    if isinstance(url, KeptUrl):
        return url.keeper.start(url, method, options, wanted)
    return current().pool("request").submit(_by_any, url, method, options, wanted)


def _by_any(url: Url, method: str, options: RequestOptions, wanted: Callable[[], bool] = lambda: True) -> Any:
    shared, found = current().answers, current().bucket(url)
    ask = functools.partial(_by_store, bucket=found[0], key=found[1]) if found else _by_fsspec
    key = str(url), method, *sorted(options.items())
    is_large = shared is not None and (len(shared) >= _MAX_SHARED or options.get("nbytes", 0) > _MAX_SHARED_BYTES)
    if shared is None or (is_large and key not in shared):
        return ask(url, method, options, wanted=wanted)
    if key not in shared:
        try:
            answer = _as_bytes(ask(url, method, options, wanted=wanted))
        except FileNotFoundError as e:
            answer = e
        shared[key] = answer, url.seen.get(str(url))
    answer, version = shared[key]
    if version is not None:
        check_version(url, version)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _as_bytes(answer: Any) -> Any:
    """Return an answer that pickles."""
    if isinstance(answer, tuple):
        return tuple(map(_as_bytes, answer))
    return bytes(answer) if isinstance(answer, memoryview) else answer


def request(url: Url, method: str, **options: Unpack[RequestOptions]) -> Any:
    """Ask for ``info`` or ``ls``, or read a ``range``, or a ``document`` whole; or, of an object of unknown size, its
    ``first`` bytes or the ``tail``, with the size.

    Raises FileNotFoundError, PermissionError, OSError: without credentials. The last one says how often it was tried.
    """
    if not isinstance(url, KeptUrl) and threading.current_thread() is not threading.main_thread():
        return _by_any(url, method, options)
    future = start(url, method, options)  # a wait that a user may interrupt
    try:
        answer = future.result()
    except BaseException:
        future.cancel()
        raise
    return answer.data if isinstance(answer, Came) else answer


def checks_versions(url: Url) -> bool:
    """Whether each range that is read of an object is compared with the version that was seen first."""
    return current().bucket(url) is not None or place_of(url).is_async


def gives_tails(url: Url) -> bool:
    """Whether one request gives the last bytes of an object, and its size and version: not so of Azure."""
    if isinstance(url, KeptUrl):
        return False
    if current().bucket(url) is None:
        return place_of(url).is_web
    return url.target.startswith(("s3://", "s3a://", "gs://", "gcs://"))


def page(url: Url, after: str) -> tuple[dict[str, Version], bool] | None:
    """List objects below a URL: so many of them, in order, from the first one after a key on.

    By key relative to the URL; and whether these are the last ones. None if a server has no such listing,
    does not allow it, or keeps no order.
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


def change(url: Url, method: str, *arguments: object, nbytes: int = 0) -> Any:
    """Call a method of a URL's file system that writes or finds, again where it fails; ``nbytes`` take their time."""
    place = place_of(url)
    place.fs.invalidate_cache()

    def once(outcome: Outcome) -> Any:
        return place.run(method, *arguments, until=time.monotonic() + outcome.time_left())

    return _request(url, method, {"nbytes": nbytes}, once, lambda: True)


def fetch(url: Url, offset: int, nbytes: int) -> bytes | memoryview:
    """Read one range, as a buffer; raises ShortReadError where the object ends before it."""
    return request(url, "range", offset=offset, nbytes=nbytes)
