"""Matmuls of weights that are not quantized, and who gets them: our kernel for few tokens, torch for the rest."""

import dataclasses
import json

import pytest
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.card import KNOWN
from quantkit.kernels.linear import dispatch, op, tuning
from quantkit.kernels.linear.dense.half import HalfConfig, matmul
from quantkit.kernels.linear.dense.weight import BUCKETS, HalfWeight, lay_out, supports
from quantkit.kernels.linear.dispatch import choose
from quantkit.kernels.linear.weight import Choice
from quantkit.kernels.reference.compare import LARGEST_ERROR, relative_error
from quantkit.runtime.model.layers import Linear

pytestmark = pytest.mark.kernel

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def make(outputs: int, inputs: int, tokens: int, dtype: str, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, x and bias."""
    generator = torch.Generator().manual_seed(outputs * inputs + tokens)
    sizes = ((outputs, inputs), (tokens, inputs), (outputs,))
    weight, x, bias = (torch.randn(size, generator=generator).to(DTYPES[dtype]).to(device) for size in sizes)
    return weight, x, bias


def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("outputs", "inputs", "tokens", "config"),
    [
        (64, 512, 1, HalfConfig(64, 16, 128, 4, 3)),  # whole tiles
        (70, 264, 3, HalfConfig(32, 8, 256, 2, 3)),  # neither outputs nor inputs are whole
        (33, 200, 8, HalfConfig(32, 8, 128, 1, 4, splits=2)),
        (131, 1000, 17, HalfConfig(64, 16, 128, 4, 4, splits=3)),
        (96, 333, 33, HalfConfig(64, 32, 64, 4, 3, splits=4)),  # rows that begin anywhere
        (130, 136, 65, HalfConfig(128, 64, 64, 4, 3)),
        (48, 2048, 1, HalfConfig(8, 1, 1024, 4, 1)),  # without matrix instructions
        (13, 1032, 1, HalfConfig(8, 1, 512, 2, 1)),
        (13, 1032, 3, HalfConfig(4, 1, 256, 1, 3, splits=3)),
        (7, 77, 2, HalfConfig(2, 1, 256, 1, 1)),
    ],
)
def test_every_way_to_cut(outputs: int, inputs: int, tokens: int, config: HalfConfig, dtype: str, device: str) -> None:
    weight, x, bias = make(outputs, inputs, tokens, dtype, device)
    prepared = lay_out(weight)
    out = torch.full((tokens, outputs), float("nan"), dtype=x.dtype, device=device)
    for _ in range(2):  # the second call finds the tickets as the first one left them
        assert matmul(x, prepared, config, bias=bias, out=out) is out
        assert relative_error(out, exact(x, weight, bias)) < LARGEST_ERROR[dtype]
    without = matmul(x, prepared, config)
    assert relative_error(without, exact(x, weight)) < LARGEST_ERROR[dtype]
    assert torch.equal(without, matmul(x, prepared, config))
    assert int(prepared.tickets.abs().sum()) == 0


def test_rows_may_lie_apart(device: str) -> None:
    weight, x, _ = make(64, 128, 5, "bfloat16", device)
    apart = torch.randn(5, 200, device=device).to(x.dtype)
    apart[:, 40:168] = x
    wide = torch.full((5, 90), 7.0, dtype=x.dtype, device=device)
    matmul(apart[:, 40:168], lay_out(weight), HalfConfig(64, 16, 128), out=wide[:, 10:74])
    assert relative_error(wide[:, 10:74], exact(x, weight)) < 5e-3
    assert bool((wide[:, :10] == 7).all() and (wide[:, 74:] == 7).all())


def test_no_tokens(device: str) -> None:
    weight, x, _ = make(64, 128, 0, "bfloat16", device)
    assert matmul(x, lay_out(weight), HalfConfig()).shape == (0, 64)


def test_wrong_arguments(device: str) -> None:
    weight, x, bias = make(64, 128, 2, "bfloat16", device)
    prepared = lay_out(weight)
    for wrong, words in (
        ((x[:, :64], None), r"must be \[any, 128\]"),
        ((x.half(), None), "x is float16, but must be bfloat16"),
        ((x.float(), None), "x is float32"),
        ((x, bias[:3]), r"must be \[64\]"),
    ):
        with pytest.raises(InputError, match=words):
            matmul(wrong[0], prepared, HalfConfig(), bias=wrong[1])


def weight_of(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> HalfWeight:
    """As large as wanted without the memory: only its shape counts."""
    return HalfWeight(torch.empty(outputs, inputs, dtype=dtype, device="meta"), torch.zeros(1, dtype=torch.int32))


def test_measured_entries_come_first() -> None:
    table: dispatch.Table = {
        "bf16": {
            "4096x4096": {"1": ["half", 4, 1, 1024, 4, 1, 1], "8": ["half", 32, 8, 256, 2, 4, 2], "16": ["cublas"]}
        }
    }
    for dtype in (torch.bfloat16, torch.float16):  # the same work
        weight = weight_of(4096, 4096, dtype)
        assert choose(weight, 1, table).config == HalfConfig(4, 1, 1024, 4, 1, 1)
        assert choose(weight, 2, table).config == HalfConfig(32, 8, 256, 2, 4, 2)
        assert choose(weight, 9, table).kernel == "cublas"
        assert choose(weight, 65, table).kernel == choose(weight, 9000, table).kernel == "cublas"
        assert "measured for bf16" in choose(weight, 1, table).why
    own: dispatch.Table = {"fp16": {"4096x4096": {"1": ["cublas"]}}}
    assert choose(weight_of(4096, 4096, torch.float16), 1, {**table, **own}).kernel == "cublas"


def test_defaults_of_unmeasured_shapes() -> None:
    for tokens in (1, 8, 16):
        choice = weight_of(5120, 5120).default(tokens, KNOWN["sm_90"])
        assert choice.kernel == "half"
        assert isinstance(choice.config, HalfConfig)
        assert "no measurement" in choice.why
    for weight, tokens in ((weight_of(512, 512), 1), (weight_of(8192, 4097), 1), (weight_of(5120, 5120), 32)):
        assert weight.default(tokens, KNOWN["sm_90"]).kernel == "cublas"


def test_entries_come_back_as_they_were() -> None:
    kernels = weight_of(8, 8).kernels
    for choice in (Choice("half", HalfConfig(32, 8, 256, 2, 6, 2), "x"), Choice("cublas", None, "x")):
        assert dispatch.from_entry(json.loads(json.dumps(dispatch.to_entry(choice))), kernels, "x") == choice


def test_candidates_fit() -> None:
    for most in BUCKETS:
        found = list(weight_of(4096, 4096).candidates(most))
        assert [choice.kernel for choice in found].count("cublas") == 1
        configs = [choice.config for choice in found if isinstance(choice.config, HalfConfig)]
        assert len(configs) > 4
        assert len(configs) == len(set(configs))
        assert all(config.tokens > 1 or most == 1 for config in configs)


def test_only_16_bit_on_a_gpu() -> None:
    """Anything else stays torch's."""
    assert op.prepare_plain(torch.randn(4, 4)) is None
    assert op.prepare_plain(torch.randn(4, 4, dtype=torch.bfloat16)) is None  # on a CPU
    assert not supports(torch.randn(4, 4))
    assert not supports(torch.randn(4, 8, dtype=torch.bfloat16).mT)
    assert not supports(torch.empty(0, 8, dtype=torch.bfloat16))
    assert supports(torch.randn(4, 8, dtype=torch.float16))


def test_the_op_and_the_layer(device: str) -> None:
    for outputs, inputs in ((96, 192), (2080, 2056)) if device == "cuda" else ((96, 192),):  # torch's, our kernel's
        for tokens in (1, 5, 16, 40, 70):
            weight, x, bias = make(outputs, inputs, tokens, "bfloat16", device)
            layer = Linear((weight,), bias)
            assert relative_error(layer(x), exact(x, weight, bias)) < 5e-3
            both = dataclasses.replace(layer, weights=(weight[:80].clone(), weight[80:].clone()))
            assert relative_error(both(x), exact(x, weight, bias)) < 5e-3
            prepared = lay_out(weight)
            out = torch.empty(tokens, outputs, dtype=x.dtype, device=device)
            torch_choice = Choice("cublas", None, "")
            for given in (None, bias):
                assert op.run(torch_choice, x, prepared, given, out) is out
                assert relative_error(out, exact(x, weight, given)) < 5e-3
            assert op.explain(prepared, tokens).startswith(("half HalfConfig(", "cublas: "))


@pytest.mark.gpu
def test_the_large_layer_runs_our_kernel() -> None:
    weight, x, _ = make(2080, 2056, 1, "bfloat16", "cuda")
    prepared = op.prepare_plain(weight)
    assert prepared is not None
    assert prepared.values is weight
    assert op.explain(prepared, 1).startswith("half HalfConfig(")
    assert op.explain(prepared, 1000).startswith("cublas")
    op.linear(x, prepared)  # compiles
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        y = op.linear(x, prepared)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert relative_error(y, exact(x, weight)) < 5e-3


@pytest.mark.gpu
def test_tuning_finds_an_entry() -> None:
    weight, _, _ = make(1024, 2048, 1, "float16", "cuda")
    lines: list[str] = []
    entries = tuning.tune(
        lay_out(weight),
        lambda x: exact(x, weight),
        buckets=(16,),
        dtype=weight.dtype,
        progress=lines.append,
    )
    assert entries["16"][0] in ("half", "cublas")
    assert len(lines) == 1, lines  # neither wrong nor failed
