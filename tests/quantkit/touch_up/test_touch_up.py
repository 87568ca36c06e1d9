"""The touch-up at the end of a run: what it learns, what it leaves alone, and that a killed one ends the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.calibration import Calibration
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.formats import IntegerWeight
from quantkit.pipeline import quantize
from quantkit.progress import Progress, silent
from quantkit.recipe import load_recipe
from quantkit.reference import load_reference, load_tokenizer
from quantkit.touch_up import Student, TouchUp
from quantkit.touch_up.learned import LearnedScales

pytestmark = pytest.mark.usefixtures("few_scales")

STEPS = 4
DATA = Calibration(samples=16, seq_len=48)


def run(output: Path, *changes: str, recipe: str = "rtn-w2g64", on_layer: Progress = silent) -> Any:
    loaded = load_recipe(recipe, changes)
    return quantize("demo-draft", loaded, output, calibration=DATA, device="cpu", quality_windows=0, on_layer=on_layer)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a touch-up. AWQ, so that norms were changed before."""
    output = tmp_path_factory.mktemp("plain") / "model"
    run(output, "format.bits=3", recipe="awq-w3g128")
    return output


@pytest.fixture(scope="module")
def touched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    output = tmp_path_factory.mktemp("touched") / "model"
    return output, run(output, "format.bits=3", f"touch_up={STEPS}", recipe="awq-w3g128")


def student_of(folder: Path) -> tuple[Any, Student]:
    teacher, quantized = load_reference("demo-draft", "float32"), Checkpoint(folder)
    weights = {name: quantized.quantized(name) for name in quantized.formats}
    norms = {name: quantized.tensor(name) for name in quantized.plain_names() if "norm" in name}
    assert all(isinstance(weight, IntegerWeight) for weight in weights.values())
    return teacher, Student(teacher, weights, norms, "model.layers", torch.bfloat16)  # type: ignore[arg-type]


def tokens() -> Tensor:
    return DATA.tokens(load_tokenizer("demo-draft"), 64)


@torch.no_grad()
def test_a_student_begins_as_the_quantized_model(plain: Path) -> None:
    teacher, student = student_of(plain)
    sequence = tokens()[0]
    wanted = load_reference(plain, "float32")(sequence.unsqueeze(0)).logits[0]
    torch.testing.assert_close(student.logits(sequence), wanted, rtol=1e-4, atol=1e-4)
    before = load_reference("demo-draft", "float32")(sequence.unsqueeze(0)).logits
    torch.testing.assert_close(teacher(sequence.unsqueeze(0)).logits, before, rtol=0, atol=0)


def test_it_learns_scales_and_norms_and_no_codes(plain: Path, touched: tuple[Path, Any]) -> None:
    folder, report = touched
    assert report.touch_up["kl"] < 0.98 * report.touch_up["start_kl"]
    assert 0 < report.touch_up["step"] <= STEPS == report.touch_up["steps"]
    before, after = Checkpoint(plain), Checkpoint(folder)
    for name in before.formats:
        old, new = before.quantized(name), after.quantized(name)
        assert isinstance(old, IntegerWeight)
        assert isinstance(new, IntegerWeight)
        assert torch.equal(old.codes, new.codes)
        assert torch.equal(old.zeros, new.zeros)
        assert not torch.equal(old.scales, new.scales)
        assert old.scales.dtype == new.scales.dtype
    for name in before.plain_names():
        same = torch.equal(before.tensor(name), after.tensor(name))
        assert same == ("norm" not in name), name


@torch.no_grad()
def test_what_is_written_is_what_was_learned(touched: tuple[Path, Any]) -> None:
    """The KL that the report promises, measured anew on the folder."""
    folder, report = touched
    teacher, student = student_of(folder)
    found = TouchUp(teacher, student, tokens()).learn(0, on_step=lambda *_: None)
    assert found.kl == pytest.approx(report.touch_up["kl"], rel=1e-4)
    assert found.step == 0


def test_a_killed_run_ends_the_same(touched: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = touched
    output = tmp_path / "model"

    def killed(item: str, total: int) -> None:
        if item.startswith("touch-up"):
            raise KeyboardInterrupt

    arguments = ("format.bits=3", f"touch_up={STEPS}")
    with pytest.raises(KeyboardInterrupt):
        run(output, *arguments, recipe="awq-w3g128", on_layer=killed)
    assert not output.exists()
    run(output, *arguments, recipe="awq-w3g128")
    assert (output / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("recipe", ["nf4", "rtn-w8a8", "fp8"])
def test_formats_without_scales_to_learn(recipe: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"touch_up learns scales of integers for inputs in 16 bits, but '"):
        run(tmp_path / "model", "touch_up=1", recipe=recipe)


def test_steps_below_zero() -> None:
    with pytest.raises(InputError, match="'touch_up' is -1, but must be at least 0"):
        load_recipe("gptq-w4g128", ["touch_up=-1"])


@pytest.mark.parametrize("scattered", [False, True])
def test_odd_groups_decode_alike(scattered: bool) -> None:
    """A last group that is short, and groups that act-order scattered."""
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (3, 40), dtype=torch.uint8)
    scales, zeros = torch.rand(3, 3).half() + 0.1, torch.randint(0, 16, (3, 3), dtype=torch.uint8)
    group_of = torch.randperm(40).remainder(3).int() if scattered else None
    weight = IntegerWeight(codes, scales, zeros, bits=4, group_size=16, group_of=group_of)
    learned, x = LearnedScales(weight, torch.ones(3), torch.float32), torch.randn(5, 40)
    torch.testing.assert_close(learned(x), x @ weight.dequantize().T + 1)
    learned(x).square().sum().backward()
    assert learned.offsets.grad is not None
    assert bool((learned.offsets.grad != 0).all())
