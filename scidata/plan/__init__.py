"""Selections × chunks → byte ranges. Pure arithmetic on metadata: no I/O, no torch."""

from scidata.plan.array import MAX_PLAN_BYTES, ArrayPlan, chunks_needed, plan_array
from scidata.plan.family import PlanFamily
from scidata.plan.totals import PlanSummary, ReadPlan, summarize

__all__ = [
    "MAX_PLAN_BYTES",
    "ArrayPlan",
    "PlanFamily",
    "PlanSummary",
    "ReadPlan",
    "chunks_needed",
    "plan_array",
    "summarize",
]
