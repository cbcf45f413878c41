"""From raw files to a finished store: round trips, parts, jobs, kills, locks, faulty input."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest

import scidata
from scidata.core.tasks.processes import Processes
from scidata.core.tasks.work import Work
from scidata.errors import (
    ConfigError,
    CorruptDataError,
    FieldMismatchError,
    OutputError,
    SciDataError,
    UnknownNameError,
)
from scidata.store.format.places import MANIFEST, is_store
from scidata.store.format.store import Store, open_store, verify
from scidata.store.partitioning.output import Part, claim_output, finished_samples
from scidata.store.partitioning.partition import finalize, partition
from tests.unit._children import Forked, interrupted
from tests.unit.store import _pieces
from tests.unit.store._partition import assert_same_tree, mesh_arrays, mesh_files, write

ROOT = Path(__file__).parents[3]
DATA = ROOT.parent / "shared" / "data"


def graph_arrays(num_nodes: int = 200, num_edges: int = 900, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng(seed)
    pairs = np.unique(rng.integers(0, num_nodes, (num_edges, 2)), axis=0)
    pairs = rng.permutation(pairs[pairs[:, 0] != pairs[:, 1]])
    return {
        "edge_index": pairs.T.copy(),
        "pos": rng.random((num_nodes, 3)),
        "node/x": rng.random((num_nodes, 4)),
        "edge/length": rng.random(len(pairs)),
    }


def edges_of(store: Store, index: int = 0) -> set[tuple[int, int]]:
    """Return the edges in the source's numbering."""
    ids = store.read(index, "node/original_id")
    dst = np.repeat(ids, np.diff(store.read(index, "csr/indptr")))
    return set(zip(ids[store.read(index, "csr/src")].tolist(), dst.tolist(), strict=True))


@pytest.mark.parametrize("order", ["hilbert", "rcb", "rows", "metis"])
class TestRoundTrip:
    def test_mesh(self, tmp_path: Path, order: str) -> None:
        if order == "metis":
            pytest.importorskip("pymetis")
        arrays = mesh_arrays(1300)
        report = partition(write(tmp_path / "m.h5", arrays), tmp_path / "s", order=order)
        assert report.finished
        assert verify(tmp_path / "s") is None
        store = open_store(tmp_path / "s")
        nodes, cells = store.read(0, "node/original_id"), store.read(0, "cell/original_id")
        np.testing.assert_array_equal(store.read(0, "node/pos"), arrays["points"][nodes])
        np.testing.assert_array_equal(store.read(0, "node/u"), arrays["node/u"][nodes])
        np.testing.assert_array_equal(store.read(0, "node/wind"), arrays["node/wind"][nodes])
        np.testing.assert_array_equal(store.read(0, "cell/area"), arrays["cell/area"][cells])
        corners = nodes[store.read(0, "cell/connectivity")].reshape(-1, 3)
        np.testing.assert_array_equal(corners, arrays["cells"][cells])
        pairs = {(a, b) for cell in arrays["cells"].tolist() for a in cell for b in cell if a != b}
        assert edges_of(store) == pairs
        assert len(store.read(0, "csr/src")) == len(pairs)
        assert store.manifest.order == order

    def test_graph(self, tmp_path: Path, order: str) -> None:
        if order == "metis":
            pytest.importorskip("pymetis")
        arrays = graph_arrays()
        partition(write(tmp_path / "g.h5", arrays), tmp_path / "s", order=order, weights="edges")
        assert verify(tmp_path / "s") is None
        store = open_store(tmp_path / "s")
        assert store.manifest.kind == "graph"
        assert edges_of(store) == set(map(tuple, arrays["edge_index"].T.tolist()))
        edge_id = store.read(0, "csr/edge_id")
        np.testing.assert_array_equal(store.read(0, "edge/length"), arrays["edge/length"][edge_id])
        ids, src = store.read(0, "node/original_id"), store.read(0, "csr/src")
        np.testing.assert_array_equal(ids[src], arrays["edge_index"][0][edge_id])
        assert store.read(0, "blocks/weight_prefix")[-1] == len(edge_id)


