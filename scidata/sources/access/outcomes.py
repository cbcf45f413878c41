"""Requests that fail: their time limit, their repetition, and the error that is raised."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from scidata.core.urls import Url
from scidata.errors import SciDataError, ShortReadError
from scidata.sources.access import retry
from scidata.sources.access.answers import is_beyond_end
from scidata.sources.access.filesystems import current
from scidata.sources.access.kept_urls import RequestOptions
from scidata.sources.access.retry import Attempts, asks_to_slow_down, causes, is_transient, status_of
from scidata.sources.access.web import redirect_error

_T = TypeVar("_T")
#: Bytes a second that a server gives at the least; and bytes in flight that need no time of their own.
_SLOWEST, _SMALL = 128 << 10, 1 << 20
_MAX_SAID = 300  # characters


def clean_error(url: Url, error: BaseException) -> Exception:
    """Return an error of the same kind without credentials of ``url``; raise it after, not in, the ``except`` block."""
    status, kinds = status_of(error), list(causes(error))
    # fsspec says of any error that an object is not there
    own = next((e for e in kinds if isinstance(e, SciDataError)), None) or redirect_error(url, kinds)
    if own is not None:
        return type(own)(url.public(str(own)))
    text = _line(url.public(str(error))) or type(error).__name__
    numbers = {e.errno for e in kinds if isinstance(e, OSError)}
    if is_beyond_end(error):
        return ShortReadError(f"{url}: ends before the bytes that were expected; it is truncated: upload it again")
    if status in (401, 403, 407) or any(isinstance(e, PermissionError) for e in kinds):
        return PermissionError(
            errno.EACCES, f"{url}: access was refused ({text}); check storage_options, or whether the URL has expired"
        )
    missing = status is None and any(isinstance(e, FileNotFoundError) for e in kinds) and not is_transient(error)
    if status in (404, 410) or missing:
        what = "bucket" if re.search("NoSuchBucket|bucket does not exist", text) else "object"
        return FileNotFoundError(errno.ENOENT, f"{url}: there is no such {what}")
    for kind in (NotADirectoryError, IsADirectoryError, NotImplementedError, ImportError, KeyError):
        if isinstance(error, kind):
            return kind(f"{url}: {text}")
    if isinstance(error, FileNotFoundError):  # so fsspec says of an outage, too: its cause is the reason
        error, text = kinds[-1], _line(url.public(str(kinds[-1])))
    said = f"{type(error).__name__}: {text}" if str(url) in text else f"{url}: {type(error).__name__}: {text}"
    number = next((n for n in numbers if n), None)
    return OSError(said) if number is None else OSError(number, said)


def _line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_SAID else text[:_MAX_SAID] + " ..."


class Outcome(Attempts):
    """Decides after each failure of one request: wait so long, or give up with this error."""

    def __init__(self, url: Url, method: str, options: RequestOptions) -> None:
        known = url.seen.get(str(url)) if method == "document" else None
        own = options.get("nbytes") or (known.size if known is not None else None) or 0
        more = max(own, current().load.nbytes) - _SMALL  # requests in flight share the line
        limit = max(1.0, retry.RETRY.total_wait) + max(0, more) / _SLOWEST
        super().__init__(retry.RETRY, str(url), limit=limit)
        self._url, self.seconds = url, 0.0

    def time_left(self) -> float:
        """Return how long the next attempt may take: half of all, so that a lost connection leaves another."""
        share = self._limit / 2 if self._retry.attempts > 1 else self._limit
        self.seconds = max(0.01, min(share, self._limit - self._elapsed()))
        return self.seconds

    def late(self) -> TimeoutError:
        """Return the error of an attempt that took longer."""
        return TimeoutError(
            errno.ETIMEDOUT, f"no whole answer within {self.seconds:.1f} s; scidata.set_retry(total_wait=) gives more"
        )

    def after(self, error: Exception) -> tuple[float, Exception | None]:
        """Return how long to wait after a failure; or an error to raise outside of the handler."""
        if asks_to_slow_down(error):
            current().load.refused()
        clean = clean_error(self._url, error)
        said = (clean.strerror if isinstance(clean, OSError) else None) or str(clean)
        wait = self.wait_after(error, said)
        if wait is not None:
            return wait, None
        if self.number > 1 and is_transient(error):
            clean = self.exhausted(clean, said)
        return 0, clean


def in_time(outcome: Outcome, call: Callable[[], _T]) -> _T:
    """Wait for a call in a thread of its own: one that hangs is left behind, since nothing else ends it."""
    done: Future[_T] = Future()

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
