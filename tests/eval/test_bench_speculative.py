"""`quantkit bench speculative`, and what `bench engine` says about guesses. No test looks at how long anything took."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.errors import StorageError
from quantkit.eval.engine import csv_file
from quantkit.eval.engine.guesses import Guesses
from quantkit.eval.engine.results import COLUMNS as ENGINE_COLUMNS
from quantkit.eval.engine.start import start
from quantkit.eval.speculative.decode import Decoded, decode, decode_all, interleaved
from quantkit.eval.speculative.results import COLUMNS, accepted_length, chance_of, expected_speed_up
from quantkit.eval.speculative.run import HELDOUT, Load, TextPlan, cut_prompts
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.output.tokenizer import load_tokenizer
from quantkit.sources import model_folder

Cli = Callable[..., tuple[int, str, str]]
Refused = Callable[..., None]

SMALL = ("--prompt-len", 8, "--new-tokens", 5, "--rounds", 2, "--device", "cpu")
TINY = EngineOptions(device="cpu", max_sequences=4, max_context=64, kv_tokens=512)
DRAFT = "draft=demo-draft,k=3,adaptive=off"  # always three guesses, however slow this machine is
GREEDY = SamplingParams(max_tokens=9, ignore_eos=True)
ENGINE = ("bench", "engine", "--prompt-len", 8, "--new-tokens", 12, "--device", "cpu", "--batch", "1,2")


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.8, 0.99])
@pytest.mark.parametrize("guesses", [1, 4, 7])
def test_the_formula(chance: float, guesses: int) -> None:
    cost = 0.2
    written = (1 - chance ** (guesses + 1)) / ((1 - chance) * (guesses * cost + 1))
    assert expected_speed_up(chance, guesses, cost) == pytest.approx(written)
    assert chance_of(accepted_length(chance, guesses), guesses) == pytest.approx(chance, abs=1e-6)


def test_the_formula_at_its_ends() -> None:
    assert expected_speed_up(1.0, 4, 0.0) == 5  # every guess right, and free
    assert expected_speed_up(0.0, 4, 0.25) == 0.5  # a step of the target and one more of drafts, for one token


def test_guesses_count_from_when_they_were_looked_at() -> None:
    found = Guesses(steps=10, guessed=40, accepted=25) - Guesses(steps=2, guessed=8, accepted=1)
    assert found == Guesses(8, 32, 24)
    assert (found.tokens_per_step, found.acceptance, found.per_step) == (4.0, 0.75, 4.0)
    none = Guesses()
    assert (none.tokens_per_step, none.acceptance, none.per_step) == (None, None, None)


def test_everybody_has_a_token_before_the_clock_starts() -> None:
    """Three answers of nine tokens: the first of each is not in the time, nor what comes before the last of these."""
    prompts = [[number] * 8 for number in (5, 6, 7)]
    engine, _ = start("tiny", "bf16", TINY, first=False)
    found = decode(engine, prompts, GREEDY)
    assert (found.tokens, found.steps, found.guesses) == (3 * 8, 8, Guesses())
    assert decode_all(engine, prompts, 1, GREEDY).tokens == 3 * 8
    slow, _ = start("tiny", "bf16", EngineOptions(**vars(TINY) | {"step_tokens": 8}), first=False)
    assert 8 <= decode(slow, prompts, GREEDY).tokens < 3 * 8  # prompts take turns, and the first ones answer meanwhile


def test_a_model_that_is_its_own_draft_is_always_right() -> None:
    """Random weights have the same seed: the draft is the target. Nine tokens: one, then 3 + 1, then 3 + 1."""
    engine, started = start("tiny", "bf16", _with("draft=shape:tiny:bf16,k=3,adaptive=off"), first=False)
    found = decode(engine, [[5] * 8], GREEDY)
    assert (found.tokens, found.steps) == (8, 2)
    assert found.guesses == Guesses(steps=2, guessed=6, accepted=6)
    assert started.speculative == "draft=shape:tiny:bf16,k=3,adaptive=off"


def _with(how: str) -> EngineOptions:
    return EngineOptions(**vars(TINY) | {"speculative": how})


def test_contenders_take_turns_after_a_turn_that_does_not_count() -> None:
    seen: list[str] = []
    seconds = {"a": iter([100.0, 1.0, 4.0, 2.0]), "b": iter([100.0, 1.0, 1.0, 1.0])}

    def run(name: str) -> Decoded:
        seen.append(name)
        return Decoded(next(seconds[name]), tokens=8, steps=2, guesses=Guesses(1, 4, len(seen)))

    first, second = interleaved([lambda: run("a"), lambda: run("b")], rounds=3)
    assert "".join(seen) == "abababab"
    assert first.tokens_per_second == 4.0  # the median of 8, 2 and 4
    assert first.step_ms == 1000.0
    assert first.spread_percent == 150.0
    assert second.spread_percent == 0.0
    assert first.guesses == Guesses(3, 12, 3 + 5 + 7)


def test_prompts_are_spread_over_the_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model_folder("demo-draft"))
    assert tokenizer is not None
    text = " ".join(f"number {number}" for number in range(200))
    (tmp_path / "text.txt").write_text(text)
    load = Load(batches=(1, 3), prompt=10, new=4, rounds=2)
    plan = TextPlan("demo-draft", ("ngram",), str(tmp_path / "text.txt"), 0.0, 2, load)
    ids = tokenizer(text)["input_ids"]
    prompts = cut_prompts(plan)
    assert prompts[0] == ids[:10]
    assert [len(prompt) for prompt in prompts] == [10, 10, 10]  # as many as the largest batch
    assert len({tuple(prompt) for prompt in prompts}) == 3
    places = [next(at for at in range(len(ids)) if ids[at : at + 10] == prompt) for prompt in prompts]
    assert places[2] > len(ids) // 2


def test_text_from_the_command_line(run_cli: Cli, tmp_path: Path) -> None:
    args = ("bench", "speculative", "demo-draft", "--speculative", DRAFT, "--speculative", "ngram,k=2")
    code, out, err = run_cli(*args, *SMALL, "--batch", "1,2", "--prompts", 2, "--output", tmp_path / "rows.csv")
    assert (code, err) == (0, "")
    assert out.count("plain") == 2
    assert f"demo-draft on {HELDOUT}" in out
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    ways = ["", DRAFT, "", DRAFT, "ngram,k=2", "ngram,k=2"]
    assert [row["speculative"] for row in rows] == ways
    assert [row["batch"] for row in rows] == ["1", "1", "2", "2", "1", "2"]
    plain, drafted = rows[0], rows[1]
    assert (plain["speed_up"], plain["acceptance"], plain["tokens_per_second"]) == (
        "1.0",
        "",
        plain["plain_tokens_per_second"],
    )
    assert 1 <= float(drafted["tokens_per_step"]) <= 4
    assert 0 <= float(drafted["acceptance"]) <= 1
    assert all(row["machine"] and row["torch"] and row["rounds"] == "2" and row["text"] == HELDOUT for row in rows)


def test_sampled_text_as_json(run_cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("A list is a sequence of values. " * 20)
    args = ("bench", "speculative", "demo-draft", "--speculative", "draft=demo-draft", "--text", tmp_path / "own.txt")
    code, out, _ = run_cli(*args, *SMALL, "--prompts", 1, "--temperature", 0.8, "--no-save", "--json")
    assert code == 0
    plain, drafted = json.loads(out)["rows"]
    assert plain["speculative"] is None
    assert (drafted["text"], drafted["temperature"]) == ("own.txt", 0.8)
    assert drafted["tokens_per_second"] > 0


def test_forced_acceptance_from_the_command_line(run_cli: Cli, tmp_path: Path) -> None:
    """Shapes with random weights, whose own guesses would all be right: the coin decides."""
    args = ("bench", "speculative", "shape:tiny:bf16", "--draft", "shape:tiny", "--acceptance", "0,1", "--k", "2,3")
    code, out, err = run_cli(*args, *SMALL, "--batch", "1,2", "--output", tmp_path / "rows.csv")
    assert (code, err) == (0, "")
    assert "c = " in out
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    cases = [(k, batch, a) for k in ("2", "3") for batch in ("1", "2") for a in ("0.0", "1.0")]
    assert [(row["k"], row["batch"], row["a"]) for row in rows] == cases
    for row in rows:
        right = row["a"] == "1.0"
        assert float(row["acceptance"]) == float(row["a_measured"]) == float(right)
        assert (float(row["tokens_per_step"]) == 1) is not right
        assert (row["format"], row["text"]) == ("bf16", "")
        cost, k = float(row["cost_ratio"]), int(row["k"])
        assert float(row["formula"]) == pytest.approx((k + 1 if right else 1) / (k * cost + 1), rel=1e-2)
        speed_up = float(row["tokens_per_second"]) / float(row["plain_tokens_per_second"])
        assert float(row["speed_up"]) == pytest.approx(speed_up, rel=1e-2)
        assert float(row["percent_of_formula"]) == pytest.approx(100 * speed_up / float(row["formula"]), rel=1e-2)


def test_forced_acceptance_of_checkpoints(run_cli: Cli) -> None:
    args = ("bench", "speculative", "demo-draft", "--draft", "demo-draft", "--acceptance", "0.5", "--no-save", "--json")
    code, out, _ = run_cli(*args, *SMALL)
    assert code == 0
    (row,) = json.loads(out)["rows"]
    assert row["speculative"] == "draft=demo-draft,k=4,adaptive=off"
    assert 0 <= row["a_measured"] <= 1
    assert row["cost_ratio"] > 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("demo-draft",), ("--draft MODEL", "--speculative HOW")),
        (("demo-draft", "--draft", "demo-draft", "--speculative", "ngram"), ("--draft MODEL", "--speculative HOW")),
        (("demo-draft", "--draft", "demo-draft", "--text", "heldout"), ("--text goes with --speculative",)),
        (("demo-draft", "--speculative", "ngram", "--k", "2"), ("--k goes with --draft",)),
        (
            ("demo-draft", "--draft", "demo-draft", "--acceptance", "0.5,1.2"),
            ("--acceptance is '0.5,1.2'", "from 0 to 1"),
        ),
        (("demo-draft", "--draft", "demo-draft", "--k", "99"), ("k must be a whole number from 1 to",)),
        (("demo-draft", "--draft", "demo-draft", "--k", "two"), ("--k is 'two'", "whole numbers")),
        (("demo-draft", "--draft", "demo-draft", "--batch", "0"), ("--batch is '0'", "1 or more")),
        (("demo-draft", "--draft", "shape:tiny"), ("a checkpoint needs one that knows its tokens",)),
        (("shape:tiny", "--draft", "demo-draft"), ("draft=shape:NAME:FORMAT",)),
        (("shape:tiny", "--draft", "shape:llama-3.2-1b"), ("128256 tokens, the model 512",)),
        (("shape:tinny", "--draft", "shape:tiny"), ("unknown shape 'tinny'", "did you mean 'tiny'")),
        (("shape:tiny:w5", "--draft", "shape:tiny"), ("unknown format 'w5'", "did you mean")),
        (("shape:tiny", "--speculative", "ngram"), ("no text fits it",)),
        (("demo-draft", "--speculative", "ngramm"), ("speculative is 'ngramm'", "did you mean 'ngram'")),
        (("demo-draft", "--speculative", "ngram", "--text", "nowhere.txt"), ("no text 'nowhere.txt'", "heldout")),
        (("demo-draft", "--speculative", "ngram", "--temperature", "-1"), ("--temperature is -1.0", "0 or more")),
        (("demo-draft", "--speculative", "ngram", "--prompts", "100000"), ("100000 are wanted", "--prompts")),
        (("nowhere", "--speculative", "ngram"), ("no model at 'nowhere'",)),
    ],
)
def test_refused(assert_refused: Refused, tmp_path: Path, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert_refused(tmp_path, "bench", "speculative", *args, *SMALL, "--no-save", words=words)


def test_bench_engine_says_what_was_guessed(run_cli: Cli, tmp_path: Path) -> None:
    args = (*ENGINE, "--shape", "tiny", "--format", "bf16", "--output", tmp_path / "rows.csv")
    assert run_cli(*args)[0] == 0
    code, out, err = run_cli(*args, "--speculative", "draft=shape:tiny,k=3,adaptive=off")
    assert (code, err) == (0, "")
    assert "guesses right %" in out
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["speculative"] for row in rows] == ["", "", *["draft=shape:tiny,k=3,adaptive=off"] * 2]
    assert [(row["tokens_per_step"], row["acceptance"]) for row in rows[:2]] == [("", "")] * 2
    for row in rows[2:]:  # the same random weights: never wrong. 12 tokens are one, two times 3 + 1, and 2 + 1
        assert (float(row["tokens_per_step"]), float(row["acceptance"])) == (pytest.approx(11 / 3, abs=1e-3), 1.0)
        assert float(row["step_ms"]) > 0


def test_old_results_get_the_new_columns(run_cli: Cli, tmp_path: Path) -> None:
    """A file from before has fewer columns: its rows stay what they were."""
    file, old = tmp_path / "engine.csv", ENGINE_COLUMNS[:-3]
    values = [f"{name} 1" for name in old]
    file.write_text(",".join(old) + "\n" + ",".join(values) + "\n")
    args = (*ENGINE, "--shape", "tiny", "--format", "bf16", "--output", file)
    assert run_cli(*args)[0] == 0
    with file.open() as opened:
        first, *rest = csv.DictReader(opened)
    assert first == dict(zip(old, values, strict=True)) | dict.fromkeys(ENGINE_COLUMNS[-3:], "")
    assert [row["batch"] for row in rest] == ["1", "2"]
    assert [path.name for path in tmp_path.iterdir()] == ["engine.csv"]


def test_the_results_of_this_repository_can_be_appended_to() -> None:
    results = Path(__file__).parents[2] / "eval" / "results"
    csv_file.check_header(results / "engine.csv", ENGINE_COLUMNS)
    csv_file.check_header(results / "speculative.csv", COLUMNS)


def test_files_with_other_columns_are_refused(run_cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "other.csv"
    file.write_text("date,colour\n2026-01-01,red\n")
    with pytest.raises(StorageError, match="other columns"):
        csv_file.check_header(file, ENGINE_COLUMNS)
    code, _, err = run_cli(*ENGINE, "--shape", "tiny", "--output", file)
    assert code != 0
    assert "other columns" in err
    args = ("bench", "speculative", "demo", "--speculative", "ngram", "--output", tmp_path / "no" / "rows.csv")
    code, _, err = run_cli(*args)
    assert code != 0
    assert "does not exist" in err
    assert file.read_text() == "date,colour\n2026-01-01,red\n"
