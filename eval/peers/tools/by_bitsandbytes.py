"""NF4 with double quantization, or LLM.int8, by bitsandbytes; neither looks at data."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from quantkit.eval.peers.tools.task import read_task

CONFIGS = {
    "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "llm-int8": BitsAndBytesConfig(load_in_8bit=True),
}

task = read_task()
model = AutoModelForCausalLM.from_pretrained(
    task.model, quantization_config=CONFIGS[task.method], dtype=torch.float32, device_map=task.device
)
model.save_pretrained(task.output)
AutoTokenizer.from_pretrained(task.model).save_pretrained(task.output)
