"""Runs lm-eval's tasks on a model: through quantkit's engine, or through lm-eval's own `hf` model as a reference."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.eval.tasks.results import Setting, TaskResults, read_scores
from quantkit.extras import require
from quantkit.formats.base import check_choice
from quantkit.progress import Progress, silent
from quantkit.wording import model_name

BACKENDS = ("runtime", "reference")
BOOTSTRAPS = 1000  # for the standard error of a perplexity: known to 2 %, in a second
_GPU_BATCH = 16  # items of a reference batch; on a CPU one at a time, because padding costs more than it saves


def run_tasks(
    model: str | Path,
    tasks: str | Sequence[str],
    *,
    limit: int | None = None,
    fewshot: int | None = None,
    task_path: str | Path | None = None,
    chat_template: bool = False,
    device: str = "auto",
    dtype: str | None = None,
    backend: str = "runtime",
    tensor_parallel: int = 1,
    expert_parallel: bool = False,
    pipeline_parallel: int = 1,
    seed: int = 0,
    with_samples: bool = False,
    on_item: Progress = silent,
) -> TaskResults:
    """Scores of tasks, named as lm-eval names them, or `local` for those that ship.

    `limit` takes the first items of each task only. `task_path` is a folder with YAML tasks of your own. `on_item` is
    told of each finished item of backend `runtime`, which may have several ranks.
    """
    ranks: dict[str, Any] = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    several = ranks != dict.fromkeys(ranks, 1)
    ranks |= {"expert_parallel": expert_parallel}
    setting = Setting(model_name(model), backend, device, dtype, limit, fewshot, chat_template, seed)
    _check(setting)
    if backend == "reference" and several:
        raise InputError("tensor_parallel and pipeline_parallel need backend runtime")
    from quantkit.eval.tasks.catalog import find_tasks

    with _quiet():
        names, catalog = find_tasks(tasks, Path(task_path) if task_path is not None else None)
        catalog.load(names)  # what is missing shows before a model is loaded
        lm = _load_model(model, setting, ranks, on_item)
        found = _evaluate(lm, names, catalog, setting, with_samples)
    used = lm.dtype if backend == "runtime" else lm.model.dtype
    return TaskResults(
        setting=replace(setting, device=str(lm.device), dtype=str(used).removeprefix("torch.")),
        scores=read_scores(found),
        task_versions=found["versions"],
        packages={name: version(name) for name in ("quantkit", "lm_eval", "torch", "transformers")},
        truncated=getattr(lm, "truncated", None),
        samples=found.get("samples") if with_samples else None,
    )


def _check(setting: Setting) -> None:
    check_choice("backend", setting.backend, BACKENDS)
    for name, least in (("limit", 1), ("fewshot", 0)):
        value = getattr(setting, name)
        if value is not None and (type(value) is not int or value < least):
            raise InputError(f"{name} is {value!r}, but must be a whole number of at least {least}")
    require("quantkit eval --tasks", "tasks")


def _load_model(model: str | Path, setting: Setting, ranks: dict[str, Any], on_item: Progress) -> Any:
    """An lm-eval model."""
    if setting.backend == "reference":
        lm = _reference_model(model, setting.device, setting.dtype)
    else:
        from quantkit.eval.tasks.engine_model import EngineModel
        from quantkit.runtime.llm import LLM

        lm = EngineModel(LLM(model, device=setting.device, dtype=setting.dtype, **ranks), on_item=on_item)
    if setting.chat_template and not lm.tokenizer.chat_template:
        raise InputError("this model's tokenizer has no chat template; run the tasks without --chat-template")
    return lm


def _reference_model(model: str | Path, device: str, dtype: str | None) -> Any:
    """lm-eval's own model around decoded weights, which ends answers where the engine does."""
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-untyped]
    from transformers import GenerationConfig

    from quantkit.devices import resolve_device
    from quantkit.reference import load_reference, load_tokenizer
    from quantkit.sources import model_folder

    device = resolve_device(device)
    loaded = load_reference(model, dtype or ("float32" if device == "cpu" else None), device, activations="served")
    if (model_folder(model) / "generation_config.json").exists():
        loaded.generation_config = GenerationConfig.from_pretrained(model_folder(model))
    return HFLM(
        pretrained=loaded,
        tokenizer=load_tokenizer(model),
        batch_size=1 if device == "cpu" else _GPU_BATCH,
        max_length=loaded.config.max_position_embeddings - 1,  # the engine counts the predicted token too
        logits_cache=False,  # lm-eval 0.4.13 scores some items wrongly with it: docs/reference/tasks.md
    )


def _evaluate(lm: Any, names: list[str], catalog: Any, setting: Setting, with_samples: bool) -> dict[str, Any]:
    from lm_eval import simple_evaluate  # type: ignore[import-untyped]

    found: dict[str, Any] = simple_evaluate(
        model=lm,
        tasks=names,
        num_fewshot=setting.fewshot,
        limit=setting.limit,
        task_manager=catalog,
        apply_chat_template=setting.chat_template,
        fewshot_as_multiturn=setting.chat_template,
        log_samples=with_samples,
        bootstrap_iters=BOOTSTRAPS,
        random_seed=setting.seed,
        numpy_random_seed=setting.seed,
        torch_random_seed=setting.seed,
        fewshot_random_seed=setting.seed,
    )
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what lm-eval prints out of our output, and its bars out of logs; errors come through as exceptions.

    lm-eval also starts a process for each core to estimate standard errors, unless told not to: these would be forks of
    a process with threads.
    """
    loggers = [logging.getLogger(name) for name in ("lm_eval", "huggingface_hub")]
    levels, single = [logger.level for logger in loggers], os.environ.get("DISABLE_MULTIPROC")
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(sys.stderr if sys.stderr.isatty() else io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if single is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = single
