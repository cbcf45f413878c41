"""Grids, as a user's script has them: what a data set, its samples, a loader's batches and their fields are."""

from typing import assert_type

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import scidata
from scidata import Sample, ShardTensor

mesh = scidata.init_mesh(dp=1, domain=-1)
assert_type(mesh, DeviceMesh)


def with_speed(sample: Sample[ShardTensor]) -> Sample[ShardTensor]:
    assert_type(sample.generator, torch.Generator)
    return sample.replace({"speed": (sample["u"] ** 2 + sample["v"] ** 2).sqrt()})


def of_any_sample(sample: Sample) -> Sample:
    return sample.to(torch.float32)


def in_kelvin(part: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"t": part["t"] + 273.15}


ds = scidata.open_dataset(
    "era5.zarr",
    mesh,
    fields=["u", "v"],
    shard={"latitude": "domain"},
    halo={"latitude": 2},
    isel={"level": slice(3)},
    steps=(0, 1),
    dtype=torch.float32,
    transform=with_speed,
    local_transform=in_kelvin,
)
assert_type(ds, scidata.ShardedDataset[ShardTensor])
assert_type(ds[0], Sample[ShardTensor])
assert_type(ds[0]["u"], ShardTensor)
assert_type(ds[0]["u"].local_with_halo(), Tensor)
assert_type(ds[0]["u"].to_local(), Tensor)
assert_type(ds[0]["u"].full_tensor(), Tensor)
assert_type(ds[0].dims, dict[str, tuple[str, ...]])
assert_type(len(ds), int)
print(ds.plan(0, rank=3).bytes_fetched, ds.coordinate("latitude"), ds.global_shape("u"))

named = scidata.open_dataset("era5.zarr", mesh, kind="grid", halo=2, transform=of_any_sample)
assert_type(named, scidata.ShardedDataset[ShardTensor])
plain = scidata.open_dataset("era5.zarr", kind="grid", transform=lambda sample: sample.replace({"w": sample["u"]}))
assert_type(plain[0], Sample)
assert_type(plain[0]["u"], Tensor)

windows = scidata.open_dataset(
    "era5.zarr", mesh, kind="grid", steps={"u": (-1, 0, 1), "*": [0]}, gaps="error", sample_dim=("member", "time")
)
assert_type(windows.static_fields, tuple[str, ...])
whole = scidata.open_dataset("soil.nc", kind="grid", sample_dim=False, gaps="allow")
assert_type(whole[0].stack(), Tensor)
channels = windows.channels(["u", "t2m"])
assert_type(channels, scidata.Channels)
assert_type(channels.names, tuple[str, ...])
assert_type(channels.stack(windows[0]), ShardTensor)
assert_type(windows[0].stack(["u"], dims=("lat", "lon")), ShardTensor)
assert_type(channels.unstack(torch.zeros(4, 6, 7)), dict[str, Tensor])

sampler = scidata.DistributedSampler(ds, mesh, shuffle="blocks", seed=1, drop_last=True)
loader = scidata.DataLoader(
    ds,
    batch_size=2,
    sampler=sampler,
    num_workers=2,
    pin_memory=True,
    device="cpu",
    prefetch_factor=3,
    timeout=60,
    on_error="skip",
    workers="thread",
    max_prefetch_bytes=2**30,
)
assert_type(loader, scidata.DataLoader[Sample[ShardTensor]])
model = scidata.parallelize(nn.Conv2d(2, 2, 3, padding=1), mesh)
assert_type(model, nn.Conv2d)
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(2):
    loader.set_epoch(epoch)
    for batch in loader:
        assert_type(batch, Sample[ShardTensor])
        assert_type(batch["u"], ShardTensor)
        with scidata.no_sync(model):
            loss: Tensor = model(batch["u"]).mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own, without types
        optimizer.step()
        print(loss.item(), batch["u"].local_with_halo().shape, batch.index)
print(loader.stats(), len(loader))
loader.load_state_dict(loader.state_dict())
assert_type(next(iter(loader)), Sample[ShardTensor])

for sample in scidata.DataLoader(plain, batch_size=None, shuffle=True):
    assert_type(sample, Sample)


def stacked(samples: list[Sample[ShardTensor]]) -> tuple[Tensor, int]:
    return scidata.collate(samples)["u"], len(samples)


for pair in scidata.DataLoader(ds, 4, collate_fn=stacked):
    assert_type(pair, tuple[Tensor, int])

assert_type(scidata.collate([ds[0], ds[1]]), Sample[ShardTensor])
