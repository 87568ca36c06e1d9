"""Wrong input: one clear line on stderr that names the remedy, exit code 2, and nothing written."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from full_disk import largest_file

Cli = Callable[..., tuple[int, str, str]]
Refused = Callable[..., None]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A private copy that a test may break."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def quantize_args(model: object, output: Path, recipe: object = "rtn-w4g128", *more: object) -> tuple[object, ...]:
    return ("quantize", model, "-r", recipe, "-o", output, *more)


def test_path_that_is_not_there(assert_refused: Refused, tmp_path: Path) -> None:
    for command in (("inspect",), ("eval",), ("generate", "hello")):
        args = (command[0], tmp_path / "nowhere", *command[1:])
        assert_refused(tmp_path, *args, words=("nowhere", "config.json", "demo"))
    args = quantize_args(tmp_path / "nowhere", tmp_path / "out")
    assert_refused(tmp_path, *args, words=("nowhere", "hub name"))


def test_unreachable_hub_name(run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    code, _, err = run_cli("inspect", "some-org/some-model")
    assert code == 2
    assert "no folder 'some-org/some-model' here, and the hub" in err


def test_folder_without_config(assert_refused: Refused, model: Path, tmp_path: Path) -> None:
    (model / "config.json").unlink()
    assert_refused(tmp_path, *quantize_args(model, tmp_path / "out"), words=("config.json is missing",))


def test_broken_config(assert_refused: Refused, model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_text('{"model_type": ')
    assert_refused(tmp_path, *quantize_args(model, tmp_path / "out"), words=("config.json", "JSON"))


def test_unknown_architecture(assert_refused: Refused, model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "llamma"}))
    words = ("llamma", "did you mean 'llama'", "qwen3", "gemma2", "phi3")
    assert_refused(tmp_path, *quantize_args(model, tmp_path / "out"), words=words)


def test_truncated_and_corrupted_weights(assert_refused: Refused, model: Path, tmp_path: Path) -> None:
    file = model / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    words = ("model.safetensors is truncated or corrupted",)
    assert_refused(tmp_path, *quantize_args(model, tmp_path / "out"), words=words)
    file.write_bytes(b"\xff" * 8 + whole[8:])
    assert_refused(tmp_path, *quantize_args(model, tmp_path / "out"), words=words)
    file.write_bytes(b"")
    assert_refused(tmp_path, "inspect", model, words=words)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_nan_and_inf(assert_refused: Refused, model: Path, tmp_path: Path, value: float, name: str) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors[name].view(-1)[3] = value
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    args = quantize_args(model, tmp_path / "out")
    assert_refused(tmp_path, *args, words=(name, "NaN or Inf"))


def test_group_size_that_does_not_divide(assert_refused: Refused, model: Path, tmp_path: Path) -> None:
    args = quantize_args(model, tmp_path / "out", "rtn-w4g128", "--set", "format.group_size=96")
    words = ("model.layers.0.self_attn.q_proj", "256", "96 does not divide", "choose a group size")
    assert_refused(tmp_path, *args, words=words)


def test_unknown_recipe_key_and_command(assert_refused: Refused, model: Path, tmp_path: Path) -> None:
    args = quantize_args(model, tmp_path / "out", "rtn-w4g218")
    assert_refused(tmp_path, *args, words=("rtn-w4g218", "did you mean 'rtn-w4g128'"))
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("summary: x\nmethod: rtn\nformat: {name: gptq, groupsize: 64}\n")
    args = quantize_args(model, tmp_path / "out", recipe)
    assert_refused(tmp_path, *args, words=("mine.yaml", "groupsize", "group_size"))
    args = quantize_args(model, tmp_path / "out", "nf4", "--set", "format.blok=32")
    assert_refused(tmp_path, *args, words=("blok", "block"))
    assert_refused(tmp_path, "quantise", words=("did you mean 'quantize'",))
    assert_refused(tmp_path, "quantize", model, words=("--recipe",))


def test_output_that_exists(assert_refused: Refused, model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert_refused(tmp_path, *quantize_args(model, tmp_path / "out"), words=("out exists", "--overwrite"))


def test_quantized_twice(run_cli: Cli, assert_refused: Refused, model: Path, tmp_path: Path) -> None:
    assert run_cli(*quantize_args(model, tmp_path / "once"))[0] == 0
    args = quantize_args(tmp_path / "once", tmp_path / "twice")
    assert_refused(tmp_path, *args, words=("quantized already", "convert"))


def test_missing_and_misshapen_tensors(assert_refused: Refused, model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    short = {name: tensor for name, tensor in tensors.items() if name != "model.layers.1.mlp.up_proj.weight"}
    save_file(short, model / "model.safetensors", metadata={"format": "pt"})
    args = quantize_args(model, tmp_path / "out")
    assert_refused(tmp_path, *args, words=("model.layers.1.mlp.up_proj.weight", "incomplete"))
    assert_refused(tmp_path, "eval", model, words=("lacks", "model.layers.1.mlp.up_proj.weight"))
    wide = tensors | {"model.norm.weight": torch.ones(255)}
    save_file(wide, model / "model.safetensors", metadata={"format": "pt"})
    assert_refused(tmp_path, "eval", model, words=("model.norm.weight", "(255,)", "(256,)"))


def test_quantized_checkpoint_without_a_part(
    run_cli: Cli, assert_refused: Refused, model: Path, tmp_path: Path
) -> None:
    assert run_cli(*quantize_args(model, tmp_path / "q"))[0] == 0
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.scales"]
    save_file(tensors, tmp_path / "q" / "model.safetensors", metadata={"format": "pt"})
    assert_refused(tmp_path, "inspect", tmp_path / "q", words=("model.layers.0.mlp.up_proj.scales", "missing"))


def test_unknown_quantization_method(assert_refused: Refused, model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq"}}))
    assert_refused(tmp_path, "inspect", model, words=("'hqq' is not supported", "compressed-tensors"))


def test_text_shorter_than_a_window(assert_refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    args = ("eval", "demo-draft", "--text", tmp_path / "short.txt")
    assert_refused(tmp_path, *args, words=("short.txt", "less than one window"))
    assert_refused(tmp_path, "eval", "demo-draft", "--text", tmp_path / "none.txt", words=("none.txt",))
    assert_refused(tmp_path, "eval", "demo-draft", "--window", 99999, words=("99999", "does not fit"))


def test_calibration_that_cannot_work(assert_refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    args = quantize_args("demo-draft", tmp_path / "out", "gptq-w4g128")
    words = ("empty.txt", "0 tokens", "longer text")
    assert_refused(tmp_path, *args, "--text", tmp_path / "empty.txt", words=words)
    assert_refused(tmp_path, *args, "--seq-len", 4096, words=("4096", "2 to 2048"))
    assert_refused(tmp_path, *args, "--samples", 0, words=("0 samples",))
    args = quantize_args("demo-draft", tmp_path / "out", "gptq-w4g128", "--set", "format={name: nf4}", "--samples", 1)
    assert_refused(tmp_path, *args, words=("integer grid", "'nf4'"))


def test_devices_that_are_not_here(assert_refused: Refused, tmp_path: Path) -> None:
    assert_refused(tmp_path, "eval", "demo-draft", "--device", "tpu", words=("'tpu'", "auto, cpu, cuda or cuda:N"))
    if not torch.cuda.is_available():
        assert_refused(tmp_path, "generate", "demo-draft", "x", "--device", "cuda", words=("sees no GPU",))


def test_generate_limits(assert_refused: Refused, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    generate = ("generate", "demo-draft")
    assert_refused(tmp_path, *generate, "", words=("prompt is empty",))
    assert_refused(
        tmp_path, "generate", "demo-draft", "x " * 3000, words=("tokens", "contexts end at 2048", "shorten it")
    )
    assert caplog.records == [], "our line says it all: the tokenizer's own warning is not to stand beside it"
    assert_refused(tmp_path, *generate, "x", "--max-context", 4096, words=("made for 2048 positions",))
    assert_refused(tmp_path, *generate, "x", "--top-p", 1.5, words=("top_p", "1.5"))
    assert_refused(tmp_path, *generate, "x", "-n", 2, words=("need --json",))
    assert_refused(
        tmp_path, "generate", "demo-draft", "x", "--kv-tokens", 10**12, words=("does not fit", "--kv-tokens")
    )


def test_bench_engine_limits(assert_refused: Refused, tmp_path: Path) -> None:
    bench = ("bench", "engine")
    assert_refused(tmp_path, *bench, "demo-draft", "--shape", "tiny", words=("not both",))
    assert_refused(tmp_path, *bench, "--shape", "tiny", "--format", "w5", words=("unknown format 'w5'", "did you mean"))
    assert_refused(tmp_path, *bench, "demo-draft", "--format", "w4", words=("has its format",))
    assert_refused(tmp_path, *bench, "--shape", "tinny", words=("unknown shape 'tinny'", "did you mean 'tiny'"))
    assert_refused(tmp_path, *bench, "--shape", "tiny", "--batch", "0", words=("1 or more",))
    assert_refused(tmp_path, *bench, "nowhere", words=("no model at 'nowhere'",))
    assert_refused(tmp_path, *bench, "demo-draft", "--zero-weights", words=("weights of its own",))


def test_files_that_may_not_grow(run_cli: Cli, model: Path, tmp_path: Path) -> None:
    with largest_file(200_000):
        code, _, err = run_cli(*quantize_args(model, tmp_path / "out"))
    assert code == 2, err
    assert "no space left" in err
    assert err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == [model]


def test_disk_that_fills_up(
    run_cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A real small file system; its free space is taken after the check that runs before writing."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", disk]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        code, _, err = run_cli(*quantize_args(model, disk / "out"))
        assert code == 2
        assert "MB are free" in err
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))
        code, _, err = run_cli(*quantize_args(model, disk / "out"))
        assert code == 2, err
        assert "no space left" in err
        assert "run the same command again" in err
        assert [entry.name for entry in disk.iterdir()] == [".out.journal"]  # the finished blocks, nothing else
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)  # what failed may still hold a file
