"""Norms, rope and rounding to caches of integers, against their meaning in torch."""

from typing import Any

import pytest
import torch

from quantkit.kernels.attention.integer_codes import BY_NAME, LARGEST_SCALE
from quantkit.kernels.reference import elementwise as reference
from quantkit.kernels.reference.integer_codes import decode, rotate_heads
from quantkit.kernels.rotary import rotate_and_cache

pytestmark = pytest.mark.kernel

PAGES, PAGE_SIZE = 3, 16


def make(
    kind: str,
    head_dim: int,
    device: str,
    *,
    rotary_dim: int | None = None,
    norms: bool = False,
    centred: bool = False,
    tokens: int = 5,
) -> dict[str, Any]:
    """The arguments of rotate_and_cache but the caches; the last token is padding."""
    generator = torch.Generator().manual_seed(head_dim + tokens)
    angle = 6.28 * torch.rand(32, (rotary_dim or head_dim) // 2, generator=generator)
    slots = torch.randperm(PAGES * PAGE_SIZE, generator=generator)[:tokens]
    slots[-1] = -1
    arguments = {
        "qkv": (torch.randn(tokens, 7 * head_dim, generator=generator) + 0.3).to(device, torch.float16),
        "positions": torch.randint(0, 32, (tokens,), generator=generator).to(device),
        "cos": angle.cos().to(device),
        "sin": angle.sin().to(device),
        "slots": slots.to(device),
        "heads": 3,
    }
    if centred:
        arguments["key_centres"] = (2 * torch.randn(2, head_dim, generator=generator)).to(device)
    if norms:
        weights = (1 + 0.2 * torch.randn(2, head_dim, generator=generator)).to(device, torch.float16)
        arguments |= {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-6}
    return arguments


def empty_cache(kind: str, head_dim: int, device: str) -> dict[str, torch.Tensor]:
    codes = BY_NAME[kind]
    pages = torch.zeros(2, PAGES, 2, PAGE_SIZE, codes.token_bytes(head_dim), dtype=torch.uint8, device=device)
    (keys, key_words), (values, value_words) = (codes.planes(part) for part in pages)
    return {"keys": keys, "values": values, "key_scales": key_words, "value_scales": value_words}


def run_problem(kind: str, head_dim: int, arguments: dict[str, Any], device: str) -> None:
    """The queries agree, and codes but for the few that a sum in another order puts on the other side of a rounding."""
    own, expected = (empty_cache(kind, head_dim, device) for _ in range(2))
    queries = rotate_and_cache(**arguments, **own)
    torch.testing.assert_close(queries, reference.rotate_and_cache(**arguments, **expected), rtol=2e-3, atol=2e-3)
    for name, words in (("keys", "key_scales"), ("values", "value_scales")):
        written = expected[words] != 0
        assert torch.equal(own[words] != 0, written)
        assert int(written.sum()) == 2 * (len(arguments["slots"]) - 1)
        assert float((own[name] == expected[name]).double().mean()) > 0.99
        ours, theirs = (decode(cache[name], cache[words])[written] for cache in (own, expected))
        step = (theirs.amax(-1) - theirs.amin(-1)) / (15 if kind == "int4" else 200)
        assert bool(((ours - theirs).abs().amax(-1) <= 1.1 * step).all())


@pytest.mark.parametrize(("norms", "centred"), [(False, False), (True, True)])
@pytest.mark.parametrize("kind", BY_NAME)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (96, 96), (128, 96), (256, 256), (128, 2)])
def test_as_in_torch(kind: str, head_dim: int, rotary_dim: int, norms: bool, centred: bool, device: str) -> None:
    how: dict[str, Any] = {"rotary_dim": rotary_dim, "norms": norms, "centred": centred}
    run_problem(kind, head_dim, make(kind, head_dim, device, **how), device)


@pytest.mark.parametrize("kind", BY_NAME)
def test_many_tokens(kind: str, device: str) -> None:
    arguments = make(kind, 64, device, tokens=PAGES * PAGE_SIZE)
    doubled = {name: torch.cat((part, part)) for name, part in arguments.items() if name in ("qkv", "positions")}
    padding = torch.full_like(arguments["slots"], -1)
    doubled["slots"] = torch.cat((arguments["slots"], padding))  # so many that programs take 16 heads each
    own, expected = (empty_cache(kind, 64, device) for _ in range(2))
    queries = rotate_and_cache(**arguments | doubled, **own)
    meaning = reference.rotate_and_cache(**arguments | doubled, **expected)
    torch.testing.assert_close(queries, meaning, rtol=2e-3, atol=2e-3)
    assert float((own["keys"] == expected["keys"]).double().mean()) > 0.99


@pytest.mark.parametrize("kind", BY_NAME)
def test_zeros_and_large_values(kind: str, device: str) -> None:
    arguments = make(kind, 64, device)
    arguments["qkv"][0] = 0.0
    arguments["qkv"][1, -64:] = 60000.0
    arguments["qkv"][1, -32:] = -60000.0
    own, expected = (empty_cache(kind, 64, device) for _ in range(2))
    rotate_and_cache(**arguments, **own)
    reference.rotate_and_cache(**arguments, **expected)
    ours, theirs = (decode(cache["values"], cache["value_scales"]) for cache in (own, expected))
    assert torch.equal(ours, theirs)
    assert bool(ours.isfinite().all())
    if kind == "int8":
        assert float(ours.abs().max()) == 127 * LARGEST_SCALE  # saturated


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_rotation_keeps_products(head_dim: int) -> None:
    q, k = torch.randn(2, 7, head_dim, generator=torch.Generator().manual_seed(0))
    k[:, 5] *= 30  # a channel of outliers
    turned = rotate_heads(k)
    torch.testing.assert_close((rotate_heads(q) * turned).sum(-1), (q * k).sum(-1), rtol=1e-4, atol=1e-3)
    assert float(turned.abs().max()) < 0.5 * float(k.abs().max())
