"""Head norms, rope and cache writes against their meaning in torch and against transformers."""

from typing import Any

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from quantkit.errors import InputError
from quantkit.kernels.reference import elementwise as reference
from quantkit.kernels.rotary import rotate_and_cache

pytestmark = pytest.mark.kernel

PAGES, PAGE_SIZE = 3, 4


def make(
    head_dim: int,
    *,
    tokens: int = 5,
    heads: int = 3,
    kv_heads: int = 1,
    rotary_dim: int | None = None,
    dtype: torch.dtype = torch.float16,
    norms: bool = False,
    device: str,
) -> dict[str, Any]:
    """The arguments of rotate_and_cache; the caches are empty, some tokens are padding."""
    generator = torch.Generator().manual_seed(head_dim + tokens)
    width = (heads + 2 * kv_heads) * head_dim
    angle = 6.28 * torch.rand(32, (rotary_dim or head_dim) // 2, generator=generator)
    slots = torch.full((tokens,), -1)
    filled = min(tokens - tokens // 2, PAGES * PAGE_SIZE)  # the other tokens are padding
    slots[:filled] = torch.randperm(PAGES * PAGE_SIZE, generator=generator)[:filled]
    keys, values = torch.zeros(2, PAGES, kv_heads, PAGE_SIZE, head_dim, dtype=dtype, device=device)
    arguments = {
        "qkv": torch.randn(tokens, width, generator=generator).to(device, dtype),
        "positions": torch.randint(0, 32, (tokens,), generator=generator).to(device),
        "cos": angle.cos().to(device),
        "sin": angle.sin().to(device),
        "slots": slots.to(device),
        "keys": keys,
        "values": values,
        "heads": heads,
    }
    if norms:
        weights = (1 + 0.2 * torch.randn(2, head_dim, generator=generator)).to(device, dtype)
        arguments |= {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-6}
    return arguments


def centres_for(arguments: dict[str, Any], kv_heads: int = 1) -> dict[str, torch.Tensor]:
    head_dim, device = arguments["keys"].shape[3], arguments["qkv"].device
    return {"key_centres": 3 * torch.randn(kv_heads, head_dim, generator=torch.Generator().manual_seed(7)).to(device)}


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    ulp = torch.finfo(expected.dtype).eps
    ulp *= 4 if expected.dtype in (torch.float32, torch.bfloat16) else 1  # the interpreter cuts bfloat16 off
    torch.testing.assert_close(result, expected, rtol=ulp, atol=ulp)


def run_problem(arguments: dict[str, Any]) -> torch.Tensor:
    """Kernel and meaning on the same arguments; their queries and caches must agree. Returns the queries."""
    caches = {name: arguments[name].clone() for name in ("keys", "values")}
    expected = reference.rotate_and_cache(**(arguments | caches))
    queries = rotate_and_cache(**arguments)
    assert_close(queries, expected)
    assert_close(arguments["keys"], caches["keys"])
    assert torch.equal(arguments["values"], caches["values"])
    return queries


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (96, 96), (128, 96), (256, 256), (128, 2)])
def test_rotate(head_dim: int, rotary_dim: int, dtype: torch.dtype, norms: bool, device: str) -> None:
    run_problem(make(head_dim, tokens=2, heads=2, rotary_dim=rotary_dim, dtype=dtype, norms=norms, device=device))


@pytest.mark.parametrize(("heads", "kv_heads", "tokens"), [(8, 2, 1), (5, 5, 3), (1, 1, 2), (17, 1, 1)])
def test_head_counts(heads: int, kv_heads: int, tokens: int, device: str) -> None:
    run_problem(make(64, heads=heads, kv_heads=kv_heads, tokens=tokens, norms=True, device=device))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (96, 96), (128, 96), (256, 2)])
def test_keys_less_their_centres(head_dim: int, rotary_dim: int, device: str) -> None:
    arguments = make(head_dim, heads=4, kv_heads=2, rotary_dim=rotary_dim, norms=rotary_dim == 96, device=device)
    plain = {name: arguments[name].clone() for name in ("keys", "values")}
    reference.rotate_and_cache(**(arguments | plain))
    centres = centres_for(arguments, 2)
    run_problem(arguments | centres)
    written = arguments["slots"][arguments["slots"] >= 0]
    shifted = (plain["keys"].float() - centres["key_centres"][:, None]).transpose(1, 2).flatten(0, 1)[written]
    found = arguments["keys"].float().transpose(1, 2).flatten(0, 1)[written]
    torch.testing.assert_close(found, shifted, rtol=1e-2, atol=1e-2)


