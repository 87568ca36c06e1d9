"""Any supported checkpoint as a transformers model with decoded weights: the reference for everything else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantkit.arch import FAMILIES, Family
from quantkit.checkpoint import Checkpoint
from quantkit.devices import resolve_device
from quantkit.errors import InputError, StorageError
from quantkit.expert_check import check_experts
from quantkit.expert_modules import file_name, fused_weights, module_name, separate_experts
from quantkit.formats.base import DTYPES, check_choice
from quantkit.progress import Progress, silent
from quantkit.served import serve_inputs
from quantkit.sources import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_reference(
    model: str | Path,
    dtype: str | None = None,
    device: str = "cpu",
    *,
    activations: str = "exact",
    on_tensor: Progress = silent,
) -> PreTrainedModel:
    """A transformers model with plain weights, decoded where the checkpoint is quantized.

    `dtype` is float32, bfloat16 or float16 and defaults to the checkpoint's own. `activations`: `exact` leaves them
    alone; `served` rounds the inputs of quantized layers as an engine does, where the format asks for it (LLM.int8,
    W8A8, FP8).
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    check_choice("activations", activations, ("exact", "served"))
    device = resolve_device(device)
    checkpoint = Checkpoint(model_folder(model))
    check_experts(checkpoint)
    dtype = dtype or checkpoint.dtype
    check_choice("dtype", dtype, tuple(DTYPES))
    plain = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    try:
        config = AutoConfig.for_model(**plain)
    except (KeyError, ValueError) as error:
        raise InputError(f"transformers cannot build model_type '{plain.get('model_type')}': {error}") from error
    family = FAMILIES.get(config.model_type)
    precise = set() if family is None else set(family.in_float32(plain))
    total = len(checkpoint.plain_names()) + len(checkpoint.formats)
    weights = {}
    for name, tensor in checkpoint.decoded(DTYPES[dtype]):
        weights[name] = checkpoint.tensor(name) if name in precise else tensor
        on_tensor(name, total)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    if family is not None:
        separate_experts(skeleton.get_submodule(family.blocks), family, plain)
    _check_names(skeleton, weights, checkpoint.folder, family)
    with quiet_transformers():
        named = weights if family is None else fused_weights(weights, family, plain)
        loaded = type(skeleton).from_pretrained(None, config=config, state_dict=named, dtype=DTYPES[dtype])
    loaded = loaded.to(device).eval()
    if family is not None:
        separate_experts(loaded.get_submodule(family.blocks), family, plain)
    if activations == "served":
        for module in checkpoint.formats:
            inside = module if family is None else module_name(family, module)
            serve_inputs(loaded.get_submodule(inside), checkpoint, module)
    return loaded


def _check_names(skeleton: PreTrainedModel, weights: dict[str, Any], folder: Path, family: Family | None) -> None:
    """transformers would fill what is missing with random numbers and only warn."""
    expected = skeleton.state_dict()
    if family is not None:
        expected = {file_name(family, name): tensor for name, tensor in expected.items()}
    tied = set(getattr(skeleton, "all_tied_weights_keys", None) or {}) if skeleton.config.tie_word_embeddings else set()
    missing = [name for name in expected if name not in weights and name not in tied]
    if missing:
        raise StorageError(f"{folder} lacks {len(missing)} tensors of the model, the first is {missing[0]}")
    for name, tensor in expected.items():
        if name in weights and weights[name].shape != tensor.shape:
            given, wanted = tuple(weights[name].shape), tuple(tensor.shape)
            raise StorageError(f"tensor {name} in {folder} has shape {given}, the model needs {wanted}")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Holds back the progress bars that transformers prints even where nobody watches."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    folder = model_folder(model)
    if not any(folder.glob("tokenizer*")):
        raise StorageError(f"{folder} has no tokenizer files; copy them from the original model")
    return AutoTokenizer.from_pretrained(folder)
