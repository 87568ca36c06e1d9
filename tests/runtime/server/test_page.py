"""The page in a real browser, against a real server: what a visitor sees and does."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("selenium", reason="needs selenium")

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from quantkit.runtime.server.config_file import ApiKey

PATIENCE = 60  # seconds; a busy machine is slow
PHONE = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
LONG = "Tell me about lists, in many words."  # what the bundled model says to it greedily does not end by itself

Browser = webdriver.Chrome
WATCHED = {"model": "demo"}  # the larger model: its answers take long enough to be watched


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs chromium and chromedriver")
    options = Options()
    options.binary_location = program
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1440,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    yield browser
    browser.quit()


@pytest.fixture
def page(chrome: Browser, start_server: Callable[..., Any]) -> Iterator[Browser]:
    """The page as a new visitor gets it, who prefers light; nothing may have gone wrong in it at the end."""
    prefer(chrome, "light")
    chrome.get(start_server(**WATCHED).base_url)
    chrome.execute_script("localStorage.clear(); sessionStorage.clear()")
    chrome.refresh()
    eventually(chrome, lambda: one(chrome, "#state-dot").get_attribute("class") == "dot good")
    chrome.get_log("browser")
    yield chrome
    assert errors(chrome) == []


def errors(browser: Browser) -> list[str]:
    """Of scripts and of the content security policy; answers of the server with an error status are no such thing."""
    found = browser.get_log("browser")
    return [entry["message"] for entry in found if entry["level"] == "SEVERE" and entry["source"] != "network"]


def prefer(browser: Browser, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def eventually(browser: Browser, condition: Callable[[], object]) -> None:
    WebDriverWait(browser, PATIENCE, poll_frequency=0.02).until(lambda _: condition())


def one(browser: Browser, selector: str) -> WebElement:
    return browser.find_element(By.CSS_SELECTOR, selector)


def set_field(browser: Browser, selector: str, value: str) -> None:
    field = one(browser, selector)
    browser.execute_script("arguments[0].closest('details')?.setAttribute('open', '')", field)
    field.clear()
    field.send_keys(value)


def send(browser: Browser, text: str) -> None:
    one(browser, "#message").send_keys(text, Keys.ENTER)


def ask_long(browser: Browser, tokens: int = 400) -> None:
    set_field(browser, "#temperature", "0")
    set_field(browser, "#max_tokens", str(tokens))
    send(browser, LONG)


def answer(browser: Browser) -> str:
    found = browser.find_elements(By.CSS_SELECTOR, ".turn:last-child .answer-text")
    return str(found[0].get_property("textContent")) if found else ""


def facts(browser: Browser) -> str:
    """What stands under the last answer once it has ended."""
    return one(browser, ".turn:last-child .facts").text


def test_an_answer_streams_and_says_how_fast_it_was(page: Browser) -> None:
    ask_long(page, tokens=96)
    lengths: list[int] = []
    eventually(page, lambda: lengths.append(len(answer(page))) or facts(page))
    grown = sorted(set(lengths))
    assert len(grown) > 3, f"the text came at once: lengths {grown}"
    assert "96 tokens ·" in facts(page)
    assert "tokens/s" in facts(page)
    assert "first token" in facts(page)
    assert one(page, ".question").text == LONG
    assert one(page, ".answer").get_attribute("aria-busy") == "false"


def test_live_numbers_follow_an_answer(page: Browser) -> None:
    ask_long(page)
    eventually(page, lambda: one(page, "#running").text == "1")
    eventually(page, lambda: float(one(page, "#tokens-per-second").text.replace(",", "")) > 0)
    eventually(page, lambda: one(page, "#ttft").text.endswith("s"))
    eventually(page, lambda: "L" in (one(page, "#spark .line").get_attribute("d") or ""))
    assert one(page, "#kv-percent").text.endswith("tokens")
    assert one(page, "#restarts").text == "0"
    served = one(page, "#model-rows").text
    for name in ("Format", "Device", "Weights", "Context", "Cache"):
        assert name in served


def test_guesses_are_shown_where_there_are_any(page: Browser, start_server: Callable[..., Any]) -> None:
    names = ("#guesses-right", "#tokens-per-step")
    eventually(page, lambda: one(page, "#running").text == "0")
    assert not any(one(page, name).is_displayed() for name in names)
    page.get(start_server(**WATCHED, speculative="draft=demo-draft,k=3,adaptive=off").base_url)
    eventually(page, lambda: all(one(page, name).is_displayed() for name in names))
    ask_long(page, tokens=48)
    eventually(page, lambda: one(page, "#guesses-right").text.endswith(" %"))
    assert 1 <= float(one(page, "#tokens-per-step").text) <= 4


def test_of_several_models_one_is_chosen(page: Browser, start_server: Callable[..., Any]) -> None:
    assert not one(page, "#model").is_displayed()
    server = start_server(**WATCHED, also={"model": "demo-draft", "served_model_name": ["small"]})
    page.get(server.base_url)
    eventually(page, lambda: one(page, "#model").is_displayed())
    one(page, "#model").send_keys("small")
    eventually(page, lambda: one(page, "#state").text.startswith("small"))
    set_field(page, "#max_tokens", "3")
    send(page, "Hello")
    eventually(page, lambda: facts(page))
    asked = [model.metrics.snapshot()["requests_total"] for model in server.app.state.models.each]
    assert asked == [0, 1]
    assert "small" in one(page, "#model-rows").text


def test_stop_keeps_what_was_written_and_retry_asks_again(page: Browser) -> None:
    ask_long(page)
    eventually(page, lambda: len(answer(page)) > 10)
    one(page, "#stop-button").click()
    eventually(page, lambda: "stopped" in facts(page))
    stopped = answer(page)
    assert stopped
    eventually(page, lambda: one(page, "#running").text == "0")  # the server has let go of it too
    assert answer(page) == stopped
    set_field(page, "#max_tokens", "5")
    one(page, ".turn:last-child .retry").click()
    eventually(page, lambda: facts(page) != "" and "stopped" not in facts(page))
    assert len(page.find_elements(By.CSS_SELECTOR, ".turn")) == 1
    one(page, "#clear").click()
    assert page.find_elements(By.CSS_SELECTOR, ".turn") == []
    assert one(page, "#empty").is_displayed()


def test_shift_enter_starts_a_line_and_escape_stops(page: Browser) -> None:
    set_field(page, "#max_tokens", "1")
    message = one(page, "#message")
    message.send_keys("one", Keys.SHIFT + Keys.ENTER)
    message.send_keys("two")
    assert message.get_property("value") == "one\ntwo"
    message.send_keys(Keys.ENTER)
    eventually(page, lambda: facts(page))
    assert one(page, ".question").text == "one\ntwo"
    one(page, "#clear").click()
    ask_long(page)
    eventually(page, lambda: answer(page))
    message.send_keys(Keys.ESCAPE)
    eventually(page, lambda: "stopped" in facts(page))


def test_what_the_server_refuses_is_said_in_words(page: Browser) -> None:
    set_field(page, "#top_p", "7")
    send(page, "Hello")
    eventually(page, lambda: page.find_elements(By.CSS_SELECTOR, ".error"))
    assert "top_p" in one(page, ".error").text
    set_field(page, "#top_p", "1")
    set_field(page, "#max_tokens", "3")
    one(page, ".retry").click()
    eventually(page, lambda: facts(page))
    assert page.find_elements(By.CSS_SELECTOR, ".error") == []


def test_a_wrong_key_is_said_and_the_right_one_works(page: Browser, start_server: Callable[..., Any]) -> None:
    page.get(start_server(**WATCHED, api_keys=(ApiKey.of("visitor", "right-key"),)).base_url)
    set_field(page, "#key", "wrong-key")
    set_field(page, "#max_tokens", "3")
    send(page, "Hello")
    eventually(page, lambda: page.find_elements(By.CSS_SELECTOR, ".error"))
    assert "API key" in one(page, ".error").text
    set_field(page, "#key", "right-key")
    one(page, ".retry").click()
    eventually(page, lambda: facts(page))
    assert page.find_elements(By.CSS_SELECTOR, ".error") == []


def test_theme_follows_the_system_until_it_is_chosen(page: Browser) -> None:
    def theme() -> Any:
        return page.execute_script("return document.documentElement.dataset.theme")

    def back() -> str:
        return one(page, "body").value_of_css_property("background-color")

    assert theme() == "light"
    light = back()
    prefer(page, "dark")
    eventually(page, lambda: theme() == "dark")
    assert back() != light
    one(page, "#theme").click()
    assert (theme(), back()) == ("light", light)
    page.refresh()
    assert (theme(), back()) == ("light", light)
    assert one(page, "#theme").get_attribute("aria-pressed") == "false"


def test_settings_are_remembered_but_the_key_only_in_this_tab(page: Browser) -> None:
    set_field(page, "#temperature", "0.25")
    set_field(page, "#system", "Answer in rhymes.")
    set_field(page, "#key", "not-a-real-key")
    page.refresh()
    assert one(page, "#temperature").get_property("value") == "0.25"
    assert one(page, "#system").get_property("value") == "Answer in rhymes."
    assert one(page, "#key").get_property("value") == "not-a-real-key"
    assert "not-a-real-key" not in page.execute_script("return JSON.stringify(localStorage)")
    one(page, "#reset").click()
    assert one(page, "#temperature").get_property("value") == "0.7"


def test_a_phone_shows_one_part_at_a_time_without_scrolling_sideways(page: Browser) -> None:
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    try:
        for part in ("status", "settings", "chat"):
            one(page, f"[data-show={part}]").click()
            shown = [each for each in ("chat", "settings", "status") if one(page, f".{each}").is_displayed()]
            assert shown == [part]
            assert page.execute_script("return document.documentElement.scrollWidth") == PHONE["width"]
            small = page.execute_script(
                "return [...document.querySelectorAll('button, input, select, textarea, summary')].filter("
                "e => e.offsetHeight > 0 && e.offsetHeight < 40).map(e => e.id || e.textContent)"
            )
            assert small == []
        set_field(page, "#message", "A" * 200)
        assert page.execute_script("return document.documentElement.scrollWidth") == PHONE["width"]
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_every_field_and_button_has_a_name(page: Browser) -> None:
    for element in page.find_elements(By.CSS_SELECTOR, "input, select, textarea, button, [role=meter], [role=log]"):
        if element.is_displayed():
            assert element.accessible_name, element.get_attribute("outerHTML")


MARKUP = """A **bold** word, *one* and `code <b>`, 2*3*4.

