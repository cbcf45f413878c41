"""Scripts on ranks as a launcher starts them, forked from one Python that has torch and scidata loaded.

Each rank ends as any interpreter does. Its start takes 0.1 s of processor time, that of a fresh one 2.5 s.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.ports import free_port

__all__ = ["Ended", "run_script"]
_LONGEST = 120  # s, then a rank is ended by SIGALRM


class Ended(NamedTuple):
    """How a rank has ended: its exit code, what it has written to stdout and stderr, and when."""

    code: int
    said: str
    seconds: float


def run_script(folder: Path, script: str, num_ranks: int) -> list[Ended]:
    """Run a script in a folder, with the variables that torchrun sets for several ranks."""
    (folder / "script.py").write_text(script)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": num_ranks, "OMP_NUM_THREADS": 1}
    common["LOCAL_WORLD_SIZE"] = num_ranks
    own = [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(num_ranks)] if num_ranks > 1 else [{}]
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps([str(folder), own]), file=server.stdin, flush=True)
    ended = json.loads(server.stdout.readline())
    return [Ended(code, (folder / f"said{rank}").read_text(), seconds) for rank, (code, seconds) in enumerate(ended)]


@functools.cache
def _server() -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.dist._scripts"],
        cwd=root, env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(server.communicate)  # ends with its input
    return server


def _serve() -> bool:
    """Fork ranks, and answer how they have ended; return True in a rank, and False at the end."""
    import torch.distributed.tensor  # noqa: F401 - before the ranks are forked

    import scidata.loader.data_loader  # noqa: F401

    gc.freeze()  # or each rank's end looks through, and so copies, all that is loaded
    for line in sys.stdin:
        folder, environs = json.loads(line)
        processes = []
        for rank, own in enumerate(environs):
            processes.append(os.fork())
            if processes[-1] == 0:
                _become(folder, rank, own)
                return True
        ended = {}
        while len(ended) < len(processes):
            process, status = os.wait()
            ended[process] = os.waitstatus_to_exitcode(status), time.monotonic()
        print(json.dumps([ended[process] for process in processes]), flush=True)
    return False


def _become(folder: str, rank: int, environ: dict[str, object]) -> None:
    signal.alarm(_LONGEST)
    os.environ.update({name: str(value) for name, value in environ.items()})
    os.chdir(folder)
    said = os.open(f"said{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, said), (2, said)):
        os.dup2(file, number)


if __name__ == "__main__" and _serve():
    sys.argv = ["script.py"]
    runpy.run_path("script.py", run_name="__main__")
