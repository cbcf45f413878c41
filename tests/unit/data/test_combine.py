"""Subsets, concatenations and mixtures of real stores, torch's own wrappers, and what a loader makes of them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
import zarr

import scidata
from scidata.errors import ConfigError, UnknownNameError


def write(path: Path, first: int, count: int, rows: int = 4) -> str:
    """Write samples whose values are ``first, first + 1, …``."""
    data = np.broadcast_to(np.arange(first, first + count, dtype=np.float32)[:, None], (count, rows))
    zarr.open_group(str(path), mode="w").create_array(
        "t", data=data, chunks=(1, rows), dimension_names=["time", "lat"], fill_value=-1
    )
    return str(path)


@pytest.fixture
def a(tmp_path: Path) -> Any:
    return scidata.open_dataset(write(tmp_path / "a.zarr", 0, 6))


@pytest.fixture
def b(tmp_path: Path) -> Any:
    return scidata.open_dataset(write(tmp_path / "b.zarr", 100, 9), transform=lambda s: s.replace({"t": s["t"] * 2}))


def firsts(batch: Any) -> list[float]:
    t = batch["t"]
    assert (t == t[..., :1]).all()
    return t[..., 0].reshape(-1).tolist()


def test_subset(a: Any) -> None:
    part = scidata.subset(a, [4, 1, -1])
    assert (len(part), part.fields, part.locate(2), part.mesh) == (3, ("t",), (0, 5), None)
    assert [(s.index, firsts(s)) for s in (part[i] for i in range(3))] == [(0, [4.0]), (1, [1.0]), (2, [5.0])]
    (batch,) = scidata.DataLoader(part, 3)
    assert (batch.index, firsts(batch)) == ([0, 1, 2], [4, 1, 5])
    assert part.plan(0).index == 4
    assert hasattr(part, "buffer_specs")  # read into reused buffers, as the data set itself
    assert firsts(scidata.subset(part, [2, 0])[0]) == [5]
    assert firsts(pickle.loads(pickle.dumps(part))[1]) == [1]
    assert len(scidata.subset(a, [])) == 0
    for wrong in ([6], [-7], [0.5], [[1]]):
        with pytest.raises(ConfigError, match="subset"):
            scidata.subset(a, wrong)
    nested = scidata.concat(scidata.subset(scidata.concat(a, part), [8, 0]), scidata.subset(part, [1]))
    assert [firsts(s)[0] for s in scidata.DataLoader(nested, batch_size=None)] == [5, 0, 1]
    (batch,) = scidata.DataLoader(nested, 3)
    assert (batch.index, firsts(batch)) == ([0, 1, 2], [5, 0, 1])
    with pytest.raises(IndexError, match="there are 3"):
        part[3]


def test_concat_with_transforms(a: Any, b: Any) -> None:
    both = scidata.concat(a, b)
    expected = [0, 1, 2, 3, 4, 5, *range(200, 218, 2)]
    assert [firsts(both[i])[0] for i in range(len(both))] == expected
    for batch_size in (1, 4, 15):
        batches = list(scidata.DataLoader(both, batch_size))
        assert [x for batch in batches for x in firsts(batch)] == expected
        assert [i for batch in batches for i in batch.index] == list(range(15))
    assert [firsts(s)[0] for s in scidata.DataLoader(both, batch_size=None)] == expected


def test_concat_batches_across_data_sets_without_transforms(a: Any, tmp_path: Path) -> None:
    other = scidata.open_dataset(write(tmp_path / "c.zarr", 50, 3))
    (batch,) = scidata.DataLoader(scidata.concat(a, other), 9)
    assert (firsts(batch), batch.dims["t"]) == ([0, 1, 2, 3, 4, 5, 50, 51, 52], ("batch", "lat"))


def test_other_shapes_come_one_by_one(a: Any, tmp_path: Path) -> None:
    wide = scidata.open_dataset(write(tmp_path / "wide.zarr", 50, 3, rows=7))
    both = scidata.concat(a, wide)
    loader = scidata.DataLoader(both, batch_size=None)
    assert [(firsts(s)[0], s["t"].numel()) for s in loader][5:7] == [(5, 4), (50, 7)]
    assert loader.stats()["bytes"] == 4 * (6 * 4 + 3 * 7)
    with pytest.raises(scidata.errors.FieldMismatchError, match="batch_size=None"):
        list(scidata.DataLoader(both, 9))


def test_torchs_wrappers(a: Any, b: Any) -> None:
    train, rest = torch.utils.data.random_split(a, [4, 2], torch.Generator().manual_seed(0))
    loader = scidata.DataLoader(train, 2, shuffle=True)
    assert loader.dataset is train
    assert sorted(x for batch in loader for x in firsts(batch)) == sorted(train.indices)
    both = torch.utils.data.ConcatDataset([rest, b])
    assert [firsts(s)[0] for s in scidata.DataLoader(both, batch_size=None)] == [*rest.indices, *range(200, 218, 2)]
    with pytest.raises(ConfigError, match="Subset cannot do"):
        scidata.DataLoader(torch.utils.data.Subset([1, 2, 3], [0]))


def test_mix_takes_in_ratio_and_resumes(a: Any, b: Any) -> None:
    def make(ratios: Any) -> scidata.DataLoader:
        return scidata.DataLoader(scidata.mix({"a": a, "b": b}, ratios), 3, shuffle=True)

    loader = make({"b": 3, "a": 1})
    assert len(loader) == 4
    seen, states = [], []
    for batch in loader:
        seen += batch.index
        states.append(loader.state_dict())
    assert sum(i < 6 for i in seen) == 3
    assert len(set(seen)) == len(seen) == 12
    again = make({"a": 2, "b": 6})
    again.load_state_dict(states[1])
    assert [i for batch in again for i in batch.index] == seen[6:]
    with pytest.raises(ConfigError, match="another data set"):
        make({"a": 1, "b": 1}).load_state_dict(states[1])
    unshuffled = scidata.DataLoader(scidata.mix([a, b], [1, 1]), 2)
    assert [i for batch in unshuffled for i in batch.index] == [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]


def test_fingerprints_tell_them_apart(a: Any, b: Any) -> None:
    kinds = [a, b, scidata.concat(a, b), scidata.concat(b, a), scidata.subset(a, [0]), scidata.subset(a, [1])]
    kinds += [scidata.mix([a, b], [1, 1]), scidata.mix([a, b], [1, 2])]
    assert len({ds.fingerprint for ds in kinds}) == len(kinds)
    assert scidata.concat(a, b).fingerprint == scidata.concat(a, b).fingerprint


def test_refusals(a: Any) -> None:
    with pytest.raises(ConfigError, match="no data set"):
        scidata.concat()
    with pytest.raises(ConfigError, match="give the data sets one by one"):
        scidata.concat(a, [1, 2])
    with pytest.raises(ConfigError, match="by name"):
        scidata.mix({"a": a}, [1])
    with pytest.raises(UnknownNameError, match="'b' has no data set"):
        scidata.mix({"a": a}, {"a": 1, "b": 2})
    with pytest.raises(ConfigError, match="ratios decide"):
        scidata.DistributedSampler(scidata.mix([a], [1]), weights=np.ones(6))
