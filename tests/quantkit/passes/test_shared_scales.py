"""FP8 with a scale per tensor: layers that engines run as one matrix have one weight scale and one input scale."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.arch import FAMILIES
from quantkit.checkpoint import Checkpoint
from quantkit.formats import CtFloat8
from quantkit.formats.ct_float8 import Float8Weight
from quantkit.methods.rtn import RtnMethod
from quantkit.passes import CalibratedPass

TOKENS = torch.randint(1, 96, (2, 24), generator=torch.Generator().manual_seed(5))
STATIC = CtFloat8(strategy="tensor", activations="static", dtype="float32")


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_fused_layers_share_scales(name: str, save_model: Any, tmp_path: Path) -> None:
    family = FAMILIES[name]
    save_model(family, tmp_path)
    source = Checkpoint(tmp_path)
    chosen = dict.fromkeys(family.linears(source.config), STATIC)
    work = CalibratedPass(source, family, chosen, RtnMethod(), "cpu", tmp_path)
    work.begin(TOKENS)
    layers = {layer.module: layer.quantized for block in work.blocks(lambda _: None) for layer in block.layers}
    for modules in (group for groups in family.fused_linears(source.config) for group in groups):
        weights = [layers[module] for module in modules]
        largest = max(float(source.tensor(f"{module}.weight").abs().max()) for module in modules)
        for weight in weights:
            assert isinstance(weight, Float8Weight)
            assert isinstance(weights[0], Float8Weight)
            assert weight.scales.item() == pytest.approx(largest / 448)
            assert torch.equal(weight.input_scale, weights[0].input_scale)
    by_layer: dict[str, set[float]] = {}
    for module, weight in layers.items():
        if ".experts." in module and not module.endswith("down_proj"):
            by_layer.setdefault(module.partition(".experts.")[0], set()).add(weight.input_scale.item())
    assert len(by_layer) == (0 if name == "llama" else 2)
    assert all(len(scales) == 1 for scales in by_layer.values())
