"""One public model on the ranks of a mesh: is it right, refused, or neither."""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import tree_leaves

import scidata
from scidata.core.index_map import IndexMap
from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec, ShardTensor
from scidata.shard.compile import Region, regions_of
from scidata.testing.oracle import shard_of
from tests.dist._pyg import to_pyg

#: The ways of cutting a sample, by name, and the ranks of each.
LAYOUTS = {"whole": 1, "two": 2, "two, one empty": 2, "three": 3, "three, one empty": 3, "2 x 2": 4}
PATIENCE = timedelta(seconds=60)  # of a collective; after it, ranks are out of step
MOST_STEPS = 24  # of a compiled model, whose modules are captured one level after the other


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its inputs.

    Attributes
    ----------
    build
        Makes the model.
    inputs
        Makes the whole inputs by the names that ``forward`` knows them by.
    cut
        Which dims of an input to cut, by the same names: on a line of ranks the first of them, on 2 x 2 ranks the first
        two. Or "nodes" or "edges", "index" for the ``edge_index``. The others are plain.
    call
        Calls the model with the inputs, where that is not ``model(**inputs)``.
    train
        Whether to run it in training mode; then dropout draws the same on both sides.
    tolerance
        Relative; 1e-4 for models that compute in single precision whatever they are given.
    dtype
        Of the model; of its inputs, too, where they are a picture.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], Mapping[str, Any]]
    cut: Mapping[str, tuple[int, ...] | str]
    call: Callable[..., Any] = lambda model, **inputs: model(**inputs)
    train: bool = True
    tolerance: float = 1e-9
    dtype: torch.dtype = torch.float64


@dataclass
class Found:
    """What became of a case."""

    name: str
    layout: str
    kind: str  # "right", "refused", "wrong", "divergent", "other error", "broken" or "not run"
    note: str = ""
    captured: str = ""  # with --compile: "whole", "parts: 3, why not whole" or "eager: why"


@dataclass
class Result:
    """What a model gave: a loss, gradients and buffers by name."""

    loss: Tensor
    values: dict[str, Tensor] = field(default_factory=dict)


def image(build: Callable[[], nn.Module], *shape: int, **options: Any) -> Case:
    """Return a case of a model of one picture, ``(2, 3, 32, 32)`` unless told, cut by rows (and columns)."""
    shape = shape or (2, 3, 32, 32)
    return Case(
        build=build,
        inputs=lambda: {"x": torch.randn(shape, dtype=options.get("dtype"))},
        **{"cut": {"x": (2, 3)}, "call": lambda model, x: model(x)} | options,
    )


def split(extent: int, num_ranks: int, *, empty: bool = False) -> tuple[int, ...]:
    """Return uneven sizes, one of them 0 if ``empty``: of 32 rows (18, 8, 6), (26, 0, 6)."""
    last = extent // (num_ranks + 2) if num_ranks > 1 else extent
    middle = 0 if empty else extent // 4
    rest = [middle] * (num_ranks - 2)
    sizes = (extent - last - sum(rest), *rest, last)
    return (0, extent) if empty and num_ranks == 2 else sizes[:num_ranks] if num_ranks > 1 else (extent,)


def on_ranks(
    rank: int,
    num_ranks: int,
    library: str,
    names: Sequence[str],
    layouts: Sequence[str],
    folder: str,
    patience: int,
    backend: str = "",
) -> None:
    """Run cases one after the other; the first rank adds what it found to a file. Collective."""
    from tests.models.registry import cases_of

    warnings.simplefilter("ignore")
    store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=patience))
    shape = (2, 2) if num_ranks == 4 else (num_ranks,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("domain", "columns")[: len(shape)])
    cases = cases_of(library)
    for name in names:
        for found in _run(cases[name], name, layouts, mesh, backend):
            if rank == 0:
                with (Path(folder) / "done").open("ab") as file:
                    pickle.dump(found, file)


