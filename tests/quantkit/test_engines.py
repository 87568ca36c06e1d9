"""Which engines load what: the rules of FORMATS by example."""

import re
from collections.abc import Iterator

import pytest

from quantkit.engines import DECODE_ZERO_POINTS, NO_SOURCE, NOT_RUN, Layers, Verdict, layout_of, verdicts
from quantkit.formats import (
    DIALECTS,
    Awq,
    BlockMxfp4,
    CtFloat8,
    CtInt8,
    CtMxfp4,
    CtNvfp4,
    CtPacked,
    Format,
    Gguf,
    GgufDialect,
    Gptq,
    LlmInt8,
    Nf4,
    Refusal,
    build,
)
from quantkit.formats.engine_rules import ENGINES, OTHERS, PLAIN_READERS, PROJECTS
from quantkit.launch.serve_commands import SERVE_COMMANDS, OllamaFile
from quantkit.recipe import list_recipes, load_recipe

FILES_ONLY = {"llama.cpp", "Ollama"}  # which take GGUF files, and say so of every folder


def answers(layers: Layers) -> dict[str, str]:
    """Of the engines that do not simply load it, but for those that load files only."""
    found = verdicts(layers)
    assert [verdict.engine for verdict in found] == list(ENGINES)
    return {one.engine: one.answer for one in found if one.answer != "yes" and one.engine not in FILES_ONLY}


def said_of(*formats: Format) -> dict[str, str]:
    return answers(Layers({f"layer{i}": fmt for i, fmt in enumerate(formats)}))


def no(*engines: str) -> dict[str, str]:
    return dict.fromkeys(engines, "no")


def unknown(*engines: str) -> dict[str, str]:
    return dict.fromkeys(engines, "unknown")


TRT = "TensorRT-LLM"


@pytest.mark.parametrize(
    ("fmt", "expected"),
    [
        (Gptq(), no(TRT)),
        (Gptq(bits=8, group_size=-1), no(TRT)),
        (Gptq(bits=3), no("vLLM", TRT, "TGI")),
        (Gptq(sym=False), no("vLLM", TRT) | unknown("TGI")),
        (Gptq(sym=False, version=2), no("vLLM", TRT, "TGI")),
        (Gptq(group_size=256), no("vLLM", TRT) | unknown("TGI")),
        (Awq(), no(TRT)),
        (Awq(group_size=16), no("vLLM", TRT) | unknown("TGI")),
        (CtPacked(), no(TRT)),
        (CtPacked(sym=False), no(TRT, "TGI")),
        (CtPacked(bits=3), no("SGLang", TRT, "TGI")),
        (CtPacked(bits=3, sym=False), no("vLLM", "SGLang", TRT, "TGI")),
        (CtInt8(), no(TRT)),
        (CtFloat8(), {}),
        (CtFloat8(strategy="block"), no("TGI")),
        (CtFloat8(strategy="tensor", activations="static"), no(TRT)),
        (CtMxfp4(), no("TGI") | unknown("SGLang", TRT)),
        (CtNvfp4(), no("TGI", TRT) | unknown("SGLang")),
        (Nf4(), no("TGI", TRT)),
        (LlmInt8(), no("TGI", TRT)),
        (BlockMxfp4(), unknown("TGI")),
        (Gguf("Q4_K"), no("TGI") | unknown(TRT)),
    ],
)
def test_one_scheme(fmt: Format, expected: dict[str, str]) -> None:
    assert said_of(fmt) == expected


def test_mixed_gptq_belongs_in_compressed_tensors() -> None:
    assert said_of(Gptq(), Gptq(bits=8)) == no("transformers", "vLLM", TRT, "TGI")
    assert said_of(CtPacked(), CtPacked(bits=8)) == no("SGLang", TRT) | unknown("TGI")
    kept = Layers({"model.layers.0.mlp.up_proj": Awq()}, ("model.layers.0.mlp.down_proj",))
    assert answers(kept) == no(TRT, "TGI")


