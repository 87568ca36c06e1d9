"""Methods that learn through a block: what they are given, and what becomes of their answer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit import working_memory
from quantkit.arch import LLAMA
from quantkit.checkpoint import Checkpoint
from quantkit.errors import QuantkitError
from quantkit.formats import CtPacked
from quantkit.methods import Method, find_method
from quantkit.passes import CalibratedPass, QuantizedLayer, calibrated

FORMAT = CtPacked(bits=8, group_size=32, dtype="float32")
TOY = Path(__file__).parents[1] / "methods" / "toy_package"


@pytest.fixture
def layers(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`layers(kept, **options)`: what the toy method makes of a model, by module; three batches of two sequences."""
    monkeypatch.syspath_prepend(TOY)
    monkeypatch.setattr(working_memory, "BATCH_TOKENS", 2 * 16)
    tokens = torch.randint(0, 512, (6, 16), generator=torch.Generator().manual_seed(0))
    source = Checkpoint(tiny_model)

    def run(kept: tuple[str, ...] = (), **options: Any) -> dict[str, QuantizedLayer]:
        method: Method = find_method("toy-tune")(**options)
        chosen = {name: FORMAT for name in LLAMA.linears(source.config) if not name.endswith(kept)}
        work = CalibratedPass(source, LLAMA, chosen, method, "cpu", tmp_path)
        work.begin(tokens)
        return {layer.module: layer for block in work.blocks(lambda _: None) for layer in block.layers}

    return run


def test_the_learnt_linear_is_kept_and_the_others_are_rounded(layers: Any, tiny_model: Path) -> None:
    found = layers()
    assert len(found) == 14
    for module, layer in found.items():
        expected = FORMAT.quantize(Checkpoint(tiny_model).tensor(f"{module}.weight").float()).dequantize()
        if module.endswith("down_proj"):
            assert layer.log["toy_factor"] == pytest.approx(1, abs=1e-3)
            assert layer.relative_error < 0.01
            assert torch.allclose(layer.quantized.dequantize(), expected, atol=1e-3)
        else:
            assert layer.log == {}
            assert torch.equal(layer.quantized.dequantize(), expected)


def test_states_and_targets_may_lie_on_disk(layers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_memory = layers()
    monkeypatch.setattr(calibrated, "choose_place", lambda *_: "disk")
    on_disk = layers()
    assert {file.name for file in tmp_path.glob("*.bin")} == {
        f"{name}-0000{index}.bin" for name in ("activations", "inputs", "original") for index in range(3)
    }
    for module, layer in in_memory.items():
        assert torch.equal(layer.quantized.dequantize(), on_disk[module].quantized.dequantize())


def test_wrong_answers_are_refused(layers: Any) -> None:
    with pytest.raises(QuantkitError, match=r"'toy-tune' tuned some of mlp.gate_proj, mlp.up_proj; .* all or none"):
        layers(linear="mlp.up_proj")
    with pytest.raises(QuantkitError, match=r"'toy-tune' tuned mlp.down_proj, which it was not asked for"):
        layers(kept=("down_proj",))
