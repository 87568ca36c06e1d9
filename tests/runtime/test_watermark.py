"""Watermarked sampling against its definition in plain numbers, and beside everything else that changes a token."""

from itertools import count, product
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit import LLM, SamplingParams, Watermark
from quantkit.errors import InputError
from quantkit.runtime.core.sequence import Sequence
from quantkit.runtime.model.ops import ops_for
from quantkit.runtime.sampling import watermark
from quantkit.runtime.sampling.sampler import Sampler
from quantkit.runtime.sampling.watermark import green, green_numbers
from quantkit.runtime.watermark_detector import detect_watermark

KEY = "a secret that nobody knows"
CPU = torch.device("cpu")
ids = count()


def splitmix(state: int, number: int) -> int:
    """SplitMix64 as published, in numbers without bounds."""
    mixed = (state + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


def is_green(mark: Watermark, before: int, token: int) -> bool:
    return splitmix(splitmix(mark.seed % 2**64, before), token) >> 33 < round(mark.gamma * 2**31)


def sequence_of(mark: Watermark | None, row: int, **params: Any) -> Sequence:
    asked = SamplingParams(watermark=mark, **params)
    return Sequence(next(ids), [1, 2], asked, 0.0, asked.seed or 0, 64, row=row)


def test_the_generator_is_the_published_one() -> None:
    """Its first numbers from the state 1234567, as in the tests of other implementations."""
    assert [splitmix(1234567, number) for number in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("vocab", [1, 2, 31, 257, 4099])
@pytest.mark.parametrize("gamma", [0.01, 0.25, 0.5, 0.77, 0.99])
def test_green_is_what_its_definition_says(vocab: int, gamma: float) -> None:
    mark = Watermark(KEY, gamma)
    before = torch.tensor([0, 5, vocab - 1, 262_207])
    found = green(torch.tensor(mark.seed), before[:, None], torch.arange(vocab), torch.tensor(green_numbers(gamma)))
    assert found.tolist() == [[is_green(mark, one, token) for token in range(vocab)] for one in before.tolist()]


@pytest.mark.parametrize("gamma", [0.1, 0.25, 0.5])
def test_the_share_of_green_tokens_is_gamma(gamma: float) -> None:
    """Behind every token, under every key, and of pairs that differ in one bit alone: within five deviations."""
    numbers, tokens = torch.tensor(green_numbers(gamma)), torch.arange(50_021)
    bound = 5 * (gamma * (1 - gamma) / len(tokens)) ** 0.5
    for key, before in product(range(4), (0, 1, 2, 4096, 131_071)):
        seed = torch.tensor(Watermark(f"key {key}").seed)
        first = green(seed, torch.tensor(before), tokens, numbers)
        second = green(seed, torch.tensor(before + 1), tokens, numbers)
        assert abs(first.double().mean() - gamma) < bound
        assert abs((first & second).double().mean() - gamma**2) < bound
        assert abs((first[1:] & first[:-1]).double().mean() - gamma**2) < bound


@pytest.mark.parametrize("vocab", [3, 24, 1001])
def test_logits_get_delta_where_green_and_others_stay(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watermark, "_MARKED_ROWS", 2)
    marks = [Watermark(KEY), None, Watermark("another", 0.5, 7), Watermark(KEY, delta=1), None]
    sequences = [sequence_of(mark, row) for row, mark in enumerate(marks)]
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(0))
    before = torch.tensor([2, 0, 1, 2, 2])
    expected = [
        [value + (mark.delta if mark and is_green(mark, last, token) else 0) for token, value in enumerate(row)]
        for mark, last, row in zip(marks, before.tolist(), logits.tolist(), strict=True)
    ]
    sampler = Sampler(ops_for(CPU, torch.float32), vocab, 5, CPU)
    for owners, rows in ((sequences, slice(0, 5)), (sequences[1:4], slice(1, 4))):  # the second batch is another one
        kept = logits[rows].clone()
        at = torch.arange(5)[rows]
        samples = sampler(logits[rows], owners, at, at, before=before[rows])
        assert samples.tokens.tolist() == torch.tensor(expected)[rows].argmax(-1).tolist()
        assert torch.equal(logits[rows], kept)


def test_with_penalties_biases_and_log_probabilities() -> None:
    """The watermark comes behind penalties, and log-probabilities are the model's."""
    mark = Watermark(KEY, delta=3)
    sequence = sequence_of(mark, 0, repetition_penalty=1.5, logit_bias={3: -2.0}, logprobs=2)
    logits = torch.linspace(-1, 1, 24)[None]
    changed = [value / 1.5 if token in (1, 2) and value > 0 else value * 1.5 if token in (1, 2) else value
               for token, value in enumerate(logits[0].tolist())]  # fmt: skip
    changed = [value + (token == 3) * -2 + 3 * is_green(mark, 2, token) for token, value in enumerate(changed)]
    sampler, at = Sampler(ops_for(CPU, torch.float32), 24, 1, CPU), torch.zeros(1, dtype=torch.int64)
    samples = sampler(logits, [sequence], at, at + 1, before=torch.tensor([2]))
    (chosen,) = samples.tokens.tolist()
    assert chosen == torch.tensor(changed).argmax()
    assert samples.logprobs is not None
    assert torch.allclose(samples.logprobs[0], logits[0].log_softmax(-1)[chosen])


@pytest.mark.parametrize(("field", "value"), [("gamma", 0), ("gamma", 1), ("delta", 0), ("delta", 101), ("key", "")])
def test_wrong_watermarks_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"watermark {field} is"):
        Watermark(**{"key": KEY, field: value})


