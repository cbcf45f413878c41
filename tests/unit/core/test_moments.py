"""Moments: against rational arithmetic and NumPy, and the same bits for any split and order."""

from __future__ import annotations

import json
import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scidata.core.moments import Moments

RNG = np.random.default_rng(7)
CASES: dict[str, npt.NDArray[Any]] = {
    "temperatures": RNG.normal(280, 15, 20_000).astype("f4"),
    "offset of 1e8": 1e8 + RNG.normal(0, 1, 5_000),
    "offset of 1e15": 1e15 + RNG.normal(0, 1, 5_000),
    "half precision": RNG.normal(0, 1, 5_000).astype("f2"),
    "many magnitudes": np.exp(RNG.normal(0, 40, 5_000)),
    "many magnitudes of both signs, float32": (np.exp(RNG.normal(0, 15, 5_000)) * RNG.choice([-1, 1], 5_000)).astype(
        "f4"
    ),
    "tiny": np.exp(RNG.normal(-600, 20, 5_000)),
    "subnormal": RNG.integers(1, 9, 50) * 5e-324,
    "huge and tiny": np.exp(RNG.normal(0, 200, 3_000).clip(-680, 660)),
    "one value": np.full(3_000, 0.1),
    "integers": RNG.integers(-5, 9, 3_000).astype("i2"),
    "large integers": RNG.integers(-(2**52), 2**52, 3_000),
    "bits": RNG.random(3_000) < 0.2,
    "cancelling": np.concatenate([a := RNG.normal(0, 1e9, 2_000), -a, [1e-9]]),
    "zeros of either sign": np.array([-0.0, 0.0, -0.0]),
}


def moments_of(*parts: npt.NDArray[Any]) -> Moments:
    total = Moments()
    for part in parts:
        total.add(part[None])
    return total


def exact(values: npt.NDArray[Any]) -> tuple[float, float]:
    numbers = [Fraction(float(value)) for value in values]
    mean = sum(numbers) / len(numbers)
    square = sum((x - mean) ** 2 for x in numbers) / len(numbers)
    # Fraction to square root: scaled, because the square itself may not be a float
    scale = 2 ** (2 * max(0, 600 - (square.numerator.bit_length() - square.denominator.bit_length()) // 2))
    root = math.isqrt(int(square * scale * 2**200))
    return float(mean), float(Fraction(root, 2**100 * math.isqrt(scale)))


@pytest.mark.parametrize("name", CASES)
def test_rational_arithmetic_gives_the_same(name: str) -> None:
    values = CASES[name][:3_000] if name == "temperatures" else CASES[name]
    figures = moments_of(values).result()
    mean, std = exact(values)
    assert figures.mean[0] == mean, "rounded once, correctly"
    assert abs(figures.std[0] - std) <= np.spacing(std)
    assert (figures.min[0], figures.max[0]) == (float(values.min()), float(values.max()))
    assert figures.count[0] == len(values)
    assert not np.signbit(figures.min[0]) or figures.min[0] < 0


@pytest.mark.parametrize("name", ["temperatures", "offset of 1e8", "half precision", "integers", "large integers"])
def test_numpy_gives_the_same(name: str) -> None:
    values = CASES[name].astype("f8")
    figures = moments_of(CASES[name]).result()
    np.testing.assert_allclose(figures.mean, values.mean(), rtol=1e-12)
    np.testing.assert_allclose(figures.std, values.std(), rtol=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_parts", [2, 7, 101])
def test_any_split_in_any_order_gives_the_same_bits(name: str, num_parts: int) -> None:
    values = CASES[name]
    shuffled = np.random.default_rng(num_parts).permutation(values)
    parts = [moments_of(part) for part in np.array_split(shuffled, num_parts)]
    merged = Moments()
    for part in reversed(parts):
        merged.merge(part)
    whole = moments_of(values)
    assert merged.state() == whole.state()
    for figure in ("mean", "std", "min", "max"):
        assert getattr(merged.result(), figure).tobytes() == getattr(whole.result(), figure).tobytes()


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=40), st.integers(0, 40))
def test_anything_that_float64_holds(numbers: list[float], cut: int) -> None:
    values = np.array(numbers)
    figures = moments_of(values[:cut], values[cut:]).result()
    finite = values[np.isfinite(values)]
    assert figures.count[0] == len(finite)
    assert figures.missing[0] == np.isnan(values).sum()
    assert figures.infinite[0] == np.isinf(values).sum()
    if not len(finite):
        assert all(np.isnan(getattr(figures, name)[0]) for name in ("mean", "std", "min", "max"))
        return
    mean, _ = exact(finite)
    assert figures.mean[0] == mean
    assert figures.max[0] == finite.max()
    assert moments_of(values[:cut], values[cut:]).state() == moments_of(values).state()


@pytest.mark.parametrize("num", [3, 1000, 40_000])
def test_cells_and_differences(num: int) -> None:
    now, then = RNG.normal(250, 20, (2, 5, num)).astype("f4")
    now[1, 0], then[2, -1], now[3, :] = np.nan, np.inf, np.nan
    moments = Moments(5)
    moments.add(now, then)
    figures = moments.result()
    wanted = now.astype("f8") - then.astype("f8")
    for cell in range(5):
        finite = wanted[cell][np.isfinite(wanted[cell])]
        assert figures.count[cell] == len(finite)
        if len(finite):
            np.testing.assert_allclose(figures.std[cell], finite.std(), rtol=1e-12, atol=1e-15)
            np.testing.assert_allclose(figures.mean[cell], finite.mean(), rtol=1e-9)
        else:
            assert np.isnan(figures.mean[cell])
    part = Moments(2)
    part.add(now[3:], then[3:])
    merged = Moments(5)
    merged.merge(part, np.array([3, 4]))
    rest = Moments(3)
    rest.add(now[:3], then[:3])
    merged.merge(rest, np.array([0, 1, 2]))
    assert merged.state() == moments.state()


def test_it_travels() -> None:
    moments = moments_of(CASES["huge and tiny"], np.array([np.nan, np.inf]))
    assert Moments.of(json.loads(json.dumps(moments.state()))).state() == moments.state()
    assert pickle.loads(pickle.dumps(moments)).state() == moments.state()
    assert Moments.of(Moments(3).state()).state() == Moments(3).state()
    assert moments.state() != moments_of(CASES["tiny"]).state()


def test_empty_parts() -> None:
    moments = Moments(2)
    moments.add(np.empty((2, 0)))
    assert moments.state() == Moments(2).state()
