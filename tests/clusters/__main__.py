"""Run the scenarios on hosts of their own: ``python -m tests.clusters [NAME ...]``. As root; see README.md."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

import scidata
from scidata.testing import make_grid
from tests.clusters import jobs, networks
from tests.clusters.hosts import adopt_orphans, hosts, reap
from tests.clusters.lab import NUM_SAMPLES, Lab
from tests.clusters.slurm import NEEDED, slurm

_PACKAGES = "apt-get install slurmctld slurmd slurm-client munge iproute2 openmpi-bin"
SCENARIOS = {scenario.__name__: scenario for scenario in (*jobs.ALL, *networks.ALL)}


def main() -> int:
    """Run scenarios one after the other; return how many failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.clusters", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*SCENARIOS, []], help="default: all")
    parser.add_argument("--keep", action="store_true", help="keep the folder of logs")
    args = parser.parse_args()
    missing = [name for name in (*NEEDED, "nsenter", "unshare", "ip", "mpirun") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        print(f"needs root and {', '.join(missing) or 'nothing else'}: {_PACKAGES}")
        return 2
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # after all has been removed
    print(f"# {_versions()}", flush=True)
    failed = []
    folder = Path(tempfile.mkdtemp(prefix="scidata-clusters-"))
    folder.chmod(0o755)
    make_grid(folder / "era5.zarr", num_times=NUM_SAMPLES, chunks=(1, 3, 19, 24))
    (folder / "bin").mkdir()
    (folder / "bin/scidata").write_text(f'#!/bin/bash\nexec {sys.executable} -m scidata "$@"\n')
    (folder / "bin/scidata").chmod(0o755)
    os.environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    with hosts(folder) as (controller, nodes), slurm(folder, controller, nodes) as cluster:
        lab = Lab(folder=folder, controller=controller, nodes=nodes, slurm=cluster)
        for name in args.names or SCENARIOS:
            began = time.monotonic()
            try:
                result = f"ok      {name}: {SCENARIOS[name](lab)}"
            except Exception:
                failed.append(name)
                result = f"FAILED  {name}: {traceback.format_exc()}"
            print(f"{time.monotonic() - began:5.0f} s  {result}", flush=True)
    reap()
    if args.keep or failed:
        print(f"# logs are in {folder}")
    else:
        shutil.rmtree(folder)
    print(f"# {len(args.names or SCENARIOS) - len(failed)} passed, {len(failed)} failed: {' '.join(failed) or 'none'}")
    return min(1, len(failed))


def _versions() -> str:
    found = [f"scidata {scidata.__version__}", f"torch {torch.__version__}", f"Python {sys.version.split()[0]}"]
    for command in ("slurmctld -V", "munged --version", "mpirun --version", "ip -V", "uname -r"):
        shown = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        found.append((shown.stdout or shown.stderr).splitlines()[0])
    return ", ".join(found)


if __name__ == "__main__":
    sys.exit(main())
