"""Items of a worker process of torch's ``DataLoader`` on a grid: tensors of this rank's part, no sample yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.utils.data import get_worker_info

from scidata.errors import ConfigError

_INDEX = "#index"  # which torch's collate function stacks as it does the fields


class LocalFields(dict[str, torch.Tensor]):
    """This rank's part of the fields of a sample, halo included, or of a batch, which ``ds.assemble(part)`` wraps.

    Outside of workers a field cannot be taken from it by name where the domain has several ranks: parts differ in shape
    from rank to rank, and none of them is the field. ``items()`` gives all that is there.
    """

    is_whole: bool

    @classmethod
    def of(cls, fields: Mapping[str, torch.Tensor], index: int, *, is_whole: bool) -> LocalFields:
        """Make one of a sample; ``is_whole`` where one rank holds all of it."""
        made = cls(fields)
        made.number(index)
        made.is_whole = is_whole
        return made

    def number(self, index: int | list[int]) -> None:
        """Say which sample it is of."""
        self[_INDEX] = torch.tensor(index)

    def __getitem__(self, name: str) -> torch.Tensor:
        if get_worker_info() is None and not self.is_whole:
            raise ConfigError(
                f"{name!r}: a worker process of torch's DataLoader has read this rank's part of the sample, with its "
                "halo; sample = ds.assemble(part) makes ShardTensors of it. Or use scidata.DataLoader"
            )
        return super().__getitem__(name)

    def fields(self) -> dict[str, torch.Tensor]:
        """Return the fields alone."""
        return {name: tensor for name, tensor in self.items() if name != _INDEX}

    @property
    def index(self) -> int | list[int]:
        """The sample's number, or those of a batch."""
        return dict.__getitem__(self, _INDEX).tolist()


def stacked(parts: Sequence[LocalFields]) -> LocalFields:
    """Return the part of a batch."""
    made = LocalFields({name: torch.stack([dict(part)[name] for part in parts]) for name in parts[0]})
    made.is_whole = parts[0].is_whole
    return made
