"""Meshes, clouds and graphs, as a user's script has them, and data whose kind only the file says."""

from typing import assert_type

import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

import scidata
from scidata import IrregularSample, Sample, ShardTensor

report = scidata.partition(["a.nc", "b.nc"], "train.store", kind="mesh", order="hilbert", jobs=2)
print(report)

mesh = scidata.init_mesh(domain=4)
ds = scidata.open_dataset("train.store", mesh, kind="mesh", halo=1, ghosts="exchange")
assert_type(ds, scidata.IrregularDataset[ShardTensor])
sample = ds[0]
assert_type(sample, IrregularSample[ShardTensor])
assert_type(sample["u"], ShardTensor)
assert_type(sample.with_ghosts("u"), Tensor)
assert_type(sample.edge_index, Tensor | None)
assert_type(sample.index_map("node"), scidata.IndexMap)
assert_type(sample.original_id("node"), ShardTensor)
assert_type(sample.to("cpu"), IrregularSample[ShardTensor])
assert_type(sample.replace({"w": sample["u"] * 2}), IrregularSample[ShardTensor])
data = sample.to_pyg(x=["u", "v"], y=["p"])
out: Tensor = SAGEConv(2, 16)(data.x, data.edge_index)


class Net(nn.Module):
    """A user's own."""


net = scidata.parallelize(Net(), mesh, strategy="fsdp")
assert_type(net, Net)

loader = scidata.DataLoader(ds, batch_size=2, shuffle=True)
for batch in loader:
    assert_type(batch, IrregularSample[ShardTensor])
    print(batch["batch"].to_local(), batch.to_pyg(x="u").num_nodes, batch.call_on_parts(net, batch.with_ghosts("u")))

cloud = scidata.open_dataset("cloud.h5", kind="points")
assert_type(cloud[0], IrregularSample)
assert_type(cloud[0]["pos"], Tensor)
assert_type(scidata.collate([cloud[0], cloud[1]]), IrregularSample)

# what only the file says: checkers let everything pass, until the script asks
found = scidata.open_dataset("train.store", mesh, halo=1)
print(found[0].to_pyg(x="u"), found[0].edge_index)
for either in scidata.DataLoader(found):
    print(either.call_on_parts(net, either["u"]))
if isinstance(found, scidata.IrregularDataset):
    print(found[0].to_pyg(x="u"))
cells = {"cell": torch.ones(5)}
scidata.metrics.RMSE(weights=cells, mesh=mesh).update(found[0], found[0])


def with_speed(state: Sample) -> Sample:
    return state.replace({"speed": state["u"].abs()})


moved = scidata.open_dataset("train.store", mesh, kind="graph", transform=with_speed)
assert_type(moved[0]["speed"], ShardTensor)


def of_any_kind(kind: str, path: str) -> None:
    opened = scidata.open_dataset(path, mesh, kind=kind)
    print(opened[0].to_pyg(x="u"))
