"""What a loader says of itself: figures, a trace on torch.profiler's clock, and one warning when the loop waits."""

import gzip
import json
import os
import time
import warnings

import numpy as np
import pytest
import torch

import scidata
from scidata.core import trace
from scidata.errors import ConfigError
from scidata.loader.stats import PrefetchStats
from scidata.loader.waiting import WaitWatch
from scidata.testing import make_grid
from scidata.testing.ranks import fork_server
from tests.writers import write_hdf5


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("visible") / "grid.zarr")
    make_grid(path, num_times=40, num_levels=2, num_lat=40, num_lon=60, chunks=(1, 2, 10, 60), compressed=True)
    return path


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cloud")
    raw = str(folder / "cloud.h5")
    rng = np.random.default_rng(0)
    write_hdf5(raw, {"pos": rng.random((3000, 3)), "t": rng.random(3000).astype("f4")})
    out = str(folder / "cloud.store")
    scidata.partition(raw, out, kind="points", points=("pos",))
    return out


def loop(loader, work=0.0):
    for _ in loader:
        end = time.perf_counter() + work
        while time.perf_counter() < end:
            pass


# -- figures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stages_are_counted_and_add_up(store, num_workers):
    ds = scidata.open_dataset(store, fields=["u"], num_threads=1)
    loader = scidata.DataLoader(ds, 2, num_workers=num_workers)
    began = time.perf_counter()
    loop(loader, 1e-3)
    took = time.perf_counter() - began
    stats = loader.stats()
    plans = [ds.plan(i) for i in range(len(ds))]
    assert (stats["batches"], stats["samples"]) == (len(ds) // 2, len(ds))
    assert stats["bytes"] == sum(p.bytes_wanted for p in plans) == len(ds) * 2 * 40 * 60 * 4
    assert stats["bytes_fetched"] == sum(p.bytes_fetched for p in plans)
    assert stats["bytes_decoded"] == sum(p.bytes_decoded for p in plans)
    assert stats["num_reads"] > 0
    stages = [stats[f"{name}_seconds"] for name in ("read", "decode", "copy")]
    assert min(stats["read_seconds"], stats["decode_seconds"], stats["transform_seconds"]) > 0
    assert sum(stages) <= stats["fill_seconds"] + 1e-3  # one thread a sample: parts of the whole
    assert stats["wait_seconds"] + stats["transform_seconds"] <= stats["loop_seconds"] <= took
    assert json.loads(json.dumps(stats)) == stats
    if num_workers:
        assert 0 <= stats["queue_depth"] <= 3
    else:
        assert stats["queue_depth"] == 0
        assert stats["wait_seconds"] >= stats["fill_seconds"]


def test_figures_print_as_a_table(store):
    loader = scidata.DataLoader(scidata.open_dataset(store, fields=["u"]), 4)
    assert "0 batches" in str(loader.stats())
    loop(loader)
    lines = str(loader.stats()).splitlines()
    assert [line.split()[0] for line in lines[1:6]] == ["read", "decode", "copy", "transform", "wait"]
    assert len({len(line) for line in lines[:6]}) == 1
    assert "10 batches, 40 samples" in lines[6]
    assert "of 2 batches ready" in lines[6]


def test_a_store_of_points_counts_its_stages_too(cloud):
    loader = scidata.DataLoader(scidata.open_dataset(cloud), num_workers=1)
    loop(loader)
    stats = loader.stats()
    assert min(stats[f"{name}_seconds"] for name in ("read", "decode", "fill")) > 0
    assert stats["bytes_fetched"] > 0


# -- traces --------------------------------------------------------------------------------------------------------


def traced(path):
    found = json.loads(path.read_text())
    return [e for e in found["traceEvents"] if e.get("cat") == "scidata"], found


def test_a_trace_lies_beside_the_profilers_on_one_clock(store, tmp_path):
    ds = scidata.open_dataset(store, fields=["u"], num_threads=1)
    loader = scidata.DataLoader(ds, 2, num_workers=2)
    weight = torch.rand(200, 200)
    steps = {}
    with scidata.trace(tmp_path / "all.json", torch_trace=tmp_path / "torch.json"):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for number, batch in enumerate(loader):
                with torch.profiler.record_function(f"step {number}"):
                    began = time.time_ns()
                    (batch["u"].mean() * weight @ weight).sum().item()
                    time.sleep(1e-3)
                    steps[f"step {number}"] = began, time.time_ns()
        profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    assert trace.active is None
    ours, merged = traced(tmp_path / "all.json")
    theirs = [e for e in merged["traceEvents"] if str(e.get("name", "")).startswith("step ") and e["ph"] == "X"]
    assert len(theirs) == len(steps) == 20
    base = merged["baseTimeNanoseconds"]
    before = 0.0
    for event in theirs:  # the profiler's own events lie where the system's clock says
        (began, ended), ts, end = (
            steps[event["name"]],
            base + event["ts"] * 1e3,
            base + (event["ts"] + event["dur"]) * 1e3,
        )
        assert before - 5e5 <= ts <= began + 5e5
        assert ended - 5e5 <= end
        before = ended
    assert {e["name"] for e in ours} == {"sample", "read", "decode", "copy", "begin copy", "wait", "transform"}
    assert all(e["dur"] >= 0 for e in ours)
    first, last = min(e["ts"] for e in theirs), max(e["ts"] + e["dur"] for e in theirs)
    reads = [e for e in ours if e["name"] == "read"]
    assert any(first < e["ts"] and e["ts"] + e["dur"] < last for e in reads)
    overlapping = [
        e for e in reads if any(s["ts"] < e["ts"] + e["dur"] and e["ts"] < s["ts"] + s["dur"] for s in theirs)
    ]
    assert overlapping  # some reads run during steps, in other threads
    main = theirs[0]["tid"]
    assert all(e["tid"] != main for e in overlapping)
    assert {e["tid"] for e in ours if e["name"] in ("wait", "transform")} == {main}
    assert sum(e["args"]["bytes"] for e in reads) == loader.stats()["bytes_fetched"]
    assert {e["args"]["sample"] for e in reads} == set(range(40))
    assert {e["args"]["field"] for e in reads} == {"u"}


def test_events_of_a_thread_nest(store, tmp_path):
    ds = scidata.open_dataset(store, num_threads=2)
    with scidata.trace(tmp_path / "t.json"):
        loop(scidata.DataLoader(ds, 2, num_workers=2))
    ours, found = traced(tmp_path / "t.json")
    names = {e["args"]["name"] for e in found["traceEvents"] if e["ph"] == "M"}
    assert {"MainThread", "scidata-reader-0", "scidata-reader-1"} <= names
    for tid in {e["tid"] for e in ours}:
        open_until = []
        for e in sorted((e for e in ours if e["tid"] == tid), key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= e["ts"] + 0.002:
                open_until.pop()
            assert not open_until or e["ts"] + e["dur"] <= open_until[-1] + 0.002
            open_until.append(e["ts"] + e["dur"])
    samples = [e for e in ours if e["name"] == "sample"]
    assert sorted(e["args"]["sample"] for e in samples) == list(range(40))
    for e in ours:  # each part lies in its sample, also those that other threads do
        if e["name"] in ("read", "decode", "copy"):
            (whole,) = [s for s in samples if s["args"]["sample"] == e["args"]["sample"]]
            assert whole["ts"] - 0.002 <= e["ts"]
            assert e["ts"] + e["dur"] <= whole["ts"] + whole["dur"] + 0.002


def halved(fields):
    return {"u": fields["u"] / 2}


def test_worker_processes_are_in_the_trace(store, tmp_path):
    ds = scidata.open_dataset(store, fields=["u"], num_threads=1, local_transform=halved)
    processes = {"workers": "process", "persistent_workers": True, "multiprocessing_context": fork_server()}
    loader = scidata.DataLoader(ds, 2, num_workers=2, **processes)
    loop(loader)  # nothing is recorded
    with scidata.trace(tmp_path / "t.json"):
        loop(loader)
    loop(loader)
    ours, found = traced(tmp_path / "t.json")
    named = {e["pid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"}
    assert sorted(named.values()) == ["scidata-worker-0", "scidata-worker-1"]
    assert os.getpid() not in named
    inside = [e for e in ours if e["pid"] in named]
    waited = {e["args"]["sample"]: e for e in ours if e["name"] == "sample" and e["pid"] == os.getpid()}
    assert sorted(e["args"]["sample"] for e in inside if e["name"] == "sample") == sorted(waited) == list(range(40))
    for name in ("read", "decode", "local transform"):
        assert {e["args"]["sample"] for e in inside if e["name"] == name} == set(range(40))
        assert not any(e["name"] == name for e in ours if e["pid"] == os.getpid())
    for e in inside:  # on the same clock
        whole = waited[e["args"]["sample"]]
        assert whole["ts"] - 0.002 <= e["ts"]
        assert e["ts"] + e["dur"] <= whole["ts"] + whole["dur"] + 0.002
    read = sum(e["args"]["bytes"] for e in inside if e["name"] == "read")
    assert read == loader.stats()["bytes_fetched"] // 3


def test_traces_of_several_ranks_merge(store, tmp_path):
    ds = scidata.open_dataset(store, fields=["u"])
    paths = [tmp_path / "a.json.gz", tmp_path / "b.json"]
    moments = []
    for path in paths:
        moments.append(time.time_ns())
        with scidata.trace(path):
            loop(scidata.DataLoader(ds, 20))
    scidata.merge_traces(paths, tmp_path / "both.json.gz")
    both = json.loads(gzip.decompress((tmp_path / "both.json.gz").read_bytes()))
    waits = [e["ts"] * 1e3 + both["baseTimeNanoseconds"] for e in both["traceEvents"] if e["name"] == "wait"]
    assert len(waits) == 4  # two batches each
    assert all(moments[0] <= t + 1e6 for t in waits[:2])
    assert waits[2] > waits[1]
    assert moments[1] <= waits[2] + 1e6


def test_what_cannot_be_traced_is_refused(tmp_path):
    with scidata.trace(tmp_path / "a.json"), pytest.raises(ConfigError, match="already"):
        scidata.trace(tmp_path / "b.json").__enter__()
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    with pytest.raises(ConfigError, match=r"bad\.json: not a trace"):
        scidata.merge_traces([bad], tmp_path / "out.json")
    bad.write_text("{}")
    with pytest.raises(ConfigError, match="traceEvents"):
        scidata.merge_traces([bad], tmp_path / "out.json")
    with pytest.raises(ConfigError, match="no traces"):
        scidata.merge_traces([], tmp_path / "out.json")


def test_a_trace_is_written_where_the_loop_fails(store, tmp_path):
    batches = iter(scidata.DataLoader(scidata.open_dataset(store)))
    with pytest.raises(KeyError, match="mine"), scidata.trace(tmp_path / "t.json"):
        raise KeyError(f"mine {next(batches)}")
    assert trace.active is None
    assert traced(tmp_path / "t.json")[0]


# -- the warning ---------------------------------------------------------------------------------------------------


class Slow:
    """A grid whose samples take a while; delays by stage, in seconds."""

    def __init__(self, store, read=0.0, decode=0.0, transform=0.0):
        self.inner = scidata.open_dataset(store, fields=["u"], num_threads=1)
        self.mesh = self.dp_axis = None
        self.read, self.decode = read, decode
        self.transform = None
        if transform:
            self.transform = lambda sample: (time.sleep(transform), sample)[1]

    def __len__(self):
        return len(self.inner)

    @property
    def fingerprint(self):
        return self.inner.fingerprint

    def buffer_specs(self):
        return self.inner.buffer_specs()

    def assemble(self, *args, **kwargs):
        return self.inner.assemble(*args, **kwargs)

    def read_into(self, index, out):
        began = time.perf_counter_ns()
        time.sleep(self.read + self.decode)
        took = time.perf_counter_ns() - began
        of_read = round(took * self.read / (self.read + self.decode)) if took and self.read + self.decode else 0
        stats = self.inner.read_into(index, out)
        return stats + scidata.read.ReadStats(read_ns=of_read, decode_ns=took - of_read)


def warnings_of(loader, *, epochs=1, work=4e-3):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(epochs):
            for _ in loader:
                time.sleep(work)
    return [w for w in caught if "what the loop waits for" in str(w.message)]


@pytest.mark.parametrize(
    ("delays", "options", "stage", "remedy"),
    [
        ({"read": 8e-3}, {"num_workers": 0}, "read", "pass num_workers=2"),
        ({"read": 20e-3}, {"num_workers": 1}, "read", "num_workers=1 now"),
        ({"read": 1e-3, "decode": 20e-3}, {"num_workers": 1, "prefetch_factor": 3}, "decode", "blosc-lz4"),
        ({"transform": 8e-3}, {"num_workers": 2}, "transform", "loop's own thread"),
    ],
)
def test_a_loop_that_waits_is_told_once_and_why(store, delays, options, stage, remedy):
    loader = scidata.DataLoader(Slow(store, **delays), None, **options)
    (warning,) = warnings_of(loader, epochs=2)
    text = str(warning.message)
    assert f"The slowest stage is {stage} " in text
    assert remedy in text
    assert warning.filename == __file__


def test_a_loop_that_does_not_wait_is_not_told(store):
    ds = scidata.subset(scidata.open_dataset(store, fields=["u"], num_threads=1), range(26))
    assert warnings_of(scidata.DataLoader(ds, None, num_workers=2), work=60e-3) == []


def watched(waits, work, *, transform=0.0):
    """Feed a watch with steps of these milliseconds; return how many warnings it gave."""
    watch, stats, now = WaitWatch(2, 2), PrefetchStats(), 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for wait in waits:
            called, arrived = now, now + round(wait * 1e6)
            returned = arrived + round(transform * 1e6)
            stats.wait_seconds += wait / 1e3
            watch.step(stats, called, arrived, returned)
            now = returned + round(work * 1e6)
    return len(caught)


@pytest.mark.parametrize(
    ("waits", "work", "told"),
    [
        ([1.9] * 60, 20, 0),  # 9 %
        ([2.5] * 60, 20, 1),  # 11 %
        ([0.0] * 30 + [5.0] * 60, 20, 1),  # later on
        ([30_000.0] + [500.0] * 4 + [0.1] * 60, 20, 0),  # the first batches, under a debugger
        ([2.5] * 24, 20, 0),  # too short to tell
        ([0.1] * 15 + [5000.0] + [0.1] * 44, 20, 0),  # one pause
        ([0.9] * 60, 1, 0),  # nothing to gain
        ([50.0] * 60, 0.01, 0),  # a loop that does nothing
    ],
)
def test_what_is_a_reason(waits, work, told):
    assert watched(waits, work) == told


def test_transforms_count_as_waiting():
    assert watched([0.1] * 30, 20) == 0
    assert watched([0.1] * 30, 20, transform=5) == 1


def test_bytes_fetched_in_vain_are_named(store):
    ds = scidata.open_dataset(store, fields=["u"], isel={"longitude": slice(0, 6)}, num_threads=1)
    slow = Slow(store, read=8e-3)
    slow.inner = ds
    (warning,) = warnings_of(scidata.DataLoader(slow, None, num_workers=1))
    assert "bytes are fetched for each that is wanted" in str(warning.message)
