"""ERA5-like grids: raw files → scidata loader → channels for a model.

    python -m pipelines.era5_grid make OUT.zarr                    # small made-up data in ERA5's shape
    python -m pipelines.era5_grid convert 2015.nc 2016.nc OUT.zarr  # NetCDF (anything xarray opens) → Zarr

    ds = open_era5("OUT.zarr", mesh, patch=8)
    mean, std = normalisation(ds)
    inputs, targets = stack_channels(batch)      # ShardTensors (B, C, H, W)

Converting is not needed to train: scidata reads NetCDF and HDF5 as well. It pays where the source is chunked or
compressed over many times, since a rank then decodes far more than its rows. Shape letters: B samples, T steps, L
levels, C = fields × levels, H latitude, W longitude.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import scidata
from pipelines.forcings import NAMES, add_forcings
from pipelines.telling import telling

__all__ = ["channel_names", "convert", "make", "normalisation", "open_era5", "split_channels", "stack_channels"]


# -- reading -----------------------------------------------------------------------------------------------------


def open_era5(
    path: str | Sequence[str],
    mesh: DeviceMesh | None,
    *,
    patch: int = 1,
    fields: Sequence[str] | None = None,
    shard: Mapping[str, str] | None = None,
    steps: Sequence[int] = (0, 1),
    halo: Any = 0,
    dtype: torch.dtype | None = torch.float32,
    derived: Sequence[str] = (),
    **options: Any,
) -> scidata.ShardedDataset:
    """Open a latitude × longitude data set, cut so that no patch is split between two ranks.

    Rows that do not fill a patch are cropped at the end of both dimensions (ERA's 241 latitudes have both poles; with
    ``patch=8`` the southern one goes), on the whole grid, before the split.

    Parameters
    ----------
    path, shard, steps, halo, dtype, options
        As in :func:`scidata.open_dataset`. Longitude wraps, so a halo along it does.
    mesh
        None reads whole samples in one process.
    patch
        Patch size of the model, in rows and columns.
    fields
        Names, in the order of the channels; default all fields that have both horizontal dimensions.
    derived
        What each sample has besides, computed from its times and place: names of :data:`pipelines.forcings.NAMES`. It
        takes the place of ``transform``.

    Raises
    ------
    ValueError
        Latitude and longitude are not the last two dimensions of a field, or are shorter than one patch.
    SciDataError
        As :func:`scidata.open_dataset`.
    """
    probe = scidata.open_dataset(path, fields=fields).reader  # metadata only
    dims = {name: probe.dims(name) for name in probe.fields}
    lat, lon = max(dims.values(), key=len)[-2:]
    names = [name for name, d in dims.items() if d[-2:] == (lat, lon)]
    stray = sorted(set(fields or ()) - set(names))
    if stray:
        raise ValueError(f"{path}: field {stray[0]!r} has dims {dims[stray[0]]}; the last two must be {(lat, lon)}")
    rows, columns = probe.global_shape(names[0])[-2:]
    if min(rows, columns) < patch:
        raise ValueError(f"{path}: patch {patch} does not fit on a grid of {rows} x {columns}; choose a smaller one")
    if derived:
        options |= {"coords": True, "transform": partial(add_forcings, names=tuple(derived))}
    return scidata.open_dataset(
        path,
        mesh,
        fields=names,
        shard=shard,
        steps=steps,
        isel={lat: slice(0, rows - rows % patch), lon: slice(0, columns - columns % patch)},
        align=patch,
        halo=halo,
        periodic=(lon,) if halo else (),
        dtype=dtype,
        **options,
    )


def channel_names(ds: scidata.ShardedDataset) -> list[str]:
    """Return ``field`` or ``field[level row]`` of each channel, in the order of :func:`stack_channels`."""
    names = []
    for field in ds.fields:
        levels = ds.global_shape(field)[-3] if len(ds.dims(field)) == 4 else 0  # 3: steps, H, W
        names += [f"{field}[{level}]" for level in range(levels)] or [field]
    return names


def stack_channels(sample: scidata.Sample) -> tuple[Tensor, Tensor]:
    """Put the levels of all fields side by side as channels: first step as inputs, last step as targets.

    Parameters
    ----------
    sample
        Read with two or more steps. A sample or a batch; its fields are ``(B, T, L, H, W)`` or ``(B, T, H, W)``,
        ShardTensors or plain tensors.

    Returns
    -------
    Two tensors ``(B, C, H, W)``, laid out as the fields are; B is 1 for a sample. What is derived from times and place
    follows in the inputs, and is not in the targets.
    """
    first, last = [], []
    for name in sorted(sample, key=NAMES.__contains__):
        field = sample[name]
        batched = field if sample.dims[name][0] == "batch" else field.unsqueeze(0)
        with_levels = batched if batched.ndim == 5 else batched.unsqueeze(2)
        first.append(with_levels[:, 0])
        if name not in NAMES:
            last.append(with_levels[:, -1])
    return torch.cat(first, dim=1), torch.cat(last, dim=1)


def split_channels(ds: scidata.ShardedDataset, x: Tensor) -> dict[str, Tensor]:
    """Take channels apart again: ``(C, H, W)``, a ShardTensor or plain, to ``(L, H, W)`` or ``(H, W)`` by field."""
    found: dict[str, list[Tensor]] = {}
    for channel, name in enumerate(channel_names(ds)):
        found.setdefault(name.partition("[")[0], []).append(x[channel])
    has_levels = {name.partition("[")[0] for name in channel_names(ds) if name.endswith("]")}
    return {name: torch.stack(parts) if name in has_levels else parts[0] for name, parts in found.items()}


def normalisation(ds: scidata.ShardedDataset, num_samples: int = 8) -> tuple[Tensor, Tensor]:
    """Compute mean and standard deviation of each channel over a few samples spread over the data set.

    Collective over the domain axis. The sums run over the whole grid whatever its cut, so every rank gets the figures
    of one process (to rounding); all dp ranks read the same samples and get the same bits.

    Returns
    -------
    mean, std
        Plain tensors ``(1, C, 1, 1)``, in the dtype of the fields, on the CPU.
    """
    chosen = np.unique(np.linspace(0, len(ds) - 1, min(num_samples, len(ds))).round().astype(int)).tolist()
    device = "cpu" if ds.mesh is None else ds.mesh.device_type  # where the mesh can add up
    moments = []
    for index in chosen:
        x = stack_channels(ds[index].to(device))[0][:, : len(channel_names(ds))]
        dtype, x = x.dtype, x.double()
        mean = x.mean(dim=(0, 2, 3), keepdim=True)
        moments.append((mean, (x - mean).square().mean(dim=(0, 2, 3), keepdim=True)))
    means, variances = (torch.stack(parts) for parts in zip(*moments, strict=True))
    mean = means.mean(dim=0)
    # law of total variance: samples are of equal size. No E[x²] - E[x]², which cancels for fields such as geopotential
    std = (variances.mean(dim=0) + (means - mean).square().mean(dim=0)).sqrt()
    return mean.to("cpu", dtype), torch.where(std > 0, std, 1.0).to("cpu", dtype)


# -- writing -----------------------------------------------------------------------------------------------------


def _create(
    group: zarr.Group, name: str, shape: tuple[int, ...], dims: tuple[str, ...], rows: int, dtype: str, attrs: Any
) -> zarr.Array:
    """Make a field's array: a chunk is one time, all levels, ``rows`` latitudes, all longitudes.

    That is what one rank takes at one step. It is not compressed, so a rank whose bounds fall inside a chunk still
    fetches its own rows only. Chunks of zeros are written too: one that is absent is then a lost one.
    """
    return group.create_array(
        name,
        shape=shape,
        chunks=(1, *shape[1:-2], min(rows, shape[-2]), shape[-1]),
        dtype=dtype,
        compressors=None,
        dimension_names=dims,
        attributes=_plain(attrs),
        config={"write_empty_chunks": True},
    )


def _coordinate(group: zarr.Group, dim: str, values: Any, attrs: Mapping[str, Any]) -> None:
    group.create_array(dim, data=np.asarray(values), dimension_names=(dim,), attributes=_plain(attrs), compressors=None)


def _plain(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Make attributes fit for JSON."""
    return {str(k): v.tolist() if isinstance(v, np.generic | np.ndarray) else v for k, v in attrs.items()}


