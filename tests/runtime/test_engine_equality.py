"""The engine gives the tokens of transformers, however steps are cut, pages are shared and sequences give way."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from pairwise import cover
from quantkit import load_reference
from quantkit.arch import FAMILIES
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.llm import LLM
from quantkit.runtime.startup import start_engine

MODELS = [*FAMILIES, "demo-draft"]
LIKE_OTHERS = (
    "mistral",
    "qwen2_moe",
    "glm4_moe",
    "deepseek_v2",
)  # what they have, others have too: all their cases are long
BUNDLED = ("demo", "demo-draft")
TOKENS = range(3, 112)  # that every model has
LENGTHS = (1, 2, 3, 5, 9, 14, 15, 16, 17, 22, 27, 31, 32, 33, 48, 60)  # of prompts, three of each
NEW_TOKENS = dict.fromkeys(FAMILIES, 8) | dict.fromkeys(BUNDLED, 6)
MAX_CONTEXT = 72
NEAR_TIE = 1e-3  # between the two best logits; behind it, rounding may choose
POOLS = {"small": 160, "roomy": 2048}  # tokens; 48 prompts and answers have 1,389
# (pool, share_prefixes, step_tokens, page_size, overlap, swap_gib)
OPTIONS: tuple[tuple[Any, ...], ...] = (tuple(POOLS), (True, False), (16, 64, 512), (16, 32), (False, True), (0, 0.001))

every_model = pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.xdist_group(f"engine {name}")) for name in MODELS]
)


@dataclass(frozen=True)
class Reference:
    """What transformers answers. An answer ends before the first near tie, if there is one."""

    prompts: list[list[int]]
    answers: list[list[int]]


def make_prompts() -> list[list[int]]:
    """Two of three begin like one text, each with another last token."""
    random = Random(0)
    text = random.choices(TOKENS, k=max(LENGTHS))
    prompts = []
    for length in LENGTHS:
        prompts += [[*text[: length - 1], random.choice(TOKENS)] for _ in range(2)]
        prompts += [random.choices(TOKENS, k=length)]
    random.shuffle(prompts)
    return prompts


def load_eager(folder: Path | str) -> torch.nn.Module:
    """Eager attention: some versions of transformers leave out soft caps in their faster kinds."""
    model = load_reference(folder, dtype="float32")
    model.set_attn_implementation("eager")
    model.generation_config.eos_token_id = None
    return model


def answers_of(model: torch.nn.Module, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """By `generate`, prompts of one length at a time, so that nothing is padded."""
    answers: dict[tuple[int, ...], list[int]] = {}
    for length in {len(prompt) for prompt in prompts}:
        ids = torch.tensor([prompt for prompt in prompts if len(prompt) == length])
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(found.logits, 1).topk(2).values  # [prompts, new tokens, 2]
        clear = (best[..., 0] - best[..., 1] > NEAR_TIE).cumprod(1).sum(1).tolist()
        for prompt, tokens, count in zip(ids.tolist(), found.sequences[:, length:].tolist(), clear, strict=True):
            answers[tuple(prompt)] = tokens[:count]
    return [answers[tuple(prompt)] for prompt in prompts]


@pytest.fixture(scope="session")
def model_folder(family_model: Callable[[str], Path]) -> Callable[[str], Path | str]:
    return lambda model: model if model in BUNDLED else family_model(model)


@pytest.fixture(scope="session")
def reference(model_folder: Callable[[str], Path | str]) -> Callable[[str], Reference]:
    """`reference(model)`, computed once."""
    found: dict[str, Reference] = {}

    def reference_of(model: str) -> Reference:
        if model not in found:
            prompts = make_prompts()
            answers = answers_of(load_eager(model_folder(model)), prompts, NEW_TOKENS[model])
            found[model] = Reference(prompts, answers)
        return found[model]

    return reference_of


def run_arrivals(engine: Engine, prompts: list[list[int]], new_tokens: int, seed: int) -> list[list[int]]:
    """Answers of prompts that arrive at random steps; the books are checked after every step."""
    random = Random(seed)
    arrivals = sorted((random.randrange(60), index) for index in range(len(prompts)))
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    owners: dict[int, int] = {}
    answers: list[list[int]] = [[] for _ in prompts]
    step = 0
    while arrivals or engine.unfinished:
        while arrivals and arrivals[0][0] <= step:
            index = arrivals.pop(0)[1]
            owners[engine.add(prompts[index], params).id] = index
        for delta in engine.step():
            assert delta.token is not None
            answers[owners[delta.request]].append(delta.token)
        engine.check_integrity()
        step += 1
    assert engine.step() == []
    return answers


def _cases() -> list[ParameterSet]:
    """Every two values of model and options meet. One case of most models is in every run, so that the options meet
    there too; the others are long, and so is the larger bundled model."""
    made = []
    for number, model in enumerate(MODELS):
        own = [case for case in cover(MODELS, *OPTIONS) if case[0] == model]
        group = pytest.mark.xdist_group(f"engine {model}")
        for place, case in enumerate(own):
            short = place == number % len(own) and model not in LIKE_OTHERS
            made.append(pytest.param(*case, marks=[group] if short else [group, pytest.mark.long]))
    marks = [pytest.mark.xdist_group("engine demo"), pytest.mark.long]
    return made + [pytest.param("demo", *case, marks=marks) for case in cover(*OPTIONS)]


@pytest.mark.parametrize(
    ("model", "pool", "share_prefixes", "step_tokens", "page_size", "overlap", "swap_gib"), _cases()
)
def test_greedy_tokens_equal_generate(
    model: str,
    pool: str,
    share_prefixes: bool,
    step_tokens: int,
    page_size: int,
    overlap: bool,
    swap_gib: float,
    model_folder: Callable[[str], Path | str],
    reference: Callable[[str], Reference],
) -> None:
    options = EngineOptions(
        device="cpu",
        max_context=MAX_CONTEXT,
        max_sequences=12,
        step_tokens=step_tokens,
        page_size=page_size,
        kv_tokens=POOLS[pool],
        swap_gib=swap_gib,
        share_prefixes=share_prefixes,
        overlap=overlap,
    )
    expected = reference(model)
    engine = start_engine(model_folder(model), options)
    answers = run_arrivals(engine, expected.prompts, NEW_TOKENS[model], seed=step_tokens + page_size)
    assert all(len(answer) == NEW_TOKENS[model] for answer in answers)
    for prompt, answer, wanted in zip(expected.prompts, answers, expected.answers, strict=True):
        assert answer[: len(wanted)] == wanted, f"prompt of {len(prompt)} tokens: {prompt}"
    scheduler = engine.scheduler
    assert scheduler.pool.free == scheduler.pool.usable
    assert scheduler.swapped_pages == 0
    assert (scheduler.preemptions > 0) == (pool == "small")
    assert (scheduler.reused_tokens > 0) == share_prefixes


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            name,
            marks=[pytest.mark.xdist_group(f"engine {name}"), *([pytest.mark.long] if name in LIKE_OTHERS else [])],
        )
        for name in MODELS
    ],
)
def test_the_reference_is_worth_comparing_with(model: str, reference: Callable[[str], Reference]) -> None:
    """Near ties are rare, and answers differ."""
    answers = reference(model).answers
    assert sum(map(len, answers)) > 0.97 * len(answers) * NEW_TOKENS[model]
    assert len({tuple(answer) for answer in answers}) > 0.8 * len(answers)


@pytest.fixture
def watch_logits(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], list[Tensor]]:
    """`watch_logits(engine)`: a list that receives every row of logits that the engine computes."""

    def watch(engine: Engine) -> list[Tensor]:
        rows: list[Tensor] = []
        compute = engine.runner.decoder.logits

        def watched(hidden: Tensor) -> Tensor:
            logits = compute(hidden)
            rows.extend(logits.clone())
            return logits

        monkeypatch.setattr(engine.runner.decoder, "logits", watched)
        return rows

    return watch


@every_model
@pytest.mark.parametrize("step_tokens", [7, pytest.param(512, marks=pytest.mark.long)])
def test_logits_equal(
    model: str,
    step_tokens: int,
    model_folder: Callable[[str], Path | str],
    watch_logits: Callable[[Engine], list[Tensor]],
) -> None:
    """Every row, of a prompt in chunks and of its answer; and the log-probabilities made of them."""
    engine = start_engine(model_folder(model), EngineOptions(device="cpu", step_tokens=step_tokens, max_context=128))
    rows = watch_logits(engine)
    prompt = Random(1).choices(TOKENS, k=93)
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=20, prompt_logprobs=20)
    request = engine.add(prompt, params)
    deltas = []
    while engine.unfinished:
        deltas += engine.step()
    tokens = torch.tensor([*prompt, *(delta.token for delta in deltas)])
    with torch.no_grad():
        logits = load_eager(model_folder(model))(tokens[None]).logits[0, :-1]
    torch.testing.assert_close(torch.stack(rows), logits, rtol=0, atol=1e-4)

    logprobs = logits.log_softmax(-1)
    parts = request.prompt_logprobs
    chosen = [value for part in parts for value in part.logprobs] + [delta.logprob for delta in deltas]
    top = [row for part in parts for row in part.top] + [delta.top for delta in deltas]
    wanted = logprobs.gather(-1, tokens[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(chosen), wanted, rtol=0, atol=1e-4)
    values = torch.tensor([[value for _, value in row] for row in top])
    places = torch.tensor([[token for token, _ in row] for row in top])
    torch.testing.assert_close(values, logprobs.topk(20).values, rtol=0, atol=1e-4)
    torch.testing.assert_close(values, logprobs.gather(-1, places), rtol=0, atol=1e-4)


def test_prompt_logprobs_after_preemption(family_model: Callable[[str], Path]) -> None:
    """A prompt that is computed again in other chunks has one log-probability for each token."""
    found = []
    for kv_tokens in (64, 1024):
        llm = LLM(family_model("llama"), device="cpu", step_tokens=16, kv_tokens=kv_tokens, max_context=64)
        prompts = [Random(seed).choices(TOKENS, k=length) for seed, length in ((0, 10), (1, 40))]
        plain = SamplingParams(max_tokens=20, ignore_eos=True)
        done = llm.generate(prompts, [plain, replace(plain, prompt_logprobs=1)])
        assert (llm.engine.scheduler.preemptions > 0) == (kv_tokens == 64)
        found.append(done[1].prompt_logprobs)
    assert found[0][0] is found[1][0] is None
    assert found[0][1:] == pytest.approx(found[1][1:], abs=1e-4)
