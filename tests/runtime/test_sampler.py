"""The sampler on a CPU against plain definitions: penalties, biases, bans, seeds, log-probabilities, distributions."""

import math
from dataclasses import replace
from itertools import count

import pytest
import torch
from torch import Tensor

from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.sequence import Sequence
from quantkit.runtime.core.step_result import Samples
from quantkit.runtime.model.ops import ops_for
from quantkit.runtime.sampling.sampler import Sampler

VOCAB = 24
NUM_ROWS = 4
CPU = torch.device("cpu")
OPS = ops_for(CPU, torch.float32)
ids = count()


def sequence_of(prompt: list[int], row: int = 0, ends: tuple[int, ...] = (), **params: object) -> Sequence:
    asked = SamplingParams(**params)  # type: ignore[arg-type]
    made = Sequence(next(ids), prompt, asked, 0.0, asked.seed or 0, asked.max_tokens or 64, end_tokens=ends)
    made.row = row
    return made


def make_sampler(seen: list[Tensor] | None = None) -> Sampler:
    """`seen` collects the logits from which tokens are chosen."""

    def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
        if seen is not None:
            seen.append(logits.clone())
        chosen: tuple[Tensor, Tensor] = OPS.greedy(logits)
        return chosen

    return Sampler(replace(OPS, greedy=greedy), VOCAB, NUM_ROWS, CPU)


