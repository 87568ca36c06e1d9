"""The file of `quantkit deploy`, the plan made from it, and what is refused before anything starts; all without Ray."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantkit.deploy.check import check_model, checkpoint_mark
from quantkit.deploy.config import parse_config, read_deploy_config
from quantkit.deploy.resources import check_room, fits_beside, replica_bundles
from quantkit.errors import InputError

CPU = {"device": "cpu", "max_context": 128, "kv_tokens": 1024}


def config_of(**model: Any) -> Any:
    return parse_config({"models": [{"name": "chat", "path": "demo", "cpus": 0.1, "options": CPU} | model]})


def test_defaults_and_short_forms(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "models:\n- {name: org/chat, path: demo}\n- {name: b, path: demo, replicas: 3}\nmax-request-bytes: 4096\n"
    )
    config = read_deploy_config(file)
    first, second = config.models
    assert (first.replicas.min, first.replicas.max, second.replicas.min, second.replicas.max) == (1, 1, 3, 3)
    assert (config.http.host, config.http.port) == ("127.0.0.1", 8000)
    assert first.deployment == "model-org_chat"
    assert config.front_settings.max_request_bytes == 4096
    settings = config.replica_settings(first)
    assert (settings.model, settings.names, settings.page, settings.max_request_bytes) == (
        "demo",
        ["org/chat"],
        False,
        4096,
    )


def test_a_replica_never_sees_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from a file, or, as with `serve`, from the environment, which wins."""
    keys = tmp_path / "keys"
    keys.write_text("alice: 0123456789abcdef0123\n")
    keys.chmod(0o600)
    config = parse_config({"models": [{"name": "chat", "path": "demo"}], "api_keys_file": str(keys)})
    assert [key.name for key in config.front_settings.api_keys] == ["alice"]
    assert config.replica_settings(config.models[0]).api_keys == ()
    monkeypatch.setenv("QUANTKIT_API_KEYS", "bob: 0123456789abcdef0123")
    assert [key.name for key in config.front_settings.api_keys] == ["bob"]
    assert config.replica_settings(config.models[0]).api_keys == ()


