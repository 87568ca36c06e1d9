"""Calibration data: the tokens that each kind of source gives, their record, one clear line for what cannot work."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from quantkit.bundled import CALIBRATION_TEXT
from quantkit.calibration import Calibration
from quantkit.errors import InputError, StorageError
from quantkit.recipe import load_recipe
from quantkit.reference import load_tokenizer

CONTEXT = 2048
WORDS = "The list holds every name that the function returns. "
CHAT = [{"role": "user", "content": "What is a list?"}, {"role": "assistant", "content": "A row of values."}]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    """The bundled model's own; a test may change it."""
    return load_tokenizer("demo")


def write_jsonl(file: Path, *rows: object) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def error_of(source: str | Path, tokenizer: PreTrainedTokenizerBase, **options: int) -> str:
    with pytest.raises(InputError) as caught:
        Calibration(source, **({"seq_len": 8} | options)).tokens(tokenizer, CONTEXT)
    message = str(caught.value)
    assert "\n" not in message
    return message


def assert_tokens(source: str | Path, tokenizer: PreTrainedTokenizerBase, expected: list[int]) -> None:
    """A source holds exactly these tokens in this order: they are one window, and not one more is there."""
    windows = Calibration(source, seq_len=len(expected)).tokens(tokenizer, CONTEXT)
    assert windows.tolist() == [expected]
    assert f" has {len(expected)} tokens, less" in error_of(source, tokenizer, seq_len=len(expected) + 1)


def test_plain_text_gives_the_same_tokens_as_ever(tokenizer: PreTrainedTokenizerBase) -> None:
    """Results measured earlier compare only as long as these digests hold."""
    for options, digest in (
        ({}, "385ee61d1e94309d8ecffbd08ab76f981fce9fc3bdcaa4632c6e05e1ba7ddf05"),
        ({"samples": 3, "seq_len": 64, "seed": 5}, "cdf8ff1e805fad0fb4a49912fd553d911df637b9ff93da59a9a31e7fad8e4b43"),
    ):
        calibration = Calibration(**options)
        tokens = calibration.tokens(tokenizer, CONTEXT)
        assert tokens.shape == (calibration.samples, calibration.seq_len)
        assert calibration.record(tokens)["tokens_sha256"] == digest


