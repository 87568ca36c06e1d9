"""What the folder of a published EAGLE head says, whoever wrote it, in one set of words.

There are two generations, of one decoder layer each (Li et al., 2024 and 2025):

    EAGLE-1 and 2   x = fc [embedding ; feature]; a layer without an input norm; the model's own head on what it leaves.
                    A feature is what the model's head reads.
    EAGLE-3         feature = fc of three hidden states of the model; attention reads [norm(embedding) ; norm(feature)];
                    a norm and a head of its own behind the layer, often over a part of the vocabulary.

Files name the layer `layers.0`, `midlayer` or `transformer`, with `model.` in front or without. config.json describes
it at the top, under `transformer_layer_config` (speculators) or under `model` (vLLM).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.arch import Config
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError, StorageError
from quantkit.runtime.model.config import ModelConfig, read_model_config
from quantkit.sources import model_folder

LAYER = "layers.0"
_PREFIXES = {"midlayer.": f"{LAYER}.", "transformer.": f"{LAYER}.", "fusion_fc.": "fc."}
_LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3")  # layers that differ in biases and norms, which the tensors show
_LLAMA: Config = {  # what a config of speculators leaves out where it is Llama's default
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
_KNOWN = {"fc.weight", "fc.bias", "embed_tokens.weight", "lm_head.weight", "norm.weight", "input_norm.weight",
          "d2t", "t2d"}  # fmt: skip
_UNREAD = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.", f"{LAYER}.self_attn.rotary_emb.")
_CONVERT = (
    'python -c "import torch; from safetensors.torch import save_file; save_file({name: tensor.contiguous() for name, '
    "tensor in torch.load('pytorch_model.bin', weights_only=True).items()}, 'model.safetensors')\""
)


@dataclass(frozen=True)
class EagleFacts:
    checkpoint: Checkpoint
    names: Mapping[str, str]  # of its tensors: as above, with the layer at `layers.0` -> as in the files
    raw: Config  # of the layer
    config: ModelConfig  # the same, read
    tapped: tuple[int, ...]  # blocks of the model whose inputs are a feature; empty: what its head reads
    feature: int  # width of one of them
    residual_is_normed: bool  # the layer adds to the normed feature
    output_is_normed: bool  # what the last norm leaves is the next feature (EAGLE 3.1)

    @property
    def third(self) -> bool:
        """Whether it is an EAGLE-3 head."""
        return bool(self.tapped)

    @property
    def state(self) -> int:
        """Numbers that it reads of a token of the model."""
        return self.feature * max(len(self.tapped), 1)

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    def has(self, name: str) -> bool:
        return name in self.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.tensors[self.names[name]].info.shape


def read_eagle(named: str, target: ModelConfig) -> EagleFacts:
    """A folder or a hub name; heads of models with other sizes are refused."""
    folder = model_folder(named)
    if not any(folder.glob("*.safetensors")):
        raise StorageError(
            f"no EAGLE head in '{named}': it has no safetensors file, and files of pickles are not opened; where it "
            f"has a pytorch_model.bin, make one of it in that folder: {_CONVERT}"
        )
    checkpoint = Checkpoint(folder)
    names = {_name(name): name for name in checkpoint.tensors if not _name(name).startswith(_UNREAD)}
    given = checkpoint.config
    if f"{LAYER}.self_attn.q_proj.weight" not in names or "fc.weight" not in names:
        raise InputError(
            f"{folder} holds no EAGLE head (architectures {given.get('architectures')}): EAGLE-1, 2 and 3 have a layer "
            "with queries and an fc; a small model guesses with draft=PATH"
        )
    if checkpoint.formats:
        raise InputError(f"the EAGLE head in {folder} is quantized; only those in 16 or 32 bits are loaded")
    raw = _layer_config(folder, given)
    third = f"{LAYER}.hidden_norm.weight" in names
    _check_tensors(folder, names, third)
    config = read_model_config(raw | {"model_type": "llama"})
    if config.vocab != target.vocab:
        raise InputError(
            f"the EAGLE head in {folder} has {config.vocab} tokens, the model {target.vocab}; it belongs to another one"
        )
    width = given.get("target_hidden_size") or config.hidden
    if width != target.hidden:
        raise InputError(
            f"the EAGLE head in {folder} reads hidden states of {width} numbers, the model's have {target.hidden}; it "
            "belongs to another one"
        )
    facts = EagleFacts(
        checkpoint,
        names,
        raw,
        replace(config, max_positions=max(config.max_positions, target.max_positions), windows=(_window(raw),)),
        tapped=_tapped(folder, given, target.layers) if third else (),
        feature=width,
        residual_is_normed=bool(given.get("norm_before_residual", False)),
        output_is_normed=bool(given.get("norm_output", False)),
    )
    _check_widths(facts)
    return facts


def _name(stored: str) -> str:
    name = stored.removeprefix("model.")
    for prefix, known in _PREFIXES.items():
        if name.startswith(prefix):
            return known + name.removeprefix(prefix)
    return name


def _layer_config(folder: Path, given: Config) -> dict[str, Any]:
    """Of the one layer."""
    nested = given.get("transformer_layer_config") or (
        given.get("model") if given.get("model_type") == "eagle" else None
    )
    raw = dict(nested or given)
    kind = raw.get("model_type", "llama")
    if kind not in _LIKE_LLAMA:
        raise InputError(
            f"the EAGLE head in {folder} has a layer of model_type '{kind}', which quantkit does not run; layers of "
            f"{', '.join(_LIKE_LLAMA)} it does"
        )
    if raw.get("num_hidden_layers", 1) != 1:
        raise InputError(f"the EAGLE head in {folder} has {raw['num_hidden_layers']} layers; only those of one are run")
    return {**(_LLAMA if kind == "llama" else {}), **raw, "num_hidden_layers": 1}


def _check_tensors(folder: Path, names: Mapping[str, str], third: bool) -> None:
    """All that the layout has, and nothing that would compute something else."""
    own = ["q_proj", "k_proj", "v_proj", "o_proj"]
    layer = [f"self_attn.{name}" for name in own] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    layer += ["post_attention_layernorm", *(["hidden_norm", "input_layernorm"] if third else [])]
    needed = ["fc.weight", *(f"{LAYER}.{name}.weight" for name in layer), *(["norm.weight"] if third else [])]
    missing = [name for name in needed if name not in names]
    if missing:
        raise StorageError(
            f"tensor {missing[0]} of the EAGLE head in {folder} is missing"
            + (f", and {len(missing) - 1} more" if missing[1:] else "")
            + "; download the head again"
        )
    modules = {_module(name) for name in (*needed, *_KNOWN)} | {"fc_norm.0", "fc_norm.1", "fc_norm.2"}
    modules |= {f"{LAYER}.self_attn.{name}" for name in ("q_norm", "k_norm")}
    strange = [stored for name, stored in names.items() if _module(name) not in modules]
    if strange:
        raise InputError(
            f"tensor {strange[0]} in {folder} is of no EAGLE layout that quantkit runs (EAGLE-1, 2, 3 and 3.1 with one "
            "layer), so the head would guess something else with it than without; use draft=PATH or ngram"
        )


def _module(name: str) -> str:
    return name.rpartition(".")[0] or name


def _tapped(folder: Path, given: Config, layers: int) -> tuple[int, ...]:
    """Which blocks' inputs. One spelling counts blocks by what goes into them, the other by what comes out."""
    inner = given.get("eagle_config") or {}
    flat, nested = (where.get("eagle_aux_hidden_state_layer_ids") for where in (given, inner))
    if flat:
        found = [int(block) for block in flat]
    elif nested:
        found = [int(block) + 1 for block in nested]
    else:
        found = [2, layers // 2, layers - 3]
    if len(set(found)) < len(found) or not all(0 <= block <= layers for block in found):
        raise InputError(
            f"the EAGLE head in {folder} reads the inputs of blocks {sorted(found)}, but the model has {layers} "
            "blocks; it belongs to another one"
        )
    return tuple(sorted(found))


def _check_widths(facts: EagleFacts) -> None:
    """Of fc, which says how many hidden states it fuses; `reader.py` checks all others."""
    hidden, stored = facts.config.hidden, facts.names["fc.weight"]
    inputs = len(facts.tapped) * facts.feature if facts.third else 2 * hidden
    found = facts.shape("fc.weight")
    if found != (hidden, inputs):
        raise StorageError(
            f"tensor {stored} in {facts.folder} has shape {list(found)}, but config.json asks for {[hidden, inputs]}"
        )


def _window(raw: Config) -> int | None:
    """Heads that were trained with a window name it twice."""
    kinds = raw.get("layer_types") or ["full_attention"]
    return raw.get("sliding_window") if kinds[0] == "sliding_attention" else None
