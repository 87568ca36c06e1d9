"""`convert --to gguf`: what is in the file, by readers that did not write it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from pages import not_printed, transcripts
from quantkit.checkpoint import Checkpoint
from quantkit.convert import convert
from quantkit.errors import InputError
from quantkit.gguf_export import export_gguf
from quantkit.gguf_import import import_gguf
from quantkit.reference import load_tokenizer
from tiny_models import save_model
from tiny_tokenizers import TEMPLATE, VOCAB_SIZE, save_byte_level, save_sentencepiece

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 64,
}
GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 16}
TEXTS = ("the theory of words", "  two  spaces\n\n", "In 1969 x", "café 日本 😀", "<|user|>the<think> words")


def model_in(folder: Path, family: str, **changes: Any) -> Path:
    """A random model of a family with a tokenizer of the kind that it usually has."""
    save_model(family, folder, vocab_size=VOCAB_SIZE, **changes)
    save = save_byte_level if family.startswith("qwen") else save_sentencepiece
    save(folder)
    return folder


def fields_of(file: Path) -> dict[str, Any]:
    return {key: field.contents() for key, field in GGUFReader(file).fields.items()}


def numbers_of(file: Path) -> dict[str, torch.Tensor]:
    """Every tensor, decoded by the gguf package, in torch's order of dimensions."""
    tensors = GGUFReader(file).tensors
    shape = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in tensors}
    return {
        one.name: torch.from_numpy(np.array(dequantize(one.data, one.tensor_type))).view(shape[one.name])
        for one in tensors
    }


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": LLAMA3, "attention_bias": True, "tie_word_embeddings": True}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        ("qwen3", {"dtype": "bfloat16"}),
    ],
)
def test_import_brings_back_what_was_exported(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = model_in(tmp_path / "model", family, **changes)
    export_gguf(folder, tmp_path / "model.gguf")
    import_gguf(tmp_path / "model.gguf", tmp_path / "back", dtype=Checkpoint(folder).dtype)
    before, after = Checkpoint(folder), Checkpoint(tmp_path / "back")
    for name in after.tensors:
        assert torch.equal(after.tensor(name), before.tensor(name)), name
    assert len(after.tensors) >= len(before.tensors) - 1  # a tied output layer stands in the folder, not in the file
    assert after.config["rope_parameters"] == before.config["rope_parameters"]
    one, other = load_tokenizer(folder), load_tokenizer(tmp_path / "back")
    for text in TEXTS:
        assert other(text).input_ids == one(text).input_ids, text
    assert other.chat_template == one.chat_template == TEMPLATE
    assert (other.bos_token, other.eos_token) == (one.bos_token, one.eos_token)


@pytest.mark.parametrize(("family", "architecture"), [("gemma2", "gemma2"), ("gemma3_text", "gemma3")])
def test_gemma(family: str, architecture: str, tmp_path: Path) -> None:
    every_second = ["full_attention", "sliding_attention"]
    layers = {"layer_types": every_second} if family == "gemma3_text" else {}
    folder = model_in(tmp_path / "model", family, **GEMMA, **layers)
    export_gguf(folder, tmp_path / "model.gguf")
    fields, tensors = fields_of(tmp_path / "model.gguf"), numbers_of(tmp_path / "model.gguf")
    source = Checkpoint(folder)
    norms = {
        "blk.1.attn_norm.weight": "input_layernorm",
        "blk.1.post_attention_norm.weight": "post_attention_layernorm",
        "blk.1.ffn_norm.weight": "pre_feedforward_layernorm",
        "blk.1.post_ffw_norm.weight": "post_feedforward_layernorm",
    }
    for name, part in norms.items():
        assert torch.equal(tensors[name], source.tensor(f"model.layers.1.{part}.weight") + 1), name
    rows = tensors["blk.0.attn_q.weight"]
    assert torch.equal(rows, source.tensor("model.layers.0.self_attn.q_proj.weight"))  # in their own order
    assert "output.weight" not in tensors
    assert fields["general.architecture"] == architecture
    assert fields[f"{architecture}.attention.sliding_window"] == 16
    if family == "gemma2":
        assert fields["gemma2.attn_logit_softcapping"] == 50
        assert "gemma2.attention.sliding_window_pattern" not in fields  # as llama.cpp has it anyway
    else:
        assert fields["gemma3.attention.sliding_window_pattern"] == [False, True]
        assert fields["gemma3.rope.freq_base"] == 1e6
        assert fields["gemma3.rope.freq_base_swa"] == 1e4


def test_phi3(tmp_path: Path) -> None:
    folder = model_in(tmp_path / "model", "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64)
    export_gguf(folder, tmp_path / "model.gguf")
    fields, tensors = fields_of(tmp_path / "model.gguf"), numbers_of(tmp_path / "model.gguf")
    source = Checkpoint(folder)
    assert torch.equal(tensors["blk.0.attn_qkv.weight"], source.tensor("model.layers.0.self_attn.qkv_proj.weight"))
    assert torch.equal(tensors["blk.0.ffn_up.weight"], source.tensor("model.layers.0.mlp.gate_up_proj.weight"))
    assert tensors["rope_factors_long.weight"].tolist() == LONGROPE["long_factor"]
    assert fields["phi3.rope.scaling.original_context_length"] == 64
    assert fields["phi3.rope.scaling.attn_factor"] == pytest.approx((1 + np.log(4) / np.log(64)) ** 0.5)


def test_vocabulary(tmp_path: Path) -> None:
    """Every row of the embeddings has a token; kinds, scores and ends are those of the tokenizer."""
    folder = model_in(tmp_path / "model", "llama")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5]}', encoding="utf-8")
    export_gguf(folder, tmp_path / "model.gguf")
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in fields_of(tmp_path / "model.gguf").items()}
    tokens, types, scores = ggml["tokens"], ggml["token_type"], ggml["scores"]
    assert len(tokens) == len(types) == len(scores) == VOCAB_SIZE == len(set(tokens))
    assert (ggml["model"], ggml["pre"], ggml["add_bos_token"], ggml["add_space_prefix"]) == (
        "llama",
        "default",
        True,
        True,
    )
    assert (ggml["bos_token_id"], ggml["eos_token_id"], ggml["eot_token_id"], ggml["unknown_token_id"]) == (1, 2, 5, 0)
    kinds = dict(zip(tokens, types, strict=True))
    assert (kinds["<unk>"], kinds["<s>"], kinds["<0x41>"], kinds["th"]) == (2, 3, 6, 1)
    assert (kinds["<tool> "], kinds["<|user|>"], kinds[f"[PAD{VOCAB_SIZE - 1}]"]) == (4, 3, 5)
    ranks = dict(zip(tokens, scores, strict=True))
    assert ranks["th"] > ranks["the"] > ranks["▁the"] > ranks["of"] > ranks["<s>"]


