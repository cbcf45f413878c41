"""What to install where an optional package is missing: a command that works however scidata itself came here."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata

#: On package indexes; ``scidata`` is another project there.
DISTRIBUTION = "scidata-parallel"

_SELF = re.compile(rf"{DISTRIBUTION}\[([^]]*)\]")


def install_hint(extra: str) -> str:
    """Return the command that installs the packages of an extra, and its name.

    The packages by their own names, since scidata may have come from a checkout, a wheel or an index, or lie on
    ``PYTHONPATH`` only; the extra by the name that the README and pages have.
    """
    packages = list(_packages(extra))
    if not packages:  # an installation older than the extra
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    return f"pip install {' '.join(map(shlex.quote, packages))} (the extra '.[{extra}]')"


def _packages(extra: str) -> Iterator[str]:
    for requirement in _extras().get(extra, ()):
        own = _SELF.match(requirement)
        if own is None:
            yield requirement
            continue
        for other in own[1].split(","):
            yield from _packages(other.strip())


@cache
def _extras() -> dict[str, list[str]]:
    """Return the requirements of each extra, without their markers."""
    checkout = os.path.join(os.path.dirname(__file__), "..", "..", "pyproject.toml")
    if os.path.isfile(checkout):  # the installed metadata of an editable checkout may be older
        with open(checkout, "rb") as file:
            project = tomllib.load(file).get("project", {})
        if project.get("name") == DISTRIBUTION:
            extras = project["optional-dependencies"]
            return {extra: [_unmarked(each) for each in group] for extra, group in extras.items()}
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    for each in required:
        for extra in re.findall(r"""extra\s*==\s*['"]([^'"]+)['"]""", each):
            found.setdefault(extra, []).append(_unmarked(each))
    return found


def _unmarked(requirement: str) -> str:
    return requirement.partition(";")[0].replace(" ", "")
