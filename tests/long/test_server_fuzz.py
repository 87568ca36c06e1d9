"""schemathesis reads the server's own OpenAPI document and sends what it allows, and what it does not.

No answer may be a server error, none may hang, and the server must be well afterwards.
"""

import json
import os
import subprocess
import urllib.request
from collections.abc import Callable

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.long

CASES = int(os.environ.get("QUANTKIT_TEST_FUZZ_CASES", "2000"))
SECONDS = 90  # for one answer, of which a busy machine may need most: a case may ask for 44 at once


def get(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=SECONDS) as answer:
        body: bytes = answer.read()
        return body


def test_openapi_document(start_server: Callable[..., tuple[subprocess.Popen[str], int]]) -> None:
    process, port = start_server("--max-context", "64", "--log-level", "error", "--request-timeout-seconds", "60")
    schema = schemathesis.openapi.from_dict(json.loads(get(port, "/openapi.json")))
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/chat/completions", "/v1/completions", "/tokenize"}
    seen = 0
    examples = -(-CASES // sum(bool(operation.body) for operation in operations))  # the others have few cases
    for operation in operations:
        right = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
        wrong = operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)
        cases = right if not operation.body else st.one_of(right, wrong)

        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=HealthCheck)
        @given(case=cases)
        def send(case: schemathesis.Case) -> None:
            nonlocal seen
            seen += 1
            answer = case.call(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS)
            assert answer.status_code < 500, f"{case.as_curl_command()}: {answer.status_code} {answer.text[:500]}"

        send()
    assert seen >= CASES
    assert process.poll() is None
    body = json.dumps({"model": "demo", "prompt": "A list", "max_tokens": 3}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        assert json.loads(answer.read())["usage"]["completion_tokens"] == 3
    live = json.loads(get(port, "/page/status"))["live"]
    assert (live["running"], live["waiting"], live["restarts"]) == (0, 0, 0)
