"""Run programs on the ranks of a mesh, each line on shards and then on whole tensors, and compare what they leave."""

from __future__ import annotations

import pickle
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec, ShardTensor
from scidata.shard.spec import UNKNOWN
from scidata.shard.views import Whole
from scidata.testing.oracle import shard_of
from tests.programs.program import NAMES, Given, Program, run_line, tensors_of

#: Of the largest element, or 1: sums are taken in another order, and each line rounds.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.2}
TOLERANCE |= {torch.complex128: 1e-10, torch.complex64: 1e-4}
#: What an error says that is raised on all ranks where one process keeps a copy of an input, to differentiate.
REMEDY = "write to a clone() of it"
AXES = ("h", "w", "d")
DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16)}


NEARBY = 6  # times that a program is run from values nearby, where something differs
SPREAD = 8  # times what these differ by is still rounding


@dataclass
class Outcome:
    """What became of a program, and why.

    right, wrong, divergent, hang, other error, accepted, lenient; or unstable: one process differs as much from itself
    where what it is given differs in the last digit, or in float64.
    """

    kind: str = "right"
    note: str = ""
    refused: Counter[str] = field(default_factory=Counter)
    lines: int = 0  # that ran


class _OutOfStepError(Exception):
    """Ranks have done different things: what comes next would mean nothing."""


def on_ranks(rank: int, num_ranks: int, programs: Sequence[Program], done: Path) -> None:
    """Run programs of the same mesh; the first rank adds what became of each to a file. Collective.

    Ends early after a program in which the ranks are no longer in step.
    """
    write_outcomes(rank, programs, done, Trial)


