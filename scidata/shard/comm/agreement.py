"""Check that ranks hold equal values, and raise on all ranks if they do not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scidata.errors import ConfigError
from scidata.shard.comm.transport import Group, all_reduce_max, gather, group_size

_MAX_SHOWN = 3


def check_agreement(subject: str, values: Mapping[str, object], mesh: DeviceMesh, axes: Sequence[str | int]) -> None:
    """Raise on every rank if the ranks along ``axes`` do not hold the same values. Collective.

    Costs a reduction of 64 bytes along each axis where they do.

    ``subject``: the owner of the values, for the message: ``"the sampler"``.
    ``values``: anything with a ``str``, the same on the same kind of rank.
    """
    texts = {name: str(value) for name, value in values.items()}
    encoded = json.dumps(texts, sort_keys=True).encode()
    groups = [mesh.get_group(axis) for axis in axes]
    digest = torch.frombuffer(bytearray(hashlib.sha256(encoded).digest()), dtype=torch.int64).to(mesh.device_type)
    highest = reduce(all_reduce_max, groups, torch.stack([digest, ~digest]))  # ~x is the greater, the less x is
    if torch.equal(highest[0], ~highest[1]):
        return
    mine = json.dumps([dist.get_rank(), texts]).encode()
    everyone = dict(json.loads(each) for each in gather_bytes(mine, groups, mesh.device_type))
    absent = dict.fromkeys((name for held in everyone.values() for name in held), "absent")
    everyone = {rank: absent | held for rank, held in everyone.items()}
    raise ConfigError(f"ranks disagree about {subject}: {differences(everyone)}; give every rank the same")


def gather_bytes(mine: bytes, groups: Sequence[Group], device: str) -> list[bytes]:
    """Gather every rank's bytes, axis by axis: after the last axis each rank has the bytes of the whole mesh.
    Collective.

    In order of the ranks along the last axis, then along the one before it.
    """
    held = [mine]
    for group in groups:
        num_ranks = group_size(group)
        if num_ranks == 1:
            continue
        own = torch.tensor([len(each) for each in held], device=device)
        lengths = gather(own, (len(held),) * num_ranks, 0, group).tolist()
        sizes = tuple(sum(lengths[i : i + len(held)]) for i in range(0, len(lengths), len(held)))
        packed = torch.frombuffer(bytearray(b"".join(held)), dtype=torch.uint8).to(device)
        everything = gather(packed, sizes, 0, group).cpu().numpy().tobytes()
        held, start = [], 0
        for length in lengths:
            held.append(everything[start : start + length])
            start += length
    return held


def differences(everyone: Mapping[int, Mapping[str, str]]) -> str:
    """List the values that differ, and the ranks that hold each.

    ``everyone``: values by name, by rank. A name that a rank does not have is left out of it.
    """
    names = dict.fromkeys(name for texts in everyone.values() for name in texts)
    parts = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank in sorted(rank for rank, texts in everyone.items() if name in texts):
            holders.setdefault(everyone[rank][name], []).append(rank)
        if len(holders) > 1:
            shown = [f"{value} on {_ranks(ranks)}" for value, ranks in holders.items()]
            parts.append(f"{name} is {' and '.join(shown[:_MAX_SHOWN])}" + (", …" if len(shown) > _MAX_SHOWN else ""))
    more = f" and {len(parts) - _MAX_SHOWN} more" if len(parts) > _MAX_SHOWN else ""
    return "; ".join(parts[:_MAX_SHOWN]) + more


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
