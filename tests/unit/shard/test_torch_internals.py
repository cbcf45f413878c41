"""Each private name of torch does what it is used for; a torch that drops or changes one fails here, by name.

None is used anywhere else, and importing scidata patches nothing.
"""

import _ctypes
import ast
import functools
import inspect
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import scidata
from scidata.device_mesh import torch_internals as of_groups
from scidata.errors import ConfigError, UnsupportedShardOp
from scidata.shard import ShardSpec, ShardTensor
from scidata.shard import torch_internals as of_tensors
from scidata.shard.compile import torch_internals as of_graphs
from scidata.shard.op_table import find
from scidata.testing import fake_group

ROOT = Path(scidata.__file__).parent
HOMES = {ROOT / f"{folder}/torch_internals.py" for folder in ("shard", "shard/compile", "device_mesh")}


def sharded(**options):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    return ShardTensor(torch.rand(2, 4, **options), ShardSpec.even(mesh, [Shard(0)], (4, 4)))


# -- where they are used -----------------------------------------------------------------------------------------------


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def attributes(tree):
    """Private attributes of other things than ``self`` and ``cls``."""
    for node in ast.walk(tree):
        own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not own:
            yield node.attr


def own_names(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def from_private_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            if any(map(is_private, [*node.module.split("."), *(alias.name for alias in node.names)])):
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("torch") and "._" in a.name)
        elif isinstance(node, ast.Constant) and re.match(r"torch\.([a-z.]+\.)?_[a-z]", str(node.value)):
            yield str(node.value)


def test_private_names_of_torch_are_used_in_three_files():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}
    ours = {name for path, tree in trees.items() if path not in HOMES for name in own_names(tree)}
    theirs = {name for path in HOMES for name in attributes(trees[path])}
    assert {"_version", "_C", "_world", "_get_backend"} <= theirs
    public_of_python = {"_exit", "_current_frames", "_fields", "_asdict"}
    found = {}
    for path, tree in trees.items():
        if path in HOMES or not {"torch", "dist"} & {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}:
            continue
        used = [name for name in attributes(tree) if (name in theirs - ours or name not in ours | public_of_python)]
        if used or list(from_private_modules(tree)):
            found[path.relative_to(ROOT).as_posix()] = used + list(from_private_modules(tree))
    assert not found


PATCHED = """
import pkgutil, importlib, sys, logging, atexit
import torch
import torch.distributed as dist
from torch.autograd import Function
apply = Function.__dict__["apply"]
before = atexit._ncallbacks()
import torch.utils.data, torch.distributed.tensor, torch.nn.parallel
before = atexit._ncallbacks()
import scidata, scidata.shard, scidata.loader.data_loader, scidata.shard.parallel, scidata.data.open_dataset
from scidata.testing import fake_group
for folder in ("shard", "loader", "device_mesh", "data", "interop"):
    for found in pkgutil.walk_packages([f"{scidata.__path__[0]}/{folder}"], f"scidata.{folder}."):
        if found.name != "scidata.shard.parallel.pipeline":  # for pipelines alone: torch imports dynamo for them
            importlib.import_module(found.name)
assert Function.__dict__["apply"] is apply
assert "data" not in vars(torch.nn.Parameter)
assert torch.utils.checkpoint._make_saved_tensor is torch._C._autograd._make_saved_tensor
assert sys.excepthook is sys.__excepthook__
assert dist.c10d_logger._c10d_logger.filters == []
assert "torch._dynamo" not in sys.modules
from scidata.shard import ShardSpec, ShardTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
with fake_group(2):
    mesh = init_device_mesh("cpu", (2,))
    for _ in range(3):
        ShardTensor(torch.rand(2, 4), ShardSpec.even(mesh, [Shard(0)], (4, 4)))
checked = Function.__dict__["apply"].__func__
assert "scidata" in checked.__code__.co_filename
assert any(cell.cell_contents is apply for cell in checked.__closure__)  # replaced once
assert torch.nn.Parameter.data.fget.__self__ is torch.Tensor.data
assert "scidata" in torch.utils.checkpoint._make_saved_tensor.__code__.co_filename
"""


def test_nothing_is_patched_by_importing_and_once_by_the_first_tensor():
    subprocess.run([sys.executable, "-c", PATCHED], check=True)


# -- of tensors --------------------------------------------------------------------------------------------------------


