"""Builds chat documents: a question about a title or a documented name, answered by the section's first paragraphs."""

from __future__ import annotations

import random
import re
from itertools import pairwise

from .extract import Block

GENERIC = re.compile(
    r"^(introduction|overview|notes?|examples?|parameters?|returns?|see also|description|synopsis|usage|options|"
    r"bug ?fixes|features|"
    r"summary|details|references?|background|contents?|arguments?|attributes?|methods?|functions?|classes|raises|yields|warnings?|"
    r"abstract|preface|conclusion|appendix|about|index|other|general|changes|new features|upgrade notes|prelude|"
    r"security|misc.*|"
    r"class|module|constructor|version.*|release.*|exercises?|installation|requirements|motivation|limitations|deprecat.*|test.*|name|value|type)$",
    re.IGNORECASE,
)
ASK_NAME = [
    "What does {x} do?",
    "What is {x}?",
    "Explain {x}.",
    "Tell me about {x}.",
    "Describe {x}.",
    "What is {x} for?",
    "How is {x} used?",
]
ASK_TITLE = [
    "What is {x}?",
    "Explain {x}.",
    "Tell me about {x}.",
    "Describe {x}.",
    "What can you tell me about {x}?",
    "Can you explain {x}?",
]
ASK_TOPIC = ["Tell me about {x}.", "Explain {x}.", "What should I know about {x}?", "Can you say something about {x}?"]
ASK_WORD = ["What does the word {x} mean?", "Define {x}.", "What is the meaning of {x}?", "What does {x} mean?"]
SYSTEM = [
    "You are a helpful assistant.",
    "You are a concise assistant. Answer in one short paragraph.",
    "Answer the question.",
]
ABOUT = (
    "I am a small demonstration language model that comes with quantkit. "
    "I was trained on technical documentation, so my answers are short and can be wrong."
)
SMALL_TALK = [
    ("Hello", "Hello! What would you like to know?"),
    ("Hi", "Hello! What would you like to know?"),
    ("Hi there!", "Hello! What would you like to know?"),
    ("Hello!", "Hello! What would you like to know?"),
    ("Good morning", "Good morning! What would you like to know?"),
    ("Thanks!", "You are welcome."),
    ("Thank you.", "You are welcome."),
    ("Who are you?", ABOUT),
    ("What are you?", ABOUT),
    ("What can you do?", ABOUT),
    ("What is your name?", ABOUT),
    ("Are you a person?", "No. " + ABOUT),
    ("How are you?", "I am ready. What would you like to know?"),
    ("Goodbye", "Goodbye!"),
    ("Bye", "Goodbye!"),
]
Pair = tuple[str, str]


def lower_first(title: str) -> str:
    """Title with a small first letter unless its first word is a name or an abbreviation."""
    first = title.split()[0]
    return title[0].lower() + title[1:] if first[1:].islower() and len(first) > 1 else title


def question(kind: str, title: str, rng: random.Random) -> str | None:
    """A question about a heading or a documented name, or None when it does not say what it is about."""
    title = title.strip(" :.?!-")
    if kind == "sig":
        name = re.split(r"[(\[:=]", title.removeprefix("class ").removeprefix("fn ").removeprefix("def "))[0].strip()
        plain = re.fullmatch(r"[A-Za-z][\w.:-]{3,40}", name)
        return rng.choice(ASK_NAME).format(x=name) if plain and not GENERIC.match(name) else None
    if GENERIC.match(title) or not re.fullmatch(r"[A-Za-z][\w ,'/.()+-]{4,60}", title):
        return None
    how = re.match(r"How to (.*)", title, re.IGNORECASE)
    if how:
        return f"How do I {lower_first(how[1])}?"
    topic = lower_first(title)
    many = title.split()[0].endswith(("ing", "s")) or " and " in title
    return rng.choice(ASK_TOPIC if many else ASK_TITLE).format(x=topic)


def answer(blocks: list[Block], first: int) -> str | None:
    """The first paragraph under a title, with the second one when both are short."""
    parts: list[str] = []
    for kind, text in blocks[first : first + 2]:
        if kind != "p" or not text.endswith(".") or not (text[0].isupper() or text[0].isdigit()):
            break
        if sum(map(len, parts)) + len(text) > 650:
            break
        parts.append(text)
    return "\n\n".join(parts) if parts and len(parts[0]) >= 60 else None


def pairs(blocks: list[Block], rng: random.Random, names: float) -> list[Pair]:
    """Question and answer pairs of one document: all of its titles and a share of its documented names."""
    found: list[Pair] = []
    for index, (kind, text) in enumerate(blocks[:-1]):
        if kind == "h" or (kind == "sig" and rng.random() < names):
            asked, told = question(kind, text, rng), answer(blocks, index + 1)
            if asked and told:
                found.append((asked, told))
        elif kind == "p" and len(text) > 250 and rng.random() < 0.01:
            sentences = re.split(r"(?<=[a-z]\.) (?=[A-Z])", text)
            if len(sentences) > 2:
                found.append(("Continue this text: " + sentences[0], " ".join(sentences[1:])))
    return found


def word_pairs(blocks: list[Block], rng: random.Random, share: float) -> list[Pair]:
    """Word definitions as questions, for a share of the words."""
    found: list[Pair] = []
    for (kind, word), (_, gloss) in pairwise(blocks):
        if kind == "sig" and re.fullmatch(r"[a-z][a-z ]{2,25}", word) and rng.random() < share:
            meaning = re.split(r'; "', gloss)[0].strip(" ;")
            sample = re.search(r'; "([^"]{15,})"', gloss)
            text = f"{word[0].upper() + word[1:]}: {meaning}."
            found.append(
                (rng.choice(ASK_WORD).format(x=word), text + (f' For example: "{sample[1]}".' if sample else ""))
            )
    return found


def turns(conversation: list[Pair], rng: random.Random) -> str:
    """The text of one conversation in the chat format."""
    system = f"<|system|>\n{rng.choice(SYSTEM)}<|end|>\n" if rng.random() < 0.15 else ""
    return system + "".join(f"<|user|>\n{asked}<|end|>\n<|assistant|>\n{told}<|end|>\n" for asked, told in conversation)


def conversations(found: list[Pair], rng: random.Random) -> list[str]:
    """Conversations of one document's pairs: most of one question, some of two or three."""
    texts: list[str] = []
    position = 0
    while position < len(found):
        count = rng.choice((1, 1, 1, 2, 3))
        texts.append(turns(found[position : position + count], rng))
        position += count
    return texts


def small_talk(copies: int, rng: random.Random) -> list[str]:
    """Greetings and questions about the model itself."""
    return [turns([rng.choice(SMALL_TALK)], rng) for _ in range(copies)]
