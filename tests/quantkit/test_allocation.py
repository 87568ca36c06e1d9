"""Automatic bits: the best mix under a budget, exact sizes, a decision that is made once."""

import itertools
import json
import random
from pathlib import Path

import pytest

import quantkit
from quantkit.calibration import Calibration
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.formats import CtPacked
from quantkit.methods import budget
from quantkit.methods.budget import Option, allocate
from quantkit.pipeline import run
from quantkit.pipeline.allocation import Allocation, choose_formats, formats_from_record
from quantkit.pipeline.job import Job, prepare
from quantkit.recipe import Recipe, load_recipe

LITTLE = Calibration(samples=6, seq_len=32)


def random_groups(seed: int) -> tuple[list[list[Option]], int]:
    """A few groups of layers with schemes of odd sizes, and a budget between the least and the most."""
    numbers = random.Random(seed)
    groups = []
    for _ in range(numbers.randint(1, 5)):
        weights, sensitivity = numbers.randint(300, 3000), numbers.lognormvariate(0, 1)
        options = []
        for bits, size in itertools.product((2, 3, 4, 6), (32, 128)):
            loss = weights * sensitivity * numbers.uniform(0.5, 1.5) * 4.0**-bits
            options.append(Option(int(weights * (bits + 16 / size)), loss))
        groups.append(options)
    least, most = (sum(pick(option.bits for option in options) for options in groups) for pick in (min, max))
    return groups, numbers.randint(least, most)


def totals(groups: list[list[Option]], chosen: list[int]) -> tuple[int, float]:
    picked = [options[index] for options, index in zip(groups, chosen, strict=True)]
    return sum(option.bits for option in picked), sum(option.loss for option in picked)


@pytest.mark.parametrize("seed", range(60))
def test_no_other_choice_loses_less(seed: int) -> None:
    groups, bits = random_groups(seed)
    spent, loss = totals(groups, allocate(groups, bits))
    assert spent <= bits
    every = (totals(groups, list(choice)) for choice in itertools.product(range(8), repeat=len(groups)))
    assert loss == pytest.approx(min(lost for size, lost in every if size <= bits))


