"""Whether a text has a watermark: needs its tokens and the key, and neither the model nor its logits.

Counted are the different pairs of neighbouring tokens, each once: a text that repeats itself would count the same draw
again and again. In a text written without the key each of these T pairs is green with probability gamma, independently
(`sampling/watermark.py`), so that the number of green ones, g, is binomial. From it

    z = (g - gamma T) / sqrt(T gamma (1 - gamma))        the paper's test
    p = P(at least g of T are green)                     exact: at 200 tokens and gamma = 0.25, z is normal only nearly

A text counts as watermarked where p is at most the share of plain texts that may be taken for such.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import InputError
from quantkit.runtime.core.watermark import GAMMA, check_gamma, key_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FALSE_POSITIVES = 1e-4  # of plain texts
_NEGLIGIBLE = 1e-18  # of a sum


@dataclass(frozen=True)
class WatermarkScore:
    """What the pairs of a text say."""

    tokens: int  # that were counted: those whose pair with the one before was new
    green: int
    gamma: float
    z: float
    p_value: float

    def found(self, false_positives: float = FALSE_POSITIVES) -> bool:
        """Whether the watermark is there, where so large a share of plain texts may be taken for watermarked."""
        return self.p_value <= false_positives


def detect_watermark(
    text: str | Sequence[int],
    key: str,
    *,
    model: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    gamma: float = GAMMA,
) -> WatermarkScore:
    """Looks for the watermark of `key` in a text, or in token ids. A text needs its tokenizer, or the model."""
    check_gamma(gamma)
    if not isinstance(key, str) or not key:
        raise InputError("key is empty or no text; give the secret that answers were watermarked with")
    ids = _encoded(text, model, tokenizer) if isinstance(text, str) else list(text)
    pairs = list(dict.fromkeys(pairwise(ids)))
    if not pairs:
        raise InputError(f"the text has {len(ids)} tokens, but a watermark is in pairs of them; give at least two")
    return score(len(pairs), _count_green(pairs, key, gamma), gamma)


def score(tokens: int, green: int, gamma: float) -> WatermarkScore:
    """What it means that so many are green."""
    from quantkit.runtime.sampling.watermark import green_share

    share = green_share(gamma)
    z = (green - share * tokens) / math.sqrt(tokens * share * (1 - share))
    return WatermarkScore(tokens, green, gamma, z, binomial_tail(tokens, green, share))


def binomial_tail(trials: int, least: int, chance: float) -> float:
    """The probability of `least` or more of `trials`, by summing the smaller side."""
    if least <= 0:
        return 1.0
    if least <= trials * chance:
        return 1.0 - binomial_tail(trials, trials - least + 1, 1 - chance)
    logs = [math.lgamma(trials + 1), -math.lgamma(least + 1), -math.lgamma(trials - least + 1)]
    logs += [least * math.log(chance), (trials - least) * math.log1p(-chance)]
    term = total = math.exp(math.fsum(logs))
    for successes in range(least, trials):  # above the mean, so that terms fall
        term *= (trials - successes) / (successes + 1) * chance / (1 - chance)
        total += term
        if term < total * _NEGLIGIBLE:
            break
    return min(total, 1.0)


def _count_green(pairs: list[tuple[int, int]], key: str, gamma: float) -> int:
    import torch

    from quantkit.runtime.sampling.watermark import green, green_numbers

    before, tokens = torch.tensor(pairs).unbind(1)
    return int(green(torch.tensor(key_seed(key)), before, tokens, torch.tensor(green_numbers(gamma))).sum())


def _encoded(text: str, model: str | Path | None, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    if tokenizer is None:
        from quantkit.runtime.output.tokenizer import load_tokenizer
        from quantkit.sources import model_folder

        if model is None:
            raise InputError("a text needs the tokenizer that wrote it; give model or tokenizer, or token ids")
        tokenizer = load_tokenizer(model_folder(model))
    if tokenizer is None:
        raise InputError(f"'{model}' has no tokenizer; name the model that wrote the text, or give token ids")
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
