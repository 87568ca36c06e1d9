"""Runs that choose block by block and are killed go on to the same bytes; processes: tests/long/test_killed_runs.py."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit.calibration import Calibration
from quantkit.methods import best, tuned
from quantkit.methods.awq import AwqMethod
from quantkit.methods.best import CANDIDATES
from quantkit.methods.gptq import GptqMethod
from quantkit.recipe import load_recipe
from tiny_models import save_model
from tiny_tokenizers import VOCAB_SIZE, save_byte_level

CHATS = [{"messages": [{"role": "user", "content": f"What is {number} and one?"}]} for number in range(40)]

QUICK = {  # they search less
    "awq+gptq": GptqMethod(scaling="awq", grid="minmax"),
    "awq": AwqMethod(points=3, clip=False),
    "gptq": GptqMethod(grid="minmax", target="model"),
}


@pytest.mark.parametrize(("name", "changes"), [("best-w4g64", ()), ("tuned-w4g64", ("method.steps=2",))])
def test_a_killed_run_goes_on_to_the_same_bytes(
    name: str, changes: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a mix of sources: what judged the candidates before the kill judges them after it."""
    for module in (best, tuned):
        monkeypatch.setattr(module, "candidate", lambda name, *_, **__: QUICK[name])
    model, chats, text = tmp_path / "model", tmp_path / "chats.jsonl", tmp_path / "text.txt"
    save_model("llama", model, vocab_size=VOCAB_SIZE)
    save_byte_level(model)
    chats.write_text("\n".join(map(json.dumps, CHATS)))
    text.write_text("The list holds every name that the function returns. " * 40)
    data = Calibration({str(text): 3, str(chats): 1}, samples=16, seq_len=16)
    recipe = load_recipe(name, ["format.group_size=32", *changes])
    told: list[str] = []

    def kill(item: str, _: int) -> None:
        if ".layers.1." in item:
            raise KeyboardInterrupt

    def run(folder: str, **options: Any) -> Any:
        return quantkit.quantize(model, recipe, tmp_path / folder, calibration=data, quality_windows=0, **options)

    report = run("whole")
    assert {layer.log["chosen"] for layer in report.layers} <= set(CANDIDATES)
    with pytest.raises(KeyboardInterrupt):
        run("killed", on_layer=kill)
    assert not (tmp_path / "killed").exists()
    run("killed", on_layer=lambda item, _: told.append(item))
    done = {".layers.1." in item for item in told if " loss " in item}
    assert done == {True}, "the finished block is named, and not done again"
    whole, killed = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("whole", "killed"))
    assert whole == killed
