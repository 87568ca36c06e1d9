"""Log-probabilities of prompt tokens, where a request asks for them: the head runs over every position."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.runtime.core.step_plan import Scheduled, StepPlan
from quantkit.runtime.core.step_result import PromptLogprobs
from quantkit.runtime.model.decoder import AnyDecoder

ROWS = 512  # at once: logits of a whole chunk would need gigabytes


def wants_prompt_logprobs(plan: StepPlan) -> bool:
    return any(map(_wanted, [work for work in plan.scheduled if work.sequence.needs_all_logits]))


def prompt_logprobs(
    decoder: AnyDecoder, hidden: Tensor, plan: StepPlan, starts: list[int]
) -> dict[int, PromptLogprobs]:
    """By sequence id. Waits for the device, which such requests are worth."""
    found = {}
    for work, start in zip(plan.scheduled, starts, strict=False):
        if _wanted(work):
            found[work.sequence.id] = _of_sequence(decoder, hidden[start : start + work.num_tokens], work)
    return found


def _wanted(work: Scheduled) -> bool:
    return work.sequence.needs_all_logits and work.start + 1 < len(work.sequence.prompt)


def _of_sequence(decoder: AnyDecoder, hidden: Tensor, work: Scheduled) -> PromptLogprobs:
    sequence, first = work.sequence, work.start + 1
    targets = torch.tensor(sequence.prompt[first : first + work.num_tokens], device=hidden.device)
    most = sequence.params.prompt_logprobs or 0
    logprobs: list[float] = []
    top: list[list[tuple[int, float]]] = []
    for begin in range(0, len(targets), ROWS):
        wanted = targets[begin : begin + ROWS]
        rows = decoder.logits(hidden[begin : begin + len(wanted)]).float().log_softmax(-1)
        logprobs += rows.gather(-1, wanted[:, None])[:, 0].tolist()
        values, ids = rows.topk(min(most, rows.shape[1]), dim=-1)
        top += [list(zip(row, scores, strict=True)) for row, scores in
                zip(ids.tolist(), values.tolist(), strict=True)]  # fmt: skip
    return PromptLogprobs(first, logprobs, top)
