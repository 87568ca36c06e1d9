"""Tokens in, text out: what is safe to show after each token, and where a stop string ends it.

    token ids --Detokenizer--> whole characters --StopFilter--> text to show

A token need not be whole characters, and how it reads depends on the token before it (SentencePiece drops the space of
a first word). So each step decodes a short window of the last tokens, never everything, and takes what is new.
The pieces add up to `tokenizer.decode(all ids)`, cut at the first stop string, for every byte-level tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how decoders write bytes that are no character, or not one yet
LONGEST_WINDOW = 16  # tokens; more are needed only while bytes keep making no sense
RESTART_WINDOW = 8  # tokens; UTF-8 decodes alike from wherever it is entered, four bytes on


class TextStream:
    """The text of one continuation as it grows. After a stop string, or `finish`, no more text comes out."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_ids: Sequence[int],
        stop: Sequence[str],
        include_stop: bool,
        skip_special_tokens: bool,
    ) -> None:
        """`prompt_ids` may be the whole prompt or its last tokens."""
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
        self._filter = StopFilter(tuple(stop), include_stop=include_stop)
        self._finished = False
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything returned so far."""
        return "".join(self._pieces)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return self._filter.met is not None

    @property
    def stop_reason(self) -> str | None:
        """The stop string that was met."""
        return self._filter.met

    def push(self, token_id: int) -> str:
        """Appends a token; returns the new text that no later token can change or cut off."""
        if self._finished or self.stopped:
            return ""
        return self._returned(self._filter.push(self._detokenizer.push(token_id)))

    def finish(self) -> str:
        """Returns what was held back: bytes that became no character, the beginning of a stop string."""
        if self._finished or self.stopped:
            return ""
        self._finished = True
        piece = self._filter.push(self._detokenizer.finish())
        return self._returned(piece + self._filter.finish())

    def _returned(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece


class Detokenizer:
    """Whole characters from tokens, by decoding a window of the last ones.

    The window begins where a character ended, at least a token back, for the new token to be read in context. Tokens
    that never have a text stay out of it: they are no context. `_shown` characters of its text are out.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._plain_decode = quick_decode(tokenizer)
        self._skip_special_tokens = skip_special_tokens
        self._window = self._context(list(prompt_ids[-LONGEST_WINDOW:]))
        self._text = self._decode(self._window)
        self._shown = len(self._text)
        self._boundary = len(self._window)  # tokens of the window up to where a character last ended

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        self._window.append(token_id)
        before, self._text = self._text, self._decode(self._window)
        if self._text == before and self._is_silent(token_id):
            self._window.pop()
            return ""
        piece = self._show(len(self._text.rstrip(UNFINISHED)))
        if not self._text.endswith(UNFINISHED):
            self._move_to_boundary()
        elif len(self._window) > LONGEST_WINDOW:
            piece += self._restart()
        return piece

    def finish(self) -> str:
        """What was held back, as the decoder writes it."""
        return self._show(len(self._text))

    def _decode(self, token_ids: list[int]) -> str:
        return self._plain_decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _context(self, prompt_ids: list[int]) -> list[int]:
        """The fewest last tokens of the prompt that are whole characters, or none."""
        token_ids: list[int] = []
        for token_id in reversed(prompt_ids):  # the last token is enough nearly always
            if not self._is_silent(token_id):
                token_ids.insert(0, token_id)
                if UNFINISHED not in self._decode(token_ids):
                    return token_ids
        for end in range(len(token_ids) - 1, 0, -1):  # the prompt ends within a character
            for start in range(end - 1, -1, -1):
                if UNFINISHED not in self._decode(token_ids[start:end]):
                    return token_ids[start:end]
        return []

    def _is_silent(self, token_id: int) -> bool:
        """Whether a token never has a text, as a special token that is skipped. A first space has none but there."""
        return not self._decode([token_id, token_id])

    def _show(self, end: int) -> str:
        """The text of the window up to `end`, as far as it is not out yet."""
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def _move_to_boundary(self) -> None:
        """All is out: what came since the last boundary is context enough."""
        self._window = self._window[self._boundary :]
        self._text = self._decode(self._window)
        self._shown, self._boundary = len(self._text), len(self._window)

    def _restart(self) -> str:
        """Shows all but the last unfinished character, and begins the window amid these bytes."""
        piece = self._show(len(self._text) - 1)
        self._window = self._window[-RESTART_WINDOW:]
        self._text = self._decode(self._window)
        self._shown = len(self._text) - self._text.endswith(UNFINISHED)
        self._boundary = 0
        return piece


def quick_decode(tokenizer: PreTrainedTokenizerBase) -> Callable[..., str]:
    """What `tokenizer.decode` calls in the end, where it adds nothing: several times as fast for a few tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    adds = getattr(tokenizer, "clean_up_tokenization_spaces", True)
    decode: Callable[..., str] = tokenizer.decode if backend is None or adds else backend.decode
    return decode


class StopFilter:
    """Lets text through up to the stop string that is complete first, the longest if several end together.

    So it does not matter in which pieces the text comes.
    """

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool) -> None:
        self.met: str | None = None
        self._stops = stops
        self._include_stop = include_stop
        self._longest = max(map(len, stops), default=0)
        self._held = ""  # the longest end of the text that begins a stop string

    def push(self, text: str) -> str:
        """Text that is no part of a stop string."""
        if not self._stops:
            return text
        text, self._held = self._held + text, ""
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            end, start, self.met = min(matches)
            return text[: end if self._include_stop else start]
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                text, self._held = text[:start], text[start:]
                break
        return text

    def finish(self) -> str:
        """What began like a stop string and will not be one."""
        text, self._held = self._held, ""
        return text
