"""Shared by tests: N32."""

from __future__ import annotations

N32 = [20, 27, 36, 40, 45, 50, 60, 64, 72, 75, 80, 90, 90, 96, 100, 108, 108, 120, 120, 120] + [128] * 12
