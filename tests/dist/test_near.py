"""Drawn points with edges between them on real ranks: one process's layers and gradients, and epochs that are resumed."""

import numpy as np
import pytest
import torch

import scidata
from scidata.testing import run_ranks
from tests.writers import write_hdf5

SIZES = (900, 37, 500)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("near")
    for index, num in enumerate(SIZES):
        rng = np.random.default_rng(index)
        write_hdf5(folder / f"{index}.h5", {"points": rng.random((num, 3)), "u": rng.standard_normal((num, 2))})
    scidata.partition(str(folder / "*.h5"), folder / "store", kind="points", order="shuffle:64")
    return str(folder / "store")


def step(rank, num_ranks, path, rule, batch_size, loaded):
    """Losses and gradients of two epochs, the second resumed in its middle from the state that is passed."""
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    ds = scidata.open_dataset(path, mesh, edges=rule, subsample={"point": 200})
    weight = torch.linspace(0.1, 1, 6, dtype=torch.float64).reshape(3, 2).requires_grad_()
    found, states = [], []
    loader = scidata.DataLoader(ds, batch_size, shuffle=True)
    if loaded is not None:
        loader.load_state_dict(loaded)
    for epoch in (1, 2) if loaded is None else (2,):
        if loaded is None:
            loader.set_epoch(epoch)
        for batch in loader:
            source, target = batch.edge_index
            away = batch.with_ghosts("pos")[source] - batch.with_ghosts("pos")[target]
            sent = batch.with_ghosts("u")[source] * (away @ weight).tanh()
            local = torch.zeros(batch.index_map("point").num_owned, 2, dtype=torch.float64).index_add(0, target, sent)
            loss = local.square().sum()
            (grad,) = torch.autograd.grad(loss, weight)
            sums = torch.cat([loss.detach().reshape(1), grad.reshape(-1), torch.tensor([len(source) + 0.0])])
            torch.distributed.all_reduce(sums)
            found.append((batch.index, sums.tolist()))
            states.append(loader.state_dict())
    return found, states


@pytest.mark.parametrize("rule", ["knn:6", "radius:0.2"])
def test_drawn_edges_give_what_one_process_has_and_epochs_resume_on_other_ranks(store, rule):
    (alone, states), *_ = run_ranks(step, 1, store, rule, 2, None)
    assert len(alone) == 4
    for num_ranks in (2, 3):
        for found, _ in run_ranks(step, num_ranks, store, rule, 2, None):
            for (index, sums), (expected, values) in zip(found, alone, strict=True):
                assert index == expected
                np.testing.assert_allclose(sums, values, rtol=1e-12)
    (rest, _), *_ = run_ranks(step, 3, store, rule, 2, states[2])  # in the middle of the second epoch
    assert rest[0][0] == alone[3][0]
    np.testing.assert_allclose(rest[0][1], alone[3][1], rtol=1e-12)
