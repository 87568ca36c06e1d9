"""The protocol: which tokens and bytes are counted, from files and from datasets."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from quantkit.bundled import CALIBRATION_TEXT, HELDOUT_TEXT
from quantkit.errors import InputError, QuantkitError
from quantkit.eval.quality.windows import read_windows
from quantkit.reference import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer("demo")


def test_windows_are_the_text_end_to_end(tokenizer: PreTrainedTokenizerBase) -> None:
    windows = read_windows(tokenizer, HELDOUT_TEXT, window=100, max_windows=5)
    text = HELDOUT_TEXT.read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert windows.ids.dtype == torch.int64
    assert windows.ids.flatten().tolist() == ids[:500]
    assert (len(windows), windows.window, windows.tokens) == (5, 100, 5 * 99)
    firsts = sum(len(tokenizer.decode(ids[start]).encode()) for start in range(0, 500, 100))
    assert windows.bytes == len(tokenizer.decode(ids[:500]).encode()) - firsts
    assert text.startswith(tokenizer.decode(ids[:500]))
    for words in ("heldout.txt", "windows 5, window 100 tokens, stride 100", "no BOS", "495 tokens counted"):
        assert words in windows.protocol
    assert f"{windows.bytes:,} bytes" in windows.protocol


def test_the_first_windows(tokenizer: PreTrainedTokenizerBase) -> None:
    windows = read_windows(tokenizer, HELDOUT_TEXT, window=64, max_windows=6)
    fewer = read_windows(tokenizer, HELDOUT_TEXT, window=64, max_windows=2)
    assert torch.equal(windows.first(2).ids, fewer.ids)
    assert windows.first(2).bytes == fewer.bytes
    assert len(windows.first(None)) == len(windows.first(99)) == 6


def test_bundled_texts_do_not_overlap() -> None:
    """Long lines of the calibration text never stand in the held-out text."""
    calibration = {line for line in CALIBRATION_TEXT.read_text(encoding="utf-8").splitlines() if len(line) > 120}
    heldout = {line for line in HELDOUT_TEXT.read_text(encoding="utf-8").splitlines() if len(line) > 120}
    assert len(calibration) > 500
    assert len(heldout) > 500
    assert not calibration & heldout


def test_wrong_texts_are_one_line(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    cases: tuple[tuple[Path, dict[str, int], str], ...] = (
        (tmp_path / "short.txt", {}, "tokens, less than one window of 1024; use a longer text"),
        (
            tmp_path / "none.txt",
            {},
            "none.txt'; give a UTF-8 text file, a .jsonl file, a folder or one of wikitext2, c4",
        ),
        (tmp_path, {}, "tokens, less than one window of 1024"),
        (tmp_path / "binary.txt", {}, "cannot read the text"),
        (HELDOUT_TEXT, {"window": 1}, "a window of 1 tokens has nothing to predict; choose 2 or more"),
        (HELDOUT_TEXT, {"max_windows": 0}, "0 windows measure nothing"),
    )
    for source, options, words in cases:
        with pytest.raises(InputError) as caught:
            read_windows(tokenizer, source, **options)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


class Hub:
    """Stands in for the package `datasets`, which needs a network."""

    def __init__(self, rows: list[dict[str, Any]], failure: Exception | None = None) -> None:
        self.rows, self.failure = rows, failure
        self.asked: tuple[Any, ...] = ()
        self.read = 0

    def load_dataset(self, name: str, config: str, *, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
        self.asked = (name, config, split)
        if self.failure:
            raise self.failure
        for row in self.rows:
            self.read += 1
            yield row


def test_wikitext_is_joined_as_papers_do(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    texts = ["", " = Title = \n", " A first sentence of it .\n", "", " Another paragraph , not longer .\n"] * 4
    hub = Hub([{"text": text} for text in texts])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    windows = read_windows(tokenizer, "wikitext2", window=16)
    assert hub.asked == ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")
    ids = tokenizer("\n\n".join(texts), add_special_tokens=False)["input_ids"]
    assert windows.ids.flatten().tolist() == ids[: len(ids) // 16 * 16]
    assert r"all texts of datasets:Salesforce/wikitext:wikitext-2-raw-v1@test joined by '\n\n'" in windows.protocol


def test_c4_is_read_no_further_than_needed(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    hub = Hub([{"text": f"Document {index} about nothing.", "url": "x"} for index in range(5000)])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    windows = read_windows(tokenizer, "c4", window=64, max_windows=3)
    assert hub.asked == ("allenai/c4", "en", "validation")
    assert hub.read == 1100
    assert len(windows) == 3
    assert "the first 1,100 texts of datasets:allenai/c4:en@validation joined by ' '" in windows.protocol


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (None, "needs datasets; pip install 'quantkit[calibration]'"),
        (Hub([], ConnectionError("no route\nto host")), "cannot be loaded: no route"),
        (Hub([{"text": "short"}]), "less than one window of 1024"),
        (Hub([{"question": "?"}]), "row 1 has no text; or download a text and give its path"),
    ],
)
def test_datasets_that_cannot_be_had(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, module: Hub | None, words: str
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(QuantkitError) as caught:
        read_windows(tokenizer, "wikitext2")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
