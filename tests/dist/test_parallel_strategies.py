"""Training by ddp and by fsdp on a dp × domain mesh gives the parameters of one process."""

import pytest
import torch
from torch import nn

import scidata
from scidata.device_mesh import axis_rank, init_mesh
from scidata.testing import run_ranks
from tests.dist._training import (
    DP_X_DOMAIN,
    Block,
    Model,
    adam,
    assert_equal_models,
    loss_of,
    part_of,
    sample,
    train_alone,
)

STRATEGIES = {"ddp": {"bucket_bytes": 700}, "fsdp": {"units": (Block,)}}


def trains(rank, num_ranks, strategy, dp, domain, micro, clip, recompute):
    mesh = init_mesh(dp=dp, domain=domain)
    alone, norms = train_alone(Model(), 5, dp, micro, clip)
    # other weights on each rank: those of rank 0 count
    model = scidata.parallelize(Model(seed=rank, recompute=recompute), mesh, strategy=strategy, **STRATEGIES[strategy])
    optimizer = adam(model)
    for step in range(5):
        optimizer.zero_grad()
        for m in range(micro):
            x = part_of(sample((step * micro + m) * dp + axis_rank(mesh, "dp")), mesh)
            loss = loss_of(model, x) / micro
            if m < micro - 1:
                with scidata.no_sync(model):
                    loss.backward()
            else:
                loss.backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            norm = norm.full_tensor() if strategy == "fsdp" else norm
            torch.testing.assert_close(norm, norms[step], rtol=1e-12, atol=0)
            assert norm > clip
        optimizer.step()
    assert_equal_models(model, alone)


@pytest.mark.parametrize(("dp", "domain"), DP_X_DOMAIN)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_five_adam_steps_are_those_of_one_process(strategy, dp, domain):
    run_ranks(trains, dp * domain, strategy, dp, domain, 1, None, False)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulation_clipping_and_recomputing(strategy):
    run_ranks(trains, 4, strategy, 2, 2, 3, 0.1, True)
