"""Text from tokens, piece by piece: the pieces make up the whole, come at once, and end at the first stop string."""

from __future__ import annotations

import re
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import quantkit
from quantkit.runtime.output.detokenizer import LONGEST_WINDOW, TextStream

BYTE_LETTERS = bytes_to_unicode()  # how byte-level vocabularies spell each byte
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
FLAGS = {"include_stop": False, "skip_special_tokens": True}
HARD_CHARACTERS = "aé ß\n\t.你好한🙂👩‍👩‍👧👍🏽🇩🇪e\u0301a\u0308\u200d\ufffd\u0000\U0010ffff"
CHARACTERS = st.one_of(st.sampled_from(HARD_CHARACTERS), st.characters(exclude_categories=["Cs"]))
TEXTS = st.lists(CHARACTERS, max_size=30).map("".join)  # st.text would draw hard ones no more often than others
HARD_BYTES = st.sampled_from(b"\x80\xbf\xc2\xe0\xa0\xe2\x82\xac\xed\x9f\xf0\x90\xf4\x8f\xffa")
WORDS = ["<s>", "▁Hello", "▁world", "▁", "▁▁", "!", "lo"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
easily_many = settings(deadline=None, max_examples=200)


@cache
def demo() -> Any:
    return AutoTokenizer.from_pretrained(Path(quantkit.__file__).parent / "bundled" / "demo")


def byte_ids(data: bytes) -> list[int]:
    """The demo's tokens for single bytes."""
    return [demo().convert_tokens_to_ids(BYTE_LETTERS[byte]) for byte in data]


def tokenizer_of(vocabulary: list[str], decoder: Any) -> Any:
    """A tokenizer that only decodes; its first token is special."""
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(vocabulary)}, vocabulary[0]))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(vocabulary[0], special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


@cache
def metaspace() -> Any:
    return tokenizer_of(WORDS, decoders.Metaspace())


@cache
def llama() -> Any:
    """As Llama 2's: bytes for what the vocabulary lacks, one space stripped from the front."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return tokenizer_of(WORDS + BYTES, decoders.Sequence(steps))


def ids_of(*parts: str | bytes) -> list[int]:
    """Words, and bytes one by one."""
    tokens = ([part] if isinstance(part, str) else [BYTES[byte] for byte in part] for part in parts)
    return [(WORDS + BYTES).index(token) for token in chain.from_iterable(tokens)]


def open_stream(tokenizer: Any, *stop: str, prompt: list[int] | None = None, **flags: bool) -> TextStream:
    return TextStream(tokenizer, prompt_ids=prompt or [], stop=stop, **(FLAGS | flags))


def streamed(tokenizer: Any, ids: list[int], *stop: str, prompt: list[int] | None = None, **flags: bool) -> str:
    """All pieces of a stream to its end."""
    stream = open_stream(tokenizer, *stop, prompt=prompt, **flags)
    text = "".join([*map(stream.push, ids), stream.finish()])
    assert stream.text == text
    return text


def is_up_to_date(stream: TextStream, decoded: str, *stops: str) -> bool:
    """Whether a stream shows all but what may be unfinished or may begin a stop string."""
    held = decoded.removeprefix(stream.text).rstrip(UNFINISHED)
    return decoded.startswith(stream.text) and (not held or any(stop.startswith(held) for stop in stops))


def cut(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """Slowly but surely: the text up to the stop string that ends first, and that one, the longest of several."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include_stop else end - len(stop)], stop
    return text, None


@st.composite
def tokens_of(draw: st.DrawFn, text: str) -> list[int]:
    """The text in tokens as the tokenizer would cut it, or in single bytes, or changing between the two."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return [*chain(*(byte_ids(part.encode()) if draw(st.booleans()) else demo().encode(part) for part in parts))]


@easily_many
@given(st.data(), TEXTS)
def test_valid_text_comes_out_as_soon_as_its_characters_are_whole(data: st.DataObject, text: str) -> None:
    ids = data.draw(tokens_of(text))
    stream = open_stream(demo())
    for count, token in enumerate(ids, start=1):
        stream.push(token)
        assert is_up_to_date(stream, demo().decode(ids[:count]))
    assert stream.text + stream.finish() == text


@easily_many
@given(st.lists(st.integers(0, 4100), max_size=60), st.lists(st.integers(0, 4100), max_size=20), st.booleans())
def test_any_tokens_make_up_what_decode_says(ids: list[int], prompt: list[int], skip: bool) -> None:
    """Tokens that the vocabulary does not have among them: decode leaves them out."""
    text = streamed(demo(), ids, prompt=prompt, skip_special_tokens=skip)
    assert text == demo().decode(ids, skip_special_tokens=skip)


@easily_many
@given(st.lists(HARD_BYTES, max_size=80), st.lists(HARD_BYTES, max_size=5), st.booleans())
@example(data=[0x80] * 50, before=[], special=False)
@example(data=[0xF0, 0x9F] * 40, before=[0xF0], special=True)
def test_invalid_bytes_make_up_what_decode_says(data: list[int], before: list[int], special: bool) -> None:
    """Also after a prompt that ends within a character: its bytes are no part of the text."""
    ids = byte_ids(bytes(data))
    if special:  # skipped: the bytes around it still make a character
        ids = [token for each in ids for token in (each, demo().eos_token_id)]
    text = streamed(demo(), ids, prompt=byte_ids(bytes(before)))
    assert text == demo().decode(ids, skip_special_tokens=True) == bytes(data).decode(errors="replace")


@pytest.mark.parametrize("bad", range(2 * LONGEST_WINDOW))
def test_character_after_many_bad_bytes_is_whole(bad: int) -> None:
    """Wherever among its bytes the window begins anew."""
    assert streamed(demo(), byte_ids(b"\x80" * bad + "🙂🙂".encode())) == UNFINISHED * bad + "🙂🙂"


@st.composite
def texts_and_stops(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text, and stop strings of which some are in it, some begin like it and then differ."""
    text = draw(st.text(st.sampled_from("ab"), max_size=30) | TEXTS)
    stops = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        part = text[start : start + draw(st.integers(0, 8))]
        stops.append(part + draw(st.sampled_from(["", "", "ab", "!"])) or "x")
    return text, stops


@easily_many
@given(st.data(), texts_and_stops(), st.booleans())
def test_text_ends_at_the_first_stop_string(data: st.DataObject, case: tuple[str, list[str]], include: bool) -> None:
    """Until then, only what may begin a stop string is held back."""
    text, stops = case
    ids = data.draw(tokens_of(text))
    stream = open_stream(demo(), *stops, include_stop=include)
    for count, token in enumerate(ids, start=1):
        stream.push(token)
        assert stream.stopped or is_up_to_date(stream, demo().decode(ids[:count]), *stops)
    stream.finish()
    assert (stream.text, stream.stop_reason) == cut(text, stops, include)
    assert stream.stopped == (stream.stop_reason is not None)


def test_stop_string_over_several_tokens_is_never_seen() -> None:
    stream = open_stream(demo(), "END")
    pieces = [*map(stream.push, byte_ids(b"an EN EN.END later")), stream.finish()]
    assert pieces == ["a", "n", " ", "", "", "EN ", "", "", "EN.", *[""] * 10]
    assert stream.stop_reason == "END"


def test_beginning_of_a_stop_string_comes_at_the_end_and_then_nothing() -> None:
    stream = open_stream(demo(), "END")
    assert "".join(map(stream.push, byte_ids(b" EN"))) == " "
    assert [stream.finish(), stream.finish(), stream.push(*byte_ids(b"D"))] == ["EN", "", ""]
    assert (stream.text, stream.stopped) == (" EN", False)


@pytest.mark.parametrize("in_bytes", [True, False])
@pytest.mark.parametrize(
    ("stops", "expected", "reason"),
    [(["abcd", "bc"], "a", "bc"), (["bc", "abc"], "", "abc"), (["cd", "d"], "ab", "cd"), (["d", "abcde"], "abc", "d")],
)
def test_first_complete_stop_wins_or_the_longest(stops: list[str], expected: str, reason: str, in_bytes: bool) -> None:
    ids = byte_ids(b"abcdef") if in_bytes else demo().encode("abcdef")
    stream = open_stream(demo(), *stops)
    assert "".join(map(stream.push, ids)) == expected
    assert stream.stop_reason == reason


def test_stop_string_of_unfinished_bytes_is_found_at_the_end() -> None:
    stream = open_stream(demo(), "a" + UNFINISHED)
    assert [*map(stream.push, byte_ids(b"xa\xe2")), stream.stopped] == ["x", "", "", False]
    assert (stream.finish(), stream.stop_reason) == ("", "a" + UNFINISHED)


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [*demo().encode("one"), demo().eos_token_id, *demo().encode(" two")]
    assert streamed(demo(), ids) == "one two"
    assert streamed(demo(), ids, skip_special_tokens=False) == "one<|endoftext|> two"
    assert streamed(demo(), ids, "<|endoftext|>", skip_special_tokens=False) == "one"
    assert streamed(demo(), ids, "<|endoftext|>") == "one two"


both_word_tokenizers = pytest.mark.parametrize("tokenizer", [metaspace(), llama()], ids=["metaspace", "llama"])


@both_word_tokenizers
def test_only_the_first_word_of_all_loses_its_space(tokenizer: Any) -> None:
    """Not the first after a prompt, nor one after tokens that are skipped."""
    assert streamed(tokenizer, ids_of("▁Hello", *["<s>"] * 40, "▁world")) == "Hello world"
    ids = ids_of("▁world", "!", "▁Hello")
    assert streamed(tokenizer, ids) == "world! Hello"
    assert streamed(tokenizer, ids, prompt=ids_of("<s>")) == "world! Hello"
    assert streamed(tokenizer, ids, prompt=ids_of("▁", "<s>")) == " world! Hello"
    assert streamed(tokenizer, ids, prompt=ids_of("▁Hello", "<s>", "<s>")) == " world! Hello"
    assert streamed(tokenizer, ids, prompt=ids_of("<s>"), skip_special_tokens=False) == " world! Hello"


def test_prompt_that_ends_amid_a_character_is_context_up_to_there() -> None:
    prompt = ids_of("▁Hello", b"\xf0\x9f")
    assert streamed(llama(), ids_of("▁world"), prompt=prompt) == " world"
    assert streamed(llama(), ids_of("é".encode()), prompt=prompt) == "é"


@both_word_tokenizers
@easily_many
@given(ids=st.lists(st.integers(0, len(WORDS) - 1), max_size=40), skip=st.booleans())
def test_any_words_make_up_what_decode_says(tokenizer: Any, ids: list[int], skip: bool) -> None:
    """Runs of spaces among them, which are lost at the beginning and only there."""
    stream = open_stream(tokenizer, skip_special_tokens=skip)
    for count, token in enumerate(ids, start=1):
        stream.push(token)
        assert stream.text == tokenizer.decode(ids[:count], skip_special_tokens=skip)
    whole = tokenizer.decode(ids_of("▁Hello") + ids, skip_special_tokens=skip)
    assert "Hello" + streamed(tokenizer, ids, prompt=ids_of("▁Hello"), skip_special_tokens=skip) == whole


@easily_many
@given(TEXTS, TEXTS, st.booleans())
def test_characters_of_fallback_bytes_come_whole(text: str, prompt: str, word: bool) -> None:
    """Such a decoder writes all bytes of a run as replacement characters as long as one character is unfinished."""
    assume(UNFINISHED * 5 not in text)  # so many in a row pass for bytes that are no characters
    prompt = prompt.replace(UNFINISHED, "") or "x"
    stream = open_stream(llama(), prompt=ids_of(prompt.encode(), *["lo"] * word))
    for count, character in enumerate(text, start=1):
        *unfinished, _ = map(stream.push, ids_of(character.encode()))
        assert not any(unfinished)
        assert is_up_to_date(stream, text[:count])
    assert stream.text + stream.finish() == text


@pytest.mark.parametrize("count", [1, 5, 40])
def test_bad_fallback_bytes_hide_no_words(count: int) -> None:
    text = streamed(llama(), ids_of("▁Hello", "🙂".encode(), b"\xff" * count, "▁world", "!"))
    assert re.fullmatch(f"Hello🙂{UNFINISHED}+ world!", text)


@cache
def straddling() -> Any:
    """A byte-level tokenizer whose tokens end amid characters, so that no text so far ever ends with a whole one."""
    tokens = ["".join(BYTE_LETTERS[byte] for byte in data) for data in (b"\xe4", b"\xbd\xa0\xe5", b"\xa5\xbd\xe4")]
    return tokenizer_of(["<s>", *tokens, "!"], decoders.ByteLevel())


def test_tokens_that_end_amid_characters_are_shown_as_they_come() -> None:
    pieces = list(map(open_stream(straddling()).push, [1, *[2, 3] * 60, 4]))
    assert pieces == ["", *["你", "好"] * 60, UNFINISHED + "!"]


LONG_STREAMS = {
    "text": (demo, lambda: demo().encode("Once upon a time, there was 你好 🙂. ") * 20),
    "bytes that are no character": (demo, lambda: byte_ids(b"\x80" * 300)),
    "replacement characters": (demo, lambda: demo().encode(UNFINISHED) * 100),
    "skipped tokens alone": (demo, lambda: [demo().eos_token_id] * 300),
    "straddling": (straddling, lambda: [1, *[2, 3] * 150]),
    "spaces alone": (metaspace, lambda: ids_of("▁", "▁▁") * 150),
    "bad fallback bytes": (llama, lambda: ids_of(b"\xff\x61") * 150),
}


@pytest.mark.parametrize("name", LONG_STREAMS)
def test_each_token_costs_the_same_however_long_the_text(name: str) -> None:
    tokenizer, ids = (make() for make in LONG_STREAMS[name])
    counted = Mock(decode=Mock(side_effect=tokenizer.decode))
    stream = open_stream(counted, prompt=ids * 10)
    assert counted.decode.call_count <= LONGEST_WINDOW**2  # a prompt without a whole character; else a few
    for token in ids:
        counted.decode.reset_mock()
        stream.push(token)
        assert counted.decode.call_count <= 3
        assert max(len(call.args[0]) for call in counted.decode.call_args_list) <= LONGEST_WINDOW + 1
    stream.finish()
    assert stream.text.endswith(tokenizer.decode(ids, skip_special_tokens=True))
