"""kill -9 of the engine process, seen from outside: errors at once, not ready, then everything as before.

Long, since `test_several_models.py` kills one of its engines in every run.
"""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest


@pytest.mark.long
def test_clients_see_an_error_and_service_resumes(start_server: Callable[..., Any]) -> None:
    server = start_server(max_context=400)  # an engine of its own, which no other test misses
    client = server.openai()
    asked: dict[str, Any] = {"model": "demo", "prompt": "The function returns", "temperature": 0}
    before = client.completions.create(**asked, max_tokens=8).choices[0].text
    stream = client.completions.create(**asked, max_tokens=380, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert server.ask("GET", "/ready").status == 200
    os.kill(server.engine.pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(openai.APIError, match="engine") as seen:
        list(stream)
    assert seen.value.code == "engine_unavailable"
    assert time.monotonic() - killed < 5
    assert server.ask("GET", "/ready").status == 503
    assert server.ask("GET", "/health").status == 200
    refused = server.ask("POST", "/v1/completions", asked)
    assert refused.status == 503
    assert "retry-after" in refused.headers
    end = time.monotonic() + 60
    while server.ask("GET", "/ready").status != 200:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert client.completions.create(**asked, max_tokens=8).choices[0].text == before
    assert server.ask("GET", "/page/status").json["live"]["restarts"] == 1
    assert 'quantkit:engine_restarts_total{model_name="demo"} 1.0' in server.ask("GET", "/metrics").content.decode()