def test_pytree():
    flat, tree = of_tensors.tree_flatten(([1, {"a": 2}], (3,)))
    assert flat == [1, 2, 3]
    assert of_tensors.tree_unflatten([4, 5, 6], tree) == ([4, {"a": 5}], (6,))
    assert of_tensors.tree_leaves({"a": [1, (2,)]}) == [1, 2]
    assert of_tensors.tree_map_only(int, lambda n: -n, [1, "x", (2.0, 3)]) == [-1, "x", (2.0, -3)]


def test_make_wrapper_has_a_shape_and_no_memory():
    size = torch.Size((3, 10**12))
    x = of_tensors.make_wrapper(ShardTensor, size, dtype=torch.float16, device="cpu", requires_grad=False)
    assert type(x) is ShardTensor
    with of_tensors.DisableTorchFunctionSubclass():
        assert torch.Tensor.size(x) == size
        assert torch.Tensor.dtype.__get__(x) == torch.float16


def test_forbid_address():
    x = torch.zeros(2)
    x.data_ptr()
    of_tensors.forbid_address(x)
    with pytest.raises(RuntimeError):
        x.data_ptr()


def test_version_of_counts_writes_also_to_views():
    x = torch.zeros(3)
    assert of_tensors.version_of(x) == 0
    x[1:].add_(1)
    assert of_tensors.version_of(x) == 1
    with torch.inference_mode():
        assert of_tensors.version_of(torch.zeros(1)) == -1


def test_shares_memory():
    x, nothing = torch.zeros(4), torch.zeros(0)
    assert of_tensors.shares_memory(x, x[2:].view(2, 1))
    assert not of_tensors.shares_memory(x, x.clone())
    assert of_tensors.shares_memory(nothing, nothing.view(0, 3))
    assert not of_tensors.shares_memory(nothing, torch.zeros(0))


def test_disable_torch_function_subclass():
    with fake_group(2):
        x = sharded()
        with of_tensors.DisableTorchFunctionSubclass():
            assert torch.Tensor.size(x) == (4, 4)  # by the wrapper itself
            with pytest.raises(UnsupportedShardOp, match="dispatcher"):
                torch.sin(x)


def test_nested_from_mask_is_what_a_transformer_asks():
    seen = []

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1).eval()
    mask = torch.tensor([[False, False, True]])
    with torch.no_grad():
        encoder(torch.rand(1, 3, 4).as_subclass(Asked), src_key_padding_mask=mask)
    assert of_tensors.nested_from_mask in seen


def test_flash_attention_returns_the_log_sum_exp_and_takes_it_back():
    q, k, v = (torch.rand(1, 2, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v)
    weights = torch.rand_like(expected)
    grads = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = of_tensors.flash_cpu(q, k, v, 0.0, False, attn_mask=None, scale=None)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, (q @ k.mT / 8**0.5).logsumexp(-1).to(lse.dtype))
    found = of_tensors.flash_cpu_backward(weights, q, k, v, out, lse, 0.0, False, attn_mask=None, scale=None)
    for one, other in zip(found, grads, strict=True):
        torch.testing.assert_close(one, other)


def test_ends_of_sorted_numbers_are_those_of_sparse_rows():
    rows = torch.tensor([0, 0, 2, 3, 3, 3])
    assert of_tensors.coo_to_csr(rows, 5).tolist() == [0, 2, 2, 3, 6, 6]
    assert of_tensors.coo_to_csr(rows, 4, out_int32=True).dtype == torch.int32


def test_kernels_are_operators_and_their_overloads():
    assert of_tensors.kernels("slice", "Tensor") == [torch.ops.aten.slice, torch.ops.aten.slice.Tensor]
    assert of_tensors.kernels("_safe_softmax")[1](torch.full((2,), -torch.inf), 0).tolist() == [0, 0]


def test_flash_attention_of_devices_takes_the_arguments_that_it_is_given():
    """Without a GPU, its signature is what can be seen."""
    names = [argument.name for argument in of_tensors.flash.default._schema.arguments]
    assert names == ["query", "key", "value", "dropout_p", "is_causal", "return_debug_mask", "scale"]
    names = [argument.name for argument in of_tensors.flash_backward.default._schema.arguments]
    assert names[:6] == ["grad_out", "query", "key", "value", "out", "logsumexp"]
    assert names[6:12] == ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
    assert names[12:] == ["philox_seed", "philox_offset", "scale"]


