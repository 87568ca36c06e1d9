"""From a model folder to an engine that answers: plan the memory, load, make the cache, capture the first graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantkit.arch import Config
from quantkit.checkpoint import Checkpoint, read_json
from quantkit.progress import Progress, silent
from quantkit.runtime.engine import Engine
from quantkit.runtime.layers import Weights
from quantkit.runtime.loading import load_weights
from quantkit.runtime.memory import MemoryPlan, available_memory, plan_memory, weight_bytes
from quantkit.runtime.model import Decoder, KvCache
from quantkit.runtime.model_config import ModelConfig, read_model_config
from quantkit.runtime.ops import Ops, ops_for
from quantkit.runtime.options import KV_DTYPES, EngineOptions
from quantkit.runtime.places import Places
from quantkit.runtime.rope import rope_tables
from quantkit.runtime.runner import Runner
from quantkit.runtime.sampler import Sampler
from quantkit.runtime.speculation.draft_loop import DraftLoop
from quantkit.runtime.speculation.draft_model import DraftModel, ModelDrafter
from quantkit.runtime.speculation.medusa_heads import MedusaHeads
from quantkit.runtime.speculation.setup import (
    check_draft_context,
    draft_cache,
    find_draft,
    find_medusa,
    make_speculation,
)
from quantkit.sources import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST_GRAPHS = (1, 2, 4, 8)
_GENERIC_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")  # tokenizer.json says it all


@dataclass
class Stages:
    """How long each part of the start took, in seconds."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


def start_engine(
    model: str | Path,
    options: EngineOptions,
    *,
    on_block: Progress = silent,
    stages: Stages | None = None,
    text: bool = True,
) -> Engine:
    """An engine for a folder, a hub name or `demo`. Without `text` it takes and gives token ids only."""
    stages = stages or Stages()
    with stages.stage("read headers"):
        checkpoint = Checkpoint(model_folder(model))
        config = read_model_config(checkpoint.config, _generation_config(checkpoint.folder))
    dtype = options.torch_dtype(checkpoint.dtype)
    with stages.stage("tokenizer"):
        tokenizer = load_tokenizer(checkpoint.folder) if text else None

    def load() -> Weights:
        return load_weights(checkpoint, config, dtype, options.torch_device, on_block)

    size = weight_bytes(checkpoint, dtype)
    draft, heads = find_draft(checkpoint, config, options), find_medusa(checkpoint, options)
    return build_engine(
        checkpoint.config, config, load, size, dtype, options, stages=stages, tokenizer=tokenizer, draft=draft,
        heads=heads,
    )  # fmt: skip


def build_engine(
    raw: Config,
    config: ModelConfig,
    load: Callable[[], Weights],
    weight_size: int,
    dtype: torch.dtype,
    options: EngineOptions,
    *,
    stages: Stages,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft: DraftModel | None = None,
    heads: MedusaHeads | None = None,
) -> Engine:
    """An engine around weights that `load` brings; nothing is loaded when the plan says that it cannot fit."""
    device = options.torch_device
    ops = ops_for(device, dtype)
    _check_kernels(config, dtype, options)
    if draft is not None:
        _check_kernels(draft.config, dtype, options)
        weight_size += draft.size
    with stages.stage("device"):
        plan = plan_memory(config, weight_size, dtype, options, draft=draft.config if draft else None)
        check_draft_context(draft, plan.max_context)
    with stages.stage("weights"):
        weights = load()
        draft_weights = draft.load(weights) if draft else weights
        if device.type == "cuda":
            torch.cuda.synchronize()

    def make_drafter(model: DraftModel) -> ModelDrafter:
        tables = rope_tables(model.raw, model.config, plan.max_context, device)
        decoder = Decoder(model.config, draft_weights, tables, ops, _attention_scratch(model.config, options))
        own, places = draft_cache(model.config, cache, dtype), runner.places
        return ModelDrafter(decoder, own, places, DraftLoop(decoder, own, ops, places, runner.graphs is not None))

    plan = _refined(plan, config, dtype, options, draft)
    with stages.stage("cache"):
        cache = _allocate_cache(config, plan, dtype, options)
        tables = rope_tables(raw, config, plan.max_context, device)
        decoder = Decoder(config, weights, tables, ops, _attention_scratch(config, options))
        runner = _make_runner(decoder, cache, ops, plan, options)
        speculation = make_speculation(options, draft, make_drafter, heads, runner)
    with stages.stage("graphs"):
        runner.warm_up(tuple(size for size in FIRST_GRAPHS if size <= options.sequences))
    engine = Engine(config, runner, plan, options, tokenizer, speculation)
    if options.warm_up and device.type == "cuda":
        from quantkit.runtime.warm_up import warm_up

        with stages.stage("warm-up"):
            warm_up(engine)
    return engine


def _make_runner(decoder: Decoder, cache: KvCache, ops: Ops, plan: MemoryPlan, options: EngineOptions) -> Runner:
    device = options.torch_device
    width = -(-plan.max_context // plan.page_size)
    places = Places(options.sequences, width, device)
    sampler = Sampler(ops, decoder.config.vocab, options.sequences, device, options.seed)
    return Runner(decoder, cache, sampler, places, graphs=options.graphs and device.type == "cuda")


def _refined(
    plan: MemoryPlan, config: ModelConfig, dtype: torch.dtype, options: EngineOptions, draft: DraftModel | None
) -> MemoryPlan:
    """The plan once more, with what the weights really took."""
    device = options.torch_device
    if device.type != "cuda":
        return plan
    torch.cuda.empty_cache()
    left = available_memory(device, options.memory_share)
    beside = draft.config if draft else None
    return plan_memory(config, plan.weights, dtype, options, available=left + plan.weights, draft=beside)


def _allocate_cache(config: ModelConfig, plan: MemoryPlan, dtype: torch.dtype, options: EngineOptions) -> KvCache:
    """Page 0 must hold numbers: padding reads it."""
    kept = KV_DTYPES[options.kv_dtype] or dtype
    shape = (config.layers, 2, plan.pages, config.kv_heads, plan.page_size, config.head_dim)
    device = options.torch_device
    pages = torch.empty(shape, dtype=kept, device=device)
    pages.view(torch.uint8)[:, :, 0] = 0
    scale = torch.ones(config.kv_heads, device=device) if kept != dtype else None
    return KvCache(pages, scale)


def _attention_scratch(config: ModelConfig, options: EngineOptions) -> Any:
    if options.torch_device.type != "cuda":
        return None
    from quantkit.kernels.attention.attend import make_scratch

    return make_scratch(
        options.torch_device,
        sequences=options.sequences,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_queries=options.budget,
    )


def _check_kernels(config: ModelConfig, dtype: torch.dtype, options: EngineOptions) -> None:
    """Refuses models whose attention has no kernel, before anything is loaded."""
    if options.torch_device.type != "cuda":
        return
    from quantkit.kernels.attention.cache import CacheLayout

    CacheLayout(2, config.kv_heads, options.page_size, config.head_dim, KV_DTYPES[options.kv_dtype] or dtype)


def _generation_config(folder: Path) -> Config:
    file = folder / "generation_config.json"
    return read_json(file, "") if file.exists() else {}


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """None for a folder without one: such a model takes and gives token ids."""
    if not any(folder.glob("tokenizer*")):
        return None
    file = folder / "tokenizer_config.json"
    named = read_json(file, "").get("tokenizer_class") if file.exists() else None
    if named in _GENERIC_TOKENIZERS and (folder / "tokenizer.json").exists():  # Auto would import seconds of modules
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
