"""What is said of strides is what torch's CPU kernels do, on torch's own samples of every operation in the op table."""

import random
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from scidata.shard import memory
from scidata.shard.op_table import HANDLERS, op_name

samples = pytest.importorskip("torch.testing._internal.common_methods_invocations", reason="needs expecttest")

#: Of permuted tensors nothing is said of these, for want of a rule (transforms: by the number of dims).
UNKNOWN = ("lstsq", "corrcoef", "cov", "linalg.eig", "cross_entropy", "_sparse_mm", "fft")


def row_major(x):
    return x.detach().clone(memory_format=torch.contiguous_format) if x.layout is torch.strided else x.detach()


def permuted(draw):
    def of(x):
        if x.layout is not torch.strided:
            return x.detach()
        order = draw.sample(range(x.ndim), x.ndim)
        inverse = [order.index(d) for d in range(x.ndim)]
        return torch.empty([x.shape[d] for d in order], dtype=x.dtype).permute(inverse).copy_(x.detach())

    return of


def channels_last(x):
    if x.layout is not torch.strided or x.ndim < 3:
        return x.detach()
    return torch.empty((x.shape[0], *x.shape[2:], x.shape[1]), dtype=x.dtype).movedim(-1, 1).copy_(x.detach())


class Compared(TorchFunctionMode):
    """Compares what is inferred for each call with what the call gives."""

    def __init__(self):
        super().__init__()
        self.wrong, self.unknown, self.right = {}, Counter(), 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = op_name(func)
        if func not in HANDLERS or func in memory.OF_VALUES or (name.endswith("_") and not name.endswith("__")):
            return func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        plain = not any(map(memory.memory_of, given)) and "memory_format" not in kwargs
        inferred = plain and func not in memory.REARRANGES
        found = () if inferred else memory.infer_strides(func, args, kwargs)
        result = func(*args, **kwargs)
        for i, x in enumerate(result if isinstance(result, tuple | list) else [result]):
            if not isinstance(x, Tensor) or x.layout is not torch.strided or any(x is y for y in args):
                continue
            strides = None if inferred else found[i] if i < len(found) else memory.UNKNOWN
            if strides is memory.UNKNOWN:
                self.unknown[name] += 1
            elif self.steps(x, strides or memory.row_major(x.shape)) != self.steps(x, x.stride()):
                self.wrong[name] = strides, x.stride(), [(tuple(y.shape), y.stride()) for y in given]
            else:
                self.right += 1
        return result

    @staticmethod
    def steps(x, strides):
        return [step for step, extent in zip(strides, x.shape, strict=True) if extent > 1] if x.numel() > 1 else []


