"""The files of the page and its numbers, as any client gets them."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest


def fetch(url: str) -> tuple[int, Any, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("", "text/html"),
        ("page/index.html", "text/html"),
        ("page/app.js", "text/javascript"),
        ("page/style.css", "text/css"),
        ("page/icon.svg", "image/svg+xml"),
    ],
)
def test_files_come_with_their_type_and_a_strict_policy(live_server: Any, path: str, content_type: str) -> None:
    status, headers, body = fetch(f"{live_server.base_url}/{path}")
    assert status == 200
    assert body
    assert headers["Content-Type"].split(";")[0] == content_type
    assert headers["Cache-Control"] == "no-cache"
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy


@pytest.mark.parametrize("path", ["page/nothing.js", "page/..%2fapp.py", "page/%2e%2e/settings.py", "page/"])
def test_nothing_but_the_files_of_the_page_is_served(live_server: Any, path: str) -> None:
    status, _, body = fetch(f"{live_server.base_url}/{path}")
    assert status == 404
    assert b"import" not in body


def test_status_says_what_is_served_and_how_it_does(live_server: Any) -> None:
    status, headers, body = fetch(f"{live_server.base_url}/page/status")
    assert status == 200
    assert headers["Cache-Control"] == "no-store"
    found = json.loads(body)
    assert found.keys() == {"info", "live", "shadow", "gpus", "ready", "models", "version"}
    assert found["ready"] is True
    assert found["info"]["weights_bytes"] > 0
    assert "/" not in found["info"]["model"]
    assert {"tokens_per_second", "running", "waiting", "kv_percent", "restarts"} <= found["live"].keys()
