"""Requests that obstore makes, on the thread that wants the answer: tried again and checked as those of fsspec."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import Any

from scidata.core.urls import Url
from scidata.sources.access import object_stores, retry
from scidata.sources.access.answers import check_version, checked, is_beyond_end, is_pinned, lost_version, noted
from scidata.sources.access.filesystems import current
from scidata.sources.access.object_stores import AnswerError, ObjectStores, UnservedError
from scidata.sources.access.outcomes import Outcome
from scidata.sources.access.retry import is_transient


def request(
    url: Url,
    method: str,
    options: dict[str, Any],
    stores: ObjectStores,
    place: tuple[str, str],
    by_fsspec: Callable[[str, dict[str, Any]], Any],
    wanted: Callable[[], bool] = lambda: True,
) -> Any:
    """Read a ``range``, or ask for ``info``.

    Parameters
    ----------
    place
        The bucket, and the key there.
    by_fsspec
        Makes a request for the same URL by fsspec's file system, with attempts of its own.
    wanted
        Whether the answer is waited for still; if not, there is no further attempt.

    Raises
    ------
    FileNotFoundError, PermissionError, OSError
        Without credentials.
    """
    outcome = Outcome(url, method, options)
    once = _info if method == "info" else _range
    while True:
        pause, error = 0.0, None
        try:
            return once(url, options, stores, place, by_fsspec, outcome)
        except UnservedError as e:
            if e.for_good:
                stores.leave(place[0])
            break  # outside of the handler: a failure's context would be this one
        except Exception as e:
            pause, error = outcome.after(outcome.late() if type(e) is TimeoutError and e.errno is None else e)
        if error is not None:
            raise error
        if not wanted() or current().is_ending():
            raise InterruptedError(errno.EINTR, f"{url}: nobody waits for it any more")
        time.sleep(pause)
    return by_fsspec(method, options)


def _store(stores: ObjectStores, name: str, outcome: Outcome) -> Any:
    """Return a store whose requests may take as long as this one, or somewhat longer: few, each keeps connections."""
    wanted = outcome.time_left()
    least = max(1.0, retry.RETRY.total_wait) / (2 if retry.RETRY.attempts > 1 else 1)
    if wanted < least / 4:  # an attempt would take longer than there is
        raise TimeoutError
    seconds = least
    while seconds < wanted * 0.85:
        seconds *= 4
    outcome.seconds = seconds
    return stores.store(name, seconds, least)


def _range(url: Url, options: dict[str, Any], stores: Any, place: Any, by_fsspec: Any, outcome: Outcome) -> Any:
    offset, nbytes = options["offset"], options["nbytes"]
    store, known = _store(stores, place[0], outcome), url.seen.get(str(url))
    pinned = None if known is None or str(url) not in url.seen.pinned else known.version
    while True:
        try:
            data, found = object_stores.read(store, place[1], offset, nbytes, pinned)
        except AnswerError as e:
            if pinned is not None and not is_transient(e):
                raise lost_version(url, pinned, str(e)) from None
            if not is_beyond_end(e):
                raise
            by_fsspec("info", {})  # raises where it is shorter since it was replaced
            if known is None or str(url) not in url.seen.pinned:
                raise
            pinned = known.version
            continue
        if known is not None and pinned is None and is_pinned(url, known, found):
            pinned = known.version
            continue
        check_version(url, found)
        return checked(data, url, offset, nbytes, found.size)


def _info(url: Url, options: dict[str, Any], stores: Any, place: Any, by_fsspec: Any, outcome: Outcome) -> Any:
    try:
        found = object_stores.head(_store(stores, place[0], outcome), place[1])
    except AnswerError as e:
        if e.status != 404:
            raise
        found = None
    return by_fsspec("folder", {}) if found is None else noted(url, "info", found)
