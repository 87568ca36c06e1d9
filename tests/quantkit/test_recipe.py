"""Recipes: what is bundled, and what a recipe means for a model. How files are read is in test_recipe_file.py."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch
import yaml

from quantkit import recipe as recipe_module
from quantkit.arch import FAMILIES, GEMMA2, LLAMA, PHI3, Family
from quantkit.errors import CannotHold, InputError
from quantkit.formats import Awq, CtPacked, Format, Gptq
from quantkit.methods import METHODS
from quantkit.recipe import Recipe, is_bundled, list_recipes, load_recipe

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,  # one family has no default
}
BUNDLED = (
    *("auto-w3.5", "awq-w3g128", "awq-w4g128", "awq-w4g32", "awq-w4g64", "best-w4g128", "best-w4g64"),
    *("fp4", "fp8", "fp8-block", "fp8-static", "gptq-w2g64", "gptq-w3g128", "gptq-w3g64", "gptq-w4g128", "gptq-w4g32"),
    *("gptq-w4g64", "gptq-w4g64-asym", "gptq-w8"),
    *("iq4_xs", "llm-int8", "mxfp4", "nf4", "nf4-plain", "nvfp4"),
    *("q2_k", "q3_k_m", "q4_0", "q4_k_m", "q4_k_s", "q5_k_m", "q6_k", "q8_0"),
    *("rtn-w2g64", "rtn-w3g128", "rtn-w4g128", "rtn-w4g128-asym", "rtn-w4g128-ct", "rtn-w4g32", "rtn-w4g64"),
    *("rtn-w8", "rtn-w8a8", "smoothquant-w8a8"),
    *("tuned-auto-w2.5", "tuned-auto-w3.0"),
    *("tuned-w2g64", "tuned-w3g128", "tuned-w3g64", "tuned-w4g128", "tuned-w4g64"),
    "w4a8",
)
PLAIN = """\
summary: A recipe for tests.
method: rtn
format:
  name: gptq
  bits: 4
"""


def load(folder: Path, text: str) -> Recipe:
    file = folder / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    return load_recipe(str(file))


def plan(folder: Path, extra: str, base: str = PLAIN) -> dict[str, Format | None]:
    return load(folder, base + extra).plan(LLAMA, CONFIG, "bfloat16")


def test_bundled_recipes() -> None:
    recipes = list_recipes()
    assert tuple(recipe.name for recipe in recipes) == BUNDLED
    assert all(recipe.method.name in METHODS for recipe in recipes)
    assert len({recipe.summary for recipe in recipes}) == len(BUNDLED)


def test_a_recipe_is_bundled_as_it_comes(tmp_path: Path) -> None:
    """Not with a change, and not under the name of another; a copy is as good."""
    assert is_bundled(load_recipe("rtn-w4g128"))
    assert not is_bundled(load_recipe("rtn-w4g128", ["format.group_size=64"]))
    for name, same in (("rtn-w4g128", True), ("rtn-w8", False), ("mine", False)):
        copy = tmp_path / f"{name}.yaml"
        copy.write_text((recipe_module.BUNDLED / "rtn-w4g128.yaml").read_text())
        assert is_bundled(load_recipe(str(copy))) == same


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_recipe_plans_and_quantizes(name: str) -> None:
    recipe = load_recipe(name)
    formats = recipe.plan(LLAMA, CONFIG, "bfloat16")
    assert list(formats) == LLAMA.linears(CONFIG)
    (fmt,) = set(formats.values())
    assert fmt is not None
    weight = torch.randn(128, 256)
    quantized = fmt.with_input_scale(fmt.quantize(weight), 3.0)
    relative = (quantized.dequantize() - weight).norm() / weight.norm()
    assert relative < {2: 0.6, 3: 0.3, 4: 0.2, 5: 0.05, 6: 0.03, 8: 0.04}[fmt.bits]
    assert set(fmt.parts((128, 256))) == set(fmt.pack(quantized))


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_recipe_fits_every_family(name: str) -> None:
    for family in FAMILIES.values():
        assert None not in load_recipe(name).plan(family, CONFIG, "float16").values()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rtn-w4g128", Gptq(bits=4, group_size=128, sym=True)),
        ("rtn-w8", Gptq(bits=8, group_size=128, sym=True)),
        ("rtn-w3g128", CtPacked(bits=3, group_size=128, sym=True, dtype="float16")),
        ("rtn-w2g64", CtPacked(bits=2, group_size=64, sym=False, dtype="float16")),
        ("gptq-w2g64", CtPacked(bits=2, group_size=64, sym=True, dtype="float16")),
        ("rtn-w4g128-asym", Awq(group_size=128, sym=False)),
    ],
)
def test_bundled_recipe_is_what_its_name_says(name: str, expected: Format) -> None:
    assert set(load_recipe(name).plan(LLAMA, CONFIG, "float16").values()) == {expected}


def test_recipe_is_a_frozen_value(tmp_path: Path) -> None:
    recipe = load(tmp_path, PLAIN + "overrides: [{modules: '*.mlp.down_proj', bits: 8}]\n")
    assert recipe == load(tmp_path, PLAIN + "overrides: [{modules: '*.mlp.down_proj', bits: 8}]\n")
    assert recipe != load(tmp_path, PLAIN + "overrides: [{modules: '*.mlp.down_proj', bits: 2}]\n")
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        recipe.method.name = "other"
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        recipe.format.bits = 3  # type: ignore[attr-defined]


def test_to_dict_is_json_and_says_what_the_file_says(tmp_path: Path) -> None:
    recipe = load(tmp_path, PLAIN + "keep: [lm_head]\noverrides: [{modules: '*.o_proj', keep: true}]\n")
    assert json.loads(json.dumps(recipe.to_dict())) == {
        "name": "mine",
        "summary": "A recipe for tests.",
        "method": "rtn",
        "format": {"name": "gptq", "bits": 4},
        "keep": ["lm_head"],
        "overrides": [{"modules": "*.o_proj", "keep": True}],
    }


def test_to_dict_has_the_order_of_a_file_and_only_what_was_given(tmp_path: Path) -> None:
    plain = load(tmp_path, PLAIN)
    assert list(plain.to_dict()) == ["name", "summary", "method", "format"]
    full = load(
        tmp_path,
        """