@pytest.mark.parametrize(
    "function",
    [F.lp_pool1d, F.gaussian_nll_loss, F.triplet_margin_with_distance_loss, F.multilabel_soft_margin_loss],
)
def test_body_of_is_the_function_without_its_look_for_overrides(function):
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            assert func is not function
            return super().__torch_function__(func, types, args, kwargs)

    args = [torch.rand(3, 8), 2, 2] if function is F.lp_pool1d else [torch.rand(3, 8) for _ in range(3)]
    given = [x.as_subclass(Refusing) if isinstance(x, torch.Tensor) else x for x in args]
    assert torch.equal(of_tensors.body_of(function)(*given).as_subclass(torch.Tensor), function(*args))


@pytest.mark.parametrize("function", [torch.hsplit, torch.vstack, torch.take_along_dim, torch.linalg.norm])
def test_definition_of_calls_functions_that_meet_overrides(function):
    called = []

    class Noting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            called.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    x = torch.rand(4, 6)
    args = {torch.vstack: [[x, x]], torch.take_along_dim: [x, torch.tensor([[1], [5], [0], [2]]), 1]}
    args = args.get(function, [x] if function is torch.linalg.norm else [x, 2])
    given = of_tensors.tree_map_only(torch.Tensor, lambda t: t.as_subclass(Noting), args)
    found, wanted = of_tensors.definition_of(function)(*given), function(*args)
    assert function not in called
    assert all(map(torch.equal, found, wanted)) if isinstance(wanted, tuple) else torch.equal(found, wanted)
    assert any(f in called for f in (torch.tensor_split, torch.cat, torch.gather, torch.linalg.vector_norm))


def test_unpooled_extents_are_those_of_unpooling():
    assert of_tensors.unpooled_extents(torch.rand(1, 3, 4), (2, 2), (2, 3), (0, 0), None) == [6, 11]


def test_unpatched_is_torchs_own_where_another_package_has_put_one_in_its_place(monkeypatch):
    own = torch.narrow
    assert find("narrow", namespaces=(torch, torch.Tensor)) == [own, torch.Tensor.narrow]

    def narrow(*args):
        return own(*args)

    monkeypatch.setattr(torch, "narrow", narrow)
    assert of_tensors.unpatched("narrow") is own
    assert find("narrow", namespaces=(torch, torch.Tensor)) == [own, torch.Tensor.narrow]


def test_copy_each():
    targets = [torch.zeros(2), torch.zeros(1, 3)]
    views = [x[:1] for x in targets]
    of_tensors.copy_each(targets, [torch.ones(2), torch.full((1, 3), 2.0)])
    assert [x.tolist() for x in targets] == [[1, 1], [[2, 2, 2]]]
    assert views[0].tolist() == [1]


def test_batch_norm_is_the_base_of_all():
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        assert issubclass(kind, of_tensors.BatchNorm)
    assert not issubclass(nn.InstanceNorm1d, of_tensors.BatchNorm)


def test_parameters_of_takes_plain_tensors():
    module, other = nn.Linear(1, 1), torch.full((1, 1), 3.0)
    own = of_tensors.parameters_of(module)
    assert list(own) == ["weight", "bias"]
    own["weight"] = other
    assert module.weight is other
    assert (module(torch.ones(1, 1)) - module.bias).item() == 3


def test_a_recurrent_module_sees_changed_parameters_by_itself():
    module = nn.GRU(1, 1, num_layers=2)
    expected = module(torch.ones(1, 1, 1))[0].item()
    own = of_tensors.parameters_of(module)
    kept = dict(own)
    own.update({name: torch.zeros_like(x) for name, x in kept.items()})
    assert module(torch.ones(1, 1, 1))[0].item() == 0
    own.update(kept)
    assert module(torch.ones(1, 1, 1))[0].item() == expected != 0


def test_buffers_of_has_those_that_are_none():
    assert of_tensors.buffers_of(nn.BatchNorm1d(2, track_running_stats=False)).keys() == {
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }


def test_compiled_from():
    module = nn.Linear(1, 1)
    assert of_tensors.compiled_from(module) is module
    assert of_tensors.compiled_from(torch.compile(module)) is module


