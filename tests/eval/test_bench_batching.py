"""`quantkit bench batching`: counts and answers; no test looks at how long anything took."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantkit.errors import InputError
from quantkit.eval.batching.drive import MixedRun, Way, drive, mixed_ways, time_first_tokens
from quantkit.eval.batching.load import Lengths, PrefixLoad, load_of_file, lognormal_load
from quantkit.eval.batching.results import COLUMNS
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.step_plan import StepPlan
from quantkit.runtime.core.step_result import Outcome, Sampled
from quantkit.runtime.device.memory import MemoryPlan
from quantkit.runtime.engine.engine import Engine

Cli = Callable[..., tuple[int, str, str]]
Refused = Callable[..., None]

PAGE, VOCAB = 16, 1000
SMALL = (
    *("bench", "batching", "demo-draft", "--device", "cpu", "--batch", 3, "--requests", 12, "--max-context", 128),
    *("--prompt-len", 12, "--new-tokens", 6, "--prefix-requests", 4),
)


class PaperRunner:
    """Answers every step at once, with the same token: what is left of an engine is its scheduler and its pages."""

    device = "cpu"

    def prepare(self, plan: StepPlan) -> None:
        pass

    def launch(self, plan: StepPlan) -> Any:
        return SimpleNamespace(plan=plan, launched=SimpleNamespace(plan=plan, prompts={}))

    def arrived(self, flight: Any) -> Any:
        return flight.launched

    def collect(self, launched: Any) -> list[Outcome]:
        return [Outcome(work, [Sampled(0)]) for work in launched.plan.scheduled if work.samples]


def paper_engine(places: int, max_context: int, sequences: int, step_tokens: int = 8192) -> Engine:
    plan = MemoryPlan(0, 0, 0, 0, 0, PAGE, places * -(-max_context // PAGE) + 1, max_context)
    config, runner = SimpleNamespace(vocab=VOCAB, eos=()), PaperRunner()
    options = EngineOptions(device="cpu", max_sequences=sequences, step_tokens=step_tokens)
    return Engine(config, runner, plan, options)  # type: ignore[arg-type]


def driven(engine: Engine, lengths: list[Lengths], way: Way) -> MixedRun:
    prompts = [[at % VOCAB] * one.prompt for at, one in enumerate(lengths, 1)]
    found = drive(engine, prompts, [one.new for one in lengths], way)
    engine.check_integrity()
    assert [len(answer) for answer in found.answers] == [one.new for one in lengths]
    return found


def test_steps_and_places_by_hand() -> None:
    """Two places of 64 tokens; answers of 2, 6, 3 and 1 tokens, each prompt computed in the step of its first token.

    Static: 6 steps for the first two, 3 for the others. Continuous: the third follows the first after 2 steps and the
    fourth the third after 5, so the second is the last to end. Paged: all begin together.
    """
    lengths = [Lengths(16, new) for new in (2, 6, 3, 1)]
    engine = paper_engine(2, 64, 4)
    static, continuous, paged = (driven(engine, lengths, way) for way in mixed_ways(2))
    assert [run.steps for run in (static, continuous, paged)] == [9, 6, 6]
    running = [[count for _, count in run.running] for run in (static, continuous, paged)]
    assert running == [[2, 2, 1, 1, 1, 1, 2, 1, 1], [2] * 6, [4, 3, 2, 1, 1, 1]]
    assert [run.most_at_once for run in (static, continuous, paged)] == [2, 2, 4]


def test_the_cache_by_hand() -> None:
    """One request of 20 + 3 tokens, seen after each of its steps but the last, after which all is given back."""
    engine, lengths = paper_engine(2, 64, 4), [Lengths(20, 3)]
    static, continuous, paged = (driven(engine, lengths, way) for way in mixed_ways(2))
    for run in (static, continuous, paged):
        assert (run.use.tokens, run.use.cache) == (20 + 21, 3 * 128)
    assert [run.use.taken for run in (static, continuous, paged)] == [2 * 64, 2 * 64, 2 * 2 * PAGE]
    both = driven(engine, [Lengths(20, 3), Lengths(20, 1)], mixed_ways(2)[0])
    assert both.use.taken == 2 * 2 * 64, "a place of a static batch is kept until the whole batch has ended"


def test_reserved_places_are_never_exceeded_and_never_preempted() -> None:
    load = lognormal_load(40, 24, 20, 1.2, 128, seed=1)
    engine = paper_engine(3, 128, 24)
    static, continuous, paged = (driven(engine, list(load.requests), way) for way in mixed_ways(3))
    assert max(count for _, count in (*static.running, *continuous.running)) == 3
    assert (static.preemptions, continuous.preemptions) == (0, 0)
    assert paged.most_at_once > 3
    assert static.answers == continuous.answers == paged.answers


@pytest.mark.parametrize(
    ("places", "requests", "steps", "filled"),
    [
        (4, 48, (6669, 3584, 1349), (10.8, 25.4, 98.6)),
        pytest.param(32, 768, (32_609, 6_575, 2_581), (4.9, 27.2, 98.7), marks=pytest.mark.long),
    ],
    ids=["small", "as-on-a-gpu"],
)
def test_the_usual_load_can_show_what_it_is_for(
    places: int, requests: int, steps: tuple[int, ...], filled: tuple[float, ...]
) -> None:
    """Scheduler and pages alone: counts have no noise. docs/performance/bench.md has those of the larger one."""
    load = lognormal_load(requests, 128, 128, 1.2, 2048, seed=0)
    engine = paper_engine(places, 2048, 8 * places)
    runs = [driven(engine, list(load.requests), way) for way in mixed_ways(places)]
    assert tuple(run.steps for run in runs) == steps
    assert tuple(round(run.use.filled_percent, 1) for run in runs) == filled
    assert runs[2].most_at_once > 3 * places


def test_shared_prefixes_are_computed_once() -> None:
    engine, prompts = paper_engine(4, 2048, 32), PrefixLoad(16, 1536, 32, 8, seed=0).prompts(VOCAB)
    cold, shared, again = (time_first_tokens(engine, prompts, 8, shared=shared) for shared in (False, True, False))
    assert cold.computed == again.computed == 16 * (1536 + 32)
    assert shared.computed == 1536 + 16 * 32
    assert len(cold.first_token) == len(shared.first_token) == 16
    assert [len(answer) for answer in shared.answers] == [8] * 16


def test_lengths_are_quantiles_in_another_order() -> None:
    one, other = (lognormal_load(101, 50, 30, 1.0, 4096, seed=seed) for seed in (1, 2))
    assert one.requests != other.requests
    assert one.requests == lognormal_load(101, 50, 30, 1.0, 4096, seed=1).requests
    for name, median in (("prompt", 50), ("new", 30)):
        lengths = sorted(getattr(request, name) for request in one.requests)
        assert lengths == sorted(getattr(request, name) for request in other.requests)
        assert lengths[50] == median
        assert lengths[-1] > 8 * median
    assert {*lognormal_load(9, 5, 3, 0.0, 64, seed=0).requests} == {Lengths(5, 3)}
    cut = lognormal_load(50, 60, 60, 2.0, 64, seed=0).requests
    assert max(request.prompt + request.new for request in cut) == 64
    assert max(request.prompt for request in cut) == 32


def test_prompts_share_nothing_but_their_prefix() -> None:
    load = lognormal_load(20, 40, 5, 0.5, 256, seed=0)
    prompts = load.prompts(VOCAB)
    assert [len(prompt) for prompt in prompts] == [one.prompt for one in load.requests]
    assert len({tuple(prompt[:PAGE]) for prompt in prompts}) == 20
    common = PrefixLoad(5, 48, 16, 4, seed=0).prompts(VOCAB)
    assert len({tuple(prompt[:48]) for prompt in common}) == 1
    assert len({tuple(prompt[48:]) for prompt in common}) == 5


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"prompt_tokens": 7, "output_tokens": 3}\n\n{"ContextTokens": 2, "GeneratedTokens": 9}\n'),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,7,3\ny,2,9\n"),
    ],
)
def test_lengths_of_files(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert load_of_file(tmp_path / name, None, 64, 0).requests == (Lengths(7, 3), Lengths(2, 9))
    assert load_of_file(tmp_path / name, 1, 64, 0).requests == (Lengths(7, 3),)
    with pytest.raises(InputError, match=r"request 2 has 2 \+ 9 tokens, but contexts end at 10"):
        load_of_file(tmp_path / name, None, 10, 0)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", "no JSON", "line 1 is not a JSON object"),
        ("a.jsonl", '{"prompt_tokens": 7}', "request 1 has none for output_tokens"),
        ("a.csv", "prompt_tokens,output_tokens\n7,0\n", "request 1 has '0' for output_tokens"),
        ("a.csv", "prompt_tokens,output_tokens\n", "has no requests"),
        ("a.jsonl", "\xff", "line 1 is not a JSON object"),
    ],
)
def test_wrong_files(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=words):
        load_of_file(tmp_path / name, None, 64, 0)


def test_the_command(run_cli: Cli, tmp_path: Path) -> None:
    """The real engine: every way gives every answer whole, the same ones, and its counters say what was saved."""
    code, out, err = run_cli(*SMALL, "--json", "--output", tmp_path / "rows.csv", "--plot", tmp_path / "plot.svg")
    assert (code, err) == (0, "")
    found = json.loads(out)
    static, continuous, paged, cold, shared = found["rows"]
    for row in (static, continuous, paged):
        assert (row["requests"], row["same_answers"], row["kv_tokens"]) == (12, 12, 3 * 128)
        assert (
            row["output_tokens"]
            == static["output_tokens"]
            == sum(one.new for one in lognormal_load(12, 12, 6, 1.2, 128, seed=0).requests)
        )
        assert row["filled_percent"] >= row["cache_percent"] > 0
    assert static["steps"] > continuous["steps"] >= paged["steps"]
    assert static["requests_most"] == continuous["requests_most"] == 3 < paged["requests_most"]
    assert static["filled_percent"] < continuous["filled_percent"] < paged["filled_percent"]
    assert (cold["computed_prompt_tokens"], shared["computed_prompt_tokens"]) == (4 * (96 + 16), 96 + 4 * 16)
    assert shared["same_answers"] == 4
    assert found["ratios"]["static_over_continuous_steps"] == pytest.approx(
        static["steps"] / continuous["steps"], abs=1e-3
    )
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["way"] for row in rows] == ["static", "continuous", "paged", "cold", "shared"]
    assert tuple(rows[0]) == COLUMNS
    drawn = (tmp_path / "plot.svg").read_text()
    assert all(f"{row['way']}: " in drawn for row in (static, continuous, paged))


def test_wrong_input(assert_refused: Refused, tmp_path: Path) -> None:
    bench = ("bench", "batching", "demo-draft", "--device", "cpu")
    assert_refused(tmp_path, *bench, "--shape", "tiny", words=("not both",))
    assert_refused(tmp_path, "bench", "batching", "--shape", "tinny", words=("did you mean 'tiny'",))
    assert_refused(tmp_path, *bench, "--plot", tmp_path / "a.pdf", words=(".png or .svg",))
    assert_refused(tmp_path, *bench, "--spread", "4", words=("--spread is 4",))
    assert_refused(tmp_path, *bench, "--kv-tokens", 64, words=("--kv-tokens is '64'", "leave it out"))
    assert_refused(tmp_path, *bench, "--speculative", "ngram", words=("--speculative is 'ngram'",))
    assert_refused(tmp_path, *bench, "--max-sequences", 3, words=("at least --batch, which is 4",))
    assert_refused(tmp_path, *bench, "--prefix-len", 1020, words=("lower --prefix-len",))
    assert_refused(tmp_path, *bench, "--lengths", tmp_path / "no.csv", words=("cannot read",))
    assert_refused(tmp_path, *bench, "--lengths", "a.csv", "--new-tokens", 9, words=("--lengths has all",))
