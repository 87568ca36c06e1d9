"""EAGLE heads on a GPU: reading and guessing are graphs, and steps are. In 16 bit two guesses may be nearly equal."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from eagle_heads import Reference, save_head, watch_guesses
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.llm import LLM
from quantkit.sources import model_folder

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["eagle", "eagle3", "eagle3-speculators"])
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """For the bundled model. Its guesses are those of random weights: hardly any is right."""
    model = AutoModelForCausalLM.from_pretrained(model_folder("demo"), dtype="float32")
    folder, last = tmp_path_factory.mktemp("heads"), model.config.num_hidden_layers
    taps = {} if request.param == "eagle" else {"eagle_aux_hidden_state_layer_ids": [1, 2, last]}
    return folder, save_head(folder, request.param, model, (1, 2, last), **taps)


def llm_of(head: Path, adaptive: str = "off", **options: Any) -> LLM:
    how = f"eagle={head},k=4,adaptive={adaptive}"
    return LLM("demo", device="cuda", kv_tokens=20_000, max_context=512, max_sequences=16, speculative=how, **options)


def prompts() -> list[list[int]]:
    dice = random.Random(1)
    return [[dice.randrange(10, 4000) for _ in range(length)] for length in (1, 2, 15, 16, 17, 100, 300, 5)]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_are_those_of_a_plain_implementation(
    head: tuple[Path, Reference], graphs: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy ones, most of them; drawn ones come from about the same logits."""
    folder, reference = head
    llm = llm_of(folder, graphs=graphs)
    seen = watch_guesses(llm, monkeypatch)
    llm.generate(prompts(), SamplingParams(max_tokens=20, temperature=temperature, ignore_eos=True))
    llm.engine.check_integrity()
    assert len(seen) > 60
    if temperature == 0.0:
        first = [guesses[0] == reference.guesses(tokens, 1)[0] for tokens, guesses, _ in seen]
        assert sum(first) > 0.8 * len(seen)
        return
    for tokens, guesses, logits in seen:
        assert logits is not None
        expected = reference.logits(tokens, len(guesses), guesses)[-1]
        known = expected.isfinite()
        found = logits[len(guesses) - 1].float().cpu()
        assert bool((found.isfinite() == known).all())
        assert float((found - expected)[known].norm() / expected[known].norm()) < 0.2


def test_everything_is_prepared(head: tuple[Path, Reference]) -> None:
    """With `warm_up` no graph is captured while somebody is answered."""
    llm = llm_of(head[0], adaptive="on", warm_up=True)
    loop = llm.engine.speculation._drafter.loop  # type: ignore[union-attr]
    ready = len(loop._graphs)
    llm.generate(prompts()[:4], SamplingParams(max_tokens=20, ignore_eos=True))
    assert 0 < ready == len(loop._graphs)
