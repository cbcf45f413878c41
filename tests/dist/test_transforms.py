"""torch.func on shards: derivatives and maps give what one process gives, or raise, on all ranks alike."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec, ShardTensor
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of

NET = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def u(parameters, x):
    return functional_call(NET, parameters, (x,))


def parameters_of(w):
    return {"0.weight": w[:, :3], "0.bias": w[:, 3], "2.weight": w[:1], "2.bias": w[0, :1]}


def pulled(result, *cotangents):
    """Call what vjp returned several times."""
    return [result[0], *[result[1](each) for each in cotangents]]


def loss(parameters, x):
    return u(parameters, x).square().mean()


def laplacian(parameters, point):
    return torch.trace(hessian(lambda q: u(parameters, q).squeeze())(point))


def residual(parameters, x):
    """Of a physics-informed network: second derivatives of all points in one sum."""
    slope = grad(lambda t: u(parameters, t).sum())
    return (grad(lambda t: slope(t).sum())(x) + x.sin()).square().mean()


def normed(t):
    """In one process by hand: the gradients of torch's own tangents of a layer norm are wrong."""
    if isinstance(t, ShardTensor):
        return torch.nn.functional.layer_norm(t, t.shape)
    mean = t.mean()
    return (t - mean) * torch.rsqrt((t - mean).square().mean() + 1e-5)


