"""What fields that never change cost a sample: read once and kept, and read into the buffers of each.

    python tests/bench/static_fields.py

The latter is what ``local_transform``, which may change them, asks for. One field of 721 x 1440 float32, raw, beside
three static ones, compressed; batches of 4; CPU time of the process a sample, interleaved, the least of five epochs.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import zarr

import scidata

STEPS, SHAPE, DIMS = 24, (721, 1440), ("latitude", "longitude")


def write(path: str) -> None:
    rng, group = np.random.default_rng(0), zarr.open_group(path, mode="w")
    values = rng.random((STEPS, *SHAPE), np.float32)
    group.create_array("u", data=values, chunks=(1, *SHAPE), dimension_names=("time", *DIMS), compressors=None)
    for name in ("orography", "mask", "slope"):
        static = np.round(rng.random(SHAPE) * 64).astype("f4")
        group.create_array(name, data=static, chunks=SHAPE, dimension_names=DIMS)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        write(path := str(Path(folder) / "a.zarr"))
        ways = {"kept once": None, "with each sample": lambda part: {}}
        loaders = {
            name: scidata.DataLoader(scidata.open_dataset(path, local_transform=function), batch_size=4)
            for name, function in ways.items()
        }
        took: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(6):  # the first warms up
            for name, loader in loaders.items():
                begin = time.process_time()
                for _batch in loader:
                    pass
                took[name].append((time.process_time() - begin) / STEPS * 1e3)
        for name, found in took.items():
            print(f"{name}: {min(found[1:]):.2f} ms of CPU a sample")
    return 0


if __name__ == "__main__":
    sys.exit(main())
