"""`quantkit inspect --launch`: commands for every format and engine, and a manifest that Ray and quantkit accept."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantkit.convert import convert
from quantkit.deploy.config import parse_config
from quantkit.errors import InputError
from quantkit.launch import (
    IMPORT_PATH,
    RAY_VERSION,
    Launch,
    Wishes,
    deploy_config,
    launches,
    manifest,
    manifest_text,
    read_target,
)
from quantkit.launch.commands import ORDER
from quantkit.launch.serve_commands import SERVE_COMMANDS, OllamaFile
from quantkit.pipeline import quantize
from quantkit.runtime.server.settings import FLAGS

Cli = Callable[..., tuple[int, str, str]]
BNB = "it does not cut bitsandbytes checkpoints"


@pytest.fixture
def quantized(quantized_tiny: Callable[..., Path]) -> Callable[[str], Path]:
    """The tiny model in a recipe's format, made once."""
    return quantized_tiny


def by_engine(model: Path | str, **options: Any) -> dict[str, Launch]:
    return {launch.engine: launch for launch in launches(read_target(str(model), **options))}


def flags(launch: Launch) -> dict[str, str]:
    """`--name value` pairs behind the model."""
    words = [word for word in launch.command if word.startswith("--")]
    return {word: launch.command[launch.command.index(word) + 1] for word in words}


def test_a_plain_model(tiny_model: Path) -> None:
    found = by_engine(tiny_model, tensor=2, max_context=128)
    assert shlex.join(found["vLLM"].command) == (
        f"vllm serve {tiny_model} --dtype bfloat16 --max-model-len 128 --tensor-parallel-size 2"
    )
    assert shlex.join(found["SGLang"].command) == (
        f"python -m sglang.launch_server --model-path {tiny_model} --dtype bfloat16 --context-length 128 "
        "--tensor-parallel-size 2"
    )
    assert shlex.join(found["quantkit"].command) == (
        f"quantkit serve {tiny_model} --max-context 128 --tensor-parallel 2"
    )


def listed_flags(engine: str) -> set[str]:
    """All that the data names."""
    serve = SERVE_COMMANDS[engine]  # type: ignore[index]
    fields = (serve.start, serve.context, serve.dtype, serve.quantization, serve.tensor, serve.pipeline)
    words = [word for field in (*fields, serve.port, serve.chat_template, *serve.kv.values()) for word in field]
    return {word for word in words if word.startswith("-")}


@pytest.mark.parametrize("engine", [engine for engine in ORDER if engine not in ("Ollama", "quantkit")])
def test_commands_have_listed_flags_only(engine: str, quantized: Callable[[str], Path]) -> None:
    """With their source; what has no flag is refused by name."""
    assert SERVE_COMMANDS[engine].sources  # type: ignore[index]
    wishes = (Wishes(), Wishes(port=9000), Wishes(chat_template="t"), *(Wishes(kv_dtype=k) for k in ("fp8", "int4")))
    target = read_target(str(quantized("fp8")), max_context=128)
    for wish in wishes:
        (launch,) = launches(target, wish, (engine,))  # type: ignore[arg-type]
        given = {word for word in launch.command if word.startswith("-")}
        assert given <= listed_flags(engine)
        assert launch.command or launch.remark


def test_tgi_is_told_the_method_or_a_dtype(tiny_model: Path, quantized: Callable[[str], Path]) -> None:
    plain, packed = (by_engine(path)["TGI"] for path in (tiny_model, quantized("rtn-w4g64")))
    assert flags(plain)["--dtype"] == "bfloat16"
    assert flags(packed)["--quantize"] == "gptq"
    assert "--dtype" not in packed.command
    assert (flags(plain)["--max-total-tokens"], flags(plain)["--max-input-tokens"]) == ("256", "255")
    assert "no flag for --pipeline-parallel" in by_engine(tiny_model, pipeline=2)["TGI"].remark


