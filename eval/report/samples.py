"""Sample completions side by side, with what differs from the unquantized model's marked."""

from __future__ import annotations

from quantkit.eval.compare.results import Comparison, FormatResult
from quantkit.eval.report.differences import Piece, differences
from quantkit.eval.report.markup import Markup, join, tag

_OPEN = 1  # prompts whose completions are shown at once


def sample_section(comparison: Comparison) -> Markup | None:
    prompts = list(dict.fromkeys(sample.prompt for found in comparison.formats for sample in found.samples))
    if not prompts:
        return None
    lead = (
        "Each format continued the same prompts, always with its most likely token. Words that the unquantized model "
        "did not write there are underlined; ‸ stands where it wrote more. Once two texts part ways they seldom meet "
        "again, so what counts is whether a text still makes sense."
    )
    parts = [_prompt(comparison, prompt, place < _OPEN) for place, prompt in enumerate(prompts)]
    return tag("section", tag("h2", "The same prompt, in every format"), tag("p", lead, class_="lead"), *parts)


def _prompt(comparison: Comparison, prompt: str, opened: bool) -> Markup:
    baseline = comparison.baseline
    original = None if baseline is None else text_of(baseline, prompt)
    cards = [
        _card(found, text, None if found.baseline else original)
        for found in comparison.formats
        if (text := text_of(found, prompt)) is not None
    ]
    grid = tag("div", *cards, class_="samples")
    shown = tag("p", prompt, class_="prompt")
    if opened:
        return tag("div", shown, grid)
    short = " ".join(prompt.split())
    name = tag("summary", "Another prompt: ", short if len(short) <= 80 else f"{short[:79]}…")
    return tag("details", name, shown, grid)


def text_of(found: FormatResult, prompt: str) -> str | None:
    return next((sample.text for sample in found.samples if sample.prompt == prompt), None)


def _card(found: FormatResult, text: str, original: str | None) -> Markup:
    if original is None:
        said, shown = "the unquantized model" if found.baseline else "nothing to compare with", tag("p", text)
    else:
        compared = differences(original, text)
        said, shown = compared.summary, tag("p", *(_piece(piece) for piece in compared.pieces))
    heading = tag("h4", found.name, tag("small", said))
    return tag("article", heading, shown, class_="sample original" if found.baseline else "sample")


def _piece(piece: Piece) -> Markup:
    if not piece.changed:
        return join(piece.text)
    instead = f"unquantized: {piece.left_out}" if piece.left_out else "not in the unquantized model's text"
    if not piece.text:
        return tag("mark", class_="gap", title=instead)
    words = piece.text.lstrip()
    return join(piece.text[: len(piece.text) - len(words)], tag("mark", words, title=instead))
