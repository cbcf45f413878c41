"""Hides what a page does not tell its readers to install from the processes that the page starts.

Python runs this file when it starts, since ``docs/conf.py`` has this folder in ``PYTHONPATH``.
"""

import os
import sys


class _Hidden:
    """A finder before all others that refuses some modules."""

    def __init__(self, names):
        self._names = frozenset(names)

    def find_spec(self, name, path=None, target=None):
        if name in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}: the page does not say that it needs it", name=name)


sys.meta_path.insert(0, _Hidden(os.environ.get("SCIDATA_PAGE_LACKS", "").split()))
