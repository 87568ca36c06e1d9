"""The parts of `quantkit bench serve` that need no server: parsers, percentiles, loads, goodput, prompts."""

import itertools
import json
import random
import statistics
from array import array
from dataclasses import astuple

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import InputError
from quantkit.eval.serve.answers import Answer, AnswerReader, Failure
from quantkit.eval.serve.bench import Plan
from quantkit.eval.serve.client import Target
from quantkit.eval.serve.facts import Facts
from quantkit.eval.serve.loads import Limits, Load, make_loads
from quantkit.eval.serve.percentiles import Spread, percentile
from quantkit.eval.serve.prompts import WORDS, IdPrompts, RequestMaker, WordPrompts, _cut, _from_line
from quantkit.eval.serve.results import ServeRow
from quantkit.eval.serve.run import Measured
from quantkit.eval.serve.wire import Events, Response, WireError

EVENTS = (
    b": a comment\n\n"
    b'data: {"a": 1}\n\n'
    b"event: message\r\nid: 7\r\ndata: two\r\ndata:lines\r\n\r\n"
    b"data:\n\n"
    b"retry: 10\n\n"
    b"data: \xc3\xa4\xc3\xb6\n\n"
    b"data: [DONE]\n\n"
    b"data: never ended\n"
)
READ = [b'{"a": 1}', b"two\nlines", b"", b"\xc3\xa4\xc3\xb6", b"[DONE]"]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(body: bytes, sizes: list[int]) -> bytes:
    found, at = b"", 0
    for size in itertools.cycle(sizes):
        piece = body[at : at + size]
        if not piece:
            break
        found += b"%X;note=1\r\n%s\r\n" % (len(piece), piece)
        at += size
    return found + b"0\r\nTrailer: x\r\n\r\n"


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


@given(st.lists(st.integers(0, 10_000)), st.lists(st.integers(1, 40), min_size=1))
def test_any_splitting_gives_the_same_events(cuts: list[int], sizes: list[int]) -> None:
    data = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    response, events, found = Response(), Events(), []
    for piece in pieces(data + chunked(EVENTS, sizes), cuts):
        assert not response.complete
        found += events.feed(response.feed(piece))
    assert found == READ
    assert response.complete
    assert response.keeps_alive
    assert (response.status, response.headers["content-type"]) == (200, "text/event-stream")


@given(st.lists(st.integers(0, 10_000)), st.booleans())
def test_bodies_with_a_length_and_without(cuts: list[int], counted: bool) -> None:
    head = HEAD + (b"Content-Length: %d\r\n\r\n" % len(EVENTS) if counted else b"\r\n")
    response = Response()
    body = b"".join(response.feed(piece) for piece in pieces(head + EVENTS, cuts))
    assert body == EVENTS
    assert response.complete == counted
    response.end_of_stream()
    assert response.complete
    assert response.keeps_alive == counted


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabcd\r\n",
        b"x" * 70_000,
    ],
)
def test_what_is_not_http(data: bytes) -> None:
    with pytest.raises(WireError):
        Response().feed(data)


def chat(delta: object, finish: str | None = None, **more: object) -> bytes:
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}).encode()


def test_which_events_are_tokens() -> None:
    reader = AnswerReader(10.0)
    events = [
        chat({"role": "assistant", "content": ""}),
        chat({"content": "a"}),
        chat({"content": ""}),  # half a character
        chat({"reasoning_content": "b"}),
        chat({"tool_calls": [{"index": 0}]}),
        chat({"content": "c"}, "length"),
        chat({}, "length"),
        json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 6}}).encode(),
        b"[DONE]",
    ]
    for time, event in enumerate(events, 11):
        reader.see(event, float(time))
    answer = reader.answer()
    assert list(answer.stamps) == [12, 13, 14, 15, 16]
    assert (answer.ttft, answer.e2e, answer.tokens, answer.prompt_tokens) == (2, 9, 6, 3)
    assert answer.tpot == 5 / 5  # to the reason of the end
    assert answer.gaps == [1, 1, 1, 1]


