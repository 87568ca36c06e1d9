"""The files of a report: whole, harmless, repeatable, and with every number in them."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from long_cases import others_long
from quantkit.errors import StorageError
from quantkit.eval.compare.results import Comparison, FormatResult
from quantkit.eval.quality.bootstrap import Interval
from quantkit.eval.report.write import write_report

pytestmark = pytest.mark.xdist_group("report")

VARIANTS = [
    *("full", "cpu-few", "single", "failed", "empty", "hostile-few"),
    *(pytest.param(name, marks=pytest.mark.long) for name in ("cpu", "shape", "no-speeds", "hostile")),
]
EMPTY_TAGS = {"meta", "link", "br"}
LOADING = {"src", "href", "srcset", "action", "data", "poster", "background"}
Written = Callable[[str], Path]
Variants = Callable[[str], Comparison]


class Page(HTMLParser):
    """Checks that tags are balanced; collects text, attributes and ids."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.count: dict[str, int] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in EMPTY_TAGS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.mark.parametrize("name", VARIANTS)
def test_page_is_whole_and_loads_nothing(name: str, written: Written) -> None:
    source = (written(name) / "report.html").read_text(encoding="utf-8")
    page = Page(source)
    assert page.count["html"] == page.count["main"] == page.count["h1"] == page.count["script"] == 1
    references = {(tag, value) for tag, key, value in page.attributes if key in LOADING}
    assert {value for tag, value in references if tag != "use"} == {"data:,"}
    assert all(value.startswith("#") for tag, value in references if tag == "use")
    assert not re.search(r"@import|url\((?!#)", source)
    assert "http://" not in source
    assert "https://" not in source
    assert not [key for _, key, _ in page.attributes if key.startswith("on")]
    ids = [value for _, key, value in page.attributes if key == "id"]
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r"url\(#([^)]+)\)", source)) | {value[1:] for tag, value in references if tag == "use"}
    assert wanted <= set(ids)


@pytest.mark.parametrize("name", VARIANTS)
def test_numbers_come_back(name: str, written: Written, variants: Variants) -> None:
    stored = json.loads((written(name) / "report.json").read_text(encoding="utf-8"))
    assert Comparison.from_dict(stored) == variants(name)
    assert len(stored["verdict"]["sentences"]) == 2
    assert [pick["need"] for pick in stored["verdict"]["picks"]] == ["best quality", "smallest", "fastest"]


def test_hostile_names_stay_text(written: Written, variants: Variants) -> None:
    folder, comparison = written("hostile-few"), variants("hostile-few")
    source = (folder / "report.html").read_text(encoding="utf-8")
    assert "<script>harm" not in source
    assert "\x00" not in source
    assert "\x1b" not in source
    shown = " ".join(comparison.model.replace("\x00", "\ufffd").replace("\x1b", "\ufffd").split())
    assert shown in Page(source).text
    text = (folder / "report.md").read_text(encoding="utf-8")
    outside = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.S | re.M)
    assert not re.search(r"(?<!\\)<", outside)
    tables = [block.splitlines() for block in outside.split("\n\n") if block.startswith("| ")]
    assert tables
    for lines in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


def figures(found: FormatResult) -> list[str]:
    """What a report must say about a format, spelled here once more."""
    said = [found.name]
    if found.size:
        said += [f"{found.size.bytes / 1e6:.2f} MB", f"{found.size.bits_per_weight:.2f}"]
    if found.making:
        said += [f"{found.making.seconds:.1f} s", "1.48 GB"]
    for result in (found.quality, found.reference_quality):
        if result:
            said += four_digits(result.perplexity)
    if found.quality:
        assert found.quality.top1_agreement is not None
        assert found.quality.perplexity_ratio is not None
        said += four_digits(found.quality.bits_per_byte)
        said.append(f"{100 * found.quality.top1_agreement.value:.2f} %")
        percent = 100 * (found.quality.perplexity_ratio.value - 1)
        said.append(f"{percent:+.2f} %" if percent < 100 else f"{percent:+,.0f} %")
    if found.running:
        said += [f"{found.running.kv_tokens:,}", "7.9 s", f"{found.running.weights_bytes / 1e6:.2f} MB"]
        for speed in found.running.speeds:
            said += [f"{speed.tokens_per_second:,.0f}", f"{speed.percent_of_limit:.1f} %"]
            said += [
                f"{speed.first_token_ms:.1f} ms" if speed.first_token_ms < 100 else f"{speed.first_token_ms:.0f} ms"
            ]
    return said + ([found.error] if found.error else [])


