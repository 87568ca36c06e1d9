"""Settings of the server: where they come from, what is refused and how, and that keys stay secret."""

import json
import logging
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import click
import pytest
from pydantic import ValidationError

from quantkit.errors import InputError, StorageError
from quantkit.formats.base import DTYPES
from quantkit.runtime.core.options import KV_DTYPES, EngineOptions
from quantkit.runtime.server.config_file import parse_api_keys, read_api_keys, read_config
from quantkit.runtime.server.logs import log_event, setup_logging
from quantkit.runtime.server.settings import ENGINE_OPTIONS, FLAGS, ServerSettings, load_settings

ROOT = Path(__file__).parents[3]
KEY = "0123456789abcdef-secret"
RunCli = Callable[..., tuple[int, str, str]]


def load(
    flags: dict[str, Any], config: Path | None = None, environment: dict[str, str] | None = None
) -> ServerSettings:
    return load_settings({"model": "demo"} | flags, config, environment or {})


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.txt"
    file.write_text(
        f"# who may ask\nalice: {KEY}\n\n  second-key-without-name  # of nobody\nbob: a#key#with#hashes#in\n"
    )
    file.chmod(0o600)
    return file


def test_flags_win_over_the_file_which_wins_over_defaults(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("model: demo\nport: 9000\nmax-queue: 7\nserved_model_name: [small, tiny]\npage: false\n")
    settings = load_settings({"model": None, "port": 9100, "page": None}, config, {})
    assert (settings.model, settings.port, settings.max_queue, settings.page) == ("demo", 9100, 7, False)
    assert settings.names == ["small", "tiny"]
    assert settings.request_timeout_seconds == 600


def test_a_model_is_never_named_by_its_path(tmp_path: Path) -> None:
    assert load({"model": str(tmp_path)}).names == [tmp_path.name]
    assert load({"model": "org/model"}).names == ["org/model"]


def test_the_reference_holds_one_context() -> None:
    settings = load({"max_sequences": 64, "kv_tokens": 99_999, "kv_dtype": "fp8"})
    assert settings.shadow_engine_options["max_sequences"] == 1
    assert EngineOptions(**settings.shadow_engine_options).kv_tokens is None


def test_keys_of_the_environment_stand_between_flags_and_file(tmp_path: Path, keys_file: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(f"api_keys_file: {keys_file}\n")
    environment = {"QUANTKIT_API_KEYS": f"carol: {KEY}x, another-key-of-the-environment"}
    assert [key.name for key in load({}, config).api_keys] == ["alice", "key-2", "bob"]
    assert [key.name for key in load({}, config, environment).api_keys] == ["carol", "key-2"]
    flags = {"api_keys_file": str(keys_file)}
    assert [key.name for key in load(flags, None, environment).api_keys] == ["alice", "key-2", "bob"]


def test_keys_are_known_by_name(keys_file: Path) -> None:
    settings = load({"api_keys_file": str(keys_file)})
    assert settings.key_name(KEY) == "alice"
    assert settings.key_name("second-key-without-name") == "key-2"
    assert settings.key_name("a#key#with#hashes#in") == "bob"
    for wrong in ("", KEY[:-1], KEY + " ", "alice", "é" * 20, "\ud800"):
        assert settings.key_name(wrong) is None


def test_keys_are_never_shown(keys_file: Path) -> None:
    settings = load({"api_keys_file": str(keys_file)})
    shown = repr(settings) + str(settings.api_keys) + settings.model_dump_json()
    stream = StringIO()
    setup_logging("info", stream)
    log_event("settings", settings=settings, keys=settings.api_keys)
    for text in (shown, stream.getvalue()):
        assert "secret" not in text
        assert "second-key" not in text


def test_a_line_of_the_log_is_one_json_object() -> None:
    stream = StringIO()
    setup_logging("info", stream)
    log_event("two\nlines", path="/v1\n{}\ud800")
    logging.getLogger("elsewhere").error("failed", exc_info=ValueError("why"))
    logging.getLogger("elsewhere").debug("not shown")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "two\nlines"
    assert first["path"] == "/v1\n{}\ud800"
    assert "ValueError: why" in second["exception"]


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o602])
def test_keys_that_others_can_reach_are_refused(keys_file: Path, mode: int) -> None:
    keys_file.chmod(mode)
    with pytest.raises(InputError, match=f"chmod 600 {keys_file}"):
        load({"api_keys_file": str(keys_file)})


