"""Along a sharded dim, in float32 and half precision: as close to the truth as torch is on the whole tensor.

The truth is float64. Where torch gives NaN or an infinity, the same is expected.
"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from scidata.shard import ShardSpec, ShardTensor
from scidata.shard.rows.redistribute import gather_full
from scidata.shard.torch_internals import tree_leaves
from scidata.testing import run_ranks
from scidata.testing.oracle import shard_of
from tests.dist._stable_arithmetic import DTYPES, FORMULAS, LAYOUTS, rows
from tests.dist._stable_reductions import REDUCTIONS

TABLES = {"formulas": FORMULAS, "reductions": REDUCTIONS}
FACTOR = 5  # of torch's largest error in the row, and of the last place of its largest number


def outcome(function, inputs, dtype, grad):
    """Return results and gradients, all whole; what comes back is weighted by numbers of ``dtype``."""
    torch.default_generator.manual_seed(5)
    results = tree_leaves(function(*inputs))
    found = [x.full_tensor() if isinstance(x, ShardTensor) else x for x in results]
    chosen = [x for x in results if x.requires_grad] if grad else []
    if chosen:
        generator = torch.Generator().manual_seed(6)
        seeds = [torch.randn(tuple(x.shape), generator=generator).to(dtype).to(x.dtype) for x in chosen]
        seeds = [
            shard_of(s, x.spec).local if isinstance(x, ShardTensor) else s for s, x in zip(seeds, chosen, strict=True)
        ]
        outputs, leaves = ([getattr(x, "local", x) for x in these] for these in (chosen, inputs))
        grads = torch.autograd.grad(outputs, leaves, seeds, materialize_grads=True)
        found += [
            gather_full(g, x.spec) if isinstance(x, ShardTensor) else g for g, x in zip(grads, inputs, strict=True)
        ]
    return [x.detach() for x in found]


def complaints(ours, theirs, truth, kinds):
    """Say for which kinds a result is further from the truth than it should be."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        yield f"{ours.dtype} {tuple(ours.shape)} for {theirs.dtype} {tuple(theirs.shape)}"
        return
    if not theirs.numel():
        return
    eps = torch.finfo(theirs.dtype).eps if theirs.is_floating_point() else 0
    ours, theirs, truth = (x.to(torch.float64).reshape(len(kinds), -1) for x in (ours, theirs, truth))
    finite = theirs.isfinite()
    # of NaN, torch's 16-bit attention loses some on CPUs without AVX-512
    alike = [(ours == x) | (ours.isnan() & x.isnan()) for x in (theirs, truth)]
    wrong = ~alike[0] & ~alike[1] & ~(finite & ours.isfinite())
    near = torch.where(truth.isfinite(), truth, theirs).where(finite, 0)
    spread, scale = (x.where(finite, 0).abs().amax(1, keepdim=True) for x in (theirs - near, near))
    times = (ours - near).where(finite, 0).abs() / (FACTOR * (spread + eps * scale))
    for i in (wrong | (times > 1)).any(1).nonzero().flatten().tolist():
        said = "other infinities" if wrong[i].any() else f"{times[i].nan_to_num(0).max():.3g} times too far"
        yield f"{kinds[i]}: {said}, {_shown(ours[i])} for {_shown(theirs[i])}, truly {_shown(truth[i])}"


def _shown(row):
    return " ".join(f"{x:.6g}" for x in row.tolist()[:9])


def check(rank, num_ranks, table):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    found, turn = [], 0
    for formula in TABLES[table]:
        for dtype in DTYPES:
            for kinds in formula.kinds(dtype):
                turn += 1
                whole = [rows(kinds, dtype, seed) for seed in range(formula.operands)]
                every = LAYOUTS[num_ranks]
                for sizes in every if len(kinds) > 1 and num_ranks == 2 else [every[turn % 3]]:
                    spec = ShardSpec.even(mesh, [Shard(1)], whole[0].shape, {0: sizes})
                    parts = [shard_of(x, spec).requires_grad_(formula.grad) for x in whole]
                    said = f"{formula.name} {dtype} {sizes}"
                    try:
                        ours = outcome(formula.function, parts, dtype, formula.grad)
                    except Exception as error:
                        raise AssertionError(f"{said} {kinds}") from error
                    if rank:
                        continue
                    theirs, truth = (
                        outcome(
                            formula.function, [x.to(d).requires_grad_(formula.grad) for x in whole], dtype, formula.grad
                        )
                        for d in (dtype, dtype if formula.fixed else torch.float64)
                    )
                    for i, each in enumerate(zip(ours, theirs, truth, strict=True)):
                        found += [f"{said} [{i}] {text}" for text in complaints(*each, kinds)]
    return found


@pytest.mark.slow_for("formulas-2", "reductions-2")  # three ranks take the same ways
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("table", TABLES)
def test_as_close_to_the_truth_as_one_process(table, num_ranks):
    found = run_ranks(check, num_ranks, table, timeout=300)[0]
    assert not found, f"{len(found)}:\n" + "\n".join(found)
