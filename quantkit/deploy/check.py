"""Whether models are there and fit, asked before anything starts: reads headers of files, loads no weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.deploy.config import DeployConfig, ModelPlan
from quantkit.errors import InputError
from quantkit.sources import BUNDLED, bundled_folder, model_folder

if TYPE_CHECKING:
    from quantkit.checkpoint import Checkpoint
    from quantkit.runtime.core.options import EngineOptions
    from quantkit.runtime.model.config import ModelConfig


@dataclass(frozen=True)
class Needs:
    """Bytes of one rank, as the engine plans them; what the cache takes is what is left, up to a use."""

    weights: int
    cache: int
    available: int
    kv_tokens: int
    max_context: int


def check_model(config: DeployConfig, model: ModelPlan, gpu: bool) -> Needs:
    """Refuses a model that is not there, that is no model, or that one rank's device cannot hold."""
    try:
        return _plan(config, model, gpu)
    except InputError as error:
        raise type(error)(f"model '{model.name}': {error}") from error


def check_host_memory(needs: list[tuple[ModelPlan, Needs]]) -> None:
    """Replicas of one machine's CPU share its memory: the weights of all of them must fit."""
    if not needs:
        return
    total = sum(model.replicas.min * model.ranks * found.weights for model, found in needs)
    available = min(found.available * model.ranks for model, found in needs)
    if total > available:
        from quantkit.wording import human_bytes

        raise InputError(
            f"the weights of all replicas take {human_bytes(total)}, but {human_bytes(available)} of memory are free; "
            "lower `replicas`"
        )


def _plan(config: DeployConfig, model: ModelPlan, gpu: bool) -> Needs:
    import torch

    from quantkit.checkpoint import Checkpoint, read_json
    from quantkit.runtime.core.options import EngineOptions
    from quantkit.runtime.device.kv_choice import RankNeed, choose_kv_dtype
    from quantkit.runtime.device.memory import available_memory, plan_memory, weight_bytes
    from quantkit.runtime.drafters.setup import find_draft, find_medusa
    from quantkit.runtime.model.config import read_model_config
    from quantkit.runtime.model.lm_head import more_bytes

    settings = config.replica_settings(model)
    checkpoint = Checkpoint(model_folder(model.path))
    generation = checkpoint.folder / "generation_config.json"
    shape = read_model_config(checkpoint.config, read_json(generation, "") if generation.exists() else {})
    seen = gpu and torch.cuda.is_available()
    options = EngineOptions(**settings.engine_options | {"device": "cuda" if seen else "cpu"})
    dtype = options.torch_dtype(checkpoint.dtype)
    draft = find_draft(checkpoint, shape, options)
    find_medusa(checkpoint, options)
    size = weight_bytes(checkpoint, dtype, options.arithmetic) + more_bytes(shape, dtype, options.head_bits)
    size += 0 if draft is None else draft.size
    if seen:  # as if it were empty: what an old replica holds is free when the new one comes
        available = int(torch.cuda.get_device_properties(0).total_memory * options.memory_share)
    elif gpu:  # a machine without GPUs cannot know theirs
        available = 1 << 60
    else:
        available = available_memory(torch.device("cpu"), options.memory_share)
    beside = None if draft is None else draft.config
    if model.ranks > 1:
        return _plan_ranks(checkpoint, shape, options, 0 if draft is None else draft.size, model, available)
    options = choose_kv_dtype([RankNeed(shape, size, beside)], dtype, options, available).settled(options)
    plan = plan_memory(shape, size, dtype, options, available=available, draft=beside)
    return Needs(size, plan.cache, available, plan.kv_tokens, plan.max_context)


def _plan_ranks(
    checkpoint: Checkpoint, shape: ModelConfig, options: EngineOptions, draft: int, model: ModelPlan, available: int
) -> Needs:
    """The rank that needs most; those on a CPU share its memory."""
    from quantkit.runtime.device.kv_choice import RankNeed, choose_kv_dtype
    from quantkit.runtime.device.memory import plan_memory
    from quantkit.runtime.model.lm_head import more_bytes
    from quantkit.runtime.model.ranks import Ranks, check_parallel, local_config
    from quantkit.runtime.parallel.rank_memory import rank_weight_bytes

    ranks = Ranks(model.tensor_parallel, model.pipeline_parallel, experts=model.expert_parallel)
    check_parallel(shape, checkpoint, ranks)
    dtype = options.torch_dtype(checkpoint.dtype)
    if options.torch_device.type == "cpu":
        available //= model.ranks
    needs = []
    for rank in range(model.ranks):
        one = replace(ranks, rank=rank)
        size = rank_weight_bytes(checkpoint, shape, dtype, one, options.arithmetic) + (draft if rank == 0 else 0)
        size += more_bytes(shape, dtype, options.head_bits, one)
        needs.append(RankNeed(local_config(shape, one), size))
    options = choose_kv_dtype(needs, dtype, options, available).settled(options)
    found = []
    for need in needs:
        plan = plan_memory(need.config, need.weights, dtype, options, available=available)
        found.append(Needs(need.weights, plan.cache, available, plan.kv_tokens, plan.max_context))
    return max(found, key=lambda needs: needs.weights)


def checkpoint_mark(path: str) -> list[tuple[str, int, int]]:
    """Changes when the files of a checkpoint do; empty for a model that is not on this machine yet."""
    folder = bundled_folder(path) if path in BUNDLED else Path(path)
    if not folder.is_dir():
        return []
    files = [file for file in sorted(folder.iterdir()) if file.suffix in (".safetensors", ".json", ".jinja")]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
