"""Orders that keep neighbours together, ghosts, cuts and their quality: NumPy and SciPy only, no torch, no I/O.

``scidata.partition`` is also the name of the function that does the whole job. Importing this package binds that name
to the package, in whatever order things are imported; so the package can be called, and calls the function. Its
arguments: ``help(scidata.partitioning.partition)``.
"""

import importlib
import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # by name: the function's module is layers above this package, and is needed only when it is called
        return importlib.import_module("scidata.partitioning").partition(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
