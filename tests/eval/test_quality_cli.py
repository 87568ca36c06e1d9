"""`quantkit eval`: what it prints, its JSON, and what it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.sources import model_folder

Cli = Callable[..., tuple[int, str, str]]
Refused = Callable[..., None]
SMALL = ("--window", 64, "--max-windows", 3)


@pytest.fixture
def int8(quantized_draft: Callable[..., Path]) -> Path:
    return quantized_draft("llm-int8")


def test_text_and_json_say_the_same(int8: Path, run_cli: Cli) -> None:
    args = ("eval", int8, "--base", "demo-draft", "--layers", "--kl-windows", 2, *SMALL)
    found = json.loads(run_cli(*args, "--json")[1])
    assert (found["model"], found["base"]) == (str(int8), "demo-draft")
    assert (found["windows"], found["compared_windows"], found["tokens"]) == (3, 2, 3 * 63)
    assert found["perplexity"]["low"] < found["perplexity"]["value"] < found["perplexity"]["high"]
    assert 0 < found["kl"]["value"] < 0.1
    layers = len(found["layers"]["blocks"])
    assert {len(errors) for errors in found["layers"]["linears"].values()} == {layers}
    code, out, _ = run_cli(*args)
    assert code == 0
    for name, digits in (("perplexity", ".4f"), ("bits_per_byte", ".4f"), ("kl", ".5f"), ("kl_p99", ".4f")):
        value, low, high = (found[name][key] for key in ("value", "low", "high"))
        assert f"{value:{digits}} [{low:{digits}}, {high:{digits}}]" in out
    assert f"{found['top1_agreement']['value']:.2%}" in out
    assert f"perplexity times {found['perplexity_ratio']['value']:.4f}" in out
    assert found["protocol"] in out
    assert found["arithmetic"] in out
    assert found["provenance"]["calibration"]["default"] is True
    assert "llm-int8: the default text calibration.txt, 2 samples of 64 tokens, 128 in all" in out
    assert "base model demo-draft: trained for quantkit, without rounding noise" in out
    worst = max(max(errors) for errors in found["layers"]["linears"].values())
    assert f"{worst:.4f}" in out


def test_backends_agree(int8: Path, run_cli: Cli) -> None:
    args = ("eval", int8, *SMALL, "--json")
    reference, runtime, steps = (
        json.loads(run_cli(*args, *more)[1])
        for more in ((), ("--backend", "runtime"), ("--backend", "runtime", "--step-tokens", 8))
    )
    assert [one["backend"] for one in (reference, runtime, steps)] == ["reference", "runtime", "runtime"]
    assert "step_tokens 8," in steps["arithmetic"]
    for other in (runtime, steps):
        assert other["perplexity"]["value"] == pytest.approx(reference["perplexity"]["value"], rel=1e-2)


def test_exact_activations_lose_less(int8: Path, run_cli: Cli) -> None:
    args = ("eval", int8, "--base", "demo-draft", *SMALL, "--json")
    served, exact = (json.loads(run_cli(*args, *more)[1]) for more in ((), ("--exact-activations",)))
    assert 0 < exact["kl"]["value"] < served["kl"]["value"]
    assert ("activations as served" in served["arithmetic"], "activations exact" in exact["arithmetic"]) == (True, True)


def test_fewer_bits_of_the_output_layer_cost_more(run_cli: Cli) -> None:
    args = ("eval", "demo-draft", "--base", "demo-draft", "--backend", "runtime", *SMALL, "--json")
    plain, eight, four = (json.loads(run_cli(*args, *more)[1]) for more in ((), ("--head-bits", 8), ("--head-bits", 4)))
    assert plain["kl"]["value"] == 0
    assert 0 < eight["kl"]["value"] < 0.1 * four["kl"]["value"] < 0.01
    assert "head 4 bit" in four["arithmetic"]


def test_one_window_has_no_interval(run_cli: Cli) -> None:
    code, out, _ = run_cli("eval", "demo-draft", "--window", 64, "--max-windows", 1)
    assert code == 0
    assert "not enough windows" in out
    assert "[" not in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--kl-windows", 2), ("--kl-windows", "name it with --base")),
        (("--layers",), ("--layers", "name it with --base")),
        (("--step-tokens", 4), ("--backend runtime",)),
        (("--head-bits", 8), ("--head-bits", "--backend runtime")),
        (("--backend", "reference", "--arithmetic", "fp8"), ("--arithmetic is about the runtime",)),
        (("--arithmetic", "fp8"), ("arithmetic is fp8", "the model has none")),
        (("--backend", "runtime", "--head-bits", 3), ("head_bits is 3", "8 or 4")),
        (("--backend", "runtime", "--exact-activations"), ("--backend reference",)),
        (("--limit", 4), ("--limit", "--tasks")),
        (("--fewshot", 0), ("--fewshot", "--tasks")),
        (("--chat-template",), ("--chat-template", "--tasks")),
        (("--tasks", "arc_easy", "--base", "demo"), ("--base is about perplexity",)),
        (("--text", "nowhere.txt"), ("no text 'nowhere.txt'", "wikitext2, c4")),
        (("--base", "./nowhere"), ("no model at './nowhere'",)),
        (("--window", 99999), ("99999", "does not fit")),
        (("--window", 99999, "--backend", "runtime"), ("99999", "does not fit")),
        (("--window", 1), ("1 tokens does not fit", "choose 2 to")),
        (("--backend", "runtime", "--dtype", "int4"), ("dtype", "int4")),
    ],
)
def test_wrong_options_are_one_line(
    args: tuple[object, ...], words: tuple[str, ...], assert_refused: Refused, tmp_path: Path
) -> None:
    assert_refused(tmp_path, "eval", "demo-draft", *args, words=words)


def test_a_base_with_other_tokens_is_refused(assert_refused: Refused, tmp_path: Path) -> None:
    other = Path(shutil.copytree(model_folder("demo-draft"), tmp_path / "other"))
    content = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["Ġthe"], vocabulary["Ġof"] = vocabulary["Ġof"], vocabulary["Ġthe"]
    (other / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    args = ("eval", "demo-draft", "--base", other, *SMALL)
    assert_refused(tmp_path, *args, words=("as different tokens", "choose the model it was made from"))
