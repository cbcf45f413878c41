"""The store: what is written, how it is read back, and that every kind of damage is found."""

from __future__ import annotations

import errno
import filecmp
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import Delaunay

from scidata.errors import ConfigError, CorruptDataError, FieldMismatchError, UnknownNameError, UnsupportedFormatError
from scidata.meshes.order.csr import CSR
from scidata.store.format import arrays
from scidata.store.format.arrays import ArrayDigest, Reordered, blocks_of
from scidata.store.format.documents import digest_documents, sample_document
from scidata.store.format.loading import load_sample
from scidata.store.format.manifest import CHECKSUMS, FieldInfo, RunningStatistics, SampleInfo, dump_json, sealed
from scidata.store.format.places import MANIFEST, folder_of, is_store
from scidata.store.format.store import Store, open_store, read_sample_info, verify, verify_sample, write_manifest
from scidata.store.format.sums import old_document
from scidata.store.format.write import FieldData, OrderedCells, OrderedSample, write_sample

ROOT = Path(__file__).parents[3]


def field_of(name: str, values: npt.NDArray[Any], entity: str = "node", entity_dim: int = 0) -> FieldData:
    info = FieldInfo(
        name=name,
        entity=entity,
        dtype=values.dtype.newbyteorder("<").str,
        dims=tuple("abc"[i] for i in range(values.ndim)),
        entity_dim=entity_dim,
        units="m s-1",
    )

    return FieldData(info=info, shape=values.shape, read=values.__getitem__)


def make_sample(num_rows: int = 1500, *, seed: int = 0, index: int = 0, num_samples: int = 1) -> OrderedSample:
    """Make a triangulation in a random order with fields on nodes, cells and edges."""
    rng = np.random.default_rng(seed)
    pos = rng.random((num_rows, 2))
    order = rng.permutation(num_rows)
    new = np.empty(num_rows, np.int64)
    new[order] = np.arange(num_rows)
    cells = new[Delaunay(pos).simplices.astype(np.int64)]
    by_owner = np.argsort(cells.min(axis=1), kind="stable")
    sorted_cells = cells[by_owner]
    pairs = np.unique(np.concatenate([cells[:, [a, b]] for a in range(3) for b in range(3) if a != b]), axis=0)
    edge_id = rng.permutation(len(pairs))  # the source's edges are in no order
    values = {
        "u": field_of("u", rng.standard_normal(num_rows).astype(np.float32)),
        "v": field_of("v", rng.standard_normal((num_rows, 3)).astype(">f8")),
        "history": field_of("history", rng.standard_normal((3, num_rows, 2)), entity_dim=1),
        "area": field_of("area", rng.random(len(cells)), "cell"),
        "length": field_of("length", rng.random((len(pairs), 2)), "edge"),
    }
    return OrderedSample(
        index=index,
        num_samples=num_samples,
        name=f"case {index}",
        kind="mesh",
        entity="node",
        on_sphere=False,
        order=order,
        pos=pos,
        weights=rng.random(num_rows),
        cells=OrderedCells(
            offsets=np.arange(0, 3 * len(cells) + 1, 3, dtype=np.int64),
            connectivity=sorted_cells.reshape(-1),
            cell_type=np.full(len(cells), 5, np.uint8),
            original_id=by_owner,
            indptr=np.searchsorted(sorted_cells.min(axis=1), np.arange(num_rows + 1)).astype(np.int64),
        ),
        relations={
            "edge": CSR(
                indptr=np.searchsorted(pairs[:, 0], np.arange(num_rows + 1)).astype(np.int64),
                src=pairs[:, 1],
                edge_id=edge_id,
            )
        },
        fields=tuple(values.values()),
        recipe="r",
        settings={"order": "hilbert"},
    )


