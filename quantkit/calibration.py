"""Calibration data: which tokens a method looks at, chosen once and recorded, so that two methods compare fairly.

A source is one of

    notes.txt                     a text, tokenized as it stands (any ending but .jsonl)
    chats.jsonl                   a document a line: {"text": ...} or {"messages": [...], "tools": [...]}
    src/                          a folder, each text file in it a document
    datasets:ORG/NAME:CONFIG@SPLIT  a dataset of the hub with such columns; `:CONFIG` and `@SPLIT` may be left out
    bundled                       the text that ships, which is the default

or a mix of them, as a mapping from each to its share of the samples: {"notes.txt": 2, "chats.jsonl": 1, "src": 1}.

Documents are tokenized one by one and packed end to end, so that no window is padded (`documents.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from quantkit.bundled import CALIBRATION_TEXT
from quantkit.calibration_mix import BUNDLED_SOURCE, deal, interleaved
from quantkit.documents import HUB, document_ids, is_collection
from quantkit.errors import InputError, StorageError
from quantkit.token_windows import StartToken, cut_windows, start_token, text_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Source = str | Path | Mapping[str, float]
_LOOK_AHEAD = 256  # tokens that must follow the last one taken: text further on never changes how it was cut
_OF_FOLDERS = 8  # times as much is read of a folder as is taken, so that windows come from many files


class Settings(Protocol):
    """What a recipe says about calibration; None where it is silent."""

    @property
    def source(self) -> str | Mapping[str, float] | None: ...
    @property
    def samples(self) -> int | None: ...
    @property
    def seq_len(self) -> int | None: ...
    @property
    def seed(self) -> int | None: ...


@dataclass(frozen=True)
class Calibration:
    """Where the tokens come from: `samples` windows of `seq_len` tokens, drawn from a source by `seed`."""

    source: Source = CALIBRATION_TEXT
    samples: int = 128
    seq_len: int = 512
    seed: int = 0

    @classmethod
    def from_recipe(
        cls,
        recipe: Settings,
        *,
        source: Source | None = None,
        samples: int | None = None,
        seq_len: int | None = None,
        seed: int | None = None,
    ) -> Calibration:
        """What the arguments say, else the recipe, else the defaults; None says nothing."""
        values: dict[str, Any] = {"source": source, "samples": samples, "seq_len": seq_len, "seed": seed}
        for name, value in values.items():
            values[name] = getattr(recipe, name) if value is None else value
        return cls(**{name: value for name, value in values.items() if value is not None})

    def tokens(self, tokenizer: PreTrainedTokenizerBase, context: int) -> Tensor:
        """Token ids [samples, seq_len]; fewer samples where the source has no more, which a mix refuses."""
        if not 2 <= self.seq_len <= context:
            raise InputError(
                f"calibration sequences of {self.seq_len} tokens do not fit the model; choose 2 to {context}"
            )
        if self.samples < 1:
            raise InputError(f"calibration with {self.samples} samples; choose 1 or more")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"calibration with seed {self.seed}; choose 0 or more, below 2**63")
        if isinstance(self.source, Mapping):
            return self._mixed(tokenizer, context, deal(self.source, self.samples))
        windows = self._windows(tokenizer, str(self.source))
        chosen = torch.randperm(len(windows), generator=torch.Generator().manual_seed(self.seed))[: self.samples]
        return windows[chosen]

    def record(self, tokens: Tensor, start: StartToken | None = None) -> dict[str, Any]:
        """What a log must hold to repeat this. `samples` is less than `asked` where the source has no more."""
        begun = {} if start is None else {"start_token": start.text}
        return begun | {
            **self._source_record(),
            "samples": tokens.shape[0],
            "asked": self.samples,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "tokens_sha256": hashlib.sha256(tokens.to(torch.int32).numpy().tobytes()).hexdigest(),
        }

    def _source_record(self) -> dict[str, Any]:
        if not isinstance(self.source, Mapping):
            return {"source": _name(self.source), "default": _is_default(self.source)}
        counts = deal(self.source, self.samples)
        mix = [
            {"source": _name(one), "default": _is_default(one), "share": share, "samples": counts[one]}
            for one, share in self.source.items()
        ]
        return {"source": " + ".join(str(part["source"]) for part in mix), "default": False, "mix": mix}

    def _mixed(self, tokenizer: PreTrainedTokenizerBase, context: int, counts: Mapping[str, int]) -> Tensor:
        """So many samples of each source, those that it alone would give, mixed evenly."""
        parts = []
        for source, count in counts.items():
            part = replace(self, source=source, samples=count).tokens(tokenizer, context)
            if len(part) < count:
                raise InputError(
                    f"{source} has {len(part)} windows of {self.seq_len} tokens, but its share of {self.samples} "
                    f"samples is {count}; give more text, a smaller share, fewer samples or shorter ones"
                )
            parts.append(part)
        return torch.cat(parts)[interleaved(counts.values())]

    def _windows(self, tokenizer: PreTrainedTokenizerBase, source: str) -> Tensor:
        """Whole windows [windows, seq_len] to draw from: all of a file, a part of a folder, the first of a dataset."""
        if source == BUNDLED_SOURCE:
            source = str(CALIBRATION_TEXT)
        if not source.startswith(HUB) and not Path(source).exists():
            raise StorageError(
                f"no text '{source}'; give a text file, a .jsonl file, a folder or a dataset as {HUB}ORG/NAME"
            )
        if not is_collection(source):
            return token_windows(tokenizer, Path(source), self.seq_len)
        start = start_token(tokenizer)
        times = 1 if source.startswith(HUB) else _OF_FOLDERS if Path(source).is_dir() else None
        enough = None
        if times is not None:  # one more, since a chat template may bring its own start token
            enough = times * self.samples * text_tokens(self.seq_len, start) + (start is not None)
        return cut_windows(document_ids(tokenizer, source, enough, self.seed), self.seq_len, source, start)


def _name(source: str | Path) -> str:
    """Where it lies is nobody's business."""
    if _is_default(source):
        return CALIBRATION_TEXT.name
    return str(source) if str(source).startswith(HUB) else Path(source).absolute().name


def _is_default(source: str | Path) -> bool:
    return str(source) == BUNDLED_SOURCE or Path(source) == CALIBRATION_TEXT


def token_windows(
    tokenizer: PreTrainedTokenizerBase,
    text_file: Path,
    window: int,
    count: int | None = None,
    *,
    begin: bool = True,
) -> Tensor:
    """A text as whole windows of token ids [windows, window]; a short rest is dropped.

    No special tokens but the one that the tokenizer puts before every text, with which each window begins, unless
    `begin` is False. With `count` only the first windows, and only as much of the text is tokenized as decides them.
    """
    start = start_token(tokenizer) if begin else None
    try:
        text = text_file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read the text {text_file}: {error}") from error
    if count is None:
        ids = _text_ids(tokenizer, text)
    else:
        ids = _first_ids(tokenizer, text, count * text_tokens(window, start))
    return cut_windows(ids, window, str(text_file), start)


def _first_ids(tokenizer: PreTrainedTokenizerBase, text: str, enough: int) -> Tensor:
    """The first `enough` token ids of a text; all of them where it has fewer."""
    characters = 5 * (enough + _LOOK_AHEAD)
    while characters < len(text):
        ids = _text_ids(tokenizer, text[:characters])
        if len(ids) >= enough + _LOOK_AHEAD:
            return ids[:enough]
        characters *= 2
    return _text_ids(tokenizer, text)[:enough]


def _text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)