- first
- second <img src=x onerror=window.harmed=1>

3. third

```js
window.harmed = 1; // **not bold**
```
<script>window.harmed = 1</script>"""


def test_model_text_never_becomes_markup(page: Browser) -> None:
    shown = page.execute_async_script(
        """const [text, done] = arguments;
        import("/page/markdown.js").then(({ MarkdownView }) => {
          const target = document.createElement("div");
          document.body.append(target);
          const view = new MarkdownView(target, () => document.createElement("button"));
          for (let end = 0; end <= text.length; end++) view.draw(text.slice(0, end));
          const tags = [...target.querySelectorAll("*")].map((node) => node.localName);
          const whole = document.createElement("div");
          new MarkdownView(whole, () => document.createElement("button")).draw(text);
          done({ tags, same: whole.innerHTML === target.innerHTML, start: target.querySelector("ol").start,
                 code: target.querySelector("pre").textContent, harmed: window.harmed ?? null });
          target.remove();
        });""",
        MARKUP,
    )
    assert shown["harmed"] is None
    assert set(shown["tags"]) == {"p", "strong", "em", "code", "ul", "ol", "li", "div", "span", "button", "pre"}
    assert shown["same"], "text that grew is drawn otherwise than the whole"
    assert shown["start"] == 3
    assert shown["code"] == "window.harmed = 1; // **not bold**"
