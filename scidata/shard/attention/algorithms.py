"""How attention over a sharded sequence is computed: a setting, and the default picked by size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from scidata.core.keywords import checked_keywords
from scidata.errors import ConfigError, near_matches

ALGORITHMS = ("auto", "gather", "ring", "heads")
_GATHER_BELOW = 64 * 2**20  # bytes of the whole keys and values: one round, and no memory that matters

_algorithm: ContextVar[str] = ContextVar("scidata_attention", default="auto")


@checked_keywords
@contextmanager
def attention(way: str) -> Iterator[None]:
    """Choose how ``scaled_dot_product_attention`` works where the sequence is sharded; the result is the same.

    Parameters
    ----------
    way : str
        ``"gather"``: each rank gathers all keys and values. ``"ring"``: blocks of keys and values are passed from rank
        to rank while each computes with the one it holds; memory grows with the block. ``"heads"``: the sequence is
        exchanged for heads and back (Ulysses); needs heads, best a multiple of the ranks. ``"auto"``, the default:
        gather while keys and values are small (64 MiB), else heads where they divide evenly, else ring.

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
    if way not in ALGORITHMS:
        raise ConfigError(
            f"attention must be one of {', '.join(ALGORITHMS)}, not {way!r}{near_matches(way, ALGORITHMS)}"
        )
    token = _algorithm.set(way)
    try:
        yield
    finally:
        _algorithm.reset(token)


def chosen_algorithm(num_ranks: int, num_heads: int, num_bytes: int) -> str:
    """Return the algorithm to use, the same on each rank.

    ``num_heads`` is 0 where the heads cannot be exchanged for the sequence. ``num_bytes`` counts all keys and values of
    a rank's batch and heads.
    """
    way = _algorithm.get()
    if way != "auto":
        return way
    if num_bytes <= _GATHER_BELOW:
        return "gather"
    return "heads" if num_heads and num_heads % num_ranks == 0 else "ring"
