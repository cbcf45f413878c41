"""How ranks end when one of them meets a fault: every kind of fault, in every place, counted.

    python -m tests.faults.rank_faults --times 20
    python -m tests.faults.rank_faults --torchrun --ranks 3

Each run starts 2, 3 or 4 ranks of ``training.py``, lets one of them meet a fault, and sees how all of them end. The
ranks are forked from this process, which has torch loaded, and end as any interpreter does; every ``--fresh``-th run
starts them with ``python training.py``, and with ``--torchrun`` that starts all. Prints a table of cases and what was
amiss; exits with 1 where anything was.

What must hold: all ranks end within 2 s of the fault (of ``timeout=`` for a stopped rank, which is killed at the end);
the others with code 1 and one traceback, of the ``RankFailedError`` that names the rank, its step and what it said;
the rank with Python's code and its own error, or its signal; nobody by SIGABRT, nobody with a word of ``terminate``.
torchrun ends the others by SIGTERM as soon as one has failed: who was ended so may have said nothing, and the rank is
what torchrun calls the root cause.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.ports import free_port

SCRIPT = Path(__file__).with_name("training.py")
FAULTS = {  # what the others say of it, behind "rank <r>"
    "raise": r" failed in step {at}: ValueError: the model is wrong",
    "interrupt": r" failed in step {at}: KeyboardInterrupt",
    "kill": r" \(process \d+ on \S+\) has died, without a word, in step {at};",
    "stop": r" \(process \d+ on \S+\) has given no sign of life .*: its process is stopped, in step {at};",
    "exit 0": r" has left: its script has ended, without an error, in step {at}",
    "exit 3": r" has left: its script has ended, without an error, in step {at}",
    "falls off": r" has left: its script has ended, without an error, in step {at}",
    "transform": r" failed in step {at}: ValueError: sample {at} makes no sense",
    "worker transform": r" failed in step {at}: ValueError: sample {at} makes no sense",
    "chunk": r" failed in step {at}: scidata\.errors\.\w+: .*",
    "worker killed": r" failed in step {at}: scidata\.errors\.WorkerDiedError: worker process",
}
ENDS = ("raise", "interrupt", "kill", "stop", "exit 0", "exit 3", "falls off")  # what may come before the first batch
CODES = {"interrupt": -signal.SIGINT, "kill": -signal.SIGKILL, "exit 0": 0, "exit 3": 3, "falls off": 0}
PLACES = ("collective", "shard op", "next", "compute", "before")
AT = 4  # the step of the fault
PATIENCE = 3.0  # s, the script's timeout=
LONGEST = 60.0  # s, then a run is killed, and is a miss


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    fault: str
    place: str
    num_ranks: int
    victim: int
    fresh: bool
    torchrun: bool = False


@dataclass(kw_only=True)
class Rank:
    """A process, and how it has ended."""

    pid: int
    error: Path
    code: int | None = None
    ended: float = 0.0


@dataclass
class Outcome:
    """What was amiss in a run; how long after the fault the last of the others had said so, and the last had ended.

    Between the two lies the interpreter's end.
    """

    misses: list[str] = field(default_factory=list)
    seconds: float = 0.0
    said: float = 0.0


# -- data --------------------------------------------------------------------------------------------------------


def write_data(folder: Path, num_times: int = 40) -> None:
    """Write a grid of 12 rows, a chunk each, of the sample's number and one: zeros would not be written."""
    import numpy as np
    import zarr

    values = np.broadcast_to(np.arange(1, num_times + 1, dtype=np.float32)[:, None, None], (num_times, 12, 6))
    group = zarr.open_group(folder, mode="w", zarr_format=3)
    array = group.create_array(
        "u", shape=values.shape, chunks=(1, 1, 6), dtype="f4", compressors=None, dimension_names=("time", "lat", "lon")
    )
    array[:] = values


def damaged(source: Path, folder: Path, case: Case) -> Path:
    """Return data of which the rank's first chunk of the step is too short."""
    copy = folder / "damaged"
    subprocess.run(["cp", "-r", str(source), str(copy)], check=True)
    row = case.victim * (12 // case.num_ranks)
    with open(copy / "u" / "c" / str(AT) / str(row) / "0", "r+b") as file:
        file.truncate(7)
    return copy


# -- running -----------------------------------------------------------------------------------------------------


class InRankError(Exception):
    """This process is a rank now."""


@contextlib.contextmanager
def removed_at_the_end() -> Iterator[Path]:
    """Make a folder, which is removed by the process that has made it."""
    folder, owner = Path(tempfile.mkdtemp(prefix="faults-")), os.getpid()
    try:
        yield folder
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder)


