"""A step that fails ends the answers of that step and nothing else; logits that are not finite end one answer."""

import math
import queue
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from quantkit.errors import QuantkitError
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.device.device_rows import DeviceRows
from quantkit.runtime.device.model_part import ModelPart
from quantkit.runtime.device.runner import Runner
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.known_answer import KnownAnswer
from quantkit.runtime.llm import LLM
from quantkit.runtime.server.engine_process.process import EngineLoop
from quantkit.runtime.startup import start_engine
from spoiled_logits import KINDS, spoil

Start = Callable[..., Engine]
Answers = dict[int, list[int]]
# What may raise in a step, in its order.
PLACES = [
    (ModelPart, "move"),
    (DeviceRows, "update_table"),
    (ModelPart, "run"),
    (Runner, "_sample"),
    (Runner, "collect"),
]


class Fault(Exception):
    """What nobody has thought of."""


@pytest.fixture
def start(family_model: Callable[[str], Path]) -> Start:
    def begin(**options: Any) -> Engine:
        sizes = {"max_context": 128, "kv_tokens": 384, "max_sequences": 4, "step_tokens": 48}
        return start_engine(family_model("llama"), EngineOptions(device="cpu", **sizes | options))

    return begin


def prompt_of(length: int, seed: int) -> list[int]:
    return Random(seed).choices(range(3, 112), k=length)


PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((40, 33, 60, 20, 48, 17, 70, 25))]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def run(engine: Engine) -> tuple[Answers, dict[int, Any]]:
    """Answers by request, and the requests that ended with an error, with what they were told."""
    answers: Answers = {}
    failed: dict[int, Any] = {}
    while engine.busy:
        try:
            outputs = engine.step()
        except Fault as fault:
            outputs = engine.recover(str(fault))
        for output in outputs:
            if output.token is not None:
                answers.setdefault(output.request, []).append(output.token)
            if output.finished == "error":
                failed[output.request] = output.stop_reason
    engine.check_integrity()
    assert engine.scheduler.pool.free == engine.scheduler.pool.usable
    return answers, failed


def raise_at(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, calls: set[int], error: type = Fault) -> None:
    """`owner.name` raises at these calls, before it has done anything."""
    real, count = getattr(owner, name), iter(range(1_000_000))

    def broken(self: Any, *args: Any, **options: Any) -> Any:
        if next(count) in calls:
            raise error(f"{name} failed")
        return real(self, *args, **options)

    monkeypatch.setattr(owner, name, broken)


@pytest.fixture
def undisturbed(start: Start) -> list[list[int]]:
    engine = start()
    for prompt in PROMPTS:
        engine.add(prompt, PARAMS)
    return list(run(engine)[0].values())


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"kv_tokens": 160, "swap_gib": 0.01}], ids=str)
@pytest.mark.parametrize(("owner", "name"), PLACES, ids=lambda part: part if isinstance(part, str) else "")
def test_only_the_step_that_fails_ends(
    owner: type, name: str, options: dict[str, Any], start: Start, undisturbed: list[list[int]], monkeypatch: Any
) -> None:
    if name == "move" and "swap_gib" not in options:
        pytest.skip("no page moves where there are enough")
    engine = start(**options)
    raise_at(monkeypatch, owner, name, {0 if name == "move" else 2})
    requests = [engine.add(prompt, PARAMS) for prompt in PROMPTS]
    answers, failed = run(engine)
    assert 0 < len(failed) < len(PROMPTS)
    assert set(failed.values()) == {f"{name} failed"}
    for request, wanted in zip(requests, undisturbed, strict=True):
        found = answers.get(request.id, [])
        assert found == (wanted[: len(found)] if request.id in failed else wanted)
    again = [engine.add(prompt, PARAMS) for prompt in PROMPTS]  # from the prefix cache, as far as it may be believed
    answers, failed = run(engine)
    assert not failed
    assert [answers[request.id] for request in again] == undisturbed


@pytest.mark.parametrize("how", ["ngram,k=4,adaptive=off", "self=rtn-w8a8,k=3,adaptive=off"])
def test_guesses_go_on_after_a_fault(how: str, start: Start, undisturbed: list[list[int]], monkeypatch: Any) -> None:
    engine = start(speculative=how)
    raise_at(monkeypatch, Runner, "_sample", {3, 9})
    requests = [engine.add(prompt, PARAMS) for prompt in PROMPTS]
    answers, failed = run(engine)
    assert failed
    for request, wanted in zip(requests, undisturbed, strict=True):  # what was found before the fault is not lost
        found = answers.get(request.id, [])
        assert found == (wanted[: len(found)] if request.id in failed else wanted)
    again = [engine.add(prompt, PARAMS) for prompt in PROMPTS]
    answers, _ = run(engine)
    assert [answers[request.id] for request in again] == undisturbed


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
def test_a_prompt_that_was_never_computed_is_not_found(error: type, tiny_model: Path, monkeypatch: Any) -> None:
    llm = LLM(tiny_model, device="cpu", max_context=128)
    wanted = LLM(tiny_model, device="cpu", max_context=128).generate([PROMPTS[0]], PARAMS)[0].answers[0].token_ids
    with monkeypatch.context() as broken:
        raise_at(broken, ModelPart, "run", {0}, error)
        with pytest.raises(error):
            llm.generate([PROMPTS[0]], PARAMS)
    found = llm.generate([PROMPTS[0]], PARAMS)[0]
    assert found.cached_tokens == 0
    assert found.answers[0].token_ids == wanted


