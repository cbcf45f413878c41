"""Along one dim, in the order of values: sorts, the largest few, running extremes, places in a sorted sequence.

Along a dim that is not sharded this is torch's own function on the part. Along a sharded one another dim is sharded for
the time being, where one is long enough to have rows for each rank; else each line is sorted where it lies, by a sample
sort. A result is split as the sorted dim was, evenly where it is shorter.

Which of equal elements are taken follows from torch's algorithm on the whole line. So a line that lies on several ranks
is gathered for torch's own kernel where equal elements decide. Of lines longer than ``GATHERED`` the first are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor

from scidata.core.bounds import even_sizes
from scidata.shard.comm.collectives import all_gather_v
from scidata.shard.op_table import TensorFunction
from scidata.shard.ops.align import local_of, on_parts, plain_of
from scidata.shard.ops.arguments import composes, handles, normal_dim
from scidata.shard.ops.moving import as_sharded, moved_back, moved_off, whole_along
from scidata.shard.rows.ordered import order_keys, sorted_ids
from scidata.shard.rows.redistribute import fetch_rows
from scidata.shard.sizes import facts_of
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor

GATHERED = 1 << 24  # elements of a line; 64 MiB in float32 on each rank, for the time of a call


def is_whole(spec: ShardSpec, dim: int) -> bool:
    """Whether each rank holds this dim whole."""
    axis = spec.axis_of_dim(dim)
    return axis is None or spec.axes[axis].size == 1


def by_lines(spec: ShardSpec, dim: int) -> bool:
    """Whether lines along a sharded dim stay in place: no other dim has rows for each rank, or is sharded."""
    free = [n for d, n in enumerate(spec.global_shape) if d not in spec.sharded]
    few = max(free, default=1) < spec.axes[spec.sharded[dim]].size
    return len(spec.sharded) == 1 and few and 0 not in free  # where there is no line, there is nothing to stack


def is_short(x: ShardTensor) -> bool:
    """Whether a line is gathered, for torch's own choice among equal elements."""
    return x.spec.global_size.numel() <= GATHERED


