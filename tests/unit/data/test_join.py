"""Joins: what is read, what is refused, and what a join goes through."""

from __future__ import annotations

import json
import pickle
import re
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import xarray as xr

import scidata
from scidata.errors import ConfigError, UnknownNameError
from scidata.testing import make_grid

HOURS = [0, 6, 12, 24, 30]


def write_grid(path: Path, times: object, num_lat: int = 4) -> None:
    values = np.arange(len(times))[:, None] * 100.0 + np.arange(num_lat)
    ds = xr.Dataset(
        {"t": (("time", "lat"), values.astype("f4")), "oro": ("lat", np.arange(num_lat) * 1.0)}, {"time": times}
    )
    ds.to_netcdf(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine and a coarse grid, clouds whose names are hours, and a graph a day."""
    path = tmp_path_factory.mktemp("joins")
    start = np.datetime64("2020-02-28", "ns")
    write_grid(path / "fine.nc", start + np.arange(6) * np.timedelta64(6, "h"))
    write_grid(path / "coarse.nc", start + np.array(HOURS) * np.timedelta64(1, "h"), 3)
    (path / "clouds").mkdir()
    (path / "graphs").mkdir()
    for k, hour in enumerate(HOURS[1:]):
        with h5py.File(path / "clouds" / f"{hour:02}.h5", "w") as file:
            file["pos"], file["v"] = np.random.default_rng(k).random((k + 2, 3)), np.arange(k + 2) + 10.0 * hour
    ids = np.arange(6)
    for day in range(2):
        with h5py.File(path / "graphs" / f"2020-02-{28 + day}.h5", "w") as file:
            file["pos"] = np.stack([np.cos(ids * np.pi / 3), np.sin(ids * np.pi / 3)], axis=1)
            file["edge_index"] = np.stack([np.r_[ids, (ids + 1) % 6], np.r_[(ids + 1) % 6, ids]])
            file["speed"] = ids + 100.0 * day
    scidata.partition(str(path / "clouds" / "*.h5"), path / "cloud", kind="points", order="rows")
    scidata.partition(str(path / "graphs" / "*.h5"), path / "graph", kind="graph", order="rows")
    return path


def hours_of(ds: object) -> np.ndarray:
    names = ds.sample_keys("name").astype(int)
    return np.datetime64("2020-02-28", "ns") + names * np.timedelta64(1, "h")


def days_of(ds: object) -> np.ndarray:
    return ds.sample_keys("name").astype("M8[ns]")


@pytest.fixture
def opened(folder: Path) -> dict[str, object]:
    return {
        "fine": scidata.open_dataset(folder / "fine.nc"),
        "coarse": scidata.open_dataset(folder / "coarse.nc"),
        "cloud": scidata.open_dataset(folder / "cloud"),
        "graph": scidata.open_dataset(folder / "graph"),
    }


KEYS = {"fine": "time", "coarse": "time", "cloud": hours_of, "graph": days_of}


def joined(opened: dict[str, object], *names: str, **options: object) -> scidata.JoinedDataset:
    on = {name: KEYS[name] for name in names}
    return scidata.join({name: opened[name] for name in names}, on=on, **options)


def test_left_joins_have_empty_clouds(opened: dict[str, object]) -> None:
    ds = joined(opened, "fine", "cloud", how="left")
    assert [len(sample["cloud"]["v"]) for sample in ds] == [0, 2, 3, 0, 4, 5]
    assert ds.counts().tolist() == [0, 2, 3, 0, 4, 5]
    assert "no sample of 'cloud' for 2 keys, the first 2020-02-28T00:00:00" in ds.explain()
    for loader in (scidata.DataLoader(ds, 4), scidata.DataLoader(ds, 4, num_workers=0)):
        first, last = loader
        assert first["cloud"]["batch"].tolist() == [1, 1, 2, 2, 2]
        assert first["cloud"]["v"].tolist() == [60, 61, 120, 121, 122]
        assert first["fine"]["t"][:, 0].tolist() == [0, 100, 200, 300]
        assert last["cloud"]["pos"].shape == (9, 3)
        assert last.index == last["cloud"].index == [4, 5]
    empty = ds[0]["cloud"]
    assert empty.source == ()
    assert empty.original_id("point").shape == (0,)
    normal = ds.normalise({"cloud": scidata.statistics(ds.parts["cloud"])}, fields={"cloud": "v"})
    assert abs(torch.cat([x["cloud"]["v"] for x in normal]).mean()) < 1e-12
    assert normal.denormalise(normal[1])["cloud"]["v"].tolist() == pytest.approx([60, 61])


def test_joins_of_other_parts_are_no_data_set(opened: dict[str, object]) -> None:
    one, other = joined(opened, "fine", "coarse"), joined(opened, "fine")
    for these in ((one, other), (one, opened["fine"]), (scidata.subset(one, [0]), other)):
        with pytest.raises(ConfigError, match=r"have the parts \['fine', 'coarse'\] and"):
            scidata.concat(*these)


def test_all_kinds_go_together_and_are_parts_of_other_data_sets(opened: dict[str, object]) -> None:
    ds = joined(opened, "graph", "fine", "coarse")
    assert [x["graph"]["speed"][0].item() for x in ds] == [0, 100]
    assert [x["fine"]["t"][0].item() for x in ds] == [0, 400]
    assert ds[1]["graph"].edge_index.shape == (2, 12)
    (batch,) = scidata.DataLoader(ds, 2)
    assert batch["graph"].edge_index.shape == (2, 24)
    assert batch.key.tolist() == ds.keys.tolist()
    both = scidata.concat(joined(opened, "fine", "coarse"), joined(opened, "fine", "coarse", at={"coarse": "6h"}))
    assert [x.index for x in both] == list(range(9))
    assert [x["coarse"]["t"][0].item() for x in both][-4:] == [100, 200, 300, 400]
    chosen = scidata.subset(both, [6, 1, 1])
    (batch,) = scidata.DataLoader(chosen, 3)
    assert batch["coarse"]["t"][:, 0].tolist() == [chosen[i]["coarse"]["t"][0].item() for i in range(3)]
    assert batch.index == [0, 1, 2]
    mixed = scidata.mix([joined(opened, "fine", "coarse"), joined(opened, "fine", "coarse")], [1, 3])
    assert len(list(scidata.DataLoader(mixed, 2, shuffle=True))) > 1
    nested = scidata.join({"pair": joined(opened, "fine", "coarse"), "cloud": opened["cloud"]}, on={
        "pair": lambda pair: pair.keys, "cloud": hours_of
    })  # fmt: skip
    assert [x["pair"]["fine"]["t"][0].item() for x in scidata.DataLoader(nested, None)] == [100, 200, 400, 500]


def test_plans_and_places_of_files(opened: dict[str, object]) -> None:
    ds = joined(opened, "fine", "coarse", "cloud")
    assert ds.fields == ("fine/t", "fine/oro", "coarse/t", "coarse/oro", "cloud/pos", "cloud/v")
    plan = ds.plan(0)
    assert plan.bytes_wanted == sum(
        x.plan(i).bytes_wanted for x, i in ((opened["fine"], 1), (opened["coarse"], 1), (opened["cloud"], 0))
    )
    assert [Path(source.path).name for source in ds[1].source[:2]] == ["fine.nc", "coarse.nc"]
    again = pickle.loads(pickle.dumps(ds))
    assert again.fingerprint == ds.fingerprint != joined(opened, "fine", "cloud", "coarse").fingerprint
    assert again[2]["fine"]["t"].tolist() == ds[2]["fine"]["t"].tolist()
    assert repr(ds).startswith("JoinedDataset(4 samples joined on keys, how='inner' of fine: ShardedDataset(")


def test_transforms_and_their_errors(folder: Path) -> None:
    def double(sample: scidata.Sample) -> scidata.Sample:
        return sample.replace({"t": 2 * sample["t"], "n": torch.full((), sample.index)})

    fine = scidata.open_dataset(folder / "fine.nc", transform=double)
    coarse = scidata.open_dataset(folder / "coarse.nc")
    ds = scidata.join(
        {"fine": fine, "coarse": coarse}, "time", transform=lambda s: s.replace({"sum": s["fine"]["t"].sum()})
    )
    wanted = [2 * (400 * k + 6) for k in (0, 1, 2, 4, 5)]
    assert [x["sum"].item() for x in ds] == wanted
    assert [x["sum"].item() for x in scidata.DataLoader(ds, None)] == wanted
    assert [x["fine"]["n"].item() for x in scidata.DataLoader(ds, None)] == [0, 1, 2, 4, 5]  # its own numbers
    wrong = scidata.join({"fine": fine, "coarse": coarse}, "time", transform=lambda s: s["lam"])
    with pytest.raises(UnknownNameError, match="the sample has no part 'lam'; there are 'coarse', 'fine'") as caught:
        list(scidata.DataLoader(wrong, None))
    assert re.search(
        r"in the transform of sample 0, .*fine.nc\[0\] 2020-02-28T00:00:00, .*coarse.nc\[0\]",
        str(caught.value.__notes__),
    )


def test_worker_processes(opened: dict[str, object]) -> None:
    ds = joined(opened, "fine", "cloud")
    loader = scidata.DataLoader(ds, 2, workers="process", num_workers=1)
    assert [x for batch in loader for x in batch["cloud"]["v"].tolist()] == [
        60,
        61,
        *range(120, 123),
        *range(240, 244),
        *range(300, 305),
    ]


def test_other_calendars(tmp_path: Path) -> None:
    calendars = {"standard": "standard", "proleptic": "proleptic_gregorian", "noleap": "noleap", "days360": "360_day"}
    for name, calendar in calendars.items():
        write_grid(tmp_path / f"{name}.nc", xr.date_range("2001-02-26", periods=5, calendar=calendar, use_cftime=True))
    later = xr.date_range("2001-02-28", periods=5, calendar="noleap", use_cftime=True)
    write_grid(tmp_path / "later.nc", later)
    opened = {path.stem: scidata.open_dataset(path) for path in tmp_path.glob("*.nc")}
    assert len(scidata.join({n: opened[n] for n in ("standard", "proleptic")}, "time")) == 5
    same = scidata.join({n: opened[n] for n in ("noleap", "later")}, "time", at={"later": "1 day"})
    assert [str(key) for key in same.keys] == [
        "2001-02-27 00:00:00",
        "2001-02-28 00:00:00",
        "2001-03-01 00:00:00",
        "2001-03-02 00:00:00",
    ]
    with pytest.raises(ConfigError, match=r"'360_day' \('days360'\) and 'proleptic_gregorian' \('standard'\) do not"):
        scidata.join({n: opened[n] for n in ("standard", "days360")}, "time")


def test_refusals(opened: dict[str, object], tmp_path: Path) -> None:
    fine, coarse, cloud = opened["fine"], opened["coarse"], opened["cloud"]
    pair = {"fine": fine, "coarse": coarse}
    mixed = scidata.mix([fine, fine], [1, 1])
    twice = scidata.concat(coarse, coarse)
    make_grid(tmp_path / "other.zarr", num_times=2)
    other = scidata.open_dataset(tmp_path / "other.zarr")
    for arguments, options, message in [
        (([fine], "time"), {}, "give data sets by name"),
        (({"a/b": fine}, "time"), {}, "'a/b' is no name"),
        (({"a": mixed}, "time"), {}, "mix the joins"),
        ((pair, "tyme"), {}, "no value for each sample; did you mean 'time'.*one for each: on={'fine'"),
        ((pair, {"fine": "time"}), {}, "no entry for 'coarse'"),
        ((pair, {"fine": [1, 2], "coarse": "time"}), {}, r"'fine' have the shape \(2,\), for 6"),
        ((pair, "time"), {"how": "lefft"}, "did you mean 'left'"),
        ((pair, "time"), {"how": "left"}, "no sample of 'coarse' for the key 2020-02-28T18:00:00; only"),
        ((pair, "time"), {"tolerance": 3}, "expected a span of time"),
        ((pair, "time"), {"at": "6h"}, r"at='6h': expected a mapping, such as \{'obs': '-6h'\}"),
        ((pair, "time"), {"tolerance": "-1h"}, "must not be negative"),
        (({"fine": fine, "c": cloud}, {"fine": "time", "c": "name"}), {}, "'fine' are times, and .* 'c' are texts"),
        (({"fine": fine, "twice": twice}, "time"), {}, r"2 samples of 'twice' have the key 2020-02-28T0.*: \[0, 5\]"),
        (({"fine": fine, "other": other}, "time"), {}, "no key is in all.*'fine' has 2020-02-28.* 'other' has 2020-01"),
        (({"cloud": cloud, "again": cloud}, "name"), {"at": {"again": "6h"}}, "between which there is no distance"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            scidata.join(*arguments, **options)
    with pytest.raises(UnknownNameError, match="at names no data set 'crs'"):
        scidata.join(pair, "time", at={"crs": "6h"})
    with pytest.raises(ConfigError, match="of a join, gather those of each part"):
        scidata.statistics(scidata.join(pair, "time"))
    with pytest.raises(ConfigError, match="no part says which samples share chunks"):
        scidata.DataLoader(joined(opened, "graph"), shuffle="blocks")
    assert len(scidata.join({"twice": twice, "fine": fine}, "time")) == 10  # of the first, keys may come again


def test_blocks_are_of_all_parts(tmp_path: Path) -> None:
    for name, steps in (("a", 8), ("b", 4), ("c", 1)):
        values = np.arange(48.0)[:, None] * np.ones(6)
        ds = xr.Dataset({"u": (("time", "x"), values)}, {"time": np.arange(48)})
        ds.to_zarr(tmp_path / f"{name}.zarr", encoding={"u": {"chunks": (steps, 6)}}, consolidated=False)
    opened = {name: scidata.open_dataset(tmp_path / f"{name}.zarr", pool_bytes=1 << 20) for name in "abc"}
    ds = scidata.join(opened, "time", at={"b": 2})
    assert ds.blocks().tolist()[:12] == [0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4]
    loader = scidata.DataLoader(ds, 2, shuffle="blocks")
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            assert batch["b"]["u"][:, 0].tolist() == [key + 2 for key in batch["a"]["u"][:, 0].tolist()]
    fetched = loader.stats()["bytes_decoded"]
    whole = sum(8 * 6 * (8 * -(-46 // 8)) for _ in "ab") + 46 * 8 * 6 * 2
    assert fetched <= 1.4 * whole


def test_loaders_side_by_side_are_warned_of(opened: dict[str, object]) -> None:
    fine, coarse = opened["fine"], opened["coarse"]

    def warned(*loaders: scidata.DataLoader) -> bool:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(zip(*loaders, strict=False))
        return any("side by side" in str(each.message) for each in caught)

    assert warned(scidata.DataLoader(fine, shuffle=True), scidata.DataLoader(coarse, shuffle="blocks"))
    assert not warned(scidata.DataLoader(fine, shuffle=True), scidata.DataLoader(coarse))
    assert not warned(scidata.DataLoader(fine, shuffle=True), scidata.DataLoader(fine, shuffle=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in scidata.DataLoader(fine, shuffle=True):
            list(scidata.DataLoader(coarse, shuffle=True))  # as validation does


def test_state_is_plain(opened: dict[str, object]) -> None:
    loader = scidata.DataLoader(joined(opened, "fine", "cloud"), 1, sampler=None, shuffle=False)
    state = loader.state_dict()
    assert json.loads(json.dumps(state)) == state
    with pytest.raises(ConfigError, match="is of another data set"):
        scidata.DataLoader(joined(opened, "cloud", "fine"), 1).load_state_dict(state)
