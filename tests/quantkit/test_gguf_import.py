"""`quantkit import`: small GGUF files written here from models and tokenizers whose answers are known."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer

from gguf_files import SPECIAL, gguf_pair, permuted, tiny_tokenizer, write_vocabulary
from quantkit.checkpoint import Checkpoint
from quantkit.cli import main
from quantkit.gguf_import import import_gguf
from quantkit.provenance import Origin, origin_of

TEXTS = (
    "Hello world",
    "  two  spaces\n\n\ttab ",
    "In 1969, x = 3.14**2",
    "naïve café 日本 😀",
    "it's THEY'RE don't",
    "",
)
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
Change = Callable[[gguf.GGUFWriter], None]


def tiny_model(arch: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(arch, **{**SIZES, "head_dim": 16, "rms_norm_eps": 1e-5, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # biases and norms too, so that none can be lost unseen
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def write_gguf(
    path: Path,
    model: Any,
    *,
    kind: Type = Type.F32,
    tokenizer: Tokenizer | None = None,
    change: Change | None = None,
) -> Path:
    """A file as converters make it: llama's q and k rows permuted, vectors as F32, matrices as `kind`."""
    arch = model.config.model_type
    writer = gguf.GGUFWriter(path, arch)
    write_metadata(writer, model.config)
    write_vocabulary(writer, "smollm" if arch == "llama" else "qwen2", tokenizer)
    if change is not None:
        change(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], model.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        short = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        data = tensor.numpy()
        if arch == "llama" and short.split(".")[-2] in ("attn_q", "attn_k"):
            data = permuted(data, data.shape[0] // model.config.head_dim)
        if data.ndim == 1 or kind == Type.F32:
            writer.add_tensor(short, data)
        else:
            packed = data.astype(np.float16) if kind == Type.F16 else quantize(data, kind)
            writer.add_tensor(short, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def rounded(model: Any, kind: Type) -> Any:
    """The model as the folder must hold it: every weight through the GGUF type, then through bfloat16."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        if parameter.ndim == 2 and kind == Type.F16:
            parameter.data = parameter.data.half().float()
        elif parameter.ndim == 2 and kind != Type.F32:
            parameter.data = torch.from_numpy(dequantize(quantize(parameter.detach().numpy(), kind), kind))
        parameter.data = parameter.data.bfloat16().float()
    return copied


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def imported(tmp_path: Path, model: Any, **options: Any) -> Path:
    file = write_gguf(tmp_path / "model.gguf", model, **options)
    import_gguf(file, tmp_path / "out")
    return tmp_path / "out"


KINDS = (Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("arch", "tied"), [("llama", True), ("llama", False), ("qwen2", False), ("qwen3", True)])
def test_logits_are_exactly_those_of_the_decoded_weights(tmp_path: Path, arch: str, tied: bool, kind: Type) -> None:
    model = tiny_model(arch, tie_word_embeddings=tied)
    folder = imported(tmp_path, model, kind=kind)
    ids = torch.arange(24)[None] * 13 % 320
    with torch.inference_mode():
        torch.testing.assert_close(load(folder)(ids).logits, rounded(model, kind)(ids).logits, rtol=0, atol=0)
    assert ("lm_head.weight" in Checkpoint(folder).tensors) is not tied


@pytest.mark.parametrize("family", ["gemma2", "phi3", "mixtral", "qwen2_moe"])
def test_families_with_other_names_norms_or_experts(tmp_path: Path, family: str) -> None:
    file, folder = gguf_pair(family, tmp_path)
    import_gguf(file, tmp_path / "out", dtype="float32")
    found, wanted = Checkpoint(tmp_path / "out"), Checkpoint(folder)
    assert {*found.tensors, "lm_head.weight"} == {*wanted.tensors, "lm_head.weight"}
    for name in found.tensors:  # Gemma's norms went through a sum with 1
        torch.testing.assert_close(found.tensor(name), wanted.tensor(name).float(), rtol=0, atol=1e-6)


def test_config_holds_what_the_file_says(tmp_path: Path) -> None:
    model = tiny_model("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    folder = imported(tmp_path, model, change=lambda writer: writer.add_uint32("tokenizer.ggml.eot_token_id", 0))
    config = json.loads((folder / "config.json").read_text())
    wanted = {**SIZES, "head_dim": 16, "rms_norm_eps": 1e-5, "dtype": "bfloat16", "architectures": ["Qwen3ForCausalLM"]}
    wanted |= {"rope_theta": 1e6, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "attention_bias": False}
    assert {key: config[key] for key in wanted} == wanted
    assert transformers.GenerationConfig.from_pretrained(folder).eos_token_id == [2, 0]
    assert {stored.info.dtype for stored in Checkpoint(folder).tensors.values()} == {"BF16"}


def test_llama_biases_are_kept_and_put_in_order(tmp_path: Path) -> None:
    model = tiny_model("llama", attention_bias=True, mlp_bias=True)
    loaded = load(imported(tmp_path, model))
    for name, tensor in rounded(model, Type.F32).state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_tokenizer_gives_the_same_tokens_and_the_chat_template(tmp_path: Path, arch: str) -> None:
    original = tiny_tokenizer("smollm" if arch == "llama" else "qwen2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(imported(tmp_path, tiny_model(arch), tokenizer=original))
    for text in (*TEXTS, "a<think>b</think>", "<|im_start|>user\nhi<|im_end|>"):
        ids = tokenizer(text)["input_ids"]
        assert ids == original.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer("x<|im_end|>")["input_ids"], skip_special_tokens=True) == "x"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (SPECIAL[1], SPECIAL[2], SPECIAL[0])
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>hi<|im_end|>>"
    assert len(tokenizer) == len(original.get_vocab())


def test_llama3_rule_puts_bos_in_front_and_takes_three_digits(tmp_path: Path) -> None:
    def llama3(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.pre"].value = "llama-bpe"
        del writer.kv_data[0]["tokenizer.ggml.add_bos_token"]

    tokenizer = transformers.AutoTokenizer.from_pretrained(imported(tmp_path, tiny_model("llama"), change=llama3))
    assert tokenizer("the")["input_ids"][0] == 1
    assert tokenizer("the", add_special_tokens=False)["input_ids"][0] != 1
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("in 12345!\n")
    assert [piece for piece, _ in pieces] == ["in", "Ġ", "123", "45", "!Ċ"]


def test_sentencepiece_vocabulary(tmp_path: Path) -> None:
    words = ["▁", "h", "e", "l", "o", "he", "ll", "▁he", "llo", "▁hello", "▁w", "w"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(words)

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        kept = {key: value for key, value in writer.kv_data[0].items() if not key.startswith("tokenizer.")}
        writer.kv_data[0] = kept
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(len(words))])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    tokenizer = transformers.AutoTokenizer.from_pretrained(imported(tmp_path, tiny_model("llama"), change=vocabulary))
    assert tokenizer.tokenize("hello w") == ["▁hello", "▁w"]
    assert tokenizer.tokenize("hé") == ["▁", "h", "<0xC3>", "<0xA9>"]
    assert tokenizer("h")["input_ids"] == [1, tokens.index("▁"), tokens.index("h")]
    assert tokenizer.decode(tokenizer("hello  wé\n")["input_ids"], skip_special_tokens=True) == "hello  wé\n"


def test_command_prints_a_summary_and_replaces_only_when_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_model("qwen2"), kind=Type.Q8_0)
    output = str(tmp_path / "out")
    main(["import", str(file), "-o", output])
    text = capsys.readouterr().out
    assert "qwen2" in text
    assert "16 x Q8_0, 11 x F32" in text
    assert f"quantkit generate {output}" in text
    main(["import", str(file), "-o", output, "--overwrite", "--dtype", "float32", "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert summary["tensor_types"] == {"Q8_0": 16, "F32": 11}
    assert summary["parameters"] == sum(stored.nbytes for stored in Checkpoint(output).tensors.values()) // 4
    assert origin_of(Path(output)) == Origin("gguf", file="m.gguf", tensor_types={"Q8_0": 16, "F32": 11})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "out"]


@pytest.mark.skipif("QUANTKIT_SMOLLM2_GGUF" not in os.environ, reason="QUANTKIT_SMOLLM2_GGUF names no file")
def test_smollm2(tmp_path: Path) -> None:
    """The real model: SmolLM2-135M-Instruct speaks, cuts digits, and scores as its original does."""
    import_gguf(os.environ["QUANTKIT_SMOLLM2_GGUF"], tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = load(tmp_path / "out")
    assert len(tokenizer) == 49152
    assert tokenizer.tokenize("In 1969, it's") == ["In", "Ġ", "1", "9", "6", "9", ",", "Ġit", "'s"]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
        text = "The tower is 324 metres tall, about the same height as an 81-storey building, and the tallest in Paris."
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        assert model(ids, labels=ids).loss.item() < 3.5