def test_a_fault_of_one_caller_is_told_to_the_other(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny_model, device="cpu", max_context=128)
    stream = llm.stream(PROMPTS[0], PARAMS)
    next(stream)
    with monkeypatch.context() as broken:
        raise_at(broken, ModelPart, "run", {0})
        with pytest.raises(Fault):
            llm.generate([PROMPTS[1]], PARAMS)
    *_, last = stream
    assert last.finished == "error"
    assert "run failed" in str(last.stop_reason)


def test_the_loop_of_the_server_proves_its_engine_before_it_goes_on(start: Start, monkeypatch: Any) -> None:
    engine = start()
    outbox: queue.Queue[Any] = queue.Queue()
    loop = EngineLoop(engine, "tiny", outbox)
    wanted = {"params": {"max_tokens": 4, "logit_bias": ()}, "priority": 0, "guide": None}
    raise_at(monkeypatch, ModelPart, "run", {0})
    loop._add(wanted | {"id": 7, "prompt": PROMPTS[0]})
    loop._step()
    told = list(messages(outbox))
    assert told[0]["fault"] == {"why": "a step of the engine failed: Fault: run failed", "ended": 1}
    assert told[1]["outputs"][0][:5] == [7, 0, None, "error", "a step of the engine failed: Fault: run failed"]
    weights = engine.runner.decoder.weights
    raise_at(monkeypatch, ModelPart, "run", {0})
    loop._add(wanted | {"id": 8, "prompt": PROMPTS[0]})
    weights.embedding.mul_(1.5)  # a memory that has changed
    with pytest.raises(Fault):
        loop._step()


def messages(outbox: "queue.Queue[Any]") -> Iterator[Any]:
    with suppress(queue.Empty):
        while True:
            yield outbox.get_nowait()


def test_the_known_answer_is_no_request(start: Start) -> None:
    engine = start()
    known = KnownAnswer(engine)
    engine.add(PROMPTS[0], PARAMS)
    engine.step()
    known.check()
    run(engine)
    engine.runner.decoder.weights.embedding[1] = math.nan
    engine.runner.decoder.weights.embedding[7919 % engine.config.vocab] = math.nan
    with pytest.raises(QuantkitError, match="does not compute what it computed"):
        known.check()


# Logits that are not finite


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("options", [{}, {"speculative": "ngram,k=3,adaptive=off"}], ids=["plain", "ngram"])
def test_one_answer_ends_where_its_logits_are_not_finite(
    options: dict[str, Any], params: SamplingParams, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = start()
    wanted = [alone.add(prompt, params) for prompt in PROMPTS[:3]]
    expected, _ = run(alone)
    engine = start(**options)
    requests = [engine.add(prompt, params) for prompt in PROMPTS[:3]]
    spoil(monkeypatch, requests[1].sequences[0], known=5)
    answers, failed = run(engine)
    assert failed == {requests[1].id: "the model's logits are not finite"}
    for request, other in ((requests[0], wanted[0]), (requests[2], wanted[2])):
        assert answers[request.id] == expected[other.id]
    assert len(answers[requests[1].id]) < 12
    assert answers[requests[1].id] == expected[wanted[1].id][: len(answers[requests[1].id])]


class Worn:
    """A guide whose grammar becomes too complex when it is asked whether it has finished."""

    def advance(self, token: int) -> None: ...

    def mask(self) -> torch.Tensor:
        return torch.ones(112, dtype=torch.bool)

    def mask_behind(self, guesses: tuple[int, ...]) -> torch.Tensor:
        return self.mask()

    @property
    def finished(self) -> bool:
        raise QuantkitError("the structured output cannot go on: too many states")


def test_a_guide_that_breaks_ends_its_own_answer(start: Start, undisturbed: list[list[int]]) -> None:
    engine = start()
    free = engine.add(PROMPTS[0], PARAMS)
    guided = engine.add(PROMPTS[1], PARAMS, guides=[Worn()])
    answers, failed = run(engine)
    assert failed == {guided.id: "the structured output cannot go on: too many states"}
    assert answers[free.id] == undisturbed[0]


def test_more_tokens_than_there_are_may_stay(tiny_model: Path) -> None:
    llm = LLM(tiny_model, device="cpu", max_context=128)
    texts = [
        llm.generate([PROMPTS[0]], SamplingParams(max_tokens=8, temperature=1.0, top_k=top_k, seed=3))[0]
        for top_k in (0, 512, 2**31, 2**70)
    ]
    assert len({tuple(one.answers[0].token_ids) for one in texts}) == 1
