"""What a written checkpoint lost, measured block by block beside its original, so that neither is loaded whole."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.arch import Family
from quantkit.blocks import POSITIONS, BlockRunner, run_block
from quantkit.checkpoint import Checkpoint
from quantkit.divergence import perplexity_of, token_divergence, token_losses
from quantkit.token_windows import StartToken
from quantkit.working_memory import BATCH_TOKENS


@dataclass(frozen=True)
class Quality:
    """Perplexity of both and KL(base || quantized), on text that calibration did not see."""

    base_perplexity: float
    perplexity: float
    kl: float  # mean per predicted token, nats
    windows: int
    window: int
    text: str
    start_token: str | None = None  # that every window begins with

    @property
    def protocol(self) -> str:
        special = "no special tokens" if self.start_token is None else f"each begun by {self.start_token}"
        return (
            f"{self.windows} windows of {self.window} tokens that do not overlap, {special}, first token of a "
            "window not scored, activations as served"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"protocol": self.protocol}


@torch.no_grad()
def compare_by_blocks(
    base: Checkpoint,
    quantized: Checkpoint,
    family: Family,
    windows: Tensor,
    text: Path,
    device: str,
    start: StartToken | None = None,
) -> Quality:
    """Quality on windows [windows, window] of token ids of a text, each begun by a start token where there is one."""
    runners = [BlockRunner(checkpoint, family, device) for checkpoint in (base, quantized)]
    hidden = [_last_hidden(runner, windows) for runner in runners]  # each [windows, window, hidden] on the device
    losses, divergence = [0.0, 0.0], 0.0
    for index, ids in enumerate(windows):
        targets = ids[1:].to(runners[0].device)
        for first in range(0, len(targets), POSITIONS):
            part = slice(first, min(first + POSITIONS, len(targets)))
            logits = [runner.logits(state[index, part]) for runner, state in zip(runners, hidden, strict=True)]
            for model, values in enumerate(logits):
                losses[model] += float(token_losses(values, targets[part]).sum())
            divergence += float(token_divergence(*logits).sum())
    scored = len(windows) * (windows.shape[1] - 1)
    before, after = (perplexity_of(loss / scored) for loss in losses)
    begun = None if start is None else start.text
    return Quality(before, after, divergence / scored, len(windows), windows.shape[1], text.name, begun)


def _last_hidden(runner: BlockRunner, windows: Tensor) -> Tensor:
    """The hidden states behind the last block."""
    hidden = runner.embed(windows).to(runner.device)
    for layer, arguments in enumerate(runner.arguments(windows.shape[1])):
        parts = runner.load(layer, arguments)
        at_once = runner.batch_tokens // BATCH_TOKENS  # a single one on a CPU
        hidden = torch.cat([run_block(parts, window) for window in hidden.split(at_once)])
        runner.free(layer)
    return hidden
