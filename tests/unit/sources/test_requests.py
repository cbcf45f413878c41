"""Requests for objects, counted: no HEAD anywhere, one GET for each thing that is needed, a LIST where nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import zarr

import scidata
from scidata.errors import CorruptDataError, MissingChunkError, ShortReadError
from scidata.sources.access import retry
from tests.unit._s3 import BUCKET
from tests.unit.sources._requests import CASES, Counts, count, put

pytest.importorskip("obstore", reason="fsspec follows each range by a HEAD")
pytest.importorskip("netCDF4", reason="writes two of the cases")

#: Requests of opening, of the first epoch and of later ones (8 chunks of each of two fields), on one rank, and on four.
EXPECTED = {
    "Zarr v3, consolidated": ("1 GET", "16 GET", "16 GET"),
    "Zarr v3": ("3 GET, 1 LIST", "16 GET", "16 GET"),
    "Zarr v3, uncompressed": ("1 GET", "16 GET", "16 GET"),
    "Zarr v3, shards": ("1 GET", "12 GET", "8 GET"),
    "Zarr v2, consolidated": ("2 GET", "16 GET", "16 GET"),
    "Zarr v2": ("10 GET, 1 LIST", "16 GET", "16 GET"),
    "HDF5": ("1 GET", "8 GET", "8 GET"),
    "NetCDF-4": ("1 GET", "8 GET", "8 GET"),
    "NetCDF-3": ("1 GET", "8 GET", "8 GET"),
    "partitioned store": ("1 GET", "5 GET", "2 GET"),
}
EXPECTED_OF_FOUR = {
    "Zarr v3, consolidated": ("4 GET", "32 GET", "32 GET"),
    "Zarr v3": ("12 GET, 4 LIST", "32 GET", "32 GET"),
    "Zarr v3, uncompressed": ("4 GET", "32 GET", "32 GET"),
    "Zarr v3, shards": ("4 GET", "48 GET", "32 GET"),
    "Zarr v2, consolidated": ("8 GET", "32 GET", "32 GET"),
    "Zarr v2": ("40 GET, 4 LIST", "32 GET", "32 GET"),
    "HDF5": ("4 GET", "32 GET", "32 GET"),
    "NetCDF-4": ("4 GET", "32 GET", "32 GET"),
    "NetCDF-3": ("4 GET", "32 GET", "32 GET"),
    "partitioned store": ("4 GET", "20 GET", "8 GET"),
}


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(retry, "RETRY", retry.Retry(attempts=2, first_wait=0.001))


@pytest.mark.parametrize("case", CASES)
def test_requests_of_one_rank(tmp_path, s3, case):
    (found,) = count(s3, [put(s3, tmp_path, case)])
    assert tuple(map(str, found)) == EXPECTED[case]


def test_requests_of_four_ranks(tmp_path, s3):
    """Each opens for itself, and each chunk of 32 rows is read by the two ranks that have 16 of them.

    Where they open together, one asks.
    """
    urls = [put(s3, tmp_path, case) for case in CASES]
    found = count(s3, urls, 4)
    expected = {case: (each[0], EXPECTED[case][0], *each[1:]) for case, each in EXPECTED_OF_FOUR.items()}
    assert {case: tuple(map(str, counts)) for case, counts in zip(CASES, found, strict=True)} == expected


def test_requests_of_shards_on_a_web_server(tmp_path, s3):
    pytest.importorskip("aiohttp", reason="fsspec needs aiohttp to read http://")
    case = "Zarr v3, shards"
    url, client = put(s3, tmp_path, case), s3.client()
    for each in client.list_objects_v2(Bucket=BUCKET, Prefix=url.removeprefix(f"s3://{BUCKET}/"))["Contents"]:
        client.put_object_acl(Bucket=BUCKET, Key=each["Key"], ACL="public-read")
    ds = scidata.open_dataset(url.replace("s3:/", s3.endpoint))
    s3.wire.forget()
    for i in range(len(ds)):
        ds[i]
    assert str(Counts(get=len(s3.wire.gets), head=len(s3.wire.heads))) == EXPECTED[case][1]


# -- nobody has asked before whether a chunk is there --------------------------------------------------------------


def write(path, server, name, **options):
    """Put an array of four chunks on the server, of which the second lacks; return URL and values."""
    values = np.arange(4 * 6, dtype="f4").reshape(4, 6) + 1
    array = zarr.open_group(path, mode="w").create_array("u", shape=(4, 6), chunks=(1, 6), dtype="f4", **options)
    array[:] = values
    (path / "u/c/1/0").unlink()
    values[1] = 0
    return server.put(path, name), values


KINDS = {"compressed": {}, "raw": {"compressors": None}, "checked": {"compressors": zarr.codecs.Crc32cCodec()}}


@pytest.mark.parametrize("kind", KINDS)
def test_an_absent_chunk_is_found_by_the_read_and_asked_for_once(tmp_path, s3, kind):
    url, values = write(tmp_path / "a.zarr", s3, f"absent/{kind}.zarr", **KINDS[kind])
    strict = scidata.open_dataset(url, storage_options=s3.options, sample_dim="dim_0")
    with pytest.raises(MissingChunkError, match=r"chunk \(1, 0\): the store does not have it.*allow_missing=True"):
        strict[1]
    ds = scidata.open_dataset(url, storage_options=s3.options, sample_dim="dim_0", allow_missing=True)
    for epoch in range(2):
        s3.wire.forget()
        for i in range(4):
            assert np.array_equal(ds[i]["u"].numpy(), values[i])
        assert Counts(get=4 - epoch) == Counts(get=len(s3.wire.gets), head=len(s3.wire.heads))


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_asks_where_a_read_need_not(tmp_path, s3, kind):
    url, values = write(tmp_path / "a.zarr", s3, f"plans/{kind}.zarr", **KINDS[kind])
    ds = scidata.open_dataset(url, storage_options=s3.options, sample_dim="dim_0")
    ds[0]
    s3.wire.forget()
    plan = ds.plan(0)
    assert (plan.exact, plan.num_reads, len(s3.wire.heads), len(s3.wire.gets)) == (True, 1, 1, 0)
    ((_, (_, _, nbytes)),) = [(paths[0], ranges[0]) for paths, ranges in [plan.fields["u"][0].ranges()]]
    assert np.array_equal(ds[0]["u"].numpy(), values[0])
    assert s3.wire.gets == [(f"/bucket/plans/{kind}.zarr/u/c/0/0", f"bytes=0-{nbytes - 1}")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_of_a_wrong_size_is_refused_by_the_read(tmp_path, s3, kind):
    url, _ = write(tmp_path / "a.zarr", s3, f"sizes/{kind}.zarr", **KINDS[kind])
    client, key = s3.client(), f"sizes/{kind}.zarr/u/c/2/0"
    body = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    for wrong, error in (
        (body[:5], CorruptDataError),
        (b"", ShortReadError),
        (body + bytes(2**20), CorruptDataError),
    ):
        client.put_object(Bucket=BUCKET, Key=key, Body=wrong)
        ds = scidata.open_dataset(url, storage_options=s3.options, sample_dim="dim_0", allow_missing=True)
        with pytest.raises(error, match=r"chunk \(2, 0\)"):
            ds[2]
