"""Recipe files are read strictly: every slip is one line that names the file, the key and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from quantkit.errors import InputError
from quantkit.recipe import Recipe, load_recipe

PLAIN = """\
summary: A recipe for tests.
method: rtn
format:
  name: gptq
  bits: 4
"""


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
        (PLAIN.replace("rtn", "4"), ["'method' is 4", "must be text"]),
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
        ("method.bits=3", ["'method' has no keys inside"]),
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
