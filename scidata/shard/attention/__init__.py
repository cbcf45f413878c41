"""Attention over sharded tokens: ring, all-to-all and gathered."""
