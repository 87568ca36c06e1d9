"""The page in a real browser: on a desk and on a phone, in light and in dark, with nothing but the file."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="needs selenium")

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

pytestmark = pytest.mark.xdist_group("report")

Browser = webdriver.Chrome
DESKTOP, PHONE = 1280, 390
LEAST_LETTERS = 10  # pixels

# Texts of one drawing that cover each other, leave it, or are too small.
FAULTS = """
const found = [];
for (const drawing of document.querySelectorAll("svg.chart")) {
  const around = drawing.getBoundingClientRect();
  const scale = around.width / drawing.viewBox.baseVal.width;
  const texts = [...drawing.querySelectorAll("text")].map((node) => [node.textContent, node.getBoundingClientRect(),
    parseFloat(getComputedStyle(node).fontSize) * scale]);
  for (const [word, box, size] of texts) {
    if (size < arguments[0]) found.push(`small ${size}: ${word}`);
    if (box.left < around.left - 1 || box.right > around.right + 1 || box.top < around.top - 1
        || box.bottom > around.bottom + 1) found.push(`outside: ${word}`);
  }
  texts.forEach(([word, box], place) => texts.slice(place + 1).forEach(([other, next]) => {
    const across = Math.min(box.right, next.right) - Math.max(box.left, next.left);
    const down = Math.min(box.bottom, next.bottom) - Math.max(box.top, next.top);
    if (across > 1 && down > 3) found.push(`over each other: ${word}, ${other}`);
  }));
}
return found;
"""
# Blocks whose text is wider than they are, unless they scroll.
CLIPPED = """
return [...document.querySelectorAll("main h1, main h2, main h3, main p, main li, main dd, main th, main td, main pre")]
  .filter((node) => node.offsetWidth > 0 && node.scrollWidth > node.clientWidth + 1
    && !["auto", "scroll"].includes(getComputedStyle(node).overflowX))
  .map((node) => node.textContent.slice(0, 60));
"""


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs chromium and chromedriver")
    options = Options()
    options.binary_location = program
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    yield browser
    browser.quit()


@pytest.fixture
def opened(chrome: Browser, written: Callable[[str], Path]) -> Iterator[Callable[..., Browser]]:
    """Opens the report of a variant; at the end nothing may have been said in the console or asked of a network."""

    def open_report(name: str, width: int, scheme: str = "light") -> Browser:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        chrome.get((written(name) / "report.html").as_uri())
        return chrome

    chrome.get_log("browser")
    chrome.get_log("performance")
    yield open_report
    assert chrome.get_log("browser") == []
    assert [url for url in requests(chrome) if not url.endswith("/report.html") and url != "data:,"] == []


def requests(browser: Browser) -> list[str]:
    messages: list[Any] = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("name", ["full", "cpu", "shape", "failed", "hostile"])
def test_everything_can_be_read(name: str, width: int, opened: Callable[..., Browser]) -> None:
    browser = opened(name, width)
    inside = browser.execute_script("return document.documentElement.clientWidth")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= inside <= width
    assert browser.execute_script(FAULTS, LEAST_LETTERS) == []
    assert browser.execute_script(CLIPPED) == []


def test_the_table_fits_on_a_desk(opened: Callable[..., Browser]) -> None:
    browser = opened("full", DESKTOP)
    table = browser.find_element(By.CSS_SELECTOR, ".table")
    assert browser.execute_script("return arguments[0].scrollWidth - arguments[0].clientWidth", table) == 0


def test_it_follows_the_system_into_the_dark(opened: Callable[..., Browser]) -> None:
    grounds, inks = [], []
    for scheme in ("light", "dark"):
        browser = opened("full", DESKTOP, scheme)
        grounds.append(browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color"))
        inks.append(browser.find_element(By.CSS_SELECTOR, "svg.chart text").value_of_css_property("fill"))
    assert grounds[0] != grounds[1]
    assert inks[0] != inks[1]


def test_the_verdict_is_on_the_first_screen(opened: Callable[..., Browser]) -> None:
    for width in (DESKTOP, PHONE):
        browser = opened("full", width)
        verdict = browser.find_element(By.CSS_SELECTOR, ".verdict .first")
        assert browser.execute_script("return arguments[0].getBoundingClientRect().bottom", verdict) < 900


def test_columns_sort(opened: Callable[..., Browser]) -> None:
    browser = opened("full", DESKTOP)

    def names() -> list[str]:
        rows = browser.find_elements(By.CSS_SELECTOR, "table.sortable tbody tr:not(.reason) th")
        return [row.text.split("\n")[0] for row in rows]

    before = names()
    size = browser.find_element(By.CSS_SELECTOR, "table.sortable th[data-column='1'] button")
    size.click()
    assert names()[0] == "rtn-w2g64"
    size.click()
    assert names()[0] == "bfloat16"
    browser.find_element(By.CSS_SELECTOR, "table.sortable th[data-column='7'] button").click()
    assert names()[-1] == "fp8", "a format without a number stands last"
    reason = browser.find_elements(By.CSS_SELECTOR, "table.sortable tbody tr")[-1]
    assert reason.text.startswith("Failed")
    assert sorted(names()) == sorted(before)


def test_hostile_text_runs_nothing(opened: Callable[..., Browser]) -> None:
    browser = opened("hostile", DESKTOP)
    assert browser.execute_script("return document.scripts.length") == 1
    assert "<script>harm()</script>" in browser.find_element(By.TAG_NAME, "h1").text
