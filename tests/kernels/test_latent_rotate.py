"""Norm, rope and cache writes of latent attention against their meaning in torch."""

from typing import Any

import pytest
import torch

from quantkit.errors import InputError
from quantkit.kernels.attention.latent.rotate import rotate_latent
from quantkit.kernels.reference import latent as reference

pytestmark = pytest.mark.kernel

PAGES, PAGE_SIZE = 2, 16


def make(
    device: str, *, tokens: int = 5, heads: int = 3, rank: int = 24, rope: int = 8, dtype: torch.dtype = torch.float16
) -> dict[str, Any]:
    """The arguments; q and kept are parts of wider rows, half of the tokens are padding."""
    random = torch.Generator().manual_seed(tokens + heads)
    angle = 6.28 * torch.rand(32, rope // 2, generator=random)
    slots = torch.full((tokens,), -1)
    slots[: (tokens + 1) // 2] = torch.randperm(PAGES * PAGE_SIZE, generator=random)[: (tokens + 1) // 2]
    wide = torch.randn(tokens, heads * (rope + 6) + rank + rope, generator=random).to(device, dtype)
    q, kept = wide.split((heads * (rope + 6), rank + rope), dim=1)
    return {
        "q": q.unflatten(1, (heads, -1))[..., 6:],
        "kept": kept,
        "norm": (1 + 0.2 * torch.randn(rank, generator=random)).to(device, dtype),
        "positions": torch.randint(0, 32, (tokens,), generator=random).to(device),
        "cos": angle.cos().to(device),
        "sin": angle.sin().to(device),
        "slots": slots.to(device),
        "cache": torch.zeros(PAGES, 1, PAGE_SIZE, rank + rope, dtype=dtype, device=device),
        "eps": 1e-6,
        "interleaved": True,
    }


def run_problem(arguments: dict[str, Any]) -> None:
    cache = arguments["cache"].clone()
    expected = reference.rotate_latent(**arguments | {"cache": cache})
    found = rotate_latent(**arguments)
    ulp = torch.finfo(expected.dtype).eps
    ulp *= 1 if expected.dtype == torch.float16 else 4  # the interpreter cuts bfloat16 off
    torch.testing.assert_close(found, expected, rtol=ulp, atol=ulp)
    torch.testing.assert_close(arguments["cache"].float(), cache.float(), rtol=ulp, atol=ulp)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_as_in_torch(dtype: torch.dtype, interleaved: bool, device: str) -> None:
    run_problem(make(device, dtype=dtype) | {"interleaved": interleaved})


@pytest.mark.parametrize(
    ("tokens", "heads", "rank", "rope"), [(1, 1, 16, 2), (2, 17, 40, 24), (3, 32, 512, 64), (2, 5, 7, 6)]
)
def test_sizes(tokens: int, heads: int, rank: int, rope: int, device: str) -> None:
    run_problem(make(device, tokens=tokens, heads=heads, rank=rank, rope=rope))


def test_outside_is_not_written(device: str) -> None:
    arguments = make(device)
    arguments["slots"] = torch.tensor([-1, PAGES * PAGE_SIZE, -(2**40), 2**40, 0], device=device)
    arguments["positions"] = torch.tensor([-5, 32, 10**9, 3, 31], device=device)
    run_problem(arguments)
    assert not arguments["cache"].flatten(0, 2)[1:].any()
    nobody = {name: arguments[name][:0] for name in ("q", "kept", "positions", "slots")}
    assert rotate_latent(**arguments | nobody).shape == (0, 3, 8)


def test_a_cache_of_8_bits(device: str) -> None:
    """Numbers of the fp8 grid under a power of two: Triton's interpreter rounds others wrongly."""
    arguments = make(device, tokens=2, rank=16)
    arguments["kept"] = torch.tensor([1.0, -1.0] * 8 + [15.0 * 64, 2.0] * 4, device=device).half().repeat(2, 1)
    arguments["norm"] = torch.full((16,), 2.0, device=device).half()
    arguments["cos"], arguments["sin"] = torch.ones_like(arguments["cos"]), torch.zeros_like(arguments["sin"])
    cache = arguments["cache"].to(torch.float8_e4m3fn)
    arguments |= {"cache": cache, "scales": torch.tensor([0.5], device=device), "eps": 0.0}
    expected = cache.clone()
    reference.rotate_latent(**arguments | {"cache": expected})
    rotate_latent(**arguments)
    assert torch.equal(cache.float(), expected.float())
    assert float(cache.float().max()) == 448  # saturated


def test_what_is_refused(device: str) -> None:
    good = make(device)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("q is float64", {"q": good["q"].double()}),
        ("kept has shape", {"kept": good["kept"][:, 1:]}),
        ("kept is float32", {"kept": good["kept"].float()}),
        ("norm is float32", {"norm": good["norm"].float()}),
        ("slots is int32", {"slots": good["slots"].int()}),
        ("positions is float32", {"positions": good["positions"].float()}),
        ("sin has shape", {"sin": good["sin"][:, :2]}),
        ("cos is float16", {"cos": good["cos"].half()}),
        ("cache has shape", {"cache": good["cache"][..., 1:]}),
        ("cache is int8", {"cache": good["cache"].to(torch.int8)}),
        ("needs scales", {"cache": good["cache"].to(torch.float8_e4m3fn)}),
        ("needs scales", {"scales": torch.ones(1, device=device)}),
        ("page_size is 8", {"cache": good["cache"][:, :, :8].contiguous()}),
    ]
    for words, changes in wrong:
        with pytest.raises(InputError, match=words):
            rotate_latent(**good | changes)
    assert not good["cache"].any()