def make_store(path: Path, *samples: OrderedSample) -> str:
    path.mkdir(parents=True, exist_ok=True)
    for sample in samples:
        write_sample(str(path), sample)
    write_manifest(str(path), [read_sample_info(str(path), s.index) for s in samples])
    return str(path)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> str:
    samples = [make_sample(1500, index=0, num_samples=2), make_sample(700, seed=1, index=1, num_samples=2)]
    return make_store(tmp_path_factory.mktemp("store") / "s", *samples)


@pytest.fixture
def copy(pristine: str, tmp_path: Path) -> str:
    return str(shutil.copytree(pristine, tmp_path / "copy"))


def same_tree(left: str, right: str) -> bool:
    def names(top: str) -> dict[str, str]:
        return {os.path.relpath(os.path.join(r, n), top): os.path.join(r, n) for r, _, ns in os.walk(top) for n in ns}

    a, b = names(left), names(right)
    return a.keys() == b.keys() and all(filecmp.cmp(a[n], b[n], shallow=False) for n in a)


class TestRoundTrip:
    def test_fields_back_in_the_source_order(self, pristine: str) -> None:
        store, sample = open_store(pristine), make_sample(1500, num_samples=2)
        ids = {"node": "node/original_id", "cell": "cell/original_id", "edge": "csr/edge_id"}
        for data in sample.fields:
            stored = store.read(0, data.info.path)
            expected = data.read(...)
            back = np.empty(expected.shape, stored.dtype)
            np.moveaxis(back, data.info.entity_dim, 0)[store.read(0, ids[data.info.entity])] = np.moveaxis(
                stored, data.info.entity_dim, 0
            )
            assert stored.dtype == expected.dtype.newbyteorder("=")
            np.testing.assert_array_equal(back, expected)

    def test_any_zarr_reader(self, pristine: str) -> None:
        group = zarr.open_group(os.path.join(pristine, folder_of(0)), mode="r")
        sample = make_sample(1500, num_samples=2)
        assert sample.pos is not None
        np.testing.assert_array_equal(group["node/pos"][:], sample.pos[sample.order])
        assert group["node/history"].metadata.dimension_names == ("a", "b", "c")
        assert group["node/u"].chunks == (1024,)
        assert group["node/u"].shards == (2048,)

    def test_rows_of_a_part(self, pristine: str) -> None:
        store = open_store(pristine)
        np.testing.assert_array_equal(store.read(0, "node/v", 1020, 1030), store.read(0, "node/v")[1020:1030])

    def test_blocks(self, pristine: str) -> None:
        store, sample = open_store(pristine), make_sample(1500, num_samples=2)
        assert sample.pos is not None
        assert sample.weights is not None
        pos, weights = sample.pos[sample.order], sample.weights[sample.order]
        boxes, prefix = store.read(0, "blocks/bbox"), store.read(0, "blocks/weight_prefix")
        assert boxes.shape == (3, 2, 2)
        for block in range(3):
            rows = slice(512 * block, 512 * (block + 1))
            np.testing.assert_array_equal(boxes[block], [pos[rows].min(axis=0), pos[rows].max(axis=0)])
            np.testing.assert_allclose(prefix[block + 1] - prefix[block], weights[rows].sum())

    def test_manifest_sums_samples(self, pristine: str) -> None:
        manifest = open_store(pristine).manifest
        values = [make_sample(n, seed=s).fields for n, s in ((1500, 0), (700, 1))]
        assert manifest.counts["node"] == 2200
        assert manifest.fields["node/u"].units == "m s-1"
        both = np.concatenate([f[1].read(...) for f in values]).astype(np.float64)
        stats = manifest.statistics["node/v"]
        np.testing.assert_allclose(stats.mean, both.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(stats.std, both.std(axis=0), rtol=1e-12)
        assert stats.min == tuple(both.min(axis=0))
        assert stats.max == tuple(both.max(axis=0))
        assert stats.count == (2200, 2200, 2200)
        assert isinstance(manifest.statistics["node/u"].mean, float)

    def test_pickles_as_its_path(self, pristine: str) -> None:
        store = pickle.loads(pickle.dumps(open_store(pristine)))
        assert old_document(store.manifest) == old_document(open_store(pristine).manifest)

    def test_same_input_same_bytes(self, pristine: str, tmp_path: Path) -> None:
        samples = [make_sample(1500, num_samples=2), make_sample(700, seed=1, index=1, num_samples=2)]
        assert same_tree(pristine, make_store(tmp_path / "again", *samples))

    def test_unknown_array_names_near_ones(self, pristine: str) -> None:
        with pytest.raises(UnknownNameError, match="did you mean 'node/pos'"):
            open_store(pristine).array(0, "node/poss")
        with pytest.raises(ConfigError, match="there are 2"):
            open_store(pristine).sample(2)

    @pytest.mark.parametrize("num_rows", [0, 1, 511, 512, 1025])
    def test_points_of_any_number(self, tmp_path: Path, num_rows: int) -> None:
        rng = np.random.default_rng(num_rows)
        sample = OrderedSample(
            index=0,
            num_samples=1,
            name="cloud",
            kind="points",
            entity="point",
            on_sphere=False,
            order=rng.permutation(num_rows),
            pos=rng.random((num_rows, 3)),
            weights=None,
            cells=None,
            fields=(field_of("p", rng.random(num_rows), "point"),),
            recipe="r",
        )
        path = make_store(tmp_path / "s", sample)
        assert verify(path) is None
        store = open_store(path)
        assert store.read(0, "blocks/weight_prefix")[-1] == num_rows
        assert (store.sample(0).bbox is None) == (num_rows == 0)
        stats = store.manifest.statistics["point/p"]
        assert stats.count == num_rows
        assert np.isnan(stats.mean) == (num_rows == 0)

    def test_sphere_has_boxes_of_unit_vectors(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        pos = np.stack([rng.uniform(0, 360, 600), rng.uniform(-90, 90, 600)], axis=1)
        sample = OrderedSample(
            index=0,
            num_samples=1,
            name="globe",
            kind="points",
            entity="point",
            on_sphere=True,
            order=rng.permutation(600),
            pos=pos,
            weights=None,
            cells=None,
            fields=(),
            recipe="r",
        )
        store = open_store(make_store(tmp_path / "s", sample))
        boxes = store.read(0, "blocks/bbox")
        assert boxes.shape == (2, 2, 3)
        assert np.abs(boxes).max() <= 1
        assert store.sample(0).block_space == "unit_sphere"
        assert verify(store.path) is None


class TestReordered:
    @settings(max_examples=40, deadline=None)
    @given(
        shape=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 3)),
        entity_dim=st.integers(0, 2),
        data=st.data(),
    )
    def test_through_scratch_equals_in_memory(self, shape: tuple[int, ...], entity_dim: int, data: Any) -> None:
        import tempfile

        values = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
        rows = st.integers(0, shape[entity_dim] - 1)
        order = np.array(data.draw(st.lists(rows, min_size=1, max_size=50)), np.int64)  # rows may repeat or be dropped
        target = list(shape)
        target[entity_dim] = len(order)
        with tempfile.TemporaryDirectory() as folder:
            read = Reordered(
                values.__getitem__,
                order,
                source_shape=shape,
                dtype=values.dtype,
                entity_dim=entity_dim,
                scratch=os.path.join(folder, "scratch"),
                max_bytes=data.draw(st.integers(0, 200)),
            )
            block = list(target)
            block[entity_dim] = data.draw(st.integers(1, len(order)))
            for dim in range(entity_dim):
                block[dim] = data.draw(st.integers(1, target[dim]))
            found = np.full(target, -1, np.int32)
            for box in blocks_of(target, block):
                found[box] = read(box)
        np.testing.assert_array_equal(found, np.take(values, order, axis=entity_dim))

    def test_a_store_does_not_depend_on_it(self, tmp_path: Path, pristine: str) -> None:
        sample = make_sample(1500, num_samples=2)
        write_sample(str(tmp_path), sample, max_field_bytes=999)
        assert same_tree(os.path.join(pristine, folder_of(0)), str(tmp_path / folder_of(0)))
        assert os.listdir(tmp_path) == [folder_of(0)]  # no scratch file is left


