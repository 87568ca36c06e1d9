"""What a watermark brings and costs: how many answers show it, how many plain ones seem to, and what the text loses.

python -m quantkit.eval.watermark demo --answers 128
python -m quantkit.eval.watermark demo --answers 64 --delta 1
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import click
import torch
from torch import Tensor

from quantkit.bundled import HELDOUT_TEXT
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.watermark import DELTA, GAMMA, Watermark, key_seed
from quantkit.runtime.llm import LLM
from quantkit.runtime.sampling.watermark import green, green_numbers
from quantkit.runtime.scoring import score_tokens
from quantkit.runtime.watermark_detector import FALSE_POSITIVES, detect_watermark, score

PROMPT_TOKENS = 16
WINDOW = 256  # tokens of held-out text that are scored at a time
WINDOWS = 64  # the first of them
_SECRET = "the key of a measurement"


@dataclass(frozen=True)
class WatermarkResult:
    """Of answers drawn at temperature 1 behind beginnings of held-out text, and of that text itself."""

    gamma: float
    delta: float
    answers: int
    tokens: int  # of each answer
    found: int  # watermarked answers that the detector finds in their text
    median_z: float
    keys: int  # tried on each plain answer
    false_positives: int  # answers and keys in which the detector finds what is not there
    kl: float  # nats per token of held-out text, of the watermarked distribution from the model's
    perplexity: float  # of that text
    marked_perplexity: float  # of it in the watermarked distribution


def measure_watermark(
    llm: LLM,
    *,
    answers: int = 128,
    tokens: int = 200,
    keys: int = 20_000,
    gamma: float = GAMMA,
    delta: float = DELTA,
    windows: int = WINDOWS,
) -> WatermarkResult:
    """Everything that `WatermarkResult` says; an answer counts as found where its text is, tokenized again."""
    mark = Watermark(_SECRET, gamma, delta)
    marked = [text for text, _ in drawn_answers(llm, answers, tokens, mark)]
    plain = [ids for _, ids in drawn_answers(llm, answers, tokens, None)]
    scores = [detect_watermark(text, mark.key, tokenizer=llm.tokenizer, gamma=gamma) for text in marked]
    kl, before, after = held_out_cost(llm, mark, windows)
    return WatermarkResult(
        gamma=gamma,
        delta=delta,
        answers=answers,
        tokens=tokens,
        found=sum(one.found() for one in scores),
        median_z=median(one.z for one in scores),
        keys=keys,
        false_positives=count_false_positives(plain, keys, gamma),
        kl=kl,
        perplexity=before,
        marked_perplexity=after,
    )


def drawn_answers(llm: LLM, count: int, tokens: int, mark: Watermark | None) -> list[tuple[str, list[int]]]:
    """Texts and token ids of answers at temperature 1, each behind another place of the held-out text."""
    ids = llm.encode(HELDOUT_TEXT.read_text(encoding="utf-8"))
    apart = max((len(ids) - PROMPT_TOKENS) // count, 1)
    prompts = [ids[start : start + PROMPT_TOKENS] for start in range(0, apart * count, apart)]
    params = [
        SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, seed=seed, watermark=mark)
        for seed in range(count)
    ]
    return [(one.text, one.answers[0].token_ids) for one in llm.generate(prompts, params)]


def count_false_positives(answers: Sequence[Sequence[int]], keys: int, gamma: float) -> int:
    """In how many pairs of an answer and a key that nobody used the detector finds the watermark."""
    each = [list(dict.fromkeys(pairwise(ids))) for ids in answers]
    owner = torch.repeat_interleave(torch.tensor([len(pairs) for pairs in each]))
    before, tokens = torch.tensor([pair for pairs in each for pair in pairs]).unbind(1)
    least = torch.tensor([least_green(len(pairs), gamma) for pairs in each])
    numbers = torch.tensor(green_numbers(gamma))
    found = 0
    for key in range(keys):
        listed = green(torch.tensor(key_seed(f"another key {key}")), before, tokens, numbers)
        found += int((torch.bincount(owner, listed.double(), len(each)) >= least).sum())
    return found


def least_green(tokens: int, gamma: float) -> int:
    """Green ones among so many tokens from which on the detector finds a watermark."""
    return next((few for few in range(tokens + 1) if score(tokens, few, gamma).found(FALSE_POSITIVES)), tokens + 1)


def held_out_cost(llm: LLM, mark: Watermark, windows: int = WINDOWS) -> tuple[float, float, float]:
    """Divergence of the watermarked distribution from the model's over held-out text, and its perplexity in both."""
    ids = torch.tensor(llm.encode(HELDOUT_TEXT.read_text(encoding="utf-8")))
    parts = ids.split(WINDOW)[:windows]
    losses = [_window_cost(score_tokens(llm.engine, part[:-1]), part, mark) for part in parts]
    kl, plain, marked = torch.cat(losses, 1).mean(1).tolist()
    return kl, math.exp(plain), math.exp(marked)


def _window_cost(logits: Tensor, ids: Tensor, mark: Watermark) -> Tensor:
    """Divergence and both losses of every token but the first; [3, tokens]."""
    plain = logits.double().cpu().log_softmax(-1)
    listed = green(
        torch.tensor(mark.seed), ids[:-1, None], torch.arange(plain.shape[1]), torch.tensor(green_numbers(mark.gamma))
    )
    marked = (plain + mark.delta * listed).log_softmax(-1)
    kl = (marked.exp() * (marked - plain)).sum(-1)
    losses = [-one.gather(-1, ids[1:, None])[:, 0] for one in (plain, marked)]
    return torch.stack([kl, *losses])


@click.command()
@click.argument("model")
@click.option("--answers", default=128, show_default=True, help="With a watermark, and as many without.")
@click.option("--tokens", default=200, show_default=True, help="Of each answer.")
@click.option("--keys", default=20_000, show_default=True, help="Tried on every plain answer.")
@click.option("--gamma", default=GAMMA, show_default=True, help="Share of green tokens.")
@click.option("--delta", default=DELTA, show_default=True, help="Added to their logits.")
def main(model: str, **given: Any) -> None:
    """Answers of MODEL with and without a watermark, and what the watermark costs, as one JSON object."""
    result = measure_watermark(LLM(model, max_sequences=64), **given)
    click.echo(json.dumps(asdict(result), indent=2))


if __name__ == "__main__":
    main()
