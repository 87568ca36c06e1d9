"""Wrong input to `quantkit import`, and files that cannot be run: one clear line, exit code 2, nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from quantkit.cli import main

HIDDEN, INNER, HEADS, VOCAB = 32, 64, 2, 5
SHAPES = {
    "token_embd": (VOCAB, HIDDEN),
    "output_norm": (HIDDEN,),
    "blk.0.attn_norm": (HIDDEN,),
    "blk.0.ffn_norm": (HIDDEN,),
    **{f"blk.0.attn_{part}": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "output")},
    "blk.0.ffn_gate": (INNER, HIDDEN),
    "blk.0.ffn_up": (INNER, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, INNER),
}
METADATA = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<s>", "a", "b", "ab", "c"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0,
}


def write_gguf(
    path: Path,
    *,
    arch: str = "llama",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, tuple[Any, Type | None]] | None = None,
    drop: str = "",
) -> Path:
    """A one-layer model that imports as it is; `metadata` and `tensors` change parts of it, `drop` leaves one out."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**METADATA, **(metadata or {})}.items():
        if key == drop:
            continue
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](key, value)
    generator = np.random.default_rng(0)
    plain = {name: (generator.standard_normal(shape, np.float32), None) for name, shape in SHAPES.items()}
    for name, (data, kind) in {**plain, **(tensors or {})}.items():
        if name != drop:
            writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refused(capsys: pytest.CaptureFixture[str], file: Path, *options: str) -> str:
    """The one line on stderr. The folder holds afterwards what it held before."""
    before = sorted(file.parent.rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        main(["import", str(file), "-o", str(file.parent / "out"), *options])
    captured = capsys.readouterr()
    assert stopped.value.code == 2, captured.err
    assert captured.out == ""
    assert captured.err.startswith("quantkit: ")
    assert captured.err.count("\n") == 1, captured.err
    assert sorted(file.parent.rglob("*")) == before
    return captured.err


def test_the_file_is_right_when_nothing_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["import", str(write_gguf(tmp_path / "f.gguf")), "-o", str(tmp_path / "out")])
    assert "architecture   llama" in capsys.readouterr().out


def test_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "none.gguf does not exist" in refused(capsys, tmp_path / "none.gguf")


def test_folder_instead_of_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder").mkdir()
    assert "is a folder" in refused(capsys, tmp_path / "folder")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 zip", b"\x00" * 100], ids=["empty", "zip", "zeros"])
def test_not_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    (tmp_path / "f.gguf").write_bytes(content)
    assert "is not a GGUF file" in refused(capsys, tmp_path / "f.gguf")


@pytest.mark.parametrize("kept", [4, 12, 23, 24, 40, 120, 400, 700, 900, 1100, 1500, -20000, -200])
def test_truncated(tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: int) -> None:
    whole = write_gguf(tmp_path / "f.gguf").read_bytes()
    (tmp_path / "f.gguf").write_bytes(whole[:kept])
    assert "is truncated or damaged" in refused(capsys, tmp_path / "f.gguf")


def test_length_field_beyond_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = write_gguf(tmp_path / "f.gguf").read_bytes()
    types = content.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type")
    (tmp_path / "f.gguf").write_bytes(content[: types + 8] + b"\xff" * 7 + b"\x00" + content[types + 16 :])
    assert "is truncated or damaged" in refused(capsys, tmp_path / "f.gguf")


def test_other_architecture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, write_gguf(tmp_path / "f.gguf", arch="mamba"))
    assert "'mamba'" in line
    assert "gemma2, gemma3, llama, phi3, qwen2, qwen2moe, qwen3, qwen3moe" in line


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("llama.expert_count", 8, "lacks the metadata 'llama.expert_used_count'"),
        ("split.count", 3, "one of 3 parts"),
        ("llama.attention.head_count", 0, "positive number"),
        ("llama.attention.head_count", [2, 4], "positive number"),
        ("llama.attention.head_count", 99, "do not fit together"),
        ("llama.attention.head_count_kv", 3, "do not fit together"),
        ("llama.block_count", "one", "expected int"),
        ("llama.block_count", 4_294_967_295, "tensors of 1 layers"),
        ("llama.feed_forward_length", 96, "blk.0.ffn_gate.weight has shape [64, 32]"),
        ("tokenizer.ggml.bos_token_id", 70, "tokenizer.ggml.bos_token_id"),
        ("tokenizer.ggml.pre", "unheard-of", "'unheard-of'"),
        ("tokenizer.ggml.model", "bert", "'bert'"),
        ("tokenizer.ggml.merges", ["a b c"], "merge"),
        ("tokenizer.ggml.merges", ["x y"], "makes no tokenizer"),
        ("tokenizer.ggml.token_type", [1], "types for 1"),
        ("tokenizer.ggml.tokens", list("abcdefg"), "7 tokens"),
    ],
)
def test_metadata(tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: Any, word: str) -> None:
    assert word in refused(capsys, write_gguf(tmp_path / "f.gguf", metadata={key: value}))


@pytest.mark.parametrize(
    "key", ["llama.context_length", "llama.attention.layer_norm_rms_epsilon", "tokenizer.ggml.model"]
)
def test_missing_metadata(tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str) -> None:
    assert f"lacks the metadata '{key}'" in refused(capsys, write_gguf(tmp_path / "f.gguf", drop=key))


