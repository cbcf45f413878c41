"""Hides what a page does not tell its readers to install from the processes that the page starts.

Python runs this file when it starts, since ``docs/conf.py`` has this folder in ``PYTHONPATH``.
"""

import os
import sys
from importlib.machinery import PathFinder

_HIDDEN = frozenset(os.environ.get("SCIDATA_PAGE_LACKS", "").split())


class _Others(PathFinder):
    """Finds every other module."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in _HIDDEN else super().find_spec(name, path, target)


sys.meta_path[:] = [_Others if finder is PathFinder else finder for finder in sys.meta_path]
for name in [name for name in sys.modules if name.partition(".")[0] in _HIDDEN]:  # tests/warm.py loads some early
    del sys.modules[name]