def test_completions_without_usage() -> None:
    reader = AnswerReader(0.0)
    for time, (text, finish) in enumerate([("a", None), ("", None), ("b", "stop"), ("", "stop")], 1):
        event = {"choices": [{"text": text, "finish_reason": finish}], "usage": None}
        reader.see(json.dumps(event).encode(), float(time))
    answer = reader.answer()
    assert (list(answer.stamps), answer.output_tokens, answer.tokens, answer.end) == ([1, 2, 3], None, 3, 4)


@pytest.mark.parametrize(
    ("event", "kind", "words"),
    [
        (b'{"choices": [', "malformed event", "not JSON"),
        (b"\xff\xfe", "malformed event", "not JSON"),
        (b"[1]", "malformed event", "not an object"),
        (b'{"choices": [3]}', "malformed event", "choices"),
        (b'{"choices": [{}]}', "malformed event", "choices"),
        (b'{"choices": {"a": 1}}', "malformed event", "choices"),
        (b'{"error": {"message": "out of pages"}}', "error event", "out of pages"),
        (b'{"error": "plain"}', "error event", "plain"),
    ],
)
def test_events_that_are_none(event: bytes, kind: str, words: str) -> None:
    with pytest.raises(Failure, match=words) as failure:
        AnswerReader(0.0).see(event, 1.0)
    assert failure.value.kind == kind


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(times: list[float], percent: float) -> None:
    assert percentile(sorted(times), percent) == pytest.approx(numpy.percentile(times, percent), abs=1e-6)


def test_spread_by_hand() -> None:
    spread = Spread.of_seconds([0.004, 0.001, 0.003, 0.002, 0.010])
    assert spread is not None
    assert astuple(spread) == pytest.approx((4.0, 3.0, 8.8, 9.76))
    assert Spread.of_seconds([]) is None


def test_poisson_arrivals() -> None:
    times = list(Load(rate=5.0, requests=20_000).arrivals(seed=1))
    gaps = [after - before for before, after in itertools.pairwise([0.0, *times])]
    assert statistics.fmean(gaps) == pytest.approx(1 / 5, rel=0.02)
    assert statistics.stdev(gaps) == pytest.approx(1 / 5, rel=0.03)  # an exponential's is its mean
    assert times == list(Load(rate=5.0, requests=20_000).arrivals(seed=1))
    assert times[:10] != list(Load(rate=5.0, requests=10).arrivals(seed=2))
    within = list(Load(rate=5.0, seconds=100.0).arrivals(seed=1))
    assert within == [time for time in times if time < 100]


def test_loads() -> None:
    assert [load.requests for load in make_loads([1, 32], [], None, None)] == [8, 128]
    assert [load.requests for load in make_loads([], [0.1, 2.0], None, None)] == [8, 60]
    assert make_loads([4], [], None, 2.0)[0].requests is None
    wrong: list[tuple[list[int], list[float], int | None, float | None]] = [
        ([1], [1.0], None, None),
        ([0], [], None, None),
        ([], [float("nan")], None, None),
        ([1], [], 3, 3.0),
    ]
    for arguments in wrong:
        with pytest.raises(InputError):
            make_loads(*arguments)


def answer(ttft: float, gaps: list[float], error: str | None = None) -> Answer:
    stamps = array("d", itertools.accumulate([100 + ttft, *gaps]))
    return Answer(100.0, stamps[-1] + 0.001, stamps, None, len(stamps), 7, error)


