"""`quantkit plan`: what a model takes in every format, what fits on a GPU, how fast it could be. Nothing is run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from quantkit.errors import InputError
from quantkit.eval.plan.cost import cost_of_million
from quantkit.eval.plan.gpus import GPUS, UNTRIED, Gpu, find_card
from quantkit.eval.plan.memory import SEQUENCES, Fit, Reserve, fit, reserve_of
from quantkit.eval.plan.model import Decoder, PlannedModel
from quantkit.eval.plan.question import Question
from quantkit.eval.plan.roofline import Ceiling, Step, stops_helping
from quantkit.eval.plan.weights import UNQUANTIZED, WeightPlan, quantized, unquantized
from quantkit.recipe import Recipe
from quantkit.runtime.device.card_plan import small_kv_dtype

# The first one is what the summary and --explain speak of.
DEFAULT_RECIPES = ("gptq-w4g128", "awq-w4g128", "nf4", "gptq-w3g128", "gptq-w8", "llm-int8", "smoothquant-w8a8", "fp8")


@dataclass(frozen=True)
class Speed:
    """The ceiling at one batch."""

    step: Step
    fits: bool
    gain: float  # times the speed of bf16
    answers_per_second: float  # output tokens of whole requests, their prompts computed in the same time
    cost: float | None  # estimated, of a million output tokens; None without a price

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self.step),
            "bound": self.step.bound,
            "tokens_per_second": self.step.tokens_per_second,
            "fits": self.fits,
            "times_bf16": self.gain,
            "output_tokens_per_second_with_prompts": self.answers_per_second,
            "estimated_cost_per_million_output_tokens": self.cost,
        }


@dataclass(frozen=True)
class FormatPlan:
    """One format on one GPU."""

    weights: WeightPlan
    ceiling: Ceiling
    fit: Fit
    speeds: tuple[Speed, ...]  # one for every batch asked for
    prefill_tokens_per_second: float
    bandwidth_bound_up_to: float  # batch; infinite: always
    bandwidth_bound_up_to_without_cache: float
    stops_helping: int | None  # the batch from which bf16 is within 10 %; None: not up to MAX_BATCH

    @property
    def name(self) -> str:
        return self.weights.name

    def to_dict(self) -> dict[str, Any]:
        weights = asdict(self.weights) | {"bits": self.weights.bits, "arithmetic": self.weights.arithmetic}
        found = {name: getattr(self.fit, name) for name in ("cache", "pages", "tokens", "requests")}
        limits = (self.bandwidth_bound_up_to, self.bandwidth_bound_up_to_without_cache)
        return {
            "weights": weights,
            "fit": asdict(self.fit) | found,
            "decode": [speed.to_dict() for speed in self.speeds],
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "bandwidth_bound_up_to_batch": None if math.isinf(limits[0]) else limits[0],
            "bandwidth_bound_up_to_batch_without_cache": None if math.isinf(limits[1]) else limits[1],
            "stops_helping_at_batch": self.stops_helping,
        }


@dataclass(frozen=True)
class ServingPlan:
    """The whole answer. Without a decoder (an unsupported family) there are no formats."""

    model: PlannedModel
    question: Question
    gpu: Gpu
    reserve: Reserve | None
    formats: tuple[FormatPlan, ...]  # bf16 first
    requests: dict[str, dict[str, int]]  # GPU -> format -> requests of the context that fit
    warnings: tuple[str, ...]
    auto_caches: dict[str, str] = field(
        default_factory=dict
    )  # format -> what `--kv-dtype auto` keeps, if that is asked

    @property
    def focus(self) -> FormatPlan | None:
        """The format that the summary speaks of: the first one after bf16, else bf16."""
        return self.formats[min(1, len(self.formats) - 1)] if self.formats else None

    def to_dict(self) -> dict[str, Any]:
        cache = self.model.cache
        item = self.question.itemsize(cache)
        return {
            "model": {
                "name": self.model.name,
                "model_type": self.model.model_type,
                "parameters": self.model.decoder.parameters if self.model.decoder else None,
                "max_positions": self.model.max_positions,
                "remark": self.model.remark,
            },
            "question": asdict(self.question) | {"prompt": self.question.prompt, "answer": self.question.new},
            "cache": {
                "kind": cache.kind,
                "layers": cache.layers,
                "bytes_per_token": int(cache.per_token * item),
                "bytes_per_request": int(cache.per_token * item) * self.question.context,
                "bytes_read_per_token": int(cache.read(self.question.context) * item),
            },
            "gpu": asdict(self.gpu),
            "reserve": asdict(self.reserve) | {"total": self.reserve.total} if self.reserve else None,
            "formats": [found.to_dict() for found in self.formats],
            "requests_by_gpu": self.requests,
            "warnings": list(self.warnings),
            "auto_caches": self.auto_caches,
        }


def plan_serving(
    model: PlannedModel,
    recipes: Sequence[Recipe],
    gpu: Gpu,
    question: Question,
    gpus: Mapping[str, Gpu] = GPUS,
) -> ServingPlan:
    """The plan for one GPU, and how many requests fit on all `gpus`."""
    if model.decoder is None:
        return ServingPlan(model, question, gpu, None, (), {}, tuple(_warnings(model, question, gpu, ())))
    rows, refused = [unquantized(model.decoder)], []
    for recipe in recipes:
        try:
            rows.append(quantized(model, recipe))
        except InputError as error:
            refused.append(f"{recipe.name} is left out: {error}")
    reserve = reserve_of(model.decoder)
    formats = _formats(model, model.decoder, rows, gpu, question, reserve)
    requests = {
        name: {
            row.name: fit(one, row, reserve, model.cache, question.itemsize(model.cache), question.context).requests
            for row in rows
        }
        for name, one in gpus.items()
    }
    caches = _auto_caches(model, question, gpu, formats)
    warnings = (*refused, *_warnings(model, question, gpu, formats), *_smaller(caches, question))
    return ServingPlan(model, question, gpu, reserve, formats, requests, warnings, caches)


def _auto_caches(
    model: PlannedModel, question: Question, gpu: Gpu, formats: Sequence[FormatPlan]
) -> dict[str, str]:  # fmt: skip
    """What a start with `--kv-dtype auto` would keep for the most requests that are asked about, where weights fit."""
    if question.kv_dtype != "auto" or gpu.capability is None:
        return {}
    small = small_kv_dtype(find_card(gpu.name), (1 if model.cache.kind == "MLA" else 2, 1, model.cache.width))
    most = max(question.batches)
    return {
        found.name: "16 bits" if small is None or found.fit.requests >= most else small
        for found in formats
        if found.fit.cache > 0
    }


def _smaller(caches: Mapping[str, str], question: Question) -> Iterator[str]:
    by_kind: dict[str, list[str]] = {}
    for name, kind in caches.items():
        by_kind.setdefault(kind, []).append(name)
    for kind in by_kind.keys() - {"16 bits"}:
        asked = f"--max-context {question.context} --max-sequences {max(question.batches)}"
        names = ", ".join(by_kind[kind])
        yield f"with {asked}, --kv-dtype auto keeps keys and values in {kind} beside {names}: 16 bits do not fit"


def _formats(
    model: PlannedModel, decoder: Decoder, rows: Sequence[WeightPlan], gpu: Gpu, question: Question, reserve: Reserve
) -> tuple[FormatPlan, ...]:
    widths = decoder.attention_width, decoder.prompt_width
    ceilings = [Ceiling(model.cache, widths[0], row, gpu, question.itemsize(model.cache), widths[1]) for row in rows]
    context = question.context
    return tuple(
        FormatPlan(
            weights=row,
            ceiling=ceiling,
            fit=(found := fit(gpu, row, reserve, model.cache, question.itemsize(model.cache), context)),
            speeds=tuple(_speed(ceiling, ceilings[0], batch, found, question) for batch in question.batches),
            prefill_tokens_per_second=context / ceiling.prefill_seconds(context),
            bandwidth_bound_up_to=ceiling.bandwidth_bound_up_to(context),
            bandwidth_bound_up_to_without_cache=ceiling.bandwidth_bound_up_to(0),
            stops_helping=None if row.name == UNQUANTIZED else stops_helping(ceiling, ceilings[0], context),
        )
        for row, ceiling in zip(rows, ceilings, strict=True)
    )


def _speed(ceiling: Ceiling, plain: Ceiling, batch: int, found: Fit, question: Question) -> Speed:
    step = ceiling.decode(batch, question.context)
    gain = plain.decode(batch, question.context).seconds / step.seconds
    rate = ceiling.answer_tokens_per_second(batch, question.prompt, question.new)
    return Speed(step, batch <= found.requests, gain, rate, cost_of_million(question, rate))


def _warnings(model: PlannedModel, question: Question, gpu: Gpu, formats: Sequence[FormatPlan]) -> Iterator[str]:
    if model.max_positions is not None and question.context > model.max_positions:
        made_for = f"{model.max_positions:,} that this model was made for"
        yield f"a context of {question.context:,} tokens is more than the {made_for}"
    if model.cache.slides(question.context):
        item = question.itemsize(model.cache)
        held = int(model.cache.per_token * item) * question.context
        read = int(model.cache.read(question.context) * item)
        yield (
            f"sliding layers read {read / 1e9:.2f} GB of a request's cache, but quantkit's engine keeps all "
            f"{held / 1e9:.2f} GB of it: room is counted by what is kept, speed by what is read"
        )
    if gpu.name in UNTRIED:
        yield UNTRIED[gpu.name]
    if gpu.fp8 is None and any(found.weights.arithmetic == "fp8" for found in formats):
        yield f"{gpu.title} has no FP8 units: fp8 recipes save memory there, and compute in 16 bit"
    if any(found.fit.requests > SEQUENCES for found in formats):
        yield f"the engine runs {SEQUENCES} concurrent requests unless --max-sequences says another number"
