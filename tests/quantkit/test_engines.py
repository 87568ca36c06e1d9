"""Which engines load what: the rules of FORMATS by example."""

import pytest

from quantkit.engines import NOT_RUN, Layers, Verdict, layout_of, verdicts
from quantkit.formats import DIALECTS, Awq, CtFloat8, CtInt8, CtMxfp4, CtNvfp4, CtPacked, Format, Gptq, LlmInt8, Nf4


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
        (CtMxfp4(), {"SGLang"}),
        (CtNvfp4(), {"SGLang"}),
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


@pytest.mark.parametrize(
    ("fmt", "engines"),
    [(Gptq(), {"transformers"}), (Awq(), {"transformers"}), (Nf4(), {"transformers"}), (LlmInt8(), {"transformers"}),
     (CtPacked(), set()), (CtPacked(sym=False), {"transformers"}), (CtFloat8(), set()), (CtMxfp4(), {"SGLang"})],
)  # fmt: skip
def test_experts_that_transformers_keeps_in_one_tensor(fmt: Format, engines: set[str]) -> None:
    """As it was run: tests/interop/test_load_experts.py. A run of the same format without experts proves nothing; some
    with experts were given to vLLM."""
    layers = Layers({"model.layers.0.mlp.experts.0.up_proj": fmt})
    assert {verdict.engine for verdict in verdicts(layers) if not verdict.loads} == engines
    assert layout_of(layers).endswith(" with experts")
    assert {verdict.evidence for verdict in verdicts(layers) if verdict.engine != "vLLM"} == {"", NOT_RUN}
    shared = Layers({"model.layers.0.mlp.shared_experts.up_proj": fmt})
    assert not any(verdict.engine == "transformers" and verdict.reasons for verdict in verdicts(shared))


@pytest.mark.parametrize(
    ("fmt", "packages"),
    [
        (Gptq(), {"transformers": ("gptqmodel", "optimum")}),
        (Awq(), {"transformers": ("gptqmodel",)}),
        (CtPacked(), {"transformers": ("compressed-tensors",)}),
        (Nf4(), {"transformers": ("bitsandbytes",), "vLLM": ("vllm-bnb-plugin",)}),
    ],
)
def test_packages_are_values_and_the_remark_is_made_of_them(fmt: Format, packages: dict[str, tuple[str, ...]]) -> None:
    found = verdicts(Layers({"a": fmt}))
    assert {verdict.engine: verdict.packages for verdict in found if verdict.packages} == packages
    assert all(verdict.loads for verdict in found)
    (transformers,) = [verdict for verdict in found if verdict.engine == "transformers"]
    assert transformers.remark == "with " + " and ".join(packages["transformers"])


def test_a_verdict_as_json() -> None:
    refused = {"engine": "vLLM", "loads": False, "remark": "one; two", "evidence": NOT_RUN}
    assert Verdict("vLLM", ("one", "two")).to_dict() == refused
    assert Verdict("quantkit").to_dict() == {"engine": "quantkit", "loads": True, "remark": "", "evidence": ""}


def test_reasons_come_once_in_the_order_of_the_layers() -> None:
    """Whatever the order of a set in this process: model cards are the same bytes every time."""
    formats = [CtPacked(bits=bits) for bits in (3, 2, 4, 3)]
    layers = Layers({f"layer{i}": fmt for i, fmt in enumerate(formats)})
    (sglang,) = [verdict for verdict in verdicts(layers) if verdict.engine == "SGLang"]
    assert [reason.partition(",")[2] for reason in sglang.reasons] == ["", " not 3", " not 2"]


def test_layouts_that_take_float16_only_elsewhere() -> None:
    only = [Gptq(bits=3), Gptq(sym=False), Gptq(group_size=256), Awq(sym=True), Awq(group_size=16)]
    assert all(fmt.only_float16_elsewhere for fmt in only)
    assert not any(fmt.only_float16_elsewhere for fmt in (Gptq(), Gptq(bits=8, group_size=-1), Awq(), CtPacked(bits=3)))


def test_only_bitsandbytes_stays_whole_elsewhere() -> None:
    assert [name for name, dialect in DIALECTS.items() if not dialect.cut_elsewhere] == ["bitsandbytes"]


@pytest.mark.parametrize(
    ("formats", "layout"),
    [
        ((), "unquantized"),
        ((Gptq(),), "gptq W4 g128 sym"),
        ((Gptq(dtype="bfloat16"), Gptq(dtype="bfloat16")), "gptq W4 g128 sym"),
        ((Gptq(bits=8, group_size=-1, version=2),), "gptq W8 row sym v2"),
        ((Gptq(act_order=True),), "gptq W4 g128 sym act-order"),
        ((Awq(),), "awq W4 g128 asym"),
        ((CtInt8(),), "compressed-tensors W8A8 row, dynamic"),
        ((CtFloat8(strategy="block"),), "compressed-tensors FP8 block, dynamic"),
        ((Nf4(),), "bitsandbytes NF4 b64 double-quant"),
        (
            (CtPacked(bits=4, group_size=64), CtPacked(bits=3), CtPacked(bits=4)),
            "compressed-tensors mixed W3 sym + W4 sym",
        ),
        ((CtPacked(), CtInt8()), "compressed-tensors mixed W4 sym + W8A8 row, dynamic"),
    ],
)
def test_layouts_have_names(formats: tuple[Format, ...], layout: str) -> None:
    assert layout_of(Layers({f"layer{i}": fmt for i, fmt in enumerate(formats)})) == layout


def test_a_layout_says_what_is_left_out_and_what_is_more() -> None:
    quantized: dict[str, Format] = {f"model.layers.{i}.mlp.up_proj": Gptq() for i in (0, 1)}
    assert layout_of(Layers(quantized | {"lm_head": Gptq()})) == "gptq W4 g128 sym with lm_head"
    uneven = Layers({"model.layers.0.mlp.up_proj": Gptq()}, ("model.layers.1.mlp.up_proj",))
    assert layout_of(uneven) == "gptq W4 g128 sym kept unevenly"
    kept = tuple(f"model.layers.{i}.mlp.down_proj" for i in (0, 1))
    assert layout_of(Layers(quantized, kept)) == "gptq W4 g128 sym with layers kept"
