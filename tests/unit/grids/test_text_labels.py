"""Texts as labels of rows and as keys of samples, in every format that has them; xarray writes and selects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray as xr

import scidata
from scidata.errors import ConfigError, UnknownNameError

IDS = ["LGAT", "Zürich", "06610", "a longer name of a station"]


def _data() -> xr.Dataset:
    values = np.random.default_rng(0).normal(size=(2, 4, 6)).astype("f4")
    runs = np.array([[f"{run}-{station[:3]}" for station in IDS] for run in "ab"])
    return xr.Dataset(
        {"t": (("run", "station", "level"), values), "flight": (("run", "station"), runs)},
        {"station": np.array(IDS, object), "run": ["first", "second"]},
    )


def _write(path: Path, kind: str) -> None:
    data = _data()
    if kind == "fixed":  # in Zarr 3
        data = data.assign_coords(station=np.array(IDS, "U26"), run=np.array([b"first", b"second"]))
    if kind in ("zarr2", "zarr3", "fixed"):
        data.to_zarr(path, zarr_format=2 if kind == "zarr2" else 3, consolidated=kind == "zarr2")
    elif kind == "netcdf3":
        data.to_netcdf(path, format="NETCDF3_CLASSIC")
    elif kind == "netcdf4":
        data.to_netcdf(path, engine="netcdf4", encoding={"run": {"dtype": "S1"}})
    else:
        with h5py.File(path, "w") as h5:
            h5["t"] = data["t"].values
            for name in ("run", "station"):
                text = h5py.string_dtype() if name == "run" else h5py.string_dtype("utf-8", 40)
                h5.create_dataset(name, data=[str(x).encode() for x in data[name].values], dtype=text)
                h5[name].make_scale(name)
            h5.create_dataset("flight", data=data["flight"].values.astype(object), dtype=h5py.string_dtype())
            for name in ("t", "flight"):
                for k, dim in enumerate(("run", "station")):
                    h5[name].dims[k].attach_scale(h5[dim])
            h5["t"].dims[2].label = "level"


@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning", "ignore:.*:UserWarning")
@pytest.mark.parametrize("kind", ["zarr2", "zarr3", "fixed", "netcdf3", "netcdf4", "hdf5"])
def test_texts_label_rows_and_are_keys(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"stations.{kind.rstrip('234')}"
    _write(path, kind)
    data, how = _data(), dict[str, Any](sample_dim="station", fields=["t"])
    ds = scidata.open_dataset(path, isel={"run": 1}, **how)
    assert [str(ds[i].source[0].time) for i in range(4)] == IDS
    chosen = scidata.open_dataset(path, sel={"run": "second", "station": ["06610", "LGAT"]}, **how)
    for sample, station in zip((chosen[0], chosen[1]), ["06610", "LGAT"], strict=True):
        assert np.array_equal(sample["t"].numpy().squeeze(), data["t"].sel(run="second", station=station).values)
    with pytest.raises(UnknownNameError, match="no label is 'LGAR'; it has LGAT, Zürich"):
        scidata.open_dataset(path, sel={"station": "LGAR"}, **how)

    heights = xr.Dataset({"z": ("station", np.arange(3.0))}, {"station": [IDS[k] for k in (3, 0, 1)]})
    heights.to_netcdf(tmp_path / "heights.nc")
    other = scidata.open_dataset(tmp_path / "heights.nc", sample_dim="station")
    joined = scidata.join({"t": ds, "heights": other}, on="station")
    assert {str(s.key): float(s["heights"]["z"]) for s in (joined[i] for i in range(len(joined)))} == {
        IDS[3]: 0.0, IDS[0]: 1.0, IDS[1]: 2.0
    }  # fmt: skip

    both = scidata.open_dataset(path, sample_dim=("run", "station"), fields=["t"])  # texts on two dims of samples
    mine = scidata.open_dataset(path, sample_dim=("run", "station"), fields=["t"], sel={"station": IDS[::-1]})
    joined = scidata.join({"a": both, "b": mine}, on="flight")
    assert len(joined) == 8
    for i in range(8):
        sample = joined[i]
        assert str(sample.key) == data["flight"].values.ravel()[i]
        assert np.array_equal(sample["a"]["t"].numpy(), sample["b"]["t"].numpy())
    with pytest.raises(ConfigError, match="'flihgt' has no value for each sample"):
        scidata.join({"a": both, "b": mine}, on="flihgt")


def test_many_long_texts(tmp_path: Path) -> None:
    names = [f"station {number:06d} with a long name" for number in range(3000)]
    data = xr.Dataset({"t": ("station", np.arange(3000.0))}, {"station": np.array(names, object)})
    data.to_netcdf(tmp_path / "a.nc", unlimited_dims=["station"])  # chunks of references to texts
    with h5py.File(tmp_path / "a.h5", "w") as h5:
        h5["t"] = data["t"].values
        h5.create_dataset("station", data=np.array(names, "S40"), chunks=(1000,), compression="gzip")
        h5["station"].make_scale("station")
        h5["t"].dims[0].attach_scale(h5["station"])
    for file in ("a.nc", "a.h5"):
        assert scidata.open_dataset(tmp_path / file, sample_dim="station")[2999].source[0].time == names[2999]
