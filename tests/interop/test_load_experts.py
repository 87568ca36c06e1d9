"""Models with experts: which of our layouts transformers loads, though it keeps the experts of a layer in one tensor.

Every token goes to all experts here: a choice that turns around would make errors larger than any layout does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import quantkit
from quantkit.convert import convert
from quantkit.inspection import inspect_checkpoint
from quantkit.recipe import load_recipe
from tiny_models import SETTINGS, save_model

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

EXACT, FLOAT8 = 1.4e-2, 8e-2  # as in test_load.py
EXPERTS = 4
SIZES = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "initializer_range": 0.05}
ALL = {"num_experts_per_tok": EXPERTS, "n_group": 1, "topk_group": 1}
COUNTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS)


@dataclass(frozen=True)
class Layout:
    recipe: tuple[str, ...]
    loads: bool
    bound: float = EXACT
    dtype: torch.dtype | str = torch.float32  # bfloat16 where the package computes in nothing else


LAYOUTS = {
    "compressed-tensors W4": Layout(("rtn-w4g32", "format.name=ct-packed"), loads=True),
    "compressed-tensors W4 asymmetric": Layout(("rtn-w4g32", "format.name=ct-packed", "format.sym=false"), loads=False),
    "compressed-tensors FP8": Layout(("fp8",), loads=True, bound=FLOAT8),
    "compressed-tensors MXFP4": Layout(("mxfp4",), loads=True, dtype="auto"),
    "GPTQ": Layout(("rtn-w4g32",), loads=False, dtype="auto"),
    "AWQ": Layout(("rtn-w4g32", "format.name=awq", "format.sym=false"), loads=False, dtype="auto"),
    "NF4": Layout(("nf4",), loads=False, dtype="auto"),
    "LLM.int8": Layout(("llm-int8",), loads=False, dtype="auto"),
}
FAMILIES = ("qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe")
CASES = [(family, layout) for family in FAMILIES for layout in LAYOUTS]
CASES += [("deepseek_v2", layout) for layout, about in LAYOUTS.items() if about.loads]  # others refuse its small sizes


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    top = tmp_path_factory.mktemp("experts")

    def folder_of(family: str) -> Path:
        if not (top / family).exists():
            save_model(family, top / family, "bfloat16", **SETTINGS[family] | SIZES | ALL | COUNTS)
        return top / family

    return folder_of


@pytest.mark.parametrize(("family", "name"), CASES)
def test_what_transformers_makes_of_experts(
    family: str,
    name: str,
    models: Callable[[str], Path],
    tmp_path: Path,
    bnb: ModuleType,
    ct: ModuleType,
    gptqmodel: ModuleType,
) -> None:
    layout = LAYOUTS[name]
    folder = tmp_path / "quantized"
    quantkit.quantize(models(family), load_recipe(layout.recipe[0], layout.recipe[1:]), folder, quality_windows=0)
    (verdict,) = [one for one in inspect_checkpoint(folder).engines if one.engine == "transformers"]
    assert verdict.loads == layout.loads
    lost, error = _try(folder, layout.dtype)
    print(f"without {lost}, relative error of the logits: {error:.1e}")
    assert (not lost and error <= layout.bound) == layout.loads


def test_converted_experts_load(
    models: Callable[[str], Path], tmp_path: Path, ct: ModuleType, gptqmodel: ModuleType
) -> None:
    quantkit.quantize(models("qwen3_moe"), "rtn-w4g32", tmp_path / "gptq", quality_windows=0)
    convert(tmp_path / "gptq", "compressed-tensors", tmp_path / "converted")
    lost, error = _try(tmp_path / "converted", torch.float32)
    assert not lost
    assert error <= EXACT


def _try(folder: Path, dtype: torch.dtype | str) -> tuple[list[str], float]:
    """The tensors that transformers did not find, and how far its logits are off; infinitely where it cannot run."""
    from transformers import AutoModelForCausalLM

    ids = torch.randint(3, 110, (2, 24), generator=torch.Generator().manual_seed(0))
    expected = _logits(quantkit.load_reference(folder, "float32"), ids)
    try:
        loaded, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, device_map="cpu", output_loading_info=True
        )
        error = float((_logits(loaded.eval(), ids) - expected).norm() / expected.norm())
    except (RuntimeError, IndexError) as refused:  # a product of codes; a gate without codes
        print(refused)
        return [], float("inf")
    return sorted(found["missing_keys"]), error


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids, use_cache=False).logits
    return logits.float()
