"""Rows drawn from the node sets of a graph between several: what each epoch draws, and the edges between drawn rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scidata
from scidata.core.options import ReadOptions
from scidata.errors import ConfigError, UnknownNameError
from scidata.store.reading.reader import StoreReader
from tests.dist._hetero import RELATIONS, write_graph

SIZES = ({"grid": 50, "mesh": 17}, {"grid": 31, "mesh": 2})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("drawn_sets")
    for i, sizes in enumerate(SIZES):
        write_graph(folder / f"{i}.h5", sizes, seed=i)
    scidata.partition([folder / "0.h5", folder / "1.h5"], folder / "store")
    return str(folder / "store")


def reader_of(store: str, counts: dict[str, int], *, seed: int = 0, **options: Any) -> StoreReader:
    num_parts = options.pop("num_parts", 1)
    return StoreReader(store, ReadOptions(subsample=counts, subsample_seed=seed, **options), num_parts=num_parts)


def drawn(reader: StoreReader, index: int, epoch: int) -> dict[str, Any]:
    """Put the parts of a draw together: rows of the store, fields, and edges as rows of the store."""
    parts = [reader.read(index, part, epoch=epoch) for part in range(reader.num_parts)]
    found: dict[str, Any] = {}
    for name in ("grid", "mesh"):
        found[name] = np.concatenate([p.rows[name] for p in parts if p.rows is not None])
    for name in reader.fields:
        entity = reader.info(name).entity
        assert all(len(p.fields[name]) == p.index_maps[entity].num_owned for p in parts)
        found[f"field {name}"] = np.concatenate([p.fields[name] for p in parts])
        assert reader.global_shape(name, index, epoch=epoch) == found[f"field {name}"].shape
    for name in RELATIONS:
        source, _, target = name.split("__")
        ends = []
        for row, of in enumerate((source, target)):
            places = np.concatenate([p.index_maps[of].to_global(p.relations[name][row]) for p in parts])
            ends.append(found[of][places])
        found[name] = np.stack(ends)
        assert all((p.relations[name][1] < p.index_maps[target].num_owned).all() for p in parts)
        ids = [reader.original_id(index, i, name, rows=p.rows[name]) for i, p in enumerate(parts) if p.rows]
        found[f"ids of {name}"] = np.concatenate(ids)
    return found


@pytest.mark.parametrize("counts", [{"grid": 20}, {"mesh": 5}, {"grid": 30, "mesh": 9}, {"grid": 1, "mesh": 1000}])
def test_the_same_for_any_number_of_parts(store: str, counts: dict[str, int]) -> None:
    whole = StoreReader(store)
    for index, epoch in ((0, 0), (3, 1), (6, 0)):
        one = drawn(reader_of(store, counts), index, epoch)
        every, sizes = whole.read(index, 0), SIZES[index // 4]
        for name, size in sizes.items():
            assert len(one[name]) == min(counts.get(name, size), size)
            assert (np.diff(one[name]) > 0).all()
        for name, pairs in every.relations.items():
            source, _, target = name.split("__")
            kept = np.isin(pairs[0], one[source]) & np.isin(pairs[1], one[target])
            assert np.array_equal(one[name], pairs[:, kept])
            assert np.array_equal(one[f"ids of {name}"], whole.original_id(index, 0, name)[kept])
            assert np.array_equal(one[f"field {name}/length"], every.fields[f"{name}/length"][kept])
        assert np.array_equal(one["field u"], every.fields["u"][one["grid"]])
        cuts: list[dict[str, Any]] = [{"num_parts": 2}, {"num_parts": 3}, {"num_parts": 7, "weights": "edges"}]
        uneven = {
            0: "even",
            1: "even",
            index // 4: {"grid": [0, 0, 9, sizes["grid"]], "mesh": [0, 1, 1, sizes["mesh"]]},
        }
        for cut in (*cuts, {"num_parts": 3, "bounds": uneven}):
            other = drawn(reader_of(store, counts, **cut), index, epoch)
            assert other.keys() == one.keys()
            for name, values in one.items():
                assert np.array_equal(other[name], values), (name, cut)


def test_each_epoch_seed_sample_and_set_draws_anew(store: str) -> None:
    counts = {"grid": 20, "mesh": 9}
    draws = [
        drawn(reader_of(store, counts, seed=seed), index, epoch)
        for seed, index, epoch in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
    ]
    for name in counts:
        assert len({draw[name].tobytes() for draw in draws}) == len(draws)
    alone = drawn(reader_of(store, {"mesh": 9}), 0, 0)  # what is drawn of a set does not depend on the others
    assert np.array_equal(alone["mesh"], draws[0]["mesh"])
    fingerprints = {reader_of(store, each).fingerprint() for each in (counts, {"grid": 20}, {"mesh": 9})}
    assert len(fingerprints) == 3


@pytest.mark.parametrize(
    ("counts", "options", "error", "words"),
    [
        ({"gird": 4}, {}, UnknownNameError, "did you mean 'grid'"),
        ({"grid__to__mesh": 4}, {}, UnknownNameError, "edges follow the rows"),
        ({"joint": 4}, {}, UnknownNameError, "draws rows of grid or mesh"),
        ({"grid": 4}, {"halo": 1}, ConfigError, "means nothing with subsample"),
    ],
)
def test_what_cannot_be_drawn(store: str, counts: Any, options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        reader_of(store, counts, **options)
