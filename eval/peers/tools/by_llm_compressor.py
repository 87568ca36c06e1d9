"""GPTQ or AWQ by llm-compressor, symmetric GPTQ and asymmetric AWQ as its own schemes have them."""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modifiers.awq import AWQModifier
from llmcompressor.modifiers.quantization import GPTQModifier
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit.eval.peers.tools.task import read_task

MODIFIERS = {"gptq": (GPTQModifier, True), "awq": (AWQModifier, False)}  # and whether symmetric

if not torch.cuda.is_available():  # AWQ pins its batches, which torch refuses where there is nothing to copy to
    setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # noqa: B010  (a type checker knows better)

task = read_task()
modifier, symmetric = MODIFIERS[task.method]
weights = QuantizationArgs(num_bits=task.bits, type="int", symmetric=symmetric, strategy="group", group_size=task.group)
recipe: Any = modifier(
    config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}, ignore=["lm_head"]
)
samples = task.samples
rows: Any = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in samples]
model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32, device_map=task.device)
oneshot(
    model=model,
    dataset=DataLoader(rows, batch_size=1),
    recipe=recipe,
    num_calibration_samples=len(samples),
)
model.save_pretrained(task.output, save_compressed=True)
AutoTokenizer.from_pretrained(task.model).save_pretrained(task.output)