def test_a_key_is_shown_nowhere() -> None:
    assert KEY not in repr(SamplingParams(watermark=Watermark(KEY)))
    with pytest.raises(InputError, match=r"watermark is True, but must be a quantkit\.Watermark or None"):
        SamplingParams(watermark=True)  # type: ignore[arg-type]


def answers(speculative: str | None, mark: Watermark | None) -> list[list[int]]:
    """Of watermarked requests beside plain ones, with penalties and without, greedy and drawn with a seed."""
    llm = LLM("demo-draft", device="cpu", max_context=256, kv_tokens=2048, speculative=speculative)
    params = [
        SamplingParams(max_tokens=60, ignore_eos=True, temperature=heat, seed=7, frequency_penalty=penalty,
                       watermark=mark if marked else None)
        for marked, heat, penalty in ((1, 0.0, 0), (0, 0.9, 0), (1, 0.9, 0), (1, 0.9, 0.3), (0, 0.0, 0))
    ]  # fmt: skip
    return [one.answers[0].token_ids for one in llm.generate(["The function returns"] * len(params), params)]


def test_in_the_engine_beside_plain_requests_and_with_guesses() -> None:
    mark = Watermark(KEY, delta=4)
    plain, marked = answers(None, None), answers(None, mark)
    assert [marked[at] for at in (1, 4)] == [plain[at] for at in (1, 4)]  # nobody else is changed
    assert marked[0] != plain[0]  # greedy, it repeats itself: too few pairs to be found
    for at in (2, 3):
        assert detect_watermark(marked[at], KEY).found()
        assert not detect_watermark(plain[at], KEY).found()
        assert not detect_watermark(marked[at], "another key").found()
    assert answers("ngram,k=3", mark) == marked  # guesses are verified in the marked distribution
    assert answers("draft=demo-draft,k=3", mark) == marked


def test_a_drawn_guess_keeps_the_marked_distribution() -> None:
    """Requests without a seed, whose guesses a draft draws from its own distribution: the watermark is there."""
    llm = LLM("demo-draft", device="cpu", max_context=256, kv_tokens=2048, speculative="draft=demo-draft,k=3", seed=1)
    params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=1.0, watermark=Watermark(KEY, delta=3))
    found = llm.generate(["The function returns"] * 2, params)
    assert llm.engine.speculation.accepted > 0
    assert all(detect_watermark(one.answers[0].token_ids, KEY).found() for one in found)


def test_a_tensor_of_any_shape_is_hashed() -> None:
    """As the detector asks: pairs, one by one."""
    pairs = torch.tensor([[1, 2], [2, 1], [0, 0]])
    found: Tensor = green(torch.tensor(Watermark(KEY).seed), *pairs.unbind(1), torch.tensor(green_numbers(0.25)))
    assert found.tolist() == [is_green(Watermark(KEY), *pair) for pair in pairs.tolist()]
