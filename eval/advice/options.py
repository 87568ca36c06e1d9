"""What could be recommended: formats whose loss is known, on every number of GPUs, as the plan predicts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.eval.advice.advice import Goal
from quantkit.eval.advice.quality import Loss, known_losses
from quantkit.eval.plan.gpus import Gpu
from quantkit.eval.plan.model import Decoder, PlannedModel, read_model
from quantkit.eval.plan.question import Question
from quantkit.eval.plan.source import find_config
from quantkit.eval.plan.traffic import Load, Replica, Traffic, replicas_of
from quantkit.eval.plan.weights import UNQUANTIZED, Chosen, choose, keep
from quantkit.eval.shapes import SHAPES
from quantkit.recipe import load_recipe
from quantkit.sources import model_folder

AS_IT_IS = "as it is"  # a checkpoint that is quantized already
RECIPES = ("llm-int8", "fp8", "awq-w4g64", "gptq-w4g64", "nf4", "gptq-w3g64")  # whose loss was measured side by side
SAME = 0.05  # speeds that are closer count as equal: the plan is off by that much
MOST_LOSS = 0.3  # nats per token of those rows: what 4 bits lose there. Speed and memory never take more


@dataclass(frozen=True)
class Asked:
    """What the advice is for."""

    goal: Goal
    gpu: Gpu
    prompt: int = 512
    new: int = 256
    requests: int | None = None  # at once; None: one, for throughput as many as fit
    gpus: int = 1  # at most

    def __post_init__(self) -> None:
        given = {"--prompt": self.prompt, "--new": self.new, "--requests": self.requests, "--gpus": self.gpus}
        for option, value in given.items():
            if value is not None and value < 1:
                raise InputError(f"{option} is {value}, but must be 1 or more")

    @property
    def traffic(self) -> Traffic:
        """Its rate plays no part: a load is looked at, not a day."""
        return Traffic(1.0, self.prompt, self.new)

    @property
    def fewest(self) -> int:
        """Requests that must fit at once."""
        return self.requests or 1


@dataclass(frozen=True)
class Subject:
    """The model to advise on, and what it may become."""

    given: str  # as a command takes it
    model: PlannedModel
    decoder: Decoder
    formats: tuple[Chosen, ...]
    has_weights: bool  # where commands can run on it

    @property
    def quantized(self) -> bool:
        return self.formats[0].name == AS_IT_IS


@dataclass(frozen=True)
class Option:
    """One format on so many GPUs, with one kind of cache."""

    format: str
    replica: Replica
    kv_dtype: str
    load: Load  # what the goal looks at
    asked: Asked

    @property
    def loss(self) -> Loss | None:
        return known_losses().get(self.format)

    @property
    def kl(self) -> float:
        """Of the format; nothing is lost by leaving a model as it is."""
        return self.loss.kl if self.loss else 0.0

    @property
    def gpus(self) -> int:
        return self.replica.ranks.world

    @property
    def seconds(self) -> float:
        """Of one whole answer, its prompt included."""
        return self.load.batch / self.load.requests_per_second

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        return self.load.requests_per_second * self.asked.new / self.gpus

    @property
    def bytes(self) -> int:
        """Of all GPUs: weights, the engine's reserve, and the pages of the requests."""
        fit = self.replica.stage.fit
        pages = self.asked.fewest * fit.pages_per_request + 1
        return self.gpus * (fit.weights + fit.reserve + pages * fit.page_bytes)

    def at(self, batch: int) -> Option:
        """The same with so many requests at once."""
        return replace(self, load=self.replica.load(self.asked.traffic, batch))

    def cost(self, goal: Goal) -> tuple[float, ...]:
        """What the goal wants least of; ties go to fewer GPUs, less loss, fewer bytes."""
        first = {
            "latency": self.seconds,
            "throughput": -self.tokens_per_second,
            "memory": float(self.bytes),
            "quality": self.kl,
        }[goal]
        return (first, self.gpus, self.kl, self.bytes)

    def beats(self, other: Option, goal: Goal) -> bool:
        """By more than SAME, which predictions cannot tell apart."""
        ours, theirs = self.cost(goal)[0], other.cost(goal)[0]
        return ours < theirs - (SAME * abs(theirs) if goal in ("latency", "throughput") else 0)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "kv_dtype": self.kv_dtype,
            "gpus": self.gpus,
            "requests": self.load.batch,
            "requests_that_fit": self.replica.stage.fit.requests,
            "seconds_per_answer": self.seconds,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "bytes": self.bytes,
            "kl": self.kl,
        }


def read_subject(model: str) -> Subject:
    """A folder, a hub name, `demo`, a shape or a GGUF file. What is quantized stays what it is."""
    name, config = find_config(model)
    planned = read_model(name, config)
    if planned.decoder is None:
        raise InputError(f"{name}: {planned.remark}")
    folder = None if model in SHAPES else _folder_with_weights(model)
    formats = {} if folder is None else Checkpoint(folder).formats
    if folder is None and isinstance(config.get("quantization_config"), Mapping):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise InputError(
            f"{model} is quantized already ({method}), but its weights are not here; give a folder with them"
        )
    if formats:
        schemes = ", ".join(dict.fromkeys(fmt.describe() for fmt in formats.values()))
        own = Chosen(AS_IT_IS, schemes, {module: formats.get(module) for module in planned.decoder.linears})
        return Subject(model, planned, planned.decoder, (own,), has_weights=True)
    return Subject(model, planned, planned.decoder, tuple(_formats(planned, planned.decoder)), folder is not None)


def _folder_with_weights(model: str) -> Path | None:
    if not (Path(model).exists() or "/" not in model):
        return None  # of the hub: advice fetches no weights
    folder = model_folder(model)
    held = any(folder.glob("*.safetensors")) or Path(model).is_file()
    return folder if held else None


def _formats(model: PlannedModel, decoder: Decoder) -> Iterator[Chosen]:
    """Unquantized first; recipes that refuse the model are not offered."""
    yield keep(decoder)
    for name in RECIPES:
        try:
            yield choose(model, load_recipe(name))
        except InputError:
            continue


def options(subject: Subject, asked: Asked, gpus: int | None = None) -> list[Option]:
    """All that fit and lose little enough, caches in 16 bits; in 8 where nothing fits else."""
    for kv_dtype in ("auto", "fp8"):
        found = list(_with_cache(subject, asked, gpus or asked.gpus, kv_dtype))
        if found:
            return found
    return []


def _with_cache(subject: Subject, asked: Asked, gpus: int, kv_dtype: str) -> Iterator[Option]:
    question = Question(context=asked.prompt + asked.new, answer=asked.new, kv_dtype=kv_dtype)
    losses = known_losses()
    for chosen in subject.formats:
        loss = losses.get(chosen.name)
        if chosen.name not in (UNQUANTIZED, AS_IT_IS) and loss is None:
            continue  # nobody measured what it loses
        if loss is not None and asked.goal != "quality" and loss.kl > MOST_LOSS:
            continue
        try:
            replicas = list(replicas_of(subject.decoder, chosen, asked.gpu, question, None, None))
        except InputError:
            continue  # the format does not hold one of the layers
        for replica in replicas:
            if replica.ranks.world <= gpus and replica.room >= asked.fewest:
                batch = asked.requests or (replica.room if asked.goal == "throughput" else 1)
                yield Option(chosen.name, replica, kv_dtype, replica.load(asked.traffic, batch), asked)
