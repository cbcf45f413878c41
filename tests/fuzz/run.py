"""Cases in children with limits on time and memory, forked from a warm parent that has one thread."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.fuzz.judge import Verdict, differs, judge
from tests.fuzz.mutations import Damage, choose, damage
from tests.fuzz.probe import STEPS, Step, run_step, threads_left
from tests.fuzz.seeds import Seed, make_seeds

__all__ = ["Case", "Limits", "Outcome", "Runner", "prepare", "run_cases", "scratch"]

_DONE = "damage: "  # before what was done, in a child's log
_BATCH = 16  # cases of one child: a fork of a process that has torch costs as much as several cases


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one case.

    Attributes
    ----------
    seconds
        Until its child is killed.
    memory
        Bytes on top of what the warm parent has.
    disk
        Bytes of any one file that is written.
    """

    seconds: float = 20
    memory: int = 1536 << 20
    disk: int = 256 << 20


@dataclass(frozen=True, order=True)
class Case:
    """The ``number``-th case of a format: all that it is follows from this and the run's seed."""

    format: str
    number: int

    def __str__(self) -> str:
        return f"{self.format}:{self.number}"

    def rng(self, seed: int) -> np.random.Generator:
        """Return its random numbers."""
        return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(self.format.encode()), self.number]))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A case, what was done, and what came of it."""

    case: Case
    seed_name: str
    mutation: str
    text: str
    verdict: Verdict
    seconds: float


@contextlib.contextmanager
def scratch() -> Iterator[str]:
    """Make a folder for the files of a run, in memory where there is such a place."""
    shared = "/dev/shm" if os.path.isdir("/dev/shm") and os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="scidata-fuzz-", dir=shared, ignore_cleanup_errors=True) as folder:
        yield folder


# -- in a child --------------------------------------------------------------------------------------------------------


def _copy(folder: str, to: str) -> None:
    for here, _, names in os.walk(folder):
        there = os.path.join(to, os.path.relpath(here, folder))
        os.makedirs(there, exist_ok=True)
        for name in names:
            os.link(os.path.join(here, name), os.path.join(there, name))


def _limit(limits: Limits) -> None:
    with open("/proc/self/status", encoding="ascii") as file:
        used = int(next(line for line in file if line.startswith("VmData")).split()[1]) << 10
    # data, not address space: threads reserve much of that and use none of it
    resource.setrlimit(resource.RLIMIT_DATA, (used + limits.memory, used + limits.memory))
    sys.dont_write_bytecode = True  # a .pyc that is cut would be there for everybody
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.disk, limits.disk))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def _run_steps(root: str, seed: Seed, threads: int, rng: np.random.Generator | None = None) -> dict[str, Step]:
    """Use the files in every way, or in some where there are random numbers."""
    mine = {name: share for name, (kinds, share, _) in STEPS.items() if seed.kind in kinds}
    names = [name for name, share in mine.items() if rng is None or rng.random() < share]
    return {name: run_step(name, root, seed, threads=threads) for name in names}


class Runner:
    """What the parent knows before it forks, and what a child does with it."""

    def __init__(self, folder: str, seeds: Sequence[Seed], seed: int, limits: Limits, keep: str | None) -> None:
        self.folder, self.seed, self.limits, self.keep = folder, seed, limits, keep
        self.by_format: dict[str, list[Seed]] = {}
        for each in seeds:
            self.by_format.setdefault(each.format, []).append(each)
        self.sound: dict[str, dict[str, Step]] = {}

    def choose(self, case: Case) -> tuple[Seed, str, np.random.Generator]:
        """Return the seed and mutation of a case, and its further random numbers."""
        rng = case.rng(self.seed)
        seeds = self.by_format[case.format]
        seed = seeds[int(rng.integers(len(seeds)))]
        return seed, choose(rng), rng

    def run(self, case: Case) -> dict[str, Any]:
        """Run one case, here."""
        begun = time.monotonic()
        seed, mutation, rng = self.choose(case)
        home = os.path.join(self.folder, f"{case.format}-{case.number}")
        shutil.rmtree(home, ignore_errors=True)
        root = os.path.join(home, "data")
        _copy(seed.folder, root)
        threads = 1 if rng.random() < 0.8 else 3
        try:
            done = damage(root, seed, mutation, rng)
            if self.keep is not None:
                kept = os.path.join(self.keep, f"{case.format}-{case.number}")
                subprocess.run(["cp", "-aT", home, kept], check=True)  # pipes and links as they are
            print(f"{_DONE}{f'{seed.name}, {mutation}: {done.text}'!a}", file=sys.stderr, flush=True)
            before = os.fstat(2).st_size
            steps = _run_steps(root, seed, threads, rng)
            changed, errors = differs(root, seed), _errors(before)
            verdict = judge(seed, done, steps, self.sound[seed.name], changed=changed, errors=errors)
            if verdict.outcome != "failure" and (left := threads_left()):
                verdict = Verdict(outcome="failure", fault="hang", step="close", message=f"threads are left: {left}")
        finally:
            shutil.rmtree(home, ignore_errors=True)
        return {
            "text": ascii(f"{seed.name}, {mutation}: {done.text}"),
            "verdict": dataclasses.asdict(verdict),
            "seconds": time.monotonic() - begun,
        }

    def run_sound(self, seed: Seed) -> dict[str, Any]:
        """Use sound files: what that gives is what damaged ones are held against."""
        home = os.path.join(self.folder, f"sound-{seed.name.replace('/', '-')}")
        _copy(seed.folder, os.path.join(home, "data"))
        steps = _run_steps(os.path.join(home, "data"), seed, 1)
        shutil.rmtree(home)
        verdict = judge(seed, Damage(text="none", strict=True), steps, steps, changed=False, errors="")
        assert verdict.outcome == "right", f"{seed.name}: sound files are not read: {verdict}"
        unread = [name for name, step in steps.items() if step.error and (name, seed.kind) not in _NOT_READ]
        assert not unread, f"{seed.name}: sound files are not read: {[(n, steps[n]) for n in unread]}"
        return {"steps": {name: dataclasses.asdict(step) for name, step in steps.items()}, "modules": [*sys.modules]}


#: Raw meshes are read from a store; those that meshio reads are no grid either, and not inspected.
_NOT_READ = [("open", "mesh"), ("as grid", "mesh"), ("inspect", "mesh")]


def _errors(start: int) -> str:
    with open(f"/proc/self/fd/{2}", "rb") as file:
        file.seek(start)
        return file.read(100_000).decode("utf-8", "replace")


# -- in the parent -----------------------------------------------------------------------------------------------------


@dataclass
class _Child:
    pid: int
    pipe: int
    log: str
    todo: list[Any]
    alone: bool
    began: float
    buffer: bytes = b""
    answers: list[dict[str, Any]] = field(default_factory=list)


def _fork(work: Callable[[Any], dict[str, Any]], todo: list[Any], log: str, limits: Limits, alone: bool) -> _Child:
    assert threading.active_count() == 1, f"a fork after threads: {threading.enumerate()}"
    receive, send = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(send)
        os.set_blocking(receive, False)
        return _Child(pid=pid, pipe=receive, log=log, todo=todo, alone=alone, began=time.monotonic())
    try:
        os.close(receive)
        out = os.open(log, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        faulthandler.enable(out)
        _limit(limits)
        warnings.simplefilter("ignore")
        for item in todo:
            faulthandler.dump_traceback_later(max(0.1, limits.seconds - 1), file=out)
            answer = work(item)
            faulthandler.cancel_dump_traceback_later()
            _send(send, answer)
            if answer.get("verdict", {}).get("outcome") == "failure":
                break  # what it has broken is not the next one's
    except BaseException:
        _send(send, {"broken": traceback.format_exc()[-3000:]})
    os._exit(0)


def _send(pipe: int, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(pipe, data) :]


def _listen(child: _Child) -> bool:
    """Take what a child says; return whether it has ended."""
    while True:
        try:
            data = os.read(child.pipe, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            return True
        child.buffer += data
        *lines, child.buffer = child.buffer.split(b"\n")
        for line in lines:
            child.answers.append(json.loads(line))
            child.began = time.monotonic()


def _end(child: _Child) -> int:
    """Wait for a child that has ended or is to be ended; return its signal, or 0."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)
    status = os.waitpid(child.pid, 0)[1]
    os.close(child.pipe)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _where(log: str) -> tuple[str, str]:
    """Return the innermost frame of scidata that a dump of the stack shows, and the end of the log."""
    with open(log, encoding="utf-8", errors="replace") as file:
        text = file.read()
    done = re.findall(f"^{_DONE}.*$", text, re.M)[-1:]
    stack = text[text.rfind("most recent call first") :]
    frames = re.findall(r'File "([^"]+)", line \d+ in (\S+)', stack)
    ours = next((f"{f[f.rfind('scidata/') :]}:{name}" for f, name in frames if "/scidata/" in f), "")
    return ours, "\n".join([*done, text[-3000:]])