class TestStatistics:
    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), max_size=20), max_size=5))
    def test_blocks_equal_numpy(self, blocks: list[list[float]]) -> None:
        running = RunningStatistics(None)
        for block in blocks:
            running.add(np.array(block))
        values = np.array([x for block in blocks for x in block])
        values = values[np.isfinite(values)]
        stats = running.result()
        assert stats.count == len(values)
        if len(values):
            np.testing.assert_allclose(stats.mean, values.mean(), atol=1e-8)
            np.testing.assert_allclose(stats.std, values.std(), atol=1e-8)
            assert (stats.min, stats.max) == (values.min(), values.max())
        else:
            assert np.isnan(stats.mean)

    def test_large_offset_keeps_the_spread(self) -> None:
        values = 1e8 + np.random.default_rng(0).random(10_000)
        running = RunningStatistics(None)
        for block in np.split(values, 10):
            running.add(block)
        np.testing.assert_allclose(running.result().std, values.std(), rtol=1e-7)


class TestRefusals:
    def test_digest_covers_dtype_and_shape(self) -> None:
        digests = set()
        for dtype, shape in (("<f4", (4,)), ("<f4", (2, 2)), ("<i4", (4,))):
            digest = ArrayDigest(shape, np.dtype(dtype))
            digest.update(np.zeros(shape, dtype))
            digests.add(digest.hexdigest())
        assert len(digests) == 3

    def test_names_of_the_store(self, tmp_path: Path) -> None:
        sample = make_sample(20)
        for bad in ("pos", "original_id"):
            broken = dict(vars(sample)) | {"fields": (field_of(bad, np.zeros(20)),)}
            with pytest.raises(ConfigError, match="the store's own arrays"):
                write_sample(str(tmp_path), OrderedSample(**broken))
        twice = dict(vars(sample)) | {"fields": (sample.fields[0], sample.fields[0])}
        with pytest.raises(ConfigError, match="twice"):
            write_sample(str(tmp_path), OrderedSample(**twice))
        assert os.listdir(tmp_path) == []

    def test_samples_must_agree(self, tmp_path: Path) -> None:
        first = make_sample(30, index=0, num_samples=2)
        second = OrderedSample(**dict(vars(make_sample(30, index=1, num_samples=2))) | {"fields": first.fields[:2]})
        with pytest.raises(FieldMismatchError, match="sample 1 \\(case 1\\) has fields"):
            make_store(tmp_path / "s", first, second)
        assert not is_store(tmp_path / "s")

    def test_no_manifest_is_no_store(self, tmp_path: Path) -> None:
        write_sample(str(tmp_path), make_sample(30))
        with pytest.raises(UnsupportedFormatError, match="unfinished"):
            open_store(tmp_path)
        with pytest.raises(FileNotFoundError, match="no such store"):
            open_store(tmp_path / "absent")
        (tmp_path / "other").mkdir()
        with pytest.raises(UnsupportedFormatError, match="no manifest"):
            open_store(tmp_path / "other")

    def test_edited_manifest(self, copy: str) -> None:
        path = Path(copy, MANIFEST)
        path.write_text(path.read_text().replace("hilbert", "rcb"))
        with pytest.raises(CorruptDataError, match="digest"):
            open_store(copy)

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": 1}', '{"version": 2}'])
    def test_damaged_manifest(self, copy: str, text: str) -> None:
        Path(copy, MANIFEST).write_text(text)
        with pytest.raises((CorruptDataError, UnsupportedFormatError)):
            open_store(copy)

    def test_missing_sample(self, copy: str) -> None:
        shutil.rmtree(os.path.join(copy, folder_of(1)))
        with pytest.raises(CorruptDataError, match="sample 1"):
            open_store(copy)

    def test_description_round_trip(self, pristine: str) -> None:
        info = read_sample_info(pristine, 0)
        assert load_sample(json.loads(dump_json(sealed(info))), "here") == info


