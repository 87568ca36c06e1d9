"""Answers that are ranked or marked, through OpenAI's routes; beams, which are refused by name."""

from pathlib import Path
from typing import Any

import pytest

from quantkit.runtime.watermark_detector import detect_watermark

PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "The function returns"
SECRET = "a secret for watermarks"
QUESTION = {"messages": [{"role": "user", "content": "What is a list?"}]}


@pytest.fixture(scope="module")
def marking(start_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    secret: Path = tmp_path_factory.mktemp("keys") / "secret.txt"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    return start_server(watermark_key_file=str(secret))


def complete(server: Any, **fields: Any) -> Any:
    return server.ask("POST", PLAIN, {"prompt": PROMPT, "max_tokens": 8, "seed": 3, **fields})


def test_best_of_gives_the_likeliest_of_those_drawn(live_server: Any) -> None:
    drawn = complete(live_server, n=6, logprobs=0).json["choices"]
    means = [sum(one["logprobs"]["token_logprobs"]) / len(one["logprobs"]["token_logprobs"]) for one in drawn]
    ranked = [drawn[at]["text"] for at in sorted(range(6), key=lambda at: -means[at])]
    found = complete(live_server, n=2, best_of=6).json
    assert [one["text"] for one in found["choices"]] == ranked[:2]
    assert [one["index"] for one in found["choices"]] == [0, 1]
    assert all(one["logprobs"] is None for one in found["choices"])
    assert found["usage"]["completion_tokens"] == 48  # all that were computed
    two = complete(live_server, prompt=[PROMPT, "In the year"], best_of=6).json["choices"]
    assert two[0]["text"] == ranked[0]
    assert len(two) == 2
    assert live_server.app.state.models.each[0].queue.taken == 0


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (PLAIN, {"best_of": 2, "n": 3}, "best_of"),
        (PLAIN, {"best_of": 2, "stream": True}, "best_of"),
        (PLAIN, {"best_of": 2, "temperature": 0}, "best_of"),
        (CHAT, {"best_of": 2}, "best_of"),
        (PLAIN, {"use_beam_search": True}, "use_beam_search"),
        (CHAT, {"use_beam_search": True}, "use_beam_search"),
        (PLAIN, {"watermark": True}, "watermark"),
        (CHAT, {"watermark": {"gamma": 0.5}}, "watermark"),
        (PLAIN, {"watermark": {"gamma": 1}}, "watermark"),
    ],
)
def test_what_is_not_served_is_refused_by_name(live_server: Any, path: str, fields: Any, param: str) -> None:
    body = {"prompt": PROMPT} if path == PLAIN else QUESTION
    reply = live_server.ask("POST", path, body | fields)
    assert reply.status == 400
    assert reply.error["param"] == param
    assert param in reply.error["message"]


def test_what_means_the_same_as_nothing_is_taken(live_server: Any) -> None:
    wanted = complete(live_server, n=2).json["choices"]
    assert complete(live_server, n=2, best_of=2, use_beam_search=False, watermark=False).json["choices"] == wanted


def test_watermarks_of_both_routes(marking: Any) -> None:
    for strength in (True, {"delta": 3}, {"gamma": 0.5, "delta": 3}):
        text = complete(marking, max_tokens=100, ignore_eos=True, watermark=strength).json["choices"][0]["text"]
        gamma = strength.get("gamma", 0.25) if isinstance(strength, dict) else 0.25
        assert detect_watermark(text, SECRET, model="demo-draft", gamma=gamma).found()
        assert not detect_watermark(text, "another secret key", model="demo-draft", gamma=gamma).found()
    plain = complete(marking, max_tokens=100, ignore_eos=True).json["choices"][0]["text"]
    assert not detect_watermark(plain, SECRET, model="demo-draft").found()
    asked = QUESTION | {"max_tokens": 100, "ignore_eos": True, "seed": 3, "watermark": True}
    answer = marking.ask("POST", CHAT, asked).json["choices"][0]["message"]["content"]
    assert detect_watermark(answer, SECRET, model="demo-draft").found()
