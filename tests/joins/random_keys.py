"""Random keys of samples, and which belong together, as pandas has it."""

from __future__ import annotations

from typing import Any

import cftime
import numpy as np
import pandas as pd
import pytest

from scidata.data.keys import Match, as_keys, match_keys
from scidata.errors import ConfigError

KINDS = ("ns", "us", "noleap", "360_day", "standard", "mixed", "int", "float", "text", "length")
#: What one step of the numbers that keys are made of means.
HOURS = {"ns": 1, "us": 1, "noleap": 1, "360_day": 1, "standard": 1, "mixed": 1, "length": 1}


def made(numbers: np.ndarray, kind: str) -> np.ndarray:
    """Return keys from whole numbers; negative ones of kinds that have it are none."""
    hours = numbers * np.timedelta64(1, "h")
    if kind in ("ns", "us"):
        keys = np.datetime64("2019-12-30", kind) + hours
        keys[numbers < 0] = "NaT"
        return keys
    if kind in ("noleap", "360_day", "standard"):
        start = cftime.datetime(2019, 12, 30, calendar=kind)
        return np.array([start + h for h in hours.astype("m8[us]").tolist()], object)
    if kind == "float":
        return np.where(numbers < 0, np.nan, numbers / 4)
    if kind == "length":
        return hours
    return numbers.astype(str) if kind == "text" else numbers


def span(number: int, kind: str, rng: np.random.Generator) -> Any:
    """Return an offset, or a tolerance, in one of the ways in which it may be given."""
    if kind in HOURS:
        return [f"{number}h", np.timedelta64(number, "h"), pd.Timedelta(number, "h").to_pytimedelta()][rng.integers(3)]
    return number / 4 if kind == "float" else number


class Trial:
    """Keys of two or three data sets, by a seed."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.kind = str(rng.choice(KINDS))
        names = ["a", "b", "c"][: rng.integers(2, 4)]
        reach = int(rng.integers(5, 60))
        self.numbers = {}
        for name in names:
            low = -3 if self.kind in ("ns", "us", "float") else 0
            num = rng.integers(low, reach, rng.integers(0, 40))
            if name != "a" and rng.random() < 0.8:
                num = rng.permutation(np.unique(num))
                num = np.delete(num, np.flatnonzero(num < 0)[1:])
            self.numbers[name] = np.sort(num) if rng.random() < 0.5 else num
        kinds = {n: ["ns", "us", "standard"][rng.integers(3)] if self.kind == "mixed" else self.kind for n in names}
        self.keys = {name: as_keys(made(num, kinds[name])) for name, num in self.numbers.items()}
        self.keep_all = bool(rng.random() < 0.5)
        self.offsets = {n: int(rng.integers(-8, 9)) for n in names if self.kind != "text" and rng.random() < 0.3}
        self.at = {name: span(number, self.kind, rng) for name, number in self.offsets.items()}
        has_reach = self.kind != "text" and rng.random() < 0.5
        self.reach = int(rng.integers(0, 5)) if has_reach else None
        self.tolerance = None if self.reach is None else span(self.reach, self.kind, rng)

    def wanted(self) -> tuple[pd.DataFrame, bool]:
        """Return the samples of each key, -1 for none, as pandas merges them; and whether some are in doubt."""
        frames = {}
        for name, num in self.numbers.items():
            frame = pd.DataFrame({"key": num, name: np.arange(len(num))})
            if self.kind in ("ns", "us", "float"):
                frame = frame[frame["key"] >= 0]
            frames[name] = frame.assign(key=frame["key"] - self.offsets.get(name, 0))
        found, doubtful = frames.pop("a"), False
        for other in frames.values():
            if self.reach is None:
                doubtful |= bool(other["key"][other["key"].duplicated()].isin(found["key"]).any())
                found = found.merge(other.drop_duplicates("key"), on="key", how="left")
            else:
                by_key = [each.sort_values("key", kind="stable") for each in (found, other.assign(near=other["key"]))]
                found = pd.merge_asof(*by_key, on="key", direction="nearest", tolerance=self.reach)
                doubtful |= bool(found["near"].isin(other["key"][other["key"].duplicated()]).any())
                found = found.drop(columns="near").sort_values("a")
        found = found.fillna(-1).astype(int)
        return (found if self.keep_all else found[(found >= 0)[list(self.numbers)].all(axis=1)]), doubtful

    def match(self) -> Match:
        return match_keys(self.keys, keep_all=self.keep_all, at=self.at, tolerance=self.tolerance)


def check(seed: int) -> int:
    """Hold a trial against pandas; return how many samples it has."""
    trial = Trial(seed)
    wanted, doubtful = trial.wanted()
    if doubtful:
        with pytest.raises(ConfigError, match="have the key"):
            trial.match()
        return 0
    found = trial.match()
    for name in trial.numbers:
        assert found.rows[name].tolist() == wanted[name].tolist(), f"seed {seed}: {name}"
    if trial.kind in ("ns", "us", "int", "float", "length"):
        keys = as_keys(made(wanted["key"].to_numpy() + 1000, trial.kind))
        shift = as_keys(made(np.array([1000, 0]), trial.kind))
        assert (found.keys == keys - (shift[0] - shift[1])).all(), f"seed {seed}"
    return len(wanted)
