"""Which failures of a read pass by themselves, and how long to wait for that."""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from scidata.core.keywords import checked_keywords
from scidata.errors import ConfigError, SciDataError

_log = logging.getLogger("scidata")
_T = TypeVar("_T")

_NAMES = (
    "EIO ESTALE ETIMEDOUT EAGAIN EINTR ECONNRESET ECONNABORTED ECONNREFUSED EPIPE ENETUNREACH ENETDOWN ENETRESET "
    "EHOSTUNREACH EHOSTDOWN ENOTCONN ESHUTDOWN EREMOTEIO ENOLINK ECOMM EPROTO ENOBUFS"
)
_TRANSIENT = {number for number, name in errno.errorcode.items() if name in _NAMES.split()} | {errno.EAGAIN}
_TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504, 509}
_SLOW_DOWN_STATUS = {429, 503, 509}
_SLOW_DOWN_CODES = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"}
_TRANSIENT_CODES = _SLOW_DOWN_CODES | {"RequestTimeout", "InternalError", "ServiceUnavailable", "OperationAborted"}
#: Classes of clients that scidata does not import: aiohttp, botocore, urllib3, requests.
_TRANSIENT_CLASSES = {
    "ClientPayloadError", "ClientConnectionError", "ServerDisconnectedError", "ServerTimeoutError",
    "HTTPClientError", "IncompleteRead", "IncompleteReadError", "ResponseStreamingError", "ProtocolError",
    "ChunkedEncodingError", "ResponseParserError", "TransferEncodingError", "ContentLengthError",
}  # fmt: skip
_FINAL_CLASSES = {"ClientConnectorCertificateError", "ClientSSLError", "ClientConnectorSSLError", "SSLError"}


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, in turn."""
    found: BaseException | None = error
    for _ in range(10):
        if found is None:
            return
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def status_of(error: BaseException) -> int | None:
    """Return the status of an HTTP answer that an error tells of."""
    for e in causes(error):
        response: Any = getattr(e, "response", None)
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
        for status in (getattr(e, "status", None), found, getattr(response, "status_code", None)):
            if isinstance(status, int):
                return status
    return None


def is_transient(error: BaseException) -> bool:
    """Return True if the same read may succeed later: never where bytes are wrong, missing or forbidden."""
    if isinstance(error, SciDataError):
        return False
    if hasattr(error, "tried"):
        return True
    status = status_of(error)
    if status is not None and status >= 400:
        return status in _TRANSIENT_STATUS or any(_code(e) in _TRANSIENT_CODES for e in causes(error))
    return any(map(_is_transient_alone, causes(error)))


def asks_to_slow_down(error: BaseException) -> bool:
    """Return True if a server has more requests than it bears."""
    return status_of(error) in _SLOW_DOWN_STATUS or any(_code(e) in _SLOW_DOWN_CODES for e in causes(error))


def _code(error: BaseException) -> str | None:
    response = getattr(error, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


def _is_transient_alone(error: BaseException) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & _FINAL_CLASSES or isinstance(error, SciDataError):
        return False
    if _code(error) in _TRANSIENT_CODES or names & _TRANSIENT_CLASSES or isinstance(error, TimeoutError):
        return True
    if not isinstance(error, OSError):
        return False
    if isinstance(error, BlockingIOError) and "lock" in str(error):  # a file that is being written
        return False
    if error.errno is None and (found := re.search(r"errno = (\d+)", str(error))):  # HDF5's own messages
        return int(found[1]) in _TRANSIENT
    return error.errno in _TRANSIENT


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How often a read is tried, and how long it waits in between: twice as long each time, less a random part.

    - ``first_wait``, ``max_wait``: seconds before the second attempt, and before any one.
    - ``total_wait``: seconds of all waits of one read. Of a URL: of its attempts, too.
    """

    attempts: int = 6
    first_wait: float = 0.1
    max_wait: float = 5.0
    total_wait: float = 30.0

    def run(self, name: str, call: Callable[[], _T], *, failed: Exception | None = None) -> _T:
        """Call until it succeeds; ``failed`` is the error of an attempt that was made before.

        Raises Exception: what the call raised, if that is not transient; an ``OSError`` that says how often it was
        tried after the last attempt.
        """
        attempts = Attempts(self, name)
        while True:
            try:
                if failed is not None:
                    error, failed = failed, None
                    raise error
                return call()
            except Exception as e:
                wait = attempts.wait_after(e, str(e))
                if wait is None:
                    if attempts.number == 1 or not is_transient(e):
                        raise
                    failure = attempts.exhausted(e, str(e))
            if wait is None:
                raise failure
            time.sleep(wait)


