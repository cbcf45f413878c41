"""Joins on the command line: a TOML file of what ``scidata.join`` and, for each part, ``open_dataset`` are given."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields
from typing import Any

import torch

from scidata.cli.arguments import parse_isel, parse_sel, parse_where, usage_error
from scidata.cli.commands.plan import PlanOutput, as_plain, planned, print_plan, reader_of
from scidata.cli.output import console, print_json
from scidata.core.options import ReadOptions
from scidata.core.urls import public_text
from scidata.data.join import join
from scidata.data.joined_dataset import JoinedDataset
from scidata.data.open_dataset import open_dataset
from scidata.errors import ConfigError, check_known
from scidata.grids.labels import label_text

_TEXTS = {"isel": parse_isel, "sel": parse_sel, "where": parse_where}  # which TOML has no slices for
_CUT = ("shard", "halo", "bounds", "weights", "align", "ghosts", "edges", "periodic")  # say nothing of samples


def read_join(path: str, **more: object) -> tuple[JoinedDataset, dict[str, dict[str, Any]]]:
    """Open the parts whole, with ``more`` arguments, and join them; return also the arguments of each."""
    try:
        with open(path, "rb") as file:
            said = tomllib.load(file)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{path}: is no TOML file: {e}") from e
    check_known(f"{path}: no entry", said, ["parts", "on", "how", "tolerance", "at"])
    parts = said.pop("parts", None)
    if "on" not in said or not isinstance(parts, Mapping):
        raise ConfigError(f"{path}: expected on = 'time', and a table [parts.NAME] with the path of each data set")
    opened, given = {}, {}
    for name, part in parts.items():
        if not isinstance(part, Mapping) or not isinstance(part.get("path"), str):
            raise ConfigError(f"{path}: part {name!r} has no path; give it one: [parts.{name}], path = 'era5_*.nc'")
        own = {key: _parsed(key, value) for key, value in part.items()}
        try:
            whole: dict[str, Any] = more | {key: x for key, x in own.items() if key not in _CUT}
            dtype = getattr(torch, str(own.get("dtype")), own.get("dtype"))
            opened[name] = open_dataset(**whole | {"dtype": dtype})
        except (TypeError, ConfigError) as e:
            raise ConfigError(f"{path}: part {name!r}: {e}") from None
        given[name] = own
    return join(opened, **said), given


def _parsed(key: str, value: Any) -> Any:
    if key not in _TEXTS or not isinstance(value, Mapping):
        return value
    texts = {dim: _TEXTS[key]([f"{dim}={text}"], key) for dim, text in value.items() if isinstance(text, str)}
    return {dim: texts[dim][dim] if dim in texts else given for dim, given in value.items()}


def run_plan_of_join(path: str, axis_sizes: Mapping[str, int], output: PlanOutput) -> None:
    """Plan the samples of a key, one of each part, for every rank of a domain, and print them."""
    joined, parts = read_join(path)
    with closing(joined):
        if not 0 <= output.sample < len(joined):
            raise usage_error("--sample", f"{output.sample} is out of range: there are {len(joined)} samples.")
        numbers = {name: part.locate(output.sample)[1] for name, part in joined.at(output.sample).items()}
        about = {"path": path, "join": joined.explain(), "key": label_text(joined.keys[output.sample])}
    found = {}
    for name, number in numbers.items():
        known = {each.name for each in fields(ReadOptions)}
        options = ReadOptions(num_threads=1, **{key: x for key, x in parts[name].items() if key in known})
        found[name] = planned(reader_of(parts[name]["path"], axis_sizes, options, output), number)
    if output.as_json:
        plans = {n: as_plain(plan, parts[n]["path"], output.dp, tips) for n, (plan, tips) in found.items()}
        print_json({**about, "parts": plans})
        return
    _print([*joined.explain().split("\n"), f"sample {output.sample}: {about['key']}"])
    for name, (plan, tips) in found.items():
        _print(["", f"part {name}"])
        print_plan(plan, public_text(parts[name]["path"]), tips=tips or (), every_rank=output.every_rank)


def run_inspect_join(path: str, *, as_json: bool) -> None:
    """Say how parts are joined, and what each has."""
    joined, _ = read_join(path)
    with closing(joined):
        if as_json:
            parts = {name: {"samples": len(part), "fields": list(part.fields)} for name, part in joined.parts.items()}
            print_json({"path": path, "join": joined.explain(), "num_samples": len(joined), "parts": parts})
            return
        parts_said = [f"{name}: {part.datasets[0]!r}" for name, part in joined.parts.items()]
        _print([*joined.explain().split("\n"), *parts_said])


def _print(lines: list[str]) -> None:
    for line in lines:
        console().print(line, soft_wrap=True)
