"""The op table as a whole: nothing outside of it computes on a sharded tensor, and entries are added once."""

import contextlib

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.overrides import TorchFunctionMode, get_overridable_functions

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec, ShardTensor, register_op, shard_ops
from scidata.shard.ops.registry import HANDLERS, find, op_name
from scidata.testing import fake_group


class Arrivals(TorchFunctionMode):
    """The functions under which calls arrive at the table: ``x + y`` comes as ``torch.Tensor.add``."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def sharded():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    return ShardTensor(torch.rand(2, 4), ShardSpec.even(mesh, [Shard(0)], (4, 4)))


@pytest.mark.filterwarnings("ignore")
def test_no_function_outside_the_table_gives_a_result():
    outside = {f for functions in get_overridable_functions().values() for f in functions if f not in HANDLERS}
    assert len(outside) > 500
    refused = 0
    with fake_group(2):
        for function in outside:
            x = sharded()
            for arguments in ((x,), (x, x), (x, 1), (x, x, x), (x, 0, 1), ([x, x],), (x, [1], [1])):
                try:
                    with Arrivals() as arrivals:
                        result = function(*arguments)
                except UnsupportedShardOp:
                    refused += 1
                    break
                except Exception:
                    continue  # these arguments do not fit it; try the next
                if result is NotImplemented:
                    continue
                assert arrivals.seen[:1], f"{op_name(function)} gave {type(result)}"
                assert arrivals.seen[0] in HANDLERS, f"{op_name(function)} gave {type(result)}"
                break  # another spelling of a function in the table
    assert refused > 500


@pytest.mark.filterwarnings("ignore")
def test_no_operator_of_the_dispatcher_gives_a_result():
    """``torch.ops`` called directly: every overload, with arguments that suit many."""
    refused = 0
    with fake_group(2):
        x = sharded()
        for name in dir(torch.ops.aten):
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
                function = getattr(packet, overload)
                for arguments in ((x,), (x, x), (x, 1), (x, x, x), (x, 0, 1), ([x, x],), (x, [1])):
                    try:
                        result = function(*arguments)
                    except UnsupportedShardOp:
                        refused += 1
                        break
                    except Exception:
                        continue
                    pytest.fail(f"{function} gave {type(result)}")
    assert refused > 1500


def test_entries_are_added_once_and_found_by_name():
    assert "torch.Tensor.add" in shard_ops()
    assert find("__eq__") == [torch.Tensor.__eq__]
    with pytest.raises(LookupError, match="no_such_function"):
        find("add no_such_function")
    with pytest.raises(ValueError, match=r"torch\.add already has a handler"):
        register_op(torch.add)(lambda func, types, args, kwargs: None)
    with fake_group(2), contextlib.ExitStack() as stack:
        stack.callback(HANDLERS.pop, torch.tril)
        register_op(torch.tril)(lambda func, types, args, kwargs: "mine")
        assert torch.tril(sharded()) == "mine"


#: Functions of a (4, 4) tensor sharded on dim 0 that need no other rank's rows.
ALONE = [
    lambda x: x * 2 + x.sin() - torch.ones(4) / torch.ones(4, 1),
    lambda x: x[1:3, ::2],
    lambda x: [
        *x.split(3),
        *x.chunk(2, 1),
        x.narrow(0, 1, 2),
        x[:, 1],
        x[:, [0, 2]],
        x[torch.tensor([1, 0, 1, 1]) > 0],
    ],
    lambda x: x.reshape(8, 2).unsqueeze(1).transpose(0, 2).permute(1, 2, 0).flatten(1, 2),
    lambda x: [x.sum(1), x.mean(-1), x.var(1), x.amax(1), x.softmax(1), x.cumsum(1), x.argmax(1)],
    lambda x: [torch.cat([x, x], 1), torch.stack([x, torch.zeros(4, 4)]), x.roll(1, 1), x.flip(1), x.repeat(1, 2)],
    lambda x: [torch.nn.functional.pad(x, (1, 1, 2, 2)), x.repeat_interleave(2, 0), x.expand(3, 4, 4)],
    lambda x: [
        x @ torch.ones(4, 2),
        torch.nn.functional.linear(x, torch.ones(3, 4)),
        torch.einsum("ni,ji", x, x[:0].new_ones(2, 4)),
    ],
    lambda x: [
        x.scatter_add(0, torch.zeros(4, 4, dtype=torch.long), torch.ones(4, 4)),
        x.gather(1, torch.zeros(4, 1, dtype=torch.long)),
    ],
    lambda x: [torch.nn.functional.dropout(x, 0.5), torch.rand_like(x), x.clone(), x.double(), torch.zeros_like(x)],
    lambda x: torch.nn.functional.mse_loss(x, torch.zeros(4, 4), reduction="none"),
]


@pytest.mark.parametrize("function", ALONE)
def test_what_needs_no_other_rank_does_not_communicate(function, monkeypatch):
    def refuse(*args, **kwargs):
        pytest.fail("it communicated")

    for name in ("all_to_all_single", "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor"):
        monkeypatch.setattr(torch.distributed, name, refuse)
    monkeypatch.setattr("scidata.shard._transport._all_gather", refuse)
    with fake_group(2):
        function(sharded())
