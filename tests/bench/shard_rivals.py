"""The same operations on scidata's ShardTensor and on PhysicsNeMo's: which are right, which raise, which are wrong.

Two ranks over gloo on CPU, float64, the sharded dim split 20 / 3. Each operation runs on both libraries through their
public interfaces, forward and backward, and is compared with one process on the whole tensors; then the forward is
timed where it gave anything: CPU time of rank 0, without gradients, median of rounds in which the libraries take
turns, partial sums added up. PhysicsNeMo registers its rules by itself only where CUDA is available; here its
``register_custom_ops()`` is called, which needs timm and torchvision. Where torchvision's compiled part does not load
(its wheel wants CUDA), its operators that are described on import are declared first; nothing here uses them.

    PYTHONPATH=. python tests/bench/shard_rivals.py [--into tests/bench/README.md]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

LIBRARIES = ("scidata", "PhysicsNeMo")
SIZES = (20, 3)
ROWS, MARK = sum(SIZES), "shard_rivals"
TABLE, IMAGE, HEADS = (ROWS, 6), (2, 4, ROWS, 8), (1, 2, ROWS, 8)  # sharded along their dim of 23
INDEX = torch.tensor([22, 0, 5, 5, 21, 1, 9])
ROWS_OF = torch.arange(ROWS).flip(0)
WEIGHT, KERNEL = torch.linspace(-1, 1, 30).double().view(5, 6), torch.linspace(-1, 1, 144).double().view(4, 4, 3, 3)
PLAIN, SQUARE = torch.linspace(-2, 2, ROWS * 6).double().view(ROWS, 6), torch.linspace(-1, 1, 36).double().view(6, 6)
GAIN = torch.linspace(0.5, 1.5, 6).double()


class OtherLayoutError(Exception):
    """The result lies differently from what was asked for."""


def again(x: Any) -> Any:
    """To replicated and back to the layout that it had, with the old sizes where the interface takes sizes."""
    if type(x) is torch.Tensor:
        return x * 1
    old = {"sizes": {0: SIZES}} if "sizes" in inspect.signature(type(x).redistribute).parameters else {}
    back = x.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(0)], **old)
    if len(back.to_local()) != len(x.to_local()):
        raise OtherLayoutError
    return back


#: name: (shape of each input, function); inputs are sharded along their dim of 23, results may be anything
OPS: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., Any]]] = {
    "add, mul": ((TABLE, TABLE), lambda x, y: x + x * y),
    "add, plain row": ((TABLE,), lambda x: x + GAIN),
    "add, plain whole": ((TABLE,), lambda x: x * PLAIN),
    "gelu": ((TABLE,), F.gelu),
    "where": ((TABLE, TABLE), lambda x, y: torch.where(x > 0, x, y)),
    "clamp": ((TABLE,), lambda x: x.clamp(-0.5, 0.5)),
    "sum": ((TABLE,), lambda x: x.sum()),
    "sum, rows": ((TABLE,), lambda x: x.sum(0)),
    "mean": ((TABLE,), lambda x: x.mean()),
    "mean, rows": ((TABLE,), lambda x: x.mean(0)),
    "mean, features": ((TABLE,), lambda x: x.mean(1)),
    "var, rows": ((TABLE,), lambda x: x.var(0)),
    "std": ((TABLE,), lambda x: x.std()),
    "amax, rows": ((TABLE,), lambda x: x.amax(0)),
    "max": ((TABLE,), lambda x: x.max()),
    "norm": ((TABLE,), torch.linalg.vector_norm),
    "logsumexp, rows": ((TABLE,), lambda x: x.logsumexp(0)),
    "mse_loss": ((TABLE, TABLE), F.mse_loss),
    "l1_loss": ((TABLE, TABLE), F.l1_loss),
    "softmax, features": ((TABLE,), lambda x: x.softmax(1)),
    "softmax, rows": ((TABLE,), lambda x: x.softmax(0)),
    "cumsum, rows": ((TABLE,), lambda x: x.cumsum(0)),
    "cat, features": ((TABLE, TABLE), lambda x, y: torch.cat([x, y], 1)),
    "cat, rows": ((TABLE, TABLE), lambda x, y: torch.cat([x, y], 0)),
    "stack": ((TABLE, TABLE), lambda x, y: torch.stack([x, y], -1)),
    "split, features": ((TABLE,), lambda x: torch.split(x, 2, 1)[1]),
    "chunk, rows": ((TABLE,), lambda x: x.chunk(2)[0]),
    "x[:, 1:3]": ((TABLE,), lambda x: x[:, 1:3]),
    "x[4:22]": ((TABLE,), lambda x: x[4:22]),
    "x[21]": ((TABLE,), lambda x: x[21]),
    "x[index]": ((TABLE,), lambda x: x[INDEX]),
    "index_select": ((TABLE,), lambda x: torch.index_select(x, 0, INDEX)),
    "gather, features": ((TABLE,), lambda x: x.gather(1, INDEX[:1].expand(ROWS, 2) % 6)),
    "index_add": ((TABLE, TABLE), lambda x, y: x.index_add(0, ROWS_OF, y)),
    "scatter_add": ((TABLE, TABLE), lambda x, y: x.scatter_add(0, ROWS_OF[:, None].expand(ROWS, 6), y)),
    "permute": ((TABLE,), lambda x: x.permute(1, 0)),
    "transpose": ((IMAGE,), lambda x: x.transpose(1, 2)),
    "reshape, features": ((TABLE,), lambda x: x.reshape(ROWS, 2, 3)),
    "flatten, rows": ((IMAGE,), lambda x: x.flatten(2)),
    "unsqueeze": ((TABLE,), lambda x: x.unsqueeze(0)),
    "expand": ((TABLE,), lambda x: x.unsqueeze(0).expand(3, ROWS, 6)),
    "flip, rows": ((TABLE,), lambda x: x.flip(0)),
    "roll, rows": ((TABLE,), lambda x: x.roll(2, 0)),
    "pad, rows": ((TABLE,), lambda x: F.pad(x, (0, 0, 1, 2))),
    "linear": ((TABLE,), lambda x: F.linear(x, WEIGHT)),
    "x @ weight": ((TABLE,), lambda x: x @ SQUARE),
    "x.T @ y": ((TABLE, TABLE), lambda x, y: x.transpose(0, 1) @ y),
    "einsum": ((TABLE,), lambda x: torch.einsum("nc,dc->nd", x, WEIGHT)),
    "layer_norm": ((TABLE,), lambda x: F.layer_norm(x, (6,), GAIN)),
    "group_norm": ((IMAGE,), lambda x: F.group_norm(x, 2)),
    "batch_norm": ((IMAGE,), lambda x: F.batch_norm(x, None, None, training=True)),
    "conv2d": ((IMAGE,), lambda x: F.conv2d(x, KERNEL, padding=1)),
    "conv2d, stride 2": ((IMAGE,), lambda x: F.conv2d(x, KERNEL, padding=1, stride=2)),
    "avg_pool2d": ((IMAGE,), lambda x: F.avg_pool2d(x, 2)),
    "max_pool2d": ((IMAGE,), lambda x: F.max_pool2d(x, 3, 1, 1)),
    "interpolate": ((IMAGE,), lambda x: F.interpolate(x, scale_factor=2, mode="nearest")),
    "attention": ((HEADS, HEADS, HEADS), F.scaled_dot_product_attention),
    "redistribute there and back": ((TABLE,), again),
}


# -- one rank --------------------------------------------------------------------------------------------------------


def makers(mesh: Any, rank: int) -> dict[str, Callable[[torch.Tensor], Any]]:
    """How each library wraps this rank's part of a whole tensor, with the sizes of all parts."""
    from scidata.shard import ShardTensor as Ours

    with_torchvision()
    from physicsnemo.domain_parallel import ShardTensor as Theirs
    from physicsnemo.domain_parallel import register_custom_ops

    register_custom_ops()

    def wrap(cls: Any, full: torch.Tensor) -> Any:
        dim = full.shape.index(ROWS)
        shapes = [torch.Size((*full.shape[:dim], size, *full.shape[dim + 1 :])) for size in SIZES]
        local = full.detach().split(SIZES, dim)[rank].clone().requires_grad_()
        return local, cls.from_local(local, mesh, [Shard(dim)], sharding_shapes={0: tuple(shapes)})

    return {"scidata": lambda full: wrap(Ours, full), "PhysicsNeMo": lambda full: wrap(Theirs, full)}


