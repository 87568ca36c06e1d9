"""What training minimises: the loss of the next token, a teacher's distribution, and experts that are left alone."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from .experts import imbalance
from .model import Decoder, make_config

TEACHER_SHARE = 0.8


class Loss(torch.nn.Module):
    """Next-token loss of a batch, mixed with the teacher's distribution when there is a teacher.

    Layers of experts add `balance` times their imbalance.
    """

    def __init__(self, model: Decoder, teacher: Decoder | None, balance: float) -> None:
        super().__init__()
        self.model = model
        self.teacher = teacher
        self.balance = balance

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (the loss to minimise, the plain next-token loss)."""
        cuda = batch.device.type == "cuda"
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=cuda):
            logits, routings = self.model.with_routings(batch[:, :-1])
        plain = total = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        if self.teacher is not None:
            with torch.no_grad(), torch.autocast(batch.device.type, torch.bfloat16, enabled=cuda):
                target = self.teacher(batch[:, :-1])
            soft = F.softmax(target.flatten(0, 1).float(), dim=-1)
            distil = -(soft * F.log_softmax(logits.flatten(0, 1).float(), dim=-1)).sum(-1).mean()
            total = (1 - TEACHER_SHARE) * plain + TEACHER_SHARE * distil
        for routing in routings:
            total = total + self.balance * imbalance(routing)
        return total, plain


def load_teacher(folder: Path | None, vocab: int, device: torch.device) -> Decoder | None:
    """The trained demo model as teacher, or None."""
    if folder is None:
        return None
    teacher = Decoder(make_config("demo", vocab, 0))
    teacher.load_state_dict(load_file(str(folder / "model.safetensors")), strict=True)
    return teacher.to(device).requires_grad_(False)
