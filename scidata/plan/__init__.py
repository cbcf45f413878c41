"""Selections × chunks → byte ranges. Pure arithmetic on metadata: no I/O, no torch."""
