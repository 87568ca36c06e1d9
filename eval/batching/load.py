"""A mixed load: how long every prompt and every answer is, from a distribution or from a file.

Lengths of a distribution are its quantiles in a seeded order, not draws: a small load has the long tail of a large one,
and another seed brings another order, but never other tokens in all.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import NormalDist

from quantkit.errors import InputError, StorageError

# What a file calls them; the second names are those of Azure's public traces.
PROMPT_NAMES = ("prompt_tokens", "ContextTokens")
NEW_NAMES = ("output_tokens", "GeneratedTokens")


@dataclass(frozen=True)
class Lengths:
    """Tokens of one request."""

    prompt: int
    new: int


@dataclass(frozen=True)
class MixedLoad:
    requests: tuple[Lengths, ...]  # in the order in which they come
    source: str  # as results name it
    seed: int

    @property
    def prompt_tokens(self) -> int:
        return sum(one.prompt for one in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(one.new for one in self.requests)

    def prompts(self, vocab: int) -> list[list[int]]:
        """Random token ids, no two prompts with a page in common."""
        return [random_tokens(one.prompt, vocab, f"{self.seed} {at}") for at, one in enumerate(self.requests)]


@dataclass(frozen=True)
class PrefixLoad:
    """Requests that begin with the same tokens, such as a long system prompt."""

    requests: int
    prefix: int  # tokens that all have
    own: int  # and those of each
    new: int
    seed: int

    def prompts(self, vocab: int) -> list[list[int]]:
        prefix = random_tokens(self.prefix, vocab, f"{self.seed} prefix")
        return [prefix + random_tokens(self.own, vocab, f"{self.seed} own {at}") for at in range(self.requests)]


def random_tokens(count: int, vocab: int, seed: str) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=count)


def lognormal_load(count: int, prompt: int, new: int, spread: float, max_context: int, seed: int) -> MixedLoad:
    """Medians of both lengths, and the deviation of their logarithms. Prompts take half of a context at most, answers
    what is left of it.
    """
    if not 0 <= spread <= 3:
        raise InputError(f"--spread is {spread:g}, but must be from 0, all lengths alike, to 3")
    order = random.Random(seed)
    prompts, answers = (_quantiles(count, median, spread) for median in (prompt, new))
    order.shuffle(prompts)
    order.shuffle(answers)
    cut = [min(length, max(1, max_context // 2)) for length in prompts]
    requests = (Lengths(one, min(answer, max_context - one)) for one, answer in zip(cut, answers, strict=True))
    return MixedLoad(tuple(requests), f"lognormal {prompt} + {new}, spread {spread:g}", seed)


def _quantiles(count: int, median: int, spread: float) -> list[int]:
    normal = NormalDist()
    return [max(1, round(median * math.exp(spread * normal.inv_cdf((at + 0.5) / count)))) for at in range(count)]


def load_of_file(file: Path, most: int | None, max_context: int, seed: int) -> MixedLoad:
    """The lengths of a CSV file with a header or of JSON lines, in their order; the first `most` of them."""
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            rows = csv.DictReader(lines) if file.suffix == ".csv" else _json_lines(lines, file)
            found = tuple(
                _lengths(row, f"{file}, request {number}", max_context)
                for number, row in enumerate(islice(rows, most), 1)
            )
    except OSError as error:
        raise StorageError(f"cannot read {file}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file} is not UTF-8 text in lines: {error}") from None
    if not found:
        raise InputError(f"{file} has no requests; give {_EXPECTED}")
    return MixedLoad(found, file.name, seed)


_EXPECTED = f"JSON lines, or CSV in a file that ends with .csv, with {PROMPT_NAMES[0]} and {NEW_NAMES[0]}"


def _json_lines(lines: Iterator[str], file: Path) -> Iterator[Mapping[str, object]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                entry = json.loads(line)
            except ValueError:
                entry = None
            if not isinstance(entry, dict):
                raise InputError(f"{file}, line {number} is not a JSON object; give {_EXPECTED}")
            yield entry


def _lengths(row: Mapping[str, object], place: str, max_context: int) -> Lengths:
    prompt, new = (_tokens(row, names, place) for names in (PROMPT_NAMES, NEW_NAMES))
    if prompt + new > max_context:
        raise InputError(f"{place} has {prompt} + {new} tokens, but contexts end at {max_context}; raise --max-context")
    return Lengths(prompt, new)


def _tokens(row: Mapping[str, object], names: tuple[str, str], place: str) -> int:
    value = next((row[name] for name in names if row.get(name) is not None), None)
    try:
        count = int(str(value))
    except ValueError:
        count = 0
    if count < 1:
        given = "has none" if value is None else f"has '{value}'"
        raise InputError(f"{place} {given} for {names[0]} (or {names[1]}); give a whole number from 1")
    return count
