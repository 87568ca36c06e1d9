"""Which models a server has: arguments, the file, their settings, and what is refused before anything starts."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import InputError
from quantkit.runtime.server.models.model_list import load_model_settings
from quantkit.runtime.server.settings import ServerSettings
from quantkit.runtime.server.virtual_models import VirtualModel

RunCli = Callable[..., tuple[int, str, str]]


def load(*arguments: str, config: Path | None = None, **flags: Any) -> tuple[ServerSettings, ...]:
    return load_model_settings(arguments, flags, config, {})


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "server.yaml").write_text(text)
        return tmp_path / "server.yaml"

    return write


def test_several_models_have_their_names() -> None:
    found = load("a=demo", "org/b=org/model", max_context=128, port=9000)
    assert [(one.model, one.names) for one in found] == [("demo", ["a"]), ("org/model", ["org/b"])]
    assert {(one.max_context, one.port) for one in found} == {(128, 9000)}


def test_one_model_is_what_it_was(tmp_path: Path, config: Callable[[str], Path]) -> None:
    (one,) = load("demo", served_model_name=["small", "tiny"])
    assert (one.model, one.names) == ("demo", ["small", "tiny"])
    (one,) = load(config=config("model: demo\nport: 1\n"))
    assert (one.model, one.names, one.port) == ("demo", ["demo"], 1)
    folder = tmp_path / "bits=4"
    folder.mkdir()
    (one,) = load(str(folder))
    assert (one.model, one.names) == (str(folder), ["bits=4"])
    (one,) = load("small=demo")
    assert (one.model, one.names) == ("demo", ["small"])


def test_the_file_gives_each_model_its_own_settings(config: Callable[[str], Path]) -> None:
    file = config("models:\n  a: demo\n  b: {model: demo-draft, max-context: 64, shadow: demo}\nmax_context: 128\n")
    first, second = load(config=file)
    assert (first.names, first.max_context, first.shadow) == (["a"], 128, None)
    assert (second.names, second.max_context, second.shadow) == (["b"], 64, "demo")
    assert [one.max_context for one in load(config=file, max_context=32)] == [32, 32], "flags win over the file"
    chosen = load("b=demo", "c=demo", config=file)
    assert [(one.names[0], one.model, one.max_context) for one in chosen] == [("b", "demo", 64), ("c", "demo", 128)]
    (one,) = load("demo", config=file)
    assert (one.names, one.max_context) == (["demo"], 128)


@pytest.mark.parametrize(
    ("arguments", "flags", "message"),
    [
        (("a=demo", "a=demo-draft"), {}, "the name 'a' is given twice, to 'demo' and 'demo-draft'"),
        (("a=demo", "demo-draft"), {}, "'demo-draft' has no name; write each of several models as NAME=MODEL"),
        (("a=demo", "b="), {}, "'b=' has no model after the ="),
        (("a=demo", "=demo"), {}, "a name of a model must be letters"),
        (("a=demo", "b,c=demo"), {}, "a name of a model must be letters"),
        (("a=demo", "b=demo"), {"served_model_name": ["x"]}, "leave served_model_name out"),
        (("a=demo", "b=demo"), {"shadow": "demo"}, "shadow compares one model"),
        (("a=demo", "b=demo"), {"cache_split": "a=1"}, "must name each model once: a, b"),
        (("a=demo", "b=demo"), {"cache_split": "a=1,b=1,c=1"}, "must name each model once: a, b"),
        (("a=demo", "b=demo"), {"cache_split": "a=1,b=0"}, "--cache-split is 'a=1,b=0', but must be a number above 0"),
        (("a=demo", "b=demo"), {"cache_split": "a=1,b=much"}, "such as a=60,b=40"),
        (("demo",), {"cache_split": "demo=1"}, "there is one; leave it out"),
        (("a=demo", "b=demo"), {"port": -1}, "--port is -1, but must be at least 0"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments: tuple[str, ...], flags: Any, message: str) -> None:
    with pytest.raises(InputError) as refused:
        load(*arguments, **flags)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: demo\nmodels: {a: demo}", "'model' and 'models' exclude each other"),
        ("models: [demo]", "'models' must hold `name: model` lines"),
        ("models: {}", "'models' must hold `name: model` lines"),
        ("models: {a: 5}", "models: 'a' must be a model, or keys such as"),
        ("models:\n  a: demo\n  a: demo", "key 'a' is given twice"),
        ("models: {a: {kv_dtype: fp8}}", "models: 'a' has no 'model'"),
        ("models: {a: {model: demo, port: 1}}", "models: a: 'port' is for the whole server; write it beside 'models'"),
        ("models: {a: {model: demo, memory_share: 0.5}}", "'memory_share' is for the whole server"),
        ("models: {a: {model: demo, kv_dtyp: fp8}}", "models: a: unknown key 'kv_dtyp'; did you mean 'kv_dtype'?"),
        ("models: {a: demo, b: {model: demo, max_context: x}}", "models: b: 'max_context' is 'x', but must be a whole"),
        ("models: {a: demo, b: {model: 5}}", "models: b: 'model' is 5, but must be text"),
        ("models: {a: demo}\nprot: 1", "server.yaml: unknown key 'prot'; did you mean 'port'?"),
    ],
)
def test_wrong_files_are_refused_in_one_line(config: Callable[[str], Path], text: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        load(config=config(text))
    assert message in str(refused.value)
    assert "server.yaml" in str(refused.value)
    assert "\n" not in str(refused.value)


PAIR = "models: {small: demo-draft, large: demo}\n"


def test_virtual_models_stand_for_models_of_the_file_or_the_command_line(config: Callable[[str], Path]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "serving.md").read_text(encoding="utf-8")
    (example,) = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "virtual_models" in block]
    auto = VirtualModel("auto", "cheapest", ("small", "large"), "weights")
    helper = VirtualModel("helper", "escalate", ("small", "large"), "listed")
    assert [one.virtual_models for one in load(config=config(example))] == [(auto, helper)] * 2
    assert load("small=demo", "large=org/b", config=config(example))[1].virtual_models == (auto, helper)
    listed = "virtual-models: {any: {policy: cheapest, members: [large, small], order: listed}}"
    (found,) = load(config=config(PAIR + listed))[0].virtual_models
    assert found == VirtualModel("any", "cheapest", ("large", "small"), "listed")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "virtual_models must hold a name with policy and members for each, such as `auto: {policy: cheapest"),
        ("[auto]", "virtual_models must hold a name with policy"),
        ("{auto: small}", "virtual_models: auto must have a policy and members, such as"),
        ("{small: {policy: cheapest, members: [small, large]}}", "'small' is the name of a model; choose another one"),
        ("{'a b': {policy: cheapest, members: [small, large]}}", "'a b': a name of a model must be letters"),
        (
            "{auto: {polcy: cheapest}}",
            "auto: unknown key 'polcy'; did you mean 'policy'? Known: members,",
        ),
        ("{auto: {policy: fastest}}", "auto: 'policy' is 'fastest', but must be cheapest or escalate"),
        ("{auto: {members: [small, large]}}", "auto: 'policy' is None, but must be cheapest or escalate"),
        ("{auto: {policy: [cheapest]}}", "auto: 'policy' is ['cheapest'], but must be cheapest or escalate"),
        ("{auto: {policy: cheapest}}", "auto: 'members' is None, but must be a list of two models or more"),
        (
            "{auto: {policy: cheapest, members: small}}",
            "'members' is 'small', but must be a list of two models",
        ),
        ("{auto: {policy: cheapest, members: [small]}}", "'members' is ['small'], but must be a list of two models"),
        ("{auto: {policy: cheapest, members: [small, 7]}}", "'members' is ['small', 7], but must be a list of two"),
        ("{auto: {policy: cheapest, members: [small, lage]}}", "auto: there is no model 'lage'; did you mean 'large'"),
        ("{auto: {policy: cheapest, members: [small, small]}}", "'members' has 'small' twice"),
        (
            "{auto: {policy: cheapest, members: [small, large], order: size}}",
            "'order' is 'size', but must be weights",
        ),
        ("{auto: {policy: escalate, members: [small, large], order: listed}}", "as they are listed; leave 'order' out"),
    ],
)
def test_wrong_virtual_models_are_refused_in_one_line(config: Callable[[str], Path], text: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        load(config=config(f"{PAIR}virtual_models: {text}"))
    assert "server.yaml: virtual_models" in str(refused.value)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_virtual_models_need_several(config: Callable[[str], Path]) -> None:
    file = config("model: demo\nvirtual_models: {auto: {policy: cheapest, members: [small, large]}}")
    for arguments in ((), ("demo",), ("small=demo",)):
        with pytest.raises(InputError, match="virtual_models choose among several models, and there is one"):
            load(*arguments, config=file)
    with pytest.raises(InputError, match="unknown key 'virtual_model'; did you mean 'virtual_models'"):
        load(config=config(PAIR + "virtual_model: {}"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a=demo", "b=no-such-folder"), ("no model at 'no-such-folder'",)),
        (("a=demo", "a=demo"), ("the name 'a' is given twice",)),
        pytest.param(
            ("a=demo", "b=demo-draft", "--max-context", "1000000"),
            ("model 'a': max_context is 1000000",),
            marks=pytest.mark.long,  # `test_memory_split.py` makes the plan in its own process
        ),
        (
            ("a=demo", "b=demo-draft", "--kv-tokens", "900000000"),
            ("the models do not fit together on cpu: a ", "weights 30.43 MB", ", b ", "may be used", "--kv-tokens"),
        ),
    ],
)
def test_nothing_starts_with_wrong_input(run_cli: RunCli, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    code, out, err = run_cli("serve", *arguments, "--device", "cpu", "--port", "0")
    assert code == 2, err
    assert (out, err.count("\n")) == ("", 1)
    for word in words:
        assert word in err
