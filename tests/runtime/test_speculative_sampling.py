"""Sampling with guesses keeps the model's distribution: counted 20,000 times for every way to guess, and 200,000 times
where tests may be long.

The target is a chain of five tokens: what follows depends on the last one. Every sequence draws two tokens; the second
comes from the same step where the guess was right, and from a step of its own elsewhere.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from long_cases import others_long
from quantkit.kernels.reference import sampling
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.sequence import Sequence
from quantkit.runtime.core.step_plan import Scheduled, StepPlan
from quantkit.runtime.core.step_result import Launched, Outcome
from quantkit.runtime.device.runner import Runner
from quantkit.runtime.model.ops import ops_for
from quantkit.runtime.sampling.rejection import Proposed
from quantkit.runtime.sampling.sampler import Sampler

CHAIN = torch.tensor([[2.0, 1.0, 0.2, -1.0, 0.0], [0.0, 0.0, 1.5, 1.0, -2.0], [1.0, -1.0, 0.5, 0.3, 0.2],
                      [0.1, 0.2, 0.3, 0.4, 0.5], [-1.0, 2.0, 0.0, 0.0, 1.0]])  # fmt: skip
OTHER = CHAIN + torch.tensor([-1.0, 0.0, 0.0, 0.0, 1.5])  # what a draft model thinks
LACKING = OTHER.index_fill(1, torch.tensor(1), float("-inf"))  # the same of one that does not have a token
DRAFTS = {"model": OTHER, "drawn": OTHER, "lacking": LACKING}
START, BATCH = 0, 20_000
MANY = 200_000
SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=0.7, top_k=3),
]


def probabilities(params: SamplingParams) -> Tensor:
    """Of the target, [token, following token]."""
    rows = len(CHAIN)
    columns = [torch.full((rows,), value) for value in (params.temperature, params.top_p, params.min_p)]
    kept = sampling.allowed(CHAIN, columns[0], torch.full((rows,), params.top_k), columns[1], columns[2])
    return (CHAIN / params.temperature).masked_fill(~kept, float("-inf")).double().softmax(-1)


def verified(
    sequences: list[Sequence], drafts: list[tuple[int, ...]], position: int, proposals: Tensor | None = None
) -> list[Outcome]:
    """The real sampler and the real verdict, on logits of the chain. `proposals`: guesses were drawn from it."""
    sampler = Sampler(ops_for(torch.device("cpu"), torch.float32), len(CHAIN), 1, torch.device("cpu"), seed=position)
    scheduled = [
        Scheduled(one, position, 1 + len(draft), True, draft) for one, draft in zip(sequences, drafts, strict=True)
    ]
    rows = [token for one, draft in zip(sequences, drafts, strict=True) for token in (one.tokens[-1], *draft)]
    owners = [work.sequence for work in scheduled for _ in range(1 + len(work.draft))]
    owner_rows = torch.zeros(len(rows), dtype=torch.int64)
    positions = torch.tensor([position + ahead for work in scheduled for ahead in range(1 + len(work.draft))])
    ids, proposed = torch.tensor(rows), None
    if proposals is not None:
        at = [row for row in range(len(rows) - 1) if owners[row] is owners[row + 1]]
        guesses = ids[torch.tensor(at) + 1]
        proposed = Proposed(at, guesses, list(proposals[ids[at]]))
    samples = sampler(CHAIN[ids], owners, owner_rows, positions, proposed=proposed)
    return Runner.collect(None, Launched(StepPlan(scheduled), scheduled, samples, torch.tensor(rows), {}, None))  # type: ignore[arg-type]


def guessed(sequences: list[Sequence], draft: tuple[int, ...] | str) -> list[tuple[int, ...]]:
    """The same draft for all, or what another chain draws with each sequence's own random numbers, or with others."""
    if not isinstance(draft, str):
        return [draft] * len(sequences)
    if draft != "model":
        sequences = [replace(one, seed=~one.seed) for one in sequences]
    sampler = Sampler(ops_for(torch.device("cpu"), torch.float32), len(CHAIN), 1, torch.device("cpu"))
    tokens, found = torch.full((len(sequences),), START), []
    for position in (1, 2):
        owner_rows = torch.zeros(len(sequences), dtype=torch.int64)
        tokens = sampler(DRAFTS[draft][tokens], sequences, owner_rows, owner_rows + position).tokens
        found.append(tokens.tolist())
    return list(zip(*found, strict=True))


