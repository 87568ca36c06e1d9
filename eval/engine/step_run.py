"""Decode steps under torch's profiler.

Protocol: N prompts of random tokens, greedy, the end token ignored. When all of them answer, some steps go by until
graphs are captured, then steps are timed by the host's clock, and only then the profiler is started: it makes launches
slower, and once started it may go on doing so.
"""

from __future__ import annotations

import random
import time
from itertools import pairwise
from statistics import median

import torch

from quantkit.errors import InputError, QuantkitError
from quantkit.eval.engine.results import Started
from quantkit.eval.engine.run import Load, bytes_of_step
from quantkit.eval.engine.step_profile import Event, step_table, whole_steps
from quantkit.eval.engine.step_results import StepResult
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.engine.engine import Engine, Request

SETTLE = 16  # steps until every graph is there
PROFILER_WARM_UP = 2  # steps: its first start takes long
_AT_EDGES = 3  # steps beside those asked for: the first is cut, its neighbours may be slow


def tokens_of(batch: int, context: int, steps: int, budget: int) -> tuple[int, int]:
    """Of every prompt, so that contexts are about as asked when the profiler runs; and new ones at most."""
    before = SETTLE + steps + PROFILER_WARM_UP
    prompt = max(1, context - before - steps // 2)
    in_chunks = 2 * -(-batch * prompt // budget) + 2  # steps in which the first prompts answer and the last are read
    return prompt, before + steps + _AT_EDGES + in_chunks


def check_options(options: EngineOptions) -> None:
    """Refuses what can be seen before anything is loaded."""
    if options.speculative is not None or options.tensor_parallel * options.pipeline_parallel > 1:
        raise InputError(
            "bench step looks at plain decoding on one GPU; leave out --speculative, --tensor-parallel and "
            "--pipeline-parallel"
        )
    if options.torch_device.type != "cuda":
        raise InputError("bench step needs a CUDA GPU, whose kernels it times; on a CPU use 'quantkit bench engine'")


def measure_step(
    engine: Engine, started: Started, batch: int, context: int, steps: int, bandwidth: float | None
) -> StepResult:
    """`bandwidth` is the device's, bytes a second."""
    prompt, new = tokens_of(batch, context, steps, engine.options.budget)
    requests = all_answering(engine, batch, prompt, new)
    for _ in range(SETTLE):
        engine.step()
    unprofiled = _seconds_of_steps(engine, steps)
    _trace(engine, PROFILER_WARM_UP)
    launched = steps + _AT_EDGES
    found = whole_steps(_trace(engine, launched))
    lengths = [len(sequence.tokens) for request in requests for sequence in request.sequences]
    _check_all_answer(engine, batch, prompt)
    _end(engine, requests)
    if len(found) > launched:
        raise QuantkitError(f"the timeline has {len(found)} ends of steps, but {launched} steps were launched")
    middle = round(sum(lengths) / len(lengths) - launched / 2)
    return StepResult(
        started=started,
        table=step_table(found),
        batch=batch,
        context=middle,
        unprofiled_us=median(unprofiled) * 1e6,
        read_bytes=bytes_of_step(engine, Load(batch, middle, 0)),
        bandwidth=bandwidth,
    )


def all_answering(engine: Engine, batch: int, prompt: int, new: int, *, seed: int = 0) -> list[Request]:
    """So many requests, each of which will answer in every step from now on."""
    generator = random.Random(seed)
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    vocab = engine.config.vocab
    requests = [engine.add([generator.randrange(vocab) for _ in range(prompt)], params) for _ in range(batch)]
    silent = {request.id for request in requests}
    while silent:
        silent -= {delta.request for delta in engine.step()}
    try:
        _check_all_answer(engine, batch, prompt)
    except InputError:
        _end(engine, requests)
        raise
    return requests


def _check_all_answer(engine: Engine, batch: int, prompt: int) -> None:
    options = engine.options
    if len(engine.scheduler.running) < batch or options.budget < batch:
        raise InputError(
            f"{batch} requests with prompts of {prompt} tokens cannot all answer in one step: there are "
            f"{options.sequences} places, {engine.memory.kv_tokens:,} tokens of cache and {options.budget:,} tokens "
            "a step; use a smaller --batch or --context"
        )


def _end(engine: Engine, requests: list[Request]) -> None:
    for request in requests:
        engine.abort(request.id)
    engine.drain()


def _seconds_of_steps(engine: Engine, steps: int) -> list[float]:
    """By the host's clock; a call ends when the tokens of the step before have come."""
    times = [time.perf_counter()]
    for _ in range(steps):
        engine.step()
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def _trace(engine: Engine, steps: int) -> list[Event]:
    """What the device did in so many steps; the one before them may still be among it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    return [
        Event(event.time_range.start, event.time_range.end - event.time_range.start, event.name)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
