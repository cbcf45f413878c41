"""Rows that move between the ranks of a domain: halos, padding, redistribution."""