def run(case: Case, data: Path, limit: float) -> Outcome:
    """Run one case; raises InRankError in the processes that it forks."""
    with removed_at_the_end() as folder:
        if case.fault == "chunk":
            data = damaged(data, folder, case)
        port = free_port()
        environ = {"WORLD_SIZE": case.num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environ |= {"FAULT_KIND": case.fault, "FAULT_WHERE": case.place, "FAULT_VICTIM": case.victim}
        environ |= {"FAULT_STEP": AT, "FAULT_DATA": data, "FAULT_FOLDER": folder}
        mark = folder / "fault"
        if case.torchrun:
            ranks, cause = begin_torchrun(case, {key: str(value) for key, value in environ.items()}, folder)
            outcome = judge(case, ranks, float(mark.read_text()) if mark.exists() else 0.0, limit)
            if CODES.get(case.fault, 1) and case.fault != "stop" and cause != case.victim:
                outcome.misses.append(f"torchrun: the root cause is rank {cause}")
            return outcome
        ranks = []
        for number in range(case.num_ranks):
            own = {key: str(value) for key, value in {**environ, "RANK": number, "LOCAL_RANK": number}.items()}
            ranks.append(begin(case, own, folder / f"stderr{number}"))
        wait_for(case, ranks)
        return judge(case, ranks, float(mark.read_text()) if mark.exists() else 0.0, limit)


def begin(case: Case, environ: dict[str, str], error: Path) -> Rank:
    """Start a rank whose stderr goes to a file."""
    if case.fresh:
        root = str(SCRIPT.parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        with open(error, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT)], env=os.environ | environ | {"PYTHONPATH": path}, stderr=file
            )
        process.returncode = 0  # wait_for() sees to its end
        return Rank(pid=process.pid, error=error)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(error, os.O_WRONLY | os.O_CREAT, 0o600), 2)
        os.environ.update(environ)
        raise InRankError
    return Rank(pid=pid, error=error)


