"""Guessed tokens change nothing but the number of steps: answers are those of plain decoding, token for token."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.bundled import HELDOUT_TEXT
from quantkit.errors import InputError
from quantkit.kernels.reference import sampling
from quantkit.runtime.engine import Engine, Request
from quantkit.runtime.llm import LLM
from quantkit.runtime.ops import ops_for
from quantkit.runtime.params import SamplingParams
from quantkit.runtime.rejection import Proposed
from quantkit.runtime.runner import Launched, Outcome, Runner
from quantkit.runtime.sampler import Sampler
from quantkit.runtime.sequence import Sequence
from quantkit.runtime.speculation.ngram import NgramDrafter
from quantkit.runtime.speculation.speculation import SpeculativeOptions
from quantkit.runtime.step_plan import Share, StepPlan
from quantkit.sources import model_folder


def prompts() -> list[str]:
    """Texts that repeat themselves, as code and lists do, and some that do not."""
    text = HELDOUT_TEXT.read_text(encoding="utf-8")
    rows = "".join(f"item {number}: value {number}\n" for number in range(12))
    return [
        rows,
        "for i in range(3):\n    print(i)\n" * 3,
        "a b c d " * 10,
        *(text[at : at + 160] for at in range(0, 2000, 500)),
    ]


PARAMS = (
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=1.0, top_k=20, seed=4, logprobs=2),
    SamplingParams(max_tokens=25, stop=["range", "value 13"], logprobs=0),
    SamplingParams(max_tokens=20, repetition_penalty=1.2, presence_penalty=0.3, ignore_eos=True),
    SamplingParams(max_tokens=12, n=2, temperature=0.7, seed=9, ignore_eos=True),
)


def engine_of(**options: Any) -> LLM:
    return LLM("demo", device="cpu", dtype="float32", max_context=256, max_sequences=6, step_tokens=96, **options)


def serve(llm: LLM, seed: int) -> tuple[list[Request], Engine]:
    """Random arrivals, everybody at once, until the last has ended."""
    engine, dice = llm.engine, random.Random(seed)
    waiting = [(llm.encode(prompt), params) for prompt in prompts() for params in PARAMS]
    dice.shuffle(waiting)
    requests: list[Request] = []
    while waiting or engine.unfinished:
        for _ in range(min(dice.randint(0, 3), len(waiting))):
            requests.append(engine.add(*waiting.pop()))
        engine.step()
        if dice.random() < 0.1:
            engine.check_integrity()
    engine.drain()
    engine.check_integrity()
    assert engine.scheduler.pool.free == engine.scheduler.pool.usable
    return requests, engine


def told(requests: list[Request]) -> list[tuple[list[int], str | None]]:
    return [(sequence.answer, sequence.finished) for request in requests for sequence in request.sequences]


@pytest.fixture(scope="module")
def plain() -> list[tuple[list[int], str | None]]:
    return told(serve(engine_of(), seed=1)[0])


FEW_PAGES: dict[str, Any] = {"kv_tokens": 288}
SWAPPED: dict[str, Any] = {"kv_tokens": 288, "swap_gib": 0.05}


@pytest.mark.parametrize(
    ("how", "pressure"),
    [
        ("ngram,k=6,adaptive=off", {}),
        ("ngram,k=6,adaptive=off", SWAPPED),
        ("draft=demo-draft,k=3,adaptive=off", {}),
        ("draft=demo-draft,k=3,adaptive=off", FEW_PAGES),
        ("draft=demo-draft,k=3,adaptive=off", SWAPPED),
        ("medusa=demo-medusa,adaptive=off", {}),
        ("medusa=demo-medusa,adaptive=off", SWAPPED),
        ("self=rtn-w3g128,k=6", FEW_PAGES),
    ],
    ids=str,
)
def test_answers_are_those_of_plain_decoding(
    plain: list[tuple[list[int], str | None]], how: str, pressure: dict[str, Any]
) -> None:
    """Greedy and sampled, under random arrivals, chunked prompts, shared prefixes and preemption."""
    requests, engine = serve(engine_of(speculative=how, overlap=True, **pressure), seed=1)
    assert told(requests) == plain
    speculation = engine.speculation
    if "adaptive=off" in how:
        assert 50 < speculation.accepted < speculation.guessed
        assert speculation.steps > 50
    if pressure:
        assert engine.scheduler.preemptions > 0


@pytest.mark.parametrize(
    "how",
    [
        "ngram,k=8,adaptive=off",
        "draft=demo-draft,adaptive=off",
        "draft=demo,adaptive=off",
        "medusa=demo-medusa,adaptive=off",
    ],
)
def test_fewer_steps(how: str) -> None:
    prompt, params = "a b c d e f " * 12, SamplingParams(max_tokens=48, ignore_eos=True)
    plain, guessed = engine_of(), engine_of(speculative=f"{how},adaptive=off")
    answers = [llm.generate(prompt, params)[0] for llm in (plain, guessed)]
    assert answers[0].text == answers[1].text
    assert guessed.engine.steps < 0.8 * plain.engine.steps
    if how == "draft=demo":  # the model itself guesses right, always
        assert guessed.engine.speculation.accepted == guessed.engine.speculation.guessed
        assert guessed.engine.steps <= plain.engine.steps / 5 + 2


def test_a_draft_of_the_model_itself_guesses_what_is_sampled() -> None:
    """Both draw with the same random numbers: where probabilities are the same, every guess is right."""
    params = [
        SamplingParams(max_tokens=30, temperature=1.0, top_p=0.95, seed=seed, ignore_eos=True) for seed in range(4)
    ]
    llm = engine_of(speculative="draft=demo,k=4,adaptive=off")
    llm.generate(prompts()[:4], params)
    speculation = llm.engine.speculation
    assert speculation.accepted == speculation.guessed > 80


def test_log_probabilities_are_those_of_plain_decoding() -> None:
    params = SamplingParams(max_tokens=30, logprobs=3, ignore_eos=True)
    one, other = (llm.generate(prompts()[:3], params) for llm in (engine_of(), engine_of(speculative="ngram")))
    for expected, found in zip(one, other, strict=True):
        assert found.answers[0].token_ids == expected.answers[0].token_ids
        assert found.answers[0].logprobs == pytest.approx(expected.answers[0].logprobs, abs=1e-4)
        assert len(found.answers[0].top_logprobs or []) == 30


def test_lookup_finds_what_followed_before() -> None:
    drafter = NgramDrafter()
    sequence = Sequence(0, [5, 6, 7, 8, 9, 1, 2, 6, 7], SamplingParams(), 0.0, 0, 8)
    assert drafter.guess(sequence, 3) == [8, 9, 1]
    assert drafter.guess(sequence, 9) == [8, 9, 1, 2, 6, 7]
    sequence.tokens += [8, 3]
    assert drafter.guess(sequence, 4) == []
    sequence.tokens += [6, 7]  # stood there twice: the later one counts
    assert drafter.guess(sequence, 2) == [8, 3]
    drafter.forget(sequence)
    assert drafter._indexes == {}


# Sampling, counted. The target is a chain of five tokens: what follows depends on the last one. Every sequence draws
# two tokens; the second comes from the same step where the guess was right, and from a step of its own elsewhere.

CHAIN = torch.tensor([[2.0, 1.0, 0.2, -1.0, 0.0], [0.0, 0.0, 1.5, 1.0, -2.0], [1.0, -1.0, 0.5, 0.3, 0.2],
                      [0.1, 0.2, 0.3, 0.4, 0.5], [-1.0, 2.0, 0.0, 0.0, 1.0]])  # fmt: skip
OTHER = CHAIN + torch.tensor([-1.0, 0.0, 0.0, 0.0, 1.5])  # what a draft model thinks
START, SAMPLES, BATCH = 0, 200_000, 20_000
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
    sequences: list[Sequence], drafts: list[tuple[int, ...]], position: int, proposals: bool = False
) -> list[Outcome]:
    """The real sampler and the real verdict, on logits of the chain. `proposals`: guesses were drawn from OTHER."""
    sampler = Sampler(ops_for(torch.device("cpu"), torch.float32), len(CHAIN), 1, torch.device("cpu"), seed=position)
    shares = [Share(one, position, 1 + len(draft), True, draft) for one, draft in zip(sequences, drafts, strict=True)]
    rows = [token for one, draft in zip(sequences, drafts, strict=True) for token in (one.tokens[-1], *draft)]
    owners = [share.sequence for share in shares for _ in range(1 + len(share.draft))]
    places = torch.zeros(len(rows), dtype=torch.int64)
    positions = torch.tensor([position + ahead for share in shares for ahead in range(1 + len(share.draft))])
    ids, proposed = torch.tensor(rows), None
    if proposals:
        at = torch.tensor([row for row in range(len(rows) - 1) if owners[row] is owners[row + 1]])
        proposed = Proposed(at, ids[at + 1], OTHER[ids[at]])
    samples = sampler(CHAIN[ids], owners, places, positions, proposed=proposed)
    return Runner.collect(None, Launched(StepPlan(shares), shares, samples, torch.tensor(rows), {}, None))  # type: ignore[arg-type]


def guessed(sequences: list[Sequence], draft: tuple[int, ...] | str) -> list[tuple[int, ...]]:
    """The same draft for all, or what another chain draws with each sequence's own random numbers, or with others."""
    if not isinstance(draft, str):
        return [draft] * len(sequences)
    if draft == "drawn":
        sequences = [replace(one, seed=~one.seed) for one in sequences]
    sampler = Sampler(ops_for(torch.device("cpu"), torch.float32), len(CHAIN), 1, torch.device("cpu"))
    tokens, found = torch.full((len(sequences),), START), []
    for position in (1, 2):
        places = torch.zeros(len(sequences), dtype=torch.int64)
        tokens = sampler(OTHER[tokens], sequences, places, places + position).tokens
        found.append(tokens.tolist())
    return list(zip(*found, strict=True))


