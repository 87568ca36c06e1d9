"""How fast a GPU could be at best: a step takes at least the time to move its bytes, and the time to compute.

Nothing else is counted: no launch, no reading of activations, no waiting. So every figure is a ceiling, and a measured
speed stands below it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from quantkit.eval.plan.gpus import Gpu
from quantkit.eval.plan.model import Cache
from quantkit.eval.plan.weights import WeightPlan

MAX_BATCH = 4096  # where the search for a batch ends
HELPS = 1.1  # a format that is less than this many times as fast as bf16 has stopped helping


@dataclass(frozen=True)
class Step:
    """One step of decoding: a token for each of `batch` requests of `context` tokens."""

    batch: int
    context: int
    bytes: int
    memory_seconds: float
    compute_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.memory_seconds, self.compute_seconds)

    @property
    def bound(self) -> str:
        return "memory" if self.memory_seconds >= self.compute_seconds else "compute"

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.seconds


@dataclass(frozen=True)
class Ceiling:
    """What bounds the speed of one model in one format on one GPU."""

    cache: Cache
    attention_width: int  # query heads times their size
    weights: WeightPlan
    gpu: Gpu
    cache_itemsize: Fraction = Fraction(2)  # bytes of a number in the cache
    prompt_width: int | None = None  # of attention in whole prompts; None: as in a step

    @property
    def linear_seconds(self) -> float:
        """To compute the linears and lm_head for one token."""
        return sum(count / self.gpu.rate(name) for name, count in self.weights.operations.items())

    def cache_bytes(self, context: int) -> int:
        """That one request of so many tokens has read for its next one."""
        return int(self.cache.read(context) * self.cache_itemsize)

    def attention_operations(self, pairs: int) -> int:
        """Query times key and score times value: a product and a sum each."""
        return 4 * self.attention_width * pairs

    def token_seconds(self, context: int) -> float:
        """To compute one token at the end of a context."""
        return self.linear_seconds + self.attention_operations(self.cache.seen(context)) / self.gpu.bf16

    def decode(self, batch: int, context: int) -> Step:
        moved = self.weights.read_for(batch) + batch * self.cache_bytes(context)
        return Step(batch, context, moved, moved / self.gpu.bandwidth, batch * self.token_seconds(context))

    def decode_operations(self, batch: int, context: int) -> int:
        """Of a step, in whichever arithmetic."""
        return batch * (sum(self.weights.operations.values()) + self.attention_operations(self.cache.seen(context)))

    def prefill_seconds(self, prompt: int, batch: int = 1) -> float:
        """To compute whole prompts, or to read the weights for them once."""
        read = self.weights.read_for(batch * prompt) / self.gpu.bandwidth
        return max(self.prompt_compute_seconds(prompt, batch), read)

    def prompt_compute_seconds(self, prompt: int, batch: int = 1) -> float:
        """To compute whole prompts; of each, lm_head sees the last token only."""
        head = self.weights.head_operations / self.gpu.bf16
        attention = self._prompt_attention(prompt) / self.gpu.bf16
        return batch * (prompt * (self.linear_seconds - head) + head + attention)

    def prompt_operations(self, prompt: int) -> int:
        """Of one whole prompt, in whichever arithmetic."""
        head = self.weights.head_operations
        linears = sum(self.weights.operations.values()) - head
        return prompt * linears + head + self._prompt_attention(prompt)

    def _prompt_attention(self, prompt: int) -> int:
        width = self.attention_width if self.prompt_width is None else self.prompt_width
        return 4 * width * self.cache.seen_in_prompt(prompt)

    def answer_tokens_per_second(self, batch: int, prompt: int, new: int) -> float:
        """Output tokens a second when `batch` requests come at once, prefill included.

        Prefill gives the first token, new - 1 steps the others. They are counted at a context no longer than their
        mean; the time of a step is the larger of two straight lines in it, so their sum cannot be less than that.
        """
        steps = max(new - 1, 0)
        decode = steps * self.decode(batch, mean_context(prompt, new)).seconds if steps else 0.0
        return batch * new / (self.prefill_seconds(prompt, batch) + decode)

    def bandwidth_bound_up_to(self, context: int) -> float:
        """The batch at which computing takes as long as moving bytes; infinite where the cache alone takes longer."""
        computing = self.token_seconds(context) - self.cache_bytes(context) / self.gpu.bandwidth
        if computing <= 0:
            return math.inf
        reading = computing * self.gpu.bandwidth  # bytes that are read while a token is computed
        low, high = (self.weights.read_for(tokens) / reading for tokens in (0, math.inf))
        while high - low > 0.01:  # the more requests, the more experts are read
            middle = (low + high) / 2
            low, high = (middle, high) if self.weights.read_for(middle) > middle * reading else (low, middle)
        return high


def mean_context(prompt: int, new: int) -> int:
    """Tokens in the cache of a request over its life, no more than their mean: the prompt and half the answer."""
    return prompt + max(new - 1, 0) // 2


def stops_helping(format_ceiling: Ceiling, plain: Ceiling, context: int) -> int | None:
    """The first batch from which bf16 is within 10 % for good; None where it is not, up to MAX_BATCH."""
    found = None
    for batch in range(MAX_BATCH, 0, -1):
        gain = plain.decode(batch, context).seconds / format_ceiling.decode(batch, context).seconds
        if gain >= HELPS:
            break
        found = batch
    return found
