"""One output, one owner: who comes second is refused by name, or takes over by name; the first then fails."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import scidata
from scidata.data.output import owner
from scidata.data.output.packed_file import PackedFileOutput
from scidata.errors import ConfigError, OutputError
from scidata.testing import make_grid
from tests.unit._children import Forked
from tests.unit._s3 import BUCKET, serve

OUTPUTS: dict[str, dict[str, Any]] = {
    "o.zarr": {}, "shards.zarr": {"chunks": {"level": 1}, "shards": {"level": 3}}, "two.zarr": {"format": "zarr2"},
    "o.nc": {}, "o.h5": {}, "packed.nc": {"codec": "zlib"},
}  # fmt: skip


@pytest.fixture
def ds(tmp_path: Path) -> Any:
    make_grid(tmp_path / "source.nc", format="netcdf4", num_times=3, num_lat=5, num_lon=6)
    return scidata.open_dataset(tmp_path / "source.nc", fields=["u"])


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    pytest.importorskip("moto")
    with serve() as found:
        yield found


def give(writer: scidata.Writer, ds: Any, factor: float, steps: Any = range(3)) -> None:
    for step in steps:
        writer[step] = {"u": ds[step]["u"] * factor}


def finish(writer: scidata.Writer, ds: Any, factor: float, steps: Any) -> None:
    give(writer, ds, factor, steps)
    writer.close()


def check(path: Any, ds: Any, factor: float, **options: Any) -> None:
    written: Any = scidata.open_dataset(path, fields=["u"], **options)
    for step in range(3):
        assert torch.equal(written[step]["u"], ds[step]["u"] * factor)


@pytest.mark.parametrize("out", OUTPUTS)
def test_a_second_one_is_refused_and_the_first_goes_on(ds: Any, tmp_path: Path, out: str) -> None:
    options: Any = {"like": ds, **OUTPUTS[out]}
    first = scidata.create(tmp_path / out, **options)
    give(first, ds, 2, [0])
    for more in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(OutputError, match=rf"process {os.getpid()} \(this one\) on .*, since 20.*, writes it"):
            scidata.create(tmp_path / out, **options, **more)
    give(first, ds, 2, [1, 2])
    first.close()
    check(tmp_path / out, ds, 2)
    assert sorted(os.listdir(tmp_path)) == sorted([out, "source.nc"])


@pytest.mark.parametrize("out", OUTPUTS)
def test_who_is_robbed_fails_and_leaves_nothing_in_what_the_other_writes(ds: Any, tmp_path: Path, out: str) -> None:
    options: Any = {"like": ds, **OUTPUTS[out]}
    first = scidata.create(tmp_path / out, **options)
    give(first, ds, 2, [0, 1])
    first.flush()
    second = scidata.create(tmp_path / out, overwrite=True, takeover=True, **options)
    give(second, ds, 3, [0])
    second.flush()
    with pytest.raises(OutputError, match=r"does not write it any more: process .* has taken it over"):
        finish(first, ds, 2, [2])
    assert second.missing == [1, 2]
    give(second, ds, 3, [1, 2])
    second.close()
    check(tmp_path / out, ds, 3)
    assert sorted(os.listdir(tmp_path)) == sorted([out, "source.nc"])


def test_who_is_robbed_while_the_file_is_put_together(ds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = {"like": ds, "codec": "zlib"}
    first, read = scidata.create(tmp_path / "o.nc", **options), PackedFileOutput._read
    second: list[scidata.Writer] = []
    give(first, ds, 2)

    def rob(*given: Any) -> bytes:
        monkeypatch.undo()
        found = read(*given)
        second.append(scidata.create(tmp_path / "o.nc", overwrite=True, takeover=True, **options))
        return found

    monkeypatch.setattr(PackedFileOutput, "_read", rob)
    with pytest.raises(OutputError, match=r"any more: .* has taken it over"):
        first.close()
    finish(second[0], ds, 3, range(3))
    check(tmp_path / "o.nc", ds, 3)
    assert sorted(os.listdir(tmp_path)) == ["o.nc", "source.nc"]


def test_it_is_noticed_at_the_end_and_without_a_step(ds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_LOOK_S", 0.05)
    writers = [scidata.create(tmp_path / "o.nc", like=ds)]
    give(writers[0], ds, 2)
    writers.append(scidata.create(tmp_path / "o.nc", like=ds, overwrite=True, takeover=True))
    give(writers[1], ds, 3)
    with pytest.raises(OutputError, match="any more"):
        writers[0].close()
    writers.append(scidata.create(tmp_path / "o.nc", like=ds, overwrite=True, takeover=True))
    deadline = time.monotonic() + 10
    while writers[1]._background.error is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(OutputError, match="has taken it over"):
        writers[1].flush()
    writers[1].abort(ValueError())
    give(writers[2], ds, 4)
    writers[2].close()
    check(tmp_path / "o.nc", ds, 4)
    with pytest.raises(ConfigError, match="give overwrite=True"):
        scidata.create(tmp_path / "o.nc", like=ds, takeover=True)


def own(folder: Path) -> None:
    ds = scidata.open_dataset(folder / "source.nc", fields=["u"])
    writer = scidata.create(folder / "o.nc", like=ds)
    give(writer, ds, 2, [0])
    writer.flush()
    (folder / "began").touch()
    signal.pause()


def test_a_dead_one_is_no_owner(ds: Any, tmp_path: Path) -> None:
    child = Forked(own, tmp_path)
    while not (tmp_path / "began").exists() and child.is_alive():
        time.sleep(0.005)
    with pytest.raises(OutputError, match=f"process {child.pid} on "):
        scidata.create(tmp_path / "o.nc", like=ds, resume=True)
    os.kill(child.pid, signal.SIGSTOP)  # stopped is not dead: it may go on
    with pytest.raises(OutputError, match=f"process {child.pid} on "):
        scidata.create(tmp_path / "o.nc", like=ds, overwrite=True)
    child.kill()
    with scidata.create(tmp_path / "o.nc", like=ds, resume=True) as writer:
        assert writer.missing == [1, 2]
        give(writer, ds, 2, [1, 2])
    check(tmp_path / "o.nc", ds, 2)


def move(progress: Path, **said: Any) -> None:
    """Have the owner be of another machine."""
    document = json.loads((progress / "owner.json").read_text())
    (progress / "owner.json").write_text(json.dumps(document | said))


def test_one_of_another_machine_is_dead_when_it_is_silent(ds: Any, tmp_path: Path) -> None:
    out, progress = tmp_path / "o.zarr", tmp_path / "o.zarr.progress"
    first = scidata.create(out, like=ds)
    give(first, ds, 2, [0])
    first.flush()
    first._owner._ends.set()
    move(progress, machine="another", host="far", pid=7)
    (beat,) = progress.glob("alive-*.txt")
    beat.write_text(str(time.time() - 20))
    with pytest.raises(OutputError, match=r"process 7 on far, .* last heard of 2. s ago, and counts as dead"):
        scidata.create(out, like=ds, resume=True)
    beat.write_text(str(time.time() - 100))
    with scidata.create(out, like=ds, resume=True) as writer:
        give(writer, ds, 2, writer.missing)
    check(out, ds, 2)
    with pytest.raises(OutputError, match="any more"):
        first.close()


def test_what_is_unfinished_is_refused_by_its_name(ds: Any, tmp_path: Path) -> None:
    writer = scidata.create(tmp_path / "o.nc", like=ds)
    give(writer, ds, 2, [0])
    writer.close()
    with pytest.raises(OutputError, match=r"o.nc.unfinished is unfinished: .*resume=True; allow_missing=True"):
        scidata.open_dataset(tmp_path / "o.nc.unfinished")
    looked_at: Any = scidata.open_dataset(tmp_path / "o.nc.unfinished", allow_missing=True, fields=["u"])
    assert torch.equal(looked_at[0]["u"], ds[0]["u"] * 2)
    with pytest.raises(OutputError, match="is unfinished"):
        scidata.partition(tmp_path / "o.nc.unfinished", tmp_path / "o.store", kind="points")


def test_nothing_is_written_through_links(ds: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("keep")
    for name in ("o.nc.unfinished", "o.nc.progress", "o.nc.replaced"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    with scidata.create(tmp_path / "o.nc", like=ds, overwrite=True) as writer:
        give(writer, ds, 2)
    check(tmp_path / "o.nc", ds, 2)
    assert [(each.name, each.read_text()) for each in (tmp_path / "mine").iterdir()] == [("file", "keep")]


# -- object stores ---------------------------------------------------------------------------------------------------


def keys(server: Any, name: str) -> dict[str, str]:
    found = server.client().list_objects_v2(Bucket=BUCKET, Prefix=name).get("Contents", [])
    return {each["Key"]: each["ETag"] for each in found}


@pytest.mark.slow_for("zarr2")
@pytest.mark.parametrize("format", ["zarr", "zarr2"])
def test_an_object_store_keeps_what_is_finished(ds: Any, server: Any, format: str) -> None:
    url, options = f"s3://{BUCKET}/{format}.zarr", {"storage_options": server.options}
    create: Any = {"like": ds, "format": format, **options}
    with scidata.create(url, **create) as writer:
        give(writer, ds, 2)
    before = keys(server, f"{format}.zarr/")
    writer = scidata.create(url, overwrite=True, **create)
    give(writer, ds, 3, [0, 1])
    writer.close()  # a step is missing
    assert keys(server, f"{format}.zarr/") == before
    check(url, ds, 2, **options)
    with pytest.raises(OutputError, match="unfinished"):
        scidata.open_dataset(f"{url}.unfinished", **options)
    with scidata.create(url, resume=True, **create) as writer:
        assert writer.missing == [2]
        give(writer, ds, 3, [2])
    check(url, ds, 3, **options)
    assert set(keys(server, format)) == set(before)  # and nothing beside it


def test_a_switch_that_is_cut_off_goes_on(ds: Any, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url, options = f"s3://{BUCKET}/cut.zarr", {"storage_options": server.options}
    create: Any = {"like": ds, **options}
    for factor in (2, 3):
        writer = scidata.create(url, overwrite=factor == 3, **create)
        give(writer, ds, factor)
        if factor == 3:
            monkeypatch.setattr(writer._place._fs, "copy", None)  # type: ignore[union-attr]
            with pytest.raises(TypeError):
                writer.close()
            monkeypatch.undo()
        writer.close()
    with pytest.raises((OutputError, FileNotFoundError)):  # no half of either
        scidata.open_dataset(url, **options)
    with scidata.create(url, resume=True, **create) as writer:
        assert writer.missing == []
    check(url, ds, 3, **options)
    assert not [name for name in keys(server, "cut") if not name.startswith("cut.zarr/")]


def test_owners_in_an_object_store(ds: Any, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "BEAT_S", 0.05)
    url, options = f"s3://{BUCKET}/owned.zarr", {"storage_options": server.options}
    create: Any = {"like": ds, **options}
    first = scidata.create(url, **create)
    give(first, ds, 2, [0])
    for more in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(OutputError, match="this one"):
            scidata.create(url, **create, **more)
    second = scidata.create(url, overwrite=True, takeover=True, **create)
    give(second, ds, 3)
    with pytest.raises(OutputError, match="has taken it over"):
        finish(first, ds, 2, [1, 2])
    second.close()
    check(url, ds, 3, **options)
    assert not [name for name in keys(server, "owned") if not name.startswith("owned.zarr/")]


def test_of_two_that_begin_at_once_one_is_refused(ds: Any, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url, options = f"s3://{BUCKET}/race.zarr", {"storage_options": server.options}
    create: Any = {"like": ds, **options}
    own, others = owner.Owner.take, []

    def late(self: owner.Owner) -> None:
        if not others:
            others.append(None)
            others[0] = scidata.create(url, **create)  # between this one's look and its word
        real = self._place.get
        monkeypatch.setattr(self._place, "get", lambda name: None if name == "owner.json" else real(name))
        own(self)

    monkeypatch.setattr(owner.Owner, "take", late)
    with pytest.raises(OutputError):
        scidata.create(url, **create)
    monkeypatch.undo()
    with others[0] as writer:
        give(writer, ds, 2)
    check(url, ds, 2, **options)
