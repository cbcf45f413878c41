"""A torch data set of whole tensors, cut over the domain: values, halos, loaders, workers, nodes, and what is refused."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

import scidata
from scidata.errors import ConfigError, FieldMismatchError, SciDataError, UnknownNameError
from scidata.testing import run_ranks

RNG = np.random.default_rng(0)
X, Y, MASK = RNG.normal(size=(6, 3, 11, 8)).astype("f4"), RNG.normal(size=(6, 11, 8)), RNG.random((6, 11)) > 0.5
DIMS = {"input/x": ("channel", "lat", "lon"), "input/mask": ("lat",), "target": ("lat", "lon")}


class Whole(torch.utils.data.Dataset):
    """Nested samples, that counts how often it is asked."""

    def __init__(self):
        self.calls = []

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        self.calls.append(index)
        x, mask = torch.from_numpy(X[index]), torch.from_numpy(MASK[index])
        return {"input": {"x": x, "mask": mask}, "target": Y[index], "month": index % 12}


class Random(Whole):
    def __getitem__(self, index):
        return torch.rand(11, 8, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))


def parts(rank, num_ranks):
    mesh = scidata.init_mesh(domain=2, device="cpu")
    options = {"halo": {"lat": 2}, "periodic": "lat", "bounds": {"lat": (0, 4, 11)}}
    rows = np.arange(-2, 6) % 11 if rank == 0 else np.arange(2, 13) % 11
    whole = Whole()
    ds = scidata.shard_dataset(whole, mesh, dims=DIMS, **options)
    nbytes = 3 * 88 * 4 + 88 * 8 + 11 + 8
    assert [ds.plan(0, r).bytes_fetched for r in (0, 1)] == [nbytes] * 2  # all of it, on each
    assert "read by a function" in ds.plan(0).note
    again = pickle.loads(pickle.dumps(ds))
    for i in range(6):
        sample = ds[i]
        np.testing.assert_array_equal(sample["input/x"].local_with_halo(), X[i][:, rows])
        np.testing.assert_array_equal(sample["target"].full_tensor(), Y[i])
        np.testing.assert_array_equal(sample["input/mask"].local_with_halo(), MASK[i][rows])
        assert sample["month"].item() == i
        np.testing.assert_array_equal(again[i]["input/x"], X[i][:, rows])
    assert whole.calls == [0, *range(1, 6)]  # sample 0 was kept

    stats = scidata.statistics(ds, fields=["input/x"], by="channel")
    np.testing.assert_allclose(stats["input/x"].mean, X.mean(axis=(0, 2, 3), dtype="f8"), atol=1e-6)
    normal = ds.normalise(stats, fields="input/x")
    shown = normal[1]["input/x"].full_tensor()
    scaled = (X[1] - stats["input/x"].mean[:, None, None]) / stats["input/x"].std[:, None, None]
    np.testing.assert_allclose(shown, scaled, atol=1e-5)
    assert torch.allclose(normal.denormalise(normal[1])["input/x"].full_tensor(), torch.from_numpy(X[1]), atol=1e-5)

    pairs = scidata.shard_dataset(Whole(), mesh, dims=DIMS, steps={"target": (0, 1)}, isel={"channel": [2, 0]})
    assert len(pairs) == 5
    np.testing.assert_array_equal(pairs[4]["target"].full_tensor(), Y[4:6])
    np.testing.assert_array_equal(pairs[4]["input/x"].full_tensor(), X[4][[2, 0]])

    # a loader, stopped and resumed; workers; a node
    whole = Whole()
    shared = scidata.shard_dataset(whole, mesh, dims=DIMS, decode="node", **options)
    torch.distributed.barrier()
    whole.calls.clear()
    for made, workers in ((ds, 0), (ds, 1), (shared, 0)):
        loader = scidata.DataLoader(made, 2, shuffle=True, num_workers=workers)
        seen, state = [], None
        for batch in loader:
            for place, i in enumerate(batch.index):
                np.testing.assert_array_equal(batch["input/x"].local_with_halo()[place], X[i][:, rows])
            seen += batch.index
            if len(seen) == 2:
                state = loader.state_dict()
        assert sorted(seen) == list(range(6))
        if workers == 0:
            again = scidata.DataLoader(made, 2, shuffle=True)
            again.load_state_dict(state)
            assert [i for batch in again for i in batch.index] == seen[2:]
    torch.distributed.barrier()
    counts = [None, None]
    torch.distributed.all_gather_object(counts, len(whole.calls))

    with pytest.raises(SciDataError, match="values of 'data' in sample"):
        next(iter(scidata.DataLoader(scidata.shard_dataset(Random(), mesh, dims=("lat", "lon")))))
    return sum(counts)


def test_parts():
    calls, _ = run_ranks(parts, 2, timeout=120)
    assert calls <= 2 * 6  # of 12 samples in an epoch and a half, on both ranks; alone they would ask 20 times


class Odd:
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def test_plain_use():
    (pair,) = {len(scidata.shard_dataset(Odd([(torch.ones(2, 3), 5), (torch.zeros(2, 3), 6)])))}
    assert pair == 2
    ds = scidata.shard_dataset(Odd([(torch.ones(2, 3), 5), (torch.zeros(2, 3), 6)]))
    assert ds.dims("0") == ("0.0", "0.1")
    assert [ds[1]["0"].sum().item(), ds[1]["1"].item()] == [0, 6]
    narrow = scidata.shard_dataset(Odd([torch.ones(2, dtype=torch.bfloat16)]), dtype=torch.bfloat16)
    assert narrow[0]["data"].dtype is torch.bfloat16
    assert scidata.concat(ds, ds)[3]["1"].item() == 6


@pytest.mark.parametrize(
    ("samples", "options", "error", "match"),
    [
        ([], {}, ConfigError, "has no samples"),
        ([{"x": "text", "y": 1}], {}, ConfigError, "'x' of a sample is str, no tensor"),
        ([{"y": 1}], {"fields": "z"}, UnknownNameError, "no field 'z'"),
        ([{"y": 1}], {"dims": {"z": ()}}, UnknownNameError, "no field 'z'"),
        ([torch.ones(2)], {"dims": {"data": ("a", "b")}}, ConfigError, "has shape"),
        ([torch.ones(2, dtype=torch.bfloat16)], {}, ConfigError, "pass dtype=torch.bfloat16"),
    ],
)
def test_errors(samples, options, error, match):
    with pytest.raises(error, match=match):
        scidata.shard_dataset(Odd(samples), **options)


def test_samples_are_alike():
    ds = scidata.shard_dataset(Odd([torch.ones(2), torch.ones(3), {"a": 1}]))
    for i in (1, 2):
        with pytest.raises(FieldMismatchError, match=f"of sample {i} is.*of sample 0 float32"):
            ds[i]
    with pytest.raises(ConfigError, match="expected a data set with __len__"):
        scidata.shard_dataset(iter([torch.ones(2)]))
    assert scidata.shard_dataset(Odd([{"x": "text", "y": 1}]), fields="y")[0]["y"] == 1
