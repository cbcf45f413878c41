"""GRIB files and reference sets of them, written by eccodes, against what eccodes reads of each message."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import scidata
from scidata.cli.app import app
from scidata.errors import CorruptDataError, MissingChunkError, MissingDependencyError, UnsupportedFormatError
from scidata.read.arrays import read_array
from scidata.sources import grib_messages, open_source
from scidata.testing import run_ranks

eccodes = pytest.importorskip("eccodes")
RNG = np.random.default_rng(0)
DAYS, LEVELS = (20200228, 20200229, 20200301), (1000, 850, 500)


def message(sample, masked=False, **keys):
    handle = eccodes.codes_grib_new_from_samples(sample)
    values = RNG.normal(size=eccodes.codes_get(handle, "numberOfPoints"))
    for key, value in ({"bitsPerValue": 16} | keys).items():
        eccodes.codes_set(handle, key, value)
    if masked:
        eccodes.codes_set(handle, "bitmapPresent", 1)
        values[::7] = eccodes.codes_get(handle, "missingValue")
    eccodes.codes_set_values(handle, values)
    data = eccodes.codes_get_message(handle)
    stored = eccodes.codes_get_values(handle).astype("f4")
    eccodes.codes_release(handle)
    return data, np.where(np.arange(len(stored)) % 7 == 0, np.nan, stored).astype("f4") if masked else stored


def write(path, parts, gap=b""):
    """Write messages; return their values."""
    path.write_bytes(gap.join(data for data, _ in parts))
    return [values for _, values in parts]


@pytest.fixture(scope="module")
def levels(tmp_path_factory):
    """Three times of three levels of two fields, and a surface field, in a mixed order."""
    path = tmp_path_factory.mktemp("grib") / "levels.grib2"
    keys = [(day, name, level) for day in DAYS for name in ("t", "u") for level in LEVELS]
    keys += [(day, "2t", 2) for day in DAYS]
    keys = [keys[i] for i in RNG.permutation(len(keys))]
    sample = {"t": "regular_ll_pl_grib2", "u": "regular_ll_pl_grib2", "2t": "regular_ll_sfc_grib2"}
    parts = [
        message(sample[name], dataDate=day, dataTime=1800, shortName=name, level=level, masked=name == "2t")
        for day, name, level in keys
    ]
    values = write(path, parts)
    by_key = dict(zip(keys, values, strict=True))
    shape = (31, 16)
    found = {
        name: np.stack([[by_key[day, name, level].reshape(shape) for level in sorted(LEVELS)] for day in DAYS])
        for name in ("t", "u")
    }
    return str(path), found | {"2t": np.stack([by_key[day, "2t", 2].reshape(shape) for day in DAYS])}


def test_fields_times_and_levels(levels):
    path, expected = levels
    ds = scidata.open_dataset(path, coords=True)
    assert ds.dims("t") == ("level", "latitude", "longitude")
    assert set(ds.fields) == {"t", "u", "2t"}
    for i in range(3):
        for name in ds.fields:
            np.testing.assert_array_equal(ds[i][name], expected[name][i])
    assert ds.coordinate("level").tolist() == [500, 850, 1000]
    assert ds.coordinate("latitude").tolist() == np.linspace(60, 0, 31).tolist()
    assert str(ds[1].coords["time"]).startswith("2020-02-29T18:00")
    assert ds.attributes("t")["units"] == "K"
    again = pickle.loads(pickle.dumps(ds))
    np.testing.assert_array_equal(again[2]["u"], expected["u"][2])
    assert ds.plan(0).exact
    done = CliRunner().invoke(app, ["inspect", path, "--json"])
    assert (json.loads(done.stdout)["format"], json.loads(done.stdout)["sample_dim"]) == ("grib", "time")


def parts(rank, num_ranks, path, expected):
    calls, before = [], grib_messages.decode
    grib_messages.decode = lambda *args, **keys: calls.append(1) or before(*args, **keys)
    mesh = scidata.init_mesh(domain=2, device="cpu")
    options = {"halo": {"latitude": 2}, "fields": ["t"], "bounds": {"latitude": (0, 11, 31)}}
    ds = scidata.open_dataset(path, mesh, decode="node", **options)
    rows = slice(0, 13) if rank == 0 else slice(9, 31)
    for batch in scidata.DataLoader(ds, shuffle="blocks"):
        local = batch["t"].local_with_halo()[0].numpy()
        np.testing.assert_array_equal(local, expected["t"][batch.index[0]][:, rows])
    torch.distributed.barrier()
    return len(calls)


def test_ranks_of_a_node_decode_each_message_once(levels):
    assert sum(run_ranks(parts, 2, *levels)) == 9  # three levels of three times


@pytest.mark.parametrize("edition", [1, 2])
def test_reduced_gaussian_points(tmp_path, edition):
    sample = f"reduced_gg_pl_32_grib{edition}"
    values = write(tmp_path / "r.grib", [message(sample, dataDate=day) for day in DAYS])
    ds = scidata.open_dataset(str(tmp_path / "r.grib"), scidata.init_mesh(device="cpu"), fields=["t"], coords=True)
    assert ds.dims("t") == ("values",)
    assert [str(ds[i].coords["time"])[:10] for i in range(3)] == ["2020-02-28", "2020-02-29", "2020-03-01"]
    assert all(np.array_equal(ds[i]["t"].full_tensor(), values[i]) for i in range(3))
    source = open_source(tmp_path / "r.grib")
    assert source.arrays["latitude"].dims == source.arrays["longitude"].dims == ("values",)
    assert source.arrays["reduced_points"].shape == (64,)
    from scidata.meshes.reduced_points import resolved_nodes

    rule = resolved_nodes({"grid": f"gaussian:{tmp_path / 'r.grib'}"})["grid"]
    assert sum(map(int, rule.partition(":")[2].split(","))) == 6114


def test_members_steps_and_gaps(tmp_path):
    keys = [(member, hour) for member in (0, 1) for hour in (0, 6, 12)]
    made = [
        message(
            "regular_ll_pl_grib2", productDefinitionTemplateNumber=1, perturbationNumber=member, step=hour, level=500
        )
        for member, hour in keys
    ]
    values = np.reshape(write(tmp_path / "e.grib", made, gap=b"\0" * 3), (2, 3, 31, 16))
    path = str(tmp_path / "e.grib")
    ds = scidata.open_dataset(path, sample_dim=("time", "step"), coords=True)
    assert (len(ds), ds.dims("t")) == (3, ("number", "latitude", "longitude"))
    assert all(np.array_equal(ds[i]["t"], values[:, i]) for i in range(3))
    assert ds.attributes("t")["level"] == 500
    write(tmp_path / "e.grib", made[:-1])
    ds = scidata.open_dataset(path, sample_dim=("time", "step"))
    with pytest.raises(MissingChunkError, match=r"field 't', chunk \(0, 1, 2, 0, 0\)"):
        ds[2]
    ds = scidata.open_dataset(path, sample_dim=("time", "step"), allow_missing=True)
    assert ds[2]["t"][1].isnan().all()
    write(tmp_path / "e.grib", [made[0], made[0]])
    with pytest.raises(UnsupportedFormatError, match=r"two messages, at bytes 0 and \d+, of t at {'time'"):
        scidata.open_dataset(path)


def test_sums_over_half_hours(tmp_path):
    made = [
        message(
            "regular_ll_sfc_grib2",
            productDefinitionTemplateNumber=8,
            shortName="tp",
            stepUnits="m",
            stepRange=f"0-{end}",
        )
        for end in (120, 60, 90)
    ]
    values = write(tmp_path / "tp.grib", made)
    ds = scidata.open_dataset(str(tmp_path / "tp.grib"), sample_dim=("time", "step"), fields=["tp"])
    np.testing.assert_array_equal(ds.coordinate("step"), [1, 1.5, 2])
    assert all(np.array_equal(ds[i]["tp"].ravel(), values[k]) for i, k in enumerate((1, 2, 0)))


def test_messages_of_edition_1_above_8_mib(tmp_path):
    area = {"latitudeOfFirstGridPoint": 80, "latitudeOfLastGridPoint": -80, "longitudeOfLastGridPoint": 299.9}
    size = {"Ni": 3000, "Nj": 1601, "iDirectionIncrementInDegrees": 0.1, "jDirectionIncrementInDegrees": 0.1}
    keys = size | {f"{key}InDegrees": value for key, value in area.items()} | {"bitsPerValue": 16}
    handle = eccodes.codes_grib_new_from_samples("regular_ll_pl_grib1")
    for key, value in keys.items():
        eccodes.codes_set(handle, key, value)
    eccodes.codes_set_values(handle, np.tile(RNG.normal(size=3000), 1601))
    data, small = eccodes.codes_get_message(handle), message("regular_ll_pl_grib1")
    assert len(data) > 1 << 23
    (tmp_path / "large.grib").write_bytes(small[0] + data + small[0])
    found = [(offset, nbytes) for offset, nbytes, _ in grib_messages.headers(str(tmp_path / "large.grib"))]
    assert found == [(0, len(small[0])), (len(small[0]), len(data)), (len(small[0]) + len(data), len(small[0]))]


def test_columns_first_and_other_grids(tmp_path):
    data, values = message("regular_ll_pl_grib2", jPointsAreConsecutive=1)
    other, others = message("regular_gg_pl_grib2")
    (tmp_path / "j.grib").write_bytes(data + other)
    source = open_source(tmp_path / "j.grib")
    assert {name: layout.dims for name, layout in source.arrays.items() if name.startswith("t")} == {
        "t": ("time", "longitude", "latitude"),
        "t_1": ("time", "latitude_1", "longitude_1"),
        "time": ("time",),
    }
    found = scidata.open_dataset(str(tmp_path / "j.grib"), fields=["t"])[0]["t"]
    np.testing.assert_array_equal(found, values.reshape(16, 31))
    found = scidata.open_dataset(str(tmp_path / "j.grib"), fields=["t_1"])[0]["t_1"]
    np.testing.assert_array_equal(found, others.reshape(64, 128))
    handle = eccodes.codes_grib_new_from_samples("sh_ml_grib2")
    (tmp_path / "s.grib").write_bytes(data + eccodes.codes_get_message(handle))
    source = open_source(tmp_path / "s.grib")
    assert source.arrays["t"].dims == ("time", "longitude", "latitude")
    assert source.skipped == {"t": "its grid, sh, is not read"}


def test_damage_and_what_is_not_read(tmp_path, monkeypatch):
    data, _ = message("regular_ll_pl_grib2")
    path = tmp_path / "d.grib"
    path.write_bytes(data[:-40])
    with pytest.raises(CorruptDataError, match=r"d\.grib"):
        scidata.open_dataset(str(path))
    path.write_bytes(data)
    ds = scidata.open_dataset(str(path))
    damaged = bytearray(data)
    at = data.index(struct.pack(">IB", 21, 5)) + 5  # section 5: how many values there are
    damaged[at : at + 4] = struct.pack(">I", 7)
    path.write_bytes(damaged)
    with pytest.raises((CorruptDataError, scidata.errors.SourceChangedError)):
        ds[0]
    with pytest.raises(CorruptDataError, match=r"field 't', chunk.*grib cannot decode it"):
        scidata.open_dataset(str(path))[0]
    begin = data.index(struct.pack(">IB", 34, 4))  # sections 4 to 7 once more: a message of two fields
    twice = bytearray(data[:-4] + data[begin:])
    twice[8:16] = struct.pack(">Q", len(twice))
    path.write_bytes(twice)
    with pytest.raises(UnsupportedFormatError, match="has several fields; split it: grib_copy"):
        scidata.open_dataset(str(path))
    monkeypatch.setattr(
        grib_messages.importlib, "import_module", lambda name: 1 / 0 if name != "eccodes" else __import__("nowhere")
    )
    with pytest.raises(MissingDependencyError, match="needs eccodes: pip install"):
        open_source(path).arrays  # noqa: B018


@pytest.mark.parametrize("sample", ["regular_ll_pl_grib1", "regular_ll_pl_grib2"])
def test_messages_that_are_cut_off_or_lie_reach_no_library(sample, tmp_path, monkeypatch):
    data, values = message(sample)
    found = grib_messages.decode(memoryview(data + b"more"), 4 * len(values))
    assert np.array_equal(found, values)
    monkeypatch.setattr(grib_messages, "opened", lambda message: 1 / 0)
    for cut in (0, 3, 7, 20, 60, 200, len(data) - 1):
        with pytest.raises(CorruptDataError, match=f"has {cut} bytes of at least"):
            grib_messages.decode(memoryview(data[:cut]), 4 * len(values))
    at = 4 if sample.endswith("1") else 13
    for wrong in (data[:-4] + b"7778", data[:at] + b"\0\1\0" + data[at + 3 :], b"GRIP" + data[4:]):
        with pytest.raises((CorruptDataError, UnsupportedFormatError), match=r"no end|data up to|is not GRIB"):
            grib_messages.decode(memoryview(wrong), 4 * len(values))


def test_reference_sets(tmp_path, levels):
    path, expected = levels
    source = open_source(path)
    layout = source.arrays["t"]
    refs = {".zgroup": json.dumps({"zarr_format": 2})}
    meta = {
        "zarr_format": 2, "shape": list(layout.shape), "chunks": [1, 1, 31, 16], "dtype": "<f4", "fill_value": None,
        "order": "C", "compressor": None, "filters": [{"id": "grib", "var": "t", "dtype": "float32"}],
    }  # fmt: skip
    refs["t/.zarray"] = json.dumps(meta)
    refs["t/.zattrs"] = json.dumps({"_ARRAY_DIMENSIONS": list(layout.dims)})
    for chunk in np.ndindex(3, 3):
        _, offset, nbytes = source.place(layout, (*chunk, 0, 0))
        refs[f"t/{chunk[0]}.{chunk[1]}.0.0"] = [path, offset, nbytes]
    refs["latitude/.zarray"] = json.dumps(
        meta | {"shape": [496], "chunks": [496], "dtype": "<f8", "filters": [{"id": "grib", "var": "latitude"}]}
    )
    refs["latitude/.zattrs"] = json.dumps({"_ARRAY_DIMENSIONS": ["values"]})
    refs["latitude/0"] = refs["t/0.0.0.0"]
    (tmp_path / "set.json").write_text(json.dumps({"version": 1, "refs": refs}))
    ds = scidata.open_dataset(str(tmp_path / "set.json"), fields=["t"], allow_external=True)
    assert all(np.array_equal(ds[i]["t"], expected["t"][i]) for i in range(3))
    assert ds.plan(0).exact
    found = open_source(tmp_path / "set.json", allow_external=True)
    assert not found.arrays["latitude"].fallback
    codecs = pytest.importorskip("kerchunk.codecs")
    _, offset, nbytes = refs["t/0.0.0.0"]
    raw = Path(path).read_bytes()[offset : offset + nbytes]
    lat = read_array(found, found.arrays["latitude"])
    np.testing.assert_array_equal(lat, codecs.GRIBCodec("latitude").decode(raw))


def test_a_set_of_kerchunk(tmp_path):
    pytest.importorskip("cfgrib")
    from kerchunk.grib2 import scan_grib

    (values,) = write(tmp_path / "one.grib", [message("regular_ll_pl_grib2", masked=True)])
    (found,) = scan_grib(str(tmp_path / "one.grib"))
    (tmp_path / "set.json").write_text(json.dumps(found))
    sample = scidata.open_dataset(str(tmp_path / "set.json"), fields=["t"], sample_dim=False)[0]
    np.testing.assert_array_equal(sample["t"], values.reshape(31, 16))
    assert not open_source(tmp_path / "set.json").arrays["t"].fallback


def test_files_and_urls(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    values = []
    for i, day in enumerate(DAYS):
        values += write(tmp_path / f"{i}.grib", [message("polar_stereographic_pl_grib2", dataDate=day)])
    ds = scidata.open_dataset(str(tmp_path / "*.grib"), steps=(0, 1), fields=["t"])
    np.testing.assert_array_equal(ds[1]["t"], np.reshape(values[1:], (2, 31, 16)))
    assert ds.dims("t") == ("time", "y", "x")
    fsspec.filesystem("memory").pipe("/one.grib", (tmp_path / "2.grib").read_bytes())
    far = scidata.open_dataset("memory://one.grib", fields=["t"])
    np.testing.assert_array_equal(far[0]["t"], values[2].reshape(31, 16))
    assert far.plan(0).num_reads == 1


def test_gribberish_decodes_where_eccodes_is_not(monkeypatch, levels):
    pytest.importorskip("gribberish")
    path, expected = levels
    ds = scidata.open_dataset(path, fields=["t"])
    ds[0]
    monkeypatch.setattr(grib_messages, "find_spec", lambda name: name == "gribberish" or None)
    np.testing.assert_allclose(ds[1]["t"], expected["t"][1], atol=1e-6)
