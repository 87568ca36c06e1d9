"""Centres of keys over several processes: one prompt for all, and each rank measures its own heads and blocks."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from quantkit.kernels.reference.compare import relative_error
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.parallel.launcher import LocalWorkers
from quantkit.runtime.scoring import score_tokens
from quantkit.runtime.startup import start_engine

OPTIONS = EngineOptions(device="cpu", dtype="float32", kv_dtype="int4", max_context=64, max_sequences=2)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("ranks", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}], ids=str)
def test_ranks_agree(ranks: dict[str, int], forked_workers: Callable[[], LocalWorkers]) -> None:
    """All are shifted as one process shifts them: else codes of 4 bits would be others."""
    ids = torch.randint(3, 4000, (40,), generator=torch.Generator().manual_seed(1))
    alone = start_engine("demo-draft", OPTIONS)
    expected, centres = score_tokens(alone, ids), alone.runner.cache.key_centres
    alone.runner.cache = replace(alone.runner.cache, key_centres=None)
    unshifted = relative_error(score_tokens(alone, ids), expected)
    engine = start_engine("demo-draft", replace(OPTIONS, **ranks), launcher=forked_workers())
    try:
        own = engine.runner.cache.key_centres
        assert own is not None
        assert centres is not None
        torch.testing.assert_close(own, centres[: own.shape[0], : own.shape[1]], rtol=1e-4, atol=1e-4)
        assert 2 * own.numel() == centres.numel()
        assert relative_error(score_tokens(engine, ids), expected) < 0.1 * unshifted
    finally:
        engine.close()
