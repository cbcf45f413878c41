"""Each public name says what it does: arguments by name, errors, and it is typed for those who check theirs."""

import inspect
import operator
import re
from importlib import resources

import pytest

import scidata
from scidata import metrics
from scidata.store.partitioning import partition

NAMES = [name for name in scidata.__all__ if name not in ("__version__", "errors", "metrics")]
NAMES += [f"metrics.{name}" for name in metrics.__all__]


def public(name):
    return (
        partition.partition if name == "partition" else operator.attrgetter(name)(scidata)
    )  # also a package, which is called


@pytest.mark.parametrize("name", NAMES)
def test_docstring(name):
    thing = public(name)
    text = inspect.getdoc(thing) or ""
    assert text.split("\n")[0].endswith((".", ":")), f"{name} has no summary"
    function = thing.__init__ if inspect.isclass(thing) else thing
    parameters = [p.name for p in inspect.signature(function).parameters.values() if p.name not in ("self", "args")]
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            if not callable(value) and not isinstance(value, property | classmethod | staticmethod):
                continue  # a field's default
            said = inspect.getdoc(value.__func__ if isinstance(value, classmethod | staticmethod) else value)
            assert member.startswith("_") or said, f"{name}.{member} has no docstring"
        return
    if not parameters:
        return
    assert re.search(r"^Parameters\n-+$", text, re.M), f"{name} says nothing of {parameters}"
    assert re.search(r"^Raises\n-+$", text, re.M), f"{name} says nothing of errors"
    section = re.split(r"^Parameters\n-+$", text, flags=re.M)[1]
    said = {word for line in section.splitlines() if re.match(r"[\w*]", line) for word in re.findall(r"\w+", line)}
    assert set(parameters) <= said, f"{name}: {sorted(set(parameters) - said)} are not described"


def test_types_are_shipped():
    assert resources.files("scidata").joinpath("py.typed").is_file()
