"""Joins beside pandas: random keys, and random data sets read on several ranks; ``python -m tests.joins``."""