GOOD = {"name": "a", "path": "demo"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ("no models",)),
        ({"models": []}, ("no models",)),
        ({"models": [GOOD], "modles": 1}, ("unknown key 'modles'", "did you mean 'models'")),
        ({"models": [GOOD | {"pth": 1}]}, ("unknown key 'models[0].pth'", "did you mean 'path'")),
        ({"models": [{"name": "a"}]}, ("'models[0].path' is missing",)),
        ({"models": [GOOD | {"replicas": 0}]}, ("models[0].replicas.min is 0", "greater than or equal to 1")),
        ({"models": [GOOD | {"replicas": {"min": 3, "max": 2}}]}, ("max is 2", "at least min, 3")),
        ({"models": [GOOD | {"replicas": {"mim": 3}}]}, ("unknown key 'models[0].replicas.mim'", "'min'")),
        ({"models": [GOOD | {"replicas": "two"}]}, ("models[0].replicas",)),
        ({"models": [GOOD | {"tensor_parallel": 0}]}, ("models[0].tensor_parallel is 0",)),
        ({"models": [GOOD | {"name": "a b"}]}, ("models[0].name is 'a b'",)),
        ({"models": [GOOD, GOOD]}, ("'a' and 'a' need names that differ",)),
        ({"models": [GOOD | {"name": "a/b"}, GOOD | {"name": "a:b"}]}, ("'a/b' and 'a:b' need names",)),
        ({"models": [GOOD | {"options": {"max_contxt": 1}}]}, ("models[0].options.max_contxt", "'max_context'")),
        ({"models": [GOOD | {"options": {"max_context": "8k"}}]}, ("models[0].options.max_context is '8k'",)),
        ({"models": [GOOD | {"options": {"device": "cuda:1"}}]}, ("models[0].options.device", "Ray chooses")),
        ({"models": [GOOD], "http": {"port": 70000}}, ("http.port is 70000",)),
        ({"models": [GOOD], "http": {"prot": 1}}, ("unknown key 'http.prot'", "'port'")),
        ({"models": [GOOD], "drain_seconds": -1}, ("drain_seconds is -1",)),
        ({"models": [GOOD], "virtual_models": {}}, ("unknown key 'virtual_models'", "did you mean 'models'")),
        ({"models": [GOOD], "health_check_seconds": 0}, ("health_check_seconds is 0",)),
        ({"models": [GOOD], "api_keys_file": "nowhere"}, ("cannot read nowhere",)),
        ({"models": [GOOD], "tls_certfile": "x"}, ("tls_certfile and tls_keyfile belong together",)),
    ],
)  # fmt: skip
def test_wrong_configurations(
    given: Any, words: tuple[str, ...], tmp_path: Path, run_cli: Callable[..., tuple[int, str, str]]
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(yaml.safe_dump(given))
    code, out, err = run_cli("deploy", file, "--dry-run")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1, err
    for word in words:
        assert word in err, err


def test_wrong_yaml_and_wrong_flags(tmp_path: Path, run_cli: Callable[..., tuple[int, str, str]]) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: [a\n")
    for arguments, word in (
        ((file,), "not valid YAML"),
        ((tmp_path / "none.yaml",), "cannot read"),
        ((), "no CONFIG.yaml"),
        (("--status", "--stop"), "exclude each other"),
    ):
        code, _, err = run_cli("deploy", *arguments)
        assert code == 2
        assert word in err
        assert err.count("\n") == 1


def test_models_that_are_not_there_or_do_not_fit(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for changes, word in (
        ({"path": str(tmp_path / "none")}, "model 'chat': no model at"),
        ({"path": str(empty)}, "model 'chat': "),
        ({"options": CPU | {"kv_tokens": 10**12}}, "model 'chat': the model does not fit"),
        ({"options": CPU | {"max_context": 10**6}}, "model 'chat': max_context is 1000000"),
        ({"options": CPU | {"speculative": "draft=nowhere,k=2"}}, "model 'chat': no model at 'nowhere'"),
    ):
        config = config_of(**changes)
        with pytest.raises(InputError, match=word):
            check_model(config, config.models[0], gpu=False)
    needs = check_model(config_of(), config_of().models[0], gpu=False)
    assert needs.weights > 2**20
    assert needs.max_context == 128


@pytest.mark.parametrize(
    ("changes", "nodes", "word"),
    [
        ({"tensor_parallel": 4}, [{"CPU": 8, "GPU": 2}], "4 ranks (tensor_parallel 4 x pipeline_parallel 1), but"),
        ({"replicas": 3, "tensor_parallel": 2}, [{"CPU": 8, "GPU": 4}], "together need 6 GPUs, but the cluster has 4"),
        ({"options": {"device": "cuda"}}, [{"CPU": 8}], "the cluster has no GPU"),
        ({"cpus": 3, "options": CPU}, [{"CPU": 2}], "needs 3 CPUs"),
        ({"cpus": 1, "replicas": 4, "options": CPU}, [{"CPU": 2}], "all replicas together need 4 CPUs"),
        ({"cpus": 3, "options": CPU}, [{"CPU": 2}, {"CPU": 2}], "no node of the cluster has 3 CPU"),
    ],
)  # fmt: skip
def test_more_than_the_cluster_has(changes: Any, nodes: Any, word: str) -> None:
    with pytest.raises(InputError) as refused:
        check_room(config_of(**{"options": {}} | changes).models, nodes)
    assert word in str(refused.value)


def test_room_that_is_enough() -> None:
    models = config_of(options={}, tensor_parallel=2, pipeline_parallel=2, replicas=2).models
    check_room(models, [{"CPU": 4, "GPU": 4}, {"CPU": 4, "GPU": 4}])
    bundles = replica_bundles(models[0], gpu=True)
    assert [bundle["GPU"] for bundle in bundles] == [1.0] * 4
    assert fits_beside(models[0], True, {"CPU": 4, "GPU": 4})
    assert not fits_beside(models[0], True, {"CPU": 4, "GPU": 3})
    check_room(config_of().models, [{"CPU": 1}])


def test_a_checkpoint_that_was_written_anew_is_another_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = checkpoint_mark(str(tmp_path))
    assert before == checkpoint_mark(str(tmp_path))
    (tmp_path / "config.json").write_text("{ }")
    assert checkpoint_mark(str(tmp_path)) != before
    assert checkpoint_mark("org/model-on-other-nodes") == []


def test_nothing_but_the_deployment_knows_ray() -> None:
    """Ray is an optional extra: whatever else is imported must load where it is not installed."""
    root = Path(__file__).parents[2]
    files = [file for folder in ("quantkit", "runtime", "eval", "kernels") for file in (root / folder).rglob("*.py")]
    knows = {
        str(file.relative_to(root)) for file in files if re.search(r"^\s*(import|from) ray\b", file.read_text(), re.M)
    }
    parts = ("app", "cluster", "ingress", "ranks", "replica", "router")
    assert knows == {f"quantkit/deploy/{part}.py" for part in parts}
