"""A job for numbered pieces, and the protocol of executors, which know nothing of samples or fields."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeAlias, TypeVar

from scidata.errors import SciDataError

K = TypeVar("K")
T = TypeVar("T")

Tick: TypeAlias = Callable[[float], None]

#: Does one piece and reports finished shares to the function; job and value pickle.
Job: TypeAlias = Callable[[int, Tick], T]


def _anywhere() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Work(Generic[T]):
    """A job for many pieces, with the words for its messages."""

    job: Job[T]  # does one piece, by number
    name: str  # noun for a piece in messages: ``"sample"``
    label: Callable[[int], str] | None = None  # name of a piece in messages, by number: ``"sample 3 (car_3.h5)"``
    after: str = ""  # end of messages about interrupted work: how to resume
    # called by a process of another machine before its first piece: raises if the machine is unfit. Pickles
    check: Callable[[], None] = _anywhere

    def named(self, index: int) -> str:
        """Return a piece's name for messages."""
        return f"{self.name} {index}" if self.label is None else self.label(index)


class Executor(Protocol):
    """Runs pieces of work in any order."""

    # whether pieces are done on other machines, which see other folders, may do a piece twice, and may go on for a
    # while after :meth:`run` has raised
    is_remote: bool

    def num_parts(self, num_units: int) -> int:
        """Return the number of contiguous parts to split ``num_units`` into; few long parts cost least."""

    def run(
        self, work: Work[T], indices: Sequence[int], *, tick: Tick, take: Callable[[int, T], None] | None = None
    ) -> None:
        """Run jobs by number; the first error ends the others and is raised here.

        ``tick``: called with the shares that are done.
        ``take``: called with the number of each piece that is done, and the value of its job; both in this thread.
        """


def in_threads(job: Callable[[K], T], items: Iterable[K], jobs: int, take: Callable[[K, T], None]) -> None:
    """Do a job for each item in ``jobs`` threads; ``take`` its value in this thread. The first error ends the
    others.
    """
    waiting, running = iter(items), dict[Future[T], K]()
    with ThreadPoolExecutor(jobs, thread_name_prefix="scidata-jobs") as pool:
        try:
            while True:
                running |= {pool.submit(job, item): item for item in islice(waiting, 2 * jobs - len(running))}
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    take(running.pop(future), future.result())
        except BaseException:
            for future in running:
                future.cancel()
            raise


def sendable(error: Exception) -> Exception:
    """Return the error, or one with the same message if it does not pickle."""
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:
        return SciDataError(f"{type(error).__name__}: {error}")
    return error if isinstance(again, type(error)) else SciDataError(str(error))
