"""The prefill kernel of Hopper GPUs: Gluon, which Triton's interpreter does not know, so on a GPU of that kind only."""

from typing import Any

import pytest
import torch

from quantkit.errors import InputError
from quantkit.kernels.attention import prefill_hopper
from quantkit.kernels.attention.attend import attend, make_scratch
from quantkit.kernels.attention.batches import Batch, random_batch
from quantkit.kernels.attention.cache import layout_of
from quantkit.kernels.attention.prefill import prefill_config
from quantkit.kernels.attention.prefill_hopper import HopperPrefillConfig, heads_together
from quantkit.kernels.reference import attention as reference
from quantkit.kernels.reference.compare import LARGEST_ERROR, relative_error

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)


def check(batch: Batch, config: HopperPrefillConfig) -> None:
    """Near the exact result, no worse than twice torch in the same dtype, the same bits twice, counters at zero."""
    q, keys = batch.tensors[0], batch.tensors[1]
    scratch = make_scratch(q.device, sequences=64, heads=q.shape[1], kv_heads=keys.shape[1], head_dim=q.shape[2])
    first, second = (torch.full_like(q, float("nan")) for _ in range(2))
    for out in (first, second):
        attend(*batch.tensors, **batch.options, max_queries=batch.max_queries, scratch=scratch, out=out, prefill=config)
    assert torch.equal(first, second)
    assert not scratch.tickets.any()
    exact = reference.attend(*batch.tensors, **batch.options, dtype=torch.float64)
    rough = reference.attend(*batch.tensors, **batch.options, dtype=q.dtype)
    error = relative_error(first, exact)
    assert error < LARGEST_ERROR[str(q.dtype)[6:]]
    assert error <= 2 * relative_error(rough, exact)


CASES: dict[str, dict[str, Any]] = {
    "one prompt": {"contexts": [1000], "new": [1000]},
    "a chunk of a prompt": {"contexts": [1500], "new": [600]},
    "prompts of odd lengths": {"contexts": [127, 129, 17, 2049], "new": [127, 129, 17, 2049]},
    "after shared prefixes": {"contexts": [960, 400, 8000], "new": [32, 240, 65]},
    "prompts beside decoding and padding": {"contexts": [1000, 17, 0, 33, 600], "new": [600, 1, 0, 5, 60]},
    "tiles that end with a page": {"contexts": [128, 256, 144], "new": [128, 64, 80]},
    "many sequences": {"contexts": [40] * 300, "new": [40] * 300},
    "group 1": {"contexts": [500, 200], "new": [300, 200], "group": 1, "kv_heads": 8},
    "group 7": {"contexts": [500, 200], "new": [300, 200], "group": 7, "kv_heads": 4},
    "group 8": {"contexts": [500, 200], "new": [300, 200], "group": 8},
    "group 12": {"contexts": [500, 200], "new": [300, 200], "group": 12},
    "group 64": {"contexts": [500, 200], "new": [300, 200], "group": 64, "kv_heads": 1},
    "pages of 32": {"contexts": [500, 200], "new": [300, 200], "page_size": 32},
    "pages of 128": {"contexts": [500, 200], "new": [300, 200], "page_size": 128},
    "pages of 256": {"contexts": [700, 200], "new": [300, 200], "page_size": 256},
    "dim 64": {"contexts": [500, 200], "new": [300, 200], "head_dim": 64},
}


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_as_in_torch(name: str, dtype: torch.dtype) -> None:
    check(random_batch(**{"head_dim": 128} | CASES[name], dtype=dtype, device="cuda"), HopperPrefillConfig())


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        HopperPrefillConfig(block_n=64, stages=4),
        HopperPrefillConfig(stages=3, query_stages=1),
    ],
    ids=str,
)
def test_every_choice(config: HopperPrefillConfig) -> None:
    contexts, new = [1000, 17, 0, 129, 600], [600, 1, 0, 129, 60]
    check(random_batch(contexts, new, head_dim=128, dtype=torch.bfloat16, device="cuda"), config)


@needs_hopper
@pytest.mark.gpu
def test_queries_inside_a_wider_projection() -> None:
    q, *rest = random_batch([300], [300], head_dim=128, dtype=torch.bfloat16, device="cuda").tensors
    wide = torch.zeros(300, 12, 128, dtype=q.dtype, device="cuda")
    wide[:, 2:10] = q
    out = attend(wide[:, 2:10], *rest, scale=0.1, max_queries=300, prefill=HopperPrefillConfig())
    assert torch.equal(out, attend(q, *rest, scale=0.1, max_queries=300, prefill=HopperPrefillConfig()))


@needs_hopper
@pytest.mark.gpu
def test_what_it_does_not_take_goes_the_other_way() -> None:
    def takes(batch: Batch) -> bool:
        q, keys, values = batch.tensors[:3]
        options = {name: batch.options[name] for name in ("window", "soft_cap")}
        scaled = "k_scale" in batch.options
        return prefill_hopper.supports(q, (keys, values), layout_of(keys, values), **options, scaled=scaled)

    kinds: list[dict[str, Any]] = [
        {"window": 50},
        {"soft_cap": 2.0},
        {"cache_dtype": torch.float8_e4m3fn},
        {"head_dim": 96},
    ]
    for kind in kinds:
        batch = random_batch(**{"contexts": [200], "new": [200], "head_dim": 128, "device": "cuda"} | kind)
        assert not takes(batch)
        options = batch.options | {"max_queries": 200}
        other = attend(*batch.tensors, **options, prefill=prefill_config(128))
        assert torch.equal(attend(*batch.tensors, **options), other)
    assert takes(random_batch([200], [200], head_dim=128, device="cuda"))


def test_elsewhere_it_is_refused(device: str) -> None:
    batch = random_batch([20], [20], head_dim=96, kv_heads=1, device=device)
    with pytest.raises(InputError, match="the Hopper kernel does not take this batch"):
        attend(*batch.tensors, **batch.options, max_queries=20, prefill=HopperPrefillConfig())


@pytest.mark.parametrize(("group", "together"), [(1, 1), (4, 4), (6, 2), (7, 1), (12, 4), (64, 64)])
def test_heads_that_share_a_tile_divide_their_group(group: int, together: int) -> None:
    assert heads_together(group) == together
