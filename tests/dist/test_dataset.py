"""Data sets on real ranks: what they hand out, that they never communicate, and the meshes they accept."""

import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xarray as xr
from torch.distributed.device_mesh import init_device_mesh

import scidata
from scidata.errors import ConfigError, UnknownNameError, UnsupportedFormatError
from scidata.testing import make_grid, run_ranks
from tests.dist._workers import forked


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("grid") / "grid.zarr")
    return path, make_grid(path, format="zarr3", num_times=5, num_levels=2, num_lat=13, num_lon=10)


def mesh_of(num_ranks, domain, **options):
    return scidata.init_mesh(domain=domain, device="cpu", **options)


def sequence_numbers(mesh):
    """How many collectives each group of this process has run so far."""
    groups = [dist.group.WORLD, *(mesh.get_group(i) for i in range(mesh.ndim))]
    return [group._get_sequence_number_for_group() for group in groups]


def hands_out_shards(rank, num_ranks, path, whole):
    mesh = mesh_of(num_ranks, num_ranks)
    ds = scidata.open_dataset(path, mesh, fields=["u"], halo={"latitude": (1, 2)}, shard={"latitude": "domain"})
    before = sequence_numbers(mesh)
    samples = [ds[i] for i in range(len(ds))] + [ds[-1]]
    assert sequence_numbers(mesh) == before, "reading communicated"
    with pytest.raises(IndexError, match="sample 5 is out of range"):
        ds[5]
    for sample, wanted in zip(samples, [*whole, whole[-1]], strict=True):
        u = sample["u"]
        assert isinstance(u, scidata.ShardTensor)
        assert tuple(u.shape) == wanted.shape
        bounds = ds.reader.partition.bounds["latitude"]
        start, stop = int(bounds[rank]), int(bounds[rank + 1])
        assert u.to_local().numpy().tobytes() == np.ascontiguousarray(wanted[:, start:stop]).tobytes()
        padded = wanted[:, max(0, start - 1) : stop + 2]
        assert u.local_with_halo().numpy().tobytes() == np.ascontiguousarray(padded).tobytes()
        assert torch.equal(u.full_tensor(), torch.from_numpy(wanted))
    assert num_ranks == 1 or sequence_numbers(mesh) != before, "the spy does not see collectives"
    assert samples[-1].index == 4
    assert samples[0].dims["u"] == ("level", "latitude", "longitude")
    return {r: ds.plan(0, r).bytes_fetched for r in range(num_ranks)}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_rank_holds_its_rows_and_nothing_is_sent(store, num_ranks):
    path, wanted = store
    plans = run_ranks(hands_out_shards, num_ranks, path, wanted["u"])
    assert all(plan == plans[0] for plan in plans), "ranks disagree on what each of them reads"


def accepts_any_mesh(rank, num_ranks, path, whole):
    # a 2-D domain, made by init_mesh
    mesh = mesh_of(num_ranks, (2, 2), names=("dp", "h", "w"))
    ds = scidata.open_dataset(path, mesh, fields="u", shard={"latitude": "h", "longitude": "w"}, halo=1)
    assert torch.equal(ds[2]["u"].full_tensor(), torch.from_numpy(whole[2]))
    assert ds.plan(0).bytes_wanted == ds.plan(0, rank).bytes_wanted
    # the user's own mesh, with a tensor-parallel axis that replicates, and dp under another name
    own = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("data", "tp", "space"))
    ds = scidata.open_dataset(path, own, fields="u", shard={"latitude": "space"}, dp="data")
    u = ds[1]["u"]
    assert u.to_local().shape[1] == (7, 6)[own.get_local_rank("space")]
    assert torch.equal(u.full_tensor(), torch.from_numpy(whole[1]))
    # only a domain axis, and only a dp axis
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("domain",))
    assert scidata.open_dataset(path, line, fields="u")[0]["u"].to_local().shape[1] in (3, 4)
    groups = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    assert torch.equal(scidata.open_dataset(path, groups, fields="u")[0]["u"], torch.from_numpy(whole[0]))
    with pytest.raises(UnknownNameError, match="did you mean 'space'"):
        scidata.open_dataset(path, own, shard={"latitude": "spcae"}, dp="data")
    with pytest.raises(ConfigError, match="data-parallel axis"):
        scidata.open_dataset(path, own, shard={"latitude": "data"}, dp="data")


def test_meshes_of_one_and_two_domain_axes_and_of_the_users_own(store):
    path, wanted = store
    run_ranks(accepts_any_mesh, 4, path, wanted["u"])


def reads_empty_shards(rank, num_ranks, path, whole):
    mesh = mesh_of(num_ranks, num_ranks)
    ds = scidata.open_dataset(path, mesh, fields=["u"], bounds=[0, 4, 4, 13], halo=2, dtype=torch.bfloat16)
    u = ds[0]["u"]
    assert u.dtype is torch.bfloat16
    assert u.to_local().shape[1] == (4, 0, 9)[rank]
    assert torch.equal(u.full_tensor(), torch.from_numpy(whole[0]).float().bfloat16())
    batch = scidata.collate([ds[0], ds[3]])
    assert tuple(batch["u"].shape) == (2, *whole[0].shape)
    assert batch.index == [0, 3]
    wrapped = ds.assemble({"u": torch.stack([ds.read_local(i)["u"] for i in (0, 3)])}, index=[0, 3])
    assert torch.equal(wrapped["u"].full_tensor(), batch["u"].full_tensor())
    with pytest.raises(ConfigError, match="but this rank's part is"):
        ds.assemble({"u": torch.zeros(2, 99, 10)})
    shouting = scidata.open_dataset(path, mesh, fields=["u"], transform=lambda s: s.replace({"twice": s["u"] * 2}))
    assert torch.equal(shouting[1]["twice"].full_tensor(), 2 * torch.from_numpy(whole[1]))


