"""``DistributedSampler``: which samples each domain works on, the same on all ranks of a domain."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DistributedSampler as _DistributedSampler

from scidata.device_mesh import axes_of, axis_rank, axis_size
from scidata.errors import ConfigError
from scidata.shard.agreement import check_agreement
from scidata.types import IntArray

__all__ = ["DistributedSampler"]


class DistributedSampler(_DistributedSampler[Any]):
    """Deals a shuffled order of sample indices to the ranks of the dp axis.

    The order is a function of seed and epoch alone. Ranks of one domain get the same indices, all dp ranks the same
    number of them. It is a ``torch.utils.data.DistributedSampler`` to whatever asks.

    Parameters
    ----------
    dataset
        Anything with a length.
    mesh
        None: one replica, all samples.
    dp
        The mesh's data-parallel axis; None where it has none.
    shuffle, seed
        A new order in each epoch (``set_epoch``), or always ``0, 1, 2, …``.
    drop_last
        What happens to the last samples when the dp axis does not divide their number: dropped, or the first ones
        of the order repeated to fill up.
    check
        Whether ranks find out, when they first iterate, that they were given different arguments. That first time
        is collective over the mesh.

    Raises
    ------
    ConfigError
        An empty dataset, fewer samples than dp ranks with ``drop_last``, a negative seed. When first iterated:
        ranks that disagree, on all ranks alike.
    """

    def __init__(
        self,
        dataset: Sized,
        mesh: DeviceMesh | None = None,
        *,
        dp: str | None = "dp",
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        check: bool = True,
    ) -> None:
        dp_axis = None if mesh is None else axes_of(mesh, dp=dp)[0]
        num_replicas = axis_size(mesh, dp_axis)
        if len(dataset) == 0:
            raise ConfigError("the dataset is empty: there is nothing to sample")
        if drop_last and len(dataset) < num_replicas:
            raise ConfigError(
                f"{len(dataset)} samples for {num_replicas} dp ranks: drop_last=True would drop them all; use "
                "drop_last=False, or fewer dp ranks"
            )
        if seed < 0:
            raise ConfigError(f"seed must not be negative, but is {seed}")
        super().__init__(
            dataset,  # type: ignore[arg-type]  # any sized thing will do
            num_replicas=num_replicas,
            rank=axis_rank(mesh, dp_axis),
            shuffle=shuffle,
            seed=int(seed),
            drop_last=drop_last,
        )
        self.mesh = mesh
        self._num_in_dataset = len(dataset)
        self._unchecked = check and mesh is not None

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; call it with the same epoch on every rank.

        Raises
        ------
        ConfigError
            A negative epoch.
        """
        if epoch < 0:
            raise ConfigError(f"epoch must not be negative, but is {epoch}")
        super().set_epoch(int(epoch))

    def order(self) -> IntArray:
        """Return this epoch's order over all dp ranks, ``(total_size,)`` int64: rank r takes each ``dp``-th from r."""
        count = self._num_in_dataset
        if self.shuffle:
            # Not seed + epoch: epoch 1 of seed 0 would be epoch 0 of seed 1.
            stream = np.random.default_rng(np.random.SeedSequence([self.seed, self.epoch]))
            indices = stream.permutation(count).astype(np.int64, copy=False)
        else:
            indices = np.arange(count, dtype=np.int64)
        return np.resize(indices, self.total_size)  # repeats from the start, or cuts

    def __iter__(self) -> Iterator[int]:
        self.check_agreement()
        return iter(self.order()[self.rank :: self.num_replicas].tolist())

    def check_agreement(self) -> None:
        """Find out once whether all ranks of the mesh were given the same arguments. Collective the first time.

        Raises
        ------
        ConfigError
            Which ranks hold what, on all ranks.
        """
        if not self._unchecked or self.mesh is None:
            return
        values = {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "the number of samples": self._num_in_dataset,
            "epoch": self.epoch,
        }
        check_agreement("the sampler", values, self.mesh, tuple(self.mesh.mesh_dim_names or ()))
        self._unchecked = False
