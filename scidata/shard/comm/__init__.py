"""Collectives with uneven parts, and the code below them."""