def test_a_gguf_file(tiny_gguf: Path, tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.write_text("{{ .Prompt }}\n")
    target = read_target(str(tiny_gguf), max_context=128)
    wishes = Wishes(port=9000, kv_dtype="int8", chat_template=str(template))
    found = {launch.engine: launch for launch in launches(target, wishes)}
    server = found["llama.cpp"].command
    assert server[:3] == ("llama-server", "--model", str(tiny_gguf))
    assert flags(found["llama.cpp"])["--cache-type-k"] == "q8_0"
    ollama = found["Ollama"]
    assert ollama.modelfile == f'FROM {tiny_gguf}\nPARAMETER num_ctx 128\nTEMPLATE """{{{{ .Prompt }}}}"""\n'
    assert ollama.command == ("ollama", "create", "model", "-f", "Modelfile")
    assert "OLLAMA_KV_CACHE_TYPE=q8_0 OLLAMA_HOST=127.0.0.1:9000" in ollama.remark
    assert "takes no GGUF files" in found["transformers"].remark
    assert "no flag for a cache in int8, only fp8" in found["vLLM"].remark
    assert OllamaFile().sources
    two = {launch.engine: launch.command for launch in launches(read_target(str(tiny_gguf), tensor=2))}
    assert two["llama.cpp"][-4:] == ("--split-mode", "row", "--tensor-split", "1,1")


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    return Path(convert("demo-draft", "gguf", tmp_path / "model.gguf").output)


def test_experts_are_divided(family_model: Callable[[str], Path]) -> None:
    """Which only we ask for: others cut each expert unless told otherwise."""
    target = read_target(str(family_model("qwen3_moe")), tensor=2)
    found = {launch.engine: launch.command for launch in launches(target)}
    assert {engine for engine, command in found.items() if "--expert-parallel" in command} == {"quantkit"}
    (model,) = deploy_config(target, (1, 1), "model")["models"]
    assert (model["tensor_parallel"], model["expert_parallel"]) == (2, True)
    assert "--expert-parallel" not in by_engine(family_model("qwen3_moe"), pipeline=2)["quantkit"].command


@pytest.mark.parametrize(
    ("recipe", "vllm", "sglang"),
    [
        ("rtn-w4g64", "bfloat16", "bfloat16"),
        ("rtn-w8", "bfloat16", "bfloat16"),
        ("rtn-w2g64", None, None),
        ("rtn-w4g128-asym", "bfloat16", "bfloat16"),
        ("rtn-w4g128-ct", "bfloat16", "bfloat16"),
        ("nf4", "bfloat16", "bfloat16"),
        ("llm-int8", "bfloat16", "bfloat16"),
        ("fp8", "bfloat16", "bfloat16"),
        ("rtn-w8a8", "bfloat16", "bfloat16"),
    ],
)
def test_formats(quantized: Callable[[str], Path], recipe: str, vllm: str | None, sglang: str | None) -> None:
    """The dtype that an engine needs, or no command at all; the quantization it finds by itself."""
    found = by_engine(quantized(recipe))
    for engine, dtype in (("vLLM", vllm), ("SGLang", sglang)):
        launch = found[engine]
        if dtype is None:
            assert launch.command == ()
            assert launch.remark
            assert list(launch.lines()) == [f"# {engine} cannot: {launch.remark}"]
        else:
            assert flags(launch)["--dtype"] == dtype
            assert "--quantization" not in launch.command
    assert found["quantkit"].command


def test_layouts_that_only_float16_kernels_read(tiny_model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "w3.yaml"
    recipe.write_text("summary: three bits\nmethod: rtn\nformat: {name: gptq, bits: 3, group_size: 128}\n")
    quantize(tiny_model, str(recipe), tmp_path / "w3", quality_windows=0)
    found = by_engine(tmp_path / "w3")
    assert "GPTQ only symmetric at 4 or 8 bits" in found["vLLM"].remark
    assert flags(found["SGLang"])["--dtype"] == "float16"


def test_bitsandbytes_in_other_engines(quantized: Callable[[str], Path]) -> None:
    """They cannot cut it, but put its layers onto several GPUs; vLLM reads it with a plugin."""
    for recipe in ("nf4", "llm-int8"):
        assert by_engine(quantized(recipe))["vLLM"].remark == "with vllm-bnb-plugin"
        cut = by_engine(quantized(recipe), tensor=2)
        for engine in ("vLLM", "SGLang"):
            assert cut[engine].command == ()
            assert BNB in cut[engine].remark
            assert "--pipeline-parallel 2" in cut[engine].remark
        assert flags(cut["quantkit"])["--tensor-parallel"] == "2"
        staged = by_engine(quantized(recipe), pipeline=2)
        assert flags(staged["vLLM"])["--pipeline-parallel-size"] == "2"
        assert flags(staged["SGLang"])["--pipeline-parallel-size"] == "2"


def test_float16_for_gemma_is_refused_by_vllm(quantized: Callable[[str], Path], tmp_path: Path) -> None:
    """A checkpoint whose config.json says gemma2, in a dtype that vLLM does not run it in."""
    folder = tmp_path / "gemma"
    folder.mkdir()
    for file in quantized("rtn-w4g128-ct").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gemma2", "dtype": "float16"}))
    found = by_engine(folder)
    assert "refuses float16 for gemma2" in found["vLLM"].remark
    assert flags(found["SGLang"])["--dtype"] == "float16"


def test_our_own_flags_exist(tiny_model: Path) -> None:
    """`quantkit serve` takes what is printed."""
    command = by_engine(tiny_model, tensor=2, pipeline=2)["quantkit"].command
    given = {word[2:].replace("-", "_") for word in command if word.startswith("--")}
    assert given == {"max_context", "tensor_parallel", "pipeline_parallel"}
    assert given <= set(FLAGS)


def test_names_with_spaces_are_quoted(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.symlink_to(tiny_model)
    command = by_engine(folder)["vLLM"].command
    assert str(folder) in command
    assert shlex.split(shlex.join(command)) == list(command)


def test_as_a_user_types_it(run_cli: Cli, tiny_model: Path) -> None:
    code, out, err = run_cli("inspect", tiny_model, "--launch")
    assert (code, err) == (0, "")
    heads = [line.split()[1] for line in out.splitlines() if line.startswith("#")]
    assert heads == list(ORDER)
    assert run_cli("inspect", "--launch", tiny_model)[1] == out
    bundled = run_cli("inspect", "demo", "--launch")[1]
    assert "quantkit serve demo --max-context 2048" in bundled
    assert "vllm serve demo" not in bundled
    found = json.loads(run_cli("inspect", tiny_model, "--launch", "--json")[1])
    assert [one["engine"] for one in found["launch"]] == list(ORDER)
    assert all(one["command"] in out for one in found["launch"] if one["command"])
    assert found["launch"][0]["arguments"] == shlex.split(found["launch"][0]["command"])


def test_the_documented_commands(
    run_cli: Cli, quantized: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/explanations/scaling.md shows what is printed, for a checkpoint that was made for 8,192 tokens."""
    page = (Path(__file__).parents[2] / "docs" / "explanations" / "scaling.md").read_text(encoding="utf-8")
    command, _, shown = page.partition("$ quantkit inspect")[2].partition("```")[0].partition("\n")
    folder = tmp_path / "model-w4"
    folder.mkdir()
    for file in quantized("rtn-w4g64").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    monkeypatch.chdir(tmp_path)
    assert run_cli("inspect", *shlex.split(command))[1] == shown


def test_the_manifest(tiny_model: Path) -> None:
    target = read_target(str(tiny_model), tensor=2, pipeline=2, max_context=128)
    text = manifest_text(target, manifest(target, replicas=(1, 4), image="registry/quantkit:1"))
    assert text.startswith("# Needs KubeRay")
    made = yaml.safe_load(text)
    assert (made["apiVersion"], made["kind"]) == ("ray.io/v1", "RayService")
    cluster = made["spec"]["rayClusterConfig"]
    assert cluster["rayVersion"] == RAY_VERSION
    (workers,) = cluster["workerGroupSpecs"]
    # a pod for each stage of each replica, with the GPUs of its tensor ranks
    assert [workers[key] for key in ("replicas", "minReplicas", "maxReplicas")] == [2, 2, 8]
    (worker,) = workers["template"]["spec"]["containers"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == worker["resources"]["requests"]["nvidia.com/gpu"] == "2"
    assert "nvidia.com/gpu" not in head["resources"]["limits"]
    assert {head["image"], worker["image"]} == {"registry/quantkit:1"}
    for pod in (workers, cluster["headGroupSpec"]):
        spec = pod["template"]["spec"]
        mounted = {mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]} == {"shm", "models"}
    assert 8000 in {port["containerPort"] for port in head["ports"]}


def serve_config(target: Any) -> dict[str, Any]:
    loaded = yaml.safe_load(manifest_text(target, manifest(target, replicas=(1, 4))))["spec"]["serveConfigV2"]
    found = yaml.safe_load(loaded)
    assert isinstance(found, dict)
    return found


def test_our_deployment_takes_its_arguments(tiny_model: Path) -> None:
    (application,) = serve_config(read_target(str(tiny_model), tensor=2, max_context=128))["applications"]
    assert application["import_path"] == IMPORT_PATH
    (model,) = parse_config(application["args"]).models
    assert (model.path, model.tensor_parallel, model.pipeline_parallel) == ("/models/tiny", 2, 1)
    assert (model.replicas.min, model.replicas.max) == (1, 4)
    assert model.options == {"device": "cuda", "max_context": 128}


def test_ray_takes_the_serve_config(tiny_model: Path) -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="the extra `ray` is not installed")
    config = schema.ServeDeploySchema.model_validate(serve_config(read_target(str(tiny_model))))
    assert config.applications[0].import_path == IMPORT_PATH
    module, _, name = IMPORT_PATH.partition(":")
    assert callable(getattr(__import__(module, fromlist=[name]), name))


def test_the_manifest_on_the_command_line(run_cli: Cli, tiny_model: Path) -> None:
    args = ("inspect", tiny_model, "--launch", "kubernetes", "--replicas", "2")
    code, out, err = run_cli(*args)
    assert (code, err) == (0, "")
    made = yaml.safe_load(out)
    assert made["metadata"]["name"] == "quantkit-tiny"
    assert made["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplicas"] == 2
    assert json.loads(run_cli(*args, "--json")[1])["manifest"] == made


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tensor-parallel", "3"), ("tensor parallel is 3", "4 attention heads")),
        (("--tensor-parallel", "0"), ("tensor parallel is 0",)),
        (("--pipeline-parallel", "3"), ("pipeline parallel is 3", "2 blocks")),
        (("--max-context", "257"), ("--max-context is 257", "1 to 256")),
        (("--max-context", "0"), ("--max-context is 0",)),
    ],
)
def test_wrong_input_is_one_line(
    assert_refused: Callable[..., None],
    tiny_model: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    assert_refused(tmp_path, "inspect", tiny_model, *arguments, "--launch", words=words)


@pytest.mark.parametrize("replicas", ["0", "3,2", "x", "1,"])
def test_replicas_that_are_none(
    assert_refused: Callable[..., None], tiny_model: Path, tmp_path: Path, replicas: str
) -> None:
    args = ("inspect", tiny_model, "--launch", "kubernetes", "--replicas", replicas)
    assert_refused(tmp_path, *args, words=("--replicas is", "such as 1,4"))


def test_other_wrong_input(assert_refused: Callable[..., None], tiny_model: Path, tmp_path: Path) -> None:
    assert_refused(tmp_path, "inspect", words=("which checkpoint",))
    assert_refused(tmp_path, "inspect", tiny_model, "--launch", "docker", words=("--launch is 'docker'", "kubernetes"))
    with pytest.raises(InputError, match="no model at"):
        read_target("./nowhere")
