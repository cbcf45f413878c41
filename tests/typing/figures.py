"""What is written, statistics, scores, and samples of several node sets, as a user's script has them."""

from collections.abc import Mapping
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import scidata
from scidata import HeteroSample, Sample, ShardTensor

mesh = scidata.init_mesh(domain=2)
ds = scidata.open_dataset("era5.zarr", mesh, kind="grid", cache_dir="cache", decode="node")


def figures(client: Any) -> None:
    stats = scidata.statistics(ds, by="level", fields=["u", "t"], client=client)
    assert_type(stats, scidata.Statistics)
    assert_type(stats["u"].mean, npt.NDArray[np.float64])
    assert_type(stats["u"].difference_count, npt.NDArray[np.int64])
    stats.save("stats.json", overwrite=True)
    scidata.partition("a.nc", "train.store", client=client)


normal = ds.normalise(scidata.Statistics.load("stats.json"), fields=["u"], method="mean_std")
assert_type(normal, scidata.ShardedDataset[ShardTensor])
assert_type(normal.denormalise(normal[0]), Sample[ShardTensor])
assert_type(normal.denormalise({"u": torch.ones(3)}), dict[str, Tensor])

rmse = scidata.metrics.RMSE(weights={"latitude": scidata.metrics.latitude_weights(ds)}, mesh=mesh, by="level")
assert_type(rmse, scidata.metrics.RMSE)
scores: Mapping[str, scidata.metrics.Metric] = {
    "rmse": rmse,
    "acc": scidata.metrics.ACC(mesh=mesh),
    "crps": scidata.metrics.CRPS(member_dim=1, fair=False),
    "spectrum": scidata.metrics.Spectrum("longitude"),
}
for name, score in scores.items():
    print(name, score.compute(), score.state_dict())

with scidata.create("out.zarr", like=ds, fields=["u"], times=[0, 1], codec="zstd", resume=True) as writer:
    assert_type(writer, scidata.Writer)
    for index, sample in enumerate(scidata.DataLoader(ds, batch_size=None)):
        rmse.update(sample["u"], sample["u"] * 2, index=index)
        writer[index] = sample
        writer[index] = {"u": sample["u"]}
    assert_type(writer.missing, list[int])

graphs = scidata.open_dataset("graph.store", mesh, kind="graph", halo=1)
graph = graphs[0]
if isinstance(graph, HeteroSample):
    assert_type(graph.node_types, tuple[str, ...])
    assert_type(graph.edge_types, tuple[tuple[str, str, str], ...])
    assert_type(graph.edge_index_dict, dict[tuple[str, str, str], Tensor])
    print(graph.to_pyg().num_nodes)
