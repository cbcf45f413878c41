"""What a sample costs that a class from outside reads, beside Zarr: CPU time of this process, medians of turns.

    PYTHONPATH=. python tests/bench/own_formats.py

Rows of 181 x 360 float32, a chunk each: raw and packed (zlib behind a byte shuffle, as Zarr has it), by ``place`` and
by ``read``, and of a torch data set. GRIB (16 bits) where eccodes is installed, beside eccodes' own decoding.
"""

from __future__ import annotations

import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import numcodecs
import numpy as np
import torch
import zarr

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/own_format"))

from lab_format import LabFile, write_lab

import scidata
from scidata.sources import FileFormat, register_format

STEPS, SHAPE, DIMS, TURNS = 100, (181, 360), ("time", "lat", "lon"), 7


@register_format
class ByPlace(LabFile):
    patterns = ("*.lab",)


@register_format
class ByRead(FileFormat):
    format, patterns = "flat", ("*.flat",)

    def describe(self):
        yield self.array("u", (STEPS, *SHAPE), "<f4", dims=DIMS, chunks=(1, *SHAPE))

    def read(self, layout, box):
        return np.memmap(self.path, "<f4", "r", shape=layout.shape)[box]


class Whole(torch.utils.data.Dataset):
    def __init__(self, values: np.ndarray) -> None:
        self.values = torch.from_numpy(values)

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index].clone()


def write_grib(path: Path, values: np.ndarray) -> None:
    import eccodes

    handle = eccodes.codes_grib_new_from_samples("regular_ll_pl_grib2")
    degrees = {"latitudeOfFirstGridPoint": 90, "latitudeOfLastGridPoint": -90, "longitudeOfLastGridPoint": 359}
    keys = {"Ni": 360, "Nj": 181, "bitsPerValue": 16} | {f"{key}InDegrees": n for key, n in degrees.items()}
    keys |= {"iDirectionIncrementInDegrees": 1, "jDirectionIncrementInDegrees": 1}
    for key, value in keys.items():
        eccodes.codes_set(handle, key, value)
    with path.open("wb") as file:
        for i, each in enumerate(values):
            eccodes.codes_set(handle, "dataDate", 20200101 + i // 4)
            eccodes.codes_set(handle, "dataTime", i % 4 * 600)
            eccodes.codes_set_values(handle, each.ravel())
            eccodes.codes_write(handle, file)


def by_eccodes(path: Path) -> None:
    import eccodes

    with path.open("rb") as file:
        while (handle := eccodes.codes_grib_new_from_file(file)) is not None:
            eccodes.codes_get_values(handle).astype("f4")
            eccodes.codes_release(handle)


def main() -> int:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        values = np.round(np.random.default_rng(0).normal(size=(STEPS, *SHAPE)), 2).astype("f4")
        group = zarr.open_group(folder / "a.zarr", mode="w", zarr_format=2)
        codec = numcodecs.Zlib(1), [numcodecs.Shuffle(4)]
        for field, (compressor, filters) in {"raw": (None, None), "packed": codec}.items():
            array = group.create_array(field, shape=values.shape, chunks=(1, *SHAPE), dtype="<f4",
                                       compressors=compressor, filters=filters)  # fmt: skip
            array.attrs["_ARRAY_DIMENSIONS"] = DIMS
            array[:] = values
            write_lab(str(folder / f"{field}.lab"), {"u": (DIMS, values)}, chunks={"time": 1}, packed=field == "packed")
        values.tofile(folder / "a.flat")
        sets = {
            f"Zarr, {field}": scidata.open_dataset(folder / "a.zarr", fields=[field]) for field in ("raw", "packed")
        }
        sets |= {f"place, {field}": scidata.open_dataset(folder / f"{field}.lab") for field in ("raw", "packed")}
        sets |= {"read, raw": scidata.open_dataset(folder / "a.flat")}
        sets |= {"torch data set": scidata.shard_dataset(Whole(values), dims=DIMS[1:])}
        ways = {name: lambda ds=ds: [ds[i] for i in range(STEPS)] for name, ds in sets.items()}
        if find_spec("eccodes"):
            write_grib(folder / "a.grib", values)
            begin = time.process_time()
            ds = scidata.open_dataset(folder / "a.grib")
            print(f"GRIB: {1e3 * (time.process_time() - begin):.0f} ms of CPU to open {STEPS} messages")
            ways |= {
                "GRIB": lambda: [ds[i] for i in range(STEPS)],
                "eccodes alone": lambda: by_eccodes(folder / "a.grib"),
            }
        took: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(TURNS + 1):  # the first warms up
            for name, run in ways.items():
                begin = time.process_time()
                run()
                took[name].append((time.process_time() - begin) / STEPS * 1e3)
        for name, found in took.items():
            print(f"{name}: {median(found[1:]):.3f} ms of CPU a sample")
    return 0


if __name__ == "__main__":
    sys.exit(main())