def test_keys_for_a_group_are_allowed(keys_file: Path) -> None:
    keys_file.chmod(0o640)
    assert len(read_api_keys(keys_file)) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no API key"),
        ("# nothing\n", "no API key"),
        ("short", "entry 1: the key has 5 characters, but needs 16"),
        (f"a: {KEY}\na: {KEY}2", "entry 2: the name 'a' is given twice"),
        (f"a: {KEY}\nb: {KEY}", "entry 2: the same key as that of 'a'"),
        (f"a b: {KEY}", "the name before the colon"),
        ("a: with spaces inside it", "without spaces"),
        ("a: ", "printable ASCII"),
        ("ключ-ключ-ключ-ключ", "printable ASCII"),
    ],
)
def test_wrong_keys_are_refused_without_showing_them(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        parse_api_keys(text)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": 70000}, "--port is 70000, but must be at most 65535"),
        ({"port": True}, "--port is True, but must be a whole number"),
        ({"drain_seconds": -1.0}, "--drain-seconds is -1.0, but must be at least 0"),
        ({"request_timeout_seconds": float("inf")}, "must be a finite number"),
        ({"shadow_rate": 2.0}, "--shadow-rate is 2.0, but must be at most 1"),
        ({"dtype": "int8"}, "'float16', 'bfloat16' or 'float32'"),
        ({"device": "gpu"}, "--device is 'gpu', but must be auto, cpu, cuda or cuda:N"),
        ({"cors_origins": ["https://a.org/path"]}, "origins such as"),
        ({"served_model_name": ["a", "a"]}, "different names"),
        ({"tls_certfile": "cert.pem"}, "give both or none"),
        ({"model": ""}, "'model' is '', but must be text"),
    ],
)
def test_wrong_values_are_refused_in_one_line(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        load(flags)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 8000", "unknown key 'prot'; did you mean 'port'?"),
        ("port: '8000'", "'port' is '8000', but must be a whole number"),
        ("log_prompts: 1", "must be true or false"),
        ("served_model_name: small", "'served_model_name' is 'small', but must be a list"),
        ("port: 1\nport: 2", "line 2: not valid YAML: key 'port' is given twice"),
        ("max-queue: 1\nmax_queue: 2", "given twice"),
        ("- port", "must hold `key: value` lines"),
        ("port: [", "not valid YAML"),
        ("api_keys: [x]", "name a file of keys with 'api_keys_file'"),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(text)
    with pytest.raises(InputError) as refused:
        load({}, config)
    assert message in str(refused.value)
    assert str(config) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2 << 20)
    with pytest.raises(StorageError, match="No such file"):
        read_config(tmp_path / "missing.yaml")
    with pytest.raises(StorageError, match="not UTF-8"):
        read_config(tmp_path / "binary")
    with pytest.raises(StorageError, match="right file"):
        read_config(tmp_path / "large")
    assert read_config("/dev/null") == {}


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        load({}).port = 1  # type: ignore[misc]


def test_the_engine_takes_every_engine_option() -> None:
    settings = load({"dtype": "float32", "kv_tokens": 512, "device": "cpu"})
    options = EngineOptions(**settings.engine_options)
    assert options.kv_tokens == 512
    defaults = EngineOptions()
    for name in ENGINE_OPTIONS:
        if name != "warm_up":  # a server has time before its first request
            assert ServerSettings.model_fields[name].default == getattr(defaults, name)
    for dtype in DTYPES:
        assert load({"dtype": dtype}).dtype == dtype
    for kv_dtype in KV_DTYPES:
        assert load({"kv_dtype": kv_dtype}).kv_dtype == kv_dtype


def test_every_setting_has_a_flag_with_its_help() -> None:
    from quantkit.cli.serve import command

    options = {option.name: option for option in command.params if isinstance(option, click.Option)}
    assert set(options) == {*FLAGS, "config"}
    for name in FLAGS:
        assert ServerSettings.model_fields[name].description in (options[name].help or "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no model"),
        (("demo", "--port", "x"), "'x' is not a valid integer"),
        (("demo", "--prot", "1"), "No such option"),
        (("demo", "--max-queue", "0"), "--max-queue is 0, but must be at least 1"),
        (("--config", "no-such-file.yaml"), "cannot read no-such-file.yaml"),
        (("no-such-folder",), "no model at 'no-such-folder'"),
        (("demo", "--host", "no.such.host.invalid"), "host 'no.such.host.invalid' is not known here"),
        (("demo", "--tls-certfile", "/dev/null", "--tls-keyfile", "/dev/null"), "cannot use the TLS files"),
    ],
)
def test_wrong_input_ends_with_one_line_and_code_2(run_cli: RunCli, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run_cli("serve", *arguments)
    assert code == 2, err
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_the_guide_names_every_setting() -> None:
    page = (ROOT / "docs" / "reference" / "serving.md").read_text(encoding="utf-8")
    guide = page.partition("\n## Settings\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in guide.splitlines() if line.startswith("| `")]
    for name in FLAGS:
        assert f"`{name}`" in rows, f"docs/reference/serving.md has no row for {name}"
    known = {f"`{name}`" for name in FLAGS}
    assert set(rows) == known, "docs/reference/serving.md explains a setting that does not exist"


@pytest.mark.parametrize(
    ("host", "keys", "warns"), [("127.0.0.1", False, False), ("0.0.0.0", False, True), ("0.0.0.0", True, False)]
)
def test_an_open_server_is_warned_of(host: str, keys: bool, warns: bool, keys_file: Path) -> None:
    """Where anybody who reaches this machine may ask."""
    given = {"model": "demo", "host": host} | ({"api_keys_file": str(keys_file)} if keys else {})
    settings = load_settings(given, None, {})
    assert (settings.warning is not None) is warns
