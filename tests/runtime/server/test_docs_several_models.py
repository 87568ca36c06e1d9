"""docs/reference/serving.md about several models: a real server prints the plan that the page shows."""

import re
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from pages import transcripts

pytestmark = pytest.mark.xdist_group("engine-process")


def without_this_machine(text: str) -> list[str]:
    """Its memory, the shares of it, and the port stand for any; column widths, which follow from them, do not count."""
    text = re.sub(r"[\d.]+ %|(?<=may be used: )[\d.]+ [KMGT]?B|(?<=127\.0\.0\.1:)\d+", "#", text)
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.long  # a server with several models comes up in every run, in test_several_models.py
def test_the_transcript_is_what_the_server_prints(serving: Callable[..., AbstractContextManager[Any]]) -> None:
    """On any free port instead of the page's."""
    (shown,) = [found for found in transcripts() if found.page == "docs/reference/serving.md"]
    name, *arguments = shown.arguments
    assert name == "serve"
    arguments[arguments.index("--port") + 1] = "0"
    with serving(*arguments) as served:
        served.wait_for("quantkit serves", served.out)
        served.process.send_signal(signal.SIGTERM)
        assert served.end() == 0
    assert without_this_machine("".join(served.out)) == without_this_machine(shown.shown)


def test_sizes_and_counts_are_compared() -> None:
    line = "large  cpu  60.84 MB  32,768  1.3 %"
    assert without_this_machine(line) == without_this_machine(line.replace("1.3 %", "20.1 %"))
    assert without_this_machine(line) != without_this_machine(line.replace("32,768", "32,752"))
    assert without_this_machine(line) != without_this_machine(line.replace("60.84", "60.85"))
