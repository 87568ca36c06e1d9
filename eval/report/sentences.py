"""The verdict in two sentences: what to take for which need, and how far that can be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from quantkit.eval.compare.results import Comparison, FormatResult
from quantkit.eval.report import numbers
from quantkit.eval.report.rules import (
    ACCEPTABLE_KL,
    ACCEPTABLE_RATIO,
    BEST,
    FASTEST,
    SMALLEST,
    WORTHWHILE_SAVING,
    Choice,
    Pick,
    divergence_of,
    ratio_of,
    same_quality,
    speed_at,
)
from quantkit.wording import human_bytes

_KL_LIMIT = f"at most {ACCEPTABLE_KL:g} nats of KL divergence, with the upper ends of their intervals"


def two_sentences(comparison: Comparison, choice: Choice) -> tuple[str, str]:
    if not comparison.formats:
        return "Nothing was measured.", "No format was asked for."
    if len(choice.failed) == len(comparison.formats):
        nothing = f"Nothing can be recommended for {comparison.model}, because every format failed."
        return nothing, f"The reasons stand in the table, the first of them is: {comparison.formats[0].error}."
    doubts = _capital("; ".join(_doubts(comparison, choice)))
    return _recommendation(comparison, choice), f"{doubts}."


def need_words(need: str, choice: Choice) -> str:
    """A need as part of a sentence: `for ...`."""
    at = f" at batch {choice.batch}" if choice.batch is not None else ""
    return {SMALLEST: "the smallest model", FASTEST: f"the fastest answers{at}", BEST: "the best quality"}[need]


def figure(comparison: Comparison, choice: Choice, pick: Pick) -> str:
    """The number that decided, and what it is beside the unquantized model's; empty without a pick."""
    found = named(comparison, pick.format)
    if found is None:
        return ""
    spell: dict[str, Callable[[], str]] = {
        SMALLEST: lambda: _size(comparison.baseline, found),
        FASTEST: lambda: _speed(comparison.baseline, found, choice.batch),
        BEST: lambda: _loss(found),
    }
    return spell[pick.need]()


def named(comparison: Comparison, name: str | None) -> FormatResult | None:
    return next((found for found in comparison.formats if found.name == name), None)


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _recommendation(comparison: Comparison, choice: Choice) -> str:
    winners = list(dict.fromkeys(pick.format for pick in choice.picks if pick.format is not None))
    base = comparison.baseline.name if comparison.baseline else None
    if not winners or (winners == [base] and not _quantized_left(comparison, choice)):
        measured = listed([found.name for found in comparison.formats if found.error is None])
        return f"Only {measured} of {comparison.model} was measured, so there is nothing to choose between."
    if winners == [base] and len([pick for pick in choice.picks if pick.format]) == 1:
        return f"No quantized format of {comparison.model} can be recommended: keep {base}."
    return f"For {_parts(comparison, choice, winners, base)}."


def _parts(comparison: Comparison, choice: Choice, winners: list[str], base: str | None) -> str:
    """`the smallest model take nf4 (11 MB, 36 % of bfloat16), for ...`: needs of one format stand together."""
    parts = []
    for winner in winners:
        picks = [pick for pick in choice.picks if pick.format == winner]
        needs = listed([need_words(pick.need, choice) for pick in picks])
        figures = "; ".join(figure(comparison, choice, pick) for pick in picks)
        verb = "keep the unquantized" if winner == base else "take"
        parts.append(f"{needs} {verb} {winner} ({figures})")
    return parts[0] if len(parts) == 1 else f"{', for '.join(parts[:-1])}, and for {parts[-1]}"


def _quantized_left(comparison: Comparison, choice: Choice) -> bool:
    return any(not found.baseline and found.name not in choice.failed for found in comparison.formats)


def _doubts(comparison: Comparison, choice: Choice) -> Iterator[str]:
    """What the reader must know to believe the recommendation, the weightiest first."""
    yield _limit_words(comparison, choice)
    yield from _missing(choice)
    yield from _unsure(comparison, choice)
    if choice.batch is not None and not comparison.machine.gpu:
        yield _cpu_words(comparison, choice)
    if choice.failed:
        whose = "the reason stands" if len(choice.failed) == 1 else "the reasons stand"
        yield f"{listed(choice.failed)} failed, {whose} in the table"


def _cpu_words(comparison: Comparison, choice: Choice) -> str:
    if choice.pick(FASTEST).format is not None or comparison.baseline is None:
        return "speeds are this CPU's and say nothing about a GPU"
    base = comparison.baseline.name
    return f"on this CPU no acceptable format is clearly faster than {base}, which says nothing about a GPU"


