"""Running a model block by block gives what running it whole gives, for every family."""

from pathlib import Path

import pytest
import torch

from quantkit.arch import FAMILIES, Family
from quantkit.blocks import BlockRunner, run_block
from quantkit.checkpoint import Checkpoint
from tiny_models import save_model


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_block_by_block_equals_whole(family: Family, tmp_path: Path) -> None:
    model = save_model(family.model_type, tmp_path, num_hidden_layers=7, sliding_window=8, initializer_range=0.02)
    tokens = torch.randint(1, 96, (3, 24))
    seen = []
    last = model.get_submodule(family.blocks)[-1]
    hook = last.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    with torch.no_grad():
        model(tokens, use_cache=False)
    hook.remove()
    whole = seen[0][0] if isinstance(seen[0], tuple) else seen[0]

    runner = BlockRunner(Checkpoint(tmp_path), family)
    hidden = runner.embed(tokens)
    for layer, extra in enumerate(runner.arguments(tokens.shape[1])):
        hidden = run_block(runner.load(layer, extra), hidden)
        runner.free(layer)
        assert all(parameter.is_meta for parameter in runner.blocks[layer].parameters())
    assert torch.allclose(hidden, whole, rtol=1e-4, atol=1e-5)
