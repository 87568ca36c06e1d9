"""Which engines load what: the rules of FORMATS by example."""

import pytest

from quantkit.engines import Layers, verdicts
from quantkit.formats import Awq, CtFloat8, CtInt8, CtPacked, Format, Gptq, LlmInt8, Nf4


def refusing(*formats: Format, kept: tuple[str, ...] = ()) -> set[str]:
    layers = Layers({f"layer{i}": fmt for i, fmt in enumerate(formats)}, kept)
    return {verdict.engine for verdict in verdicts(layers) if not verdict.loads}


@pytest.mark.parametrize(
    ("fmt", "engines"),
    [
        (Gptq(), set()),
        (Gptq(bits=8, group_size=-1), set()),
        (Gptq(bits=3), {"vLLM"}),
        (Gptq(sym=False), {"vLLM"}),
        (Gptq(group_size=256), {"vLLM"}),
        (Awq(), set()),
        (CtPacked(), set()),
        (CtPacked(bits=3), {"SGLang"}),
        (CtPacked(bits=3, sym=False), {"vLLM", "SGLang"}),
        (CtInt8(), set()),
        (CtFloat8(), set()),
        (Nf4(), set()),
        (LlmInt8(), set()),
    ],
)
def test_one_scheme(fmt: Format, engines: set[str]) -> None:
    assert refusing(fmt) == engines


def test_mixed_gptq_belongs_in_compressed_tensors() -> None:
    assert refusing(Gptq(), Gptq(bits=8)) == {"transformers", "vLLM"}
    assert refusing(CtPacked(), CtPacked(bits=8)) == {"SGLang"}


def test_kept_layers_must_be_the_same_in_every_block_for_transformers() -> None:
    quantized: dict[str, Format] = {f"model.layers.{i}.mlp.up_proj": Gptq() for i in (0, 1)}
    uneven = Layers(quantized | {"model.layers.0.self_attn.o_proj": Gptq()}, ("model.layers.1.self_attn.o_proj",))
    even = Layers(quantized, ("model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"))
    assert [v.loads for layers in (uneven, even) for v in verdicts(layers) if v.engine == "transformers"] == [
        False,
        True,
    ]


def test_plain_models_load_everywhere() -> None:
    assert refusing() == set()


def test_refusals_say_why() -> None:
    (verdict,) = [v for v in verdicts(Layers({"a": Gptq(bits=3)})) if v.engine == "vLLM"]
    assert "W3 g128 sym" in verdict.remark
    assert "compressed-tensors" in verdict.remark
