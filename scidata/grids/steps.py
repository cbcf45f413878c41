"""Which steps a sample has of each field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scidata.core.checks import check_steps
from scidata.errors import ConfigError, UnknownNameError, near_matches

#: The key of the steps of all fields that ``steps`` does not name.
OTHERS = "*"


@dataclass(frozen=True, kw_only=True)
class FieldSteps:
    """The offsets along the sample dimension that a sample has of each field.

    - ``every``: as they were given for all fields; where fields differ, those of any of them, each once, ascending.
    - ``by_field``: where fields differ: of each that has the dimension.
    """

    every: tuple[int, ...]
    by_field: Mapping[str, tuple[int, ...]]

    def of(self, name: str) -> tuple[int, ...]:
        """Return those of a field."""
        return self.by_field.get(name, self.every)

    def num(self, name: str) -> int:
        """Return how many a sample has of a field that has the dimension."""
        return len(self.of(name))

    def reach(self, name: str, *, every: bool = False) -> int:
        """Return how far the last lies from the first; ``every``: from the first of any field."""
        return max(self.of(name)) - min(self.every if every else self.of(name))

    def places(self, name: str) -> list[int]:
        """Return where those of a field are among those of all."""
        return [self.every.index(step) for step in self.of(name)]

    def as_json(self) -> list[int] | dict[str, list[int]]:
        """Return them as plain values."""
        return {name: list(steps) for name, steps in self.by_field.items()} or list(self.every)


def checked_steps(
    steps: Sequence[int] | Mapping[str, Sequence[int]], sample_dim: str | None, dims: Mapping[str, Sequence[str]]
) -> FieldSteps:
    """Return the steps of each field, given for all or by field; ``"*"`` are all others, (0,) without it."""
    if isinstance(steps, Mapping):
        given = {name: check_steps(each, f"steps of {name!r}") for name, each in steps.items()}
    else:
        given = {OTHERS: check_steps(steps)}
    others = given.pop(OTHERS, (0,))
    if sample_dim is None and (given or others != (0,)):
        raise ConfigError(f"steps={steps} need a sample dimension; name it with sample_dim")
    if not isinstance(steps, Mapping):
        return FieldSteps(every=others, by_field={})
    for name in given:
        if name not in dims:
            raise UnknownNameError(f"steps: no field {name!r} is read{near_matches(name, dims)}")
        if sample_dim not in dims[name]:
            raise ConfigError(
                f"steps: field {name!r} has no dimension {sample_dim!r}, its dims are {', '.join(dims[name])}; it is "
                "the same in every sample: leave it out"
            )
    moving = {name: given.get(name, others) for name, own in dims.items() if sample_dim in own}
    if len(alike := set(moving.values())) < 2:
        return FieldSteps(every=alike.pop() if alike else (0,), by_field={})
    return FieldSteps(every=tuple(sorted(set().union(*moving.values()))), by_field=moving)