CASES = {
    "grad": lambda x, w: grad(lambda t: (t * w[0, :3]).sin().square().sum())(x),
    "grad by plain": lambda x, w: grad(lambda v: (x * v[0, :3]).sin().mean())(w),
    "grad by parameters": lambda x, w: grad(loss)(parameters_of(w), x),
    "grad by several": lambda x, w: grad(lambda t, v: (t * v[0, :3]).sin().sum(), argnums=(1, -2))(x, w),
    "grad and value": lambda x, w: grad_and_value(lambda t, v=None: ((t * v[0, :3]).sin().sum(), (t * 2, v)), has_aux=True)(x, v=w),
    "grad of what it does not depend on": lambda x, w: grad(lambda t, v: v.sum(), argnums=(0, 1))(x, w),
    "grad of a constant": lambda x, w: grad(lambda t: torch.zeros((), dtype=t.dtype))(x),
    "grad of grad": lambda x, w: grad(lambda t: (t * grad(lambda s: (s.sin() * t * w[0, :3]).sum())(t * 2)).sum())(x),
    "residual": lambda x, w: list(grad(residual)(parameters_of(w), x).values())[:3],  # the last has none
    "vjp": lambda x, w: pulled(vjp(lambda t, v: t.flip(0) * v[0, :3], x, w), torch.ones_like(x), x * 2, torch.ones(x.shape).to(x)),
    "vjp of a dict": lambda x, w: pulled(vjp(lambda t: {"a": t.flip(0) * w[0, :3], "b": t.sum()}, x), {"a": x, "b": w[0, 0]}),
    "jvp": lambda x, w: jvp(lambda t, v: (t.sin() * v[0, :3]).cumsum(0), (x, w), (x.cos(), w * 2)),
    "jvp of softmax": lambda x, w: jvp(lambda t: t.softmax(0) * t, (x,), (x.cos() * w[0, :3],)),
    "jvp of softmax by rows": lambda x, w: jvp(lambda t: t.softmax(1) * t.logsumexp(1, keepdim=True), (x,), (x.cos() * w[0, :3],)),
    "jvp of a layer norm": lambda x, w: jvp(normed, (x,), (x.cos() * w[0, :3],)),
    "jvp of a quantile": lambda x, w: jvp(lambda t: t.quantile(0.3, dim=0) * t, (x,), (x.cos() * w[0, :3],)),
    "jvp of grad of softmax": lambda x, w: jvp(grad(lambda t: (t.softmax(1) * t.log_softmax(1)).sum()), (x,), (x.cos(),)),
    "jvp by plain": lambda x, w: jvp(lambda v: ((x * v[0, :3]).sum(0), x), (w,), (w * 2,), has_aux=True),
    "jvp in jvp": lambda x, w: jvp(lambda t: jvp(lambda s: s.sin() * t * w[0, :3], (t,), (t.cos(),))[1], (x,), (x * 2,)),
    "jvp in grad": lambda x, w: grad(lambda t: jvp(lambda s: s.sin().sum(0) * t, (t,), (t * w[0, :3],))[1].sum())(x),
    "jacrev": lambda x, w: jacrev(lambda t: (t * w[0, :3]).sin().flip(0))(x),
    "jacrev to plain": lambda x, w: jacrev(lambda t, v: (t * v[0, :3]).sin().mean(0), argnums=(0,))(x, w),
    "jacrev by plain": lambda x, w: jacrev(lambda v: {"plain": (x * v[0, :3]).sin().sum(0), "sharded": x * v[0, :3]})(w),
    "jacrev in chunks": lambda x, w: [jacrev(lambda t: (t * w[0, :3]).sin().mean(0), chunk_size=n)(x) for n in (1, 2)],
    "jacfwd": lambda x, w: jacfwd(lambda t, v: (t * v[0, :3]).sin(), argnums=(0, 1))(x, w),
    "jacfwd of one in a tuple": lambda x, w: jacfwd(lambda t, v: (t * v).sin(), argnums=(1,))(x, w[0, :3]),
    "hessian": lambda x, w: hessian(lambda t: (t * w[0, :3]).sin().sum())(x),
    "hessian of softmax": lambda x, w: hessian(lambda t: (t.softmax(0) * w[0, :3]).square().sum())(x.detach()),
    "jvp of reductions": lambda x, w: jvp(reductions, (x,), (x.cos() * w[0, :3],)),
    "hessian of reductions": lambda x, w: hessian(lambda t: (reductions(t) * w[0, :3]).square().sum())(x.detach()),
    "hessian of scans": lambda x, w: hessian(lambda t: (t.cumprod(0) * t.cumsum(0) * w[0, :3]).square().sum())(x.detach()),
    "jacfwd of jacfwd": lambda x, w: jacfwd(jacfwd(lambda v: (x * v).sin().sum(0)))(w[0, :3]),
    "vmap": lambda x, w: torch.vmap(lambda row, v: v @ row.sin(), in_dims=(0, None), out_dims=1)(x, w[:, :3]),
    "vmap beside plain": lambda x, w: torch.vmap(
        lambda row, v: {"a": row.dot(v), "b": row + v}, in_dims=(0, -1), out_dims={"a": 0, "b": -1}
    )(x, w[0, 0] * torch.arange(21.0).to(x.dtype).view(3, 7)),
    "vmap of keywords": lambda x, w: torch.vmap(lambda row, v=None: row * v[0, :3], chunk_size=2)(x, v=w),
    "vmap of nested": lambda x, w: torch.vmap(lambda rows, v: rows["x"][0] * v, in_dims=({"x": [0]}, None))({"x": [x]}, w[0, 0]),
    "gradients of samples": lambda x, w: torch.vmap(grad(loss), in_dims=(None, 0))(parameters_of(w), x),
    "grad of those": lambda x, w: grad(lambda t: torch.vmap(grad(loss), in_dims=(None, 0))(parameters_of(w), t)["0.weight"].square().sum())(x),
    "laplacian": lambda x, w: torch.vmap(laplacian, in_dims=(None, 0))(parameters_of(w), x),
    "grad of vmap": lambda x, w: grad(lambda t, v: torch.vmap(lambda r, z: (z[:, :3] @ r).sin(), (0, None))(t, v).sum(), (0, 1))(x, w),
    "jvp of vmap": lambda x, w: jvp(lambda t: torch.vmap(lambda r, v: v[:, :3] @ r.sin(), (0, None))(t, w), (x,), (x.cos(),)),
    "vmap, infinite at zero": lambda x, w: torch.vmap(lambda r, v: (r * v).norm() / r.norm(), in_dims=(0, None))(x, w[0, :3]),
    "vmap, singular at zero": lambda x, w: torch.vmap(lambda r, v: torch.linalg.inv(r.outer(r) + v))(x, w[:3, :3].expand(7, 3, 3)),
    "vmap of vmap": lambda x, w: torch.vmap(torch.vmap(lambda a, b: a * b, in_dims=(0, None)), in_dims=(1, 0))(x, w[0, :3]),
    "a loop": lambda x, w: torch.vmap(lambda c: c.cumsum(0) * c.sum(), in_dims=1, out_dims=-1)(x),
    "closed over": lambda x, w: torch.vmap(lambda v: ((x * v[:3]).sum(), x + v[:3]))(w),
    "ensemble": lambda x, w: torch.vmap(u, in_dims=(0, None))({k: torch.stack([v, v * 2]) for k, v in parameters_of(w).items()}, x),
}  # fmt: skip