def make_logits(rows: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def draw(sampler: Sampler, sequences: list[Sequence], logits: Tensor) -> Samples:
    """One step as the engine takes it: the new token is on its way while the sampler runs."""
    owner_rows = torch.tensor([sequence.row for sequence in sequences])
    positions = torch.tensor([len(sequence.tokens) - 1 for sequence in sequences])
    for sequence in sequences:
        sequence.num_pending += 1
    samples = sampler(logits, sequences, owner_rows, positions)
    for sequence, token in zip(sequences, samples.tokens.tolist(), strict=True):
        sequence.num_pending -= 1
        sequence.tokens.append(token)
    return samples


def shaped(logits: list[float], sequence: Sequence) -> list[float]:
    """Repetition as in transformers, over prompt and answer; presence and frequency as OpenAI defines them."""
    params, changed = sequence.params, []
    for token, logit in enumerate(logits):
        times = sequence.answer.count(token)
        if times or token in sequence.prompt:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= times * params.frequency_penalty + (times > 0) * params.presence_penalty
        changed.append(logit + params.logit_bias.get(token, 0.0))
    return changed


PENALTIES: dict[str, dict[str, object]] = {
    "repetition": {"repetition_penalty": 1.7},
    "reward": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "negative": {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    "bias": {"logit_bias": {3: 5.0, 7: -100.0}},
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "logit_bias": {0: 1.5, 23: -2},
    },
}


@pytest.mark.parametrize("name", PENALTIES)
def test_logits_are_shaped_as_defined(name: str) -> None:
    seen: list[Tensor] = []
    sampler = make_sampler(seen)
    sequence = sequence_of([1, 2, 2, 5], **PENALTIES[name])
    plain = sequence_of([1, 2, 3], row=1)
    for step in range(12):
        logits = make_logits(2, step % 3)  # few of them, so that tokens come again
        expected = torch.tensor([shaped(logits[0].tolist(), sequence), logits[1].tolist()])
        samples = draw(sampler, [sequence, plain], logits)
        assert torch.allclose(seen[-1], expected, atol=1e-5)
        assert samples.tokens.tolist() == expected.argmax(-1).tolist()


def test_logits_of_the_caller_stay() -> None:
    logits = make_logits(2).bfloat16()
    before = logits.clone()
    draw(make_sampler(), [sequence_of([1], **PENALTIES["all"]), sequence_of([2], row=1, min_tokens=3)], logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_before_the_least_number_of_tokens(temperature: float) -> None:
    ends = (4, 9, 17)
    logits = torch.full((2, VOCAB), -5.0)
    logits[:, ends] = 20.0
    held = sequence_of([1], ends=ends, min_tokens=3, temperature=temperature, logit_bias={9: 100})
    free = sequence_of([1], row=1, ends=ends, temperature=temperature)
    sampler = make_sampler()
    for _ in range(5):
        draw(sampler, [held, free], logits)
    assert [token in ends for token in held.answer] == [False, False, False, True, True]
    assert all(token in ends for token in free.answer)


def test_ends_are_banned_beside_tokens_on_their_way() -> None:
    """With overlap, the host knows one token less than the device has."""
    sequence = sequence_of([1], ends=(4,), min_tokens=2)
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 9.0
    sampler, owner_rows = make_sampler(), torch.tensor([0])
    found = []
    for pending in (1, 2, 3):  # none of them has come back
        sequence.num_pending = pending
        found.append(int(sampler(logits, [sequence], owner_rows, torch.tensor([pending - 1])).tokens))
    assert [token == 4 for token in found] == [False, False, True]


def run_seeded(batches: list[list[Sequence]], steps: int = 10) -> None:
    """Each batch has a sampler of its own; the logits depend on the sequence's own tokens alone."""
    for sequences in batches:
        sampler = make_sampler()
        for _ in range(steps):
            rows = [make_logits(1, hash(tuple(sequence.tokens)) % 2**31) for sequence in sequences]
            draw(sampler, sequences, torch.cat(rows))


def test_a_seed_means_the_same_in_every_batch() -> None:
    def make(seed: int, row: int = 0) -> Sequence:
        return sequence_of([1, 2], row, seed=seed, temperature=0.9, top_p=0.95, presence_penalty=0.5)

    alone, first, last, greedy = make(7), make(7, 0), make(7, 3), sequence_of([1, 2], row=1)
    run_seeded([[alone], [first, make(8, 1), greedy], [make(9, 2), make(8, 1), last]])
    assert alone.answer == first.answer == last.answer
    other = make(8)
    run_seeded([[other]])
    assert other.answer != alone.answer


def test_a_batch_may_change_between_steps() -> None:
    a, b, c = (sequence_of([1], row, seed=row, temperature=1.0) for row in range(3))
    wanted = [sequence_of([1], 0, seed=row, temperature=1.0) for row in range(3)]
    run_seeded([[one] for one in wanted], steps=4)
    sampler = make_sampler()
    for sequences in ([a, b, c], [c, a, b], [b], [c, a], [a, c, b], [b, a, c]):
        rows = [make_logits(1, hash(tuple(sequence.tokens)) % 2**31) for sequence in sequences]
        draw(sampler, sequences, torch.cat(rows))
    for one, expected in zip((a, b, c), wanted, strict=True):
        assert one.answer[:4] == expected.answer


def test_answers_to_one_prompt_differ() -> None:
    sequences = [sequence_of([1], row, seed=5 + row, temperature=1.5) for row in range(NUM_ROWS)]
    run_seeded([sequences])
    assert len({tuple(sequence.answer) for sequence in sequences}) == NUM_ROWS


def test_greedy_and_sampled_rows_in_one_batch() -> None:
    logits = make_logits(3)
    greedy = [sequence_of([1], 0, seed=3), sequence_of([1], 2, seed=4)]
    sampled = sequence_of([1], 1, seed=5, temperature=50.0)
    sampler = make_sampler()
    for _ in range(40):
        draw(sampler, [greedy[0], sampled, greedy[1]], logits)
    assert set(greedy[0].answer) == {int(logits[0].argmax())}
    assert set(greedy[1].answer) == {int(logits[2].argmax())}
    assert len(set(sampled.answer)) > 10


def test_logprobs_are_those_of_the_model() -> None:
    """Whatever penalties, biases and temperature make of the logits."""
    params = PENALTIES["all"] | {"temperature": 2.0, "top_k": 5}
    sequences = [sequence_of([1, 2], 0, logprobs=5, **params), sequence_of([3], 1, logprobs=2), sequence_of([4], 2)]
    sampler = make_sampler()
    for step in range(5):
        logits = make_logits(3, step)
        samples = draw(sampler, sequences, logits)
        expected = logits.log_softmax(-1)
        assert samples.logprobs is not None
        assert samples.top is not None
        assert samples.top_logprobs is not None
        assert torch.equal(samples.logprobs, expected.gather(-1, samples.tokens[:, None])[:, 0])
        assert samples.top.shape == (3, 5)
        for row in range(3):
            best = sorted(range(VOCAB), key=lambda token: -float(expected[row, token]))[:5]
            assert samples.top[row].tolist() == best
            assert samples.top_logprobs[row].tolist() == expected[row, best].tolist()


def test_logprobs_of_the_chosen_token_alone() -> None:
    logits = make_logits(1)
    samples = draw(make_sampler(), [sequence_of([1], logprobs=0)], logits)
    assert samples.logprobs is not None
    assert float(samples.logprobs) == float(logits.log_softmax(-1).max())
    assert samples.top is not None
    assert samples.top.shape == (1, 0)
    assert draw(make_sampler(), [sequence_of([1])], logits).logprobs is None


def check_next_logits(sampler: Sampler, seen: list[Tensor], sequence: Sequence, steps: int = 1) -> None:
    for _ in range(steps):
        logits = make_logits(1, len(sequence.tokens) % 3)
        expected = shaped(logits[0].tolist(), sequence)
        draw(sampler, [sequence], logits)
        assert seen[-1][0].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_place_starts_afresh_with_its_next_sequence() -> None:
    seen: list[Tensor] = []
    sampler = make_sampler(seen)
    for prompt in ([1, 2, 3], [4], [1, 2, 3]):
        check_next_logits(sampler, seen, sequence_of(prompt, row=2, **PENALTIES["all"]), steps=4)


def test_a_place_lent_to_a_sequence_without_penalties() -> None:
    seen: list[Tensor] = []
    sampler = make_sampler(seen)
    sequence = sequence_of([1, 2], row=1, **PENALTIES["all"])
    check_next_logits(sampler, seen, sequence, steps=3)
    check_next_logits(sampler, seen, sequence_of([5], row=1), steps=3)
    check_next_logits(sampler, seen, sequence, steps=3)


@pytest.mark.parametrize("rows", [(0, 0), (0, 1), (0, 1, 0), (0, 1, 2, 0, 1)], ids=str)
def test_counts_are_right_after_preemptions(rows: tuple[int, ...]) -> None:
    """Who comes back may get its old owner_rows, another one, or one that it had before that."""
    seen: list[Tensor] = []
    sampler = make_sampler(seen)
    sequence = sequence_of([1, 2], **PENALTIES["all"])
    for times, row in enumerate(rows):
        sequence.row, sequence.num_preemptions = row, times
        check_next_logits(sampler, seen, sequence, steps=3)


def allowed_probabilities(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """By definition: temperature, then the k likeliest, then the fewest that reach p, then those near the likeliest."""
    weights = {token: math.exp(logit / params.temperature) for token, logit in enumerate(logits)}
    ranked = sorted(weights, key=lambda token: -weights[token])[: params.top_k or None]
    whole, reached, kept = sum(weights[token] for token in ranked), 0.0, []
    for token in ranked:
        if reached < params.top_p * whole or params.top_p == 1:
            kept.append(token)
        reached += weights[token]
    kept = [token for token in kept if weights[token] >= params.min_p * weights[ranked[0]]]
    whole = sum(weights[token] for token in kept)
    return {token: weights[token] / whole for token in kept}


def chi_square_limit(freedom: int) -> float:
    """Exceeded once in a thousand (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(
    ("cuts", "survivors"),
    [
        ({}, 10),
        ({"top_k": 4}, 4),
        ({"top_p": 0.85}, 5),
        ({"min_p": 0.4}, 4),
        ({"top_k": 6, "top_p": 0.9, "min_p": 0.05}, 5),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(cuts: dict[str, float], survivors: int) -> None:
    row = [0.0, 1.1, -0.4, 0.7, 1.5, -1.2, 0.3, 0.9, -0.8, 1.3]
    params = SamplingParams(temperature=0.7, **cuts)  # type: ignore[arg-type]
    expected = allowed_probabilities(row, params)
    assert len(expected) == survivors
    sequences = [Sequence(seed, [0], params, 0.0, seed, 64) for seed in range(200) for _ in range(100)]
    positions = torch.arange(100).repeat(200)  # 20,000 draws: 200 seeds at 100 positions each
    sampler = Sampler(OPS, len(row), NUM_ROWS, CPU)
    tokens = sampler(torch.tensor([row] * 20_000), sequences, torch.zeros(20_000, dtype=torch.int64), positions).tokens
    found = tokens.bincount(minlength=len(row)).tolist()
    assert sum(found[token] for token in expected) == 20_000, "a token was drawn that is cut off"
    squares = sum((found[token] - 20_000 * part) ** 2 / (20_000 * part) for token, part in expected.items())
    assert squares < chi_square_limit(survivors - 1)
