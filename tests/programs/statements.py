"""Random statements: views, writes, reductions, joins, indexing, random numbers, Fourier transforms, autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.programs.expressions import Scope, ids, index, mask, rows_of, several_ids, view
from tests.programs.functions import compared, convolved, moved, pooled, solved, transformed_function


def _target(s: Scope) -> tuple[str, Tensor]:
    """Return what is written to: a tensor, or more often a view of it."""
    name, x = s.pick()
    if s.chance(0.4):
        return name, x
    if s.chance(0.15):
        name, x = f"{name}.detach()", x.detach()
    expression = view(s, name, x)
    return expression, s.value(expression)


def viewed(s: Scope) -> str:
    name, x = s.pick()
    if x.ndim and x.shape[0] and s.chance(0.15):
        dim = s.dim(x)
        parts = x.unbind(dim) if x.shape[dim] in (2, 3) and s.chance(0.5) else x.chunk(2, dim)
        call = f"unbind({dim})" if parts[0].ndim < x.ndim else f"chunk(2, {dim})"
        return f"{', '.join(f'NEW{i}' for i in range(len(parts)))}{',' * (len(parts) == 1)} = {name}.{call}"
    return f"NEW0 = {view(s, name, x)}"


def written(s: Scope) -> str:
    target, x = _target(s)
    other = s.apart(s.fitting(x.shape), x)
    name = target.split(".")[0].split("[")[0]
    ways = [
        *[f"{target}.{s.draw.choice(['add_', 'mul_', 'sub_', 'copy_'])}({other})"] * 5,
        f"{target}.{s.draw.choice(['zero_', 'tanh_', 'sin_', 'neg_', 'abs_', 'sigmoid_', 'relu_', 'square_'])}()",
        f"{target}.fill_({s.draw.choice([s.number(), f'{s.pick()[0]}.sum()'])})",
        f"{target}.clamp_(-0.5, {s.draw.choice(['0.5', '0.9'])})",
        f"{target}.lerp_({other}, 0.25)",
        f"{target}.addcmul_({other}, {s.apart(s.fitting(x.shape), x)}, value=0.5)",
        f"F.relu({target}, inplace=True)",
        f"F.dropout({target}, 0.4, inplace=True)",
        f"{target}.{s.draw.choice(['normal_()', 'uniform_()', 'bernoulli_(0.5)', 'exponential_()'])}",
        f"{target}.uniform_(generator=seeded({s.draw.randrange(9)}))",
        f"{name} {s.draw.choice(['+=', '*=', '-='])} {s.apart(s.fitting(s.value(name).shape), x)}",
    ]
    return s.draw.choice(ways)


def assigned(s: Scope) -> str:
    name, x = s.pick(dims=1)
    if s.chance(0.3):
        name = view(s, name, x)
        x = s.value(name)
        if not x.ndim:
            raise LookupError
    where = index(s, x)
    part = s.value(f"{name}{where}")
    value = s.apart(s.fitting(part.shape), x)
    return f"{name}{where} {s.draw.choice(['=', '=', '+=', '*='])} {value}"


def assigned_by_tensor(s: Scope) -> str:
    name, x = s.pick(dims=1)
    dim = s.dim(x) % x.ndim
    n = x.shape[dim]
    if s.chance(0.35):
        chosen = mask(s, name, x)
        value = s.draw.choice([f"{s.number()}", f"{name}[{chosen}] * 2", f"{s.pick()[0]}.mean()"])
        if s.chance(0.3):
            return f"{name}.masked_fill_({name} > 0.1, {s.number()})"
        return f"{name}[{chosen}] = {value}"
    rows = rows_of(s, n, distinct=True)
    count = s.value(rows).numel()
    shape = [*x.shape[:dim], count, *x.shape[dim + 1 :]]
    several = rows_of(s, n, s.draw.randrange(4))
    added = [*x.shape[:dim], s.value(several).numel(), *x.shape[dim + 1 :]]
    leading = ":, " * dim
    ways = [
        f"{name}[{leading}{rows}] {s.draw.choice(['=', '+='])} {s.apart(s.fitting(shape), x)}",
        f"{name}.index_fill_({dim}, {rows}, {s.number()})",
        f"{name}.index_add_({dim}, {several}, ramp({', '.join(map(str, added))}))",
        f"{name}.index_copy_({dim}, {rows}, ramp({', '.join(map(str, shape))}))",
        f"{name}.index_put_(({rows_of(s, x.shape[0], 2)},), {s.apart(s.fitting(x.shape[1:]), x)}, accumulate=True)",
        f"{name}.scatter_add_({dim}, ({name} > 0).long() * {max(0, n - 1)}, {name}.sin())",
        f"{name}.scatter_({dim}, torch.zeros_like({name}, dtype=torch.int64), {s.number()})",
    ]
    return s.draw.choice(ways)


def reduced(s: Scope) -> str:
    name, x = s.pick()
    line = _reduced(s, name, x)
    # of equal numbers it is 0, or about 1e-17, by the order of sums; the gradient is nothing then, or anything
    if ".std(" in line and bool((s.value(line.removeprefix("NEW0 = ")).abs() < 1e-9).any()):
        raise LookupError
    if ".median(" in line and len(x.unique()) < x.numel():  # which of equal ones has the gradient, torch does not say
        raise LookupError
    return line


def _reduced(s: Scope, name: str, x: Tensor) -> str:
    if not x.ndim or s.chance(0.15):
        return f"NEW0 = {name}.{s.draw.choice(['sum', 'mean', 'max', 'norm', 'var', 'std', 'prod', 'amin'])}()"
    dim = s.dim(x)
    keep = ", keepdim=True" * s.chance(0.4)
    several = tuple(sorted(s.draw.sample(range(x.ndim), min(2, x.ndim))))
    usual = s.draw.choice(["sum", "mean", "var", "amax", "amin", "logsumexp", "std"])
    ways = [
        *[f"{name}.{usual}({s.draw.choice([dim, several])}{keep})"] * 3,
        f"{name}.norm(dim={dim}{keep})",
        f"{name}.{s.draw.choice(['softmax', 'log_softmax', 'cumsum', 'cumprod', 'logcumsumexp'])}({dim})",
        f"{name}.{s.draw.choice(['max', 'min'])}({dim}{keep}).values",
        f"{name}.{s.draw.choice(['argmax', 'argmin'])}({dim}{keep}).type_as(ramp()) * 0.1",
        f"({name} > 0).{s.draw.choice(['any', 'all', 'sum', 'count_nonzero'])}({dim}).type_as(ramp())",
        f"torch.var_mean({name}, {dim}{keep})[{s.draw.randrange(2)}]",
        f"F.layer_norm({name}, {list(x.shape[dim % x.ndim :])})",
        f"F.normalize({name}, dim={dim})",
        f"F.cosine_similarity({name}, {s.fitting(x.shape)}, dim={dim})" if x.shape[dim] else f"{name}.sum()",
        f"{name}.sort({dim}).values",
        f"{name}.clone().median({dim}).values",
        f"torch.linalg.vector_norm({name}, dim={dim}{keep})",
        f"{name}.diff(dim={dim})",
    ]
    return f"NEW0 = {s.draw.choice(ways)}"


def elementwise(s: Scope) -> str:
    name, x = s.pick()
    other = s.fitting(x.shape)
    unary = s.draw.choice(["sin", "tanh", "sigmoid", "exp", "abs", "square", "clone", "neg", "relu"])
    ways = [
        *[f"{name} {s.draw.choice('+-*')} {other}"] * 4,
        f"{name}.{unary}()",
        f"torch.where({name} > {s.number()}, {name}, {other})",
        f"torch.maximum({name}, {s.pick(lambda y: y.shape == x.shape)[0]})",
        f"{name}.clamp({s.draw.choice(['min', 'max'])}=0.1)",
        f"F.gelu({name})",
        f"cube({name})",
        f"{name}.masked_fill({name} < 0, {s.number()})",
        f"torch.zeros_like({name}) + {name}",
        f"{name} / ({name}.abs() + 1)",
    ]
    return f"NEW0 = {s.draw.choice(ways)}"


def joined(s: Scope) -> str:
    name, x = s.pick(dims=1)
    dim = s.dim(x) % x.ndim
    rest = [d for d in range(x.ndim) if d != dim]
    beside, _ = s.pick(lambda y: y.ndim == x.ndim and all(y.shape[d] == x.shape[d] for d in rest))
    same, _ = s.pick(lambda y: y.shape == x.shape)
    plain = f"ramp({', '.join(map(str, x.shape))})"
    parts = [name, beside, s.draw.choice([same, plain, f"{name}{('[' + ':, ' * dim + '1:]')} * 2"])]
    s.draw.shuffle(parts)
    ways = [
        f"torch.cat([{', '.join(parts[: s.draw.randrange(2, 4)])}], {s.draw.choice([dim, dim - x.ndim])})",
        f"torch.stack([{name}, {s.draw.choice([same, plain])}], {s.draw.randrange(-x.ndim - 1, x.ndim + 1)})",
        f"{name}.roll({s.draw.randrange(-3, 4)}, {dim})",
        f"{name}.flip({dim})",
        f"{name}.repeat({', '.join(str(s.draw.choice([1, 1, 2])) for _ in range(x.ndim))})",
        f"{name}.repeat_interleave(2, {dim})",
        f"F.pad({name}, ({s.draw.randrange(-1, 3)}, {s.draw.randrange(3)}))",
        f"torch.tril({name})",
        f"torch.hstack([{name}, {same}])",
    ]
    return f"NEW0 = {s.draw.choice(ways)}"


def multiplied(s: Scope) -> str:
    name, x = s.pick(dims=1)
    letters = "abcdefg"[: x.ndim]
    other, y = s.pick(lambda y: 0 < y.ndim < 4)
    names, new = "", iter("uvwxyz")
    for n in y.shape:
        match = [c for c, m in zip(letters, x.shape, strict=True) if m == n and c not in names]
        names += s.draw.choice(match) if match and s.chance(0.8) else next(new)
    kept = [c for c in dict.fromkeys(letters + names) if s.chance(0.6)]
    s.draw.shuffle(kept)
    columns = s.draw.randrange(1, 4)
    ways = [
        *[f"torch.einsum('{letters},{names}->{''.join(kept)}', {name}, {other})"] * 2,
        f"{name} @ ramp({x.shape[-1]}, {columns})",
        f"F.linear({name}, ramp({columns}, {x.shape[-1]}), ramp({columns}))",
    ]
    if x.ndim > 1:
        third, _ = s.pick(lambda y: y.ndim > 1 and y.shape[-1] == x.shape[-1])
        ways += [f"{name} @ {name}.mT", f"{name}.mT @ {name}", f"{name} @ {third}.mT"] * 2
        ways += [f"F.scaled_dot_product_attention({name}, {name}, {name})"]
    return f"NEW0 = {s.draw.choice(ways)}"


def indexed(s: Scope) -> str:
    name, x = s.pick(dims=1)
    dim = s.dim(x) % x.ndim
    rows, more = rows_of(s, x.shape[dim]), rows_of(s, x.shape[dim], 2)
    leading = ":, " * dim
    ways = [
        f"{name}[{leading}{rows}]",
        f"{name}[{mask(s, name, x)}]",
        f"{name}.index_select({dim}, {rows})",
        f"{name}.gather({dim}, ({name} > 0).long() * {max(0, x.shape[dim] - 1)})",
        f"{name}.take_along_dim({name}.argmax({dim}, keepdim=True), {dim})" if x.shape[dim] else f"{name}[{rows}]",
        f"{name}[{leading}{more}{', None' * s.chance(0.3)}]",
        f"{name}[{leading}{more}, ..., {rows_of(s, x.shape[-1], 2)}]" if dim < x.ndim - 1 else f"{name}[..., {more}]",
        f"{name}.masked_select({name} > 0.2)",
    ]
    return f"NEW0 = {s.draw.choice(ways)}"


def indexed_by_several(s: Scope) -> str:
    name, x = s.pick(dims=1)
    where = several_ids(s, x)
    part = s.value(f"{name}{where}")
    if s.chance(0.5):
        return f"NEW0 = {name}{where}"
    value = s.apart(s.fitting(part.shape), x)
    dim, count = s.dim(x) % x.ndim, s.draw.choice([0, 1, 1, 2])
    rows = ids(s, x.shape[dim], count).replace("[:, None]", "")
    taken = s.value(rows).numel()
    added = f"ramp({', '.join(map(str, [*x.shape[:dim], taken, *x.shape[dim + 1 :]]))})"
    leading = [ids(s, n, count) for n in x.shape[: s.draw.randrange(1, x.ndim + 1)]]
    ways = [
        f"{name}{where} += {s.number()}",
        f"{name}{where} = {s.number()}",
        f"{name}.index_put_(({', '.join(leading)},), ramp(), accumulate=True)",
        f"{name}.index_add_({dim}, {rows}, {added})",
        f"NEW0 = {name}.detach().index_reduce({dim}, {rows}, {added}, 'amax')",
        f"NEW0 = {name}[torch.where({mask(s, name, x)})]",
        f"{name}[torch.where({mask(s, name, x)})] = {s.number()}",
    ]
    places = torch.arange(x.numel()).view(x.shape)
    if len(eval(f"places{where}", s.scope, {"places": places}).unique()) == part.numel():
        ways += [f"{name}{where} {s.draw.choice(['=', '+='])} {value}"] * 2  # of equal rows anyone's stays
    return s.draw.choice(ways)


def laid_out(s: Scope) -> str:
    """Return what depends on the order of a tensor in memory."""
    name, x = s.pick(dims=1)
    order = s.draw.sample(range(x.ndim), x.ndim)
    moved = f"{name}.permute({', '.join(map(str, order))})"
    four = f"{name}{'[None]' * (4 - x.ndim)}" if x.ndim < 4 else name
    size = [s.draw.randrange(n + 1) for n in x.shape]
    ways = [
        f"NEW0 = {name}.as_strided({size}, {list(x.stride())}, {s.draw.randrange(2)})",
        f"NEW0 = {moved}.as_strided({[x.shape[i] for i in order]}, {[x.stride(i) for i in order]})",
        f"NEW0 = {moved}.contiguous().view(-1)",
        f"NEW0 = {moved} * 2",
        f"NEW0 = {moved}.clone().flatten()",
        f"NEW0 = {name} + {moved}.is_contiguous()",
        f"NEW0 = {four}.contiguous(memory_format=torch.channels_last)",
        f"NEW0 = {four}.to(memory_format=torch.channels_last).sin()",
        f"NEW0 = F.pixel_shuffle({four}.expand(-1, {4 if x.ndim < 4 else -1}, -1, -1), 2)",
        f"NEW0 = torch.empty_like({moved}).zero_()",
        f"NEW0 = torch.eye({x.shape[0]}, 3).mT.{s.draw.choice(['to_sparse()', 'to_sparse_csr()'])} @ {name}",
        f"NEW0 = torch.tensor({name}.detach().tolist()).type_as(ramp())",
        f"NEW0 = torch.from_numpy({name}.detach().numpy().copy())",
    ]
    return s.draw.choice(ways)


def drawn(s: Scope) -> str:
    name, _ = s.pick()
    ways = [
        f"F.dropout({name}, 0.4)",
        f"torch.rand_like({name})",
        f"torch.randn_like({name})",
        f"{name} * torch.rand_like({name})",
        f"torch.bernoulli(torch.sigmoid({name}))",
        f"{name}.sigmoid().bernoulli()",
        f"torch.empty_like({name}).uniform_(generator=seeded({s.draw.randrange(9)}))",
        f"torch.zeros_like({name}).bernoulli_(0.5, generator=seeded({s.draw.randrange(9)}))",
    ]
    return f"NEW0 = {s.draw.choice(ways)}"


def transformed(s: Scope) -> str:
    name, x = s.pick(dims=1)
    dim = s.dim(x)
    ways = [
        f"torch.fft.fft({name}, dim={dim}).real",
        f"torch.fft.ifft(torch.fft.fft({name}, dim={dim}) * 2, dim={dim}).real",
        f"torch.fft.irfft(torch.fft.rfft({name}, dim={dim}), n={x.shape[dim]}, dim={dim})",
        f"torch.fft.rfft({name}, dim={dim}).abs()",
        f"torch.fft.fftn({name}).imag",
        f"torch.view_as_real(torch.fft.rfft({name}, dim={dim}))",
    ]
    return f"NEW0 = {s.draw.choice(ways)}"


def differentiated(s: Scope) -> str:
    name, _ = s.pick(lambda y: y.requires_grad)
    source, _ = s.pick(lambda y: y.requires_grad)
    power = s.draw.choice([f"{name}", f"{name} * {name}", f"{name}.sin()", f"{name}.exp()"])
    ways = [
        *[f"total({power}).backward(retain_graph=True)"] * 2,
        f"(NEW0,) = torch.autograd.grad(total({power}), [{source}], create_graph=True, allow_unused=True)",
        f"(NEW0,) = torch.autograd.grad(total({power}), [{source}], retain_graph=True, allow_unused=True)",
        f"(NEW0,) = torch.autograd.grad(({power}).sum(), [{source}], create_graph=True, allow_unused=True)",
        f"{name}.backward(torch.ones_like({name}), retain_graph=True)",
        f"total({power}).backward(create_graph=True)",
        f"{name}.retain_grad()",
        f"{s.pick(lambda y: y.requires_grad and y.is_leaf)[0]}.register_hook(lambda g: g * 2)",  # torch dies of views
        f"{source}.grad = None",
        f"NEW0 = {source}.grad * 2",
        f"{source}.grad.mul_(0.5)",
    ]
    return s.draw.choice(ways)


def with_autograd(s: Scope) -> str:
    name, x = s.pick()
    target, y = _target(s)
    ways = [
        f"NEW0 = {name}.detach().clone().requires_grad_()",
        f"NEW0 = checkpoint(lambda t: (t * t).sin() + t, {name}, use_reentrant=False)",
        f"NEW0 = checkpoint(lambda t: F.dropout(t.mT, 0.5).tanh() * {name}.mT, {name}, use_reentrant=False)"
        if x.ndim > 1
        else f"NEW0 = checkpoint(cube, {name}, use_reentrant=False)",
        f"with torch.no_grad(): {target}.mul_({s.number()})",
        f"with torch.no_grad(): {target}.copy_({s.apart(s.fitting(y.shape), y)})",
        f"with torch.no_grad(): NEW0 = {view(s, name, x.detach())}.clone()",
        f"with torch.no_grad(): NEW0 = {name} * 2",
    ]
    return s.draw.choice(ways)


#: How likely each kind is, in tenths of the whole.
KINDS: dict[Callable[[Scope], str], float] = {
    viewed: 2.2,
    written: 2.2,
    assigned: 0.9,
    assigned_by_tensor: 0.6,
    reduced: 0.8,
    elementwise: 0.7,
    joined: 0.6,
    multiplied: 0.4,
    indexed: 0.5,
    indexed_by_several: 0.7,
    laid_out: 0.5,
    drawn: 0.3,
    transformed: 0.15,
    differentiated: 0.6,
    with_autograd: 0.35,
    convolved: 0.3,
    pooled: 0.4,
    compared: 0.5,
    moved: 0.6,
    solved: 0.5,
    transformed_function: 0.3,
}


def statement(s: Scope) -> str:
    """Return a random statement; ``NEW0``, ``NEW1``, … stand for names to be given. LookupError where none fits."""
    (kind,) = s.draw.choices(list(KINDS), list(KINDS.values()))
    return kind(s)
