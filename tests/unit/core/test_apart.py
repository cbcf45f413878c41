"""Outputs that are inputs, lie in one or hold one are refused, however the paths are spelled, by all that write."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import scidata
from scidata.cli.app import app
from scidata.core import apart
from scidata.core.apart import check_apart
from scidata.core.urls import url_of
from scidata.errors import OutputError
from scidata.testing import make_grid
from tests.writers import write_clouds


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make_grid(tmp_path / "in" / "source.zarr", num_times=2, num_lat=5, num_lon=6)
    (tmp_path / "link").symlink_to(tmp_path / "in")
    (tmp_path / "file.h5").touch()
    os.link(tmp_path / "file.h5", tmp_path / "hard.h5")
    return tmp_path / "in" / "source.zarr"


@pytest.mark.parametrize(
    ("out", "path", "how"),
    [
        ("in/source.zarr", "in/source.zarr", "is"),
        ("in/source.zarr/", "in/../link/source.zarr", "is"),
        ("link/source.zarr/u/new/deep", "in/source.zarr", "lies in"),
        ("in/source.zarr/../source.zarr/x", "./in//source.zarr/", "lies in"),
        ("in", "link/source.zarr", "holds"),
        ("hard.h5", "file.h5", "is"),
        ("file.h5", "file.h5/group/of/it", "is"),
        ("in/source.zarr2", "in/source.zarr", None),
        ("in/other", "in/absent.nc", None),
        ("s3://b/a.zarr", "s3a://b//a.zarr/", "is"),
        ("s3://b/a.zarr/x", "simplecache::s3://b/a.zarr", "lies in"),
        ("s3://b/a.zarr", "s3://b/a.zarr2", None),
        ("s3://b", "s3://b/a.zarr", "holds"),
        ("in", "s3://b/in", None),
    ],
)
def test_spellings_of_one_path(
    source: Path, monkeypatch: pytest.MonkeyPatch, out: str, path: str, how: str | None
) -> None:
    monkeypatch.chdir(source.parent.parent)
    if how is None:
        return check_apart(url_of(out), ["file.h5", url_of(path)], "it")
    with pytest.raises(OutputError, match=f"it {how} .*, which is read"):
        check_apart(url_of(out), ["file.h5", url_of(path)], "it")
    if how == "holds":
        check_apart(url_of(out), [url_of(path)], "it", may_hold=True)
    return None


def test_other_servers_are_other_places() -> None:
    urls = [url_of("s3://b/a", {"endpoint_url": f"http://{host}:1"}) for host in ("one", "two")]
    check_apart(urls[0], urls[1:], "it")


def run(*args: Any) -> None:
    result = CliRunner().invoke(app, [*map(str, args), "--debug"])
    if result.exception is not None:
        raise result.exception


def stage_store(source: Path) -> None:
    store = write_clouds(source.parent, [3])
    run("stage", store, f"{store}/cache", "--domain", 1)


def like(source: Path, out: str) -> None:
    scidata.create(source.parent / out, like=scidata.open_dataset(source), overwrite=True, format="zarr")


ALL: dict[str, Callable[[Path], Any]] = {
    "stage": lambda source: run("stage", source, source, "--domain", 1),
    "stage within": lambda source: run("stage", source, source / "cache", "--domain", 1),
    "stage a store": stage_store,
    "cache_dir": lambda source: scidata.open_dataset(source, cache_dir=source.parent.parent / "link/source.zarr/c"),
    "create": lambda source: like(source, "source.zarr"),
    "create within": lambda source: like(source, "source.zarr/u/out.zarr"),
    "create around": lambda source: like(source, "../link"),
    "partition": lambda source: scidata.partition(source, source / "x.store", kind="points"),
    "stats": lambda source: run("stats", source, "--out", source / "stats.json"),
    "save": lambda source: scidata.statistics(scidata.open_dataset(source)).save(source / "stats.json"),
    "plan": lambda source: run("plan", source, "--domain", 1, "--plot", source / "u/plan.png"),
    "plot": lambda source: scidata.open_dataset(source).plot(0, path=source / "u.png"),
}


@pytest.mark.parametrize("what", ALL)
def test_all_that_write(source: Path, what: str) -> None:
    before = sorted(source.rglob("*"))
    with pytest.raises(OutputError, match="which is read; write it somewhere else"):
        ALL[what](source)
    assert sorted(source.rglob("*")) == before


def test_a_folder_that_another_process_makes_meanwhile(tmp_path, monkeypatch):
    """Parts of one job begin at once, and one makes the store while another looks where it will be."""
    (tmp_path / "mesh.nc").touch()
    places = apart._places

    def and_then_it_is_there(path):
        found = places(path)
        (tmp_path / "out.store").mkdir(exist_ok=True)
        return found

    monkeypatch.setattr(apart, "_places", and_then_it_is_there)
    check_apart(tmp_path / "out.store", [tmp_path / "mesh.nc"], "it")
