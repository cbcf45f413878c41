"""``scidata.create``: the same output, byte for byte, for any number of ranks; failures that all ranks hear of."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch.distributed.tensor import Replicate, Shard

import scidata
from scidata.errors import ConfigError, OutputError, RankFailedError
from scidata.testing import RankError, make_grid, run_ranks

LATITUDE, LONGITUDE = {"latitude": "domain"}, {"longitude": "domain"}
CASES: dict[str, dict[str, Any]] = {
    "plain.zarr": {},
    "tiled.zarr": {"chunks": {"latitude": 4, "longitude": 7}},
    "many.zarr": {"chunks": {"latitude": 4, "longitude": 7, "time": 4}},
    "sharded.zarr": {"chunks": {"latitude": 2, "longitude": 6}, "shards": {"latitude": 8, "longitude": 24}},
    "raw.zarr": {"codec": "none", "chunks": {"level": 1}},
    "two.zarr": {"format": "zarr2", "chunks": {"latitude": 5}, "codec": "zstd"},
    "one.nc": {},
    "one.h5": {},
    "packed.nc": {"codec": "zlib", "chunks": {"latitude": 5, "longitude": 7}},
    "packed.h5": {"codec": "zlib", "chunks": {"latitude": 5, "time": 4}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """A packed source of 6 steps, and what one process writes of it."""
    path: Path = tmp_path_factory.mktemp("output")
    make_grid(path / "source.nc", format="netcdf4", num_times=6, num_lat=19, num_lon=24, packed=True)
    run_ranks(write_cases, 1, str(path), "whole", 1, ("dp", "domain"), LATITUDE, "even")
    return path


def digests(path: Path) -> dict[str, str]:
    """Return a digest of each file below a folder."""
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def opened(
    folder: str, domain: Any, names: tuple[str, ...], shard: Any, bounds: Any
) -> tuple[Any, scidata.ShardedDataset[Any]]:
    mesh = scidata.init_mesh(domain=domain, names=names, device="cpu")
    ds: Any = scidata.open_dataset(
        f"{folder}/source.nc",
        mesh,
        shard=shard,
        bounds=bounds,
        halo={min(shard): 2},
        isel={"longitude": slice(1, None)},
    )
    return mesh, ds


def write_cases(
    rank: int, num_ranks: int, folder: str, name: str, domain: Any, names: tuple[str, ...], shard: Any, bounds: Any
) -> None:
    mesh, ds = opened(folder, domain, names, shard, bounds)
    os.makedirs(f"{folder}/{name}", exist_ok=True)
    for out, options in CASES.items():
        with scidata.create(f"{folder}/{name}/{out}", like=ds, **options) as writer:
            dp, num_dp = mesh.get_local_rank("dp"), mesh.size(0)
            steps = [i for i in range(len(ds)) if min(i // 4, num_dp - 1) == dp]  # whole chunks of 4 steps
            for step in steps:
                writer[step] = ds[step]
        assert not os.path.exists(f"{folder}/{name}/{out}.unfinished")


@pytest.mark.slow_for(
    "2-2-names=('dp', 'domain')-shard={'latitude': 'domain'}-even",
    "2-2-names=('dp', 'domain')-shard={'longitude': 'domain'}-even",
    "3-3-names=('dp', 'domain')-shard={'latitude': 'domain'}-even",
    "4-4-names=('dp', 'domain')-shard={'latitude': 'domain'}-bounds=[0, 0, 8, 12, 19]",
    "4-2-names=('dp', 'domain')-shard={'latitude': 'domain'}-bounds=[0, 9, 19]",
)
@pytest.mark.parametrize(
    ("num_ranks", "domain", "names", "shard", "bounds"),
    [
        (2, 2, ("dp", "domain"), LATITUDE, "even"),
        (2, 2, ("dp", "domain"), LONGITUDE, "even"),
        (3, 3, ("dp", "domain"), LATITUDE, [0, 1, 1, 19]),
        (3, 3, ("dp", "domain"), LATITUDE, "even"),
        (4, 4, ("dp", "domain"), LATITUDE, [0, 0, 8, 12, 19]),
        (4, 2, ("dp", "domain"), LATITUDE, [0, 9, 19]),
        (4, (2, 2), ("dp", "h", "w"), {"latitude": "h", "longitude": "w"}, "even"),
    ],
)
def test_the_same_for_any_number_of_ranks(
    folder: Path, num_ranks: int, domain: Any, names: tuple[str, ...], shard: Any, bounds: Any
) -> None:
    name = f"{num_ranks}-{domain}-{min(shard)}-{bounds}"
    run_ranks(write_cases, num_ranks, str(folder), name, domain, names, shard, bounds)
    assert digests(folder / name) == digests(folder / "whole")


@pytest.mark.parametrize("out", CASES)
def test_other_readers_see_the_source(folder: Path, out: str) -> None:
    source = xr.open_dataset(folder / "source.nc").isel(longitude=slice(1, None)).load()
    engine: Any = "netcdf4" if out.endswith((".nc", ".h5")) else "zarr"
    written = xr.open_dataset(folder / "whole" / out, engine=engine).load()
    xr.testing.assert_identical(written, source)
    raw = xr.open_dataset(folder / "whole" / out, engine=engine, mask_and_scale=False)
    packed = xr.open_dataset(folder / "source.nc", mask_and_scale=False).isel(longitude=slice(1, None))
    for field in ("u", "v", "t"):
        assert raw[field].dtype == packed[field].dtype
        assert (raw[field].values == packed[field].values).all()


def write_other_layouts(rank: int, num_ranks: int, folder: str) -> None:
    """Tensors that are split otherwise than the data set, or not at all, and batches of them."""
    _mesh, ds = opened(folder, num_ranks, ("dp", "domain"), LATITUDE, "even")
    with scidata.create(f"{folder}/others{num_ranks}.zarr", like=ds, chunks={"longitude": 5}, fields=["u"]) as writer:
        u = ds[0]["u"]
        writer[0] = {"u": u.redistribute(placements=[Shard(2)]) if num_ranks > 1 else u}
        writer[1] = {"u": ds[1]["u"].full_tensor()}
        writer[2] = {"u": ds[2]["u"].redistribute(placements=[Replicate()])}
        batch = scidata.collate([ds[i] for i in (3, 4, 5)])
        writer[3:6] = {"u": batch["u"]}


@pytest.mark.slow_for("2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_any_layout_of_the_tensors(folder: Path, num_ranks: int) -> None:
    run_ranks(write_other_layouts, num_ranks, str(folder))
    written = xr.open_dataset(folder / f"others{num_ranks}.zarr")
    source = xr.open_dataset(folder / "source.nc").isel(longitude=slice(1, None))
    xr.testing.assert_equal(written["u"], source["u"])


def write_beside_tp(rank: int, num_ranks: int, folder: str) -> None:
    """Ranks along tp hold the same parts; a dp rank has no step; two outputs are written at once."""
    mesh = scidata.init_mesh(dp=num_ranks // 4, domain=2, extra={"tp": 2}, device="cpu")
    ds: Any = scidata.open_dataset(f"{folder}/source.nc", mesh, shard=LATITUDE, isel={"longitude": slice(1, None)})
    out = f"{folder}/beside{num_ranks}"
    first = scidata.create(f"{out}a.zarr", like=ds, chunks={"latitude": 4, "longitude": 7})
    second = scidata.create(f"{out}b.zarr", like=ds, chunks={"latitude": 5})
    with first, second:
        if mesh.get_local_rank("dp") == 0:
            for step in range(len(ds)):
                first[step] = ds[step]
                second[step] = ds[step]
            assert not first.missing


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_ranks_that_hold_the_same_and_outputs_at_once(folder: Path, num_ranks: int) -> None:
    run_ranks(write_beside_tp, num_ranks, str(folder), timeout=120)
    assert digests(folder / f"beside{num_ranks}a.zarr") == digests(folder / "whole" / "tiled.zarr")
    source = xr.open_dataset(folder / "source.nc").isel(longitude=slice(1, None)).load()
    xr.testing.assert_identical(xr.open_dataset(folder / f"beside{num_ranks}b.zarr").load(), source)


# -- failures --------------------------------------------------------------------------------------------------------


def fail_on_a_rank(rank: int, num_ranks: int, folder: str, how: str) -> str:
    """The last rank fails; what each one meets."""
    _, ds = opened(folder, num_ranks, ("dp", "domain"), LATITUDE, "even")
    out = f"{folder}/failed-{how}.zarr"
    started = time.monotonic()
    met: BaseException | None = None
    try:
        with scidata.create(out, like=ds, overwrite=True, chunks={"latitude": 4}) as writer:
            for step in range(len(ds)):
                sample = ds[step]
                if rank == num_ranks - 1 and step == 2:
                    if how == "raises":
                        raise ZeroDivisionError("in the loop")
                    if how == "unpackable":
                        sample = sample.replace({"u": sample["u"] * 1e9})
                    if how == "full":
                        writer._output.write = full  # type: ignore[method-assign]
                    if how == "dies":
                        os.kill(os.getpid(), signal.SIGKILL)
                writer[step] = sample
                time.sleep(0.05)
    except (RankFailedError, ZeroDivisionError, ConfigError, OSError) as e:
        met = e
    assert met is not None
    assert time.monotonic() - started < 20
    assert not os.path.exists(out)
    return f"{type(met).__name__}: {met}"


def full(*args: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("how", "what"), [("raises", "in the loop"), ("unpackable", "cannot be stored"), ("full", "No space left")]
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_failure_is_heard_on_all_ranks(folder: Path, num_ranks: int, how: str, what: str) -> None:
    *others, own = run_ranks(fail_on_a_rank, num_ranks, str(folder), how)
    assert not own.startswith("RankFailedError")
    assert what in own
    for text in others:
        assert text.startswith("RankFailedError")
        assert f"rank {num_ranks - 1}" in text
        assert what in text


def test_a_rank_that_dies(folder: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(fail_on_a_rank, 2, str(folder), "dies", timeout=40)
    assert set(caught.value.failures) == {1}  # the other one met an error, and returned


def misuse(rank: int, num_ranks: int, folder: str) -> list[str]:
    mesh = scidata.init_mesh(domain=1, device="cpu")
    ds: Any = scidata.open_dataset(f"{folder}/source.nc", mesh, shard=LATITUDE)
    found = []
    with scidata.create(f"{folder}/misused.zarr", like=ds) as writer:
        for step in range(rank * 3, rank * 3 + 3):
            writer[step] = ds[step]
        writer.flush()
        torch.distributed.barrier()
        try:
            writer[(rank * 3 + 3) % 6] = ds[0]
        except OutputError as e:
            found.append(str(e))
    try:
        scidata.create(f"{folder}/misused.zarr", like=ds)
    except OutputError as e:
        found.append(str(e))
    except RankFailedError as e:
        found.append(str(e))
    try:
        scidata.create(f"{folder}/rank{rank}.zarr", like=ds, fields=["u", "v"][rank])
    except OutputError as e:
        found.append(str(e))
    return found


def test_steps_of_other_ranks_and_outputs_that_are_there(folder: Path) -> None:
    for found in run_ranks(misuse, 2, str(folder)):
        taken, there, differ = found
        assert "the ranks of domain" in taken
        assert "is there already" in there
        assert "different things" in differ


# -- killed and gone on with -----------------------------------------------------------------------------------------


def write_slowly(rank: int, num_ranks: int, folder: str, out: str, seconds: float) -> int:
    """Write all that is missing; the process is killed after some time."""
    _, ds = opened(folder, num_ranks, ("dp", "domain"), LATITUDE, "even")
    if seconds and rank == num_ranks - 1:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, seconds)
    with scidata.create(f"{folder}/{out}", like=ds, resume=True, **CASES[out.split("-")[1]]) as writer:
        missing = writer.missing
        for step in missing:
            writer[step] = ds[step]
            writer.flush()
            time.sleep(0.02 if seconds else 0)
    return len(missing)


def check_killed(folder: Path, out: str, seed: int, ranks: list[int]) -> None:
    """Kill a run of each of some numbers of ranks at a random point, and go on to the end."""
    name = f"killed{seed}-{out}"
    random = np.random.default_rng([seed, len(out)])
    for turn, num_ranks in enumerate(ranks):
        with pytest.raises(RankError):
            run_ranks(write_slowly, num_ranks, str(folder), name, 0.005 + random.uniform(0.0, 0.1), timeout=40)
        assert not (folder / name).exists(), f"finished in turn {turn}"
    array = folder / f"{name}.unfinished" / "u"
    if array.is_dir():  # of a store of Zarr, unless all were killed before: one that was killed while it wrote a chunk
        (array / f"zarr.{'0f' * 16}.partial").touch()
    left = run_ranks(write_slowly, 2, str(folder), name, 0.0)
    assert left[0] == left[1] > 0
    check_whole(folder, name, out)
    assert run_ranks(write_slowly, 2, str(folder), name, 0.0) == [0, 0]  # finished: nothing is missing


def check_whole(folder: Path, name: str, out: str) -> None:
    whole = folder / "whole" / out
    if whole.is_dir():
        assert digests(folder / name) == digests(whole)
    else:
        assert (folder / name).read_bytes() == whole.read_bytes()
    assert not list(folder.glob(f"{name}.*"))


@pytest.mark.parametrize("out", ["sharded.zarr", "many.zarr", "one.nc", "packed.h5"])
def test_a_killed_run_goes_on(folder: Path, out: str) -> None:
    check_killed(folder, out, 0, [2, 1, 3])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("out", ["tiled.zarr", "two.zarr", "many.zarr", "packed.nc", "one.h5"])
def test_runs_killed_at_many_points(folder: Path, out: str, seed: int) -> None:
    check_killed(folder, out, seed, [2, 3])


def die_at_the_end(rank: int, num_ranks: int, folder: str, out: str, dies: int) -> None:
    """A rank dies while the first puts the file together."""
    _, ds = opened(folder, num_ranks, ("dp", "domain"), LATITUDE, "even")
    processes: list[int] = [0] * num_ranks
    torch.distributed.all_gather_object(processes, os.getpid())

    def killing(*chunk: Any) -> bytes:
        if next(count) == 5:
            os.kill(processes[dies], signal.SIGKILL)
        found: bytes = read(*chunk)
        return found

    with scidata.create(f"{folder}/{out}", like=ds, **CASES["packed.nc"]) as writer:
        for step in range(len(ds)):
            writer[step] = ds[step]
        output: Any = writer._output
        count, read, output._read = itertools.count(), output._read, killing


@pytest.mark.parametrize("dies", [0, 1])
def test_a_run_killed_while_the_file_is_put_together(folder: Path, dies: int) -> None:
    out = f"ends{dies}-packed.nc"
    with pytest.raises(RankError) as error:
        run_ranks(die_at_the_end, 2, str(folder), out, dies, timeout=40)
    assert "exit code -9" in error.value.failures[dies]
    assert (folder / out).exists() == (dies != 0)  # the first needs no other any more
    assert run_ranks(write_slowly, 3, str(folder), out, 0.0) == [0, 0, 0]  # all is written
    check_whole(folder, out, "packed.nc")
