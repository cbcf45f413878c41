"""What readers of irregular samples share: fields and entities by name, and parts by number, checked. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from scidata.errors import ConfigError, UnknownNameError, near_matches
from scidata.store.format.manifest import FieldInfo
from scidata.store.reading.subsample import Subsample


class PartReader:
    """Reads parts of samples.

    Attributes
    ----------
    path
        The store, or the first file, as the user gave it.
    num_parts
        Parts of each sample: ranks of the domain.
    entities
        Those that the samples have.
    period
        Width of the domain along each coordinate where it wraps, 0 where it does not; None where it does in none.
    subsample
        What each epoch draws; None reads all.
    layers
        Of a graph between several node sets: of each layer of a model that the ghosts are enough for, its relations.
    """

    path: str
    num_parts: int
    entities: tuple[str, ...]
    period: tuple[float, ...] | None
    subsample: Subsample | None
    layers: tuple[tuple[str, ...], ...] = ()
    _infos: Mapping[str, FieldInfo]  # by the names that users type

    def info(self, name: str) -> FieldInfo:
        """Return what there is to say of a field: entity, units, attributes, dims and dtype as it is stored."""
        return self._infos[self._known(name)]

    def graph_values(self, index: int) -> dict[str, Any]:
        """Return values of a whole sample: arrays, and what JSON has. Files have none."""
        return {}

    def _known(self, name: str) -> str:
        if name not in self._infos:
            raise UnknownNameError(f"{self.path}: no field {name!r}{near_matches(name, self._infos)}")
        return name

    def _check_entity(self, entity: str) -> None:
        if entity not in self.entities:
            raise UnknownNameError(f"{self.path}: no entity {entity!r}{near_matches(entity, self.entities)}")

    def _checked_part(self, part: int) -> int:
        if not 0 <= part < self.num_parts:
            raise ConfigError(f"rank {part} does not exist: the domain has {self.num_parts} ranks")
        return part

    def _digest(self, content: dict[str, object]) -> str:
        """Return the digest of what decides the samples, and what is drawn of them."""
        if self.subsample is not None:
            content["subsample"] = self.subsample.recipe
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