def pairs_drawn(params: SamplingParams, draft: tuple[int, ...] | str, spoil: float = 0.0) -> Tensor:
    """How often each pair of tokens was drawn, [first, second]. `spoil`: the share of wrong first guesses that are
    taken for right."""
    counts = torch.zeros(len(CHAIN), len(CHAIN), dtype=torch.int64)
    dice = random.Random(5)
    for first in range(0, SAMPLES, BATCH):
        made = [Sequence(seed, [START], params, 0.0, seed * 7919 + 13, 2) for seed in range(first, first + BATCH)]
        short = []
        for outcome in verified(made, guessed(made, draft), position=1, proposals=draft == "drawn"):
            tokens = [sampled.token for sampled in outcome.tokens]
            if spoil and outcome.accepted == 0 and dice.random() < spoil:
                tokens[0] = outcome.share.draft[0]
            outcome.share.sequence.tokens += tokens[:2]
            if len(tokens) < 2:
                short.append(outcome.share.sequence)
        for outcome in verified(short, [()] * len(short), position=2):
            outcome.share.sequence.tokens.append(outcome.tokens[0].token)
        drawn = torch.tensor([one.tokens[1:3] for one in made])
        counts += torch.bincount(drawn[:, 0] * len(CHAIN) + drawn[:, 1], minlength=len(CHAIN) ** 2).view_as(counts)
    return counts