def _limit_words(comparison: Comparison, choice: Choice) -> str:
    if not _quantized_left(comparison, choice):
        return "no quantized format was measured"
    if not choice.quality_measured:
        return "quality was not measured, so only size and speed are judged"
    base = comparison.baseline.name if comparison.baseline else "the unquantized model"
    limit = f"at most {100 * (ACCEPTABLE_RATIO - 1):.0f} % more perplexity than {base} and {_KL_LIMIT}"
    if not any(name != base for name in choice.acceptable):
        return f"no quantized format is acceptable here, which means {limit}{_nearest(comparison, choice)}"
    if not choice.unacceptable:
        return f"acceptable means {limit}, which all of them keep"
    verb = "misses" if len(choice.unacceptable) == 1 else "miss"
    return f"acceptable means {limit}, which {listed(choice.unacceptable)} {verb}"


def _nearest(comparison: Comparison, choice: Choice) -> str:
    """The least lossy of the formats that miss the limit, with those that cannot be told apart from it."""
    missing = [found for name in choice.unacceptable if (found := named(comparison, name)) is not None]
    if not missing:
        return ""
    first = min(missing, key=lambda found: _divergence(comparison, found.name))
    closest = [first.name, *(found.name for found in missing if found is not first and same_quality(first, found))]
    return f", and {listed(closest)} {'is' if len(closest) == 1 else 'are'} the closest"


def _missing(choice: Choice) -> Iterator[str]:
    if choice.unjudged:
        yield f"the quality of {listed(choice.unjudged)} was not measured, so nothing is said about it"
    if choice.batch is None:
        yield "speed was not measured"
    if choice.quality_measured and choice.pick(SMALLEST).format is not None and choice.pick(BEST).format is None:
        saving = f"{100 * WORTHWHILE_SAVING:.0f} % of the bytes"
        yield f"no acceptable format is known to save {saving}, so none is named for quality"


def _unsure(comparison: Comparison, choice: Choice) -> Iterator[str]:
    same = {FASTEST: "speed", BEST: "quality", SMALLEST: "size"}
    for pick in choice.picks:
        if pick.ties and pick.format is not None:
            others = listed(pick.ties)
            yield f"in {same[pick.need]} {others} cannot be told apart from {pick.format} here"
    yield from _unpaired(comparison, choice)
    if choice.borderline:
        yield f"for {listed(choice.borderline)} only the interval reaches across a limit, so more windows may decide"


def _unpaired(comparison: Comparison, choice: Choice) -> Iterator[str]:
    """What stands on less than paired differences."""
    judged = [found for found in comparison.formats if found.quality and found.name not in choice.failed]
    if len([found for found in judged if not found.baseline]) < 2:
        return
    if choice.unpaired:
        whose = f"the stored {'result' if len(choice.unpaired) == 1 else 'results'} of {listed(choice.unpaired)}"
        verb = "has" if len(choice.unpaired) == 1 else "have"
        yield f"{whose} {verb} no numbers by window, so ties in quality are guessed from overlapping intervals"
    elif all(found.quality and found.quality.compared_windows == 1 for found in judged):
        yield "one window cannot say how sure the order in quality is"


def _divergence(comparison: Comparison, name: str) -> float:
    found = named(comparison, name)
    loss = divergence_of(found) if found else None
    return math.inf if loss is None else loss.value


def _size(base: FormatResult | None, found: FormatResult) -> str:
    assert found.size is not None
    text = human_bytes(found.size.bytes)
    if base is None or base.size is None:
        return text
    return f"{text}, {100 * found.size.bytes / base.size.bytes:.0f} % of {base.name}"


def _speed(base: FormatResult | None, found: FormatResult, batch: int | None) -> str:
    speed, other = speed_at(found, batch), speed_at(base, batch) if base else None
    assert speed is not None
    text = f"{numbers.rate(speed.tokens_per_second)} tokens/s"
    if base is None or other is None or found is base:
        return text
    return f"{text}, {numbers.times(speed.tokens_per_second / other.tokens_per_second)} {base.name}"


def _loss(found: FormatResult) -> str:
    kl, ratio = divergence_of(found), ratio_of(found)
    assert kl is not None
    text = f"KL divergence {numbers.divergence(kl.value)}"
    return text if ratio is None else f"{text}, perplexity {numbers.change(ratio.value)}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