def with_torchvision() -> None:
    """Import torchvision, also where its compiled part does not load."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        with_torchvision.kept = library  # type: ignore[attr-defined]


def inputs_of(name: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in OPS[name][0]]


def whole(result: Any) -> torch.Tensor:
    return result if type(result) is torch.Tensor else result.full_tensor()


def settled(result: Any) -> Any:
    """Add up what was left as partial sums, so that both libraries have the value."""
    is_partial = any(placement.is_partial() for placement in getattr(result, "placements", ()))
    return result.full_tensor() if is_partial else result


def run_op(name: str, tensors: list[Any]) -> Any:
    return settled(OPS[name][1](*tensors))


def outcome(name: str, make: Callable[[torch.Tensor], Any], rank: int) -> str:
    """Compare values and gradients with one process."""
    fulls = [full.requires_grad_() for full in inputs_of(name)]
    expected = OPS[name][1](*fulls)
    weight = torch.linspace(0.5, 1.5, expected.numel(), dtype=expected.dtype).view(expected.shape)
    (expected * weight).sum().backward()
    locals_, tensors = zip(*[make(full) for full in fulls], strict=True)
    found = whole(OPS[name][1](*tensors))
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-9, atol=1e-9):
        return "wrong"
    (found * weight).sum().backward()
    for local, full in zip(locals_, fulls, strict=True):
        own = full.grad.split(SIZES, full.shape.index(ROWS))[rank]
        if (
            local.grad is None
            or local.grad.shape != own.shape
            or not torch.allclose(local.grad, own, rtol=1e-9, atol=1e-9)
        ):
            return "wrong gradient"
    return "right"


def microseconds(function: Callable[[], Any], number: int) -> float:
    start = time.process_time()
    for _ in range(number):
        function()
    return (time.process_time() - start) / number * 1e6


def run_rank(rank: int, folder: Path, names: list[str], number: int, repeats: int) -> None:
    """Run operations one after the other, one line of JSON for each; whatever breaks the group ends the process."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{names[0].replace('/', ' ')}"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    make = makers(mesh, rank)
    with open(folder / f"rank{rank}", "a") as out:
        for name in names:
            line: dict[str, Any] = {"name": name}
            for library in LIBRARIES:
                print(json.dumps({"name": name, "starts": library}), file=out, flush=True)
                try:
                    line[library] = outcome(name, make[library], rank)
                except OtherLayoutError:
                    line[library] = "wrong"
                except Exception as error:
                    line[library] = "raises"
                    line[f"{library} says"] = (
                        f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                    )
                    if os.environ.get("SHARD_RIVALS_TRACE"):
                        traceback.print_exc()
                stuck = any(word in line.get(f"{library} says", "").lower() for word in ("gloo", "timed out", "peer"))
                store.set(f"{name} {library} {rank}", f"{line[library]}{',' * stuck}")
                other = store.get(f"{name} {library} {1 - rank}").decode()
                stuck, other = stuck or "," in other, other.rstrip(",")
                if stuck or (other == "raises") != (line[library] == "raises"):  # the group is, or may be, out of step
                    line[library] = "raises"
                    print(json.dumps({**line, "ends": True}), file=out, flush=True)
                    os._exit(0)
                line[library] = max(other, line[library], key=["right", "raises", "wrong gradient", "wrong"].index)
            works = [lib for lib in LIBRARIES if line[lib] != "raises" and name != "redistribute there and back"]
            jobs = {lib: [make[lib](full)[1] for full in inputs_of(name)] for lib in works}
            jobs["plain"] = inputs_of(name)
            times: dict[str, list[float]] = {lib: [] for lib in jobs}
            with torch.no_grad():
                for turn in range(repeats + 1):
                    for lib, tensors in jobs.items():
                        took = microseconds(partial(run_op, name, tensors), number)
                        times[lib] += [took] * (turn > 0)
            line["times"] = {lib: statistics.median(each) for lib, each in times.items()}
            print(json.dumps(line), file=out, flush=True)
    os._exit(0)


