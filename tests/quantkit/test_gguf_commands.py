"""Commands that take a model folder take a GGUF file: inspect, generate, eval, bench."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gguf_files import gguf_pair
from quantkit.checkpoint import Checkpoint
from quantkit.errors import StorageError
from quantkit.gguf_view import MANIFEST
from quantkit.provenance import provenance_of
from quantkit.runtime.llm import LLM
from quantkit.sources import model_folder

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "home", lambda: folder)
        yield folder


@pytest.fixture(scope="module")
def file(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "initializer_range": 0.05}
    return gguf_pair("llama", tmp_path_factory.mktemp("gguf"), "Q4_K", **wide)[0]


def test_inspect_shows_types_and_bits(run_cli: Cli, file: Path) -> None:
    code, out, _ = run_cli("inspect", file)
    assert code == 0
    assert f"{file}: llama, bfloat16, gguf" in out
    assert "4.50 in quantized layers" in out
    assert ["Q4_K", "16", "4.50"] in [line.split()[1::2] for line in out.splitlines() if "│" in line]
    found = json.loads(run_cli("inspect", file, "--json")[1])
    assert found["schemes"] == {"gguf Q4_K": 16}
    assert found["gguf_types"]["Q4_K"] == {"tensors": 16, "weights": 950272, "bits_per_weight": 4.5}
    loads = {engine["engine"]: engine["loads"] for engine in found["engines"]}
    assert all(loads[engine] for engine in ("quantkit", "llama.cpp", "Ollama"))
    assert loads["TGI"] is False
    assert "weight-only kernels" in run_cli("inspect", file, "--gpu", "l4")[1]


def test_generate_and_bench(run_cli: Cli, file: Path) -> None:
    code, out, err = run_cli("generate", file, "the theory", "--max-tokens", 4, "--device", "cpu")
    assert (code, bool(out.strip())) == (0, True), err
    sizes = ("--batch", 1, "--prompt-len", 8, "--new-tokens", 3)
    code, out, err = run_cli("bench", "engine", file, *sizes, "--device", "cpu", "--no-save", "--json")
    assert code == 0, err
    assert "Q4_K" in out


def test_eval_says_what_the_file_is(run_cli: Cli, file: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the theory of other words it's the others' 1969 " * 30)
    options = ("--text", tmp_path / "text.txt", "--window", 64, "--device", "cpu")
    code, out, err = run_cli("eval", file, *options, "--backend", "runtime")
    assert code == 0, err
    assert "run as it is, the GGUF file tiny.Q4_K.gguf (16 x Q4_K, 5 x F32), whose losses stay" in out
    decoded = run_cli("eval", file, *options)[1]
    perplexities = [float(text.split("perplexity ")[1].split()[0]) for text in (out, decoded)]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=0.02)
    assert provenance_of(file).origin.kept


def test_the_folder_is_made_once_and_again_for_another_file(file: Path, home: Path) -> None:
    folder = model_folder(file)
    made = (folder / MANIFEST).stat().st_mtime_ns
    assert model_folder(str(file)) == folder
    assert (folder / MANIFEST).stat().st_mtime_ns == made
    assert home in folder.parents
    assert not list(folder.glob("*.safetensors"))
    copied = file.with_name("other.gguf")
    copied.write_bytes(file.read_bytes())
    first = model_folder(copied)
    checkpoint = Checkpoint(first)
    copied.write_bytes(file.read_bytes())
    with pytest.raises(StorageError, match="changed while it was in use"):
        checkpoint.tensor("model.norm.weight")
    assert model_folder(copied) != first
    assert not first.exists()


def test_a_file_that_is_gone(file: Path) -> None:
    copied = file.with_name("gone.gguf")
    copied.write_bytes(file.read_bytes())
    checkpoint = Checkpoint(model_folder(copied))
    copied.unlink()
    with pytest.raises(StorageError, match=r"gone\.gguf cannot be read"):
        checkpoint.tensor("model.norm.weight")


def test_from_python_with_the_tokenizer_of_the_file(file: Path) -> None:
    llm = LLM(file, device="cpu", dtype="float32", max_context=64)
    assert llm.tokenizer.decode(llm.tokenizer("the theory")["input_ids"]) == "the theory"
    assert llm.engine.runner.decoder.weights.embedding.dtype == torch.float32
