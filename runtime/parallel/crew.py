"""Several ranks for one engine: what cannot work is refused before any of them starts; then all agree on one cache."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device.memory import MemoryPlan, plan_memory
from quantkit.runtime.device.model_part import BusyClock
from quantkit.runtime.drafters.draft_model import DraftModel
from quantkit.runtime.engine.speculation import SpeculativeOptions
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.lm_head import more_bytes
from quantkit.runtime.model.ranks import Ranks, check_parallel, local_config
from quantkit.runtime.parallel.coordinator import Lead
from quantkit.runtime.parallel.launcher import Launcher, LocalWorkers
from quantkit.runtime.parallel.pipeline import Links, make_store
from quantkit.runtime.parallel.rank_memory import available_to_rank, rank_weight_bytes


class Crew:
    """The other ranks of an engine, and the connections to them."""

    def __init__(self, lead: Lead, options: EngineOptions) -> None:
        self.lead = lead
        self.ranks = lead.ranks
        self.weights: list[int] = []  # bytes that each rank loaded; rank 0 is the first
        self._links: Links | None = None
        self._asked = time.perf_counter()
        self._threads = torch.get_num_threads()
        if options.torch_device.type == "cpu":
            torch.set_num_threads(max(1, self._threads // self.ranks.world))

    @property
    def links(self) -> Links:
        assert self._links is not None, "the ranks have not met"
        return self._links

    def meet(self, plan: MemoryPlan, loaded: int, hidden: int, dtype: torch.dtype, device: torch.device) -> MemoryPlan:
        """When rank 0 has loaded so many bytes: waits for the others, connects all. The plan has the fewest pages."""
        lead = self.lead
        lead.gather()
        found = lead.hear("loaded")
        self.weights = [loaded, *(found[rank]["weights"] for rank in sorted(found))]
        pages = min([plan.pages, *(one["pages"] for one in found.values())])
        context = min([plan.max_context, *(one["max_context"] for one in found.values())])
        host = lead.address.host
        store = make_store(host, 0, first=True)
        lead.say({"agreed": {"pages": pages, "max_context": context, "store": store.port}})
        self._links = lead.run_beside(lambda: Links(self.ranks, store, host, device, hidden, dtype))
        lead.when_broken(self.links.abort)
        lead.hear("ready")
        return replace(plan, pages=pages, max_context=context)

    def idle_shares(self, own: BusyClock) -> tuple[float, ...]:
        """Of every stage since the last call: the time in which not even its busiest rank computed. `own` is rank 0's
        clock. Waiting for another rank's part of a sum counts as computing."""
        busy = {0: own.take(), **self.lead.busy_seconds()}
        now = time.perf_counter()
        seconds, self._asked = now - self._asked, now
        stages: list[list[float]] = [[] for _ in range(self.ranks.pipeline)]
        for rank, one in busy.items():
            stages[rank // self.ranks.tensor].append(one)
        return tuple(max(0.0, 1 - max(each) / seconds) for each in stages)

    def stop(self) -> None:
        self.lead.stop()
        torch.set_num_threads(self._threads)


def ranks_of(options: EngineOptions) -> Ranks:
    return Ranks(options.tensor_parallel, options.pipeline_parallel)


def start_crew(
    model: str,
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    options: EngineOptions,
    launcher: Launcher | None,
    draft: DraftModel | None = None,
) -> Crew | None:
    """Starts the other ranks; None where there is only one. They load while this process does."""
    ranks = ranks_of(options)
    if ranks.world == 1:
        return None
    launcher = launcher or LocalWorkers()
    check_parallel(config, checkpoint, ranks)
    _check_devices(options, ranks, launcher)
    _check_speculation(options)
    available = available_to_rank(options, ranks)
    for rank in range(ranks.world):
        one = replace(ranks, rank=rank)
        size, beside = rank_weight_bytes(checkpoint, config, dtype, one), None
        size += more_bytes(config, dtype, options.head_bits, one)
        if rank == 0 and draft is not None:
            size, beside = size + draft.size, draft.config
        plan_memory(local_config(config, one), size, dtype, options, available, beside)
    return Crew(Lead(ranks, launcher, model, options), options)


def refuse_ranks(options: EngineOptions, what: str) -> None:
    """For engines that only one process can have."""
    if ranks_of(options).world > 1:
        raise InputError(f"{what} cannot be divided among ranks; leave --tensor-parallel and --pipeline-parallel out")


def _check_devices(options: EngineOptions, ranks: Ranks, launcher: Launcher) -> None:
    shape = f"tensor parallel {ranks.tensor} x pipeline parallel {ranks.pipeline}"
    if options.torch_device.type != "cuda":
        return
    if ":" in options.device:
        raise InputError(f"device is '{options.device}', one GPU, but {shape} needs {ranks.world}; use --device cuda")
    if launcher.devices is not None and launcher.devices < ranks.world:
        raise InputError(
            f"{shape} needs {ranks.world} GPUs, but torch sees {launcher.devices}; use fewer ranks, or show it more "
            "with CUDA_VISIBLE_DEVICES"
        )


def _check_speculation(options: EngineOptions) -> None:
    if options.speculative is None:
        return
    if options.pipeline_parallel > 1:
        raise InputError(
            "guesses need the last token before a step, so they leave the stages of pipeline parallel idle; leave "
            "--speculative or --pipeline-parallel out"
        )
    if SpeculativeOptions.parse(options.speculative).kind == "self":
        raise InputError(
            "speculative is 'self=...', but with tensor parallel no rank has the whole model to make a draft of; "
            "quantize it and give draft=PATH, or use ngram"
        )


def bubble(stages: int, micro_batches: int) -> float:
    """The share of time that stages are idle when so many micro-batches go through and nothing follows them."""
    return (stages - 1) / (micro_batches + stages - 1)
