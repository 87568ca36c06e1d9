"""The tasks of `quantkit eval --tasks`: runs them and prints what came out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.cli.common import print_json, print_provenance, print_table, progress_bar

if TYPE_CHECKING:
    from quantkit.eval.tasks.results import Score, TaskResults


def evaluate_tasks(
    model: str,
    tasks: str,
    *,
    limit: int | None,
    fewshot: int | None,
    task_path: Path | None,
    chat_template: bool,
    device: str,
    dtype: str,
    backend: str,
    as_json: bool,
    ranks: dict[str, Any] | None = None,
) -> None:
    """Scores of lm-eval tasks, as a table or as JSON."""
    from quantkit.eval.tasks.run import run_tasks
    from quantkit.provenance import provenance_of

    with progress_bar("items") as advance:
        found = run_tasks(
            model,
            tasks,
            limit=limit,
            fewshot=fewshot,
            task_path=task_path,
            chat_template=chat_template,
            device=device,
            dtype=dtype,
            backend=backend,
            **(ranks or {}),
            on_item=advance,
        )
    provenance = provenance_of(model)
    if as_json:
        print_json(found.to_dict() | {"provenance": provenance.to_dict()})
        return
    rows = [
        (score.task, score.name, f"{score.value:.4f}", _stderr(score), _direction(score), score.n)
        for score in found.scores
    ]
    print_table(f"{model}: tasks", ("task", "metric", "value", "± stderr", "better", "n"), rows, footer=_footer(found))
    print_provenance(model, None, provenance)


def _stderr(score: Score) -> str:
    return "-" if score.stderr is None else f"{score.stderr:.4f}"


def _direction(score: Score) -> str:
    return {True: "higher", False: "lower", None: ""}[score.higher_is_better]


def _footer(found: TaskResults) -> str:
    setting = found.setting
    engine = "quantkit's engine" if setting.backend == "runtime" else "lm-eval's hf model on decoded weights"
    parts = [f"{engine}, {setting.dtype} on {setting.device}, lm-eval {found.packages['lm_eval']}, seed {setting.seed}"]
    parts += [f"{setting.fewshot} examples before each item"] if setting.fewshot is not None else []
    parts += ["with the chat template"] if setting.chat_template else []
    parts += [f"{found.truncated} requests cut to the model's context"] if found.truncated else []
    return ", ".join(parts) + "."