def four_digits(value: Interval) -> list[str]:
    return [f"{value.value:,.4f}", f"[{value.low:,.4f}, {value.high:,.4f}]"]


def test_every_figure_is_in_the_page_and_in_the_text(written: Written, full: Comparison) -> None:
    page = Page((written("full") / "report.html").read_text(encoding="utf-8")).text
    text = re.sub(r"\\(.)", r"\1", (written("full") / "report.md").read_text(encoding="utf-8"))
    for found in full.formats:
        for said in [*figures(found), *found.commands]:
            assert said in page, (found.name, said)
            assert said in text, (found.name, said)
    for said in ("0.00123", "[0.00116, 0.00130]", "0.0329", "3.91", full.command, "2026-11-16", "NVIDIA H200", "17",
                 "torch 2.11.0", "150.75 GB", "134,515,008", "heldout.txt: windows 64", "calibration.txt",
                 "The GPU was used by nobody else.", "decoded from the GGUF file base.gguf (7 x Q8_0)",
                 "nf4: unknown, no record of quantkit's in the folder",
                 "given text mine.jsonl, 64 samples of 512 tokens, 32,768 in all"):  # fmt: skip
        assert said in page
        assert said in text


def test_layer_errors_are_in_the_page(written: Written, full: Comparison) -> None:
    page = Page((written("full") / "report.html").read_text(encoding="utf-8")).text
    for found in full.formats:
        for layer, error in enumerate(found.damage.blocks if found.damage else ()):
            assert re.search(rf"{found.name}, layer {layer}: ([\d.,]+) %", page)
            shown = re.search(rf"{found.name}, layer {layer}: ([\d.,]+) %", page)
            assert shown is not None
            assert float(shown[1].replace(",", "")) == pytest.approx(100 * error, rel=5e-3)
    assert "down_proj, layer 0: not quantized" in page


def test_samples_are_marked(written: Written) -> None:
    source = (written("full") / "report.html").read_text(encoding="utf-8")
    assert re.search(
        r"<mark title=\"unquantized: in the order in which they were added.\">sorted by their length.</mark>", source
    )
    for said in ("the same text", "differs after 11 words", "differs from the first word", "the unquantized model"):
        assert said in source


PICTURES = {"full": 5, "shape-few": 2, "failed": 0, "empty": 0, "no-speeds-few": 3}


@pytest.mark.parametrize(("name", "count"), others_long(PICTURES.items(), [("full", 5), ("failed", 0), ("empty", 0)]))
def test_pictures_of_the_text_are_there(name: str, count: int, written: Written) -> None:
    folder = written(name)
    linked = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (folder / "report.md").read_text(encoding="utf-8"))
    assert len(linked) == count
    assert set(linked) == {file.name for file in folder.glob("*.png")}
    for file in linked:
        assert (folder / file).read_bytes().startswith(b"\x89PNG")


def test_same_input_gives_the_same_bytes(written: Written, variants: Variants, tmp_path: Path) -> None:
    again = write_report(variants("cpu-few"), tmp_path / "again").parent
    names = {file.name for file in again.iterdir()}
    assert names == {file.name for file in written("cpu-few").iterdir()}
    for name in names:
        assert (again / name).read_bytes() == (written("cpu-few") / name).read_bytes(), name


def test_a_folder_that_cannot_be_written(tmp_path: Path, variants: Variants) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(StorageError, match="cannot write"):
        write_report(variants("empty"), tmp_path / "taken")
