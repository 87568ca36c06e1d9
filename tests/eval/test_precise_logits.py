"""KL is measured on float32 logits, and what the arithmetic alone adds to it can be asked for."""

from pathlib import Path

import torch
from torch import Tensor

from quantkit.arch import LLAMA
from quantkit.blocks import BlockRunner
from quantkit.checkpoint import Checkpoint
from quantkit.eval.quality.evaluate import evaluate
from quantkit.eval.quality.measure import QualityResult
from quantkit.eval.quality.precise_logits import compute_logits_in_float32
from quantkit.reference import load_reference

IDS = torch.randint(1, 90, (1, 16), generator=torch.Generator().manual_seed(0))


def test_norm_and_output_layer_of_a_16_bit_model_are_float32(tiny_model: Path) -> None:
    model = load_reference(tiny_model, "float16")
    seen: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    compute_logits_in_float32(model)
    with torch.no_grad():
        logits = model(IDS, use_cache=False).logits
    assert (seen[0].dtype, logits.dtype) == (torch.float16, torch.float32)
    hidden, norm = seen[0].float(), model.model.norm
    normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight.float()
    assert torch.allclose(logits, normed @ model.lm_head.weight.float().T, rtol=1e-5, atol=1e-5)


def test_blocks_in_16_bits_have_logits_in_float32(tiny_model: Path) -> None:
    runner = BlockRunner(Checkpoint(tiny_model), LLAMA)
    hidden = torch.randn(4, int(runner.config.hidden_size), generator=torch.Generator().manual_seed(1)).half()
    exact = runner.logits(hidden.float())
    runner.dtype = torch.float16
    assert torch.equal(runner.logits(hidden), exact)


def test_what_the_arithmetic_alone_adds() -> None:
    """A model in 16 bits is no distance from itself, and some from itself in float32."""
    found = evaluate("demo-draft", "demo-draft", window=32, max_windows=2, dtype="float16", null_kl=True)
    assert found.kl is not None
    assert found.kl.value == 0
    assert found.null_kl is not None
    assert 0 < found.null_kl.value < 0.001
    assert QualityResult.from_dict(found.to_dict()) == found
    older = {name: value for name, value in found.to_dict().items() if name != "null_kl"}
    assert QualityResult.from_dict(older).null_kl is None