def write_outcomes(rank: int, programs: Sequence[Program], done: Path, trial_of: type[Trial]) -> None:
    """Try programs, each in one way."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(DTYPES[programs[0].dtype])
    mesh = init_device_mesh("cpu", programs[0].mesh, mesh_dim_names=AXES[: len(programs[0].mesh)])
    control = dist.new_group()  # apart from the programs' own collectives
    for program in programs:
        outcome = Outcome()
        trial = trial_of(program, mesh, control, outcome)
        try:
            trial.run()
        except _OutOfStepError:
            pass
        finally:  # also where this rank waits in vain for the others
            if rank == 0 and (outcome.kind != "right" or trial.finished):
                with done.open("ab") as file:
                    pickle.dump(outcome, file)
        if outcome.kind == "divergent":
            return


class Trial:
    """One program on this rank's parts, and on whole tensors."""

    def __init__(self, program: Program, mesh: DeviceMesh, control: dist.ProcessGroup, outcome: Outcome) -> None:
        self.program, self.mesh, self.control, self.outcome = program, mesh, control, outcome
        self.whole: dict[str, Any] = dict(NAMES)
        self.parts: dict[str, Any] = dict(NAMES)
        self.finished, self.ran = False, list[str]()
        self.nearby: list[dict[str, Any]] | None = None
        for given in program.given:
            self.whole[given.name] = given.whole().requires_grad_(given.requires_grad)
            self.parts[given.name] = placed(given, mesh).requires_grad_(given.requires_grad)

    def run(self) -> None:
        """Run all lines, and compare all that is left."""
        for line in self.program.lines:
            if not self._line(line):
                break
        else:
            self._compare()
        self.finished = True

    def _found(self, kind: str, note: str) -> bool:
        self.outcome.kind, self.outcome.note = kind, note
        return False

    def _agreed(self, error: Exception | None, where: str) -> None:
        """Raise where the ranks have different errors, or some have none."""
        said = type(error).__name__
        mine = torch.tensor([zlib.crc32(said.encode())])
        others = torch.empty(dist.get_world_size(), dtype=torch.int64)
        try:
            dist.all_gather_into_tensor(others, mine, group=self.control)
        except RuntimeError:
            self._found("hang", f"{where}: rank {dist.get_rank()} is done ({said}: {error}), others are not")
            raise
        if len(others.unique()) > 1:
            self._found("divergent", f"{where}: rank {dist.get_rank()}: {said}: {error}")
            raise _OutOfStepError

    def _line(self, line: str) -> bool:
        for x in (*tensors_of(self.whole).values(), *filter(_is_plain, tensors_of(self.parts).values())):
            error_of(lambda x=x: x.grad_fn)  # views that were written to by others are leaves to torch until asked
        error = error_of(run_line, line, self.parts)
        if isinstance(error, RuntimeError) and "gloo" in str(error):
            self._found("hang", f"{line}: {error}")
            raise error
        self._agreed(error, line)
        if isinstance(error, UnsupportedShardOp) or REMEDY in str(error):
            self.outcome.refused[str(error).split(":")[0]] += 1
            self._forget_gradients(line)
            return True
        theirs = error_of(run_line, line, self.whole)
        self.ran.append(line)
        self.outcome.lines += 1
        if error is not None and theirs is None:
            return self._found("other error", f"{line}: {type(error).__name__}: {error}")
        if error is None and theirs is not None:
            if "modified" in str(theirs) or "MKL FFT" in str(
                theirs
            ):  # of nothing; torch's rules for writes to what is differentiated: copies know fewer
                return self._found("lenient", line)
            target = self.whole.get(re.split(r"\W", line)[0])
            if "a leaf Variable" in str(theirs) and isinstance(target, Tensor) and not target.is_leaf:
                return self._found("lenient", line)  # of a view made within the line
            if "single memory location" in str(theirs) and any(map(_is_gradient, tensors_of(self.parts).values())):
                return self._found("lenient", line)  # of a gradient nobody knows whether its elements are one in memory
            return self._found("accepted", f"{line}: {type(theirs).__name__}: {theirs}")
        return True

    def _forget_gradients(self, line: str) -> None:
        """Drop what a refused backward pass has left on its way."""
        if "backward" in line:
            for x in (*tensors_of(self.whole).values(), *tensors_of(self.parts).values()):
                x.grad = None

    def _compare(self) -> None:
        """Compare variables and gradients; each rank looks at its own parts."""
        notes = [self._memories()]
        gradients = {line[1 : line.index(",")] for line in self.ran if "= torch.autograd.grad(" in line}
        nobodys = {_memory(self.whole[name]) for name in gradients if self.whole.get(name) is not None}
        for name, whole in tensors_of(self.whole).items():
            if error_of(lambda x=whole: x.grad_fn) is not None:  # a view that torch does not let be used any more
                continue
            part = self.parts[name]
            strides = _memory(whole) not in nobodys
            notes.append((name, *self._compared(whole, lambda x=part: x, lambda x: x, name, strides)))
            # torch gives views that were written to new places in the graph when they are next looked at
            if whole.is_leaf or whole._base is None or not whole._version:
                found = self._compared(whole.grad, lambda x=part: x.grad, lambda x: x.grad, name, strides=False)
                notes.append((f"{name}.grad", *found))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, notes, group=self.control)
        for same in zip(*gathered, strict=True):
            found = [each for kind in ("wrong", "unstable") for each in same if each[2] == kind]
            name, _, kind, note = [*found, same[0]][0]
            if len({each[1:3] for each in same if each not in found}) > 1:
                self._found("divergent", f"reading {name}: {same}")
            elif kind == "refused":
                self.outcome.refused[f"reading: {note.split(':')[0]}"] += 1
            elif kind != "right" and (kind != "unstable" or self.outcome.kind == "right"):
                self._found(kind, f"{name}: {note}")

    def _memories(self) -> tuple[str, bool, str, str]:
        """Look for parts that share memory where wholes do not: a write to one would change the other."""
        # of a tensor whose order in memory is not known writes to views are refused
        named = {
            name: x
            for name, x in tensors_of(self.parts).items()
            if name in self.whole and getattr(x, "global_strides", None) is not UNKNOWN
        }
        for (name, x), (other, y) in combinations(named.items(), 2):
            mine, theirs = (z.local if isinstance(z, ShardTensor) else z for z in (x, y))
            shared = mine.numel() and theirs.numel() and _memory(mine) == _memory(theirs)
            if shared and _memory(self.whole[name]) != _memory(self.whole[other]):
                return "memory", False, "wrong", f"{name} has the memory of {other}"
        return "memory", False, "right", ""

    def _compared(
        self, want: Any, read: Callable[[], Any], of: Callable[[Any], Any], name: str, strides: bool
    ) -> tuple[bool, str, str]:
        """Return whether there is nothing, a kind of outcome and what differs.

        Collective where a copy has to be brought up to date.
        """
        got, kind = None, "wrong"
        try:
            got = read()
            message = _difference(want, got, strides)
            if message is not None:
                spread = self._spread(want, of, name)
                if spread is None or _difference(want, got, strides, SPREAD * spread) is None:
                    kind = "unstable"
        except UnsupportedShardOp as error:
            return got is None, "refused", str(error)
        except Exception as error:
            return got is None, "other error", f"{type(error).__name__}: {error}"
        return (got is None, "right", "") if message is None else (got is None, kind, message)

    def _spread(self, want: Any, of: Callable[[Any], Any], name: str) -> float | None:
        """Return by how much one process differs from itself, given values nearby; None where shapes differ."""
        if self.nearby is None:
            self.nearby = [self._scope_nearby(seed) for seed in range(NEARBY)]
            if not any(re.search("rand|drop|bernoulli|normal_|uniform|exponential_", line) for line in self.ran):
                dtype = torch.get_default_dtype()
                torch.set_default_dtype(torch.float64)
                self.nearby.append(self._scope_nearby(0))
                torch.set_default_dtype(dtype)
        others = [None if scope.get(name) is None else of(scope[name]) for scope in self.nearby]
        if want is None or all(x is None for x in others):
            return 0.0
        if any(x is None or x.shape != want.shape for x in others):
            return None
        spread = max(((x - want).detach().abs().max().item() for x in others if x.numel()), default=0.0)
        return float(spread)

    def _scope_nearby(self, seed: int) -> dict[str, Any]:
        """Run in one process what was run, given values that differ in the last digit. Lines may raise then."""
        generator, scope = torch.Generator().manual_seed(seed), dict(NAMES)
        for given in self.program.given:
            x = given.whole()
            last = torch.finfo(x.dtype).eps * (torch.randint(3, x.shape, generator=generator) - 1)
            scope[given.name] = (x * (1 + last)).requires_grad_(given.requires_grad)
        for line in self.ran:
            error_of(run_line, line, scope)
        return scope


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _is_gradient(x: Any) -> bool:
    return isinstance(x, ShardTensor) and isinstance(x.copied, Whole)


