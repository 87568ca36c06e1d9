"""GPTQ by GPTQModel, symmetric, with its own defaults for all else."""

from __future__ import annotations

import os

from quantkit.eval.peers.tools.task import read_task

os.cpu_count = lambda: 8  # its pools of threads do not start on two cores

import torch  # noqa: E402
from gptqmodel import BACKEND, GPTQModel  # noqa: E402
from gptqmodel.quantization import QuantizeConfig  # noqa: E402

task = read_task()
config = QuantizeConfig(bits=task.bits, group_size=task.group, sym=True, offload_to_disk=False)
model = GPTQModel.load(str(task.model), config, device=task.device, dtype=torch.float32)
rows = [{"input_ids": ids[None], "attention_mask": ids.new_ones(1, len(ids))} for ids in task.samples]
model.quantize(rows, backend=BACKEND.GPTQ_TORCH)
model.save(str(task.output))
