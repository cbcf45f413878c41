"""How attention over a sharded sequence is computed: a setting, and the default picked by sizes and heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from scidata.core.checks import check_choice
from scidata.core.keywords import checked_keywords

ALGORITHMS = ("auto", "gather", "ring", "heads")
_GATHER_BELOW = 64 * 2**20  # bytes of the whole keys and values: no memory that matters
# Bytes a rank that are worth an exchange more. Over gloo, 4 ranks on two cores: 98 KB saved are even, 25 KB lose half.
_ROUND = 2**17

_algorithm: ContextVar[str] = ContextVar("scidata_attention", default="auto")
_last: ContextVar[str] = ContextVar("scidata_last_attention", default="")


@checked_keywords
@contextmanager
def attention(way: str) -> Iterator[None]:
    """Choose the algorithm of ``scaled_dot_product_attention`` over a sharded sequence; the result does not change.

    Parameters
    ----------
    way : str
        ``"gather"``: each rank gathers all keys and values. ``"ring"``: blocks of keys and values are passed from rank
        to rank while each computes with the one it holds; memory grows with the block. ``"heads"``: the sequence is
        exchanged for heads and back (Ulysses); needs heads, best a multiple of the ranks. ``"auto"``, the default:
        heads where they divide evenly and send less (from three ranks on) or less memory is held, else gather while
        keys and values are small (64 MiB), else ring. :func:`scidata.explain` says which.

    Raises
    ------
    ConfigError
        An unknown algorithm.

    Examples
    --------
    On each of two ranks:

    >>> mesh = scidata.init_mesh(domain=2)
    >>> from torch.distributed.tensor import Shard
    >>> q = scidata.scatter_tensor(torch.randn(1, 2, 6, 4), 0, mesh["domain"], [Shard(2)])  # (B, heads, sequence, E)
    >>> by_gather = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    >>> with scidata.attention("ring"):
    ...     by_ring = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    >>> torch.allclose(by_gather, by_ring, atol=1e-6)
    True
    """
    check_choice("attention", way, ALGORITHMS)
    token = _algorithm.set(way)
    try:
        yield
    finally:
        _algorithm.reset(token)


def chosen_by_user() -> str:
    """Return the algorithm of the enclosing :func:`attention` block."""
    return _algorithm.get()


def chosen_algorithm(num_ranks: int, num_heads: int, gathered: int, exchanged: int, beside: int = 0) -> str:
    """Return the algorithm to use, equal on each rank.

    ``num_heads``: of keys; 0 if the heads cannot be exchanged for the sequence.
    ``gathered``: bytes of all keys and values of a rank's batch and heads, which a gather brings to each rank.
    ``exchanged``: bytes of all queries, keys, values and results, of which each rank sends its part in exchange for
    heads.
    ``beside``: bytes that are gathered for these: of a mask that is sharded along the queries.
    """
    way = _algorithm.get()
    if way != "auto":
        return way
    is_even = bool(num_heads) and num_heads % num_ranks == 0
    if gathered > _GATHER_BELOW:
        return "heads" if is_even else "ring"
    others = num_ranks - 1
    sends_less = gathered * others - (exchanged // num_ranks + beside) * others > _ROUND * num_ranks
    return "heads" if is_even and sends_less else "gather"


def note_algorithm(way: str = "") -> str:
    """Note the algorithm that an operation takes, for ``explain``; return the one noted before."""
    before = _last.get()
    _last.set(way)
    return before
