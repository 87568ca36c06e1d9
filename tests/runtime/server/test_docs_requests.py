"""docs/reference/serving.md about requests: its table has the fields that the schemas know, no more and no fewer."""

import re
from pathlib import Path

from quantkit.runtime.server.routes import chat, completions, health, models, tokenize
from quantkit.runtime.server.schemas.requests import ChatRequest, CompletionRequest, Strict

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "serving.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## What a request may say\n")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| (?P<fields>`.*?) \| (?P<where>\w+) \|", SECTION, re.MULTILINE)
KNOWN = {"chat": set(ChatRequest.model_fields), "completions": set(CompletionRequest.model_fields)}


def in_table(route: str) -> set[str]:
    return {field for fields, where in ROWS if where in (route, "both") for field in re.findall(r"`(\w+)`", fields)}


def test_the_table_has_every_known_field_and_no_other() -> None:
    assert {where for _, where in ROWS} == {"chat", "completions", "both"}
    assert {route: in_table(route) for route in KNOWN} == KNOWN


def test_what_is_called_unknown_is_unknown_and_ignored() -> None:
    ignored = set(re.findall(r"`(\w+)`", SECTION.partition("are not known, and so ignored:")[2].partition(". ")[0]))
    assert len(ignored) > 5
    assert not ignored & (KNOWN["chat"] | KNOWN["completions"])
    assert Strict.model_config["extra"] == "ignore"
    asked = {"messages": [{"role": "user", "content": "a"}]}
    assert ChatRequest.model_validate(asked | dict.fromkeys(ignored, "x")) == ChatRequest.model_validate(asked)


def test_routes_that_are_called_missing_are_missing() -> None:
    routes = {route.path for module in (chat, completions, models, tokenize, health) for route in module.router.routes}  # type: ignore[attr-defined]
    assert {"/v1/chat/completions", "/v1/completions"} <= routes
    assert not routes & {"/v1/responses", "/v1/embeddings"}