def compare(layout):
    change = {"row-major": row_major, "channels last": channels_last, "permuted": permuted(random.Random(0))}[layout]
    compared = Compared()
    names = {op_name(function).rsplit(".", 1)[-1] for function in HANDLERS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in samples.op_db:
            if torch.float32 not in op.supported_dtypes("cpu") or op.name.rsplit(".", 1)[-1] not in names:
                continue
            for sample in islice(op.sample_inputs("cpu", torch.float32), 4):
                for function in (op.op, op.method_variant):
                    try:
                        args, kwargs = tree_map_only(
                            Tensor, change, ((sample.input, *sample.args), dict(sample.kwargs))
                        )
                        with compared:
                            function(*args, **kwargs)
                    except (AssertionError, RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
                        continue  # what torch does not do is no matter here
    return compared


@pytest.mark.parametrize("layout", ["row-major", "permuted", "channels last"])
def test_strides_of_all_results(layout):
    # in a thread of its own: torch's samples list the frames of the stack, and pytest's is deep
    with ThreadPoolExecutor(1) as pool:
        compared = pool.submit(compare, layout).result()
    assert not compared.wrong, "\n".join(f"{name}: {what}" for name, what in compared.wrong.items())
    assert compared.right > 1000
    left = {n for n in compared.unknown if not any(known in n for known in UNKNOWN)}
    assert left <= {"torch.Tensor.__getitem__"}, left


@pytest.mark.parametrize("function", [torch.fft.fftn, torch.fft.ifftn, torch.fft.fft2, torch.fft.rfft, torch.fft.irfft])
@pytest.mark.parametrize("shape", [(5, 3, 2, 6), (2, 3, 4), (4, 3)])
def test_transforms_of_many_dims(function, shape):
    x = torch.randn(shape, dtype=torch.complex128 if function is not torch.fft.rfft else torch.float64)
    found = memory.infer_strides(function, (x,), {})
    assert found == () or (found[0] or memory.row_major(function(x).shape)) == function(x).stride()
    assert bool(found) == (len(shape) < 4 or function not in (torch.fft.fftn, torch.fft.ifftn))


def strided(draw, shape):
    """Some of the last dims of a shape, in any order of memory, some of extent 1 or expanded."""
    shape = shape[draw.randrange(len(shape)) :]
    kept = [n if draw.random() < 0.7 else 1 for n in shape]
    x = permuted(draw)(torch.empty(kept))
    return x.expand([n if draw.random() < 0.3 else -1 if m != 1 else 1 for n, m in zip(shape, kept, strict=True)])


def test_broadcast_results_lie_as_those_of_kernels():
    draw, several = random.Random(0), 0
    for _ in range(2000):
        shape = [draw.choice([1, 2, 3]) for _ in range(draw.randrange(1, 5))]
        x, y = strided(draw, shape), strided(draw, shape)
        several += x.shape != y.shape
        (found,), product = memory.infer_strides(torch.mul, (x, y), {}), x * y
        assert Compared.steps(product, found or memory.row_major(product.shape)) == Compared.steps(
            product, product.stride()
        )
    assert several > 1000


@pytest.mark.parametrize("number", range(24))
def test_kernels_that_lay_out_by_format(number):
    """Pads, pools and shuffles of all orders of memory, with dims of one row, expanded and with gaps."""
    draw = random.Random(number)
    ndim = draw.choice([3, 4, 5])
    shape = [draw.choice([1, 2, 3, 4]) for _ in range(ndim)]
    shape[1] = 4
    last, lay = draw.random() < 0.5, permuted(draw)
    x = channels_last(torch.rand(shape)) if last else lay(torch.rand(shape))
    x = x[:, :, ::2] if draw.random() < 0.3 else x[:1].expand(2, *[-1] * (ndim - 1)) if draw.random() < 0.3 else x
    pads = [1, 0] * (ndim - 2)
    calls = [
        *[(torch.nn.functional.pad, (x, pads, mode)) for mode in ("constant", "replicate", "circular")],
        (torch.nn.functional.pad, (x, [0, 0, -1, 0])),
        (torch.nn.functional.channel_shuffle, (x, 2)),
        (torch.nn.functional.group_norm, (x.expand(2, *x.shape[1:]) if len(x) == 1 else x, 2)),
        (torch.nn.functional.max_pool1d, (x, 1)),
        (torch.nn.functional.max_pool1d, (x.detach().requires_grad_(), 1)),
        (torch.nn.functional.pixel_shuffle, (x, 2)),
        (torch.pow, (2.0, x)),
        (torch.roll, (x, (1, -2), (1, -1))),
        (torch.roll, (x, 1)),
        (torch.ldexp, (x, x[:1])),
        (torch.rsub, (x, x[:1].contiguous())),
        (torch.Tensor.view, (x, x.shape[0], torch.tensor(2), 2, *x.shape[2:])),
        (torch.narrow, (x, 1, torch.tensor(1), 2)),
    ]
    compared = Compared()
    for function, args in calls:
        try:
            with compared:
                function(*args)
        except (RuntimeError, NotImplementedError, ValueError):
            continue  # of another number of dims, or with too few rows
    assert not compared.wrong, compared.wrong
    assert not compared.unknown, compared.unknown
    assert compared.right >= 8


def test_elementwise_results_of_tensors_without_gaps_have_exactly_the_strides_of_kernels():
    """Also of dims of one row, by which later functions choose a format."""
    draw, compared, several = random.Random(1), 0, 0
    functions = sorted(memory.AT_ONCE | memory.ELEMENTWISE, key=op_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for function in functions:
            for _ in range(8):
                x = permuted(draw)(torch.rand([draw.choice([1, 2]) for _ in range(4)]))
                for operands in ((x,), (x, 0.5), (x, x + 1), (x, x + 1, x + 2)):
                    try:
                        result = function(*operands)
                    except (RuntimeError, TypeError, NotImplementedError):
                        continue
                    if isinstance(result, Tensor) and result is not x:
                        (found,) = memory.infer_strides(function, operands, {}) or (memory.UNKNOWN,)
                        assert (found or memory.row_major(result.shape)) == result.stride(), (function, x.stride())
                        compared += 1
                        several += x.is_contiguous() and x.stride() != memory.row_major(x.shape)
    assert compared > 2000
    assert several > 200