def test_kept_layers_must_be_the_same_in_every_block_for_transformers() -> None:
    quantized: dict[str, Format] = {f"model.layers.{i}.mlp.up_proj": Gptq() for i in (0, 1)}
    uneven = Layers(quantized | {"model.layers.0.self_attn.o_proj": Gptq()}, ("model.layers.1.self_attn.o_proj",))
    even = Layers(quantized, ("model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"))
    assert [v.loads for layers in (uneven, even) for v in verdicts(layers) if v.engine == "transformers"] == [
        False,
        True,
    ]


def test_plain_models_load_everywhere_but_where_files_are_wanted() -> None:
    found = {verdict.engine: verdict for verdict in verdicts(Layers({}))}
    assert answers(Layers({})) == {}
    assert (found["llama.cpp"].answer, found["Ollama"].answer) == ("no", "unknown")
    assert "convert --to gguf" in found["llama.cpp"].remark


@pytest.mark.parametrize(
    ("fmt", "command"), [(CtPacked(), "convert --to gguf"), (Gptq(act_order=True), "quantize -r q4_k_m"),
                         (CtPacked(bits=8, group_size=32), "convert --to gguf"), (CtFloat8(), "quantize -r q4_k_m"),
                         (CtPacked(sym=False), "quantize -r q4_k_m"), (Gptq(group_size=16), "quantize -r q4_k_m")],
)  # fmt: skip
def test_programs_for_gguf_say_how_to_come_by_a_file(fmt: Format, command: str) -> None:
    for verdict in verdicts(Layers({"layer": fmt})):
        if verdict.engine in FILES_ONLY:
            assert verdict.loads is False
            assert verdict.remark.startswith("not this layout")
            assert command in verdict.remark


def test_gguf_files_are_for_them() -> None:
    for layers in (Layers({"a": Gguf("Q4_K"), "b": Gguf("Q6_K")}), Layers({}, gguf_file=True)):
        found = {verdict.engine: verdict for verdict in verdicts(layers)}
        assert all(found[engine].loads for engine in FILES_ONLY)
        assert found["vLLM"].remark == "with vllm-gguf-plugin"
    assert found["Ollama"].evidence == NOT_RUN


def test_unknown_is_no_yes() -> None:
    """Without a source nobody loads anything, and what is uncertain does not outweigh a refusal."""
    (tgi,) = [verdict for verdict in verdicts(Layers({"a": BlockMxfp4()})) if verdict.engine == "TGI"]
    assert (tgi.loads, tgi.reasons, tgi.sources, tgi.evidence) == (None, (NO_SOURCE,), (), "not run")
    (mixed,) = [v for v in verdicts(Layers({"a": CtPacked(), "lm_head": CtPacked(bits=8)})) if v.engine == TRT]
    assert mixed.loads is False
    assert "lm_head" not in mixed.remark


def all_refusals() -> Iterator[Refusal]:
    """Of every layout that recipes write and of every rule above, alone and together."""
    kinds = (
        Gptq(),
        Awq(),
        CtPacked(),
        CtPacked(bits=3, sym=False, group_size=16),
        CtPacked(group_size=64, activations="fp8"),
        CtInt8(),
        CtFloat8(strategy="block"),
    )
    kinds += (CtFloat8(strategy="tensor", activations="exact"), CtMxfp4(), CtNvfp4(), Nf4(), LlmInt8(), Gguf("Q4_K"))
    for fmt in (*kinds, Gptq(bits=3), Gptq(sym=False, group_size=-1, version=2), Awq(group_size=16), BlockMxfp4()):
        yield from fmt.refusals()
    for dialect in (*DIALECTS.values(), GgufDialect()):
        yield from (*dialect.refusals, *dialect.refusals_of_experts)


def test_every_rule_names_a_source_that_was_read() -> None:
    named = {(engine, source) for engine, source in PLAIN_READERS.items()}
    for dialect in (*DIALECTS.values(), GgufDialect()):
        named |= set(dialect.readers.items())
    named |= {(refusal.engine, refusal.source) for refusal in all_refusals()}
    for layers in ODD:
        named |= {(verdict.engine, source) for verdict in verdicts(layers) for source in verdict.sources}
    for serve in (*SERVE_COMMANDS.items(), ("Ollama", OllamaFile())):
        named |= {(serve[0], source) for source in serve[1].sources}
    read = {(engine, path) for engine, project in PROJECTS.items() for path in project.read}
    assert named <= read
    assert read - named == set(), "nobody uses these sources"
    assert set(PROJECTS) == set(OTHERS)
    assert all(re.fullmatch(r"20\d\d-\d\d(-\d\d)?", one.date) for p in PROJECTS.values() for one in p.read.values())


