"""Ranks that read together compare their reading, beside their work; the loop itself pays nothing.

The board (:mod:`scidata.device_mesh.board`) calls the loop's :class:`~scidata.loader.peers.session.Session` with each
sign of life. Besides what the board has, below ``loader<n>/``, where n counts the loaders that a rank has iterated:

``rank/<r>``
    The reading of rank r, the first of those that read the same samples: iteration, step, a checksum over all indices
    so far, the last of them. Only ``r`` writes it.

Each rank compares its checksum with that of the first rank which reads the same samples. A difference that it finds,
and an error that a rank fails with, are events of the board, with an iteration and a step. Every rank raises one when
it comes to that step, or at once where it is past it: so a read that fails ahead of its use ends all ranks at the same
step, before they are in a collective there.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from scidata.device_mesh.board import Board, begin


@dataclass
class Meeting:
    """Whether all ranks have come to an iteration, and whether the loop has gone on, or has ended, without that."""

    is_complete: bool = False
    is_past: bool = False


class Watch:
    """State of a loader about the other ranks that iterate it.

    - ``dp_axis``: ranks of the same place along it read the same samples.
    - ``is_aligned``: whether its number is that of the other ranks' iterations: not any more where this rank has
      iterated alone.
    - ``has_left``: whether it has left one in its middle.
    """

    def __init__(self, board: Board, mesh: DeviceMesh, dp_axis: str | None) -> None:
        self.board, self.rank = board, board.rank
        self.ranks: list[int] = mesh.mesh.flatten().tolist()
        self.dp_rank = 0 if dp_axis is None else mesh.get_local_rank(dp_axis)
        same = mesh.mesh
        if dp_axis is not None:
            same = same.select((mesh.mesh_dim_names or ()).index(dp_axis), self.dp_rank)
        self.sharing: list[int] = same.flatten().tolist()  # ranks that read the same samples
        self.leader = self.sharing[0]
        self.data = ("", "")  # fingerprint and name of the data set, once the thread has asked for them
        self.iteration = 0
        self.meeting, self.is_aligned, self.has_left = Meeting(), True, False
        self.name = board.name_for("loader", self.ranks)
        self.posts = board.posts.below(self.name)

    @classmethod
    def of(cls, mesh: DeviceMesh | None, dp_axis: str | None) -> Watch | None:
        """Return the watch of a mesh of several ranks; None if there is one rank, or no common store."""
        board = None if mesh is None or mesh.size() == 1 else begin()
        return None if board is None or mesh is None else cls(board, mesh, dp_axis)

    def begin(self) -> int:
        """Begin an iteration; return its number, from 1."""
        self.is_aligned = self.is_aligned and (self.meeting.is_complete or not self.meeting.is_past)
        self.meeting = Meeting()
        self.iteration += 1
        return self.iteration
