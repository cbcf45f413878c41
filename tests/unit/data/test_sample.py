"""A sample in a user's hands: where it comes from."""

import pickle

import h5py
import numpy as np
import pytest
import torch
import xarray as xr

import scidata
from scidata.errors import ConfigError, UnknownNameError, UnsupportedFormatError
from scidata.grids import reader
from scidata.sources import open_source
from tests.real_layouts.make import mesh_graph_nets

TIMES = np.arange("2015-01-01", "2015-01-04", 6, dtype="M8[h]").astype("M8[ns]")


def grid(times=TIMES, **more):
    shape = (len(times), 3, 6, 8)
    values = np.arange(np.prod(shape), dtype="f4").reshape(shape)
    dims = ("time", "level", "lat", "lon")
    return xr.Dataset({"u": (dims, values), **more}, {"time": times, "level": [1000, 500, 100]})


@pytest.fixture
def files(tmp_path):
    for number, part in enumerate((TIMES[:5], TIMES[5:])):
        grid(part).to_netcdf(tmp_path / f"{number}.nc")
    return [f"{tmp_path}/0.nc", f"{tmp_path}/1.nc"]


def places(sample):
    return [(source.path[-4:], source.index) for source in sample.source]


def test_source_of_steps_over_two_files(files):
    ds = scidata.open_dataset(files, steps=(-1, 0, 2))
    assert places(ds[3]) == [("0.nc", 3), ("0.nc", 4), ("1.nc", 1)]
    assert [source.time for source in ds[3].source] == list(TIMES[[3, 4, 6]])
    assert ds[3].source == ds.sources_of(3) == ds.sources_of(3 - len(ds))
    assert str(ds[0].source[1]).endswith("0.nc[1] 2015-01-01T06:00:00")
    with pytest.raises(IndexError, match="out of range"):
        ds.sources_of(len(ds))


def test_source_follows_crops_batches_and_combined_data_sets(files):
    cropped = scidata.open_dataset(files, isel={"time": slice(1, 12, 2)})
    assert places(cropped[2]) == [("1.nc", 0)]
    twice = scidata.subset(scidata.concat(cropped, cropped), [7, 2])
    assert places(scidata.collate([twice[0], twice[1]])) == [("0.nc", 3), ("1.nc", 0)]
    (batch,) = scidata.DataLoader(twice, batch_size=2)
    assert places(batch) == [("0.nc", 3), ("1.nc", 0)]
    assert places(batch.replace({"w": batch["u"] * 2}).to(torch.float64)) == places(batch)
    assert scidata.Sample({"u": torch.zeros(1)}, dims={"u": ("x",)}, index=None).source == ()


def test_source_of_members_and_of_a_file_without_times(tmp_path):
    dims = ("member", "time", "lat", "lon")
    values = np.random.default_rng(0).random((3, len(TIMES), 6, 8))
    xr.Dataset({"t": (dims, values)}, {"time": TIMES}).to_netcdf(tmp_path / "ens.nc")
    ds = scidata.open_dataset(str(tmp_path / "ens.nc"), sample_dim=("member", "time"), steps=(0, 1))
    first, second = ds[len(TIMES)].source  # each member has one window less than times
    assert (first.trajectory, first.index, second.index, second.time) == ({"member": 1}, 1, 2, TIMES[2])
    turned = scidata.open_dataset(str(tmp_path / "ens.nc"), sample_dim=("time", "member"))
    assert [(s.trajectory, s.index, s.time) for s in turned[7].source] == [({"time": 2}, 1, TIMES[2])]
    whole = scidata.open_dataset(str(tmp_path / "ens.nc"), sample_dim=False)
    (source,) = whole[0].source
    assert (source.index, source.time) == (0, None)


def test_times_that_cannot_be_decoded_have_no_label(tmp_path):
    ds = grid(np.arange(4))
    ds["time"].attrs["units"] = "months since 0000-01-01"
    ds.to_netcdf(tmp_path / "a.nc")
    sample = scidata.open_dataset(str(tmp_path / "a.nc"), coords=True, gaps="allow")[2]
    assert (sample.source[0].index, sample.source[0].time) == (2, None)
    with pytest.raises(UnsupportedFormatError):
        sample.coords  # noqa: B018


