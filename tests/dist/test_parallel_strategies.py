"""Training by ddp and by fsdp on a dp × domain mesh gives the parameters of one process."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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


@pytest.mark.slow_for("fsdp-3-1")
@pytest.mark.parametrize(("dp", "domain"), DP_X_DOMAIN)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_five_adam_steps_are_those_of_one_process(strategy, dp, domain):
    run_ranks(trains, dp * domain, strategy, dp, domain, 1, None, False)


@pytest.mark.slow_for("fsdp")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulation_clipping_and_recomputing(strategy):
    run_ranks(trains, 4, strategy, 2, 2, 3, 0.1, True)


def trains_with_less_memory(rank, num_ranks):
    mesh, steps = init_mesh(dp=2, domain=2), 3
    alone, _ = train_alone(Model(), steps, 2)
    seen = set()

    def keep_products(ctx, op, *args, **kwargs):
        is_product = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        seen.add(is_product)
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    def train(make_optimizer=adam, saving=nullcontext, selective=False, **options):
        model = Model(seed=rank)
        for block in model.blocks if selective else ():
            contexts = partial(create_selective_checkpoint_contexts, keep_products)
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
        model = scidata.parallelize(model, mesh, **options)
        optimizer = make_optimizer(model)
        for step in range(steps):
            optimizer.zero_grad()
            with saving():
                loss = loss_of(model, part_of(sample(step * 2 + axis_rank(mesh, "dp")), mesh))
            loss.backward()
            optimizer.step()
        assert_equal_models(model, alone)

    def zero(model):
        group = mesh.get_group("dp")
        trained = [p for p in model.parameters() if p.requires_grad]
        return ZeroRedundancyOptimizer(trained, torch.optim.Adam, process_group=group, lr=0.01, eps=1e-3)

    train(strategy="fsdp", fsdp_options={"offload_policy": CPUOffloadPolicy(pin_memory=False)})
    train(zero)
    train(saving=torch.autograd.graph.save_on_cpu)
    train(selective=True)
    assert seen == {True, False}


def test_what_saves_memory_trains_as_one_process():
    """FSDP2's CPU offload, the optimizer of ZeRO, activation offload, selective checkpoints."""
    run_ranks(trains_with_less_memory, 4)
