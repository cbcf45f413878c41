"""ShardTensor: a torch.Tensor with a global shape whose parts lie on the ranks.

Torch functions are intercepted at ``__torch_function__`` and looked up in the op table; ordinary autograd runs on the
local parts, with differentiable collectives between them. So a tensor's graph, gradient and memory are those of its
local part, and DDP, checkpointing and autocast see nothing unusual. Whatever gets past the table to the dispatcher
raises there: nothing is ever computed on the wrapper itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import enable_reentrant_dispatch
from torch.serialization import add_safe_globals
from torch.utils.hooks import RemovableHandle

from scidata.core.keywords import checked_keywords
from scidata.errors import ShardLayoutError
from scidata.shard import layouts
from scidata.shard.axes import as_sizes, by_axis
from scidata.shard.base import ShardBase, ViewState
from scidata.shard.dispatch import dispatch
from scidata.shard.memory import dense, laid_out, memory_of, memory_of_parts, own_strides
from scidata.shard.notebook import layout_card
from scidata.shard.op_table import TorchFunction, Types, handler_of_operator, unsupported
from scidata.shard.rows.edge_order import as_in_one_process, in_one_order
from scidata.shard.rows.redistribute import change_layout, gather_full
from scidata.shard.rows.runs import exchange_halo, halo_dims, owned_of
from scidata.shard.saving import load_part, saved
from scidata.shard.sizes import facts_of
from scidata.shard.spec import UNKNOWN, HaloDim, ShardSpec, Sizes, Strides
from scidata.shard.torch_internals import base_of, tree_flatten, version_of
from scidata.shard.views import gradient_of, part_of_gradient, refuse_no_gradient


class ShardTensor(ShardBase):
    """A tensor whose parts lie on the ranks of a device mesh.

    Make one with :meth:`from_local`, ``from_padded`` or :func:`scidata.scatter_tensor`. Every supported operation
    gives the result of one process on the whole tensor, forward and backward; every other one raises
    :class:`~scidata.errors.UnsupportedShardOp`. Values that come out replicated on all axes (a loss) are plain
    tensors, the same on each rank.

    A tensor made by ``from_padded`` also holds its halo. Pointwise operations act on the halo too and keep it,
    as long as nothing requires grad; other operations drop it.

    Attributes
    ----------
    spec
        The layout.
    halo
        The halo that was asked for, by tensor dim; empty if none was.

    Examples
    --------
    On each of two ranks:

    >>> mesh = scidata.init_mesh(domain=2)
    >>> from torch.distributed.tensor import Shard
    >>> rows = torch.arange(3.0) if mesh.get_rank() == 0 else torch.arange(3.0, 5.0)
    >>> x = scidata.ShardTensor.from_local(rows, mesh["domain"], [Shard(0)])
    >>> tuple(x.shape), x.sharding_shapes()
    ((5,), {0: (torch.Size([3]), torch.Size([2]))})
    >>> x.mean()  # of the whole, and the same on each rank: a plain tensor
    tensor(2.)
    >>> (2 * x).full_tensor()
    tensor([0., 2., 4., 6., 8.])
    """

    __slots__ = ()

    # -- making -------------------------------------------------------------------------------------------------

    @classmethod
    def from_local(
        cls,
        local: Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        sharding_shapes: str | layouts.Shapes = "infer",
        global_shape: Sequence[int] | None = None,
    ) -> ShardTensor:
        """Wrap this rank's part.

        Parameters
        ----------
        local : Tensor
            This rank's part; its graph stays connected. The whole lies in memory as the parts do (channels_last, say),
            which random numbers go by. Where only explicit shapes are given and some rank has one row or none, that is
            known of row-major parts alone: of others, random operations ask for ``contiguous()``.
        device_mesh : DeviceMesh
            The domain axes only.
        placements : Sequence[Placement]
            ``Shard(dim)`` or ``Replicate()``, one per mesh axis. ``Partial()`` is added up at once: Collective.
        sharding_shapes : str or Mapping[int, Sequence[torch.Size]], default "infer"
            Local shape of each rank along each mesh axis that shards: ``{axis: [shape, ...]}``, no communication. Or
            ``"infer"``: Collective, one gather of shapes per axis. Or ``"chunk"``: as ``torch.chunk`` splits
            ``global_shape``.
        global_shape : Sequence[int] or None, optional
            Of the whole; needed for ``sharding_shapes="chunk"``.

        Raises
        ------
        ShardLayoutError
            Parts that do not fit together.

        Examples
        --------
        >>> parts = scidata.ShardTensor.from_local(rows, mesh["domain"], [Shard(0)], sharding_shapes={0: [(3,), (2,)]})
        """
        if isinstance(local, ShardTensor):
            raise ShardLayoutError("from_local takes this rank's plain part, not a ShardTensor; use redistribute()")
        layouts.check_layout(local, placements)
        part, spec, laid = layouts.part_and_spec(
            local, device_mesh, placements, sharding_shapes, global_shape, own_strides(local)
        )
        strides = memory_of(part) if spec.is_replicated else memory_of_parts(spec, laid)
        return cls(part, spec, global_strides=strides)

    @classmethod
    def from_dtensor(cls, dtensor: DTensor) -> ShardTensor:
        """Wrap the local part of a DTensor, as :func:`scidata.from_dtensor` does.

        Parameters
        ----------
        dtensor : DTensor
            Its placements are ``Shard`` or ``Replicate``.

        Examples
        --------
        >>> from torch.distributed.tensor import distribute_tensor
        >>> d = distribute_tensor(torch.arange(4.0), mesh["domain"], [Shard(0)])
        >>> scidata.ShardTensor.from_dtensor(d).sum()
        tensor(6.)
        """
        spec, part = layouts.spec_of_dtensor(dtensor), dtensor.to_local()
        strides = memory_of_parts(spec, [(tuple(part.shape), own_strides(part))])
        return cls(part, spec, global_strides=strides)

    @classmethod
    def from_padded(cls, padded: Tensor, spec: ShardSpec, halo: Mapping[int, HaloDim]) -> ShardTensor:
        """Wrap a part that was read together with its halo; no copy, no communication.

        - ``padded``: owned rows and halo in one tensor. The halo's real widths are those of
          :func:`scidata.core.bounds.halo_widths`.
        - ``halo``: the widths that were asked for along each tensor dim; a dim that is not sharded counts as one part.

        Raises ShardLayoutError: ``padded`` does not have the owned shape plus its halo.
        """
        wanted = {dim % spec.ndim: widths for dim, widths in halo.items()}
        strides = memory_of_parts(spec, [(tuple(padded.shape), own_strides(padded))])
        return cls(owned_of(padded, spec, wanted), spec, padded=padded, halo=wanted, global_strides=strides)

    def like(self, local: Tensor, spec: ShardSpec, copied: ViewState | None, strides: Strides | None) -> ShardTensor:
        """Return a plain ShardTensor of another part."""
        return ShardTensor(local, spec, copied=copied, global_strides=strides)

    # -- layout -------------------------------------------------------------------------------------------------

    # these four are asked for so often that the way through the table would show

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape."""
        return self.spec.global_size

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dims."""
        return self.spec.ndim

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of all parts."""
        return self.local.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where this rank's part lies."""
        return self.local.device

    @property
    def device_mesh(self) -> DeviceMesh:
        """The domain axes."""
        return self.spec.device_mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """``Shard(dim)`` or ``Replicate()``, one per mesh axis."""
        return self.spec.placements

    @property
    def offsets(self) -> layouts.Offsets:
        """Global index of the own part's first element along each dim; ``offsets()``: along each mesh axis."""
        return layouts.Offsets(self.spec)

    def sharding_shapes(self) -> dict[int, tuple[torch.Size, ...]]:
        """Return the local shapes of the ranks along each mesh axis that shards.

        Examples
        --------
        >>> x.sharding_shapes()
        {0: (torch.Size([3]), torch.Size([2]))}
        """
        spec, result = self.spec, {}
        for dim, axis in spec.sharded.items():
            before, after = spec.local_shape[:dim], spec.local_shape[dim + 1 :]
            result[axis] = tuple(torch.Size((*before, size, *after)) for size in spec.sizes_of(axis))
        return result

    # -- values -------------------------------------------------------------------------------------------------

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the owned part, connected to the graph; no copy.

        Its gradient is taken as lying as the part does; where that is replicated, ``Partial()`` in ``grad_placements``
        says that it is to be summed over the ranks of the axis. A mean over the part, ``mse_loss(model(x).to_local(),
        y.to_local())``, gives weights gradients that are too large by the number of ranks, over which they are summed:
        give the loss the ShardTensors, or divide a sum over the part by the global count, ``y.numel()``.

        Writing to it makes the ghosts of a held halo old, so that the next use exchanges them (Collective): write on
        all ranks of the mesh or on none. Collective if this is a copy for which torch has a view (``x[i]``), and
        the original was written to since.

        Parameters
        ----------
        grad_placements : Sequence[Placement] or None, optional
            How the gradient of the part lies over the mesh axes; default as the part.

        Examples
        --------
        >>> torch.equal(x.to_local(), rows)
        True
        """
        self.refresh()
        return layouts.with_gradient(self.local, self.spec, grad_placements)

    @checked_keywords
    def local_with_halo(
        self, halo: Mapping[int, int | tuple[int, int]] | None = None, periodic: Sequence[int] = ()
    ) -> Tensor:
        """Return the owned part with its halo.

        As read, without communication, where the tensor holds its halo; otherwise the halo is exchanged
        (Collective), differentiably.

        Parameters
        ----------
        halo : Mapping[int, int or tuple[int, int]] or None, optional
            ``{dim: width or (lo, hi)}``, for a tensor without a halo of its own or for other widths.
        periodic : Sequence[int], default ()
            Dims of ``halo`` that wrap.

        Raises
        ------
        ShardLayoutError
            There is no halo and no widths were given.

        Examples
        --------
        >>> tuple(x.local_with_halo({0: 1}).shape) in [(4,), (3,)]
        True
        """
        self.refresh()
        if halo is not None:
            return exchange_halo(self.local, self.spec, halo_dims(halo, periodic, self.spec))
        held = self.held_halo()
        if held is not None:
            return held
        if not self.halo:
            raise ShardLayoutError(f"this tensor has no halo ({self.spec}); pass widths, e.g. halo={{0: 1}}")
        return exchange_halo(self.local, self.spec, self.halo)

    def as_subclass(self, cls: type[Tensor]) -> Tensor:  # type: ignore[override]  # torch asks no rule for it
        """Return the tensor itself for ``torch.Tensor``, of which models make plain tensors.

        Parameters
        ----------
        cls : type[Tensor]
            ``torch.Tensor``; UnsupportedShardOp is raised for other classes.

        Examples
        --------
        >>> x.as_subclass(torch.Tensor) is x
        True
        """
        if cls is not Tensor:
            raise unsupported(Tensor.as_subclass, f"{cls.__name__} is another kind of tensor", self.spec)
        return self

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the whole tensor on each rank, plain. Collective. Its gradient is taken as replicated, or as
        ``Partial()`` where ``grad_placements`` says so.

        Edges come in the order of one process, or where that is not known, one rank's after the other's.

        Parameters
        ----------
        grad_placements : Sequence[Placement] or None, optional
            How the gradient of the whole lies over the mesh axes; default replicated.

        Examples
        --------
        >>> x.full_tensor()
        tensor([0., 1., 2., 3., 4.])
        """
        self.refresh()
        full = as_in_one_process(gather_full(self.local, self.spec), self.spec)
        return layouts.with_gradient(full, self.spec, grad_placements, whole=True)

    @checked_keywords
    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        sizes: Sizes | None = None,
    ) -> ShardTensor:
        """Return the tensor in another layout; any change drops the halo. Collective.

        Parameters
        ----------
        device_mesh : DeviceMesh or None, optional
            None or the tensor's own mesh.
        placements : Sequence[Placement] or None, optional
            Default: as they are, for new ``sizes``.
        sizes : Mapping[int, Sequence[int]] or None, optional
            ``{mesh axis: sizes}``. Default: the old sizes where an axis shards the same dim, else even ones.

        Raises
        ------
        ShardLayoutError
            Another mesh, or sizes that do not fit.
        UnsupportedShardOp
            Edges of a graph whose order in one process is not known.

        Examples
        --------
        >>> x.redistribute(sizes={0: (1, 4)}).sharding_shapes()
        {0: (torch.Size([1]), torch.Size([4]))}
        """
        if device_mesh is not None and device_mesh != self.spec.device_mesh:
            raise ShardLayoutError(
                f"cannot redistribute from {self.spec.device_mesh} to another mesh {device_mesh}; "
                "use full_tensor() and scatter_tensor()"
            )
        self.refresh()
        if placements is not None:
            layouts.check_layout(None, placements)
        wanted = self.placements if placements is None else tuple(placements)
        given = by_axis(sizes or {}, self.spec.axes, as_sizes)
        # the target has the sizes, so that their ids stay theirs
        parts = [(axis, None if each is None else id(facts_of(each).sizes)) for axis, each in given.items()]
        make = partial(layouts.target_spec, self.spec, wanted, sizes)
        target = self.spec.plans.get_or_make(("redistribute", wanted, *parts), make)
        if (target.dims, target.sizes) == (self.spec.dims, self.spec.sizes):
            return self
        local = change_layout(in_one_order(ShardTensor.redistribute, self.local, self.spec)[0], self.spec, target)
        if target.is_replicated and self.global_strides is not None and self.global_strides is not UNKNOWN:
            local = laid_out(local, self.global_strides)  # operations on it are those on a plain tensor
        return ShardTensor(local, target, global_strides=self.global_strides)

    # -- autograd: all of it lives on the local part --------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        """Whether the local part requires grad."""
        return self.local.requires_grad or (self.copied is not None and self.copied.will_require_grad())

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ShardTensor:
        """Set whether gradients are kept, in place.

        Parameters
        ----------
        requires_grad : bool, default True
            Whether operations are recorded.

        Examples
        --------
        >>> leaf = (2 * x).requires_grad_()
        """
        self.local.requires_grad_(requires_grad)
        return self

    @property  # type: ignore[override]
    def grad(self) -> ShardTensor | None:
        """The gradient, a ShardTensor of the same layout."""
        local, retained = self.local, vars(self).get("_retained")
        grad = None if retained is None and local.retains_grad else local.grad  # not what is kept for a view alone
        if retained is not None:
            base, version = retained
            if base is not local and base_of(local) is base and version_of(base) != version:
                grad = part_of_gradient(base, local)
        if grad is None:
            refuse_no_gradient(self)
            return None
        # autograd lays a leaf's gradient out as the leaf; retained gradients of others are row-major
        strides = dense(self.global_strides, self.spec.global_shape) if self.local.is_leaf else None
        return ShardTensor(grad, self.spec, global_strides=strides)

    @grad.setter
    def grad(self, value: ShardTensor | None) -> None:
        if value is not None and (not isinstance(value, ShardTensor) or value.spec != self.spec):
            if isinstance(value, Tensor) and not isinstance(value, ShardTensor):  # by warp.from_torch
                why, remedy = "a kernel would write gradients of this part alone", "give it detach().full_tensor()"
                raise unsupported(Tensor.data_ptr, why, self.spec, remedy=remedy)
            raise ShardLayoutError(f"grad must be None or a ShardTensor of the same layout ({self.spec})")
        if value is None and "_retained" in vars(self):
            vars(self)["_retained"][0].grad = None
        self.local.grad = None if value is None else value.local

    @property
    def grad_fn(self) -> Node | None:  # type: ignore[override]
        """The local part's grad_fn."""
        return self.local.grad_fn

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether the local part is a leaf."""
        return self.local.is_leaf

    def retain_grad(self) -> None:
        """Keep the gradient of a non-leaf tensor.

        Examples
        --------
        >>> leaf = (2 * x).requires_grad_()
        >>> middle = leaf * leaf
        >>> middle.retain_grad()
        >>> middle.sum().backward()
        >>> middle.grad.sum()
        tensor(5.)
        """
        self.local.retain_grad()
        # A result that is new in torch may be a view here, of padded rows, say. After a write, gradients through other
        # views of it arrive at their common base alone.
        base = base_of(self.local)
        if base.grad_fn is None or base.dtype != self.local.dtype:
            base = self.local
        base.retain_grad()
        vars(self)["_retained"] = base, version_of(base)

    def register_hook(self, hook: Callable[[ShardTensor], Tensor | None]) -> RemovableHandle:
        """Call ``hook`` with the gradient, a ShardTensor, when it is computed; its result replaces the gradient.

        Parameters
        ----------
        hook : Callable[[ShardTensor], Tensor or None]
            Returns a gradient of the same layout, or None.

        Raises
        ------
        ShardLayoutError
            In backward: the hook returned something of another layout.

        Examples
        --------
        >>> leaf = (2 * x).requires_grad_()
        >>> _ = leaf.register_hook(lambda gradient: 2 * gradient)
        >>> leaf.sum().backward()
        >>> leaf.grad.sum()
        tensor(10.)
        """

        def on_local(grad: Tensor) -> Tensor | None:
            gradient = gradient_of(self, grad)
            assert isinstance(gradient, ShardTensor)
            changed = hook(gradient)
            if isinstance(changed, ShardTensor) and changed.spec == self.spec:
                return changed.local
            if changed is not None and (isinstance(changed, ShardTensor) or not self.spec.is_replicated):
                raise ShardLayoutError(f"a hook must return None or a ShardTensor of the same layout ({self.spec})")
            return changed

        return self.local.register_hook(on_local)  # type: ignore[no-untyped-call]

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensor | Sequence[Tensor] | None = None,
    ) -> None:
        """Backpropagate a gradient. Collective.

        Parameters
        ----------
        gradient : Tensor or None, optional
            A ShardTensor, or the whole gradient, the same on each rank; needed unless the tensor is one number.
        retain_graph : bool or None, optional
            Keep the graph for another backward.
        create_graph : bool, default False
            Record a graph of the gradients.
        inputs : Tensor or Sequence[Tensor] or None, optional
            Leaves whose gradients are added up; default all.

        Examples
        --------
        >>> leaf = (2 * x).requires_grad_()
        >>> (leaf * leaf).backward(torch.ones_like(leaf))
        >>> leaf.grad.sum()
        tensor(40.)
        """
        torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)

    # -- being a tensor ---------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: Types, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        if len(types) > 1:
            for kind in types:
                if kind is not Tensor and not issubclass(kind, ShardTensor):
                    return NotImplemented
        return dispatch(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: TorchFunction, types: Types, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        handler = handler_of_operator(func) if getattr(func, "namespace", None) == "aten" else None
        if handler is not None:  # of what is called by functions that ask no __torch_function__
            with enable_reentrant_dispatch():
                return handler(func, types, args, kwargs or {})
        specs = [x.spec for x in tree_flatten((args, kwargs))[0] if isinstance(x, ShardTensor)]
        raise unsupported(func, "reached the dispatcher without a rule for sharded tensors", *specs)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        grad = f", grad_fn={self.grad_fn.name()}" if self.grad_fn else ", requires_grad=True" * self.requires_grad
        halo = f", halo={dict(self.halo)}" if self.halo else ""
        return (
            f"ShardTensor({self.spec}, local shape {self.spec.local_shape}, dtype={self.local.dtype}, "
            f"device='{self.local.device}'{halo}{grad})"
        )

    __str__ = __repr__

    def _repr_html_(self) -> str:
        halo = ", ".join(f"dim {dim}: {each}" for dim, each in self.halo.items())
        return layout_card(self.spec, {"dtype": str(self.local.dtype), "device": str(self.device), "halo": halo})

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def __hash__(self) -> int:
        return id(self)

    def __dir__(self) -> list[str]:
        return dir(type(self))

    def __deepcopy__(self, memo: dict[int, object]) -> ShardTensor:
        if self.padded is not None and self.held_halo() is not None:
            padded = copy.deepcopy(self.padded, memo)
            local = owned_of(padded, self.spec, self.halo)
        else:
            padded, local = None, copy.deepcopy(self.local, memo)
        result = ShardTensor(local, self.spec, padded=padded, halo=self.halo, global_strides=self.global_strides)
        memo[id(self)] = result
        result.__dict__.update(copy.deepcopy(self.__dict__, memo))  # torch's mark of a parameter is there
        return result

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return saved(self, ShardTensor)


add_safe_globals([ShardTensor, load_part])  # for torch.load(weights_only=True)
