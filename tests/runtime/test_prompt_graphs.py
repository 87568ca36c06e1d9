"""Steps with prompts, padded as their graphs are; a graph is replaced by the function that it would replay."""

from collections.abc import Callable
from typing import Any

import pytest

from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.device import prompt_graphs
from quantkit.runtime.device.prompt_graphs import TOKENS, PromptGraphs, PromptKey
from quantkit.runtime.device.step_inputs import StepInputs
from quantkit.runtime.llm import LLM


class Replayed:
    def __init__(self, step: Callable[[], None], pool: Any) -> None:
        self.replay = step


def padded(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[LLM, list[PromptKey]]:
    """An engine whose prompts go through padded steps, and the sizes that were made."""
    monkeypatch.setattr(prompt_graphs, "capture_graph", Replayed)
    llm = LLM("demo-draft", device="cpu", **options)
    part = llm.engine.runner.part
    graphs = PromptGraphs(part.decoder, part.cache, part.device_rows, None)
    part.prompt_graphs = graphs
    made: list[PromptKey] = []
    capture = graphs.capture

    def note(key: PromptKey) -> None:
        made.append(key)
        capture(key)

    monkeypatch.setattr(graphs, "capture", note)
    return llm, made


def test_answers_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of many lengths, answers beside them, chunks, log-probabilities of prompts."""
    options: dict[str, Any] = {"max_sequences": 5, "step_tokens": 48, "max_context": 256}
    prompts = [list(range(3, 3 + length)) for length in (1, 15, 16, 17, 33, 100, 47, 2)]
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    expected = LLM("demo-draft", device="cpu", **options).generate(prompts, params)
    llm, made = padded(monkeypatch, **options)
    found = llm.generate(prompts, params)
    assert [one.answers[0].token_ids for one in found] == [one.answers[0].token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.prompt_logprobs == pytest.approx(other.prompt_logprobs, abs=1e-4)
    assert {key.tokens for key in made} == {16, 64}  # 48 tokens in a step, and what is left at the end
    llm.engine.check_integrity()


@pytest.mark.parametrize("max_context", [8, 128, 250])
def test_padding_longer_than_any_context(max_context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many short prompts that what is missing to the next size is more than one sequence may have."""
    options: dict[str, Any] = {"max_sequences": 8, "max_context": max_context, "share_prefixes": False}
    prompts = [list(range(3 + start, 3 + start + min(max_context - 4, 70))) for start in range(8)]
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    expected = LLM("demo-draft", device="cpu", **options).generate(prompts, params)
    llm, made = padded(monkeypatch, **options)
    graphs = llm.engine.runner.part.prompt_graphs
    assert graphs is not None
    monkeypatch.setattr(graphs, "_padded", lambda inputs: PromptKey(TOKENS[-1], 9))
    found = llm.generate(prompts, params)
    assert [one.answers[0].token_ids for one in found] == [one.answers[0].token_ids for one in expected]
    assert made
    part = llm.engine.runner.part
    assert part.device_rows.page_table.shape[1] * part.cache.page_size >= TOKENS[-1]


def test_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, made = padded(monkeypatch, max_sequences=20)
    graphs = llm.engine.runner.part.prompt_graphs
    assert graphs is not None
    assert graphs.keys[0] == PromptKey(TOKENS[-1], 21)
    assert {key.sequences for key in graphs.keys} == {9, 21}
    assert graphs.takes(StepInputs(ids=[1] * TOKENS[-1]))
    assert not graphs.takes(StepInputs(ids=[1] * (TOKENS[-1] + 1)))
    assert not graphs.takes(StepInputs(ids=[1], ancestors=[1]))  # trees have attention of their own
    llm.generate([[length] * length for length in range(20, 29)], SamplingParams(max_tokens=1))
    assert made == [PromptKey(256, 21)]  # nine prompts, 216 tokens
    llm.generate([[7] * 100] * 8, SamplingParams(max_tokens=1))
    assert made[1] == PromptKey(128, 9)  # eight, which share all but their last pages
