"""Several data sets as one, and operations of a user's own."""

from typing import Any, assert_type

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

import scidata
from scidata import IrregularSample, Sample, ShardTensor

mesh = scidata.init_mesh(domain=(2, 2), names=("dp", "h", "w"))
era5 = scidata.open_dataset("era5.zarr", mesh, shard={"lat": "h", "lon": "w"})
cmip = scidata.open_dataset("cmip/*.nc", mesh, kind="grid")
flow = scidata.open_dataset("flow.store", mesh, kind="mesh")

assert_type(scidata.subset(era5, range(0, len(era5), 10)), scidata.CombinedDataset[Sample[ShardTensor]])
assert_type(scidata.concat(era5, cmip), scidata.CombinedDataset[Sample[ShardTensor]])
assert_type(scidata.concat(flow, flow)[0], IrregularSample[ShardTensor])
both = scidata.mix({"era5": era5, "cmip": cmip}, {"era5": 3, "cmip": 1}, num_samples=100)
assert_type(both[0]["u"], ShardTensor)
assert_type(scidata.mix([era5, cmip], [0.5, 0.5])[0], Sample[ShardTensor])
for batch in scidata.DataLoader(both, batch_size=2):
    assert_type(batch, Sample[ShardTensor])
for batch in scidata.DataLoader(scidata.subset(scidata.concat(era5, cmip), [1, 2]), batch_size=None):
    assert_type(batch["u"].local_with_halo(), Tensor)
for batch in scidata.DataLoader(Subset(era5, [1, 2])):
    assert_type(batch, Sample[ShardTensor])
joined: ConcatDataset[Sample[ShardTensor]] = ConcatDataset([era5, cmip])  # torch does not infer of what
for batch in scidata.DataLoader(joined):
    assert_type(batch, Sample[ShardTensor])
pairs = scidata.join({"era5": era5, "flow": flow}, on={"era5": "time", "flow": "name"}, at={"flow": "-6h"})
for pair in scidata.DataLoader(pairs, batch_size=2, shuffle="blocks"):
    assert_type(pair, scidata.JoinedSample)
assert_type(scidata.subset(pairs, [0])[0], scidata.JoinedSample)


@scidata.register_op(torch.special.i0)
def i0(func: Any, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardTensor:
    x: ShardTensor = args[0]
    local: Tensor = func(x.to_local(), **kwargs)
    return ShardTensor.from_local(local, x.device_mesh, x.placements, sharding_shapes=x.sharding_shapes())


whole = scidata.scatter_tensor(torch.ones(8, 3), 0, mesh["h"], era5[0]["u"].placements)
assert_type(whole, ShardTensor)
assert_type(whole.redistribute(placements=whole.placements), ShardTensor)
assert_type(scidata.shard_ops(), tuple[str, ...])
with scidata.gather(), scidata.attention("ring"), scidata.trace("out.json"):
    print(scidata.explain(torch.nn.Linear(3, 3), whole))
scidata.set_retry(attempts=3)
