"""Peak memory of one rank that reads an eighth of a 2 GB sample: its part plus a constant."""

import json
import os
import subprocess
import sys

import h5py
import numcodecs
import numpy as np
import pytest
import zarr

MIB = 2**20
SHAPE = (1, 32, 4096, 4096)  # float32: 2 GiB a sample, 256 MiB for one rank of eight
CONSTANT = 64 * MIB  # scratch of the reading threads, file metadata, allocator slack

# ru_maxrss would do, but for what it inherits: the peak of the process that began this one
PEAK = """
def peak(name="VmHWM"):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))
"""
READ = """
import json, sys
import numpy as np
from scidata.core.options import ReadOptions
from scidata.grids.reader import GridReader
reader = GridReader(sys.argv[1], ReadOptions(shard={"latitude": "domain"}, fields=["u"]), axis_sizes={"domain": 8})
coordinate = reader.partition.coordinate(3)
(spec,) = reader.buffer_specs(coordinate).values()
reader.plan(0, 3)
before = peak()
out = np.empty(spec.shape, spec.dtype)
stats = reader.read_into(0, {"u": out}, coordinate)
print(json.dumps({"grown": peak() - before, "part": out.nbytes, "mean": float(out.mean(dtype="f8"))}))
"""


def hdf5_contiguous(path):
    """A file with a hole in it: 2 GiB of zeros that take no space."""
    with h5py.File(path, "w") as f:
        dims = [f.create_dataset(n, data=np.arange(s)) for n, s in zip(("time", "level"), SHAPE[:2], strict=True)]
        dims += [f.create_dataset(n, data=np.arange(4096.0)) for n in ("latitude", "longitude")]
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        h5py.h5d.create(f.id, b"u", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple(SHAPE), dcpl=plist)
        for scale, name in zip(dims, ("time", "level", "latitude", "longitude"), strict=True):
            scale.make_scale(name)
        for i, scale in enumerate(dims):
            f["u"].dims[i].attach_scale(scale)
    return 0.0


def zarr_compressed(path):
    """512 chunks of 4 MiB that are one file under 512 names."""
    os.makedirs(f"{path}/u")
    chunk = (1, 1, 256, 4096)
    codec = numcodecs.Blosc(cname="lz4", clevel=1)
    metadata = {
        "zarr_format": 2,
        "shape": SHAPE,
        "chunks": chunk,
        "dtype": "<f4",
        "compressor": codec.get_config(),
        "filters": None,
        "fill_value": None,
        "order": "C",
    }
    with open(f"{path}/.zgroup", "w") as f:
        json.dump({"zarr_format": 2}, f)
    with open(f"{path}/u/.zarray", "w") as f:
        json.dump(metadata, f)
    with open(f"{path}/u/.zattrs", "w") as f:
        json.dump({"_ARRAY_DIMENSIONS": ["time", "level", "latitude", "longitude"]}, f)
    first = f"{path}/u/0.0.0.0"
    with open(first, "wb") as f:
        f.write(codec.encode(np.full(chunk, 1.5, "<f4")))
    for level in range(SHAPE[1]):
        for row in range(SHAPE[2] // chunk[2]):
            if level or row:
                os.link(first, f"{path}/u/0.{level}.{row}.0")
    return 1.5


@pytest.mark.parametrize("make", [hdf5_contiguous, zarr_compressed])
def test_peak_memory_is_the_part_and_a_constant(make, tmp_path):
    path = str(tmp_path / "large")
    mean = make(path)
    run = subprocess.run(
        [sys.executable, "-c", PEAK + READ, path], capture_output=True, text=True, check=False, timeout=150
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["part"] == 256 * MIB
    assert found["mean"] == mean
    assert found["grown"] < found["part"] + CONSTANT


EPOCHS = """
import gc, json, sys
import scidata
ds = scidata.open_dataset(sys.argv[1], pool_bytes=int(sys.argv[2]))
loader = scidata.DataLoader(ds, None, sampler=scidata.DistributedSampler(ds, shuffle="blocks", window=2))
sample = ds[0]
nbytes = sum(field.nbytes for field in sample.values())
before, now, decoded = peak(), [], []
for epoch in range(20):
    loader.set_epoch(epoch)
    for sample in loader:
        pass
    now.append(peak("VmRSS"))
    decoded.append(loader.stats()["bytes_decoded"])
print(json.dumps({"peak": peak() - before, "now": now, "sample": nbytes, "decoded": decoded, "samples": len(ds)}))
"""


@pytest.mark.slow
def test_memory_of_a_pool_is_its_bytes_and_the_ring_in_all_epochs(tmp_path):
    steps, shape = 20, (2, 181, 720)  # 1 MiB a sample, blocks of 20 MiB
    group = zarr.open_group(tmp_path / "blocks.zarr", mode="w")
    u = group.create_array(
        "u", shape=(160, *shape), dtype="f4", chunks=(steps, *shape), dimension_names=("time", *"zyx")
    )
    for first in range(0, 160, steps):
        u[first : first + steps] = np.random.default_rng(first).integers(0, 50, (steps, *shape))
    pool = 64 * MIB
    command = [sys.executable, "-c", PEAK + EPOCHS, str(tmp_path / "blocks.zarr"), str(pool)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    ring, being_read = 8 * found["sample"], 2 * steps * found["sample"]
    assert found["peak"] < pool + ring + being_read + CONSTANT
    # how many blocks are on their way at the end of an epoch varies
    assert np.mean(found["now"][14:]) - np.mean(found["now"][8:14]) < 12 * MIB
    assert found["decoded"][-1] <= 1.1 * 20 * found["samples"] * found["sample"]  # so the pool was of use


PARTITION = """
import json, sys
import h5py, scipy.spatial, zarr
import scidata.meshes.order.csr
from scidata.store.partitioning.partition import partition
before = peak()
report = partition(sys.argv[1], sys.argv[2], keep="duplicate_edges")
print(json.dumps({"grown": peak() - before, "edges": report.counts["edge"]}))
"""


def graph_of_four_million_edges(file):
    num_nodes, num_edges = 1 << 17, 1 << 22
    src = np.random.default_rng(0).integers(0, num_nodes, num_edges)
    file["edge_index"], file["pos"] = np.stack([src, (src + 1 + src[::-1] % 999) % num_nodes]), np.zeros((num_nodes, 2))
    file["pos"][:, 0] = np.arange(num_nodes)
    return num_edges


def mesh_of_half_a_million_quads(file):
    nodes = np.arange(720 * 720).reshape(720, 720)
    file["cells"] = np.stack([nodes[:-1, :-1], nodes[:-1, 1:], nodes[1:, 1:], nodes[1:, :-1]], -1).reshape(-1, 4)
    file["points"] = np.stack(np.divmod(nodes.reshape(-1), 720), axis=1).astype("f8")
    return 2 * 2 * 720 * 719


# MiB; what is held at least: 64 of pairs and 64 of their order; 16 of cells, 8 of points, 32 of edges and 28 of theirs
@pytest.mark.parametrize(("make", "most"), [(graph_of_four_million_edges, 180), (mesh_of_half_a_million_quads, 200)])
def test_partition_holds_few_copies_of_cells_and_edges(make, most, tmp_path):
    with h5py.File(tmp_path / "raw.h5", "w") as file:
        num_edges = make(file)
    command = [sys.executable, "-c", PEAK + PARTITION, str(tmp_path / "raw.h5"), str(tmp_path / "store")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["edges"] == num_edges
    assert found["grown"] < most * MIB
