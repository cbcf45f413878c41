"""Fields without the sample dimension: read once, kept once, right in every sample whatever is done to one of them."""

import json
import pickle

import numpy as np
import pytest
import torch
import xarray as xr
from torch.utils.data import DataLoader as TorchLoader
from typer.testing import CliRunner

import scidata
from scidata.cli.app import app
from scidata.errors import ConfigError
from scidata.testing.ranks import fork_server

NUM = 6
U, MASK, SOIL = (
    np.random.default_rng(0).random(shape, np.float32) for shape in ((NUM, 2, 5, 4), (5, 4), (9, 5, 4))
)  # fmt: skip


def write(path, mask=MASK, **more):
    fields = {"u": (("time", "level", "y", "x"), U), "mask": (("y", "x"), mask)} | more
    encoding = {name: {"zlib": True} for name in fields}
    xr.Dataset(fields, {"time": np.arange(NUM)}).to_netcdf(path, engine="netcdf4", encoding=encoding)
    return str(path)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("static") / "a.nc")


def check(batch, mask=MASK):
    want = torch.from_numpy(mask).to(batch["mask"].dtype)
    assert torch.equal(batch["mask"], want.expand_as(batch["mask"]))
    assert batch["mask"].shape[-2:] == want.shape
    for u, index in zip(batch["u"], batch.index, strict=True):
        assert torch.equal(u, torch.from_numpy(U[index]).to(u.dtype))


@pytest.mark.parametrize(
    "more", [{}, {"num_workers": 0}, {"workers": "process", "num_workers": 1, "persistent_workers": True}], ids=str
)
def test_read_once_and_out_of_the_buffers(path, more):
    ds = scidata.open_dataset(path)
    assert (ds.static_fields, ds.static_nbytes, list(ds.buffer_specs())) == (("mask",), MASK.nbytes, ["u"])
    if "workers" in more:
        more = more | {"multiprocessing_context": fork_server()}
    loader = scidata.DataLoader(ds, batch_size=4, **more)
    held = []
    for _ in range(2):
        for batch in loader:
            check(batch)
            held.append(batch)
    assert list(batch) == list(ds.fields)
    assert batch.dims["mask"] == ("batch", "y", "x")
    assert len({batch["mask"].untyped_storage().data_ptr() for batch in held}) == 1
    stats = loader.stats()
    assert (stats["bytes"], stats["bytes_static"]) == (2 * U.nbytes, MASK.nbytes)
    u_alone = scidata.open_dataset(path, fields=["u"])
    other = scidata.DataLoader(u_alone, batch_size=4, **more)
    for _ in range(2):
        for _ in other:
            pass
    if "workers" not in more:  # whose parent reads it, at its first batch
        nbytes = ds.plan(0).bytes_fetched - u_alone.plan(0).bytes_fetched
        assert stats["bytes_fetched"] == other.stats()["bytes_fetched"] + nbytes


def test_what_is_changed_in_place_is_in_no_later_sample(path):
    ds = scidata.open_dataset(path)
    for k in range(3):
        sample = ds[k]
        assert np.array_equal(sample["mask"].numpy(), MASK)
        sample["mask"].mul_(2)
    loader = scidata.DataLoader(ds, batch_size=1)
    for batch in loader:
        check(batch)
        batch["mask"][0, 1:] = 0
    with pytest.raises(RuntimeError, match="clone"):
        next(iter(scidata.DataLoader(ds, batch_size=2)))["mask"].mul_(2)
    doubled = scidata.open_dataset(path, transform=lambda s: s.replace({"mask": s["mask"].mul_(2)}))
    for batch in scidata.DataLoader(doubled, batch_size=3):
        check(batch, 2 * MASK)
    ds[0]["mask"].requires_grad_()
    assert not ds[1]["mask"].requires_grad


def test_what_is_read_while_validating_trains(path):
    ds = scidata.open_dataset(path)
    with torch.inference_mode():
        assert ds[0]["mask"].sum() > 0
    weight = torch.ones((), requires_grad=True)
    (weight * ds[1]["mask"]).sum().backward()
    assert weight.grad == ds[1]["mask"].sum()
    with torch.inference_mode():
        ds[2]["mask"].mul_(2)
    assert np.array_equal(ds[1]["mask"].numpy(), MASK)


def test_transforms_normalising_dtypes_and_copies(path):
    masked = scidata.open_dataset(path, local_transform=lambda part: {"mask": part["mask"] + part["u"][0]})
    assert list(masked.buffer_specs()) == ["u", "mask"]
    assert masked.static_nbytes == 0
    for batch in scidata.DataLoader(masked, batch_size=2):
        assert torch.equal(batch["mask"], torch.from_numpy(MASK + U[batch.index, 0]))
    ds = scidata.open_dataset(path)
    assert np.array_equal(ds[0]["mask"].numpy(), MASK)
    stats = scidata.statistics(ds)
    normal = ds.normalise(stats, fields=["mask"])
    for batch in scidata.DataLoader(normal, batch_size=3):
        check(batch, ds.normalise(stats)[0]["mask"].numpy())
        assert abs(batch["mask"].mean()) < 1e-6
    assert torch.allclose(normal.denormalise(normal[3])["mask"], torch.from_numpy(MASK))
    check(next(iter(scidata.DataLoader(scidata.open_dataset(path, dtype=torch.bfloat16), batch_size=2))))
    again = pickle.loads(pickle.dumps(ds))
    assert np.array_equal(again[1]["mask"].numpy(), MASK)
    part = ds.assemble({"u": torch.from_numpy(U[0])})
    assert np.array_equal(part["mask"].numpy(), MASK)
    assert list(ds.assemble({"mask": torch.zeros(5, 4)})) == ["mask"]