def begin_torchrun(case: Case, environ: dict[str, str], folder: Path) -> tuple[list[Rank], int | None]:
    """Have torchrun start the ranks, and wait for it; return how they have ended, and which it calls the cause."""
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del environ[name]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.num_ranks}"]
    command += [f"--log-dir={folder / 'logs'}", "--redirects=2", str(SCRIPT)]
    path = os.pathsep.join([str(SCRIPT.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    with open(folder / "torchrun", "w+b") as said:
        agent = subprocess.Popen(command, env=os.environ | environ | {"PYTHONPATH": path}, stderr=said, stdout=said)
        begun, mark = time.time(), folder / "fault"
        while agent.poll() is None:
            over = PATIENCE + 4.0 if mark.exists() and case.fault == "stop" else LONGEST
            if time.time() - (mark.stat().st_mtime if mark.exists() else begun) > over:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int((folder / "victim").read_text()) if mark.exists() else agent.pid, signal.SIGKILL)
            time.sleep(0.05)
    text = (folder / "torchrun").read_text(errors="replace")
    codes = re.findall(r"rank +: (\d+) .*\n.*exitcode +: (-?\d+)", text)
    cause = re.search(r"Root Cause.*\n(?:.*\n)*?.*rank +: (\d+)", text)
    ranks = []
    for number in range(case.num_ranks):
        error = next((folder / "logs").glob(f"*/attempt_0/{number}/stderr.log"))
        ranks.append(Rank(pid=0, error=error, code=int(dict(codes).get(str(number), 0)), ended=error.stat().st_mtime))
    return ranks, int(cause[1]) if cause else None


def wait_for(case: Case, ranks: list[Rank]) -> None:
    """Wait until all have ended; a stopped one is killed when the others have."""
    deadline = time.time() + LONGEST
    while any(rank.code is None for rank in ranks):
        running = [number for number, rank in enumerate(ranks) if rank.code is None]
        if time.time() > deadline or (case.fault == "stop" and running == [case.victim]):
            for number in running:
                os.kill(ranks[number].pid, signal.SIGKILL)
        for number in running:
            pid, status = os.waitpid(ranks[number].pid, os.WNOHANG)
            if pid:
                ranks[number].code, ranks[number].ended = os.waitstatus_to_exitcode(status), time.time()
        time.sleep(0.01)


def judge(case: Case, ranks: list[Rank], fault: float, limit: float) -> Outcome:
    """See how the ranks have ended."""
    outcome = Outcome()
    expected_words = FAULTS[case.fault].format(at=AT)
    if case.place == "before":
        expected_words = re.sub(r",? in step \d+", "", expected_words)
    said = re.compile(f"rank {case.victim}" + expected_words)
    for number, rank in enumerate(ranks):
        text = rank.error.read_text(errors="replace")
        is_victim = number == case.victim
        expected = CODES.get(case.fault, 1) if is_victim else 1
        misses = []
        if is_victim and case.fault == "stop":
            continue
        if not is_victim and case.torchrun and rank.code == -signal.SIGTERM and "Traceback" not in text:
            continue
        if rank.code != expected and not (case.torchrun and rank.code == -signal.SIGTERM):
            misses.append(f"code {rank.code}")
        if "terminate called" in text:
            misses.append("terminate called")
        num_tracebacks = len(re.findall(r"^(?:\[rank\d+\]: )?Traceback \(most recent call last\)", text, re.MULTILINE))
        if not is_victim and num_tracebacks != 1:
            misses.append(f"{num_tracebacks} tracebacks")
        if is_victim and ("RankFailedError" in text or "During handling" in text or "Exception ignored" in text):
            misses.append("more than its own traceback")
        last = [line for line in text.splitlines() if re.match(r"(\[rank\d+\]: )?[\w.]*Error: ", line)]
        if not is_victim and not (last and "RankFailedError" in last[-1] and said.search(last[-1])):
            misses.append(f"says {last[-1][:300] if last else text[-300:]!r}")
        seconds = rank.ended - (fault or rank.ended)
        outcome.seconds = max(outcome.seconds, seconds)
        if fault and not is_victim:
            outcome.said = max(outcome.said, rank.error.stat().st_mtime - fault)
        if seconds > limit + (PATIENCE if case.fault == "stop" else 0.5 if case.place in PLACES[:2] else 0.0):
            misses.append(f"ended after {seconds:.1f} s")
        outcome.misses += [f"{'victim' if is_victim else 'other'}: {miss}" for miss in misses]
    if not fault:
        outcome.misses = ["no fault: " + ranks[case.victim].error.read_text(errors="replace")[-500:]]
    return outcome


# -- all cases ---------------------------------------------------------------------------------------------------


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases, in an order of their own each time round."""
    rng = random.Random(options.seed)
    count = 0
    for _ in range(options.times):
        kinds = list(itertools.product(options.faults, options.places, options.ranks))
        kinds = [kind for kind in kinds if kind[1] != "before" or kind[0] in ENDS]
        rng.shuffle(kinds)
        for fault, place, num_ranks in kinds:
            count += 1
            fresh = bool(options.fresh) and count % options.fresh == 0
            # a worker process is spawned from the script's own file, as a script's is
            victim = rng.randrange(num_ranks)
            yield Case(
                fault=fault, place=place, num_ranks=num_ranks, victim=victim, fresh=fresh, torchrun=options.torchrun
            )


def show(outcomes: dict[tuple[str, str, int], list[Outcome]], width: int = 16) -> bool:
    """Print the table; return whether nothing was amiss."""
    print(f"\n{'fault':{width}} {'place':11} ranks  runs  amiss  said within  ended within")
    for (fault, place, num_ranks), found in sorted(outcomes.items()):
        amiss = [outcome for outcome in found if outcome.misses]
        said, ended = max(outcome.said for outcome in found), max(outcome.seconds for outcome in found)
        counts = f"{num_ranks:5} {len(found):5} {len(amiss):6}"
        print(f"{fault:{width}} {place:11} {counts} {said:9.1f} s {ended:11.1f} s")
        for miss, count in Counter(miss for outcome in amiss for miss in outcome.misses).items():
            print(f"{'':{width}} {count} x {miss}")
    total = sum(len(found) for found in outcomes.values())
    num_amiss = sum(bool(outcome.misses) for found in outcomes.values() for outcome in found)
    print(f"\n{total} runs, {num_amiss} amiss")
    return num_amiss == 0


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", type=int, default=10, help="every so manieth run in fresh interpreters; 0: none")
    parser.add_argument("--torchrun", action="store_true", help="have torchrun start the ranks")
    parser.add_argument("--limit", type=float, default=2.0, help="seconds from the fault to the end of the last rank")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so many; 0: when all is done")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--places", nargs="+", choices=(*PLACES, "handle"), default=list(PLACES))
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


def main() -> int:
    """Run all cases."""
    options = arguments()
    sys.path.insert(0, str(SCRIPT.parents[2]))
    with contextlib.suppress(ImportError):
        import torch.distributed.tensor  # noqa: F401  # before the ranks are forked

        import scidata.loader.data_loader  # noqa: F401
    gc.freeze()  # or each rank's end copies, and looks through, all that this process has loaded
    outcomes: dict[tuple[str, str, int], list[Outcome]] = {}
    began = time.time()
    with removed_at_the_end() as folder:
        write_data(folder / "grid.zarr")
        for case in cases(options):
            outcome = run(case, folder / "grid.zarr", options.limit)
            outcomes.setdefault((case.fault, case.place, case.num_ranks), []).append(outcome)
            if options.verbose or outcome.misses:
                times = f"{time.time() - began:6.1f} s {outcome.said:5.2f} s {outcome.seconds:5.2f} s"
                print(f"{times} {case} {outcome.misses}", flush=True)
            if options.minutes and time.time() - began > 60 * options.minutes:
                break
    return 0 if show(outcomes) else 1


if __name__ == "__main__":
    try:
        code = main()
    except InRankError:  # and out of all that main() holds
        code = -1
    if code >= 0:
        sys.exit(code)
    sys.argv = [str(SCRIPT)]
    runpy.run_path(str(SCRIPT), run_name="__main__")