def test_empty_shards_batches_and_transforms(store):
    path, wanted = store
    run_ranks(reads_empty_shards, 3, path, wanted["u"])


def feeds_the_stock_loader(rank, num_ranks, path, whole):
    mesh = mesh_of(num_ranks, num_ranks)
    ds = scidata.open_dataset(path, mesh, fields=["u"], halo=1)
    copy = pickle.loads(pickle.dumps(ds))
    assert copy.mesh is None
    assert torch.equal(copy[1]["u"], ds.read_local(1)["u"])
    with pytest.raises(ConfigError, match="in the parent"):
        copy.assemble(copy[1])
    context = forked() if rank else "spawn"  # one as those of users are, which takes seconds
    stock = torch.utils.data.DataLoader(ds, batch_size=2, num_workers=1, multiprocessing_context=context)
    for first, local in zip((0, 2, 4), stock, strict=True):
        with pytest.raises(ConfigError, match=r"rank's part.*ds.assemble"):
            local["u"]
        batch = ds.assemble(local)
        assert batch.index == [first, first + 1][: len(batch["u"])]
        assert torch.equal(batch["u"].full_tensor(), torch.from_numpy(whole[first : first + 2]))


def test_the_stock_loader_with_a_spawned_worker(store):
    path, wanted = store
    run_ranks(feeds_the_stock_loader, 2, path, wanted["u"], timeout=150)


def test_without_a_mesh_samples_are_plain(store):
    path, wanted = store
    ds = scidata.open_dataset(path, fields=["u"], dtype=torch.float32)
    assert len(ds) == 5
    assert type(ds[3]["u"]) is torch.Tensor
    assert ds[3]["u"].dtype is torch.float32
    assert "u (5" not in repr(ds[3])
    assert np.allclose(ds[3]["u"], wanted["u"][3])
    assert len(ds.coordinate("latitude")) == 13
    with pytest.raises(UnknownNameError, match="no field 'U'; did you mean 'u'"):
        ds[3]["U"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"kind": "gird"}, ConfigError, "did you mean 'grid'"),
        ({"kind": "mesh"}, UnsupportedFormatError, "scidata partition .* OUT --kind mesh"),
        ({"ghosts": "disk"}, ConfigError, "always read from disk"),
        ({"dtype": torch.int32}, ConfigError, "floating torch dtype"),
        ({"halo": 1}, ConfigError, "halo=1 needs a mesh"),
        ({"shard": {"latitude": "domain"}}, ConfigError, "needs a mesh"),
        ({"halo": {"latitude": 1}}, ConfigError, "needs a mesh"),
    ],
)
def test_arguments_that_cannot_be_honoured(store, options, error, words):
    with pytest.raises(error, match=words):
        scidata.open_dataset(store[0], **options)


def gives_its_part_to_xarray(rank, num_ranks, path):
    mesh = mesh_of(num_ranks, num_ranks)
    ds = scidata.open_dataset(
        path, mesh, fields=["u"], halo={"latitude": 2}, shard={"latitude": "domain"}, bounds=[*[0, 5, 5, 13][:num_ranks], 13],
        coords=True,
    )  # fmt: skip
    sample = ds[2]
    latitude, before = sample.coords["latitude"], sequence_numbers(mesh)
    assert isinstance(latitude, scidata.ShardTensor)
    assert latitude.local_with_halo().shape[0] == sample["u"].local_with_halo().shape[1]
    found = sample.to_xarray()
    assert sequence_numbers(mesh) == before
    weights = torch.cos(torch.deg2rad(latitude.double()))
    mean = ((sample["u"].double() * weights[None, :, None]).sum() / weights.sum()).item()
    batch = next(iter(scidata.DataLoader(ds, batch_size=2)))
    assert torch.equal(batch.coords["latitude"].full_tensor(), latitude.full_tensor())
    return found.load(), mean


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_parts_put_together_are_what_xarray_reads(store, num_ranks):
    path, _ = store
    parts = run_ranks(gives_its_part_to_xarray, num_ranks, path)
    with xr.open_zarr(path, chunks=None, consolidated=False) as whole:
        want = whole[["u"]].isel(time=2).load()
    xr.testing.assert_identical(xr.concat([part for part, _ in parts], "latitude").u.variable, want.u.variable)
    xr.testing.assert_equal(xr.concat([part for part, _ in parts if part.sizes["latitude"]], "latitude"), want)
    weights = np.cos(np.deg2rad(want.latitude.astype("f8")))
    mean = float((want.u.astype("f8") * weights).sum() / weights.sum())
    assert [found for _, found in parts] == pytest.approx([mean] * num_ranks, rel=1e-12)
