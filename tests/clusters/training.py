"""A training as a user writes one: it saves after every step, and goes on from the last complete checkpoint.

``python training.py DATA OUT '{"domain": 2, "pause": 0.1}'``. Checkpoints hold the samples that all ranks have taken.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import scidata

DATA, OUT = sys.argv[1], Path(sys.argv[2])
OPTIONS = {"domain": 1, "pause": 0.0, "decode": "rank", "workers": "thread", "timeout": 60, "dies": None} | json.loads(
    sys.argv[3] if len(sys.argv) > 3 else "{}"
)


def main() -> None:
    """Train for one epoch."""
    began = time.monotonic()
    mesh = scidata.init_mesh(domain=OPTIONS["domain"], device="cpu", timeout=OPTIONS["timeout"])
    rank, num_dp = dist.get_rank(), mesh["dp"].size()
    say = lambda text: print(f"rank {rank} of {dist.get_world_size()} on {os.uname().nodename}: {text}", flush=True)  # noqa: E731
    say(f"joined after {time.monotonic() - began:.1f} s")
    shard = {"latitude": "domain"} if OPTIONS["domain"] > 1 else None
    ds = scidata.open_dataset(DATA, mesh, fields=["u"], shard=shard, decode=OPTIONS["decode"])
    torch.manual_seed(0)
    model = scidata.parallelize(torch.nn.Linear(24, 24).double(), mesh)
    loader = scidata.DataLoader(ds, 1, shuffle=True, workers=OPTIONS["workers"], num_workers=1)
    seen = torch.full((len(ds) + 8,), -1)  # the samples taken, in order
    last = max((path.parent for path in OUT.glob("step_*/.metadata")), default=None)
    if last is not None:
        dcp.load({"model": model.state_dict(), "loader": loader, "seen": seen}, checkpoint_id=str(last))
        say(f"goes on from {last.name}")
    loader.set_epoch(0)
    stopped, num = False, int((seen >= 0).sum())
    with scidata.StopSignal() as stop:
        for batch in loader:
            u = batch["u"].double()
            loss = (model(u) - u).square().mean()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(1e-3 * p.grad)
                    p.grad = None
            taken = [torch.zeros(1, dtype=torch.int64) for _ in range(num_dp)]
            dist.all_gather(taken, torch.tensor(batch.index), group=mesh.get_group("dp"))
            seen[num : num + num_dp] = torch.cat(taken)
            num += num_dp
            if OPTIONS["dies"] == [rank, num] and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            folder = OUT / f"step_{num:04d}"
            dcp.save({"model": model.state_dict(), "loader": loader, "seen": seen}, checkpoint_id=str(folder))
            if rank == 0:
                say(f"took {num}")
            time.sleep(OPTIONS["pause"])
            if stopped := stop.reached():
                break
    if stopped:
        say(f"stopped by a signal after {num}")
    weights = sum(p.sum().item() for p in model.parameters())
    if rank == 0 and not stopped:
        result = {"seen": seen[seen >= 0].tolist(), "weights": weights, "ranks": dist.get_world_size()}
        (OUT / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