def test_backward_pass_and_its_end():
    said = []

    def hook(grad):
        said.append(of_tensors.backward_pass())
        of_tensors.when_backward_ends(lambda: said.append("end"))

    x = torch.ones(1, requires_grad=True)
    y = torch.ones(1, requires_grad=True)
    (x * y).register_hook(hook)
    z = x * y
    z.register_hook(hook)
    y.register_post_accumulate_grad_hook(lambda _: said.append("accumulated"))
    assert of_tensors.backward_pass() == -1
    z.sum().backward(retain_graph=True)
    assert isinstance(said[0], int)
    assert said[0] >= 0
    assert said[1:] == ["accumulated", "end"]
    z.sum().backward()
    assert said[3] != said[0]  # another pass


def test_is_accumulated_tells_backward_from_grad():
    said = []

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            said.append(of_tensors.is_accumulated(ctx))
            return grad

    x = torch.ones(1, requires_grad=True)
    Through.apply(x).sum().backward()
    torch.autograd.grad(Through.apply(x).sum(), x)
    assert said == [True, False]
    with fake_group(2):
        leaf = DTensor.from_local(torch.ones(1), init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
        Through.apply(leaf.to_local()).sum().backward()
        torch.autograd.grad(Through.apply(leaf.to_local()).sum(), leaf)
    assert said[2:] == [True, False]

    class Inside(Through):
        @staticmethod
        def backward(ctx, grad):
            nodes = [each for each, _ in ctx.next_functions]
            needed = [of_tensors.is_needed(node) for node in nodes]
            said.append((needed, of_tensors.keeps_graph()))
            known = of_tensors.accumulating(node for node, each in zip(nodes, needed, strict=True) if each)
            with known, torch.enable_grad():
                torch.autograd.grad(Through.apply(x).sum(), x)
            return grad, grad

        @staticmethod
        def forward(ctx, x, y):
            return x.view_as(x)

    del said[:]
    y = torch.ones(1, requires_grad=True)
    torch.autograd.grad(Inside.apply(x, y).sum(), x)
    Inside.apply(x, y).sum().backward(inputs=[y], retain_graph=True)
    assert said == [([True, False], False), True, ([False, True], True), False]


def test_functions_that_get_a_sharded_tensor_are_handed_over():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.to_local() * 2 if isinstance(x, ShardTensor) else x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    with fake_group(2):
        x = sharded()
        assert torch.equal(Twice.apply(x), x.to_local() * 2)
        Twice.apply(x.requires_grad_()).sum().backward()
        assert torch.equal(x.grad.to_local(), torch.full((2, 4), 2.0))
        with torch.no_grad():
            assert not Twice.apply(x).requires_grad
    plain = torch.ones(2, requires_grad=True)
    Twice.apply(plain).sum().backward()
    assert plain.grad.tolist() == [2, 2]


HELD = torch.ones(2)


def test_what_functions_hold_is_reached():
    def held(function, *others):
        return [x for x in of_tensors.reached((function, *others)) if isinstance(x, torch.Tensor)]

    x, y = torch.ones(1), torch.zeros(1)

    def inner(t, k=y):
        return t * x

    assert held(torch.func.grad(inner)) == [x, y] or held(torch.func.grad(inner)) == [y, x]
    assert held(functools.partial(print, x), {"y": [y]})[0] in (x, y)
    assert held(lambda t: (lambda: t + HELD)())[0] is HELD
    assert not held(lambda t: t)
    with fake_group(2):
        part = sharded()
        assert of_tensors.sees((torch.func.grad(lambda t: (t * part).sum()),), ShardTensor)
        assert not of_tensors.sees((inner, x), ShardTensor)


def test_transforms_of_functions():
    assert not of_tensors.is_transforming()
    assert torch.vmap(lambda x: x * of_tensors.is_transforming())(torch.ones(2)).tolist() == [1, 1]
    assert not of_tensors.has_dual_level()
    with torch.autograd.forward_ad.dual_level():
        assert of_tensors.has_dual_level()
    assert of_tensors.slice_argnums((1, 2, 3), (-1, 0), as_tuple=False) == (3, 1)
    rows, dims, flat, _ = of_tensors.mapped_inputs((-1, None), (torch.ones(2, 3), 5), print)
    assert (rows, dims, flat[1]) == (3, [1, None], 5)
    assert of_tensors.flat_out_dims((1,), torch.ones(2)) == [1]
    assert of_tensors.flat_out_dims({"a": 0, "b": None}, {"a": 1, "b": 2}) == [0, None]
    with pytest.raises(ValueError, match="structure"):
        of_tensors.flat_out_dims((0, 1), torch.ones(2))


def test_inferring_makes_tensors_without_values():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError("modes of the user's see nothing")

    with Seen(), of_tensors.inferring(fake=False):
        assert torch.empty(4, 3, device="meta").t().stride() == (1, 3)
    with Seen(), of_tensors.inferring(fake=True):
        x = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
        y = F.conv2d(x, torch.empty(5, 3, 1, 1))
    assert y.device.type == "cpu"
    assert y.stride() == (80, 1, 20, 5)
    with pytest.raises(RuntimeError):
        y.untyped_storage().tolist()


COMPILED = """
import sys, torch
if BEFORE:
    import torch._dynamo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from scidata.shard import ShardTensor
from scidata.shard.torch_internals import keep_out_of_graphs
from scidata.testing import fake_group

traced = []
def backend(graph, inputs):
    traced.append(graph)
    return graph.forward

def step(x):
    return x.to_local() * 2

with fake_group(2):
    mesh = init_device_mesh("cpu", (2,))
    x = ShardTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], sharding_shapes={0: [(2, 4)] * 2})
    assert ("torch._dynamo" in sys.modules) is BEFORE
    compiled, y = torch.compile(step, backend=backend), x + 0
    assert compiled(y).tolist() == [[2.0] * 4] * 2
assert torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2)).tolist() == [2, 2]
assert not any("scidata" in str(node.stack_trace) for graph in traced for node in graph.graph.nodes)
assert torch._dynamo.trace_rules.lookup(ShardTensor.to_local) is torch._dynamo.variables.SkipFunctionVariable
"""


@pytest.mark.parametrize("before", [True, False], ids=["loaded before the first tensor", "loaded after it"])
def test_dynamo_runs_this_package_as_it_is(before):
    subprocess.run([sys.executable, "-c", COMPILED.replace("BEFORE", str(before))], check=True)


def test_flatten_mesh_is_one_axis_of_the_same_ranks():
    with fake_group(8, rank=3):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "h", "w"))
        flat = of_tensors.flatten_mesh(mesh["h", "w"])
        assert flat.mesh.tolist() == [0, 1, 2, 3]
        assert flat.get_group().size() == 4
        assert of_tensors.flatten_mesh(mesh["h", "w"]).get_group() is flat.get_group()


