"""Prompt lookup: what followed the last tokens when they stood there before is guessed to follow again.

Summaries, edits, code and chats repeat their context; no model is needed to guess that. Every sequence has an index of
its own from the last few tokens to where they stood last, extended as tokens come.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from quantkit.runtime.core.sequence import Sequence
from quantkit.runtime.core.step_result import Launched, Outcome

LONGEST, SHORTEST = 4, 2  # tokens that must be the same, the longest first


@dataclass
class _Index:
    """Of the tokens up to `known`: run of tokens -> the position behind its last occurrence but the final one."""

    known: int = 0
    behind: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, tokens: list[int]) -> None:
        """The run that ends with the last token is left out: it would only find itself."""
        for end in range(max(self.known, SHORTEST), len(tokens)):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self.behind[tuple(tokens[end - size : end])] = end
        self.known = max(self.known, len(tokens))


class NgramDrafter:
    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        tokens = sequence.tokens
        index = self._indexes.setdefault(sequence.id, _Index())
        index.extend(tokens)
        for size in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            found = index.behind.get(tuple(tokens[-size:]))
            if found is not None:
                return tokens[found : found + most]
        return []

    def observe(self, launched: Launched, outcomes: list[Outcome], ended: Collection[int]) -> None:
        """Its index looks at tokens, not at guesses."""
        for sequence in ended:
            self._indexes.pop(sequence, None)
