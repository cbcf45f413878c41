"""What scidata's own tests run on, public because users' tests need the same: ranks, fake groups, tiny stores.

``run_ranks`` runs a function on a few real gloo ranks in well under a second; ``fake_group`` pretends to be one rank
of hundreds; ``make_grid`` writes the same small ERA5-like data in every format; ``check_op`` holds an operation on
shards against one process. Of the rest of the package, ``scidata demo`` alone imports from here.
"""

import importlib
from typing import TYPE_CHECKING

from scidata.testing.grids import GRID_FORMATS, make_grid

if TYPE_CHECKING:
    from scidata.testing.oracle import check_op
    from scidata.testing.ranks import RankError, fake_group, run_ranks

__all__ = ["GRID_FORMATS", "RankError", "check_op", "fake_group", "make_grid", "run_ranks"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import ranks, and torch with them, on first use: ``scidata demo`` writes its grid without."""
        if name not in __all__:
            raise AttributeError(f"module 'scidata.testing' has no attribute {name!r}")
        home = "oracle" if name == "check_op" else "ranks"
        return getattr(importlib.import_module(f"scidata.testing.{home}"), name)