overrides: [{keep: true, modules: "*.o_proj"}]
keep: [lm_head]
calibration: {seed: 3, source: notes.txt}
target_bits: 4
format: {name: ct-packed, group_size: 64}
method: {damping: 0.1, name: gptq}
summary: Every key, in reverse.
""",
    )
    written = json.loads(json.dumps(full.to_dict()))
    assert list(written) == [
        *("name", "summary", "method", "format", "target_bits", "calibration", "keep", "overrides"),
    ]
    assert list(written["method"].items()) == [("name", "gptq"), ("damping", 0.1)]
    assert written["calibration"] == {"source": "notes.txt", "seed": 3}
    assert written["target_bits"] == 4.0


def test_first_override_wins_and_keep_goes_before(tmp_path: Path) -> None:
    formats = plan(
        tmp_path,
        r"""
keep: ["model.layers.0.mlp.down_proj"]
overrides:
  - {modules: "re:model\\.layers\\.0\\.mlp\\..*", bits: 8}
  - {modules: "*.mlp.*", bits: 3, group_size: 64}
  - {modules: "*.o_proj", keep: true}
""",
    )
    assert formats["model.layers.0.mlp.down_proj"] is None
    assert formats["model.layers.0.mlp.up_proj"] == Gptq(bits=8)
    assert formats["model.layers.1.mlp.up_proj"] == Gptq(bits=3, group_size=64)
    assert formats["model.layers.1.self_attn.o_proj"] is None
    assert formats["model.layers.1.self_attn.q_proj"] == Gptq(bits=4)
    assert list(formats) == LLAMA.linears(CONFIG)


def test_regular_expressions_match_whole_names(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="matches no linear layer"):
        plan(tmp_path, "keep: ['re:down_proj']")
    assert plan(tmp_path, "keep: ['re:.*down_proj']")["model.layers.1.mlp.down_proj"] is None


def test_dtype_of_scales_follows_the_model_only_where_the_format_says_so() -> None:
    for name, dtype in (("rtn-w4g128-ct", "bfloat16"), ("rtn-w4g128", "float16")):
        (fmt,) = set(load_recipe(name).plan(LLAMA, CONFIG, "bfloat16").values())
        assert fmt is not None
        assert fmt.dtype == dtype


@pytest.mark.parametrize(
    ("rule", "scheme"),
    [
        (
            "overrides: [{modules: '*.1.self_attn.q_proj', bits: 8}]",
            "W8 g128 sym (override '*.1.self_attn.q_proj' bits: 8)",
        ),
        ("overrides: [{modules: '*.1.self_attn.q_proj', keep: true}]", "kept (override '*.1.self_attn.q_proj' keep)"),
        ("keep: ['*.1.self_attn.q_proj']", "kept (keep '*.1.self_attn.q_proj')"),
    ],
)
def test_fused_layers_must_share_one_scheme(tmp_path: Path, rule: str, scheme: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(tmp_path, rule)
    message = str(caught.value)
    assert f"model.layers.1.self_attn.q_proj would be {scheme}" in message
    assert "model.layers.1.self_attn.k_proj would be W4 g128 sym (no override)" in message
    assert "model.layers.1.self_attn.v_proj" in message
    assert "as one matrix" in message
    assert "recipe 'mine'" in message


def test_a_difference_that_tables_do_not_show_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gate_proj would be .* dtype: bfloat16"):
        plan(tmp_path, "overrides: [{modules: '*.gate_proj', dtype: bfloat16}]")


def test_layers_that_are_already_fused_are_free(tmp_path: Path) -> None:
    recipe = load(tmp_path, PLAIN + "overrides: [{modules: '*.gate_up_proj', bits: 8}]")
    formats = recipe.plan(PHI3, CONFIG, "bfloat16")
    assert formats["model.layers.0.mlp.gate_up_proj"] == Gptq(bits=8)


@pytest.mark.parametrize("rule", ["keep: ['*.fc1']", "overrides: [{modules: '*.fc1', bits: 8}]"])
def test_pattern_without_a_match_shows_real_names(tmp_path: Path, rule: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(tmp_path, rule)
    for part in ("'*.fc1'", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        assert part in str(caught.value)


def test_lm_head_may_be_kept_but_not_quantized(tmp_path: Path) -> None:
    assert "lm_head" not in plan(tmp_path, "keep: [lm_head]")
    with pytest.raises(InputError, match="'lm_head' bits: 8: lm_head is never quantized; remove this override"):
        plan(tmp_path, "overrides: [{modules: lm_head, bits: 8}]")


@pytest.mark.parametrize(("family", "config"), [(LLAMA, CONFIG | {"tie_word_embeddings": True}), (GEMMA2, CONFIG)])
def test_a_tied_lm_head_is_the_embedding(tmp_path: Path, family: Family, config: dict[str, Any]) -> None:
    recipe = load(tmp_path, PLAIN + "overrides: [{modules: lm_head, bits: 8}]")
    with pytest.raises(InputError) as caught:
        recipe.plan(family, config, "bfloat16")
    assert str(caught.value) == (
        "recipe 'mine': override 'lm_head' bits: 8: lm_head is this model's embedding matrix (they are tied) and "
        "stays as it is; remove this override"
    )
    for harmless in ("keep: [lm_head]", "overrides: [{modules: lm_head, keep: true}]"):
        assert "lm_head" not in load(tmp_path, PLAIN + harmless).plan(family, config, "bfloat16")


def test_a_plan_must_quantize_something(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing would be quantized"):
        plan(tmp_path, "keep: ['*']")


def test_a_mix_that_no_checkpoint_can_describe_is_refused_early(tmp_path: Path) -> None:
    awq = PLAIN.replace("gptq", "awq")
    with pytest.raises(CannotHold, match="recipe 'mine': an awq checkpoint has one group size"):
        plan(tmp_path, "overrides: [{modules: '*.down_proj', group_size: 64}]", awq)


def test_the_worked_example_of_the_manual(tmp_path: Path) -> None:
    manual = (Path(__file__).parents[2] / "docs" / "reference" / "recipes.md").read_text(encoding="utf-8")
    example = manual.split("```yaml\n# careful.yaml\n")[1].split("```")[0]
    formats = load(tmp_path, example).plan(LLAMA, CONFIG, "bfloat16")
    assert {fmt for module, fmt in formats.items() if module.startswith("model.layers.0.")} == {None}
    schemes = {module: fmt.describe() for module, fmt in formats.items() if fmt is not None}
    assert schemes.pop("model.layers.1.mlp.down_proj") == "W8 g128 sym"
    assert set(schemes.values()) == {"W4 g128 sym"}
    assert len(schemes) == 6


def test_the_manual_lists_every_option_of_every_method_with_its_default() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "reference" / "recipes.md").read_text(encoding="utf-8")
    table = manual.split("## Methods")[1].split("\n## ")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:4]] for line in table.splitlines() if line[:2] == "| "]
    method = ""
    listed: dict[str, list[tuple[str, str]]] = {}
    for name, option, default in rows[1:]:
        method = name or method
        listed.setdefault(method, [])
        if option and option != "none":
            listed[method].append((option, default))
    assert listed == {
        name: [(field.name, str(field.default).lower()) for field in dataclasses.fields(kind)]
        for name, kind in METHODS.items()
    }


def test_the_examples_of_the_manual_are_recipes(tmp_path: Path) -> None:
    manual = (Path(__file__).parents[2] / "docs" / "reference" / "recipes.md").read_text(encoding="utf-8")
    examples = [part.split("```")[0] for part in manual.split("```yaml\n")[1:]]
    for example in examples:
        load(tmp_path, example if "summary:" in example else _with(PLAIN, example))
    assert len(examples) == 8


def _with(base: str, keys: str) -> str:
    """A recipe with some of its keys given anew."""
    return yaml.safe_dump(yaml.safe_load(base) | yaml.safe_load(keys))
