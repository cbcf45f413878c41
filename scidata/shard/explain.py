"""List a model's operations on sharded tensors in order: layouts, bytes sent, and the rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from scidata.shard.comm.transport import count_sent
from scidata.shard.gathering import Gathering
from scidata.shard.op_table import FALLBACKS, HANDLERS, OF_THE_WHOLE, TorchFunction, Types, handler_of_operator, op_name
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import tree_leaves


@dataclass(frozen=True, kw_only=True)
class ExplainedOp:
    """One operation of a forward pass.

    Attributes
    ----------
    name
        The public name of the torch function.
    inputs, outputs
        The layouts of its sharded tensors, plain ones left out.
    bytes_sent
        How many bytes this rank sent, of reductions as many as in a ring.
    rule
        The family of the op table that served it, ``"replicated"`` where no axis shards any of its tensors, or
        ``"gather"`` where there is no rule.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    bytes_sent: int
    rule: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """All operations in order, and the result of the model; ``str`` makes a table of it."""

    ops: tuple[ExplainedOp, ...]
    result: object

    @property
    def bytes_sent(self) -> int:
        """How many bytes this rank sent in all."""
        return sum(op.bytes_sent for op in self.ops)

    @property
    def gathered(self) -> tuple[str, ...]:
        """The names of the operations that have no rule, each once."""
        return tuple(dict.fromkeys(op.name for op in self.ops if op.rule == "gather"))

    def __str__(self) -> str:
        rows = [("operation", "bytes sent", "rule", "layouts")]
        for op in self.ops:
            layouts = f"{'; '.join(op.inputs)} -> {'; '.join(op.outputs) or 'plain'}"
            rows.append((op.name, f"{op.bytes_sent:,}", op.rule, layouts))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            f"{name:<{widths[0]}}  {sent:>{widths[1]}}  {rule:<{widths[2]}}  {layouts}"
            for name, sent, rule, layouts in rows
        ]
        end = f"{len(self.ops)} operations, {self.bytes_sent:,} bytes sent by this rank"
        if self.gathered:
            end += f"; without a rule, so on gathered tensors: {', '.join(self.gathered)}"
        return "\n".join([*lines, end])


def explain(model: Callable[..., object], *args: object, **kwargs: object) -> Explanation:
    """Run a model once, and list each operation on sharded tensors.

    Operations without a rule run on gathered tensors, as in a block of :func:`scidata.gather`. Collective.

    Parameters
    ----------
    model : Callable[..., object]
        A module or function.
    *args, **kwargs : object
        Its arguments.

    Returns
    -------
    explanation
        ``print`` shows a table; ``ops`` has a row for each operation.

    Raises
    ------
    UnsupportedShardOp
        An operation that gathered tensors cannot stand in for: see :func:`scidata.gather`.

    Examples
    --------
    >>> from torch.distributed.tensor import Shard
    >>> mesh = scidata.init_mesh()
    >>> x = scidata.scatter_tensor(torch.randn(1, 3, 8, 8), 0, mesh["domain"], [Shard(2)])
    >>> explanation = scidata.explain(torch.nn.Conv2d(3, 4, 3, padding=1), x)
    >>> [row.rule for row in explanation.ops]
    ['conv']
    >>> print(explanation)  # doctest: +ELLIPSIS
    operation                   bytes sent  rule  layouts
    torch.nn.functional.conv2d           0  conv  Shard(2) on 'domain' sizes (8,), global shape (1, 3, 8, 8) -> ...
    1 operations, 0 bytes sent by this rank
    """
    ops: list[ExplainedOp] = []
    gathering = Gathering(quiet=True)
    FALLBACKS.append(gathering)
    try:
        with _recorded(ops, gathering):
            result = model(*args, **kwargs)
    finally:
        FALLBACKS.remove(gathering)
    return Explanation(ops=tuple(ops), result=result)


@contextmanager
def _recorded(ops: list[ExplainedOp], gathering: Gathering) -> Iterator[None]:
    """Record the calls that arrive at ShardTensor, but not those that their handlers make."""
    usual = ShardTensor.__dict__["__torch_function__"]
    inside = [False]

    def record(
        cls: type[ShardTensor],
        func: TorchFunction,
        types: Types,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        run = usual.__get__(None, cls)
        handler = HANDLERS.get(func) or handler_of_operator(func)
        if inside[0] or handler in OF_THE_WHOLE:
            return run(func, types, args, kwargs)
        inputs = [x.spec for x in tree_leaves((args, kwargs or {})) if isinstance(x, ShardTensor)]
        sent, calls = count_sent(), gathering.calls
        inside[0] = True
        try:
            result = run(func, types, args, kwargs)
        finally:
            inside[0] = False
        outputs = [x.spec for x in tree_leaves(result) if isinstance(x, ShardTensor)]
        if gathering.calls > calls:
            rule = "gather"
        elif handler is None or all(spec.is_replicated for spec in inputs):
            rule = "replicated"
        else:
            rule = handler.__module__.rsplit(".", 1)[-1].replace("_", " ")
        ops.append(
            ExplainedOp(
                name=op_name(func),
                inputs=tuple(map(str, inputs)),
                outputs=tuple(map(str, outputs)),
                bytes_sent=count_sent() - sent,
                rule=rule,
            )
        )
        return result

    ShardTensor.__torch_function__ = classmethod(record)  # type: ignore[assignment]
    try:
        yield
    finally:
        ShardTensor.__torch_function__ = usual  # type: ignore[method-assign]
