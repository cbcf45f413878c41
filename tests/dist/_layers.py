"""What the tests of layers share: layouts of a dim of 23 rows, a runner of cases, and a spy on collectives."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import scidata.shard.comm.transport as transport
from scidata.shard import ShardSpec
from scidata.testing.oracle import assert_like_one_process

ROWS, COLUMNS = 23, 9
LAYOUTS = {
    1: [(23,)],
    2: [(12, 11), (20, 3), (22, 1), (0, 23)],
    3: [(8, 8, 7), (20, 0, 3), (0, 1, 22), (11, 12, 0)],
    4: [(6, 6, 6, 5), (1, 0, 19, 3)],
}
#: sizes of 23 rows and of 9 columns on a 2 x 2 mesh
GRIDS = [((12, 11), (5, 4)), ((20, 3), (0, 9)), ((1, 22), (8, 1))]


def random(*shape, seed=0, grad=True):
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return values.requires_grad_(grad)


def mesh_of(num_ranks):
    return init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))


def grid_mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))


def check_cases(cases, num_ranks, layouts=LAYOUTS):
    """Check cases by name, ``(function, shapes, sharded dim of the first operand)``, against one process.

    On 4 ranks also on a 2 x 2 mesh, those whose first operand ends in 23 x 9.
    """
    mesh = mesh_of(num_ranks)
    for sizes in layouts[num_ranks]:
        for name, (function, shapes, dim) in cases.items():
            _check(name, function, shapes, ShardSpec.even(mesh, [Shard(dim)], shapes[0], {0: sizes}))
    if num_ranks != 4:
        return
    mesh = grid_mesh()
    for rows, columns in GRIDS:
        for name, (function, shapes, _) in cases.items():
            first = len(shapes[0]) - 2
            if first >= 1 and tuple(shapes[0][first:]) == (ROWS, COLUMNS):
                spec = ShardSpec.even(mesh, [Shard(first), Shard(first + 1)], shapes[0], {"h": rows, "w": columns})
                _check(name, function, shapes, spec)


def _check(name, function, shapes, spec):
    inputs = [random(*shape, seed=i) for i, shape in enumerate(shapes)]
    try:
        assert_like_one_process(function, inputs, [spec, *[None] * (len(shapes) - 1)])
    except Exception as error:
        raise AssertionError(f"{name} at {spec}") from error


class Spy:
    """Counts collectives."""

    NAMES = ("all_to_all_single", "all_gather_into_tensor", "all_gather_single", "all_reduce", "broadcast")

    def __enter__(self):
        self.counts, self.kept = {}, []
        for module, name in [*((dist, name) for name in self.NAMES), (transport, "_all_gather")]:
            function = getattr(module, name, None)
            if function is not None:
                self.kept.append((module, name, function))
                setattr(module, name, self._counting(name.removeprefix("_"), function))
        return self

    def _counting(self, name, function):
        def counted(*args, **kwargs):
            self.counts[name] = self.counts.get(name, 0) + 1
            return function(*args, **kwargs)

        return counted

    def __exit__(self, *_):
        for module, name, function in self.kept:
            setattr(module, name, function)
