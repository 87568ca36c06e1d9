"""The first windows of a text are those of the whole text, whatever the tokenizer, and cost less."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from quantkit.bundled import HELDOUT_TEXT
from quantkit.calibration import token_windows
from quantkit.errors import InputError
from quantkit.reference import load_tokenizer

WORDS = HELDOUT_TEXT.read_text(encoding="utf-8")[:40_000]


def whole_text_pairs() -> PreTrainedTokenizerFast:
    """Byte pairs as SentencePiece writes them: no words are split off, so a merge may look across the whole text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.train_from_iterator([WORDS[:4000]], trainers.BpeTrainer(vocab_size=400, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def likeliest_pieces() -> PreTrainedTokenizerFast:
    """A unigram model: the likeliest cut of a word, found from its end."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(split=False), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, show_progress=False, unk_token="?", special_tokens=["?"])
    tokenizer.train_from_iterator([WORDS[:4000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {"bundled": lambda: load_tokenizer("demo"), "pairs": whole_text_pairs, "pieces": likeliest_pieces}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_first_windows_are_those_of_the_whole_text(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]()
    text = tmp_path / "text"
    text.write_text(WORDS + " " * 3000 + "a" * 3000 + WORDS[:2000], encoding="utf-8")
    whole = token_windows(tokenizer, text, 64)
    for count in (1, 7, 100, len(whole) - 1, len(whole), len(whole) + 1):
        assert torch.equal(token_windows(tokenizer, text, 64, count), whole[:count]), count


def test_only_what_decides_them_is_tokenized() -> None:
    tokenizer, asked = load_tokenizer("demo"), []

    def counted(text: str, **options: bool) -> object:
        asked.append(len(text))
        return tokenizer(text, **options)

    token_windows(counted, HELDOUT_TEXT, 512, 2)  # type: ignore[arg-type]
    assert sum(asked) < 50_000 < len(HELDOUT_TEXT.read_text(encoding="utf-8"))


def test_a_short_text_is_refused_with_its_length(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Too short.\n")
    with pytest.raises(InputError, match="tokens, less than one window of 64"):
        token_windows(load_tokenizer("demo"), tmp_path / "text", 64, 2)