class TestKinds:
    @pytest.mark.parametrize("edges", [None, "knn:4", "radius:0.1"])
    def test_points(self, tmp_path: Path, edges: str | None) -> None:
        rng = np.random.default_rng(0)
        arrays = {"points": rng.random((700, 3)), "p": rng.random(700)}
        partition(write(tmp_path / "c.h5", arrays), tmp_path / "s", edges=edges, weights="p")
        store = open_store(tmp_path / "s")
        entity = "point" if edges is None else "node"
        ids = store.read(0, f"{entity}/original_id")
        np.testing.assert_array_equal(store.read(0, f"{entity}/p"), arrays["p"][ids])
        np.testing.assert_allclose(store.read(0, "blocks/weight_prefix")[-1], arrays["p"].sum())
        assert ("edge" in store.manifest.counts) == (edges is not None)
        if edges == "knn:4":
            assert store.manifest.counts["edge"] == 2800
        assert verify(tmp_path / "s") is None

    def test_graph_without_positions(self, tmp_path: Path) -> None:
        arrays = {name: values for name, values in graph_arrays().items() if name != "pos"}
        source = write(tmp_path / "g.h5", arrays)
        with pytest.raises(ConfigError, match="needs coordinates"):
            partition(source, tmp_path / "s")
        partition(source, tmp_path / "s", order="rows")
        assert verify(tmp_path / "s") is None
        assert "node/pos" not in open_store(tmp_path / "s").sample(0).arrays

    def test_time_before_nodes(self, tmp_path: Path) -> None:
        arrays = mesh_arrays() | {"node/history": np.arange(5 * 300.0).reshape(5, 300)}
        partition(write(tmp_path / "m.h5", arrays), tmp_path / "s", max_field_bytes=100)
        store = open_store(tmp_path / "s")
        ids = store.read(0, "node/original_id")
        np.testing.assert_array_equal(store.read(0, "node/history"), arrays["node/history"][:, ids])
        assert store.manifest.fields["node/history"].entity_dim == 1

    @pytest.mark.parametrize(
        ("name", "fields"),
        [
            ("outCSne30.ug", None),
            ("mesh.QU.1920km.151026.nc", "node/areaTriangle"),
            ("geoflow_grid.nc", "node/mesh_depth"),
        ],
    )
    def test_real_files(self, tmp_path: Path, name: str, fields: str | None) -> None:
        if not (DATA / name).exists():
            pytest.skip("the real files are not beside the repository")
        partition(DATA / name, tmp_path / "s")
        assert verify(tmp_path / "s") is None
        store = open_store(tmp_path / "s")
        assert store.manifest.on_sphere
        assert store.sample(0).block_space == "unit_sphere"
        if fields is not None:
            assert fields in store.manifest.fields

    def test_fields_in_another_file(self, tmp_path: Path) -> None:
        if not DATA.exists():
            pytest.skip("the real files are not beside the repository")
        partition(DATA / "outCSne30_vortex.nc", tmp_path / "s", mesh=DATA / "outCSne30.ug")
        assert list(open_store(tmp_path / "s").manifest.fields) == ["cell/psi"]
        assert verify(tmp_path / "s") is None


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return mesh_files(tmp_path_factory.mktemp("raw"), 5)


