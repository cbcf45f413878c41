"""The shards that a store writes itself, as zarr-python and scidata read them."""

import itertools
import os

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import Crc32cCodec

import scidata
from scidata.store.format.arrays import blocks_of, write_array, write_shard

sizes = st.integers(1, 5)


@settings(max_examples=40, deadline=None)
@given(
    dims=st.lists(st.tuples(sizes, sizes, st.integers(1, 13)), min_size=1, max_size=3),
    dtype=st.sampled_from(["<f4", "<i8", "|u1", "|b1"]),
)
def test_zarr_python_reads_what_was_written(tmp_path_factory, dims, dtype):
    chunk, per_shard, shape = zip(*dims, strict=True)
    shard = tuple(c * n for c, n in zip(chunk, per_shard, strict=True))
    values = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    store = tmp_path_factory.mktemp("shards")
    array = zarr.create_array(
        store, shape=shape, dtype=dtype, chunks=chunk, shards=shard, compressors=[Crc32cCodec()], filters=None
    )
    for box in blocks_of(shape, shard):
        key = array.metadata.encode_chunk_key(tuple(s.start // n for s, n in zip(box, shard, strict=True)))
        write_shard(store / key, values[box], chunk=chunk, shard=shard)
    np.testing.assert_array_equal(zarr.open_array(store, mode="r")[...], values)
    source = scidata.sources.open_source(str(store))
    layout = next(iter(source.arrays.values()))
    grid = np.array(list(itertools.product(*(range(-(-n // c)) for n, c in zip(shape, chunk, strict=True)))))
    refs = source.locate(layout, grid)
    for path in range(len(refs.paths)):
        offset = refs.offset[refs.path_index == path]
        assert (np.diff(offset) > 0).all()  # C order, and nothing that no value needs
        nbytes = np.prod(chunk) * np.dtype(dtype).itemsize + 4
        assert os.path.getsize(refs.paths[path]) == nbytes * len(offset) + 16 * np.prod(per_shard) + 4


def test_a_damaged_chunk_is_found_by_zarr_python_too(tmp_path):
    group = zarr.create_group(tmp_path, zarr_format=3)
    write_array(group, "x", np.arange(10.0).__getitem__, shape=(10,), dtype="f8", dims=("node",), chunk_rows=4)
    (path,) = (tmp_path / "x" / "c").iterdir()
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        zarr.open_group(tmp_path, mode="r")["x"][...]


def test_a_time_step_is_one_range(tmp_path):
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "raw.h5", "w") as file:
        file["points"] = rng.random((5000, 2))
        file["node/u"] = rng.standard_normal((6, 5000), dtype=np.float32)
        for i, label in enumerate(("time", "node")):
            file["node/u"].dims[i].label = label
    scidata.partition(tmp_path / "raw.h5", tmp_path / "store", kind="points")
    ds = scidata.open_dataset(tmp_path / "store", fields=["u"])
    for i in range(6):
        (plan,) = ds.plan(i).fields["u"]
        _, ranges = plan.ranges()
        assert (ranges[1:, 1] == (ranges[:-1, 1] + ranges[:-1, 2])).all(), ranges
