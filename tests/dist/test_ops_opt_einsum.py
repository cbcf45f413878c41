"""opt_einsum, which neural operators contract with, on shards: it looks for its functions in the package of a class."""

import subprocess
import sys

import pytest
from torch.distributed.tensor import Shard

from scidata.shard import ShardSpec
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process
from tests.dist._layers import LAYOUTS, ROWS, mesh_of, random


def contract(equation, **options):
    import opt_einsum

    return lambda *tensors: opt_einsum.contract(equation, *tensors, **options)


def check(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    inputs = [random(2, 4, ROWS, 3, seed=1), random(4, 5, 3, seed=2), random(5, 6, seed=3)]
    for sizes in LAYOUTS[num_ranks]:
        spec = ShardSpec.even(mesh, [Shard(2)], inputs[0].shape, {0: sizes})
        for equation, count in (("bixm,iom->boxm", 2), ("bixm,iom,op->bpxm", 3), ("bixm,iom->bom", 2)):
            assert_like_one_process(contract(equation), inputs[:count], [spec, None, None][:count], rtol=1e-11)
        both = [random(2, ROWS, seed=1), random(ROWS, 4, seed=2)]
        specs = [ShardSpec.even(mesh, [Shard(dim)], x.shape, {0: sizes}) for dim, x in zip((1, 0), both, strict=True)]
        assert_like_one_process(contract("ij,jk->ki"), both, specs, rtol=1e-11)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_contractions(num_ranks):
    pytest.importorskip("opt_einsum")
    run_ranks(check, num_ranks)


def test_it_is_not_scidata_that_brings_them():
    code = "import scidata; print(hasattr(scidata, 'einsum'), 'einsum' in dir(scidata))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]