def test_root_mesh_is_what_both_were_cut_out_of():
    with fake_group(8, rank=3):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "domain", "tp"))
        assert of_tensors.root_mesh(mesh["tp"]) == of_tensors.root_mesh(mesh["dp", "domain"]) == mesh
        assert of_tensors.root_mesh(mesh) == mesh


def test_from_local_of_a_dtensor_applies_a_function():
    given = []
    with fake_group(2), pytest.MonkeyPatch.context() as patch:
        mesh = init_device_mesh("cpu", (2,))
        patch.setattr(of_tensors.FromTorchTensor, "apply", lambda *args: given.append(args))
        x = torch.ones(2)
        DTensor.from_local(x, mesh, [Shard(-1)])
    assert given[0][:4] == (x, mesh, (Shard(0),), False)
    assert given[0][4:] == (None, None, None)  # shape, stride, grad_placements


# -- of graphs ---------------------------------------------------------------------------------------------------------


def test_has_function_mode():
    assert not of_graphs.has_function_mode()
    with torch.overrides.TorchFunctionMode():
        assert of_graphs.has_function_mode()


def test_tensors_of_tracers_have_no_values():
    from torch.fx.experimental.proxy_tensor import make_fx

    found = []
    held = torch.ones(2)

    def function(x):
        found.append((of_tensors.has_values(x), of_tensors.has_values(held)))
        return x + held

    make_fx(torch.func.functionalize(function), tracing_mode="fake", _allow_non_fake_inputs=True)(torch.ones(2))
    with FakeTensorMode():
        found.append((of_tensors.has_values(torch.ones(2)), of_tensors.has_values(held)))
    assert found == [(False, True)] * 2


