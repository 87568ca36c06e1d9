"""GGUF files of tiny models, written by the gguf package as converters write them.

`gguf_pair(family, folder, kind)` gives a file whose matrices are random blocks of one type (of types that we have no
blocks of, rounded by the gguf package), and a folder with the same
numbers decoded by the gguf package: whoever runs both must get the same.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from quantkit.arch import FAMILIES
from quantkit.checkpoint import Checkpoint
from quantkit.formats.gguf import TYPES, Blocks, pack
from tiny_models import save_model

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "qwen2": [
        pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
ARCHITECTURES = {"mixtral": "llama", "mistral": "llama", "gemma3_text": "gemma3"}  # where GGUF says otherwise
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def architecture_of(family: str) -> str:
    return ARCHITECTURES.get(family, family.replace("_", ""))


def gguf_pair(family: str, folder: Path, kind: str = "Q8_0", **changes: Any) -> tuple[Path, Path]:
    """(file, folder with the decoded numbers); matrices whose rows are no whole blocks are F16."""
    save_model(family, folder / "decoded", **{"vocab_size": 320, **changes})
    checkpoint = Checkpoint(folder / "decoded")
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.tensors}
    stored = {name: _stored(place, name, tensor, kind) for place, (name, tensor) in enumerate(tensors.items())}
    decoded = {name: torch.from_numpy(dequantize(*data)).reshape(tensors[name].shape) for name, data in stored.items()}
    for file in (folder / "decoded").glob("*.safetensors*"):
        file.unlink()
    save_file({name: tensor.clone() for name, tensor in decoded.items()}, folder / "decoded" / "model.safetensors")
    file = folder / f"tiny.{kind}.gguf"
    write_file(file, family, checkpoint.config, stored)
    return file, folder / "decoded"


def _stored(seed: int, name: str, tensor: Tensor, kind: str) -> tuple[np.ndarray[Any, Any], Type]:
    if tensor.ndim < 2 or name.endswith(("gate.weight", "shared_expert_gate.weight")):
        return tensor.numpy(), Type.F32
    if kind in TYPES and tensor.shape[1] % TYPES[kind].size == 0:
        return random_blocks(kind, tensor.shape[0], tensor.shape[1], seed).numpy(), Type[kind]
    if kind not in TYPES and tensor.shape[1] % gguf.GGML_QUANT_SIZES[Type[kind]][0] == 0:
        return quantize(tensor.numpy(), Type[kind]), Type[kind]
    return tensor.numpy().astype(np.float16), Type.F16


def random_blocks(name: str, rows: int, inputs: int, seed: int = 0, size: float = 0.1) -> Tensor:
    """uint8 [rows, bytes]: weights up to about `size`, on both sides of 0."""
    kind, generator = TYPES[name], torch.Generator().manual_seed(seed)
    blocks = inputs // kind.size
    codes = torch.randint(0, 2**kind.bits, (rows, blocks, kind.size), generator=generator, dtype=torch.uint8)
    largest = 127 if kind.table else 2 ** (kind.bits - 1)
    scale = size / largest * (0.5 + torch.rand(rows, blocks, generator=generator))
    scales = mins = minimum = None
    if kind.has_groups:
        most = 15 if name == "Q2_K" else 31
        scales = torch.randint(1, most + 1, (rows, blocks, kind.groups), generator=generator, dtype=torch.int8)
        scale = scale / most
    if kind.has_mins:
        minimum = (scale if kind.has_groups else -scale) * largest
        mins = scales
    halves = [None if number is None else number.half() for number in (scale, minimum)]
    assert halves[0] is not None
    return pack(Blocks(codes, halves[0], halves[1], scales, mins), kind).flatten(1)


def write_file(
    path: Path, family: str, config: dict[str, Any], stored: dict[str, tuple[np.ndarray[Any, Any], Type]]
) -> None:
    arch = architecture_of(family)
    writer = gguf.GGUFWriter(path, arch)
    write_settings(writer, family, config)
    write_vocabulary(writer, "smollm" if arch == "llama" else "qwen2")
    known = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(known, config["num_hidden_layers"])
    experts: dict[str, list[np.ndarray[Any, Any]]] = {}
    for name, (data, kind) in stored.items():
        if name == "lm_head.weight" and FAMILIES[family].tied(config):
            continue
        expert = _EXPERT.fullmatch(name)
        short = names.get_name(f"{expert[1]}.{expert[3]}.weight" if expert else name, try_suffixes=(".weight", ".bias"))
        assert short is not None, name
        if "norm" in short:
            data = data + np.float32(FAMILIES[family].norm_offset)
        if arch == "llama" and short.split(".")[-2] in ("attn_q", "attn_k"):
            data = permuted(data, config["num_attention_heads" if "attn_q" in short else "num_key_value_heads"])
        if short.endswith("ffn_gate_inp_shexp.weight"):
            data = data[0]
        if expert:
            experts.setdefault(short, []).append(data)
            data = np.stack(experts[short])
            if len(data) < (config.get("num_local_experts") or config["num_experts"]):
                continue
        writer.add_tensor(short, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permuted(data: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    return data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)


def write_settings(writer: gguf.GGUFWriter, family: str, config: dict[str, Any]) -> None:
    """As llama.cpp's converter would for this config.json."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", FAMILIES[family].norm_eps))
    rope = config["rope_parameters"].get("full_attention") or config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1)))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    if family in ("gemma2", "gemma3_text", "phi3") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    count = config.get("num_local_experts") or config.get("num_experts")
    if count:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])


def tiny_tokenizer(split: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[split])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the theory of other 1969 1970 words it's the others' \n\n   café"] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def write_vocabulary(writer: gguf.GGUFWriter, split: str, tokenizer: Tokenizer | None = None) -> None:
    tokenizer = tokenizer or tiny_tokenizer(split)
    state = json.loads(tokenizer.to_str())
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = {token["content"]: 3 if token["special"] else 4 for token in state["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, 1) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
