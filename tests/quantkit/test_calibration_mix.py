"""Several calibration sources with shares: how samples are dealt and mixed, and that a run shows and keeps the mix."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

import quantkit
from quantkit.bundled import CALIBRATION_TEXT
from quantkit.calibration import Calibration
from quantkit.calibration_mix import deal, interleaved, recorded_words, source_of, words_of
from quantkit.errors import InputError
from quantkit.methods.held_back import judged
from quantkit.passes.sensitivity import SCORED
from quantkit.provenance import CalibrationData, provenance_of
from quantkit.recipe import load_recipe
from quantkit.reference import load_tokenizer
from tiny_tokenizers import save_sentencepiece

Cli = Callable[..., tuple[int, str, str]]
Refused = Callable[..., None]
CHAT = {"messages": [{"role": "user", "content": "What is a list?"}, {"role": "assistant", "content": "Values."}]}
CODE = "def total(values):\n    return sum(value for value in values if value is not None)\n\n\n"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer("demo-draft")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: chats.jsonl, and a folder src with code."""
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 40, encoding="utf-8")
    (tmp_path / "src" / "inner").mkdir(parents=True)
    (tmp_path / "src" / "one.py").write_text(CODE * 10, encoding="utf-8")
    (tmp_path / "src" / "inner" / "two.py").write_text(CODE * 30, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("shares", "samples", "expected"),
    [
        ([2, 1, 1], 128, [64, 32, 32]),
        ([1, 1, 1], 128, [43, 43, 42]),
        ([1, 1, 1], 8, [3, 3, 2]),
        ([0.7, 0.2, 0.1], 9, [6, 2, 1]),
        ([5], 7, [7]),
        ([1e-9, 2e-9], 3, [1, 2]),
    ],
)
def test_samples_are_dealt_to_the_largest_remainders(shares: list[float], samples: int, expected: list[int]) -> None:
    assert list(deal({str(place): share for place, share in enumerate(shares)}, samples).values()) == expected


def test_every_stretch_has_all_sources_in_proportion() -> None:
    """`best`, learned rounding and touch-up hold back the last ones, automatic bits are judged by the first."""
    dice = torch.Generator().manual_seed(0)
    for _ in range(200):
        counts = torch.randint(2, 60, (int(torch.randint(2, 5, (), generator=dice)),), generator=dice).tolist()
        order = interleaved(counts)
        assert sorted(order.tolist()) == list(range(sum(counts)))
        owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[order]
        number = len(counts)
        assert set(owner[:number].tolist()) == set(owner[-number:].tolist()) == set(range(number))
        for size in (SCORED, len(judged(len(order)))):
            for part in (owner[:size], owner[-size:]):
                exact = torch.tensor(counts) * size / len(order)
                assert float((part.bincount(minlength=number) - exact).abs().max()) < 2, (counts, size)


def test_words_of_a_command_line_are_unambiguous() -> None:
    assert source_of(()) is None
    for alone in ("C:\\texts\\a.txt", "datasets:org/name:en@train", "./2=a.txt", "a=b.txt", "nan=a", "src/"):
        assert source_of((alone,)) == alone
    several = {"C:\\a.txt": 2.0, "datasets:org/name:en@train": 1.0, "b=c.txt": 0.125}
    assert source_of(("2=C:\\a.txt", "datasets:org/name:en@train", ".125=b=c.txt")) == several
    assert source_of(words_of(several)) == several
    assert source_of(("3=a.txt",)) == "a.txt"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("0=a.txt", "b.txt"), "the share of a.txt is 0.0; choose a number above 0"),
        (("-1=a.txt",), "the share of a.txt is -1.0; choose a number above 0"),
        (("a.txt", "2=a.txt"), "the text 'a.txt' is given twice; give it once, with a share as in 2=a.txt"),
        (("2=",), "'2=' names no text; give SHARE=SOURCE, such as 2=notes.txt"),
    ],
)
def test_wrong_words(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as caught:
        source_of(words)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("mix", "samples", "message"),
    [
        ({"bundled": 1, "short.txt": 1}, 8, "short.txt has 2 windows of 16 tokens, but its share of 8 samples is 4;"),
        ({"bundled": 99, "short.txt": 1}, 8, "8 calibration samples leave none for short.txt (share 1 of 100); take"),
        ({"bundled": 1, "gone.txt": 1}, 8, "no text 'gone.txt'; give a text file, a .jsonl file, a folder or"),
        ({"bundled": 1, "short.txt": float("nan")}, 8, "the share of short.txt is nan; choose a number above 0"),
        ({"bundled": 1, "short.txt": "2"}, 8, "the share of short.txt is 2; choose a number above 0"),
        ({}, 8, "a mix without a source; name one or more, each with its share"),
    ],
)
def test_a_mix_that_cannot_be(
    tokenizer: PreTrainedTokenizerBase, sources: Path, mix: dict[str, Any], samples: int, message: str
) -> None:
    (sources / "short.txt").write_text("One two three four. " * 7)
    with pytest.raises(InputError) as caught:
        Calibration(mix, samples, seq_len=16).tokens(tokenizer, 64)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_each_source_gives_what_it_would_give_alone(tokenizer: PreTrainedTokenizerBase, sources: Path) -> None:
    data = Calibration({"bundled": 2, "chats.jsonl": 1, "src": 1}, samples=16, seq_len=32, seed=3)
    tokens = data.tokens(tokenizer, 64)
    assert torch.equal(tokens, data.tokens(tokenizer, 64))
    alone = [
        Calibration(source, count, 32, 3).tokens(tokenizer, 64)
        for source, count in (("bundled", 8), ("chats.jsonl", 4), (sources / "src", 4))
    ]
    assert torch.equal(alone[0], Calibration(CALIBRATION_TEXT, 8, 32, 3).tokens(tokenizer, 64))
    assert sorted(tokens.tolist()) == sorted(torch.cat(alone).tolist())
    last = tokens[-3:].tolist()
    assert all(any(window in part.tolist() for window in last) for part in alone), "held back are some of each"


