"""Random chains of operations on a tensor of any shape: each draws its arguments from the shape that it meets."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Draw = random.Random


def plain(draw: Draw, *shape: int) -> torch.Tensor:
    return (
        torch.rand(*shape, generator=torch.Generator().manual_seed(draw.randrange(1 << 30)), dtype=torch.float64) - 0.5
    )


def dim_of(x: Any, draw: Draw) -> int:
    return draw.randrange(len(x.shape))


def at(dim: int, item: Any) -> tuple[Any, ...]:
    return (*[slice(None)] * dim, item)


def reshaped(x: Any, draw: Draw) -> Any:
    count, shape = x.shape.numel(), []
    while count > 1:
        shape.append(draw.choice([f for f in range(2, count + 1) if count % f == 0]))
        count //= shape[-1]
    return x.reshape(*shape, 1) if x.shape.numel() else x.flatten()


def flattened(x: Any, draw: Draw) -> Any:
    first = dim_of(x, draw)
    return x.flatten(first, draw.randrange(first, len(x.shape)))


def basic_index(x: Any, draw: Draw) -> tuple[Any, ...]:
    items: list[Any] = []
    for n in x.shape:
        start = draw.randrange(n + 1)
        chosen = [slice(None), slice(start, None, draw.randrange(1, 4)), slice(start, draw.randrange(start, n + 1))]
        items.append(draw.randrange(-n, n) if n and draw.random() < 0.2 else draw.choice(chosen))
    return tuple(items)


def rows(x: Any, draw: Draw, dim: int, count: int) -> torch.Tensor:
    extent = x.shape[dim]
    return torch.tensor([draw.randrange(-extent, extent) for _ in range(count if extent else 0)], dtype=torch.int64)


def taken(x: Any, draw: Draw) -> Any:
    """Index tensors for one dim or two."""
    dims = sorted(draw.sample(range(len(x.shape)), min(len(x.shape), draw.randrange(1, 3))))
    count = draw.randrange(5) if all(x.shape[d] for d in dims) else 0
    return x[tuple(rows(x, draw, d, count) if d in dims else slice(None) for d in range(len(x.shape)))]


def mask_of(x: Any, draw: Draw) -> tuple[Any, ...]:
    """A mask of some neighbouring dims, plain or sharded."""
    first = dim_of(x, draw)
    if draw.random() < 0.3:
        return (x.detach() > 0,)
    return at(first, plain(draw, *x.shape[first : draw.randrange(first, len(x.shape)) + 1]) > 0)


def written(x: Any, draw: Draw) -> Any:
    """Write to a copy, in one of many ways."""
    y, dim = x * 1.0, dim_of(x, draw)
    extent, way = x.shape[dim], draw.randrange(7)
    if way == 0:
        y[basic_index(y, draw)] = 2.5
    elif way == 1:
        index = mask_of(y, draw)
        y[index] = y[index] * 2
    elif way == 2 and extent:
        y[at(dim, draw.randrange(extent))] += 1.5
    elif way == 3 and extent:
        y.select(dim, draw.randrange(extent)).mul_(2)
    elif way == 4 and extent > 1:
        y[at(dim, slice(1, None))] = y.clone()[at(dim, slice(0, extent - 1))]
    elif way == 5 and extent > 1:
        y[at(dim, 0)] = y[at(dim, extent - 1)] * 2
    else:
        index = at(dim, torch.tensor(draw.sample(range(extent), draw.randrange(extent + 1)), dtype=torch.int64))
        y[index] = y[index].sin()
    return y


def with_plain(x: Any, draw: Draw) -> Any:
    shape = [n if draw.random() < 0.6 else 1 for n in x.shape][draw.randrange(len(x.shape)) :]
    other = plain(draw, *shape)
    return draw.choice([lambda: x + other, lambda: other * x, lambda: torch.where(x > other, x, other * 2)])()


def with_row(x: Any, draw: Draw) -> Any:
    dim = dim_of(x, draw)
    return x + x.narrow(dim, draw.randrange(x.shape[dim]), 1).exp() if x.shape[dim] else x


def reduced(x: Any, draw: Draw) -> Any:
    dim, keepdim = dim_of(x, draw), draw.random() < 0.5
    name = draw.choice(["sum", "mean", "amax", "logsumexp", "max"])
    if x.shape.numel() == 0:
        return x
    return x.max(dim, keepdim=keepdim).values if name == "max" else getattr(x, name)(dim, keepdim=keepdim)


def joined(x: Any, draw: Draw) -> Any:
    dim = dim_of(x, draw)
    cut = draw.randrange(x.shape[dim] + 1)
    other = plain(draw, *[draw.randrange(4) if d == dim else n for d, n in enumerate(x.shape)])
    parts = [x.narrow(dim, cut, x.shape[dim] - cut), x.narrow(dim, 0, cut) * 2, other]
    draw.shuffle(parts)
    return torch.cat(parts, dim)


def padded(x: Any, draw: Draw) -> Any:
    return F.pad(x, [draw.randrange(3) for _ in range(2 * draw.randrange(1, len(x.shape) + 1))], value=1.0)


def product(x: Any, draw: Draw) -> Any:
    if len(x.shape) < 2:
        return x @ plain(draw, x.shape[0], 3)
    return draw.choice([lambda: x @ x.mT, lambda: x.mT @ x, lambda: x @ plain(draw, x.shape[-1], 2)])().tanh()


def scattered(x: Any, draw: Draw) -> Any:
    dim = dim_of(x, draw)
    if x.shape.numel() == 0:
        return x
    index = (plain(draw, *x.shape) * 100).long() % x.shape[dim]
    return draw.choice([lambda: x.gather(dim, index), lambda: x.scatter_add(dim, index, x.sin())])()


def pooled(x: Any, draw: Draw) -> Any:
    if len(x.shape) != 4 or min(x.shape) < 1 or min(x.shape[2:]) < 2:
        return x.sin()
    pools = [
        lambda: F.max_pool2d(x, 2),
        lambda: F.avg_pool2d(x, 2, 1),
        lambda: F.adaptive_max_pool2d(x, (2, 1), True)[0],
    ]
    return draw.choice([*pools, lambda: F.interpolate(x, scale_factor=2, mode="bilinear")])()


def rearranged(x: Any, draw: Draw) -> Any:
    dim, ndim = dim_of(x, draw), len(x.shape)
    ways = [
        lambda: x.permute(*draw.sample(range(ndim), ndim)),
        lambda: x.unsqueeze(draw.randrange(ndim + 1)),
        x.squeeze,
        lambda: x.roll(draw.randrange(-9, 9), dim),
        lambda: x.flip(dim),
        lambda: x.repeat(*[draw.choice([1, 1, 2]) for _ in range(ndim)]),
        lambda: x.repeat_interleave(2, dim),
        lambda: torch.stack([*x.unbind(dim)][::-1], dim_of(x, draw)) if x.shape[dim] else x,
        lambda: torch.cat([*x.chunk(3, dim)][::-1], dim) if x.shape[dim] else x,
        lambda: x.expand(2, *[3 if n == 1 else n for n in x.shape]),
    ]
    return draw.choice(ways)()


def along(x: Any, draw: Draw) -> Any:
    dim = dim_of(x, draw)
    return draw.choice([lambda: x.softmax(dim), lambda: x.cumsum(dim), lambda: F.layer_norm(x, x.shape[-1:])])()


OPS: list[Callable[[Any, Draw], Any]] = [
    *(reshaped, flattened, taken, written, written, with_plain, with_row, reduced, joined, padded, product),
    *(scattered, pooled, rearranged, rearranged, along),
    lambda x, draw: x[basic_index(x, draw)],
    lambda x, draw: x[mask_of(x, draw)],
]


def chain(seed: int) -> Callable[[Any], Any]:
    """Return a chain of up to 8 operations, the same at each call."""

    def run(x: Any) -> Any:
        draw = Draw(seed)
        for _ in range(draw.randrange(1, 9)):
            op, arguments = draw.choice(OPS), Draw(draw.randrange(1 << 30))
            if not 0 < len(x.shape) < 6 or x.shape.numel() > 2000:
                break
            x = op(x, arguments)
        return x

    return run