def on_lines(x: ShardTensor, dim: int, function: Callable[[ShardTensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Call a function of one dim on each line along ``dim``, the only sharded one, and stack its results."""
    if x.spec.ndim == 1:
        return function(x)
    other = int(dim == 0)
    found = [on_lines(as_sharded(row, x.spec), dim - (other < dim), function) for row in x.unbind(other)]
    return tuple(torch.stack(each, other) for each in zip(*found, strict=True))


def sort_line(line: ShardTensor, *, descending: bool = False) -> tuple[ShardTensor, ShardTensor]:
    """Sort a 1-D tensor stably; return values and former positions. Collective."""
    spec = line.spec
    sizes, _, group = spec.parts(0)
    keys = order_keys(line.local)
    ids, counts = sorted_ids(~keys if descending else keys, sizes, group)
    (axis,) = spec.sharded.values()
    places = ShardTensor(ids, spec.with_rows(0, counts)).redistribute(sizes={axis: sizes})
    return ShardTensor(fetch_rows(line.local, places.local, sizes, 0, group), spec), places


def _along(
    func: Callable[..., tuple[Tensor, Tensor]], x: ShardTensor, dim: int, options: Mapping[str, int],
    of_line: Callable[[ShardTensor], tuple[Tensor, ...]],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return values and positions along a dim: by torch's function if the dim is whole, by lines, or after moving the
    split.
    """
    values: Tensor
    places: Tensor
    if is_whole(x.spec, dim):
        values, places = (_wrapped(x, dim, each) for each in func(x.local, dim=dim, **options))
    elif by_lines(x.spec, dim):
        values, places = on_lines(x, dim, of_line)
    else:
        values, places = (moved_back(each, [dim], x.spec) for each in func(moved_off(x, [dim]), dim=dim, **options))
    return values, places


@handles("sort argsort")
def sort(
    func: TensorFunction, x: ShardTensor, dim: int = -1, descending: bool = False, stable: bool = False
) -> Tensor | tuple[Tensor, ...]:
    """Sort along one dim; lines that stay split always stably."""
    options = {"descending": descending, "stable": stable}
    found = _along(
        torch.sort, x, normal_dim(dim, x.spec.ndim), options, lambda line: sort_line(line, descending=descending)
    )
    return torch.return_types.sort(found) if func.__name__ == "sort" else found[1]


def _wrapped(x: ShardTensor, dim: int, part: Tensor) -> ShardTensor:
    """Wrap a result of a function along a dim that each rank holds whole."""
    extent = part.shape[dim]
    return ShardTensor(part, x.spec.with_rows(dim, (extent,) if dim in x.spec.sharded else extent))


@handles("topk")
def topk(
    func: Callable[..., tuple[Tensor, Tensor]], x: ShardTensor, k: int, dim: int = -1, largest: bool = True,
    sorted: bool = True,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Take the k largest, or smallest, along one dim; of a sharded one, they are split evenly."""
    spec, k, dim = x.spec, int(k), normal_dim(dim, x.spec.ndim)
    if not 0 <= k <= spec.global_shape[dim]:
        raise RuntimeError(f"topk: k={k} is out of range for dim {dim} of extent {spec.global_shape[dim]}")
    options = {"k": k, "largest": largest, "sorted": sorted}
    return torch.return_types.topk(_along(func, x, dim, options, lambda line: _top_of_line(line, k, largest, sorted)))


def _top_of_line(line: ShardTensor, k: int, largest: bool, is_sorted: bool) -> tuple[Tensor, ...]:
    """Take the first k of the line; if k is small and values differ, only each rank's k are gathered.

    Of (9, 2, 5 | 7, 1, 8) on two ranks and k = 2, the ranks' first three, (9, 5, 2) and (8, 7, 1), are gathered. The
    first two of all are 9 and 8; the third, 7, shows that no equal element was left out.
    """
    spec = line.spec
    (axis,) = spec.sharded.values()
    sizes, rank, group = spec.parts(0)
    wanted, few = even_sizes(k, len(sizes)), k * len(sizes) ** 2 <= sum(sizes)
    if not few and not is_short(line):
        found = sort_line(line, descending=largest)
        return tuple(as_sharded(each[:k], spec).redistribute(sizes={axis: wanted}) for each in found)
    ids = _first_of_line(line, k, largest) if few and is_sorted else None
    if ids is None:
        ids = torch.topk(line.full_tensor().detach(), k, 0, largest, is_sorted).indices
    mine = ids[sum(wanted[:rank]) :][: wanted[rank]]
    new = spec.with_rows(0, wanted)
    return ShardTensor(fetch_rows(line.local, mine, sizes, 0, group), new), ShardTensor(mine, new)


def _first_of_line(line: ShardTensor, k: int, largest: bool) -> Tensor | None:
    """Return the positions of the first k of the sorted line; None if equal elements of a short line decide."""
    sizes, _, group = line.spec.parts(0)
    keys = order_keys(line.local)
    keys = ~keys if largest else keys
    own = torch.sort(keys, stable=True).indices[: k + 1]
    pairs = torch.stack([keys[own], own + line.spec.offsets[0]], 1)
    gathered = all_gather_v(pairs, tuple(min(k + 1, size) for size in sizes), 0, group)
    first = gathered[torch.sort(gathered[:, 0], stable=True).indices[: k + 1]]
    if is_short(line) and (first[1:, 0] == first[:-1, 0]).any():
        return None
    return first[:k, 1]


@handles("cummax cummin")
def cummax(func: TensorFunction, x: ShardTensor, dim: int) -> Tensor | tuple[Tensor, ...]:
    """Find the running extreme; on a sharded dim each rank continues from the ranks before it."""
    spec, dim = x.spec, normal_dim(dim, x.spec.ndim)
    largest = "cummax" in func.__name__
    run, kind = torch.cummax if largest else torch.cummin, getattr(torch.return_types, func.__name__)
    if x.local.numel():
        found = run(x.local, dim)
    else:  # of no elements torch gives the input for the gradient, with its graph
        found = kind((x.local.clone(), torch.zeros_like(x.local, dtype=torch.int64)))
    result: tuple[Tensor, ...]
    if is_whole(spec, dim):
        result = kind([_wrapped(x, dim, each) for each in found])
        return result
    sizes, rank, group = spec.parts(dim)
    held, length = facts_of(sizes).held, spec.local_shape[dim]
    start = max(0, length - 1)
    values, indices = found.values, found.indices + spec.offsets[dim]
    # the others use a rank's last row each for their own part, hence grad="sum"
    totals = all_gather_v(values.narrow(dim, start, held[rank]), held, dim, group, grad="sum")
    places = all_gather_v(indices.narrow(dim, start, held[rank]), held, dim, group)
    before = sum(held[:rank])
    if before == 0 or not length:
        values = values + totals.narrow(dim, 0, 0).sum(dim, keepdim=True).to(values.dtype)  # in the graph, as elsewhere
    else:
        last = run(totals.detach().narrow(dim, 0, before), dim)
        which = last.indices.narrow(dim, before - 1, 1)
        carried, place = totals.gather(dim, which), places.gather(dim, which)
        wins = values >= carried if largest else values <= carried  # of equal ones the last
        if values.is_floating_point():
            wins = values.isnan() | (wins & ~carried.isnan())
        values, indices = torch.where(wins, values, carried), torch.where(wins, indices, place)
    result = kind((ShardTensor(values, spec), ShardTensor(indices, spec)))
    return result


# -- places in a sorted sequence -----------------------------------------------------------------------------------


composes(
    {
        "msort": lambda input: torch.sort(input, dim=0).values,
        torch.bucketize: lambda input, boundaries, **options: torch.searchsorted(boundaries, input, **options),
    }
)


@handles(torch.searchsorted)
def searchsorted(
    func: TensorFunction, sorted_sequence: Tensor, input: Tensor | float | None = None, *, self: float | None = None,
    sorter: Tensor | None = None, **options: bool | str,
) -> Tensor:  # fmt: skip
    """Return the insertion point of each value in a sorted row. Collective if rows are cut: they are gathered."""
    rows, values = whole_along(sorted_sequence.detach(), -1), self if input is None else input
    if not isinstance(values, Tensor):  # one number, in a sequence of one dim
        return func(local_of(rows), values, sorter=plain_of(sorter), **options)
    shared = range(len(rows.shape) - 1)
    if shared and tuple(rows.shape[:-1]) != tuple(values.shape[:-1]):
        raise RuntimeError(f"searchsorted: the first dims of {tuple(rows.shape)} and {tuple(values.shape)} differ")
    operands = [rows, values.detach(), *([] if sorter is None else [whole_along(sorter, -1)])]
    labels: list[Hashable] = [d if d in shared else ("value", d) for d in range(len(values.shape))]
    names = [[*shared, "row"], labels, [*shared, "row"]][: len(operands)]

    def find_places(rows: Tensor, values: Tensor, *order: Tensor) -> Tensor:
        return func(rows, values, **({"sorter": order[0]} if order else {}), **options)

    return on_parts(func, find_places, operands, names, labels)
