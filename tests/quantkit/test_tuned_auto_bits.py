"""Automatic bits on learned layers: any recipe takes a target, the result keeps it, and a killed run goes on to it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import quantkit
from quantkit.calibration import Calibration
from quantkit.checkpoint import Checkpoint
from quantkit.formats import IntegerFormat
from quantkit.pipeline import run
from quantkit.recipe import load_recipe
from quantkit.recipe.limits import target_bits_changes

pytestmark = pytest.mark.usefixtures("few_scales")

Cli = Callable[..., tuple[int, str, str]]
LITTLE = ("--samples", 8, "--seq-len", 32, "--quality-windows", 0, "--device", "cpu")
FAST = ("--set", "method.steps=2", "--set", "method.start=gptq")
TARGET = 2.5


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By a recipe whose own layout cannot mix layers, as the command line does it."""
    from quantkit.cli import main

    folder = tmp_path_factory.mktemp("tuned") / "out"
    asked = ("demo-draft", "-r", "tuned-w4g64", "--target-bits", TARGET, *FAST, *LITTLE)
    main([str(one) for one in ("quantize", *asked, "-o", folder)])
    return folder


def test_files_keep_the_target_scales_and_all(tuned: Path) -> None:
    checkpoint = Checkpoint(tuned)
    bits = weights = 0
    for module, fmt in checkpoint.formats.items():
        assert isinstance(fmt, IntegerFormat)
        assert not fmt.sym  # the recipe's grid
        parts = [stored for name, stored in checkpoint.tensors.items() if name.startswith(f"{module}.")]
        out, groups = checkpoint.tensors[f"{module}.weight_scale"].info.shape
        weights += out * groups * fmt.group_size
        bits += 8 * sum(stored.nbytes for stored in parts)
    assert TARGET - 0.1 < bits / weights <= TARGET
    assert {fmt.bits for fmt in checkpoint.formats.values()} >= {2, 3}


def test_layers_that_engines_fuse_share_a_scheme(tuned: Path) -> None:
    formats = Checkpoint(tuned).formats
    for fused in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        for block in range(2):
            assert len({formats[f"model.layers.{block}.{name}"] for name in fused}) == 1


@torch.no_grad()
def test_the_engine_serves_it(tuned: Path) -> None:
    prompt = list(range(20, 60))
    (served,) = quantkit.LLM(tuned, device="cpu").generate(
        [prompt], quantkit.SamplingParams(max_tokens=6, temperature=0)
    )
    answer = served.answers[0].token_ids
    logits = quantkit.load_reference(tuned, "float32")(torch.tensor([prompt + answer])).logits
    assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == answer


@pytest.mark.long
def test_a_killed_run_ends_in_the_same_bytes(tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load_recipe("tuned-w4g64", FAST[1::2])
    recipe = load_recipe("tuned-w4g64", [*FAST[1::2], *target_bits_changes(plain, TARGET)])

    def kill(item: str, total: int) -> None:
        if item.startswith("model.layers.1.mlp.up_proj") and "measured" not in item:
            raise KeyboardInterrupt

    def quantize(**more: object) -> None:
        data = Calibration(samples=8, seq_len=32)
        quantkit.quantize(
            "demo-draft", recipe, tmp_path / "out", calibration=data, device="cpu", quality_windows=0, **more
        )

    with pytest.raises(KeyboardInterrupt):
        quantize(on_layer=kill)
    monkeypatch.setattr(run, "choose_formats", None)  # whoever decides again fails
    quantize()
    one, other = ((folder / "model.safetensors").read_bytes() for folder in (tuned, tmp_path / "out"))
    assert one == other


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("tuned-w4g64", "format={name: ct-packed, group_size: 64, sym: false}"),
        ("best-w4g128", "format={name: ct-packed, group_size: 128, sym: false}"),
        ("gptq-w4g32", "format={name: ct-packed, group_size: 32, sym: true}"),
        ("tuned-w3g64", None),
        ("nf4", None),  # refused afterwards: no integer grid
    ],
)
def test_a_target_changes_the_layout_only_where_it_cannot_mix(recipe: str, layout: str | None) -> None:
    changes = target_bits_changes(load_recipe(recipe), 3.0)
    assert changes == ("target_bits=3.0",) if layout is None else (layout, "target_bits=3.0")


def test_the_change_of_layout_is_said_once_in_one_line(run_cli: Cli, tmp_path: Path) -> None:
    asked = ("quantize", "demo-draft", "--target-bits", 3, *LITTLE, "-o", tmp_path / "out", "--dry-run", "--json")
    code, out, err = run_cli(*asked, "-r", "tuned-w4g64")
    assert (code, json.loads(out)["output"]["format"]) == (0, "ct-packed")
    said = (
        "note: layout awq has one scheme for all layers; format={name: ct-packed, group_size: 64, sym: false} instead"
    )
    assert err.splitlines() == [said]
    assert run_cli(*asked, "-r", "tuned-w3g64")[2] == ""
    code, _, err = run_cli(*asked, "-r", "nf4")
    assert (code, "'nf4' cannot hold" in err) == (2, True)


@pytest.mark.long
def test_no_block_is_worse_than_the_better_of_awq_and_gptq_where_it_was_judged(tmp_path: Path) -> None:
    """The start is the candidate with the least error on sequences held back; steps that do not help are not kept."""
    recipe = load_recipe("tuned-auto-w2.5", ["method.steps=10"])
    quantkit.quantize("demo-draft", recipe, tmp_path / "out", calibration=Calibration(samples=16, seq_len=64))
    lines = map(json.loads, (tmp_path / "out" / "quantization_log.jsonl").read_text().splitlines())
    layers = [line["log"] for line in lines if "module" in line]
    assert len(layers) == 14
    for layer in layers:
        errors = layer["block_errors"]
        assert set(errors) == {"awq+gptq", "awq", "gptq"}
        assert layer["chosen"] == min(errors, key=lambda name: errors[name])
        assert layer["block_loss"] <= layer["block_start_loss"] <= layer["block_calibrated_loss"]