def chi_square(counts: Tensor, params: SamplingParams) -> tuple[float, int]:
    """The statistic and its degrees of freedom; tokens that cannot be drawn must not be."""
    chain = probabilities(params)
    expected = (chain[START][:, None] * chain) * SAMPLES
    possible = expected > 0
    assert int(counts[~possible].sum()) == 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum()), int(possible.sum()) - 1


def limit(freedom: int) -> float:
    """Chi-square beyond which chance goes once in a million (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + 4.75 * spread**0.5) ** 3)


@pytest.mark.parametrize(
    ("params", "draft"),
    [
        *((params, (0,)) for params in SETTINGS),
        (SETTINGS[2], "model"),
        *((params, "drawn") for params in SETTINGS),
        (SETTINGS[0], (2, 1)),
    ],
    ids=str,
)
def test_samples_have_the_target_distribution(params: SamplingParams, draft: tuple[int, ...] | str) -> None:
    statistic, freedom = chi_square(pairs_drawn(params, draft), params)
    assert statistic < limit(freedom)


@pytest.mark.parametrize(("draft", "rejected"), [((3,), 0.97), ("drawn", 0.346)])
def test_an_error_of_one_percent_would_be_seen(draft: tuple[int, ...] | str, rejected: float) -> None:
    """The test above, tested: of all tokens, one in a hundred is a wrong guess that is taken for right."""
    params = SETTINGS[0]
    statistic, freedom = chi_square(pairs_drawn(params, draft, spoil=0.01 / rejected), params)
    assert statistic > limit(freedom)


def test_the_rejection_rule_accepts_what_both_distributions_share() -> None:
    """No rule can accept more: the overlap of the two distributions. Common random numbers accept less."""
    params, rates = SETTINGS[0], {}
    for draft in ("model", "drawn"):
        made = [Sequence(seed, [START], params, 0.0, seed * 7919 + 13, 2) for seed in range(BATCH)]
        outcomes = verified(made, guessed(made, draft), position=1, proposals=draft == "drawn")
        rates[draft] = sum(outcome.accepted > 0 for outcome in outcomes) / BATCH
    overlap = float(torch.minimum(CHAIN[START].softmax(0), OTHER[START].softmax(0)).sum())
    assert rates["drawn"] == pytest.approx(overlap, abs=0.01)
    assert rates["model"] < 0.6 * overlap


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ngarm", ("ngarm", "did you mean 'ngram'")),
        ("ngram,k=0", ("k", "1 to 16")),
        ("ngram,k=17", ("1 to 16",)),
        ("ngram,k=many", ("whole number",)),
        ("ngram,n=3", ("'n'", "known: k, adaptive")),
        ("ngram,adaptive=yes", ("on or off",)),
        ("", ("Known: draft, medusa, ngram, self",)),
        ("medusa", ("medusa=PATH",)),
        ("medusa=nowhere", ("no medusa heads in 'nowhere'", "train-medusa")),
        ("self", ("self=nf4",)),
        ("self=nf5", ("nf5",)),
        ("self=gptq-w4g128", ("needs calibration", "rtn-w4g128", "draft=PATH")),
        ("draft", ("draft=PATH",)),
        ("ngram=x", ("ngram,k=8",)),
    ],
)
def test_wrong_input(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as refused:
        LLM("demo", device="cpu", speculative=text)
    for word in words:
        assert word in str(refused.value)


def test_heads_of_another_model() -> None:
    with pytest.raises(InputError, match="belong to another model"):
        LLM("demo-draft", device="cpu", speculative="medusa=demo-medusa")


def test_options() -> None:
    assert SpeculativeOptions.parse("ngram") == SpeculativeOptions("ngram", 8)
    assert replace(SpeculativeOptions.parse("ngram, k=3"), most=8) == SpeculativeOptions("ngram", 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("vocabulary", ("512 tokens", "4096")),
        ("tokenizer", ("numbers tokens otherwise", "same tokenizer")),
        ("positions", ("64 positions", "--max-context 64")),
        ("missing", ("no model at",)),
    ],
)
def test_a_draft_that_does_not_fit(tmp_path: Path, tiny_model: Path, change: str, words: tuple[str, ...]) -> None:
    folder = tmp_path / "draft"
    if change == "vocabulary":
        folder = tiny_model
    elif change != "missing":
        shutil.copytree(model_folder("demo-draft"), folder)
    if change == "tokenizer":
        file = folder / "tokenizer.json"
        contents = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = contents["model"]["vocab"]
        vocabulary["\u0120the"], vocabulary["\u0120of"] = vocabulary["\u0120of"], vocabulary["\u0120the"]
        file.write_text(json.dumps(contents), encoding="utf-8")
    if change == "positions":
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 64}))
    with pytest.raises(InputError) as refused:
        engine_of(speculative=f"draft={folder}")
    for word in words:
        assert word in str(refused.value)