def test_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no tokenizer" in refused(capsys, write_gguf(tmp_path / "f.gguf", drop="tokenizer.ggml.tokens"))


@pytest.mark.parametrize("name", ["token_embd", "blk.0.attn_q", "blk.0.ffn_up", "output_norm"])
def test_missing_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    line = refused(capsys, write_gguf(tmp_path / "f.gguf", drop=name))
    assert "lacks" in line
    assert f"{name}.weight" in line


def test_tensor_that_no_llama_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = {"blk.0.ffn_gate_inp": (np.ones((2, HIDDEN), np.float32), None)}
    line = refused(capsys, write_gguf(tmp_path / "f.gguf", tensors=extra))
    assert "blk.0.ffn_gate_inp.weight has no place in a llama model" in line


def test_type_that_cannot_be_decoded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {"blk.0.ffn_down": (np.ones((HIDDEN, INNER), np.int32), None)}
    line = refused(capsys, write_gguf(tmp_path / "f.gguf", tensors=wrong))
    assert "tensor blk.0.ffn_down.weight has type I32" in line


def test_type_from_the_future(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray(write_gguf(tmp_path / "f.gguf").read_bytes())
    place = content.index(b"blk.0.ffn_down.weight") + len(b"blk.0.ffn_down.weight") + 4 + 2 * 8
    content[place] = 99
    (tmp_path / "f.gguf").write_bytes(content)
    assert "tensor blk.0.ffn_down.weight has ggml type number 99" in refused(capsys, tmp_path / "f.gguf")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_damaged_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float) -> None:
    data = np.ones((HIDDEN, INNER), np.float32)
    data[3, 4] = value
    line = refused(capsys, write_gguf(tmp_path / "f.gguf", tensors={"blk.0.ffn_down": (data, None)}))
    assert "tensor blk.0.ffn_down.weight holds 1 NaN or Inf" in line


def test_damaged_scale_of_a_quantized_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = gguf.quants.quantize(np.ones((HIDDEN, INNER), np.float32), Type.Q8_0)
    packed[0, :2] = (0xFF, 0x7F)  # the half-precision scale of the first block becomes NaN
    line = refused(capsys, write_gguf(tmp_path / "f.gguf", tensors={"blk.0.ffn_down": (packed, Type.Q8_0)}))
    assert "blk.0.ffn_down.weight holds 32 NaN or Inf" in line


def test_too_large_for_half_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = {"blk.0.ffn_down": (np.full((HIDDEN, INNER), 1e6, np.float32), None)}
    line = refused(capsys, write_gguf(tmp_path / "f.gguf", tensors=large), "--dtype", "float16")
    assert "too large for float16" in line


def test_output_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    file = write_gguf(tmp_path / "f.gguf")
    assert "exists" in refused(capsys, file)
    assert "not a checkpoint" in refused(capsys, file, "--overwrite")


def test_unknown_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'float16'" in refused(capsys, write_gguf(tmp_path / "f.gguf"), "--dtype", "floot16")


def test_wrong_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = write_gguf(tmp_path / "f.gguf").read_bytes()
    (tmp_path / "f.gguf").write_bytes(content[:4] + (9).to_bytes(4, "little") + content[8:])
    assert "is of GGUF version 9, but versions 2 and 3 are read" in refused(capsys, tmp_path / "f.gguf")


def test_rows_that_are_no_whole_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray(write_gguf(tmp_path / "f.gguf").read_bytes())
    place = content.index(b"blk.0.ffn_down.weight") + len(b"blk.0.ffn_down.weight") + 4 + 2 * 8
    content[place] = Type.Q4_K
    (tmp_path / "f.gguf").write_bytes(content)
    line = refused(capsys, tmp_path / "f.gguf")
    assert "rows of tensor blk.0.ffn_down.weight have 64 numbers, which is no whole number of Q4_K blocks" in line


RUN = (("inspect",), ("generate", "a"), ("eval",), ("bench", "engine", "--device", "cpu"), ("serve", "--device", "cpu"))


@pytest.mark.parametrize("command", RUN, ids=lambda command: command[0])
def test_commands_refuse_what_cannot_be_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """The same lines as of an import, and no folder is left in the cache."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    wrong = {
        "is truncated or damaged": whole[:-20000],
        "is of GGUF version 7": whole[:4] + b"\x07" + whole[5:],
        "holds no tokenizer": write_gguf(tmp_path / "mute.gguf", drop="tokenizer.ggml.tokens").read_bytes(),
        "holds a 'mamba' model, which is not supported": write_gguf(tmp_path / "other.gguf", arch="mamba").read_bytes(),
    }
    name, *rest = command
    at = 1 if name == "bench" else 0
    for words, content in wrong.items():
        (tmp_path / "f.gguf").write_bytes(content)
        with pytest.raises(SystemExit) as stopped:
            main([name, *rest[:at], str(tmp_path / "f.gguf"), *rest[at:]])
        captured = capsys.readouterr()
        assert stopped.value.code == 2, captured.err
        assert words in captured.err
        assert captured.err.count("\n") == 1, captured.err
    assert not (tmp_path / "home").exists()
