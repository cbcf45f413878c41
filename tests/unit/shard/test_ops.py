"""The op table as a whole: nothing outside of it computes on a sharded tensor, and entries are added once."""

import contextlib
import subprocess
import sys

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.overrides import TorchFunctionMode, get_overridable_functions

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec, ShardTensor, register_op, shard_ops
from scidata.shard.op_table import HANDLERS, find, op_name
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


AFTER_PYG = """
import torch_geometric.data, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from scidata.shard import ShardSpec, ShardTensor, shard_ops
from scidata.testing import fake_group

with fake_group(2):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    x = ShardTensor(torch.rand(2, 4), ShardSpec.even(mesh, [Shard(0)], (4, 4)))
    assert torch.select(x, 1, 0).shape == (4,)
    assert torch.index_select(x, 1, torch.tensor([0, 2])).shape == (4, 2)
assert {"torch.select", "torch.index_select"} <= set(shard_ops())
"""


def test_functions_that_pyg_has_put_its_own_in_place_of():
    pytest.importorskip("torch_geometric")
    subprocess.run([sys.executable, "-c", AFTER_PYG], check=True)


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
