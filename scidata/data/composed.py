"""``ComposedDataset``: common base of data sets made of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset

from scidata.data.adapter import DatasetAdapter, SampleT
from scidata.errors import ConfigError


class ComposedDataset(Dataset[SampleT], Generic[SampleT]):
    """Data sets opened with the same mesh, and calls that go to all of them."""

    def __init__(self, datasets: Mapping[Any, Any]) -> None:
        self._sources = tuple(map(DatasetAdapter, datasets.values()))
        (name, first), *others = datasets.items()
        self.mesh: DeviceMesh | None = first.mesh
        self.dp_axis: str | None = first.dp_axis
        for other, dataset in others:
            if dataset.mesh != self.mesh or dataset.dp_axis != self.dp_axis:
                raise ConfigError(
                    f"data sets {name} and {other} were opened with other meshes, or dp axes; open them with the same "
                    "mesh"
                )

    @property
    def reads_alone(self) -> bool:
        """Whether reads of all data sets never wait for another machine or rank."""
        return all(source.reads_alone for source in self._sources)

    @property
    def static_nbytes(self) -> int:
        """Bytes of the static fields of all data sets."""
        return sum(source.static_nbytes for source in self._sources)

    @property
    def epoch(self) -> tuple[object, ...]:
        """The epochs of the data sets; None for a data set without one."""
        return tuple(source.epoch for source in self._sources)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, counted from 0 and equal on every rank, of the data sets that have one."""
        for source in self._sources:
            source.set_epoch(epoch)

    def close(self) -> None:
        """Close the data sets' files; the next read opens them again."""
        for source in self._sources:
            source.dataset.close()

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"mesh": None}
