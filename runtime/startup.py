"""From a model folder to an engine that answers: plan the memory, load, make the cache, capture the first graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from quantkit.arch import Config
from quantkit.checkpoint import Checkpoint, read_json
from quantkit.devices import on_device
from quantkit.expert_check import check_experts
from quantkit.formats import Format
from quantkit.kernels.card import card_of
from quantkit.progress import Progress, silent
from quantkit.runtime.compiling_ahead import CompilingAhead
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device.build import check_kernels, make_decoder, make_part
from quantkit.runtime.device.key_centres import centre_keys
from quantkit.runtime.device.kv_cache import allocate_draft_cache
from quantkit.runtime.device.kv_choice import KvChoice, RankNeed, choose_kv_dtype
from quantkit.runtime.device.memory import MemoryPlan, plan_memory, refine_plan, weight_bytes
from quantkit.runtime.device.model_part import ModelPart
from quantkit.runtime.device.peers import Alone
from quantkit.runtime.device.prompt_graphs import PromptGraphs
from quantkit.runtime.device.runner import Runner
from quantkit.runtime.drafters.draft_loop import DraftLoop
from quantkit.runtime.drafters.draft_model import DraftModel, ModelDrafter
from quantkit.runtime.drafters.eagle import EagleDrafter
from quantkit.runtime.drafters.eagle_setup import EagleHead, make_eagle
from quantkit.runtime.drafters.eagle_weights import EagleWeights
from quantkit.runtime.drafters.medusa_heads import MedusaHeads
from quantkit.runtime.drafters.published_heads import PublishedHeads
from quantkit.runtime.drafters.setup import (
    Draft,
    check_draft_context,
    find_draft,
    find_medusa,
    make_speculation,
)
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.model.config import ModelConfig, read_model_config
from quantkit.runtime.model.layers import Weights
from quantkit.runtime.model.lm_head import more_bytes
from quantkit.runtime.model.loading import load_weights
from quantkit.runtime.model.ops import import_ahead, ops_for
from quantkit.runtime.model.ranks import Ranks, check_parallel, local_config
from quantkit.runtime.parallel.launcher import Launcher
from quantkit.runtime.parallel.peer_ranks import PeerRanks, ranks_of, refuse_ranks, start_peers
from quantkit.runtime.parallel.rank_memory import available_to_rank, rank_weight_bytes, resident_bytes
from quantkit.runtime.sampling.sampler import Sampler
from quantkit.sources import model_folder

FIRST_GRAPHS = (1,)
_log = logging.getLogger("quantkit.runtime")


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
    launcher: Launcher | None = None,
) -> Engine:
    """An engine for a folder, a hub name or `demo`; it takes and gives token ids.

    `launcher` starts the other ranks, where the options ask for several; by default on this machine.
    """
    stages = stages or Stages()
    import_ahead(options.torch_device)
    compiling = _compiling_ahead(options)
    with stages.stage("read headers"):
        checkpoint = Checkpoint(model_folder(model))
        config = read_model_config(checkpoint.config, generation_config(checkpoint.folder))
        check_experts(checkpoint)
    if checkpoint.gguf is not None and checkpoint.gguf.decoded:
        _log.warning(checkpoint.gguf.decoded)
    dtype = options.torch_dtype(checkpoint.dtype)
    draft, heads = find_draft(checkpoint, config, options), find_medusa(checkpoint, options)
    with stages.stage("device"):
        choice = _choose_cache(checkpoint, config, dtype, options, draft)
    options = choice.settled(options)
    if compiling is not None:
        compiling.begin(model, options, card_of(options.torch_device), available_to_rank(options, Ranks()))
    peers = start_peers(str(model), checkpoint, config, dtype, options, launcher, draft)
    ranks = Ranks() if peers is None else peers.ranks

    def load() -> Weights:
        return load_weights(
            checkpoint, config, dtype, options.torch_device, on_block, ranks, options.head_bits, options.kv_dtype,
            options.arithmetic,
        )  # fmt: skip

    if peers is None:
        size = weight_bytes(checkpoint, dtype, options.arithmetic)
    else:
        size = rank_weight_bytes(checkpoint, config, dtype, ranks, options.arithmetic)
    size += more_bytes(config, dtype, options.head_bits, ranks)
    try:
        return build_engine(
            checkpoint.config, config, load, size, dtype, options, stages=stages, draft=draft, heads=heads,
            peers=peers, formats=checkpoint.formats, kv_choice=choice,
        )  # fmt: skip
    except BaseException:
        if peers is not None:
            peers.stop()
        raise


def build_engine(
    raw: Config,
    config: ModelConfig,
    load: Callable[[], Weights],
    weight_size: int,
    dtype: torch.dtype,
    options: EngineOptions,
    *,
    stages: Stages,
    draft: Draft | None = None,
    heads: MedusaHeads | PublishedHeads | None = None,
    peers: PeerRanks | None = None,
    formats: Mapping[str, Format] | None = None,
    kv_choice: KvChoice | None = None,
    available: int | None = None,
) -> Engine:
    """An engine around weights that `load` brings; nothing is loaded when the plan says that it cannot fit.

    With `peers`, sizes and weights are those of rank 0. `formats`: of quantized layers, by module. `kv_choice`: what
    `options.kv_dtype` was settled by; None: it is settled here. `available`: bytes that quantkit may use; None: it is
    looked up.
    """
    if peers is None:
        refuse_ranks(options, "random weights")
    ranks = Ranks() if peers is None else peers.ranks
    device = options.torch_device
    with on_device(device):
        wait_for_kernels = import_ahead(device)
        own = local_config(config, ranks)
        card_plan = check_kernels(own, dtype, options, formats)
        for line in () if card_plan is None else card_plan.warnings:
            _log.warning(line)
        beside = None if draft is None else draft.config
        if draft is not None:
            check_kernels(draft.config, dtype, options)
            weight_size += draft.size
        with stages.stage("device"):
            available = available_to_rank(options, ranks) if available is None else available
            if kv_choice is None:
                kv_choice = choose_kv_dtype([RankNeed(own, weight_size, beside)], dtype, options, available)
                options = kv_choice.settled(options)
            _log.log(logging.WARNING if kv_choice.is_smaller else logging.INFO, kv_choice.line(dtype))
            plan = plan_memory(own, weight_size, dtype, options, available, draft=beside)
            check_draft_context(draft, plan.max_context)
        with stages.stage("kernels"):
            wait_for_kernels()
        with stages.stage("weights"):
            weights = load()
            draft_weights: Weights | EagleWeights = draft.load(weights, options.kv_dtype) if draft else weights
            if device.type == "cuda":
                torch.cuda.synchronize()
        plan = refine_plan(plan, own, dtype, options, beside)
        if peers is not None:
            with stages.stage("other ranks"):
                plan = peers.meet(plan, resident_bytes(weights), config.hidden, dtype, device)

        def make_drafter(model: Draft) -> ModelDrafter | EagleDrafter:
            if isinstance(draft_weights, EagleWeights):
                assert isinstance(model, EagleHead)
                return make_eagle(model, draft_weights, runner, plan.max_context, options)
            assert isinstance(model, DraftModel)
            decoder = make_decoder(model.raw, model.config, draft_weights, plan.max_context, dtype, options)
            cache = allocate_draft_cache(model.config, runner.cache, draft_weights.kv_scales)
            rows, graphs = runner.device_rows.alone(), runner.graphs
            assert options.speculation is not None
            loop = DraftLoop(
                decoder,
                cache,
                ops_for(device, dtype),
                rows,
                most=options.speculation.most,
                graphs=graphs is not None,
                unknown=model.unknown,
            )
            prompts = None if graphs is None else PromptGraphs(decoder, cache, rows, graphs.pool)
            part = ModelPart(decoder, cache, rows, prompt_graphs=prompts)
            centre_keys(part)
            return ModelDrafter(part, loop)

        with stages.stage("cache"):
            runner = _make_runner(raw, own, weights, plan, dtype, options, peers)
            centre_keys(runner.part, peers or Alone())
            speculation = make_speculation(options, draft, make_drafter, heads, runner)
        with stages.stage("graphs"):
            runner.warm_up(tuple(size for size in FIRST_GRAPHS if size <= options.sequences))
        engine = Engine(config, runner, plan, options, speculation, peers or Alone(), kv_choice)
        if options.warm_up != "none" and device.type == "cuda":
            from quantkit.runtime.warm_up import all_parts, first_parts, rehearse

            with stages.stage("warm-up"):
                rehearse(engine, all_parts(engine) if options.warm_up == "all" else first_parts(engine))
        return engine


def _compiling_ahead(options: EngineOptions) -> CompilingAhead | None:
    """Where a whole model is to be rehearsed on one GPU of this machine."""
    alone = options.tensor_parallel == options.pipeline_parallel == 1
    return CompilingAhead() if options.warm_up != "none" and options.torch_device.type == "cuda" and alone else None


def _choose_cache(
    checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, options: EngineOptions, draft: Draft | None
) -> KvChoice:
    """The kind of cache that all ranks will have."""
    ranks = ranks_of(options)
    check_parallel(config, checkpoint, ranks)
    needs = []
    for rank in range(ranks.world):
        one = replace(ranks, rank=rank)
        if ranks.world == 1:
            size = weight_bytes(checkpoint, dtype, options.arithmetic)
        else:
            size = rank_weight_bytes(checkpoint, config, dtype, one, options.arithmetic)
        size += more_bytes(config, dtype, options.head_bits, one)
        beside = draft if rank == 0 else None
        size += 0 if beside is None else beside.size
        needs.append(RankNeed(local_config(config, one), size, None if beside is None else beside.config))
    return choose_kv_dtype(needs, dtype, options, available_to_rank(options, ranks))


def _make_runner(
    raw: Config,
    config: ModelConfig,
    weights: Weights,
    plan: MemoryPlan,
    dtype: torch.dtype,
    options: EngineOptions,
    peers: PeerRanks | None,
) -> Runner:
    device = options.torch_device
    sampler = Sampler(ops_for(device, dtype), config.vocab, options.sequences, device, options.seed)
    if peers is None:
        return Runner(make_part(raw, config, weights, plan, dtype, options), sampler)
    part = make_part(
        raw, config, weights, plan, dtype, options, group=peers.pipeline.group, ranks=peers.ranks, peers=peers
    )
    return Runner(part, sampler, peers)


def generation_config(folder: Path) -> Config:
    file = folder / "generation_config.json"
    return read_json(file, "") if file.exists() else {}
