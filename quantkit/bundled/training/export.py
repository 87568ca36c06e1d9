"""Writes a trained model as a Hugging Face folder, checks it against the trained module, measures it and packs it."""

from __future__ import annotations

import io
import json
import math
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers import __version__ as transformers_version

from .experts import split_experts
from .model import Decoder

PART_BYTES = 15 * 1024 * 1024
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def save(model: Decoder, config: PreTrainedConfig, tokenizer: Path, out: Path, facts: dict[str, object]) -> None:
    """Writes weights in bfloat16, configuration, generation settings, tokenizer and the facts of the run."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to("cpu", torch.bfloat16) for name, value in model.named_parameters()}
    weights = {name: value.clone() for name, value in split_experts(weights).items()}
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    save_config(config, out)
    end = AutoTokenizer.from_pretrained(tokenizer).convert_tokens_to_ids("<|end|>")
    generation = {
        "bos_token_id": 0,
        "eos_token_id": [0, end],
        "pad_token_id": 0,
        "transformers_version": transformers_version,
    }
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    (out / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists() and (tokenizer / name).resolve() != (out / name).resolve():
            shutil.copyfile(tokenizer / name, out / name)


def save_config(config: PreTrainedConfig, out: Path) -> None:
    """Writes config.json; the number of experts under its older name too, which other engines read."""
    config.save_pretrained(out)
    if hasattr(config, "num_experts"):
        file = out / "config.json"
        settings = json.loads(file.read_text(encoding="utf-8")) | {"num_experts": config.num_experts}
        file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@torch.no_grad()
def verify(model: Decoder, folder: Path) -> float:
    """Largest logit difference between the module and the saved folder, both with the saved weights, in float32."""
    rounded = {name: value.detach().to("cpu", torch.bfloat16).float() for name, value in model.named_parameters()}
    own = Decoder(AutoConfig.from_pretrained(folder))
    own.load_state_dict(rounded)
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, saved.config.vocab_size, (2, 96), generator=torch.Generator().manual_seed(0))
    difference = float((own(ids) - saved(ids).logits).abs().max())
    if difference > 1e-3:
        raise SystemExit(f"the saved model gives other logits than the trained one: {difference}")
    return difference


def load(folder: Path, device: torch.device) -> Any:
    """The saved model with transformers; on a CPU in float32, since many are slow in bfloat16."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()


def windows_of(folder: Path, text: str, device: torch.device, window: int) -> Iterator[Tensor]:
    """The tokens of a text in pieces of `window` and the one that follows."""
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    for start in range(0, len(ids) - 1, window):
        yield ids[start : start + window + 1].to(device)


@torch.no_grad()
def evaluate(folder: Path, text_file: Path, device: torch.device, window: int = 2048) -> float:
    """Bits per byte of a text, windows of the model's length, every token but the first scored once."""
    text = text_file.read_text(encoding="utf-8")
    model = load(folder, device)
    total = 0.0
    for part in windows_of(folder, text, device, window):
        logits = model(part[None, :-1]).logits[0].float()
        total += float(F.cross_entropy(logits, part[1:], reduction="sum"))
    return round(total / math.log(2) / len(text.encode("utf-8")), 5)


@torch.no_grad()
def routing_of(folder: Path, text_file: Path, device: torch.device, window: int = 2048) -> list[dict[str, float]]:
    """For every layer of experts: how evenly the tokens of a text are shared among them; empty without experts."""
    config = AutoConfig.from_pretrained(folder)
    if not hasattr(config, "num_experts_per_tok"):
        return []
    model = load(folder, device)
    counts = torch.zeros(config.num_hidden_layers, config.num_experts, device=device)
    for part in windows_of(folder, text_file.read_text(encoding="utf-8"), device, window):
        for layer, logits in enumerate(model(part[None, :-1], output_router_logits=True).router_logits):
            chosen = logits.topk(config.num_experts_per_tok, dim=-1).indices
            counts[layer] += chosen.flatten().bincount(minlength=config.num_experts)
    return [
        {
            "entropy_bits": round(float(torch.special.entr(shares).sum()) / math.log(2), 4),
            "most_bits": round(math.log2(config.num_experts), 4),
            "largest_share": round(float(shares.max()), 4),
            "smallest_share": round(float(shares.min()), 4),
        }
        for shares in counts / counts.sum(-1, keepdim=True)
    ]


def pack(folder: Path, target: Path) -> None:
    """Writes the folder as NAME.tar.part0, part1, ... so that no single file is large."""
    target.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, arcname=path.name)
    data = buffer.getvalue()
    for index, start in enumerate(range(0, len(data), PART_BYTES)):
        (target / f"{folder.name}.tar.part{index}").write_bytes(data[start : start + PART_BYTES])
