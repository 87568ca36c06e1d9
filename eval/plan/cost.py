"""What output tokens would cost: an estimate from data sheets, for requests with a prompt and an answer.

A request reads its prompt once and grows by a token in every step, so over its life it has the prompt and half the
answer in the cache. Its price is that of both parts, divided by the tokens that come out.
"""

from __future__ import annotations

from quantkit.eval.plan.question import Question

COST_TITLE = "Cost, estimated from data sheets"


def cost_of_million(question: Question, tokens_per_second: float, gpus: int = 1) -> float | None:
    """Of output tokens, where all GPUs together give so many a second at best; None without a price."""
    if question.price_per_hour is None:
        return None
    return question.price_per_hour * gpus / (3600 * tokens_per_second * question.efficiency) * 1e6


def cost_meaning(question: Question, per: str = "") -> str:
    """What is counted, and how far it can be trusted; `per` says whose price it is where there are several GPUs."""
    lines = [
        f"Of a million output tokens at {question.price_per_hour:g} an hour{per}: prompts of {question.prompt:,} and "
        f"answers of {question.new:,} tokens.",
        f"Computing the prompts is counted, and steps at the mean context of {question.mean_context:,} tokens.",
    ]
    if question.efficiency == 1:
        return "\n".join([*lines, "A lower bound, not a measurement: no engine is as fast as the ceiling."])
    share = f"At {question.efficiency:g} of the ceiling, the --efficiency that was given; not a measurement."
    return "\n".join([*lines, share])
