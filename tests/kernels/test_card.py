"""What is decided for a card that is not here: which kernels, how they are cut, and what is refused."""

import itertools

import pytest
import torch

from quantkit.errors import InputError
from quantkit.formats import CtFloat8, CtPacked
from quantkit.kernels.attention.decode_plan import decode_config, favoured_config
from quantkit.kernels.attention.prefill import prefill_config
from quantkit.kernels.card import KNOWN, NO_GPU, TOO_OLD, Card, card_of, pretend
from quantkit.kernels.linear.weight_only import hopper
from quantkit.kernels.linear.weight_only.weight import lay_out
from quantkit.runtime.device.card_plan import plan_card

SHAPES = list(itertools.product((64, 128, 256), (1, 2), (1, 16, 32, 64), (1, 64, 4096)))


def test_pretending_ends() -> None:
    device = torch.device("cpu")
    assert card_of(device) is NO_GPU
    with pretend(KNOWN["sm_80"]):
        assert card_of(device).name == "A100"
        with pretend(KNOWN["sm_90"]):
            assert card_of(device).has_warpgroups
        assert not card_of(device).has_warpgroups
    assert card_of(device) is NO_GPU


def test_what_was_measured_on_hopper_stays() -> None:
    card = KNOWN["sm_90"]
    for padded_dim, itemsize, rows, pairs in SHAPES:
        shape = (padded_dim, itemsize, rows, pairs, card.processors)
        assert decode_config(*shape, card) == favoured_config(*shape)
    assert all(prefill_config(dim, card) == prefill_config(dim) for dim in (64, 128, 256))


@pytest.mark.parametrize("target", ["sm_86", "sm_89", "sm_120"])
def test_tiles_are_smaller_where_there_is_less_room(target: str) -> None:
    card = KNOWN[target]
    smaller = [decode_config(*shape, card.processors, card).block_n for shape in SHAPES]
    assert all(
        16 <= one <= favoured_config(*shape, card.processors).block_n
        for one, shape in zip(smaller, SHAPES, strict=True)
    )
    assert decode_config(128, 2, 4, 1, card.processors, card).block_n == 64
    with pretend(card):
        weight = lay_out(CtPacked().quantize(torch.randn(256, 512)))
        assert weight.default(128, card).config.tokens == 64


@pytest.mark.parametrize("target", KNOWN)
def test_hoppers_kernels_are_for_hopper(target: str) -> None:
    weight = lay_out(CtPacked().quantize(torch.randn(256, 512)))
    with pretend(KNOWN[target]):
        assert hopper.supports(weight) == (target == "sm_90")


def test_fp8_is_decoded_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.kernels.linear import op

    fmt = CtFloat8()
    quantized = fmt.quantize(torch.randn(32, 64))
    monkeypatch.setattr(op, "device_of", lambda quantized: torch.device("cuda"))
    with pretend(KNOWN["sm_80"]):
        prepared = op.prepare(fmt, quantized)
    assert prepared.default(1, KNOWN["sm_80"]).why == "A100 has no FP8, which begins with compute capability 8.9"
    with pretend(KNOWN["sm_89"]):
        assert op.prepare(fmt, quantized).kind == "fp8-token"


@pytest.mark.parametrize(
    ("card", "kv_dtype", "words"),
    [
        (TOO_OLD["t4"], "auto", "Tesla T4 has compute capability 7.5, but quantkit's kernels need 8.0"),
        (TOO_OLD["v100"], "auto", "Tesla V100-SXM2-16GB has compute capability 7.0, but quantkit's kernels need 8.0"),
        (KNOWN["sm_80"], "fp8", "A100 has compute capability 8.0, but a cache in FP8 needs 8.9"),
    ],
)
def test_what_a_card_cannot_do_is_refused_in_a_line(card: Card, kv_dtype: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        plan_card(card, [], kv_dtype)
    assert "\n" not in str(caught.value)


def test_what_a_card_does_in_another_way_is_a_warning() -> None:
    formats = [CtFloat8(), CtFloat8(), CtPacked()]
    (line,) = plan_card(KNOWN["sm_80"], formats).warnings
    assert line.startswith("A100 has no FP8, which begins with compute capability 8.9: 2 layers are decoded")
    assert plan_card(KNOWN["sm_89"], formats, "fp8").warnings == ()
    assert plan_card(KNOWN["sm_80"], [CtPacked()]).warnings == ()
    (line,) = plan_card(KNOWN["sm_86"], [CtPacked(activations="fp8"), CtPacked()]).warnings
    assert line == "RTX 3090 has no FP8: 1 layers that ask for it are multiplied in 16 bits"
    assert plan_card(KNOWN["sm_86"], [CtPacked(activations="fp8")], arithmetic="16-bit").warnings == ()


@pytest.mark.parametrize("asked", ["fp8", "fp8-copy"])
def test_arithmetic_in_fp8_needs_a_card_that_has_it(asked: str) -> None:
    with pytest.raises(InputError, match=r"A100 has compute capability 8\.0, but arithmetic in FP8 needs 8.9"):
        plan_card(KNOWN["sm_80"], [CtPacked()], arithmetic=asked)
    assert plan_card(KNOWN["sm_89"], [CtPacked()], arithmetic=asked).warnings == ()
