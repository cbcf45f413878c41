"""Files that tests of blocks share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

from tests.unit.grids._pool import ROWS, STEPS


@pytest.fixture(scope="module")
def stores(tmp_path_factory: Any) -> dict[str, Any]:
    """The same numbers with several steps a chunk: banded, tiled, sharded, packed; files that follow each other."""
    folder = tmp_path_factory.mktemp("pool")
    numbers = np.random.default_rng(0).normal(size=(2, STEPS, 3, ROWS, 8)).astype(np.float32)
    for name, chunks, more in (
        ("lz4", (8, 3, ROWS, 8), {"compressors": zarr.codecs.BloscCodec(cname="lz4")}),
        ("banded", (8, 1, 4, 8), {"compressors": zarr.codecs.ZstdCodec()}),
        ("sharded", (5, 3, ROWS, 4), {"shards": (10, 3, ROWS, 8)}),
        ("raw", (8, 3, ROWS, 8), {"compressors": None}),
    ):
        group = zarr.open_group(folder / name, mode="w")
        for field, data in zip("uv", numbers, strict=True):
            array = group.create_array(
                field,
                shape=data.shape,
                dtype=data.dtype,
                chunks=chunks,
                dimension_names=("time", "level", "y", "x"),
                **more,
            )
            array[:] = data
    ds = xr.Dataset(
        {name: (("time", "level", "y", "x"), data) for name, data in zip("uv", numbers, strict=True)},
        {"time": np.arange(STEPS)},
    )
    paths = []
    for i, (start, stop) in enumerate([(0, 10), (10, 21), (21, STEPS)]):
        paths.append(str(folder / f"part{i}.nc"))
        packed = {"dtype": "i2", "scale_factor": 0.001, "_FillValue": -9999, "zlib": True}
        encoding = {name: packed | {"chunksizes": (4, 3, 5, 8)} for name in "uv"}
        ds.isel(time=slice(start, stop)).to_netcdf(paths[-1], engine="netcdf4", encoding=encoding)
    return {name: str(folder / name) for name in ("lz4", "banded", "sharded", "raw")} | {"files": paths}