def pairs_drawn(samples: int, params: SamplingParams, draft: tuple[int, ...] | str, spoil: float = 0.0) -> Tensor:
    """How often each pair of tokens was drawn, [first, second]. `spoil`: the share of wrong first guesses that are
    taken for right."""
    counts = torch.zeros(len(CHAIN), len(CHAIN), dtype=torch.int64)
    dice = random.Random(5)
    for first in range(0, samples, BATCH):
        made = [Sequence(seed, [START], params, 0.0, seed * 7919 + 13, 2) for seed in range(first, first + BATCH)]
        short = []
        proposals = None if draft == "model" else DRAFTS.get(str(draft))
        for outcome in verified(made, guessed(made, draft), position=1, proposals=proposals):
            tokens = [sampled.token for sampled in outcome.tokens]
            if spoil and outcome.num_accepted == 0 and dice.random() < spoil:
                tokens[0] = outcome.scheduled.draft[0]
            outcome.scheduled.sequence.tokens += tokens[:2]
            if len(tokens) < 2:
                short.append(outcome.scheduled.sequence)
        for outcome in verified(short, [()] * len(short), position=2):
            outcome.scheduled.sequence.tokens.append(outcome.tokens[0].token)
        drawn = torch.tensor([one.tokens[1:3] for one in made])
        counts += torch.bincount(drawn[:, 0] * len(CHAIN) + drawn[:, 1], minlength=len(CHAIN) ** 2).view_as(counts)
    return counts


def chi_square(counts: Tensor, params: SamplingParams) -> tuple[float, int]:
    """The statistic and its degrees of freedom; tokens that cannot be drawn must not be."""
    chain = probabilities(params)
    expected = (chain[START][:, None] * chain) * counts.sum()
    possible = expected > 0
    assert int(counts[~possible].sum()) == 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum()), int(possible.sum()) - 1


def limit(freedom: int) -> float:
    """Chi-square beyond which chance goes once in a million (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + 4.75 * spread**0.5) ** 3)


DRAWN: list[tuple[SamplingParams, tuple[int, ...] | str]] = [
    (SETTINGS[0], (2, 1)),
    (SETTINGS[1], (0,)),
    (SETTINGS[2], "model"),
    *((params, "drawn") for params in SETTINGS),
]


@pytest.mark.parametrize(
    ("params", "draft", "samples"),
    [
        (SETTINGS[0], "lacking", BATCH),
        *((*DRAWN[number], BATCH) for number in (0, 2, -1)),  # fixed guesses, a model's, drawn ones; the rest with MANY
        *(pytest.param(*case, MANY, marks=pytest.mark.long) for case in DRAWN),
        *(pytest.param(params, (0,), MANY, marks=pytest.mark.long) for params in SETTINGS),
    ],
    ids=str,
)
def test_samples_have_the_target_distribution(
    params: SamplingParams, draft: tuple[int, ...] | str, samples: int
) -> None:
    statistic, freedom = chi_square(pairs_drawn(samples, params, draft), params)
    assert statistic < limit(freedom)


@pytest.mark.parametrize(
    ("samples", "error"), [(BATCH, 0.04), pytest.param(MANY, 0.01, marks=pytest.mark.long)], ids=str
)
@pytest.mark.parametrize(("draft", "rejected"), others_long([((3,), 0.97), ("drawn", 0.346)], [((3,), 0.97)]))
def test_an_error_would_be_seen(draft: tuple[int, ...] | str, rejected: float, samples: int, error: float) -> None:
    """The test above, tested: of all tokens, four or one in a hundred are wrong guesses that are taken for right."""
    params = SETTINGS[0]
    statistic, freedom = chi_square(pairs_drawn(samples, params, draft, spoil=error / rejected), params)
    assert statistic > limit(freedom)


def test_the_rejection_rule_accepts_what_both_distributions_share() -> None:
    """No rule can accept more: the overlap of the two distributions. Common random numbers accept less."""
    params, rates = SETTINGS[0], {}
    for draft in ("model", "drawn"):
        made = [Sequence(seed, [START], params, 0.0, seed * 7919 + 13, 2) for seed in range(BATCH)]
        proposals = OTHER if draft == "drawn" else None
        outcomes = verified(made, guessed(made, draft), position=1, proposals=proposals)
        rates[draft] = sum(outcome.num_accepted > 0 for outcome in outcomes) / BATCH
    overlap = float(torch.minimum(CHAIN[START].softmax(0), OTHER[START].softmax(0)).sum())
    assert rates["drawn"] == pytest.approx(overlap, abs=0.01)
    assert rates["model"] < 0.6 * overlap
