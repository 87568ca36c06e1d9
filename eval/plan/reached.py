"""What share of its ceiling each measured row reached, and what a plan that had not seen the row would have said."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from quantkit.eval.plan.efficiency import efficiency_on
from quantkit.eval.plan.gpus import GPUS
from quantkit.eval.plan.measured import Row, ceiling_of, known_rows


@dataclass(frozen=True)
class Reached:
    """Tokens a second of whole answers."""

    row: Row
    ceiling: float
    predicted: float  # by the other rows

    @property
    def percent(self) -> float:
        return 100 * self.row.tokens_per_second / self.ceiling

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted / self.row.tokens_per_second - 1

    def to_dict(self) -> dict[str, object]:
        return {
            "row": self.row.title,
            "kv_dtype": self.row.case.kv_dtype,
            "tokens_per_second": self.row.tokens_per_second,
            "ceiling": self.ceiling,
            "percent_of_ceiling": self.percent,
            "predicted_without_it": self.predicted,
            "error_percent": 100 * self.error,
        }


def reached(row: Row) -> Reached:
    case, ceiling = row.case, ceiling_of(row.case)
    routed = bool(ceiling.weights.routed)
    others = efficiency_on(GPUS[case.gpu], routed=routed, leave_out=frozenset([case]))
    load = case.batch, case.prompt, case.new
    return Reached(row, ceiling.answer_tokens_per_second(*load), others.answer_tokens_per_second(ceiling, *load))


def reached_by(schemes: Collection[str], *, routed: bool) -> tuple[Reached, ...]:
    """All rows of these layouts, of models with or without experts."""
    rows = known_rows(routed=routed)
    return tuple(reached(row) for row in rows if ceiling_of(row.case).weights.scheme in schemes)
