"""All that is tried and measured on a machine with one GPU: ``python -m tests.gpu OUT.json``, in under ten minutes.

The tests of an accelerator; the share of a training step in which the device waits for the loader; bytes a second from
pinned host memory, beside a plain copy; what an operation on shards adds to torch's; the examples, compared with one
process, in bf16 and compiled. Writes one JSON, and prints the tables of the docs. ``--device sim`` takes the stand-in.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import scidata
from pipelines import era5_grid, flow_graph
from scidata.device_mesh.devices import accelerator
from scidata.testing import make_grid
from tests import sim_device
from tests.bench import shard_ops

ROOT = Path(__file__).parents[1]
#: Seconds that a child may take.
LIMIT = 300


def run(command: list[str], device: str, **more: str) -> dict[str, Any]:
    """Run Python in a child, which has the stand-in where that is the device; return how it ended."""
    began = time.perf_counter()
    if device == sim_device.NAME:
        start = "import sys, runpy; from tests import sim_device; sim_device.load(); sys.argv = sys.argv[1:]; "
        is_module, name = command[0] == "-m", command[1 if command[0] == "-m" else 0]
        how = f"runpy.run_{'module' if is_module else 'path'}({name!r}, run_name='__main__')"
        command = ["-c", start + how, name, *command[2 if is_module else 1 :]]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | more
    try:
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return {"ok": False, "seconds": LIMIT, "end": f"did not end in {LIMIT} s"}
    text = (done.stdout.strip() if done.returncode == 0 else "") or done.stderr.strip()
    took = time.perf_counter() - began
    return {
        "ok": done.returncode == 0,
        "seconds": round(took, 1),
        "end": "\n".join(text.splitlines()[-3:]) or "said nothing",
    }


# -- copies ------------------------------------------------------------------------------------------------------------


def seconds_of(function: Callable[[], Any], repeats: int = 5) -> float:
    """Median time of a call, until the device has done its work."""
    found = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        function()
        torch.accelerator.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def copies(folder: Path, device: str, shape: tuple[int, int]) -> dict[str, float]:
    """Gigabytes a second to the device: of a plain copy from pinned memory, and of a loader's later epochs."""
    make_grid(
        folder / "large.zarr", num_times=8, num_levels=2, num_lat=shape[0], num_lon=shape[1], compressed=False,
        chunks=(1, 2, *shape),
    )  # fmt: skip
    ds = scidata.open_dataset(folder / "large.zarr")
    loader = scidata.DataLoader(ds, None, device=device, pin_memory=True)
    size = sum(x.nbytes for x in ds[0].values())
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    plain = seconds_of(lambda: target.copy_(pinned, non_blocking=True))
    epoch = seconds_of(lambda: [None for _ in loader])
    return {"sample, MB": size / 1e6, "plain copy, GB/s": size / plain / 1e9, "loader, GB/s": 8 * size / epoch / 1e9}


def waiting(folder: Path, device: str, width: int) -> dict[str, float]:
    """Milliseconds of a step on one sample that stays, and on a loader's: the rest is what the device waits."""
    make_grid(folder / "steps.zarr", num_times=32, num_levels=4, num_lat=180, num_lon=360, chunks=(1, 4, 180, 360))
    ds = scidata.open_dataset(folder / "steps.zarr", fields=["t"])
    loader = scidata.DataLoader(ds, None, device=device, pin_memory=True)
    net = nn.Sequential(nn.Conv2d(4, width, 3, padding=1), nn.GELU(), nn.Conv2d(width, 4, 3, padding=1)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        x = x.reshape(-1, 4, *x.shape[-2:])
        F.mse_loss(net(x), x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    kept = next(iter(loader))["t"]
    fixed = seconds_of(lambda: [step(kept) for _ in range(32)])
    fed = seconds_of(lambda: [step(batch["t"]) for batch in loader])
    share = 100 * max(0.0, 1 - fixed / fed)
    return {"step, ms": fixed / 32e-3, "fed by a loader, ms": fed / 32e-3, "device waits, %": share}


# -- examples ----------------------------------------------------------------------------------------------------------


def examples(folder: Path, device: str) -> dict[str, dict[str, Any]]:
    """Run the examples on made-up data: compared with one process, and compiled."""
    era5_grid.make(folder / "era5.zarr")
    flow_graph.make(folder / "raw")
    flow_graph.convert(folder / "raw", folder / "flow.store")
    scripts = {
        "ViT": ["examples/train_vit.py", "--data", str(folder / "era5.zarr")],
        "MeshGraphNet": ["examples/train_gnn.py", "--data", str(folder / "flow.store")],
    }
    ways = {
        "checked, float64": ["--check", "--dtype", "float64"],
        "bf16": ["--amp", "bf16"],
        "compiled": ["--compile", *(["aot_eager"] if device == sim_device.NAME else [])],
    }
    found = {}
    for name, script in scripts.items():
        for way, more in ways.items():
            out = ["--out", str(folder / f"{name} {way}"), "--device", device, "--max-steps", "8"]
            found[f"{name}, {way}"] = run([*script, *more, *out], device)
    return found


def main() -> None:
    """Run all, write the JSON and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a JSON file")
    parser.add_argument("--device", default=accelerator(), help="default: the accelerator that torch finds")
    parser.add_argument("--small", action="store_true", help="small arrays, as the stand-in copies slowly")
    args = parser.parse_args()
    if args.device == sim_device.NAME:
        sim_device.load()
    if args.device is None or accelerator() != args.device:
        sys.exit(f"torch finds no accelerator {args.device or ''} here; --device {sim_device.NAME} takes the stand-in")
    warnings.simplefilter("ignore")
    began, found = time.perf_counter(), {}
    properties = getattr(torch.get_device_module(args.device), "get_device_properties", None)
    found["machine"] = {
        "device": str(properties(0).name) if properties else args.device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "scidata": scidata.__version__,
    }
    plugin = ["-p", "tests.sim_device"] if args.device == sim_device.NAME else []
    found["tests"] = run(["-m", "pytest", "-q", *plugin, "-n", "0", "tests/accelerator"], "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found["copies"] = copies(folder, args.device, (90, 180) if args.small else (721, 1440))
        found["waiting"] = waiting(folder, args.device, 4 if args.small else 256)
        found["operations, µs: torch, scidata"] = shard_ops.measure(200, 5, args.device)
        found["examples"] = examples(folder, args.device)
    found["seconds"] = round(time.perf_counter() - began, 1)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    sys.exit(not all(each["ok"] for each in (found["tests"], *found["examples"].values())))


def table(found: dict[str, Any]) -> str:
    """Return what was found, as the docs print it."""
    machine = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    lines = [
        machine,
        "",
        "| | |",
        "|---|---:|",
        f"| tests of an accelerator | {found['tests']['end'].splitlines()[-1]} |",
    ]
    lines += [f"| {name} | {value:.1f} |" for name, value in (found["copies"] | found["waiting"]).items()]
    for name, (plain, ours, *_) in found["operations, µs: torch, scidata"].items():
        lines.append(f"| {name}, µs of torch, of scidata | {plain:.1f}, {ours:.1f} |")
    for name, ended in found["examples"].items():
        lines.append(f"| {name} | {'passed' if ended['ok'] else ended['end'].splitlines()[-1]}, {ended['seconds']} s |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
