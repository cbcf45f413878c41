"""Stand-ins for ``sbatch`` and ``srun``: a job of one node that is this machine, with the variables that SLURM sets."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.ports import free_port


def sbatch(words: list[str]) -> int:
    """Run the script at once, as SLURM does later; its output goes to ``slurm.out``."""
    with open(words[0]) as file:
        options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", file.read(), re.M))
    job = {
        "SLURM_JOB_ID": "4711",
        "SLURM_NTASKS": options["ntasks-per-node"],
        "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_PROCID": "0",
        "ENVIRONMENT": "BATCH",
    }
    print(f"Submitted batch job {job['SLURM_JOB_ID']}", flush=True)
    with open("slurm.out", "w") as out:
        return subprocess.run(["bash", *words], env=os.environ | job, stdout=out, check=False).returncode


def srun(words: list[str]) -> int:
    """Start a process for each task."""
    while words[0].startswith("--"):
        words = words[1:]
    tasks = int(os.environ["SLURM_NTASKS"])
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_NODELIST": "localhost"}
    # the job's number gives a port, which has to be free
    step |= {"MASTER_PORT": str(free_port())} if tasks > 1 else {}
    started = [
        subprocess.Popen(words, env=os.environ | step | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)})
        for task in range(tasks)
    ]
    return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit({"sbatch": sbatch, "srun": srun}[sys.argv[1]](sys.argv[2:]))
