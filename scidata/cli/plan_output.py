"""How ``scidata plan`` shows what it found, of whatever kind of data: a table, JSON, a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scidata.cli.arguments import usage_error
from scidata.cli.output import console, print_json
from scidata.cli.tables import print_bullets
from scidata.grids.plan import DomainPlan
from scidata.store.plan import StorePlan


@dataclass(frozen=True, kw_only=True)
class PlanOutput:
    """What is planned, and how that is shown: the options that all kinds share, as typed."""

    sample: int
    dp: int | None
    plot: str | None
    overwrite: bool
    every_rank: bool
    as_json: bool

    def check_picture(self) -> None:
        """Refuse a picture that cannot be drawn there, before the work is done."""
        if self.plot is not None:
            from scidata.data.pictures.grid_parts import check_picture

            check_picture(self.plot, overwrite=self.overwrite)

    def check_sample(self, num_samples: int) -> None:
        """Refuse a sample that is not there."""
        if not 0 <= self.sample < num_samples:
            raise usage_error("--sample", f"{self.sample} is out of range: there are {num_samples} samples.")

    def show(
        self, plan: DomainPlan | StorePlan, about: Mapping[str, Any], print_table: Callable[..., None], notes: list[str]
    ) -> None:
        """Print the plan; ``notes`` are on the picture, which is drawn."""
        picture = {} if self.plot is None else {"plot": self.plot, "plot_notes": notes}
        if self.as_json:
            ranks = [plan.rank(rank) for rank in range(plan.num_ranks)]
            print_json({**about, **picture, "totals": plan.totals(), "ranks": ranks})
            return
        print_table(plan, about, every_rank=self.every_rank)
        if self.plot is not None:
            console().print(f"picture: {self.plot}", soft_wrap=True)
            print_bullets("note", notes, "yellow")
