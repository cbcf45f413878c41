"""The cut of a grid: arguments, messages, shapes."""

import numpy as np
import pytest

from scidata.core.options import ReadOptions
from scidata.errors import ConfigError, UnknownNameError
from scidata.grids.partition import make_partition

SIZES = {"time": 4, "level": 3, "latitude": 241, "longitude": 480}


def cut(**options):
    axis_sizes, chunks = options.pop("axis_sizes", {"domain": 3}), options.pop("chunks", {})
    return make_partition(
        SIZES, ReadOptions(**({"shard": {"latitude": "domain"}} | options)), axis_sizes=axis_sizes, chunks=chunks
    )


def test_crop_and_stride_come_before_the_split():
    partition = cut(isel={"latitude": slice(0, 240, 2)}, align=8)
    assert partition.bounds["latitude"].tolist() == [0, 40, 80, 120]
    (segment,) = partition.segments("latitude", {"domain": 1})
    assert (segment.start, segment.step, segment.count) == (80, 2, 40)


def test_two_axes_number_their_ranks_with_the_last_axis_fastest():
    partition = cut(axis_sizes={"h": 2, "w": 3}, shard={"latitude": "h", "longitude": "w"})
    assert partition.num_parts == 6
    assert partition.coordinate(4) == {"h": 1, "w": 1}
    assert partition.owned_rows("longitude", {"h": 1, "w": 1}) == (160, 320)
    assert partition.owned_rows("level", {"h": 1, "w": 1}) == (0, 3)


def test_a_halo_on_an_unsharded_dim_wraps_onto_itself():
    partition = cut(halo={"longitude": (2, 1)}, periodic="longitude")
    first, middle, last = partition.segments("longitude", {"domain": 0})
    assert (first.start, first.count) == (478, 2)
    assert (middle.start, middle.count, middle.offset) == (0, 480, 2)
    assert (last.start, last.count, last.offset) == (0, 1, 482)


def test_chunk_bounds_know_the_crop():
    partition = cut(isel={"latitude": slice(1, None)}, bounds="chunk", chunks={"latitude": 80})
    assert partition.bounds["latitude"].tolist() == [0, 79, 159, 240]


def test_weights_balance_and_bounds_per_dim():
    heavy = np.r_[np.full(120, 3.0), np.full(121, 1.0)]
    bounds = cut(weights=heavy).bounds["latitude"]
    sums = np.add.reduceat(heavy, bounds[:-1])
    assert sums.max() - sums.min() <= 3
    assert cut(bounds={"latitude": [0, 0, 200, 241]}).bounds["latitude"].tolist() == [0, 0, 200, 241]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"shard": {"latitud": "domain"}}, UnknownNameError, "did you mean 'latitude'"),
        ({"isel": {"lon": 0}}, UnknownNameError, "did you mean 'longitude'"),
        ({"halo": {"latitude": -1}}, ConfigError, "must not be negative"),
        ({"halo": {"latitude": (1, 2, 3)}}, ConfigError, "width or"),
        ({"halo": {"latitude": 1.5}}, ConfigError, "width or"),
        ({"bounds": "evn"}, ConfigError, "did you mean 'even'"),
        ({"bounds": [0, 241]}, ConfigError, "dimension 'latitude': 3 ranks need 4 bounds"),
        ({"bounds": {"longitude": "even"}}, ConfigError, "not sharded"),
        ({"weights": [1, 2]}, ConfigError, "2 values for 241"),
        ({"weights": 3}, ConfigError, "one number, 3, for 241"),
        ({"isel": {"latitude": 3}}, ConfigError, "cannot be sharded"),
        ({"isel": {"latitude": slice(10, 10)}}, ConfigError, "no rows of 'latitude'"),
        ({"align": 8}, ConfigError, "crop to 240"),
        ({"axis_sizes": {"domain": 242}}, ConfigError, "dimension 'latitude': 242 parts of 241 rows"),
        ({"periodic": "longitud"}, UnknownNameError, "periodic names"),
        ({"shard": {"latitude": "domain", "longitude": "domain"}}, ConfigError, "one mesh axis"),
    ],
)
def test_what_does_not_fit_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        cut(**options)


def test_integers_name_dimensions():
    assert cut(shard={2: "domain"}).axis_of_dim == {"latitude": "domain"}
