"""A plan for traffic: by hand, against measured rows that it has not seen, and as a user types it."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from quantkit.errors import InputError
from quantkit.eval.plan.attention_kinds import kinds_of_attention
from quantkit.eval.plan.efficiency import TYPICAL, Efficiency, Part, efficiency_on, evidence_for, fit
from quantkit.eval.plan.gpus import GPUS
from quantkit.eval.plan.guessing import Guessing, gain
from quantkit.eval.plan.intensity import phases, ridge_points
from quantkit.eval.plan.measured import Case, ceiling_of, known_rows, read_rows
from quantkit.eval.plan.model import read_model
from quantkit.eval.plan.question import Question
from quantkit.eval.plan.reached import reached
from quantkit.eval.plan.roofline import mean_context
from quantkit.eval.plan.source import find_config
from quantkit.eval.plan.traffic import Replica, Traffic, fleet_of, plan_traffic, replicas_of
from quantkit.eval.plan.weights import choose
from quantkit.recipe import load_recipe

Cli = Callable[..., tuple[int, str, str]]
H200 = GPUS["h200"]
MILLION = Traffic(1_000_000, 512, 256, 3.0, ttft=1.0, tpot=0.02)
MILLION_ASKED = "--requests-per-day 1000000 --prompt 512 --new 256 --peak-factor 3 --ttft 1 --tpot 0.05"
CONSTANTS = {
    Part("overhead", "", False): 25e-6,
    Part("weights", "W4 g128 sym", False): 1.5,
    Part("cache", "", False): 1.1,
    Part("decode", "weight-only", False): 1.4,
    Part("prompt", "weight-only", False): 1.5,
}
# Llama-3.1-8B: q and o 4096 x 4096, k and v 1024 x 4096, gate, up and down 14336 x 4096
LINEAR = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
HEAD = 128256 * 4096
# half a byte a weight, a scale of 2 bytes and half a byte of zero point for 128, an int32 for every input column
READ = LINEAR // 2 + LINEAR // 128 * 5 // 2 + 4 * 32 * (6 * 4096 + 14336) + 2 * (HEAD + 65 * 4096)


def replicas(share: float | None = None) -> list[Replica]:
    model = read_model(*find_config("llama-3.1-8b"))
    assert model.decoder is not None
    chosen = choose(model, load_recipe("gptq-w4g128"))
    return list(replicas_of(model.decoder, chosen, H200, Question(context=768, answer=256), None, share))


def life_by_hand(batch: int) -> tuple[float, float]:
    """(step, life) in seconds: 25 us a layer, then 1.5, 1.1, 1.4 and 1.5 times what the data sheet says."""
    every = 32 * 25e-6 + 1.5 * READ / 4.8e12
    context = 512 + 127  # half of 255 steps
    cache = 1.1 * batch * context * 131_072 / 4.8e12
    step = every + cache + 1.4 * batch * (2 * (LINEAR + HEAD) + 4 * 4096 * context * 32) / 989.5e12
    pairs = 512 * 513 // 2
    prompts = 1.5 * batch * (512 * 2 * LINEAR + 2 * HEAD + 4 * 4096 * pairs * 32) / 989.5e12
    return step, math.ceil(batch * 512 / 8192) * every + prompts + 255 * step


def test_a_million_requests_by_hand() -> None:
    one = replace(replicas()[0], efficiency=Efficiency(CONSTANTS))
    fleet = fleet_of("gptq-w4g128", [one], MILLION)
    load = fleet.load
    assert load is not None
    rate = 1_000_000 / 86_400 * 3  # 34.7 a second at the peak
    step, life = life_by_hand(load.batch)
    assert life / 255 <= 0.02 < life_by_hand(load.batch + 1)[1] / 255  # the largest batch that keeps 20 ms
    assert fleet.limit == "--tpot"
    assert load.step == pytest.approx(step)
    assert load.between_tokens == pytest.approx(life / 255)
    assert load.requests_per_second == pytest.approx(load.batch / life)
    assert fleet.gpus == math.ceil(rate * life / load.batch)
    own = life_by_hand(1)[1] - 255 * life_by_hand(1)[0]
    busy = load.batch / life * own
    assert load.first_token == pytest.approx(step + own + busy * own / (2 * (1 - busy)))
    assert fleet.cost_per_day(3.0) == 24 * 3.0 * fleet.gpus
    assert fleet.watts == 700 * fleet.gpus
    assert fleet.joules_per_token(MILLION) == pytest.approx(700 * life / load.batch / 256)


def test_a_million_requests_as_a_user_asks(run_cli: Cli) -> None:
    """At half of the ceilings, so that nothing that was measured plays a part."""
    asked = "--requests-per-day 1000000 --prompt 512 --new 256 --peak-factor 3 --price-per-hour 3 --efficiency 0.5"
    args = ("plan", "llama-3.1-8b", "--gpu", "h200", "-r", "gptq-w4g128", *asked.split(), "--acceptance", "0.6")
    code, out, err = run_cli(*args, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    fleet = found["fleets"][1]
    step = (READ + 256 * 639 * 131_072) / 4.8e12  # longer than to compute it
    prompts = 256 * (512 * 2 * LINEAR + 2 * HEAD + 4 * 4096 * 512 * 513 // 2 * 32) / 989.5e12
    rate = 256 / ((prompts + 255 * step) / 0.5)
    assert fleet["load_of_a_replica"]["batch"] == 256
    assert fleet["load_of_a_replica"]["requests_per_second"] == pytest.approx(rate)
    assert fleet["gpus"] == math.ceil(1_000_000 / 86_400 * 3 / rate) == 1
    assert fleet["cost_per_day"] == 72
    assert fleet["cost_per_request"] == pytest.approx(72e-6)
    assert fleet["kwh_per_million_tokens"] == pytest.approx(700 / (rate * 256) / 3600 * 1e6 / 1e3)
    assert fleet["percent_of_ceiling"] == pytest.approx(50)
    assert fleet["evidence"]["words"].startswith("assumed: 0.5 of the ceiling")
    assert found["speculation"]["tokens_per_step"] == pytest.approx(1 + 0.6 + 0.36 + 0.216 + 0.1296)


def test_predictions_are_within_15_percent_of_rows_that_they_have_not_seen() -> None:
    """Each by constants fitted to all other rows."""
    found = [reached(row) for row in known_rows(routed=False)]
    close = [one.row.case for one in found if abs(one.error) <= 0.15]
    assert len(close) >= 0.95 * len(found) > 40
    assert {"auto", "fp8", "int8", "int4"} == {case.kv_dtype for case in close}
    assert {"bf16", "w4", "nf4", "llm-int8", "fp8"} <= {case.format for case in close}
    assert {1, 8, 32, 256} <= {case.batch for case in close}
    assert median(abs(one.error) for one in found) < 0.05
    assert max(abs(one.error) for one in found) < 0.2
    assert all(one.percent < 100 for one in found)


def test_a_larger_model_is_predicted_by_rows_of_a_smaller_one() -> None:
    large = [row for row in known_rows(routed=False) if row.case.model == "llama-3.1-70b"]
    known = efficiency_on(H200, routed=False, leave_out=frozenset(row.case for row in large))
    assert {row.case.batch for row in large} == {1, 8, 32, 64}
    for row in large:
        case, ceiling = row.case, ceiling_of(row.case)
        predicted = known.answer_tokens_per_second(ceiling, case.batch, case.prompt, case.new)
        assert predicted == pytest.approx(row.tokens_per_second, rel=0.15), case


def test_a_fit_finds_what_made_the_rows() -> None:
    """Times that some constants make are found again, but for the pull to what is typical."""
    truth = efficiency_on(H200, routed=False)
    made = []
    for row in truth.rows:
        case, ceiling = row.case, ceiling_of(row.case)
        step = truth.step_seconds(ceiling, case.batch, mean_context(case.prompt, case.new))
        prompts = truth.prompt_seconds(ceiling, case.prompt, case.batch)
        made.append(replace(row, step=row.step and step, prompts=prompts))
    again = fit(made)
    for row in made:
        if row.step is not None:
            ceiling, context = ceiling_of(row.case), mean_context(row.case.prompt, row.case.new)
            assert again.step_seconds(ceiling, row.case.batch, context) == pytest.approx(row.step, rel=0.02)


def test_nothing_is_faster_than_its_data_sheet() -> None:
    for part, value in efficiency_on(H200, routed=False).constants.items():
        assert value >= (1 if part.what != "overhead" else 0), part


def test_what_a_prediction_rests_on_is_said() -> None:
    here, *_ = replicas()
    measured = evidence_for(here.efficiency, here.ceiling)
    assert measured.measured
    assert "llama-3.1-8b w4 at 1, 8, 32" in measured.words
    assert {row.case.gpu for row in measured.rows} == {"h200"}
    elsewhere = replace(here.ceiling, gpu=GPUS["l4"])
    assert not evidence_for(here.efficiency, elsewhere).measured
    assert "the H200's shares of its data sheet" in evidence_for(here.efficiency, elsewhere).words
    strange = replace(here.ceiling, weights=replace(here.ceiling.weights, scheme="W5"))
    assert "none was W5" in evidence_for(here.efficiency, strange).words
    assert "typical" in evidence_for(Efficiency({}), strange).words


def test_layouts_without_rows_get_what_is_typical() -> None:
    known = Efficiency(CONSTANTS)
    assert known.constant(Part("weights", "W5", False)) == 1.5
    assert known.constant(Part("weights", "W5", True)) == TYPICAL["weights"]


def test_rows_are_the_newest_and_without_guesses(tmp_path: Path) -> None:
    rows = read_rows()
    assert len({row.case for row in rows}) == len(rows) > 80
    assert all(row.tokens_per_second > 0 and row.prompts > 0 for row in rows)
    newest = next(row for row in rows if row.case == Case("h200", "llama-3.1-8b", "w4", "auto", 1, 128, 256))
    assert newest.date >= "2026-11-18"
    assert read_rows(tmp_path / "engine.csv") == ()


def test_the_rows_travel_with_the_package() -> None:
    root = Path(__file__).parents[2]
    assert '"engine.csv"' in (root / "pyproject.toml").read_text(encoding="utf-8")


def test_ridge_points_and_phases_by_hand() -> None:
    assert ridge_points(H200) == {"bf16": 989.5e12 / 4.8e12, "fp8": 1979e12 / 4.8e12, "int8": 1979e12 / 4.8e12}
    assert set(ridge_points(GPUS["a10"])) == {"bf16", "int8"}
    prompt, step = phases(replicas()[0].ceiling, 512, 639, (8,))
    assert prompt.per_byte == pytest.approx((512 * 2 * LINEAR + 2 * HEAD + 4 * 4096 * 512 * 513 / 2 * 32) / READ)
    assert step.operations == 8 * (2 * (LINEAR + HEAD) + 4 * 4096 * 639 * 32)
    assert step.bytes == READ + 8 * 639 * 131_072
    assert (prompt.bound, step.bound) == ("compute", "memory")


def test_what_speculation_brings_by_hand() -> None:
    ceiling = replicas()[0].ceiling
    found = gain(Efficiency(CONSTANTS), ceiling, Guessing(0.5, 2), 4, 639)
    every, context = 32 * 25e-6 + 1.5 * READ / 4.8e12 + 1.1 * 4 * 639 * 131_072 / 4.8e12, 639
    row = 1.4 * (2 * (LINEAR + HEAD) + 4 * 4096 * context * 32) / 989.5e12
    assert found.plain == pytest.approx(every + 4 * row)
    assert found.verifying == pytest.approx(every + 12 * row)
    assert found.speed_up == pytest.approx(1.75 * found.plain / found.verifying)
    assert found.worth == pytest.approx((1.75 - found.verifying / found.plain) / 2)


@pytest.mark.parametrize(
    ("name", "own", "numbers"),
    [
        ("llama-3.1-8b", "GQA", {"MHA": 2 * 32 * 128, "GQA": 2 * 8 * 128, "MQA": 2 * 128, "MLA": 576}),
        ("phi-3-mini", "MHA", {"MHA": 2 * 32 * 96, "GQA": 2 * 8 * 96, "MQA": 2 * 96, "MLA": 432}),
        ("deepseek-v3", "MLA", {"MHA": 2 * 128 * 128, "GQA": 2 * 32 * 128, "MQA": 2 * 128, "MLA": 576}),
    ],
)
def test_kinds_of_attention_by_hand(name: str, own: str, numbers: dict[str, int]) -> None:
    model = read_model(*find_config(name))
    assert model.decoder is not None
    kinds = kinds_of_attention(model.decoder, model.cache, Question(context=1000), 10**12)
    assert {kind.cache.kind: kind.cache.per_layer for kind in kinds} == numbers
    assert [kind.cache.kind for kind in kinds if kind.own] == [own]
    assert all(kind.requests == 10**12 // (2 * kind.cache.layers * kind.cache.per_layer * 1000) for kind in kinds)


def test_more_gpus_where_one_is_too_small_or_too_slow() -> None:
    model = read_model(*find_config("llama-3.1-70b"))
    (plain,) = plan_traffic(model, [], [GPUS["h100"]], Question(), MILLION).fleets
    assert plain.load is not None
    assert plain.replica.ranks.tensor > 1
    assert not plain.evidence.measured
    assert plain.gpus == plain.replicas * plain.replica.ranks.world
    hopeless = plan_traffic(model, [], [GPUS["l4"]], Question(), replace(MILLION, tpot=1e-4)).fleets[0]
    assert hopeless.load is None
    assert hopeless.limit == "one request alone misses --tpot"
    assert hopeless.to_dict(MILLION, 1.0)["gpus"] is None


def test_tables_for_one_gpu_and_for_all(run_cli: Cli) -> None:
    million = MILLION_ASKED.split()
    code, out, err = run_cli("plan", "llama-3.1-8b", *million, "--acceptance", "0.6", "--guesses", "4")
    assert (code, err) == (0, "")
    for word in ("34.7 a second", "RTX 4090", "MI300X", "first ms", "data-sheet TDP", "ridge point", "GQA (this model)",
                 "MLA", "guesses for nothing", "off by", "engine.csv", "the H200's shares"):  # fmt: skip
        assert word in out, word
    code, out, _ = run_cli("plan", "demo-experts", "--gpu", "l4", "-r", "nf4,fp8", *million, "--price-per-hour", "1")
    assert code == 0
    for word in ("demo-experts on the L4", "bf16", "nf4", "fp8", "cost/request", "24.00"):
        assert word in out, word


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--ttft 1", "--ttft belongs to a plan for traffic; give --requests-per-day too"),
        ("--requests-per-day 0", "--requests-per-day is 0, but must be more than 0"),
        ("--requests-per-day 5 --peak-factor 0.5", "--peak-factor is 0.5, but must be 1 or more"),
        ("--requests-per-day 5 --acceptance 1", "--acceptance is 1, but must be 0 or more and less than 1"),
        ("--requests-per-day 5 --guesses 3", "give --acceptance too"),
        ("--requests-per-day 5 --acceptance 0.5 --guesses 99", "--guesses is 99, but must be 1 to 32"),
        ("--requests-per-day 5 --prompt 0", "--prompt is 0, but must be 1 or more tokens"),
        ("--requests-per-day 5 --efficiency 2", "--efficiency is 2, but must be more than 0 and at most 1"),
        ("--requests-per-day 5 --tensor-parallel 2", "choose --tensor-parallel themselves"),
    ],
)
def test_wrong_input_is_one_line(run_cli: Cli, options: str, message: str) -> None:
    code, out, err = run_cli("plan", "demo", *options.split())
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_family_that_is_not_known_is_refused() -> None:
    unknown = read_model("m", {"model_type": "mamba9", "num_hidden_layers": 2, "num_attention_heads": 2,
                               "hidden_size": 64})  # fmt: skip
    with pytest.raises(InputError):
        plan_traffic(unknown, [], [H200], Question(), MILLION)