# -- the table -------------------------------------------------------------------------------------------------------


def gather_results(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Run pairs of ranks until every operation has an outcome; one that hangs costs its pair."""
    results: dict[str, dict[str, Any]] = {}
    left = [name for name in OPS if not options.only or name in options.only]
    with tempfile.TemporaryDirectory() as folder:
        while left:
            command = [sys.executable, __file__, "--folder", folder, "--number", str(options.number)]
            command += ["--repeats", str(options.repeats), "--only", *left]
            ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(2)]
            for process in ranks:
                try:
                    process.wait(600)
                except subprocess.TimeoutExpired:
                    for each in ranks:
                        each.kill()
            lines = [json.loads(line) for line in (Path(folder) / "rank0").read_text().splitlines()]
            started = next((line for line in reversed(lines) if line["name"] == left[0] and "starts" in line), None)
            if started is None:
                raise RuntimeError("no rank came as far as its first operation")
            for line in lines:
                if "starts" not in line:
                    results[line["name"]] = line
            last = [line for line in lines if "starts" in line][-1]
            if last["name"] not in results:  # neither a result nor an error: it hung, or took the process down
                results[last["name"]] = {"name": last["name"], last["starts"]: "hangs or dies"}
            left = [name for name in left if name not in results]
    return results


def table_of(results: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    counts = {lib: [r.get(lib, "not run") for r in results.values()] for lib in LIBRARIES}
    versions = f"scidata {version('scidata')}, PhysicsNeMo {version('nvidia-physicsnemo')}, torch {torch.__version__}"
    kinds = ["right", "wrong", "wrong gradient", "raises", "hangs or dies", "not run"]
    summary = [
        f"{lib}: " + ", ".join(f"{counts[lib].count(kind)} {kind}" for kind in kinds if kind in counts[lib])
        for lib in LIBRARIES
    ]
    rows = [
        f"{versions}. Of {len(results)} operations, " + "; ".join(summary) + f". Load {os.getloadavg()[0]:.0f}.",
        "",
        "| operation | scidata | PhysicsNeMo | µs, torch on the whole | µs, scidata | µs, PhysicsNeMo |",
        "|---|---|---|---|---|---|",
    ]
    for name, line in results.items():
        times = line.get("times", {})
        told = [f"{times[lib]:.0f}" if lib in times else "-" for lib in ("plain", *LIBRARIES)]
        verdicts = [line.get(lib, "not run") for lib in LIBRARIES]
        verdicts = [f"**{v}**" if v.startswith(("wrong", "hangs")) else v for v in verdicts]
        rows.append("| " + " | ".join([name.replace("|", "\\|"), *verdicts, *told]) + " |")
    return "\n".join(rows)


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        import scidata

        return scidata.__version__ if package == "scidata" else "unknown"


def write_into(path: Path, table: str) -> None:
    """Put the table between the marks of the file."""
    begin, end = f"<!-- {MARK}: begin -->", f"<!-- {MARK}: end -->"
    before, rest = path.read_text().split(begin)
    path.write_text(f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}")


def main() -> None:
    """Run all and print, or write, the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path)
    parser.add_argument("--number", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="these operations only")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank, options.folder, options.only, options.number, options.repeats)
    results = gather_results(options)
    for line in results.values():
        for lib in LIBRARIES:
            if f"{lib} says" in line:
                print(f"{line['name']}, {lib}: {line[f'{lib} says']}", file=sys.stderr)
    table = table_of(results)
    if options.into:
        write_into(options.into, table)
    else:
        print(table)


if __name__ == "__main__":
    main()