class Attempts:
    """The attempts of one read: counted, and warned of once."""

    def __init__(self, retry: Retry, name: str, *, limit: float = math.inf) -> None:
        self._retry, self._name, self._limit = retry, name, limit
        self.number, self._waited, self._began = 0, 0.0, time.monotonic()

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def wait_after(self, error: BaseException, text: str) -> float | None:
        """Return how long to wait before the next attempt; None if there is none. ``text`` is the error's."""
        retry = self._retry
        self.number += 1
        if self.number >= retry.attempts or hasattr(error, "tried") or not is_transient(error):
            return None  # tried: by a read inside this one
        wait = min(retry.max_wait, retry.first_wait * 2.0 ** (self.number - 1)) * random.uniform(0.5, 1.0)
        if self._waited + wait > retry.total_wait or self._elapsed() + wait >= self._limit:
            return None
        if self.number == 1:
            _log.warning(
                "%s: attempt 1 of %d failed (%s); trying again",
                self._name,
                retry.attempts,
                text or type(error).__name__,
            )
        self._waited += wait
        return wait

    def exhausted(self, error: BaseException, text: str) -> OSError:
        """Return the error to raise after the last attempt, with the same errno."""
        said = f"{text} (tried {self.number} times in {self._elapsed():.1f} s)"
        number = next((e.errno for e in causes(error) if isinstance(e, OSError) and e.errno), errno.EIO)
        found = OSError(number, said if self._name in text else f"{os.strerror(number)}: {self._name}: {said}")
        found.tried = self.number  # type: ignore[attr-defined]
        return found


#: What every read of a file or URL goes by.
RETRY = Retry()


@checked_keywords
def set_retry(*, attempts: int = 6, first_wait: float = 0.1, max_wait: float = 5.0, total_wait: float = 30.0) -> None:
    """Say how patiently this process, and workers that it starts later, read: files and URLs alike.

    Failures that may pass are tried again: ``EIO``, ``ESTALE``, time-outs and the like of network file systems, HTTP
    408, 429 and 5xx, connections that break or are cut short. Missing, forbidden, truncated or damaged data are not.

    Parameters
    ----------
    attempts : int, default 6
        At most so many in all; 1 tries nothing again.
    first_wait, max_wait : float
        Seconds before the second attempt, twice as long each time, less a random part; and before any one.
    total_wait : float, default 30.0
        Seconds of all waits of one read. Of a URL it is the time for all of it, attempts included, at least one second,
        and more for reads of more than a MiB: a server that accepts and does not answer, or hardly, is given up then.

    Raises
    ------
    ConfigError
        No attempt, or a wait that is no number from 0.

    Examples
    --------
    >>> scidata.set_retry(attempts=10, total_wait=120)  # of a slow object store
    >>> scidata.set_retry()  # the defaults
    """
    global RETRY  # noqa: PLW0603 - a process has one policy, as it has one cache of files
    waits = {"first_wait": first_wait, "max_wait": max_wait, "total_wait": total_wait}
    if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
        raise ConfigError(f"attempts={attempts!r}: a read is tried a whole number of times, at least 1")
    for name, value in waits.items():
        if not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigError(f"{name}={value!r}: a wait is a number of seconds, from 0")
    RETRY = Retry(attempts=attempts, **waits)
