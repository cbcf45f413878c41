"""Collectives with uneven parts, and their foundations."""