def test_torchs_loader_and_data_sets_made_of_others(path, tmp_path):
    other = write(tmp_path / "b.nc", 1 - MASK)
    a, b = scidata.open_dataset(path), scidata.open_dataset(other)
    both = scidata.concat(a, b)
    assert both.static_nbytes == 2 * MASK.nbytes
    for batch in scidata.DataLoader(both, batch_size=4):
        for index, mask in zip(batch.index, batch["mask"], strict=True):
            assert np.array_equal(mask.numpy(), MASK if index < NUM else 1 - MASK)
    mixed = scidata.mix([a, b], [1, 1])
    for batch in scidata.DataLoader(mixed, batch_size=3, shuffle=True):
        for index, mask in zip(batch.index, batch["mask"], strict=True):
            assert np.array_equal(mask.numpy(), MASK if index < NUM else 1 - MASK)
    for batch in scidata.DataLoader(scidata.subset(a, [5, 2, 4]), batch_size=2):
        assert np.array_equal(batch["mask"][0].numpy(), MASK)
    for sample in TorchLoader(a, batch_size=None, num_workers=1, multiprocessing_context=fork_server()):
        assert np.array_equal(sample["mask"].numpy(), MASK)


def test_layers_alone_are_no_samples_and_none_beside_times(tmp_path):
    alone = str(tmp_path / "soil.nc")
    xr.Dataset({"soil": (("layer", "y", "x"), SOIL)}).to_netcdf(alone)
    with pytest.raises(ConfigError, match=r"'layer' is vertical.*sample_dim=: 'layer' takes each.*False"):
        scidata.open_dataset(alone)
    assert len(scidata.open_dataset(alone, sample_dim="layer")) == 9
    (sample,) = scidata.open_dataset(alone, sample_dim=False)
    assert np.array_equal(sample["soil"].numpy(), SOIL)
    found = CliRunner().invoke(app, ["inspect", alone])
    assert "'layer' is vertical" in found.output.replace("\n", " ")
    whole = CliRunner().invoke(app, ["plan", alone, "--domain", "2", "--sample-dim", "none", "--json"])
    assert '"num_samples": 1' in whole.output, whole.output
    beside = write(tmp_path / "beside.nc", t=(("time", "y", "x"), U[:, 0]), soil=(("layer", "y", "x"), SOIL))
    with pytest.warns(UserWarning, match="soil: not on the grid of u"):
        assert scidata.open_dataset(beside).fields == ("u", "mask", "t")
    ds = scidata.open_dataset(beside, fields=["soil", "t"])  # layers are more than times
    assert (len(ds), ds.static_fields) == (NUM, ("soil",))
    assert np.array_equal(ds[2]["soil"].numpy(), SOIL)


def test_the_plan_says_what_is_read_once(path):
    found = CliRunner().invoke(app, ["plan", path, "--domain", "2", "--json"])
    assert '"static_fields": ["mask"]' in " ".join(found.output.split()).replace("[ ", "[").replace(" ]", "]")
    assert "the same in all samples; read once and kept, up to 48 bytes a rank" in found.output
    without = CliRunner().invoke(app, ["plan", path, "--domain", "2", "--fields", "u", "--json"])
    ours, right = (json.loads(each.stdout) for each in (found, without))
    assert ours["totals"]["bytes_owned"] == right["totals"]["bytes_owned"] == U[0].nbytes
    assert ours["totals"]["bytes_decoded"] == right["totals"]["bytes_decoded"]


def test_a_field_named_as_a_coordinate_is_not_left_out_without_a_word(tmp_path):
    made = xr.Dataset({"u": (("time", "y", "x"), U[:, 0]), "ens": (("time", "y", "x"), U[:, 1])})
    made["u"].attrs["coordinates"] = "ens"
    made.to_netcdf(path := str(tmp_path / "a.nc"))
    with pytest.warns(UserWarning, match="ens: a coordinate by the attribute 'coordinates' of others, left out unless"):
        assert scidata.open_dataset(path).fields == ("u",)
    assert scidata.open_dataset(path, fields=["u", "ens"]).fields == ("u", "ens")
    for command in (["inspect", path], ["plan", path, "--domain", "1"]):
        assert "ens: a coordinate by the attribute" in " ".join(CliRunner().invoke(app, command).output.split())
