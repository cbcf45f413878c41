"""Texts of the command line turned into arguments of the library. Pure; imports nothing heavy.

Every function takes the option's name, so that a bad value is answered with the option and the values that it accepts.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from scidata.errors import near_matches, visible

if TYPE_CHECKING:
    from scidata.core.options import Align, Bounds, Crop, Halo, ReadOptions, SampleDim

T = TypeVar("T")

#: Names of the domain's axes, by how many there are; as ``init_mesh`` names them.
_AXIS_NAMES = {1: ("domain",), 2: ("h", "w"), 3: ("d", "h", "w")}
_FLOATS = ("float16", "float32", "float64")
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?")
KINDS = ("grid", "points", "mesh", "graph")


def usage_error(option: str, message: str) -> typer.BadParameter:
    """Return the error that ends the program with exit code 2 and names the option."""
    return typer.BadParameter(visible(message), param_hint=f"'{option}'")


def check_choice(option: str, text: str | None, choices: Sequence[str]) -> None:
    """Refuse a word that is none of the choices; None is the default."""
    if text is not None and text not in choices:
        hint = near_matches(text, choices, listed=False)
        raise usage_error(option, f"{text!r} is none of {', '.join(choices)}{hint or '.'}")


def _integer(option: str, text: str, accepted: str) -> int:
    try:
        return int(text.strip())
    except ValueError:
        raise usage_error(option, f"{text.strip()!r} is not an integer; accepted: {accepted}.") from None


def _dim(text: str) -> str | int:
    name = text.strip()
    return int(name) if re.fullmatch(r"-?\d+", name) else name


def _pairs(
    option: str, texts: Iterable[str], accepted: str, noun: str = "dimension", *, needs_equals: bool = True
) -> Iterator[tuple[str, str]]:
    """Yield name and value of each ``name=value``; refuse a name that comes twice."""
    seen: set[str] = set()
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if needs_equals and not equals:
            raise usage_error(option, f"{text!r} names no {noun}; accepted: {accepted}.")
        if not name or not value:
            raise usage_error(option, f"{text!r} is incomplete; accepted: {accepted}.")
        if name in seen:
            raise usage_error(option, f"{noun} {name!r} is given twice.")
        seen.add(name)
        yield name, value


def _by_dim(option: str, texts: Sequence[str], accepted: str, parse: Callable[[str], T]) -> T | dict[str | int, T]:
    """Collect ``dim=value`` of a repeatable option into a mapping; one ``value`` alone holds for every dimension."""
    if len(texts) == 1 and "=" not in texts[0]:
        return parse(texts[0])
    return {_dim(dim): parse(value) for dim, value in _pairs(option, texts, accepted)}


def parse_sample_dim(text: str, option: str = "--sample-dim") -> SampleDim:
    """``time`` or a position; ``trajectory,time`` as a tuple of them; ``none`` as False."""
    if text == "none":
        return False
    if not all(part.strip() for part in text.split(",")):
        raise usage_error(option, f"{text!r} is incomplete; accepted: a dimension, or several: trajectory,time.")
    dims = tuple(map(_dim, text.split(",")))
    return dims if len(dims) > 1 else dims[0]


def parse_domain(text: str, option: str = "--domain") -> dict[str, int]:
    """``"8"``, ``"2x4"`` or ``"2,4"`` as the ranks along each domain axis."""
    accepted = "the ranks of one sample, 8, or of a 2-D split, 2x4"
    if not re.fullmatch(r"-?\d+([x,]-?\d+)*", text.lower().replace(" ", "")):
        raise usage_error(option, f"{text!r} is not an integer, nor integers joined by x; accepted: {accepted}.")
    sizes = [int(part) for part in re.split("[x,]", text.lower())]
    if len(sizes) not in _AXIS_NAMES:
        raise usage_error(option, f"{text!r} has {len(sizes)} axes; accepted: {accepted}.")
    if min(sizes) < 1:
        raise usage_error(option, f"{text!r} asks for {min(sizes)} ranks; at least 1 is needed.")
    return dict(zip(_AXIS_NAMES[len(sizes)], sizes, strict=True))


def parse_shard(
    values: Sequence[str], axis_sizes: dict[str, int], option: str = "--shard"
) -> dict[str | int, str] | None:
    """``latitude`` or ``latitude=h``, as ``{dim: axis}``; dimensions without an axis take the free ones in order."""
    if not values:
        return None
    accepted = f"a dimension, or dimension=axis with an axis of {', '.join(axis_sizes)}"
    given = [part.strip() for value in values for part in value.split(",")]
    taken = {axis.strip() for part in given for axis in part.split("=")[1:]}
    for axis in taken - set(axis_sizes):
        raise usage_error(option, f"there is no domain axis {axis!r}{near_matches(axis, axis_sizes)}")
    free = [axis for axis in axis_sizes if axis not in taken]
    if sum("=" not in part for part in given) > len(free):
        split = "x".join(map(str, axis_sizes.values()))
        raise usage_error(
            option,
            f"more dimensions than the {len(axis_sizes)} axes of --domain {split}; "
            "give --domain one number for each dimension, as in --domain 2x4.",
        )
    named = [part if "=" in part else f"{part}={free.pop(0)}" for part in given]
    shard = {_dim(dim): axis for dim, axis in _pairs(option, named, accepted)}
    unused = sorted(set(axis_sizes) - set(shard.values()))
    if unused:
        raise usage_error(
            option,
            f"no dimension is split over domain axis {unused[0]!r}; give --shard once for each number of --domain.",
        )
    return shard


def parse_halo(values: Sequence[str], option: str = "--halo") -> Halo:
    """``2``, ``latitude=2`` or ``latitude=1:3`` (below, above)."""
    accepted = "rows on either side, 2; or of one dimension, latitude=2 or latitude=1:3 (below:above)"

    def width(text: str) -> int | tuple[int, int]:
        parts = [_integer(option, part, accepted) for part in text.split(":")]
        if len(parts) > 2 or min(parts) < 0:
            raise usage_error(option, f"{text!r} is no width; accepted: {accepted}.")
        return parts[0] if len(parts) == 1 else (parts[0], parts[1])

    widths = _by_dim(option, values, accepted, width)
    return widths if values else 0


def parse_bounds(values: Sequence[str], *, of_store: bool) -> Bounds:
    """``even``, ``chunk`` or ``0,100,241``; or ``latitude=`` one of these. A store has one dimension, and no chunks."""
    option, words = "--bounds", ("even",) if of_store else ("even", "chunk")
    accepted = f"{', '.join(words)}, or the first row of each rank and the end, 0,100,241"

    def bounds(text: str) -> str | list[int]:
        word = text.strip().lower()
        if word in words:
            return word
        if not re.fullmatch(r"[\d,\s-]+", word):
            hint = near_matches(word, words, listed=False)
            raise usage_error(option, f"{text!r} are no bounds{hint}; accepted: {accepted}.")
        return [_integer(option, part, accepted) for part in word.split(",")]

    if of_store:
        return bounds(_only(option, values, accepted) or "even")
    return _by_dim(option, values, f"{accepted}; also latitude=even", bounds) if values else "even"


def parse_align(values: Sequence[str], option: str = "--align") -> Align:
    """``8`` or ``latitude=8``."""
    accepted = "rows that stay together, 8; or of one dimension, latitude=8"

    def unit(text: str) -> int:
        rows = _integer(option, text, accepted)
        if rows < 1:
            raise usage_error(option, f"{rows} is less than 1; accepted: {accepted}.")
        return rows

    return _by_dim(option, values, accepted, unit) if values else 1


def names_store(path: str) -> bool:
    """Return True if a path is a partitioned store, also one whose writing was interrupted."""
    from scidata.store.format.places import folder_of, is_store

    if is_store(path):
        return True
    if not os.path.isdir(path):
        return False
    stem, suffix = os.path.splitext(folder_of(0))
    prefix = stem.rstrip("0")
    return any(name.startswith((prefix, f".tmp-{prefix}")) and suffix in name for name in os.listdir(path))


def num_parts_of(axis_sizes: Mapping[str, int]) -> int:
    """Return the ranks that share a sample of a store, which has one axis."""
    if len(axis_sizes) > 1:
        split = "x".join(map(str, axis_sizes.values()))
        raise usage_error(
            "--domain",
            f"{split} splits two dimensions of a grid; the rows of a store are in one sequence, along a curve through "
            f"space, and are cut in one: --domain {math.prod(axis_sizes.values())}.",
        )
    return next(iter(axis_sizes.values()))


def read_options(
    axis_sizes: dict[str, int],
    *,
    of_store: bool,
    halo: Sequence[str] | None = None,
    bounds: Sequence[str] | None = None,
    shard: Sequence[str] | None = None,
    weights: str | None = None,
    ghosts: str | None = None,
    **others: Any,
) -> ReadOptions:
    """Return the options of reading and cutting, from the texts of the options that commands share.

    The halo and bounds of a partitioned store are given otherwise than those of grids. ``others`` are called alike in
    the library.
    """
    from scidata.core.options import ReadOptions

    cut = parse_bounds(bounds or (), of_store=of_store)
    if weights is not None and cut != "even":
        raise usage_error("--weights", "weights decide the bounds; leave out --bounds.")
    check_choice("--dtype", others.get("dtype"), _FLOATS)
    if of_store:
        check_choice("--ghosts", ghosts, ("disk", "exchange"))
    elif ghosts is not None:
        raise usage_error("--ghosts", "the halo of a grid is always read from disk; leave it out.")
    given = {name: value for name, value in others.items() if value is not None}
    parsed: dict[str, Any] = {
        name: _PARSERS[name](value) if name in _PARSERS else value for name, value in given.items()
    }
    return ReadOptions(
        shard=parse_shard(shard or (), axis_sizes),
        halo=(parse_width if of_store else parse_halo)(halo or ()),
        bounds=cut,
        weights=weights,
        ghosts=ghosts,
        **parsed,
    )


def parse_isel(values: Sequence[str], option: str = "--isel") -> Crop:
    """``latitude=0:240:2``, ``level=3`` or ``level=0,2,5``."""
    accepted = "dim=start:stop:step, dim=row or dim=row,row,…; as in latitude=0:240:2"

    def rows(text: str) -> slice | int | list[int]:
        if ":" in text:
            parts = [None if not p.strip() else _integer(option, p, accepted) for p in text.split(":")]
            if len(parts) > 3:
                raise usage_error(option, f"{text!r} has too many colons; accepted: {accepted}.")
            return slice(*parts)
        indices = [_integer(option, part, accepted) for part in text.split(",")]
        return indices if "," in text else indices[0]

    return {_dim(dim): rows(text) for dim, text in _pairs(option, values, accepted)}


def parse_sel(values: Sequence[str], option: str = "--sel") -> Crop:
    """``time=1990:2015``, ``level=500``, ``level=500,850`` or ``time=2020-01-01T06:00/2020-01-02T00:00``."""
    accepted = "dim=first:last, dim=value or dim=value,value,…; as in time=1990:2015 or level=500,850"
    return {dim: _labels(dim, text, accepted) for dim, text in _pairs(option, values, accepted, needs_equals=False)}


def parse_where(values: Sequence[str], option: str = "--where") -> dict[str, object]:
    """``qc=0,1``, ``station=LGAT`` or ``bt=150:350``: values, or one or both ends of a range."""
    accepted = "column=value,value,… or column=least:most; as in qc=0,1 or station=LGAT or bt=150:350"

    def number(text: str) -> float | str:
        with suppress(ValueError):
            return float(text)
        return text.strip()

    def wanted(text: str) -> object:
        if ":" not in text:
            return list(map(number, text.split(",")))
        return slice(*(number(end) if end.strip() else None for end in text.split(":")))

    return {column: wanted(text) for column, text in _pairs(option, values, accepted, "column")}


def _labels(dim: str, text: str, accepted: str) -> object:
    """Return a label, a list or a slice of labels: numbers if they can be, but for dims whose name says time."""
    from scidata.sources.cf import names_time

    kinds = (str,) if names_time(dim) else (int, float, str)

    def label(item: str) -> str | float:
        for kind in kinds:
            with suppress(ValueError):
                return kind(item.strip())
        raise AssertionError("every text is a str")

    if kinds == (str,) and _MOMENT.fullmatch(text):  # its colon is one of the time of day
        return text
    between = "/" if "/" in text else ":"
    if text.count(between) > 1:
        raise usage_error("--sel", f"{text!r} has more than one {between!r}; accepted: {accepted}.")
    if between in text:
        return slice(*(label(end) if end.strip() else None for end in text.split(between)))
    found = [label(item) for item in text.split(",")]
    return found if "," in text else found[0]


def parse_rules(option: str, text: str) -> dict[str, str]:
    """Read ``"grid=file,mesh=icosahedral:4"``."""
    return dict(_pairs(option, text.split(","), "name=rule, as in grid=file,mesh=icosahedral:4", "name"))


def parse_names(values: Sequence[str]) -> list[str]:
    """Names given with commas, by repeating the option, or both."""
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


def parse_fields(values: Sequence[str] | None, option: str = "--fields") -> list[str] | None:
    """Names of arrays, None if the option is not given."""
    names = parse_names(values or ())
    if values and not names:
        raise usage_error(option, f"{','.join(values)!r} names no array; leave it out to read all.")
    return names or None


def parse_steps(values: Sequence[str], option: str = "--steps") -> tuple[int, ...] | dict[str, tuple[int, ...]]:
    """``0,1`` as offsets along the sample dimension, of all fields, or ``u=-1,0,1`` of one, ``*=0,1`` of all others."""
    accepted = "offsets along the sample dimension, 0,1; or by field, u=-1,0,1 with *=0 for all others"

    def offsets(text: str) -> tuple[int, ...]:
        return tuple(_integer(option, part, accepted) for part in text.split(","))

    if len(values) == 1 and "=" not in values[0]:
        return offsets(values[0])
    return {name: offsets(text) for name, text in _pairs(option, values, accepted, "field")} or (0,)


def parse_ranks(values: Sequence[str], num_ranks: int, option: str = "--rank") -> list[int]:
    """``3``, ``0-3`` or ``0,2-5``, sorted; all of them if none is given."""
    accepted = "ranks of the domain, 3, 0-3 or 0,2-5"
    found: set[int] = set()
    for text in parse_names(values):
        first, dash, last = text.partition("-")
        begin = _integer(option, first, accepted)
        end = _integer(option, last, accepted) if dash else begin
        if not 0 <= begin <= end < num_ranks:
            raise usage_error(option, f"{text!r} is out of range: --domain has {num_ranks} ranks, from 0 on.")
        found |= set(range(begin, end + 1))
    return sorted(found) or list(range(num_ranks))


def parse_bytes(text: str | None, option: str) -> int | None:
    """``500G``, ``1.5T`` or a number of bytes; units are powers of 1024."""
    from scidata.core.checks import bytes_of

    if text is None:
        return None
    number = bytes_of(text)
    if number is None:
        raise usage_error(option, f"{text!r} is no number of bytes; accepted: 500G, 1.5T, or a number.")
    return number


def parse_width(values: Sequence[str], option: str = "--halo") -> Halo:
    """Read a store's halo: hops, ``2``, ``cells``, a radius, ``0.05``, or layers, ``a__to__b=1,b__to__b=4``."""
    accepted = (
        "one number, hops along edges, 2, or a radius of points, 0.05; 'cells', all those of owned nodes; between node "
        "sets also how many layers follow which relation, in their order, grid__to__mesh=1,mesh__to__mesh=4"
    )
    text = _only(option, values, accepted)
    if text is None:
        return 0
    if text == "cells":
        return "cells"
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    if all(name.count("__") >= 2 for name, _ in pairs):
        layers = [[name.strip()] * _integer(option, number.strip() or "1", accepted) for name, number in pairs]
        return [name for names in layers for name in names]
    try:
        width = int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except ValueError:
        raise usage_error(option, f"{text!r} is no width of a store's halo; accepted: {accepted}.") from None
    if not 0 <= width < float("inf"):
        raise usage_error(option, f"{text!r} is negative or infinite; accepted: {accepted}.")
    return width


def _only(option: str, values: Sequence[str], accepted: str) -> str | None:
    """Return the value of an option that is given once at most."""
    if len(values) > 1:
        raise usage_error(option, f"is given {len(values)} times; accepted: {accepted}.")
    return values[0].strip() if values else None


_PARSERS: dict[str, Callable[[Any], object]] = {
    "periodic": parse_names,
    "align": parse_align,
    "fields": parse_fields,
    "isel": parse_isel,
    "sel": parse_sel,
    "steps": parse_steps,
    "sample_dim": parse_sample_dim,
    "positions": parse_names,
    "where": parse_where,
}


@contextmanager
def cluster(address: str | None, jobs: int) -> Iterator[Any]:
    """Return a client of the cluster at an address; None without one."""
    if address is None:
        yield None
        return
    if jobs > 1:
        raise usage_error("--dask", "excludes --jobs: its workers are the processes.")
    from scidata.core.tasks.dask_jobs import connected

    # a lost connection is reported once, by the error that ends the command
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    with connected(address) as client:
        yield client
