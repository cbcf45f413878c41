"""The op table as a whole: nothing outside of it computes on a sharded tensor, and entries are added once."""

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.overrides import TorchFunctionMode, get_overridable_functions

import scidata
from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec, ShardTensor, register_op, shard_ops
from scidata.shard.op_table import HANDLERS, find, handler_of_operator, op_name
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
    assert len(outside) > 100
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
    assert refused > 100


@pytest.mark.filterwarnings("ignore")
def test_no_operator_of_the_dispatcher_gives_a_result():
    """``torch.ops`` called directly: every overload that has no handler, with arguments that suit many."""
    refused = 0
    with fake_group(2):
        x = sharded()
        for name in dir(torch.ops.aten):
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
                function = getattr(packet, overload)
                if function in HANDLERS or handler_of_operator(function) is not None:
                    continue
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


IN_ANY_ORDER = """
import importlib, json, pathlib, random, re, sys, types
import scidata

folder = pathlib.Path(scidata.__file__).parent / "shard"
names = sorted(p.stem for p in (folder / "ops").glob("*.py") if p.stem != "__init__")
keeps = re.compile("comm")  # modules that make operators, which are made but once

def table(order):
    for name in [name for name in sys.modules if name.startswith("scidata.shard") and not keeps.search(name)]:
        del sys.modules[name]
    for package in ("scidata.shard", "scidata.shard.ops"):  # without what they import themselves
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(folder / package.removeprefix("scidata.shard").strip("."))]
    for name in order:
        importlib.import_module(f"scidata.shard.ops.{name}")
    entries = importlib.import_module("scidata.shard.op_table")
    filled = importlib.import_module("scidata.shard.graphs.targets")._ACCEPT_FILLED
    return {
        entries.op_name(f): (h.__module__, h.__qualname__, h in entries.KEEPS_REPLICATED, h in filled)
        for f, h in entries.HANDLERS.items()
    }

first = table(names)
for seed in range(8):
    random.Random(seed).shuffle(names)
    assert table(names) == first, names
print(json.dumps(first))
"""


def test_the_table_does_not_depend_on_the_order_of_imports():
    """Nor does a function get a second handler: ``register_op`` raises, and nothing else fills the table."""
    text = subprocess.run([sys.executable, "-c", IN_ANY_ORDER], check=True, capture_output=True, text=True).stdout
    found = {name: handler[:2] for name, handler in json.loads(text).items()}
    assert found == {op_name(f): [h.__module__, h.__qualname__] for f, h in HANDLERS.items()}
    folder = Path(scidata.__file__).parent
    writers = [p.name for p in folder.rglob("*.py") if re.search(r"HANDLERS(\[.*\] = |\.\w*(set|up))", p.read_text())]
    assert writers == ["op_table.py"]


def test_entries_are_added_once_and_found_by_name():
    assert "torch.Tensor.add" in shard_ops()
    assert find("__eq__") == [torch.Tensor.__eq__]
    with pytest.raises(LookupError, match="no_such_function"):
        find("add no_such_function")
    with pytest.raises(ValueError, match=r"torch\.add already has a handler"):
        register_op(torch.add)(lambda func, types, args, kwargs: None)
    with fake_group(2), contextlib.ExitStack() as stack:
        stack.callback(HANDLERS.pop, torch.nonzero_static)
        register_op(torch.nonzero_static)(lambda func, types, args, kwargs: "mine")
        assert torch.nonzero_static(sharded(), size=1) == "mine"


def test_arguments_have_all_of_torchs_names_and_out():
    with fake_group(2):
        x = sharded()
        assert torch.softmax(x, axis=1).shape == torch.softmax(input=x, dim=1).shape == (4, 4)
        assert x.sum(axis=1, keepdims=True).shape == (4, 1)
        assert torch.cat([x, x], axis=1).shape == (4, 8)
        assert torch.swapaxes(x, axis0=0, axis1=1).shape == torch.swapdims(x, dim0=0, dim1=1).shape
        assert torch.topk(x, k=2, axis=1).values.shape == (4, 2)
        assert torch.sum(x, 1, out=(out := torch.empty(4))) is out
        with pytest.raises(UnsupportedShardOp, match=r"out= has shape \(2, 4\), not \(2, 4, 4\)"):
            torch.stack([x, x], out=torch.empty(2, 4))
