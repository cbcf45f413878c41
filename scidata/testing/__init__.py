"""What scidata's own tests run on, public because users' tests need the same: ranks, fake groups, tiny stores.

``run_ranks`` runs a function on a few real gloo ranks in well under a second; ``fake_group`` pretends to be one rank
of hundreds; ``make_grid`` writes the same small ERA5-like data in every format; ``scidata.testing.oracle`` holds an
operation on shards against one process. Of the rest of the package, ``scidata demo`` alone imports from here.
"""

from scidata.testing.grids import GRID_FORMATS, make_grid
from scidata.testing.ranks import RankError, fake_group, run_ranks

__all__ = ["GRID_FORMATS", "RankError", "fake_group", "make_grid", "run_ranks"]