def test_source_of_stores_and_clouds(tmp_path):
    for number in (1, 2):
        with h5py.File(tmp_path / f"car_{number}.h5", "w") as file:
            file["points"] = np.random.default_rng(number).random((30 * number, 3))
    raw = scidata.open_dataset(f"{tmp_path}/car_*.h5", kind="points")
    assert [source.path for source in raw[1].source] == [f"{tmp_path}/car_2.h5"]
    scidata.partition(f"{tmp_path}/car_*.h5", str(tmp_path / "cars.store"), kind="points")
    ds = scidata.open_dataset(str(tmp_path / "cars.store"))
    (batch,) = scidata.DataLoader(ds, batch_size=2)
    want = [f"{tmp_path}/cars.store/sample-{number:06d}.zarr" for number in range(2)]
    assert (
        [source.path for source in batch.source] == [source.path for i in range(2) for source in ds[i].source] == want
    )
    assert batch.to(torch.float64).replace({"w": batch["pos"] * 2}).source == batch.source


def fails(sample):
    raise ValueError("no rain")


def test_an_error_of_a_transform_names_the_source(files):
    ds = scidata.open_dataset(files, transform=fails)
    for read in (lambda: ds[6], lambda: list(scidata.DataLoader(scidata.subset(ds, [6]), batch_size=1))):
        with pytest.raises(ValueError, match="no rain") as caught:
            read()
        assert "1.nc[1] 2015-01-02T12:00:00" in caught.value.__notes__[0]


@pytest.fixture
def weather(files, tmp_path):
    for number in (0, 1):
        with xr.open_dataset(f"{tmp_path}/{number}.nc") as found:
            t2m = found.u.isel(level=0, drop=True) + 5
            solar, land = t2m * 2, t2m.isel(time=0, drop=True)
            made = found.assign(t2m=t2m, solar=solar, land=land).load()
        made.to_netcdf(f"{tmp_path}/{number}.nc")
    return files


STEPS = {"u": (-1, 0, 1), "t2m": (-1, 0, 1), "solar": (0, 1)}


def test_one_step_has_its_dims_times_and_source(weather):
    ds = scidata.open_dataset(weather, steps=STEPS, coords=True)
    for sample in (ds[4], scidata.collate([ds[4], ds[2]])):
        lead = ("batch",) * isinstance(sample.index, list)
        for k, row in ((-1, 4), (0, 5), (1, 6)):
            step = sample.step(k)
            assert list(step) == [name for name in sample if k in STEPS.get(name, (k,))]
            assert step.dims["u"] == (*lead, "level", "lat", "lon")
            assert step.dims["land"] == sample.dims["land"]
            times = step.coords["time"]
            assert (times[0] if lead else times) == TIMES[row] == step.source[0].time
            assert len(step.source) == 1 + len(lead)
            at = (slice(None),) * len(lead) + (STEPS["t2m"].index(k),)
            assert torch.equal(step["t2m"], sample["t2m"][at])
            assert "u_time" not in step.coords
            assert step.step(k).source == step.source
            with pytest.raises(ConfigError, match=f"no step 7, but {k}"):
                step.step(7)
    assert ds[4].step(1).to_xarray().time.values == TIMES[6]
    with pytest.raises(ConfigError, match="no step 2, but -1, 0, 1"):
        ds[0].step(2)
    with pytest.raises(ConfigError, match="step: k"):
        ds[0].step("1")
    with pytest.raises(ConfigError, match="field 'u' has 2 rows of 'time', not steps"):
        ds[0].replace({"u": ds[0]["u"][:2]}).step(0)
    with pytest.raises(ConfigError, match="not read from a data set"):
        scidata.Sample({"u": torch.zeros(1)}, dims={"u": ("x",)}, index=None).step(0)


def test_a_data_set_of_one_step_has_it(weather):
    ds = scidata.open_dataset(weather, steps=(1,), coords=True)
    assert list(ds[0].step(1)) == list(ds[0])
    assert ds[0].step(1).coords["time"] == TIMES[1]
    by_field = scidata.open_dataset(weather, fields=["u", "t2m", "land"], steps={"u": (0,), "t2m": (1,)})
    assert list(by_field[0].step(0)) == ["u", "land"]
    assert list(by_field[0].step(1)) == ["t2m", "land"]