def test_constants_are_computed_at_once_and_not_written_to():
    held, rows = torch.tensor([3, 1]), torch.arange(4)

    def function(x, constants):
        with constants:
            made = held[:1].clone().add_(1) + torch.arange(1)
            return x * made.item(), rows[1:], torch.rand(2)

    for folds in (True, False):
        constants = of_graphs.Constants(folds=folds)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            x = mode.from_tensor(torch.ones(2))
            if not folds:
                with pytest.raises(DataDependentOutputException):
                    function(x, constants)
                with constants, pytest.raises(TypeError, match="writes to a tensor that is neither"):
                    held.add_(1)
                continue
            scaled, part, drawn = function(x, constants)
            with constants, pytest.raises(TypeError, match="writes to a tensor"):
                part.add_(1)
        assert not of_tensors.has_values(scaled)
        assert not of_tensors.has_values(drawn)
        assert part.tolist() == [1, 2, 3]
        assert {of_tensors.storage_of(x) for x, _ in constants.read.values()} == {
            *map(of_tensors.storage_of, (held, rows))
        }
    assert held.tolist() == [3, 1]


def test_unseen_leaves_modes():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError("modes of the user's see nothing")

    with Seen():
        with of_tensors.unseen():
            assert (torch.ones(2) + 1).tolist() == [2, 2]
        with pytest.raises(AssertionError):
            torch.ones(2)


def test_compiled_call_comes_first_and_the_eager_one_calls_hooks():
    module, called = nn.Linear(1, 1), []
    assert of_graphs.compiled_call(module) is None
    assert not of_graphs.has_hooks(module)
    module.register_forward_hook(lambda *_: called.append("hook"))
    eager = of_graphs.eager_call(module)

    def call(x):
        called.append("compiled")
        return eager(x)

    of_graphs.set_compiled_call(module, call)
    assert of_graphs.compiled_call(module) is call
    module(torch.ones(1))
    assert called == ["compiled", "hook"]


def test_called_module_is_that_of_module_compile(monkeypatch):
    module, given = nn.Linear(1, 1), []
    monkeypatch.setattr(torch, "compile", lambda call, **_: given.append(call))
    module.compile()
    assert of_graphs.called_module(given[0]) is module
    assert of_graphs.called_module(module.forward) is None
    assert of_graphs.called_module(len) is None


def test_wrapped_is_what_torch_compile_returns():
    module = nn.Linear(1, 1)

    def call(x):
        return x + 1

    found = of_graphs.wrapped(module, lambda _: call)
    assert type(found) is type(torch.compile(module))
    assert found(torch.ones(1)) == 2
    assert of_graphs.forward_of_wrapped(found) is call
    assert of_graphs.forward_of_wrapped(module) is None


def test_checkpoints_are_run_again_as_in_their_forward():
    seen = []

    def function(x):
        if (found := of_graphs.checkpoint()) is None:
            seen.append(None)
        elif (before := found.next_of(function)) is None:
            found.note(function, f"graph {len(found.ran)}")
        else:
            seen.append(before.graph)
        return x.sin()

    function(torch.ones(1))
    x, kept = torch.ones(1, requires_grad=True), {"use_reentrant": False}
    torch.utils.checkpoint.checkpoint(lambda x: function(function(x)), x, **kept).backward()
    torch.utils.checkpoint.checkpoint(
        lambda x: torch.utils.checkpoint.checkpoint(function, x, **kept), x, **kept
    ).backward()
    with torch.autograd.graph.save_on_cpu():
        function(torch.ones(1))
    assert seen == [None, "graph 1", "graph 2", "graph 1", None]


def test_watch_backward_is_asked_before_the_graph():
    def function(x, written):
        written.add_(1)
        return x.sin(), x.cos(), written + 1

    def compiler(gm, inputs):
        return of_graphs.make_boxed(gm.forward)

    run = of_graphs.captured_function(function, compiler, compiler, lambda _: None, lambda *_: None, fuses=False)
    x, asked = torch.ones(1, requires_grad=True), []

    def handle(node, grads):
        asked.append([grads[i] for i in of_graphs.results_of_graph(node).values()])
        return None if None not in asked[-1] else (torch.full((1,), 7.0), None)

    for _ in range(2):
        found = run(x, torch.zeros(1))
        node = of_graphs.graph_of(found[0])
        assert of_graphs.graph_of(x.sin()) is None
        assert of_graphs.graph_of(found[2]) is None
        assert [*of_graphs.results_of_graph(node)] == [0, 1]
        of_graphs.watch_backward(node, handle)
        assert torch.autograd.grad(found[0], x, retain_graph=True)[0] == 7
        assert torch.autograd.grad(sum(found[:2]), x)[0] == x.cos() - x.sin()
    assert asked == 2 * [[torch.ones(1), None], [torch.ones(1), torch.ones(1)]]
    alias = of_graphs.captured_function(lambda x: (x.view(-1),), *2 * [compiler], id, lambda *_: None, fuses=False)
    assert of_graphs.graph_of(alias(x)[0]) is None


