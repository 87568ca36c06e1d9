"""EAGLE heads of every published layout guess what a plain implementation guesses, and change no answer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_heads import KINDS, Reference, build_target, save_head, watch_guesses
from quantkit.errors import InputError, QuantkitError, StorageError
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.drafters import eagle_loop, eagle_setup
from quantkit.runtime.llm import LLM

GUESSES = 4
LENGTHS = (1, 16, 17, 70)  # of prompts: shorter than a draft, around a page, longer than a step


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    model = build_target()
    folder = tmp_path_factory.mktemp("eagle") / "target"
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def head(target: tuple[Path, Any]) -> Callable[[str], tuple[Path, Reference]]:
    @cache
    def make(kind: str) -> tuple[Path, Reference]:
        folder = target[0].parent / kind
        return folder, save_head(folder, kind, target[1])

    return make


def engine_of(model: Path, head: Path | None, **options: Any) -> LLM:
    if head is not None:
        options["speculative"] = f"eagle={head},k={GUESSES},adaptive=off"
    return LLM(model, device="cpu", dtype="float32", max_context=128, max_sequences=4, step_tokens=48, **options)


def prompts() -> list[list[int]]:
    dice = random.Random(1)
    return [[dice.randrange(3, 112) for _ in range(length)] for length in LENGTHS]


class Replayed:
    """A graph that runs the function that it would replay."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.replay = step

    def pool(self) -> None:
        return None


def pad_as_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(step: Callable[[], None], pool: Any) -> tuple[Replayed, float]:
        step()
        return Replayed(step), 0.001

    monkeypatch.setattr(eagle_loop, "timed_capture", capture)
    monkeypatch.setattr(
        eagle_setup, "EagleLoop", lambda *given, **named: eagle_loop.EagleLoop(*given, **(named | {"graphs": True}))
    )


