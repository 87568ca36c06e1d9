"""A transformers model in 16 bits whose final norm and output layer compute in float32.

Logits that are rounded to bfloat16 add to every KL (docs/reference/eval.md), whatever the weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantkit.arch import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PIECE = 16384  # rows of the output matrix in float32 at once


def compute_logits_in_float32(model: PreTrainedModel) -> None:
    """Changes a model in place, where its family is known: inputs of its last norm are float32 from now on."""
    family, head = FAMILIES.get(model.config.model_type), model.get_output_embeddings()
    if family is None or not isinstance(head, nn.Linear):
        return
    norm = model.get_submodule(f"{family.blocks.rpartition('.')[0]}.norm")
    norm.register_forward_pre_hook(lambda _module, inputs: (inputs[0].float(), *inputs[1:]))

    def forward(hidden: Tensor) -> Tensor:
        pieces = (hidden.float() @ rows.float().T for rows in head.weight.split(_PIECE))
        logits = torch.cat(list(pieces), -1)
        return logits if head.bias is None else logits + head.bias.float()

    head.forward = forward  # type: ignore[method-assign, assignment]