EXPERT, HEAD = "model.layers.0.mlp.experts.0.up_proj", "lm_head"
ODD = (
    Layers({EXPERT: CtPacked(sym=False)}),
    Layers({EXPERT: CtMxfp4()}, experts_apart=True),
    Layers({HEAD: Gptq()}),
    Layers({"a": Gptq(), "b": Gptq(bits=8)}),
    Layers({"a": CtPacked(), "b": CtFloat8()}),
)


@pytest.mark.parametrize("recipe", [recipe.name for recipe in list_recipes()])
def test_every_layout_that_recipes_write_has_a_verdict_of_every_engine(recipe: str) -> None:
    fmt = load_recipe(recipe).format
    layers = Layers({"layer": build(fmt.name, fmt.options, "bfloat16")})
    found = verdicts(layers)
    assert [verdict.engine for verdict in found] == list(ENGINES)
    for verdict in found[1:]:
        assert verdict.answer in ("yes", "no", "unknown")
        assert bool(verdict.sources) or verdict.reasons == (NO_SOURCE,)
        assert verdict.loads or verdict.reasons


def test_refusals_say_why() -> None:
    (verdict,) = [v for v in verdicts(Layers({"a": Gptq(bits=3)})) if v.engine == "vLLM"]
    assert "W3 g128 sym" in verdict.remark
    assert "compressed-tensors" in verdict.remark


@pytest.mark.parametrize(
    ("fmt", "engines"),
    [(Gptq(), {"transformers"}), (Awq(), {"transformers"}), (Nf4(), {"transformers"}), (LlmInt8(), {"transformers"}),
     (CtPacked(), set()), (CtPacked(sym=False), {"transformers"}), (CtFloat8(), set()), (CtMxfp4(), set())],
)  # fmt: skip
def test_experts_that_transformers_keeps_in_one_tensor(fmt: Format, engines: set[str]) -> None:
    """As it was run: tests/interop/test_load_experts.py. A run of the same format without experts proves nothing; some
    with experts were given to vLLM."""
    layers = Layers({"model.layers.0.mlp.experts.0.up_proj": fmt})
    refused = {verdict.engine for verdict in verdicts(layers) if verdict.loads is False}
    assert refused - FILES_ONLY - {TRT, "TGI"} == engines
    assert not any(verdict.loads for verdict in verdicts(layers) if verdict.engine in (TRT, "TGI")), "nobody looked"
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
    assert all(verdict.loads for verdict in found if verdict.engine in ("transformers", "vLLM", "SGLang"))
    (transformers,) = [verdict for verdict in found if verdict.engine == "transformers"]
    assert transformers.remark == "with " + " and ".join(packages["transformers"])


def test_zero_points_of_compressed_tensors_are_decoded_while_loading() -> None:
    for symmetric, advice in ((True, ""), (False, DECODE_ZERO_POINTS)):
        found = {verdict.engine: verdict for verdict in verdicts(Layers({"a": CtPacked(sym=symmetric)}))}
        assert {verdict.advice for engine, verdict in found.items() if engine != "transformers"} == {""}
        assert found["transformers"].advice == advice
        assert found["transformers"].remark.endswith(advice or "with compressed-tensors")


def test_a_verdict_as_json() -> None:
    path = next(iter(PROJECTS["vLLM"].read))
    source = {"repository": "vllm-project/vllm", "path": path, **PROJECTS["vLLM"].read[path]._asdict()}
    refused = {"engine": "vLLM", "loads": False, "remark": "one; two", "evidence": NOT_RUN, "sources": [source]}
    assert Verdict("vLLM", ("one", "two"), sources=(path,)).to_dict() == refused
    ours = {"engine": "quantkit", "loads": True, "remark": "", "evidence": "", "sources": []}
    assert Verdict("quantkit").to_dict() == ours
    assert Verdict("TGI", ("why",), known=False).to_dict()["loads"] is None


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
