"""Owners of irregular rows, and each part's ghosts: rows owned by other parts.

The idea and the name are DOLFINx's. Pure arithmetic: data are moved elsewhere.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import explicit_bounds, owners_of, sizes_of
from scidata.core.types import IntArray
from scidata.errors import ConfigError


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexMap:
    """One part's rows in local numbering: owned rows, then ghosts.

    Attributes
    ----------
    bounds
        ``(num_parts + 1,)`` int64: part ``p`` owns ``[bounds[p], bounds[p + 1])``. Empty parts are legal.
    part
        Whose rows these are.
    ghosts
        ``(num_ghost,)`` int64 global ids that others own, sorted, hence grouped by owner.
    key
        Shared by all maps of one topology, if there are several objects: senders and receivers are found once
        for a key. On all ranks the maps that are used in the same place have a key, equal at the same places, or none.

    Raises
    ------
    ConfigError
        Bounds that are none, a part that is not there, ghosts that are unsorted, repeated, owned or out of range.

    Examples
    --------
    >>> import numpy as np
    >>> rows = scidata.IndexMap(bounds=np.array([0, 3, 6]), part=0, ghosts=np.array([3, 5]))
    >>> rows.owned, rows.num_owned, rows.num_ghost, rows.num_global
    ((0, 3), 3, 2, 6)
    >>> rows.to_local([2, 5]), rows.to_global([0, 3, 4])
    (array([2, 4]), array([0, 3, 5]))
    """

    bounds: IntArray
    part: int
    ghosts: IntArray
    key: Hashable = None

    def __post_init__(self) -> None:
        bounds = np.asarray(self.bounds)
        last = int(bounds[-1]) if bounds.ndim == 1 and len(bounds) > 1 else 0
        object.__setattr__(self, "bounds", explicit_bounds(bounds, last, max(bounds.size - 1, 1)))
        if not 0 <= self.part < self.num_parts:
            raise ConfigError(f"part {self.part} does not exist: there are {self.num_parts}")
        object.__setattr__(self, "ghosts", _checked_ghosts(self.ghosts, *self.owned, self.num_global))

    def __repr__(self) -> str:
        first, stop = self.owned
        return (
            f"IndexMap(part {self.part} of {self.num_parts}: rows {first}:{stop} of {self.num_global}, "
            f"{len(self.ghosts)} ghosts)"
        )

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return len(self.bounds) - 1

    @property
    def owned(self) -> tuple[int, int]:
        """First owned global id, and one past the last."""
        return int(self.bounds[self.part]), int(self.bounds[self.part + 1])

    @property
    def num_owned(self) -> int:
        """Number of owned rows."""
        start, stop = self.owned
        return stop - start

    @property
    def num_ghost(self) -> int:
        """Number of ghosts."""
        return len(self.ghosts)

    @property
    def num_local(self) -> int:
        """Number of owned rows and ghosts."""
        return self.num_owned + self.num_ghost

    @property
    def num_global(self) -> int:
        """Number of rows of all parts."""
        return int(self.bounds[-1])

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each part."""
        return sizes_of(self.bounds)

    @cached_property
    def owners(self) -> IntArray:
        """``(num_ghost,)`` int64: owner of each ghost."""
        return owners_of(self.bounds, self.ghosts)

    @cached_property
    def recv_counts(self) -> IntArray:
        """``(num_parts,)`` int64: number of ghosts that each part owns."""
        return np.bincount(self.owners, minlength=self.num_parts).astype(np.int64)

    def to_local(self, global_ids: npt.ArrayLike) -> IntArray:
        """Turn global ids into local ones: owned rows from 0, then ghosts.

        Parameters
        ----------
        global_ids : array_like
            Any shape, integers.

        Raises
        ------
        ConfigError
            An id that the part neither owns nor has as a ghost.

        Examples
        --------
        >>> rows.to_local([0, 3])
        array([0, 3])
        """
        ids = _integers(global_ids, "global ids")
        start, stop = self.owned
        local = ids.copy()
        local -= start  # in place, so that a single id remains an array
        elsewhere = (ids < start) | (ids >= stop)
        wanted = ids[elsewhere]
        if len(wanted):
            at = np.searchsorted(self.ghosts, wanted)
            found = at < self.num_ghost
            found[found] = self.ghosts[at[found]] == wanted[found]
            if not found.all():
                raise ConfigError(
                    f"global id {int(wanted[~found][0])} is not local to part {self.part}, which owns "
                    f"[{start}, {stop}) of {self.num_global} rows and has {self.num_ghost} ghosts "
                    f"({int((~found).sum())} of {ids.size} ids are not local); a wider halo may bring them"
                )
            local[elsewhere] = self.num_owned + at
        return local

    def to_global(self, local_ids: npt.ArrayLike) -> IntArray:
        """Turn local ids into global ones.

        Parameters
        ----------
        local_ids : array_like
            Any shape, integers.

        Raises
        ------
        ConfigError
            An id outside ``[0, num_local)``.

        Examples
        --------
        >>> rows.to_global([[0, 3]])
        array([[0, 3]])
        """
        ids = _integers(local_ids, "local ids")
        bad = (ids < 0) | (ids >= self.num_local)
        if bad.any():
            raise ConfigError(
                f"local id {int(ids[bad][0])} is out of range: part {self.part} has {self.num_owned} owned rows and "
                f"{self.num_ghost} ghosts"
            )
        is_ghost = ids >= self.num_owned
        result = ids.copy()
        result += self.owned[0]
        result[is_ghost] = self.ghosts[ids[is_ghost] - self.num_owned]
        return result


def _checked_ghosts(ghosts: npt.ArrayLike, start: int, stop: int, num_global: int) -> IntArray:
    ids = _integers(ghosts, "ghosts")
    if ids.shape == (0,):
        return ids
    if ids.ndim != 1 or np.any(ids[1:] <= ids[:-1]):
        raise ConfigError("ghosts must be one dimension of sorted global ids, each once")
    bad = (ids < 0) | (ids >= num_global) | ((ids >= start) & (ids < stop))
    if bad.any():
        raise ConfigError(
            f"ghost {int(ids[bad][0])} is owned by the part itself ([{start}, {stop})) or is none of {num_global} rows"
        )
    return ids


def _integers(ids: npt.ArrayLike, what: str) -> IntArray:
    array = np.asarray(ids)
    if array.dtype.kind not in "iu" and array.size:
        raise ConfigError(f"{what} must be integers, not {array.dtype}")
    return array.astype(np.int64)
