"""Derivatives of functions that see ShardTensors, by ordinary autograd on the parts.

torch's own transforms wrap each tensor in another one, and know no subclass that holds its values apart. Each function
here gets ``plain``, torch's own, and its arguments; where these are wrong, torch's own raises, on stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import Node

from scidata.shard.op_table import TRANSFORMS, TorchFunction, unsupported
from scidata.shard.ops.align import local_of
from scidata.shard.ops.moving import as_sharded, to_layout
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import (
    Observed,
    has_dual_level,
    is_transforming,
    slice_argnums,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

_T = TypeVar("_T")
_Argnums: TypeAlias = int | tuple[int, ...]
_Results: TypeAlias = tuple[object, ...]  # of a transform: outputs, derivatives, and aux

_dual: Callable[[Tensor, Tensor], Tensor] = forward_ad.make_dual  # torch does not type them
_unpacked: Callable[[Tensor], tuple[Tensor, Tensor | None]] = forward_ad.unpack_dual


def refuse_inside(func: TorchFunction) -> None:
    """Raise if a transform of torch's own runs: its wrapped tensors do not go through collectives."""
    if is_transforming():
        raise unsupported(
            func,
            "it is called inside of another transform, which sees no ShardTensor",
            remedy="pass the ShardTensor as an argument to the outer one, too",
        )