def _run(case: Case, name: str, layouts: Sequence[str], mesh: DeviceMesh, backend: str) -> list[Found]:
    """Run one case in some layouts. Raises where ranks are no longer in step."""
    torch.set_default_dtype(case.dtype)
    # what models that name it would use in double precision
    torch.cfloat = torch.complex128 if case.dtype == torch.float64 else torch.complex64
    try:
        expected = _step(case, case.inputs)
    except Exception as error:
        return [Found(name, layout, "not run", _words(error)) for layout in layouts]
    results = []
    for layout in layouts:
        how, kind, note = "", "right", ""
        try:
            cut = partial(_cut, case, mesh, empty="empty" in layout)
            if backend:
                first, found, how = _compiled_step(case, cut, backend)
                kind, note = _compare(first, expected, case.tolerance)
                if kind == "right":
                    kind, note = _compare(found, first, case.tolerance)
                    note = note and f"compiled: {note}; {how}"
            else:
                found = _step(case, cut)
            if kind == "right":
                kind, note = _compare(found, expected, case.tolerance)
        except UnsupportedShardOp as error:
            kind, note = "refused", str(error)
        except Exception as error:
            kind, note = "other error", _words(error)
        kinds: list[Any] = [None] * mesh.size()
        dist.all_gather_object(kinds, (kind, note, how))
        if len({each for each, *_ in kinds}) > 1:
            kind, note = "divergent", "; ".join(f"{each}: {words[:150]}" for each, words, _ in kinds)
        results.append(Found(name, layout, kind, note, min(how for *_, how in kinds)))
    return results


def _words(error: Exception) -> str:
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    place = "" if where is None else f" ({Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno})"
    return f"{type(error).__name__}: {error}"[:300] + place


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what models draw from it is theirs


def _step(case: Case, inputs: Callable[[], Mapping[str, Any]]) -> Result:
    """Run a model forward and backward."""
    return _run_step(case, *_made(case, inputs))


