"""What steps take on machines for `simulated_gpu.py`: measured where that says so, else computed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, eq=False)
class Machine:
    """Milliseconds. Tables are by tokens of a step, or by sequences; between them seconds grow in straight lines."""

    name: str
    step: dict[int, float]  # of the model, by tokens
    attention: float  # for each 1,000 tokens of context, of all sequences together
    draft: dict[int, float]  # of one guess, by sequences
    reading: tuple[float, float]  # of the draft: a start, and 1,000 tokens
    prompt: float  # of the model, 1,000 tokens
    verifying: tuple[float, float]  # what a step with guesses takes beside that of as many tokens, and each guess
    host: tuple[float, float]  # a plain step, and each sequence in it
    guessing_host: tuple[float, float]  # the same of a step with guesses

    def step_ms(self, tokens: int, context: int = 0) -> float:
        return _line(self.step, tokens) + self.attention * context / 1000

    def guess_ms(self, sequences: int) -> float:
        return _line(self.draft, sequences)


# Llama-3.1-8B's shape in W4 on an H200. Plain steps are those of eval/results/engine.csv and speculative.csv less the
# attention over their contexts, drafts those of Llama-3.2-1B's shape. The host's part is what rows with a fixed number
# of guesses take beside: `test_the_machine_is_the_one_that_was_measured`.
H200_8B = Machine(
    "8B in W4, 1B draft",
    step={1: 2.23, 8: 2.36, 16: 2.45, 32: 2.86, 64: 3.6, 128: 4.8, 256: 7.6, 512: 13.5},
    attention=0.033,
    draft={1: 0.78, 8: 0.82, 32: 1.1, 128: 2.3},
    reading=(0.8, 8.5),
    prompt=45.0,
    verifying=(0.25, 0.012),
    host=(0.44, 0.02),
    guessing_host=(0.95, 0.025),
)
# The bundled pair there: the device waits for the host.
H200_SMALL = Machine(
    "15M in bf16, 2M draft",
    step={1: 0.30, 8: 0.32, 64: 0.40, 512: 0.9},
    attention=0.0005,
    draft={1: 0.2, 8: 0.21, 128: 0.4},
    reading=(0.3, 0.5),
    prompt=1.0,
    verifying=(0.05, 0.002),
    host=(0.44, 0.027),
    guessing_host=(1.1, 0.12),
)
# Llama-3.1-70B's shape in W4 with an 8B draft, by bytes and products of the above: nobody measured it.
H200_70B = Machine(
    "70B in W4, 8B draft",
    step={1: 12.0, 8: 12.6, 16: 13.2, 32: 15.5, 64: 21.0, 128: 31.0, 256: 54.0, 512: 103.0},
    attention=0.082,
    draft={1: 2.3, 8: 2.4, 32: 2.9, 128: 5.2},
    reading=(2.4, 45.0),
    prompt=400.0,
    verifying=(0.4, 0.02),
    host=(0.6, 0.02),
    guessing_host=(1.4, 0.03),
)
MACHINES = (H200_8B, H200_SMALL, H200_70B)


def _line(known: dict[int, float], at: int) -> float:
    points = sorted(known.items())
    for (left, low), (right, high) in pairwise(points):
        if at <= right:
            return low + (high - low) * max(0, at - left) / (right - left)
    (left, low), (right, high) = points[-2:]
    return high + (high - low) * (at - right) / (right - left)