def test_draws():
    assert of_graphs.draws(torch.ops.aten.native_dropout.default)
    assert not of_graphs.draws(torch.ops.aten.sin.default)
    assert not of_graphs.draws("output")


def test_computes():
    aten = torch.ops.aten
    targets = aten.sin.default, aten.view.default, aten._unsafe_view.default, "output"
    assert [of_graphs.computes(x) for x in targets] == [True, False, False, False]


def test_make_boxed_leaves_functions_of_one_list():
    boxed = of_graphs.boxed(lambda inputs: [sum(inputs)])
    assert of_graphs.make_boxed(boxed) is boxed
    assert of_graphs.make_boxed(lambda x, y: x + y)([1, 2]) == 3


@pytest.mark.parametrize(
    "register",
    [
        lambda module: module.register_forward_hook(lambda *_: None),
        lambda module: module.register_forward_hook(lambda *_: None, always_call=True),
        lambda module: module.register_forward_hook(lambda *_, **__: None, with_kwargs=True),
        lambda module: module.register_forward_pre_hook(lambda *_: None),
        lambda module: module.register_full_backward_hook(lambda *_: None),
        lambda module: module.register_full_backward_pre_hook(lambda *_: None),
    ],
)
def test_has_hooks(register):
    module = nn.Linear(1, 1)
    assert not of_graphs.has_hooks(module)
    handle = register(module)
    assert of_graphs.has_hooks(module)
    handle.remove()
    assert not of_graphs.has_hooks(module)


def test_has_global_hooks():
    assert not of_graphs.has_global_hooks()
    for name in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        handle = getattr(nn.modules.module, f"register_module_{name}")(lambda *_: None)
        assert of_graphs.has_global_hooks()
        handle.remove()
        assert not of_graphs.has_global_hooks()


def test_captured_function_runs_graphs_forward_and_backward():
    graphs, parted, values = [], [], torch.tensor([2.0, 3.0])

    def function(x):
        graphs.append("captured")
        return (x.sin() * values,)

    def compiler(gm, inputs):
        graphs.append(gm)
        return of_graphs.make_boxed(gm.forward)

    with of_graphs.tracing():
        run = of_graphs.captured_function(function, *2 * [compiler], id, lambda *both: parted.extend(both), fuses=False)
        x = torch.ones(2, requires_grad=True)
        assert torch.equal(run(x)[0], x.sin() * values)
    num = len(graphs)
    grad = torch.autograd.grad(run(x)[0].sum(), x)[0]
    assert torch.equal(grad, x.cos() * values)
    assert len(graphs) - num <= 1  # the backward graph, compiled when it is first needed
    assert len(parted) == 2
    assert any(getattr(parted[0], node.target) is values for node in parted[0].graph.nodes if node.op == "get_attr")


def test_tracing_captures_backward_without_autocast():
    seen = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            seen.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
            return grad

    def compiler(gm, inputs):
        return of_graphs.make_boxed(gm.forward)

    with torch.autocast("cpu", dtype=torch.bfloat16), of_graphs.tracing():
        run = of_graphs.captured_function(
            lambda x: (Noting.apply(x),), compiler, compiler, lambda _: None, lambda *_: None, fuses=False
        )
        run(torch.ones(2, requires_grad=True))
    assert seen == [(False, False)]
    assert torch.is_autocast_cache_enabled()


def test_inductor_knows_modes():
    assert all(map(callable, of_graphs.inductor("reduce-overhead", {"max_autotune": False})))
    with pytest.raises(ConfigError, match="mode"):
        of_graphs.inductor("fastest", None)


def test_storage_of_tells_empty_tensors_apart():
    x, nothing = torch.zeros(4), torch.zeros(0)
    assert of_tensors.storage_of(x) == of_tensors.storage_of(x[2:])
    assert of_tensors.storage_of(nothing) != of_tensors.storage_of(torch.zeros(0))


