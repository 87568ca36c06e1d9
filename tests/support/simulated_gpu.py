"""A GPU that exists as seconds alone, under the real engine: what speculation costs there, without a clock on the wall.

Engine, scheduler, page pool, speculation, policy, costs and `ModelDrafter` are the real ones. The device computes
nothing: what is queued there takes the seconds of a `Machine`, one thing after the other, and the host takes its own
seconds for launching and for looking at results, beside the device where nobody waits. So lost overlap, the first step
after plain ones, and what a draft has to read cost what they cost on a real one. Guesses are right by a coin
(`Speculation.force_acceptance`).

    PYTHONPATH=.:tests/support python -m simulated_gpu

prints adaptive over plain decoding for every machine, batch and acceptance.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.step_plan import StepPlan
from quantkit.runtime.core.step_result import Launched, Outcome, Sampled, Samples, StepRows
from quantkit.runtime.device.decode_graphs import DRAFT_LENGTHS, graph_sizes, padded_guesses
from quantkit.runtime.device.memory import MemoryPlan
from quantkit.runtime.device.runner import InFlight
from quantkit.runtime.drafters.draft_model import ModelDrafter
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.engine.speculation import Speculation
from quantkit.runtime.engine.speculation_policy import Policy
from quantkit.runtime.engine.step_costs import Costs
from quantkit.runtime.sampling.acceptance import accepted_path
from simulated_machines import MACHINES, Machine

BATCHES = (1, 8, 32, 128)
CHANCES = (0.3, 0.6, 0.9)
_PAGE = 16


@dataclass
class Gpu:
    """Its queue, and the host beside it, in milliseconds since the start."""

    machine: Machine
    now: float = 0.0  # of the host
    free: float = 0.0  # when the device has done all that was queued

    def work(self, host_ms: float) -> None:
        self.now += host_ms

    def queue(self, device_ms: float) -> float:
        self.free = max(self.now, self.free) + device_ms
        return self.free

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)

    def seconds(self) -> float:
        return self.now / 1000


class SimulatedRunner:
    """What the engine asks of a `Runner`."""

    device = torch.device("cpu")
    graphs = None

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._done: dict[int, float] = {}

    def prepare(self, plan: StepPlan) -> None:
        pass

    def launch(self, plan: StepPlan) -> InFlight:
        gpu, machine = self._gpu, self._gpu.machine
        sampling = [work for work in plan.scheduled if work.samples]
        gpu.work(0.6 * self._host(plan))
        context = sum(work.start + work.num_tokens for work in plan.scheduled)
        if plan.answers_only:
            each = max(len(work.draft) for work in plan.scheduled)
            new = 1 + padded_guesses(each) if each else 1
            took = machine.step_ms(_padded(len(plan.scheduled)) * new, context)
            if each:  # rows of the head, and of sampling
                took += machine.verifying[0] + machine.verifying[1] * sum(len(work.draft) for work in plan.scheduled)
        else:
            took = machine.step_ms(1) + machine.prompt * plan.tokens / 1000
        nothing = torch.zeros(0)
        rows = StepRows(nothing, nothing, nothing)
        launched = Launched(plan, sampling, Samples(nothing), None, {}, None, rows=rows)
        self._done[id(launched)] = gpu.queue(took)
        return InFlight(launched)

    def arrived(self, flight: InFlight) -> Launched:
        assert flight.launched is not None
        return flight.launched

    def collect(self, launched: Launched) -> list[Outcome]:
        self._gpu.wait(self._done.pop(id(launched)))
        self._gpu.work(0.4 * self._host(launched.plan))
        found, row = [], 0
        for work in launched.sampling:
            path = accepted_path(work, row, [], [], launched.plan.coins)
            found.append(Outcome(work, [Sampled(5)] * (1 + len(path)), tuple(path), row))
            row += 1 + len(work.draft)
        return found

    def _host(self, plan: StepPlan) -> float:
        guesses = any(work.draft for work in plan.scheduled)
        fixed, each = self._gpu.machine.guessing_host if guesses else self._gpu.machine.host
        return fixed + each * len(plan.scheduled)


@dataclass
class SimulatedPart:
    """What a `ModelDrafter` asks of the draft's `ModelPart`."""

    gpu: Gpu
    cache: Any = field(default_factory=lambda: SimpleNamespace(page_size=_PAGE))
    prompt_graphs: None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    read: int = 0  # tokens

    def move(self, moves: object) -> None:
        pass

    def run(self, inputs: Any) -> None:
        start, thousand = self.gpu.machine.reading
        self.read += len(inputs.ids)
        self.gpu.work(0.1)
        self.gpu.queue(start + thousand * len(inputs.ids) / 1000)


