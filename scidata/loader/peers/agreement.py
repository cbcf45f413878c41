"""Ranks that read together compare their arguments and orders: before the first batch, and at the end of an epoch.

A loader that is told something else on one rank than on another (a batch size, a dtype, a file behind the same path, an
order) would hang, or mix samples, in whatever collective comes next. So each rank writes its values into the process
group's store, and compares them with those of the first rank that reads the same samples, and of the first rank of all
(:mod:`scidata.shard.comm.comparing`); all raise a difference that any of them has found. The loop waits meanwhile, and
hears of a rank that fails. At the end, only the order is compared, by the ranks that share it.

A rank that does not come to the first batch is named in a warning, and the loop goes on: one rank may iterate alone.
Where it waits for that rank in a collective, the error after the process group's timeout (``init_mesh(timeout=)``)
names it, too; and so does one, after the same time, of a rank that does not come to the end. Once a rank has iterated a
loader alone, a first batch perhaps, its iterations have other numbers than the others': it compares no more.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

from scidata.device_mesh import groups
from scidata.device_mesh.board import Postings, call_with_timeout
from scidata.errors import ConfigError, RankFailedError, SciDataError
from scidata.loader.peers.session import Session
from scidata.loader.peers.watch import Watch
from scidata.shard.comm.agreement import differences
from scidata.shard.comm.comparing import Comparison, Record, Report, differing

_log = logging.getLogger("scidata")

_PAUSES = 0.0002, 0.02  # s between two questions: at first, and in the end
_LOOK = 0.1  # s between two looks of the loop at the fate of other ranks
_LOOKS = 10  # for why the store does not answer
_GRACE_SECONDS = 2.0  # that the loop waits for others before its first batch
_ASK_SECONDS = 1.0  # s to wait for missing ranks after a collective has failed
_LATE_SECONDS = 10.0  # that others have not come, after which a warning names one of them


class Agreement:
    """What one iteration of a loader compares.

    - ``of_data``: called when the first batch is asked for: returns values that ranks which share their samples must
      share, too.
    """

    def __init__(
        self, watch: Watch, session: Session, of_loader: Mapping[str, str], of_data: Callable[[], Mapping[str, str]]
    ) -> None:
        self._watch, self._session = watch, session
        self._of_loader, self._of_data = of_loader, of_data
        self._iteration = watch.iteration
        self._start: _Talk | None = None
        self._reached = False
        session.leave = self._leave

    def begin(self) -> None:
        """Begin to compare, once, while the first batch is read."""
        if self._start is None and self._session.is_aligned:
            of_data = dict(self._of_data())
            self._start = self._talk("start")
            self._start.begin({"loader": dict(self._of_loader), "data": of_data | self._session.first_step()})

    def reached(self) -> None:
        """Wait once, before the first batch is used, until the ranks have compared their data.

        Where others do not come for a moment, which may be slow, or iterate something else, the loop goes on, and is
        told later. Raises ConfigError: ranks differ: names the values, and which ranks have them; on all ranks alike;
        RankFailedError: a rank has failed.
        """
        if not self._reached and self._start is not None:
            self._reached = True
            self._wait(self._start, _GRACE_SECONDS)
            self._session.is_agreed = True

    def end(self) -> None:
        """Compare the whole order at the end of an epoch, if all came to its beginning; raises as :meth:`begin`."""
        self.reached()
        if self._start is not None and self._session.is_aligned and not self._start.is_alive():
            talk = self._talk("end")
            talk.begin({"loader": {}, "data": self._session.whole_order()})
            self._wait(talk)

    def _talk(self, name: str) -> _Talk:
        return _Talk(self._watch.posts, name, self._iteration, self._watch, self._session)

    def _wait(self, talk: _Talk, grace: float = float("inf")) -> None:
        """Wait for an exchange in its thread, whose store may not answer, and check whether another rank has failed."""
        began = time.monotonic()
        while talk.is_alive():
            talk.join(_LOOK)
            self._session.check(self._session.at)
            if time.monotonic() - began > grace:
                talk.go_on_alone()
                return
        if talk.error is None:
            return
        if isinstance(talk.error, ConfigError):
            self._session.all_know()
        elif not isinstance(talk.error, SciDataError):  # of the store, which has ended with another rank, perhaps
            for _ in range(_LOOKS):
                time.sleep(_LOOK)
                self._session.check(self._session.at)
        raise talk.error

    def _leave(self) -> None:
        """Vote in the remaining comparisons after the loop was left, so that no rank waits for this one."""
        self._session.leave = lambda: None
        for name in ("start", "end") if self._start is None else ("end",):
            self._talk(name).comparison.pass_by()


class _Talk(threading.Thread):
    """One exchange: of all ranks at the start of an iteration, of the ranks that share samples at its end."""

    def __init__(self, posts: Postings, name: str, iteration: int, watch: Watch, session: Session) -> None:
        super().__init__(name="scidata-agree", daemon=True)
        self._posts, self._iteration, self._watch, self._session = posts, iteration, watch, session
        self._ranks = watch.ranks if name == "start" else watch.sharing
        self._where = "the first batch of" if name == "start" else "the end of"
        key, past = (f"agree/{number}/{name}/{self._ranks[0]}" for number in (iteration, iteration - 1))
        self.comparison = Comparison(posts, key, watch.rank, self._ranks, differing, past)
        self._is_alone = False  # the loop has gone on
        self._record: Record[str] = {}
        #: What it has come to its end with.
        self.error: Exception | None = None

    def begin(self, record: Record[str]) -> None:
        self._record = record
        self.start()

    def go_on_alone(self) -> None:
        """Stop waiting; a later error is raised in the loop's next step."""
        self._is_alone = True
        self._session.go_on_alone()
        if not self._session.is_aligned:
            call_with_timeout(_ASK_SECONDS, self.comparison.blank)
        if not _alone:
            groups.add_explainer(_reason)
        _alone[:] = [weakref.ref(self)]

    def reason(self) -> Exception | None:
        """Return the error about a rank that has not come yet; None if all have."""
        missing = call_with_timeout(_ASK_SECONDS, lambda: self._missing(self._ranks))
        return missing if self.is_alive() else None

    def run(self) -> None:
        leaders = {"loader": self._ranks[0], "data": self._watch.leader}
        try:
            if reports := self.comparison.run(self._record, leaders, self._wait_for):
                self.error = ConfigError(_in_words(reports))
                # where loops do not wait for this, but for a batch, or for the last of them to come
                self._session.found(str(self.error), tell=self.comparison.is_last)
            self._session.meeting.is_complete = True
        except Exception as e:
            if isinstance(e, SciDataError) or not self.comparison.has_voted:  # else the store has ended with rank 0
                self.error = e
            with contextlib.suppress(Exception):
                if self._is_of_no_use:
                    self.comparison.pass_by()
                else:
                    self.comparison.withdraw()

    @property
    def _is_of_no_use(self) -> bool:
        return self._session.has_ended or not self._session.is_aligned

    def _wait_for(self, key: str, whose: Sequence[int]) -> None:
        told = False

        def look(waited: float) -> None:
            nonlocal told
            if waited > self._posts.timeout or self._is_of_no_use:
                raise self._missing(whose)
            if not told and waited > _LATE_SECONDS and (self._iteration == 1 or not self._is_alone):
                told, how = True, "goes on" if self._is_alone else "waits"
                _log.warning("rank %d %s: %s", self._watch.rank, how, self._missing(whose))

        self._posts.wait([key], look=look, pauses=_PAUSES, num_ranks=len(self._ranks))
        if not self._session.is_aligned:
            raise self._missing(whose)

    def _missing(self, whose: Sequence[int]) -> RankFailedError:
        missing = self.comparison.first_missing(whose)
        text = (
            f"rank {missing} has not come to {self._where} iteration {self._iteration} of the loader, which all "
            f"ranks iterate alike; see its own output, or pass watch=False where rank {self._watch.rank} iterates alone"
        )
        return RankFailedError(text, missing)


_alone: list[weakref.ref[_Talk]] = []  # the latest that its loop has not waited for


def _reason() -> Exception | None:
    """Explain a collective's timeout by a rank that has not entered this rank's loop."""
    talk = _alone[0]()
    return None if talk is None else talk.reason()


def _in_words(reports: Sequence[Report]) -> str:
    texts = []
    for part in ("loader", "data"):
        everyone: dict[int, dict[str, str]] = {}
        for report in (each[part] for each in reports if part in each):
            for rank, at in zip(report["ranks"], (0, 1), strict=True):
                everyone.setdefault(rank, {}).update({name: both[at] for name, both in report["values"].items()})
        if not everyone:
            continue
        if part == "loader":
            texts.append(f"ranks disagree about the loader: {differences(everyone)}; give every rank the same")
        else:
            first, *_, last = sorted(everyone)
            texts.append(
                f"ranks {first} and {last}, which share their samples, read different ones: {differences(everyone)}; "
                "give both the same data set and arguments, and a sampler whose order does not depend on the rank, "
                "such as scidata.DistributedSampler; or watch=False, where one rank iterates by itself"
            )
    return "; ".join(texts)