def test_a_prediction_keeps_dims_and_metrics_by_level_work(weather):
    ds = scidata.open_dataset(weather, steps=STEPS)
    normal = ds.normalise(scidata.statistics(ds, by="level"))
    rmse = scidata.metrics.RMSE(by="level")
    by_dict = scidata.metrics.RMSE(by="level", dims=("level", "lat", "lon"))
    for batch in scidata.DataLoader(normal, batch_size=2):
        output = batch["u"][:, 1] * 0.5  # (batch, level, lat, lon)
        assert batch.replace({"u": output}).dims["u"][1] == "dim_1"  # there are as many levels as steps
        made = batch.replace({"u": output}, dims={"u": ("batch", "level", "lat", "lon")})
        assert made.dims["u"] == ("batch", "level", "lat", "lon")
        truth = normal.denormalise(batch.step(1))
        rmse.update({"u": normal.denormalise(made)["u"]}, truth)
        plain = normal.denormalise({"u": output, "land": batch["land"]})
        assert torch.equal(plain["u"], normal.denormalise(made)["u"])
        by_dict.update({"u": plain["u"]}, {"u": truth["u"]}, index=batch.index)
    assert torch.equal(rmse.compute()["u"], by_dict.compute()["u"])
    one = normal[3].step(0)
    raw = ds[3]
    torch.testing.assert_close(normal.denormalise(one)["u"], raw["u"][1])
    torch.testing.assert_close(normal.denormalise({"u": one["u"]})["u"], raw["u"][1])
    torch.testing.assert_close(normal.denormalise({"u": normal[3]["u"][:2]})["u"], raw["u"][:2])
    torch.testing.assert_close(normal.denormalise({"t2m": one["t2m"]})["t2m"], raw["t2m"][1])
    with pytest.raises(ConfigError, match="a tensor of 2 dims"):
        normal.denormalise({"u": one["u"][0]})
    with pytest.raises(ConfigError, match=r"by 'level' has dims \('dim_0', 'dim_1', 'dim_2'\)"):
        normal.denormalise(normal[3].replace({"u": one["u"]}))


def test_dims_of_made_fields():
    old = {"u": torch.zeros(2, 3, 4, 5), "s": torch.zeros(4, 5), "e": torch.zeros(3, 3, 6)}
    dims = {"u": ("time", "level", "lat", "lon"), "s": ("lat", "lon"), "e": ("a", "b", "c")}
    sample = scidata.Sample(old, dims=dims, index=0)

    def found(name, *shape, **given):
        return sample.replace({name: torch.zeros(shape)}, **given).dims[name]

    assert found("u", 3, 4, 5) == ("level", "lat", "lon")
    assert found("u", 2, 3, 4, 4) == dims["u"]  # cropped
    assert found("new", 2, 4, 5) == ("time", "lat", "lon")
    assert found("new", 3) == ("dim_0",)  # level, a or b
    assert found("e", 3, 6) == ("dim_0", "dim_1")  # a or b
    assert found("e", 3, 6, dims={"e": ("b", "c")}) == ("b", "c")
    assert found("new", 7, 4, 5) == ("dim_0", "dim_1", "dim_2")
    assert found("new") == ()
    for wrong in ({"new": ("a", "b")}, {"new": "abc"}, {"new": ("a", "a", "b")}):
        with pytest.raises(ConfigError, match="but the tensor has shape"):
            found("new", 7, 4, 5, dims=wrong)
    with pytest.raises(UnknownNameError, match=r"dims of field 'nwe'.*'new'"):
        found("new", 7, dims={"nwe": ("a",)})