class SimulatedLoop:
    """What it asks of a `DraftLoop`."""

    sizes: list[int] = []  # noqa: RUF012  (never changed)

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def run(self, inputs: Any) -> tuple[torch.Tensor, None]:
        self._queue(inputs)
        return torch.zeros(len(inputs.rows), max(inputs.lengths), dtype=torch.int64), None

    def run_behind(self, step: object, behind: object, coins: list[bool], inputs: Any) -> None:
        self._queue(inputs)

    def _queue(self, inputs: Any) -> None:
        guesses = padded_guesses(max(inputs.lengths))
        self._gpu.queue(guesses * self._gpu.machine.guess_ms(_padded(len(inputs.rows))))


@dataclass(frozen=True)
class Simulated:
    """An engine on such a machine. `guesses` 0: nobody guesses."""

    engine: Engine
    gpu: Gpu
    part: SimulatedPart


def simulated_engine(
    machine: Machine,
    guesses: int,
    adaptive: bool = True,
    sequences: int = 128,
    context: int = 4096,
    share_prefixes: bool = False,
) -> Simulated:
    gpu = Gpu(machine)
    part = SimulatedPart(gpu)
    pages = sequences * context // _PAGE + 1
    plan = MemoryPlan(0, 0, 0, 0, 0, _PAGE, pages, context)
    options = EngineOptions(
        device="cpu", max_sequences=sequences, step_tokens=8192, overlap=True, share_prefixes=share_prefixes
    )
    config: Any = SimpleNamespace(vocab=100, eos=(1,))
    runner: Any = SimulatedRunner(gpu)
    speculation = Speculation()
    if guesses:
        draft: Any = part
        loop: Any = SimulatedLoop(gpu)
        drafter = ModelDrafter(draft, loop)
        policy = Policy(
            guesses, Costs(*_captured(machine, guesses, sequences)), adaptive, alike=True, unread=drafter.unread
        )
        speculation = Speculation(drafter, policy, device=drafter, early=drafter, overlaps=True, clock=gpu.seconds)
    return Simulated(Engine(config, runner, plan, options, speculation), gpu, part)


def _captured(machine: Machine, most: int, sequences: int) -> tuple[dict[Any, float], dict[Any, float]]:
    """What graphs took when they were made: without host, context, head and sampling."""
    steps, drafts = {}, {}
    for size in (size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size <= sequences):
        steps[size, 1] = machine.step_ms(size) / 1000
        for guesses in (length for length in DRAFT_LENGTHS if length <= most):
            if size * (1 + guesses) <= 512:
                steps[size, 1 + guesses] = machine.step_ms(size * (1 + guesses)) / 1000
                drafts[size, guesses] = guesses * machine.guess_ms(size) / 1000
    return steps, drafts


def decode(made: Simulated, batch: int, chance: float, prompt: int = 128, new: int = 256, seed: int = 0) -> float:
    """Tokens in a second by the protocol of `quantkit bench speculative`: from the moment when everybody has a first
    token until the first one ends."""
    engine, gpu = made.engine, made.gpu
    engine.forget()
    engine.speculation.force_acceptance(chance, seed)
    params = SamplingParams(max_tokens=new, ignore_eos=True, temperature=0.0)
    waiting = {engine.add([7] * prompt, params, arrived=0.0).id for _ in range(batch)}
    while waiting:
        waiting -= {output.request for output in engine.step()}
    begin, tokens, ended = gpu.now, 0, False
    while not ended:
        outputs = engine.step()
        tokens += len(outputs)
        ended = any(output.finished for output in outputs)
    seconds = (gpu.now - begin) / 1000
    while engine.unfinished:
        engine.step()
    engine.drain()
    return tokens / seconds


def rounds(made: Simulated, batch: int, chance: float, count: int, **sizes: int) -> float:
    """The mean of several, each with other coins; a first one is not counted."""
    found = [decode(made, batch, chance, seed=seed, **sizes) for seed in range(count + 1)]
    return sum(found[1:]) / count


def ratios(machine: Machine, guesses: int, batches: tuple[int, ...], count: int = 3, **sizes: int) -> Iterator[Any]:
    """Batch, acceptance, adaptive over plain."""
    for batch in batches:
        plain = rounds(simulated_engine(machine, 0), batch, 0.0, 1, **sizes)
        for chance in CHANCES:
            yield batch, chance, rounds(simulated_engine(machine, guesses), batch, chance, count, **sizes) / plain


def _padded(sequences: int) -> int:
    return graph_sizes(1024)[bisect_left(graph_sizes(1024), sequences)]


if __name__ == "__main__":
    for machine in MACHINES:
        print(f"{machine.name}: adaptive over plain decoding, 256 new tokens, k=4")
        for batch, chance, ratio in ratios(machine, 4, BATCHES):
            print(f"  {batch:4} requests, acceptance {chance}: {ratio:.3f}", flush=True)
