"""`quantkit bench step`: timelines that are made up, requests on a CPU, and on a GPU the real thing."""

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.cli.bench_step import print_result
from quantkit.errors import InputError, QuantkitError
from quantkit.eval.engine.results import Started
from quantkit.eval.engine.start import start
from quantkit.eval.engine.step_profile import END_OF_STEP, Event, step_table, tidy_name, whole_steps
from quantkit.eval.engine.step_results import BETWEEN, COLUMNS, GAPS, StepResult, append
from quantkit.eval.engine.step_run import all_answering, measure_step, tokens_of
from quantkit.runtime.core.options import EngineOptions

Cli = Callable[..., tuple[int, str, str]]
Refused = Callable[..., None]
END = f"{END_OF_STEP} (Device -> Pinned)"


def one_step(at: float, *more: Event) -> list[Event]:
    """30 us: the host is late by 4; a kernel of 10 and one of 12 overlap by 2; 3 idle; the head 2; the copy 1."""
    times = [(4.0, 10.0, "norm"), (12.0, 12.0, "linear"), (27.0, 2.0, "linear"), (29.0, 1.0, END)]
    return [Event(at + start, duration, name) for start, duration, name in times] + list(more)


def timeline(count: int) -> list[Event]:
    return [event for number in range(count) for event in one_step(30.0 * number)]


def test_overlaps_are_counted_once_and_gaps_are_named() -> None:
    table = step_table(whole_steps(timeline(4)))
    found = {kernel.name: (kernel.launches, kernel.us, kernel.gap_us) for kernel in table.kernels}
    assert found == {"linear": (2, 12.0, 3.0), "norm": (1, 10.0, 0.0), END: (1, 1.0, 0.0)}
    assert [kernel.name for kernel in table.kernels] == ["linear", "norm", END]
    assert (table.gaps_us, table.between_us, table.us, table.launches) == (3.0, 4.0, 30.0, 4)
    assert (table.steps, table.alike, table.seen) == (3, 3, 3)
    assert table.percent(3.0) == 10.0


def test_a_launch_inside_another_has_no_time_of_its_own() -> None:
    events = [event for number in range(3) for event in one_step(30.0 * number, Event(30.0 * number + 13, 4.0, "side"))]
    table = step_table(whole_steps(events))
    assert next((kernel.launches, kernel.us) for kernel in table.kernels if kernel.name == "side") == (1, 0.0)
    assert table.us == 30.0


def test_cut_steps_at_both_ends_are_dropped() -> None:
    events = timeline(4)
    random.Random(0).shuffle(events)  # the profiler promises no order
    whole = whole_steps(events)
    cut = whole_steps(sorted(events)[2:-2])  # the first step has lost its kernel, the last one its end
    assert (len(whole), len(cut)) == (3, 2)
    assert cut == whole[:2]


def test_steps_with_other_kernels_do_not_count() -> None:
    events = [*timeline(6), *one_step(180.0, Event(181.0, 2.0, "new pages")), *one_step(210.0)]
    table = step_table(whole_steps(events))
    assert (table.alike, table.seen) == (6, 7)
    assert "new pages" not in {kernel.name for kernel in table.kernels}
    assert (table.launches, table.us) == (4, 30.0)


def test_the_slowest_and_the_fastest_do_not_count() -> None:
    late = [Event(event.start + 5000.0, event.duration, event.name) for event in timeline(3)]
    table = step_table(whole_steps([*timeline(4), *late]))  # one of six steps begins 4914 us late
    assert (table.steps, table.alike) == (4, 6)
    assert (table.us, table.between_us) == (30.0, 4.0)


def test_every_moment_is_counted_once() -> None:
    """Whatever overlaps: the steps together are the time from the end of the first one to the end of the last."""
    generator = random.Random(3)
    for _ in range(50):
        clock, events = 0.0, []
        for _ in range(5):
            for _ in range(generator.randrange(12)):
                clock = max(0.0, clock + generator.uniform(-3, 3))
                events.append(Event(clock, generator.uniform(0, 6), generator.choice("abc")))
            clock = max(event.start + event.duration for event in [*events, Event(clock, 0, "")])
            clock += generator.uniform(0, 2)
            events.append(Event(clock, 1.0, END))
            clock += 1.0
        ends = [event.start + event.duration for event in events if event.name == END]
        steps = whole_steps(events)
        assert len(steps) == 4
        total = sum(piece.us + piece.gap for step in steps for piece in step)
        before = max(event.start + event.duration for event in sorted(events)[: _place(events, ends[0])])
        after = max(event.start + event.duration for event in sorted(events)[: _place(events, ends[-1])])
        assert total == pytest.approx(after - before)


def _place(events: list[Event], end: float) -> int:
    """How many events there are up to the one that ends a step at this moment."""
    in_order = sorted(events)
    return 1 + next(
        place for place, event in enumerate(in_order) if event.name == END and event.start + event.duration == end
    )


def test_a_timeline_without_a_whole_step_is_an_error() -> None:
    for events in ([], [Event(0.0, 1.0, "a")], timeline(1)):
        with pytest.raises(QuantkitError, match="no whole step"):
            step_table(whole_steps(events))


def test_names() -> None:
    assert tidy_name("_skinny") == "_skinny"
    assert tidy_name(END) == END
    assert tidy_name("void at::native::(anonymous namespace)::fill<at::native::F>(int)") == "fill<F>(int)"
    assert tidy_name("x" * 300) == "x" * 69 + "..."


def made_up(bandwidth: float | None = 4e12) -> StepResult:
    started = Started("tiny", "w4", "bfloat16", "bfloat16", {}, None, 1, 1)
    return StepResult(started, step_table(whole_steps(timeline(4))), 2, 256, 25.0, 6e7, bandwidth)