def test_memory_facts():
    x = torch.zeros(2, 3, dtype=torch.complex64)
    with torch.inference_mode():
        inferred = torch.zeros_like(x)
    others = [x.t(), x.clone().t().contiguous().t(), x.to(torch.complex128), x.to("meta"), x.clone().requires_grad_()]
    others += [x.conj(), x.conj().imag, inferred, nn.Parameter(x, requires_grad=False)]
    found = [of_graphs.memory_facts(each) for each in [x, *others]]
    assert len(set(found)) == len(found)
    assert of_graphs.memory_facts(x.clone()) == found[0]


# -- of process groups and loaders -------------------------------------------------------------------------------------


def test_process_groups_are_all_of_the_process():
    with fake_group(4):
        made = dist.new_group([0, 1])
        assert of_groups.process_groups() == [dist.group.WORLD, made]


def test_backends_can_be_asked_for_and_aborted_together():
    """Without a GPU, what can be seen is that the methods are there."""
    assert callable(dist.ProcessGroup._get_backend)
    if dist.is_nccl_available():
        assert all(callable(getattr(dist.ProcessGroupNCCL, name)) for name in ("_group_start", "_group_end", "abort"))


def test_the_logger_of_collectives_hears_of_an_error_in_its_handler():
    logger, records = of_groups.collectives_logger(), []

    class Seen(logging.Filter):
        def filter(self, record):
            records.append((threading.get_ident(), type(sys.exc_info()[1])))
            return True

    seen = Seen()
    logger.addFilter(seen)
    try:
        with fake_group(2), pytest.raises(TypeError):
            dist.all_reduce("no tensor")
    finally:
        logger.removeFilter(seen)
    assert records == [(threading.get_ident(), TypeError)]


def test_collectives_run_in_the_files_that_are_named():
    assert inspect.getfile(inspect.unwrap(dist.all_reduce)).startswith(of_groups.COLLECTIVES)
    assert inspect.getfile(inspect.unwrap(dist.all_reduce)).startswith(of_groups.HANDLERS_OF_ERRORS)
    assert dist.all_reduce.__code__.co_filename.startswith(of_groups.HANDLERS_OF_ERRORS)  # its wrapper
    assert all(Path(file).is_file() for file in of_groups.HANDLERS_OF_ERRORS)
    assert torch.autograd.graph._engine_run_backward.__code__.co_filename.startswith(of_groups.HANDLERS_OF_ERRORS)
    assert torch.ops.aten.add.__call__.__func__.__code__.co_filename.startswith(of_groups.COLLECTIVES)


WORKER = """
import torch.utils.data
from scidata.device_mesh.torch_internals import set_worker_info
assert torch.utils.data.get_worker_info() is None
set_worker_info([1, 2], number=1, num_workers=3, seed=7)
info = torch.utils.data.get_worker_info()
assert (info.id, info.num_workers, info.seed, info.dataset) == (1, 3, 7, [1, 2])
"""


def test_set_worker_info_is_what_get_worker_info_returns():
    subprocess.run([sys.executable, "-c", WORKER], check=True)


def test_shared_storage_is_shared():
    storage = of_groups.shared_storage(8)
    assert storage.is_shared()
    assert storage.nbytes() == 8
    x = torch.empty(0, dtype=torch.float64).set_(storage)
    x.fill_(3)
    assert np.asarray(x).tolist() == [3.0]


def test_fake_store():
    with fake_group(3, rank=2):
        assert (dist.get_rank(), dist.get_world_size()) == (2, 3)
        dist.all_reduce(torch.ones(1))  # of no other rank


def test_dynamo_is_what_an_optimizer_imports():
    program = f"import sys, torch\np = torch.nn.Parameter(torch.ones(1))\nprint({of_groups.DYNAMO!r} in sys.modules)\n"
    program += f"torch.optim.SGD([p], 0.1).step()\nprint({of_groups.DYNAMO!r} in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120)
    assert ran.stdout.split() == ["False", "True"]


def test_a_library_that_was_cut_raises_before_it_is_loaded(tmp_path):
    from torch._inductor.codecache import CppCodeCache

    of_graphs.check_libraries()
    whole, path = Path(_ctypes.__file__).read_bytes(), tmp_path / "kernel.so"
    for size in (len(whole) // 2, len(whole) - 1, 100, 10):
        path.write_bytes(whole[:size])
        with pytest.raises(OSError, match="file too short"):
            CppCodeCache._load_library(str(path), "key")
    path.write_bytes(whole)
    assert CppCodeCache._load_library(str(path), "key").key == "key"