@pytest.mark.parametrize("seed", range(20))
def test_a_coarse_table_stays_within_the_budget(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, bits = random_groups(seed)
    _, best = totals(groups, allocate(groups, bits))
    _, less = totals(groups, allocate(groups, max(bits - 200, sum(min(o.bits for o in each) for each in groups))))
    monkeypatch.setattr(budget, "UNITS", 500)
    spent, loss = totals(groups, allocate(groups, bits))
    assert spent <= bits
    assert best <= loss <= less + 1e-12  # a unit is at most 40 bits here, so less than 200 are lost


def test_budgets_at_both_ends() -> None:
    groups, _ = random_groups(1)
    least, most = (sum(pick(option.bits for option in options) for options in groups) for pick in (min, max))
    assert totals(groups, allocate(groups, least))[0] == least
    best = sum(min(option.loss for option in options) for options in groups)
    assert totals(groups, allocate(groups, 10 * most))[1] == pytest.approx(best)


def job_for(*changes: str, model: str | Path = "demo-draft", calibration: Calibration = LITTLE) -> Job:
    recipe = load_recipe("auto-w3.5", changes)
    return prepare(model, recipe, "never-written", calibration=calibration, device="cpu", quality_windows=0)


@pytest.fixture(scope="module")
def allocation(tmp_path_factory: pytest.TempPathFactory) -> Allocation:
    return choose_formats(job_for("method=rtn"), tmp_path_factory.mktemp("scratch"))


def test_sizes_are_exact_and_within_the_target(allocation: Allocation) -> None:
    job = job_for("method=rtn")
    bits = weights = 0
    for module, fmt in allocation.formats.items():
        weight = job.source.tensor(f"{module}.weight").float()
        weights += weight.numel()
        bits += 8 * sum(part.nbytes for part in fmt.encode(weight).values())
    assert allocation.record["bits_per_weight"] == bits / weights
    assert 3.45 < bits / weights <= 3.5


def test_fused_layers_share_a_scheme(allocation: Allocation) -> None:
    job = job_for()
    assert list(allocation.formats) == list(job.plan)
    for modules in (modules for layer in job.family.linears_by_stage(job.source.config) for modules in layer):
        assert len({allocation.formats[module] for module in modules}) == 1
    assert len(set(allocation.formats.values())) > 1
    assert all(isinstance(fmt, CtPacked) and fmt.sym for fmt in allocation.formats.values())


def test_the_same_data_decide_the_same(allocation: Allocation, tmp_path: Path) -> None:
    assert choose_formats(job_for("method=rtn"), tmp_path) == allocation


def test_record_is_json_and_gives_the_formats_back(allocation: Allocation) -> None:
    record = json.loads(json.dumps(allocation.record))
    assert record == allocation.record
    assert formats_from_record(record, job_for().plan) == allocation.formats
    assert record["kl"] == pytest.approx(sum(group["kl"] for group in record["groups"]))


def test_kept_layers_take_no_part(tmp_path: Path) -> None:
    job = job_for("method=rtn", "keep=['*.mlp.*', 'model.layers.0.*']", "target_bits=4.2", "format.sym=false")
    found = choose_formats(job, tmp_path)
    assert set(found.formats) == set(job.chosen)
    assert len(found.record["groups"]) == 2
    assert 4 < found.record["bits_per_weight"] <= 4.2
    assert all(isinstance(fmt, CtPacked) and not fmt.sym for fmt in found.formats.values())


def test_more_bits_lose_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured once for all targets, so that only the choice differs."""
    from quantkit.passes.sensitivity import SensitivityPass

    work = job_for("method=rtn")
    measured = SensitivityPass(work.source, work.family, work.chosen, work.method, "cpu", tmp_path).run(work.tokens, 3)
    monkeypatch.setattr(SensitivityPass, "run", lambda *_: measured)
    records = [choose_formats(job_for(f"target_bits={bits}"), tmp_path).record for bits in (2.2, 2.9, 3.5, 5, 8)]
    losses = [record["kl"] for record in records]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.01 * losses[0]
    for record in records:
        assert record["target_bits"] - 0.1 < record["bits_per_weight"] <= record["target_bits"]


def test_targets_out_of_reach_say_the_range() -> None:
    with pytest.raises(InputError, match=r"target_bits is 2, .* take 2\.13 to 8\.50 bits per weight") as caught:
        job_for("target_bits=2")
    assert "\n" not in str(caught.value)


def test_quantize_says_why_in_its_log(tmp_path: Path) -> None:
    steps: list[tuple[str, int]] = []
    report = quantkit.quantize(
        "demo-draft",
        load_recipe("auto-w3.5", ["method=rtn"]),
        tmp_path / "out",
        calibration=LITTLE,
        quality_windows=0,
        on_layer=lambda item, total: steps.append((item, total)),
    )
    first = json.loads((tmp_path / "out" / "quantization_log.jsonl").read_text().splitlines()[0])
    decided = formats_from_record(first["allocation"], job_for().plan)
    assert Checkpoint(tmp_path / "out").formats == decided
    assert report.bits_per_weight == first["allocation"]["bits_per_weight"] <= 3.5
    assert len(steps) == 8 + 14
    assert {total for _, total in steps} == {8 + 14}


def test_a_killed_run_keeps_its_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe: Recipe = load_recipe("auto-w3.5", ["method=rtn"])

    def kill(item: str, total: int) -> None:
        if item.startswith("model.layers.1.mlp.up_proj") and "measured" not in item:
            raise KeyboardInterrupt

    def quantize(name: str, **more: object) -> None:
        quantkit.quantize("demo-draft", recipe, tmp_path / name, calibration=LITTLE, quality_windows=0, **more)

    quantize("whole")
    with pytest.raises(KeyboardInterrupt):
        quantize("killed", on_layer=kill)
    monkeypatch.setattr(run, "choose_formats", None)  # whoever decides again fails
    quantize("killed")
    whole, killed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed"))
    assert whole == killed
