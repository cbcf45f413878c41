"""The recipe of observations: tables of one weather, in three layouts, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from pipelines import observations
from pipelines.observations import INSTRUMENTS, LAYOUTS, Weather, value_columns

SMALL = {"days": 2.5, "shape": (12, 16), "density": 0.3}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("observations")
    for layout in LAYOUTS:
        observations.make(str(folder / layout), layout=layout, **SMALL)  # type: ignore[arg-type]
    return folder


def table(path: Path) -> dict[str, Any]:
    return {name: array[:] for name, array in zarr.open_group(str(path), mode="r").arrays()}


def test_tables_are_sorted_and_have_gaps_and_flags(made: Path) -> None:
    begin = np.datetime64("2020-01-01", "s").astype("i8")
    for name in INSTRUMENTS:
        found = table(made / "columns" / f"{name}.zarr")
        hours = (found["dates"] - begin) / 3600
        assert (np.diff(hours) >= 0).all()
        assert hours[0] >= 0
        assert hours[-1] < 60
        assert (abs(found["lat"]) <= 90).all()
        assert (found["lon"] >= 0).all()
        assert (found["lon"] <= 360).all()
        assert {0, 1} <= set(np.unique(found["qc"])) <= {0, 1, 2}
        counts = np.histogram(hours, np.arange(0, 61, 6))[0]
        assert len(set(counts)) > 1  # no window is like another
        if name == "radiosondes":
            assert (counts[1::4] == 0).any()  # nothing is let go between 0 and 12 UTC
        if name == "stations":
            assert 0 < np.isnan(found["t2m"]).mean() < 0.1


def test_good_rows_say_what_the_analysis_says(made: Path) -> None:
    """The analysis is the weather on the grid; a station is that at its place, with its error."""
    weather = Weather(0)
    grid = table(made / "columns" / "analysis.zarr")
    truth = weather.at_ground("u10", grid["time"][:, None, None], grid["lat"][:, None].astype("f8"), grid["lon"])
    np.testing.assert_allclose(grid["u10"], truth, rtol=1e-5, atol=1e-5)
    found = table(made / "columns" / "stations.zarr")
    hours = (found["dates"] - found["dates"][0]) / 3600
    error = found["u10"] - weather.at_ground("u10", hours, found["lat"].astype("f8"), found["lon"].astype("f8"))
    spread = [np.nanstd(error[found["qc"] == flag]) for flag in (0, 1, 2)]
    assert spread[0] == pytest.approx(0.9, rel=0.1)
    assert spread[0] < spread[1] < spread[2]


@pytest.mark.parametrize("layout", ["weathergenerator", "anemoi"])
def test_other_layouts_convert_to_the_same_columns(made: Path, tmp_path: Path, layout: str) -> None:
    for name in INSTRUMENTS:
        source, out = str(made / layout / f"{name}.zarr"), str(tmp_path / f"{name}.zarr")
        if name == "satellite":
            observations.convert(source, out, rows=100)
        else:
            assert observations.main(["convert", source, out]) == 0
        found, expected = table(Path(out)), table(made / "columns" / f"{name}.zarr")
        assert found.keys() == expected.keys()
        for column, values in expected.items():
            np.testing.assert_array_equal(found[column], values, err_msg=f"{name} {column}")
            assert found[column].dtype == values.dtype


def test_indexes_of_other_layouts_say_where_rows_are(made: Path) -> None:
    dates = table(made / "columns" / "stations.zarr")["dates"]
    hourly = table(made / "weathergenerator" / "stations.zarr")["idx_197001010000_1"]
    hours = 3600 * np.arange(len(hourly))
    assert hourly[-1] == len(dates)
    for hour in range(dates[0] // 3600 - 1, len(hourly)):
        assert hourly[hour] == (dates <= hours[hour]).sum()
    ranges = table(made / "anemoi" / "stations.zarr")["date_index_ranges"]
    assert np.array_equal(np.repeat(ranges[:, 0], ranges[:, 2]), dates)
    assert np.array_equal(ranges[:, 1], np.cumsum(ranges[:, 2]) - ranges[:, 2])


def test_weathergenerators_tables_open_as_columns_do(made: Path) -> None:
    mine, theirs = (
        observations.open_observations(str(made / layout), None, patch=4) for layout in ("columns", "weathergenerator")
    )
    assert len(mine) == len(theirs) == 7  # of ten analyses: the first radiosondes are of the sixth to twelfth hour
    for name in INSTRUMENTS:
        columns = value_columns(theirs.parts[name])
        assert {column.removeprefix("obsvalue_") for column in columns} == {*value_columns(mine.parts[name])}
        for column in ("pos", "dates", *columns):
            found, expected = theirs[2][name][column], mine[2][name][column.removeprefix("obsvalue_")]
            torch.testing.assert_close(found, expected.to(found.dtype), rtol=0, atol=0, equal_nan=True)
        assert (mine[2][name]["qc"] < 2).all()
        assert (mine[2][name]["dates"] < 12 * 3600).all()


def test_what_is_there_and_what_is_unknown_is_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert observations.main(["make", str(made / "columns")]) == 1
    assert "exists; remove it" in capsys.readouterr().err
    assert observations.main(["convert", str(made / "columns" / "analysis.zarr"), str(tmp_path / "out")]) == 1
    assert "neither WeatherGenerator's layout nor anemoi's" in capsys.readouterr().err
    with pytest.raises(ValueError, match="'wide' is none of columns, "):
        observations.write_table(str(tmp_path / "wide"), {"dates": np.empty(0, "M8[s]")}, layout="wide")
    empty: dict[str, Any] = {"dates": np.empty(0, "M8[s]")} | {name: np.empty(0, "f4") for name in ("lat", "lon", "x")}
    for layout in LAYOUTS:  # an instrument that saw nothing
        observations.write_table(str(tmp_path / layout), empty, layout=layout)