def test_types_and_what_they_round(tmp_path: Path) -> None:
    folder = model_in(tmp_path / "model", "qwen2", dtype="bfloat16")
    for to, kind, exact in (("gguf", "BF16", True), ("gguf-f16", "F16", False), ("gguf-f32", "F32", True)):
        report = convert(folder, to, tmp_path / f"{to}.gguf")
        assert report.exact is exact
        assert kind in report.target_format
        tensor = next(one for one in GGUFReader(tmp_path / f"{to}.gguf").tensors if one.name == "blk.0.ffn_up.weight")
        assert tensor.tensor_type.name == kind
    assert numbers_of(tmp_path / "gguf-f16.gguf")["blk.0.attn_norm.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("mixtral", {}, "a 'mixtral' model cannot be written as GGUF"),
        ("gemma2", {"query_pre_attn_scalar": 24}, "by 16 ** -0.5, but this model by 24"),
        ("llama", {"hidden_act": "gelu"}, "with silu, but this model has gelu"),
        ("qwen2", {"head_dim": 32}, "heads x head size = hidden size"),
        ("qwen3", {"attention_bias": True}, "o_proj.bias has no place in a GGUF file of a qwen3 model"),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope scaling 'dynamic'",
        ),
    ],
)
def test_models_that_llama_cpp_would_compute_otherwise(
    family: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = model_in(tmp_path / "model", family, **changes)
    with pytest.raises(InputError) as error:
        export_gguf(folder, tmp_path / "model.gguf")
    assert says in str(error.value)
    assert list(tmp_path.iterdir()) == [folder]


def test_output_is_one_file_that_is_not_there_yet(tmp_path: Path) -> None:
    folder = model_in(tmp_path / "model", "llama")
    with pytest.raises(InputError, match=r"must end in \.gguf"):
        export_gguf(folder, tmp_path / "out")
    (tmp_path / "old.gguf").write_bytes(b"old")
    with pytest.raises(InputError, match="exists"):
        export_gguf(folder, tmp_path / "old.gguf")
    export_gguf(folder, tmp_path / "old.gguf", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "old.gguf"]
    with pytest.raises(InputError, match="'Q4_0' is not known here"):
        export_gguf(folder, tmp_path / "new.gguf", kind="Q4_0")


def test_window_that_llama_cpp_does_not_know_is_said(tmp_path: Path) -> None:
    folder = model_in(tmp_path / "model", "mistral", sliding_window=16)
    (note,) = export_gguf(folder, tmp_path / "model.gguf").notes
    assert "beyond 16 tokens" in note


def test_the_documented_command(run_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = "quantkit convert demo --to gguf -o demo.gguf"
    (shown,) = [one.shown for one in transcripts() if one.name == ("docs/reference/gguf.md", command)]
    code, out, err = run_cli(*command.split()[1:])
    assert code == 0
    assert not_printed(shown, out + err) is None
