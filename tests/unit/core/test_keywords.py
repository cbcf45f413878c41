"""Each public function answers a keyword argument that it does not have with the near ones."""

import inspect

import pytest

import scidata
from scidata.core.keywords import checked_keywords
from scidata.store.partitioning.partition import partition

FUNCTIONS = {name: getattr(scidata, name) for name in scidata.__all__ if name not in ("__version__", "errors")}
FUNCTIONS["partition"] = partition  # the name is also a package's
#: These take the arguments of a model, or have none by name.
OTHERS = {"explain", "concat", "shard_ops"}
TYPED = {
    name: call
    for name, call in FUNCTIONS.items()
    if name not in OTHERS and (inspect.isfunction(call) or name in ("DataLoader", "DistributedSampler"))
}


def test_all_are_tried():
    assert {"open_dataset", "DataLoader", "init_mesh", "all_gather_v", "trace"} <= {*TYPED}


@pytest.mark.parametrize("name", TYPED)
def test_a_near_name_is_proposed(name):
    call = TYPED[name]
    own = [
        p.name
        for p in inspect.signature(call).parameters.values()
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    for keyword in own:
        with pytest.raises(TypeError, match=rf"{name}\(\) has no argument '{keyword}s_'; did you mean .*'{keyword}'"):
            call(**{f"{keyword}s_": 1})


def test_the_wrapped_function_stays_what_it_was():
    @checked_keywords
    def read(path: str, *, halo: int = 0) -> tuple[str, int]:
        """Read."""
        return path, halo

    assert read("a", halo=2) == read(path="a", halo=2) == ("a", 2)
    assert (read.__name__, read.__doc__, [*inspect.signature(read).parameters]) == ("read", "Read.", ["path", "halo"])
    with pytest.raises(TypeError, match="missing 1 required positional"):
        read(halo=2)
    with pytest.raises(TypeError, match="there are 'halo', 'path'"):
        read("a", zzzzzz=2)
