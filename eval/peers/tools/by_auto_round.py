"""Learned rounding by auto-round in the layout of GPTQ, symmetric or `asym`; its own number of steps unless given."""

from __future__ import annotations

import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit.eval.peers.tools.task import read_task

task = read_task()
samples = task.samples
rounding = AutoRound(
    AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32),
    AutoTokenizer.from_pretrained(task.model),
    scheme={
        "bits": task.bits,
        "group_size": task.group,
        "sym": not task.method.endswith(" asym"),
        "data_type": "int",
        "act_bits": 16,
    },
    dataset=[{"input_ids": ids[None], "attention_mask": ids.new_ones(1, len(ids))} for ids in samples],
    iters=task.steps,
    seqlen=len(samples[0]),
    nsamples=len(samples),
    device_map=task.device,
)
rounding.quantize_and_save(str(task.output), format="auto_gptq")
for inner in [folder for folder in task.output.iterdir() if folder.is_dir()]:  # it names a folder after the model
    for file in inner.iterdir():
        file.rename(task.output / file.name)
    inner.rmdir()
