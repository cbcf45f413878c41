"""Blocks of decoded rows that samples share: kept in memory, on disk, or made once for the ranks of a node."""
