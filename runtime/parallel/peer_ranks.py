"""Several ranks for one engine: what cannot work is refused before any of them starts; then all agree on one cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device.memory import AGREED, MemoryPlan, plan_memory
from quantkit.runtime.device.peers import ReturningRows
from quantkit.runtime.device.step_inputs import PageMoves, Step
from quantkit.runtime.drafters.setup import Draft
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.decoder import AnyDecoder, Decoder
from quantkit.runtime.model.lm_head import more_bytes
from quantkit.runtime.model.ranks import Ranks, check_parallel, local_config
from quantkit.runtime.parallel.channel import Kind
from quantkit.runtime.parallel.coordinated_decoder import CoordinatedDecoder
from quantkit.runtime.parallel.coordinator import Coordinator
from quantkit.runtime.parallel.launcher import Launcher, LocalWorkers
from quantkit.runtime.parallel.pipeline import Pipeline, ReceivedRows, make_store
from quantkit.runtime.parallel.rank_memory import available_to_rank, rank_weight_bytes
from quantkit.runtime.parallel.step_message import moves_to_lists, step_to_lists


@dataclass(frozen=True)
class _Returning:
    """Rows of a step that come back to the first stage, whose other ranks are told when they are waited for."""

    coordinator: Coordinator
    received: ReceivedRows

    def wait(self) -> Tensor:
        self.coordinator.send(Kind.ROWS, [], first_stage=True)
        return self.received.wait()


@dataclass(frozen=True)
class _NoRows:
    """Of a step of which no row is wanted: nobody sends any."""

    hidden: Tensor  # [0, hidden]

    def wait(self) -> Tensor:
        return self.hidden


class PeerRanks:
    """The other ranks of an engine, as rank 0 reaches them: `Peers` for several processes."""

    def __init__(self, coordinator: Coordinator, options: EngineOptions) -> None:
        self._coordinator = coordinator
        self.ranks = coordinator.ranks
        self.weights: list[int] = []
        self._pipeline: Pipeline | None = None
        self._asked = time.perf_counter()
        self._threads = torch.get_num_threads()
        if options.torch_device.type == "cpu":
            torch.set_num_threads(max(1, self._threads // self.ranks.world))

    @property
    def pipeline(self) -> Pipeline:
        assert self._pipeline is not None, "the ranks have not met"
        return self._pipeline

    def meet(self, plan: MemoryPlan, loaded: int, hidden: int, dtype: torch.dtype, device: torch.device) -> MemoryPlan:
        """When rank 0 has loaded so many bytes: waits for the others, connects all. The plan has the fewest pages."""
        coordinator = self._coordinator
        coordinator.gather()
        found = coordinator.hear("loaded")
        self.weights = [loaded, *(found[rank]["weights"] for rank in sorted(found))]
        agreed = {name: min([getattr(plan, name), *(one[name] for one in found.values())]) for name in AGREED}
        host = coordinator.address.host
        store = make_store(host, 0, first=True)
        coordinator.say({"agreed": agreed | {"store": store.port}})
        self._pipeline = coordinator.run_beside(lambda: Pipeline(self.ranks, store, host, device, hidden, dtype))
        coordinator.when_broken(self.pipeline.abort)
        coordinator.hear("ready")
        return replace(plan, **agreed)

    def coordinated(self, own: Decoder) -> AnyDecoder:
        return CoordinatedDecoder(own, self._coordinator, self.pipeline)

    def guarded(self) -> AbstractContextManager[None]:
        return self._coordinator.guarded()

    def tell_moves(self, moves: PageMoves) -> None:
        self._coordinator.send(Kind.MOVES, moves_to_lists(moves))

    def tell_step(self, step: Step) -> None:
        self._coordinator.send(Kind.STEP, step_to_lists(step))

    def tell_kept(self, sources: list[int], targets: list[int]) -> None:
        self._coordinator.send(Kind.KEEP, [sources, targets])

    def tell_centring(self) -> None:
        self._coordinator.send(Kind.CENTRE, [])

    @contextmanager
    def capturing(self, sequences: int, new: int, tree: bool) -> Iterator[None]:
        with self._coordinator.guarded():
            self._coordinator.send(Kind.CAPTURE, [[sequences, new, int(tree)]])
            yield

    def send_on(self, hidden: Tensor | None, num_rows: int) -> ReturningRows | None:
        if self.ranks.pipeline == 1:
            return None
        assert hidden is not None, "a step through several stages is no graph"
        back = self.pipeline.expect(num_rows) if num_rows else None  # asked for before anything else is sent
        self.pipeline.send_on(hidden)
        return _NoRows(hidden.new_empty(0, hidden.shape[1])) if back is None else _Returning(self._coordinator, back)

    def idle_shares(self, busy_seconds: float) -> tuple[float, ...]:
        """A stage is idle while not even its busiest rank computes. Waiting for another rank's part of a sum counts as
        computing."""
        if self.ranks.pipeline == 1:
            return ()
        busy = {0: busy_seconds, **self._coordinator.busy_seconds()}
        now = time.perf_counter()
        seconds, self._asked = now - self._asked, now
        stages: list[list[float]] = [[] for _ in range(self.ranks.pipeline)]
        for rank, one in busy.items():
            stages[rank // self.ranks.tensor].append(one)
        return tuple(max(0.0, 1 - max(each) / seconds) for each in stages)

    def check(self) -> None:
        self._coordinator.check()

    def when_broken(self, call: Callable[[], None]) -> None:
        self._coordinator.when_broken(call)

    def stop(self) -> None:
        self._coordinator.stop()
        torch.set_num_threads(self._threads)


def ranks_of(options: EngineOptions) -> Ranks:
    return Ranks(options.tensor_parallel, options.pipeline_parallel, experts=options.expert_parallel)


def start_peers(
    model: str,
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    options: EngineOptions,
    launcher: Launcher | None,
    draft: Draft | None = None,
) -> PeerRanks | None:
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
        size, beside = rank_weight_bytes(checkpoint, config, dtype, one, options.arithmetic), None
        size += more_bytes(config, dtype, options.head_bits, one)
        if rank == 0 and draft is not None:
            size, beside = size + draft.size, draft.config
        plan_memory(local_config(config, one), size, dtype, options, available, beside)
    return PeerRanks(Coordinator(ranks, launcher, model, options), options)


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
    if launcher.devices is not None and options.torch_device.index != 0:
        raise InputError(
            f"{shape} gives rank 0 the first GPU, but {options.torch_device} is current in this thread; choose GPUs "
            "with CUDA_VISIBLE_DEVICES instead"
        )


def _check_speculation(options: EngineOptions) -> None:
    asked = options.speculation
    if asked is None:
        return
    if options.pipeline_parallel > 1:
        raise InputError(
            "guesses need the last token before a step, so they leave the stages of pipeline parallel idle; leave "
            "--speculative or --pipeline-parallel out"
        )
    if asked.kind == "self":
        raise InputError(
            "speculative is 'self=...', but with tensor parallel no rank has the whole model to make a draft of; "
            "quantize it and give draft=PATH, or use ngram"
        )


def bubble(stages: int, micro_batches: int) -> float:
    """The share of time that stages are idle when so many micro-batches go through and nothing follows them."""
    return (stages - 1) / (micro_batches + stages - 1)
