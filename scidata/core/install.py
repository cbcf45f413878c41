"""Installation hints for optional packages, which work however scidata was installed."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata

#: The name on package indexes, where ``scidata`` is another project.
DISTRIBUTION = "scidata-parallel"

_SELF = re.compile(rf"{DISTRIBUTION}\[([^]]*)\]")


def install_hint(extra: str) -> str:
    """Return the command that installs an extra's packages, and its name.

    The packages by their own names, since scidata may have come from a checkout, a wheel or an index, or lie on
    ``PYTHONPATH`` only; the extra by the name that the README and pages have.
    """
    packages = list(_packages(extra))
    if not packages:  # this installation is older than the extra
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
    """Return each extra's requirements without markers."""
    checkout = os.path.join(os.path.dirname(__file__), "..", "..", "pyproject.toml")
    if os.path.isfile(checkout):  # an editable checkout's installed metadata may be older
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
