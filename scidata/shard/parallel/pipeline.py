"""Stages of ``torch.distributed.pipelining`` that pass ShardTensors on.

torch sends plain tensors from stage to stage, into buffers that it makes once, for the first microbatch. So a stage
hands on the parts of its ShardTensors, and the next stage, whose ranks hold the same parts, wraps them again. Their
layouts go through the store that all ranks share, once: they are there before the first part arrives.

Gradients are summed over dp and the domain in a stage's last backward pass of a step.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Replicate, Shard

from scidata.device_mesh import domain_mesh
from scidata.device_mesh.board import common_postings, has_peers
from scidata.errors import ConfigError, UnsupportedShardOp
from scidata.shard.base import ShardBase
from scidata.shard.parallel.buckets import BUCKETS
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import compiled_from

_MESHES: weakref.WeakKeyDictionary[nn.Module, DeviceMesh] = weakref.WeakKeyDictionary()
_prepared: Counter[str] = Counter()  # times that a stage was, as all ranks of a pipeline count them


def serve_stages(model: nn.Module, mesh: DeviceMesh) -> None:
    """Have pipeline stages that are made from now on pass ShardTensors on; ``model`` may be one."""
    _MESHES[model] = mesh
    PipelineStage.__new__ = _new_stage  # type: ignore[method-assign, assignment]


def _new_stage(cls: type[PipelineStage], *args: object, **kwargs: object) -> PipelineStage:
    return object.__new__(ShardStage if cls is PipelineStage and has_peers() else cls)  # who share a store


class ShardStage(PipelineStage):
    """A stage between whose ranks and the next stage's tensors travel as local parts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._posts = common_postings()
        self._specs: list[ShardSpec | None] | None = None  # layouts of the values sent on
        self._layouts: list[Any] | None = None  # layouts of the received values
        self._posts.claim(self._key(self.stage_index), "here")

    def _key(self, stage: int) -> str:
        first = dist.get_global_rank(self.group or dist.group.WORLD, 0)  # type: ignore[arg-type]
        return f"stage/{first}/{stage}/{self.num_stages}"

    # -- what torch calls --------------------------------------------------------------------------------------------

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        _prepared[self._key(self.stage_index)] += 1
        self._specs = self._layouts = None
        kept = [(buffer, buffer.clone()) for buffer in self.submod.buffers()]
        with self._handing_on():
            result = super()._prepare_forward_infra(*args, **kwargs)
        for buffer, before in kept:  # torch has run the module on memory without values: running statistics, say
            buffer.copy_(before)
        return result

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on one microbatch, as torch does."""
        with self._handing_on():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        """Run a backward pass; the last one of a step averages gradients."""
        buckets = BUCKETS.get(compiled_from(self.submod))  # type: ignore[call-overload]
        if buckets is None:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        is_whole = backward_type == "full"  # else torch sets gradients itself, without a hook that would tell
        with nullcontext() if last_backward and is_whole else buckets.put_off():
            result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if last_backward and not is_whole:
            buckets.average()
        return result

    # -- on the way --------------------------------------------------------------------------------------------------

    @contextmanager
    def _handing_on(self) -> Iterator[None]:
        """Wrap what the module is given, and hand on parts of what it returns."""
        hooks = []
        if not self.is_first:
            hooks.append(self.submod.register_forward_pre_hook(self._receive, prepend=True))
        if not self.is_last:
            hooks.append(self.submod.register_forward_hook(self._hand_on))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _receive(self, _: nn.Module, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._layouts is None:
            key = self._key(self.stage_index - 1)
            found = self._posts.find(f"{key}/{_prepared[self._key(self.stage_index)]}")
            self._layouts = [None] * len(parts) if found is None else json.loads(found)
        return tuple([self._wrapped(part, layout) for part, layout in zip(parts, self._layouts, strict=True)])

    def _wrapped(self, part: Tensor, layout: Any) -> Tensor:
        if layout is None:
            return part
        mesh = _MESHES.get(compiled_from(self.submod))  # type: ignore[call-overload]
        if mesh is None:
            raise ConfigError(
                f"stage {self.stage_index} receives a ShardTensor, but its module was not given to "
                "scidata.parallelize(module, mesh), so the mesh is not known"
            )
        names, dims, shape, sizes, past = layout
        spec = ShardSpec.on(
            domain_mesh(mesh, names),
            tuple(Replicate() if dim is None else Shard(dim) for dim in dims),
            tuple(shape),
            tuple(None if each is None else tuple(each) for each in sizes),
        )
        if past:
            spec = replace(spec, past_sizes={(axis, extent): tuple(each) for axis, extent, each in past})
        if part.requires_grad:
            part.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]  # it is sent back
        return ShardTensor(part, spec)

    def _hand_on(self, _: nn.Module, args: object, output: Any) -> Any:
        given = tuple(output) if isinstance(output, tuple | list) else (output,)
        specs = [x.spec if isinstance(x, ShardBase) else None for x in given]
        if self._specs is None:
            self._post(specs)
        elif specs != self._specs:
            raise ConfigError(
                f"stage {self.stage_index} hands on {_shown(specs)}, and of the first microbatch it was "
                f"{_shown(self._specs)}; all microbatches of a pipeline have the same layout. Remedy: give batches of "
                "another size a PipelineStage of their own, on the same module; leave the first dim whole"
            )
        parts = tuple([self._part(x) if isinstance(x, ShardBase) else x for x in given])
        return parts if isinstance(output, tuple | list) else parts[0]

    def _part(self, x: ShardBase) -> Tensor:
        if type(x) is not ShardTensor or x.spec.exchange is not None:
            raise UnsupportedShardOp(
                f"stage {self.stage_index} hands on a {type(x).__name__} ({x.spec}); pipeline stages pass on fields, "
                "not edges of graphs or spectra. Remedy: keep in one stage what needs them"
            )
        x.refresh()
        return x.local.contiguous()  # torch sends nothing else

    def _post(self, specs: list[ShardSpec | None]) -> None:
        """Tell the next stage the layouts."""
        if any(specs) and not self._posts.has(self._key(self.stage_index + 1)):
            raise ConfigError(
                f"stage {self.stage_index + 1} would take parts for whole tensors: on its ranks, call "
                "scidata.parallelize(module, mesh) for each stage's module before PipelineStage is made"
            )
        layouts = [None if spec is None else _layout(spec) for spec in specs]
        key = self._key(self.stage_index)
        self._posts.claim(f"{key}/{_prepared[key]}", json.dumps(layouts))
        self._specs = specs


def _layout(spec: ShardSpec) -> list[object]:
    past = [(*key, sizes) for key, sizes in spec.past_sizes.items()]
    return [[axis.name for axis in spec.axes], spec.dims, spec.global_shape, spec.sizes, past]


def _shown(specs: list[ShardSpec | None]) -> str:
    return "; ".join("a plain tensor" if spec is None else str(spec) for spec in specs)