def reductions(x):
    """Those whose derivatives are given by weights."""
    return x.var(0) * x.std(0, correction=0) + x.logsumexp(0) * torch.var_mean(x, 0)[1]


LAYOUTS = [(7,), (4, 3), (4, 0, 3), (4, 2, 1)]


def given(num_ranks, sizes):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, dtype=torch.float64, generator=generator)
    w = torch.randn(4, 4, dtype=torch.float64, generator=generator)
    return x, w, ShardSpec.even(mesh, [Shard(0)], x.shape, {0: sizes})


def check(rank, num_ranks, sizes, names):
    x, w, spec = given(num_ranks, sizes)
    for name in names:
        try:
            inputs = [x.clone().requires_grad_(), w.clone().requires_grad_()]
            assert_like_one_process(CASES[name], inputs, [spec, None])
            assert_like_one_process(CASES[name], [x, inputs[1]], [spec, None])
            with torch.no_grad():
                assert_like_one_process(CASES[name], inputs, [spec, None])
        except Exception as error:
            raise AssertionError(f"{name} at {spec}") from error


@pytest.mark.slow_for(
    "sizes=(4, 0, 3)-1", *(f"sizes=({sizes})-{part}" for sizes in ("4, 3", "4, 2, 1") for part in range(4))
)
@pytest.mark.slow_for("sizes=(4, 0, 3)-2", "sizes=(4, 0, 3)-3")
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_like_one_process(sizes, part):
    run_ranks(check, len(sizes), sizes, sorted(CASES)[part::4], timeout=120)


def in_modules(x, model):
    """Gradients of what functions close over, modules among it; the results of a second backward pass."""
    slope = torch.vmap(grad(lambda row: model(row).sum()))(x)
    (torch.vmap(model)(x).square().mean() + slope.square().sum() + grad(lambda t: model(t).sum())(x).sum()).backward()
    return [p.grad for p in model.parameters()]


def one_of(model, parameters, buffers, x):
    return functional_call(model, (parameters, buffers), (x,))


def check_modules(rank, num_ranks):
    for sizes in (sizes for sizes in LAYOUTS if len(sizes) == num_ranks):
        x, _, spec = given(num_ranks, sizes)
        found = []
        for each in (x.clone(), shard_of(x, spec)):
            torch.manual_seed(0)
            found.append(
                in_modules(
                    each, torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
                )
            )
        torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
        models = [torch.nn.Linear(3, 2).double() for _ in range(2)]
        parameters, buffers = stack_module_state(models)

        one = partial(one_of, models[0])
        ours = torch.vmap(one, in_dims=(0, 0, None))(parameters, buffers, shard_of(x, spec))
        torch.testing.assert_close(ours.full_tensor(), torch.stack([model(x) for model in models]))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_modules_that_are_closed_over(num_ranks):
    run_ranks(check_modules, num_ranks)


