"""Wrong input of calibrated runs: one clear line, exit code 2, and nothing left behind, hidden or not."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from quantkit.sources import model_folder

Cli = Callable[..., tuple[int, str, str]]
Refused = Callable[..., None]
pytestmark = pytest.mark.usefixtures("few_scales")
FEW = ("--samples", 2, "--seq-len", 64, "--quality-windows", 0)


def quantize(
    output: Path, recipe: str = "gptq-w4g128", *more: object, model: object = "demo-draft"
) -> tuple[object, ...]:
    return ("quantize", model, "-r", recipe, "-o", output, "--device", "cpu", *more)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A private copy of the small bundled model that a test may break."""
    return Path(shutil.copytree(model_folder("demo-draft"), tmp_path / "model"))


def change(model: Path, name: str, value: float) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors[name].view(-1)[3] = value
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("recipe", ["gptq-w4g128", "awq-w4g128", "smoothquant-w8a8", "fp8-static"])
@pytest.mark.parametrize(("text", "tokens"), [("", "0 tokens"), ("Much too short.", "tokens, less than one window")])
def test_texts_without_a_window(assert_refused: Refused, tmp_path: Path, recipe: str, text: str, tokens: str) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(text)
    args = quantize(tmp_path / "out", recipe, "--text", file)
    assert_refused(tmp_path, *args, words=("mine.txt", tokens, "window of 512", "longer text"))


def test_text_that_is_not_there(assert_refused: Refused, tmp_path: Path) -> None:
    args = quantize(tmp_path / "out", "gptq-w4g128", "--text", tmp_path / "none.txt")
    assert_refused(tmp_path, *args, words=("none.txt", ".jsonl"))


def test_empty_collection(assert_refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("\n")
    args = quantize(tmp_path / "out", "awq-w4g128", "--text", tmp_path / "chats.jsonl")
    assert_refused(tmp_path, *args, words=("chats.jsonl",))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--seq-len", 2049, ("2049 tokens", "2 to 2048")),
        ("--seq-len", 1, ("1 tokens", "2 to 2048")),
        ("--samples", 0, ("0 samples", "1 or more")),
        ("--samples", -3, ("-3 samples", "1 or more")),
        ("--seed", -1, ("seed -1", "0 or more")),
        ("--quality-windows", -1, ("-1 windows", "0 (none) or more")),
    ],
)
def test_numbers_that_cannot_be(
    assert_refused: Refused, tmp_path: Path, option: str, value: int, words: tuple[str, ...]
) -> None:
    args = quantize(tmp_path / "out", "gptq-w4g128", option, value)
    assert_refused(tmp_path, *args, words=words)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("tensor", ["mlp.up_proj.weight", "post_attention_layernorm.weight"])
def test_nan_in_a_weight(assert_refused: Refused, model: Path, tmp_path: Path, layer: int, tensor: str) -> None:
    name = f"model.layers.{layer}.{tensor}"
    change(model, name, float("nan"))
    args = quantize(tmp_path / "out", "gptq-w4g128", *FEW, model=model)
    assert_refused(tmp_path, *args, words=(name, "NaN or Inf"))


@pytest.mark.parametrize("recipe", ["gptq-w4g128", "awq-w4g128"])
@pytest.mark.parametrize("layer", [0, 1])
def test_activations_that_overflow(
    assert_refused: Refused, model: Path, tmp_path: Path, recipe: str, layer: int
) -> None:
    change(model, f"model.layers.{layer}.input_layernorm.weight", 1e30)
    args = quantize(tmp_path / "out", recipe, *FEW, model=model)
    assert_refused(tmp_path, *args, words=(f"model.layers.{layer}.self_attn.q_proj", "not finite"))


@pytest.mark.parametrize("method", ["gptq", "awq", "smoothquant"])
@pytest.mark.parametrize("fmt", ["nf4", "ct-float8"])
def test_formats_that_do_not_suit_a_method(assert_refused: Refused, tmp_path: Path, method: str, fmt: str) -> None:
    recipe = "smoothquant-w8a8" if method == "smoothquant" else f"{method}-w4g128"
    args = quantize(tmp_path / "out", recipe, "--set", f"format={{name: {fmt}}}", *FEW)
    assert_refused(tmp_path, *args, words=(f"method '{method}'", f"'{fmt}'"))


def test_scattered_groups_need_a_format_that_holds_them(assert_refused: Refused, tmp_path: Path) -> None:
    args = quantize(tmp_path / "out", "gptq-w4g128", "--set", "method.order=desc_act", *FEW)
    assert_refused(tmp_path, *args, words=("act_order",))


def test_options_of_a_method(assert_refused: Refused, tmp_path: Path) -> None:
    args = quantize(tmp_path / "out", "gptq-w4g128", "--set", "method.damping=2")
    assert_refused(tmp_path, *args, words=("method.damping", "2", "at most 1"))
    args = quantize(tmp_path / "out", "awq-w4g128", "--set", "method.points=0")
    assert_refused(tmp_path, *args, words=("method.points", "1 to 1000"))
