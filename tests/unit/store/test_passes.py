"""Samples put in order in passes, in memory and over disk, against one that is put in order whole."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from scidata import open_dataset, partition
from scidata.errors import ConfigError, CorruptDataError
from scidata.meshes.checks import findings_of
from scidata.meshes.samples import read_samples
from scidata.store.format.manifest import SampleHead
from scidata.store.format.store import read_sample_info
from scidata.store.format.write import write_sample
from scidata.store.partitioning.ordered import order_sample

from ._partition import assert_same_tree, mesh_arrays, write

TINY = "40K"  # of which half is for the sample: dozens of buckets


def solids(num: int = 6) -> dict[str, Any]:
    """Return cubes in a layer, some of them cut into tetrahedra, wedges or pyramids, others whole."""
    rng = np.random.default_rng(0)
    ids = rng.permutation((num + 1) ** 2 * 2).reshape(2, num + 1, num + 1)
    cuts = {
        10: [[0, 1, 3, 4], [1, 2, 3, 6], [1, 3, 4, 6], [1, 4, 5, 6], [3, 4, 6, 7]],
        12: [[0, 1, 2, 3, 4, 5, 6, 7]],
        13: [[0, 1, 2, 4, 5, 6], [0, 2, 3, 4, 6, 7]],
    }
    cells, types = [], []
    for i, j in np.ndindex(num, num):
        corner = [ids[k, i + a, j + b] for k in (0, 1) for a, b in ((0, 0), (1, 0), (1, 1), (0, 1))]
        kind = [10, 12, 13][(i + 2 * j) % 3]
        cells += [[corner[c] for c in cell] for cell in cuts[kind]]
        types += [kind] * len(cuts[kind])
    points = np.empty((ids.size, 3))
    points[ids.ravel()] = np.indices(ids.shape).reshape(3, -1).T + rng.uniform(-0.1, 0.1, points.shape)
    return {
        "points": points,
        "cells/offsets": np.cumsum([0, *map(len, cells)]),
        "cells/connectivity": np.concatenate(cells),
        "cells/types": np.array(types, np.uint8),
        "node/u": rng.random((ids.size, 2), "f4"),
        "cell/p": rng.random(len(cells)),
    }


def graph(num: int = 300) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    edges = rng.integers(0, num, (2, 5 * num))
    edges[:, 7] = edges[:, 3]  # one that repeats another
    return {"pos": rng.random((num, 2)), "edge_index": edges, "edge/w": rng.random(5 * num)}


def cloud(num: int = 700) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    return {"points": rng.random((num, 3)), "p": rng.random((3, num)).T.copy()}


KEPT = {"keep": ("duplicate_edges", "self_loops")}
CASES = {
    "flat": (mesh_arrays(), "60K", {"weights": "edges"}),
    "flat, cells as rows": (mesh_arrays(), "110K", {"entity": "cell", "order": "rcb"}),
    "solid": (solids(), TINY, {"order": "rcb"}),
    "solid, cells as rows": (solids(), TINY, {"entity": "cell", "weights": "p"}),
    "graph": (graph(), "60K", KEPT),
    "graph in its order": (graph(), "60K", {**KEPT, "order": "rows", "weights": "edges"}),
    "cloud": (cloud(), "20K", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_stores_are_those_of_samples_put_in_order_whole(tmp_path: Path, case: str) -> None:
    arrays, least, options = CASES[case]
    raw = str(write(tmp_path / "raw.h5", arrays))
    for memory in (None, least):
        shares: list[float] = []
        partition(raw, tmp_path / f"{memory}.store", memory=memory, tick=shares.append, max_field_bytes=2000, **options)
        assert sum(shares) == pytest.approx(1)
        assert not [name for name in os.listdir(tmp_path / f"{memory}.store") if name.startswith(".")]
    assert_same_tree(tmp_path / "None.store", tmp_path / f"{least}.store")
    info = read_sample_info(str(tmp_path / "None.store"), 0)
    head = SampleHead(**{each.name: getattr(info, each.name) for each in dataclasses.fields(SampleHead)})
    sample = read_samples([raw], **({"entity": "cell"} if "entity" in options else {}))[0]
    whole = order_sample(sample, head, by=options.get("order", "hilbert"), weights=options.get("weights"))
    os.mkdir(tmp_path / "whole")
    write_sample(str(tmp_path / "whole"), whole)
    assert_same_tree(tmp_path / "whole/sample-000000.zarr", tmp_path / "None.store/sample-000000.zarr")


def broken(case: str) -> tuple[dict[str, Any], str]:
    """Return a sample with a fault, and what the message has to say."""
    arrays = graph() if case.startswith("edge") else solids()
    if case == "NaN in a point":
        arrays["points"][17] = np.nan
        return arrays, "1 of 98 points have a NaN or infinite coordinate (first rows: [17])"
    if case == "an id out of range in the last block":
        arrays["cells/connectivity"][-1] = 98
        num = len(arrays["cells/types"])
        return arrays, f"1 of {num} cells name a node that is not among the 98 (first rows: [{num - 1}])"
    if case == "a face used three times":
        extra = [*arrays["cells/connectivity"][:3], 97]
        arrays["cells/connectivity"] = np.concatenate([arrays["cells/connectivity"], extra, extra])
        arrays["cells/offsets"] = np.concatenate([arrays["cells/offsets"], arrays["cells/offsets"][-1] + [4, 8]])
        arrays["cells/types"] = np.append(arrays["cells/types"], [10, 10]).astype(np.uint8)
        arrays["cell/p"] = np.append(arrays["cell/p"], [0, 0])
        return arrays, "faces lie between more than two cells"
    if case == "edges out of range":
        arrays["edge_index"][1, -1] = 300
        return arrays, "1 of 1500 edges name a node that is not among the 300 (first rows: [1499])"
    return arrays, "1500 edges repeat an earlier one"


@pytest.mark.parametrize(
    "case",
    [
        "NaN in a point", "an id out of range in the last block", "a face used three times", "edges out of range",
        "edges that repeat others",
    ],
)  # fmt: skip
def test_faults_are_named_as_in_a_sample_read_whole(tmp_path: Path, case: str) -> None:
    arrays, expected = broken(case)
    raw, out = str(write(tmp_path / "raw.h5", arrays)), tmp_path / "a.store"
    whole = [found.message for found in findings_of(read_samples([raw])[0])]
    assert any(expected in message for message in whole)
    for options in ({}, {} if case.startswith("edge") else {"entity": "cell"}):
        for memory in (None, TINY):
            with pytest.raises(CorruptDataError) as caught:
                partition(raw, out, memory=memory, **options)
            assert all(message in str(caught.value) for message in whole)
            assert not out.exists()  # neither samples nor scratch files
    kinds = [found.kind for found in findings_of(read_samples([raw])[0])]
    if "crowded_faces" not in kinds:
        with pytest.raises(ConfigError, match="repairs need all of it"):
            partition(raw, out, memory=TINY, repair="all")
        partition(raw, out, repair="all")  # without a limit it is read whole


@pytest.mark.parametrize("name", ["points", "cells/connectivity", "node/u"])
def test_truncated_files_and_chunks_leave_no_store(tmp_path: Path, name: str) -> None:
    """The raw file is cut off, or the last chunk of its points, cells or a field is another's bytes."""
    raw, out = tmp_path / "raw.h5", tmp_path / "a.store"
    with h5py.File(raw, "w") as file:
        for each, values in solids().items():
            file.create_dataset(each, data=values, chunks=(16, *values.shape[1:]), compression="gzip")
        last = file[name].id.get_chunk_info(file[name].id.get_num_chunks() - 1)
    data = raw.read_bytes()
    damaged = data[: last.byte_offset] + bytes(last.size) + data[last.byte_offset + last.size :]
    for content in (data[:-100], damaged):
        raw.write_bytes(content)
        for memory in (None, TINY):
            with pytest.raises(CorruptDataError, match=r"raw\.h5"):
                partition(raw, out, memory=memory)
            assert not out.exists()


