"""Recipe files are read strictly: every slip is one line that names the file, the key and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from quantkit.errors import InputError
from quantkit.methods.awq import AwqMethod
from quantkit.methods.gptq import GptqMethod
from quantkit.methods.rtn import RtnMethod
from quantkit.recipe import Recipe, load_recipe

PLAIN = """\
summary: A recipe for tests.
method: rtn
format:
  name: gptq
  bits: 4
"""
LONG = PLAIN.replace("rtn", "{name: gptq, damping: 0.05}")
MIXED = PLAIN.replace("name: gptq", "name: ct-packed") + "target_bits: 3.5\n"


def load(folder: Path, text: str, changes: Sequence[str] = ()) -> Recipe:
    file = folder / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    return load_recipe(str(file), changes)


def error_of(folder: Path, text: str, changes: Sequence[str] = ()) -> str:
    """The message of a refused file, which must be one line that names the file."""
    with pytest.raises(InputError) as caught:
        load(folder, text, changes)
    message = str(caught.value)
    assert "\n" not in message
    assert "pydantic" not in message
    return message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (PLAIN.replace("method", "methods"), ["unknown key 'methods'", "did you mean 'method'?"]),
        (PLAIN + "kep: []", ["unknown key 'kep'", "did you mean 'keep'?"]),
        (PLAIN + "name: other", ["unknown key 'name'"]),
        (PLAIN + "  group_sise: 64", ["unknown key 'format.group_sise'", "'gptq'", "did you mean 'group_size'?"]),
        (PLAIN.replace("name:", "nam:"), ["unknown key 'format.nam'", "did you mean 'name'?"]),
        (PLAIN + "overrides: [{modules: '*', bit: 8}]", ["unknown key 'overrides.0.bit'", "did you mean 'bits'?"]),
        (
            PLAIN + "overrides: [{module: '*', bits: 8}]",
            ["unknown key 'overrides.0.module'", "did you mean 'modules'?"],
        ),
        (PLAIN + "overrides: [{modules: '*', kep: true}]", ["unknown key 'overrides.0.kep'", "did you mean 'keep'?"]),
        (
            LONG.replace("damping", "dampin"),
            ["unknown key 'method.dampin' for method 'gptq'", "did you mean 'damping'?", "order", "name"],
        ),
        (LONG.replace("gptq, damp", "rtn, damp"), ["unknown key 'method.damping' for method 'rtn'; Known: name."]),
        (LONG.replace("name: gptq, d", "nam: gptq, d"), ["unknown key 'method.nam'", "did you mean 'name'?"]),
        (PLAIN + "targetbits: 4", ["unknown key 'targetbits'", "did you mean 'target_bits'?"]),
        (
            PLAIN + "calibration: {sample: 4}",
            ["unknown key 'calibration.sample'", "did you mean 'samples'?", "seed, seq_len, source"],
        ),
    ],
)
def test_unknown_key_names_file_key_and_nearest(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = error_of(tmp_path, text)
    for part in ["mine.yaml", *parts]:
        assert part in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (PLAIN.replace("method: rtn", ""), ["key 'method' is missing"]),
        (PLAIN.replace("rtn", "rnt"), ["'method' is 'rnt'", "did you mean 'rtn'?"]),
        (PLAIN.replace("rtn", "4"), ["'method' is 4", "must be a name such as gptq, or a mapping"]),
        (PLAIN.replace("rtn", ""), ["'method' is empty", "must be a name such as gptq, or a mapping"]),
        (PLAIN.replace("rtn", "{name: 4}"), ["'method.name' is 4", "must be text"]),
        (PLAIN.replace("rtn", "{damping: 0.1}"), ["key 'method.name' is missing"]),
        (LONG.replace("name: gptq, d", "name: gtpq, d"), ["'method' is 'gtpq'", "did you mean 'gptq'?", "smoothquant"]),
        (LONG.replace("0.05", "much"), ["'method.damping' is 'much'", "must be a number"]),
        (LONG.replace("0.05", "true"), ["'method.damping' is True", "must be a number"]),
        (LONG.replace("0.05", "2"), ["'method.damping' is 2", "must be above 0 and at most 1"]),
        (LONG.replace("0.05", ".nan"), ["'method.damping' is nan", "must be above 0 and at most 1"]),
        (LONG.replace("0.05", "0.05, order: desc"), ["'method.order' is 'desc'", "one of static, desc_act, none"]),
        (PLAIN.replace("rtn", "{name: awq, points: 0}"), ["'method.points' is 0", "must be 1 to 1000"]),
        (PLAIN.replace("rtn", "{name: awq, points: 2.5}"), ["'method.points' is 2.5", "must be a whole number"]),
        (PLAIN.replace("rtn", "{name: awq, clip: 1}"), ["'method.clip' is 1", "must be true or false"]),
        (PLAIN + "calibration: notes.txt", ["'calibration' is 'notes.txt'", "must be a mapping"]),
        (PLAIN + "calibration:", ["'calibration' is empty", "must be a mapping"]),
        (PLAIN + "calibration: {source: 3}", ["'calibration.source' is 3", "must be text"]),
        (PLAIN + "calibration: {source: ''}", ["'calibration.source' is empty", "must be text"]),
        (PLAIN + "calibration: {source: }", ["'calibration.source' is empty", "leave it out"]),
        (PLAIN + "calibration: {samples: 0}", ["'calibration.samples' is 0", "must be at least 1"]),
        (PLAIN + "calibration: {samples: many}", ["'calibration.samples' is 'many'", "must be a whole number"]),
        (PLAIN + "calibration: {seq_len: 1}", ["'calibration.seq_len' is 1", "must be at least 2"]),
        (PLAIN + "calibration: {seed: -1}", ["'calibration.seed' is -1", "must be at least 0"]),
        (MIXED.replace("3.5", "few"), ["'target_bits' is 'few'", "must be a number"]),
        (MIXED.replace("3.5", ""), ["'target_bits' is empty", "leave it out"]),
        (MIXED.replace("3.5", "1.9"), ["'target_bits' is 1.9", "must be a number from 2 to 8"]),
        (MIXED.replace("3.5", "9"), ["'target_bits' is 9", "must be a number from 2 to 8"]),
        (MIXED.replace("3.5", ".nan"), ["'target_bits' is nan", "must be a number from 2 to 8"]),
        (PLAIN + "target_bits: 4", ["'target_bits'", "format 'gptq' cannot hold", "format.name: ct-packed"]),
        (
            MIXED + "overrides: [{modules: '*.o_proj', keep: true}, {modules: '*.down_proj', bits: 8}]",
            ["'overrides.1' sets options of '*.down_proj'", "'target_bits' chooses them", "keep: true may stay"],
        ),
        (PLAIN.replace("gptq", "gtpq"), ["'format.name' is 'gtpq'", "did you mean 'gptq'?", "nf4"]),
        (PLAIN.replace("bits: 4", "bits: 5"), ["'format.bits' is 5", "must be one of 2, 3, 4, 8"]),
        (PLAIN.replace("bits: 4", "bits: four"), ["'format.bits' is 'four'", "must be a whole number"]),
        (PLAIN.replace("bits: 4", "bits: 4.0"), ["'format.bits' is 4.0", "must be a whole number"]),
        (PLAIN + "  sym: 1", ["'format.sym' is 1", "must be true or false"]),
        (PLAIN + "  version: true", ["'format.version' is True", "must be a whole number"]),
        (PLAIN + "  group_size: 4", ["'format.group_size' is 4", "must be -1 (per row) or at least 8"]),
        (PLAIN + "  dtype: int4", ["'format.dtype' is 'int4'", "must be one of float16, bfloat16"]),
        (PLAIN.replace("A recipe for tests.", ""), ["'summary' is empty", "must be text"]),
        (PLAIN.replace("A recipe for tests.", '"two\\nlines"'), ["'summary' is", "must be one line of text"]),
        (PLAIN + "keep: '*'", ["'keep' is '*'", "must be a list"]),
        (PLAIN + "keep: [3]", ["'keep.0' is 3", "must be text"]),
        (PLAIN + "keep: ['']", ["'keep.0' is empty"]),
        (PLAIN + "keep: ['re:(']", ["'keep.0' is 're:('", "not a valid regular expression"]),
        (PLAIN + "overrides: {modules: '*'}", ["'overrides' is", "must be a list"]),
        (PLAIN + "overrides: ['*']", ["'overrides.0' is '*'", "must be a mapping"]),
        (PLAIN + "overrides: [{bits: 8}]", ["key 'overrides.0.modules' is missing"]),
        (PLAIN + "overrides: [{modules: '*', bits: 9}]", ["'overrides.0.bits' is 9", "must be one of 2, 3, 4, 8"]),
        (PLAIN + "overrides: [{modules: '*', keep: 1}]", ["'overrides.0.keep' is 1", "must be true or false"]),
        (PLAIN + "overrides: [{modules: 're:[', bits: 8}]", ["'overrides.0.modules' is 're:['", "regular expression"]),
        (PLAIN + "overrides: [{modules: '*'}]", ["'overrides.0'", "either keep: true or options"]),
        (PLAIN + "overrides: [{modules: '*', keep: true, bits: 8}]", ["'overrides.0'", "either keep: true or options"]),
        (PLAIN.replace("gptq", "ct-int8"), ["'format.bits' is 4", "must be one of 8"]),
        (PLAIN.replace("gptq\n  bits: 4", "ct-int8\n  sym: false"), ["'format'", "ct-int8", "sym true"]),
        (PLAIN + "3: 4", ["'3'", "must be text"]),
        (PLAIN + "  3: 4", ["'format.3'", "must be text"]),
        ("", ["a recipe is a mapping", "empty"]),
        ("[1, 2]", ["a recipe is a mapping", "[1, 2]"]),
    ],
)
def test_wrong_value_names_file_key_given_and_allowed(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = error_of(tmp_path, text)
    for part in ["mine.yaml", *parts]:
        assert part in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("summary: x\nmethod: [rtn", ["line 2", "not valid YAML"]),
        ("summary: x\nmethod: rtn\n\tformat: y", ["line 3", "not valid YAML"]),
        (PLAIN + "method: rtn", ["line 6", "key 'method' is given twice"]),
        (PLAIN + "  bits: 8", ["line 6", "key 'bits' is given twice"]),
        ("summary: !!python/object:os.system x", ["line 1", "not valid YAML"]),
        ("summary: 2024-99-99", ["not valid YAML"]),
        ("summary: \0", ["not valid YAML"]),
        ("[" * 5000, ["not valid YAML"]),
    ],
)
def test_broken_yaml_names_file_and_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = error_of(tmp_path, text)
    for part in ["mine.yaml", *parts]:
        assert part in message


def test_unreadable_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(b"summary: \xff\xfe")
    with pytest.raises(InputError, match=r"mine\.yaml: cannot be read"):
        load_recipe(str(file))
    with pytest.raises(InputError, match=r"no recipe file .*absent\.yml"):
        load_recipe(str(tmp_path / "absent.yml"))
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(InputError, match="no recipe file"):
        load_recipe(str(tmp_path / "folder.yaml"))


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown recipe 'rtn-w4g12'; did you mean 'rtn-w4g128'\?.*\.yaml"):
        load_recipe("rtn-w4g12")
    with pytest.raises(InputError, match=r"by their name alone: did you mean 'nf4'\?"):
        load_recipe("nf4.yaml")


def test_changes_apply_before_the_checks(tmp_path: Path) -> None:
    recipe = load(tmp_path, PLAIN, ["format.bits=3", "format.name=ct-packed", "keep=['*.o_proj', lm_head]"])
    assert recipe.format.name == "ct-packed"
    assert recipe.format.options == {"bits": 3}
    assert recipe.keep == ("*.o_proj", "lm_head")
    assert load_recipe("rtn-w4g128", ["format.sym=false"]).format.options["sym"] is False
    assert load_recipe("rtn-w4g128", ["summary=a=b"]).summary == "a=b"
    whole = load_recipe("nf4", ["format={name: gptq, bits: 4}"])
    assert whole.format.options == {"bits": 4}


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("format.bits", ["'format.bits' is not of the form KEY=VALUE"]),
        ("=3", ["not of the form KEY=VALUE"]),
        ("format..bits=3", ["not of the form KEY=VALUE"]),
        ("format.bits=[", ["'format.bits=['", "not valid YAML"]),
        ("format.bitz=3", ["mine.yaml with format.bitz=3", "unknown key 'format.bitz'", "did you mean 'bits'?"]),
        ("formt.bits=3", ["mine.yaml with formt.bits=3", "unknown key 'formt'", "did you mean 'format'?"]),
        ("format.bits=5", ["mine.yaml with format.bits=5", "'format.bits' is 5", "must be one of 2, 3, 4, 8"]),
        ("format.bits=", ["mine.yaml with format.bits=", "'format.bits' is empty", "must be a whole number"]),
        ("format.name=gtpq", ["mine.yaml with format.name=gtpq", "did you mean 'gptq'?"]),
        ("summary.bits=3", ["'summary' has no keys inside"]),
        ("method.bits=3", ["mine.yaml with method.bits=3", "unknown key 'method.bits' for method 'rtn'"]),
        ("method=rnt", ["mine.yaml with method=rnt", "'method' is 'rnt'", "did you mean 'rtn'?"]),
        ("method.name=rnt", ["mine.yaml with method.name=rnt", "'method' is 'rnt'", "did you mean 'rtn'?"]),
        ("method={name: gptq, damping: 2}", ["mine.yaml with method={name", "'method.damping' is 2"]),
        ("calibration.samples=0", ["mine.yaml with calibration.samples=0", "must be at least 1"]),
        ("target_bits=3", ["mine.yaml with target_bits=3", "format 'gptq' cannot hold"]),
        ("overrides.0.bits=3", ["mine.yaml with overrides.0.bits=3", "must be a list"]),
    ],
)
def test_wrong_change(tmp_path: Path, change: str, parts: list[str]) -> None:
    message = error_of(tmp_path, PLAIN, [change])
    for part in parts:
        assert part in message


def test_option_of_the_old_format_is_named_after_a_change_of_format() -> None:
    with pytest.raises(InputError, match=r"unknown key 'format\.group_size' for format 'nf4'"):
        load_recipe("rtn-w4g128", ["format.name=nf4"])


@pytest.mark.parametrize("text", [PLAIN, PLAIN.replace("rtn", "{name: rtn}")])
def test_methods_short_and_long_form_mean_the_same(tmp_path: Path, text: str) -> None:
    recipe = load(tmp_path, text)
    assert (recipe.method.name, recipe.method.options, recipe.method.build()) == ("rtn", {}, RtnMethod())
    assert recipe.to_dict()["method"] == "rtn"


def test_method_options_are_built(tmp_path: Path) -> None:
    assert load(tmp_path, LONG).method.build() == GptqMethod(damping=0.05)
    assert load(tmp_path, PLAIN.replace("rtn", "gptq")).method.build() == GptqMethod()
    options = load(tmp_path, PLAIN.replace("rtn", "{name: awq, points: 5, clip: false}")).method.build()
    assert options == AwqMethod(points=5, clip=False)


def test_changes_of_the_method(tmp_path: Path) -> None:
    """Options can be added to the short form; a bare name replaces the method with all its options."""
    short = PLAIN.replace("rtn", "gptq")
    assert load(tmp_path, short, ["method.damping=0.1"]).method.build() == GptqMethod(damping=0.1)
    assert load(tmp_path, short, ["method.damping=1e-3"]).method.build() == GptqMethod(damping=0.001)
    assert load(tmp_path, LONG, ["method.order=desc_act"]).method.options == {"damping": 0.05, "order": "desc_act"}
    assert load(tmp_path, LONG, ["method=rtn"]).method.build() == RtnMethod()
    changed = load(tmp_path, PLAIN, ["method=gptq", "method.damping=0.2"])
    assert changed.method.build() == GptqMethod(damping=0.2)
    assert "unknown key 'method.damping' for method 'rtn'" in error_of(tmp_path, LONG, ["method.name=rtn"])


def test_calibration_and_target_bits(tmp_path: Path) -> None:
    plain = load(tmp_path, PLAIN)
    assert plain.target_bits is None
    assert (plain.calibration.source, plain.calibration.samples) == (None, None)
    recipe = load(tmp_path, MIXED + "calibration: {source: a.jsonl, seq_len: 64}", ["calibration.seed=7"])
    assert recipe.target_bits == 3.5
    assert (recipe.calibration.source, recipe.calibration.samples) == ("a.jsonl", None)
    assert (recipe.calibration.seq_len, recipe.calibration.seed) == (64, 7)
    kept = load(tmp_path, MIXED + "keep: [lm_head]\noverrides: [{modules: '*.o_proj', keep: true}]")
    assert kept.target_bits == 3.5


@pytest.mark.parametrize("number", ["1e-2", "1E-2", "1.e-2", ".1e-1", "+1e-2", "0.01", "1.0e-2"])
def test_numbers_with_exponents_are_numbers(tmp_path: Path, number: str) -> None:
    assert load(tmp_path, LONG.replace("0.05", number)).method.build() == GptqMethod(damping=0.01)
