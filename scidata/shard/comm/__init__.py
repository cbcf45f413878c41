"""Collectives with uneven parts, and what they stand on."""
