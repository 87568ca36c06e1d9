"""What the sampled tokens of a step say about its guesses, and how tokens are described."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quantkit.runtime.core.step_plan import Scheduled, StepPlan
from quantkit.runtime.core.step_result import Samples
from quantkit.runtime.sampling.rejection import Proposed


def accepted_path(work: Scheduled, row: int, tokens: list[int], verified: list[int], coins: list[bool]) -> list[int]:
    """The way through the guesses that the sampled tokens take, or that coins decide: numbers of guesses.

    Its last known token has this logits row, and each of its guesses one behind it.
    """

    def right(node: int, child: int) -> bool:
        guess = row + 1 + child
        return coins[guess] if coins else tokens[row + 1 + node] == verified[guess]

    path: list[int] = []
    node = -1
    if not work.parents:
        while node + 1 < len(work.draft) and right(node, node + 1):
            node += 1
            path.append(node)
        return path
    while True:
        children = (child for child, parent in enumerate(work.parents) if parent == node)
        following = next((child for child in children if right(node, child)), None)
        if following is None:
            return path
        path.append(node := following)


def proposed_guesses(plan: StepPlan, sampling: list[Scheduled], ids: Tensor) -> Proposed | None:
    """The guesses that were drawn from a distribution. Each is verified by the row before it."""
    rows: list[int] = []
    logits: list[Tensor] = []
    row = 0
    for work in sampling:
        if work.draft and work.sequence.id in plan.proposals:
            rows += range(row, row + len(work.draft))
            logits += plan.proposals[work.sequence.id][: len(work.draft)].unbind()
        row += len(work.draft) + 1
    if not rows:
        return None
    at = torch.tensor(rows).to(ids.device, non_blocking=True)
    return Proposed(rows, ids[at + 1], logits)


_Described = tuple[float, list[tuple[int, float]]] | tuple[()]


def describer(samples: Samples) -> Callable[[int, int | None], _Described]:
    """Log-probabilities of a row, where they were computed and so many are wanted."""
    if samples.logprobs is None or samples.top is None or samples.top_logprobs is None:
        return lambda row, wanted: ()
    top, values, chosen = samples.top.tolist(), samples.top_logprobs.tolist(), samples.logprobs.tolist()

    def describe(row: int, wanted: int | None) -> _Described:
        if wanted is None:
            return ()
        return chosen[row], list(zip(top[row][:wanted], values[row][:wanted], strict=True))

    return describe