@pytest.mark.parametrize(
    ("kind", "how"), [*((kind, "") for kind in KINDS), ("eagle3", "waiting"), ("eagle", "padded"), ("eagle3", "padded")]
)
def test_guesses_are_those_of_a_plain_implementation(
    target: tuple[Path, Any],
    head: Callable[[str], tuple[Path, Reference]],
    kind: str,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever was accepted before; prompts come in pieces, beside answers. `padded`: in the sizes of graphs."""
    folder, reference = head(kind)
    if how == "padded":
        pad_as_graphs(monkeypatch)
    llm = engine_of(target[0], folder, overlap=how != "waiting", share_prefixes=False)
    seen = watch_guesses(llm, monkeypatch)
    llm.generate(prompts(), SamplingParams(max_tokens=14, ignore_eos=True))
    llm.engine.check_integrity()
    assert bool(llm.engine.speculation._drafter.loop._graphs) == (how == "padded")  # type: ignore[union-attr]
    assert 5 < llm.engine.speculation.accepted < 0.5 * llm.engine.speculation.guessed
    for tokens, guesses, _ in seen:
        assert guesses == reference.guesses(tokens, len(guesses)), len(tokens)


def test_a_shared_prefix_was_read_by_whoever_computed_it(
    target: tuple[Path, Any], head: Callable[[str], tuple[Path, Reference]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second answer to a prompt finds what the first has read, and guesses the same."""
    folder, reference = head("eagle3")
    llm = engine_of(target[0], folder, overlap=True)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    llm.generate(prompts()[-1], params)
    seen = watch_guesses(llm, monkeypatch)
    assert llm.generate(prompts()[-1], params)[0].cached_tokens >= 64
    assert len(seen) > 2
    for tokens, guesses, _ in seen:
        assert guesses == reference.guesses(tokens, len(guesses)), len(tokens)


@pytest.mark.parametrize(("kind", "how"), [("eagle", ""), ("eagle3", "padded")])
def test_guesses_are_drawn_from_the_logits_that_verify_them(
    target: tuple[Path, Any],
    head: Callable[[str], tuple[Path, Reference]],
    kind: str,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over the whole vocabulary, where tokens that the head does not know have no chance."""
    folder, reference = head(kind)
    if how == "padded":
        pad_as_graphs(monkeypatch)
    llm = engine_of(target[0], folder, overlap=True)
    seen = watch_guesses(llm, monkeypatch)
    llm.generate(prompts(), SamplingParams(max_tokens=10, temperature=1.0, ignore_eos=True))
    assert llm.engine.speculation.accepted > 5
    for tokens, guesses, logits in seen:
        expected = torch.stack(reference.logits(tokens, len(guesses), guesses))
        assert logits is not None
        torch.testing.assert_close(logits[: len(guesses)], expected, rtol=1e-3, atol=1e-3)
        assert bool(torch.isfinite(expected[range(len(guesses)), guesses]).all())


PARAMS = (
    SamplingParams(max_tokens=30, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=15, temperature=1.5, top_k=20, seed=4, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=10, repetition_penalty=1.2, presence_penalty=0.3, ignore_eos=True),
    SamplingParams(max_tokens=8, n=2, temperature=1.2, seed=9, ignore_eos=True),
)


def serve(llm: LLM) -> list[tuple[list[int], str | None]]:
    """Random arrivals of prompts of which some begin alike, until the last has ended."""
    engine, dice = llm.engine, random.Random(1)
    texts = [*prompts(), [*prompts()[-1][:48], 5, 6, 7]]
    waiting = [(prompt, params) for prompt in texts for params in PARAMS]
    dice.shuffle(waiting)
    requests = []
    while waiting or engine.unfinished:
        for _ in range(min(dice.randint(0, 2), len(waiting))):
            requests.append(engine.add(*waiting.pop()))
        engine.step()
    engine.drain()
    engine.check_integrity()
    assert engine.scheduler.pool.free == engine.scheduler.pool.usable
    return [(sequence.answer, sequence.finish_reason) for request in requests for sequence in request.sequences]


@pytest.fixture(scope="module")
def plain(target: tuple[Path, Any]) -> list[tuple[list[int], str | None]]:
    return serve(engine_of(target[0], None))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("eagle", {}, marks=pytest.mark.long),
        pytest.param("eagle3", {"kv_tokens": 128}, marks=pytest.mark.long),
        ("eagle3-speculators", {"kv_tokens": 128, "swap_gib": 0.05}),
    ],
    ids=str,
)
def test_answers_are_those_of_plain_decoding(
    target: tuple[Path, Any],
    head: Callable[[str], tuple[Path, Reference]],
    plain: list[tuple[list[int], str | None]],
    kind: str,
    options: dict[str, Any],
) -> None:
    """Greedy and with seeds, with prompts in pieces and shared, and where sequences give way."""
    llm = engine_of(target[0], head(kind)[0], overlap=True, **options)
    assert serve(llm) == plain
    assert llm.engine.speculation.accepted > 20
    assert (llm.engine.scheduler.preemptions > 0) == bool(options)


def test_guesses_go_on_after_plain_steps(
    target: tuple[Path, Any], head: Callable[[str], tuple[Path, Reference]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was answered meanwhile stays unread."""
    llm = engine_of(target[0], head("eagle3")[0], overlap=True)
    policy, turn = llm.engine.speculation._policy, count()
    always = policy.lengths
    monkeypatch.setattr(policy, "lengths", lambda answering: always(answering) if next(turn) // 6 % 2 else {})
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    answers = [found.answers[0].token_ids for found in llm.generate(prompts(), params)]
    expected = engine_of(target[0], None).generate(prompts(), params)
    assert answers == [found.answers[0].token_ids for found in expected]
    assert llm.engine.speculation.guessed > 20


Spoil = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]


@pytest.mark.parametrize(
    ("kind", "spoil", "words"),
    [
        ("eagle", lambda config, _: config.update(hidden_size=128), ("128 numbers", "64", "another")),
        ("eagle3", lambda config, _: config.update(target_hidden_size=96), ("96 numbers", "another")),
        ("eagle3", lambda config, _: config.update(vocab_size=113), ("113 tokens", "112")),
        ("eagle3", lambda config, _: config.update(model_type="deepseek_v3"), ("'deepseek_v3'", "llama")),
        ("eagle3", lambda config, _: config.update(num_hidden_layers=2), ("2 layers",)),
        ("eagle3", lambda config, _: config.update(eagle_aux_hidden_state_layer_ids=[2, 16, 29]), ("29", "7 blocks")),
        ("eagle3", lambda _, tensors: tensors.pop("midlayer.mlp.down_proj.weight"), ("down_proj", "missing")),
        ("eagle3", lambda _, tensors: tensors.pop("norm.weight"), ("norm.weight", "missing")),
        ("eagle3", lambda _, tensors: tensors.pop("d2t"), ("d2t", "40 tokens of 112")),
        ("eagle3", lambda _, tensors: tensors["d2t"].add_(80), ("d2t", "40 of the model's 112")),
        ("eagle3", lambda _, tensors: tensors.pop("fc.weight"), ("no EAGLE head", "draft=PATH")),
        ("eagle", lambda _, tensors: tensors.update({"embedding_layernorm.weight": torch.ones(64)}),
         ("embedding_layernorm.weight", "no EAGLE layout")),
        ("eagle", lambda _, tensors: tensors.update({"fc.weight": torch.ones(64, 64)}), ("fc.weight", "[64, 128]")),
        ("eagle", lambda _, tensors: tensors.update({"layers.0.mlp.up_proj.weight": torch.ones(96, 32)}),
         ("up_proj", "[96, 32]", "[96, 64]")),
        ("eagle", lambda _, tensors: tensors["fc.bias"].fill_(float("nan")), ("fc.bias", "NaN")),
    ],
)  # fmt: skip
def test_heads_that_do_not_fit(
    target: tuple[Path, Any],
    head: Callable[[str], tuple[Path, Reference]],
    tmp_path: Path,
    kind: str,
    spoil: Spoil,
    words: tuple[str, ...],
) -> None:
    folder = head(kind)[0]
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    spoil(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuantkitError) as refused:
        engine_of(target[0], tmp_path)
    for word in words:
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)


def test_folders_that_hold_no_head(
    target: tuple[Path, Any], head: Callable[[str], tuple[Path, Reference]], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"no EAGLE head .*LlamaForCausalLM"):
        engine_of(target[0], target[0])
    torch.save({"fc.weight": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StorageError, match=r"files of pickles are not opened.*save_file.*weights_only=True"):
        engine_of(target[0], tmp_path)
    with pytest.raises(InputError, match="not gathered from the ranks of tensor parallel"):
        engine_of(target[0], head("eagle")[0], tensor_parallel=2)
