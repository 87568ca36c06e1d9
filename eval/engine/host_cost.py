"""What the host does for one decode step, apart from every device: milliseconds of processor time by the number of
sequences.

    python -m quantkit.eval.engine.host_cost --sequences 256,1024,2048

The engine, its scheduler, pages, runner and sampler are the real ones, and so are the numbers of a step, made as for a
CUDA graph. Only the model is missing: hidden states and logits are zeros that are there at once. As on a GPU, a step is
launched before the tokens of the one before are looked at; that is the time which must stay below the device's.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from types import FrameType, SimpleNamespace
from typing import Any

import torch

from quantkit.eval.engine.step_run import all_answering
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.step_result import LogitsRows
from quantkit.runtime.device.decode_graphs import Key, padded_numbers
from quantkit.runtime.device.device_rows import DeviceRows
from quantkit.runtime.device.memory import MemoryPlan
from quantkit.runtime.device.model_part import BusyClock
from quantkit.runtime.device.runner import Runner
from quantkit.runtime.device.step_inputs import StepInputs
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.model.ops import ops_for
from quantkit.runtime.sampling.sampler import Sampler

_VOCAB, _PAGE, _PROMPT = 8, 16, 24
_CPU = torch.device("cpu")
STAGES = ("schedule", "prepare", "launch", "collect")


class _NoDecoder:
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), _VOCAB)


class _NoModel:
    """In place of a `ModelPart`: takes the numbers of a step as a CUDA graph does, and computes nothing."""

    graphs = None
    device = _CPU

    def __init__(self, device_rows: DeviceRows) -> None:
        self.device_rows = device_rows
        self.decoder = _NoDecoder()
        self.cache = SimpleNamespace(page_size=_PAGE)
        self.clock = BusyClock(_CPU)

    def run(self, inputs: StepInputs) -> tuple[None, LogitsRows]:
        count = len(inputs.rows)
        if inputs.max_queries > 1:  # prompts
            sent = self.device_rows.send(inputs)
            ids, positions, owner_rows = sent.ids[sent.logits_rows], sent.positions[sent.logits_rows], sent.owner_rows
        else:
            numbers = padded_numbers(inputs, inputs.num_new, Key(count, 1), self.device_rows.padding)
            columns = self.device_rows.to_device(numbers).split(len(numbers) // 5)
            ids, positions, owner_rows = columns[0][:count], columns[1][:count], columns[3][:count]
        return None, LogitsRows(torch.zeros(len(owner_rows), 1), ids, owner_rows, positions)


def host_engine(sequences: int, new_tokens: int) -> Engine:
    """An engine without a model that can hold so many sequences, with so many new tokens each."""
    context = _PROMPT + new_tokens + 1
    pages = sequences * -(-context // _PAGE) + 1
    plan = MemoryPlan(0, 0, 0, 0, 0, _PAGE, pages, context)
    options = EngineOptions(device="cpu", max_sequences=sequences, step_tokens=max(8192, 2 * sequences), overlap=True)
    config: Any = SimpleNamespace(vocab=_VOCAB, eos=())
    part: Any = _NoModel(DeviceRows(sequences, context, _PAGE, _CPU))
    runner = Runner(part, Sampler(ops_for(_CPU, torch.float32), _VOCAB, sequences, _CPU))
    return Engine(config, runner, plan, options)


@dataclass
class HostCost:
    """Median milliseconds of processor time of a step, all of it and by stages."""

    sequences: int
    step_ms: float
    stages_ms: dict[str, float] = field(default_factory=dict)


def measure(sequences: int, steps: int) -> HostCost:
    engine = host_engine(sequences, 3 * steps + 16)
    all_answering(engine, sequences, _PROMPT, 3 * steps + 12)
    gc.collect()
    gc.freeze()  # as the server does once it has started
    try:
        whole = _seconds_of_steps(engine, steps)
        with _timed(engine) as seconds:
            _seconds_of_steps(engine, steps)
    finally:
        gc.unfreeze()
    stages = {name: 1e3 * median(times) for name, times in seconds.items()}
    return HostCost(sequences, 1e3 * median(whole), stages)


def calls_of_step(sequences: int) -> Counter[str]:
    """Python functions that a step calls, by name: what grows with the sequences shows without a clock."""
    engine = host_engine(sequences, 32)
    all_answering(engine, sequences, _PROMPT, 24)
    engine.step()
    calls: Counter[str] = Counter()

    def see(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(see)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return calls


def _seconds_of_steps(engine: Engine, steps: int) -> list[float]:
    times = [time.thread_time()]
    for _ in range(steps):
        engine.step()
        times.append(time.thread_time())
    return [after - before for before, after in pairwise(times)]


@contextmanager
def _timed(engine: Engine) -> Iterator[dict[str, list[float]]]:
    """Seconds of every call of a stage. What is left of a step is what its tokens mean for their sequences."""
    seconds: dict[str, list[float]] = {name: [] for name in STAGES}
    for name in STAGES:
        owner = engine.scheduler if name == "schedule" else engine.runner
        setattr(owner, name, _stopwatch(getattr(owner, name), seconds[name]))
    try:
        yield seconds
    finally:
        for name in STAGES:
            delattr(engine.scheduler if name == "schedule" else engine.runner, name)


def _stopwatch(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        begin = time.thread_time()
        result = call(*arguments)
        seconds.append(time.thread_time() - begin)
        return result

    return timed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m quantkit.eval.engine.host_cost", description=__doc__)
    parser.add_argument("--sequences", default="256,1024,2048", help="numbers of sequences that answer in a step")
    parser.add_argument("--steps", type=int, default=40, help="steps that are timed, twice")
    asked = parser.parse_args(arguments)
    print("sequences  step ms  " + "  ".join(f"{name:>8}" for name in STAGES) + "      rest")
    for sequences in map(int, asked.sequences.split(",")):
        cost = measure(sequences, asked.steps)
        stages = list(cost.stages_ms.values())
        cells = "  ".join(f"{value:8.2f}" for value in (*stages, cost.step_ms - sum(stages)))
        print(f"{sequences:9,}  {cost.step_ms:7.2f}  {cells}")


if __name__ == "__main__":
    main()
