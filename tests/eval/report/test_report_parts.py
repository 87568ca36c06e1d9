"""Small parts of the report: numbers, marked differences, escaping, places of labels, scales."""

import random
from dataclasses import replace

import pytest

from quantkit.eval.compare.results import Comparison
from quantkit.eval.quality.bootstrap import Interval
from quantkit.eval.report import numbers
from quantkit.eval.report.differences import differences
from quantkit.eval.report.labels import Box, Label, place_labels, spread_out
from quantkit.eval.report.markdown import fenced, plain
from quantkit.eval.report.markup import Markup, join, readable, tag
from quantkit.eval.report.paired_table import paired_table
from quantkit.eval.report.scales import LossScale, SizeScale
from quantkit.eval.report.tables import runtime_agrees


@pytest.mark.parametrize(
    ("spelled", "expected"),
    [
        (numbers.significant(0.000423), "0.000423"),
        (numbers.significant(15432.4), "15,432"),
        (numbers.significant(0), "0"),
        (numbers.divergence(3e-9), "0"),
        (numbers.divergence(0.0329), "0.0329"),
        (numbers.change(1.0213), "+2.13 %"),
        (numbers.change(0.9987), "−0.13 %"),  # noqa: RUF001
        (numbers.change(71.8), "+7,080 %"),
        (numbers.rate(38.96), "39.0"),
        (numbers.rate(38011.2), "38,011"),
        (numbers.milliseconds(9.374), "9.37 ms"),
        (numbers.milliseconds(1766.87), "1,767 ms"),
        (numbers.seconds(61.3), "61.3 s"),
        (numbers.seconds(252), "4 min 12 s"),
        (numbers.seconds(7500), "2 h 5 min"),
        (numbers.bounds(Interval(1.02, 1.01, 1.03), numbers.change), "[+1.00, +3.00]"),
        (numbers.bounds(Interval(1.02), numbers.change), ""),
    ],
)
def test_numbers(spelled: str, expected: str) -> None:
    assert spelled == expected


def test_differences_mark_what_is_new_and_keep_the_text() -> None:
    text = "the  cat sat\non a mat"
    found = differences("the  cat slept on a soft mat", text)
    assert "".join(piece.text for piece in found.pieces) == text
    assert [piece.text.strip() for piece in found.pieces if piece.changed] == ["sat", ""]
    assert [piece.left_out for piece in found.pieces if piece.changed] == ["slept", "soft"]
    assert (found.same_words, found.equal, found.summary) == (2, False, "differs after 2 words")


@pytest.mark.parametrize(
    ("original", "text", "summary"),
    [
        ("a b", "a b", "the same text"),
        ("a b", "a  b\n", "the same text"),
        ("", "", "the same text"),
        ("a b", "c b", "differs from the first word"),
        ("a b", "a", "differs after 1 word"),
        ("", "a", "differs from the first word"),
    ],
)
def test_where_texts_part_ways(original: str, text: str, summary: str) -> None:
    found = differences(original, text)
    assert found.summary == summary
    assert "".join(piece.text for piece in found.pieces) == text


def test_every_string_is_escaped() -> None:
    made = tag("p", "<b>", Markup("<i>"), None, title="\"'&", data_column=3, hidden=None)
    assert made == '<p title="&quot;&#x27;&amp;" data-column="3">&lt;b&gt;<i></p>'
    assert join("a&b", tag("br")) == "a&amp;b<br>"
    assert readable("a\x00\x1b\ud800\ufffe\n\t🦙") == "a\ufffd\ufffd\ufffd\ufffd\n\t🦙"


def test_markdown_is_plain() -> None:
    assert plain("a|b\nc_d `e` <f> _g_ [h](i) *j*") == r"a\|b c_d \`e\` \<f\> \_g\_ \[h\](i) \*j\*"
    assert fenced("a ```` b").startswith("`````\n")


def test_labels_never_overlap_where_there_is_room() -> None:
    generator = random.Random(3)
    area = Box(0, 0, 330, 230)
    for count in (1, 5, 12):
        for spread in (1.0, 20.0, 150.0):
            points = [(165 + generator.uniform(-1, 1) * spread, 115 + generator.uniform(-0.6, 0.6) * spread)
                      for _ in range(count)]  # fmt: skip
            labels = [Label(x, y, generator.uniform(20, 90), 12) for x, y in points]
            marks = [Box.around(x, y, 10, 10) for x, y in points]
            boxes = place_labels(labels, area, marks, 8)
            for place, box in enumerate(boxes):
                assert area.holds(box)
                assert all(box.overlap(other) == 0 for other in [*boxes[place + 1 :], *marks])


def test_spread_out_keeps_order_and_distance() -> None:
    found = spread_out([5.0, 5.0, 1.0, 9.9], 2.0, 0.0, 10.0)
    assert found[2] < found[0] < found[1] < found[3] <= 10.0
    assert all(high - low >= 2.0 - 1e-9 for low, high in zip(sorted(found), sorted(found)[1:], strict=False))
    assert spread_out([1.0], 2.0, 0.0, 10.0) == [1.0]
    assert spread_out([0.0, 10.0], 2.0, 0.0, 10.0) == [0.0, 10.0]


def test_less_loss_stands_higher_and_none_at_the_top() -> None:
    scale = LossScale.over([Interval(0.0), Interval(0.001, 0.0009, 0.0011), Interval(3.9, 3.7, 4.1)])
    heights = [scale.height(nats) for nats in (4.1, 0.1, 0.0009, 1e-9)]
    assert heights == sorted(heights)
    assert scale.height(0.0009) < scale.break_at < scale.height(0.0) == scale.nothing
    assert [text for _, text in scale.ticks()][:3] == ["0", "0.001", "0.01"]
    assert scale.spread(Interval(0.0, 0.0, 0.0)) is None
    narrow = LossScale.over([Interval(0.03), Interval(0.05)])
    assert len(narrow.ticks()) >= 3
    assert SizeScale(1000).height(10) > SizeScale(1000).height(20)


def test_the_runtime_agrees_only_where_the_whole_interval_is_near(full: Comparison) -> None:
    """A kernel that is 2 % off in every window is caught, though both perplexities have intervals of 6 %."""
    found = full.formats[1]
    assert found.reference_quality is not None
    assert found.quality is not None
    assert runtime_agrees(found)
    losses = found.reference_quality.window_losses
    assert losses is not None
    wrong = replace(found.quality, window_losses=tuple(loss + 0.02 for loss in losses))
    assert wrong.perplexity.overlaps(found.reference_quality.perplexity)
    assert not runtime_agrees(replace(found, quality=wrong))
    assert runtime_agrees(replace(found, quality=replace(wrong, window_losses=None)))  # stored without: they overlap


def test_every_format_stands_beside_the_least_lossy(full: Comparison) -> None:
    table = paired_table(full)
    assert table.title == "Beside llm-int8, window by window"
    rows = {row.name: [f"{cell.text} {cell.detail}" for cell in row.cells] for row in table.rows}
    assert set(rows) == {one.name for one in full.formats} - {"llm-int8", "bfloat16"}
    assert rows["fp8"][0].startswith("+0.00364 [+0.00")
    assert rows["fp8"][2].strip() == "yes"
    alone = replace(full, formats=full.formats[:1])
    assert not paired_table(alone)
