"""``scidata demo``: writes data, shows the plan, starts ranks with torchrun, and reports their results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from scidata.cli.arguments import usage_error
from scidata.cli.commands.plan import as_plain, print_plan
from scidata.cli.output import console, human_bytes, make_table, print_json
from scidata.cli.progress import doing
from scidata.core.options import ReadOptions
from scidata.errors import LauncherError, OutputError
from scidata.grids.plan import GridPlan, plan_grid
from scidata.grids.reader import GridReader
from scidata.testing.grids import make_grid

_ROWS, _COLUMNS = 121, 240
#: Mean and spread of each field; the model takes them to normalise.
FIELDS = {"u": (5.0, 10.0), "v": (0.0, 5.0), "t": (260.0, 20.0)}
PATCH = 8  # rows and columns of a patch of the model
#: What is read of each sample: input, and the target six hours later, on rows that fill patches; and how it is split.
READ: dict[str, Any] = {
    "fields": list(FIELDS),
    "steps": (0, 1),
    "isel": {"latitude": slice(0, _ROWS - _ROWS % PATCH)},
}
SPLIT: dict[str, Any] = {"shard": {"latitude": "domain"}, "align": PATCH}
TOLERANCE = 1e-12  # float64: one process and P ranks differ by rounding alone
_DEADLINE = 300.0  # seconds; a run takes a tenth of it
_GRACE = 40.0  # torchrun itself gives its ranks 30 s to end


def run_demo(*, ranks: int, steps: int, keep: str | None, as_json: bool) -> bool:
    """Run the demo and print it; return True if the ranks agree with one process."""
    if ranks > _ROWS // PATCH:
        raise usage_error("--ranks", f"{ranks}: there are {_ROWS // PATCH} rows of patches to share.")
    began = time.monotonic()
    with _folder(keep) as folder:
        path = os.path.join(folder, "weather.zarr")
        make_grid(path, num_times=16, num_lat=_ROWS, num_lon=_COLUMNS, chunks=(1, 3, 32, _COLUMNS))
        plan = _plan(path, ranks)
        if not as_json:
            size = sum(os.path.getsize(os.path.join(base, name)) for base, _, names in os.walk(path) for name in names)
            console().print(f"wrote synthetic weather: {human_bytes(size)} in {path}", soft_wrap=True)
            print_plan(plan, path, every_rank=True)
            console().print()
            console().print(f"training a ViT in float64 on {ranks} ranks (torchrun, gloo)", style="bold")
        doing("training")
        results = _launch(path, folder, ranks, steps, echo=not as_json)
    report = _report(as_plain(plan, path, None, []), results, seconds=time.monotonic() - began)
    if as_json:
        print_json(report)
    else:
        _print(report, keep)
    return bool(report["agrees"])


@contextmanager
def _folder(keep: str | None) -> Iterator[str]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="scidata-demo-") as folder:
            yield folder
        return
    if os.path.exists(keep) and (not os.path.isdir(keep) or os.listdir(keep)):
        raise OutputError(f"{keep}: exists and is not an empty folder; name another for --keep")
    os.makedirs(keep, exist_ok=True)
    yield keep


def _launch(path: str, folder: str, ranks: int, steps: int, *, echo: bool) -> list[dict[str, Any]]:
    """Start the ranks, pass on their output, and return the report of each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "scidata.cli.commands.demo_rank", path, folder, str(ranks), str(steps)]
    # one thread each: ranks share the machine, and torchrun warns at length if the number is not set
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    log_path = os.path.join(folder, "torchrun.log")
    with (
        open(log_path, "w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process,
    ):
        expired = threading.Event()

        def end() -> None:
            expired.set()
            _stop(process)

        def terminated(*_: object) -> None:
            raise SystemExit(128 + signal.SIGTERM)  # so that the ranks are ended too

        previous = signal.signal(signal.SIGTERM, terminated)
        timer = threading.Timer(_DEADLINE, end)
        timer.daemon = True
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if echo and line.startswith("step "):
                    console().print(line.rstrip(), soft_wrap=True)
            code = process.wait()
        except BaseException:
            _stop(process)
            raise
        finally:
            timer.cancel()
            signal.signal(signal.SIGTERM, previous)
    if expired.is_set():
        raise LauncherError(f"the ranks did not end within {_DEADLINE:.0f} s and were stopped{_reason(folder)}")
    if code != 0:
        raise LauncherError(f"the ranks failed (exit code {code}){_reason(folder)}")
    results = []
    for rank in range(ranks):
        with open(os.path.join(folder, f"rank{rank}.json")) as f:
            results.append(json.load(f))
    return results


def _stop(process: subprocess.Popen[str]) -> None:
    """Let torchrun end its ranks; end it by force if it does not."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
        return
    process.kill()


def _reason(folder: str) -> str:
    """Return the first rank's own error, or the last line of torchrun's report."""
    errors = sorted(name for name in os.listdir(folder) if name.startswith("error"))
    errors.sort(key=lambda name: os.path.getmtime(os.path.join(folder, name)))
    for name in [*errors, "torchrun.log"]:
        with open(os.path.join(folder, name)) as f:
            lines = [line.strip() for line in f if line.strip()]
        if lines:
            return f": {lines[-1]}"
    return ""


def _plan(path: str, ranks: int) -> GridPlan:
    options = ReadOptions(**READ, **SPLIT, dtype="float64", num_threads=1)
    return plan_grid(GridReader(path, options, axis_sizes={"domain": ranks}))


def _report(plan: Mapping[str, object], results: list[dict[str, Any]], *, seconds: float) -> dict[str, Any]:
    first = results[0]
    differences = {"loss": first["loss_difference"], "gradient": first["gradient_difference"]}
    return {
        "plan": plan,
        "samples": first["order"],
        "losses": first["losses"],
        "ranks": [{k: r[k] for k in ("rank", "rows", "bytes_read", "samples_read")} for r in results],
        "bytes_whole": first["bytes_whole"],
        "relative_difference": differences,
        "tolerance": TOLERANCE,
        "agrees": agrees(differences),
        "seconds": round(seconds, 1),
    }


def agrees(differences: Mapping[str, float]) -> bool:
    """Return True if ranks and one process computed the same; NaN never does."""
    return all(value <= TOLERANCE for value in differences.values())


def _print(report: dict[str, Any], keep: str | None) -> None:
    out = console()
    out.print()
    table = make_table(("rank", "latitude rows", "samples read", "bytes read", "whole samples hold", "share"))
    whole = report["bytes_whole"]
    steps = len(report["losses"])
    for rank in report["ranks"]:
        # reading ahead is not counted: a batch counts when it is handed out
        table.add_row(
            str(rank["rank"]),
            "{}:{}".format(*rank["rows"]),
            str(rank["samples_read"]),
            human_bytes(rank["bytes_read"]),
            human_bytes(whole),
            f"{rank['bytes_read'] / whole:.1%}",
        )
    out.print(table)
    difference = report["relative_difference"]
    out.print()
    out.print(f"against one process that reads whole samples, after {steps} steps, relative difference of the")
    out.print(f"  loss      {difference['loss']:.1e}")
    out.print(f"  gradient  {difference['gradient']:.1e}")
    if report["agrees"]:
        out.print(f"the same computation: both are below {TOLERANCE:.0e}", style="green")
    else:
        out.print(f"NOT the same computation: the limit is {TOLERANCE:.0e}", style="bold red")
    if keep is not None:
        out.print(f"data and results are kept in {keep}", soft_wrap=True)
