"""What plans of grids and of stores say of bytes, in the same words."""

from __future__ import annotations

from typing import Any


def over(part: Any, whole: Any) -> float | None:
    """Return ``part / whole``; None where nothing is wanted."""
    return float(part) / float(whole) if whole else None


def read_figures(wanted: Any, fetched: Any, decoded: Any, num_chunks: Any) -> dict[str, Any]:
    """Describe a read in plain values: its bytes and chunks, and how many times over what is wanted it takes."""
    return {
        "bytes_wanted": int(wanted),
        "bytes_fetched": int(fetched),
        "bytes_decoded": int(decoded),
        "num_chunks": int(num_chunks),
        "amplification": over(fetched, wanted),
        "decode_amplification": over(decoded, wanted),
    }