def test_many_tokens(device: str) -> None:
    run_problem(make(64, tokens=65, heads=1, device=device))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 96)])
def test_rope_as_in_transformers(head_dim: int, rotary_dim: int, device: str) -> None:
    arguments = make(head_dim, rotary_dim=rotary_dim, dtype=torch.float32, device=device)
    queries = run_problem(arguments)
    rows = arguments["positions"]
    cos, sin = (arguments[name][rows].repeat(1, 2)[None] for name in ("cos", "sin"))
    q, k, _ = arguments["qkv"].unflatten(1, (-1, head_dim)).transpose(0, 1)[None].split((3, 1, 1), dim=1)
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    torch.testing.assert_close(queries, q[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
    for token, slot in enumerate(arguments["slots"].tolist()):
        if slot >= 0:
            stored = arguments["keys"][slot // PAGE_SIZE, :, slot % PAGE_SIZE]
            torch.testing.assert_close(stored, k[0, :, token], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("module", "plus_one"), [(Qwen3RMSNorm, False), (Gemma3RMSNorm, True)])
def test_norms_as_in_transformers(module: type, plus_one: bool, device: str) -> None:
    arguments = make(64, norms=True, device=device) | {"plus_one": plus_one}
    arguments["cos"], arguments["sin"] = torch.ones_like(arguments["cos"]), torch.zeros_like(arguments["sin"])
    queries = run_problem(arguments)
    norm = module(64, eps=1e-6)
    norm.weight.data = arguments["q_norm"]
    with torch.no_grad():
        assert_close(queries, norm(arguments["qkv"].unflatten(1, (-1, 64))[:, :3]))


def test_caches_of_8_bits(device: str) -> None:
    """Values from the fp8 grid under powers of two as scales: Triton's interpreter rounds others wrongly."""
    arguments = make(64, heads=2, kv_heads=2, device=device)
    qkv = torch.randint(-15, 16, arguments["qkv"].shape, generator=torch.Generator().manual_seed(0)).to(device) * 64.0
    arguments["qkv"] = qkv.half()
    arguments["cos"], arguments["sin"] = torch.ones_like(arguments["cos"]), torch.zeros_like(arguments["sin"])
    caches = {name: torch.zeros_like(arguments[name], dtype=torch.float8_e4m3fn) for name in ("keys", "values")}
    scales = {"key_scales": torch.tensor([1.0, 8.0]), "value_scales": torch.tensor([4.0, 0.5])}
    centres = torch.randint(-1, 2, (2, 64), generator=torch.Generator().manual_seed(1)) * 64.0  # stays on the grid
    arguments |= caches | {name: scale.to(device) for name, scale in (scales | {"key_centres": centres}).items()}
    expected = {name: cache.clone() for name, cache in caches.items()}
    reference.rotate_and_cache(**(arguments | expected))
    rotate_and_cache(**arguments)
    for name, cache in caches.items():
        assert torch.equal(cache.float(), expected[name].float()), name
        assert float(cache.float().max()) == 448  # saturated


@pytest.mark.gpu
def test_rounding_of_8_bits(device: str) -> None:
    if device == "cpu":
        pytest.skip("Triton's interpreter does not round to fp8")
    arguments = make(128, heads=2, kv_heads=2, dtype=torch.bfloat16, device=device)
    caches = {name: torch.zeros_like(arguments[name], dtype=torch.float8_e4m3fn) for name in ("keys", "values")}
    scales = {name: torch.tensor([0.013, 0.3], device=device) for name in ("key_scales", "value_scales")}
    expected = {name: cache.clone() for name, cache in caches.items()}
    more = scales | centres_for(arguments, 2)
    reference.rotate_and_cache(**(arguments | expected | more))
    rotate_and_cache(**(arguments | caches | more))
    assert torch.equal(caches["values"].float(), expected["values"].float())
    same = caches["keys"].float() == expected["keys"].float()
    assert float(same.double().mean()) > 0.99  # a fused multiply-add may fall on the other side of a rounding


def test_strided_rows_and_caches_and_int32_positions(device: str) -> None:
    arguments = make(64, device=device)
    both = torch.zeros(PAGES, 2, 1, PAGE_SIZE, 64, dtype=torch.float16, device=device)  # keys and values of a page
    wide = torch.cat((arguments["qkv"], arguments["qkv"]), dim=1)
    arguments |= {"keys": both[:, 0], "values": both[:, 1], "qkv": wide[:, : 5 * 64]}
    arguments["positions"] = arguments["positions"].int()
    out = torch.empty(5, 3, 64, dtype=torch.float16, device=device)
    expected = run_problem(arguments)
    assert rotate_and_cache(**arguments, out=out) is out
    assert torch.equal(out, expected)


def test_outside_is_not_written(device: str) -> None:
    arguments = make(64, device=device)
    arguments["slots"] = torch.tensor([-1, PAGES * PAGE_SIZE, -(2**40), 2**40, 0], device=device)
    arguments["positions"] = torch.tensor([-5, 32, 10**9, 3, 31], device=device)
    run_problem(arguments)
    assert not bool(arguments["keys"].flatten(0, 2)[1:].any())


def test_nothing_to_do(device: str) -> None:
    arguments = make(64, tokens=1, device=device)
    empty = {name: arguments[name][:0] for name in ("qkv", "positions", "slots")}
    assert rotate_and_cache(**(arguments | empty)).shape == (0, 3, 64)


def test_refuses_what_it_cannot_take(device: str) -> None:
    good = make(64, norms=True, device=device)
    scale = torch.ones(1, device=device)
    bytes_ = {name: good[name].to(torch.float8_e4m3fn) for name in ("keys", "values")}
    refused: list[tuple[str, dict[str, Any]]] = [
        ("head_dim is 48", {name: good[name][..., :48] for name in ("keys", "values")}),
        ("must be the same", {"values": good["values"].transpose(0, 2).contiguous().transpose(0, 2)}),
        (r"must be \[any, 384\]", {"heads": 4}),
        (
            "qkv is float64",
            {"qkv": good["qkv"].double(), "keys": good["keys"].double(), "values": good["values"].double()},
        ),
        ("last dimension of qkv", {"qkv": good["qkv"].t().contiguous().t()}),
        (r"positions has shape \[4\]", {"positions": good["positions"][:4]}),
        ("positions is float32", {"positions": good["positions"].float()}),
        ("slots is int32", {"slots": good["slots"].int()}),
        ("cos is float16", {"cos": good["cos"].half()}),
        ("sin has shape", {"sin": good["sin"][:, :8]}),
        ("rotary_dim between", {name: good[name].repeat(1, 2) for name in ("cos", "sin")}),
        ("together", {"k_norm": None}),
        (r"q_norm has shape \[32\]", {"q_norm": good["q_norm"][:32]}),
        ("q_norm is float32", {"q_norm": good["q_norm"].float()}),
        ("keys is float32", {"keys": good["keys"].float()}),
        ("keys is int16", {name: good[name].to(torch.int16) for name in ("keys", "values")}),
        ("values is float8_e4m3fn", {"values": bytes_["values"]}),
        ("float8_e4m3fn need key_scales", bytes_),
        ("must not have key_scales", {"key_scales": scale}),
        ("value_scales is float16", bytes_ | {"key_scales": scale, "value_scales": scale.half()}),
        (r"key_scales has shape \[2\]", bytes_ | {"key_scales": scale.repeat(2), "value_scales": scale}),
        (r"key_centres has shape \[64\]", {"key_centres": torch.ones(64, device=device)}),
        ("key_centres is float16", {"key_centres": torch.ones(1, 64, device=device).half()}),
        ("out has shape", {"out": good["qkv"]}),
        ("one device", {"slots": good["slots"].to("meta")}),
    ]
    for words, change in refused:
        with pytest.raises(InputError, match=words):
            rotate_and_cache(**(good | change))
    assert not bool(good["keys"].any())