def edit(store: str, path: str, change: Callable[[npt.NDArray[Any]], None]) -> None:
    """Write an array of sample 0 with other values, and all that is said of it, so that only the meaning is wrong."""
    folder, info = os.path.join(store, folder_of(0)), read_sample_info(store, 0)
    group: Any = zarr.open_group(folder, mode="r+")
    values, dims = np.asarray(group[path][:]), group[path].metadata.dimension_names
    change(values)
    shutil.rmtree(os.path.join(folder, path))
    chunks = info.arrays[path].chunks
    assert chunks is not None
    found: dict[str, Any] = {}
    written = arrays.write_array(
        group, path, values.__getitem__, shape=values.shape, dtype=values.dtype, dims=dims,
        chunk_rows=chunks[0], checksums=found,
    )  # fmt: skip
    sums, first = group[CHECKSUMS][:], 0
    for name in sorted(info.arrays.keys() - {CHECKSUMS}):
        grid = [-(-n // c) for n, c in zip(info.arrays[name].shape, info.arrays[name].chunks or (), strict=True)]
        if name == path:
            sums[first : first + np.prod(grid)] = found[path].reshape(-1)
        first += int(np.prod(grid))
    group[CHECKSUMS][:] = sums
    digest = ArrayDigest(sums.shape, sums.dtype)
    digest.update(sums)
    listed = replace(info.arrays[CHECKSUMS], digest=digest.hexdigest())
    reseal(store, replace(info, arrays={**info.arrays, path: written, CHECKSUMS: listed}))


def reseal(store: str, info: SampleInfo) -> None:
    """Let a sample say something else of itself, and the manifest too."""
    folder = os.path.join(store, info.folder)
    info = replace(info, documents=digest_documents(folder, info.arrays))
    Path(folder, "zarr.json").write_text(sample_document(info))
    os.unlink(os.path.join(store, MANIFEST))
    write_manifest(store, [read_sample_info(store, i) for i in range(info.num_samples)])


def put(row: int, value: Any) -> Callable[[npt.NDArray[Any]], None]:
    def change(values: npt.NDArray[Any]) -> None:
        values[row] = value

    return change


def swap(values: npt.NDArray[Any]) -> None:
    values[:] = values[::-1].copy()


class TestVerify:
    def test_good(self, pristine: str) -> None:
        ticks: list[int] = []
        assert verify(pristine, tick=lambda: ticks.append(1)) is None
        assert len(ticks) == 2

    @pytest.mark.parametrize(
        ("array", "change", "row", "message"),
        [
            ("node/original_id", put(7, 9999), 7, "not one of 1500 rows"),
            ("node/original_id", lambda v: v.__setitem__(1400, v[3]), 1400, "a second time"),
            ("cell/original_id", lambda v: v.__setitem__(5, v[4]), 5, "a second time"),
            ("csr/src", put(40, 1500), 40, "not one of 1500 rows"),
            ("csr/src", put(40, -1), 40, "not one of 1500 rows"),
            ("csr/indptr", put(0, 1), 0, "must run from 0"),
            ("csr/indptr", put(9, 0), 9, "decreases"),
            ("csr/edge_id", put(3, -1), 3, "is negative"),
            ("cell/connectivity", put(11, 1500), 11, "not one of 1500 rows"),
            ("cell/offsets", put(4, 9), 3, "without nodes"),
            ("cell/offsets", put(2, 0), 2, "decreases"),
            ("cell/indptr", put(1, 0), None, "its lowest node is 0"),
            ("blocks/bbox", put(1, 0.5), 1, "does not contain row"),
            ("blocks/weight_prefix", put(1, -1.0), 1, "not decrease"),
            ("node/pos", put(600, 77.0), 1, "does not contain row 600"),
        ],
    )
    def test_each_invariant(self, copy: str, array: str, change: Any, row: int | None, message: str) -> None:
        edit(copy, array, change)
        fault = verify(copy)
        assert fault is not None
        assert fault.sample == 0
        assert fault.array == ("blocks/bbox" if array == "node/pos" else array)
        assert message in fault.message
        if row is not None:
            assert fault.row == row
        for part in (copy, "sample 0", fault.array):
            assert part in str(fault)
        with pytest.raises(CorruptDataError, match="sample 0"):
            verify_sample(copy, 0)

    def test_unsorted_edges(self, copy: str) -> None:
        indptr = open_store(copy).read(0, "csr/indptr")
        row = int(indptr[20])

        def swap_two(values: npt.NDArray[Any]) -> None:
            values[[row, row + 1]] = values[[row + 1, row]]

        edit(copy, "csr/src", swap_two)
        fault = verify(copy)
        assert fault is not None
        assert (fault.array, fault.row) == ("csr/src", row + 1)

    @pytest.mark.parametrize("array", ["node/v", "csr/src", "node/original_id"])
    def test_a_flipped_bit(self, copy: str, array: str) -> None:
        path = Path(copy, folder_of(0), array, "c")
        shard = next(p for p in path.rglob("*") if p.is_file())
        data = bytearray(shard.read_bytes())
        data[len(data) // 3] ^= 4
        shard.write_bytes(data)
        fault = verify(copy)
        assert fault is not None
        assert fault.array == array
        assert "checksum" in fault.message
        assert "chunk" in fault.message

    def test_values_changed_with_their_checksum(self, copy: str) -> None:
        array = zarr.open_array(os.path.join(copy, folder_of(1), "node/u"), mode="r+")
        array[5] = 3.0
        fault = verify(copy)
        assert fault is not None
        assert (fault.sample, fault.array) == (1, "node/u")
        assert "was recorded for it" in fault.message

    def test_a_lost_shard_and_a_short_one(self, copy: str) -> None:
        shard = Path(copy, folder_of(0), "node/u/c/0")
        shard.write_bytes(shard.read_bytes()[:-9])
        assert "node/u" in str(verify(copy))
        shard.unlink()
        assert "node/u" in str(verify(copy))

    def test_arrays_that_are_not_listed(self, copy: str) -> None:
        zarr.create_array(os.path.join(copy, folder_of(0), "node/extra"), shape=(3,), dtype="f4")
        fault = verify(copy)
        assert fault is not None
        assert fault.array == "node/extra"
        shutil.rmtree(os.path.join(copy, folder_of(0), "node/extra"))
        shutil.rmtree(os.path.join(copy, folder_of(0), "cell/type"))
        fault = verify(copy)
        assert fault is not None
        assert fault.array == "cell/type"

    def test_exchanged_samples(self, copy: str) -> None:
        zero, one = (os.path.join(copy, folder_of(i)) for i in (0, 1))
        os.rename(zero, zero + "x")
        os.rename(one, zero)
        os.rename(zero + "x", one)
        assert "renamed or mixed" in str(verify(copy))

    def test_small_blocks_find_the_same(self, copy: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("scidata.store.format.verify._BLOCK_BYTES", 4096)
        assert verify(copy) is None
        edit(copy, "csr/src", put(4000, -5))
        fault = verify(copy)
        assert fault is not None
        assert fault.row == 4000


class TestShards:
    @settings(max_examples=60, deadline=None)
    @given(shape=st.lists(st.integers(1, 3000), min_size=1, max_size=3), data=st.data())
    def test_blocks_are_in_c_order(self, shape: list[int], data: Any) -> None:
        """The digest is of the values in C order: shards, one after the other, must give just that."""
        entity_dim = data.draw(st.integers(0, len(shape) - 1))
        for dim in range(len(shape)):
            shape[dim] = shape[dim] if dim == entity_dim else shape[dim] % 7 + 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(arrays, "_SHARD_BYTES", data.draw(st.sampled_from([1, 4096, 100_000])))
            chunk, shard = arrays._chunk_and_shard(shape, 4, entity_dim, 100)
        assert all(s % c == 0 for s, c in zip(shard, chunk, strict=True))
        ids = np.arange(np.prod(shape)).reshape(shape)
        parts = [ids[box].reshape(-1) for box in blocks_of(shape, shard)]
        np.testing.assert_array_equal(np.concatenate(parts), ids.reshape(-1))

    def test_time_steps_share_a_shard(self) -> None:
        assert arrays._chunk_and_shard((50, 2000), 4, 1, 1024) == ((1, 1024), (50, 2048))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=224k", "none", mount], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no tmpfs here: {done.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


class TestFullDisk:
    @pytest.mark.parametrize("max_field_bytes", [1 << 20, 100])
    def test_error_and_nothing_valid(self, small_disk: Path, max_field_bytes: int) -> None:
        write_sample(str(small_disk), make_sample(20))
        with pytest.raises(OSError, match="no space left while writing sample 1") as caught:
            write_sample(str(small_disk), make_sample(3000, index=1), max_field_bytes=max_field_bytes)
        assert caught.value.errno == errno.ENOSPC
        assert os.listdir(small_disk) == [folder_of(0)]
        with pytest.raises(UnsupportedFormatError, match="unfinished"):
            Store(small_disk)

    def test_manifest(self, small_disk: Path) -> None:
        store = str(small_disk / "s")
        path = make_store(small_disk / "s", make_sample(20))
        os.unlink(os.path.join(path, MANIFEST))
        with open(small_disk / "ballast", "wb", buffering=0) as ballast:
            os.posix_fallocate(ballast.fileno(), 0, shutil.disk_usage(small_disk).free)
        with pytest.raises(OSError, match="No space"):
            write_manifest(store, [read_sample_info(store, 0)])
        assert os.listdir(store) == [folder_of(0)]


_MEASURE = """
import dataclasses, resource, sys
import numpy as np
from scidata.store.format.manifest import FieldInfo
from scidata.store.format.write import FieldData, OrderedSample, write_sample
num_rows, path, shape, dim = 200_000, sys.argv[1], eval(sys.argv[2]), int(sys.argv[3])
info = FieldInfo(name="x", entity="point", dtype="<f8", dims=("a", "b"), entity_dim=dim)
def read(box):
    return np.zeros([s.stop - s.start for s in box])
order = np.random.default_rng(0).permutation(num_rows)
sample = OrderedSample(index=0, num_samples=1, name="s", kind="points", entity="point", on_sphere=False, order=order,
    pos=np.zeros((num_rows, 2)), weights=None, cells=None, fields=(), recipe="")
write_sample(path, sample)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
big = dataclasses.replace(sample, index=1, fields=(FieldData(info=info, shape=shape, read=read),))
write_sample(path, big, max_field_bytes=32 << 20)
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.parametrize(("shape", "entity_dim"), [((200_000, 200), 0), ((60, 200_000), 1)])
def test_memory_of_a_large_field_is_bounded(tmp_path: Path, shape: tuple[int, int], entity_dim: int) -> None:
    """A large field where 32 MiB of it may be held: that, the order twice, and copies of a shard of 32 MiB."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _MEASURE, str(tmp_path), str(shape), str(entity_dim)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    print(f"{(after - before) / 1024:.0f} MiB more than without the field")
    assert after - before < 220 << 10  # KiB