def _parallel(
    work: Callable[[Any], dict[str, Any]],
    todo: Sequence[Any],
    folder: str,
    limits: Limits,
    jobs: int,
    batch: int = _BATCH,
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Do the work in children, and yield each item with its answer, or ``{"died": …}``.

    An item whose child died, or which failed after others in the same child, is done again alone: what it comes to
    there counts, unless nothing comes of it alone.
    """
    queue = collections.deque(([*todo[i : i + batch]], False) for i in range(0, len(todo), batch))
    running: list[_Child] = []
    first: dict[Any, dict[str, Any]] = {}
    number = 0
    try:
        while queue or running:
            while queue and len(running) < jobs:
                items, alone = queue.popleft()
                number += 1
                running.append(_fork(work, items, os.path.join(folder, f"log-{number}"), limits, alone))
            select.select([child.pipe for child in running], [], [], 0.2)
            for child in list(running):
                ended = _listen(child)
                late = time.monotonic() - child.began > limits.seconds
                if not ended and not late:
                    continue
                running.remove(child)
                if late and not ended:
                    ended = _listen(child)
                yield from _finished(child, _end(child) if ended or late else 0, late and not ended, queue, first)
                with contextlib.suppress(OSError):
                    os.unlink(child.log)
    finally:
        for child in running:
            _end(child)


def _finished(
    child: _Child,
    signal_number: int,
    late: bool,
    queue: collections.deque[tuple[list[Any], bool]],
    first: dict[Any, dict[str, Any]],
) -> Iterator[tuple[Any, dict[str, Any]]]:
    answers = child.answers
    done = [a for a in answers if "broken" not in a]
    failed = done and done[-1].get("verdict", {}).get("outcome") == "failure"
    if len(done) < len(child.todo) and not failed:
        frame, log = _where(child.log)
        broken = answers[-1]["broken"] if len(answers) > len(done) else ""
        done.append({"died": {"late": late, "signal": signal_number, "frame": frame, "log": log, "broken": broken}})
        failed = True
    rest = child.todo[len(done) :]
    if rest:
        queue.appendleft((rest, False))
    for item, answer in zip(child.todo, done, strict=False):
        again = failed and answer is done[-1] and not child.alone and len(done) > 1
        if again and not late:  # where it hung is known
            first[str(item)] = answer
            queue.appendleft(([item], True))
        elif child.alone and not failed and str(item) in first:
            yield item, {**first[str(item)], "only": "after other cases"}
        else:
            yield item, answer


def _last_damage(log: str) -> str:
    found = re.findall(f"^{_DONE}(.*)$", log, re.M)
    return found[-1] if found else ""


def _verdict(answer: dict[str, Any], limits: Limits) -> Verdict:
    if "verdict" in answer:
        return Verdict(**answer["verdict"])
    died = answer["died"]
    if died["broken"]:
        fault, message = "fuzzer", died["broken"]
        if "MemoryError" in message:
            fault = "blow-up"
    elif died["late"]:
        fault, message = "hang", f"no end after {limits.seconds:g} s"
    else:
        number = died["signal"]
        fault = "crash"
        message = f"ended by {signal.Signals(number).name if number else 'an exit'}: {died['log'][-300:]}"
    return Verdict(outcome="failure", fault=fault, frame=died["frame"], message=message, trace=died["log"])


def _in_child(work: Callable[[], Any], folder: str) -> Any:
    """Return what a function gives in a child of its own, which may start threads."""
    limits = Limits(seconds=300, memory=8 << 30)
    (answer,) = (found for _, found in _parallel(lambda _: {"value": work()}, [0], folder, limits, 1))
    if "value" not in answer:
        raise RuntimeError(f"the seeds could not be made: {answer}")
    return answer["value"]


def prepare(folder: str, formats: tuple[str, ...], seed: int, limits: Limits, jobs: int, keep: str | None) -> Runner:
    """Make the sound files, and see what they give.

    Raises
    ------
    RuntimeError
        Sound files are not read.
    """
    torch.set_num_threads(1)
    os.mkdir(os.path.join(folder, "seeds"))
    made = _in_child(
        lambda: [dataclasses.asdict(s) for s in make_seeds(os.path.join(folder, "seeds"), formats)], folder
    )
    seeds = [
        Seed(**{**s, "targets": tuple(s["targets"]), "checked": tuple(tuple(x) for x in s["checked"])}) for s in made
    ]
    runner = Runner(folder, seeds, seed, limits, keep)
    modules: dict[str, None] = {}
    for number, answer in _parallel(
        lambda i: runner.run_sound(seeds[i]), range(len(seeds)), folder, Limits(seconds=120), jobs, batch=len(seeds)
    ):
        if "died" in answer:
            raise RuntimeError(f"{seeds[number].name}: sound files are not read: {answer['died']}")
        runner.sound[seeds[number].name] = {name: Step(**step) for name, step in answer["steps"].items()}
        modules.update(dict.fromkeys(answer["modules"]))
    for name in modules:  # what a child would import anew in each batch
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that children do not copy pages by counting references of what is there
    return runner


def run_cases(runner: Runner, cases: Sequence[Case], jobs: int) -> Iterator[Outcome]:
    """Run cases, in any order."""
    for case, answer in _parallel(runner.run, cases, runner.folder, runner.limits, jobs):
        seed, mutation, _ = runner.choose(case)
        shutil.rmtree(os.path.join(runner.folder, f"{case.format}-{case.number}"), ignore_errors=True)
        verdict = _verdict(answer, runner.limits)
        if "only" in answer:
            verdict = dataclasses.replace(verdict, message=f"({answer['only']}) {verdict.message}")
        yield Outcome(
            case=case,
            seed_name=seed.name,
            mutation=mutation,
            text=answer.get("text") or _last_damage(answer["died"]["log"]) or f"{seed.name}, {mutation}",
            verdict=verdict,
            seconds=answer.get("seconds", runner.limits.seconds),
        )