def test_windows_are_cut_from_the_text_as_it_stands(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    text = WORDS * 20
    (tmp_path / "notes.md").write_text(text, encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    windows = Calibration(tmp_path / "notes.md", samples=99, seq_len=16).tokens(tokenizer, CONTEXT)
    assert sorted(map(tuple, windows.tolist())) == sorted(
        tuple(ids[start : start + 16]) for start in range(0, len(ids) - 15, 16)
    )


def test_seed_chooses_and_repeats(tokenizer: PreTrainedTokenizerBase) -> None:
    short = CALIBRATION_TEXT.with_name("README.md")
    first, again, other = (Calibration(short, 4, seq_len=32, seed=seed).tokens(tokenizer, 32) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_record_says_what_was_asked_and_what_was_there(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "few.jsonl", {"text": WORDS})
    calibration = Calibration(str(file), samples=128, seq_len=4, seed=3)
    tokens = calibration.tokens(tokenizer, CONTEXT)
    record = calibration.record(tokens)
    assert 1 < len(tokens) < 128
    assert len(record.pop("tokens_sha256")) == 64
    asked = {"samples": len(tokens), "asked": 128, "seq_len": 4, "seed": 3}
    assert record == {"source": "few.jsonl", "default": False} | asked
    assert Calibration().record(tokens)["default"] is True


def test_jsonl_texts_are_packed_with_end_of_text_between(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", {"text": "One text."}, {"text": ""}, {"id": 7, "text": "Another, ü."})
    one, other = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("One text.", "Another, ü."))
    end = tokenizer.eos_token_id
    assert_tokens(file, tokenizer, [*one, end, *other, end])
    tokenizer.eos_token = None
    assert_tokens(file, tokenizer, [*one, *other])


def test_jsonl_chats_go_through_the_chat_template(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """The template brings its own special tokens, so nothing is put behind a chat."""
    file = write_jsonl(tmp_path / "A.JSONL", {"messages": CHAT}, {"text": "Then this."}, {"messages": CHAT[:1]})
    expected: list[int] = []
    for text in (
        "<|user|>\nWhat is a list?<|end|>\n<|assistant|>\nA row of values.<|end|>\n",
        "Then this.<|endoftext|>",
        "<|user|>\nWhat is a list?<|end|>\n",
    ):
        expected += tokenizer(text, add_special_tokens=False)["input_ids"]
    assert_tokens(file, tokenizer, expected)


def test_jsonl_many_documents_and_forgiven_trifles(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """More documents than are tokenized at once; blank lines and a byte order mark do no harm."""
    texts = [f"Number {index}." for index in range(50)]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n\n".join(lines).encode())
    expected = tokenizer("<|endoftext|>".join(texts) + "<|endoftext|>", add_special_tokens=False)["input_ids"]
    assert_tokens(tmp_path / "a.jsonl", tokenizer, expected)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("{text: hello}", ["not JSON", "one object with 'text' or 'messages'"]),
        ("[" * 100_000, ["not JSON", "one object with 'text' or 'messages'"]),
        ("[1, 2]", ["[1, 2] is not an object with 'text' or 'messages'"]),
        ('{"txt": "x", "id": 1}', ["the keys are txt, id", "must be 'text' or 'messages'"]),
        ("{}", ["the keys are none", "must be 'text' or 'messages'"]),
        ('{"text": 3}', ["'text' is 3, but must be text"]),
        ('{"text": null}', ["'text' is None, but must be text"]),
        (r'{"text": "half \ud83d"}', ["half a character"]),
        ('{"messages": "hello"}', ["'messages' is 'hello'", "list of objects with role and content"]),
        ('{"messages": []}', ["'messages' is []", "list of objects with role and content"]),
        ('{"messages": [["user", "hello"]]}', ["'messages' is [['user', 'hello']]", "list of objects"]),
        ('{"messages": [{"role": "user"}]}', ["chat template refuses these messages", "content"]),
        ('{"messages": [{"role": "user", "content": null}]}', ["chat template refuses these messages"]),
    ],
)
def test_jsonl_line_that_cannot_be_used(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, line: str, parts: list[str]
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"text": WORDS}) + "\n\n" + line + "\n", encoding="utf-8")
    message = error_of(file, tokenizer)
    for part in (f"{file}, line 3: ", *parts):
        assert part in message


def test_chats_need_a_chat_template_that_takes_them(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tokenizer.chat_template = None
    file = write_jsonl(tmp_path / "chats.jsonl", {"messages": CHAT})
    needs = "'messages' need a chat template and this model's tokenizer has none; give 'text'"
    assert error_of(file, tokenizer) == f"{file}, line 1: {needs}"
    tokenizer.chat_template = "{{ raise_exception('Roles must alternate.\\nSee the card.') }}"
    assert error_of(file, tokenizer).endswith("chat template refuses these messages: Roles must alternate.")


@pytest.mark.parametrize("name", ["mine.txt", "mine.jsonl"])
def test_files_without_enough_text(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text("")
    assert error_of(file, tokenizer) == f"{file} has 0 tokens, less than one window of 8; use a longer text"
    file.write_text("Four." if name.endswith("txt") else '{"text": "Four."}')
    count = len(tokenizer("Four.", add_special_tokens=False)["input_ids"]) + name.endswith("jsonl")
    assert f"has {count} tokens, less than one window of 8;" in error_of(file, tokenizer)


@pytest.mark.parametrize("name", ["mine.txt", "mine.jsonl"])
def test_unreadable_files(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    message = error_of(file, tokenizer)
    given = "give a text file, a .jsonl file, a folder or a dataset as datasets:ORG/NAME"
    assert message == f"no text '{file}'; {given}"
    file.write_bytes(b"\xff\xfe not UTF-8")
    with pytest.raises(StorageError, match=r"cannot read .*mine.* can't decode byte 0xff"):
        Calibration(file).tokens(tokenizer, CONTEXT)
    file.unlink()
    file.mkdir()
    assert error_of(file, tokenizer) == f"{file} has 0 tokens, less than one window of 8; use a longer text"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seq_len": 4096}, "calibration sequences of 4096 tokens do not fit the model; choose 2 to 2048"),
        ({"seq_len": 1}, "calibration sequences of 1 tokens do not fit the model; choose 2 to 2048"),
        ({"samples": 0}, "calibration with 0 samples; choose 1 or more"),
        ({"samples": -5}, "calibration with -5 samples; choose 1 or more"),
        ({"seed": -1}, "calibration with seed -1; choose 0 or more, below 2**63"),
        ({"seed": 2**63}, f"calibration with seed {2**63}; choose 0 or more, below 2**63"),
    ],
)
def test_numbers_that_cannot_work(tokenizer: PreTrainedTokenizerBase, options: dict[str, int], words: str) -> None:
    assert error_of(CALIBRATION_TEXT, tokenizer, **options) == words


class Hub:
    """Stands in for the package `datasets`, which needs a network: remembers what was asked and how far it was read."""

    def __init__(self, rows: list[dict[str, Any]], failure: Exception | None = None) -> None:
        self.rows, self.failure = rows, failure
        self.asked: tuple[Any, ...] = ()
        self.read = 0

    def load_dataset(self, name: str, config: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
        self.asked = (name, config, split, streaming)
        return self.stream()

    def stream(self) -> Iterator[dict[str, Any]]:
        for row in self.rows:
            self.read += 1
            yield row
        if self.failure:
            raise self.failure


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("datasets:Salesforce/wikitext:wikitext-2-raw-v1@test", ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")),
        ("datasets:org/na.me-2@train[:10%]", ()),
        ("datasets:org/name@validation", ("org/name", None, "validation")),
        ("datasets:org/name:en", ("org/name", "en", "train")),
        ("datasets:imdb", ("imdb", None, "train")),
        ("datasets:", ()),
        ("datasets:org/name/more", ()),
        ("datasets:org/name@", ()),
        ("datasets:org/name:", ()),
    ],
)
def test_how_a_dataset_is_named(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, source: str, asked: tuple[str | None, ...]
) -> None:
    hub = Hub([{"text": WORDS}, {"messages": CHAT}])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    if not asked:
        assert error_of(source, tokenizer).startswith(f"'{source}' is not of the form datasets:ORG/NAME, ")
        return
    calibration = Calibration(Path(source), seq_len=8)  # a command line may hand any source over as a path
    tokens = calibration.tokens(tokenizer, CONTEXT)
    assert hub.asked == (*asked, True)
    assert calibration.record(tokens)["source"] == source


def test_a_dataset_is_read_only_as_far_as_needed(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [{"text": f"{WORDS} {index}"} for index in range(1000)]
    hub = Hub(rows)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    tokens = Calibration("datasets:org/name", samples=8, seq_len=16, seed=4).tokens(tokenizer, CONTEXT)
    assert tokens.shape == (8, 16)
    assert hub.read <= 32
    file = write_jsonl(tmp_path / "same.jsonl", *rows[:32])
    local = Calibration(file, samples=999, seq_len=16).tokens(tokenizer, CONTEXT)
    assert set(map(tuple, tokens.tolist())) < set(map(tuple, local.tolist()))


def test_dataset_errors_are_one_line(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "datasets:org/name"
    monkeypatch.setitem(sys.modules, "datasets", Hub([{"question": "?"}]))
    assert f"{source}, row 1: the keys are question; one of them must be" in error_of(source, tokenizer)
    monkeypatch.setitem(sys.modules, "datasets", Hub([{"text": "Four."}], ConnectionError("Couldn't reach\nthe hub")))
    message = error_of(source, tokenizer)
    assert message.startswith(f"{source} cannot be loaded: Couldn't reach; check the name and the network, or give a ")
    monkeypatch.setitem(sys.modules, "datasets", Hub([], TimeoutError()))
    assert f"{source} cannot be loaded: TimeoutError;" in error_of(source, tokenizer)
    monkeypatch.setitem(sys.modules, "datasets", Hub([]))
    assert error_of(source, tokenizer) == f"{source} has 0 tokens, less than one window of 8; use a longer text"
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    assert error_of(source, tokenizer) == f"{source} needs datasets; pip install 'quantkit[calibration]'"


def test_with_the_real_package(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It takes a folder of that name in the current directory before it asks the hub."""
    pytest.importorskip("datasets")
    (tmp_path / "org" / "name").mkdir(parents=True)
    write_jsonl(tmp_path / "org" / "name" / "train.jsonl", {"text": WORDS}, {"text": "Another."})
    monkeypatch.chdir(tmp_path)
    ids = tokenizer(f"{WORDS}<|endoftext|>Another.<|endoftext|>", add_special_tokens=False)["input_ids"]
    assert_tokens("datasets:org/name", tokenizer, ids)
    assert "Bad split: test" in error_of("datasets:org/name@test", tokenizer)
    assert "'missing' not found" in error_of("datasets:org/name:missing", tokenizer)


def test_flags_win_over_the_recipe_and_the_recipe_over_defaults() -> None:
    recipe = load_recipe("gptq-w4g128", ["calibration={source: a.txt, samples: 9}"]).calibration
    assert Calibration.from_recipe(recipe) == Calibration("a.txt", samples=9)
    assert Calibration.from_recipe(recipe, samples=5, seed=0) == Calibration("a.txt", samples=5)
    flags = {"source": Path("b.txt"), "samples": 1, "seq_len": 2, "seed": 3}
    assert Calibration.from_recipe(recipe, **flags) == Calibration(Path("b.txt"), 1, 2, 3)
    silent = SimpleNamespace(source=None, samples=None, seq_len=None, seed=None)
    assert Calibration.from_recipe(silent) == Calibration()
    assert Calibration.from_recipe(load_recipe("gptq-w4g128").calibration) == Calibration()
