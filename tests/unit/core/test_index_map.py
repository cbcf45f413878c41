"""IndexMap against plain set arithmetic, and all parts of one graph against each other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scidata.core.index_map import IndexMap
from scidata.errors import ConfigError


@st.composite
def cut_graphs(draw):
    """Bounds (empty parts too), and for every part some ghosts that it does not own."""
    num_parts = draw(st.integers(1, 5))
    num_global = draw(st.integers(0, 30))
    inner = sorted(draw(st.lists(st.integers(0, num_global), min_size=num_parts - 1, max_size=num_parts - 1)))
    bounds = np.array([0, *inner, num_global])
    ghosts = []
    for part in range(num_parts):
        others = [i for i in range(num_global) if not bounds[part] <= i < bounds[part + 1]]
        chosen = draw(st.sets(st.sampled_from(others))) if others else set()
        ghosts.append(np.array(sorted(chosen), np.int64))
    return bounds, ghosts


@settings(deadline=None)
@given(cut_graphs())
def test_local_numbering_owners_and_counts(case):
    bounds, ghosts = case
    for part in range(len(bounds) - 1):
        index_map = IndexMap(bounds=bounds, part=part, ghosts=ghosts[part])
        held = [*range(bounds[part], bounds[part + 1]), *ghosts[part].tolist()]
        assert index_map.num_local == index_map.num_owned + index_map.num_ghost == len(held)
        assert index_map.sizes == tuple(np.diff(bounds).tolist())
        assert index_map.to_global(np.arange(len(held))).tolist() == held
        assert index_map.to_local(np.array(held, np.int64)).tolist() == list(range(len(held)))
        owners = [next(p for p in range(len(bounds) - 1) if bounds[p] <= g < bounds[p + 1]) for g in ghosts[part]]
        assert index_map.owners.tolist() == owners
        assert index_map.recv_counts.tolist() == [owners.count(p) for p in range(len(bounds) - 1)]
        assert index_map.recv_counts[part] == 0


def test_ids_keep_their_shape():
    index_map = IndexMap(bounds=np.array([0, 3, 6]), part=1, ghosts=np.array([1]))
    assert index_map.to_local([[3, 1], [5, 4]]).tolist() == [[0, 3], [2, 1]]
    assert index_map.to_global([[3], [0]]).tolist() == [[1], [3]]
    assert index_map.to_local(1).shape == ()
    assert int(index_map.to_local(1)) == 3
    assert int(index_map.to_global(3)) == 1


def test_an_id_that_is_not_local_is_named():
    index_map = IndexMap(bounds=np.array([0, 3, 6]), part=1, ghosts=np.array([1]))
    with pytest.raises(ConfigError, match=r"global id 2 is not local to part 1, which owns \[3, 6\).*2 of 3 ids"):
        index_map.to_local([4, 2, 0])
    with pytest.raises(ConfigError, match="local id 4 is out of range"):
        index_map.to_global([0, 4])
    with pytest.raises(ConfigError, match="local id -1 is out of range"):
        index_map.to_global([-1])
    with pytest.raises(ConfigError, match="integers"):
        index_map.to_local([0.5])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ghosts": [5, 1]}, "sorted"),
        ({"ghosts": [1, 1]}, "each once"),
        ({"ghosts": [3]}, r"ghost 3 is owned by the part itself \(\[3, 6\)\)"),
        ({"ghosts": [9]}, "ghost 9"),
        ({"ghosts": [-1]}, "ghost -1"),
        ({"part": 2}, "part 2 does not exist"),
        ({"part": -1}, "part -1 does not exist"),
        ({"bounds": [0, 4, 2]}, "must not decrease"),
        ({"bounds": [1, 3, 6]}, "from 0"),
        ({"bounds": [0]}, "1 ranks need 2 bounds"),
    ],
)
def test_maps_that_contradict_themselves_are_refused(changes, words):
    arguments = {"bounds": [0, 3, 6], "part": 1, "ghosts": [0]} | changes
    with pytest.raises(ConfigError, match=words):
        IndexMap(**{name: np.array(v) if isinstance(v, list) else v for name, v in arguments.items()})