class _Level:
    """Fresh aliases of the tensors that one transform differentiates by, so that derivatives relate to them alone.

    ``grad(grad(f))(x)``: the outer level makes ``x1``, an alias of ``x``, the inner one ``x2``, an alias of ``x1``. The
    inner one differentiates by ``x2``, and its result still depends on ``x1``: its graph is kept for the outer one. A
    result whose graph leads to ``x2`` alone is released without it.
    """

    def __init__(self) -> None:
        self.keeps_graphs = torch.is_grad_enabled()  # else no graph that is recorded inside is used outside
        self.aliases: list[Tensor] = []

    def differentiate(self, args: _T) -> _T:
        """Return nested arguments with aliases in the places of tensors."""
        flat, tree = tree_flatten(args)
        self.aliases = [self._alias(x) for x in flat]
        return tree_unflatten(self.aliases, tree)

    def _alias(self, x: object) -> Tensor:
        if not isinstance(x, Tensor):
            raise ValueError(f"Thing passed to transform API must be Tensor, got {type(x)}")
        x = x if self.keeps_graphs else _without_graph(x)
        alias = _with_local(x, x.local.view_as(x.local)) if isinstance(x, ShardTensor) else x.view_as(x)
        return alias if alias.requires_grad else alias.requires_grad_()

    def release(self, results: _T) -> _T:
        """Return nested results without the graphs that lead to the aliases alone, or outside to nobody."""
        own = {id(x) for x in map(local_of, self.aliases) if x.is_leaf}
        idle: set[Node] = set()

        def released(x: Tensor) -> Tensor:
            local = local_of(x)
            kept = self.keeps_graphs or local.is_leaf  # a leaf came in from outside
            return x if not x.requires_grad or (kept and _leads_elsewhere(local, own, idle)) else _without_graph(x)

        return tree_map_only(Tensor, released, results)

    def gradients(
        self, outputs: Sequence[Tensor], given: Sequence[Tensor] | None, *, retain_graph: bool, create_graph: bool
    ) -> list[Tensor]:
        """Differentiate by the aliases; those that nothing depends on get zeros. Collective."""
        chosen = [i for i, x in enumerate(outputs) if x.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(self.aliases)
        if chosen:
            found = torch.autograd.grad(
                [outputs[i] for i in chosen],
                self.aliases,
                None if given is None else [given[i] for i in chosen],
                retain_graph=retain_graph,
                create_graph=create_graph,
                allow_unused=True,
            )
        return [torch.zeros_like(x) if g is None else g for x, g in zip(self.aliases, found, strict=True)]


def _with_local(x: ShardTensor, local: Tensor) -> ShardTensor:
    x.refresh()
    return ShardTensor(local, x.spec, halo=x.halo, copied=x.copied, global_strides=x.global_strides)


def _without_graph(x: Tensor) -> Tensor:
    """Detach, but keep the tangent that a transform further out follows; ``detach`` drops it."""
    if isinstance(x, ShardTensor):
        return _with_local(x, _without_graph(x.local))
    value, tangent = _unpacked(x)
    return x.detach() if tangent is None else _dual(value.detach(), tangent.detach())


def _leads_elsewhere(x: Tensor, own: set[int], idle: set[Node]) -> bool:
    """Whether a graph has leaves that are not ``own``. Nodes that have none behind them are added to ``idle``."""
    if x.grad_fn is None:
        return id(x) not in own
    seen, left = {x.grad_fn}, [x.grad_fn]
    while left:
        node = left.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in own:
            return True
        new = {following for following, _ in node.next_functions if following is not None} - seen - idle
        seen |= new
        left.extend(new)
    idle |= seen
    return False


def _replace(args: tuple[object, ...], argnums: _Argnums, new: object) -> tuple[object, ...]:
    places = (argnums,) if isinstance(argnums, int) else argnums
    values = new if isinstance(new, tuple) and not isinstance(argnums, int) else (new,)
    chosen = {i % len(args): value for i, value in zip(places, values, strict=True)}
    return tuple(chosen.get(i, x) for i, x in enumerate(args))


def _split_aux(results: object, has_aux: bool) -> tuple[bool, object, object]:
    """Return whether the results are as ``has_aux`` says, the outputs, and aux."""
    if not has_aux:
        return True, results, None
    if isinstance(results, tuple) and len(results) == 2:
        return True, results[0], results[1]
    return False, results, None


def _as_plain(function: Callable[..., _T], results: object, *args: object, **options: object) -> _T:
    """Have torch's own transform raise its error for a function's results."""
    made = tree_map_only(Tensor, lambda x: torch.zeros(x.shape, dtype=x.dtype, device="meta"), results)
    return function(lambda *_: made, *args, **options)


def _like(given: Tensor, x: Tensor) -> Tensor:
    """Bring a gradient or tangent to the layout of its tensor. Collective if that differs."""
    if isinstance(x, ShardTensor):
        given = to_layout(as_sharded(given, x.spec), x.spec)
        return given if given.spec is x.spec else ShardTensor(given.local, x.spec, global_strides=given.global_strides)
    return given.full_tensor() if isinstance(given, ShardTensor) else given


def grad_and_value(
    plain: Callable[..., _Results],
    func: TorchFunction,
    argnums: _Argnums,
    has_aux: bool,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> _Results:
    """Do as ``torch.func.grad_and_value``. The gradients of plain arguments are whole on each rank. Collective."""
    refuse_inside(torch.func.grad)
    level = _Level()
    with torch.enable_grad():
        chosen = level.differentiate(slice_argnums(args, argnums, as_tuple=False))
        results = func(*_replace(args, argnums, chosen), **kwargs)
        fits, output, aux = _split_aux(results, has_aux)
        if not fits or not isinstance(output, Tensor) or output.dim():
            return _as_plain(plain, results, 0, has_aux, (torch.zeros(()),), {})
        output = local_of(output)  # replicated: it has no dims
        found = level.gradients([output], None, retain_graph=True, create_graph=True)
    gradients = tree_unflatten(level.release(found), tree_flatten(chosen)[1])
    output, aux = level.release((output, aux))
    return gradients, ((output, aux) if has_aux else output)


class Pullback:
    """The function that ``vjp`` returns: takes gradients of the results to those of the arguments. Collective."""

    of_shards = True  # also where all of them are plain: tensors between them are not

    def __init__(self, plain: Callable[..., _Results], level: _Level, outputs: object, chosen: object) -> None:
        self._plain, self._level = plain, level
        self._outputs, self._tree = tree_flatten(outputs)
        self._chosen_tree = tree_flatten(chosen)[1]

    def __call__(self, cotangents: object, retain_graph: bool = True, create_graph: bool | None = None) -> object:
        """Return the gradients, as often as it is called."""
        refuse_inside(torch.func.vjp)
        flat, tree = tree_flatten(cotangents)
        if tree != self._tree or any(
            not isinstance(given, Tensor) or given.shape != x.shape
            for given, x in zip(flat, self._outputs, strict=True)
        ):
            self._raise(cotangents)
        given = [_like(each, x) for each, x in zip(flat, self._outputs, strict=True)]
        create = torch.is_grad_enabled() if create_graph is None else create_graph
        found = self._level.gradients(self._outputs, given, retain_graph=retain_graph, create_graph=create)
        return tree_unflatten(self._level.release(found), self._chosen_tree)

    def _raise(self, cotangents: object) -> NoReturn:
        outputs = [torch.zeros(each.shape, dtype=each.dtype) for each in self._outputs]
        pullback = self._plain(lambda x: tree_unflatten([x + each for each in outputs], self._tree), torch.zeros(()))[1]
        assert callable(pullback)
        pullback(_zeros_like(cotangents))
        raise RuntimeError(f"vjp: the cotangents do not fit the results: {cotangents}")


def _zeros_like(values: _T) -> _T:
    return tree_map_only(Tensor, lambda x: torch.zeros(x.shape, dtype=x.dtype), values)


def vjp(
    plain: Callable[..., _Results],
    func: TorchFunction,
    *primals: object,
    argnums: _Argnums | None = None,
    has_aux: bool = False,
) -> _Results:
    """Do as ``torch.func.vjp``. Cotangents of sharded results are sharded or whole. Collective."""
    refuse_inside(torch.func.vjp)
    level = _Level()
    with torch.enable_grad():
        if argnums is None:
            chosen: object = (new := level.differentiate(primals))
        else:
            chosen = level.differentiate(slice_argnums(primals, argnums, as_tuple=False))
            new = _replace(primals, argnums, chosen)
        results = func(*new)
    fits, outputs, aux = _split_aux(results, has_aux)
    flat = tree_flatten(outputs)[0]
    if (
        not fits
        or not flat
        or not all(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in flat)
    ):
        return _as_plain(plain, results, torch.zeros(()), has_aux=has_aux)
    pullback = Pullback(plain, level, outputs, chosen)
    outputs, aux = level.release((outputs, aux))
    return (outputs, pullback, aux) if has_aux else (outputs, pullback)


def jvp(
    plain: Callable[..., _Results],
    func: TorchFunction,
    primals: object,
    tangents: object,
    argnums: _Argnums | None = None,
    *,
    strict: bool = False,
    has_aux: bool = False,
) -> _Results:
    """Do as ``torch.func.jvp``, by forward-mode derivatives of the parts. Collective if operations are."""
    refuse_inside(torch.func.jvp)
    chosen = slice_argnums(primals, argnums) if argnums is not None and isinstance(primals, tuple) else primals
    flat, tree = tree_flatten(chosen)
    given, tangents_tree = tree_flatten(tangents)
    if not isinstance(primals, tuple) or tree != tangents_tree or not _fit(flat, given):
        plain(lambda *args: args, _zeros_like(chosen), _zeros_like(tangents), None, has_aux=False)
        raise RuntimeError("jvp: the tangents are not of the primals' shapes and dtypes")
    whole = primals

    def run(duals: Sequence[Tensor]) -> object:
        new = tree_unflatten(duals, tree)
        if argnums is None:
            return func(*new)
        return func(*_replace(whole, argnums, new[0] if isinstance(argnums, int) else new))

    follow = _by_reverse if has_dual_level() else _by_dual_numbers
    results, found = follow(run, flat, [_like(t, x) for t, x in zip(given, flat, strict=True)])
    fits, outputs, aux = _split_aux(results, has_aux)
    flat, tree = tree_flatten(outputs)
    found = found[: len(flat)]  # outputs come first
    complete = not strict or all(t is not None for t in found)
    if not fits or not complete or not flat or not all(isinstance(x, Tensor) for x in flat):
        one = (torch.zeros(()),)
        return _as_plain(plain, results, one, one, None, strict=strict, has_aux=has_aux)
    moved = tree_unflatten([torch.zeros_like(x) if t is None else t for x, t in zip(flat, found, strict=True)], tree)
    return (outputs, moved, aux) if has_aux else (outputs, moved)


def _fit(flat: Sequence[object], given: Sequence[object]) -> bool:
    return bool(flat) and all(
        isinstance(x, Tensor) and isinstance(t, Tensor) and (x.shape, x.dtype) == (t.shape, t.dtype)
        for x, t in zip(flat, given, strict=True)
    )


def _by_dual_numbers(
    run: Callable[[Sequence[Tensor]], object], primals: Sequence[Tensor], tangents: Sequence[Tensor]
) -> tuple[object, list[Tensor | None]]:
    """Return the nested results, and for each of them its tangent, None if there is none."""
    with forward_ad.dual_level(), Observed():  # type: ignore[no-untyped-call]
        flat, tree = tree_flatten(run([_dual(x, t) for x, t in zip(primals, tangents, strict=True)]))
        pairs = [_unpacked(x) if isinstance(x, Tensor) else (x, None) for x in flat]
        parts = [x if moved is None else value for x, (value, moved) in zip(flat, pairs, strict=True)]
    return tree_unflatten(parts, tree), [moved for _, moved in pairs]


def _by_reverse(
    run: Callable[[Sequence[Tensor]], object], primals: Sequence[Tensor], tangents: Sequence[Tensor]
) -> tuple[object, list[Tensor | None]]:
    """Do the same by two backward passes, since dual numbers do not nest.

    The gradient ``g(w) = J.T @ w`` is linear in the weights ``w`` of the outputs. Its derivative by ``w``, weighted
    with the tangents ``t``, is ``J @ t``.
    """
    level = _Level()
    with torch.enable_grad():
        results = run(level.differentiate(list(primals)))
        flat = tree_leaves(results)
        places = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and x.requires_grad]
        weights = [torch.zeros_like(flat[i]).requires_grad_() for i in places]
        found = level.gradients([flat[i] for i in places], weights, retain_graph=True, create_graph=True)
        linear = [(g, t) for g, t in zip(found, tangents, strict=True) if g.requires_grad]
        moved: list[Tensor | None] = [None] * len(flat)
        if linear:
            outputs, given = [g for g, _ in linear], [t for _, t in linear]
            derived = torch.autograd.grad(outputs, weights, given, create_graph=True, allow_unused=True)
            for i, x in zip(places, derived, strict=True):
                moved[i] = x
    return level.release(results), level.release(moved)


TRANSFORMS.update(grad_and_value_impl=grad_and_value, _vjp_with_argnums=vjp, _jvp_with_argnums=jvp)