@pytest.fixture(scope="module")
def whole(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "s"
    partition(files, out)
    return out


class TestParts:
    def test_parts_and_finalize(self, files: list[Path], whole: Path, tmp_path: Path) -> None:
        out = tmp_path / "s"
        for index in (2, 0):
            report = partition(files, out, part=f"{index}/3")
            assert not report.finished
        assert not is_store(out)
        with pytest.raises(ConfigError, match=r"2 of 5 samples are missing \(1, 4\)"):
            finalize(out)
        partition(files, out, part=(1, 3))
        assert finalize(out).counts == dict(open_store(whole).manifest.counts)
        assert_same_tree(whole, out)
        finalize(out)
        assert_same_tree(whole, out)

    def test_jobs(self, files: list[Path], whole: Path, tmp_path: Path) -> None:
        shares: list[float] = []
        report = partition(files, tmp_path / "s", jobs=2, tick=shares.append)
        assert report.written == (0, 1, 2, 3, 4)
        assert sum(shares) == pytest.approx(5)
        assert_same_tree(whole, tmp_path / "s")

    @pytest.mark.slow_for("")
    @pytest.mark.parametrize("importing", ["", "numpy"])
    def test_interrupted_jobs(self, files: list[Path], tmp_path: Path, importing: str) -> None:
        code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); sys.argv[0] = 'scidata'"
        code += "; from scidata.cli.app import app; app()"
        command = ["-c", code, "partition", *files, tmp_path / "s", "--jobs", "2"]
        exit_code, errors, spawned = interrupted(command, 2, importing=importing)
        assert exit_code == 130, errors
        assert "Traceback" not in errors
        assert not any(Path(f"/proc/{pid}").exists() for pid in spawned)
        assert not is_store(tmp_path / "s")

    def test_error_of_a_job(self, files: list[Path], tmp_path: Path) -> None:
        bad = mesh_arrays()
        bad["points"][3] = np.nan
        inputs = [*files[:2], write(tmp_path / "bad.h5", bad)]
        with pytest.raises(CorruptDataError, match="NaN or infinite"):
            partition(inputs, tmp_path / "s", jobs=2)
        assert not is_store(tmp_path / "s")
        assert all(not p.name.startswith(".tmp") for p in (tmp_path / "s").iterdir())

    def test_existing_output(self, files: list[Path], whole: Path, tmp_path: Path) -> None:
        out = shutil.copytree(whole, tmp_path / "s")
        with pytest.raises(ConfigError, match="a finished store is there"):
            partition(files, out)
        assert_same_tree(whole, out)  # nor does the refused run leave a lock
        report = partition(files, out, resume=True)
        assert (report.written, report.kept) == ((), (0, 1, 2, 3, 4))
        assert_same_tree(whole, out)
        partition(files[:2], out, overwrite=True)
        assert len(open_store(out)) == 2
        assert verify(out) is None
        assert os.listdir(tmp_path) == ["s"]

    def test_a_store_stays_until_its_successor_is_whole(self, files: list[Path], whole: Path, tmp_path: Path) -> None:
        out = tmp_path / "s"
        (tmp_path / "real").mkdir()
        out.symlink_to(shutil.copytree(whole, tmp_path / "real" / "s"))
        (tmp_path / "nan.h5").write_bytes(files[1].read_bytes())
        with h5py.File(tmp_path / "nan.h5", "a") as file:
            file["points"][0, 0] = np.nan
        with pytest.raises(CorruptDataError, match="NaN or infinite"):
            partition([files[0], tmp_path / "nan.h5"], out, overwrite=True)
        assert_same_tree(whole, out)  # and what was written beside it goes on
        (tmp_path / "nan.h5").write_bytes(files[1].read_bytes())
        report = partition([files[0], tmp_path / "nan.h5"], out, resume=True)
        assert (report.out, report.written, report.kept) == (str(out), (1,), (0,))
        assert len(open_store(out)) == 2
        assert verify(out) is None
        assert out.is_symlink()
        assert os.listdir(tmp_path / "real") == ["s"]

    def test_foreign_files(self, files: list[Path], tmp_path: Path) -> None:
        (tmp_path / "s").mkdir()
        (tmp_path / "s" / "thesis.tex").write_text("x")
        for option in ({}, {"overwrite": True}, {"resume": True}):
            with pytest.raises(ConfigError, match=r"thesis\.tex"):
                partition(files, tmp_path / "s", **option)
        assert os.listdir(tmp_path / "s") == ["thesis.tex"]
        with pytest.raises(ConfigError, match="no folder"):
            partition(files, tmp_path / "s" / "thesis.tex")

    def test_resume_after_damage(self, files: list[Path], whole: Path, tmp_path: Path) -> None:
        out = shutil.copytree(whole, tmp_path / "s")
        shard = next(iter((out / "sample-000003.zarr" / "node" / "u" / "c").iterdir()))
        data = bytearray(shard.read_bytes())
        data[40] ^= 1
        shard.write_bytes(data)
        shutil.rmtree(out / "sample-000001.zarr" / "csr")
        (out / MANIFEST).unlink()
        (out / ".tmp-sample-000002.zarr").mkdir()
        report = partition(files, out, resume=True)
        assert report.written == (1, 3)
        assert_same_tree(whole, out)

    @pytest.mark.parametrize(
        ("change", "part"),
        [
            ({"order": "rcb"}, "order was 'hilbert', now 'rcb'"),
            ({"fields": "u"}, "fields was None"),
            ({}, "there were 5"),
        ],
    )
    def test_resume_with_other_options(
        self, files: list[Path], whole: Path, tmp_path: Path, change: dict[str, str], part: str
    ) -> None:
        out = shutil.copytree(whole, tmp_path / "s")
        with pytest.raises(ConfigError, match=part):
            partition(files if change else files[:4], out, resume=True, **change)  # type: ignore[arg-type]
        assert_same_tree(whole, out)

    @pytest.mark.parametrize("change", ["size", "content", "name"])
    def test_resume_with_changed_inputs(self, tmp_path: Path, change: str) -> None:
        files = mesh_files(tmp_path, 3)
        partition(files, tmp_path / "s", part=(1, 3))
        before = shutil.copytree(tmp_path / "s" / "sample-000001.zarr", tmp_path / "before")
        if change == "size":
            write(files[1], mesh_arrays(500))
            expected = (
                r"sample 1 \(case1\) was made from another .*case1\.h5: it has \d+ bytes, and had \d+; .*--overwrite"
            )
        elif change == "content":
            time = files[1].stat().st_mtime_ns
            with h5py.File(files[1], "r+") as file:
                file["node/u"][17] += 1
            os.utime(files[1], ns=(time, time))  # as a copy that keeps times
            expected = r"sample 1 \(case1\) was made from another .*case1\.h5: its content differs, .*--overwrite"
        else:
            files[1] = files[1].rename(tmp_path / "other.h5")
            expected = r"its input was case1\.h5, now other\.h5"
        with pytest.raises(ConfigError, match=expected):
            partition(files, tmp_path / "s", resume=True)
        assert_same_tree(before, tmp_path / "s" / "sample-000001.zarr")

    def test_resume_with_copied_and_mended_inputs(self, tmp_path: Path) -> None:
        """Times and folders may change, and so may inputs of samples that are not written yet."""
        files = mesh_files(tmp_path / "a", 2)
        good = files[1].read_bytes()
        faulty = mesh_arrays()
        faulty["points"][3] = np.nan
        write(files[1], faulty)
        with pytest.raises(CorruptDataError, match="NaN"):
            partition(files, tmp_path / "s")
        files[1].write_bytes(good)
        shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=shutil.copyfile)
        copies = [tmp_path / "b" / file.name for file in files]
        report = partition(copies, tmp_path / "s", resume=True)
        assert (report.written, report.kept) == ((1,), (0,))
        partition([files[0], copies[1]], tmp_path / "whole")  # the store says where its files lay
        assert_same_tree(tmp_path / "whole", tmp_path / "s")

    def test_resume_with_a_changed_folder_or_mesh(self, tmp_path: Path) -> None:
        zarr = pytest.importorskip("zarr")
        topology = write(tmp_path / "m.h5", {k: mesh_arrays()[k] for k in ("points", "cells")})
        fields = zarr.create_group(tmp_path / "u.zarr")
        fields.create_array("u", data=np.arange(300.0), chunks=(100,), compressors=None)
        partition(tmp_path / "u.zarr", tmp_path / "s", mesh=topology)
        fields["u"][250] = 1.0
        with pytest.raises(ConfigError, match=r"made from another .*u\.zarr: its content differs"):
            partition(tmp_path / "u.zarr", tmp_path / "s", mesh=topology, resume=True)
        fields["u"][250] = 250.0
        assert partition(tmp_path / "u.zarr", tmp_path / "s", mesh=topology, resume=True).kept == (0,)
        write(topology, {k: mesh_arrays(300, seed=1)[k] for k in ("points", "cells")})
        with pytest.raises(ConfigError, match=r"made from another .*m\.h5: it"):
            partition(tmp_path / "u.zarr", tmp_path / "s", mesh=topology, resume=True)

    def test_locks(self, files: list[Path], tmp_path: Path) -> None:
        out = tmp_path / "s"
        with claim_output(str(out), None), pytest.raises(ConfigError, match="another run is writing"):
            partition(files, out)
        with claim_output(str(out), Part(0, 2)):
            for refused in ((0, 2), (0, 3), None):
                with pytest.raises(ConfigError, match="another run is writing"):
                    partition(files, out, part=refused, resume=True)
            with pytest.raises(ConfigError, match="no samples"):
                finalize(out)
            partition(files, out, part=(1, 2))
            with pytest.raises(ConfigError, match="another run is writing"):
                finalize(out)
        partition(files, out, part=(0, 2))
        finalize(out)
        assert sorted(p.name for p in out.iterdir())[0] == MANIFEST  # no lock is left
        with pytest.raises(ConfigError, match="a finished store"):
            partition(files, out, part=(0, 2))
        assert sorted(p.name for p in out.iterdir())[0] == MANIFEST

    def test_dry_run(self, files: list[Path], whole: Path, tmp_path: Path) -> None:
        report = partition(files, tmp_path / "s", dry_run=True, part="1/2")
        assert not (tmp_path / "s").exists()
        assert [p.index for p in report.planned] == [1, 3]
        counts = open_store(whole).sample(3).counts
        assert report.planned[1].counts == {"node": counts["node"], "cell": counts["cell"], "edge": None}
        assert set(report.planned[0].fields) == {"u", "wind", "area"}
        with pytest.raises(OutputError, match="a finished store is there"):
            partition(files, whole, dry_run=True)
        assert partition(files, whole, dry_run=True, overwrite=True).num_samples == 5

    @pytest.mark.parametrize("part", ["2/2", "-1/2", "a/b", "1", "0/0"])
    def test_bad_part(self, files: list[Path], tmp_path: Path, part: str) -> None:
        with pytest.raises(ConfigError, match="counted from 0"):
            partition(files, tmp_path / "s", part=part)
        assert not (tmp_path / "s").exists()

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"order": "hilbart"}, ConfigError, "did you mean 'hilbert'"),
            ({"weights": "uu"}, UnknownNameError, "no field 'uu' for weights"),
            ({"weights": "wind"}, ConfigError, "one number per node"),
            ({"weights": "u"}, ConfigError, "negative"),
            ({"repair": "all_of_it"}, ConfigError, "is no repair"),
            ({"keep": "nan_points"}, ConfigError, "cannot be kept"),
            ({"jobs": 0}, ConfigError, "at least 1"),
            ({"overwrite": True, "resume": True}, ConfigError, "exclude"),
        ],
    )
    def test_bad_options(
        self, files: list[Path], tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            partition(files, tmp_path / "s", **options)
        assert not is_store(tmp_path / "s")

    def test_samples_that_differ(self, files: list[Path], tmp_path: Path) -> None:
        other = write(tmp_path / "other.h5", {k: v for k, v in mesh_arrays().items() if k != "node/u"})
        with pytest.raises(FieldMismatchError, match="has fields"):
            partition([files[0], other], tmp_path / "s")
        assert not is_store(tmp_path / "s")
        partition([files[0], other], tmp_path / "s", fields="wind", overwrite=True)
        assert list(open_store(tmp_path / "s").manifest.fields) == ["node/wind"]


class TestFaultyInput:
    def test_points_without_a_place(self, tmp_path: Path) -> None:
        arrays = mesh_arrays()
        lost = [0, 17]  # row 0: what follows moves up
        arrays["points"][lost] = np.nan
        source = write(tmp_path / "m.h5", arrays)
        with pytest.raises(CorruptDataError, match=r"sample m: 2 of 300 points .*--repair nan_points"):
            partition(source, tmp_path / "s")
        report = partition(source, tmp_path / "s", repair="nan_points", overwrite=True)
        assert "repaired nan_points: 2" in report.notes["m"][0]
        assert verify(tmp_path / "s") is None
        store = open_store(tmp_path / "s")
        ids, cells = store.read(0, "node/original_id"), store.read(0, "cell/original_id")
        assert sorted(ids) == sorted(set(range(300)) - set(lost))
        np.testing.assert_array_equal(store.read(0, "node/u"), arrays["node/u"][ids])
        np.testing.assert_array_equal(store.read(0, "cell/area"), arrays["cell/area"][cells])
        corners = ids[store.read(0, "cell/connectivity")].reshape(-1, 3)
        np.testing.assert_array_equal(corners, arrays["cells"][cells])
        assert len(cells) == (~np.isin(arrays["cells"], lost).any(axis=1)).sum()
        assert store.manifest.bbox == (tuple(np.nanmin(arrays["points"], 0)), tuple(np.nanmax(arrays["points"], 0)))

    def test_a_lost_point_that_nothing_uses(self, tmp_path: Path) -> None:
        arrays = mesh_arrays()
        arrays["points"] = np.concatenate([[[np.nan, 0.0]], arrays["points"]])
        arrays["cells"] = arrays["cells"] + 1
        for name in ("node/u", "node/wind"):
            arrays[name] = np.concatenate([arrays[name][:1], arrays[name]])
        partition(write(tmp_path / "m.h5", arrays), tmp_path / "s", repair="all")
        store = open_store(tmp_path / "s")
        ids, cells = store.read(0, "node/original_id"), store.read(0, "cell/original_id")
        corners = ids[store.read(0, "cell/connectivity")].reshape(-1, 3)
        np.testing.assert_array_equal(corners, arrays["cells"][cells])
        assert verify(tmp_path / "s") is None

    def test_edges(self, tmp_path: Path) -> None:
        arrays = graph_arrays()
        index = arrays["edge_index"]
        index[:, 5] = 3
        index[:, 9] = index[:, 8]
        source = write(tmp_path / "g.h5", arrays)
        with pytest.raises(CorruptDataError, match=r"repeat an earlier one.*keep 'duplicate_edges'.*keep 'self_loops'"):
            partition(source, tmp_path / "s")
        partition(source, tmp_path / "s", keep="self_loops,duplicate_edges", overwrite=True)
        assert open_store(tmp_path / "s").manifest.counts["edge"] == index.shape[1]
        partition(source, tmp_path / "s", repair=["self_loops", "duplicate_edges"], overwrite=True)
        store = open_store(tmp_path / "s")
        edge_id = store.read(0, "csr/edge_id")
        assert sorted(edge_id) == [i for i in range(index.shape[1]) if i not in (5, 9)]
        np.testing.assert_array_equal(store.read(0, "edge/length"), arrays["edge/length"][edge_id])
        assert verify(tmp_path / "s") is None
        arrays["pos"][0] = np.inf
        write(source, arrays)
        with pytest.raises(ConfigError, match="are to be kept"):
            partition(source, tmp_path / "s", keep="self_loops,duplicate_edges", repair="nan_points", overwrite=True)
        index[0, 0] = -1_294_967_296  # 3e9 in 32 bits
        write(source, arrays)
        with pytest.raises(CorruptDataError, match="write the ids again in 64 bits"):
            partition(source, tmp_path / "s", repair="all", overwrite=True)

    def test_a_repair_is_allowed_when_the_run_is_resumed(self, tmp_path: Path) -> None:
        good, bad, last = (graph_arrays(seed=seed) for seed in range(3))
        good["edge_index"][:, 9] = good["edge_index"][:, 8]
        bad["edge_index"][:, 5] = 3
        sources = [write(tmp_path / f"{i}.h5", arrays) for i, arrays in enumerate((good, bad, last))]
        out, keep = tmp_path / "s", "duplicate_edges"
        with pytest.raises(CorruptDataError, match="--repair self_loops"):
            partition(sources, out, keep=keep)
        with pytest.raises(OutputError, match=r"repair was \[\], now \['all'\]"):
            partition(sources, out, repair="all", resume=True)
        with pytest.raises(OutputError, match="order was 'hilbert', now 'rows'"):
            partition(sources, out, keep=keep, repair="self_loops", order="rows", resume=True)
        report = partition(sources, out, keep=keep, repair="self_loops", resume=True)
        assert (report.kept, report.written) == ((0,), (1, 2))
        store = open_store(out)
        assert [store.manifest.settings[name] for name in ("repair", "keep")] == [["self_loops"], [keep]]
        counts = [sample.counts["edge"] for sample in store.manifest.samples]
        assert counts == [a["edge_index"].shape[1] - lost for a, lost in ((good, 0), (bad, 1), (last, 0))]
        assert verify(out) is None

    def test_parts_that_treat_faults_otherwise_do_not_mix(self, tmp_path: Path) -> None:
        sources = [write(tmp_path / f"{i}.h5", graph_arrays(seed=i)) for i in range(2)]
        partition(sources, tmp_path / "s", part=(0, 2), keep="self_loops")
        partition(sources, tmp_path / "s", part=(1, 2), repair="self_loops")
        with pytest.raises(FieldMismatchError, match="keeps faults that others repair"):
            finalize(tmp_path / "s")


def start(*args: object) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "scidata", "partition", *map(str, args)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(files: list[Path], out: Path, jobs: int) -> None:
    partition(files, out, resume=True, jobs=jobs)


class TestKilled:
    @pytest.mark.parametrize("jobs", [1, 2])
    def test_resumed_equals_uninterrupted(self, files: list[Path], whole: Path, tmp_path: Path, jobs: int) -> None:
        """SIGKILL at random moments after writing has begun; all runs but the last are killed."""
        out, rng = tmp_path / "s", random.Random(jobs)
        interrupted = 0
        for _ in range(4 - jobs):
            process = Forked(run, files, out, jobs)
            while process.is_alive() and not any(p.name.startswith(".tmp") for p in out.glob("*")):
                time.sleep(0.002)  # until a sample is being written
            time.sleep(rng.uniform(0, 0.15))
            process.kill()
            interrupted += not is_store(out)
        assert interrupted
        # in this process: it begins while workers of the killed run may still be ending
        partition(files, out, resume=True)
        assert_same_tree(whole, out)

    def test_two_at_once(self, files: list[Path], whole: Path, tmp_path: Path) -> None:
        runs = [start(*files, tmp_path / "s") for _ in range(2)]
        errors = [run.communicate(timeout=60)[1] for run in runs]
        assert sorted(run.returncode for run in runs) == [0, 1], errors
        assert any("another run is writing" in e or "store is there" in e or "unfinished store" in e for e in errors)
        assert_same_tree(whole, tmp_path / "s")

    def test_killed_worker(self) -> None:
        with pytest.raises(SciDataError, match=r"sample 1 ended with exit code -9.*fewer --jobs"):
            Processes(2).run(Work(job=_pieces.killed, name="sample"), range(2), tick=lambda share: None)

    def test_workers_report_in_any_order(self) -> None:
        shares: list[float] = []
        Processes(2).run(Work(job=_pieces.halves, name="sample"), range(5), tick=shares.append)
        assert shares == [0.5] * 10

    def test_error_that_does_not_pickle(self) -> None:
        with pytest.raises(SciDataError, match="Unpicklable: at 1"):
            Processes(2).run(Work(job=_pieces.unpicklable, name="sample"), range(2), tick=lambda share: None)


def test_full_disk(tmp_path: Path) -> None:
    """The size of a sample is compared with what is free before anything of it is written."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", mount], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no tmpfs here: {done.stderr.decode().strip()}")
    try:
        files = [write(tmp_path / "a.h5", mesh_arrays(100)), write(tmp_path / "b.h5", mesh_arrays(4000))]
        with pytest.raises(OSError, match=r"sample 1 \(b\) takes \d+ bytes, and \d+ are free"):
            partition(files, mount / "s")
        assert not is_store(mount / "s")
        assert finished_samples(str(mount / "s")) == [0]
        process = start(*files, mount / "s", "--resume")
        _, error = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "are free" in error
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def test_flags_that_are_none(files: list[Path], tmp_path: Path) -> None:
    for name in ("overwrite", "resume", "dry_run", "allow_missing", "allow_external"):
        with pytest.raises(ConfigError, match=f"{name}='yes': expected True or False"):
            partition(files[0], tmp_path / "s", **{name: "yes"})  # type: ignore[arg-type]
    assert not (tmp_path / "s").exists()


def test_root_exports_it(files: list[Path], whole: Path, tmp_path: Path) -> None:
    scidata.partition(files, tmp_path / "s")
    assert_same_tree(whole, tmp_path / "s")
    assert "partition" in dir(scidata)


def test_imports_little() -> None:
    """Each process of ``--jobs`` imports it."""
    code = "import scidata.store.partitioning.partition, sys; "
    code += "assert not {'torch', 'scipy', 'zarr', 'xarray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
