"""Small samples are read by threads ahead of the loop, or by the loop itself, whichever turns out to be faster.

Handing a sample from a thread to the loop takes some 0.1 ms, and more where both want Python's lock. A sample of a
megabyte is read in 0.2. So where reading is quick, a loop that does nothing meanwhile, or computes in Python, is better
off without threads, and one that waits for a device is not. Both are tried, a few steps each, and again from time to
time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

_SMALL = 0.002  # s: samples that take longer are left to threads, without a trial
_MATTERS = 0.02  # of a step: reads that take less are not worth a trial
_IDLE = 1.15  # times as long a step may take without threads where the loop does nothing that they could go beside
_BESIDE = 0.97  # ... and where it does: steps differ a little between trials, in doubt threads are taken
_TRIAL = (4, 16)  # steps: of threads that have just begun, and later
_SKIPPED = 3  # steps after a change, of which some were read the other way
_SETTLED = (64, 1024)  # steps between two trials: at first, when much is done for the first time, and at most


class OwnReads:
    """Decides from step to step; kept from epoch to epoch."""

    def __init__(self) -> None:
        self.now = False
        self._steps: list[tuple[float, float, float]] = []  # seconds of each, of the loop itself in it, and of reading
        self._before: float | None = None  # seconds a step the other way, while this one is on trial
        self._skip = _SKIPPED
        self._wait = 0  # steps until the next trial
        self._trial = _TRIAL[0]
        self._settled = _SETTLED[0]  # steps without one after the next
        self._last: float | None = None

    def begin(self) -> None:
        """Begin an epoch."""
        self._last = None

    def step(self, *, asked: float, at: float, read: float, own: bool) -> None:
        """Take note that an item is handed over, which took ``read`` seconds to read."""
        last, self._last = self._last, at
        if own != self.now or last is None:
            return
        self._wait -= 1
        if self._skip:
            self._skip -= 1
            return
        self._steps.append((at - last, asked - last, read))
        if len(self._steps) == self._trial:  # medians of each step would take as long as a tenth of a small read
            steps, loops, reads = zip(*self._steps, strict=True)
            self._steps.clear()
            self._trial = _TRIAL[1]
            self._judge(_middle(steps), statistics.median(loops), statistics.median(reads))

    def _judge(self, step: float, loop: float, read: float) -> None:
        """Continue, switch sides, or begin a trial, by the seconds of a step, of the loop's own work and of reading."""
        is_small = min(read, step) <= _SMALL  # threads in each other's way read slowly, several at once
        if self._before is not None:
            most = _IDLE if loop < read / 2 else _BESIDE
            ratio, self._before = step / self._before, None
            is_better = is_small and ratio < most if self.now else ratio < 1 / most
            self._settle(change=not is_better)
        elif self.now and not is_small:
            self._settle(change=True)
        elif self._wait <= 0 and is_small and read < _MATTERS * step:
            self._settle(change=False)
        elif self._wait <= 0 and is_small:
            self._change()
            self._before = step

    def _settle(self, *, change: bool) -> None:
        self._wait = self._settled
        self._settled = min(2 * self._settled, _SETTLED[1])
        if change:
            self._change()

    def _change(self) -> None:
        self.now = not self.now
        self._skip = _SKIPPED


def _middle(seconds: Sequence[float]) -> float:
    """Return the mean of the middle half; if two threads take turns, every other step is quick."""
    ordered, quarter = sorted(seconds), len(seconds) // 4
    return statistics.fmean(ordered[quarter : len(ordered) - quarter])
