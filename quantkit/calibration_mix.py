"""Several calibration sources at once, each with a share of the samples.

2=notes.txt  chats.jsonl  src/      as words of a command line; a share that is not given is 1
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import InputError

_WORD = re.compile(r"(?P<share>[+-]?(?:\d+\.?\d*|\.\d+))=(?P<source>.*)", re.DOTALL)
BUNDLED_SOURCE = "bundled"  # the text that ships
Mix = Mapping[str, float]  # from a source to its share


def source_of(words: Sequence[str]) -> str | dict[str, float] | None:
    """What a command line names: nothing, one source, or a mix."""
    mix: dict[str, float] = {}
    for word in words:
        match = _WORD.fullmatch(word)
        source, share = (match["source"], float(match["share"])) if match else (word, 1.0)
        if not source:
            raise InputError(f"'{word}' names no text; give SHARE=SOURCE, such as 2=notes.txt")
        if source in mix:
            raise InputError(f"the text '{source}' is given twice; give it once, with a share as in 2={source}")
        mix[source] = share
    if not mix:
        return None
    check_shares(mix)
    return next(iter(mix)) if len(mix) == 1 else mix


def check_shares(mix: Mix) -> None:
    if not mix:
        raise InputError("a mix without a source; name one or more, each with its share")
    for source, share in mix.items():
        if not (isinstance(share, int | float) and 0 < share < math.inf):
            raise InputError(f"the share of {source} is {share}; choose a number above 0")


def deal(mix: Mix, samples: int) -> dict[str, int]:
    """How many samples each source gives: in proportion, what is left over to the largest remainders."""
    check_shares(mix)
    total = math.fsum(mix.values())
    exact = {source: samples * share / total for source, share in mix.items()}
    counts = {source: math.floor(quota) for source, quota in exact.items()}
    by_remainder = sorted(mix, key=lambda source: counts[source] - exact[source])  # of equal ones the first named
    for source in by_remainder[: samples - sum(counts.values())]:
        counts[source] += 1
    for source, count in counts.items():
        if count == 0:
            raise InputError(
                f"{samples} calibration samples leave none for {source} (share {mix[source]:g} of {total:g}); "
                "take more samples or give it a larger share"
            )
    return counts


def interleaved(counts: Collection[int]) -> Tensor:
    """The order [samples] in which parts of these sizes, one after the other, are mixed evenly.

    Whoever holds back the first or the last sequences, or looks at some stretch of them, meets every source in about
    its proportion. Of N sources, each with two samples or more is among the first N of all and among the last N.
    """
    places = [torch.arange(count, dtype=torch.float64) / max(1, count - 1) for count in counts]
    return torch.cat(places).argsort(stable=True)


def words_of(source: str | Mix | None) -> list[str]:
    """The words that `source_of` reads."""
    if isinstance(source, Mapping):
        return [f"{share:.12g}={name}" for name, share in source.items()]
    return [] if source is None else [source]


def recorded_words(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The same of a recorded mix."""
    names = [BUNDLED_SOURCE if part["default"] else part["source"] for part in parts]
    return [f"{part['share']:.12g}={name}" for name, part in zip(names, parts, strict=True)]


def describe_mix(parts: Sequence[Mapping[str, Any]]) -> str:
    """Of a recorded mix: how many samples came from where."""
    return ", ".join(f"{part['samples']} x {part['source']}" for part in parts)