def test_rows_add_up_and_go_into_a_file(tmp_path: Path) -> None:
    result = made_up()
    found = json.loads(json.dumps(result.to_dict()))
    assert sum(row["percent"] for row in found["rows"]) == pytest.approx(100, abs=0.05)
    assert [row["kernel"] for row in found["rows"]] == ["linear", "norm", END, GAPS, BETWEEN]
    assert (found["limit_us"], found["percent_of_limit"]) == (15.0, 50.0)
    assert found["tokens_per_second"] == pytest.approx(66666.7)
    append(tmp_path / "step.csv", "a GPU", result)
    with (tmp_path / "step.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [(row["kernel"], row["launches"]) for row in rows][-3:] == [(END, "1"), (GAPS, ""), (BETWEEN, "")]
    assert made_up(None).to_dict()["percent_of_limit"] is None


def test_the_table_people_see(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(made_up(), Path("step.csv"))
    out = capsys.readouterr().out
    for words in (
        "linear",
        GAPS,
        BETWEEN,
        "total",
        "limit: reading 60.00 MB at 4.00 TB/s",
        "66,666.7 tokens/s at this",
    ):
        assert words in out
    assert "without the profiler a step takes 25.0 us: 80,000.0 tokens/s, 60.0 % of the limit" in out
    assert "appended to step.csv" in out
    print_result(made_up(None), None)
    assert "limit" not in capsys.readouterr().out


def test_wrong_input(assert_refused: Refused, tmp_path: Path) -> None:
    step = ("bench", "step")
    assert_refused(tmp_path, *step, "demo", "--shape", "tiny", words=("not both",))
    assert_refused(tmp_path, *step, "--shape", "tinny", words=("unknown shape 'tinny'", "did you mean 'tiny'"))
    assert_refused(tmp_path, *step, "--format", "w5", words=("unknown format 'w5'", "did you mean"))
    assert_refused(tmp_path, *step, "demo", "--format", "w4", words=("has its format",))
    assert_refused(tmp_path, *step, "demo", "--device", "cpu", words=("needs a CUDA GPU", "bench engine"))
    assert_refused(tmp_path, *step, "demo", "--speculative", "ngram,k=4", words=("plain decoding", "leave out"))
    assert_refused(tmp_path, *step, "--output", tmp_path / "no" / "x.csv", words=("does not exist",))


def test_requests_answer_together_until_the_last_step() -> None:
    options = EngineOptions(device="cpu", max_sequences=3, max_context=256, step_tokens=64)
    engine, _ = start("tiny", "bf16", options, first=False)
    prompt, new = tokens_of(3, 100, 6, options.budget)
    requests = all_answering(engine, 3, prompt, new)
    sequences = [sequence for request in requests for sequence in request.sequences]
    assert all(prompt < len(sequence.tokens) < 100 for sequence in sequences)
    for _ in range(new - 2 * -(-3 * prompt // 64) - 2):  # all but those that reading prompts in chunks may take
        assert {delta.request for delta in engine.step()} == {request.id for request in requests}
    for request in requests:
        engine.abort(request.id)
    engine.drain()
    engine.check_integrity()


@pytest.mark.parametrize("changes", [{"max_sequences": 2}, {"step_tokens": 2}, {"kv_tokens": 160}])
def test_too_many_requests_for_one_step_are_refused(changes: dict[str, int]) -> None:
    options = EngineOptions(device="cpu", **({"max_sequences": 3, "max_context": 128} | changes))
    engine, _ = start("tiny", "bf16", options, first=False)
    with pytest.raises(InputError, match="cannot all answer in one step"):
        all_answering(engine, 3, 60, 8)
    assert not engine.busy
    engine.check_integrity()


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 4])
def test_a_step_of_the_demo_model(batch: int) -> None:
    prompt, new = tokens_of(batch, 128, 10, 8192)
    options = EngineOptions(device="cuda", max_sequences=batch, max_context=prompt + new, kv_tokens=8192)
    engine, started = start("demo", "checkpoint", options, first=False)
    result = measure_step(engine, started, batch, 128, 10, 1e12)
    table, found = result.table, result.to_dict()
    assert sum(row["percent"] for row in found["rows"]) == pytest.approx(100, abs=0.5)
    assert sum(table.percent(us) for us in (*(kernel.us for kernel in table.kernels), table.gaps_us, table.between_us)
               ) == pytest.approx(100)  # fmt: skip
    assert all(isinstance(kernel.launches, int) and kernel.launches > 0 for kernel in table.kernels)
    assert table.launches > 2 * engine.config.layers  # a step has all layers
    assert sum(kernel.launches for kernel in table.kernels if kernel.name.startswith(END_OF_STEP)) == 1
    assert 10 <= table.seen <= 13
    assert abs(result.context - 128) <= 8
    assert not engine.busy


@pytest.mark.gpu
def test_the_command(run_cli: Cli, tmp_path: Path) -> None:
    args = ("bench", "step", "demo", "--context", 96, "--steps", 8, "--kv-tokens", 4096)
    code, out, _ = run_cli(*args, "--output", tmp_path / "step.csv")
    assert code == 0
    assert "limit: reading" in out
    assert "between steps" in out
    found = json.loads(run_cli(*args, "--no-save", "--json")[1])
    assert found["percent_of_limit"] > 0
    assert (tmp_path / "step.csv").read_text().startswith("date,gpu")


@pytest.mark.gpu
def test_wrong_input_on_a_gpu(assert_refused: Refused, tmp_path: Path) -> None:
    assert_refused(
        tmp_path, "bench", "step", "demo", "--max-context", 64, words=("--max-context is 64", "leave it out")
    )