def test_what_needs_all_at_once_is_refused_or_done_in_memory(tmp_path: Path) -> None:
    raw = str(write(tmp_path / "raw.h5", cloud()))
    with pytest.raises(
        ConfigError, match=r"takes about \d+ bytes in memory, but memory=1000 leaves 500.*'knn:3' are made"
    ):
        partition(raw, tmp_path / "a.store", edges="knn:3", memory=1000)
    with pytest.raises(ConfigError, match=r"costs of its 700 rows take 28000 bytes, and memory=1024 leaves 512; leave"):
        partition(raw, tmp_path / "a.store", memory="1K", weights="p")
    for memory in ("8X", "", 0, 1.5):
        with pytest.raises(ConfigError, match="memory"):
            partition(raw, tmp_path / "a.store", memory=memory)
    assert not (tmp_path / "a.store").exists()
    partition(raw, tmp_path / "a.store", edges="knn:3", memory="1GiB")
    assert partition(raw, tmp_path / "b.store", dry_run=True).planned[0].memory == 700 * 64


def test_meshes_without_cells_and_a_memory_of_one_byte(tmp_path: Path) -> None:
    arrays = solids(1)
    arrays |= {"cells/offsets": np.zeros(1, int), "cell/p": np.empty(0)}
    arrays |= {"cells/connectivity": np.empty(0, int), "cells/types": np.empty(0, np.uint8)}
    raw = str(write(tmp_path / "raw.h5", arrays))
    for memory, order in ((None, "hilbert"), (1, "rcb")):
        partition(raw, tmp_path / f"{memory}.store", memory=memory, order=order)
        assert open_dataset(str(tmp_path / f"{memory}.store"))[0]["u"].shape == (8, 2)
    with pytest.raises(ConfigError, match="more memory than is allowed while they are sorted; use --order rcb"):
        partition(raw, tmp_path / "a.store", memory=1)


def test_scratch_files_of_a_run_that_was_killed_go(tmp_path: Path) -> None:
    raw, out = str(write(tmp_path / "raw.h5", solids())), tmp_path / "a.store"
    scratch = out / ".tmp-sample-000000.zarr.scratch"
    scratch.mkdir(parents=True)
    (scratch / "3").write_bytes(b"half a bucket")
    partition(raw, out, memory=TINY, resume=True)
    assert not scratch.exists()
    assert len(open_dataset(str(out))) == 1


@pytest.mark.parametrize("arrays", [mesh_arrays(), solids(), graph()], ids=["padded", "ragged", "edges"])
def test_compressed_chunks_that_do_not_divide_the_rows_are_read_whole(tmp_path: Path, arrays: dict[str, Any]) -> None:
    plain = write(tmp_path / "plain.h5", arrays)
    with h5py.File(tmp_path / "packed.h5", "w") as file:
        for name, values in arrays.items():
            chunks = tuple(min(num, num * 2 // 3 + 1) for num in values.shape)  # the last has fewer rows
            file.create_dataset(name, data=values, chunks=chunks, compression="gzip")
    whole, packed = (read_samples([str(path)])[0] for path in (plain, tmp_path / "packed.h5"))
    assert whole.sizes == packed.sizes
    if whole.cells is not None:
        assert packed.cells is not None
        assert np.array_equal(packed.cells.offsets, whole.cells.offsets)
        assert np.array_equal(packed.cells.connectivity, whole.cells.connectivity)
    if whole.edge_index is not None:
        assert np.array_equal(packed.edge_index, whole.edge_index)