def placed(given: Given, mesh: DeviceMesh) -> Tensor:
    if given.dims is None:
        return given.whole()
    placements = [Replicate() if d is None else Shard(d) for d in given.dims]
    sizes = {axis: n for axis, n in enumerate(given.sizes) if n is not None}
    return shard_of(given.whole(), ShardSpec.even(mesh, placements, given.shape, sizes))


def _is_plain(x: object) -> bool:
    return type(x) is Tensor


def error_of(function: Callable[..., Any], *args: Any) -> Exception | None:
    try:
        function(*args)
    except Exception as error:
        return error
    return None


def _difference(want: Any, got: Any, strides: bool = True, rounding: float = 0.0) -> str | None:
    """Return what differs between a tensor and its shards by more than rounding, in words."""
    if want is None or got is None:  # no gradient is as good as one of zeros
        left = want if got is None else got.to_local() if isinstance(got, ShardTensor) else got
        return (
            None if left is None or not left.any() else f"{'None' if got is None else 'not None'}, unlike one process"
        )
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"{tuple(got.shape)} {got.dtype}, not {tuple(want.shape)} {want.dtype}"
    if got.requires_grad != want.requires_grad and want.any():  # zeros without a graph are as good as zeros with one
        return f"requires_grad is {got.requires_grad}"
    mine, part = want, got
    if isinstance(got, ShardTensor):
        part = got.to_local()
        for dim, start in enumerate(got.spec.offsets):
            mine = mine.narrow(dim, start, part.shape[dim])
    if want.is_floating_point() or want.is_complex():
        loose = max(TOLERANCE[want.dtype], TOLERANCE[torch.get_default_dtype()])
        bound = rounding + loose * max(1.0, float(want.detach().abs().max()) if want.numel() else 0.0)
        if not torch.allclose(mine, part, rtol=0, atol=bound, equal_nan=True):
            return f"values differ by {float((mine - part).detach().abs().max()):.2g}"
    elif not torch.equal(mine, part):
        return "values differ"
    return _strides_differ(want, got) if strides else None


def _strides_differ(want: Tensor, got: Any) -> str | None:
    """Compare strides where they say anything: of dims of several rows."""
    try:
        found = got.stride()
    except UnsupportedShardOp:
        return None
    if want.numel() < 2 or all(a == b for n, a, b in zip(want.shape, want.stride(), found, strict=True) if n > 1):
        return None
    return f"strides {found}, not {want.stride()}"
