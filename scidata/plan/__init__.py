"""Selections × chunks → byte ranges. Pure arithmetic on metadata: no I/O, no torch."""

from scidata.plan.array import ArrayPlan, chunks_needed, plan_array
from scidata.plan.family import PlanFamily
from scidata.plan.kept import KeptPlans
from scidata.plan.totals import PlanSummary, ReadPlan, summarize

__all__ = [
    "ArrayPlan",
    "KeptPlans",
    "PlanFamily",
    "PlanSummary",
    "ReadPlan",
    "chunks_needed",
    "plan_array",
    "summarize",
]
