"""What the first requests would wait for, done before they come: kernels compiled or loaded, graphs captured.

A kernel that no step has used yet takes milliseconds to load, and a second to compile where it is new on this machine;
in the middle of service everybody would wait for it. Linear layers have a kernel for each range of token counts, and
attention one for each range of new tokens, for few and for many sequences: prompts of every range run once, and every
kind of sampling; then graphs are captured. On a CPU nothing is compiled.

All of it is a list of parts, each of which leaves the engine as it was: nothing cached, nothing counted. A server does
the first ones before it is ready, and the others between requests (`Rehearsal`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

from quantkit.kernels.linear.dispatch import BUCKETS
from quantkit.progress import Progress, silent
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.device.decode_graphs import graph_sizes
from quantkit.runtime.engine.engine import Engine

_MANY = 64  # sequences, enough to fill a GPU with one program for each and KV head
_NEW_TOKENS = (2, 4, 8, 16, 32)  # of each sequence
_EVERY_SIZE_UP_TO = 64  # sequences; larger graphs are captured at every fourth size, and serve those between
_KINDS = (
    SamplingParams(max_tokens=2, ignore_eos=True, seed=0),
    SamplingParams(max_tokens=2, ignore_eos=True, temperature=1.0, seed=0),
    SamplingParams(
        max_tokens=2, ignore_eos=True, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, logprobs=1, seed=0,
        repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What is done at once: some steps, or a graph."""

    name: str
    run: Callable[[], object]


class Rehearsal:
    """The parts that are still to do."""

    def __init__(self, engine: Engine, parts: list[Part]) -> None:
        self._engine = engine
        self._parts = deque(parts)

    @property
    def left(self) -> int:
        return len(self._parts)

    @property
    def next(self) -> str:
        """The name of the part that comes now; empty where none is left."""
        return self._parts[0].name if self._parts else ""

    def step(self) -> None:
        """Does one part, while nobody is answered."""
        part = self._parts.popleft()
        with self._engine.uncounted():
            part.run()

    def stop(self) -> None:
        """What is left is done when it is needed."""
        self._parts.clear()


def warm_up(engine: Engine, on_part: Progress = silent) -> None:
    """Does everything at once."""
    rehearse(engine, all_parts(engine), on_part)


def rehearse(engine: Engine, parts: list[Part], on_part: Progress = silent) -> None:
    rehearsal = Rehearsal(engine, parts)
    for part in parts:
        rehearsal.step()
        on_part(part.name, len(parts))


def first_parts(engine: Engine) -> list[Part]:
    """What nearly every first request needs: a short prompt, and its answer, greedy and drawn."""
    random = Random(0)
    return [Part(f"a first answer {number + 1}", partial(_run, engine, random, [1], params))
            for number, params in enumerate(_KINDS[:2])]  # fmt: skip


def all_parts(engine: Engine) -> list[Part]:
    random, runner = Random(0), engine.runner
    parts = []
    if (prompts := runner.part.prompt_graphs) is not None:
        parts += [Part(f"prompts of {key.tokens} tokens", partial(prompts.capture, key)) for key in prompts.keys]
    for count in token_counts(engine):
        parts.append(Part(f"{count} tokens", partial(_run, engine, random, _lengths(count, engine), _KINDS[0])))
    for lengths in attention_loads(engine):
        parts.append(Part(f"{len(lengths)} prompts", partial(_run, engine, random, lengths, _KINDS[0])))
    for number, params in enumerate(_KINDS):
        parts.append(Part(f"sampling {number + 1}", partial(_run, engine, random, [1, 1], params)))
    for size in reversed(sizes_to_capture(engine.options.sequences)):  # the largest first: its memory serves all
        parts.append(Part(f"{size} sequences", partial(runner.warm_up, (size,))))
    for sequences, count in reversed(engine.speculation.loads(engine.options.sequences)):
        name = f"{sequences} sequences, {count} guesses"
        parts.append(Part(name, partial(_prepare_guesses, engine, sequences, count)))
    return parts


def _prepare_guesses(engine: Engine, sequences: int, count: int) -> None:
    if engine.runner.graphs is not None:
        engine.speculation.prepare(engine.runner.graphs, sequences, count)


def token_counts(engine: Engine) -> Iterator[int]:
    """Steps in each range of the kernels' table, as far as steps and the cache go.

    Two for each: Triton compiles a kernel once for sizes that 16 divides, and once for others.
    """
    most = min(engine.options.budget, engine.memory.kv_tokens // 2)
    counts = {*BUCKETS, 4 * BUCKETS[-1], most}
    counts |= {count - 1 for count in counts}
    yield from sorted(count for count in counts if 2 <= count <= most)


def attention_loads(engine: Engine) -> list[list[int]]:
    """Prompt lengths for each kernel of attention: so many new tokens in few and in many sequences, and single tokens
    beside a prompt."""
    longest, many = _longest(engine), min(_MANY, engine.options.sequences)
    lengths = [length for length in _NEW_TOKENS if length <= longest]
    few_and_many = [[length] * count for count in sorted({1, many}) for length in lengths]
    return [*few_and_many, [1] * (many - 1) + [min(2 * _NEW_TOKENS[-1], longest)]]


def sizes_to_capture(sequences: int) -> list[int]:
    sizes = graph_sizes(sequences)
    small, large = [[size for size in sizes if (size <= _EVERY_SIZE_UP_TO) == wanted] for wanted in (True, False)]
    return sorted({*small, *large[3::4], sizes[-1]})


def _lengths(tokens: int, engine: Engine) -> list[int]:
    """Prompts that together have so many tokens, the first of them a single one: both kinds of attention run."""
    lengths = [1]
    while (left := tokens - sum(lengths)) > 0 and len(lengths) < engine.options.sequences:
        lengths.append(min(left, _longest(engine)))
    return lengths


def _longest(engine: Engine) -> int:
    return engine.memory.max_context - 2


def _run(engine: Engine, random: Random, lengths: list[int], params: SamplingParams) -> None:
    for length in lengths:
        engine.add([random.randrange(engine.config.vocab) for _ in range(length)], params)
    while engine.unfinished:
        engine.step()
    engine.drain()