def test_all_windows_of_a_mix_begin_as_the_model_was_taught(sources: Path, tmp_path: Path) -> None:
    """With the start token of its tokenizer, whether it is text, a chat whose template brings its own, or code."""
    begins = save_sentencepiece(tmp_path / "tokenizer")
    begins.chat_template = "<s>{% for turn in messages %}{{ turn.content }}</s>{% endfor %}"
    (sources / "text.txt").write_text("the theory of the words " * 30)
    tokens = Calibration({"text.txt": 1, "chats.jsonl": 1, "src": 1}, samples=9, seq_len=16).tokens(begins, 64)
    assert tokens.shape == (9, 16)
    assert set(tokens[:, 0].tolist()) == {begins.bos_token_id}


def test_a_recipe_may_name_a_mix(tmp_path: Path) -> None:
    given = "calibration.source={datasets:org/name: 1, bundled: 0.5}"
    recipe = load_recipe("gptq-w4g128", [given])
    assert Calibration.from_recipe(recipe.calibration).source == {"datasets:org/name": 1, "bundled": 0.5}
    assert Calibration.from_recipe(recipe.calibration, source="a.txt").source == "a.txt"
    assert recipe.to_dict()["calibration"] == {"source": {"datasets:org/name": 1, "bundled": 0.5}}
    for wrong in ("{a.txt: 0}", "{a.txt: yes}", "{a.txt: two}", "{}", "[a.txt]", "{3: 1}", "{a.txt: .inf}", "7"):
        with pytest.raises(InputError, match="must be text, or a mapping from texts to their shares") as caught:
            load_recipe("gptq-w4g128", [f"calibration.source={wrong}"])
        assert "'calibration.source' is " in str(caught.value)


def test_a_run_shows_its_mix_and_goes_on_with_no_other(
    run_cli: Cli, assert_refused: Refused, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["--text", "2=bundled", "--text", "chats.jsonl", "--text", "src"]
    command = ["quantize", "demo-draft", "-r", "gptq-w4g128", "-o", "out", "--samples", 8, "--seq-len", 16]
    command += ["--quality-windows", 0, "--device", "cpu"]
    code, out, _ = run_cli(*command, *texts, "--dry-run")
    assert code == 0
    assert "8 sequences of 16 tokens (4 x bundled, 2 x chats.jsonl, 2 x src)" in out
    plan = json.loads(run_cli(*command, *texts, "--dry-run", "--json")[1])
    assert plan["method"]["mix"] == {"bundled": 4, "chats.jsonl": 2, "src": 2}

    with monkeypatch.context() as killed:
        killed.setattr("quantkit.pipeline.run.write_checkpoint", _stop)
        with pytest.raises(KeyboardInterrupt):
            quantkit.quantize(
                "demo-draft", "gptq-w4g128", "out", **_options({"bundled": 2, "chats.jsonl": 1, "src": 1})
            )
    assert_refused(
        sources, *command, "--text", "bundled", *texts[2:], words=("calibration.mix.0.share was 2.0, now 1",)
    )
    code, out, err = run_cli(*command, *texts, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    mix = [(part["source"], part["default"], part["samples"]) for part in report["calibration"]["mix"]]
    assert mix == [("calibration.txt", True, 4), ("chats.jsonl", False, 2), ("src", False, 2)]
    card = (sources / "out" / "README.md").read_text(encoding="utf-8")
    assert "4 x calibration.txt, 2 x chats.jsonl, 2 x src" in card
    assert "--text 2=bundled --text 1=chats.jsonl --text 1=src" in card
    assert source_of(recorded_words(report["calibration"]["mix"])) == {"bundled": 2, "chats.jsonl": 1, "src": 1}
    told = provenance_of("out").calibration
    assert str(told) == ("a mix of 4 x calibration.txt, 2 x chats.jsonl, 2 x src, 8 samples of 16 tokens, 128 in all")


def _stop(*_: Any, **__: Any) -> Iterator[Any]:
    raise KeyboardInterrupt


def _options(mix: dict[str, float]) -> dict[str, Any]:
    data = Calibration({source: float(share) for source, share in mix.items()}, samples=8, seq_len=16)
    return {"calibration": data, "quality_windows": 0, "device": "cpu"}


def test_a_log_of_others_may_say_anything(tmp_path: Path, quantized_draft: Callable[..., Path]) -> None:
    made = quantized_draft("nf4")
    for file in made.iterdir():
        (tmp_path / file.name).symlink_to(file)
    log = tmp_path / "quantization_log.jsonl"
    for mix in (3, "x", {"a": 1}, [1, None], [{"samples": "x"}], [{"source": "\x1b[31m", "samples": 2}]):
        log.unlink(missing_ok=True)
        log.write_text(json.dumps({"calibration": {"source": "a", "samples": 2, "seq_len": 4, "mix": mix}}) + "\n")
        found = provenance_of(tmp_path).calibration
        assert isinstance(found, CalibrationData)
        assert str(found).isprintable()
