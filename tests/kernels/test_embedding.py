"""The embedding gather against its meaning in torch and against transformers' scaled embedding."""

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from quantkit.errors import InputError
from quantkit.kernels.embedding import embed
from quantkit.kernels.reference import elementwise as reference

pytestmark = pytest.mark.kernel


def make(tokens: int, vocab: int, width: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens * 1000 + width)
    ids = torch.randint(0, vocab, (tokens,), generator=generator)
    return ids.to(device), torch.randn(vocab, width, generator=generator).to(device, dtype)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1100), (5, 100), (3, 1)])
def test_gather(tokens: int, width: int, dtype: torch.dtype, id_dtype: torch.dtype, device: str) -> None:
    ids, table = make(tokens, 17, width, dtype, device)
    assert torch.equal(embed(ids.to(id_dtype), table), reference.embed(ids, table))
    scaled, expected = embed(ids.to(id_dtype), table, scale=width**0.5), reference.embed(ids, table, scale=width**0.5)
    if dtype == torch.bfloat16 and device == "cpu":  # Triton's interpreter cuts off where the GPU rounds
        torch.testing.assert_close(scaled, expected, rtol=2**-7, atol=0)
    else:
        assert torch.equal(scaled, expected)


def test_as_in_transformers(device: str) -> None:
    ids, table = make(6, 17, 72, torch.float16, device)
    module = Gemma3TextScaledWordEmbedding(17, 72, None, embed_scale=72**0.5).to(device, torch.float16)
    module.weight.data = table
    with torch.no_grad():
        assert torch.equal(embed(ids, table, scale=72**0.5), module(ids))


def test_strided_rows_and_unknown_ids(device: str) -> None:
    ids, wide = make(4, 17, 80, torch.float16, device)
    ids[1], ids[2] = -1, 17
    table = wide[:, 8:72]
    out = torch.full((4, 96), 7.0, dtype=torch.float16, device=device)
    assert embed(ids, table, out=out[:, :64]).data_ptr() == out.data_ptr()
    assert torch.equal(out[:, :64], reference.embed(ids, table))
    assert not bool(out[1:3, :64].any())
    assert bool((out[:, 64:] == 7).all())


def test_nothing_to_do(device: str) -> None:
    ids, table = make(0, 17, 8, torch.float16, device)
    assert embed(ids, table).shape == (0, 8)


def test_refuses_what_it_cannot_take(device: str) -> None:
    ids, table = make(3, 17, 8, torch.float16, device)
    refused = [
        ("ids is float32", lambda: embed(ids.float(), table)),
        (r"ids has shape \[1, 3\]", lambda: embed(ids[None], table)),
        ("ids must be contiguous", lambda: embed(ids[::2], table)),
        ("table is int64", lambda: embed(ids, table.long())),
        ("last dimension of table", lambda: embed(ids, table.t())),
        (r"out has shape \[2, 8\]", lambda: embed(ids, table, out=table[:2])),
        ("one device", lambda: embed(ids.to("meta"), table)),
    ]
    for words, call in refused:
        with pytest.raises(InputError, match=words):
            call()
