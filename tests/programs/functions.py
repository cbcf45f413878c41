"""Random calls of networks' functions: convolutions, pools, resizing, norms, losses, linear algebra, searches."""

from __future__ import annotations

from torch import Tensor

from tests.programs.expressions import Scope, rows_of


def _plain(*shape: int) -> str:
    return f"ramp({', '.join(map(str, shape))})"


def _channels(s: Scope) -> tuple[str, Tensor, int]:
    """Return a tensor as (batch, channels, one to three spatial dims), and how many of these."""
    name, x = s.pick(dims=2)
    name = f"{name}[None]" if x.ndim == 2 or (x.ndim < 5 and s.chance(0.3)) else name
    x = s.value(name)
    if x.ndim > 5 or not x.shape[1]:
        raise LookupError
    return name, x, x.ndim - 2


def convolved(s: Scope) -> str:
    name, x, n = _channels(s)
    draw = s.draw
    channels, groups = x.shape[1], draw.choice([g for g in (1, 1, 2, 3) if x.shape[1] % g == 0])
    out = groups * draw.randrange(1, 3)
    kernel = [draw.randrange(1, min(4, m + 2)) for m in x.shape[2:]]
    steps = [draw.choice([1, 1, 2, 3]) for _ in kernel]
    pads = [draw.randrange(k) for k in kernel]
    gaps = [draw.choice([1, 1, 1, 2]) for _ in kernel]
    bias = draw.choice(["None", _plain(out)])
    if s.chance(0.35):
        more = [draw.randrange(max(1, min(a, 2))) for a in steps]
        weight = _plain(channels, out // groups, *kernel)
        given = zip(x.shape[2:], steps, pads, gaps, kernel, more, strict=True)
        if any((n - 1) * step - 2 * pad + gap * (k - 1) + extra < 0 for n, step, pad, gap, k, extra in given):
            raise LookupError  # no rows, which torch's kernels take or refuse by chance
        options = f"{steps}, {pads}, {more}, {groups}, {gaps}"
        return f"NEW0 = F.conv_transpose{n}d({name}, {weight}, {bias}, {options})"
    weight = _plain(out, channels // groups, *kernel)
    if s.chance(0.3):  # a weight that is differentiated, or a sharded one
        weight = f"{s.pick(lambda y: y.numel() > 0)[0]}.mean() * {weight}"
    padding = draw.choice([pads, f"'{draw.choice(['same', 'valid'])}'"]) if set(steps) == {1} else pads
    return f"NEW0 = F.conv{n}d({name}, {weight}, {bias}, {steps}, {padding}, {gaps}, {groups})"


def pooled(s: Scope) -> str:
    name, x, n = _channels(s)
    draw = s.draw
    kernel = [draw.randrange(1, min(4, m + 1) if m else 2) for m in x.shape[2:]]
    steps, pads = [draw.randrange(1, 4) for _ in kernel], [draw.randrange(k // 2 + 1) for k in kernel]
    to = [draw.randrange(1, 5) for _ in kernel]
    ceil = f"ceil_mode={s.chance(0.3)}"
    mode = draw.choice([("linear",), ("bilinear", "bicubic"), ("trilinear",)][n - 1])
    ways = [
        f"F.max_pool{n}d({name}, {kernel}, {steps}, {pads}, {ceil})",
        f"F.max_pool{n}d({name}, {kernel}, {steps}, {pads}, dilation={draw.choice([1, 2])})",
        f"F.avg_pool{n}d({name}, {kernel}, {steps}, {pads}, {ceil}, count_include_pad={s.chance(0.5)})",
        f"F.adaptive_avg_pool{n}d({name}, {to})",
        f"F.adaptive_max_pool{n}d({name}, {to})",
        f"F.lp_pool{n}d({name}.abs() + 0.1, 2, {kernel}, {steps})",
        f"F.interpolate({name}, scale_factor={draw.choice([0.5, 1.5, 2.0])}, mode='nearest')",
        f"F.interpolate({name}, {to}, mode='{draw.choice(['nearest', 'nearest-exact', 'area'])}')",
        f"F.interpolate({name}, {to}, mode='{mode}', align_corners={s.chance(0.5)})",
        f"F.interpolate({name}, scale_factor=2.0, mode='{mode}', align_corners={s.chance(0.5)})",
        f"F.instance_norm({name})",
        f"F.group_norm({name}, {draw.choice([g for g in (1, 2, 3) if x.shape[1] % g == 0])})",
        f"F.batch_norm({name}, None, None, training=True)",
        f"F.local_response_norm({name}, 2)",
        f"F.pad({name}, {[draw.randrange(2) for _ in range(2 * n)]}, mode="
        f"'{draw.choice(['reflect', 'replicate', 'circular'])}')",
        f"F.dropout{n}d({name}, 0.4)",
    ]
    if n == 2:
        ways += [
            f"F.unfold({name}, {kernel}, stride={steps}, padding={pads})",
            f"F.fold(F.unfold({name}, {kernel}, stride={steps}), {list(x.shape[2:])}, {kernel}, stride={steps})",
            f"F.grid_sample({name}, F.affine_grid({_plain(x.shape[0], 2, 3)}, {list(x.shape)}, align_corners=False), "
            "align_corners=False)",
        ]
    return f"NEW0 = {s.draw.choice(ways)}"


def compared(s: Scope) -> str:
    """Return a loss, or what searches, counts or sorts."""
    name, x = s.pick(dims=1)
    other = s.pick(lambda y: y.shape == x.shape)[0] if s.chance(0.7) else _plain(*x.shape)
    dim, draw = s.dim(x), s.draw
    n = x.shape[dim]
    how = f"reduction='{draw.choice(['none', 'mean', 'sum'])}'"
    classes = f"({other}.select(1, 0) > 0).long()" if x.ndim > 1 and x.shape[1] > 1 else f"({other} > 0).long()"
    k = draw.randrange(1, n + 1) if n else 1
    loss = draw.choice(["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"])
    ways = [
        f"F.{loss}({name}, {other}, {how})",
        f"F.binary_cross_entropy_with_logits({name}, {other}.sigmoid(), {how})",
        f"F.kl_div({name}.log_softmax({dim}), {other}.softmax({dim}), reduction='{draw.choice(['batchmean', 'sum'])}')",
        f"F.cross_entropy({name}, {classes}, {how}, label_smoothing={draw.choice([0.0, 0.1])})",
        f"F.nll_loss({name}.log_softmax(1), {classes}, {how}, weight={_plain(x.shape[1]) if x.ndim > 1 else 'None'})",
        f"F.poisson_nll_loss({name}, {other}.abs(), {how})",
        f"F.gaussian_nll_loss({name}, {other}, {other}.abs() + 1, {how})",
        f"{name}.topk({k}, {dim}).values",
        f"{name}.kthvalue({k}, {dim}).values",
        f"torch.cummax({name}, {dim}).values",
        f"torch.cummin({name}, {dim}).values",
        f"{name}.quantile(0.3, dim={dim})",
        f"{name}.nansum({dim})",
        f"torch.searchsorted(ramp(5), {name}) * ramp()",
        f"torch.bucketize({name}, ramp(4)) * ramp()",
        f"torch.isin(({name} > 0).long(), torch.tensor([1])) * ramp()",
        f"torch.histc({name}.detach(), 5, -1, 1)",
        f"F.one_hot(({name} > 0).long(), 3) * ramp()",
        f"F.embedding(({name} > 0).long(), ramp(2, 3))",
        f"F.embedding(({name} > 0).long(), {_table(s)})",
        f"torch.trapezoid({name}, dim={dim})",
        f"torch.cumulative_trapezoid({name}, dim={dim})",
        f"torch.gradient({name}, dim={dim})[0]",
        f"torch.isclose({name}, {other}) * ramp()",
        f"({name} == {other}).all() * ramp()",
        f"{name}.unique(return_inverse=True)[1] * ramp()",
        f"torch.nonzero({name} > 0) * ramp()",
        f"torch.argsort({name}, {dim}, stable=True) * ramp()",
        f"torch.renorm({name}, 2, {dim % x.ndim}, 0.7)",
        f"torch.bincount(({name} > 0).long().flatten(), minlength=3) * ramp()",
        f"{name}.msort()",
    ]
    return f"NEW0 = {draw.choice(ways)}"


def _table(s: Scope) -> str:
    """Return a tensor of at least two rows of embeddings."""
    try:
        return s.pick(lambda y: y.ndim == 2 and len(y) > 1)[0]
    except LookupError:
        return "ramp(2, 3)"


def moved(s: Scope) -> str:
    name, x = s.pick(dims=1)
    draw, dim = s.draw, s.dim(x)
    second = s.dim(x)
    n = x.shape[dim]
    same = s.pick(lambda y: y.shape == x.shape)[0]
    least = draw.choice(["amax", "amin", "mean"])
    places = f"({same} > 0).long() * {max(0, n - 1)}"
    how = draw.choice(["sum", "amax", "amin", "mean", "prod"])
    ways = [
        f"{name}.roll({draw.randrange(-4, 5)}, {dim})",
        f"{name}.roll(({draw.randrange(-2, 3)}, 1), ({dim}, {second}))",
        f"{name}.roll({draw.randrange(-4, 5)})",
        f"{name}.flip({dim})",
        f"torch.rot90({name}, {draw.randrange(4)}, ({dim}, {second}))",
        f"{name}.tile(2)",
        f"torch.cat([{name}, {same}, {name}], {dim})",
        f"torch.column_stack([{name}, {same}])",
        f"torch.dstack([{name}, {same}])",
        f"torch.block_diag({name}, {same})",
        f"torch.cartesian_prod({name}.flatten()[:3], {same}.flatten()[:2])",
        f"torch.meshgrid({name}.flatten()[:3], {same}.flatten()[:4], indexing='ij')[{draw.randrange(2)}]",
        f"{name}.scatter_reduce({dim}, {places}, {same}, '{how}', include_self={s.chance(0.5)})",
        f"{name}.index_reduce({dim}, {rows_of(s, n, n)}, {same}, '{least}')",
        f"{name}.take({rows_of(s, x.numel())})",
        f"torch.take_along_dim({name}, {places}, {dim})",
        f"{name}.masked_scatter({same} > 0, {name}.flip(0))",
        f"torch.diag_embed({name}, {draw.randrange(-1, 2)})",
        f"{name}.triu({draw.randrange(-1, 2)})",
        f"{name}.diff({draw.choice([1, 2])}, {dim})",
        f"{name}.unfold({dim}, {draw.randrange(1, n + 1) if n else 1}, {draw.randrange(1, 3)}).sum(-1)",
        f"torch.stack([{name}, {same}, {name} * 2], {dim})",
        f"F.glu({name}, {dim})",
        f"F.prelu({name}, ramp())",
        f"torch.combinations({name}.flatten()[:4])",
        f"torch.vander({name}.flatten()[:4], 3)",
        f"torch.atleast_3d({name})",
        f"torch.select_scatter({name}, {same}.select({dim}, 0), {dim}, {n - 1})",
        f"torch.slice_scatter({name}, {same}.narrow({dim}, 0, {n // 2}), {dim}, {n - n // 2})",
        f"torch.diagonal_scatter({name}, {same}.diagonal(0, {dim}, {second}), 0, {dim}, {second})",
    ]
    written = [
        f"{name}.index_reduce_({dim}, {rows_of(s, n, n)}, {s.apart(same, x)}, '{least}')",
        f"{name}.scatter_reduce_({dim}, {places}, ({same}).clone(), '{how}')",
        f"{name}.masked_scatter_({same} > 0, {_plain(max(1, x.numel()))})",
        f"{name}.put_({rows_of(s, x.numel(), min(2, x.numel()), distinct=True)}, ramp({min(2, x.numel())}))",
        f"{name}.diagonal(0, {dim}, {second}).fill_(0.5)",
        f"{name}.triu_()",
    ]
    return draw.choice(written) if s.chance(0.25) else f"NEW0 = {draw.choice(ways)}"


def solved(s: Scope) -> str:
    name, x = s.pick(dims=2)
    draw = s.draw
    rows, columns = x.shape[-2:]
    k = draw.randrange(1, 4)
    square = f"({name} @ {name}.mT + 3 * torch.eye({rows}).type_as(ramp()))"
    other = s.pick(lambda y: y.ndim > 1 and y.shape[-1] == columns)[0]
    ways = [
        f"torch.bmm({name}.reshape(-1, {rows}, {columns}), {name}.reshape(-1, {rows}, {columns}).mT)",
        f"torch.baddbmm({_plain(1, rows, k)}, {name}.reshape(-1, {rows}, {columns}), "
        f"{_plain(max(1, x.numel() // max(1, rows * columns)), columns, k)})",
        f"torch.addmm({_plain(rows, k)}, {name}, {_plain(columns, k)}, beta=0.5)",
        f"torch.tensordot({name}, {other}, dims=([-1], [-1]))",
        f"torch.cdist({name}, {other})",
        f"torch.kron({name}[..., :2, :2], {_plain(2, 2)})",
        f"torch.outer({name}.flatten()[:3], {other}.flatten()[:3])",
        f"torch.inner({name}, {other})",
        f"torch.linalg.multi_dot([{name}, {name}.mT, {name}])",
        f"F.bilinear({name}, {name}, {_plain(2, columns, columns)})",
        f"torch.linalg.det({square})",
        f"torch.linalg.inv({square})",
        f"torch.linalg.solve({square}, {name})",
        f"torch.linalg.cholesky({square})",
        f"torch.linalg.matrix_norm({name})",
        f"torch.linalg.slogdet({square})[1]",
        f"torch.trace({name})",
        f"torch.cov({name})",
        f"torch.cross({name}[..., :3], {name}.flip(-1)[..., :3], dim=-1)",
        f"torch.einsum('...i,...j->...ij', {name}, {other})",
        f"torch.mv({name}, {_plain(columns)})",
        f"torch.linalg.vecdot({name}, {other})",
        f"F.scaled_dot_product_attention({name}, {other}, {other}, is_causal={s.chance(0.4)})",
        f"F.scaled_dot_product_attention({name}, {other}, {other}, {name} @ {other}.mT > 0)",
        f"F.rms_norm({name}, [{columns}])",
        f"torch.matrix_exp({name} @ {name}.mT * 0.1)",
    ]
    sparse = draw.choice(["to_sparse()", "to_sparse_csr()"])
    ways += [f"{name}.to_sparse() @ {_plain(columns, k)}", f"torch.sparse.mm({_plain(k, rows)}.{sparse}, {name})"]
    return f"NEW0 = {draw.choice(ways)}"


def transformed_function(s: Scope) -> str:
    """Return a call under torch.func, autocast, or of a loss differentiated again."""
    name, x = s.pick(dims=1)
    dim, draw = s.dim(x), s.draw
    # no layer norm: torch's tangents of it have wrong gradients (its mean and deviation count as constants)
    body = draw.choice(
        ["(t * t).sin()", "t.softmax(-1)", "t.cumsum(-1) * t", "t - t.amax()", "F.rms_norm(t, t.shape[-1:])"]
    )
    weight = _plain(x.shape[-1], 2)
    ways = [
        f"torch.func.grad(lambda t: total({body}))({name})",
        f"torch.func.vjp(lambda t: {body}, {name})[1](torch.ones_like({name}))[0]",
        f"torch.func.jvp(lambda t: {body}, ({name},), (torch.ones_like({name}),))[1]",
        f"torch.func.vmap(lambda t: {body}, {dim}, {dim})({name})",
        f"torch.func.vmap(lambda t: t @ {weight}, 0)({name})",
        f"torch.func.vmap(torch.func.grad(lambda t: ({body}).sum()))({name})",
        f"torch.func.jacrev(lambda t: {body})({name}[..., :2].flatten()[:3])",
        f"torch.func.jacfwd(lambda t: {body})({name}[..., :2].flatten()[:3])",
        f"torch.func.functional_call(torch.nn.Linear({x.shape[-1]}, 2), "
        f"{{'weight': {weight}.mT, 'bias': ramp(2)}}, ({name},))",
        f"torch.autograd.functional.hvp(lambda t: total({body}), {name}.detach(), torch.ones_like({name}))[1]",
        f"torch.autograd.functional.jvp(lambda t: {body}, {name}.detach(), torch.ones_like({name}))[1]",
    ]
    return f"NEW0 = {draw.choice(ways)}"
