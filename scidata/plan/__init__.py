"""Selections × chunks → byte ranges. Pure arithmetic on metadata: no I/O, no torch."""

from scidata.plan.array import ArrayPlan, PlanSummary, ReadPlan, chunks_needed, plan_array, summarize
from scidata.plan.family import PlanFamily

__all__ = ["ArrayPlan", "PlanFamily", "PlanSummary", "ReadPlan", "chunks_needed", "plan_array", "summarize"]
