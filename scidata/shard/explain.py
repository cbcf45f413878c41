"""List a model's operations on sharded tensors in order: layouts, bytes sent, and the rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.overrides import TorchFunctionMode

from scidata.errors import ConfigError
from scidata.shard.attention.algorithms import note_algorithm
from scidata.shard.comm.transport import count_sent
from scidata.shard.compile import regions_of
from scidata.shard.gathering import Gathering, gathered
from scidata.shard.op_table import HANDLERS, OF_THE_WHOLE, TorchFunction, Types, handler_of_operator, op_name
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import tree_leaves


@dataclass(frozen=True, kw_only=True)
class ExplainedOp:
    """One operation of a forward pass.

    ``rule``: the family of the op table that served it, ``"replicated"`` where no axis shards any of its tensors, or
    ``"gather"`` where there is no rule. Of attention over a sharded sequence also how, by the names of
    :func:`scidata.attention`: ``"attention, heads"``.
    """

    name: str  # the public name of the torch function
    inputs: tuple[str, ...]  # the layouts of its sharded tensors, plain ones left out
    outputs: tuple[str, ...]
    bytes_sent: int  # by this rank, of reductions as many as in a ring
    rule: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """All operations in order, as an eager step runs them, and the result of the model; ``str`` makes a table of it.

    ``compiled`` has a line for each region of a model of :func:`scidata.compile`: its graphs, or why there are none.
    """

    ops: tuple[ExplainedOp, ...]
    result: object
    compiled: tuple[str, ...] = ()

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
        return "\n".join([*lines, end, *self.compiled])


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
    if not callable(model):
        raise ConfigError(f"model: expected a module or a function, not {type(model).__name__}")
    with gathered(quiet=True) as gathering, _Recorder(gathering) as recorder:
        result = model(*args, **kwargs)
    compiled = [str(region) for region in regions_of(model)]
    return Explanation(ops=tuple(recorder.ops), result=result, compiled=tuple(compiled))


class _Recorder(TorchFunctionMode):
    """Lists the calls with a ShardTensor, without the calls of their handlers: torch leaves the mode during a call."""

    def __init__(self, gathering: Gathering) -> None:
        super().__init__()
        self.ops: list[ExplainedOp] = []
        self._gathering = gathering

    def __torch_function__(
        self, func: TorchFunction, types: Types, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        inputs = [x.spec for x in tree_leaves((args, kwargs or {})) if isinstance(x, ShardTensor)]
        handler = HANDLERS.get(func) or handler_of_operator(func)
        sent, calls = count_sent(), self._gathering.calls
        note_algorithm()
        result = func(*args, **(kwargs or {}))
        if not inputs or handler in OF_THE_WHOLE:
            return result
        if self._gathering.calls > calls:
            rule = "gather"
        elif handler is None or all(spec.is_replicated for spec in inputs):
            rule = "replicated"
        else:
            rule = handler.__module__.rsplit(".", 1)[-1].replace("_", " ")
            way = note_algorithm()
            rule = f"{rule}, {way}" if way else rule
        outputs = [str(x.spec) for x in tree_leaves(result) if isinstance(x, ShardTensor)]
        op = ExplainedOp(
            name=op_name(func),
            inputs=tuple(map(str, inputs)),
            outputs=tuple(outputs),
            bytes_sent=count_sent() - sent,
            rule=rule,
        )
        self.ops.append(op)
        return result