def raises_as_torch(function, x, part):
    """Both raise the same error."""
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        function(x)
    with pytest.raises(theirs.type) as ours:
        function(part)
    assert str(ours.value) == str(theirs.value)


WRONG = {
    "no scalar": lambda x: grad(lambda t: t * 2)(x),
    "no tensor": lambda x: grad(lambda t: 2.0)(x),
    "no pair": lambda x: grad(lambda t: t.sum(), has_aux=True)(x),
    "argnums": lambda x: grad(lambda t: t.sum(), argnums=1)(x),
    "argnums twice": lambda x: grad(lambda t, s: t.sum(), argnums=(0, 0))(x, x),
    "no tensor given": lambda x: grad(lambda t, s: t.sum(), argnums=1)(x, 2.0),
    "no pair of vjp": lambda x: vjp(lambda t: t * 2, x, has_aux=True),
    "integers": lambda x: vjp(lambda t: t > 0, x),
    "cotangents": lambda x: vjp(lambda t: t * 2, x)[1]((x, x)),
    "cotangent": lambda x: vjp(lambda t: t * 2, x)[1](x[:, :2]),
    "no tuple": lambda x: jvp(lambda t: t * 2, x, x),
    "independent": lambda x: jvp(lambda t: torch.zeros(2), (x,), (x,), strict=True),
    "in_dims": lambda x: torch.vmap(lambda t: t, in_dims=2)(x),
    "in_dims of another structure": lambda x: torch.vmap(lambda t: t, in_dims=(0, 0))(x),
    "other rows": lambda x: torch.vmap(lambda t, s: t, in_dims=(0, 1))(x, x),
    "out_dims": lambda x: torch.vmap(lambda t: t, out_dims="0")(x),
    "random": lambda x: torch.vmap(lambda t: t + torch.rand(3))(x),
    "random in a loop": lambda x: torch.vmap(lambda t: t + torch.rand(7), in_dims=1)(x),
}


def check_refused(rank, num_ranks):
    x, w, spec = given(num_ranks, (4, 0, 3))
    for name, function in WRONG.items():
        try:
            raises_as_torch(function, x, shard_of(x, spec))
        except BaseException as error:
            raise AssertionError(name) from error
    part, learned = shard_of(x, spec), w[0, :3].clone().requires_grad_()
    square = shard_of(x.new_ones(7, 7), ShardSpec.even(spec.device_mesh, [Shard(1)], (7, 7), {0: (4, 0, 3)}))
    for refused, reason in [
        (lambda: torch.vmap(lambda row: row * learned)(part), "closes over a tensor that requires grad"),
        (lambda: torch.vmap(lambda row: part.sum(0) * row, in_dims=0)(part), "holds a ShardTensor"),
        (lambda: torch.vmap(lambda row, s: row + s, in_dims=(0, None))(part, part), "not mapped"),
        (lambda: torch.vmap(lambda row, s: row + s[:3], in_dims=(0, 0))(part, square), "another one"),
        (lambda: torch.vmap(lambda row: row, randomness="different")(part), "randomness='different'"),
        (lambda: torch.vmap(lambda row: (row, learned * 2), in_dims=0, out_dims=(0, None))(part), "requires grad"),
        (lambda: torch.vmap(lambda row: row.add_(1))(part), "writes to its arguments"),
    ]:
        with pytest.raises(UnsupportedShardOp, match=r"torch\.func\.vmap: .*Remedy: ") as raised:
            pytest.fail(f"{reason}: {refused()!r}")
        assert reason in str(raised.value)
    with torch.no_grad():
        assert isinstance(torch.vmap(lambda row: row * learned)(part), ShardTensor)


def test_wrong_arguments_raise_as_torch_and_the_rest_says_what_to_do():
    run_ranks(check_refused, 3)
