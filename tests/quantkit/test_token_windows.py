"""The first windows of a text are those of the whole text, whatever the tokenizer, and cost less."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from quantkit.bundled import HELDOUT_TEXT
from quantkit.calibration import Calibration, token_windows
from quantkit.errors import InputError
from quantkit.eval.quality.windows import read_windows
from quantkit.pipeline.quality import Quality
from quantkit.reference import load_tokenizer
from quantkit.token_windows import StartToken, cut_windows, shorter_windows, start_token
from tiny_tokenizers import save_byte_level, save_sentencepiece

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


@pytest.fixture(scope="module")
def begins(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """A tokenizer that puts <s> before every text."""
    return save_sentencepiece(tmp_path_factory.mktemp("tokenizer"))


def test_a_start_token_is_what_the_tokenizer_itself_adds(begins: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """A `bos_token` alone says nothing: many tokenizers have one and never use it."""
    assert start_token(begins) == StartToken(1, "<s>")
    others = (load_tokenizer("demo"), save_byte_level(tmp_path))
    assert all(tokenizer.bos_token_id is not None for tokenizer in others)
    assert [start_token(tokenizer) for tokenizer in others] == [None, None]


def test_every_window_begins_with_it(begins: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """One function for calibration, for held-out text and for `eval`; the text between is not changed."""
    text = tmp_path / "text"
    text.write_text(WORDS[:4000], encoding="utf-8")
    plain = begins(WORDS[:4000], add_special_tokens=False)["input_ids"]
    windows = token_windows(begins, text, 32)
    assert windows.shape == (len(plain) // 31, 32)
    assert windows[:, 0].tolist() == [1] * len(windows)
    assert windows[:, 1:].flatten().tolist() == plain[: 31 * len(windows)]
    assert torch.equal(token_windows(begins, text, 32, 3), windows[:3])
    assert torch.equal(token_windows(begins, text, 32, begin=False).flatten()[:96], torch.tensor(plain[:96]))
    calibrated = Calibration(text, samples=8, seq_len=32)
    tokens = calibrated.tokens(begins, 32)
    assert tokens[:, 0].tolist() == [1] * 8
    assert calibrated.record(tokens, start_token(begins))["start_token"] == "<s>"
    measured = read_windows(begins, text, window=32, max_windows=4)
    assert torch.equal(measured.ids, windows[:4])
    assert "window 32 tokens, stride 31, each begun by <s>, no other special tokens, first token" in measured.protocol
    assert measured.bytes == len(begins.decode(plain[: 31 * 4]).encode())
    assert "no BOS" in read_windows(begins, text, window=32, max_windows=4, begin=False).protocol
    assert "overlap, each begun by <s>, first" in Quality(1.0, 1.0, 0.0, 1, 32, "text", "<s>").protocol


def test_windows_are_cut_shorter_and_begin_again() -> None:
    start, ids = StartToken(99, "<s>"), torch.arange(40)
    windows = cut_windows(ids, 9, "numbers", start)
    assert windows.tolist() == [[99, *range(8 * row, 8 * row + 8)] for row in range(5)]
    assert torch.equal(cut_windows(torch.cat([torch.tensor([99]), ids]), 9, "numbers", start), windows)
    shorter = shorter_windows(windows[:2], 4, start)
    assert shorter.tolist() == [[99, 0, 1, 2], [99, 8, 9, 10], [99, 3, 4, 5], [99, 11, 12, 13]]
    assert shorter_windows(windows[:1, 1:], 4, None).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