def test_stack_tells_inputs_from_targets(weather):
    ds = scidata.open_dataset(weather, steps=STEPS)
    batch = scidata.collate([ds[0], ds[5]])
    x = batch.stack(["u", "t2m", "solar", "land"], steps={"*": (-1, 0), "solar": (0, 1)})
    parts = [batch["u"][:, :2].flatten(1, 2), batch["t2m"][:, :2], batch["solar"], batch["land"][:, None]]
    assert torch.equal(x, torch.cat(parts, 1))
    target = ds.channels(["u", "t2m"], steps=1)
    assert target.names == ("u[level=1000]", "u[level=500]", "u[level=100]", "t2m")
    y = target.stack(batch)
    assert torch.equal(y, torch.cat([batch["u"][:, 2], batch["t2m"][:, 2:]], 1))
    assert torch.equal(y, target.stack(batch.step(1)))
    assert torch.equal(y, batch.stack(["u", "t2m"], steps=1))
    back = target.unstack(y)
    assert torch.equal(back["u"], batch.step(1)["u"])
    assert torch.equal(back["t2m"], batch.step(1)["t2m"])
    kept = ds.channels(["u"], steps=(1, -1))
    assert kept.names[0] == "u[time=1, level=1000]"
    assert torch.equal(kept.unstack(kept.stack(batch))["u"], batch["u"][:, [2, 0]])
    with pytest.raises(ConfigError, match=r"'solar' has steps \(0, 1\), not -1"):
        ds[0].stack(["u", "solar"], steps=(-1, 0))
    with pytest.raises(UnknownNameError, match="steps of field 'uu'"):
        ds[0].stack(["u"], steps={"uu": 0})


def test_steps_and_made_fields_of_a_store(tmp_path):
    mesh_graph_nets(tmp_path / "a.h5")
    scidata.partition(f"{tmp_path}/a.h5/*", f"{tmp_path}/out")
    ds = scidata.open_dataset(f"{tmp_path}/out", steps=(0, 1), sample_dim="dim_0")
    each = ds.view(fields=["velocity"], steps=(0,))
    assert (each.fields, each.reader.store) == (("velocity",), ds.reader.store)
    assert torch.equal(each[1]["velocity"], ds[0].step(1)["velocity"])
    sample, later = ds[0], ds[1]
    step = sample.step(1)
    assert step.dims["velocity"] == ds.dims("velocity")[1:]
    assert torch.equal(step["velocity"], later["velocity"][0])
    assert step.source == later.source[:1]
    assert step.entity_of("velocity") == "node"
    assert torch.equal(step.with_ghosts("velocity"), step["velocity"])
    batch = scidata.collate([sample, ds[5]]).step(0)  # of two meshes
    assert torch.equal(batch["velocity"], torch.cat([sample["velocity"][0], ds[5]["velocity"][0]]))
    assert (batch.entity_of("velocity"), len(batch.source)) == ("node", 2)
    ghosts = scidata.open_dataset(
        f"{tmp_path}/out", scidata.init_mesh(), steps=(0, 1), sample_dim="dim_0", halo=1, ghosts="disk"
    )
    assert torch.equal(ghosts[0].step(1).with_ghosts("velocity"), step["velocity"])
    made = sample.replace({"velocity": step["velocity"] * 2})  # a model's, of one step
    assert (made.dims["velocity"], made.places["velocity"]) == (step.dims["velocity"], step.places["velocity"])


def test_a_view_opens_nothing(weather, monkeypatch):
    """Pairs to train on, what is given and what came of a forecast, and its start: one opening."""
    opened = []
    monkeypatch.setattr(reader, "open_source", lambda *args, **more: opened.append(args) or open_source(*args, **more))
    ds = scidata.open_dataset(weather, fields=["u", "t2m"], steps=(0, 1), coords=True, transform=fails)
    stats = scidata.statistics(scidata.open_dataset(weather))
    normal = ds.normalise(stats, fields=["u"])
    before = [*opened]
    start = normal.view(steps=(-1, 0))
    given = ds.view(fields=["solar", "land"], steps={"solar": range(1, 4)}).normalise(stats, fields="solar")
    truth = ds.view(fields=["u"], steps=(0,))
    assert opened == before
    alone = scidata.open_dataset(weather, fields=["solar", "land"], steps={"solar": range(1, 4)})
    for i in (0, 5):
        want = alone.normalise(stats, fields="solar")[i]
        assert all(torch.equal(given[i][name], want[name]) for name in want)
        assert torch.equal(truth[i]["u"], scidata.open_dataset(weather, fields=["u"])[i]["u"])
        now = start[i].step(0)
        assert now.coords["time"] == truth[i + 1].coords["time"]
        torch.testing.assert_close(start.denormalise(now)["u"], truth[i + 1]["u"])
    assert list(start.normalising) == ["u"]
    assert pickle.loads(pickle.dumps(given))[2].source == given[2].source
    batches = scidata.DataLoader(scidata.concat(given, given), batch_size=3)
    assert sum(len(batch.index) for batch in batches) == 2 * len(given)
