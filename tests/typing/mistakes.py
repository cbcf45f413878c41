# ruff: noqa: B018
"""What a type checker has to find: each line marked is one error, and there are no others."""

import scidata

mesh = scidata.init_mesh(domain=2)
ds = scidata.open_dataset("a.zarr", mesh, shard={"lat": "domain"})
scidata.open_datset("a.zarr")  # error
scidata.open_dataset("a.zarr", halos=2)  # error
scidata.open_dataset("a.zarr", mesh, kind="grid", halo="two")  # error
ds[0].to_pyg()  # error
scidata.open_dataset("a.zarr", kind="grid")[0]["u"].local_with_halo()  # error
scidata.open_dataset("a.zarr", kind="grid", gaps="jump")  # error
scidata.open_dataset("a.zarr", kind="grid", steps={"u": 1})  # error
scidata.DataLoader(ds, batch_size="2")  # error
scidata.DataLoader(ds, num_worker=2)  # error
scidata.DataLoader([1, 2])  # error
for batch in scidata.DataLoader(ds):
    batch["u"].to_locl()  # error
    batch[0]  # error
scidata.subset(ds, [0])[0]["u"].halos  # error
scidata.collate([1, 2])  # error
scidata.create("out.zarr", like=ds, codec="zlb")  # error
scidata.statistics(ds, bye="level")  # error
scidata.statistics(ds)["u"].meen  # error
scidata.metrics.RMSE(weight=1)  # error