def _made(case: Case, inputs: Callable[[], Mapping[str, Any]]) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model and its inputs."""
    _seed(0)
    model = case.build().train(case.train)
    model = model.double() if case.dtype == torch.float64 else model.float()  # to(dtype) makes complex numbers real
    with torch.no_grad():
        for p in model.parameters():  # gates that start at nought would hide what is behind them
            p.add_(0.02 * torch.randn_like(p))
    _seed(1)
    given = dict(inputs())
    for x in given.values():
        if isinstance(x, Tensor) and x.is_floating_point():
            x.requires_grad_()
    return model, given


def _run_step(case: Case, model: nn.Module, given: Mapping[str, Any]) -> Result:
    _seed(2)
    outputs = [x for x in tree_leaves(_plain_tree(case.call(model, **given))) if isinstance(x, Tensor)]
    outputs = [x for x in outputs if (x.is_floating_point() or x.is_complex()) and x.requires_grad]
    assert outputs, "no output requires grad"
    _seed(3)
    loss: Any = 0
    for x in (torch.view_as_real(x) if x.is_complex() else x for x in outputs):
        loss = loss + (x * torch.randn(x.shape, dtype=torch.float64).to(x.dtype)).sum()
    assert type(loss) is Tensor, f"the loss is a {type(loss).__name__}"
    loss.backward()
    result = Result(loss.detach())
    for name, x in given.items():
        if isinstance(x, Tensor) and x.requires_grad:
            grad = torch.zeros_like(x) if x.grad is None else x.grad
            result.values[f"gradient of {name}"] = grad.full_tensor() if isinstance(grad, ShardTensor) else grad
    for name, p in model.named_parameters():
        result.values[f"gradient of {name}"] = torch.zeros_like(p) if p.grad is None else p.grad
    result.values |= {name: b.clone() for name, b in model.named_buffers() if b.is_floating_point()}
    return result


def _compiled_step(case: Case, inputs: Callable[[], Mapping[str, Any]], backend: str) -> tuple[Result, Result, str]:
    """Run a model until nothing is captured any more, at least five times; return its first and last step. Collective.

    Also returns how it was captured: "whole", "parts: 3, ...", or "eager: ..." with the reason.
    """
    model, given = _made(case, inputs)
    before = [(m, name, b, b.clone()) for m in model.modules() for name, b in m.named_buffers(recurse=False)]
    scidata.compile(model, backend=backend)
    steps: list[Result] = []
    found: list[str] = []
    while len(steps) < 5 or (len({*found[-3:]}) > 1 and len(steps) < MOST_STEPS):
        for module, name, b, values in before:
            setattr(module, name, b.copy_(values))
        model.zero_grad()
        for x in given.values():
            if isinstance(x, Tensor):
                x.grad = None
        steps.append(_run_step(case, model, given))
        each: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(each, [str(region) for region in regions_of(model)])
        found.append(str(each))
    return steps[0], steps[-1], _how_captured(regions_of(model))


def _how_captured(regions: Sequence[Region]) -> str:
    whole, *parts = regions
    # a list of modules is never called itself
    if whole.captured or (not whole.reason and whole.parts and all(part.captured for part in whole.parts)):
        return "whole"
    captured = sum(bool(part.captured) for part in parts)
    reason = whole.reason or str(whole)
    return f"parts: {captured}, {reason}" if captured else f"eager: {reason}"


def _plain_tree(x: Any) -> Any:
    """Return outputs of all kinds (data classes, mappings) as what a tree is made of."""
    if isinstance(x, Mapping):
        return {key: _plain_tree(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_plain_tree(value) for value in x]
    return x


def _compare(found: Result, expected: Result, tolerance: float) -> tuple[str, str]:
    if not torch.allclose(found.loss, expected.loss, rtol=tolerance, atol=tolerance):
        return "wrong", f"loss {float(found.loss)}, not {float(expected.loss)}"
    if found.values.keys() != expected.values.keys():
        return "wrong", f"not on both sides: {sorted(found.values.keys() ^ expected.values.keys())[:3]}"
    # a bias before a normalisation has a gradient of rounding errors
    total = float(sum(x.norm() for x in expected.values.values()))
    for name, wanted in expected.values.items():
        given = found.values[name]
        if given.shape != wanted.shape:
            return "wrong", f"{name}: {tuple(given.shape)}, not {tuple(wanted.shape)}"
        off, norm = float((given - wanted).norm()), float(wanted.norm())
        if not off <= tolerance * (norm + 1e-3 * total):
            return "wrong", f"{name}: {off:.2g} off, of norm {norm:.2g}"
    return "right", ""


# -- cutting -----------------------------------------------------------------------------------------------------------


def _cut(case: Case, mesh: DeviceMesh, *, empty: bool) -> dict[str, Any]:
    """Return this rank's part of the inputs. Collective."""
    whole = dict(case.inputs())
    if "index" in case.cut.values():
        return _cut_graph(case, whole, mesh["domain"] if mesh.ndim > 1 else mesh, empty=empty)
    on = mesh if any(len(dims) >= mesh.ndim for dims in case.cut.values()) else mesh["domain"]
    given = {}
    for name, x in whole.items():
        dims = case.cut.get(name, ())
        if not dims:
            given[name] = x
            continue
        dims = dims[: on.ndim]
        sizes = {axis: split(x.shape[dim], on.size(axis), empty=empty) for axis, dim in enumerate(dims)}
        placements = [*(Shard(dim) for dim in dims), *[Replicate()] * (on.ndim - len(dims))]
        given[name] = shard_of(x, ShardSpec.even(on, placements, x.shape, sizes))
    return given


def _cut_graph(case: Case, whole: dict[str, Any], mesh: DeviceMesh, *, empty: bool) -> dict[str, Any]:
    """Cut nodes, and give each rank the edges that end at its own; whole edges are in the order of where they end."""
    kinds = {kind: [name for name, each in case.cut.items() if each == kind] for kind in ("nodes", "edges", "index")}
    (index,) = kinds["index"]
    src, dst = whole[index].numpy()
    sizes = split(len(whole[kinds["nodes"][0]]), mesh.size(), empty=empty)
    bounds = np.array([0, *accumulate(sizes)])
    rank = mesh.get_local_rank()
    first, last = np.searchsorted(dst, bounds[rank : rank + 2])
    mine = src[first:last]
    ghosts = np.unique(mine[(mine < bounds[rank]) | (mine >= bounds[rank + 1])])
    index_map = IndexMap(bounds=bounds, part=rank, ghosts=ghosts)
    local = np.stack([index_map.to_local(mine), index_map.to_local(dst[first:last])])
    data = to_pyg(
        torch.from_numpy(local),
        index_map,
        mesh,
        node={name: whole[name][bounds[rank] : bounds[rank + 1]].clone() for name in kinds["nodes"]},
        edge={name: whole[name][first:last].clone() for name in kinds["edges"]},
    )
    given = {name: data[name] for name in (*kinds["nodes"], *kinds["edges"])}
    return {name: x for name, x in whole.items() if name not in case.cut} | given | {index: data.edge_index}