def make(
    out: str,
    *,
    num_times: int = 16,
    num_levels: int = 3,
    shape: tuple[int, int] = (73, 144),
    rows: int = 8,
    seed: int = 0,
) -> None:
    """Write small made-up data in ERA5's shape: travelling waves, three fields on levels and one at the surface.

    Raises
    ------
    FileExistsError
        ``out`` exists.
    """
    _refuse_existing(out)
    rng = np.random.default_rng(seed)
    lat, lon = np.linspace(90, -90, shape[0]), np.linspace(0, 360, shape[1], endpoint=False)
    levels = np.round(np.linspace(200, 850, num_levels)).astype("i4")
    group = zarr.open_group(out, mode="w-", zarr_format=3)
    group.attrs["title"] = "made-up travelling waves in the shape of ERA5"
    _coordinate(group, "time", np.arange(num_times) * 6, {"units": "hours since 2000-01-01", "standard_name": "time"})
    _coordinate(group, "level", levels, {"units": "hPa", "axis": "Z"})
    _coordinate(group, "latitude", lat.astype("f4"), {"units": "degrees_north", "standard_name": "latitude"})
    _coordinate(group, "longitude", lon.astype("f4"), {"units": "degrees_east", "standard_name": "longitude"})
    fields = {
        "temperature": ("K", 260, 15),
        "u": ("m s-1", 8, 12),
        "v": ("m s-1", 0, 9),
        "surface_pressure": ("Pa", 1e5, 900),
    }
    for name, (units, offset, amplitude) in fields.items():
        on_levels = name != "surface_pressure"
        dims = ("time", "level", "latitude", "longitude") if on_levels else ("time", "latitude", "longitude")
        size = (num_times, *((num_levels,) if on_levels else ()), *shape)
        array = _create(group, name, size, dims, rows, "f4", {"units": units})
        waves = rng.normal(size=(4, 3))
        tick = telling(name, num_times)
        for t in range(num_times):
            data = np.zeros(size[1:])
            depth = np.linspace(0.5, 1.5, num_levels)[:, None, None] if on_levels else 1.0
            for k, (height, phase, speed) in enumerate(waves, start=1):
                angle = np.radians(k * lon)[None, :] + phase - (0.3 + 0.1 * speed) * t
                data += depth * height * np.sin(angle) * np.cos(np.radians(lat))[:, None] ** k
            array[t] = offset + amplitude * data + rng.normal(scale=0.01 * amplitude, size=size[1:])
            tick(1)


