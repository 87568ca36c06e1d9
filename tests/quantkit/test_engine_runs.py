"""Verdicts about engines against what was seen when they were run (eval/results/interop.csv)."""

import re
from pathlib import Path

import pytest

from quantkit.arch import family_of
from quantkit.checkpoint import Checkpoint
from quantkit.convert import target_format
from quantkit.engine_runs import (
    GGUF_RESULTS,
    RESULTS,
    Run,
    newest,
    read_gguf_runs,
    read_runs,
    run_of_blocks,
    run_of_layout,
)
from quantkit.engines import NOT_RUN, Layers, Verdict, layout_of, verdicts
from quantkit.eval.interop.checkpoints import Tried, all_tried
from quantkit.formats import Awq, CtPacked, Format, Gguf, Gptq
from quantkit.recipe import load_recipe
from quantkit.sources import model_folder

TRIED = {tried.name: tried for tried in all_tried()}
RUNS = newest(read_runs())
MODELS = {run.model: Checkpoint(model_folder(run.model)) for run in RUNS}


def planned(tried: Tried, model: str = "demo") -> Layers:
    """The layers that a recipe or a conversion will write, as they are read back."""
    if tried.source:
        before = planned(TRIED[tried.source], model)
        was_symmetric = tried.source == "gptq-w4g128-to-awq"  # `convert` sees it in the zero points
        old = {name: Gptq() if was_symmetric else fmt for name, fmt in before.formats.items()}
        return Layers({name: as_read(target_format(fmt, tried.to)) for name, fmt in old.items()}, before.kept_in_blocks)
    if not tried.recipe:
        return Layers({})
    recipe = load_recipe(tried.recipe, tried.changes)
    config = MODELS[model].config
    plan = recipe.plan(family_of(config), config, MODELS[model].dtype)
    formats = {name: as_read(fmt) for name, fmt in plan.items() if fmt is not None}
    return Layers(formats, tuple(name for name, fmt in plan.items() if fmt is None))


def as_read(fmt: Format) -> Format:
    """AWQ has zero points for symmetric weights too, and says so."""
    return Awq(group_size=fmt.group_size, dtype=fmt.dtype) if isinstance(fmt, Awq) else fmt


def layers_of(run: Run) -> Layers:
    """Of the checkpoint that was run; what bits a budget is spent on, only its row knows."""
    tried = TRIED[run.checkpoint]
    if tried.recipe and load_recipe(tried.recipe, tried.changes).target_bits is not None:
        kinds = re.findall(r"W(\d) (sym|asym)", run.layout)
        return Layers({f"layer{bits}": CtPacked(bits=int(bits), sym=sym == "sym") for bits, sym in kinds})
    return planned(tried, run.model)


def verdict_for(run: Run) -> Verdict:
    (found,) = [verdict for verdict in verdicts(layers_of(run)) if verdict.engine == run.engine]
    return found


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.engine}-{run.model}-{run.checkpoint}")
def test_verdicts_say_what_was_seen(run: Run) -> None:
    """Where this fails, mend the rules: `Format.refusals`, or engines.py."""
    assert layout_of(layers_of(run)) == run.layout, "this checkpoint is written otherwise today: run it again"
    verdict = verdict_for(run)
    assert verdict.loads == run.works, f"{run.engine} {run.version} said: {run.reason or 'other numbers'}"
    assert re.fullmatch(rf"run with {run.engine} \S+, \d{{4}}-\d\d-\d\d", verdict.evidence)


def test_without_a_row_a_verdict_rests_on_the_source() -> None:
    odd = Layers({"layer": Gptq(bits=2, group_size=1024)})
    assert run_of_layout("vLLM", layout_of(odd)) is None
    assert {verdict.evidence for verdict in verdicts(odd)[1:]} == {NOT_RUN}
    have = {(run.engine, run.layout) for run in read_runs()}
    for tried in TRIED.values():
        layers = planned(tried)
        for verdict in verdicts(layers):
            if verdict.engine != "quantkit" and (verdict.engine, layout_of(layers)) not in have:
                assert verdict.evidence == (NOT_RUN if verdict.sources else "not run")


@pytest.mark.parametrize("run", read_gguf_runs(), ids=lambda run: f"{run.checkpoint}-{run.date}")
def test_files_that_llama_cpp_ran_are_evidence(run: Run) -> None:
    """It computed what the file means, and the verdict about such blocks names a run."""
    assert run.works
    blocks = set(re.findall(r"x (\w+)", run.layout)) - {"F32", "F16", "BF16"}
    if not blocks:
        return
    found = {one.engine: one for one in verdicts(Layers({kind: Gguf(kind) for kind in blocks}))}
    assert found["llama.cpp"].loads
    assert re.fullmatch(r"run with llama.cpp \S+, \d{4}-\d\d-\d\d", found["llama.cpp"].evidence)
    assert found["Ollama"].evidence == NOT_RUN


def test_types_that_no_file_had_together_were_not_run() -> None:
    assert run_of_blocks("llama.cpp", frozenset({"Q4_K", "IQ4_NL"})) is None
    assert run_of_blocks("Ollama", frozenset({"Q4_K"})) is None


def test_evidence_names_the_newest_run(tmp_path: Path) -> None:
    known = read_runs()
    assert known == sorted(known, key=lambda run: run.date)
    assert known, "the rows of eval/results/interop.csv are gone"
    last = known[-1]
    found = run_of_layout(last.engine, last.layout)
    assert found is not None
    assert found.date == last.date
    assert Verdict("vLLM", run=found).evidence == f"run with vLLM {found.version}, {found.date}"
    assert read_runs(tmp_path / "none.csv") == []


def test_loading_is_not_enough() -> None:
    run = Run("vLLM", "0", "2026-11-17", "nf4", "any", True, "", 20.0, 16.0)
    assert not run.works
    assert not Run("vLLM", "0", "2026-11-17", "nf4", "any", False, "no kernel", None, None).works


def test_the_rows_travel_with_the_package() -> None:
    """The files, which pyproject.toml puts into wheels."""
    root = Path(__file__).parents[2]
    assert RESULTS.resolve() == root / "eval" / "results" / "interop.csv"
    assert GGUF_RESULTS.resolve() == root / "eval" / "results" / "gguf.csv"
    packaged = '"quantkit.eval.results" = ["interop.csv", "gguf.csv", '
    assert packaged in (root / "pyproject.toml").read_text(encoding="utf-8")
