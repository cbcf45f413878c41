"""A training script as a user writes one, in which one rank meets a fault: ``rank_faults.py`` starts it."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import scidata

FAULT, WHERE, DATA, FOLDER = (os.environ[f"FAULT_{name}"] for name in ("KIND", "WHERE", "DATA", "FOLDER"))
VICTIM, AT = int(os.environ["FAULT_VICTIM"]), int(os.environ["FAULT_STEP"])
IS_VICTIM = int(os.environ["RANK"]) == VICTIM
# a worker process takes long to begin where the machine is busy
TIMEOUT = 60.0 if FAULT.startswith("worker") else 3.0
READS = ("transform", "worker transform", "chunk", "worker killed")  # what fails before the loop has the batch
IN_COLLECTIVE = ("collective", "shard op", "handle")


def mark() -> None:
    """Say when the fault happens, or the reading that it is met in begins."""
    Path(FOLDER, "victim").write_text(str(os.getpid()))
    Path(FOLDER, "fault").write_text(repr(time.time()))


def local_transform(part):
    """Run in reader threads, or in worker processes."""
    index = int(part["u"].reshape(-1)[0]) - 1
    if IS_VICTIM and index == AT and FAULT in ("transform", "worker transform", "worker killed"):
        if WHERE in IN_COLLECTIVE:
            time.sleep(0.5)  # the others are in the step
        if FAULT == "worker killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(f"sample {index} makes no sense")
    if not IS_VICTIM and index == AT + 1 and WHERE == "next":
        time.sleep(8.0)  # the others wait for their data
    return part


def fault() -> None:
    """Do to this process what the case asks for."""
    mark()
    if FAULT == "raise":
        raise ValueError("the model is wrong")
    if FAULT in ("exit 0", "exit 3"):
        sys.exit(int(FAULT[-1]))
    signals = {"interrupt": signal.SIGINT, "kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    os.kill(os.getpid(), signals[FAULT])
    time.sleep(0.1)  # until Python has run the handler


def compute(u) -> None:
    """Do what a step of the case does; where the others are in a collective, the fault comes while they are."""
    if WHERE == "before":
        Path(FOLDER, f"in{dist.get_rank()}").touch()
    if WHERE in ("collective", "before"):
        dist.all_reduce(u.to_local().sum())
    elif WHERE == "handle":
        dist.all_reduce(u.to_local().sum(), async_op=True).wait()
    elif WHERE == "shard op":
        (u - u.mean()).square().mean()
    else:
        time.sleep(0.2)


def main() -> None:
    """Train."""
    torch.set_num_threads(1)
    is_early = WHERE == "before"  # the first batch
    patience = TIMEOUT if is_early and FAULT == "stop" else 60.0
    mesh = scidata.init_mesh(domain=int(os.environ["WORLD_SIZE"]), device="cpu", timeout=patience)
    if is_early and IS_VICTIM:
        while len(list(Path(FOLDER).glob("in*"))) < dist.get_world_size() - 1:  # until the others wait for it
            time.sleep(0.05)
        time.sleep(0.6)
        if FAULT == "falls off":
            mark()
            return
        fault()
    ds = scidata.open_dataset(DATA, mesh, shard={"lat": "domain"}, sample_dim="time", local_transform=local_transform)
    workers = "process" if FAULT.startswith("worker") and IS_VICTIM else "thread"
    loader = scidata.DataLoader(
        ds, batch_size=None, num_workers=1, workers=workers, timeout=0.0 if is_early else TIMEOUT
    )
    for step, sample in enumerate(loader):
        if step == AT and IS_VICTIM and FAULT not in READS:
            time.sleep(0.05 if WHERE == "compute" else 0.6)
            if FAULT == "falls off":
                mark()
                break
            fault()
        compute(sample["u"])
        if step == 0:
            dist.barrier()  # a worker process takes seconds to begin
        if step == AT - 1 and IS_VICTIM and FAULT in READS:
            mark()


if __name__ == "__main__":
    main()
