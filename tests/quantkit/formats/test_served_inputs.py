"""What a kernel sees of a layer's inputs, where the format rounds them: against definitions written out by hand."""

import pytest
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import Awq, CtFloat8, CtInt8, CtPacked, Format, Fp4, Gptq, LlmInt8, Nf4

ROUNDING = [LlmInt8(), LlmInt8(threshold=0.0), CtInt8(), CtFloat8(), CtFloat8(strategy="block")]
ROUNDING += [CtPacked(activations="fp8")]


def random_inputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def name_of(fmt: Format) -> str:
    return f"{fmt.name} {fmt.describe()}"


@pytest.mark.parametrize("fmt", [Gptq(), Awq(), CtPacked(), Nf4(), Fp4(), CtFloat8(activations="exact")], ids=name_of)
def test_weight_only_formats_leave_inputs_alone(fmt: Format) -> None:
    inputs = random_inputs(3, 64)
    assert fmt.input_rounding is None
    assert fmt.served_inputs(inputs) is inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", ROUNDING, ids=name_of)
def test_shape_and_dtype_stay_and_the_caller_keeps_its_tensor(fmt: Format, dtype: torch.dtype) -> None:
    inputs = random_inputs(2, 5, 200).to(dtype)
    inputs[0, 1] = 0  # a padded token
    before = inputs.clone()
    served = fmt.served_inputs(inputs)
    assert fmt.input_rounding is not None
    assert (served.shape, served.dtype) == (inputs.shape, inputs.dtype)
    assert torch.equal(inputs, before)
    assert torch.isfinite(served).all()
    assert not served[0, 1].any()
    assert 0 < float((served - inputs).float().norm() / inputs.float().norm()) < 0.05
    assert torch.equal(served, fmt.served_inputs(inputs.flatten(0, 1)).view(inputs.shape))
    assert fmt.served_inputs(inputs[:0]).shape == (0, 5, 200)


def test_llm_int8_keeps_outlier_columns_of_the_whole_call() -> None:
    inputs = random_inputs(6, 32).clamp(-2, 2)
    inputs[4, 7], inputs[1, 20] = -6.0, 9.3  # the threshold itself counts
    served = LlmInt8().served_inputs(inputs)
    kept = (served == inputs).all(0)
    assert kept.nonzero().flatten().tolist() == [7, 20]
    below = LlmInt8().served_inputs(inputs.masked_fill(inputs == -6.0, -5.99))
    assert not (below == inputs).all(0)[7]


def test_llm_int8_rows_are_scaled_by_their_largest_value_outside_outlier_columns() -> None:
    """The 2.0 is no outlier, but stands in a column that has one, so it is not rounded and sets no scale."""
    inputs = torch.tensor([[1.0, 0.3, 100.0], [0.5, 0.3, 2.0]])
    rows = torch.tensor([[1.0], [0.5]])
    expected = torch.round(inputs.half().float() * (127 / rows)) * (rows / 127)
    expected[:, 2] = inputs[:, 2]
    assert torch.equal(LlmInt8().served_inputs(inputs), expected)


def test_llm_int8_threshold_zero_has_no_outliers() -> None:
    inputs = torch.tensor([[127.0, 0.4, -3.6]])
    assert LlmInt8(threshold=0.0).served_inputs(inputs).tolist() == [[127.0, 0.0, -4.0]]


def test_ct_int8_rounds_every_token_alone_to_half_a_step() -> None:
    inputs = random_inputs(4, 96) * torch.tensor([[1e-3], [1.0], [50.0], [1e4]])
    served = CtInt8().served_inputs(inputs)
    steps = inputs.abs().amax(-1, keepdim=True) / 127.5
    assert bool(((served - inputs).abs() <= 0.5001 * steps).all())
    assert torch.equal(served[2:3], CtInt8().served_inputs(inputs[2:3]))
    codes = served / steps
    assert torch.allclose(codes, codes.round(), atol=1e-3)


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_float8_rounds_every_token_alone(strategy: str) -> None:
    fmt = CtFloat8(strategy=strategy)
    inputs = random_inputs(4, 96) * torch.tensor([[1e-3], [1.0], [50.0], [1e4]])
    served = fmt.served_inputs(inputs)
    smallest = inputs.abs().amax(-1, keepdim=True) / 448 * 2**-10  # half a subnormal step
    assert bool(((served - inputs).abs() <= inputs.abs() * 2**-4 + smallest).all())
    assert torch.equal(served[1:2], fmt.served_inputs(inputs[1:2]))


def test_float8_blocks_have_their_own_scales() -> None:
    """An outlier of 10^7 swallows its block of 128 inputs, not the next one, which is short here."""
    inputs = random_inputs(3, 200)
    inputs[:, 5] = 1e7
    served = CtFloat8(strategy="block").served_inputs(inputs)
    assert not served[:, 6:128].any()
    assert float((served[:, 128:] - inputs[:, 128:]).norm() / inputs[:, 128:].norm()) < 0.05
    assert torch.equal(served[:, 128:], CtFloat8().served_inputs(inputs[:, 128:]))


def test_float8_static_uses_the_calibrated_scale_and_clips_beyond_it() -> None:
    fmt = CtFloat8(strategy="tensor", activations="static", dtype="float32")
    plain = fmt.quantize(random_inputs(8, 4))
    carried = fmt.with_input_scale(plain, 448.0)
    inputs = torch.tensor([[1.0, 17.0, -448.0, 9000.0]])
    assert fmt.served_inputs(inputs, carried).tolist() == [[1.0, 16.0, -448.0, 448.0]]
    twice = fmt.with_input_scale(plain, torch.tensor(896.0))
    assert fmt.served_inputs(inputs, twice).tolist() == [[1.0, 16.0, -448.0, 896.0]]
    with pytest.raises(InputError, match="carries its input scale"):
        fmt.served_inputs(inputs, plain)
