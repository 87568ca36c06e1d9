"""What tasks brought: scores with their standard errors, and what is needed to repeat them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Score:
    """One metric of one task."""

    task: str
    metric: str
    value: float
    stderr: float | None  # None where lm-eval has none for the metric
    n: int  # items
    higher_is_better: bool | None
    filter: str = "none"  # what was done to answers before they were judged

    @property
    def name(self) -> str:
        return self.metric if self.filter == "none" else f"{self.metric} ({self.filter})"


@dataclass(frozen=True)
class Setting:
    """How tasks were run."""

    model: str
    backend: str  # runtime | reference
    device: str
    dtype: str | None  # None: what suits the checkpoint and the device, until it is known
    limit: int | None
    fewshot: int | None  # None: as each task says
    chat_template: bool
    seed: int


@dataclass(frozen=True)
class TaskResults:
    setting: Setting
    scores: tuple[Score, ...]
    task_versions: Mapping[str, Any]
    packages: Mapping[str, str]
    truncated: int | None = None  # items that were cut to the model's context; None where nobody counted
    samples: Mapping[str, list[dict[str, Any]]] | None = None  # by task: every item with what the model said

    def to_dict(self) -> dict[str, Any]:
        found = {
            **asdict(self.setting),
            "scores": [asdict(score) for score in self.scores],
            "truncated": self.truncated,
            "task_versions": dict(self.task_versions),
            "packages": dict(self.packages),
        }
        return found if self.samples is None else found | {"samples": dict(self.samples)}


def read_scores(found: Mapping[str, Any]) -> tuple[Score, ...]:
    """The scores in what lm-eval returns, where metrics stand as `acc,none` beside `acc_stderr,none`."""
    scores = []
    for task, metrics in found["results"].items():
        better = found.get("higher_is_better", {}).get(task, {})
        items = found.get("n-samples", {}).get(task, {}).get("effective", 0)
        for key, value in metrics.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = metrics.get(f"{metric}_stderr,{filter_name}")
            scores.append(
                Score(
                    task=task,
                    metric=metric,
                    value=float(value),
                    stderr=float(stderr) if isinstance(stderr, int | float) else None,
                    n=int(items),
                    higher_is_better=better.get(metric),
                    filter=filter_name,
                )
            )
    return tuple(scores)
