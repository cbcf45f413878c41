"""Windows of random tables held against pandas: ``python -m tests.windows``."""
