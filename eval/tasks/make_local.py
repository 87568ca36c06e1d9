"""Makes the items of the local task set from the held-out text that ships: `python -m quantkit.eval.tasks.make_local`.

The same text gives the same items, byte for byte. Passages end where a model has something to go by: the missing words
stand in the passage before, as in LAMBADA, or the wrong choices come from the same document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from quantkit.bundled import HELDOUT_TEXT

FOLDER = Path(__file__).parent / "local"
ITEMS = 200
GENERATED_ITEMS = 100  # answers are slower than scores
ROLLING_ITEMS = 40
CHOICES = 4

_PASSAGE_WORDS = 40  # at least, before what is asked for
_CHOICE_WORDS = 8
_ROLLING_BYTES = 2500  # of a document, about: whole paragraphs
_SENTENCE_END = re.compile(r"(?<=[a-z)])[.!?] (?=[A-Z])")
_WORD = re.compile(r"[A-Za-z]{4,}")

Item = dict[str, Any]


def documents() -> list[list[str]]:
    """The held-out text: documents of paragraphs."""
    text = HELDOUT_TEXT.read_text(encoding="utf-8")
    return [[part.strip() for part in document.split("\n\n") if part.strip()] for document in text.split("\n\n\n")]


def sentences(paragraphs: Sequence[str]) -> list[str]:
    """Of a document's prose, in order, each with its full stop; lists, tables and headings are left out."""
    prose = [part for part in paragraphs if part.endswith(".") and "\n" not in part and part[:1].isalpha()]
    return [sentence for part in prose for sentence in _SENTENCE_END.sub(".\n", part).split("\n")]


def last_word_items(document: Sequence[str], choose: Random) -> Iterator[Item]:
    """A passage without its last word, which stood in it before."""
    for before, sentence in _passages(document):
        *words, last = sentence.removesuffix(".").split(" ")
        context = " ".join([*before, *words])
        if words and _WORD.fullmatch(last) and last in context.split(" "):
            yield {"context": context, "word": last}


def completion_items(document: Sequence[str], choose: Random) -> Iterator[Item]:
    """A passage without the end of its last sentence: two words that followed each other in it before."""
    for before, sentence in _passages(document):
        words = sentence.removesuffix(".").split(" ")
        context = " ".join([*before, *words[:-2]])
        first, last = ["", *words][-2:]
        if len(words) > 6 and first.isalpha() and _WORD.fullmatch(last) and f" {first} {last}" in context:
            yield {"context": context, "ending": f"{first} {last}"}


def continuation_items(document: Sequence[str], choose: Random) -> Iterator[Item]:
    """Half a sentence, the words that follow it, and as many words from the middle of the document's other ones."""
    halves = []
    for before, sentence in _passages(document):
        words = sentence.split(" ")
        middle = len(words) // 2
        if middle >= _CHOICE_WORDS and words[middle][0].islower():
            chosen = " ".join(words[middle : middle + _CHOICE_WORDS]).rstrip(".,;:")
            halves.append((" ".join([*before, *words[:middle]]), chosen))
    for context, chosen in halves:
        others = sorted({other for _, other in halves} - {chosen})
        if len(others) >= CHOICES - 1:
            choices = [chosen, *choose.sample(others, CHOICES - 1)]
            choose.shuffle(choices)
            yield {"context": context, "choices": choices, "answer": choices.index(chosen)}


def rolling_items(document: Sequence[str], choose: Random) -> Iterator[Item]:
    """The beginning of a document."""
    text = document[0]
    for part in document[1:]:
        if len(f"{text}\n\n{part}".encode()) > _ROLLING_BYTES:
            break
        text = f"{text}\n\n{part}"
    if len(text.encode()) > _ROLLING_BYTES // 2:
        yield {"text": text}


def make(kind: Callable[[Sequence[str], Random], Iterator[Item]], count: int) -> list[Item]:
    """`count` items in turns from all documents, so that none of them weighs more than the others."""
    choose = Random(0)
    queues = []
    for document in documents():
        found = list(kind(document, choose))
        choose.shuffle(found)
        queues.append(found)
    items: list[Item] = []
    while len(items) < count and any(queues):
        items += [queue.pop() for queue in queues if queue]
    if len(items) < count:
        raise ValueError(f"the held-out text gives {len(items)} items, but {count} are wanted")
    return items[:count]


def _passages(document: Sequence[str]) -> Iterator[tuple[list[str], str]]:
    """Every sentence with those before it: the fewest that have enough words together."""
    prose = sentences(document)
    for index, sentence in enumerate(prose):
        before: list[str] = []
        for earlier in reversed(prose[:index]):
            before.insert(0, earlier)
            if sum(len(one.split(" ")) for one in before) >= _PASSAGE_WORDS:
                yield before, sentence
                break


FILES = {
    "last_word.jsonl": (last_word_items, ITEMS),
    "continuation.jsonl": (continuation_items, ITEMS),
    "completion.jsonl": (completion_items, GENERATED_ITEMS),
    "rolling.jsonl": (rolling_items, ROLLING_ITEMS),
}


def lines(file: str) -> str:
    """What stands in a file of items."""
    kind, count = FILES[file]
    return "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in make(kind, count))


def main() -> None:
    for file in FILES:
        (FOLDER / file).write_text(lines(file), encoding="utf-8")


if __name__ == "__main__":
    main()