def test_goodput_by_hand() -> None:
    answers = [
        answer(0.1, [0.02] * 9),
        answer(0.3, [0.02] * 9),  # its first token is late
        answer(0.1, [0.02] * 8 + [0.9]),  # its 95th percentile of gaps is late
        answer(0.1, [0.02] * 99 + [0.9]),  # one gap of a hundred is not
        answer(0.1, [0.02] * 9, "timeout"),
        answer(0.1, []),  # a single token has no gaps
    ]
    limits = Limits.parse("ttft=250, itl=50")
    assert [limits.keeps(each) for each in answers] == [True, False, False, True, False, True]
    assert not Limits.parse("e2e=280.5").keeps(answers[0])
    assert Limits.parse("e2e=281.5,tpot=20.001").keeps(answers[0])
    row = ServeRow(Facts("m"), "chat", 10, limits, Measured(Load(concurrency=6), tuple(answers), 100.0, 0.1))
    found = row.to_dict()
    seconds = 0.1 + 99 * 0.02 + 0.9 + 0.001
    assert found["goodput"]["percent"] == 50.0
    assert found["goodput"]["per_second"] == pytest.approx(3 / seconds, rel=1e-3)
    assert (found["requests"], found["whole"], found["errors"]) == (6, 5, {"timeout": 1})
    assert found["output_tokens"] == 10 + 10 + 10 + 101 + 1
    assert found["output_tokens_per_second"] == pytest.approx(132 / seconds, rel=1e-3)
    assert found["total_tokens_per_second"] == pytest.approx((132 + 5 * 7) / seconds, rel=1e-3)
    assert any("1 of 5 answers have fewer than 10" in note for note in found["notes"])
    for text in ("ttft", "ttft=x", "ttft=-1", "ttft=nan", "tft=3", ""):
        with pytest.raises(InputError):
            Limits.parse(text)


def test_urls() -> None:
    assert Target.parse("http://127.0.0.1:8000/v1/") == Target("127.0.0.1", 8000, False, "")
    assert Target.parse("https://host/some/v1") == Target("host", 443, True, "/some")
    assert Target.parse("http://[::1]:80").authority == "[::1]:80"
    for url in ("", "127.0.0.1:8000", "ftp://host", "http://", "http://host:99999", "http://host?x=1"):
        with pytest.raises(InputError, match="--url"):
            Target.parse(url)


def test_synthetic_prompts_depend_on_seed_and_number_alone() -> None:
    ids, words = IdPrompts(range(50), 12, seed=3), WordPrompts(12, seed=3)
    random.seed(9)
    assert ids.prompt(4) == IdPrompts(range(50), 12, seed=3).prompt(4) != ids.prompt(5)
    assert ids.prompt(4) != IdPrompts(range(50), 12, seed=4).prompt(4)
    assert all(0 <= token < 50 for token in ids.prompt(4))
    text = words.prompt(0)
    assert isinstance(text, str)
    assert len(text.split()) == 12
    assert set(text.split()) <= set(WORDS)
    body = json.loads(RequestMaker("m", "completions", ids, ignore_eos=True).body(4, 9))
    assert body["prompt"] == ids.prompt(4)
    assert (body["max_tokens"], body["ignore_eos"], body["stream_options"]) == (9, True, {"include_usage": True})
    body = json.loads(RequestMaker("m", "chat", words, ignore_eos=False).body(0, 9))
    assert body["messages"] == [{"role": "user", "content": text}]
    assert "ignore_eos" not in body


def test_prompts_of_files() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert _from_line(json.dumps({"messages": messages}), "x", "chat") == messages
    assert _from_line('{"prompt": "hi"}', "x", "chat") == "hi"
    assert _from_line('{"prompt": [1, 2]}', "x", "completions") == [1, 2]
    wrong = [
        ('{"prompt": [1]}', "chat", "--endpoint completions"),
        (json.dumps({"messages": messages}), "completions", "--endpoint chat"),
        ('{"text": "hi"}', "chat", "must have"),
        ("[", "chat", "not JSON"),
    ]
    for line, endpoint, words in wrong:
        with pytest.raises(InputError, match=words):
            _from_line(line, "prompts.jsonl, line 3", endpoint)
    assert _cut(list("abcdefg"), 3) == ("a b c", "d e f")
    assert _cut(list("abcdefgh"), 3) == ("a b c", "d e f", "g h")
    assert _cut(["a"], 3) == ("a",)


def test_varied_answers_have_their_lengths_by_number() -> None:
    plan = Plan(url="http://x", loads=(), new_tokens=100, vary=0.5, seed=3)
    lengths = [plan.tokens_of(number) for number in range(2000)]
    assert lengths == [plan.tokens_of(number) for number in range(2000)]
    assert 50 <= min(lengths) < 55
    assert 145 < max(lengths) <= 150 == plan.most_tokens
    assert 98 < sum(lengths) / len(lengths) < 102
    assert Plan(url="http://x", loads=(), new_tokens=7).tokens_of(5) == 7
