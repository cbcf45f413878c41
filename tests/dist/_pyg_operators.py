"""pyg-lib's searches: the library's own where it is installed, else slow ones by the same names and signatures.

Written by what pyg-lib's documentation says of them, for machines on which it cannot be installed. Neighbours come from
near to far in ``knn``, in the order of their ids in ``radius``, where pyg-lib has the order of its search tree.
"""

import functools
from itertools import pairwise

import torch

SCHEMAS = {
    "knn": "(Tensor x, Tensor y, Tensor? ptr_x=None, Tensor? ptr_y=None, int k=1, bool cosine=False, "
    "int num_workers=1) -> Tensor",
    "radius": "(Tensor x, Tensor y, Tensor? ptr_x=None, Tensor? ptr_y=None, float r=1.0, int max_num_neighbors=32, "
    "int num_workers=1, bool ignore_same_index=False) -> Tensor",
    "nearest": "(Tensor x, Tensor y, Tensor? ptr_x=None, Tensor? ptr_y=None) -> Tensor",
    "fps": "(Tensor src, Tensor ptr, float ratio=0.5, bool random_start=True) -> Tensor",
}


def _clouds(x, y, ptr_x, ptr_y):
    """Yield each row of ``y`` with the distances of the rows of ``x`` in its cloud, and the first of these."""
    for i, row in enumerate(y):
        b = 0 if ptr_y is None else int(torch.searchsorted(ptr_y, i, right=True)) - 1
        first, last = (0, len(x)) if ptr_x is None else ptr_x[b : b + 2].tolist()
        yield i, first, (x[first:last] - row).norm(dim=-1)


def _edges(pairs):
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2).t().contiguous()


def knn(x, y, ptr_x=None, ptr_y=None, k=1, cosine=False, num_workers=1):
    found = _clouds(x, y, ptr_x, ptr_y)
    return _edges([(i, first + j) for i, first, away in found for j in away.argsort(stable=True)[:k].tolist()])


def radius(x, y, ptr_x=None, ptr_y=None, r=1.0, max_num_neighbors=32, num_workers=1, ignore_same_index=False):
    pairs = []
    for i, first, away in _clouds(x, y, ptr_x, ptr_y):
        near = [first + j for j in (away < r).nonzero()[:, 0].tolist()]
        near = [j for j in near if j != i or not ignore_same_index]
        pairs += [(i, j) for j in near[:max_num_neighbors]]
    return _edges(pairs)


def nearest(x, y, ptr_x=None, ptr_y=None):
    return torch.tensor(
        [first + int(away.argmin()) for _, first, away in _clouds(y, x, ptr_y, ptr_x)], dtype=torch.int64
    )


def fps(src, ptr, ratio=0.5, random_start=True):
    picked = []
    for first, last in pairwise(ptr.tolist()):
        rows, mine = src[first:last], [int(torch.randint(last - first, ())) if random_start else 0]
        while len(mine) < -(-(last - first) * ratio // 1):
            mine.append(int(torch.stack([(rows - rows[i]).square().sum(-1) for i in mine]).amin(0).argmax()))
        picked += [first + i for i in mine]
    return torch.tensor(picked, dtype=torch.int64)


@functools.cache
def have_operators():
    """Make ``torch.ops.pyg`` have them; return whether they are pyg-lib's."""
    try:
        import pyg_lib  # noqa: F401
    except ImportError:
        library = torch.library.Library("pyg", "FRAGMENT")
        for name, schema in SCHEMAS.items():
            library.define(name + schema)
            library.impl(name, globals()[name], "CPU")
        have_operators.library = library  # lasts as long as it is held
        return False
    return True
