"""The lower part of the page: how it was measured, and how to measure it again."""

from __future__ import annotations

import json

from quantkit.eval.compare.results import Comparison
from quantkit.eval.quality.bootstrap import CONFIDENCE, RESAMPLES
from quantkit.eval.report.markup import Markup, tag
from quantkit.eval.report.paired_table import paired_table
from quantkit.eval.report.rules import rules
from quantkit.eval.report.sections import html_table
from quantkit.eval.report.tables import Table, check_table, memory_table, quality_table, speed_table
from quantkit.wording import human_bytes

BY_HAND = "Each format by hand, in the folder where that command was run"


def detail_tables(comparison: Comparison) -> list[Table]:
    tables = (quality_table, paired_table, check_table, speed_table, memory_table)
    made = (table(comparison) for table in tables)
    return [table for table in made if table]


def quality_words(comparison: Comparison) -> list[str]:
    """How quality was measured; the formats share it, so each sentence stands once."""
    results = [found.quality for found in comparison.formats if found.quality]
    results += [found.reference_quality for found in comparison.formats if found.reference_quality]
    if not results:
        return ["Quality was not measured."]
    seeds = ", ".join(str(seed) for seed in sorted({result.seed for result in results}))
    compared = ", ".join(f"{count:,}" for count in sorted({result.compared_windows for result in results}))
    interval = (
        f"Intervals hold {100 * CONFIDENCE:.0f} %: a bootstrap over windows, {RESAMPLES:,} resamples, seed {seeds}. "
        "The change against the unquantized model is taken window by window, which makes its interval narrower than "
        f"those of the two perplexities. Windows compared with the unquantized model: {compared}."
    )
    said = [f"{protocol}." for protocol in dict.fromkeys(result.protocol for result in results)]
    said += [f"Computed with {how}." for how in dict.fromkeys(result.arithmetic for result in results)]
    return [*said, interval]


def speed_words(comparison: Comparison) -> list[str]:
    loads = dict.fromkeys(
        (speed.batch, speed.prompt, speed.new)
        for found in comparison.formats if found.running for speed in found.running.speeds
    )  # fmt: skip
    if not loads:
        return ["Speed was not measured."]
    spelled = "; ".join(f"{batch:,} × ({prompt:,} + {new:,})" for batch, prompt, new in loads)  # noqa: RUF001
    said = [
        "All requests of a load start at the same moment with prompts of random tokens, and each answers with the full "
        "length. Tokens per second count from that moment to the last token, prompts included; each load was timed "
        "once, after a warm-up.",
        f"Loads, as requests × (prompt + new tokens): {spelled}.",  # noqa: RUF001
    ]
    if not comparison.machine.gpu:
        said.append("These are speeds of a CPU. They say nothing about a GPU, where other formats win.")
    return said


def measured_section(comparison: Comparison) -> Markup:
    def listed(words: list[str]) -> Markup:
        return tag("ul", *(tag("li", word) for word in words))

    tables = [tag("details", tag("summary", table.title), html_table(table)) for table in detail_tables(comparison)]
    return tag(
        "section",
        tag("h2", "How it was measured"),
        tag("h3", "Quality"),
        listed(quality_words(comparison)),
        tag("h3", "Speed"),
        listed(speed_words(comparison)),
        tag("h3", "The rules of the verdict"),
        listed(list(rules())),
        tag("h3", "Every number") if tables else None,
        *tables,
    )


def setup(comparison: Comparison) -> list[tuple[str, str]]:
    machine = comparison.machine
    memory = f"{'GPU' if machine.gpu else 'CPU'}, {human_bytes(machine.memory_bytes)} of memory, {machine.cores} cores"
    versions = ", ".join(f"{name} {version}" for name, version in machine.software.items())
    return [
        ("model", f"{comparison.model} ({comparison.family}, {comparison.parameters:,} parameters)"),
        ("machine", f"{machine.device} ({memory})"),
        ("software", versions),
        ("seed", str(comparison.seed)),
        ("date", comparison.date),
        *(("calibration", text) for text in calibrations(comparison)),
    ]


def calibrations(comparison: Comparison) -> list[str]:
    """The data that methods saw, with the formats that share it."""
    found: dict[str, list[str]] = {}
    for one in comparison.formats:
        if one.making and one.making.calibration:
            spelled = json.dumps(one.making.calibration, ensure_ascii=False, sort_keys=True)
            found.setdefault(spelled, []).append(one.name)
    return [f"{', '.join(names)}: {spelled}" for spelled, names in found.items()]


def repeat_section(comparison: Comparison) -> Markup:
    pairs = [item for name, text in setup(comparison) for item in (tag("dt", name), tag("dd", text))]
    by_hand = [
        tag("div", tag("h3", found.name), tag("pre", tag("code", "\n".join(found.commands))))
        for found in comparison.formats
        if found.commands
    ]
    return tag(
        "section",
        tag("h2", "Do it again"),
        tag("p", "This command makes this report; what it has measured already, it does not measure again."),
        tag("pre", tag("code", comparison.command)),
        tag("dl", *pairs, class_="setup"),
        tag("details", tag("summary", BY_HAND), *by_hand) if by_hand else None,
        tag("p", "All numbers of this page are in report.json, the page as text is report.md.", class_="quiet"),
    )