def convert(sources: Sequence[str], out: str, *, fields: Sequence[str] | None = None, rows: int = 8) -> None:
    """Copy files that xarray opens into one Zarr v3 store, chunked for ranks that read slabs of latitude.

    The files follow each other along their first dimension. One time of one field is in memory at a time. Values are
    decoded (scale, offset, fill to NaN) to float32.

    Raises
    ------
    FileExistsError
        ``out`` exists.
    ValueError
        A field that is not there, or has no latitude × longitude in its last dimensions; files that do not agree.
    """
    import xarray as xr  # only converting needs it

    _refuse_existing(out)
    files = [xr.open_dataset(path, decode_times=False) for path in sources]
    first = files[0]
    names = list(fields or (name for name, v in first.data_vars.items() if v.ndim >= 3))
    for path, file in zip(sources, files, strict=True):
        for name in names:
            if name not in file.data_vars or file[name].ndim < 3:
                raise ValueError(f"{path}: no gridded field {name!r}; there are {sorted(map(str, file.data_vars))}")
            if file[name].dims != first[name].dims or file[name].shape[1:] != first[name].shape[1:]:
                raise ValueError(
                    f"{path}: field {name!r} is {dict(file[name].sizes)}, but in {sources[0]} {dict(first[name].sizes)}"
                )
    group = zarr.open_group(out, mode="w-", zarr_format=3)
    time = first[names[0]].dims[0]
    for dim in dict.fromkeys(dim for name in names for dim in first[name].dims):
        if dim in first.coords:
            values = [file[dim].values for file in files] if dim == time else [first[dim].values]
            _coordinate(group, str(dim), np.concatenate(values), first[dim].attrs)
    for name in names:
        shape = (sum(file.sizes[time] for file in files), *first[name].shape[1:])
        array = _create(group, name, shape, first[name].dims, rows, "f4", first[name].attrs)
        written, tick = 0, telling(name, shape[0])
        for file in files:
            for t in range(file.sizes[time]):
                array[written] = file[name].isel({time: t}).values
                written += 1
                tick(1)
    for file in files:
        file.close()


def _refuse_existing(out: str) -> None:
    if Path(out).exists():
        raise FileExistsError(f"{out} exists; remove it or choose another name")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="pipelines.era5_grid", description="Make or convert ERA5-like data.")
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("make", help="write small made-up data")
    made.add_argument("out")
    made.add_argument("--times", type=int, default=16)
    made.add_argument("--levels", type=int, default=3)
    made.add_argument("--shape", type=int, nargs=2, default=(73, 144), metavar=("LAT", "LON"))
    made.add_argument("--seed", type=int, default=0)
    converted = commands.add_parser("convert", help="copy NetCDF files into one Zarr store")
    converted.add_argument("sources", nargs="+")
    converted.add_argument("out")
    converted.add_argument("--fields", nargs="+")
    for command in (made, converted):
        command.add_argument("--rows", type=int, default=8, help="latitudes in a chunk, such as the patch size")
    args = parser.parse_args(argv)
    try:
        if args.command == "make":
            size = (args.shape[0], args.shape[1])
            make(args.out, num_times=args.times, num_levels=args.levels, shape=size, rows=args.rows, seed=args.seed)
        else:
            convert(args.sources, args.out, fields=args.fields, rows=args.rows)
    except (OSError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
